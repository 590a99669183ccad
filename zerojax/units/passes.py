"""What gather units share: how parameters and gradients travel, how gradients are summed, what backward keeps."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from zerojax.placement import Leaf
from zerojax.precision import is_floating
from zerojax.units.cutting import Unit

Arrays = list[jax.Array]
Leaves = Sequence[Leaf]


@dataclass(frozen=True)
class Traffic:
    """How parameters and their gradients travel.

    Attributes:
      gather: ``(held, leaves) -> whole``, or ``None`` if parameters are held whole during the step.
      reduce: ``(gradients, leaves) -> reduced gradients``, or ``None`` if they stay as they are.
      remat: as in `zerojax.ZeroConfig`.
    """

    gather: Callable[[Arrays, Leaves], Arrays] | None
    reduce: Callable[[Arrays, Leaves], Arrays] | None
    remat: str | Callable[..., Any] | None = None

    def shapes(self, leaves: Leaves) -> list[jax.ShapeDtypeStruct]:
        """Of whole parameters."""
        return [jax.ShapeDtypeStruct(leaf.shape, leaf.compute_dtype) for leaf in leaves]


class Sums(dict):
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
                    (self[key],) = once_known(first_of([array]), [self[key]])

    def of(self, variables: Iterable[Any]) -> Arrays:
        """One for each variable, zeros where there is none."""
        return [self[v] if v in self else jnp.zeros(v.aval.shape, v.aval.dtype) for v in variables]


class Reduced(Sums):
    """Reduced gradients: kept in the dtype in which they travelled, but never summed in less than float32."""

    def _sum(self, a: jax.Array, b: jax.Array) -> jax.Array:
        dtype = jnp.promote_types(a.dtype, jnp.float32)
        return a.astype(dtype) + b.astype(dtype)


class Pass:
    """One way through the units. What each gathers waits until the unit before the last is done.

    So the parameters of two units are whole at a time: those in use and those on their way. It also waits until the
    gradients of the unit before that have left; a scheduler that believes to have memory would let them pile up.
    """

    def __init__(self, held: Arrays, leaves: Leaves, traffic: Traffic, start: jax.Array):
        self._held, self._leaves, self._traffic = held, leaves, traffic
        self._done, self._left = deque([start] * 2, maxlen=2), deque([start] * 3, maxlen=3)

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
        if not self.prefetches:
            return held
        return self.gather(once_known(self._left[0], once_known(self._done[0], held)), leaves)

    def paced(self, cotangents: Arrays) -> Arrays:
        """Cotangents for the next unit. Without gathers it is they that wait for gradients to leave, if these do.

        Else a scheduler puts off the products of the gradients, and all that they are made of stays.
        """
        waits = self._traffic.reduce is not None and not self.prefetches
        return once_known(self._left[0], cotangents) if waits else cotangents

    def gather(self, held: Arrays, leaves: Leaves) -> Arrays:
        return self._traffic.gather(held, leaves) if self._traffic.gather and held else held

    def reduce(self, grads: Arrays, leaves: Leaves) -> Arrays:
        return self._traffic.reduce(grads, leaves) if self._traffic.reduce and grads else grads

    def reduced(self, leaves: Leaves) -> list[jax.ShapeDtypeStruct]:
        """What `reduce` would return."""
        return jax.eval_shape(lambda grads: self.reduce(grads, leaves), self._traffic.shapes(leaves))

    def left(self, reduced: Arrays):
        """Note a number that is there when all gradients of a unit have been reduced."""
        self._left.append(_sum_of_first(reduced, self._left[-1]))

    def done(self, made: Arrays):
        """Note some number that a unit made."""
        self._done.append(first_of(made, self._done[-1]))


def first_of(arrays: Arrays, otherwise: Any = 0) -> Any:
    """Some number of these arrays."""
    known = [a for a in arrays if is_floating(a) and a.size]
    return known[0][(0,) * known[0].ndim] if known else otherwise


def _sum_of_first(arrays: Arrays, otherwise: jax.Array) -> jax.Array:
    """A number that is there when all these arrays are."""
    numbers = [jnp.asarray(first_of([a]), jnp.float32) for a in arrays if a.size]
    return jnp.stack(numbers).sum() if numbers else otherwise


def once_known(number: Any, arrays: Arrays) -> Arrays:
    """``arrays``, but not before ``number`` exists: a dependency that no compiler can see through.

    Without it a second gather is merged with the first, and everything stays whole in between. An optimization barrier
    is not enough: the CPU compiler drops it before it looks for equal instructions.
    """
    never = jnp.asarray(number, jnp.float32) > jnp.inf  # true of no number, nor of NaN
    return [jnp.where(never, jnp.zeros_like(a), a) for a in arrays]


def look_at(unit: Unit, whole: Arrays) -> tuple[Arrays, Arrays, Callable[[Arrays], Arrays]]:
    """``(views, still views, back)``; ``back(of views)`` is the gradient of the unit's trained parameters."""
    views, look_back, still = jax.vjp(unit.look, whole, has_aux=True)

    def back(of_views):
        (of_whole,) = look_back(of_views)
        return [a for a, number in zip(of_whole, unit.params, strict=True) if number in unit.trained]

    return views, still, back


def linearize(unit: Unit, views: Arrays, active: Arrays, passive: Arrays, remat: Any, known: Sequence[Any] = ()):
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

    like = [a.dtype for a in views], [a.dtype for a in active]

    def rebuild(kept, views, known=()):
        kept, again = iter(kept), (*views, *known)
        function = treedef.unflatten([next(kept) if place is None else again[place] for place in places])

        def back(cotangents):  # a user's own derivative may have returned another dtype
            return jax.tree.map(lambda a, dtype: a.astype(dtype), function(cotangents), like)

        return back

    return results, others, [a for a, place in zip(residuals, places, strict=True) if place is None], rebuild
