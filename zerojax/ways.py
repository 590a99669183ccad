"""How the devices share the rows of a batch: each works on its own, or all together on all of them.

A loss whose rows stand alone is computed by every device on its own rows, under `jax.shard_map`. One that looks across
rows sees the whole batch, under ``jit``; its gathers and reductions are then sharding constraints.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from zerojax import collectives
from zerojax.contracts import Tree
from zerojax.placement import Leaf
from zerojax.plan import Plan
from zerojax.precision import is_key, rounded
from zerojax.units.rows import Rows, judge, tell
from zerojax.units.spread import UnfitError, spread

log = logging.getLogger("zerojax")
Arrays = list[jax.Array]
T = TypeVar("T")


@dataclass(frozen=True)
class Way:
    """How a loss is computed on the devices of a plan.

    Attributes:
      axes: the shard axes over which rows are divided, and their sizes; none where a loss sees all rows.
      gather: ``(shards, leaves) -> whole parameters``, each in the dtype in which the loss sees it.
      reduce: ``(gradients, leaves) -> sums over the devices``, of partitioned leaves partitioned, in ``reduce_dtype``.
      run: ``(f, in_specs, out_specs) -> f on global arrays``; the specs say what is divided over the shard axes.
      each: whether gradients can only be reduced in each micro-batch.
      of_device: the loss as it is computed on a device.
      keys: the axes along which random keys differ.
    """

    axes: Mapping[str, int]
    gather: Callable[[Arrays, Sequence[Leaf]], Arrays]
    reduce: Callable[[Arrays, Sequence[Leaf]], Arrays]
    run: Callable[[Callable, Any, Any], Callable]
    each: bool
    of_device: Callable[[Callable], Callable] = lambda call: call
    keys: Mapping[str, int] = field(default_factory=dict)


def along(
    use: Callable[[Way], T], call: Callable, plan: Plan, params: Tree, batch: Tree, *others: Any, parts: int = 1
) -> T:
    """``use`` with the way of a loss: as ``ZeroConfig(rows=...)`` says, or as the loss's equations do.

    Args:
      use: traces the loss in a way; it may be called with more than one.
      call: ``(params, batch, *others) -> what a loss or a metric function returns``.
      plan: its shard axes and its dtypes hold.
      params: all of them, as at rest.
      batch: with all rows of a step.
      others: further arguments that do not depend on rows.
      parts: the micro-batches.
    """
    if plan.devices == 1 or plan.config.rows != "auto":
        rows_together = plan.devices > 1 and plan.config.rows == "together"
        tell(f"{'together' if rows_together else 'apart'}, by the configuration")
        return use((together if rows_together else apart)(plan))
    seen = jax.tree.map(lambda a: jax.ShapeDtypeStruct((a.shape[0] // parts, *a.shape[1:]), a.dtype), batch)
    try:
        found = judged(call, plan, whole_shapes(params, plan), seen, *others)
    except Exception as error:  # whatever the loss raises; it may name axes that only one program for all can have
        return _in_one_program(use, plan, error)
    if found.apart:
        tell("apart: what a row adds to the loss depends on it alone")
        return use(apart(plan))
    try:
        made, how = use(across(plan)), "own rows, and what devices exchange"
    except UnfitError as unfit:
        made, how = use(together(plan)), f"together, since {unfit}"
    tell(f"{how}. {found.why}")
    hint = "If a row's part of the loss depends on it alone all the same, say ZeroConfig(rows='apart')"
    log.warning("the loss looks across rows and is computed from %s. %s. %s", how, found.why, hint)
    return made


def _in_one_program(use: Callable[[Way], T], plan: Plan, error: Exception) -> T:
    """``use`` with a way in which a loss may place arrays along the shard axes, or raise the error of the usual way."""
    for way in (together(plan), written_out(plan)):
        try:
            made = use(way)
        except Exception:  # the first error is told
            continue
        why = str(error).partition("\n")[0]
        tell(f"together, since on a device's own rows the loss fails: {why}")
        log.warning("the loss is computed from all rows together, since on a device's own it fails: %s", why)
        return made
    raise error


def judged(call: Callable, plan: Plan, *args: Any) -> Rows:
    """Whether the rows of a loss stand alone; it is traced as every device would.

    What gradients overwrite (fp8) is made by rules of derivatives, and the largest of all devices counts.
    """
    derivatives = not any(leaf.overwritten for leaf in plan.wire)
    found: list[Rows] = []

    def local():
        found.append(judge(call, *args, axes=plan.axes, derivatives=derivatives))
        return jnp.zeros(())

    jax.eval_shape(on_devices(local, (), PartitionSpec(), plan))
    return found[-1]


def whole_shapes(params: Tree, plan: Plan) -> Tree:
    """Of parameters as the loss sees them."""
    arrays, treedef = jax.tree.flatten(params)
    wire = iter(plan.wire)

    def shape(array):
        return jax.ShapeDtypeStruct(array.shape, array.dtype if is_key(array) else next(wire).compute_dtype)

    return treedef.unflatten(map(shape, arrays))


# ---- what a loss returns beside its value ----


class Beside:
    """The arrays that a loss returns beside its value, as they come out of ``shard_map``: some by rows, some whole.

    Args:
      has_rows: says of each of them whether its dim 0 is the rows; asked if any has a dim.
    """

    def __init__(self, has_rows: Callable[[], list[bool]]):
        self._has_rows, self._treedef, self._by_rows = has_rows, jax.tree.structure(()), []

    def parted(self, aux: Tree, micro_batches: int) -> tuple[Arrays, Arrays]:
        """Of a step: with rows, in the order of the batch, and means over its micro-batches, stacked in dim 0."""
        arrays, self._treedef = jax.tree.flatten(aux)
        arrays, stacked = [jnp.asarray(a) for a in arrays], micro_batches > 1
        have_dims = any(a.ndim > stacked for a in arrays)
        self._by_rows = self._has_rows() if have_dims else [False] * len(arrays)
        if stacked:
            pairs = zip(arrays, self._by_rows, strict=True)
            arrays = [a.swapaxes(0, 1).reshape(-1, *a.shape[2:]) if rows else a.mean(0) for a, rows in pairs]
        pairs = list(zip(arrays, self._by_rows, strict=True))
        return [a for a, rows in pairs if rows], [a for a, rows in pairs if not rows]

    def joined(self, own: Arrays, means: Arrays) -> Tree:
        """The tree of both."""
        both = iter(own), iter(means)
        return self._treedef.unflatten([next(both[0] if rows else both[1]) for rows in self._by_rows])


def row_outputs(call: Callable, plan: Plan, params: Tree, batch: Tree, *others: Any, parts: int) -> list[bool]:
    """Of each array that a loss returns beside its value, whether dim 0 is the rows of the micro-batch."""

    def shapes(times):
        size = lambda a: times * a.shape[0] // parts  # noqa: E731
        some = jax.tree.map(lambda a: jax.ShapeDtypeStruct((size(a), *a.shape[1:]), a.dtype), batch)
        made = jax.eval_shape(call, whole_shapes(params, plan), some, *others)
        return [a.shape for a in jax.tree.leaves(made[1])]

    one, two = shapes(1), shapes(2)
    return [a != b and a[1:] == b[1:] for a, b in zip(one, two, strict=True)]


# ---- rows apart ----


def apart(plan: Plan) -> Way:
    """Every device for its own rows, manual over the shard axes."""

    def gather(shards, leaves):
        return whole_params(shards, leaves, plan)

    def reduce(grads, leaves):
        with jax.named_scope(collectives.REDUCED):
            return collectives.reduce_scatter(_in_reduce_dtype(grads, leaves, plan), leaves, plan.axes)

    return Way(plan.axes, gather, reduce, functools.partial(on_devices, plan=plan), each=False, keys=plan.axes)


def across(plan: Plan) -> Way:
    """The same for a loss that looks across rows, which has one key, as on one device."""
    return replace(apart(plan), of_device=functools.partial(spread, axes=plan.axes), keys={})


def on_devices(local: Callable, in_specs: Any, out_specs: Any, plan: Plan) -> Callable:
    """``local`` on every device, manual over the shard axes; other mesh axes stay with the compiler.

    Replication is not checked: with the check on, gradients of replicated parameters arrive already summed and those
    of partitioned ones do not.
    """
    return jax.shard_map(
        local, mesh=plan.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(plan.axes), check_vma=False
    )


def param_specs(plan: Plan) -> Tree:
    """How a `TrainState`'s parameters enter ``shard_map``."""
    return plan.treedefs[0].unflatten(leaf.shard_spec(plan.partitioned_axes) for leaf in plan.params)


def whole_params(shards: Arrays, leaves: Sequence[Leaf], plan: Plan) -> Arrays:
    """Whole parameters, each in the dtype in which the loss sees it.

    The shards are cast just before they travel: sooner, all of them would be held in both dtypes; later, the larger one
    would travel.
    """
    with jax.named_scope(collectives.GATHERED):
        sent = [_sent(shard, leaf) for shard, leaf in zip(shards, leaves, strict=True)]
        whole = collectives.gather(sent, leaves, plan.axes)
        return [array.astype(leaf.compute_dtype) for array, leaf in zip(whole, leaves, strict=True)]


def _sent(shard: jax.Array, leaf: Leaf) -> jax.Array:
    """In the dtype that travels; what stays is only rounded to it."""
    stays = leaf.dim is None and leaf.gather_dtype not in (leaf.compute_dtype, shard.dtype.name)
    return rounded(shard, leaf.gather_dtype) if stays else shard.astype(leaf.gather_dtype)


def _in_reduce_dtype(grads: Arrays, leaves: Sequence[Leaf], plan: Plan) -> Arrays:
    dtype = plan.config.precision.reduce_dtype
    return [g if leaf.overwritten else g.astype(dtype) for g, leaf in zip(grads, leaves, strict=True)]


# ---- rows together ----


def together(plan: Plan) -> Way:
    """One program for all rows, which the compiler divides. Every gradient in it is summed over the devices.

    It is also summed where it is made, in the dtype of the operation that makes it.
    """

    def put(array, spec):
        return lax.with_sharding_constraint(array, NamedSharding(plan.mesh, spec))

    def partitioned(arrays, leaves):
        return [put(a, leaf.spec(plan.partitioned_axes)) for a, leaf in zip(arrays, leaves, strict=True)]

    def gather(shards, leaves):
        with jax.named_scope(collectives.GATHERED):
            sent = partitioned([_sent(*pair) for pair in zip(shards, leaves, strict=True)], leaves)
            pairs = zip(sent, leaves, strict=True)
            return [put(array, leaf.spec(())).astype(leaf.compute_dtype) for array, leaf in pairs]

    def reduce(grads, leaves):
        with jax.named_scope(collectives.REDUCED):
            return partitioned(_in_reduce_dtype(grads, leaves, plan), leaves)

    def run(f, in_specs, out_specs):
        del out_specs

        def placed(arg, spec):
            is_rows = isinstance(spec, PartitionSpec) and tuple(spec)
            return jax.tree.map(lambda a: put(a, spec), arg) if is_rows else arg

        def on_mesh(*args):
            with jax.sharding.use_abstract_mesh(plan.mesh.abstract_mesh):  # for the loss's own constraints
                return f(*map(placed, args, in_specs))

        return on_mesh

    return Way({}, gather, reduce, run, True, functools.partial(_with_one_place, axes=tuple(plan.axes)))


def written_out(plan: Plan) -> Way:
    """The same for a loss that is written for Explicit axes: its operations say how their results are placed."""
    way = together(plan)

    def of_device(call):
        def run(params, batch, *others):
            leaves = iter(plan.wire)
            specs = jax.tree.map(lambda a: PartitionSpec() if is_key(a) else next(leaves).spec(()), params)
            placed = specs, plan.batch_sharding.spec, *(PartitionSpec() for _ in others)
            explicit_axes: Any = jax.sharding.explicit_axes
            return explicit_axes(call, axes=plan.mesh.axis_names, in_sharding=placed)(params, batch, *others)

        return way.of_device(run)

    return replace(way, of_device=of_device)


def _with_one_place(call: Callable, axes: tuple[str, ...]) -> Callable:
    """A function that may sum over axes which have no names here, since all rows are in one place."""

    def run(*args):
        try:
            return call(*args)
        except NameError as error:
            if "axis name" not in str(error):
                raise

        def at_place(_):
            return call(*args)

        named = at_place
        for axis in axes:
            named = jax.vmap(named, axis_name=axis)
        return jax.tree.map(lambda a: a[(0,) * len(axes)], named(jnp.zeros((1,) * len(axes))))

    return run
