"""Traced functions as lists of equations: all that the library knows of jaxprs, and how JAX's versions differ."""

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var


@dataclass(frozen=True)
class Program:
    """A function as equations.

    Attributes:
      eqns: in the order in which they run.
      inputs: one variable for each array that the function takes.
      outputs: variables or `Literal`.
      constants: arrays that the function closes over.
    """

    eqns: tuple[JaxprEqn, ...]
    inputs: tuple[Var, ...]
    outputs: tuple[Any, ...]
    constants: dict[Var, Any]


@dataclass(frozen=True)
class Scan:
    """The parts of a ``scan`` equation: its inputs are constants, then what is carried, then what is scanned over."""

    body: ClosedJaxpr
    constants: int
    carried: int
    length: int
    reverse: bool


def trace(fn: Callable, params: list, *args: Any) -> tuple[Program, Any]:
    """``fn(params, *args)`` as a program, and the tree structure of what it returns."""
    closed, out = jax.make_jaxpr(fn, return_shape=True)(params, *args)
    return inline(closed, range(len(params))), jax.tree.structure(out)


def is_staged(tree: Any) -> bool:
    """Whether a program is being written, of which these are variables; else they have values."""
    return any(type(leaf).__name__ == "DynamicJaxprTracer" for leaf in jax.tree.leaves(tree))


def inline(closed: ClosedJaxpr, params: Collection[int] | None = None) -> Program:
    """The program with the equations of nested calls in place of the calls; named scopes are kept.

    Args:
      params: which inputs are parameters. Then only a ``jit`` that takes parameters is opened, and states no placement:
        JAX differentiates other calls as one, and keeps less for backward.

    >>> closed = jax.make_jaxpr(lambda w, x: jax.jit(jax.lax.mul)(w, jax.jit(jax.lax.sin)(x)))(1.0, 1.0)
    >>> [[eqn.primitive.name for eqn in inline(closed, params).eqns] for params in (None, [0])]
    [['sin', 'mul'], ['jit', 'mul']]
    """
    eqns: list[JaxprEqn] = []
    constants: dict[Var, Any] = {}
    inputs = tuple(Var(var.aval) for var in closed.jaxpr.invars)
    of_params = {inputs[i] for i in params or ()}  # parameters, and what is made of nothing else

    def opened(eqn, inner):
        if params is None:
            return _called(eqn)
        return _called(eqn) if _is_plain_jit(eqn) and any(var in of_params for var in inner) else None

    def enter(closed, inputs, scope):
        here = dict(zip(closed.jaxpr.invars, inputs, strict=True))  # new names: a jaxpr may be called more than once
        for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            here[var] = Var(var.aval)
            constants[here[var]] = value

        def read(atom):
            return atom if isinstance(atom, Literal) else here[atom]

        for eqn in closed.jaxpr.eqns:
            inner = [read(atom) for atom in eqn.invars]
            source = eqn.source_info.replace(name_stack=scope + eqn.source_info.name_stack)
            own = variables(inner)
            if body := opened(eqn, own):
                outputs = enter(body, inner, source.name_stack)
            else:
                outputs = [var if isinstance(var, DropVar) else Var(var.aval) for var in eqn.outvars]
                eqns.append(eqn.replace(invars=inner, outvars=outputs, source_info=source))
                if own and all(var in of_params for var in own):
                    of_params.update(outputs)
            here.update(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in closed.jaxpr.outvars]

    scope = type(closed.jaxpr.eqns[0].source_info.name_stack)() if closed.jaxpr.eqns else None
    outputs = enter(closed, inputs, scope)
    return Program(tuple(eqns), inputs, tuple(outputs), constants)


def function(eqns: Sequence[JaxprEqn], inputs: Sequence[Var], outputs: Sequence[Any]) -> Callable[..., list]:
    """``f(*arrays) -> list of arrays`` that runs these equations."""
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    debug = core.DebugInfo("unit", "unit", ("",) * len(inputs), ("",) * len(outputs))
    jaxpr = Jaxpr((), inputs, outputs, eqns, effects, debug)
    return core.jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))


def scan_of(eqn: JaxprEqn) -> Scan | None:
    """The parts of a scan; ``None`` for other equations, and for a scan in a form that is not known."""
    params = eqn.params
    if eqn.primitive.name != "scan":
        return None
    if "num_consts" in params:  # until jax 0.11
        constants, carried = params["num_consts"], params["num_carry"]
    elif "ft_in" in params:
        constants, carried, _ = (len(list(part)) for part in params["ft_in"].unpack())
    else:
        return None
    return Scan(params["jaxpr"], constants, carried, params["length"], params["reverse"])


def variables(atoms: Sequence[Any]) -> list[Var]:
    """Those that are no literals, each once, in their order."""
    return list(dict.fromkeys(atom for atom in atoms if not isinstance(atom, Literal)))


def writes(eqn: JaxprEqn) -> bool:
    """Whether the equation makes or uses a mutable array."""
    return any("Ref" in type(atom.aval).__name__ for atom in (*eqn.invars, *eqn.outvars))


def sums_its_own_way(eqn: JaxprEqn) -> bool:
    """Whether cotangents here are not added up (those of Flax's ``fm32``, of which the largest counts)."""
    dtypes = [getattr(atom.aval, "dtype", None) for atom in (*eqn.invars, *eqn.outvars)]
    extended = [d for d in dtypes if d is not None and jnp.issubdtype(d, jax.dtypes.extended)]
    return any(not jnp.issubdtype(d, jax.dtypes.prng_key) for d in extended)


def _called(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """What an equation calls, if it is nothing but a call."""
    name = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr"}.get(eqn.primitive.name)
    return eqn.params[name] if name else None


def _is_plain_jit(eqn: JaxprEqn) -> bool:
    """A ``jit`` that states no placement; one that does is left as it is."""
    if eqn.primitive.name not in ("jit", "pjit"):
        return False
    placements = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
    return all(type(placement).__name__ == "UnspecifiedValue" for placement in placements)


_PACKAGE = f"{Path(__file__).parent.parent}/"
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "zerojax")


def where(eqn: JaxprEqn) -> str:
    """File and line of the innermost code that made an equation and is of no library; nothing if that is not known."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if not _is_of_libraries(frame.file_name):
            return f"{frame.file_name}:{frame.line_num}"
    return ""


def is_of_libraries(jaxpr: ClosedJaxpr | Jaxpr) -> bool:
    """Whether it was traced from a function of JAX or of what is built on it."""
    source = getattr(opened(jaxpr)[0].debug_info, "func_src_info", None) or ""
    return _is_of_libraries(source.rpartition(" at ")[2])


def _is_of_libraries(file: str) -> bool:
    parts = file.replace("\\", "/").split("/")
    inside = any(a == "site-packages" and b in _LIBRARIES for a, b in itertools.pairwise(parts))
    return inside or file.startswith(("<", _PACKAGE))


def calls(eqn: JaxprEqn) -> ClosedJaxpr | Jaxpr | None:
    """What an equation runs once on all its inputs: a call, a checkpoint, or a function with rules of its own."""
    known = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2")
    if eqn.primitive.name in (*known, "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"):
        return next((eqn.params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in eqn.params), None)
    return None


def opened(jaxpr: ClosedJaxpr | Jaxpr) -> tuple[Jaxpr, Sequence[Any]]:
    """A jaxpr and its constants."""
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, ClosedJaxpr) else (jaxpr, ())
