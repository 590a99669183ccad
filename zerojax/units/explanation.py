"""Which gather units a loss was cut into: their parameters, their bytes, and what is gathered where."""

import inspect
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import tables
from zerojax.contracts import Tree
from zerojax.units import gradient as units
from zerojax.units import rows
from zerojax.units.cutting import Unit
from zerojax.units.passes import Traffic


@dataclass(frozen=True)
class UnitUse:
    """A gather unit of one micro-batch.

    Attributes:
      does: its most frequent equations, or ``"scan"``.
      params: the paths of the parameters that are whole while it runs; of a scan, one layer of each of its stacks.
      bytes: of those of them that are partitioned, whole, in the dtype in which the loss sees them.
      turns: how often it runs; the layers of a scan.
      gathers: how often its parameters are gathered, forward and backward; compilers may merge gathers, and drop those
        of which nothing is used.
    """

    does: str
    params: tuple[str, ...]
    bytes: int
    turns: int
    gathers: tuple[int, int]


@dataclass(frozen=True)
class Explanation:
    """The gather units of one micro-batch of a step, in the order in which they run.

    Attributes:
      units: at stage 3 those whose parameters are gathered, at all stages those whose gradients leave together. In
        evaluation the loss is not cut.
      travels: whether parameters are gathered for each unit.
      rows: which rows a device computes the loss of, and why.
    """

    units: tuple[UnitUse, ...]
    travels: bool
    rows: str = ""

    @property
    def whole_bytes(self) -> int:
        """The most bytes of parameters that units hold whole at a time: those of a unit, and of the next on its way."""
        sizes = [unit.bytes for unit in self.units for _ in range(min(unit.turns, 2))]
        return max((sum(pair) for pair in zip(sizes, [*sizes[1:], 0], strict=True)), default=0)

    def __str__(self):
        if not self.units:
            return (
                "no gather units: in evaluation all parameters are whole at once. Else none are seen if the step "
                "calls a jitted function that ran before: explain that one"
            )
        columns = ("unit", "does", "parameters", "whole", "turns", "gathered forward", "backward")
        lines = [
            (number, unit.does, " ".join(unit.params), tables.size(unit.bytes), unit.turns, *unit.gathers)
            for number, unit in enumerate(self.units)
        ]
        whole = f"whole at a time, at most: {tables.size(self.whole_bytes)}"
        told = f"\nrows: {self.rows}" if self.rows else ""
        return f"{tables.render(columns, lines)}\n\n{whole if self.travels else 'all parameters are whole'}{told}"


def explain(step: Any, *arguments: Tree) -> Explanation:
    """The gather units of a step for these arguments. It is traced, and neither compiled nor run.

    Args:
      step: from ``make_train_step``, or a function around ``value_and_grad``, jitted or not.
      arguments: of the step, arrays or shapes, such as ``plan.abstract_state`` and a batch.

    Raises:
      ValueError: for what was lowered or compiled.

    >>> import optax
    >>> from zerojax import make_plan, make_train_step
    >>> init_fn, tx = lambda key: {"w": jnp.ones((512, 512)), "v": jnp.ones((512, 512))}, optax.sgd(0.5)
    >>> plan = make_plan(init_fn, tx, jax.make_mesh((8,), ("data",)))
    >>> step = make_train_step(lambda p, x: jnp.mean(jnp.tanh(x @ p["w"]) @ p["v"]), tx, plan)
    >>> print(explain(step, plan.abstract_state, jax.ShapeDtypeStruct((16, 512), "float32")))
     unit   does                    parameters     whole   turns   gathered forward   backward
    -------------------------------------------------------------------------------------------
        0   dot_general, tanh       w            1.0 MiB       1                  1          1
        1   div, dot_general, ...   v            1.0 MiB       1                  1          0
    <BLANKLINE>
    whole at a time, at most: 2.0 MiB
    rows: apart: what a row adds to the loss depends on it alone
    """
    if isinstance(step, (jax.stages.Lowered, jax.stages.Compiled)):
        raise ValueError("explain traces a step; what was lowered or compiled cannot be traced: pass the step")
    with units.recorded() as found, rows.recorded() as told:
        jax.eval_shape(_traced_anew(getattr(step, "jitted", step)), *arguments)
    losses = {id(traffic): (cuts, leaves, traffic) for cuts, leaves, traffic in found}  # a loop may be traced twice
    uses = [
        _use(cuts, number, leaves, traffic) for cuts, leaves, traffic in losses.values() for number in range(len(cuts))
    ]
    travels = any(traffic.gather is not None for _, _, traffic in losses.values())
    return Explanation(tuple(uses), travels, "; ".join(dict.fromkeys(told)))


def _traced_anew(function: Any) -> Any:
    """What a jitted function runs, in a form that JAX has not traced before."""
    bound = [function.__self__] if inspect.ismethod(function) else []
    inner = getattr(function, "__wrapped__", function if not bound else function.__func__)
    return lambda *args: inner(*bound, *args)


def _use(cuts: list[Unit], number: int, leaves: Any, traffic: Traffic) -> UnitUse:
    unit = cuts[number]
    own = [leaves[i] for i in unit.params]
    turns = 1
    if unit.loop is not None:
        own += [leaves[i].layer() for i in unit.loop.numbers]
        turns = unit.loop.scan.length
    travel = [leaf for leaf in own if leaf.dim is not None]
    bytes = sum(leaf.size * jnp.dtype(leaf.compute_dtype).itemsize for leaf in travel)
    last = 0 < number == len(cuts) - 1 and unit.loop is None
    gathers = (0, 0) if traffic.gather is None or not travel else (turns, 0 if last else turns)
    return UnitUse(_does(unit), tuple(leaf.path for leaf in own), bytes, turns, gathers)


def _does(unit: Unit) -> str:
    if unit.loop is not None:
        return "scan"
    names = Counter(unit.primitives)
    common = [name for name, _ in names.most_common(2)]
    return ", ".join([*common, *(["..."] if len(names) > 2 else [])])
