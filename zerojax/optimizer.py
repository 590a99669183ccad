"""The lower half of a step, on global arrays: what it hands to an optax transformation, and the new parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from zerojax.contracts import TrainState, Tree
from zerojax.plan import Plan, mesh_context
from zerojax.precision import (
    cast,
    cast_like,
    gradient_dtype,
    round_stochastically,
    with_overwritten,
    without_overwritten,
)

_ROUNDING_STREAM = 0xB17  # sets the keys of stochastic rounding apart from those of the micro-batches

_HANDED = (
    "a step hands tx.update the mean gradient, its state and the parameters, and as extra arguments value (the mean "
    "loss) and grad (the mean gradient). It has no function that evaluates the loss again (value_fn, grad_fn, obj_fn) "
    "and no gradients of single rows: leave out the line search, as in optax.lbfgs(..., linesearch=None), take another "
    "transformation, or write the step yourself around zerojax.value_and_grad"
)


def update(
    tx: optax.GradientTransformation, grads: Tree, opt_state: Tree, params: Tree, value: Any
) -> tuple[Tree, Tree]:
    """``tx.update``, with the extra arguments that a step knows: ``(updates, opt_state)``.

    Args:
      tx: one that takes extra arguments (`optax.GradientTransformationExtraArgs`, `optax.MultiSteps`) or none.
      value: the mean loss over the whole batch, a scalar: what Polyak's step size or a plateau is measured by.

    >>> tx = optax.polyak_sgd(max_learning_rate=10.0)
    >>> grads, params = {"w": jnp.array([2.0, 1.0])}, {"w": jnp.ones(2)}
    >>> update(tx, grads, tx.init(params), params, value=jnp.float32(5.0))[0]["w"].tolist()
    [-2.0, -1.0]
    """
    grads = grads.fast if isinstance(params, optax.LookaheadParams) else grads  # that is what optax.lookahead takes
    ask: Any = tx.update
    try:
        return ask(grads, opt_state, params, value=value, grad=grads)
    except TypeError as error:  # asked like this, as the type does not tell: optax.contrib.sam says that it takes them
        if "unexpected keyword argument" not in str(error):
            raise
    return ask(grads, opt_state, params)


def check_update(tx: optax.GradientTransformation, plan: Plan):
    """Raise a ``ValueError`` unless ``tx.update`` works on what a step hands it; traced only, nothing runs.

    Raises:
      ValueError: if it asks for other arguments, or returns updates or a state of other shapes than it was given.

    >>> from zerojax import make_plan
    >>> init_fn = lambda key: {"w": jax.random.normal(key, (8,))}
    >>> plan = make_plan(init_fn, optax.adam(1.0), jax.make_mesh((8,), ("data",)))
    >>> check_update(optax.adam(0.1), plan)
    """
    params = plan.optimized(plan.abstract_state.params)
    dtype = gradient_dtype(plan.config.precision)
    grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, dtype, sharding=p.sharding), params)
    opt_state, value = plan.abstract_state.opt_state, jax.ShapeDtypeStruct((), dtype)
    try:
        with mesh_context(plan.mesh):
            made = jax.eval_shape(lambda *args: update(tx, *args), grads, opt_state, params, value)
    except NameError as error:
        raise ValueError(f"tx cannot be used in a step: {error}\nIt sees global arrays and the mean gradient of all "
                         "devices, so that it needs no collective over mesh axes: leave it out") from error  # fmt: skip
    except (TypeError, ValueError) as error:
        raise ValueError(f"tx cannot be used in a step: {error}\nFor {_HANDED}.") from error
    for what, new, old in (("updates", made[0], params), ("the optimizer state", made[1], opt_state)):
        _check_shapes(what, new, old)


def _check_shapes(what: str, new: Tree, old: Tree):
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise ValueError(
            f"tx.update returns {what} of another tree structure than it was given: {jax.tree.structure(new)} for "
            f"{jax.tree.structure(old)}; let tx.init make what tx.update returns"
        )
    for (keys, ours), given in zip(jax.tree.leaves_with_path(new), jax.tree.leaves(old), strict=True):
        if ours.shape != given.shape:
            name = jax.tree_util.keystr(keys)
            raise ValueError(f"tx.update returns {what} of another shape than it was given: {name} is "
                             f"{list(ours.shape)}, not {list(given.shape)}. For {_HANDED}")  # fmt: skip


# ---- new parameters ----


def updated(
    tx: optax.GradientTransformation, grads: Tree, loss: jax.Array, state: TrainState, plan: Plan
) -> tuple[Tree, Tree]:
    """Parameters and optimizer state after ``tx``, in the dtypes that they had."""
    stochastic = plan.config.precision.rounding == "stochastic"
    seen = plan.optimized(state.params)
    old = cast(seen, jnp.float32) if stochastic else seen
    updates, opt_state = update(tx, without_overwritten(grads), state.opt_state, old, loss)
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
