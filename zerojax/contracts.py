"""What passes between a user's functions and the library: the train state, initial variables, the loss."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

Tree = Any  # a pytree of arrays, of shapes or of shardings


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScaleState:
    """Where dynamic loss scaling stands; scalars.

    Attributes:
      scale: float32, what the next step's loss is multiplied by.
      good_steps: int32, steps without overflow since the scale last changed.
      hysteresis: int32, the overflows that it takes to lower the scale.
      stuck: int32, overflows in a row that no lower scale could help.

    >>> ScaleState(scale=65536.0, good_steps=0, hysteresis=1, stuck=0).scale
    65536.0
    """

    scale: Any
    good_steps: Any
    hysteresis: Any
    stuck: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that training carries from one step to the next; a pytree.

    Attributes:
      step: int32 scalar, the number of updates made.
      params: the parameters, in ``param_dtype``; these are the master weights.
      opt_state: what ``tx.init`` returned, then what ``tx.update`` did.
      rng: a typed random key; every step folds its own number into it.
      model_state: mutable model state (BatchNorm statistics), whole on every device; ``None`` if there is none.
      loss_scale: a `ScaleState` where steps may be skipped (``ZeroConfig(loss_scale=..., skip_nonfinite=...)``), else
        ``None``.

    >>> jax.tree.leaves(TrainState(step=0, params={"w": 1.0}, opt_state=(), rng=2))
    [0, 1.0, 2]
    """

    step: Any
    params: Tree
    opt_state: Tree
    rng: Any
    model_state: Tree = None
    loss_scale: ScaleState | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Variables:
    """What ``init_fn`` returns if the model has mutable state beside its parameters.

    >>> Variables(params={"w": 1.0}, model_state={"mean": 0.0}).model_state
    {'mean': 0.0}
    """

    params: Tree
    model_state: Tree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Loss:
    """A loss as a sum and its weight, so that uneven parts are weighted exactly, once, globally.

    The loss of a step is ``sum(total) / sum(weight)`` over all devices and micro-batches; with no weight at all it
    is zero and so are its gradients.

    Attributes:
      total: scalar, summed over the rows or tokens that the function was given.
      weight: scalar, their number (or the sum of their weights); not differentiated.
      metrics: named arrays, each a mean over the same rows; averaged with the same weights.
      model_state: the new mutable model state, of the old one's shapes and dtypes; ``None`` keeps the old one.

    >>> Loss(total=6.0, weight=3.0).metrics
    {}
    """

    total: Any
    weight: Any
    metrics: Mapping[str, Any] = field(default_factory=dict)
    model_state: Tree = None
