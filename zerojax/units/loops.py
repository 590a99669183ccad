"""Scans over stacked layers: each layer is gathered, and its gradient reduced, inside the loops.

The last layer stands outside of both loops: in the forward one its turn would gather a layer that is not there, in the
backward one it would reduce a gradient that is not there yet. Backward begins with it while it is still whole.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.units.cutting import Flow, Loop, Unit, read
from zerojax.units.passes import Arrays, Pass, Reduced, Sums, first_of, linearize, look_at, once_known


class _Layers:
    """The stacked parameters of a loop: one layer is whole, and the next one on its way."""

    def __init__(self, loop: Loop, way: Pass):
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


def run_loop(unit: Unit, loop: Loop, views: Arrays, active: Arrays, still: Arrays, passive: Arrays, way: Pass):
    """``(results, others, back)`` of a scan over stacked parameters."""
    scan, body, layers, rebuilds = loop.scan, loop.body, _Layers(loop, way), []
    consts, carried, scanned = loop.parts(unit.given(views, active, still, passive))

    def turn(carry, number, more=True):
        carried, collected, coming = carry
        whole = layers.whole(coming, number)
        coming = layers.coming(number + 1) if more else []
        own = _layer_of(scanned, layers.number(number))
        here = loop.enter(consts, carried, own)
        looked, unmoved = body.look(whole)
        inputs = looked, read(here, body.active), [*unmoved, *read(here, body.passive)]
        known = [*unmoved, *loop.restored(consts, own)]
        results, others, kept, rebuild = linearize(body, *inputs, way.remat, known)
        rebuilds.append(rebuild)
        made = (*looked, *unmoved, *results, *others)
        here.update(zip((*body.viewed, *body.still, *body.results, *body.others), made, strict=True))
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

    def back(views, still, cotangents, way):
        given, of_results = unit.given(views, active, still, passive), Sums(zip(unit.results, cotangents, strict=True))
        of_inputs, of_stacks = _LoopBack(loop, loop.flow(unit), way).run(given, of_results, tape)
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

    def __init__(self, loop: Loop, flow: Flow, way: Pass):
        self._loop, self._flow, self._way = loop, flow, way
        self._layers, self._length = _Layers(loop, way), loop.scan.length
        self._trained = [leaf.layer() for leaf in way.leaves(loop.trained)]

    def run(self, given: dict, cotangents: Sums, tape: _Tape) -> tuple[Sums, Sums]:
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
        of_inputs, of_stacks = Sums(), Reduced()
        of_inputs.add(flow.consts, carry.of_consts)
        of_inputs.add(flow.carried, carry.of_carried)
        of_inputs.add(flow.scanned, carry.of_scanned)
        sums = self._reduced(carry.sums, carry.waiting, 0)
        of_stacks.add(self._loop.trained, sums)  # the scan may take one stack twice
        return of_inputs, of_stacks

    def _start(self, cotangents: Sums, tape: _Tape) -> _Carry:
        of_carried, of_consts = cotangents.of(self._flow.carried_results), Sums().of(self._flow.consts_in)
        of_scanned = _empty((var.aval for var in self._flow.scanned_in), self._length)
        sums = _empty(self._way.reduced(self._trained), self._length)
        return _Carry(of_carried, of_consts, of_scanned, sums, tape.whole_last, None)

    def _turn(self, carry: _Carry, number: Any, back: Callable, consts, scanned, of_collected) -> _Carry:
        body, flow, layers = self._loop.body, self._flow, self._layers
        whole = layers.whole(carry.coming, number)
        coming = layers.coming(jnp.maximum(number - 1, 0))  # the first layer is gathered once more, in its own turn
        sums = self._reduced(carry.sums, carry.waiting, number + 1)
        looked, unmoved, look_back = look_at(body, whole)
        here = Sums()
        here.add(flow.carried_out, carry.of_carried)
        here.add(flow.collected_out, of_collected)
        known = [*unmoved, *self._loop.restored(consts, scanned)]
        of_views, of_active = back(looked, known)(here.of(body.results))
        here = Sums({var: a for var, a in here.items() if var not in body.results})  # what passes through unchanged
        here.add(body.active, of_active)
        waiting = look_back(of_views)
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
        (place,) = once_known(first_of(waiting), [jnp.asarray(self._layers.number(number))])
        return _put(sums, place, self._way.reduce(waiting, self._trained))
