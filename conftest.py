"""For all tests and doctests: eight simulated devices, on the CPU, before JAX starts."""

import os
from importlib.metadata import version

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
        "--xla_cpu_parallel_codegen_split_count=1",  # and not in threads of its own
        *(["--xla_cpu_use_fusion_emitters=false"] if version("jaxlib") < "0.10.2" else []),  # in half the time
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


def pytest_configure():
    """Profiles of hypothesis: the same examples each time, or by --hypothesis-profile=night many new ones."""
    from hypothesis import HealthCheck, settings

    shared = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    settings.register_profile("ordinary", shared, max_examples=50, derandomize=True, database=None)
    settings.register_profile("night", shared, max_examples=1600, print_blob=True)
    settings.load_profile("ordinary")
