"""The gradient of a loss in gather units, the parameters that are gathered together.

The loss is traced and its equations are cut into units of consecutive ones (`zerojax.units.cutting`). Forward, a unit
gathers its parameters, runs, and keeps for backward what JAX would keep, except the parameters; backward, in reverse
order, it gathers them again when its cotangent exists, and reduces their gradient at once. A scan over stacked layers
does the same for each layer, inside its loops. The next parameters travel while the present ones are used. Below
stage 3 all parameters are whole, and units only say when gradients are made and leave.
"""

import contextlib
import contextvars
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from zerojax import tables
from zerojax.precision import is_key
from zerojax.units import jaxprs
from zerojax.units.cutting import Unit, cut, read
from zerojax.units.loops import run_loop
from zerojax.units.passes import Arrays, Leaves, Pass, Reduced, Sums, Traffic, linearize, look_at


def gradient(
    objective: Callable[..., tuple[jax.Array, Any]], held: Arrays, leaves: Leaves, traffic: Traffic
) -> Callable[..., tuple[tuple[jax.Array, Any], list[jax.Array | None]]]:
    """Value and reduced gradient of an objective.

    Args:
      objective: ``(whole parameters, *args) -> (scalar, aux)``.
      held: the parameters as they are held during the step: shards, or whole without ``traffic.gather``.
      leaves: their places.
      traffic: how they travel.

    Returns:
      ``f(turn, *args) -> ((scalar, aux), reduced gradients)``: ``None`` for a parameter that is not trained or has no
      influence. ``turn`` is the number of the micro-batch.
    """
    shapes = traffic.shapes(leaves)

    def run(turn, *args):
        if not jaxprs.is_staged((held, args)):
            return _uncut(objective, held, leaves, traffic, *args)
        program, treedef = jaxprs.trace(objective, shapes, *args)
        _tell_of_whole(list(program.constants.values()), shapes)
        values = dict(zip(program.inputs[len(held) :], jax.tree.leaves(args), strict=True)) | program.constants
        way = Pass(held, leaves, traffic, turn)
        cuts = cut(program, leaves)
        if (found := _FOUND.get()) is not None:
            found.append((cuts, leaves, traffic))
        tape = _all_forward(cuts, values, way)
        total, aux = treedef.unflatten(read(values, program.outputs))
        cotangents = Sums({program.outputs[0]: jnp.ones_like(total)})
        grads = _all_back(tape, cotangents, Pass(held, leaves, traffic, total))
        return (total, aux), [grads.get(i) for i in range(len(held))]

    return run


def _tell_of_whole(constants: list[Any], shapes: Any):
    """Warn if a loss closes over much that may be partitioned: it is whole on every device, as long as it is used."""

    def size(arrays):
        return sum(a.size * a.dtype.itemsize for a in arrays if hasattr(a, "dtype") and not is_key(a))

    whole = [
        a
        for a in constants
        if isinstance(a, jax.Array) and (isinstance(a, Tracer) or not a.sharding.is_fully_replicated)
    ]
    if size(whole) > max(_MUCH, size(shapes) / 100):
        largest = max(whole, key=lambda a: size([a]))
        warnings.warn(
            f"the loss closes over {tables.count(len(whole), 'array')} of {tables.size(size(whole))} (the largest is "
            f"{largest.dtype}{list(largest.shape)}), which are whole on every device at once. To gather them unit by "
            'unit, put them into params and freeze them: ZeroConfig(frozen="teacher/*")',
            stacklevel=2,
        )


_MUCH = 2**20  # bytes


def _uncut(objective: Callable, held: Arrays, leaves: Leaves, traffic: Traffic, *args: Any):
    """The same by JAX alone, where no program is written: ``jax_debug_nans`` runs a step again, operation by operation,
    to find the line of the loss that fails. All parameters are whole at once."""
    whole = traffic.gather(held, leaves) if traffic.gather else list(held)
    trained = [i for i, leaf in enumerate(leaves) if leaf.trained]

    def of_trained(some):
        given = dict(zip(trained, some, strict=True))
        return objective([given.get(i, a) for i, a in enumerate(whole)], *args)

    made, grads = jax.value_and_grad(of_trained, has_aux=True)([whole[i] for i in trained])
    grads = traffic.reduce(grads, [leaves[i] for i in trained]) if traffic.reduce else grads
    by_number = dict(zip(trained, grads, strict=True))
    return made, [by_number.get(i) for i in range(len(held))]


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[list[Unit], Leaves, Traffic]]]:
    """Collects the units of each loss that is traced here."""
    found: list[tuple[list[Unit], Leaves, Traffic]] = []
    token = _FOUND.set(found)
    try:
        yield found
    finally:
        _FOUND.reset(token)


_FOUND: contextvars.ContextVar[list | None] = contextvars.ContextVar("found", default=None)


class _Done(NamedTuple):
    """A unit that has run, its backward function, and its parameters if they are still whole."""

    unit: Unit
    back: Callable
    whole: Arrays | None


def _all_forward(units: list[Unit], values: dict, way: Pass) -> list[_Done]:
    """Run the units. Backward begins with the last one, so its parameters stay whole, unless it is the only one."""
    tape = []
    for number, unit in enumerate(units):
        whole = way.whole(way.held(unit.params), way.leaves(unit.params))
        back = _forward(unit, whole, values, way)
        tape.append(_Done(unit, back, whole if 0 < number == len(units) - 1 else None))
    return tape


def _all_back(tape: list[_Done], cotangents: Sums, way: Pass) -> Sums:
    """The reduced gradients. That of a parameter of several units waits for the first of them, and travels once."""
    first = {i: number for number, done in reversed(list(enumerate(tape))) for i in done.unit.trained}
    grads, waiting = Reduced(), Sums()
    for number, done in reversed(list(enumerate(tape))):
        unit = done.unit
        if any(var in cotangents for var in unit.results):  # else the loss does not depend on it
            _backward(done, cotangents, waiting, grads, way)
        ready = [i for i in unit.trained if i in waiting and first[i] == number]
        reduced = way.reduce([waiting.pop(i) for i in ready], way.leaves(ready))
        way.left(reduced)
        grads.add(ready, reduced)
        cotangents.wait_for([waiting[i] for i in unit.trained if i in waiting], unit.active)
    return grads


# ---- units ----


def _forward(unit: Unit, whole: Arrays, values: dict, way: Pass) -> Callable:
    """Run a unit.

    Returns:
      ``(views, still views, cotangents, way) -> (of views, of active, reduced gradients of stacks)``.
    """
    views, still = unit.look(whole)
    inputs = views, read(values, unit.active), still, read(values, unit.passive)
    results, others, back = run_loop(unit, unit.loop, *inputs, way) if unit.loop else _plain(unit, *inputs, way)
    values.update(zip((*unit.results, *unit.others), (*results, *others), strict=True))
    way.done([*results, *others])
    return back


def _backward(done: _Done, cotangents: Sums, waiting: Sums, grads: Sums, way: Pass):
    """Add the cotangents of a unit's inputs, whole gradients that wait to be reduced, and reduced ones of stacks."""
    unit, whole = done.unit, done.whole
    if whole is None:
        whole = way.whole(way.held(unit.params), way.leaves(unit.params))
    views, still, look_back = look_at(unit, whole)
    of_results = way.paced(cotangents.of(unit.results))
    of_views, of_active, of_stacks = done.back(views, still, of_results, way)
    of_whole = look_back(of_views)
    way.done([*of_active, *of_whole])
    cotangents.add(unit.active, of_active)
    waiting.add(unit.trained, of_whole)
    grads.add(of_stacks.keys(), of_stacks.values())


def _plain(unit: Unit, views: Arrays, active: Arrays, still: Arrays, passive: Arrays, way: Pass):
    """``(results, others, back)`` of a unit that is no loop."""
    results, others, kept, rebuild = linearize(unit, views, active, [*still, *passive], way.remat, still)

    def back(views, still, cotangents, way):
        return *rebuild(kept, views, still)(cotangents), {}

    return results, others, back
