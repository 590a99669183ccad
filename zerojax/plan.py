"""From shapes, mesh and configuration to a `Plan`: how every leaf of the train state is partitioned, and why."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from zerojax import boxes, compilers, tables
from zerojax.config import ZeroConfig
from zerojax.contracts import TrainState, Tree, Variables
from zerojax.placement import (
    Leaf,
    at_rest,
    axes_of,
    check_overwritten,
    check_whole,
    entry_of,
    on_the_wire,
    only_trained,
    optimizer_leaves,
    parameter_leaves,
    whole_leaf,
    with_paths,
    with_trained,
)
from zerojax.precision import is_key, is_trainable, without_overwritten
from zerojax.scaling import first_scale


@dataclass(frozen=True)
class Plan:
    """Every decision about where the train state lives; immutable, comparable, printable. Made by `make_plan`.

    Attributes:
      config: the `ZeroConfig` that it obeys.
      mesh: the user's mesh, with Auto axes whatever kind the user's has; a mesh of abstract devices will do.
      params, opt_state, model_state: a `Leaf` for each array, in the order of ``jax.tree.leaves``.
      treedefs: the tree structures of the three.
    """

    config: ZeroConfig
    mesh: Mesh | AbstractMesh
    params: tuple[Leaf, ...]
    opt_state: tuple[Leaf, ...]
    model_state: tuple[Leaf, ...]
    treedefs: tuple[Any, Any, Any]

    def __post_init__(self):
        if self.config.stage > 0 and not self.config.allow_whole:
            check_whole((*self.params, *self.opt_state), self.devices)

    @property
    def axes(self) -> dict[str, int]:
        """The shard axes and their sizes, major first."""
        return {axis: self.mesh.shape[axis] for axis in self.config.shard_axes}

    @property
    def devices(self) -> int:
        """How many devices share one copy of the state."""
        return math.prod(self.axes.values())

    @property
    def partitioned_axes(self) -> tuple[str, ...]:
        """The shard axes, or none at stage 0, which keeps everything whole."""
        return tuple(self.axes) if self.config.stage > 0 else ()

    @property
    def compiler_options(self) -> dict[str, bool | int]:
        """What a step wants of its compiler, for ``jax.jit(..., compiler_options=...)`` around `value_and_grad`."""
        if isinstance(self.mesh, AbstractMesh):
            return {}
        stacked = any(len(leaf.shape) > 2 and leaf.dim for leaf in self.params)
        return compilers.options(self.mesh.devices.flat[0].platform, self.config.stage, stacked)

    @functools.cached_property
    def wire(self) -> tuple[Leaf, ...]:
        """All parameters but random keys as this stage places and sends them, in the order of ``jax.tree.leaves``."""
        sent = [on_the_wire(leaf, self.config.precision) for leaf in self.params if not is_key(leaf)]
        return tuple(sent if self.config.stage > 0 else [dataclasses.replace(leaf, dim=None) for leaf in sent])

    @functools.cached_property
    def state_shardings(self) -> TrainState:
        """A `TrainState` of `NamedSharding`; fits ``jax.device_put`` and ``out_shardings``."""
        return self._state(
            lambda leaf: self._sharding(leaf.spec(self.partitioned_axes)), lambda scalar: self.replicated
        )

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """A `TrainState` of `jax.ShapeDtypeStruct` with shardings: for lowering a step without any array."""

        def abstract(leaf, sharding):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return self._state(
            lambda leaf: abstract(leaf, self._sharding(leaf.spec(self.partitioned_axes))),
            lambda scalar: abstract(scalar, self.replicated),
        )

    @property
    def batch_sharding(self) -> NamedSharding:
        """Of every leaf of a batch: dim 0, the rows, over the shard axes."""
        return self._sharding(PartitionSpec(entry_of(tuple(self.axes))))

    @property
    def replicated(self) -> NamedSharding:
        return self._sharding(PartitionSpec())

    def with_stage(self, stage: int) -> "Plan":
        """The same plan for another stage. From 1, 2 or 3 to another of them every sharding of the state is kept.

        Stage 0 keeps the state whole: to and from it, move a state by ``jax.device_put(state, plan.state_shardings)``.
        """
        return dataclasses.replace(self, config=dataclasses.replace(self.config, stage=stage))

    def trained(self, params: Tree) -> Tree:
        """The tree of gradients: parameters that are not trained are replaced by ``None``."""
        return only_trained(params, self.params)

    def optimized(self, params: Tree) -> Tree:
        """The tree that the optimizer sees: `trained`, without what gradients overwrite."""
        return without_overwritten(self.trained(params))

    def with_trained(self, params: Tree, trained: Tree) -> Tree:
        """``params`` with other trained leaves: the inverse of `trained`."""
        return with_trained(params, trained, self.params)

    def transform(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """``tx`` for trees of all parameters: what is not trained gets an update of zero.

        For loops that call ``tx.update`` and `optax.apply_updates` with all parameters and the gradients of
        `zerojax.value_and_grad`; the state is that of ``tx``. It is ``tx`` itself if all parameters are trained.
        """
        own = [leaf for leaf in self.params if not leaf.overwritten]  # Flax gives its optimizer no others
        if all(leaf.trained for leaf in own):
            return tx

        def init(params):
            return tx.init(only_trained(params, own))

        def update(updates, state, params=None, **extra):
            trained = only_trained(params, own)
            updates = jax.tree.structure(trained).unflatten(jax.tree.leaves(updates))
            updates, state = full.update(updates, state, trained, **extra)
            nothing = jax.tree.map(lambda p: jnp.full_like(p, -0.0), params)  # minus zero is what changes no bit
            return with_trained(nothing, updates, own), state

        full = optax.with_extra_args_support(tx)
        return optax.GradientTransformationExtraArgs(init, update)

    def bytes_per_device(self, part: str | None = None) -> int:
        """Bytes of the state at rest on each device: all of it, or of its part ``"params"``, ``"opt_state"``, ..."""
        if part is not None:
            return sum(map(self._bytes, getattr(self, part)))
        own = sum(scalar.dtype.itemsize for scalar in jax.tree.leaves(self._scalars))
        return own + sum(map(self._bytes, (*self.params, *self.opt_state, *self.model_state)))

    def __str__(self) -> str:
        return _describe(self)

    def _sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    @property
    def _scalars(self) -> tuple[Any, Any, Any]:
        """Shapes of the state's step, key and loss scale."""
        scaling = self.config.scaling

        def make():
            return jnp.int32(0), jax.random.key(0), scaling and first_scale(scaling)

        return jax.eval_shape(make)

    def _state(self, of_leaf: Callable[[Leaf], Any], of_scalar: Callable[[Any], Any]) -> TrainState:
        parts = (self.params, self.opt_state, self.model_state)
        trees = [treedef.unflatten(map(of_leaf, leaves)) for treedef, leaves in zip(self.treedefs, parts, strict=True)]
        step, rng, scale = jax.tree.map(of_scalar, self._scalars)
        return TrainState(step, trees[0], trees[1], rng, trees[2], scale)

    def _bytes(self, leaf: Leaf) -> int:
        spec = leaf.spec(self.partitioned_axes)
        return leaf.bytes // math.prod(self.mesh.shape[axis] for entry in spec for axis in axes_of(entry))


def make_plan(
    init_fn: Callable[[Any], Tree],
    tx: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
    config: ZeroConfig | None = None,
    *,
    base_specs: Tree = None,
) -> Plan:
    """Decide how the train state is partitioned. Runs nothing: shapes only.

    A leaf is partitioned along the largest of its dims that the number of devices divides and that ``base_specs``
    leaves free, never along the layers that a scan in ``init_fn`` stacks; for three dims and more, dim 0 (where stacked
    layers usually lie) comes last. State of the optimizer that is shaped like a parameter follows it.

    Args:
      init_fn: ``key -> params``, or ``key -> Variables(params, model_state)``; arrays only.
      tx: any optax transformation.
      mesh: any mesh, also of abstract devices; Auto or Explicit axes.
      config: stage, shard axes, precision, ...; by default stage 3 over ``"data"``.
      base_specs: a tree like ``params`` of `PartitionSpec` or ``None``, for axes other than the shard axes. An entry
        that names the shard axes says which dim to partition. By default the names in Flax linen's boxes
        (``nn.with_partitioning``, ``nn.with_logical_partitioning`` by the ``nn.logical_axis_rules`` that are active
        here). The state itself holds no boxes.

    Raises:
      ValueError: if an axis is not in the mesh, a spec, a box or an override does not fit its leaf, or leaves of more
        than 1 % of the bytes cannot be partitioned and the config does not allow it.

    >>> mesh = jax.make_mesh((8,), ("data",))
    >>> plan = make_plan(lambda key: {"w": jnp.zeros((16, 24))}, optax.adam(1e-3), mesh)
    >>> plan.params[0].dim, plan.bytes_per_device("params")
    (1, 192)
    """
    config = ZeroConfig() if config is None else config
    if not isinstance(config, ZeroConfig):
        raise ValueError(f"config must be a zerojax.ZeroConfig, such as ZeroConfig(stage=3), not {config!r}")
    if not callable(init_fn):
        raise ValueError(
            "init_fn must be a function of a key, and tx and mesh come after it; for parameters that exist already "
            "write make_plan(lambda key: params, tx, mesh)"
        )
    if hasattr(init_fn, "init") and hasattr(init_fn, "apply"):
        raise ValueError(f"init_fn is a {type(init_fn).__name__}, a Flax module; write zerojax.linen.init_fn(module, "
                         "example inputs)")  # fmt: skip
    mesh = _with_auto_axes(mesh)
    _check_axes(mesh, config)
    _check_compiler(mesh, config)
    with mesh_context(mesh):
        made, stacked = _trace(init_fn, config)
        variables = boxes.unboxed(made)
        check_overwritten([path for path, _ in with_paths(variables.params)])
    specs = boxes.base_specs(made.params, stacked, mesh) if base_specs is None else boxes.unboxed(base_specs)
    params = parameter_leaves(variables.params, stacked, specs, mesh, config)
    with mesh_context(mesh):
        opt_state = jax.eval_shape(tx.init, without_overwritten(only_trained(variables.params, params)))
    trees = (variables.params, opt_state, variables.model_state)
    return Plan(
        config,
        mesh,
        params,
        optimizer_leaves(opt_state, variables.params, params, mesh, config),
        tuple(whole_leaf(path, leaf, "model state") for path, leaf in with_paths(variables.model_state)),
        (jax.tree.structure(trees[0]), jax.tree.structure(trees[1]), jax.tree.structure(trees[2])),
    )


def mesh_context(mesh: Mesh | AbstractMesh) -> contextlib.AbstractContextManager:
    """Make ``mesh`` the active one, whatever mesh the caller has active."""
    return jax.sharding.use_abstract_mesh(mesh) if isinstance(mesh, AbstractMesh) else jax.set_mesh(mesh)


def on_active_mesh(tree: Tree, plan: Plan) -> Tree:
    """Arrays of the plan as the active mesh wants them, if it is the plan's with Explicit axes: the same, of that kind.

    In a user's own ``jit`` under ``jax.set_mesh`` JAX takes no others.
    """
    active = jax.sharding.get_abstract_mesh()
    if isinstance(plan.mesh, AbstractMesh) or not is_kind_of(active, plan):
        return tree
    mesh = Mesh(plan.mesh.devices, plan.mesh.axis_names, axis_types=active.axis_types)
    return jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, a.sharding.spec)), tree)


def on_own_mesh(tree: Tree, plan: Plan) -> Tree:
    """The inverse: arrays that lie on the plan's mesh with Explicit axes, with its own ones."""

    def moved(leaf):
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding) or not is_kind_of(sharding.mesh.abstract_mesh, plan):
            return leaf
        return jax.device_put(leaf, NamedSharding(plan.mesh, sharding.spec))

    return jax.tree.map(moved, tree)


def is_kind_of(mesh: AbstractMesh, plan: Plan) -> bool:
    """Whether it is the plan's mesh, but for axes that are Explicit."""
    own = plan.mesh.abstract_mesh
    explicit = AxisType.Explicit in mesh.axis_types and AxisType.Manual not in mesh.axis_types
    return explicit and mesh.shape_tuple == own.shape_tuple


def born(init_fn: Callable, config: ZeroConfig) -> Callable[[Any], Variables]:
    """``init_fn`` as the state is born by it: always `Variables`, parameters in ``param_dtype``, nothing in boxes."""
    return lambda key: boxes.unboxed(_boxed(init_fn, config)(key))


# ---- what init_fn makes ----


def _boxed(init_fn: Callable, config: ZeroConfig) -> Callable[[Any], Variables]:
    """`born`, with the boxes that ``init_fn`` made."""

    def init(key):
        made = _made(init_fn, key)
        variables = made if isinstance(made, Variables) else Variables(made, None)
        for path, leaf in with_paths(boxes.unboxed(variables.params)):
            if not hasattr(leaf, "dtype"):
                remedy = "make numbers arrays: jnp.asarray(...)"
                if callable(leaf) or isinstance(leaf, (str, bool)):
                    remedy = ("keep it out of the parameters and let the loss put it back, as with "
                              "equinox.partition(model, equinox.is_array) and equinox.combine")  # fmt: skip
                raise ValueError(f"init_fn(key) must return a tree of arrays and nothing else: {path} is the "
                                 f"{type(leaf).__name__} {leaf!r}; {remedy}")  # fmt: skip
        return Variables(at_rest(variables.params, config), variables.model_state)

    return init


def _made(init_fn: Callable, key: Any) -> Any:
    """What ``init_fn`` makes, without an active mesh where it fails under one: there linen constrains what it takes out
    of boxes by their names, which may be no axes, and JAX's error does not say whose names they are."""
    try:
        return init_fn(key)
    except Exception as error:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            try:
                return init_fn(key)
            except Exception:
                raise error from None


def _trace(init_fn: Callable, config: ZeroConfig) -> tuple[Variables, list[bool]]:
    """Shapes of what ``init_fn`` makes, and for each parameter whether its dim 0 counts layers stacked by a scan."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    try:
        jaxpr, variables = jax.make_jaxpr(_boxed(init_fn, config), return_shape=True)(key)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"init_fn(key) must return a tree of arrays and nothing else: {error}") from error
    count = len(jax.tree.leaves(variables.params))
    return variables, [_is_stacked(jaxpr.jaxpr, out) for out in jaxpr.jaxpr.outvars[:count]]


def _is_stacked(jaxpr: Any, var: Any) -> bool:
    """Whether ``var`` is what a scan collected from its turns, so that its dim 0 counts layers."""
    for eqn in jaxpr.eqns:
        if not any(out is var for out in eqn.outvars):
            continue
        index = next(i for i, out in enumerate(eqn.outvars) if out is var)
        if eqn.primitive.name == "scan":
            return var.aval.ndim == eqn.params["jaxpr"].jaxpr.outvars[index].aval.ndim + 1
        if eqn.primitive.name in ("jit", "pjit"):
            inner = eqn.params["jaxpr"].jaxpr
            return _is_stacked(inner, inner.outvars[index])
        same = eqn.primitive.name in ("convert_element_type", "copy", "sharding_constraint")
        return same and _is_stacked(jaxpr, eqn.invars[0])
    return False


# ---- checks ----


def _with_auto_axes(mesh: Any) -> Mesh | AbstractMesh:
    """The same mesh with Auto axes: the library states every placement itself, and any loss and optimizer must run."""
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    raise ValueError(f"mesh must be a jax.sharding.Mesh or AbstractMesh, not {type(mesh).__name__}; see jax.make_mesh")


def _check_axes(mesh: Mesh | AbstractMesh, config: ZeroConfig):
    missing = [axis for axis in config.shard_axes if axis not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"shard_axes {missing} are not in the mesh, which has {dict(mesh.shape)}; name axes of the mesh"
        )


def _check_compiler(mesh: Mesh | AbstractMesh, config: ZeroConfig):
    """XLA ends the process ("Invalid binary instruction opcode copy") at such a sum over some axes of several."""
    others = [axis for axis in mesh.axis_names if axis not in config.shard_axes]
    on_cpu = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"
    if others and on_cpu and config.precision.reduce_dtype == "bfloat16":
        raise ValueError(f"reduce_dtype='bfloat16' with mesh axes {others} beside the shard axes makes XLA's compiler "
                         "for CPUs abort the process; use reduce_dtype='float32' on CPU devices")  # fmt: skip


# ---- words ----


def _describe(plan: Plan) -> str:
    axes = ", ".join(f"{axis}={size}" for axis, size in plan.axes.items())
    precision = plan.config.precision
    title = (
        f"ZeRO stage {plan.config.stage}, {tables.count(plan.devices, 'device')} ({axes}); parameters "
        f"{precision.param_dtype}, computed in {precision.compute_dtype}, "
        f"{f'gathered in {precision.gather_dtype}, ' if precision.gather_dtype else ''}"
        f"gradients reduced in {precision.reduce_dtype}{_scaling(plan.config)}"
    )
    shown = [*plan.params, *(leaf for leaf in plan.opt_state if not leaf.follows), *plan.model_state]
    rows = [_row(plan, leaf) for leaf in shown]
    table = tables.render(("leaf", "shape", "dtype", "placed", "a device", "of", "why"), rows, title)
    followers = sum(1 for leaf in plan.opt_state if leaf.follows)
    follow = f"{followers} arrays of the optimizer are placed like the parameters that they follow."
    return "\n".join(filter(None, [table, follow, _idle_axes(plan), _totals(plan)]))


def _idle_axes(plan: Plan) -> str:
    """Of axes along which nothing is divided, neither rows nor arrays."""
    used = {*plan.axes, *(axis for leaf in plan.params for entry in leaf.base for axis in axes_of(entry))}
    idle = {axis: size for axis, size in plan.mesh.shape.items() if axis not in used and size > 1}
    if not idle:
        return ""
    names = ", ".join(f"{axis}={size}" for axis, size in idle.items())
    return (
        f"Nothing is divided over {names}: unless the loss places arrays over it, its devices repeat the same work. "
        "For rows and state over all devices, name it in shard_axes."
    )


def _scaling(config: ZeroConfig) -> str:
    if config.scaling is None:
        return ""
    scaled = "" if config.loss_scale is None else f", loss scaled by {config.scaling.initial:g} at first"
    return f"{scaled}, steps skipped whose gradient is not finite"


def _row(plan: Plan, leaf: Leaf) -> tuple[str, ...]:
    spec = leaf.spec(plan.partitioned_axes)
    placed = ", ".join(f"dim {d} over {'+'.join(axes_of(e))}" for d, e in enumerate(spec) if e is not None) or "whole"
    why = leaf.why if plan.config.stage > 0 or leaf.dim is None else "stage 0"
    if not leaf.trained:
        why = f"frozen; {why}" if is_trainable(leaf) else f"not trained ({leaf.dtype}); {why}"
    if leaf.compute_dtype not in (None, plan.config.precision.compute_dtype, leaf.dtype.name):
        why += f"; computed in {leaf.compute_dtype}"
    here, of = tables.size(plan._bytes(leaf)), tables.size(leaf.bytes)
    return leaf.path, "x".join(map(str, leaf.shape)) or "scalar", str(leaf.dtype), placed, here, of, why


def _totals(plan: Plan) -> str:
    rows = []
    for part in ("params", "opt_state", "model_state"):
        leaves = getattr(plan, part)
        whole = sum(leaf.bytes for leaf in leaves if leaf.dim is None or not plan.partitioned_axes)
        sums = (plan.bytes_per_device(part), sum(leaf.bytes for leaf in leaves), whole)
        rows.append((part, str(len(leaves)), *map(tables.size, sums)))
    rows.append(("state, with step and key", "", tables.size(plan.bytes_per_device()), "", ""))
    return tables.render(("part", "arrays", "a device", "of", "not over shard axes"), rows)
