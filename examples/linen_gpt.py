"""A small GPT in Flax linen learns the source of Python's argparse byte by byte."""

import argparse
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import zerojax.linen

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH, ROWS = 256, 64, 2, 4, 64, 32

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100, help="updates to make")
steps = parser.parse_args().steps

text = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8).astype(np.int32)
random = np.random.default_rng(0)


def next_batch():
    starts = random.integers(0, text.size - LENGTH, ROWS)
    return text[starts[:, None] + np.arange(LENGTH + 1)]  # (rows, length + 1)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS)(h, mask=mask)
        h = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(h)


class GPT(nn.Module):
    @nn.compact
    def __call__(self, tokens):  # (rows, length) -> (rows, length, vocabulary)
        embed = nn.Embed(VOCABULARY, WIDTH)
        x = embed(tokens) + nn.Embed(LENGTH, WIDTH)(jnp.arange(LENGTH))
        for _ in range(LAYERS):
            x = Block()(x, nn.make_causal_mask(tokens))
        return embed.attend(nn.LayerNorm()(x))  # the embedding is also the output layer


def loss_fn(params, tokens):
    logits = model.apply({"params": params}, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@partial(jax.jit, donate_argnums=0)
def train_step(state, tokens):
    loss, grads = zerojax.value_and_grad(loss_fn, plan)(state.params, tokens)
    return state.apply_gradients(grads=grads), loss


model, tx, key = GPT(), optax.adamw(3e-3), jax.random.key(0)
init_fn = zerojax.linen.init_fn(model, jnp.zeros((1, LENGTH), jnp.int32))
plan = zerojax.make_plan(init_fn, tx, jax.make_mesh((jax.device_count(),), ("data",)))
state = zerojax.linen.create_train_state(init_fn, tx, plan, key, apply_fn=model.apply)

for step in range(steps):
    state, loss = train_step(state, next_batch())
    if step % 10 == 0 or step == steps - 1:
        print(f"step {step} loss {loss:.6f}", flush=True)
