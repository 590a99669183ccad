"""Gather and reduce-scatter inside `jax.shard_map`, in dtypes and over axes that the caller chooses.

Leaves with few elements travel together: one collective costs about the same for one number as for many thousands.
Lists of arrays run beside lists of `plan.Leaf`, which say where each is partitioned.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from zerojax.contracts import Tree
from zerojax.placement import Leaf, axes_of

# Named scopes, by which the compiled program's arrays are known.
GATHERED, REDUCED = "zerojax_gathered", "zerojax_reduced"

TOGETHER_BELOW = 2**16  # elements; larger leaves travel alone, without being copied into a common buffer


def gather(shards: Sequence[jax.Array], leaves: Sequence[Leaf], axes: Mapping[str, int]) -> list[jax.Array]:
    """Whole arrays from their shards; leaves that are whole already are returned as they are.

    Args:
      shards: this device's parts, in the dtype that shall travel.
      leaves: where each is partitioned.
      axes: the shard axes and their sizes, major first.
    """
    whole = list(shards)
    together, alone = _batches(leaves, [s.dtype for s in shards], partitioned=True)
    for i in alone:
        whole[i] = _on_every_axis(all_gather, leaves[i], axes)(shards[i])
    for group in together:
        rows_NE = all_gather(jnp.concatenate([shards[i].ravel() for i in group])[None], 0, axes)
        parts = jnp.split(rows_NE, _ends([shards[i].size for i in group]), axis=1)
        for i, part in zip(group, parts, strict=True):
            whole[i] = _from_rows(part, shards[i].shape, _dim(leaves[i]))
    return whole


def reduce_scatter(arrays: Sequence[jax.Array], leaves: Sequence[Leaf], axes: Mapping[str, int]) -> list[jax.Array]:
    """Sums over the devices: of partitioned leaves this device's shard, of others the whole sum.

    Of leaves that gradients overwrite the largest values: their gradients are maxima, and what is made of earlier ones.
    """
    summed = list(arrays)
    overwritten = [i for i, leaf in enumerate(leaves) if leaf.overwritten]
    for i, largest in zip(overwritten, lax.pmax([arrays[i] for i in overwritten], _several(axes)), strict=True):
        summed[i] = largest
    dtypes = [a.dtype for a in arrays]
    together, alone = _batches(leaves, dtypes, partitioned=True)
    for i in alone:
        summed[i] = _on_every_axis(_reduce_scatter, leaves[i], axes)(arrays[i])
    devices = math.prod(axes.values())
    for group in together:
        rows = [_to_rows(arrays[i], _dim(leaves[i]), devices) for i in group]
        sums = _reduce_scatter(jnp.concatenate(rows, axis=1), 0, axes)[0]
        for i, part in zip(group, jnp.split(sums, _ends([row.shape[1] for row in rows])), strict=True):
            summed[i] = part.reshape(_shard_shape(leaves[i], arrays[i].shape, devices))
    together, alone = _batches(leaves, dtypes, partitioned=False)
    for group in (*together, *([i] for i in alone)):
        for i, total in zip(group, all_reduce([arrays[i] for i in group], axes), strict=True):
            summed[i] = total
    return summed


def all_reduce(tree: Tree, axes: Mapping[str, int]) -> Tree:
    """Sums of a tree of arrays of one dtype over the devices, in one collective."""
    arrays, treedef = jax.tree.flatten(tree)
    if len(arrays) < 2:
        return treedef.unflatten([lax.psum(a, _several(axes)) for a in arrays])
    sums = lax.psum(jnp.concatenate([jnp.ravel(a) for a in arrays]), _several(axes))
    parts = jnp.split(sums, _ends([jnp.size(a) for a in arrays]))
    return treedef.unflatten([part.reshape(jnp.shape(a)) for part, a in zip(parts, arrays, strict=True)])


def mean(tree: Tree, axes: Mapping[str, int]) -> Tree:
    """Means over the devices of floating leaves; others (counters, keys) are alike on all devices and kept."""
    return jax.tree.map(lambda a: lax.pmean(a, _several(axes)) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree)


def _several(axes: Mapping[str, int]) -> tuple[str, ...]:
    """Without axes of one device: XLA cannot reduce over such a one what a tensor axis partitions."""
    return tuple(axis for axis, size in axes.items() if size > 1)


def _batches(leaves, dtypes, *, partitioned: bool) -> tuple[list[list[int]], list[int]]:
    """Indices of the leaves that travel together, by dtype, and of those that travel alone.

    A leaf that a tensor axis partitions too travels alone: laid in a row with others it would lose that axis. So does
    one without elements: XLA's CPU compiler fails, or ends the process, where a row is split into some and none.
    """
    chosen = [i for i, leaf in enumerate(leaves) if (leaf.dim is not None) == partitioned and not leaf.overwritten]
    small = [i for i in chosen if 0 < leaves[i].size < TOGETHER_BELOW and not any(leaves[i].base)]
    groups: dict = {}
    for i in small:
        groups.setdefault(dtypes[i], []).append(i)
    together = [group for group in groups.values() if len(group) > 1]
    return together, [i for i in chosen if not any(i in group for group in together)]


def _dim(leaf: Leaf) -> int:
    """Of a leaf that is partitioned."""
    if leaf.dim is None:
        raise ValueError(f"{leaf.path} is whole")
    return leaf.dim


def _on_every_axis(
    collective: Callable[[jax.Array, int, Mapping[str, int]], jax.Array], leaf: Leaf, axes: Mapping[str, int]
) -> Callable[[jax.Array], jax.Array]:
    """The collective of a leaf that other axes partition too, on what each of their devices holds.

    Left to the compiler, those axes are undone first: it gathers and sums what is whole along them.
    """
    dim, others = _dim(leaf), {axis for entry in leaf.base for axis in axes_of(entry)}

    def run(x):
        return collective(x, dim, axes)

    spec = PartitionSpec(*leaf.base)
    return jax.shard_map(run, in_specs=spec, out_specs=spec, axis_names=others, check_vma=False) if others else run


def all_gather(x: jax.Array, dim: int, axes: Mapping[str, int]) -> jax.Array:
    """Over several axes the minor one first, one after the other: a TPU's compiler makes true gathers of these only.

    As dim 0, where each device's part is one piece of memory: along another dim the CPU's gather takes twice the time.
    The shard itself stays as it lies: else a GPU's compiler turns all layers of a stack at once, before the loop.
    """
    x = jnp.moveaxis(with_layout_constraint(x, Layout(tuple(range(x.ndim)))), dim, 0)
    for axis in reversed(_several(axes)):
        x = lax.all_gather(x, axis, axis=0, tiled=True)
    return jnp.moveaxis(x, 0, dim)


def _reduce_scatter(x: jax.Array, dim: int, axes: Mapping[str, int]) -> jax.Array:
    """The inverse order: the major axis first, when the most bytes travel over the outermost axis."""
    x = jnp.moveaxis(x, dim, 0)
    for axis in _several(axes):
        x = lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True)
    return jnp.moveaxis(x, 0, dim)


def _to_rows(x: jax.Array, dim: int, devices: int) -> jax.Array:
    """A whole array as one row for each device: (N, elements of a shard)."""
    parts = x.reshape(*x.shape[:dim], devices, x.shape[dim] // devices, *x.shape[dim + 1 :])
    return jnp.moveaxis(parts, dim, 0).reshape(devices, -1)


def _from_rows(rows_NE: jax.Array, shard_shape: tuple[int, ...], dim: int) -> jax.Array:
    """The inverse of `_to_rows`."""
    devices = rows_NE.shape[0]
    parts = jnp.moveaxis(rows_NE.reshape(devices, *shard_shape), 0, dim)
    return parts.reshape(*shard_shape[:dim], devices * shard_shape[dim], *shard_shape[dim + 1 :])


def _shard_shape(leaf: Leaf, shape: tuple[int, ...], devices: int) -> tuple[int, ...]:
    return tuple(size // devices if dim == leaf.dim else size for dim, size in enumerate(shape))


def _ends(sizes: Sequence[int]) -> list[int]:
    """Where to split a row of parts of these sizes."""
    return [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
