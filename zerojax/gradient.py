"""The upper half of a step: cast, gather, differentiate, reduce-scatter, weigh."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from zerojax import collectives, ways
from zerojax.contracts import Loss, Tree
from zerojax.losses import divide, fold, global_mean, objective_of, share, weighted, with_arguments
from zerojax.placement import Leaf
from zerojax.plan import Plan
from zerojax.precision import gradient_dtype, merge, numbers
from zerojax.units import jaxprs
from zerojax.units.gradient import gradient
from zerojax.units.passes import Traffic
from zerojax.ways import Way


@dataclass(frozen=True)
class _Schedule:
    """What makes a stage: when parameters are gathered and how often gradients are reduced."""

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


def gradient_of(loss_fn: Callable, plan: Plan) -> Callable:
    """``(params, batch, rng, model_state, scale) -> (mean loss, mean gradient, new model state, aux)``, global arrays.

    The gradient travels scaled and arrives unscaled; ``scale`` is a float32 scalar, or ``None``. Of what the loss
    returns beside its value, ``()`` or ``(aux,)``, what has rows in dim 0 has those of the batch; the rest is a mean.
    """
    call = with_arguments(loss_fn)
    everywhere, rows = PartitionSpec(), plan.batch_sharding.spec
    in_specs = (ways.param_specs(plan), rows, everywhere, everywhere, everywhere)
    grad_specs = [leaf.shard_spec(tuple(plan.axes)) for leaf in plan.wire if leaf.trained]
    out_specs = (everywhere, grad_specs, everywhere, (rows, everywhere))

    def run(params, batch, rng, model_state, scale):
        others, parts = (rng, model_state), plan.config.accumulate

        def use(way):
            seen = call if way.axes else way.of_device(call)
            beside = ways.Beside(lambda: ways.row_outputs(seen, plan, params, batch, *others, parts=parts))
            on_rows = way.run(_on_rows(call, plan, way, beside), in_specs, out_specs)
            *made, aux = on_rows(params, batch, rng, model_state, scale)
            aux = map(lax.with_sharding_constraint, aux, (plan.batch_sharding, plan.replicated))
            return *made, beside.joined(*aux)

        loss, grads, *rest = ways.along(use, call, plan, params, batch, *others, parts=parts)
        return loss, jax.tree.structure(plan.trained(params)).unflatten(grads), *rest

    return run


def _on_rows(call: Callable, plan: Plan, way: Way, beside: ways.Beside) -> Callable:
    """What `gradient_of` returns, as lists, from the rows that the way gives."""
    objective = objective_of(way.of_device(call), plan, way.axes)

    def on_rows(params, batch, rng, model_state, scale):
        sums, grads, model_state, aux = _sums(objective, plan, way, params, batch, rng, model_state, scale)
        dtype = gradient_dtype(plan.config.precision)

        def unscaled(grad):
            return grad.astype(dtype) if scale is None else grad.astype(dtype) / scale.astype(dtype)

        pairs = zip(grads, _trained(plan.wire, plan), strict=True)
        grads = [g if leaf.overwritten else unscaled(g) for g, leaf in pairs]
        own, means = beside.parted(aux, plan.config.accumulate)
        model_state, means = collectives.mean((model_state, means), way.axes)
        return global_mean(sums, way.axes), grads, model_state, (own, means)

    return on_rows


def _sums(objective, plan, way, params, batch, rng, model_state, scale) -> tuple[Loss, list[jax.Array], Tree, Tree]:
    """Sums of the loss over these rows' micro-batches, the reduced mean gradient of all, and what else it returned."""
    schedule, count, shards = _SCHEDULES[plan.config.stage], plan.config.accumulate, numbers(params)
    held = way.gather(shards, list(plan.wire)) if schedule.gather == "step" else shards
    every, trained = way.each or reduces_each(plan), _trained(plan.wire, plan)
    dtype = gradient_dtype(plan.config.precision)
    zeros = [jnp.zeros(a.shape, dtype) for a in _trained(shards if every else held, plan)]
    differentiated = _differentiated(objective, plan, way, params, held)

    def micro_batch(model_state, index, rows):
        loss, weight, aux, grads = differentiated(index, rows, fold(rng, index, way.keys), model_state, scale)
        grads = [zero if g is None else g for g, zero in zip(grads, zeros, strict=True)]
        return loss.model_state, grads, weight, weighted(loss), aux

    if count == 1:
        model_state, grads, weight, sums, aux = micro_batch(model_state, 0, batch)
        grads = _none_without(weight, grads, trained)
    else:
        rows = _micro_batches(batch, count)
        model_state, grads, sums, aux = _accumulate(micro_batch, trained, model_state, zeros, rows)
    return sums, grads if every else way.reduce(grads, trained), model_state, aux


def reduces_each(plan: Plan) -> bool:
    """Whether gradients are reduced in each micro-batch, as they are made; else their sum is, at the end of the step.

    If there is only one micro-batch that sends nothing more, whatever the stage.
    """
    return _SCHEDULES[plan.config.stage].reduce == "micro-batch" or plan.config.accumulate == 1


def _differentiated(objective: Callable, plan: Plan, way: Way, params: Tree, held: list[jax.Array]) -> Callable:
    """``(index, *args of the objective) -> (Loss, weight of all devices, aux, gradients)`` of one micro-batch.

    On parameters as they are held. The gradients are of what is trained: this device's part of the mean over all rows
    of the micro-batch, or if each micro-batch is reduced by itself, that mean.
    """
    gathers, remat = _SCHEDULES[plan.config.stage].gather == "use", plan.config.remat
    every, trained = way.each or reduces_each(plan), _trained(plan.wire, plan)

    def reduce(grads, leaves):
        return way.reduce(_shares(grads, leaves, plan, way), leaves)

    def on_whole(whole, *args):
        return objective(merge(whole, params), *args)

    traffic = Traffic(way.gather if gathers else None, reduce if every else None, remat)
    in_units = gradient(on_whole, held, plan.wire, traffic)

    def differentiated(index, *args):
        (_, (loss, weight, aux)), grads = in_units(index, *args)
        grads = _trained(grads, plan)
        return loss, weight, aux, grads if every else _shares(grads, trained, plan, way)

    return differentiated


def _shares(grads: list[Any], leaves: Sequence[Leaf], plan: Plan, way: Way) -> list[Any]:
    """These rows' part of the mean gradient, in float32; ``None`` stays.

    Before it travels: what is sent, and every sum of it on the way, is of the size of the mean, which must fit float16.
    """
    dtype, part = gradient_dtype(plan.config.precision), share(plan, way.axes)

    def weighed(grad, leaf):
        return grad if grad is None or leaf.overwritten else grad.astype(dtype) * part

    return [weighed(*pair) for pair in zip(grads, leaves, strict=True)]


def _accumulate(micro_batch, leaves, model_state, zeros, batches) -> tuple[Tree, list[jax.Array], Loss, Tree]:
    """Means over the micro-batches by weight, in a scan; sums of the loss; the model state is threaded through."""

    def body(carry, part):
        model_state, sums = carry
        model_state, grads, weight, weighted, aux = micro_batch(model_state, *part)
        sums = [add(*parts, weight) for parts in zip(sums, grads, leaves, strict=True)]
        return (model_state, sums), (weight, weighted, aux)

    def add(total, grad, leaf, weight):  # what overwrites is largest of all micro-batches, and never below zero
        dtype = total.dtype
        return jnp.maximum(total, grad) if leaf.overwritten else total + grad.astype(dtype) * weight.astype(dtype)

    count = jax.tree.leaves(batches)[0].shape[0]
    scan = lax.scan if jaxprs.is_staged((zeros, batches)) else _one_by_one
    (model_state, sums), made = scan(body, (model_state, zeros), (jnp.arange(count), batches))
    weights, weighted, aux = made
    weight = weights.sum()
    means = [a if leaf.overwritten else divide(a, weight) for a, leaf in zip(sums, leaves, strict=True)]
    return model_state, means, jax.tree.map(lambda a: a.sum(0), weighted), aux


def _one_by_one(body: Callable, carry: Any, scanned: Tree) -> tuple[Any, Tree]:
    """A scan where no program is written, so that an error (``jax_debug_nans``) names the line of the loss."""
    made = []
    for i in range(jax.tree.leaves(scanned)[0].shape[0]):
        carry, one = body(carry, jax.tree.map(lambda a, i=i: a[i], scanned))
        made.append(one)
    return carry, jax.tree.map(lambda *parts: jnp.stack(parts), *made)


def _none_without(weight: Any, grads: list[jax.Array], leaves: Sequence[Leaf]) -> list[jax.Array]:
    """The gradients, zeros if there is no weight; next values that are no gradients stay. A plain weight is some."""
    if not isinstance(weight, Tracer):
        return grads
    return [g if leaf.overwritten else jnp.where(weight == 0, 0, g) for g, leaf in zip(grads, leaves, strict=True)]


def _micro_batches(batch: Tree, count: int) -> Tree:
    """Rows by stride, so that micro-batch ``i`` holds the same rows whatever the number of devices."""
    return jax.tree.map(lambda a: a.reshape(a.shape[0] // count, count, *a.shape[1:]).swapaxes(0, 1), batch)


def _trained(those: Sequence[Any], plan: Plan) -> list[Any]:
    """Of what stands for each parameter of `Plan.wire`, that of those which are trained."""
    return [a for a, leaf in zip(those, plan.wire, strict=True) if leaf.trained]
