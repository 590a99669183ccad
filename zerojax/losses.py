"""The contract of the loss: what it takes, what it may return, and how means over rows are made of it."""

import inspect
import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from zerojax import collectives
from zerojax.contracts import Loss, Tree
from zerojax.placement import with_paths
from zerojax.plan import Plan

# The axes over which rows are divided, and their sizes; none for a loss that sees all rows at once.
Axes = Mapping[str, int]


def with_arguments(fn: Callable) -> Callable:
    """``fn(params, batch, rng, model_state)`` for a function that may leave out the last one or two.

    It may also take the parts of the batch one by one, if the batch is a tuple of so many.
    """
    parameters = inspect.signature(fn).parameters.values()
    if any(p.kind == p.VAR_POSITIONAL for p in parameters):
        return fn
    required = [p.name for p in parameters if p.default is p.empty and p.kind in _POSITIONAL]
    named = [p.name for p in parameters if p.name in ("rng", "model_state") and p.name not in required]
    parts = len(list(itertools.takewhile(lambda name: not _KEY.search(name), required[1:])))
    needs_key = len(required) > 2 or any(p.name == "rng" and p.default is p.empty for p in parameters)

    def misfit():
        return ValueError(
            f"the loss must take (params, batch[, rng[, model_state]]), but it requires ({', '.join(required)}). What "
            "differs from row to row is the batch, not closed over: each device gets its own rows. Several parts of it "
            f"are given as a tuple: ({', '.join(required[1:])})"
        )

    if len(required) < 2:
        raise misfit()

    def call(params, batch, rng, model_state):
        several = parts > 1 and isinstance(batch, (tuple, list)) and len(batch) == parts
        rows = (*batch,) if several else (batch,)
        others = required[1 + len(rows) :]
        if len(others) > 2 or (len(others) == 2 and named):
            raise misfit()
        if rng is None and not several and needs_key:
            raise ValueError(
                f"the loss requires {'rng' if 'rng' in named else others[0]}, a random key, and none is given: "
                "pass a key such as jax.random.key(0), or write rng=None in the loss if it can do without. What else "
                "it needs of the rows goes into the batch, as a tuple or a mapping"
            )
        given = {"rng": rng, "model_state": model_state}
        return _checked(fn(params, *rows, *(rng, model_state)[: len(others)], **{name: given[name] for name in named}))

    return call


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_KEY = re.compile(r"^(_.*|k|r|key|.*_?keys?|.*rngs?|prng.*|seed|model_state)$")


def _checked(value: Any) -> Any:
    """What a loss returned; what it returns beside the loss are arrays or numbers."""
    if isinstance(value, tuple) and len(value) == 1:
        return value[0]
    if isinstance(value, tuple) and len(value) != 2:
        raise ValueError(f"the loss must return a scalar, a zerojax.Loss or (loss, aux), not a tuple of {len(value)}")
    if isinstance(value, tuple):
        for path, leaf in with_paths(value[1]):
            if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float, complex)):
                raise ValueError(f"the loss returned {path or 'aux'} = {leaf!r} beside its value, which is no array")
    return value


def without_aux(value: Any) -> tuple[Any, tuple]:
    """The loss, and what it returned beside it: ``()`` or ``(aux,)``."""
    return (value[0], value[1:]) if isinstance(value, tuple) else (value, ())


def objective_of(call: Callable, plan: Plan, axes: Axes) -> Callable:
    """The loss as ``(params, batch, rng, model_state, scale) -> (what to differentiate, (Loss, weight of all, aux))``.

    On each device its sum over the mean weight of all devices: about the mean over its rows, since the gradient of a
    sum over many rows overflows float16. One divisor for all, so that a cotangent that crosses devices (of a mean over
    them inside the loss) is in the same unit everywhere. The mean over the devices is the gradient of the micro-batch's
    mean; `share` says what each contributes. It is scaled, in float32; the `Loss`, this device's own, is not.
    """

    def objective(params, batch, rng, model_state, scale):
        value, aux = without_aux(call(params, batch, rng, model_state))
        loss = as_loss(value, "loss_fn")
        new = _new_model_state(loss.model_state, model_state)
        own = lax.stop_gradient(loss.weight)
        weight = _weight_of_all(value, own, plan, axes)
        mean = loss.total / _divisor(weight * own.dtype.type(share(plan, axes)))
        scaled = mean if scale is None else mean * scale.astype(mean.dtype)
        return scaled, (Loss(loss.total, own, loss.metrics, new), weight, aux)

    return objective


def _weight_of_all(value: Any, own: jax.Array, plan: Plan, axes: Axes) -> Any:
    """The weight of all devices' rows: of a plain number, the same on each, without a collective."""
    if isinstance(value, Loss) and isinstance(value.weight, Tracer):
        _check_micro_batches(plan)
        return collectives.all_reduce(own, axes)
    return np.asarray(value.weight if isinstance(value, Loss) else 1, own.dtype) * own.dtype.type(_devices(axes))


def _devices(axes: Axes) -> int:
    return math.prod(axes.values())


def share(plan: Plan, axes: Axes) -> float:
    """What a device's gradient counts for in that of the micro-batch: all devices as much.

    Where largest gradients are noted (fp8), they shall be those of the step: what is differentiated is then a part of
    the mean over all rows of all micro-batches.
    """
    overwrites = any(leaf.overwritten for leaf in plan.wire)
    return float(plan.config.accumulate) if overwrites else 1 / _devices(axes)


def _check_micro_batches(plan: Plan):
    """A loss of which only each micro-batch tells the weight cannot be part of a mean over all of them."""
    if plan.config.accumulate > 1 and any(leaf.overwritten for leaf in plan.wire):
        raise ValueError(
            "with accumulate > 1, parameters that their gradient overwrites (fp8) need a loss whose weight is a plain "
            "number, the same for every micro-batch: return the mean over the rows, or use accumulate=1"
        )


def as_loss(value: Any, name: str, rows: int = 1) -> Loss:
    """A scalar mean as a `Loss` of its rows, of 1 where all devices and micro-batches have as many; sums in float32."""
    loss = value if isinstance(value, Loss) else Loss(value, 1.0)
    for part, number in (("total", loss.total), ("weight", loss.weight)):
        if jax.tree.structure(number) != jax.tree.structure(0) or jnp.ndim(number):
            shape = jax.tree.map(jnp.shape, number)
            raise ValueError(
                f"{name} must return a scalar, a zerojax.Loss or (loss, aux); its {part} has shape {shape}. Take the "
                "mean over the rows"
            )
    if not jnp.issubdtype(jnp.result_type(loss.total), jnp.floating):
        raise ValueError(f"{name} must return a floating scalar, not {jnp.result_type(loss.total)}")
    total, weight = (jnp.asarray(x).astype(_sum_dtype(x)) for x in (loss.total, loss.weight))
    if rows > 1 and not isinstance(value, Loss):
        total, weight = total * rows, weight * rows
    return Loss(total, weight, loss.metrics, loss.model_state)


def weighted(loss: Loss) -> Loss:
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
    # by leaves: a container need not be comparable
    shapes = [[(jnp.shape(a), jnp.result_type(a)) for a in jax.tree.leaves(tree)] for tree in (new, old)]
    trees = jax.tree.structure(new), jax.tree.structure(old)
    if shapes[0] != shapes[1] or trees[0] != trees[1]:
        raise ValueError(f"the loss returned a model_state unlike the one it was given: {trees[0]} of {shapes[0]} for "
                         f"{trees[1]} of {shapes[1]}")  # fmt: skip
    return new


def add_metrics(own: dict, others: Mapping) -> dict:
    """The step's own metrics and those of the loss."""
    taken = sorted(set(own) & set(others))
    if taken:
        raise ValueError(f"the names {taken} in Loss(metrics=...) are the step's own; choose others")
    return {**own, **others}


def named(aux: Tree = None) -> Mapping:
    """What a loss returned beside its value as metrics: by its own names, or as ``aux``."""
    return aux if isinstance(aux, Mapping) else {} if aux is None else {"aux": aux}


# ---- means over the rows of all devices ----


def global_mean(sums: Loss, axes: Axes) -> Loss:
    """Of every device's weighted sums: the mean loss as ``total``, mean metrics, the summed weight."""
    sums = collectives.all_reduce(sums, axes)
    mean = jax.tree.map(lambda a: divide(a, sums.weight), (sums.total, sums.metrics))
    return Loss(mean[0], sums.weight, mean[1])


def divide(total: jax.Array, weight: jax.Array) -> jax.Array:
    """``total / weight``, and zero where there is no weight: a batch of padding only must not destroy a run."""
    return jnp.where(weight == 0, weight, total / _divisor(weight))  # a constant zero would cost the compiler a buffer


def _divisor(weight: Any) -> Any:
    """``weight``, or one where there is none."""
    return jnp.where(weight == 0, 1, weight) if isinstance(weight, jax.Array) else weight or weight.dtype.type(1)


# ---- randomness ----


def fold(rng: Any, micro_batch: Any, axes: Axes) -> Any:
    """The key of one micro-batch on one device."""
    if rng is None:
        return None
    return jax.random.fold_in(jax.random.fold_in(rng, micro_batch), device_number(axes))


def device_number(axes: Axes) -> Any:
    """Of the device whose rows these are, along axes that have names here; zero of rows that all devices share."""
    try:
        return lax.axis_index(tuple(axes))
    except NameError:
        return 0


def is_key_array(value: Any) -> bool:
    """Whether it is a random key, of either kind."""
    return isinstance(value, jax.Array) and (
        jnp.issubdtype(value.dtype, jax.dtypes.prng_key) or (value.dtype == jnp.uint32 and value.shape in ((2,), (4,)))
    )


def check_key(rng: Any):
    """Raise a ``ValueError`` for what is no random key."""
    if rng is not None and not is_key_array(rng):
        shape = jax.tree.map(jnp.shape, rng)
        raise ValueError(f"rng must be a key such as jax.random.key(0), not arrays of shape {shape}; what else the "
                         "loss needs of the rows goes into the batch, as a tuple or a mapping")  # fmt: skip
