"""What a step costs: its memory, its collectives (`zerojax.hlo`), and the closed formulas to compare with."""

from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax

from zerojax import tables
from zerojax.hlo import Collective, collectives

Tree = Any

# The CPU backend's default scheduler favours concurrency over memory; with this one, figures are comparable with other
# backends'. As a compile option the older xla_cpu_enable_concurrency_optimized_scheduler is accepted and does nothing.
_CPU_OPTIONS: dict[str, str | bool] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


# ---- memory ----


@dataclass(frozen=True)
class Memory:
    """Bytes of one device while a compiled program runs.

    Attributes:
      argument: the program's arguments.
      output: its results.
      temp: everything in between.
      alias: outputs that lie in the buffers of donated arguments, counted in both.

    >>> Memory(argument=100, output=60, temp=30, alias=50).peak
    140
    """

    argument: int
    output: int
    temp: int
    alias: int

    @property
    def peak(self) -> int:
        """Bytes that the device must have for the program."""
        return self.argument + self.output + self.temp - self.alias


def memory(compiled: jax.stages.Compiled) -> Memory:
    """The memory of a compiled program, as its compiler planned it.

    >>> import jax
    >>> memory(jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((4,), "float32")).compile()).argument
    16
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError("this backend does not say how much memory a compiled program needs")
    names = ("argument", "output", "temp", "alias")
    return Memory(**{name: getattr(stats, f"{name}_size_in_bytes") for name in names})


def live_bytes(tree: Tree) -> dict[jax.Device, int]:  # pyright: ignore[reportInvalidTypeForm]: jaxlib has no stubs
    """The bytes that the arrays of a tree really hold on each of this process's devices, random keys included.

    An array that occurs twice counts twice. Leaves on no device (numpy arrays, numbers) hold nothing.

    >>> import jax.numpy as jnp
    >>> list(live_bytes({"w": jnp.ones((2, 4)), "n": 3}).values())
    [32]
    """
    held: Counter = Counter()
    for leaf in jax.tree.leaves(tree):
        for shard in getattr(leaf, "addressable_shards", ()):
            held[shard.device] += shard.data.nbytes
    return dict(held)


# ---- closed formulas ----


def model_state_bytes(parameters: float, devices: int, stage: int) -> float:
    """Peak bytes per device of parameters, gradients and Adam's state in a step, without activations.

    With 2-byte parameters and gradients in the step and 4-byte parameters and moments at rest (arXiv 1910.02054,
    section 5). The paper's stage 3 is 16 bytes per parameter over the devices; here it is 14, since the 2-byte
    parameters are cast from the 4-byte shards and gathered a unit at a time, and no partitioned copy of them is kept.
    The units in flight come on top.

    >>> [model_state_bytes(7.5e9, 64, stage) / 1e9 for stage in range(4)]
    [120.0, 31.40625, 16.640625, 1.640625]
    """
    _check(stage, devices)
    whole, shared = ((16, 0), (4, 12), (2, 14), (0, 14))[stage]
    return parameters * (whole + shared / devices)


def at_rest_bytes(parameters: float, devices: int, stage: int) -> float:
    """Bytes per device of the state between steps: 4-byte parameters and Adam's two moments.

    >>> at_rest_bytes(1000, 8, stage=0), at_rest_bytes(1000, 8, stage=1)
    (12000.0, 1500.0)
    """
    _check(stage, devices)
    return 12 * parameters / (devices if stage else 1)


def communication_volume(parameters: float, stage: int, accumulate: int = 1) -> float:
    """Elements that each device sends in a step, for many devices (times ``(N - 1) / N`` for N of them).

    >>> [communication_volume(1000, stage, accumulate=4) for stage in range(4)]
    [2000, 2000, 5000, 12000]
    """
    _check(stage)
    if accumulate < 1:
        raise ValueError(f"accumulate={accumulate!r} is not a number of micro-batches; use 1 or more")
    return parameters * (2, 2, 1 + accumulate, 3 * accumulate)[stage]


def _check(stage: int, devices: int = 1):
    if stage not in range(4):
        raise ValueError(f"stage={stage!r} is not one of 0, 1, 2, 3")
    if devices < 1:
        raise ValueError(f"devices={devices!r} is not a number of devices; use 1 or more")


# ---- a step's report ----


@dataclass(frozen=True)
class Report:
    """What the compiler made of a step, per device; print it.

    Attributes:
      memory: bytes while the step runs.
      collectives: in program order.

    >>> gather = Collective("all-gather", "bf16", elements=2**20, group=8, times=24)
    >>> print(Report(Memory(2**20, 2**20, 2**18, 2**20), (gather, gather)))
     memory, a device       bytes
    ------------------------------
     arguments            1.0 MiB
     outputs              1.0 MiB
     temporaries        256.0 KiB
     donated, in both    -1.0 MiB
     peak                 1.2 MiB
    <BLANKLINE>
     collective   dtype    elements   devices   times       sent
    -------------------------------------------------------------
     all-gather   bf16    1,048,576         8      48   84.0 MiB
     total                                         48   84.0 MiB
    """

    memory: Memory
    collectives: tuple[Collective, ...]

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends in a step."""
        return sum((c.wire_bytes for c in self.collectives), 0.0)

    def to_dict(self) -> dict:
        """Plain numbers and strings, for JSON."""
        collectives = [asdict(c) | {"bytes": c.bytes, "wire_bytes": c.wire_bytes} for c in self.collectives]
        memory = asdict(self.memory) | {"peak": self.memory.peak}
        return {"memory": memory, "collectives": collectives, "wire_bytes": self.wire_bytes}

    def __str__(self):
        m = self.memory
        names = ("arguments", "outputs", "temporaries", "donated, in both", "peak")
        sizes = map(tables.size, (m.argument, m.output, m.temp, -m.alias, m.peak))
        rows = zip(names, sizes, strict=True)
        return f"{tables.render(('memory, a device', 'bytes'), rows)}\n\n{self._collectives()}"

    def _collectives(self) -> str:
        times: Counter = Counter()
        for c in self.collectives:
            times[replace(c, times=1)] += c.times
        rows = [
            (c.kind, c.dtype, f"{c.elements:,}", str(c.group), f"{n:,}", tables.size(n * c.wire_bytes))
            for c, n in times.items()
        ]
        rows.append(("total", "", "", "", f"{sum(times.values()):,}", tables.size(self.wire_bytes)))
        return tables.render(("collective", "dtype", "elements", "devices", "times", "sent"), rows)


def report(step: Any, state: Tree = None, batch: Tree = None, *more: Tree) -> Report:
    """Compile a step for these arguments, without running it, and read what the compiler made of it.

    On CPU devices it is compiled with a scheduler that saves memory; the default one there runs as much as possible at
    once, and its figures would say nothing about other backends.

    Args:
      step: what ``make_train_step`` or ``jax.jit`` returned, or a compiled program (no arguments are used then).
      state, batch, more: its arguments, arrays or shapes with shardings, also of devices that do not exist.

    >>> import jax
    >>> x = jax.ShapeDtypeStruct((4,), "float32")
    >>> report(jax.jit(lambda state, batch: state + batch), x, x).memory.peak
    48
    """
    arguments = (state, batch, *more)
    compiled = step if isinstance(step, jax.stages.Compiled) else _compile(step.lower(*arguments), arguments)
    text = compiled.as_text()
    if text is None:
        raise ValueError("this backend does not show what it compiled, so collectives cannot be counted")
    return Report(memory(compiled), tuple(collectives(text)))


def _compile(lowered: jax.stages.Lowered, arguments: Tree) -> jax.stages.Compiled:
    """Compiled so that memory is comparable. The devices need not be the default backend's, nor exist."""
    out = getattr(lowered, "out_info", None)  # what nnx.jit lowers has none
    for leaf in jax.tree.leaves((out, arguments)):
        sharding = getattr(leaf, "sharding", None)
        if sharding is not None and not isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
            platform = next(iter(sharding.device_set)).platform
            break
    else:
        platform = jax.default_backend()
    return lowered.compile(compiler_options=_CPU_OPTIONS if platform == "cpu" else None)
