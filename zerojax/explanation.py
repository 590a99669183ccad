"""Which gather units a loss was cut into: their parameters, their bytes, and what is gathered where."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import tables, units
from zerojax.contracts import Tree
from zerojax.cutting import Unit
from zerojax.passes import Traffic


@dataclass(frozen=True)
class UnitUse:
    """A gather unit of one micro-batch.

    Attributes:
      does: its most frequent equations, or ``"scan"``.
      params: the paths of the parameters that are whole while it runs; of a scan, one layer of each of its stacks.
      bytes: of these parameters, whole, in the dtype in which the loss sees them.
      turns: how often it runs; the layers of a scan.
      gathers: how often its parameters are gathered, forward and backward.
    """

    does: str
    params: tuple[str, ...]
    bytes: int
    turns: int
    gathers: tuple[int, int]


@dataclass(frozen=True)
class Explanation:
    """The gather units of a step, in the order in which they run; none at stages 0 and 1."""

    units: tuple[UnitUse, ...]

    @property
    def whole_bytes(self) -> int:
        """The most bytes of parameters that are whole at a time: of a unit, and of the next one on its way."""
        sizes = [unit.bytes for unit in self.units for _ in range(min(unit.turns, 2))]
        return max((sum(pair) for pair in zip(sizes, [*sizes[1:], 0], strict=True)), default=0)

    def __str__(self):
        if not self.units:
            return "no gather units: at stages 0 and 1 all parameters are whole while a step runs"
        columns = ("unit", "does", "parameters", "whole", "turns", "gathered forward", "backward")
        rows = [
            (number, unit.does, " ".join(unit.params), tables.size(unit.bytes), unit.turns, *unit.gathers)
            for number, unit in enumerate(self.units)
        ]
        return f"{tables.render(columns, rows)}\n\nwhole at a time, at most: {tables.size(self.whole_bytes)}"


def explain(step: Any, state: Tree, batch: Tree) -> Explanation:
    """The gather units of a step for these arguments. It is traced, and neither compiled nor run.

    Args:
      step: from ``make_train_step``, or a function around ``value_and_grad``, jitted or not.
      state: arrays, or shapes such as ``plan.abstract_state``.
      batch: likewise.

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
    """
    function = getattr(step, "jitted", step)
    function = getattr(function, "__wrapped__", function)  # a jitted function may have been traced before, and kept
    with units.recorded() as found:
        jax.eval_shape(lambda *args: function(*args), state, batch)
    return Explanation(tuple(_use(number, len(cut), unit, leaves, traffic) for cut, leaves, traffic in found[-1:]
                             for number, unit in enumerate(cut)))  # fmt: skip


def _use(number: int, count: int, unit: Unit, leaves: Any, traffic: Traffic) -> UnitUse:
    own = [leaves[i] for i in unit.params]
    turns = 1
    if unit.loop is not None:
        own += [leaves[i].layer() for i in unit.loop.numbers]
        turns = unit.loop.scan.length
    bytes = sum(leaf.size for leaf in own) * jnp.dtype(traffic.dtype).itemsize
    last = 0 < number == count - 1 and unit.loop is None
    gathers = (0, 0) if traffic.gather is None or not own else (turns, 0 if last else turns)
    return UnitUse(_does(unit), tuple(leaf.path for leaf in own), bytes, turns, gathers)


def _does(unit: Unit) -> str:
    if unit.loop is not None:
        return "scan"
    names = Counter(unit.primitives)
    common = [name for name, _ in names.most_common(2)]
    return ", ".join([*common, *(["..."] if len(names) > 2 else [])])
