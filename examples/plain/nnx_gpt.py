"""A small GPT in Flax NNX learns the source of Python's argparse byte by byte."""

import argparse
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH, ROWS = 256, 64, 2, 4, 64, 32

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100, help="updates to make")
steps = parser.parse_args().steps

text = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8).astype(np.int32)
random = np.random.default_rng(0)


def next_batch():
    starts = random.integers(0, text.size - LENGTH, ROWS)
    return text[starts[:, None] + np.arange(LENGTH + 1)]  # (rows, length + 1)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.position = (nnx.Embed(n, WIDTH, rngs=rngs) for n in (VOCABULARY, LENGTH))
        self.blocks = nnx.List(Block(rngs) for _ in range(LAYERS))
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):  # (rows, length) -> (rows, length, vocabulary)
        x = self.embed(tokens) + self.position(jnp.arange(LENGTH))
        for block in self.blocks:
            x = block(x, nnx.make_causal_mask(tokens))
        return self.embed.attend(self.norm(x))  # the embedding is also the output layer


def loss_fn(model, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()


@partial(nnx.jit, donate_argnums=(0, 1))
def train_step(model, optimizer, tokens):
    loss, grads = nnx.value_and_grad(loss_fn)(model, tokens)
    optimizer.update(model, grads)
    return loss


tx = optax.adamw(3e-3)
model = GPT(nnx.Rngs(jax.random.key(0)))
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

for step in range(steps):
    loss = train_step(model, optimizer, next_batch())
    if step % 10 == 0 or step == steps - 1:
        print(f"step {step} loss {loss:.6f}", flush=True)
