"""Inputs from closed formulas, a small model, and the loop that everything is compared with: plain optax, one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zerojax


def wave(shape: tuple[int, ...], seed: float, scale: float = 1.0) -> jax.Array:
    """``scale * sin(0.731 i + 1.37 seed)`` in float32: the same numbers everywhere, without a random generator."""
    values = np.sin(np.arange(int(np.prod(shape)), dtype=np.float64) * 0.731 + seed * 1.37) * scale
    return jnp.asarray(values.reshape(shape), jnp.float32)


def odd_params() -> dict:
    """67 numbers in five leaves of which none can be divided by 2, 4 or 8."""
    shapes = {"w1": ((5, 7), 1, 0.6), "b1": ((7,), 2, 0.1), "w2": ((7, 3), 3, 0.5), "b2": ((3,), 4, 0.1)}
    return {**{name: wave(*args) for name, args in shapes.items()}, "s": jnp.float32(1.3)}


def even_params() -> dict:
    shapes = {"w1": ((16, 32), 1, 0.3), "b1": ((32,), 2, 0.1), "w2": ((32, 8), 3, 0.3), "b2": ((8,), 4, 0.1)}
    return {name: wave(*args) for name, args in shapes.items()}


def odd_batch(rows: int = 16, seed: int = 0) -> dict:
    return {"x": wave((rows, 5), 10 + seed), "y": wave((rows, 3), 20 + seed)}


def even_batch(rows: int = 16, seed: int = 0) -> dict:
    return {"x": wave((rows, 16), 10 + seed), "y": wave((rows, 8), 20 + seed)}


def forward(params: dict, x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return (hidden @ params["w2"] + params["b2"]) * params.get("s", 1.0)


def loss_fn(params: dict, batch: dict) -> jax.Array:
    return jnp.mean(jnp.mean((forward(params, batch["x"]) - batch["y"]) ** 2, axis=-1))


def norm(tree) -> float:
    return float(np.sqrt(sum(np.sum(np.asarray(leaf, np.float64) ** 2) for leaf in jax.tree.leaves(tree))))


def difference(a, b) -> float:
    """The largest absolute difference of two trees."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)).max(initial=0)) for x, y in pairs)


def train(tx, params, batches, loss=loss_fn):
    """Plain optax: ``(params, opt_state, losses, gradient norms)``."""

    @jax.jit
    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value, grads

    opt_state, losses, norms = tx.init(params), [], []
    for batch in batches:
        params, opt_state, value, grads = step(params, opt_state, batch)
        losses.append(float(value))
        norms.append(norm(grads))
    return params, opt_state, losses, norms


def make_mesh(devices: int = 8, explicit: bool = False):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    return jax.make_mesh((devices,), ("data",), axis_types=(kind,), devices=jax.devices()[:devices])


def prepare(params, tx, loss=loss_fn, mesh=None, **config):
    """``(plan, state, step)`` of the library for parameters that exist."""
    plan = zerojax.make_plan(lambda key: params, tx, mesh or make_mesh(), zerojax.ZeroConfig(**config))
    state = zerojax.init_state(lambda key: params, tx, plan, jax.random.key(0))
    return plan, state, zerojax.make_train_step(loss, tx, plan)


def train_zero(tx, params, batches, loss=loss_fn, mesh=None, **config):
    """The library: ``(state, losses, gradient norms)``."""
    _, state, step = prepare(params, tx, loss, mesh, **config)
    metrics = []
    for batch in batches:
        state, metric = step(state, batch)
        metrics.append(metric)
    return state, [float(m["loss"]) for m in metrics], [float(m["grad_norm"]) for m in metrics]
