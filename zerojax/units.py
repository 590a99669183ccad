"""Stages 2 and 3: the gradient of a loss in gather units, the parameters that are gathered together.

The loss is traced and its equations are cut into units of consecutive ones (`zerojax.cutting`). Forward, a unit gathers
its parameters, runs, and keeps for backward what JAX would keep, except the parameters; backward, in reverse order, it
gathers them again when its cotangent exists, and reduces their gradient at once. A scan over stacked layers does the
same for each layer, inside its loops. The next parameters travel while the present ones are used.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from zerojax import jaxprs
from zerojax.cutting import Loop, Unit, cut, read
from zerojax.plan import Leaf
from zerojax.precision import is_floating

Arrays = list[jax.Array]
Leaves = Sequence[Leaf]


@dataclass(frozen=True)
class Traffic:
    """How parameters and their gradients travel.

    Attributes:
      gather: ``(held, leaves) -> whole``, or ``None`` if parameters are held whole during the step.
      reduce: ``(gradients, leaves, aux of the objective) -> reduced gradients``.
    """

    gather: Callable[[Arrays, Leaves], Arrays] | None
    reduce: Callable[[Arrays, Leaves, Any], Arrays]


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
      ``f(turn, *args) -> ((scalar, aux), reduced gradients)``: ``None`` for a parameter without influence. ``turn`` is
      the number of the micro-batch.
    """
    shapes = [jax.ShapeDtypeStruct(leaf.shape, a.dtype) for leaf, a in zip(leaves, held, strict=True)]

    def run(turn, *args):
        program, treedef = jaxprs.trace(objective, shapes, *args)
        values = dict(zip(program.inputs[len(held) :], jax.tree.leaves(args), strict=True)) | program.constants
        way = _Pass(held, leaves, traffic, turn)
        tape = [(unit, _forward(unit, values, way)) for unit in cut(program, leaves)]
        total, aux = treedef.unflatten(read(values, program.outputs))
        cotangents = _Sums({program.outputs[0]: jnp.ones_like(total)})
        grads = _all_back(tape, cotangents, aux, _Pass(held, leaves, traffic, total))
        return (total, aux), [grads.get(i) for i in range(len(held))]

    return run


def _all_back(tape: list[tuple[Unit, Callable]], cotangents: "_Sums", aux: Any, way: "_Pass") -> "_Sums":
    """The reduced gradients. That of a parameter of several units waits for the first of them, and travels once."""
    first = {i: number for number, (unit, _) in reversed(list(enumerate(tape))) for i in unit.params}
    grads, waiting = _Sums(), _Sums()
    for number, (unit, back) in reversed(list(enumerate(tape))):
        if any(var in cotangents for var in unit.results):  # else the loss does not depend on it
            _backward(unit, back, cotangents, waiting, grads, aux, way)
        ready = [i for i in unit.params if i in waiting and first[i] == number]
        grads.add(ready, way.reduce([waiting.pop(i) for i in ready], way.leaves(ready), aux))
    return grads


class _Sums(dict):
    """Cotangents or gradients by what they belong to."""

    def add(self, keys: Iterable[Hashable], arrays: Iterable[jax.Array]):
        for key, array in zip(keys, arrays, strict=True):
            if not isinstance(key, Literal):
                self[key] = self[key] + array if key in self else array

    def of(self, variables: Iterable[Any]) -> Arrays:
        """One for each variable, zeros where there is none."""
        return [self[v] if v in self else jnp.zeros(v.aval.shape, v.aval.dtype) for v in variables]


class _Pass:
    """One way through the units. What each gathers waits until the unit before the last is done.

    So the parameters of two units are whole at a time: those in use and those on their way.
    """

    def __init__(self, held: Arrays, leaves: Leaves, traffic: Traffic, start: jax.Array):
        self._held, self._leaves, self._traffic, self._done = held, leaves, traffic, [start, start]

    @property
    def prefetches(self) -> bool:
        """Whether parameters travel at all."""
        return self._traffic.gather is not None

    def held(self, numbers: Iterable[int]) -> Arrays:
        return [self._held[i] for i in numbers]

    def leaves(self, numbers: Iterable[int]) -> list[Leaf]:
        return [self._leaves[i] for i in numbers]

    def whole(self, held: Arrays, leaves: Leaves) -> Arrays:
        """Whole parameters for the next unit."""
        return self.gather(_once_known(self._done[-2], held), leaves) if self.prefetches else held

    def gather(self, held: Arrays, leaves: Leaves) -> Arrays:
        return self._traffic.gather(held, leaves) if self._traffic.gather and held else held

    def reduce(self, grads: Arrays, leaves: Leaves, aux: Any) -> Arrays:
        return self._traffic.reduce(grads, leaves, aux) if grads else grads

    def done(self, made: Arrays):
        """Note some number that a unit made."""
        known = [a for a in made if is_floating(a) and a.size]
        self._done.append(known[0][(0,) * known[0].ndim] if known else self._done[-1])


def _once_known(number: jax.Array, arrays: Arrays) -> Arrays:
    """``arrays``, but not before ``number`` exists: a dependency that no compiler can see through.

    Without it a second gather is merged with the first, and everything stays whole in between. An optimization barrier
    is not enough: the CPU compiler drops it before it looks for equal instructions.
    """
    never = jnp.asarray(number, jnp.float32) > jnp.inf  # true of no number, nor of NaN
    return [jnp.where(never, jnp.zeros_like(a), a) for a in arrays]


# ---- units ----


def _forward(unit: Unit, values: dict, way: _Pass) -> Callable:
    """Run a unit; returns ``(views, cotangents, aux, way) -> (of views, of active, reduced gradients of stacks)``."""
    views = unit.look(way.whole(way.held(unit.params), way.leaves(unit.params)))
    active, passive = read(values, unit.active), read(values, unit.passive)
    if unit.loop is None:
        results, others, back = _plain(unit, views, active, passive)
    else:
        results, others, back = _loop(unit, unit.loop, views, active, passive, way)
    values.update(zip((*unit.results, *unit.others), (*results, *others), strict=True))
    way.done([*results, *others])
    return back


def _backward(unit: Unit, back: Callable, cotangents: _Sums, waiting: _Sums, grads: _Sums, aux: Any, way: _Pass):
    """Add the cotangents of a unit's inputs, whole gradients that wait to be reduced, and reduced ones of stacks."""
    views, look_back = jax.vjp(unit.look, way.whole(way.held(unit.params), way.leaves(unit.params)))
    of_views, of_active, of_stacks = back(views, cotangents.of(unit.results), aux, way)
    (of_whole,) = look_back(of_views)
    way.done([*of_active, *of_whole])
    cotangents.add(unit.active, of_active)
    waiting.add(unit.params, of_whole)
    grads.add(of_stacks.keys(), of_stacks.values())


def _plain(unit: Unit, views: Arrays, active: Arrays, passive: Arrays):
    """``(results, others, back)`` of a unit that is no loop."""
    results, others, kept, rebuild = _linearize(unit, views, active, passive)

    def back(views, cotangents, aux, way):
        return *rebuild(kept, views)(cotangents), {}

    return results, others, back


def _linearize(unit: Unit, views: Arrays, active: Arrays, passive: Arrays, known: Sequence[Any] = ()):
    """``(results, others, kept, rebuild)``: ``rebuild(kept, views, known)`` is the function of the cotangents.

    What it holds of views and known arrays is not kept: while tracing, such a residual is that very object.
    """

    def call(views, active):
        outputs = unit.call(*views, *active, *passive)
        return outputs[: len(unit.results)], outputs[len(unit.results) :]

    results, backward, others = jax.vjp(call, views, active, has_aux=True)
    residuals, treedef = jax.tree.flatten(backward)
    index = {id(a): i for i, a in enumerate((*views, *known))}
    places = [index.get(id(a)) for a in residuals]

    def rebuild(kept, views, known=()):
        kept, again = iter(kept), (*views, *known)
        return treedef.unflatten([next(kept) if place is None else again[place] for place in places])

    return results, others, [a for a, place in zip(residuals, places, strict=True) if place is None], rebuild


# ---- scans over stacked layers ----


class _Layers:
    """The stacked parameters of a loop, one layer whole after the other, each gathered a turn early."""

    def __init__(self, loop: Loop, way: _Pass, reverse: bool):
        numbers = loop.numbers
        self._way, self._last, self._step = way, loop.scan.length - 1, -1 if reverse else 1
        self._stacks, self.leaves = way.held(numbers), [leaf.layer() for leaf in way.leaves(numbers)]

    def slices(self, number: Any) -> Arrays:
        return [lax.dynamic_index_in_dim(stack, number, 0, keepdims=False) for stack in self._stacks]

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Of a whole layer."""
        pairs = zip(self.leaves, self._stacks, strict=True)
        return [jax.ShapeDtypeStruct(leaf.shape, stack.dtype) for leaf, stack in pairs]

    def first(self) -> Arrays:
        """What is on its way when the loop begins."""
        number = 0 if self._step > 0 else self._last
        return self._way.whole(self.slices(number), self.leaves) if self._way.prefetches else []

    def take(self, coming: Arrays, number: jax.Array) -> tuple[Arrays, Arrays]:
        """The layer of this turn, and the next one, on its way. The last turn gathers its own once more."""
        if not self._way.prefetches:
            return self.slices(number), []
        return coming, self._way.gather(self.slices(self.neighbour(number, self._step)), self.leaves)

    def before(self, number: jax.Array) -> jax.Array:
        """The turn before this one; of the first, itself."""
        return self.neighbour(number, -self._step)

    def neighbour(self, number: jax.Array, step: int) -> jax.Array:
        return jnp.clip(number + step, 0, self._last)


def _loop(unit: Unit, loop: Loop, views: Arrays, active: Arrays, passive: Arrays, way: _Pass):
    """``(results, others, back)`` of a scan over stacked parameters."""
    scan, body, rebuilds = loop.scan, loop.body, []
    layers = _Layers(loop, way, scan.reverse)
    inputs = unit.given(views, active, passive)
    consts, carried, scanned = loop.parts(inputs)

    def turn(state, each):
        (carried, coming), (number, scanned) = state, each
        whole, coming = layers.take(coming, number)
        here = loop.enter(consts, carried, scanned)
        looked = body.look(whole)
        own = looked, read(here, body.active), read(here, body.passive)
        results, others, kept, rebuild = _linearize(body, *own, loop.restored(consts, scanned))
        rebuilds.append(rebuild)
        here.update(zip((*body.viewed, *body.results, *body.others), (*looked, *results, *others), strict=True))
        outputs = read(here, loop.program.outputs)
        return (outputs[: scan.carried], coming), (outputs[scan.carried :], kept)

    each = jnp.arange(scan.length), scanned
    (carried, _), (collected, kept) = lax.scan(turn, (carried, layers.first()), each, reverse=scan.reverse)
    outputs = dict(zip(loop.eqn.outvars, (*carried, *collected), strict=True))

    def back(views, cotangents, aux, way):
        return _loop_back(unit, loop, unit.given(views, active, passive), kept, rebuilds[-1], cotangents, aux, way)

    return read(outputs, unit.results), read(outputs, unit.others), back


def _loop_back(unit: Unit, loop: Loop, inputs: dict, kept: Arrays, rebuild: Callable, cotangents: Arrays, aux, way):
    """The loop in the other direction; a layer's gradient is reduced in the turn after its own."""
    scan, body, flow = loop.scan, loop.body, loop.flow(unit)
    consts, _, scanned = loop.parts(inputs)
    layers = _Layers(loop, way, not scan.reverse)
    of_outputs = _Sums(zip(unit.results, cotangents, strict=True))

    def reduce_into(sums, number, waiting):
        reduced = way.reduce(waiting, layers.leaves, aux)
        return [lax.dynamic_update_index_in_dim(s, g, number, 0) for s, g in zip(sums, reduced, strict=True)]

    def turn(state, each):
        (of_carried, of_consts, coming, waiting, sums), (number, kept, scanned, of_collected) = state, each
        whole, coming = layers.take(coming, number)
        sums = reduce_into(sums, layers.before(number), waiting)
        looked, look_back = jax.vjp(body.look, whole)
        here = _Sums()
        here.add(flow.carried_out, of_carried)
        here.add(flow.collected_out, of_collected)
        of_views, of_active = rebuild(kept, looked, loop.restored(consts, scanned))(here.of(body.results))
        here = _Sums({var: a for var, a in here.items() if var not in body.results})  # what passes through unchanged
        here.add(body.active, of_active)
        (waiting,) = look_back(of_views)
        of_consts = [a + b for a, b in zip(of_consts, here.of(flow.consts_in), strict=True)]
        return (here.of(flow.carried_in), of_consts, coming, waiting, sums), here.of(flow.scanned_in)

    shapes = layers.shapes()
    reduced = jax.eval_shape(lambda grads: way.reduce(grads, layers.leaves, aux), shapes)
    zeros = [jnp.zeros(a.shape, a.dtype) for a in shapes]
    sums = [jnp.zeros((scan.length, *a.shape), a.dtype) for a in reduced]
    of_consts = _Sums().of(flow.consts_in)
    state = of_outputs.of(flow.carried_results), of_consts, layers.first(), zeros, sums
    each = jnp.arange(scan.length), kept, scanned, of_outputs.of(flow.collected_results)
    state, of_scanned = lax.scan(turn, state, each, reverse=not scan.reverse)
    of_carried, of_consts, _, waiting, sums = state
    sums = reduce_into(sums, 0 if not scan.reverse else scan.length - 1, waiting)
    of_inputs = _Sums()
    of_inputs.add(flow.consts, of_consts)
    of_inputs.add(flow.carried, of_carried)
    of_inputs.add(flow.scanned, of_scanned)
    of_stacks = _Sums()
    of_stacks.add(loop.numbers, sums)  # the scan may take one stack twice
    return of_inputs.of(unit.viewed), of_inputs.of(unit.active), of_stacks
