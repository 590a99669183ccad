"""Stage 3: gather units, the parameters that are gathered together, dropped, and gathered again in backward.

For now the whole loss is one unit: the gathered parameters are not kept from forward to backward.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Arrays = list[jax.Array]


def gradient(
    objective: Callable[..., tuple[jax.Array, Any]],
    params: Arrays,
    gather: Callable[[Arrays], Arrays] | None,
    reduce: Callable[[Arrays, Any], Arrays],
) -> Callable[..., tuple[tuple[jax.Array, Any], Arrays]]:
    """Value and gradient of an objective of which the parameters are given whole or as shards.

    Args:
      objective: ``(whole parameters, *args) -> (scalar, aux)``.
      params: whole parameters if ``gather`` is ``None``, else shards.
      gather: makes whole parameters of shards.
      reduce: ``(gradients, aux) -> ...``: what happens to the gradients as soon as they exist.

    Returns:
      ``f(turn, *args) -> ((scalar, aux), reduced gradients)``; ``turn`` is the number of the micro-batch.
    """

    def run(turn, *args):
        # tied to the turn, or the compiler moves the gather out of the loop over micro-batches
        whole = params if gather is None else gather(_once_known(turn, params))
        total, backward, aux = jax.vjp(lambda p: objective(p, *args), whole, has_aux=True)
        if gather is not None:
            backward = _gathered_again(backward, whole, gather(_once_known(total, params)))
        (grads,) = backward(jnp.ones_like(total))
        return (total, aux), reduce(grads, aux)

    return run


def _gathered_again(backward: Any, whole: Arrays, again: Arrays) -> Any:
    """``backward`` with other arrays in place of the gathered parameters that it holds.

    While tracing, a residual that is a gathered parameter is that very object.
    """
    residuals, treedef = jax.tree.flatten(backward)
    index = {id(w): i for i, w in enumerate(whole)}
    return treedef.unflatten([again[index[id(r)]] if id(r) in index else r for r in residuals])


def _once_known(value: jax.Array, arrays: Arrays) -> Arrays:
    """``arrays``, but not before ``value`` exists: a dependency that no compiler can see through.

    Without it a second gather is merged with the first and everything stays whole in between. An optimization barrier
    is not enough: the CPU compiler drops it before it looks for equal instructions.
    """
    never = jnp.asarray(value, jnp.float32) > jnp.inf  # true of no number, nor of NaN
    return [jnp.where(never, jnp.zeros_like(a), a) for a in arrays]
