"""Flax linen's metadata boxes around parameters: their axis names as base specs, and their contents."""

import sys
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from zerojax.contracts import Tree
from zerojax.placement import axes_of, with_paths


def unboxed(tree: Tree) -> Tree:
    """What the boxes hold, without the sharding constraints that linen puts on it under a mesh."""
    return jax.tree.map(lambda node: unboxed(_content(node)) if is_box(node) else node, tree, is_leaf=is_box)


def is_box(node: Any) -> bool:
    """Whether it is one of linen's boxes."""
    return "flax.linen" in sys.modules and isinstance(node, _linen().meta.AxisMetadata)


def base_specs(params: Tree, stacked: list[bool], mesh: Mesh | AbstractMesh) -> Tree:
    """For each parameter in a tree with boxes a `PartitionSpec` of axes of the mesh, or ``None`` without a box.

    Args:
      params: arrays or shapes, some in boxes.
      stacked: for each whether its dim 0 counts the layers of a scan; a box has a name for these too, which is usually
        no axis.
      mesh: what a box may name, itself or by the logical rules that are active.
    """
    specs, layers = [], iter(stacked)
    for path, node in with_paths(params, is_box):
        held = [next(layers) for _ in jax.tree.leaves(node)]
        specs += [_spec(path, node, is_stacked, mesh) if is_box(node) else None for is_stacked in held]
    return jax.tree.structure(unboxed(params)).unflatten(specs)


def _spec(path: str, box: Any, stacked: bool, mesh: Mesh | AbstractMesh) -> PartitionSpec | None:
    names = tuple(box.get_partition_spec()) if hasattr(box, "get_partition_spec") else ()
    names = tuple(None if name is PartitionSpec.UNCONSTRAINED else name for name in names)
    if isinstance(box, _linen().LogicallyPartitioned):
        axes, remedy = _by_rules(path, box, names), "let the rules give axes of the mesh, or None"
    else:
        axes = (None, *names[1:]) if stacked and names and not _known(names[0], mesh) else names
        remedy = ("name axes of the mesh, or None; names that follow nn.logical_axis_rules are those of "
                  "nn.with_logical_partitioning")  # fmt: skip
    unknown = [axis for entry in axes for axis in axes_of(entry) if axis not in mesh.axis_names]
    if unknown:
        raise ValueError(f"{path}: its box has the names {names}, which ask for axes {unknown}; the mesh has "
                         f"{dict(mesh.shape)}: {remedy}")  # fmt: skip
    return PartitionSpec(*axes)


def _by_rules(path: str, box: Any, names: tuple) -> tuple:
    """Logical names as axes; ``None`` where no rule has a free axis for a name, as in linen."""
    rules = _linen().get_logical_axis_rules() if box.rules is None else box.rules
    try:
        return tuple(_linen().logical_to_mesh_axes(names, rules)) if rules else ()
    except ValueError as error:
        raise ValueError(f"{path}: its box has the names {names}, which linen cannot read: {error}") from error


def _known(entry: Any, mesh: Mesh | AbstractMesh) -> bool:
    return set(axes_of(entry)) <= set(mesh.axis_names)


def _content(box: Any) -> Any:
    constrains = isinstance(box, _linen().Partitioned)
    return box.unbox(apply_constraint=False) if constrains else box.unbox()


def _linen() -> Any:
    """Whoever has boxes has imported it; nobody else waits for it."""
    return sys.modules["flax.linen"]
