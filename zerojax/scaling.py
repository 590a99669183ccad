"""Dynamic loss scaling and skipped steps: the scale's state, the choice between two states, when to give up."""

import dataclasses
from collections import deque

import jax
import jax.numpy as jnp

from zerojax.config import LossScale
from zerojax.contracts import ScaleState, TrainState, Tree

_LATE = 8  # steps after which it is looked at whether training is stuck: by then the numbers are there


def first_scale(config: LossScale) -> ScaleState:
    """The state in which training begins.

    >>> float(first_scale(LossScale(initial=1024)).scale)
    1024.0
    """
    return ScaleState(jnp.float32(config.initial), jnp.int32(0), jnp.int32(config.hysteresis), jnp.int32(0))


def next_scale(config: LossScale, old: ScaleState, finite: jax.Array) -> ScaleState:
    """The state after a step.

    Args:
      config: the rules.
      old: the state whose scale the step has used.
      finite: boolean scalar, whether its gradient was finite.

    >>> config = LossScale(initial=1024, growth_interval=1)
    >>> [float(next_scale(config, first_scale(config), jnp.bool(finite)).scale) for finite in (True, False)]
    [2048.0, 512.0]
    """
    good = old.good_steps + 1
    grow = finite & (good >= config.growth_interval)
    raised, lowered = old.scale * config.growth_factor, jnp.maximum(old.scale * config.backoff_factor, config.minimum)
    raised = jnp.where(jnp.isfinite(raised), raised, old.scale)
    lower = ~finite & (old.hysteresis <= 1)
    refill = finite if config.consecutive_hysteresis else grow
    return ScaleState(
        scale=jnp.where(grow, raised, jnp.where(lower, lowered, old.scale)),
        good_steps=jnp.where(finite & ~grow, good, 0),
        hysteresis=jnp.where(refill, config.hysteresis, jnp.maximum(old.hysteresis - ~finite, 1)),
        stuck=jnp.where(~finite & (lowered >= old.scale), old.stuck + 1, 0),
    )


def all_finite(arrays: list[jax.Array]) -> jax.Array:
    """Whether all numbers of all arrays are finite: a boolean scalar, the same on every device.

    Counted in float32, so that the sums over the devices can be joined, and however many they are, do not wrap to zero.

    >>> bool(all_finite([jnp.ones(2), jnp.array(jnp.nan)]))
    False
    """
    return sum(jnp.sum(~jnp.isfinite(a), dtype=jnp.float32) for a in arrays) == jnp.float32(0)


def unless_overflow(
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


class Watch:
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
