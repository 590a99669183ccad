"""The rule: how each array of the train state is placed, and why."""

import dataclasses
import glob
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from zerojax import tables
from zerojax.config import Precision, ZeroConfig
from zerojax.contracts import Tree
from zerojax.precision import OVERWRITTEN, is_floating, is_key, is_trainable, without_overwritten

_WHOLE_SHARE = 0.01  # of all bytes: what may stay whole, for want of a dim, without the config allowing it


@dataclass(frozen=True)
class Leaf:
    """How one array of the train state is placed.

    Attributes:
      path: its place in the tree, parts joined by ``/``.
      shape, dtype: of the whole array.
      base: the user's own `PartitionSpec` (tensor parallelism), one entry a dim, free of the shard axes.
      dim: the dim that is partitioned over the shard axes; ``None`` if the leaf stays whole.
      why: the reason, in words.
      unwanted: whether it stays whole only because it cannot be partitioned.
      follows: the path of the parameter whose placement it shares, or ``""``.
      trained: of a parameter, whether it has a gradient and state in the optimizer.
      compute_dtype: of a parameter that the loss sees in another dtype than the precision says.
      gather_dtype: of a parameter on the wire; set in `Plan.wire`.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    base: tuple[Any, ...]
    dim: int | None
    why: str
    unwanted: bool = False
    follows: str = ""
    trained: bool = True
    compute_dtype: str | None = None
    gather_dtype: str | None = None

    @property
    def overwritten(self) -> bool:
        """Whether its gradient is its next value, which no optimizer sees."""
        return _is_overwritten(self.path)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.size * self.dtype.itemsize

    def layer(self) -> "Leaf":
        """Of an array of stacked layers that is partitioned within the layers: one of them."""
        return dataclasses.replace(self, shape=self.shape[1:], base=self.base[1:], dim=(self.dim or 0) - 1)

    def shard_spec(self, axes: Sequence[str]) -> PartitionSpec:
        """Only the shard axes: what `jax.shard_map` over them needs."""
        return PartitionSpec() if self.dim is None else PartitionSpec(*[None] * self.dim, entry_of(axes))

    def spec(self, axes: Sequence[str]) -> PartitionSpec:
        """The whole placement: the user's axes, and the shard axes at `dim`."""
        entries = list(self.base)
        if self.dim is not None and axes:
            entries[self.dim] = entry_of(axes)
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)


def parameter_leaves(params, stacked, base_specs, mesh, config) -> tuple[Leaf, ...]:
    """By the rule, the overrides and the base specs."""
    named = with_paths(params)
    paths = [path for path, _ in named]
    config = _exact_first(config, paths)
    specs = _base_list(params, base_specs, paths)
    _check_patterns("overrides", config.overrides, paths)
    floats = [path for path, leaf in named if is_floating(leaf) and not _is_overwritten(path)]
    _check_patterns("compute_dtypes", config.compute_dtypes, floats)
    _check_patterns("param_dtypes", config.param_dtypes, floats)
    leaves = [
        _parameter_leaf(path, leaf, layers, spec, mesh, config)
        for (path, leaf), layers, spec in zip(named, stacked, specs, strict=True)
    ]
    trained = _trained_paths([leaf for leaf in leaves if not leaf.overwritten], config)
    return tuple(dataclasses.replace(leaf, trained=leaf.overwritten or leaf.path in trained) for leaf in leaves)


def at_rest(params: Tree, config: ZeroConfig) -> Tree:
    """Parameters in the dtypes in which they rest: by pattern, else in ``param_dtype``; what is not trainable, and what
    gradients overwrite, as it is.

    >>> at_rest({"w": jnp.zeros(2), "n": jnp.arange(2)}, ZeroConfig(precision="p=bf16"))["w"].dtype.name
    'bfloat16'
    """
    config = _exact_first(config, [path for path, _ in with_paths(params)])

    def cast(keys, leaf):
        path = _path(keys)
        given = _first_match(config.param_dtypes, path) if is_floating(leaf) else None
        dtype = given or (config.precision.param_dtype if is_trainable(leaf) else None)
        return leaf if dtype is None or _is_overwritten(path) else leaf.astype(dtype)

    return jax.tree.map_with_path(cast, params)


def optimizer_leaves(opt_state, params, leaves, mesh, config) -> tuple[Leaf, ...]:
    """A leaf whose path ends in a parameter's path and has its shape follows that parameter, also a stack of several
    such (the memory of L-BFGS); others (factored moments, counters) go by the rule."""
    devices = math.prod(mesh.shape[axis] for axis in config.shard_axes)
    seen = without_overwritten(only_trained(jax.tree.structure(params).unflatten(leaves), leaves))
    by_path = dict(jax.tree.leaves_with_path(seen))

    def place(keys, leaf):
        path = _path(keys)
        for start in range(len(keys) + 1):
            owner = by_path.get(keys[start:])
            if owner and owner.shape == leaf.shape:
                follows = owner.path or "params"
                return dataclasses.replace(owner, path=path, dtype=leaf.dtype, follows=follows, compute_dtype=None)
            if owner and owner.dim is not None and owner.shape == leaf.shape[-len(owner.shape) :]:
                return _stack_of(owner, path, leaf)
        return _place(path, leaf, (None,) * leaf.ndim, False, devices, config)

    return tuple(place(keys, leaf) for keys, leaf in jax.tree.leaves_with_path(opt_state))


def whole_leaf(path: str, leaf: Any, why: str, base: tuple | None = None, unwanted: bool = False) -> Leaf:
    """One that stays whole, and why."""
    return Leaf(path, leaf.shape, leaf.dtype, base or (None,) * leaf.ndim, None, why, unwanted)


def on_the_wire(leaf: Leaf, precision: Precision) -> Leaf:
    """A parameter with the dtypes in which it travels and is seen. What rests in a smaller one travels in that."""
    compute_dtype = leaf.compute_dtype or precision.compute_dtype
    gather_dtype = leaf.compute_dtype or precision.gather_dtype or compute_dtype
    if leaf.dtype.itemsize < jnp.dtype(gather_dtype).itemsize:
        gather_dtype = leaf.dtype.name
    return dataclasses.replace(leaf, compute_dtype=compute_dtype, gather_dtype=gather_dtype)


# ---- one leaf ----


def _parameter_leaf(
    path: str, leaf: Any, stacked: bool, spec: Any, mesh: Mesh | AbstractMesh, config: ZeroConfig
) -> Leaf:
    placed = _placed(path, leaf, stacked, spec, mesh, config)
    if placed.overwritten:
        return dataclasses.replace(placed, compute_dtype=leaf.dtype.name)
    compute_dtype = _first_match(config.compute_dtypes, path) if is_floating(leaf) else None
    stored = is_floating(leaf) and _first_match(config.param_dtypes, path)  # by the user's wish, for the time at rest
    if compute_dtype is None and not (is_trainable(leaf) or is_key(leaf) or stored):
        compute_dtype = leaf.dtype.name
    return dataclasses.replace(placed, compute_dtype=compute_dtype)


def _first_match(pairs: Sequence[tuple[str, Any]], path: str) -> Any:
    """What the first pattern that matches a path gives; ``None`` if none does."""
    return next((value for pattern, value in pairs if fnmatchcase(path, pattern)), None)


def _placed(path: str, leaf: Any, stacked: bool, spec: Any, mesh: Mesh | AbstractMesh, config: ZeroConfig) -> Leaf:
    devices = math.prod(mesh.shape[axis] for axis in config.shard_axes)
    base, wanted = _read_base(path, leaf.shape, spec, mesh, config.shard_axes)
    matches = [dim for pattern, dim in config.overrides if fnmatchcase(path, pattern)]
    if matches and matches[0] is None:
        return whole_leaf(path, leaf, "override", base)
    dim = matches[0] if matches else wanted
    if _is_overwritten(path):
        if dim is not None:
            raise ValueError(f"{path} is overwritten by its gradient and stays whole; ask for no dim of it")
        return whole_leaf(path, leaf, "overwritten by its gradient", base)
    if dim is None:
        return _place(path, leaf, base, stacked, devices, config)
    _check_dim(path, leaf.shape, dim, base, devices)
    return Leaf(path, leaf.shape, leaf.dtype, base, dim, "override" if matches else "base spec")


def _place(path: str, leaf: Any, base: tuple, stacked: bool, devices: int, config: ZeroConfig) -> Leaf:
    """One leaf's placement by the general rule."""
    if devices == 1:
        return whole_leaf(path, leaf, "one device", base)
    if is_key(leaf):
        return whole_leaf(path, leaf, f"random keys ({leaf.dtype})", base)
    if math.prod(leaf.shape) < max(devices, config.keep_whole_below):
        return whole_leaf(path, leaf, f"small ({math.prod(leaf.shape)} elements)", base)
    dim = _choose_dim(leaf.shape, base, stacked, devices)
    if dim is None:
        return whole_leaf(path, leaf, f"no free dim that {devices} divides", base, unwanted=True)
    return Leaf(path, leaf.shape, leaf.dtype, base, dim, "largest free dim")


def _choose_dim(shape: tuple[int, ...], base: tuple, stacked: bool, devices: int) -> int | None:
    """The dim to partition: the largest free one that ``devices`` divides; dim 0 of three or more dims comes last."""
    free = [d for d, size in enumerate(shape) if base[d] is None and size % devices == 0 and not (stacked and d == 0)]
    return min(free, key=lambda d: (d == 0 and len(shape) > 2, -shape[d], d), default=None)


def _stack_of(owner: Leaf, path: str, leaf: Any) -> Leaf:
    """Of several arrays like a partitioned parameter, stacked in front."""
    more, follows = len(leaf.shape) - len(owner.shape), owner.path or "params"
    base, dim = (None,) * more + owner.base, (owner.dim or 0) + more
    return Leaf(path, leaf.shape, leaf.dtype, base, dim, owner.why, follows=follows)


def _exact_first(config: ZeroConfig, paths: Sequence[str]) -> ZeroConfig:
    """A pattern that is itself a path means that path only, also where it holds brackets or stars."""

    def escape(pattern):
        return glob.escape(pattern) if pattern in paths else pattern

    return dataclasses.replace(
        config,
        overrides=tuple((escape(pattern), dim) for pattern, dim in config.overrides),
        compute_dtypes=tuple((escape(pattern), dtype) for pattern, dtype in config.compute_dtypes),
        param_dtypes=tuple((escape(pattern), dtype) for pattern, dtype in config.param_dtypes),
        trainable=tuple(map(escape, config.trainable)),
        frozen=tuple(map(escape, config.frozen)),
    )


# ---- what is trained ----


def _trained_paths(leaves: Sequence[Leaf], config: ZeroConfig) -> set[str]:
    """Paths of what is trained: trainable leaves that a pattern of ``trainable`` matches, and none of ``frozen``."""
    paths = [leaf.path for leaf in leaves if is_trainable(leaf)]
    wanted = _matching(config.trainable, paths, "trainable parameter (floats of 16 bits or more)")
    frozen = _matching(config.frozen, [leaf.path for leaf in leaves], "parameter")
    trained = wanted - frozen
    for leaf in leaves:
        if leaf.path not in frozen and any(fnmatchcase(leaf.path, pattern) for pattern in config.trainable):
            _check_can_be_trained(leaf, config)
    if paths and not trained:
        raise ValueError(
            f"trainable={config.trainable} and frozen={config.frozen} leave no parameter to train; paths are such as "
            f"{paths[:3]}"
        )
    return trained


def _matching(patterns: Sequence[str], paths: Sequence[str], kind: str) -> set[str]:
    found = {pattern: [path for path in paths if fnmatchcase(path, pattern)] for pattern in patterns}
    unused = [pattern for pattern in patterns if not found[pattern] and pattern != "*"]
    if unused:
        raise ValueError(f"{unused} in trainable or frozen match no {kind}; paths are such as {list(paths[:3])}")
    return {path for matches in found.values() for path in matches}


def _check_can_be_trained(leaf: Leaf, config: ZeroConfig):
    """What looks like a parameter to train and cannot be is not kept still without a word."""
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        raise ValueError(f"{leaf.path} {leaf.shape} is complex ({leaf.dtype}), which is not trained: keep real and "
                         f"imaginary part as two leaves, or freeze it: ZeroConfig(frozen={leaf.path!r})")  # fmt: skip
    if is_floating(leaf) and not is_trainable(leaf) and _first_match(config.param_dtypes, leaf.path):
        raise ValueError(f"{leaf.path} {leaf.shape} shall rest in {leaf.dtype}, in which it cannot be trained: freeze "
                         f"it (ZeroConfig(frozen=...)) or let it rest in bfloat16 or more")  # fmt: skip


def only_trained(params: Tree, leaves: Sequence[Leaf]) -> Tree:
    """The tree with ``None`` for what is not trained."""
    arrays, treedef = jax.tree.flatten(params)
    return treedef.unflatten([a if leaf.trained else None for a, leaf in zip(arrays, leaves, strict=True)])


def with_trained(params: Tree, trained: Tree, leaves: Sequence[Leaf]) -> Tree:
    """The inverse of `only_trained`."""
    arrays, treedef = jax.tree.flatten(params)
    new = iter(jax.tree.leaves(trained))
    return treedef.unflatten([next(new) if leaf.trained else a for a, leaf in zip(arrays, leaves, strict=True)])


# ---- checks ----


def _check_patterns(setting: str, pairs: Sequence[tuple[str, Any]], paths: list[str]):
    unused = [pattern for pattern, _ in pairs if not any(fnmatchcase(path, pattern) for path in paths)]
    if unused:
        raise ValueError(f"{setting} {unused} match no parameter; paths are such as {paths[:3]}")


def check_overwritten(paths: list[str]):
    """Flax keeps what gradients overwrite beside ``"params"``, and nothing else there."""
    inside = [path for path in paths if OVERWRITTEN in path.split("/")]
    beside = [path for path in paths if path.partition("/")[0] not in ("params", OVERWRITTEN)]
    odd = [path for path in inside if not _is_overwritten(path)] + beside
    if inside and odd:
        raise ValueError(f"parameters with {OVERWRITTEN!r} must be {{'params': ..., {OVERWRITTEN!r}: ...}}, no more, "
                         f"as in Flax's TrainState; look at {odd[:3]}")  # fmt: skip


def _is_overwritten(path: str) -> bool:
    return path.startswith(f"{OVERWRITTEN}/")


def _check_dim(path: str, shape: tuple[int, ...], dim: int, base: tuple, devices: int):
    if not 0 <= dim < len(shape):
        raise ValueError(f"{path}: there is no dim {dim} in shape {shape}")
    if base[dim] is not None:
        raise ValueError(f"{path}: dim {dim} of shape {shape} is taken by axis {base[dim]!r}; choose another dim")
    if shape[dim] % devices or shape[dim] == 0:
        over = tables.count(devices, "device")
        raise ValueError(f"{path}: dim {dim} of shape {shape} cannot be divided over {over}; pad it or choose another")


def check_whole(leaves: Iterable[Leaf], devices: int):
    """Raise a ``ValueError`` if too many bytes would stay whole."""
    leaves = tuple(leaves)
    total = sum(leaf.bytes for leaf in leaves)
    whole = sorted((leaf for leaf in leaves if leaf.unwanted), key=lambda leaf: -leaf.bytes)
    lost = sum(leaf.bytes for leaf in whole)
    if lost > _WHOLE_SHARE * total:
        names = "; ".join(f"{leaf.path} {leaf.shape} {tables.size(leaf.bytes)} ({leaf.why})" for leaf in whole[:5])
        more = f"; and {len(whole) - 5} more" if len(whole) > 5 else ""
        raise ValueError(
            f"{len(whole)} leaves, {lost / total:.1%} of the state's bytes, cannot be partitioned over {devices} "
            f"devices and would stay whole on each: {names}{more}. Pad a dim of floats (such as a vocabulary) "
            f"to a multiple of {devices}, use another mesh, or accept it with ZeroConfig(allow_whole=True)."
        )


def _base_list(params: Tree, base_specs: Tree, paths: list[str]) -> list[Any]:
    """One `PartitionSpec` or ``None`` for each parameter."""
    if base_specs is None:
        return [None] * len(paths)
    is_spec = lambda x: x is None or isinstance(x, PartitionSpec)  # noqa: E731
    found = {_path(keys): spec for keys, spec in jax.tree.leaves_with_path(base_specs, is_leaf=is_spec)}
    found = {path: spec for path, spec in found.items() if path in paths or spec is not None}  # params may hold None
    wrong = [path for path, spec in found.items() if not is_spec(spec)]
    if wrong or set(found) != set(paths):
        odd = wrong or sorted(set(found) ^ set(paths))
        raise ValueError(f"base_specs must hold a PartitionSpec or None for each parameter; look at {odd[:3]}")
    return [found[path] for path in paths]


def _read_base(path, shape, spec, mesh, shard_axes) -> tuple[tuple, int | None]:
    """A user's spec as one entry a dim without the shard axes, and the dim at which it names those."""
    entries = tuple(spec or ())
    if len(entries) > len(shape):
        raise ValueError(f"{path}: base spec {spec} has more entries than shape {shape} has dims")
    entries += (None,) * (len(shape) - len(entries))
    named = [axis for entry in entries for axis in axes_of(entry)]
    if len(set(named)) < len(named):
        raise ValueError(f"{path}: base spec {spec} names an axis more than once; one axis divides one dim")
    wanted = None
    for dim, entry in enumerate(entries):
        axes = axes_of(entry)
        unknown = [axis for axis in axes if axis not in mesh.axis_names]
        if unknown:
            raise ValueError(f"{path}: base spec {spec} names axes {unknown}; the mesh has {dict(mesh.shape)}")
        if set(axes) & set(shard_axes):
            if axes != tuple(shard_axes):
                raise ValueError(f"{path}: base spec {spec} mixes shard axes {shard_axes} with others in dim {dim}; "
                                 "name the shard axes alone or leave them to the plan")  # fmt: skip
            wanted = dim
        elif shape[dim] % math.prod(mesh.shape[axis] for axis in axes):
            raise ValueError(f"{path}: dim {dim} of shape {shape} cannot be divided over axes {axes} of "
                             f"{dict(mesh.shape)}; pad it or leave it whole")  # fmt: skip
    return tuple(None if dim == wanted else entry for dim, entry in enumerate(entries)), wanted


# ---- axes and paths ----


def entry_of(axes: Sequence[str]) -> Any:
    """Of a `PartitionSpec`: these axes."""
    return axes[0] if len(axes) == 1 else tuple(axes)


def axes_of(entry: Any) -> tuple[str, ...]:
    """The axes of an entry of a `PartitionSpec`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _path(keys: tuple) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def with_paths(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """Every leaf with its path, parts joined by ``/``."""
    return [(_path(keys), leaf) for keys, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_leaf)]
