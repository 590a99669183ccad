"""What fits where: the stages of a workload on a machine, by formula or by its compiler; searches for what fits."""

import bisect
import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh

from zerojax import tables
from zerojax.config import Precision, ZeroConfig
from zerojax.contracts import Tree
from zerojax.cost import models
from zerojax.cost.hardware import Machine, data_axes
from zerojax.cost.prediction import Prediction, predict
from zerojax.cost.report import Bound, Report, report
from zerojax.cost.targets import target
from zerojax.plan import Plan, make_plan
from zerojax.step import make_train_step

RESERVED = 0.05  # of the memory: the driver's context, buffers of collectives, gaps between arrays
_MOST_DEVICES = 2**16
_MOST_ROWS = 2**20


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
      name: for people.
      init_fn, loss_fn, tx: as for ``make_plan`` and ``make_train_step``.
      row: shapes of a batch's leaves without their first dim, the rows.
    """

    name: str
    init_fn: Callable
    loss_fn: Callable
    tx: optax.GradientTransformation
    row: Tree

    def batch(self, rows: int) -> Tree:
        """Shapes of that many rows."""
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct((rows, *a.shape), a.dtype), self.row)


@dataclass(frozen=True)
class Setting:
    """How it is trained.

    Attributes:
      machine: where.
      rows: of each device in each micro-batch.
      accumulate: micro-batches a step.
      precision: the short form of a `zerojax.Precision`.
      stage: ZeRO's.

    Raises:
      ValueError: if rows or micro-batches are fewer than one.
    """

    machine: Machine
    rows: int = 1
    accumulate: int = 1
    precision: str = "c=bf16"
    stage: int = 3

    def __post_init__(self):
        for name in ("rows", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not 1 or more")

    @property
    def total_rows(self) -> int:
        """Of a step, over all devices."""
        return self.rows * self.accumulate * self.machine.devices


@dataclass(frozen=True)
class Answer:
    """One workload in one setting.

    Attributes:
      name: of the workload.
      setting: that it is about.
      predicted: by formula and trace.
      compiled: by the machine's compiler; ``None`` if it was not asked.
      whole_bytes: of arrays that stay whole on every device because they cannot be partitioned.
    """

    name: str
    setting: Setting
    predicted: Prediction
    compiled: Report | None
    whole_bytes: int

    @property
    def peak(self) -> int:
        """Bytes of a device."""
        return self.compiled.memory.peak if self.compiled else self.predicted.peak

    @property
    def wire_bytes(self) -> float:
        """That a device sends in a step."""
        return self.compiled.wire_bytes if self.compiled else self.predicted.wire_bytes

    @property
    def fits(self) -> bool:
        """Whether the peak leaves ``RESERVED`` of the memory free."""
        return self.peak <= usable(self.setting.machine)

    @property
    def bound(self) -> Bound:
        """A time that the step cannot beat."""
        p, compiled = self.predicted, self.compiled
        moved = compiled.memory.argument + compiled.memory.output if compiled else 2 * p.at_rest + p.batch
        return Bound.of(p.flops, moved, self.wire_bytes, self.setting.machine)

    def to_dict(self) -> dict:
        """Plain numbers and strings, for JSON."""
        setting = dataclasses.asdict(self.setting) | {"machine": self.setting.machine.name}
        bound = dataclasses.asdict(self.bound) | {"seconds": self.bound.seconds, "by": self.bound.by}
        return {
            "workload": self.name, "setting": setting,
            "peak": self.peak, "fits": self.fits, "usable": usable(self.setting.machine),
            "wire_bytes": self.wire_bytes, "bound": bound, "kept_whole": self.whole_bytes,
            "predicted": self.predicted.to_dict(), "compiled": self.compiled and self.compiled.to_dict(),
        }  # fmt: skip


def usable(machine: Machine) -> float:
    """Bytes of a device that arrays may take."""
    return machine.accelerator.memory_bytes * (1 - RESERVED)


# ---- workloads ----


def transformer(name: str, **sizes: Any) -> Workload:
    """A model of `zerojax.cost.models`, by name or, as ``"gpt"`` or ``"llama"``, by sizes; AdamW and clipping.

    >>> transformer("gpt2").row.shape
    (1025,)
    """
    given = {key: value for key, value in sizes.items() if value is not None}
    if name in ("gpt", "llama"):
        lacking = [key for key in ("width", "layers", "heads") if key not in given]
        if lacking:
            raise ValueError(f"{name!r} needs {', '.join('--' + key for key in lacking)}")
        model = models.Transformer(style=name, tied=name == "gpt", **given)
    else:
        model = models.named(name, **given)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, weight_decay=0.1))
    return Workload(name, model.init, model.loss, tx, jax.ShapeDtypeStruct((model.sequence + 1,), jnp.int32))


def from_user(reference: str) -> tuple[Workload, int]:
    """From ``"module:function"``; the function returns ``(init_fn, loss_fn, tx, batch)``. Also: the batch's rows.

    Raises:
      ValueError: if it cannot be imported, or returns something else.
    """
    module, _, name = reference.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot import {reference!r}: {error}") from error
    finally:
        sys.path.pop(0)
    if not callable(function):
        raise ValueError(f"{reference} is no function that returns (init_fn, loss_fn, tx, batch), but {function!r}")
    made = function()
    if not isinstance(made, tuple) or len(made) != 4:
        raise ValueError(f"{reference} must return (init_fn, loss_fn, tx, batch), not {type(made).__name__}")
    init_fn, loss_fn, tx, batch = made
    rows = {leaf.shape[0] if getattr(leaf, "ndim", 0) else 0 for leaf in jax.tree.leaves(batch)}
    if len(rows) != 1 or 0 in rows:
        raise ValueError(f"the batch of {reference} must be arrays with as many rows each in dim 0")
    row = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), batch)
    return Workload(reference, init_fn, loss_fn, tx, row), rows.pop()


def workload(model: str, sizes: dict[str, Any]) -> tuple[Workload, int]:
    """By name, by sizes, or from the user's ``module:function``; also the rows that it comes with, or 1."""
    if ":" not in model:
        return transformer(model, **sizes), 1
    if given := [name for name, value in sizes.items() if value is not None]:
        raise ValueError(f"--{given[0]} is for named models; {model} has its own")
    return from_user(model)


# ---- answers ----


def answer(workload: Workload, setting: Setting, exact: bool = False) -> Answer:
    """What a step needs there.

    Args:
      exact: whether to compile it; else nothing but the shapes is looked at.
    """
    mesh = _mesh(setting.machine, exact)
    config = ZeroConfig(
        stage=setting.stage, shard_axes=tuple(mesh.axis_names), accumulate=setting.accumulate,
        precision=Precision.parse(setting.precision), allow_whole=True,
    )  # fmt: skip
    plan, batch = make_plan(workload.init_fn, workload.tx, mesh, config), workload.batch(setting.total_rows)
    compiled = None
    if exact:
        step = make_train_step(workload.loss_fn, workload.tx, plan)
        compiled = report(step, plan.abstract_state, batch)
    predicted = (compiled and compiled.predicted) or predict(workload.loss_fn, plan, batch)
    return Answer(workload.name, setting, predicted, compiled, _whole_bytes(plan))


def _mesh(machine: Machine, exact: bool) -> Any:
    if exact:
        return target(machine.name).mesh()
    return AbstractMesh(machine.mesh_shape, data_axes(len(machine.mesh_shape)))


def _whole_bytes(plan: Plan) -> int:
    if plan.config.stage == 0:
        return 0
    return sum(leaf.bytes for leaf in (*plan.params, *plan.opt_state) if leaf.unwanted)


# ---- searches ----


class Found(NamedTuple):
    """What fits, and what is just beyond it; ``None`` if nothing fits, or everything does."""

    best: Answer | None
    beyond: Answer | None


def find(what: str, ask: Callable[[Setting], Answer], setting: Setting, guess: int = 1) -> Found:
    """What fits: the most rows of a device (``"batch"``), the fewest ``"devices"``, or the lowest ``"stage"``.

    Args:
      ask: answers a setting; with a compiler behind it each answer takes a minute, and there are some ten.
      guess: of the number, where to begin.
    """
    if what == "stage":
        return _first(ask(dataclasses.replace(setting, stage=stage)) for stage in range(4))
    if what == "batch":
        return _most(lambda rows: ask(dataclasses.replace(setting, rows=rows)), guess)
    if what == "devices":
        sizes = (2**n for n in range(_MOST_DEVICES.bit_length()))
        return _fewest(
            [setting.machine.resized(n) for n in sizes], lambda m: ask(dataclasses.replace(setting, machine=m))
        )
    raise ValueError(f"find={what!r} is not one of 'batch', 'devices', 'stage'")


def _first(answers: Iterable[Answer]) -> Found:
    """Memory never rises with the stage."""
    beyond = None
    for one in answers:
        if one.fits:
            return Found(one, beyond)
        beyond = one
    return Found(None, beyond)


def _most(ask: Callable[[int], Answer], guess: int) -> Found:
    """The largest number that fits: from the guess in growing steps until two numbers hold it, then by bisection."""
    best = beyond = None
    low, high, number, step = 0, _MOST_ROWS, guess, max(1, guess // 8)
    while low + 1 < high:
        one = ask(number)
        if one.fits:
            best, low = one, number
        else:
            beyond, high = one, number
        known = best is not None and beyond is not None
        number = (low + high) // 2 if known else min(max(number + (step if one.fits else -step), low + 1), high - 1)
        step *= 2
    return Found(best, beyond)


def _fewest(machines: list[Machine], ask: Callable[[Machine], Answer]) -> Found:
    """By bisection: more devices need less memory each, until they are more than the arrays can be divided by."""
    asked: dict[Machine, Answer] = {}

    def fits(machine):
        asked[machine] = ask(machine)
        return asked[machine].fits

    number = bisect.bisect_left(machines, True, key=fits)
    if number < len(machines):
        return Found(asked[machines[number]], asked[machines[number - 1]] if number else None)
    return Found(None, min(asked.values(), key=lambda one: one.peak))


# ---- words ----

_COLUMNS = ("params", "optimizer", "gradients", "gathered", "rest", "peak", "fits", "sent", "bound", "by")


def table(answers: list[Answer]) -> str:
    """The answers, one a line; rows are those of a device and micro-batch."""
    settings = [one.setting for one in answers]
    first = settings[0]
    machines, rows = {s.machine.name for s in settings}, {s.rows for s in settings}
    varies = {"devices": len(machines) > 1, "rows": len(rows) > 1}
    where = first.machine.kind if varies["devices"] else first.machine.name
    each = "" if varies["rows"] else f", {tables.count(first.rows, 'row')} a device"
    turns = f" in each of {first.accumulate} micro-batches" if first.accumulate > 1 else ""
    by = "compiled" if answers[0].compiled else "by formula"
    title = f"{answers[0].name} on {where}{each}{turns}, {first.precision}; {by}, bytes a device"
    columns = ("stage", *(name for name, shown in varies.items() if shown), *_COLUMNS)
    return tables.render(columns, [_cells(one, varies) for one in answers], title)


def _cells(one: Answer, varies: Mapping[str, bool]) -> tuple[str, ...]:
    setting, size = one.setting, tables.size
    numbers = {"devices": f"{setting.machine.devices:,}", "rows": f"{setting.rows:,}"}
    shown = (text for name, text in numbers.items() if varies[name])
    sizes = map(size, (*parts(one).values(), one.peak))
    bound = tables.duration(one.bound.seconds), one.bound.by
    return (str(setting.stage), *shown, *sizes, "yes" if one.fits else "no", size(one.wire_bytes), *bound)


def parts(one: Answer) -> dict[str, int]:
    """What the peak is made of."""
    p, compiled = one.predicted, one.compiled
    state = {"parameters": p.parameters, "optimizer": p.optimizer}
    if compiled is None:
        return state | {"gradients": p.gradients, "gathered": p.gathered, "rest": p.activations + p.other + p.batch}
    held = {"gradients": compiled.held("gradients"), "gathered": compiled.held("gathered")}
    return state | held | {"rest": one.peak - p.parameters - p.optimizer - sum(held.values())}


def told(what: str, stage: int, found: Found) -> str:
    """One line: what was found, and what bounds it."""
    names: dict[str, Callable[[Setting], str]] = {
        "batch": lambda s: tables.count(s.rows, "row"), "devices": lambda s: tables.count(s.machine.devices, "device"),
        "stage": lambda s: f"stage {s.stage}",
    }  # fmt: skip
    of = "" if what == "stage" else f"stage {stage}: "
    line = f"{of}{names[what](found.best.setting)}" if found.best else f"{of}nothing fits"
    if found.best and not found.beyond and what == "batch":
        line += ", more was not tried"
    if found.beyond:
        made = parts(found.beyond)
        largest = max(made, key=made.__getitem__)
        line += (f"; {names[what](found.beyond.setting)} would need {tables.size(found.beyond.peak)}, of which "
                 f"{largest} {tables.size(made[largest])}")  # fmt: skip
    return line


def notes(answers: list[Answer]) -> str:
    """What to know beside the table."""
    machine = answers[0].setting.machine
    one = machine.accelerator
    lines = [
        f"fits: the peak leaves {RESERVED:.0%} of {tables.size(one.memory_bytes)} free.",
        f"bound: no step is faster; {one.flops / 1e12:,.0f} TFLOP/s, memory {one.memory_bandwidth / 1e9:,.0f} GB/s, "
        f"links {machine.bandwidth / 1e9:,.0f} GB/s, each at its best, all at once.",
    ]
    if most := max(answer.whole_bytes for answer in answers):
        lines.append(f"{tables.size(most)} of arrays stay whole on every device: no dim of theirs divides.")
    if not answers[0].compiled:
        lines.append("rest: activations, from the trace of the loss, and the batch; --exact asks the compiler.")
    return "\n".join(lines)
