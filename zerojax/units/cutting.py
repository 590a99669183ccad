"""Cuts a traced loss into gather units: consecutive equations, and the parameters that they use.

What is only another view of parameters (a cast, a transpose, a broadcast) belongs to every unit that uses it: it is
made again there and kept nowhere. What is not known here (branches, custom derivatives, loops over parameters that are
not stacked) has its parameters gathered just before it, all together.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import DropVar, JaxprEqn, Literal, Var

from zerojax.collectives import TOGETHER_BELOW
from zerojax.placement import Leaf
from zerojax.precision import is_key
from zerojax.units import jaxprs

ENOUGH = 2**24  # elements of a unit: more would not make its collectives any faster

_VIEWS = frozenset(
    [
        *("add", "and", "bitcast_convert_type", "broadcast_in_dim", "concatenate", "convert_element_type", "copy"),
        *("div", "exp", "integer_pow", "log", "logistic", "max", "min", "mul", "name", "neg", "not", "or", "pad"),
        *("pow", "reduce_precision", "reshape", "rev", "rsqrt", "select_n", "sharding_constraint", "shift_left"),
        *("shift_right_arithmetic", "shift_right_logical", "slice", "split", "sqrt", "square", "squeeze"),
        *("stop_gradient", "sub", "tanh", "transpose", "xor"),
    ]
)  # element by element, or only another order: not worth keeping. Of integers too: unpacked quantized weights
_STOPS = frozenset(["ceil", "floor", "round", "sign", "stop_gradient"])  # gradients do not flow through these


@dataclass(frozen=True)
class Unit:
    """Consecutive equations and the parameters that they use.

    Attributes:
      params: numbers of the parameters that are whole while it runs.
      trained: of those of them that a gradient is wanted of.
      look: ``whole parameters -> (views, still views)``, that which the equations read of them; gradients flow through
        the former only.
      viewed, still: the variables that these views are.
      active, passive: the other inputs; gradients flow through active ones.
      results, others: outputs that gradients flow through, and others.
      call: ``(*views, *active, *still views, *passive) -> [*results, *others]``; not for a loop.
      primitives: the names of its equations.
      loop: of a scan over stacked parameters.
    """

    params: tuple[int, ...]
    trained: tuple[int, ...]
    look: Callable[[list[jax.Array]], tuple[list[jax.Array], list[jax.Array]]]
    viewed: tuple[Var, ...]
    still: tuple[Var, ...]
    active: tuple[Var, ...]
    passive: tuple[Var, ...]
    results: tuple[Var, ...]
    others: tuple[Var, ...]
    call: Callable[..., list[jax.Array]]
    primitives: tuple[str, ...]
    loop: "Loop | None" = None

    def given(self, views: list, active: list, still: list, passive: list) -> dict[Var, Any]:
        """Its inputs by variable."""
        inputs = (*self.viewed, *self.active, *self.still, *self.passive)
        return dict(zip(inputs, (*views, *active, *still, *passive), strict=True))


@dataclass(frozen=True)
class Flow:
    """Where gradients flow in a scan: variables of one turn (``..._in``, ``..._out``) beside those of the equation."""

    consts_in: list[Var]
    consts: list[Any]
    carried_in: list[Var]
    carried_out: list[Any]
    carried: list[Any]
    carried_results: list[Var]
    scanned_in: list[Var]
    scanned: list[Any]
    collected_out: list[Any]
    collected_results: list[Var]


@dataclass(frozen=True)
class Loop:
    """A scan over stacked parameters.

    Attributes:
      eqn, scan: the equation and its parts.
      stacks: the number of the parameter by the position at which the equation takes it as a stack of layers.
      program: one turn, as equations.
      body: one turn, as a unit whose parameters are layers, numbered by their order in ``stacks``.
      moving: positions among what is carried that gradients flow through.
    """

    eqn: JaxprEqn
    scan: jaxprs.Scan
    stacks: dict[int, int]
    program: jaxprs.Program
    body: Unit
    moving: tuple[int, ...]

    @property
    def numbers(self) -> list[int]:
        """Of the stacked parameters that the body uses."""
        return [list(self.stacks.values())[i] for i in self.body.params]

    @property
    def trained(self) -> list[int]:
        """Of those of them that a gradient is wanted of."""
        return [list(self.stacks.values())[i] for i in self.body.trained]

    def parts(self, given: dict[Var, Any]) -> tuple[list, list, list]:
        """Constants, what is carried at first, and what is scanned over; ``None`` for the stacks."""
        everything = [None if i in self.stacks else _read(given, atom) for i, atom in enumerate(self.eqn.invars)]
        return self._split(everything)

    def enter(self, consts: list, carried: list, scanned: list) -> dict[Var, Any]:
        """What a turn begins with, by variable."""
        return dict(zip(self.program.inputs, (*consts, *carried, *scanned), strict=True)) | self.program.constants

    def restored(self, consts: list, scanned: list) -> list:
        """What a turn need not keep, since it is there in both directions."""
        return [*consts, *(a for a in scanned if a is not None)]

    def flow(self, unit: Unit) -> Flow:
        """Where gradients flow."""
        flows = {*unit.active, *unit.viewed}
        pairs = list(zip(self.program.inputs, self.eqn.invars, strict=True))
        stacked = [pairs[i] for i in self.stacks]
        consts, carried, scanned = self._split(pairs)
        consts = [(var, atom) for var, atom in consts if _is_in(atom, flows)]
        scanned = [(var, atom) for var, atom in scanned if _is_in(atom, flows) and (var, atom) not in stacked]
        outputs = list(zip(self.program.outputs, self.eqn.outvars, strict=True))
        results = outputs[: self.scan.carried]
        collected = [(atom, var) for atom, var in outputs[self.scan.carried :] if var in unit.results]
        return Flow(
            *_unzip(consts),
            [carried[i][0] for i in self.moving],
            [results[i][0] for i in self.moving],
            [carried[i][1] for i in self.moving],
            [results[i][1] for i in self.moving],
            *_unzip(scanned),
            *_unzip(collected),
        )

    def _split(self, inputs: list) -> tuple[list, list, list]:
        first, second = self.scan.constants, self.scan.constants + self.scan.carried
        return inputs[:first], inputs[first:second], inputs[second:]


def cut(program: jaxprs.Program, leaves: Sequence[Leaf]) -> list[Unit]:
    """The program as units, in the order in which they run.

    A unit is full when one more parameter would make it larger than the largest one of the model, or `ENOUGH` (or its
    own largest one), and what travels together with that. A scan over stacked parameters is a unit of its own.

    Args:
      program: the loss; its first inputs are the parameters.
      leaves: where each parameter is partitioned.
    """
    trained = {i for i, leaf in enumerate(leaves) if leaf.trained}
    maker = _Maker(program, program.inputs[: len(leaves)], trained, program.outputs[:1])
    if any(jaxprs.writes(eqn) or jaxprs.sums_its_own_way(eqn) for eqn in maker.eqns):
        # what is written and read must not be torn apart, nor gradients that only JAX can sum
        maker.active.update(var for eqn in maker.eqns for var in eqn.outvars if _is_inexact(var.aval))
        return [maker.unit(maker.eqns, _wanted_of([maker.eqns], program.outputs, maker)[0])]
    stacks = {id(eqn): found for eqn in maker.eqns if (found := _stacks(eqn, maker.numbers, leaves))}
    sizes = [leaf.size for leaf in leaves]
    plain = [maker.params_of(eqn, stacks.get(id(eqn), ())) for eqn in maker.eqns]
    limit = min(ENOUGH, max((sizes[i] for params in plain for i in params), default=0))

    def is_too_much(params):
        own = [sizes[i] for i in params]
        return sum(own) > TOGETHER_BELOW + max([limit, *own])

    groups: list[list[JaxprEqn]] = []
    used: set[int] = set()
    closed = True
    for eqn, params in zip(maker.eqns, plain, strict=True):
        own = id(eqn) in stacks
        if closed or own or (used and params - used and is_too_much(used | params)):
            groups.append([])
            used = set()
        groups[-1].append(eqn)
        used |= params
        closed = own
    wanted = _wanted_of(groups, program.outputs, maker)
    return [maker.unit(group, want, stacks.get(id(group[0]))) for group, want in zip(groups, wanted, strict=True)]


def read(values: dict[Var, Any], atoms: Iterable[Any]) -> list:
    """The value of each variable or literal."""
    return [_read(values, atom) for atom in atoms]


def _read(values: dict[Var, Any], atom: Any) -> Any:
    if not isinstance(atom, Literal):
        return values[atom]
    aval: Any = atom.aval
    return jnp.asarray(atom.val, aval.dtype)


def _wanted_of(groups: list[list[JaxprEqn]], outputs: Sequence[Any], maker: "_Maker") -> list[list[Var]]:
    """Of each group, the variables that are wanted later; of the last also the views that the program returns."""
    later = set(jaxprs.variables(outputs))
    wanted = []
    for group in reversed(groups):
        made = [var for eqn in group for var in eqn.outvars if var in later]
        wanted.append(made if wanted else made + [var for var in jaxprs.variables(outputs) if var in maker.roots])
        later.update(var for eqn in group for var in jaxprs.variables(eqn.invars))
    return wanted[::-1]


def _stacks(eqn: JaxprEqn, numbers: dict[Var, int], leaves: Sequence[Leaf]) -> dict[int, int]:
    """Position and number of the parameters of which this scan takes one layer a turn, partitioned within the layer."""
    scan = jaxprs.scan_of(eqn)
    if scan is None or not scan.length or any(jaxprs.writes(inner) for inner in scan.body.jaxpr.eqns):
        return {}
    found = {}
    for position in range(scan.constants + scan.carried, len(eqn.invars)):
        atom = eqn.invars[position]
        number = numbers.get(atom) if isinstance(atom, Var) else None
        if number is not None and leaves[number].dim:  # neither whole nor partitioned along the layers
            found[position] = number
    return found


class _Maker:
    """Makes units of the equations of one program.

    Attributes:
      eqns: all but views of parameters.
      numbers: of the parameters.
      trained: the numbers of those of which gradients are wanted.
      roots: the parameters on which each view depends; a parameter is a view of itself.
      active: variables that depend on trained parameters, or on active inputs, and on which a differentiated output
        depends.
    """

    def __init__(
        self,
        program: jaxprs.Program,
        params: Sequence[Var],
        trained: set[int],
        outputs: Iterable[Any],
        inputs: Iterable[Var] = (),
    ):
        self.trained = trained
        self.numbers = {var: i for i, var in enumerate(params)}
        self.roots = {var: {i} for var, i in self.numbers.items()}
        self.eqns: list[JaxprEqn] = []
        self._params, self._views, moved = params, {}, {*inputs, *(params[i] for i in trained)}
        for eqn in program.eqns:
            read = jaxprs.variables(eqn.invars)
            if eqn.primitive.name not in _STOPS and any(var in moved for var in read):
                moved.update(var for var in eqn.outvars if _is_inexact(var.aval))
            if read and all(var in self.roots for var in read) and _is_view(eqn):
                for var in eqn.outvars:
                    self._views[var] = eqn
                    self.roots[var] = set().union(*(self.roots[inner] for inner in read))
                continue
            self.eqns.append(eqn)
        self.moved, self.behind = moved, _behind(program, outputs)
        self.active = self.moved & self.behind

    def params_of(self, eqn: JaxprEqn, besides: Iterable[int] = ()) -> set[int]:
        """Numbers of the parameters that an equation reads, but for those at some positions."""
        atoms = [atom for i, atom in enumerate(eqn.invars) if i not in besides]
        return set().union(*(self.roots.get(var, ()) for var in jaxprs.variables(atoms)))

    def unit(self, eqns: Sequence[JaxprEqn], wanted: Sequence[Var], stacks: dict[int, int] | None = None) -> Unit:
        """The unit of consecutive equations of which some variables are wanted later."""
        made = {var for eqn in eqns for var in eqn.outvars}
        atoms = [atom for eqn in eqns for i, atom in enumerate(eqn.invars) if not (stacks and i in stacks)]
        reads = jaxprs.variables([*atoms, *(var for var in wanted if var not in made)])
        views = [var for var in reads if var in self.roots]
        viewed = tuple(var for var in views if var in self.moved)
        still = tuple(var for var in views if var not in self.moved)
        inputs = [var for var in reads if var not in made and var not in self.roots]
        active = tuple(var for var in inputs if var in self.active)
        passive = tuple(var for var in inputs if var not in self.active)
        results = tuple(var for var in wanted if var in self.active)
        others = tuple(var for var in wanted if var not in results)
        params = tuple(sorted(set().union(*(self.roots[var] for var in views))))
        trained = tuple(i for i in params if i in self.trained and any(i in self.roots[var] for var in viewed))
        look_at = jaxprs.function(self._makers(views), [self._params[i] for i in params], (*viewed, *still))
        call = jaxprs.function(eqns, (*viewed, *active, *still, *passive), (*results, *others))

        def look(whole):
            seen = look_at(*whole)
            return seen[: len(viewed)], seen[len(viewed) :]

        scan = jaxprs.scan_of(eqns[0]) if stacks else None
        loop = self._loop(eqns[0], scan, stacks) if scan and stacks else None
        names = tuple(eqn.primitive.name for eqn in eqns)
        return Unit(params, trained, look, viewed, still, active, passive, results, others, call, names, loop)

    def _loop(self, eqn: JaxprEqn, scan: jaxprs.Scan, stacks: dict[int, int]) -> Loop:
        program = jaxprs.inline(scan.body, stacks)
        carried = list(zip(program.inputs[scan.constants :], program.outputs[: scan.carried], strict=False))
        maker, moved = self._turn(eqn, program, carried, stacks)
        moving = tuple(n for n, (var, _) in enumerate(carried) if var in moved and var in maker.behind)
        made = {var for inner in maker.eqns for var in inner.outvars} | set(maker.roots)
        wanted = [var for var in jaxprs.variables(program.outputs) if var in made]
        return Loop(eqn, scan, stacks, program, maker.unit(maker.eqns, wanted), moving)

    def _turn(
        self, eqn: JaxprEqn, program: jaxprs.Program, carried: list[tuple[Var, Any]], stacks: dict[int, int]
    ) -> tuple["_Maker", set[Var]]:
        """The maker of one turn's unit, and the inputs through which gradients flow.

        What is carried may make more of what is carried depend on parameters, or matter: so until nothing changes.
        """
        pairs = zip(program.inputs, eqn.invars, strict=True)
        moved = {var for var, atom in pairs if _is_in(atom, self.active)}
        outputs = [a for a, var in zip(program.outputs, eqn.outvars, strict=True) if var in self.active]
        params = [program.inputs[i] for i in stacks]
        trained = {i for i, number in enumerate(stacks.values()) if number in self.trained}
        while True:
            maker = _Maker(program, params, trained, outputs, moved)
            more = {i for i, o in carried if _is_in(o, maker.moved)}
            behind = [o for i, o in carried if i in maker.behind and _is_inexact(i.aval)]
            if more <= moved and all(isinstance(o, Literal) or o in outputs for o in behind):
                return maker, moved
            moved |= {var for var in more if _is_inexact(var.aval)}
            outputs += behind

    def _makers(self, views: Iterable[Var]) -> list[JaxprEqn]:
        """The equations that make these views, in order."""
        needed: dict[Var, JaxprEqn] = {}

        def visit(var):
            if var in self._views and var not in needed:
                for inner in jaxprs.variables(self._views[var].invars):
                    visit(inner)
                needed[var] = self._views[var]

        for var in views:
            visit(var)
        return list(needed.values())


def _behind(program: jaxprs.Program, outputs: Iterable[Any]) -> set[Var]:
    """The variables on which these outputs depend."""
    behind = set(jaxprs.variables(list(outputs)))
    for eqn in reversed(program.eqns):
        if any(var in behind for var in eqn.outvars) and eqn.primitive.name not in _STOPS:
            behind.update(jaxprs.variables(eqn.invars))
    return behind


def _is_view(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _VIEWS and not any(isinstance(var, DropVar) or is_key(var.aval) for var in eqn.outvars)


def _is_inexact(aval: Any) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", jnp.int32), jnp.inexact)


def _is_in(atom: Any, variables: Any) -> bool:
    return not isinstance(atom, Literal) and atom in variables


def _unzip(pairs: Iterable[tuple]) -> tuple[list, list]:
    pairs = list(pairs)
    return [first for first, _ in pairs], [second for _, second in pairs]
