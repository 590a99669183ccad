"""The train state: born partitioned, checked before a step, gathered for evaluation or export."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from zerojax import tables
from zerojax.boxes import is_box, unboxed
from zerojax.contracts import TrainState, Tree, Variables
from zerojax.losses import is_key_array
from zerojax.placement import at_rest
from zerojax.plan import Plan, born, mesh_context, on_active_mesh, on_own_mesh
from zerojax.precision import is_key
from zerojax.scaling import first_scale

_RNG_STREAM = 0x5EED  # sets the key that training folds apart from all that init_fn derives of the same key


def init_state(
    init_fn: Callable[[Any], Tree], tx: optax.GradientTransformation, plan: Plan, key: Any, *, params: Tree = None
) -> TrainState:
    """Make the train state, each device only its own part.

    Parameters and optimizer state come from one compiled program each, so that nothing is whole anywhere on the way
    (unless ``init_fn`` itself needs it, as an orthogonal initializer does). The values are the same on every mesh.

    Args:
      init_fn, tx: those that the plan was made for.
      plan: where everything goes.
      key: for ``init_fn``, as it is; the key for training, of JAX's default kind, is derived from it.
      params: parameters that exist already (pretrained ones, on the host or on devices, in linen's boxes or not) in
        place of ``init_fn``'s; they are cast to ``param_dtype``.

    Raises:
      ValueError: if the plan was made for other parameters or another ``tx``, or its mesh has no devices.

    >>> from zerojax import make_plan
    >>> init_fn, tx = lambda key: {"w": jax.random.normal(key, (16, 24))}, optax.adam(1e-3)
    >>> plan = make_plan(init_fn, tx, jax.make_mesh((8,), ("data",)))
    >>> tuple(init_state(init_fn, tx, plan, jax.random.key(0)).params["w"].sharding.spec)
    (None, 'data')
    """
    if not isinstance(plan.mesh, jax.sharding.Mesh):
        raise ValueError("the plan's mesh has no devices, so no state can be made on it; make the plan on a real mesh")
    check_transform(tx, plan)
    shardings = plan.state_shardings
    if not isinstance(key, jax.Array):
        raise ValueError(f"key must be a key such as jax.random.key(0), not {key!r}")
    key = _everywhere(key, plan)

    init = born(init_fn, plan.config)
    with mesh_context(plan.mesh):
        _check_shapes(jax.eval_shape(init, key).params, plan.abstract_state.params, "init_fn's parameters")
        if params is None:
            variables = jax.jit(init, out_shardings=Variables(shardings.params, shardings.model_state))(key)
        else:  # init_fn makes the model state only
            model_state = jax.jit(lambda key: init(key).model_state, out_shardings=shardings.model_state)(key)
            variables = Variables(_place_params(params, plan), model_state)
        opt_state, (step, rng, scale) = jax.jit(
            lambda params, key: (_own_copy(tx.init)(params), _scalars(key, plan)),
            out_shardings=(shardings.opt_state, plan.replicated),
        )(plan.optimized(variables.params), key)
    state = TrainState(step, variables.params, opt_state, rng, variables.model_state, scale)
    return on_active_mesh(state, plan)


def _everywhere(key: Any, plan: Plan) -> Any:
    """The key on all devices: one made under another active mesh carries that mesh. By its numbers, from the host:
    ``device_put`` refuses typed keys for the devices of several processes."""
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    data = jax.device_put(np.asarray(jax.random.key_data(key) if typed else key), plan.replicated)
    if not typed:
        return data
    with mesh_context(plan.mesh):
        return jax.jit(
            lambda data: jax.random.wrap_key_data(data, impl=jax.random.key_impl(key)), out_shardings=plan.replicated
        )(data)


def gather_params(params: Tree, plan: Plan) -> Tree:
    """Whole parameters on every device, for sampling, evaluation or export; copies, safe from later donated steps.

    Args:
      params: the parameters of a state of this plan.

    >>> from zerojax import make_plan
    >>> init_fn, tx = lambda key: {"w": jax.random.normal(key, (16, 24))}, optax.sgd(1e-3)
    >>> plan = make_plan(init_fn, tx, jax.make_mesh((8,), ("data",)))
    >>> state = init_state(init_fn, tx, plan, jax.random.key(0))
    >>> gather_params(state.params, plan)["w"].addressable_shards[0].data.shape
    (16, 24)
    """
    _check_arrays(params, plan.state_shardings.params, plan.abstract_state.params, "params")
    with mesh_context(plan.mesh):
        whole = jax.jit(_own_copy(lambda p: p), out_shardings=plan.replicated)(on_own_mesh(params, plan))
    return on_active_mesh(whole, plan)


def check_transform(tx: optax.GradientTransformation, plan: Plan):
    """Raise a ``ValueError`` unless ``tx`` makes the optimizer state that the plan has places for."""
    with mesh_context(plan.mesh):
        made = jax.eval_shape(tx.init, plan.optimized(plan.abstract_state.params))
    _check_shapes(made, plan.abstract_state.opt_state, "the arrays of the optimizer state of tx")


def check_state(state: Any, plan: Plan):
    """Raise a ``ValueError`` unless ``state`` is alive and placed as the plan says."""
    if not isinstance(state, TrainState):
        raise ValueError(f"state must be a zerojax.TrainState, not {type(state).__name__}; make it with init_state")
    if (state.loss_scale is None) != (plan.config.scaling is None):
        has, lacks, scale = ("the plan scales the loss or skips steps", "the state was made without",
                             "zerojax.scaling.first_scale(plan.config.scaling)")  # fmt: skip
        if plan.config.scaling is None:
            has, lacks, scale = "the state has a loss_scale", "the plan's config has none", "None"
        raise ValueError(f"{has}, {lacks}; to go on, move dataclasses.replace(state, loss_scale={scale}) there with "
                         "jax.device_put(..., plan.state_shardings)")  # fmt: skip
    _check_arrays(state, plan.state_shardings, plan.abstract_state, "state")


def with_placed_scalars(state: Any, plan: Plan) -> Any:
    """The state with numbers and unplaced arrays placed where the plan has a whole scalar: a learning rate that was set
    between steps (`optax.inject_hyperparams`). In the planned dtype, so that no step is compiled again."""
    if not isinstance(state, TrainState) or jax.tree.structure(state) != jax.tree.structure(plan.abstract_state):
        return state  # `check_state` says what is wrong

    def place(leaf, planned, sharding):
        if planned.shape or np.shape(leaf) or _is_placed(leaf, sharding):
            return leaf
        if is_key(planned) or not np.can_cast(_kind(leaf), planned.dtype, "same_kind"):
            return leaf
        return jax.device_put(np.asarray(leaf, planned.dtype), sharding)

    return jax.tree.map(place, state, plan.abstract_state, plan.state_shardings)


def _kind(leaf: Any) -> Any:
    return np.asarray(leaf).dtype if not hasattr(leaf, "dtype") else leaf.dtype


def _is_placed(leaf: Any, sharding: Any) -> bool:
    own = getattr(leaf, "sharding", None)
    return own is not None and (own == sharding or own.is_equivalent_to(sharding, leaf.ndim))


def evaluated(state: Any, plan: Plan) -> TrainState:
    """What evaluation reads of a state, checked: a `TrainState`, or any object with ``params``, such as Flax's."""
    if isinstance(state, TrainState) or not hasattr(state, "params"):
        check_state(state, plan)
        return on_own_mesh(dataclasses.replace(state, opt_state=None, loss_scale=None), plan)
    model_state, placed, planned = _beside_params(state, plan), plan.state_shardings, plan.abstract_state
    _check_arrays(state.params, placed.params, planned.params, "state.params")
    _check_arrays(model_state, placed.model_state, planned.model_state, "state.model_state")
    return on_own_mesh(TrainState(None, state.params, None, None, model_state), plan)


def _beside_params(state: Any, plan: Plan) -> Tree:
    """The model state of a state of another class: a field ``model_state``, or one for each collection of it."""
    planned = plan.abstract_state.model_state
    by_name = isinstance(planned, Mapping) and all(hasattr(state, name) for name in planned)
    if hasattr(state, "model_state") or not by_name:
        return getattr(state, "model_state", None)
    return {name: getattr(state, name) for name in planned}


def check_own_update(plan: Plan, name: str):
    """Raise a ``ValueError`` if the plan wants more of the update than a user's own loop would do."""
    config = plan.config
    asked = {
        "loss_scale": config.loss_scale is not None,
        "skip_nonfinite": config.skip_nonfinite,
        "rounding='stochastic'": config.precision.rounding != "nearest",
    }
    found = [option for option, given in asked.items() if given]
    if found:
        raise ValueError(
            f"{name} leaves the update to you, but the plan's config has {', '.join(found)}, which is part of the "
            "update: use zerojax.make_train_step and zerojax.init_state, or make a plan without and do it yourself "
            "(scale the loss, divide the gradients, keep the old state where they are not finite), or compute in bf16"
        )


def check_params(params: Tree, plan: Plan):
    """Raise a ``ValueError`` unless ``params`` (arrays, or values traced under ``jit``) have the plan's shapes."""
    _check_shapes(params, plan.abstract_state.params, "params")


def place_batch(batch: Tree, plan: Plan) -> Tree:
    """The batch as global arrays, rows divided over the shard axes. What is placed already is not moved.

    Host arrays are this process's own rows: with several processes each feeds its part of the global batch.
    """
    processes = jax.process_count()

    def place(leaf):
        if isinstance(leaf, jax.Array):
            return jax.device_put(leaf, plan.batch_sharding)
        return jax.make_array_from_process_local_data(plan.batch_sharding, np.asarray(leaf))

    local = _as_arrays(batch)
    check_batch(local, plan, micro_batches=1, processes=processes)
    return jax.tree.map(place, local)


def shapes_of(batch: Tree) -> Tree:
    """The shapes of the global batch: host arrays are this process's own rows, as in `place_batch`."""
    processes = jax.process_count()

    def shape(leaf):
        if isinstance(leaf, np.ndarray):
            own = jax.dtypes.canonicalize_dtype(leaf.dtype)
            rows = [size * processes for size in leaf.shape[:1]]
            return jax.ShapeDtypeStruct((*rows, *leaf.shape[1:]), own)
        return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    return jax.tree.map(shape, _as_arrays(batch))


def place_rows(batch: Tree, plan: Plan) -> tuple[Tree, Tree]:
    """As many rows as the devices divide, by `place_batch`, and the rest on every device; ``None`` for no rows.

    Processes do not see each other's rest, so several of them must have none.
    """
    batch = _as_arrays(batch)
    rows = _same_number(_rows_of(batch))
    rest = rows % plan.devices
    if jax.process_count() > 1 or not (rest and rows):
        return place_batch(batch, plan), None

    def part(start, stop):
        cut = lambda a: lax.slice_in_dim(a, start, stop) if isinstance(a, jax.Array) else a[start:stop]  # noqa: E731
        return jax.tree.map(cut, batch)

    first = place_batch(part(0, rows - rest), plan) if rows > rest else None
    return first, jax.device_put(part(rows - rest, rows), plan.replicated)


def check_batch(batch: Tree, plan: Plan, *, micro_batches: int, processes: int = 1):
    """Raise a ``ValueError`` unless the rows can be divided over devices and micro-batches."""
    parts, numbers = plan.devices * micro_batches, _rows_of(batch, processes)
    for (name, rows), leaf in zip(numbers.items(), jax.tree.leaves(batch), strict=True):
        if not rows:
            raise ValueError(f"{name} has no rows (shape {leaf.shape}): there is nothing to take a mean over")
        if rows % parts:
            raise ValueError(
                f"{name} has {rows} rows (shape {leaf.shape}), which cannot be divided over "
                f"{tables.count(plan.devices, 'device')} (axes {dict(plan.axes)}) x {micro_batches} micro-batches: "
                f"use a multiple of {parts} rows, or give the loss a row mask and pad"
            )
    _same_number(numbers)


def _rows_of(batch: Tree, processes: int = 1) -> dict[str, int]:
    """The number of rows of each array, of all processes together."""
    numbers = {}
    for keys, leaf in jax.tree.leaves_with_path(batch):
        name = "batch" + jax.tree_util.keystr(keys)
        if not keys and is_key_array(leaf):
            raise ValueError("the batch is a random key: the batch comes first, as in loss_fn(params, batch, rng)")
        if not jnp.ndim(leaf):
            raise ValueError(f"{name} is a scalar and has no rows to divide over devices; repeat it per row or close "
                             "over it in the loss")  # fmt: skip
        numbers[name] = leaf.shape[0] * (1 if isinstance(leaf, jax.Array) else processes)
    if not numbers:
        raise ValueError("the batch holds no arrays")
    return numbers


def _same_number(numbers: dict[str, int]) -> int:
    if len(set(numbers.values())) > 1:
        raise ValueError(f"the leaves of the batch have different numbers of rows: {numbers}")
    return next(iter(numbers.values()))


def _as_arrays(batch: Tree) -> Tree:
    def as_array(keys, leaf):
        if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
            return leaf
        array = np.asarray(leaf)
        if array.dtype.kind in "OSUMm":
            raise ValueError(f"batch{jax.tree_util.keystr(keys)} has dtype {array.dtype}, which no device can hold; "
                             "keep such data out of the batch, or encode it as numbers")  # fmt: skip
        return array

    return jax.tree.map_with_path(as_array, batch)


def _own_copy(f: Callable) -> Callable:
    """``f`` with a buffer of its own for every output: some optimizers return their very inputs, and donation would
    then take the same buffer twice."""
    return lambda *args: jax.tree.map(jnp.copy, f(*args))


def _scalars(key: Any, plan: Plan) -> tuple[Any, Any, Any]:
    """The state's step, key and loss scale."""
    scaling = plan.config.scaling
    return jnp.int32(0), _train_key(key), scaling and first_scale(scaling)


def _train_key(key: Any) -> Any:
    key = key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
    key = jax.random.fold_in(key, _RNG_STREAM)
    planned = jax.random.key(0).dtype  # the plan knows the default kind of key only
    return key if key.dtype == planned else jax.random.key(jax.random.bits(key))


def _place_params(params: Tree, plan: Plan) -> Tree:
    """Existing parameters moved, then cast; a copy, so that the caller's arrays outlive the donated state."""
    params = jax.tree.map(lambda p: p if isinstance(p, jax.Array) else np.asarray(p), unboxed(params))

    def shape(leaf):
        own = jax.dtypes.canonicalize_dtype(leaf.dtype) if isinstance(leaf, np.ndarray) else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, own)

    after_cast = jax.eval_shape(lambda p: at_rest(p, plan.config), jax.tree.map(shape, params))
    _check_shapes(after_cast, plan.abstract_state.params, "params")
    shardings = plan.state_shardings.params
    return jax.jit(_own_copy(lambda p: at_rest(p, plan.config)), out_shardings=shardings)(
        jax.device_put(params, shardings)
    )


def _check_shapes(tree: Tree, expected: Tree, what: str):
    """Same tree structure, and the same shape and dtype for every leaf."""
    _check_structure(tree, expected, what)
    for (keys, leaf), want in zip(jax.tree.leaves_with_path(tree), jax.tree.leaves(expected), strict=True):
        if not hasattr(leaf, "dtype"):
            raise ValueError(f"{what}{jax.tree_util.keystr(keys)} is the {type(leaf).__name__} {leaf!r}, planned was "
                             f"{want.dtype}{list(want.shape)}; give an array")  # fmt: skip
        if leaf.shape != want.shape or leaf.dtype != want.dtype:
            raise ValueError(
                f"{what} do not fit the plan: {jax.tree_util.keystr(keys)} is {leaf.dtype}{list(leaf.shape)}, planned "
                f"was {want.dtype}{list(want.shape)}; use the init_fn and tx that make_plan was given, or make a new "
                "plan"
            )


def _check_structure(tree: Tree, expected: Tree, what: str):
    if jax.tree.structure(tree) != jax.tree.structure(expected):
        have, want = ({jax.tree_util.keystr(k) for k, _ in jax.tree.leaves_with_path(t)} for t in (tree, expected))
        odd = f"missing {sorted(want - have)[:3]}, not planned {sorted(have - want)[:3]}"
        if any(map(is_box, jax.tree.leaves(tree, is_leaf=is_box))):
            raise ValueError(f"{what} do not fit the plan, whose arrays are in no boxes ({odd}); take them out with "
                             "flax.linen.unbox")  # fmt: skip
        raise ValueError(f"{what} do not fit the plan: another tree ({odd}); make a plan for this init_fn and tx")


def _check_arrays(tree: Tree, shardings: Tree, expected: Tree, what: str):
    _check_shapes(tree, expected, what)
    for (keys, leaf), sharding in zip(jax.tree.leaves_with_path(tree), jax.tree.leaves(shardings), strict=True):
        name = what + jax.tree_util.keystr(keys)
        if not isinstance(leaf, jax.Array):
            raise ValueError(f"{name} is a {type(leaf).__name__}, not placed on the plan's devices; {_MOVE}")
        if leaf.is_deleted():
            raise ValueError(f"{name} was donated: this train state went into an earlier step, which reused its "
                             "memory; go on with the state that the step returned")  # fmt: skip
        if not _is_placed(leaf, sharding):
            raise ValueError(f"{name} is placed as {leaf.sharding}, the plan says {sharding}; {_MOVE}")


_MOVE = "move it there with jax.device_put(state, plan.state_shardings)"
