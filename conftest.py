"""For all tests and doctests: eight simulated devices, on the CPU, before JAX starts."""

import os

import pytest

DEVICES = 8

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        f"--xla_force_host_platform_device_count={DEVICES}",
        "--xla_cpu_multi_thread_eigen=false",  # the devices are threads already, and so are the test workers
        "--xla_backend_optimization_level=0",  # of the machine code: tests compile long and run shortly
        "--xla_llvm_disable_expensive_passes=true",
    ]
).strip()
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")


@pytest.fixture(scope="session", autouse=True)
def _devices():
    """Fails every test, rather than skipping it, where the devices are not there."""
    import jax

    found = jax.devices()
    assert [d.platform for d in found] == ["cpu"] * DEVICES, f"the tests need {DEVICES} CPU devices, found {found}"
