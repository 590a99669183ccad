"""Stages 2 and 3: the gradient of a loss in gather units, the parameters that are gathered together.

The loss is traced and its equations are cut into units of consecutive ones (`zerojax.cutting`). Forward, a unit gathers
its parameters, runs, and keeps for backward what JAX would keep, except the parameters; backward, in reverse order, it
gathers them again when its cotangent exists, and reduces their gradient at once. A scan over stacked layers does the
same for each layer, inside its loops. The next parameters travel while the present ones are used.
"""

import contextlib
import contextvars
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from zerojax import jaxprs
from zerojax.cutting import Flow, Loop, Unit, cut, read
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
      dtype: of whole parameters.
      remat: as in `zerojax.ZeroConfig`.
    """

    gather: Callable[[Arrays, Leaves], Arrays] | None
    reduce: Callable[[Arrays, Leaves, Any], Arrays]
    dtype: Any
    remat: str | Callable[..., Any] | None = None

    def shapes(self, leaves: Leaves) -> list[jax.ShapeDtypeStruct]:
        """Of whole parameters."""
        return [jax.ShapeDtypeStruct(leaf.shape, self.dtype) for leaf in leaves]


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
    shapes = traffic.shapes(leaves)

    def run(turn, *args):
        program, treedef = jaxprs.trace(objective, shapes, *args)
        values = dict(zip(program.inputs[len(held) :], jax.tree.leaves(args), strict=True)) | program.constants
        way = _Pass(held, leaves, traffic, turn)
        cuts = cut(program, leaves)
        if (found := _FOUND.get()) is not None:
            found.append((cuts, leaves, traffic))
        tape = _all_forward(cuts, values, way)
        total, aux = treedef.unflatten(read(values, program.outputs))
        cotangents = _Sums({program.outputs[0]: jnp.ones_like(total)})
        grads = _all_back(tape, cotangents, aux, _Pass(held, leaves, traffic, total))
        return (total, aux), [grads.get(i) for i in range(len(held))]

    return run


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


def _all_forward(units: list[Unit], values: dict, way: "_Pass") -> list[_Done]:
    """Run the units. Backward begins with the last one, so its parameters stay whole, unless it is the only one."""
    tape = []
    for number, unit in enumerate(units):
        whole = way.whole(way.held(unit.params), way.leaves(unit.params))
        back = _forward(unit, whole, values, way)
        tape.append(_Done(unit, back, whole if 0 < number == len(units) - 1 else None))
    return tape


def _all_back(tape: list[_Done], cotangents: "_Sums", aux: Any, way: "_Pass") -> "_Sums":
    """The reduced gradients. That of a parameter of several units waits for the first of them, and travels once."""
    first = {i: number for number, done in reversed(list(enumerate(tape))) for i in done.unit.params}
    grads, waiting = _Reduced(), _Sums()
    for number, done in reversed(list(enumerate(tape))):
        unit = done.unit
        if any(var in cotangents for var in unit.results):  # else the loss does not depend on it
            _backward(done, cotangents, waiting, grads, aux, way)
        ready = [i for i in unit.params if i in waiting and first[i] == number]
        grads.add(ready, way.reduce([waiting.pop(i) for i in ready], way.leaves(ready), aux))
        cotangents.wait_for([waiting[i] for i in unit.params if i in waiting], unit.active)
    return grads


class _Sums(dict):
    """Cotangents or gradients by what they belong to."""

    def add(self, keys: Iterable[Hashable], arrays: Iterable[jax.Array]):
        for key, array in zip(keys, arrays, strict=True):
            if not isinstance(key, Literal):
                self[key] = self._sum(self[key], array) if key in self else array

    def _sum(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return a + b

    def wait_for(self, made: Iterable[jax.Array], keys: Iterable[Hashable]):
        """Let no one use these before some arrays are made, and what they are made of is free."""
        for array in made:
            for key in keys:
                if key in self:
                    (self[key],) = _once_known(_first_of([array]), [self[key]])

    def of(self, variables: Iterable[Any]) -> Arrays:
        """One for each variable, zeros where there is none."""
        return [self[v] if v in self else jnp.zeros(v.aval.shape, v.aval.dtype) for v in variables]


class _Reduced(_Sums):
    """Reduced gradients: kept in the dtype in which they travelled, but never summed in less than float32."""

    def _sum(self, a: jax.Array, b: jax.Array) -> jax.Array:
        dtype = jnp.promote_types(a.dtype, jnp.float32)
        return a.astype(dtype) + b.astype(dtype)


class _Pass:
    """One way through the units. What each gathers waits until the unit before the last is done.

    So the parameters of two units are whole at a time: those in use and those on their way.
    """

    def __init__(self, held: Arrays, leaves: Leaves, traffic: Traffic, start: jax.Array):
        self._held, self._leaves, self._traffic, self._done = held, leaves, traffic, [start, start]

    @property
    def remat(self) -> Any:
        return self._traffic.remat

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

    def reduced(self, leaves: Leaves, aux: Any) -> list[jax.ShapeDtypeStruct]:
        """What `reduce` would return."""
        return jax.eval_shape(lambda grads: self.reduce(grads, leaves, aux), self._traffic.shapes(leaves))

    def done(self, made: Arrays):
        """Note some number that a unit made."""
        self._done.append(_first_of(made, self._done[-1]))


def _first_of(arrays: Arrays, otherwise: Any = 0) -> Any:
    """Some number of these arrays."""
    known = [a for a in arrays if is_floating(a) and a.size]
    return known[0][(0,) * known[0].ndim] if known else otherwise


def _once_known(number: Any, arrays: Arrays) -> Arrays:
    """``arrays``, but not before ``number`` exists: a dependency that no compiler can see through.

    Without it a second gather is merged with the first, and everything stays whole in between. An optimization barrier
    is not enough: the CPU compiler drops it before it looks for equal instructions.
    """
    never = jnp.asarray(number, jnp.float32) > jnp.inf  # true of no number, nor of NaN
    return [jnp.where(never, jnp.zeros_like(a), a) for a in arrays]


# ---- units ----


def _forward(unit: Unit, whole: Arrays, values: dict, way: _Pass) -> Callable:
    """Run a unit; returns ``(views, cotangents, aux, way) -> (of views, of active, reduced gradients of stacks)``."""
    views = unit.look(whole)
    active, passive = read(values, unit.active), read(values, unit.passive)
    if unit.loop is None:
        results, others, back = _plain(unit, views, active, passive, way)
    else:
        results, others, back = _loop(unit, unit.loop, views, active, passive, way)
    values.update(zip((*unit.results, *unit.others), (*results, *others), strict=True))
    way.done([*results, *others])
    return back


def _backward(done: _Done, cotangents: _Sums, waiting: _Sums, grads: _Sums, aux: Any, way: _Pass):
    """Add the cotangents of a unit's inputs, whole gradients that wait to be reduced, and reduced ones of stacks."""
    unit, whole = done.unit, done.whole
    if whole is None:
        whole = way.whole(way.held(unit.params), way.leaves(unit.params))
    views, look_back = jax.vjp(unit.look, whole)
    of_views, of_active, of_stacks = done.back(views, cotangents.of(unit.results), aux, way)
    (of_whole,) = look_back(of_views)
    way.done([*of_active, *of_whole])
    cotangents.add(unit.active, of_active)
    waiting.add(unit.params, of_whole)
    grads.add(of_stacks.keys(), of_stacks.values())


def _plain(unit: Unit, views: Arrays, active: Arrays, passive: Arrays, way: _Pass):
    """``(results, others, back)`` of a unit that is no loop."""
    results, others, kept, rebuild = _linearize(unit, views, active, passive, way.remat)

    def back(views, cotangents, aux, way):
        return *rebuild(kept, views)(cotangents), {}

    return results, others, back


def _linearize(unit: Unit, views: Arrays, active: Arrays, passive: Arrays, remat: Any, known: Sequence[Any] = ()):
    """``(results, others, kept, rebuild)``: ``rebuild(kept, views, known)`` is the function of the cotangents.

    What it holds of views and known arrays is not kept: while tracing, such a residual is that very object.
    """

    def call(views, active):
        outputs = unit.call(*views, *active, *passive)
        return outputs[: len(unit.results)], outputs[len(unit.results) :]

    if remat is not None:
        call = jax.checkpoint(call, policy=None if remat == "unit" else remat)
    results, backward, others = jax.vjp(call, views, active, has_aux=True)
    residuals, treedef = jax.tree.flatten(backward)
    index = {id(a): i for i, a in enumerate((*views, *known))}
    places = [index.get(id(a)) for a in residuals]

    def rebuild(kept, views, known=()):
        kept, again = iter(kept), (*views, *known)
        return treedef.unflatten([next(kept) if place is None else again[place] for place in places])

    return results, others, [a for a, place in zip(residuals, places, strict=True) if place is None], rebuild


# ---- scans over stacked layers ----
#
# The last layer stands outside of both loops: in the forward one its turn would gather a layer that is not there, in
# the backward one it would reduce a gradient that is not there yet. Backward begins with it while it is still whole.


class _Layers:
    """The stacked parameters of a loop: one layer is whole, and the next one on its way."""

    def __init__(self, loop: Loop, way: _Pass):
        self._way, self._last, self._reverse = way, loop.scan.length - 1, loop.scan.reverse
        self._stacks = way.held(loop.numbers)
        self.leaves = [leaf.layer() for leaf in way.leaves(loop.numbers)]

    def number(self, turn: Any) -> Any:
        """Of the layer of a turn."""
        return self._last - turn if self._reverse else turn

    def first(self) -> Arrays:
        """The layer of the first turn, on its way when the loop begins."""
        return self._way.whole(self._held(0), self.leaves) if self._way.prefetches else []

    def coming(self, turn: Any) -> Arrays:
        """The layer of a turn, on its way."""
        return self._way.gather(self._held(turn), self.leaves) if self._way.prefetches else []

    def whole(self, coming: Arrays, turn: Any) -> Arrays:
        """The layer of a turn, which was on its way, if parameters travel at all."""
        return coming if self._way.prefetches else self._held(turn)

    def _held(self, turn: Any) -> Arrays:
        return _layer_of(self._stacks, self.number(turn))


def _layer_of(stacks: list, number: Any) -> list:
    """What stacks hold for one layer; ``None`` stays."""
    return jax.tree.map(lambda stack: lax.dynamic_index_in_dim(stack, number, 0, keepdims=False), stacks)


def _put(stacks: Arrays, number: Any, values: Arrays) -> Arrays:
    pairs = zip(stacks, values, strict=True)
    return [lax.dynamic_update_index_in_dim(stack, value, number, 0) for stack, value in pairs]


def _empty(shapes: Iterable[Any], *length: int) -> Arrays:
    """Arrays to be filled, of these shapes and dtypes; with a length, stacks of such arrays."""
    return [lax.full((*length, *a.shape), 0, a.dtype) for a in shapes]


def _loop(unit: Unit, loop: Loop, views: Arrays, active: Arrays, passive: Arrays, way: _Pass):
    """``(results, others, back)`` of a scan over stacked parameters."""
    scan, body, layers, rebuilds = loop.scan, loop.body, _Layers(loop, way), []
    consts, carried, scanned = loop.parts(unit.given(views, active, passive))

    def turn(carry, number, more=True):
        carried, collected, coming = carry
        whole = layers.whole(coming, number)
        coming = layers.coming(number + 1) if more else []
        own = _layer_of(scanned, layers.number(number))
        here = loop.enter(consts, carried, own)
        looked = body.look(whole)
        inputs = looked, read(here, body.active), read(here, body.passive)
        results, others, kept, rebuild = _linearize(body, *inputs, way.remat, loop.restored(consts, own))
        rebuilds.append(rebuild)
        here.update(zip((*body.viewed, *body.results, *body.others), (*looked, *results, *others), strict=True))
        outputs = read(here, loop.program.outputs)
        collected = _put(collected, layers.number(number), outputs[scan.carried :])
        return (outputs[: scan.carried], collected, coming), kept

    last, kept = scan.length - 1, []
    collected = _empty(var.aval for var in loop.eqn.outvars[scan.carried :])
    carry = carried, collected, layers.first()
    if last:
        carry, kept = lax.scan(turn, carry, jnp.arange(last))
    *_, whole_last = carry
    (carried, collected, _), kept_last = turn(carry, last, more=False)
    outputs = dict(zip(loop.eqn.outvars, (*carried, *collected), strict=True))
    tape = _Tape(kept, rebuilds[0], kept_last, rebuilds[-1], whole_last)

    def back(views, cotangents, aux, way):
        given, of_results = unit.given(views, active, passive), _Sums(zip(unit.results, cotangents, strict=True))
        of_inputs, of_stacks = _LoopBack(loop, loop.flow(unit), way, aux).run(given, of_results, tape)
        return of_inputs.of(unit.viewed), of_inputs.of(unit.active), of_stacks

    return read(outputs, unit.results), read(outputs, unit.others), back


class _Tape(NamedTuple):
    """What a loop keeps for backward."""

    kept: Arrays  # residuals, stacked over all turns but the last
    rebuild: Callable
    kept_last: Arrays
    rebuild_last: Callable
    whole_last: Arrays  # the last layer


class _Carry(NamedTuple):
    """What passes from turn to turn, backward."""

    of_carried: Arrays
    of_consts: Arrays
    of_scanned: Arrays  # stacks, filled turn by turn
    sums: Arrays  # reduced gradients, likewise
    coming: Arrays
    waiting: Arrays | None  # the gradient of the layer before, still to be reduced; the first turn has none


class _LoopBack:
    """A loop in the other direction; a layer's gradient is reduced in the turn after its own."""

    def __init__(self, loop: Loop, flow: Flow, way: _Pass, aux: Any):
        self._loop, self._flow, self._way, self._aux = loop, flow, way, aux
        self._layers, self._length = _Layers(loop, way), loop.scan.length

    def run(self, given: dict, cotangents: _Sums, tape: _Tape) -> tuple[_Sums, _Sums]:
        """Cotangents of the loop's inputs, and reduced gradients by the number of the parameter."""
        flow, last = self._flow, self._length - 1
        consts, _, scanned = self._loop.parts(given)
        of_collected = cotangents.of(flow.collected_results)

        def turn(carry, number, back):
            layer = self._layers.number(number)
            return self._turn(carry, number, back, consts, _layer_of(scanned, layer), _layer_of(of_collected, layer))

        def turn_in_loop(carry, number):
            kept = _layer_of(tape.kept, number)
            return turn(carry, number, lambda *args: tape.rebuild(kept, *args)), None

        carry = turn(self._start(cotangents, tape), last, lambda *args: tape.rebuild_last(tape.kept_last, *args))
        if last:
            carry, _ = lax.scan(turn_in_loop, carry, jnp.arange(last), reverse=True)
        of_inputs, of_stacks = _Sums(), _Reduced()
        of_inputs.add(flow.consts, carry.of_consts)
        of_inputs.add(flow.carried, carry.of_carried)
        of_inputs.add(flow.scanned, carry.of_scanned)
        sums = self._reduced(carry.sums, carry.waiting, 0)
        of_stacks.add(self._loop.numbers, sums)  # the scan may take one stack twice
        return of_inputs, of_stacks

    def _start(self, cotangents: _Sums, tape: _Tape) -> _Carry:
        of_carried, of_consts = cotangents.of(self._flow.carried_results), _Sums().of(self._flow.consts_in)
        of_scanned = _empty((var.aval for var in self._flow.scanned_in), self._length)
        sums = _empty(self._way.reduced(self._layers.leaves, self._aux), self._length)
        return _Carry(of_carried, of_consts, of_scanned, sums, tape.whole_last, None)

    def _turn(self, carry: _Carry, number: Any, back: Callable, consts, scanned, of_collected) -> _Carry:
        body, flow, layers = self._loop.body, self._flow, self._layers
        whole = layers.whole(carry.coming, number)
        coming = layers.coming(jnp.maximum(number - 1, 0))  # the first layer is gathered once more, in its own turn
        sums = self._reduced(carry.sums, carry.waiting, number + 1)
        looked, look_back = jax.vjp(body.look, whole)
        here = _Sums()
        here.add(flow.carried_out, carry.of_carried)
        here.add(flow.collected_out, of_collected)
        of_views, of_active = back(looked, self._loop.restored(consts, scanned))(here.of(body.results))
        here = _Sums({var: a for var, a in here.items() if var not in body.results})  # what passes through unchanged
        here.add(body.active, of_active)
        (waiting,) = look_back(of_views)
        of_consts = [a + b for a, b in zip(carry.of_consts, here.of(flow.consts_in), strict=True)]
        of_scanned = _put(carry.of_scanned, layers.number(number), here.of(flow.scanned_in))
        return _Carry(here.of(flow.carried_in), of_consts, of_scanned, sums, coming, waiting)

    def _reduced(self, sums: Arrays, waiting: Arrays | None, number: Any) -> Arrays:
        """The sums with the waiting gradient, if there is one, that of turn ``number``.

        XLA's GPU compiler copies in the background to a place that it foresees; it then hides nothing else behind the
        layer's work, and the reduction stands alone. So the place must not be foreseen.
        """
        if waiting is None:
            return sums
        (place,) = _once_known(_first_of(waiting), [jnp.asarray(self._layers.number(number))])
        return _put(sums, place, self._way.reduce(waiting, self._layers.leaves, self._aux))
