"""Whether a loss looks across the rows of its batch, read from its equations.

The loss is traced twice, with all rows and with twice as many. Both programs are walked together: what doubles is the
rows' own, so that no size is taken for another, and a factor that halves makes a mean of a sum. Each variable is

- *free*: does not depend on rows. It may have a dim along the rows if it is the same there for every row;
- *rows*: along the one dim that grows, each slice depends on its own row. So does random noise, one for each row;
- *sum*: a linear sum over rows of such terms, and of free ones;
- *mixed*: anything else. What is not known to be one of the others is mixed.

All are times a power of the number of rows, their degree: a mean is a sum of degree -1.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from zerojax.contracts import Loss, Tree
from zerojax.units import jaxprs
from zerojax.units.rowrules import (
    ANY,
    CONSTANT,
    FREE,
    PLACED,
    ROWS,
    RULES,
    SUM,
    Bad,
    Eqn,
    MixedError,
    State,
    alike,
    any_function,
    constant,
    degree_in_sum,
    fitting,
    together,
    unknown,
)


@dataclass(frozen=True)
class Rows:
    """Whether the rows of a loss stand alone.

    Attributes:
      apart: the loss of a batch is the mean (or weighted mean) of the losses of its parts.
      why: if not, the first operation that mixes rows, with the user's file and line.

    >>> Rows(apart=True, why="").apart
    True
    """

    apart: bool
    why: str


@contextlib.contextmanager
def recorded() -> Iterator[list[str]]:
    """Collects how the losses that are traced here share rows, and why."""
    told: list[str] = []
    token = _TOLD.set(told)
    try:
        yield told
    finally:
        _TOLD.reset(token)


_TOLD: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("told", default=None)


def tell(text: str):
    """Say how a loss shares rows, to who collects that."""
    if (told := _TOLD.get()) is not None:
        told.append(text)


def judge(
    call: Callable,
    params: Tree,
    batch: Tree,
    *others: Any,
    axes: Mapping[str, int] | tuple[tuple[str, int], ...] = (),
    derivatives: bool = True,
) -> Rows:
    """Whether the rows of a loss stand alone.

    Args:
      call: ``(params, batch, *others) -> scalar or zerojax.Loss``, or a tuple of that and of arrays beside it.
      params: arrays or their shapes.
      batch: arrays or their shapes, with all rows of a micro-batch; dim 0 of every leaf is the rows.
      others: further arguments that do not depend on the rows: a random key, model state.
      axes: names and sizes of the shard axes; what is summed or gathered over all of them is free.
      derivatives: whether rules of derivatives, of functions that have their own, are judged as well.

    Returns:
      `Rows`. Metrics must be means over the rows or free, model state must be free; what else is returned may also be
      rows in dim 0.

    Raises:
      Exception: what the loss raises when it is traced with all rows.

    >>> judge(lambda w, x: jnp.mean((x @ w) ** 2), jnp.ones(3), jnp.ones((8, 3))).apart
    True
    >>> judge(lambda w, x: jnp.mean(x @ w) ** 2, jnp.ones(3), jnp.ones((8, 3))).apart
    False
    """
    sizes = {leaf.shape[:1] for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1 or sizes == {()}:
        return Rows(False, f"the batch's leaves have no common number of rows: {sorted(sizes)}")
    rows = max(2, *sizes.pop(), 2)  # one row would hide the dim that it lies along
    axes = dict(axes)

    def traced(count):
        some = jax.tree.map(lambda a: jax.ShapeDtypeStruct((count, *a.shape[1:]), a.dtype), batch)
        return jax.make_jaxpr(call, axis_env=list(axes.items()), return_shape=True)(params, some, *others)

    one, out = traced(rows)
    try:
        two, out_two = traced(2 * rows)
    except Exception as error:  # whatever the loss raises
        return Rows(False, f"the loss takes {rows} rows, but not {2 * rows}: {error}")
    if jax.tree.structure(out) != jax.tree.structure(out_two):
        return Rows(False, "what the loss returns depends on the number of rows")
    walk = Walk(rows, axes, derivatives=derivatives)
    states = jax.tree.unflatten(jax.tree.structure(out), _walked(walk, one, two, params, batch))
    return _verdict(states, out, rows)


def _walked(walk: "Walk", one: ClosedJaxpr, two: ClosedJaxpr, params: Tree, batch: Tree) -> list:
    before, within = (len(jax.tree.leaves(tree)) for tree in (params, batch))
    states = [CONSTANT] * before + [State(ROWS, 0, (1, 1))] * within
    states += [CONSTANT] * (len(one.jaxpr.invars) - len(states))
    try:
        return walk.run(one, two, states)
    except MixedError as mixed:
        return [Bad(f"the loss {mixed}")] * len(one.jaxpr.outvars)


# ---- what the loss returns ----


def _verdict(out: Any, shapes: Any, rows: int) -> Rows:
    if isinstance(out, tuple):
        found = _verdict(out[0], shapes[0], rows)
        pairs = zip(jax.tree.leaves(out[1]), jax.tree.leaves(shapes[1]), strict=True)
        why = next(filter(None, (_not_beside(*pair, rows) for pair in pairs)), "")
        return found if not found.apart else Rows(not why, why)
    if not isinstance(out, Loss):
        whys = [_not_of(leaf, -1, "the loss", "a mean over rows") for leaf in jax.tree.leaves(out)]
    else:
        whys = [_not_sums(out.total, out.weight)]
        whys += [_not_a_metric(leaf, out.weight) for leaf in jax.tree.leaves(dict(out.metrics))]
        whys += [_not_free(leaf) for leaf in jax.tree.leaves(out.model_state)]
    why = next(filter(None, whys), "")
    return Rows(not why, why)


def _not_of(state: Any, degree: int, name: str, wanted: str) -> str:
    """Why something is no sum over rows of a degree; nothing if it is."""
    if isinstance(state, Bad):
        return state.why
    if state.kind == ROWS:
        return f"{name} has a dim along the rows"
    if degree_in_sum(state) in (degree, ANY):
        return ""
    return f"{name} is not {wanted}: return a mean, or zerojax.Loss(total, weight) with both summed over the rows"


def _not_sums(total: Any, weight: Any) -> str:
    """Why the ratio of both is not that of their sums over parts of the batch; nothing if it is."""
    bad = next((s for s in (total, weight) if isinstance(s, Bad)), None)
    if bad:
        return bad.why
    degrees = [degree_in_sum(s) for s in (total, weight) if s.kind != ROWS]
    fits = len(degrees) == 2 and (degrees[0] == ANY or (degrees[0] == degrees[1] and degrees[0] is not None))
    told = "the loss's total and weight are not sums over the same rows: return zerojax.Loss(total, weight) with both"
    return "" if fits else f"{told} summed, or the mean"


def _not_a_metric(state: Any, weight: Any) -> str:
    if why := _not_of(state, -1, "a metric", "a mean over rows"):
        return why
    weighted = getattr(weight, "kind", FREE) != FREE and state.kind == SUM
    return "a metric is a mean over all rows, but the loss does not weight them alike" if weighted else ""


def _not_beside(state: Any, shape: Any, rows: int) -> str:
    """Why something that is returned beside the loss is neither a mean, nor free, nor rows in dim 0."""
    if isinstance(state, Bad) or state.kind != ROWS:
        return _not_of(state, -1, "what is returned beside the loss", "a mean over rows") and _not_free(state)
    own = shape.shape[0] == rows and state.layout in (None, (1, 1))
    return "" if own else "what is returned beside the loss has rows in another dim than 0"


def _not_free(state: Any) -> str:
    if isinstance(state, Bad):
        return state.why
    return "" if state.kind == FREE and state.degree in (0, ANY) else "the model state depends on rows"


# ---- the walk ----


class Walk:
    """Through both programs at once; the second has so many times the rows."""

    def __init__(self, rows: int, axes: Mapping[str, int], times: int = 2, derivatives: bool = True):
        self.rows, self.axes, self.times = rows, axes, times
        self._derives = derivatives

    def run(self, one: ClosedJaxpr | Jaxpr, two: ClosedJaxpr | Jaxpr, states: list) -> list:
        """The states of what a jaxpr returns, given those of what it takes."""
        (a, a_consts), (b, b_consts) = jaxprs.opened(one), jaxprs.opened(two)
        same = [e.primitive for e in a.eqns] == [e.primitive for e in b.eqns]
        if not same or len(a.invars) != len(b.invars) or len(a.constvars) != len(b.constvars):
            raise MixedError("the program differs with the number of rows")
        env = dict(zip(a.invars, states, strict=True))
        twin = dict(zip(b.invars, a.invars, strict=True))
        for x, y, v, w in zip(a.constvars, b.constvars, a_consts, b_consts, strict=True):
            env[x], twin[y] = constant(v, w), x

        def read(x, y):
            if isinstance(x, Literal) and isinstance(y, Literal):
                return constant(x.val, y.val)
            if isinstance(x, Literal) or isinstance(y, Literal) or twin[y] is not x:
                raise MixedError("the program differs with the number of rows")
            return env[x]

        for x, y in zip(a.eqns, b.eqns, strict=True):
            eqn = Eqn(x, y, self.rows, self.times)
            ins = [read(*atoms) for atoms in zip(x.invars, y.invars, strict=True)]
            env.update(zip(x.outvars, self.eqn(eqn, ins), strict=True))
            twin.update(zip(y.outvars, x.outvars, strict=True))
        return [read(*atoms) for atoms in zip(a.outvars, b.outvars, strict=True)]

    def eqn(self, eqn: Eqn, ins: list) -> list:
        """The states of what an equation makes."""
        count = len(eqn.one.outvars)
        body = jaxprs.calls(eqn.one)
        if body is None and (bad := next((s for s in ins if isinstance(s, Bad)), None)):
            return [bad] * count
        try:
            outs = self.rule(eqn, ins) if body is None else self.call(eqn, body, ins)
            outs = outs if isinstance(outs, list) else [outs] * count
            return [s if isinstance(s, Bad) else fitting(eqn, i, s) for i, s in enumerate(outs)]
        except MixedError as mixed:
            return [Bad(f"{eqn.name} {mixed}", jaxprs.where(eqn.one))] * count

    def rule(self, eqn: Eqn, ins: list) -> Any:
        name = eqn.name
        if name in _NESTED:
            return _NESTED[name](self, eqn, ins)
        if name in _COLLECTIVES:
            return _collective(eqn, ins, self.axes)
        if not alike(eqn) or (any(s.numbered is not None for s in ins) and name != "gather"):
            return unknown(eqn, ins, "is not known to keep rows apart")
        rule = RULES.get(name)
        if rule is None:
            return unknown(eqn, ins, "is not known to keep rows apart")
        return rule(eqn, ins)

    def call(self, eqn: Eqn, body: Any, ins: list) -> list:
        twin: Any = jaxprs.calls(eqn.two)
        outs = self.run(body, twin, ins)
        if jaxprs.is_of_libraries(body):  # traced once: its lines may be those of another caller
            at, before = jaxprs.where(eqn.one), {s for s in ins if isinstance(s, Bad)}
            outs = [replace(s, at=at or s.at) if isinstance(s, Bad) and s not in before else s for s in outs]
        first = self._derives  # derivatives of first order are enough, and those of relu call relu
        if first and eqn.name.startswith("custom_") and any(isinstance(s, Bad) or s.kind != FREE for s in ins):
            self.derivative(eqn, ins, outs)
        return outs

    def derivative(self, eqn: Eqn, ins: list, outs: list):
        """Raises if a derivative rule mixes: cotangents must be rows for rows, sums for what is free."""
        if any(isinstance(s, Bad) for s in (*ins, *outs)):
            return
        inexact = [i for i, a in enumerate(eqn.one.invars) if jnp.issubdtype(a.aval.dtype, jnp.inexact)]
        made = [i for i, a in enumerate(eqn.one.outvars) if jnp.issubdtype(a.aval.dtype, jnp.inexact)]
        if not inexact or not made:
            return

        def pulled(one):
            variables = [Var(a.aval) for a in one.invars]
            fn = jaxprs.function([one.replace(invars=variables)], variables, one.outvars)

            def back(args, cotangents):
                def of(*some):
                    every = list(args)
                    for i, x in zip(inexact, some, strict=True):
                        every[i] = x
                    whole = fn(*every)
                    return [whole[i] for i in made]

                return jax.vjp(of, *(args[i] for i in inexact))[1](cotangents)

            shapes = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in (*one.invars, *one.outvars)]
            given, got = shapes[: len(variables)], shapes[len(variables) :]
            return jax.make_jaxpr(back, axis_env=list(self.axes.items()))(given, [got[i] for i in made])

        try:
            one, two = pulled(eqn.one), pulled(eqn.two)
        except Exception as error:  # rules may not be differentiable by reverse mode, or do anything
            raise MixedError(f"has a derivative rule that cannot be read: {error}") from error
        cotangents = [replace(outs[i], kind=ROWS if outs[i].kind == ROWS else FREE, degree=0) for i in made]
        self._derives = False
        try:
            ends = self.run(one, two, [*ins, *cotangents])
        finally:
            self._derives = True
        for i, end in zip(inexact, ends, strict=True):
            if isinstance(end, Bad):
                raise MixedError(f"has a derivative rule that mixes rows: {end.why}")
            along = ins[i].kind == ROWS or bool(eqn.grows(i))
            wanted = end.degree in (0, ANY) and end.kind in (ROWS, FREE) if along or ins[i].kind == SUM else None
            rows_reach_it = any(outs[j].kind == ROWS for j in made)
            if wanted is None:  # free: a sum over the rows' cotangents, if there are rows
                wanted = end.degree in (0, ANY) and (end.kind == SUM or end.degree == ANY or not rows_reach_it)
            if not wanted or (not along and end.kind == ROWS):
                raise MixedError("has a derivative rule that mixes rows")


# ---- rules: loops and branches ----


def _joined(old: Any, new: Any) -> Any:
    if isinstance(old, Bad) or isinstance(new, Bad):
        return old if isinstance(old, Bad) else new
    return old if old == new else together([old, new])


def _settled(step: Callable, carry: list) -> tuple[list, list]:
    """What is carried, once another round adds nothing, and the last round's results."""
    for _ in range(12):
        outs = step(carry)
        new = [_joined(a, b) for a, b in zip(carry, outs, strict=False)]
        if new == carry:
            return carry, outs
        carry = new
    raise MixedError("carries what changes in every round")


def _scan(walk: Walk, eqn: Eqn, ins: list) -> list:
    one, two = jaxprs.scan_of(eqn.one), jaxprs.scan_of(eqn.two)
    if one is None or two is None or one.length != two.length or one.reverse != two.reverse:
        return unknown(eqn, ins, "goes from row to row")
    constants, end = ins[: one.constants], one.constants + one.carried
    step = lambda carry: walk.run(one.body, two.body, [*constants, *carry, *ins[end:]])  # noqa: E731
    carry, outs = _settled(step, ins[one.constants : end])
    return [*carry, *outs[one.carried :]]


def _while(walk: Walk, eqn: Eqn, ins: list) -> list:
    p, two = eqn.params, eqn.two.params
    first, second = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    step = lambda carry: walk.run(p["body_jaxpr"], two["body_jaxpr"], [*ins[first:second], *carry])  # noqa: E731
    carry, _ = _settled(step, ins[second:])
    (goes_on,) = walk.run(p["cond_jaxpr"], two["cond_jaxpr"], [*ins[:first], *carry])
    if isinstance(goes_on, Bad):
        return [goes_on] * len(carry)
    if goes_on.kind != FREE or goes_on.degree not in (0, ANY):
        return unknown(eqn, ins, "goes on for as long as rows say")
    return carry


def _cond(walk: Walk, eqn: Eqn, ins: list) -> list:
    if ins[0].kind != FREE or ins[0].degree not in (0, ANY):
        return unknown(eqn, ins, "branches as rows say")
    pairs = zip(eqn.params["branches"], eqn.two.params["branches"], strict=True)
    first, *others = [walk.run(a, b, ins[1:]) for a, b in pairs]
    for outs in others:
        first = [_joined(a, b) for a, b in zip(first, outs, strict=True)]
    return first


def _shard_map(walk: Walk, eqn: Eqn, ins: list) -> list:
    """Over other axes than the shard axes, if these divide no rows."""
    manual = set(eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes", walk.axes)))  # the latter till 0.11
    specs = (*eqn.params["in_specs"], *eqn.params["out_specs"])
    dims = [eqn.grows(i) for i in range(len(ins))] + [eqn.out_grows(i) for i in range(len(eqn.one.outvars))]
    divided = any(d < len(spec) and spec[d] is not None for spec, grows in zip(specs, dims, strict=True) for d in grows)
    if manual & set(walk.axes) or divided:
        return unknown(eqn, ins, "divides rows over devices")
    return walk.run(eqn.params["jaxpr"], eqn.two.params["jaxpr"], ins)


_NESTED = {"scan": _scan, "while": _while, "cond": _cond, "shard_map": _shard_map}
_COLLECTIVES = {"psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}


def _collective(eqn: Eqn, ins: list, axes: Mapping[str, int]) -> list:
    """Over all shard axes it makes free; of some it leaves what differs between the others."""
    names: Any = eqn.params.get("axes", eqn.params.get("axis_name"))
    names = {names} if isinstance(names, str) else set(names)
    if axes and not names & set(axes):  # over others: rows stay where they are
        return list(ins) if eqn.name.startswith("psum") else [any_function([state]) for state in ins]
    grouped = eqn.params.get("axis_index_groups") is not None
    outs = []
    for i, state in enumerate(ins):
        if state.kind != FREE and (grouped or not names >= set(axes)):
            raise MixedError("reaches over some of the shard axes only")
        placed = PLACED if state.kind == ROWS or state.layout else None
        degree = state.degree + 1 if state.kind == SUM else None if grouped else state.degree
        outs.append(State(FREE, degree, placed if eqn.out_grows(i) else None))
    return outs
