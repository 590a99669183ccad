"""Which leaves are numbers that a loss computes with, casts that touch only those, rounding."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.config import Precision
from zerojax.contracts import Tree

OVERWRITTEN = "_overwrite_with_gradient"  # Flax's collection beside "params": fp8 scales and histories of maxima


def is_floating(leaf: Any) -> bool:
    """Whether a leaf (array or shape) is of floats, of any size.

    >>> is_floating(jnp.zeros(2)), is_floating(jnp.arange(2))
    (True, False)
    """
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def is_trainable(leaf: Any) -> bool:
    """Whether a leaf can be trained: floats of 16 bits or more. Others (integers, booleans, floats of 8 bits) are data
    of the model, quantized weights for example, and pass through as they are.

    >>> is_trainable(jnp.zeros(2)), is_trainable(jnp.zeros(2, "float8_e4m3fn"))
    (True, False)
    """
    return is_floating(leaf) and leaf.dtype.itemsize > 1


def is_key(leaf: Any) -> bool:
    """Whether a leaf is of random keys, which are neither partitioned nor gathered.

    >>> is_key(jax.random.key(0)), is_key(jnp.zeros(2))
    (True, False)
    """
    return jnp.issubdtype(leaf.dtype, jax.dtypes.extended)


def numbers(tree: Tree) -> list[Any]:
    """The leaves that are gathered: all but random keys.

    >>> numbers({"w": jnp.zeros(2), "key": jax.random.key(0)})
    [Array([0., 0.], dtype=float32)]
    """
    return [leaf for leaf in jax.tree.leaves(tree) if not is_key(leaf)]


def without_overwritten(params: Tree) -> Tree:
    """What the optimizer sees of parameters or gradients: all but what gradients overwrite, as in Flax's `TrainState`.

    >>> without_overwritten({"params": {"w": 1}, OVERWRITTEN: {"scale": 2}}), without_overwritten({"w": 1})
    ({'w': 1}, {'w': 1})
    """
    return params["params"] if _overwrites(params) else params


def with_overwritten(optimized: Tree, grads: Tree) -> Tree:
    """New parameters from what the optimizer made of some, and from the gradients that are the others' next values.

    >>> with_overwritten({"w": 1}, {"params": {"w": 0}, OVERWRITTEN: {"scale": 2}})["params"]
    {'w': 1}
    """
    return {**grads, "params": optimized} if _overwrites(grads) else optimized


def merge(given: list[Any], tree: Tree) -> Tree:
    """``tree`` with other `numbers`: their inverse.

    >>> merge([jnp.ones(1), jnp.int32(4)], {"n": jnp.zeros(1), "w": jnp.int32(3)})
    {'n': Array([1.], dtype=float32), 'w': Array(4, dtype=int32)}
    """
    new = iter(given)
    return jax.tree.map(lambda leaf: leaf if is_key(leaf) else next(new), tree)


def cast(tree: Tree, dtype: Any) -> Tree:
    """Floating leaves in ``dtype``, all others untouched.

    >>> cast({"w": jnp.zeros(2), "n": jnp.int32(3)}, "bfloat16")["w"].dtype.name
    'bfloat16'
    """
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if is_floating(leaf) else leaf, tree)


def rounded(array: jax.Array, dtype: Any) -> jax.Array:
    """As after a cast to ``dtype`` and back; compilers may drop such a pair of casts.

    >>> float(rounded(jnp.float32(1 / 3), "bfloat16"))
    0.333984375
    """
    info = jnp.finfo(dtype)
    near = lax.reduce_precision(array, info.nexp, info.nmant)
    if jnp.dtype(dtype) == jnp.float16:  # of which reduce_precision makes zeros below the normal numbers
        near = jnp.where(jnp.abs(array) < 2.0**-14, jnp.round(array * 2.0**24) * 2.0**-24, near)
    return near


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


def _overwrites(params: Tree) -> bool:
    return isinstance(params, Mapping) and OVERWRITTEN in params


# ---- stochastic rounding ----


def round_stochastically(x: jax.Array, dtype: Any, bits: jax.Array) -> jax.Array:
    """A float32 array in bfloat16 or float16: up or down, so that the mean over random bits is the array itself.

    What ``dtype`` can hold stays as it is. What is larger than its largest number, infinite or no number becomes what
    an ordinary cast makes of it.

    Args:
      x: float32, of any shape.
      dtype: ``"bfloat16"`` or ``"float16"``.
      bits: uint32, random, of the same shape.

    >>> x = jnp.full(4096, 1 + 1 / 1024)  # bfloat16 has nothing between 1 and 1 + 1 / 128
    >>> bits = jax.random.bits(jax.random.key(0), x.shape, "uint32")
    >>> float(jnp.mean(round_stochastically(x, "bfloat16", bits).astype("float32"))) - 1 > 0.5 / 1024
    True
    """
    kind = jnp.finfo(dtype)
    lost = 23 - kind.nmant  # the bits of float32 that there is no room for
    pattern = lax.bitcast_convert_type(x, jnp.uint32)
    kept = (pattern + (bits >> (32 - lost))) >> lost << lost  # a carry goes on into the exponent, as it must
    rounded = lax.bitcast_convert_type(kept, jnp.float32)
    if kind.smallest_normal > jnp.finfo(jnp.float32).smallest_normal:  # below it float16's steps are all alike
        rounded = jnp.where(
            jnp.abs(x) < kind.smallest_normal, _round_to_steps(x, kind.smallest_subnormal, bits), rounded
        )
    return jnp.where(jnp.abs(x) <= kind.max, rounded, x).astype(dtype)


def _round_to_steps(x: jax.Array, step: Any, bits: jax.Array) -> jax.Array:
    """A multiple of ``step``, a power of two; also stochastically."""
    steps = jnp.abs(x) / jnp.float32(step)
    below = jnp.floor(steps)
    chance = (bits >> 8).astype(jnp.float32) * 2.0**-24
    return jnp.copysign((below + (chance < steps - below)) * jnp.float32(step), x)
