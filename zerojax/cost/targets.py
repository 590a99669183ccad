"""Accelerators that are not there: their compilers plan, schedule and account for memory without them.

XLA's compilers for GPUs and TPUs need a description of the device, not the device. So a plan, a step and a report can
be made for hundreds of accelerators on a laptop.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from zerojax.cost.hardware import Machine, data_axes, machine


@dataclass(frozen=True)
class _Gpu:
    """What XLA must know of a GPU; from NVIDIA's data sheets and CUDA's programming guide.

    Attributes:
      cores: streaming multiprocessors.
      lanes: float32 units of one.
      shared: bytes of shared memory of one; a block of threads may use all but 1 KiB.
      clock: GHz, at most.
      cache: bytes of the second-level cache.
      capability: the compute capability.
      links: NVLinks.
    """

    label: str
    cores: int
    lanes: int
    shared: int
    clock: float
    cache: int
    capability: tuple[int, int]
    links: int


_HOPPER = {"cores": 132, "lanes": 128, "shared": 228 << 10, "clock": 1.98, "cache": 50 << 20, "capability": (9, 0)}
_AMPERE = {"cores": 108, "lanes": 64, "shared": 164 << 10, "clock": 1.41, "cache": 40 << 20, "capability": (8, 0)}
_GPUS = {
    "a100-40gb": _Gpu("NVIDIA A100-SXM4-40GB", **_AMPERE, links=12),
    "a100-80gb": _Gpu("NVIDIA A100-SXM4-80GB", **_AMPERE, links=12),
    "h100": _Gpu("NVIDIA H100 80GB HBM3", **_HOPPER, links=18),
    "h200": _Gpu("NVIDIA H200", **_HOPPER, links=18),
}


@dataclass(frozen=True)
class Target:
    """Accelerators to compile for.

    Attributes:
      name: as given to `target`.
      platform: "gpu" or "tpu".
      devices: stand-ins for the devices; nothing can run on them.
      grid: how they are connected: a TPU slice's chips in each direction, ``(N,)`` for GPUs.
      memory_bytes: of one device.
    """

    name: str
    platform: str
    devices: tuple[Any, ...]
    grid: tuple[int, ...]
    memory_bytes: int

    def mesh(self, shape: Sequence[int] | None = None, names: Sequence[str] | None = None) -> Mesh:
        """A mesh of these devices, in the order of the grid.

        Args:
          shape: devices along each axis; by default the grid's. A TPU's compiler makes true reduce-scatters over axes
            that follow the grid only.
          names: of the axes; by default ``data``, or ``data_0``, ``data_1``, ... if there are several.
        """
        shape = self.grid if shape is None else tuple(shape)
        names = data_axes(len(shape)) if names is None else names
        fits = all(type(n) is int and n > 0 for n in shape) and math.prod(shape) == len(self.devices)
        if not fits or len({*names}) != len(shape):
            raise ValueError(f"a mesh {shape} with axes {tuple(names)} does not fit the {len(self.devices)} "
                             f"devices of {self.name}")  # fmt: skip
        devices = np.array(self.devices, dtype=object).reshape(shape)
        return Mesh(devices, tuple(names), axis_types=(AxisType.Auto,) * len(names))


def target(name: str) -> Target:
    """Accelerators by name and number, whether they are there or not.

    JAX must run on the CPU: set the environment variable ``JAX_PLATFORMS=cpu``, or call
    ``jax.config.update("jax_platforms", "cpu")`` before JAX is first used.

    Args:
      name: ``"h100:8"``, ``"a100-80gb:64"`` (also a100-40gb, h200; whole hosts of 8, or less than one), or a TPU slice
        as chips in each direction, ``"v5e:4x4"``, ``"v5p:2x2x4"`` (also v6e).

    Raises:
      ValueError: for a name that is not known, with those that are.
      ImportError: if the compiler is not installed, with the command that installs it.

    >>> target("h100:three")
    Traceback (most recent call last):
    ...
    ValueError: 'h100:three' is no target; write for example 'h100:8', 'a100-80gb:64', 'v5e:4x4' or 'v5p:2x2x4' ...
    """
    found = machine(name)
    return _gpus(found) if found.accelerator.platform == "gpu" else _tpus(found)


def _gpus(wanted: Machine) -> Target:
    name, host = wanted.name, wanted.accelerator.host
    if wanted.kind not in _GPUS:
        raise ValueError(f"{name!r}: XLA's compiler does not know this GPU any more; there are formulas for it only")
    hosts, rest = divmod(wanted.devices, host)
    if hosts and rest:
        raise ValueError(f"{name!r}: more than one host of {host} GPUs must be whole hosts, such as "
                         f"{(hosts + 1) * host}")  # fmt: skip
    topology = f"1x{hosts}x{host}" if hosts else f"1x1x{rest}"
    devices = _devices("cuda", "gpu-target", topology_name="", target_config=_config(wanted), topology=topology)
    return Target(name, "gpu", devices, wanted.grid, wanted.accelerator.memory_bytes)


def _tpus(wanted: Machine) -> Target:
    name, grid = wanted.name, wanted.grid
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # else libtpu asks the network which TPU this machine has
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # else one process at a time, as with a TPU that is there
    devices = _devices("tpu", "tpu-target", topology_name=name)
    if len(devices) != math.prod(grid):
        raise ValueError(f"{name} has {len(devices)} devices, two a chip; this is not supported")
    # Coordinates are (x, y, z); the last direction of the grid changes first.
    ordered = sorted(devices, key=lambda d: tuple(d.coords))
    return Target(name, "tpu", tuple(ordered), wanted.mesh_shape, wanted.accelerator.memory_bytes)


def _devices(platform: str, extra: str, **options: Any) -> tuple[Any, ...]:
    try:
        return tuple(topologies.get_topology_desc(platform=platform, **options).devices)
    except NotImplementedError as error:  # the plugin is absent, or was tried as a device of this machine, and dropped
        raise ImportError(
            f"the {platform} compiler is not at hand: install it by `pip install 'zerojax[{extra}]'`, and let JAX run "
            "on the CPU: JAX_PLATFORMS=cpu in the environment"
        ) from error
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"the {platform} compiler does not know this target: {error}") from error


def _config(wanted: Machine) -> str:
    """The description that XLA reads (GpuTargetConfigProto as text)."""
    gpu, facts = _GPUS[wanted.kind], wanted.accelerator
    major, minor = gpu.capability
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: {48 << 10} shared_memory_per_core: {gpu.shared}
  shared_memory_per_block_optin: {gpu.shared - 1024}
  core_count: {gpu.cores} fpus_per_core: {gpu.lanes} clock_rate_ghz: {gpu.clock}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {facts.memory_bandwidth:.0f} l2_cache_size: {gpu.cache} device_memory_size: {facts.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  device_vendor: "NVIDIA Corporation" name: "{gpu.label}"
  driver_version: "13.0.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0" dnn_version: "9.10.0"
  device_interconnect_info {{ active_links: {gpu.links} }}
}}
platform_name: "CUDA" device_description_str: "{gpu.label}"
dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 12 minor: 9 }}
"""
