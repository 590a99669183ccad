"""A multilayer perceptron in plain JAX learns scikit-learn's handwritten digits."""

import argparse
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100, help="updates to make")
steps = parser.parse_args().steps

images, labels = load_digits(return_X_y=True)  # (1797, 64), (1797,)
data = {"x": (images / 16).astype(np.float32), "y": labels.astype(np.int32)}
train, held_out = ({k: v[part] for k, v in data.items()} for part in (slice(None, 1536), slice(1536, None)))


def init_fn(key):
    first, second = jax.random.split(key)
    return {
        "hidden": {"w": jax.random.normal(first, (64, 256)) / 8, "b": jnp.zeros(256)},
        "out": {"w": jax.random.normal(second, (256, 10)) / 16, "b": jnp.zeros(10)},
    }


def logits(params, x):
    hidden = jax.nn.relu(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]


def loss_fn(params, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, batch["x"]), batch["y"]).mean()


class State(NamedTuple):
    params: Any
    opt_state: Any


@jax.jit
def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    return State(optax.apply_updates(state.params, updates), opt_state), {"loss": loss}


tx = optax.adamw(3e-3)
params = init_fn(jax.random.key(0))
state = State(params, tx.init(params))

random = np.random.default_rng(0)
for step in range(steps):
    rows = random.choice(len(train["y"]), 64, replace=False)
    state, metrics = train_step(state, {k: v[rows] for k, v in train.items()})
    if step % 10 == 0 or step == steps - 1:
        print(f"step {step} loss {metrics['loss']:.6f}", flush=True)

accuracy = (logits(state.params, held_out["x"]).argmax(-1) == held_out["y"]).mean()
print(f"accuracy on images that were held out: {accuracy:.3f}")
