"""The steps: the gradient of each stage, accumulation, the update.

The upper half runs under `jax.shard_map` on every device's own rows: cast, gather, differentiate, reduce-scatter,
weigh. The lower half, the optimizer, sees global arrays under ``jit``, so that norms, trust ratios and matrix products
are those of whole parameters.
"""

import dataclasses
import inspect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from zerojax import collectives, optimizer, tables, units
from zerojax.config import LossScale
from zerojax.contracts import Loss, ScaleState, TrainState, Tree
from zerojax.passes import Traffic
from zerojax.plan import Leaf, Plan, mesh_context
from zerojax.precision import (
    all_finite,
    cast,
    cast_like,
    floating,
    gradient_dtype,
    merge,
    next_scale,
    round_stochastically,
    rounded,
    with_overwritten,
    without_overwritten,
)
from zerojax.state import (
    check_batch,
    check_own_update,
    check_params,
    check_state,
    check_transform,
    evaluated,
    place_batch,
    place_rows,
)

_LATE = 8  # steps after which it is looked at whether training is stuck: by then the numbers are there
_ROUNDING_STREAM = 0xB17  # sets the keys of stochastic rounding apart from those of the micro-batches


@dataclass(frozen=True)
class _Schedule:
    """What makes a stage: when parameters are gathered and when gradients are reduced."""

    gather: Literal["step", "use"]
    reduce: Literal["step", "micro-batch"]


# arXiv 1910.02054, section 5. Stage 0 is stage 1 with nothing partitioned: gathers vanish, reduce-scatters are
# all-reduces.
_SCHEDULES = {
    0: _Schedule(gather="step", reduce="step"),
    1: _Schedule(gather="step", reduce="step"),
    2: _Schedule(gather="step", reduce="micro-batch"),
    3: _Schedule(gather="use", reduce="micro-batch"),
}


@dataclass(frozen=True)
class Step:
    """A compiled step with its checks: ``step(state, batch)``.

    Attributes:
      plan: what the state must fit.
      micro_batches: into how many parts each device's rows are divided.
      jitted: the function under ``jax.jit``.
      watch: raises if training is stuck.
    """

    plan: Plan
    micro_batches: int
    jitted: Any
    watch: "_Watch | None" = dataclasses.field(default=None, compare=False, repr=False)

    def __call__(self, state: TrainState, batch: Tree) -> Any:
        check_state(state, self.plan)
        batch = place_batch(batch, self.plan)
        check_batch(batch, self.plan, micro_batches=self.micro_batches)
        if self.watch:
            self.watch.check()
        with mesh_context(self.plan.mesh):
            made = self.jitted(state, batch)
        if self.watch:
            self.watch.add(made[1]["stuck"])
        return made

    def lower(self, state: TrainState, batch: Tree) -> jax.stages.Lowered:
        """Lower the step for arrays or shapes (``plan.abstract_state``, `jax.ShapeDtypeStruct`)."""
        check_batch(batch, self.plan, micro_batches=self.micro_batches)
        with mesh_context(self.plan.mesh):
            return self.jitted.lower(state, batch)


class _Watch:
    """Raises if training is stuck; looks at the counts of some steps ago, so that the host waits for no running step.

    Always as many steps ago, so that all processes raise at the same call.
    """

    def __init__(self, config: LossScale):
        self._patience, self._counts = config.patience, deque[jax.Array]()

    def add(self, count: jax.Array):
        count.copy_to_host_async()
        self._counts.append(count)

    def check(self):
        if len(self._counts) < _LATE or (count := int(self._counts.popleft())) < self._patience:
            return
        self._counts.clear()
        raise FloatingPointError(
            f"{count} steps in a row had gradients that are not finite, with a loss scale that cannot be lowered: "
            "nothing was learned in them, and the state is as it was before. Look for the infinity or NaN in the loss, "
            "the parameters or the batch (jax.debug_nans finds it), lower the learning rate, compute in bf16, or allow "
            "more by LossScale(minimum=..., patience=...)"
        )


def make_train_step(loss_fn: Callable, tx: optax.GradientTransformation, plan: Plan) -> Step:
    """One training step of the plan's stage, compiled; it takes over the memory of the state that it is given.

    Args:
      loss_fn: ``loss_fn(params, batch, rng)``, with mutable model state ``loss_fn(params, batch, rng, model_state)``;
        trailing arguments may be left out. It sees whole parameters in ``compute_dtype`` and one device's rows of one
        micro-batch, and returns the mean over those rows, or a `Loss`. The shard axes are named axes inside it
        (``nn.BatchNorm(axis_name="data")``). ``rng`` differs by step, micro-batch and device.
      tx: the transformation that the plan was made for. It sees the mean gradient in float32, and gets ``value``, the
        mean loss, and ``grad`` as extra arguments if it takes such (`optax.GradientTransformationExtraArgs`).
      plan: from `make_plan`.

    Returns:
      ``step(state, batch) -> (state, metrics)``. The batch is a tree of arrays with rows in dim 0, on the host or
      placed by ``plan.batch_sharding``; micro-batch ``i`` of ``k`` holds the rows ``i, i + k, i + 2 k, ...``. Metrics:
      ``loss``; ``grad_norm`` of the whole mean gradient in float32, before ``tx``; ``step``, the updates made so far;
      and the loss's own. They stay on the devices until they are read. Where the plan scales the loss or skips steps,
      also ``loss_scale``, the one that this step used (``grad_norm`` is that of the gradient without it); ``skipped``,
      whether the gradient was not finite, so that the state is the old one but for its loss scale; and ``stuck``, the
      overflows in a row that no lower scale could help.

    Raises:
      ValueError: for a ``tx`` that asks for more than that (a line search, gradients of single rows); for a ``tx`` or
        a state that does not fit the plan, a state that was donated before, rows that do not divide, a loss that is no
        scalar; all before compilation.
      FloatingPointError: from ``step``, if ``stuck`` reached ``patience`` 8 calls before. The state that it was given
        stays usable.

    >>> from zerojax import init_state, make_plan
    >>> init_fn, tx = lambda key: {"w": jnp.zeros((8,))}, optax.sgd(0.5)
    >>> plan = make_plan(init_fn, tx, jax.make_mesh((8,), ("data",)))
    >>> step = make_train_step(lambda p, x: jnp.mean((x @ p["w"] - 1) ** 2), tx, plan)
    >>> state, metrics = step(init_state(init_fn, tx, plan, jax.random.key(0)), jnp.ones((16, 8)))
    >>> float(metrics["loss"]), int(state.step)
    (1.0, 1)
    """
    check_transform(tx, plan)
    optimizer.check_update(tx, plan)
    gradient, scaling = _gradient(loss_fn, plan), plan.config.scaling

    def train_step(state, batch):
        rng = jax.random.fold_in(state.rng, state.step)
        scale = state.loss_scale
        loss, grads, model_state = gradient(state.params, batch, rng, state.model_state, scale and scale.scale)
        params, opt_state = _update(tx, grads, loss.total, state, plan)
        new = TrainState(state.step + 1, params, opt_state, state.rng, model_state, state.loss_scale)
        metrics = {"loss": loss.total, "grad_norm": optax.tree.norm(without_overwritten(grads))}
        if scaling and scale:
            new, judged = _unless_overflow(scaling, scale, new, state, grads)
            metrics |= judged
        return new, _add_metrics({**metrics, "step": new.step}, loss.metrics)

    placed = plan.state_shardings
    jitted = jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(placed, plan.batch_sharding),
        out_shardings=(placed, plan.replicated),
        compiler_options=plan.compiler_options,
    )
    return Step(plan, plan.config.accumulate, jitted, _Watch(scaling) if scaling else None)


@dataclass(frozen=True)
class EvalStep:
    """A compiled evaluation with its checks: ``step(state, batch)``, for any number of rows.

    Attributes:
      plan: what the state must fit.
      jitted: the function under ``jax.jit``, of the state, the rows that are divided over the devices, and the others.
    """

    plan: Plan
    jitted: Any

    def __call__(self, state: Any, batch: Tree) -> dict[str, jax.Array]:
        state, (rows, rest) = evaluated(state, self.plan), place_rows(batch, self.plan)
        with mesh_context(self.plan.mesh):
            return self.jitted(state, rows, rest)

    def lower(self, state: TrainState, batch: Tree) -> jax.stages.Lowered:
        """Lower the step for arrays or shapes, with rows that divide."""
        check_batch(batch, self.plan, micro_batches=1)
        with mesh_context(self.plan.mesh):
            return self.jitted.lower(replace(state, opt_state=None, loss_scale=None), batch, None)


def make_eval_step(metric_fn: Callable, plan: Plan) -> EvalStep:
    """Means over a batch of any number of rows, without a gradient and without touching the state.

    As many rows as the devices divide are divided over them. The few that remain are evaluated by every device alike,
    and count once.

    Args:
      metric_fn: takes what a loss takes, and returns what a loss returns, or a mapping of means over the rows. Scalars
        and mappings count by their rows, a `Loss` by its weight.

    Returns:
      ``step(state, batch) -> metrics``; the value of a scalar or a `Loss` is ``metrics["loss"]``. The state is a
      `TrainState`, or any object with ``params``, such as Flax's, whose ``model_state`` is used if the plan has one;
      for such a state there is no ``rng``.

    Raises:
      ValueError: for a state that does not fit the plan; for rows that do not divide, if there are several processes or
        if ``metric_fn`` computes across the shard axes, on which the remaining rows are not.

    >>> from zerojax import init_state, make_plan
    >>> init_fn, tx = lambda key: {"w": jnp.ones((8,))}, optax.sgd(0.5)
    >>> plan = make_plan(init_fn, tx, jax.make_mesh((8,), ("data",)))
    >>> step = make_eval_step(lambda p, x: {"mean": jnp.mean(x @ p["w"])}, plan)
    >>> float(step(init_state(init_fn, tx, plan, jax.random.key(0)), jnp.ones((16, 8)))["mean"])
    8.0
    """
    measure, everywhere = _measure(with_arguments(metric_fn), plan), PartitionSpec()

    def gather(params):
        return merge(_whole(floating(params), plan.wire, plan), params)

    def measure_all(*args):
        return collectives.all_reduce(measure(*args), plan.axes)

    gathered = _on_devices(gather, plan, (_param_specs(plan),), everywhere)
    over_rows = _on_devices(
        measure_all, plan, (everywhere, plan.batch_sharding.spec, everywhere, everywhere), everywhere
    )

    def eval_step(state, rows, rest=None):
        rng = None if state.rng is None else jax.random.fold_in(state.rng, state.step)
        params, args = gathered(state.params), (rng, state.model_state)
        sums = [] if rows is None else [over_rows(params, rows, *args)]
        sums += [] if rest is None else [_off_axes(measure, plan)(params, rest, *args)]
        totals, weight = jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *sums)
        return jax.tree.map(lambda total: _divide(total, weight), totals)

    placed = (replace(plan.state_shardings, opt_state=None, loss_scale=None), plan.batch_sharding, plan.replicated)
    return EvalStep(plan, jax.jit(eval_step, in_shardings=placed, out_shardings=plan.replicated))


def value_and_grad(loss_fn: Callable, plan: Plan, has_aux: bool = False) -> Callable:
    """Drop-in for `jax.value_and_grad` inside a user's own ``jax.jit``: the mean loss and its partitioned gradient.

    Args:
      loss_fn: as for `make_train_step`.
      plan: its stage, accumulation and precision hold.
      has_aux: return ``(loss, aux)`` for ``loss``, where ``aux`` is a `Loss` with the sum and weight of all rows, the
        mean metrics and the new model state.

    Returns:
      ``f(params, batch, rng=None, model_state=None) -> (loss, gradients)``: the gradient of the mean over all rows,
      placed like the parameters and in their dtype; ``None`` for leaves that are not floating, or frozen. Fold the
      step into ``rng`` yourself; micro-batch and device are folded here.

    Raises:
      ValueError: as `make_train_step`, while tracing; also if another mesh than the plan's is active, or if the plan
        scales the loss, skips steps or rounds stochastically, which is part of the update and so yours here.

    >>> from zerojax import make_plan
    >>> params, tx = {"w": jnp.ones((8,))}, optax.sgd(0.5)
    >>> plan = make_plan(lambda key: params, tx, jax.make_mesh((8,), ("data",)))
    >>> f = jax.jit(value_and_grad(lambda p, x: jnp.mean(x @ p["w"]), plan))
    >>> loss, grads = f(jax.device_put(params, plan.state_shardings.params), jnp.ones((16, 8)))
    >>> float(loss), tuple(grads["w"].sharding.spec)
    (8.0, ('data',))
    """
    check_own_update(plan, "value_and_grad")
    gradient = _gradient(loss_fn, plan)

    def run(params, batch, rng=None, model_state=None):
        check_params(params, plan)
        check_batch(batch, plan, micro_batches=plan.config.accumulate)
        _check_key(rng)
        _check_context(plan)
        loss, grads, model_state = gradient(params, batch, rng, model_state, None)
        grads = cast_like(grads, plan.trained(params))
        if not has_aux:
            return loss.total, grads
        return (loss.total, Loss(loss.total * loss.weight, loss.weight, loss.metrics, model_state)), grads

    return run


# ---- evaluation ----


def _measure(call: Callable, plan: Plan) -> Callable:
    """``(whole parameters, rows, rng, model_state) -> ({name: weighted sum}, weight)``."""

    def measure(params, batch, rng, model_state):
        value, rows = call(params, batch, _fold(rng, 0, plan), model_state), len(jax.tree.leaves(batch)[0])
        named = isinstance(value, Mapping)
        loss = _weighted(_as_loss(Loss(0.0, rows, value) if named else value, "metric_fn", rows))
        return _add_metrics({} if named else {"loss": loss.total}, loss.metrics), loss.weight

    return measure


def _off_axes(measure: Callable, plan: Plan) -> Callable:
    """``measure`` for rows that every device has; the shard axes, over which they would count again, have no names."""

    def run(*args):
        try:
            return measure(*args)
        except NameError as error:
            if "axis name" not in str(error):
                raise
            raise ValueError(
                f"metric_fn computes across the axes {tuple(plan.axes)}, which needs rows that can be divided over "
                f"{tables.count(plan.devices, 'device')}; use a multiple of {plan.devices} rows, or give metric_fn a "
                f"row mask and pad ({error})"
            ) from error

    return run


# ---- the upper half: on one device's rows ----


def _gradient(loss_fn: Callable, plan: Plan) -> Callable:
    """``(params, batch, rng, model_state, scale) -> (mean loss, mean gradient, new model state)`` on global arrays.

    The gradient travels scaled and arrives unscaled; ``scale`` is a float32 scalar, or ``None``.
    """
    objective = _objective(with_arguments(loss_fn), plan)

    def local(params, batch, rng, model_state, scale):
        sums, grads, model_state = _local_sums(objective, plan, params, batch, rng, model_state, scale)
        loss = _global_mean(sums, plan)
        dtype = gradient_dtype(plan.config.precision)

        def mean(grad):
            sum_of_means = _divide(grad.astype(dtype), loss.weight)
            return sum_of_means if scale is None else sum_of_means / scale.astype(dtype)

        pairs = zip(grads, _trained(plan.wire, plan), strict=True)
        grads = [g if leaf.overwritten else mean(g) for g, leaf in pairs]
        return loss, grads, collectives.mean(model_state, plan.axes)

    grad_specs = [leaf.shard_spec(tuple(plan.axes)) for leaf in plan.wire if leaf.trained]
    in_specs = (_param_specs(plan), plan.batch_sharding.spec, PartitionSpec(), PartitionSpec(), PartitionSpec())
    sharded = _on_devices(local, plan, in_specs, (PartitionSpec(), grad_specs, PartitionSpec()))

    def run(params, batch, rng, model_state, scale):
        loss, grads, model_state = sharded(params, batch, rng, model_state, scale)
        return loss, jax.tree.structure(plan.trained(params)).unflatten(grads), model_state

    return run


def _on_devices(local: Callable, plan: Plan, in_specs: Any, out_specs: Any) -> Callable:
    """``local`` on every device, manual over the shard axes; other mesh axes stay with the compiler.

    Replication is not checked: with the check on, gradients of replicated parameters arrive already summed and those
    of partitioned ones do not.
    """
    return jax.shard_map(
        local, mesh=plan.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(plan.axes), check_vma=False
    )


def _param_specs(plan: Plan) -> Tree:
    return plan.treedefs[0].unflatten(leaf.shard_spec(plan.partitioned_axes) for leaf in plan.params)


def _local_sums(objective, plan, params, batch, rng, model_state, scale) -> tuple[Loss, list[jax.Array], Tree]:
    """This device's sums over its micro-batches, and the reduced sum of the gradients."""
    config = plan.config
    schedule, precision, count, remat = _SCHEDULES[config.stage], config.precision, config.accumulate, config.remat
    shards, dtype = floating(params), gradient_dtype(precision)

    def gather(shards, leaves):
        return _whole(shards, leaves, plan)

    def reduce(grads, leaves):
        pairs = zip(grads, leaves, strict=True)
        sent = [g if leaf.overwritten else g.astype(precision.reduce_dtype) for g, leaf in pairs]
        return collectives.reduce_scatter(sent, leaves, plan.axes)

    def weigh(grads, leaves, divisor):  # that of a mean becomes that of a sum, in float32 where sums do not overflow
        pairs = zip(grads, leaves, strict=True)
        return [g if leaf.overwritten else g.astype(dtype) * divisor.astype(dtype) for g, leaf in pairs]

    def leaving(grads, leaves, aux):  # what a unit does with its gradient
        weighed = weigh(grads, leaves, aux[1])
        return reduce(weighed, leaves) if every else weighed

    def on_whole(whole, *args):
        return objective(merge(whole, params), *args)

    def on_trained(trained, *args):
        new = iter(trained)
        return on_whole([next(new) if leaf.trained else a for a, leaf in zip(held, plan.wire, strict=True)], *args)

    every, trained = schedule.reduce == "micro-batch", _trained(plan.wire, plan)
    held = gather(shards, plan.wire) if schedule.gather == "step" else shards
    zeros = [jnp.zeros(a.shape, dtype) for a in _trained(shards if every else held, plan)]
    travelling = gather if schedule.gather == "use" else None
    traffic = Traffic(travelling, leaving, remat)
    in_units = units.gradient(on_whole, held, plan.wire, traffic)

    def micro_batch(model_state, index, rows):
        args = rows, _fold(rng, index, plan), model_state, scale
        if every or remat is not None:
            (_, (loss, _)), grads = in_units(index, *args)
            grads = [zero if g is None else g for g, zero in zip(_trained(grads, plan), zeros, strict=True)]
        else:
            (_, (loss, divisor)), grads = jax.value_and_grad(on_trained, has_aux=True)(_trained(held, plan), *args)
            grads = weigh(grads, trained, divisor)
        return loss.model_state, grads, _weighted(loss)

    if count == 1:
        model_state, grads, sums = micro_batch(model_state, 0, batch)
    else:
        model_state, grads, sums = _accumulate(micro_batch, trained, model_state, zeros, _micro_batches(batch, count))
    return sums, grads if every else reduce(grads, trained), model_state


def _accumulate(micro_batch, leaves, model_state, zeros, batches) -> tuple[Tree, list[jax.Array], Loss]:
    """Sums over the micro-batches, in a scan; the model state is threaded through."""

    def body(carry, part):
        model_state, sums = carry
        model_state, grads, weighted = micro_batch(model_state, *part)
        return (model_state, [add(*parts) for parts in zip(sums, grads, leaves, strict=True)]), weighted

    def add(total, grad, leaf):  # what overwrites is largest of all micro-batches, and never below zero
        return jnp.maximum(total, grad) if leaf.overwritten else total + grad.astype(total.dtype)

    count = jax.tree.leaves(batches)[0].shape[0]
    (model_state, sums), weighted = lax.scan(body, (model_state, zeros), (jnp.arange(count), batches))
    return model_state, sums, jax.tree.map(lambda a: a.sum(0), weighted)


def _micro_batches(batch: Tree, count: int) -> Tree:
    """Rows by stride, so that micro-batch ``i`` holds the same rows whatever the number of devices."""
    return jax.tree.map(lambda a: a.reshape(a.shape[0] // count, count, *a.shape[1:]).swapaxes(0, 1), batch)


def _trained(floats: Sequence[Any], plan: Plan) -> list[Any]:
    """Of what stands for each floating parameter, that of those which are trained."""
    return [a for a, leaf in zip(floats, plan.wire, strict=True) if leaf.trained]


def _whole(shards: list[jax.Array], leaves: Sequence[Leaf], plan: Plan) -> list[jax.Array]:
    """Whole parameters, each in the dtype in which the loss sees it.

    The shards are cast just before they travel: sooner, all of them would be held in both dtypes; later, the larger one
    would travel.
    """
    sent = [_sent(shard, leaf) for shard, leaf in zip(shards, leaves, strict=True)]
    whole = collectives.gather(sent, leaves, plan.axes)
    return [array.astype(leaf.compute_dtype) for array, leaf in zip(whole, leaves, strict=True)]


def _sent(shard: jax.Array, leaf: Leaf) -> jax.Array:
    """In the dtype that travels; what stays is only rounded to it."""
    stays = leaf.dim is None and leaf.gather_dtype != leaf.compute_dtype
    return rounded(shard, leaf.gather_dtype) if stays else shard.astype(leaf.gather_dtype)


def _fold(rng: Any, micro_batch: Any, plan: Plan) -> Any:
    if rng is None:
        return None
    return jax.random.fold_in(jax.random.fold_in(rng, micro_batch), device_number(plan))


def device_number(plan: Plan) -> Any:
    """Of the device whose rows these are; of rows that all devices have, one more than the last."""
    try:
        return lax.axis_index(tuple(plan.axes))
    except NameError:
        return plan.devices


def _global_mean(sums: Loss, plan: Plan) -> Loss:
    """Of every device's weighted sums: the mean loss as ``total``, mean metrics, the summed weight."""
    sums = collectives.all_reduce(sums, plan.axes)
    mean = jax.tree.map(lambda a: _divide(a, sums.weight), (sums.total, sums.metrics))
    return Loss(mean[0], sums.weight, mean[1])


def _divide(total: jax.Array, weight: jax.Array) -> jax.Array:
    """``total / weight``, and zero where there is no weight: a batch of padding only must not destroy a run."""
    return jnp.where(weight == 0, weight, total / _divisor(weight))  # a constant zero would cost the compiler a buffer


def _divisor(weight: jax.Array) -> jax.Array:
    """``weight``, or one where there is none."""
    return jnp.where(weight == 0, 1, weight)


# ---- the lower half: on global arrays ----


def _update(tx: optax.GradientTransformation, grads: Tree, loss: jax.Array, state: TrainState, plan: Plan) -> tuple[Tree, Tree]:
    """Parameters and optimizer state after ``tx``, in the dtypes that they had."""
    stochastic = plan.config.precision.rounding == "stochastic"
    seen = plan.optimized(state.params)
    old = cast(seen, jnp.float32) if stochastic else seen
    updates, opt_state = optimizer.update(tx, without_overwritten(grads), state.opt_state, old, loss)
    new = with_overwritten(optax.apply_updates(old, updates), grads)
    trained = plan.trained(state.params)
    params = _rounded(new, trained, state, plan) if stochastic else cast_like(new, trained)
    return plan.with_trained(state.params, params), cast_like(opt_state, state.opt_state)


def _rounded(new: Tree, trained: Tree, state: TrainState, plan: Plan) -> Tree:
    """Updated float32 parameters in the dtypes of the old ones; each with random bits of its own, shard by shard.

    The generator is one whose bits do not depend on the mesh, whatever JAX's default is.
    """
    key = jax.random.fold_in(jax.random.fold_in(state.rng, state.step), _ROUNDING_STREAM)
    key = jax.random.wrap_key_data(jax.random.bits(key, (2,), "uint32"), impl="threefry2x32")

    def round_one(number, new, old, sharding):
        if old.dtype.itemsize >= new.dtype.itemsize:
            return new.astype(old.dtype)
        bits = jax.random.bits(jax.random.fold_in(key, number), new.shape, "uint32")
        return round_stochastically(new, old.dtype, lax.with_sharding_constraint(bits, sharding))

    numbers = [number for number, leaf in enumerate(plan.params) if leaf.trained]
    shardings = [jax.tree.leaves(plan.state_shardings.params)[number] for number in numbers]
    leaves, treedef = jax.tree.flatten(new)
    return treedef.unflatten(map(round_one, numbers, leaves, jax.tree.leaves(trained), shardings))


def _unless_overflow(
    config: LossScale, used: ScaleState, new: TrainState, old: TrainState, grads: Tree
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The new state, or if the gradient is not finite the old one; with the next loss scale, and metrics about it.

    Chosen number by number: the compiler joins the choice with the update, in the donated memory of the old state.
    """
    finite = all_finite(jax.tree.leaves(grads))
    scale = next_scale(config, used, finite)
    kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
    metrics = {"loss_scale": used.scale, "skipped": ~finite, "stuck": scale.stuck}
    return dataclasses.replace(kept, loss_scale=scale), metrics


# ---- the contract of the loss ----


def with_arguments(fn: Callable) -> Callable:
    """``fn(params, batch, rng, model_state)`` for a function that may leave out the last one or two."""
    parameters = inspect.signature(fn).parameters.values()
    if any(p.kind == p.VAR_POSITIONAL for p in parameters):
        return fn
    required = [
        p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    named = [p.name for p in parameters if p not in required and p.name in ("rng", "model_state")]
    needs_key = len(required) > 2 or any(p.name == "rng" and p.default is p.empty for p in parameters)
    if len(required) not in (2, 3, 4) or (len(required) == 4 and named):
        names = ", ".join(p.name for p in required)
        raise ValueError(
            f"the loss must take (params, batch[, rng[, model_state]]), but it requires ({names}). What differs from "
            "row to row is an argument, not closed over: each device gets its own rows"
        )

    def call(params, batch, rng, model_state):
        if rng is None and needs_key:
            raise ValueError(
                f"the loss requires {'rng' if 'rng' in named else required[2].name}, a random key, and none is given: "
                "pass a key such as jax.random.key(0), or write rng=None in the loss if it can do without. What else "
                "it needs of the rows goes into the batch, as a tuple or a mapping"
            )
        given = {"rng": rng, "model_state": model_state}
        return fn(*(params, batch, rng, model_state)[: len(required)], **{name: given[name] for name in named})

    return call


def _objective(call: Callable, plan: Plan) -> Callable:
    """The loss as ``(params, batch, rng, model_state, scale) -> (part of a mean to differentiate, (Loss, divisor))``.

    The local mean, not the sum: the gradient of a sum over many rows overflows float16. It is scaled, in float32; the
    `Loss` is not. Where largest gradients are noted (fp8), the part of the mean over all rows of the step, so that they
    are those of the whole batch.
    """
    overwrites = any(leaf.overwritten for leaf in plan.wire)

    def objective(params, batch, rng, model_state, scale):
        value = call(params, batch, rng, model_state)
        loss = _as_loss(value, "loss_fn")
        new = _new_model_state(loss.model_state, model_state)
        weight = lax.stop_gradient(loss.weight)
        divisor = _divisor(_weight_of_step(value, weight, plan) if overwrites else weight)
        mean = loss.total / divisor
        scaled = mean if scale is None else mean * scale.astype(mean.dtype)
        return scaled, (Loss(loss.total, weight, loss.metrics, new), divisor)

    return objective


def _weight_of_step(value: Any, weight: jax.Array, plan: Plan) -> jax.Array:
    """Of all rows, known from one micro-batch."""
    count = plan.config.accumulate
    if count > 1 and isinstance(value, Loss) and isinstance(value.weight, Tracer):
        raise ValueError(
            "with accumulate > 1, parameters that their gradient overwrites (fp8) need a loss whose weight is a plain "
            "number, the same for every micro-batch: return the mean over the rows, or use accumulate=1"
        )
    return collectives.all_reduce(weight, plan.axes) * count


def _as_loss(value: Any, name: str, rows: int = 1) -> Loss:
    """A scalar mean as a `Loss` of its rows, of 1 where all devices and micro-batches have as many; sums in float32."""
    loss = value if isinstance(value, Loss) else Loss(value, 1.0)
    for part, number in (("total", loss.total), ("weight", loss.weight)):
        if jax.tree.structure(number) != jax.tree.structure(0) or jnp.ndim(number):
            shape = jax.tree.map(jnp.shape, number)
            raise ValueError(
                f"{name} must return a scalar or a zerojax.Loss; its {part} has shape {shape}. Take the mean over the "
                "rows; for (loss, extras) return zerojax.Loss(total, weight, metrics=...)"
            )
    if not jnp.issubdtype(jnp.result_type(loss.total), jnp.floating):
        raise ValueError(f"{name} must return a floating scalar, not {jnp.result_type(loss.total)}")
    total, weight = (jnp.asarray(x).astype(_sum_dtype(x)) for x in (loss.total, loss.weight))
    if rows > 1 and not isinstance(value, Loss):
        total, weight = total * rows, weight * rows
    return Loss(total, weight, loss.metrics, loss.model_state)


def _weighted(loss: Loss) -> Loss:
    """Ready to be added over micro-batches and devices: metrics times the weight, all in the dtype of the sums."""
    dtype = loss.total.dtype
    weight = loss.weight.astype(dtype)

    def times_weight(metric):  # without weight a mean is often 0/0, which must not reach the others
        return jnp.where(weight == 0, 0, jnp.asarray(metric).astype(dtype) * weight)

    return Loss(loss.total, weight, jax.tree.map(times_weight, dict(loss.metrics)))


def _sum_dtype(value: Any) -> Any:
    return jnp.promote_types(jnp.result_type(value, jnp.float32), jnp.float32)


def _new_model_state(new: Tree, old: Tree) -> Tree:
    if new is None or (old is None and not jax.tree.leaves(new)):
        return old
    shapes = [jax.tree.map(lambda a: (jnp.shape(a), jnp.result_type(a)), tree) for tree in (new, old)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"the loss returned a model_state unlike the one it was given: {shapes[0]} for {shapes[1]}")
    return new


def _add_metrics(own: dict, others: Mapping) -> dict:
    taken = sorted(set(own) & set(others))
    if taken:
        raise ValueError(f"the names {taken} in Loss(metrics=...) are the step's own; choose others")
    return {**own, **others}


def _check_key(rng: Any):
    is_key = isinstance(rng, jax.Array) and (
        jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) or (rng.dtype == jnp.uint32 and rng.ndim == 1)
    )
    if rng is not None and not is_key:
        shape = jax.tree.map(jnp.shape, rng)
        raise ValueError(f"rng must be a key such as jax.random.key(0), not arrays of shape {shape}; what else the "
                         "loss needs of the rows goes into the batch, as a tuple or a mapping")  # fmt: skip


def _check_context(plan: Plan):
    """An active mesh with other axes than the plan's makes JAX refuse the plan's arrays, in words that do not help."""
    active = jax.sharding.get_abstract_mesh()
    own = plan.mesh.abstract_mesh
    same = (active.shape_tuple, active.axis_types) == (own.shape_tuple, own.axis_types)
    if not active.empty and not same:
        raise ValueError(f"the active mesh {active} is not the plan's; use `with jax.set_mesh(plan.mesh)`, which has "
                         "the same devices with Auto axes, or no active mesh")  # fmt: skip
