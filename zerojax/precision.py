"""Which leaves are trained, and casts that touch only those."""

from typing import Any

import jax
import jax.numpy as jnp

from zerojax.config import Precision
from zerojax.contracts import Tree


def is_floating(leaf: Any) -> bool:
    """Whether a leaf (array or shape) is trained: integers, booleans and random keys pass through training as they are.

    >>> is_floating(jnp.zeros(2)), is_floating(jnp.arange(2))
    (True, False)
    """
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def floating(tree: Tree) -> Tree:
    """The tree that the optimizer sees: leaves that are not trained are replaced by ``None``.

    >>> floating({"w": jnp.zeros(2), "n": jnp.int32(3)})["n"] is None
    True
    """
    return jax.tree.map(lambda leaf: leaf if is_floating(leaf) else None, tree)


def merge(trained: Tree, tree: Tree) -> Tree:
    """``tree`` with its floating leaves taken from ``trained``: the inverse of `floating`.

    >>> merge({"w": jnp.ones(1), "n": None}, {"w": jnp.zeros(1), "n": jnp.int32(3)})
    {'n': Array(3, dtype=int32), 'w': Array([1.], dtype=float32)}
    """
    new = iter(jax.tree.leaves(trained))
    return jax.tree.map(lambda leaf: next(new) if is_floating(leaf) else leaf, tree)


def cast(tree: Tree, dtype: Any) -> Tree:
    """Floating leaves in ``dtype``, all others untouched.

    >>> cast({"w": jnp.zeros(2), "n": jnp.int32(3)}, "bfloat16")["w"].dtype.name
    'bfloat16'
    """
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if is_floating(leaf) else leaf, tree)


def cast_like(tree: Tree, like: Tree) -> Tree:
    """Every leaf in the dtype of its counterpart.

    >>> cast_like(jnp.float32(1.5), jnp.bfloat16(0)).dtype.name
    'bfloat16'
    """
    return jax.tree.map(lambda leaf, other: leaf.astype(other.dtype), tree, like)


def gradient_dtype(precision: Precision) -> Any:
    """The dtype in which gradients are accumulated, averaged and given to the optimizer: float32 or wider.

    >>> gradient_dtype(Precision(reduce_dtype="bfloat16")).name
    'float32'
    """
    return jnp.promote_types(precision.reduce_dtype, jnp.float32)
