"""A user's own transformation and loss under the tests of the library: against one device, array by array."""

import dataclasses
import glob
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from zerojax import optimizer, tables
from zerojax.config import Precision
from zerojax.contracts import Tree
from zerojax.losses import as_loss, with_arguments, without_aux
from zerojax.placement import Leaf
from zerojax.plan import Plan, make_plan, mesh_context
from zerojax.state import init_state, place_batch
from zerojax.step import make_train_step, value_and_grad
from zerojax.units.rows import recorded
from zerojax.ways import whole_shapes

_LARGEST, _LARGE, _SMALL = 256, 128, 8  # optax.adafactor factors dims from 128 on, galore projects such


@dataclass(frozen=True)
class Difference:
    """How far one array of the partitioned run is from that of one device, in parts of the latter's largest number.

    >>> Difference("params/w", 3e-7).path
    'params/w'
    """

    path: str
    error: float


@dataclass(frozen=True)
class OptimizerCheck:
    """What `check_optimizer` found; print it.

    Attributes:
      stage, devices, steps: what was run.
      differences: of the losses, then of every array of parameters and optimizer state.

    >>> print(OptimizerCheck(3, 8, 4, (Difference("losses", 0.0), Difference("params/w", 3e-7))))
    stage 3 on 8 devices against one device, 4 steps
     part     arrays   largest difference   where
    -------------------------------------------------
     losses        1              0.0e+00   losses
     params        1              3.0e-07   params/w
    """

    stage: int
    devices: int
    steps: int
    differences: tuple[Difference, ...]

    def __str__(self):
        parts: dict[str, list[Difference]] = {}
        for found in self.differences:
            parts.setdefault(found.path.partition("/")[0], []).append(found)
        worst = {part: _worst(found)[0] for part, found in parts.items()}
        rows = [(part, len(found), f"{worst[part].error:.1e}", worst[part].path) for part, found in parts.items()]
        title = f"stage {self.stage} on {tables.count(self.devices, 'device')} against one device, {self.steps} steps"
        return tables.render(("part", "arrays", "largest difference", "where"), rows, title)


def check_optimizer(
    tx: optax.GradientTransformation, plan: Plan, *, steps: int = 4, tolerance: float = 1e-5
) -> OptimizerCheck:
    """Run ``tx`` partitioned as the plan says and on one device, and compare every array of the two.

    The plan's parameters are stood in for by small ones of float32: the same tree and paths, as many dims, partitioned
    along the same dims over the same mesh; the two largest dims of an array are cut to 256 and 128 at most, the others
    to 8 (or a multiple of what divides them). The loss is a quadratic in each number. It is compiled twice and run, at
    the plan's stage; the plan's own state and loss are not needed.

    Args:
      tx: any transformation; need not be the one that the plan was made for.
      plan: made by `make_plan` on devices that exist.
      steps: as many as it takes until all of ``tx`` has acted, such as the inner one of `optax.MultiSteps`.
      tolerance: for each array, relative to its largest number. Float32 sums in another order differ by some 1e-7 of
        it. Muon's five iterations enlarge the rounding of small singular values up to 485 times: give it 1e-4.

    Returns:
      The differences found, all within the tolerance.

    Raises:
      ValueError: if an array differs by more, naming it; if a step cannot serve ``tx`` (see `make_train_step`); if the
        plan's mesh has no devices.

    >>> init_fn = lambda key: {"w": jax.random.normal(key, (4096, 512))}
    >>> plan = make_plan(init_fn, optax.adam(1e-3), jax.make_mesh((8,), ("data",)))
    >>> found = check_optimizer(optax.lamb(1e-3), plan)
    >>> max(difference.error for difference in found.differences) < 1e-5
    True
    """
    if not isinstance(plan.mesh, Mesh):
        raise ValueError("the plan's mesh has no devices, so nothing can be run on it; make the plan on a real mesh")
    small, params = _stand_in(tx, plan)
    optimizer.check_update(tx, small)
    batches = [_rows(2 * plan.devices, step) for step in range(steps)]
    with jax.default_matmul_precision("highest"):  # lower ones round what partitioning leaves equal but for rounding
        right = _alone(tx, small, params, batches)
        ours = _partitioned(tx, small, params, batches)
    differences = tuple(Difference(path, _error(a, b)) for path, a, b in _pairs(ours, right))
    found = OptimizerCheck(plan.config.stage, plan.devices, steps, differences)
    wrong = [d for d in _worst(differences) if not d.error <= tolerance]
    if wrong:
        names = "; ".join(f"{d.path} by {d.error:.1e}" for d in wrong[:5]) + (" and others" if wrong[5:] else "")
        raise ValueError(f"{tables.count(len(wrong), 'array')} of the partitioned run differ by more than {tolerance} "
                         f"of the largest number from those of one device: {names}\n{found}")  # fmt: skip
    return found


@dataclass(frozen=True)
class LossCheck:
    """How far loss and gradient on a plan's devices are from those of one device.

    Attributes:
      stage, devices: as of the plan.
      rows: which rows a device computes the loss of, and why.
      differences: one for the loss, and one for each parameter's gradient.
    """

    stage: int
    devices: int
    rows: str
    differences: tuple[Difference, ...]

    def __str__(self):
        worst = [(d.path, f"{d.error:.1e}") for d in _worst(self.differences)[:10]]
        title = f"stage {self.stage} on {tables.count(self.devices, 'device')} against one device"
        return f"{tables.render(('array', 'difference'), worst, title)}\n\nrows: {self.rows}"


def check_loss(
    loss_fn: Callable,
    plan: Plan,
    batch: Tree,
    *,
    params: Tree = None,
    model_state: Tree = None,
    tolerance: float = 1e-5,
) -> LossCheck:
    """Loss and gradient on the plan's devices beside plain JAX on one of them, of the same rows.

    Args:
      loss_fn: as for `make_train_step`. It gets no random key: noise differs by device.
      plan: made by `make_plan` on devices that exist; one device must hold the model and its gradient.
      batch: all rows of a step.
      params, model_state: values to compare at; normal numbers of deviation 0.02, and zeros, where none are given.
      tolerance: of each array, relative to its largest number. Computation in 16 bits wants 1e-2.

    Returns:
      The differences found, all within the tolerance.

    Raises:
      ValueError: if an array differs by more, naming it.

    >>> init_fn = lambda key: {"w": jnp.zeros((16, 8))}
    >>> plan = make_plan(init_fn, optax.sgd(0.1), jax.make_mesh((8,), ("data",)))
    >>> found = check_loss(lambda p, x: jnp.std(x @ p["w"]), plan, np.arange(512.0, dtype="f").reshape(32, 16))
    >>> found.rows.partition(".")[0]
    'own rows, and what devices exchange'
    """
    if not isinstance(plan.mesh, Mesh):
        raise ValueError("the plan's mesh has no devices, so nothing can be run on it; make the plan on a real mesh")
    params = _normal(plan) if params is None else params
    if model_state is None:
        model_state = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), plan.abstract_state.model_state)
    params = jax.device_put(params, plan.state_shardings.params)
    ours = jax.jit(value_and_grad(loss_fn, plan, has_aux=True), compiler_options=plan.compiler_options)
    with jax.default_matmul_precision("highest"), recorded() as told:
        (loss, _), grads = ours(params, place_batch(batch, plan), None, model_state)
        right = _loss_alone(loss_fn, plan, jax.device_get((params, batch, model_state)))
    differences = tuple(
        Difference(path, _error(a, b)) for path, a, b in _pairs((loss, grads), right, ("loss", "gradient"))
    )
    found = LossCheck(plan.config.stage, plan.devices, "; ".join(told), differences)
    wrong = [d for d in _worst(differences) if not d.error <= tolerance]
    if wrong:
        raise ValueError(f"loss or gradient differ by more than {tolerance} of the largest number\n{found}")
    return found


def _normal(plan: Plan) -> Tree:
    """Numbers in the place of parameters, alike on every process."""
    random = np.random.default_rng(0)

    def numbers(leaf):
        floats = jnp.issubdtype(leaf.dtype, jnp.floating)
        return (random.standard_normal(leaf.shape) * 0.02 if floats else np.zeros(leaf.shape)).astype(leaf.dtype)

    return jax.tree.map(numbers, plan.abstract_state.params)


def _loss_alone(loss_fn: Callable, plan: Plan, given: Tree) -> Tree:
    """``(mean loss, gradient)`` by plain JAX on one device."""
    call, count = with_arguments(loss_fn), plan.config.accumulate
    devices: Any = plan.mesh.devices
    device = next(d for d in devices.flat if d.process_index == jax.process_index())
    dtypes = jax.tree.map(lambda a: a.dtype, whole_shapes(given[0], plan))

    @jax.jit
    def run(params, batch, model_state):
        def mean(trained):
            seen = jax.tree.map(lambda a, dtype: a.astype(dtype), plan.with_trained(params, trained), dtypes)
            sums, state = [], model_state
            for i in range(count):
                part = jax.tree.map(lambda a, i=i: a[i::count], batch)
                made = as_loss(without_aux(call(seen, part, None, state))[0], "loss_fn")
                sums, state = [*sums, made], state if made.model_state is None else made.model_state
            weight = jax.lax.stop_gradient(sum(one.weight for one in sums))
            return sum(one.total for one in sums) / weight

        return jax.value_and_grad(mean)(plan.trained(params))

    return run(*jax.device_put(given, device))


# ---- small parameters in the place of the plan's ----


def _stand_in(tx: optax.GradientTransformation, plan: Plan) -> tuple[Plan, Tree]:
    """A plan of the same decisions for small parameters, and those; what the optimizer does not see is left out."""
    leaves = plan.optimized(plan.treedefs[0].unflatten(plan.params))
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: random.normal(size=_small_shape(leaf, plan)).astype(np.float32), leaves)
    with_paths = jax.tree.leaves_with_path(leaves)
    dims = {jax.tree_util.keystr(keys, simple=True, separator="/"): leaf.dim for keys, leaf in with_paths}
    config = dataclasses.replace(
        plan.config, precision=Precision(), accumulate=1, keep_whole_below=0, allow_whole=True,
        trainable="*", frozen=(), compute_dtypes=(), loss_scale=None, skip_nonfinite=False,
        overrides=[(glob.escape(path), dim) for path, dim in dims.items()],
    )  # fmt: skip
    specs = jax.tree.map(lambda leaf: PartitionSpec(*leaf.base), leaves)
    return make_plan(lambda key: jax.tree.map(jnp.zeros_like, params), tx, plan.mesh, config, base_specs=specs), params


def _small_shape(leaf: Leaf, plan: Plan) -> tuple[int, ...]:
    """Cut so that larger dims stay larger ones, and each can still be divided as it was."""
    second = sorted(leaf.shape)[-2] if len(leaf.shape) > 1 else 0
    limits = [_LARGEST if size > second else _LARGE if size == second else _SMALL for size in leaf.shape]
    parts = [_parts(leaf, dim, plan) for dim in range(len(leaf.shape))]
    return tuple(
        min(size, -(-limit // part) * part) for size, limit, part in zip(leaf.shape, limits, parts, strict=True)
    )


def _parts(leaf: Leaf, dim: int, plan: Plan) -> int:
    """Into how many a dim is divided."""
    if dim == leaf.dim:
        return plan.devices
    axes = leaf.base[dim] or ()
    return math.prod(plan.mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))


# ---- the two runs ----


def _rows(count: int, step: int) -> np.ndarray:
    return np.random.default_rng(step + 1).normal(size=(count, 2)).astype(np.float32)


def _loss(params: Tree, rows_R2: jax.Array) -> jax.Array:
    """Half of the sum of ``(slope p - target + shift)**2``, in the mean over the rows; constants left out."""
    slope, shift = 1 + 0.3 * rows_R2[:, 0], 0.1 * rows_R2[:, 1]
    square, cross, mean = jnp.mean(slope**2), jnp.mean(slope * shift), jnp.mean(slope)

    def of_leaf(p):
        target = jnp.cos(jnp.arange(p.size, dtype=jnp.float32)).reshape(p.shape)
        return jnp.sum(0.5 * square * p**2 + p * (cross - mean * target))

    return sum(map(of_leaf, jax.tree.leaves(params)), jnp.float32(0))


def _alone(tx, plan: Plan, params: Tree, batches: Sequence[np.ndarray]) -> Tree:
    """By plain optax on one device of the mesh: ``(losses, params, opt_state)``."""
    devices: Any = plan.mesh.devices
    device = next(d for d in devices.flat if d.process_index == jax.process_index())
    mesh = Mesh(np.reshape(device, (1,) * len(plan.mesh.axis_names)), plan.mesh.axis_names)

    @jax.jit
    def step(params, opt_state, rows):
        loss, grads = jax.value_and_grad(_loss)(params, rows)
        updates, opt_state = optimizer.update(tx, grads, opt_state, params, loss)
        return loss, optax.apply_updates(params, updates), opt_state

    losses = []
    with mesh_context(mesh):
        params = jax.device_put(params, device)
        opt_state = jax.jit(tx.init)(params)
        for rows in batches:
            loss, params, opt_state = step(params, opt_state, rows)
            losses.append(loss)
    return jnp.stack(losses), params, opt_state


def _partitioned(tx, plan: Plan, params: Tree, batches: Sequence[np.ndarray]) -> Tree:
    """By the library on the whole mesh: the same, whole."""
    state = init_state(lambda key: jax.tree.map(jnp.zeros_like, params), tx, plan, jax.random.key(0), params=params)
    step, losses = make_train_step(_loss, tx, plan), []
    for rows in batches:  # every process has all rows, and places its own
        placed = jax.make_array_from_callback(rows.shape, plan.batch_sharding, lambda index, rows=rows: rows[index])
        state, metrics = step(state, placed)
        losses.append(metrics["loss"])
    with mesh_context(plan.mesh):
        whole = jax.jit(lambda *tree: tree, out_shardings=plan.replicated)
        return whole(jnp.stack(losses), state.params, state.opt_state)


# ---- the comparison ----


def _pairs(
    ours: Tree, right: Tree, names: Sequence[str] = ("losses", "params", "opt_state")
) -> Iterable[tuple[str, Any, Any]]:
    for name, a, b in zip(names, ours, right, strict=True):
        for (keys, leaf), other in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
            path = jax.tree_util.keystr(keys, simple=True, separator="/")
            yield f"{name}/{path}" if path else name, _numbers(leaf), _numbers(other)


def _numbers(leaf: jax.Array) -> np.ndarray:
    leaf = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return np.asarray(leaf).astype(np.float64)


def _error(ours: np.ndarray, right: np.ndarray) -> float:
    if np.array_equal(ours, right, equal_nan=True):
        return 0.0
    return float(np.abs(ours - right).max() / max(np.abs(right).max(), np.finfo(np.float32).tiny))


def _worst(differences: Iterable[Difference]) -> list[Difference]:
    """The largest first; what is no number before all."""
    return sorted(differences, key=lambda d: -math.inf if math.isnan(d.error) else -d.error)
