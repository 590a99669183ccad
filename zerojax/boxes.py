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


def _spec(path: str, box: Any, stacked: bool, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    names = tuple(box.get_partition_spec()) if hasattr(box, "get_partition_spec") else ()
    names = tuple(None if name is PartitionSpec.UNCONSTRAINED else name for name in names)
    entries = _by_rules(path, box, names, mesh)
    if stacked and entries and not _known(entries[0], mesh):
        entries = (None, *entries[1:])
    unknown = [axis for entry in entries for axis in axes_of(entry) if axis not in mesh.axis_names]
    if unknown:
        raise ValueError(f"{path}: its box has the names {names}, which ask for axes {unknown}; the mesh has "
                         f"{dict(mesh.shape)}. Use names of its axes, None, or names to which nn.logical_axis_rules, "
                         "active in make_plan, give such axes")  # fmt: skip
    return PartitionSpec(*entries)


def _by_rules(path: str, box: Any, names: tuple, mesh: Mesh | AbstractMesh) -> tuple:
    """The axes that rules give to names, as linen does: none to a logical name without a rule. Axes of the mesh that
    `nn.with_partitioning` names need no rule."""
    logical, rules = isinstance(box, _linen().LogicallyPartitioned), getattr(box, "rules", None)
    rules = _linen().get_logical_axis_rules() if rules is None else rules
    ruled = {name for name, _ in rules}
    asked = [name if name in ruled and (logical or not _known(name, mesh)) else None for name in names]
    try:
        axes = _linen().logical_to_mesh_axes(asked, rules)
    except ValueError as error:
        raise ValueError(f"{path}: linen cannot read the names {names} of its box: {error} Use other names") from error
    return tuple(axis if asks or logical else name for name, asks, axis in zip(names, asked, axes, strict=True))


def _known(entry: Any, mesh: Mesh | AbstractMesh) -> bool:
    return set(axes_of(entry)) <= set(mesh.axis_names)


def _content(box: Any) -> Any:
    constrains = isinstance(box, _linen().Partitioned)
    return box.unbox(apply_constraint=False) if constrains else box.unbox()


def _linen() -> Any:
    """Whoever has boxes has imported it; nobody else waits for it."""
    return sys.modules["flax.linen"]
