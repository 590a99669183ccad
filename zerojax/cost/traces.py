"""What a traced function needs, from its equations alone: operations of matrix products, and memory in between.

No compiler is asked. Memory is that of the equations run one after the other, where what is made element by element is
made on the way to whoever uses it, as XLA's fusions do.
"""

import math
from collections.abc import Iterable
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from zerojax.units import jaxprs

_ON_THE_WAY = frozenset(
    [
        *("abs", "add", "add_any", "and", "broadcast_in_dim", "ceil", "clamp", "convert_element_type", "copy", "cos"),
        *("custom_jvp_call", "div", "eq", "erf", "exp", "exp2", "expand_dims", "floor", "ge", "gt", "integer_pow"),
        *("iota", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "name", "ne", "neg", "not"),
        *("optimization_barrier", "or", "pow", "reduce_precision", "reshape", "round", "rsqrt", "select_n", "sign"),
        *("sin", "slice", "sqrt", "square", "squeeze", "stop_gradient", "sub", "tanh", "transpose", "xor"),
    ]
)  # made where it is used, if only one equation uses it
_TAKES_FUSED = _ON_THE_WAY | {"reduce_sum", "reduce_max", "reduce_min", "argmax", "reduce_and", "reduce_or"}


# ---- matrix products ----


def flops(jaxpr: Jaxpr) -> float:
    """Multiplications and additions of all matrix products and convolutions; loops and branches as often as they run.

    Inside ``shard_map`` they are those of one device, elsewhere those of whole arrays. Of branches the dearest counts,
    a ``while`` loop counts once.

    >>> import jax, jax.numpy as jnp
    >>> flops(jax.make_jaxpr(jnp.dot)(jnp.ones((4, 8)), jnp.ones((8, 2))).jaxpr)
    128.0
    """
    return sum(map(_flops, jaxpr.eqns), 0.0)


def _flops(eqn: JaxprEqn) -> float:
    if eqn.primitive.name == "dot_general":
        ((contracted, _), _) = eqn.params["dimension_numbers"]
        depth = math.prod(_shape(eqn.invars[0])[dim] for dim in contracted)
        return 2.0 * depth * math.prod(_shape(eqn.outvars[0]))
    if eqn.primitive.name == "conv_general_dilated":
        kernel = _shape(eqn.invars[1])
        outputs = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * math.prod(_shape(eqn.outvars[0])) * math.prod(kernel) / outputs
    inside = [sum(map(_flops, jaxpr.eqns), 0.0) for jaxpr in _inner(eqn)]
    if eqn.primitive.name == "cond":
        return max(inside, default=0.0)
    return _turns(eqn) * sum(inside)


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _inner(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs that an equation runs; of a custom derivative, not the rules."""
    found = []
    for value in eqn.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(one, (ClosedJaxpr, Jaxpr)):
                found.append(one.jaxpr if isinstance(one, ClosedJaxpr) else one)
    return found


def _turns(eqn: JaxprEqn) -> int:
    return eqn.params["length"] if eqn.primitive.name == "scan" else 1


# ---- memory ----


def peak_bytes(jaxpr: Jaxpr, results: bool = True) -> int:
    """Bytes at most of what the function makes, but not of what it is given.

    Args:
      results: whether its results count.

    >>> import jax, jax.numpy as jnp
    >>> jaxpr = jax.make_jaxpr(lambda x: jnp.dot(jnp.dot(x, x) + 1, x))(jnp.ones((16, 16))).jaxpr
    >>> peak_bytes(jaxpr), peak_bytes(jaxpr, results=False)
    (2048, 1024)
    """
    program = jaxprs.inline(ClosedJaxpr(jaxpr, [None] * len(jaxpr.constvars)))  # shapes do, without values
    eqns, outputs, holds = program.eqns, program.outputs, _holders(program)
    uncounted = {*program.inputs, *program.constants} | (set() if results else {*jaxprs.variables(outputs)})
    last = {var: n for n, eqn in enumerate(eqns) for var in _held(eqn.invars, holds)}
    last |= dict.fromkeys(_held(outputs, holds), len(eqns))
    ends: dict[int, list[Var]] = {}
    for var, n in last.items():
        ends.setdefault(n, []).append(var)
    live = peak = 0
    for n, eqn in enumerate(eqns):
        made = [var for var in eqn.outvars if holds[var] == (var,) and var not in uncounted]
        ended = sum(_bytes(var) for var in ends.get(n, ()) if var not in uncounted)
        in_place = min(ended, sum(map(_bytes, made))) if eqn.primitive.name in _ON_THE_WAY else 0
        live += sum(map(_bytes, made))
        peak = max(peak, live - in_place + _inside(eqn))
        live -= ended + sum(_bytes(var) for var in made if var not in last)
    return peak


def _holders(program: jaxprs.Program) -> dict[Var, tuple[Var, ...]]:
    """The arrays that must be there for a variable to be used: itself, or those of which it is made on the way."""
    eqns, outputs = program.eqns, program.outputs
    users: dict[Var, list[str]] = {}
    for eqn in eqns:
        for var in jaxprs.variables(eqn.invars):
            users.setdefault(var, []).append(eqn.primitive.name)
    results = {*jaxprs.variables(outputs)}
    holds: dict[Var, tuple[Var, ...]] = {var: (var,) for var in (*program.inputs, *program.constants)}
    for eqn in eqns:
        held = tuple(_held(eqn.invars, holds))
        for var in eqn.outvars:
            fused = var not in results and eqn.primitive.name in _ON_THE_WAY
            holds[var] = held if fused and _is_on_the_way(var, held, users.get(var, [])) else (var,)
    return holds


def _is_on_the_way(var: Var, held: tuple[Var, ...], users: list[str]) -> bool:
    """Made again for each user, unless that keeps more than the array itself; of next to nothing, wherever it is."""
    kept, own = sum(map(_bytes, held)), _bytes(var)
    if kept < own / 64:
        return True
    return all(name in _TAKES_FUSED for name in users) and (len(users) == 1 or kept < 1.1 * own)


def _held(atoms: Iterable[Any], holds: dict[Var, tuple[Var, ...]]) -> list[Var]:
    return list(dict.fromkeys(held for var in jaxprs.variables(list(atoms)) for held in holds[var]))


def _inside(eqn: JaxprEqn) -> int:
    """What an equation's own jaxprs need besides their results, which stand outside."""
    peaks = [peak_bytes(jaxpr) for jaxpr in _inner(eqn)]
    if not peaks:
        return 0
    results = 0 if eqn.primitive.name == "scan" else sum(map(_bytes, eqn.outvars))
    return max(0, max(peaks) - results)


def _bytes(var: Var) -> int:
    aval: Any = var.aval
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    return 0 if shape is None or dtype is None else math.prod(shape) * dtype.itemsize
