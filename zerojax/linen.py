"""Flax linen: ``TrainState`` and ``apply_gradients`` as users have them, partitioned."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from zerojax.contracts import Tree, Variables
from zerojax.plan import Plan
from zerojax.precision import OVERWRITTEN, is_key
from zerojax.state import check_own_update, init_state


def init_fn(model: nn.Module, *inputs: Any, **kwargs: Any) -> Callable[[Any], Tree]:
    """``key -> params`` for a linen module, or ``key -> Variables`` if it has other collections (``batch_stats``).

    With fp8 operations (`flax.linen.fp8_ops`) the parameters are ``{"params": ..., "_overwrite_with_gradient": ...}``,
    as ``TrainState`` has them, which ``model.apply`` takes as they are.

    Parameters in metadata boxes stay in them here. A plan reads the names in the boxes, and states hold what was
    inside, which ``model.apply`` takes as well.

    Args:
      model: the module; ``model.init(key, *inputs, **kwargs)`` is run inside ``jit``.
      inputs: example inputs, arrays or `jax.ShapeDtypeStruct`; only shapes and dtypes matter.

    >>> import jax, jax.numpy as jnp
    >>> params = init_fn(nn.Dense(4), jnp.ones((1, 3)))(jax.random.key(0))
    >>> params["kernel"].shape
    (3, 4)
    """

    def init(key):
        examples = jax.tree.map(_array, inputs)
        variables = dict(model.init(key, *examples, **kwargs))
        params = variables.pop("params")
        if OVERWRITTEN in variables:
            params = {"params": params, OVERWRITTEN: variables.pop(OVERWRITTEN)}
        return Variables(params, variables) if variables else params

    return init


def _array(example: Any) -> Any:
    """Zeros of its shape, which is all that matters: the array itself may lie on another mesh than theirs."""
    return jnp.zeros(example.shape, example.dtype) if hasattr(example, "shape") and not is_key(example) else example


def create_train_state(
    init_fn: Callable[[Any], Tree],
    tx: optax.GradientTransformation,
    plan: Plan,
    key: Any,
    *,
    apply_fn: Callable,
    params: Tree = None,
    state_class: type[TrainState] = TrainState,
    **fields: Any,
) -> TrainState:
    """Flax's ``TrainState``, born partitioned; stands where ``TrainState.create`` stood.

    Args:
      init_fn, tx, plan, key, params: as for `zerojax.init_state`. ``apply_gradients`` leaves alone what the plan
        does not train.
      apply_fn: usually ``model.apply``.
      state_class: a subclass of ``TrainState``, with ``fields`` for what it adds. What ``init_fn`` made beside the
        parameters fills its field ``model_state``, or a field for each collection (``batch_stats``).

    >>> import jax, jax.numpy as jnp
    >>> from zerojax import make_plan
    >>> model, tx = nn.Dense(16), optax.adam(1e-3)
    >>> init = init_fn(model, jnp.ones((1, 8)))
    >>> plan = make_plan(init, tx, jax.make_mesh((8,), ("data",)))
    >>> state = create_train_state(init, tx, plan, jax.random.key(0), apply_fn=model.apply)
    >>> tuple(state.params["kernel"].sharding.spec)
    (None, 'data')
    """
    check_own_update(plan, "linen.create_train_state")
    made = init_state(init_fn, tx, plan, key, params=params)
    names, collections = state_class.__dataclass_fields__, made.model_state or {}
    if "model_state" in names:
        fields.setdefault("model_state", made.model_state)
    elif all(name in names for name in collections):
        fields = {**collections, **fields}
    else:
        raise ValueError(f"the model has state beside its parameters ({sorted(collections)}); give a state_class with "
                         "fields of these names to keep it in, or with a field model_state")  # fmt: skip
    of_all = plan.transform(tx)
    return state_class(
        step=made.step, apply_fn=apply_fn, params=made.params, tx=of_all, opt_state=made.opt_state, **fields
    )
