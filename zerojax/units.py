"""Stage 3: gather units, the parameters that are gathered together, dropped, and gathered again in backward.

For now the whole loss is one unit: the gathered parameters are not kept from forward to backward.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

Arrays = list[jax.Array]


def gradient(
    objective: Callable[..., tuple[jax.Array, Any]],
    params: Arrays,
    gather: Callable[[Arrays], Arrays] | None,
    reduce: Callable[[Arrays], Arrays],
) -> Callable[..., tuple[tuple[jax.Array, Any], Arrays]]:
    """Value and gradient of an objective of which the parameters are given whole or as shards.

    Args:
      objective: ``(whole parameters, *args) -> (scalar, aux)``.
      params: whole parameters if ``gather`` is ``None``, else shards.
      gather: makes whole parameters of shards.
      reduce: what happens to the gradients as soon as they exist.

    Returns:
      ``f(*args) -> ((scalar, aux), reduced gradients)``.
    """

    def run(*args):
        whole = params if gather is None else gather(params)
        total, backward, aux = jax.vjp(lambda p: objective(p, *args), whole, has_aux=True)
        if gather is not None:
            backward = _gathered_again(backward, whole, params, gather, after=total)
        (grads,) = backward(jax.numpy.ones_like(total))
        return (total, aux), reduce(grads)

    return run


def _gathered_again(backward: Any, whole: Arrays, shards: Arrays, gather: Callable, after: jax.Array) -> Any:
    """``backward`` with the gathered parameters among its residuals replaced by ones gathered after the forward pass.

    While tracing, a residual that is a gathered parameter is that very object. The barrier ties the second gather to
    the end of the forward pass; without it the compiler merges it with the first and keeps every parameter whole.
    """
    residuals, treedef = jax.tree.flatten(backward)
    index = {id(w): i for i, w in enumerate(whole)}
    shards, _ = lax.optimization_barrier((shards, after))
    again = gather(shards)
    return treedef.unflatten([again[index[id(r)]] if id(r) in index else r for r in residuals])
