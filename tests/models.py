"""Small models with their unsharded twins, for tests that compare the two.

A `Case` holds a loss for the library and the same loss for one device and the whole batch. No layer has a gradient that
is zero but for rounding (a bias before BatchNorm, a key's bias in attention): Adam would blow the rounding up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import reference
from flax import nnx

import zerojax

VOCABULARY, WIDTH, LENGTH, ROWS = 40, 16, 8, 32
ATTENTION = jax.nn.initializers.normal(0.4)  # large, so that gradients of queries and keys stand out of rounding


@dataclass(frozen=True)
class Case:
    """A model, its loss for the library, and for the twin ``(params, batch, model_state) -> (mean loss, model_state)``.

    ``splits``: whether the twin must accumulate over the micro-batches too, as BatchNorm sees each by itself.
    """

    init: Callable
    loss: Callable
    twin: Callable
    batch: Callable[[int], Any]
    splits: bool = False
    allow_whole: bool = False


def _stateless(loss: Callable) -> Callable:
    return lambda params, batch, model_state: (loss(params, batch), model_state)


def _mlp(params: Callable, batch: Callable, allow_whole: bool = False) -> Case:
    loss = reference.loss_fn
    return Case(
        lambda key: params(), lambda p, b, rng: loss(p, b), _stateless(loss), lambda seed: batch(ROWS, seed),
        allow_whole=allow_whole,
    )  # fmt: skip


# ---- language models ----


def tokens(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, (ROWS, LENGTH + 1)).astype(np.int32)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x_BTD):
        h = nn.LayerNorm()(x_BTD)
        mask = nn.make_causal_mask(jnp.ones(x_BTD.shape[:2]))
        x_BTD = x_BTD + nn.MultiHeadDotProductAttention(num_heads=2, use_bias=False, kernel_init=ATTENTION)(
            h, mask=mask
        )
        h = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x_BTD)))
        return x_BTD + nn.Dense(WIDTH)(h)


class LinenGPT(nn.Module):
    """The embedding is tied with the head."""

    @nn.compact
    def __call__(self, tokens_BT):
        embed = nn.Embed(VOCABULARY, WIDTH)
        x_BTD = embed(tokens_BT) + nn.Embed(LENGTH, WIDTH)(jnp.arange(LENGTH))
        x_BTD = LinenBlock()(x_BTD)
        return embed.attend(nn.LayerNorm()(x_BTD))


def _cross_entropy(logits_BTV, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, batch[:, 1:]).mean()


def _linen_gpt() -> Case:
    model = LinenGPT()

    def init(key):
        return model.init(key, jnp.zeros((1, LENGTH), jnp.int32))["params"]

    def loss(params, batch):
        return _cross_entropy(model.apply({"params": params}, batch[:, :-1]), batch)

    return Case(init, lambda p, b, rng: loss(p, b), _stateless(loss), tokens)


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm_1, self.norm_2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            2, WIDTH, use_bias=False, decode=False, kernel_init=ATTENTION, rngs=rngs
        )
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x_BTD):
        mask = nnx.make_causal_mask(jnp.ones(x_BTD.shape[:2]))
        x_BTD = x_BTD + self.attention(self.norm_1(x_BTD), mask=mask)
        return x_BTD + self.down(nnx.gelu(self.up(self.norm_2(x_BTD))))


class NnxGPT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.block = NnxBlock(rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens_BT):
        x_BTD = self.embed(tokens_BT) + self.positions(jnp.arange(LENGTH))
        return self.embed.attend(self.norm(self.block(x_BTD)))


def _nnx_gpt() -> Case:
    def split(key):
        return nnx.split(NnxGPT(nnx.Rngs(key)))

    def init(key):
        return nnx.to_pure_dict(split(key)[1])

    def loss(params, batch):
        graphdef, abstract = jax.eval_shape(split, jax.random.key(0))
        state = jax.tree.unflatten(jax.tree.structure(abstract), jax.tree.leaves(params))
        return _cross_entropy(nnx.merge(graphdef, state)(batch[:, :-1]), batch)

    return Case(init, lambda p, b, rng: loss(p, b), _stateless(loss), tokens)


# ---- statistics and weights ----


class CNN(nn.Module):
    """BatchNorm over the global batch if ``axis`` names the data axis."""

    axis: str | None = None

    @nn.compact
    def __call__(self, x_BHWC):
        x = nn.Conv(8, (3, 3), use_bias=False)(x_BHWC)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, axis_name=self.axis)(x))
        return nn.Dense(8)(x.mean((1, 2)))


def images(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(ROWS, 6, 6, 3)).astype(np.float32), "y": rng.integers(0, 8, ROWS).astype(np.int32)}


def _cnn() -> Case:
    def run(axis, params, batch, model_state):
        variables = {"params": params, **model_state}
        logits, new = CNN(axis).apply(variables, batch["x"], mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), dict(new)

    def init(key):
        variables = CNN().init(key, jnp.zeros((1, 6, 6, 3)))
        return zerojax.Variables(variables["params"], {"batch_stats": variables["batch_stats"]})

    def loss(params, batch, rng, model_state):
        mean, new = run("data", params, batch, model_state)
        return zerojax.Loss(mean, 1.0, {"mean": mean}, new)

    return Case(init, loss, lambda p, b, s: run(None, p, b, s), images, splits=True)


def masked_batch(seed: int) -> dict:
    """Rows of very unequal weight; the first eighth (one device of eight) has none."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, LENGTH + 1, ROWS) * (np.arange(ROWS) >= ROWS // 8)
    counts[-3:] = LENGTH
    mask = (np.arange(LENGTH)[None] < counts[:, None]).astype(np.float32)
    x, y = (rng.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32) for _ in range(2))
    return {"x": x, "y": y, "mask": mask}


def _masked() -> Case:
    def init(key):
        return {"w": reference.wave((WIDTH, WIDTH), 3, 0.3), "b": reference.wave((WIDTH,), 4, 0.1)}

    def parts(params, batch):
        errors_BT = ((jnp.tanh(batch["x"] @ params["w"] + params["b"]) - batch["y"]) ** 2).mean(-1)
        return (errors_BT * batch["mask"]).sum(), batch["mask"].sum()

    def loss(params, batch, rng):
        total, weight = parts(params, batch)
        return zerojax.Loss(total, weight, {"error": total / jnp.maximum(weight, 1)})

    def twin(params, batch):
        total, weight = parts(params, batch)
        return total / weight

    return Case(init, loss, _stateless(twin), masked_batch)


CASES = {
    "even": _mlp(reference.even_params, reference.even_batch),
    "odd": _mlp(reference.odd_params, reference.odd_batch, allow_whole=True),
    "linen_gpt": _linen_gpt(),
    "nnx_gpt": _nnx_gpt(),
    "cnn": _cnn(),
    "masked": _masked(),
}
