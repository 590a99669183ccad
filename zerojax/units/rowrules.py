"""What each operation makes of the rows of a batch: the rules by which `zerojax.units.rows` judges a loss."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FREE, ROWS, SUM = "free", "rows", "sum"
ANY = "any"  # the degree of zero, which is a multiple of everything
PLACED = "placed"  # a free array that differs from row to row
NUMBER = "number"  # the same, and it holds the rows' numbers


@dataclass(frozen=True)
class State:
    """What is known of a variable.

    Attributes:
      kind: `FREE`, `ROWS` or `SUM`.
      degree: the power of the number of rows that it is times; `ANY` for zero, ``None`` for what is not known.
      layout: the dim that grows has (outer, rows, inner) elements; ``None`` if it may be seen so in every way.
      numbered: it is an index whose last dim holds, at this place, the row's number.
    """

    kind: str = FREE
    degree: Any = 0
    layout: Any = None
    numbered: int | None = None


CONSTANT, ZERO, UNKNOWN = State(), State(degree=ANY), State(degree=None)


class MixedError(Exception):
    """Raised by rules; its text says what mixes rows."""


@dataclass(frozen=True)
class Bad:
    """The state of what mixes rows: which operation, why, and its file and line."""

    what: str
    at: str = ""

    @property
    def why(self) -> str:
        """In one line."""
        return f"{self.what} ({self.at})" if self.at else self.what


@dataclass(frozen=True)
class Eqn:
    """The same equation of both programs."""

    one: Any  # a JaxprEqn; of the shapes of what it takes type checkers know nothing
    two: Any
    rows: int  # of the first program
    times: int = 2  # as many has the second

    @property
    def name(self) -> str:
        """Of the primitive."""
        return self.one.primitive.name

    @property
    def params(self) -> dict:
        """Of the first program's."""
        return self.one.params

    def shape(self, i: int) -> tuple[int, ...]:
        """Of an input, in the first program."""
        return self.one.invars[i].aval.shape

    def grows(self, i: int) -> list[int]:
        """The dims of an input that grow with the rows."""
        return _growing(self.one.invars[i], self.two.invars[i])

    def out_grows(self, i: int = 0) -> list[int]:
        """The dims of an output that grow with the rows."""
        return _growing(self.one.outvars[i], self.two.outvars[i])

    def whole(self, key: str) -> bool:
        """Whether sizes in a parameter leave the growing dims of the first input as they are."""
        pairs = ((eqn.params[key], eqn.invars[0].aval.shape) for eqn in (self.one, self.two))
        return all(sizes[d] == shape[d] for sizes, shape in pairs for d in self.grows(0))


def _growing(one: Any, two: Any) -> list[int]:
    a, b = (getattr(atom.aval, "shape", ()) for atom in (one, two))
    if len(a) != len(b):
        raise MixedError("differs with the number of rows")
    return [d for d, sizes in enumerate(zip(a, b, strict=True)) if sizes[0] != sizes[1]]


# ---- states ----


def constant(one: Any, two: Any) -> State:
    """Of a literal or an array that the loss closes over, as it is in both programs."""
    if _is_key(one) or _is_key(two):
        return CONSTANT if one is two else UNKNOWN
    if one is two and np.ndim(one):
        return CONSTANT
    a, b = np.asarray(one), np.asarray(two)
    if a.ndim == b.ndim and a.shape != b.shape:
        if not a.size or (a != a.flat[0]).any() or (b != a.flat[0]).any():
            return State(degree=None, layout=PLACED)
        return CONSTANT if a.flat[0] != 0 else ZERO
    if a.shape == b.shape and np.array_equal(a, b):
        return CONSTANT if a.any() else ZERO
    if a.shape == b.shape and jnp.issubdtype(a.dtype, jnp.number) and not np.iscomplexobj(a):
        a, b = a.astype(np.float64), b.astype(np.float64)
        return next((State(degree=d) for d in (-2, -1, 1, 2) if np.allclose(b, a * 2.0**d, 1e-6, 0)), UNKNOWN)
    return UNKNOWN


def _is_key(value: Any) -> bool:
    return jnp.issubdtype(getattr(value, "dtype", np.float32), jax.dtypes.extended)


def degree_in_sum(state: State) -> Any:
    """A free value is the sum over rows of its n-th part."""
    return state.degree - 1 if state.kind == FREE and isinstance(state.degree, int) else state.degree


def _layout(states: list[State]) -> Any:
    """The layout of what is made of these element by element."""
    found = {PLACED if s.layout == NUMBER else s.layout for s in states if s.layout is not None}
    with_rows = any(s.kind == ROWS for s in states)
    if with_rows and PLACED in found:
        raise MixedError("depends on a row's place in the batch")
    if len(found) > 1 and with_rows:
        raise MixedError("lays rows beside others")
    return found.pop() if len(found) == 1 else PLACED if found else None


def together(states: list[State]) -> State:
    """What may be any of these, or their sum."""
    kinds = {s.kind for s in states}
    if kinds >= {ROWS, SUM}:
        raise MixedError("brings a sum over rows to each row")
    kind = SUM if SUM in kinds else ROWS if ROWS in kinds else FREE
    degree = _common([degree_in_sum(s) if kind == SUM else s.degree for s in states])
    if degree is None and kind != FREE:
        raise MixedError("adds what grows differently with the number of rows")
    return State(kind, degree, _layout(states))


def _common(degrees: list) -> Any:
    found = {d for d in degrees if d != ANY}
    return found.pop() if len(found) == 1 else None if found else ANY


def _product(a: State, b: State, sign: int = 1) -> State:
    """Multiplied, or divided if ``sign`` is -1."""
    if SUM in (a.kind, b.kind) and (FREE not in (a.kind, b.kind) or (sign < 0 and b.kind == SUM)):
        does = "divides by" if sign < 0 else "multiplies"
        raise MixedError(f"{does} a sum over rows: for a ratio of sums, return zerojax.Loss(total, weight)")
    kind = next((kind for kind in (SUM, ROWS) if kind in (a.kind, b.kind)), FREE)
    if None in (a.degree, b.degree) or (sign < 0 and b.degree == ANY):
        degree = None
    elif ANY in (a.degree, b.degree):
        degree = ANY if kind == FREE else _common([a.degree, b.degree])
    else:
        degree = a.degree + sign * b.degree
    if degree is None and kind != FREE:
        raise MixedError("depends on the number of rows or on the device")
    return State(kind, degree, _layout([a, b]))


def any_function(states: list[State]) -> State:
    """What is made of these element by element in any way."""
    if any(s.kind == SUM for s in states):
        raise MixedError("is not linear in a sum over rows")
    plain = all(s.degree in (0, ANY) for s in states)
    kind = ROWS if any(s.kind == ROWS for s in states) else FREE
    if kind == ROWS and not plain:
        raise MixedError("depends on the number of rows or on the device")
    return State(kind, 0 if plain else None, _layout(states))


# Parameters that may grow with the rows.
_SIZES = ("shape", "new_sizes", "limit_indices", "slice_sizes", "dimensions")


def fitting(eqn: Eqn, i: int, state: State) -> State:
    """The state, if the dims that grow are as it says."""
    grows = eqn.out_grows(i)
    if state.kind == SUM:
        if grows:
            raise MixedError("lays a sum over rows beside each row")
        return replace(state, layout=None)
    if not grows:
        if state.kind == ROWS:
            raise MixedError("mixes rows")
        return replace(state, layout=None)
    one, two = (eqn.one.outvars[i].aval.shape, eqn.two.outvars[i].aval.shape)
    fits = len(grows) == 1 and two[grows[0]] == eqn.times * one[grows[0]] and one[grows[0]] % eqn.rows == 0
    if fits and isinstance(state.layout, tuple):
        fits = math.prod(state.layout) * eqn.rows == one[grows[0]]
    if fits and state.layout == NUMBER:
        fits = one[grows[0]] == eqn.rows
    if fits or (state.kind == FREE and state.layout in (None, PLACED)):
        return state
    if state.kind == ROWS:
        raise MixedError("lays rows beside rows, or takes some of them")
    return replace(state, layout=PLACED)


def alike(eqn: Eqn) -> bool:
    """Whether both equations say the same, sizes apart that grow with the rows."""

    def same(key, a, b):
        if key in _SIZES and isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
            return all(x == y or y == eqn.times * x for x, y in zip(a, b, strict=True))
        return a == b or (a != a and b != b)  # nan is not itself

    two = eqn.two.params
    return eqn.params.keys() == two.keys() and all(same(k, v, two[k]) for k, v in eqn.params.items())


def unknown(eqn: Eqn, ins: list, why: str) -> Any:
    """What an operation makes of free inputs, if nothing else is known of it."""
    if any(s.kind != FREE for s in ins):
        raise MixedError(why)
    known = alike(eqn) and all(s.degree in (0, ANY) for s in ins)
    known = known and not any(eqn.grows(i) for i in range(len(ins)))
    return [
        State(FREE, 0 if known and not eqn.out_grows(i) else None, PLACED if eqn.out_grows(i) else None)
        for i in range(len(eqn.one.outvars))
    ]


# ---- rules: element by element ----

_SAME = "neg copy copy_p stop_gradient real imag reduce_precision optimization_barrier name pvary pcast conj"
_SAME += " sharding_constraint layout_constraint mesh_cast reshard device_put"
_ELEMENTWISE = """
abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil clamp clz complex
cos cosh digamma eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac integer_pow is_finite le lgamma log log1p
log2 logistic lt max min ne nextafter not or polygamma population_count pow regularized_incomplete_beta rem round rsqrt
shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square tan tanh xor zeta
one_minus_square
"""


def _same(eqn: Eqn, ins: list) -> list:
    return [replace(s, layout=PLACED) if s.layout == NUMBER and eqn.name != "copy" else s for s in ins]


def _convert(eqn: Eqn, ins: list) -> State:
    (state,) = ins
    inexact = jnp.issubdtype(eqn.params["new_dtype"], jnp.inexact)
    integers = all(jnp.issubdtype(a.aval.dtype, jnp.integer) for a in (eqn.one.invars[0], eqn.one.outvars[0]))
    return state if inexact or integers or state.degree == ANY else any_function(ins)


def _div(eqn: Eqn, ins: list) -> State:
    if jnp.issubdtype(eqn.one.outvars[0].aval.dtype, jnp.inexact):
        return _product(*ins, sign=-1)
    return any_function(ins)


def _select(eqn: Eqn, ins: list) -> State:
    which, *cases = ins
    if which == ZERO:
        return cases[0]
    chosen = together(cases)
    if which.kind != FREE and chosen.kind == SUM:
        raise MixedError("chooses among sums over rows as rows say")
    return _product(any_function([which]), chosen) if chosen.degree != ANY else any_function([which, chosen])


def _less(eqn: Eqn, ins: list) -> State:
    if ins[0].layout == NUMBER and ins[1] == ZERO:
        return ZERO  # no row's number is below zero
    return any_function(ins)


RULES: dict[str, Callable] = dict.fromkeys(_ELEMENTWISE.split(), lambda eqn, ins: any_function(ins))
RULES |= dict.fromkeys(_SAME.split(), _same)
RULES |= dict.fromkeys(("add", "add_any"), lambda eqn, ins: together(ins))
RULES |= {"sub": lambda eqn, ins: together(ins), "mul": lambda eqn, ins: _product(*ins), "div": _div}
RULES |= {"select_n": _select, "lt": _less, "convert_element_type": _convert}


# ---- rules: where dims go ----


def _moved(eqn: Eqn, ins: list) -> State:
    """The same elements elsewhere; where the dim that grows lies now is seen by its size."""
    return ins[0]


def _broadcast(eqn: Eqn, ins: list) -> State:
    (state, *_) = ins
    if state.kind == ROWS and len(eqn.out_grows()) > 1:
        raise MixedError("lays rows beside rows")
    grew = len(eqn.out_grows()) > len(eqn.grows(0))
    return replace(state, layout=PLACED) if grew and state.layout is not None else state


def _reshape(eqn: Eqn, ins: list) -> State:
    state, grows, ends = ins[0], eqn.grows(0), eqn.out_grows()
    if state.kind == SUM or not (grows or ends):
        return state
    if len(grows) != 1 or len(ends) != 1 or state.layout == PLACED:
        return State(FREE, state.degree, PLACED) if state.kind == FREE else unknown(eqn, ins, "mixes rows")
    (g,), (e,) = grows, ends
    old, new = eqn.shape(0), eqn.one.outvars[0].aval.shape
    outer, inner = state.layout if isinstance(state.layout, tuple) else (1, old[g] // eqn.rows)
    before, stride = math.prod(old[:g]) * outer, inner * math.prod(old[g + 1 :])
    lead, trail = math.prod(new[:e]), math.prod(new[e + 1 :])
    split = outer * inner * eqn.rows != old[g] or not lead or not trail or before % lead or stride % trail
    if split:
        if state.kind == ROWS:
            raise MixedError("mixes rows")
        return replace(state, layout=PLACED)
    layout = NUMBER if state.layout == NUMBER else (before // lead, stride // trail)
    return replace(state, layout=layout)


def _reduce_sum(eqn: Eqn, ins: list) -> State:
    state = ins[0]
    lost = len(set(eqn.grows(0)) & set(eqn.params["axes"]))
    if not lost:
        return replace(state, layout=PLACED) if state.layout == NUMBER else state
    if state.kind == ROWS:
        return State(SUM, state.degree)
    if state.layout in (PLACED, NUMBER):
        return State(FREE, None, PLACED)
    return replace(state, degree=state.degree + lost if isinstance(state.degree, int) else state.degree)


def _along(key: str, linear: bool = False) -> Callable:
    """A rule for what works along some dims, which must not be the rows'."""

    def rule(eqn, ins):
        dims = eqn.params.get(key, len(eqn.shape(0)) - 1)
        dims = set(dims) if isinstance(dims, (tuple, list)) else {dims}
        if any(dims & set(eqn.grows(i)) for i in range(len(ins))):
            return unknown(eqn, ins, "goes from row to row")
        return ins[0] if linear and ins[0].layout != NUMBER else any_function(ins)

    return rule


def _concatenate(eqn: Eqn, ins: list) -> State:
    dim = eqn.params["dimension"]
    if any(dim in eqn.grows(i) for i in range(len(ins))):
        return unknown(eqn, ins, "lays rows behind others")
    numbers = [i for i, s in enumerate(ins) if s.layout == NUMBER]
    if len(numbers) == 1 and dim == len(eqn.shape(0)) - 1 and eqn.shape(numbers[0])[dim] == 1:
        others = [s for i, s in enumerate(ins) if i != numbers[0]]
        state = any_function([State(ROWS, 0, (1, 1)), *others])
        return replace(state, numbered=sum(eqn.shape(i)[dim] for i in range(numbers[0])))
    return together(ins)


def _split(eqn: Eqn, ins: list) -> Any:
    return unknown(eqn, ins, "takes some rows") if eqn.params["axis"] in eqn.grows(0) else ins * len(eqn.one.outvars)


def _stack(eqn: Eqn, ins: list) -> State:
    return together([replace(s, layout=PLACED) if s.layout == NUMBER else s for s in ins])


def _pad(eqn: Eqn, ins: list) -> State:
    if any(tuple(eqn.params["padding_config"][d]) != (0, 0, 0) for d in eqn.grows(0)):
        return unknown(eqn, ins, "lays something beside rows")
    return together(ins)


def _slice(eqn: Eqn, ins: list) -> State:
    strides = eqn.params["strides"]
    whole = all(strides is None or strides[d] == 1 for d in eqn.grows(0)) and eqn.whole("limit_indices")
    return ins[0] if whole and eqn.grows(0) == eqn.out_grows() else unknown(eqn, ins, "takes some rows")


def _fixed(states: list) -> bool:
    """Whether all are the same for every row and any number of rows."""
    return all(s.kind == FREE and s.degree in (0, ANY) and s.layout is None for s in states)


def _dynamic_slice(eqn: Eqn, ins: list) -> State:
    whole = _fixed(ins[1:]) and eqn.whole("slice_sizes")
    return ins[0] if whole else unknown(eqn, ins, "takes some rows")


def _dynamic_update_slice(eqn: Eqn, ins: list) -> State:
    whole = all(
        atoms[0].aval.shape[d] == atoms[1].aval.shape[d]
        for atoms in (eqn.one.invars, eqn.two.invars)
        for d in {*eqn.grows(0), *eqn.grows(1)}
    )
    return together(ins[:2]) if whole and _fixed(ins[2:]) else unknown(eqn, ins, "writes some rows")


def _windows(eqn: Eqn, ins: list) -> State:
    for key, value in (("window_dimensions", 1), ("window_strides", 1), ("base_dilation", 1), ("window_dilation", 1)):
        if any(eqn.params.get(key) and eqn.params[key][d] != value for i in range(len(ins)) for d in eqn.grows(i)):
            return unknown(eqn, ins, "goes from row to row")
    if any(tuple(eqn.params["padding"][d]) != (0, 0) for i in range(len(ins)) for d in eqn.grows(i)):
        return unknown(eqn, ins, "lays something beside rows")
    return ins[0] if eqn.name == "reduce_window_sum" else any_function(ins)


def _batched(eqn: Eqn, ins: list) -> Any:
    """Linear algebra on the last two dims."""
    last = any(d >= len(eqn.shape(i)) - 2 for i in range(len(ins)) for d in eqn.grows(i))
    return unknown(eqn, ins, "takes rows for a matrix") if last else any_function(ins)


# ---- rules: products ----


def _dot(eqn: Eqn, ins: list) -> State:
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    a, b = eqn.grows(0), eqn.grows(1)
    if not a or not b:
        return _product(*ins)
    pairs = [*zip(lc, rc, strict=True), *zip(lb, rb, strict=True)]
    if len(a) > 1 or len(b) > 1 or (a[0], b[0]) not in pairs:
        return unknown(eqn, ins, "compares rows with rows")
    product = _product(*ins)
    if a[0] not in lc:
        return product
    if product.kind == ROWS:
        return State(SUM, product.degree)
    known = product.layout != PLACED and isinstance(product.degree, int)
    return State(FREE, product.degree + 1 if known else ANY if product.degree == ANY else None)


def _conv(eqn: Eqn, ins: list) -> State:
    numbers = eqn.params["dimension_numbers"]
    a, b = eqn.grows(0), eqn.grows(1)
    grouped = eqn.params["batch_group_count"] != 1
    if not a and not b:
        return _product(*ins)
    if not grouped and a == [numbers.lhs_spec[0]] and not b:
        return _product(*ins)
    if not grouped and a == [numbers.lhs_spec[1]] and b == [numbers.rhs_spec[1]]:  # the gradient of a kernel
        product = _product(*ins) if eqn.params["feature_group_count"] == 1 else None
        if product is not None and product.kind == ROWS:
            return State(SUM, product.degree)
    return unknown(eqn, ins, "goes from row to row")


# ---- rules: by index ----


def _gather(eqn: Eqn, ins: list) -> State:
    d, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    table, index = ins
    a, b = eqn.grows(0), eqn.grows(1)
    bad = lambda: unknown(eqn, ins, "takes rows by number")  # noqa: E731
    if index.kind == SUM or index.degree not in (0, ANY) or len(a) > 1 or len(b) > 1:
        return bad()
    if b and b[0] == len(eqn.shape(1)) - 1:
        return bad()
    if index.numbered is not None:
        alone = a and d.start_index_map[index.numbered] == a[0] and sizes[a[0]] == 1 and a[0] in d.collapsed_slice_dims
        if not alone or table.layout == PLACED:
            raise MixedError("takes rows by number")
        return _product(replace(index, numbered=None), table)
    if a and b:
        pairs = list(zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True))
        return _product(index, table) if (a[0], b[0]) in pairs else bad()
    if a and (not eqn.whole("slice_sizes") or a[0] in d.start_index_map or a[0] in d.collapsed_slice_dims):
        return bad()
    return _product(index, table)


def _scatter(eqn: Eqn, ins: list) -> State:
    d = eqn.params["dimension_numbers"]
    table, index, updates = ins
    a, b, c = (eqn.grows(i) for i in range(3))
    bad = lambda: unknown(eqn, ins, "writes rows by number")  # noqa: E731
    if index.kind == SUM or index.degree not in (0, ANY) or max(map(len, (a, b, c))) > 1:
        return bad()
    adds = eqn.name in ("scatter-add", "scatter_add")
    if b and b[0] == len(eqn.shape(1)) - 1:
        return bad()
    if a and b:
        pairs = zip(d.operand_batching_dims, d.scatter_indices_batching_dims, strict=True)
        return _written(ins) if (a[0], b[0]) in pairs else bad()
    if a:
        window = [x for x in range(len(eqn.shape(0))) if x not in (*d.inserted_window_dims, *d.operand_batching_dims)]
        beside = a[0] in window and a[0] not in d.scatter_dims_to_operand_dims
        fits = beside and c == [d.update_window_dims[window.index(a[0])]]
        whole = fits and all(e.invars[2].aval.shape[c[0]] == e.invars[0].aval.shape[a[0]] for e in (eqn.one, eqn.two))
        return _written(ins) if whole else bad()
    if not b and not c:
        return together([table, updates]) if _fixed([index]) else bad()
    if not adds or (c and c[0] in d.update_window_dims):
        return bad()
    added = _product(index, updates)  # a sum over rows, each at its own place
    if added.kind != ROWS:
        return bad()
    return together([table, State(SUM, added.degree)])


def _written(ins: list) -> State:
    table, index, updates = ins
    return _product(index, together([table, updates])) if index.kind == ROWS else together([table, updates])


# ---- rules: numbers and noise ----


def _iota(eqn: Eqn, ins: list) -> State:
    along = eqn.params["dimension"] in eqn.out_grows()
    return State(layout=NUMBER if along and len(eqn.out_grows()) == 1 else PLACED if along else None)


def _noise(eqn: Eqn, ins: list) -> Any:
    """A row's noise is its own; of one key for all, or of as many keys as there are rows."""
    if any(s.kind != FREE for s in ins):
        return any_function(ins)
    makes = []
    for i in range(len(eqn.one.outvars)):
        grows = eqn.out_grows(i)
        makes.append(State(ROWS if grows else FREE))
    return makes


def _place(eqn: Eqn, ins: list) -> State:
    return UNKNOWN


def _fft(eqn: Eqn, ins: list) -> Any:
    last = len(eqn.shape(0)) - len(eqn.params["fft_lengths"])
    return unknown(eqn, ins, "goes from row to row") if any(d >= last for d in eqn.grows(0)) else _same(eqn, ins)


RULES |= dict.fromkeys(("transpose", "squeeze", "expand_dims"), _moved)
RULES |= dict.fromkeys(
    ("reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin"),
    _along("axes"),
)
RULES |= dict.fromkeys(("cummax", "cummin", "cumprod", "cumlogsumexp"), _along("axis"))
RULES |= {"cumsum": _along("axis", linear=True), "rev": _along("dimensions", linear=True), "top_k": _along("axis")}
RULES |= {"broadcast_in_dim": _broadcast, "reshape": _reshape, "reduce_sum": _reduce_sum, "sort": _along("dimension")}
RULES |= {
    "concatenate": _concatenate,
    "stack": _stack,
    "split": _split,
    "unstack": _split,
    "pad": _pad,
    "slice": _slice,
    "fft": _fft,
}
RULES |= {"dynamic_slice": _dynamic_slice, "dynamic_update_slice": _dynamic_update_slice}
RULES |= dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min"), _windows)
RULES |= dict.fromkeys(("cholesky", "triangular_solve", "lu", "eigh", "qr", "svd", "householder_product"), _batched)
RULES |= {"dot_general": _dot, "conv_general_dilated": _conv, "gather": _gather, "iota": _iota, "axis_index": _place}
RULES |= dict.fromkeys(("scatter", "scatter-add", "scatter_add", "scatter_max", "scatter_min"), _scatter)
RULES |= dict.fromkeys(
    ("random_bits", "random_split", "random_fold_in", "random_wrap", "random_unwrap", "random_seed", "threefry2x32"),
    _noise,
)
