"""What accelerators have and can do, by name: memory, arithmetic, links. Facts from their makers; nothing is asked.

NVIDIA's data sheets (A100 SXM, H100 SXM, H200 SXM, V100 SXM3; DGX A100, DGX H100, DGX-2 for the network), Google's
pages on Cloud TPU v5e, v5p and v6e, and the table of links of "How to Scale Your Model" (2025), chapter 2.
"""

import math
import re
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Accelerator:
    """One kind of device.

    Attributes:
      platform: "gpu" or "tpu".
      memory_bytes: that a program can use.
      flops: multiplications and additions a second of dense matrix products in bf16 (fp16 on a V100), at most.
      memory_bandwidth: bytes a second to and from the device's memory.
      link_bandwidth: bytes a second that a device sends to its neighbours: a GPU over its NVLinks, a TPU chip over the
        two links of one direction of the grid.
      network_bandwidth: bytes a second that a GPU sends to other hosts.
      host: GPUs that NVLink connects.
    """

    platform: str
    memory_bytes: int
    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float = 0
    host: int = 8


ACCELERATORS = {
    "v100-32gb": Accelerator("gpu", 34_089_730_048, 125e12, 900e9, 150e9, 6.25e9, host=16),
    "a100-40gb": Accelerator("gpu", 42_400_000_000, 312e12, 1555e9, 300e9, 25e9),
    "a100-80gb": Accelerator("gpu", 84_900_000_000, 312e12, 2039e9, 300e9, 25e9),
    "h100": Accelerator("gpu", 84_942_979_072, 989.4e12, 3352e9, 450e9, 50e9),
    "h200": Accelerator("gpu", 151_397_597_184, 989.4e12, 4800e9, 450e9, 50e9),
    "v5e": Accelerator("tpu", 16 * GIB, 197e12, 819e9, 90e9),
    "v5p": Accelerator("tpu", 95 * GIB, 459e12, 2765e9, 180e9),
    "v6e": Accelerator("tpu", 32 * GIB, 918e12, 1640e9, 180e9),
}
_DIRECTIONS = {"v5p": 3}  # of a slice's grid; two of the others


@dataclass(frozen=True)
class Machine:
    """Accelerators of one kind, connected.

    Attributes:
      name: as given to `machine`, such as ``"h100:64"``.
      kind: the accelerator's name.
      grid: a TPU slice's chips in each direction, ``(N,)`` for GPUs.
    """

    name: str
    kind: str
    grid: tuple[int, ...]

    @property
    def accelerator(self) -> Accelerator:
        """One of its devices."""
        return ACCELERATORS[self.kind]

    @property
    def devices(self) -> int:
        """How many."""
        return math.prod(self.grid)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Of a mesh whose axes follow the grid.

        >>> machine("h100:64").mesh_shape, machine("v5p:2x2x1").mesh_shape
        ((64,), (2, 2))
        """
        return tuple(n for n in self.grid if n > 1) or (1,)

    @property
    def bandwidth(self) -> float:
        """Bytes a second that a device sends in rings over all of them.

        Between hosts there are as many rings as a host has GPUs, each through another network card.
        """
        one = self.accelerator
        if one.platform == "gpu" and self.devices > one.host:
            return min(one.link_bandwidth, one.host * one.network_bandwidth)
        return one.link_bandwidth

    def resized(self, devices: int) -> "Machine":
        """As many devices of the same kind; of TPUs the slice whose directions differ least.

        >>> machine("h100:8").resized(64).name, machine("v5p:2x2x4").resized(64).name
        ('h100:64', 'v5p:4x4x4')
        """
        if self.accelerator.platform == "gpu":
            return machine(f"{self.kind}:{devices}")
        sides = _near_cube(devices, _DIRECTIONS.get(self.kind, 2))
        return machine(f"{self.kind}:{'x'.join(map(str, sides))}")


def machine(name: str) -> Machine:
    """Accelerators by name and number.

    Args:
      name: ``"h100:8"``, ``"a100-80gb:64"`` (also v100-32gb, a100-40gb, h200), or a TPU slice as chips in each
        direction, ``"v5e:4x4"``, ``"v5p:2x2x4"`` (also v6e).

    Raises:
      ValueError: for a name that is not known, with those that are.

    >>> machine("v5p:2x2x4").devices, machine("h100:8").bandwidth
    (16, 450000000000.0)
    """
    kind, _, size = str(name).partition(":")
    number = "[1-9][0-9]*"
    if kind in ACCELERATORS:
        gpu = ACCELERATORS[kind].platform == "gpu"
        if re.fullmatch(number if gpu else "x".join([number] * _DIRECTIONS.get(kind, 2)), size):
            return Machine(name, kind, tuple(int(n) for n in size.split("x")))
    known = ", ".join(ACCELERATORS)
    raise ValueError(
        f"{name!r} is no target; write for example 'h100:8', 'a100-80gb:64', 'v5e:4x4' or 'v5p:2x2x4' (known: {known})"
    )


def data_axes(count: int) -> tuple[str, ...]:
    """Names of so many axes that data and state are divided over.

    >>> data_axes(1), data_axes(2)
    (('data',), ('data_0', 'data_1'))
    """
    return ("data",) if count == 1 else tuple(f"data_{i}" for i in range(count))


def _near_cube(count: int, directions: int) -> list[int]:
    """Factors of ``count``, as many as directions, that differ least."""
    if directions == 1:
        return [count]
    side = next(n for n in range(round(count ** (1 / directions)), 0, -1) if count % n == 0)
    return [side, *_near_cube(count // side, directions - 1)]
