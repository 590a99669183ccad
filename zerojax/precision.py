"""Which leaves are numbers that a loss computes with, and casts that touch only those."""

from typing import Any

import jax
import jax.numpy as jnp

from zerojax.config import Precision
from zerojax.contracts import Tree


def is_floating(leaf: Any) -> bool:
    """Whether a leaf (array or shape) can be trained: integers, booleans and random keys pass through as they are.

    >>> is_floating(jnp.zeros(2)), is_floating(jnp.arange(2))
    (True, False)
    """
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def floating(tree: Tree) -> list[Any]:
    """The floating leaves.

    >>> floating({"w": jnp.zeros(2), "n": jnp.int32(3)})
    [Array([0., 0.], dtype=float32)]
    """
    return [leaf for leaf in jax.tree.leaves(tree) if is_floating(leaf)]


def merge(floats: list[Any], tree: Tree) -> Tree:
    """``tree`` with other floating leaves: the inverse of `floating`.

    >>> merge([jnp.ones(1)], {"w": jnp.zeros(1), "n": jnp.int32(3)})
    {'n': Array(3, dtype=int32), 'w': Array([1.], dtype=float32)}
    """
    new = iter(floats)
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
