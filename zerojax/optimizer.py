"""What a step hands to an optax transformation, and whether the transformation can work with that."""

from typing import Any

import jax
import optax

from zerojax.contracts import Tree
from zerojax.plan import Plan, mesh_context
from zerojax.precision import floating, gradient_dtype

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

    >>> import jax.numpy as jnp
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
    params = floating(plan.abstract_state.params)
    dtype = gradient_dtype(plan.config.precision)
    grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, dtype, sharding=p.sharding), params)
    opt_state, value = plan.abstract_state.opt_state, jax.ShapeDtypeStruct((), dtype)
    try:
        with mesh_context(plan.mesh):
            made = jax.eval_shape(lambda *args: update(tx, *args), grads, opt_state, params, value)
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
