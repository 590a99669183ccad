"""What a step costs: its memory by what it holds, its collectives, its products; each beside its formula."""

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import jax

from zerojax import collectives as _collectives
from zerojax import tables
from zerojax.cost import hlo, liveness
from zerojax.cost.hardware import Machine
from zerojax.cost.hlo import Collective
from zerojax.cost.prediction import Prediction, predict
from zerojax.plan import Plan
from zerojax.state import shapes_of
from zerojax.units import explanation

Tree = Any

# The CPU backend's default scheduler favours concurrency over memory; with this one, figures are comparable with other
# backends'. As a compile option the older xla_cpu_enable_concurrency_optimized_scheduler is accepted and does nothing.
_CPU_OPTIONS: dict[str, str | bool] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}

# XLA's own kernels for sums of a few numbers are for the GPUs of one host. The compiler of jax 0.12 tries to make one
# for 64 GPUs as well, and ends the process; older ones do not know the option, nor need it.
_GPU_OPTIONS: dict[str, str | bool] = {"xla_gpu_experimental_use_collective_kernels": ""}

_SLICES = ("dynamic_slice", "squeeze")  # how JAX ends the name of what a scan takes out of an array


# ---- memory ----


@dataclass(frozen=True)
class Memory:
    """Bytes of one device while a compiled program runs. What a TPU keeps in its vector memory is not among them.

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


# ---- a step's report ----


@dataclass(frozen=True)
class Report:
    """What the compiler made of a step, per device; print it.

    Attributes:
      memory: bytes while the step runs.
      collectives: in program order.
      beside: of each of them, whether matrix products are scheduled between its start and its end; empty on CPUs,
        whose programs do not tell.
      gradients, gathered: bytes of gradients and of gathered parameters when the temporaries need most, found by
        following the program's schedule; ``None`` without a plan, or if what is alive then is not near ``memory.temp``.
      predicted: what plan and loss say, for a step of ``make_train_step``; else ``None``.
      made: dtypes and shapes of all arrays that the program makes.
      rows: which rows a device computes the loss of, and why; shown unless these are its own only.

    >>> gather = Collective("all-gather", "bf16", elements=2**20, group=8, times=24, axis="data")
    >>> print(Report(Memory(2**20, 2**20, 2**18, 2**20), (gather, gather)))
     memory, a device    compiled
    ------------------------------
     arguments            1.0 MiB
     outputs              1.0 MiB
     temporaries        256.0 KiB
     donated, in both    -1.0 MiB
     peak                 1.2 MiB
    <BLANKLINE>
     collective   dtype    elements   axis   devices   times       sent
    --------------------------------------------------------------------
     all-gather   bf16    1,048,576   data         8      48   84.0 MiB
     total                                                48   84.0 MiB
    """

    memory: Memory
    collectives: tuple[Collective, ...]
    beside: tuple[bool, ...] = ()
    gradients: int | None = None
    gathered: int | None = None
    predicted: Prediction | None = None
    made: frozenset[tuple[str, tuple[int, ...]]] = field(default=frozenset(), repr=False)
    rows: str = ""

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends in a step."""
        return sum((c.wire_bytes for c in self.collectives), 0.0)

    def _told(self) -> list[tuple[Collective, bool]]:
        """Each collective, and whether it is known to run beside matrix products."""
        return list(zip(self.collectives, self.beside or (False,) * len(self.collectives), strict=True))

    def overlapped(self, *kinds: str) -> float | None:
        """Of the bytes that collectives of these kinds (of any kind, if none is named) send, the part that travels
        while matrix products are scheduled; ``None`` if they send nothing, or the program does not tell."""
        if not self.beside:
            return None
        chosen = [(c.wire_bytes, beside) for c, beside in self._told() if not kinds or c.kind in kinds]
        total = sum(sent for sent, _ in chosen)
        return sum(sent for sent, beside in chosen if beside) / total if total else None

    def held(self, what: Literal["gradients", "gathered"]) -> int:
        """Bytes of gradients or of gathered parameters; by formula, where the program does not tell."""
        compiled = getattr(self, what)
        return getattr(self.predicted, what, 0) if compiled is None else compiled

    def bound(self, machine: Machine) -> "Bound":
        """A time that the step cannot beat on this machine; needs a step of ``make_train_step``."""
        if self.predicted is None:
            raise ValueError("only for a step of make_train_step is it known how much it computes")
        moved = self.memory.argument + self.memory.output
        return Bound.of(self.predicted.flops, moved, self.wire_bytes, machine)

    # ---- assertions for users' own tests ----

    def assert_wire_bytes(self, max: float):
        """Raise an ``AssertionError`` that names the largest collectives if a device sends more than ``max`` bytes."""
        if self.wire_bytes > max:
            raise AssertionError(f"a device sends {self.wire_bytes:,.0f} bytes in a step, more than {max:,.0f}:\n"
                                 f"{self._collectives()}")  # fmt: skip

    def assert_peak(self, max: float):
        """Raise an ``AssertionError`` that says what the memory is for if a device needs more than ``max`` bytes."""
        if self.memory.peak > max:
            raise AssertionError(f"a device needs {self.memory.peak:,} bytes, more than {max:,.0f}:\n{self._memory()}")

    def assert_no_whole(self, tree: Tree):
        """Raise an ``AssertionError`` if the program makes an array of the shape of a leaf.

        Its dtype may be another of the same kind: floating, or not. An array that only looks like it counts as well.

        Args:
          tree: arrays or shapes of which no device must have the whole, such as the batch, or stacked layers.
        """
        if not self.made:
            raise ValueError("this report does not know what the program makes; make it by zerojax.report")
        shapes = {(dtype.startswith(("f", "bf")), dims) for dtype, dims in self.made}
        for path, leaf in jax.tree.leaves_with_path(tree):
            if leaf.ndim and (jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating), tuple(leaf.shape)) in shapes:
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                whole = f"the whole of {name}" if name else "the whole one"
                raise AssertionError(f"the program makes an array {list(leaf.shape)}, as large as {whole}")

    def to_dict(self) -> dict:
        """Plain numbers and strings, for JSON."""
        rows = [
            asdict(c) | {"bytes": c.bytes, "wire_bytes": c.wire_bytes, "beside_products": overlapped}
            for c, overlapped in self._told()
        ]
        memory = asdict(self.memory) | {"peak": self.memory.peak}
        parts = {name: {"formula": formula, "compiled": compiled} for name, formula, compiled in self._parts()}
        return {"memory": memory, "parts": parts, "collectives": rows, "wire_bytes": self.wire_bytes,
                "predicted": self.predicted and self.predicted.to_dict(), "rows": self.rows}  # fmt: skip

    def __str__(self):
        rows = "" if not self.rows or self.rows.startswith("apart") else f"\n\nrows: {self.rows}"
        return f"{self._memory()}\n\n{self._collectives()}{self._products()}{rows}"

    def _memory(self) -> str:
        m = self.memory
        names = ("arguments", "outputs", "temporaries", "donated, in both", "peak")
        plain = list(zip(names, map(tables.size, (m.argument, m.output, m.temp, -m.alias, m.peak)), strict=True))
        parts = self._parts()
        if not parts:
            return tables.render(("memory, a device", "compiled"), plain)
        rows = [(name, *map(tables.size, sizes)) for name, *sizes in parts]
        note = "" if self.gathered is not None else (
            "\ngradients and gathered parameters by formula: the program does not tell what is alive in it"
        )  # fmt: skip
        return tables.render(("memory, a device", "formula", "compiled"), rows) + note

    def _parts(self) -> list[tuple[str, int, int]]:
        """What memory is for: by formula, and in the compiled program at the moment when it needs most."""
        p = self.predicted
        if p is None:
            return []
        state = [("parameters", p.parameters), ("optimizer state", p.optimizer), ("rest of the state", p.other)]
        known = [(name, size, size) for name, size in (*state, ("batch", p.batch))]
        known += [("gradients", p.gradients, self.held("gradients"))]
        known += [("gathered parameters", p.gathered, self.held("gathered"))]
        rest = self.memory.peak - sum(size for *_, size in known)
        return [*known, ("activations and the rest", p.activations, rest), ("peak", p.peak, self.memory.peak)]

    def _collectives(self) -> str:
        groups: dict[Collective, list[float]] = {}
        for c, beside in self._told():
            group = groups.setdefault(replace(c, times=1), [0, 0.0])
            group[0] += c.times
            group[1] += c.wire_bytes * beside
        rows = [
            [c.kind, c.dtype, f"{c.elements:,}", c.axis, str(c.group), f"{n:,.0f}", tables.size(n * c.wire_bytes),
             _share(beside, n * c.wire_bytes)] for c, (n, beside) in groups.items()
        ]  # fmt: skip
        times, beside = (sum(numbers) for numbers in zip(*groups.values(), strict=True)) if groups else (0, 0.0)
        total = ("", "", "", "", f"{times:,.0f}", tables.size(self.wire_bytes), _share(beside, self.wire_bytes))
        columns = ("collective", "dtype", "elements", "axis", "devices", "times", "sent", "beside products")
        unknown = {"beside products"} if not self.beside else set()
        unknown |= {"axis"} if not any(c.axis for c in self.collectives) else set()
        shown = [n for n, name in enumerate(columns) if name not in unknown]
        cells = [[row[n] for n in shown] for row in (*rows, ("total", *total))]
        return tables.render([columns[n] for n in shown], cells)

    def _products(self) -> str:
        p = self.predicted
        if p is None:
            return ""
        return (f"\n\nsent by formula: {tables.size(p.wire_bytes)}"
                f"\nmatrix products: {p.flops:.4g} operations a device")  # fmt: skip


@dataclass(frozen=True)
class Bound:
    """Seconds that a step takes at least, were each of three things all that it does, at its peak rate.

    Attributes:
      compute: matrix products at the rate of bf16.
      memory: arguments read and results written once.
      links: what a device sends, in a ring over the slowest links that it must pass.

    >>> from zerojax.cost.hardware import machine
    >>> Bound.of(flops=989.4e12, moved=3352e9, wire=900e9, machine=machine("h100:8"))
    Bound(compute=1.0, memory=1.0, links=2.0)
    """

    compute: float
    memory: float
    links: float

    @classmethod
    def of(cls, flops: float, moved: float, wire: float, machine: Machine) -> "Bound":
        """For operations, bytes to and from memory, and bytes sent, of one device."""
        one = machine.accelerator
        return cls(flops / one.flops, moved / one.memory_bandwidth, wire / machine.bandwidth)

    @property
    def seconds(self) -> float:
        """The largest of the three, which may run beside each other."""
        return max(self.compute, self.memory, self.links)

    @property
    def by(self) -> str:
        """Which of them it is."""
        return max(asdict(self), key=asdict(self).__getitem__)


def report(step: Any, state: Tree = None, batch: Tree = None, *more: Tree) -> Report:
    """Compile a step for these arguments, without running it, and read what the compiler made of it.

    On CPU devices it is compiled with a scheduler that saves memory; the default one there runs as much as possible at
    once, and its figures would say nothing about other backends.

    Args:
      step: what ``make_train_step`` or ``jax.jit`` returned, or a lowered or compiled program (no arguments are used
        then).
      state, batch, more: its arguments, arrays or shapes with shardings, also of devices that do not exist.

    >>> import jax
    >>> x = jax.ShapeDtypeStruct((4,), "float32")
    >>> report(jax.jit(lambda state, batch: state + batch), x, x).memory.peak
    48
    """
    arguments = (state, batch, *more)
    if isinstance(step, jax.stages.Compiled):
        compiled = step
    elif hasattr(step, "lower"):
        compiled = _compile(step.lower(*arguments), arguments)
    elif isinstance(step, jax.stages.Lowered):
        compiled = _compile(step, arguments)
    else:
        raise ValueError(f"report takes a step of make_train_step, a function under jax.jit, or what was lowered or "
                         f"compiled of one, not {type(step).__name__}: wrap it in jax.jit")  # fmt: skip
    text = compiled.as_text()
    if text is None:
        raise ValueError("this backend does not show what it compiled, so collectives cannot be counted")
    plan: Plan | None = getattr(step, "plan", None)
    loss_fn = getattr(step, "loss_fn", None)
    mesh = plan.mesh if plan else _mesh(arguments)
    seen = hlo.overlap(text, dict(mesh.shape) if mesh else None)
    gradients, gathered = _held(compiled, plan) if plan else (None, None)
    return Report(
        memory(compiled),
        tuple(one.collective for one in seen),
        tuple(one.overlapped for one in seen) if hlo.is_scheduled(text) else (),
        gradients,
        gathered,
        predict(loss_fn, plan, shapes_of(batch)) if plan and loss_fn else None,
        hlo.made(text),
        explanation.explain(step, state, shapes_of(batch)).rows if plan and loss_fn else "",
    )


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
    options = {"cpu": _CPU_OPTIONS, "gpu": _GPU_OPTIONS}.get(platform)
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return lowered.compile()


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}".replace("%", " %") if whole else "-"


def _mesh(arguments: Tree) -> Any:
    """The mesh on which the arguments lie, if it is one."""
    found = {getattr(getattr(leaf, "sharding", None), "mesh", None) for leaf in jax.tree.leaves(arguments)}
    return found.pop() if len(found) == 1 else None


def _held(compiled: jax.stages.Compiled, plan: Plan) -> tuple[int | None, int | None]:
    """Bytes of gradients and of gathered parameters when the temporaries of a program need most.

    Parameters are known by the named scope in which they are gathered; gradients by that in which they are reduced, or
    by their shape, that of a trained parameter or of a part of it. A layer taken out of stacked parameters has it too.
    """
    runtime: Any = compiled.runtime_executable()
    modules = runtime.hlo_modules() if runtime else []
    try:
        found = liveness.at_the_peak(modules[0].as_serialized_hlo_module_proto()) if len(modules) == 1 else []
    except (LookupError, ValueError):  # a form of instruction that is not known: the report says that it cannot tell
        return None, None
    total, planned = sum(buffer.bytes for buffer in found), memory(compiled).temp
    if not 0.8 * planned <= total <= 1.1 * planned:  # gaps between arrays are in the plan only
        return None, None
    shapes = _gradient_shapes(plan)
    gathered = sum(buffer.bytes for buffer in found if _collectives.GATHERED in buffer.scope)
    others = [buffer for buffer in found if _collectives.GATHERED not in buffer.scope]
    gradients = [b for b in others if _collectives.REDUCED in b.scope + b.reducer
                 or (_flat(b.dims) in shapes and not b.scope.endswith(_SLICES))]  # fmt: skip
    return sum(b.bytes for b in gradients), gathered


def _gradient_shapes(plan: Plan) -> set[tuple[int, ...]]:
    """Of trained parameters, whole and in part, of layers and of stacks of them; of more than a few numbers."""
    shapes = set()
    for leaf in plan.wire:
        whole = leaf.shape
        part = tuple(n // plan.devices if dim == leaf.dim else n for dim, n in enumerate(whole))
        shapes.update(_flat(shape) for shape in (whole, part, whole[1:], part[1:]) if leaf.trained and len(shape) > 1)
    return shapes


def _flat(dims: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without dims of one, in order of size: compilers transpose."""
    return tuple(sorted(n for n in dims if n > 1))
