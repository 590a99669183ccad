"""The GPT of `gpt.py` as users write it: Flax linen, unrolled or with ``nn.scan``, and Flax NNX; bfloat16 inside."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from gpt import Size

DTYPE = jnp.bfloat16


def _loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:]).mean()


def attend(size: Size, qkv: jax.Array) -> jax.Array:
    """Causal attention of (rows, sequence, 3 width)."""
    heads = *qkv.shape[:2], size.width // size.head, size.head
    q, k, v = (a.reshape(heads) for a in jnp.split(qkv, 3, axis=-1))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(*qkv.shape[:2], size.width)


# ---- linen ----


class LinenBlock(nn.Module):
    size: Size

    @nn.compact
    def __call__(self, x, _=None):
        d = self.size.width
        h = nn.Dense(3 * d, use_bias=False, dtype=DTYPE, name="qkv")(nn.LayerNorm(dtype=DTYPE)(x))
        x = x + nn.Dense(d, use_bias=False, dtype=DTYPE, name="out")(attend(self.size, h))
        h = nn.gelu(nn.Dense(4 * d, dtype=DTYPE, name="up")(nn.LayerNorm(dtype=DTYPE)(x)))
        return x + nn.Dense(d, dtype=DTYPE, name="down")(h), None


class LinenGPT(nn.Module):
    size: Size
    scan: bool

    @nn.compact
    def __call__(self, tokens):
        size = self.size
        embed = nn.Embed(size.vocabulary, size.width, dtype=DTYPE, name="embed")
        x = embed(tokens) + nn.Embed(size.sequence, size.width, dtype=DTYPE, name="position")(
            jnp.arange(tokens.shape[1])
        )
        if self.scan:
            block = nn.remat(LinenBlock, prevent_cse=False)
            stack = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=size.layers)
            x, _ = stack(size, name="blocks")(x, None)
        else:
            for i in range(size.layers):
                x, _ = nn.remat(LinenBlock)(size, name=f"block_{i}")(x)
        return embed.attend(nn.LayerNorm(dtype=DTYPE)(x))


def linen(size: Size, scan: bool) -> tuple[Callable, Callable]:
    """``(init_fn, loss_fn)``."""
    model = LinenGPT(size, scan)

    def init_fn(key: Any):
        return model.init(key, jnp.zeros((1, size.sequence), jnp.int32))["params"]

    return init_fn, lambda params, tokens: _loss(model.apply({"params": params}, tokens[:, :-1]), tokens)


# ---- NNX ----


class NnxBlock(nnx.Module):
    def __init__(self, size: Size, rngs: nnx.Rngs):
        d, self.size = size.width, size
        self.norm_1, self.norm_2 = (nnx.LayerNorm(d, dtype=DTYPE, rngs=rngs) for _ in range(2))
        self.qkv = nnx.Linear(d, 3 * d, use_bias=False, dtype=DTYPE, rngs=rngs)
        self.out = nnx.Linear(d, d, use_bias=False, dtype=DTYPE, rngs=rngs)
        self.up = nnx.Linear(d, 4 * d, dtype=DTYPE, rngs=rngs)
        self.down = nnx.Linear(4 * d, d, dtype=DTYPE, rngs=rngs)

    def __call__(self, x):
        x = x + self.out(attend(self.size, self.qkv(self.norm_1(x))))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class NnxGPT(nnx.Module):
    def __init__(self, size: Size, rngs: nnx.Rngs):
        self.embed = nnx.Embed(size.vocabulary, size.width, dtype=DTYPE, rngs=rngs)
        self.position = nnx.Embed(size.sequence, size.width, dtype=DTYPE, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(size, rngs) for _ in range(size.layers)])
        self.norm = nnx.LayerNorm(size.width, dtype=DTYPE, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x)
        return self.embed.attend(self.norm(x))


def nnx_gpt(size: Size) -> tuple[Callable, Callable]:
    """``(init_fn, loss_fn)``."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: NnxGPT(size, nnx.Rngs(0))))

    def init_fn(key: Any):
        return nnx.state(NnxGPT(size, nnx.Rngs(params=key)), nnx.Param)

    return init_fn, lambda params, tokens: _loss(nnx.merge(graph, params)(tokens[:, :-1]), tokens)
