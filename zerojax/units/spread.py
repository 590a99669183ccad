"""A loss of the whole batch, computed by devices that have some of its rows each.

The loss is traced with all rows and with those of one device, and both programs are walked together. What each row
makes for itself every device computes for its own rows, by the second program; what is the same for all rows, by the
first. A sum over rows is added up over the devices, and what compares rows is computed from all of them, gathered.
Numbers in the equations are the first program's, so that all is what one device would compute.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from zerojax import collectives
from zerojax.contracts import Loss, Tree
from zerojax.units import jaxprs
from zerojax.units.rowrules import ANY, CONSTANT, FREE, NUMBER, PLACED, ROWS, SUM, ZERO, Bad, Eqn, MixedError, State
from zerojax.units.rows import Walk


class UnfitError(Exception):
    """Raised for a loss that is better computed in another way; its text says why."""


@dataclass(frozen=True)
class Value:
    """A variable as a device holds it.

    Attributes:
      array: of the device's own rows, of all rows, or this device's part of a sum.
      state: what it is, as in `zerojax.units.rows`.
      own: whether it is of the device's own rows.
      gathered: whether rows of other devices are in it.
      weights: whether matrices of parameters are in it, and no rows.
    """

    array: Any
    state: State
    own: bool = False
    gathered: bool = False
    weights: bool = False


def spread(call: Callable, axes: Mapping[str, int]) -> Callable:
    """A function that returns on each device its part of what ``call`` returns for all rows.

    Args:
      call: ``(params, batch, *others) -> scalar, zerojax.Loss, or a mapping of means over the rows``; or a tuple of one
        of them and of other arrays.
      axes: the shard axes, over which the rows are divided.

    Returns:
      ``f(params, own rows, *others)``, to be called under ``jax.shard_map``. The mean over the devices of the loss that
      it returns is the loss, the sum that of a `Loss`'s total and weight; all else is the same on all devices, but for
      arrays beside the loss that have rows in dim 0: these have the device's own.
    """
    here = _Here(axes)

    def run(params, batch, *others):
        own, out_own = _traced(call, params, batch, *others)
        every, out = _traced(call, params, here.of_all(batch), *others)
        if jax.tree.structure(out) != jax.tree.structure(out_own):
            raise UnfitError("what it returns depends on the number of rows")
        given = [Value(a, CONSTANT, weights=jnp.ndim(a) > 1) for a in jax.tree.leaves(params)]
        given += [Value(a, State(ROWS, 0, (1, 1)), own=True) for a in jax.tree.leaves(batch)]
        given += [Value(a, CONSTANT) for a in jax.tree.leaves(others)]
        made = _Spread(here).run(own, every, given)
        ends = map(_End, made, jaxprs.opened(own)[0].outvars, jaxprs.opened(every)[0].outvars)
        return _parts(jax.tree.structure(out).unflatten(ends), here)

    return run


def _traced(call: Callable, *args: Any) -> tuple[ClosedJaxpr, Any]:
    try:
        return jax.make_jaxpr(call, return_shape=True)(*args)
    except Exception as error:  # whatever the loss raises
        raise UnfitError(f"it cannot be traced: {error}") from error


@dataclass(frozen=True)
class _End:
    """A value that the loss returns, with its variables in both programs."""

    value: Value
    one: Any
    two: Any


def _parts(out: Any, here: "_Here") -> Any:
    def whole(end):
        return here.whole(end.value, end.one, end.two).array

    def part(end, of_sum, of_whole):
        summed = end.value.state.kind == SUM
        array = end.value.array if summed else whole(end)
        dtype = jnp.promote_types(array.dtype, jnp.bfloat16)  # a weight may be a number of rows
        return array.astype(dtype) * jnp.asarray(of_sum if summed else of_whole, dtype)

    def of_device(end):
        by_rows = _growing(end.one, end.two) == [0] and end.one.aval.shape[0] == here.rows
        if not by_rows or (end.value.own and end.value.state.layout in (None, (1, 1))):
            return end.value.array if by_rows else whole(end)
        every = here.whole(end.value, end.one, end.two)
        return here.own(replace(every, state=State(layout=PLACED)), end.one, end.two, (1, 1)).array

    if isinstance(out, tuple):
        return _parts(out[0], here), jax.tree.map(of_device, out[1])
    if isinstance(out, _End):
        return part(out, here.devices, 1)
    if not isinstance(out, Loss):
        return jax.tree.map(whole, out)
    total, weight = (part(end, 1, 1 / here.devices) for end in (out.total, out.weight))
    return Loss(total, weight, jax.tree.map(whole, out.metrics), jax.tree.map(whole, out.model_state))


class _Here:
    """This device's place among the rows: from its own rows to all, and back."""

    def __init__(self, axes: Mapping[str, int]):
        self.rows, self.axes, self.devices = 0, axes, math.prod(axes.values())

    def of_all(self, batch: Tree) -> Tree:
        """The shapes of a batch with all rows, given this device's."""
        self.rows = len(jax.tree.leaves(batch)[0])
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct((len(a) * self.devices, *a.shape[1:]), a.dtype), batch)

    def number(self) -> jax.Array:
        return lax.axis_index(tuple(self.axes))

    def whole(self, value: Value, one: Any, two: Any) -> Value:
        """A value of all rows, or a whole sum."""
        if value.state.kind == SUM:
            return Value(collectives.all_reduce(value.array, self.axes), State(), gathered=value.gathered)
        if not value.own:
            return value
        if not _growing(one, two):
            return replace(value, own=False)
        dim = self._dim(one, two)
        if value.state.kind == FREE:  # alike for every row
            first = lax.slice_in_dim(value.array, 0, 1, axis=dim)
            return Value(jnp.broadcast_to(first, two.aval.shape), value.state)
        if jnp.issubdtype(value.array.dtype, jax.dtypes.extended):
            raise UnfitError("random keys of all rows are wanted")
        split, at = self._split(value, one.aval.shape, dim)
        gathered = collectives.all_gather(value.array.reshape(split), at, self.axes).reshape(two.aval.shape)
        return Value(gathered, State(layout=PLACED), gathered=True)

    def own(self, value: Value, one: Any, two: Any, layout: Any = None) -> Value:
        """This device's rows of a value of all rows."""
        if value.own or not _growing(one, two):
            return value
        dim, kind = self._dim(one, two), FREE if value.state.layout is None else ROWS
        if value.state.layout is None:
            return Value(lax.slice_in_dim(value.array, 0, one.aval.shape[dim], axis=dim), value.state, own=True)
        state = State(kind, 0, layout)
        split, at = self._split(replace(value, state=state), one.aval.shape, dim)
        whole = value.array.reshape(*split[:at], split[at] * self.devices, *split[at + 1 :])
        part = lax.dynamic_slice_in_dim(whole, self.number() * self.rows, self.rows, axis=at)
        return Value(part.reshape(one.aval.shape), state, own=True, gathered=value.gathered)

    def _dim(self, one: Any, two: Any) -> int:
        dims = _growing(one, two)
        if len(dims) != 1:
            raise UnfitError("several dims lie along the rows")
        return dims[0]

    def _split(self, value: Value, shape: tuple[int, ...], dim: int) -> tuple[tuple[int, ...], int]:
        """The shape with the rows in a dim of their own, and which that is."""
        layout = value.state.layout
        outer, inner = layout if isinstance(layout, tuple) else (1, shape[dim] // self.rows)
        return (*shape[:dim], outer, self.rows, inner, *shape[dim + 1 :]), dim + 1


class _Spread:
    """Runs both programs at once."""

    def __init__(self, here: _Here):
        self.here, self.walk = here, Walk(here.rows, {}, here.devices)

    def run(self, one: ClosedJaxpr | Jaxpr, two: ClosedJaxpr | Jaxpr, values: Sequence[Value]) -> list[Value]:
        """What a jaxpr returns, given what it takes."""
        (a, a_consts), (b, b_consts) = jaxprs.opened(one), jaxprs.opened(two)
        if len(a_consts) != len(b_consts) or len(a.outvars) != len(b.outvars):
            raise UnfitError("the program differs with the number of rows")
        env: dict[Any, Value] = dict(zip(b.invars, values, strict=True))
        for x, y, value in zip(a.constvars, b.constvars, b_consts, strict=True):
            env[y] = Value(value, State(layout=PLACED) if _growing(x, y) else CONSTANT)

        def read(y):
            if not isinstance(y, Literal):
                return env[y]
            zero = np.ndim(y.val) == 0 and not np.any(y.val)
            aval: Any = y.aval
            return Value(jnp.asarray(y.val, aval.dtype), ZERO if zero else CONSTANT)

        for x, y in self._paired(a.eqns, b.eqns):
            ins = [read(v) for v in y.invars]
            if x is None:  # all rows are one row here
                made = [Value(ins[0].array, State(), own=True)]
            else:
                made = self.eqn(Eqn(x, y, self.here.rows, self.here.devices), ins)
            env.update(zip(y.outvars, made, strict=True))
        return [read(v) for v in b.outvars]

    def _paired(self, own: Sequence[Any], every: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        """Equations of both programs. A program for one row does not broadcast what has one row already."""
        waiting = deque(own)
        for y in every:
            if waiting and _alike(waiting[0], y):
                yield waiting.popleft(), y
            elif self.here.rows == 1 and y.primitive.name == "broadcast_in_dim" and _adds_rows(y, self.here.devices):
                yield None, y
            else:
                break
        else:
            if not waiting:
                return
        raise UnfitError("the program differs with the number of rows")

    def eqn(self, eqn: Eqn, ins: list[Value]) -> list[Value]:
        """What an equation makes."""
        if eqn.name == "axis_index":
            return [Value(jnp.zeros_like(eqn.two.outvars[0].aval), ZERO)]  # as on the one device that has all rows
        if eqn.name in _REACHES_OVER:
            raise UnfitError(f"{eqn.name} names the shard axes")
        if any(v.state.kind == SUM for v in ins):
            if _is_linear(eqn, ins):
                gathered = any(v.gathered for v in ins)
                return [Value(a, State(SUM), gathered=gathered) for a in _run(eqn.two, [v.array for v in ins])]
            ins = [self._added(v) for v in ins]
        nested = _NESTED.get(eqn.name)
        if eqn.name in _CALLS or (nested and any(v.own for v in ins) and not self._stands(eqn, ins)):
            return (nested or _call)(self, eqn, ins)
        return self.of_own(eqn, ins) if any(v.own for v in ins) else self.of_whole(eqn, ins)

    def of_own(self, eqn: Eqn, ins: list[Value]) -> list[Value]:
        """From the device's own rows for itself; if rows meet in it, from all rows."""
        for tried in (ins, self._with_own(eqn, ins)):
            states = self._states(eqn, tried)
            if states and all(_is_of_device(s, eqn.out_grows(i)) for i, s in enumerate(states)):
                made = enumerate(zip(_run(eqn.one, self._here_of(eqn, tried)), states, strict=True))
                return [Value(a, s, own=bool(eqn.out_grows(i))) for i, (a, s) in made]
        return self.of_whole(eqn, [self.here.whole(v, *self._atoms(eqn, i)) for i, v in enumerate(ins)])

    def of_whole(self, eqn: Eqn, ins: list[Value]) -> list[Value]:
        """What is the same on all devices; noise of rows, and what is alike for all of them, for a device's own."""
        states = self._states(eqn, ins) or [State(layout=PLACED)] * len(eqn.one.outvars)
        gathered = any(v.gathered for v in ins)
        weights = any(v.weights for v in ins)
        if gathered and weights and eqn.name in _HEAVY:
            raise UnfitError(f"{eqn.name} takes rows of all devices")
        grows = [bool(eqn.out_grows(i)) for i in range(len(states))]
        arrays = [v.array for v in ins]
        if eqn.name in _NOISE and any(grows):
            key = jax.random.fold_in(arrays[0], self.here.number() + 1) if arrays[0].ndim == 0 else None
            if key is None:
                raise UnfitError("noise is made of many keys")
            return [Value(a, State(ROWS), own=True) for a in _run(eqn.one, [key, *arrays[1:]])]
        alike = all(grows) and all(_is_of_device(s, eqn.out_grows(i)) for i, s in enumerate(states))
        if alike and not gathered and not any(eqn.grows(i) for i in range(len(ins))):
            return [Value(a, s, own=True) for a, s in zip(_run(eqn.one, arrays), states, strict=True)]
        made = zip(_run(eqn.two, arrays), states, grows, strict=True)
        return [Value(a, _of_all(s, g), False, gathered, weights and not gathered) for a, s, g in made]

    def _added(self, value: Value) -> Value:
        return self.here.whole(value, None, None) if value.state.kind == SUM else value

    def _atoms(self, eqn: Eqn, i: int) -> tuple[Any, Any]:
        return eqn.one.invars[i], eqn.two.invars[i]

    def _states(self, eqn: Eqn, ins: list[Value]) -> list[State] | None:
        """What rules make of the inputs; nothing if rows meet."""
        try:
            states = self.walk.eqn(eqn, [v.state for v in ins])
        except MixedError:
            return None
        if any(isinstance(s, Bad) for s in states):
            return None
        return [s if s.degree == ANY else replace(s, degree=0) for s in states]

    def _with_own(self, eqn: Eqn, ins: list[Value]) -> list[Value]:
        """Element by element, what all rows have lies beside the device's own: its own part is taken."""
        if eqn.name not in _ELEMENT_BY_ELEMENT:
            return ins
        layout = next((v.state.layout for v in ins if v.state.kind == ROWS), None)
        return [self.here.own(v, *self._atoms(eqn, i), layout) for i, v in enumerate(ins)]

    def _here_of(self, eqn: Eqn, ins: list[Value]) -> list[Any]:
        """Arrays of the sizes that one device's program takes; rows' numbers count from its first row."""
        arrays = []
        for i, v in enumerate(ins):
            mine = self.here.own(v, *self._atoms(eqn, i))
            if v.state.layout == NUMBER and not v.own:
                first = self.here.number() * self.here.rows
                mine = replace(mine, array=mine.array - first.astype(mine.array.dtype))
            arrays.append(mine.array)
        return arrays

    def _stands(self, eqn: Eqn, ins: list[Value]) -> bool:
        """Whether a nested program can run as it is: no row meets another in it, and it holds no number of rows."""
        return self._states(eqn, ins) is not None and _same_numbers(eqn.one, eqn.two)


def _alike(x: Any, y: Any) -> bool:
    """Whether equations may be the same for other numbers of rows."""
    if x.primitive is not y.primitive or len(x.invars) != len(y.invars) or len(x.outvars) != len(y.outvars):
        return False
    shapes = [
        (getattr(u.aval, "shape", ()), getattr(v.aval, "shape", ())) for u, v in zip(x.outvars, y.outvars, strict=True)
    ]
    return all(len(s) == len(t) and all(m % n == 0 for n, m in zip(s, t, strict=True) if n) for s, t in shapes)


def _adds_rows(eqn: Any, rows: int) -> bool:
    """Whether a dim of one becomes that of the rows, and nothing else changes."""
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    same = eqn.params["broadcast_dimensions"] == tuple(range(len(new))) and len(old) == len(new)
    return same and [(a, b) for a, b in zip(old, new, strict=True) if a != b] == [(1, rows)]


def _is_of_device(state: State, grows: list[int]) -> bool:
    """Whether a device can make it from what it has: of its rows, its part of a sum, alike for every row, or zero."""
    if state.kind != FREE:
        return True
    return len(grows) == 1 and state.layout is None if grows else state.degree == ANY


def _growing(one: Any, two: Any) -> list[int]:
    a, b = (getattr(getattr(atom, "aval", None), "shape", ()) for atom in (one, two))
    if len(a) != len(b):
        raise UnfitError("the program differs with the number of rows")
    return [d for d, sizes in enumerate(zip(a, b, strict=True)) if sizes[0] != sizes[1]]


def _of_all(state: State, grows: bool) -> State:
    layout = (state.layout if state.kind == FREE else PLACED) if grows else None
    return State(FREE, state.degree if state.degree == ANY else 0, layout)


def _run(eqn: Any, arrays: Sequence[Any]) -> list[Any]:
    variables = [Var(a.aval) for a in eqn.invars]
    outs = [Var(a.aval) for a in eqn.outvars]
    return jaxprs.function([eqn.replace(invars=variables, outvars=outs)], variables, outs)(*arrays)


_REACHES_OVER = ("psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "ppermute")
_REACHES_OVER += ("all_to_all", "psum_scatter", "reduce_scatter", "shard_map")
_CALLS = ("jit", "pjit", "closed_call", "core_call")
_HEAVY = (
    "dot_general",
    "conv_general_dilated",
    "scan",
    "while",
    "cond",
    "custom_vjp_call",
    "pallas_call",
    "ragged_dot",
)
_NOISE = ("random_bits", "random_split")
_MOVES = ("neg", "reshape", "broadcast_in_dim", "transpose", "squeeze", "expand_dims", "reduce_sum", "copy", "slice")
_ELEMENT_BY_ELEMENT = {
    "add",
    "sub",
    "mul",
    "div",
    "select_n",
    "max",
    "min",
    "pow",
    "rem",
    "and",
    "or",
    "xor",
    "eq",
    "ne",
}
_ELEMENT_BY_ELEMENT |= {"lt", "le", "gt", "ge", "clamp", "add_any", "nextafter", "atan2"}


def _is_linear(eqn: Eqn, ins: list[Value]) -> bool:
    """Whether an equation makes a device's part of a sum from its parts; else they are added up before."""
    kinds = [v.state.kind for v in ins]
    if any(v.own for v in ins) or any(eqn.grows(i) for i in range(len(ins))) or any(map(eqn.out_grows, range(1))):
        return False
    if eqn.name in _MOVES:
        return True
    if eqn.name == "convert_element_type":
        old, new = eqn.one.invars[0].aval.dtype, eqn.params["new_dtype"]
        return jnp.issubdtype(new, jnp.floating) and jnp.promote_types(old, new) == new
    if eqn.name in ("add", "sub", "add_any", "concatenate", "stack"):
        return set(kinds) == {SUM}
    if eqn.name in ("mul", "dot_general"):
        return kinds.count(SUM) == 1
    return eqn.name == "div" and kinds == [SUM, FREE] and jnp.issubdtype(eqn.one.outvars[0].aval.dtype, jnp.inexact)


def _same_numbers(one: Any, two: Any) -> bool:
    """Whether two programs hold the same literals and constants."""
    if isinstance(one, (ClosedJaxpr, Jaxpr)):
        (a, a_consts), (b, b_consts) = jaxprs.opened(one), jaxprs.opened(two)
        consts = all(x is y or np.array_equal(x, y) for x, y in zip(a_consts, b_consts, strict=True))
        return consts and all(_same_numbers(*pair) for pair in zip(a.eqns, b.eqns, strict=True))
    if isinstance(one, (tuple, list)):
        return len(one) == len(two) and all(_same_numbers(*pair) for pair in zip(one, two, strict=True))
    if not hasattr(one, "primitive"):
        return True
    literals = all(
        np.array_equal(x.val, y.val)
        for x, y in zip(one.invars, two.invars, strict=True)
        if isinstance(x, Literal) and isinstance(y, Literal)
    )
    return literals and all(_same_numbers(v, two.params[k]) for k, v in one.params.items())


# ---- nested programs ----


def _call(spread: _Spread, eqn: Eqn, ins: list[Value]) -> list[Value]:
    one: Any = jaxprs.calls(eqn.one)
    two: Any = jaxprs.calls(eqn.two)
    return spread.run(one, two, ins)


def _as_function(spread: _Spread, one: Any, two: Any, ins: list[Value], finish: Callable) -> tuple[Callable, list]:
    """A function of the inputs' arrays, and a list that tells what it returned last: values without arrays."""
    told: list[Value] = []

    def run(*arrays):
        given = [replace(v, array=a) for v, a in zip(ins, arrays, strict=True)]
        made = finish(spread.run(one, two, given))
        told[:] = [replace(v, array=None) for v in made]
        return [v.array for v in made]

    return run, told


def _checkpoint(spread: _Spread, eqn: Eqn, ins: list[Value]) -> list[Value]:
    run, told = _as_function(spread, jaxprs.calls(eqn.one), jaxprs.calls(eqn.two), ins, lambda made: made)
    arrays = jax.checkpoint(run, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])(
        *(v.array for v in ins)
    )
    return [replace(v, array=a) for v, a in zip(told, arrays, strict=True)]


def _custom(spread: _Spread, eqn: Eqn, ins: list[Value]) -> list[Value]:
    """Its rule of derivatives is for all rows."""
    return spread.of_whole(eqn, [spread.here.whole(v, *spread._atoms(eqn, i)) for i, v in enumerate(ins)])


def _scan(spread: _Spread, eqn: Eqn, ins: list[Value]) -> list[Value]:
    one, two = jaxprs.scan_of(eqn.one), jaxprs.scan_of(eqn.two)
    if one is None or two is None or one.length != two.length:
        return _custom(spread, eqn, ins)
    end, here = one.constants + one.carried, spread.here
    atoms = [
        list(zip(a, b, strict=True))
        for a, b in (
            (jaxprs.opened(one.body)[0].invars, jaxprs.opened(two.body)[0].invars),
            (jaxprs.opened(one.body)[0].outvars, jaxprs.opened(two.body)[0].outvars),
        )
    ]
    consts, carry, xs = ins[: one.constants], ins[one.constants : end], ins[end:]
    for _ in range(8):
        wanted = [v.state for v in carry]

        def finish(made, carry=carry):
            fitted = [_like(here, v, c, pair) for v, c, pair in zip(made, carry, atoms[1], strict=False)]
            return [*fitted, *made[one.carried :]]

        given = [*consts, *carry, *(replace(x, array=None) for x in xs)]
        run, told = _as_function(spread, one.body, two.body, given, finish)

        def body(carried, scanned, run=run):
            outs = run(*(v.array for v in consts), *carried, *scanned)
            return outs[: one.carried], outs[one.carried :]

        first = [jax.ShapeDtypeStruct(x.array.shape[1:], x.array.dtype) for x in xs]
        jax.eval_shape(body, [v.array for v in carry], first)
        ends = told[: one.carried]
        if all(e.own == c.own for e, c in zip(ends, carry, strict=True)):
            break
        pairs = zip(carry, ends, atoms[0][one.constants : end], strict=True)
        carry = [here.own(c, *pair, e.state.layout) if e.own else c for c, e, pair in pairs]
        carry = [replace(c, state=e.state) if e.own else c for c, e in zip(carry, ends, strict=True)]
    else:
        raise UnfitError(f"scan carries what changes in every round: {wanted}")
    last, ys = lax.scan(
        body, [v.array for v in carry], [x.array for x in xs], one.length, one.reverse, eqn.params.get("unroll", 1)
    )
    return [replace(v, array=a) for v, a in zip(told, [*last, *ys], strict=True)]


def _like(here: _Here, made: Value, carried: Value, atoms: tuple[Any, Any]) -> Value:
    """What is carried on in the form in which it was; what became the device's own stays so."""
    whole = here.whole(made, *atoms) if made.state.kind == SUM else made
    if carried.own and not whole.own:
        return here.own(whole, *atoms, carried.state.layout)
    return whole


def _cond(spread: _Spread, eqn: Eqn, ins: list[Value]) -> list[Value]:
    which, *given = ins
    if which.own:
        return _custom(spread, eqn, ins)
    here, arrays = spread.here, [v.array for v in given]
    branches = list(zip(eqn.params["branches"], eqn.two.params["branches"], strict=True))
    told: list[list[Value]] = []
    for one, two in branches:
        run, found = _as_function(spread, one, two, given, lambda made: made)
        jax.eval_shape(run, *arrays)
        told.append(found)
    own = [next((v for v in made if v.own and v.state.kind == ROWS), None) for made in zip(*told, strict=True)]

    def finish_of(one, two):
        atoms = zip(jaxprs.opened(one)[0].outvars, jaxprs.opened(two)[0].outvars, strict=True)
        pairs = list(atoms)

        def finish(made):
            added = [here.whole(v, *pair) if v.state.kind == SUM else v for v, pair in zip(made, pairs, strict=True)]
            return [
                here.own(v, *pair, o.state.layout) if o else here.whole(v, *pair)
                for v, o, pair in zip(added, own, pairs, strict=True)
            ]

        return finish

    runs = [_as_function(spread, one, two, given, finish_of(one, two)) for one, two in branches]
    made = lax.switch(which.array, [run for run, _ in runs], *arrays)
    states = [o or replace(told[0][i], own=False) for i, o in enumerate(own)]
    return [
        replace(s, array=a, state=s.state if s.own else _of_all(s.state, bool(_growing(x, y))))
        for s, a, x, y in zip(states, made, eqn.one.outvars, eqn.two.outvars, strict=True)
    ]


_NESTED: dict[str, Callable] = {"scan": _scan, "cond": _cond, "while": _custom}
_NESTED |= dict.fromkeys(("checkpoint", "remat", "remat2"), _checkpoint)
_NESTED |= dict.fromkeys(("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"), _custom)
