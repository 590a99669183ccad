"""A GPT as plain functions, its layers unrolled or stacked, its head tied to the embedding."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class Size:
    """Of the model, and rows of one step over all devices; ``head`` divides ``width``."""

    width: int
    layers: int
    sequence: int
    rows: int
    vocabulary: int = 512
    head: int = 64


def init_fn(size: Size, key: Any) -> dict:
    """Parameters with a list of layers."""
    keys = iter(jax.random.split(key, 2 + 4 * size.layers))

    def normal(*shape, scale=0.02):
        return scale * jax.random.normal(next(keys), shape)

    def norm():
        return {"scale": jnp.ones(size.width), "bias": jnp.zeros(size.width)}

    def block():
        d, out = size.width, 0.02 / math.sqrt(2 * size.layers)
        attention = {"qkv": normal(d, 3 * d), "out": normal(d, d, scale=out)}
        mlp = {"up": normal(d, 4 * d), "up_bias": jnp.zeros(4 * d), "down": normal(4 * d, d, scale=out)}
        return {"norm_1": norm(), **attention, "norm_2": norm(), **mlp, "down_bias": jnp.zeros(d)}

    ends = {"embed": normal(size.vocabulary, size.width), "position": normal(size.sequence, size.width), "norm": norm()}
    return {**ends, "blocks": [block() for _ in range(size.layers)]}


def stacked_init_fn(size: Size, key: Any) -> dict:
    """The same numbers with the layers stacked, for ``lax.scan``."""
    params = init_fn(size, key)
    return {**params, "blocks": jax.tree.map(lambda *layers: jnp.stack(layers), *params["blocks"])}


def parameters(size: Size) -> int:
    shapes = jax.eval_shape(lambda key: init_fn(size, key), jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def layer_norm(p, x):
    return jax.nn.standardize(x, epsilon=1e-5) * p["scale"] + p["bias"]


def block_fn(size: Size, p, x):
    rows, sequence, width = x.shape
    heads = rows, sequence, width // size.head, size.head
    q, k, v = (a.reshape(heads) for a in jnp.split(layer_norm(p["norm_1"], x) @ p["qkv"], 3, axis=-1))
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"]
    h = jax.nn.gelu(layer_norm(p["norm_2"], x) @ p["up"] + p["up_bias"])
    return x + h @ p["down"] + p["down_bias"]


def hidden_fn(size: Size, params, tokens, block: Callable | None = None, constrain: Callable = lambda x: x):
    """What comes before the head: (rows, sequence, width).

    Args:
      tokens: (rows, sequence).
      block: ``(parameters of a layer, x) -> x``.
      constrain: sees what passes from block to block.
    """
    block = block or (lambda p, x: block_fn(size, p, x))
    x = constrain(params["embed"][tokens] + params["position"])
    if isinstance(params["blocks"], list):
        for p in params["blocks"]:
            x = constrain(block(p, x))
    else:
        x, _ = jax.lax.scan(lambda x, p: (constrain(block(p, x)), None), x, params["blocks"])
    return layer_norm(params["norm"], x)


def token_losses(size: Size, params, tokens, *how: Callable):
    """Cross entropy of each next token, (rows, sequence), for tokens (rows, sequence + 1)."""
    logits = hidden_fn(size, params, tokens[:, :-1], *how) @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:])


def loss_fn(size: Size, params, tokens, *how: Callable):
    """Mean cross entropy of the next token."""
    return token_losses(size, params, tokens, *how).mean()


def masked_loss_fn(size: Size, params, tokens, *how: Callable):
    """The mean over the tokens that are no padding (token 0), of all rows."""
    mask = tokens[:, 1:] != 0
    return (token_losses(size, params, tokens, *how) * mask).sum() / mask.sum()


def contrastive_loss_fn(size: Size, params, tokens, *how: Callable):
    """Next tokens, and rows that shall differ: every other row of the batch is a negative."""
    hidden = hidden_fn(size, params, tokens[:, :-1], *how)
    logits = (hidden @ params["embed"].T).astype(jnp.float32)
    rows = hidden.mean(1).astype(jnp.float32)
    rows /= jnp.linalg.norm(rows, axis=-1, keepdims=True)
    alike = jax.nn.log_softmax(rows @ rows.T / 0.1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean() - jnp.diag(alike).mean()


def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, weight_decay=0.1))
