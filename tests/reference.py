"""Inputs from closed formulas, a small model, and what everything is compared with: plain optax on one device."""

import functools

import chex
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


def per_row(params: dict, batch: dict) -> jax.Array:
    return jnp.mean((forward(params, batch["x"]) - batch["y"]) ** 2, axis=-1)


def loss_fn(params: dict, batch: dict) -> jax.Array:
    return jnp.mean(per_row(params, batch))


def weighted_loss(params: dict, batch: dict) -> zerojax.Loss:
    """The mean over the rows whose ``batch["weight"]`` is not zero."""
    return zerojax.Loss(jnp.sum(per_row(params, batch) * batch["weight"]), jnp.sum(batch["weight"]))


def norm(tree) -> float:
    return float(np.sqrt(sum(np.sum(np.asarray(leaf, np.float64) ** 2) for leaf in jax.tree.leaves(tree))))


def difference(a, b) -> float:
    """The largest absolute difference of two trees."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)).max(initial=0)) for x, y in pairs)


def assert_close(ours, right, tolerance: float = 1e-5):
    """Every leaf, relative to its largest number: float32 sums in another order differ by some 1e-7 of it."""
    chex.assert_trees_all_equal_structs(ours, right)
    for (path, a), b in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(right), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape, f"{jax.tree_util.keystr(path)} has shape {a.shape}, not {b.shape}"
        error = np.abs(a - b).max(initial=0) / max(np.abs(b).max(initial=0), 1e-30)
        assert error <= tolerance, f"{jax.tree_util.keystr(path)} is off by {error:.2e} of its largest number"


def assert_same(ours, right):
    """Bitwise."""
    assert jax.tree.structure(ours) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)


def pad_rows(batch: dict, parts: int) -> dict:
    """The batch with rows of weight zero behind, so that ``parts`` divides it; their numbers are far from harmless."""
    rows = len(batch["x"])
    more = -rows % parts
    padded = {name: np.concatenate([a, np.full((more, *a.shape[1:]), 7, a.dtype)]) for name, a in batch.items()}
    return {**padded, "weight": np.concatenate([np.ones(rows, np.float32), np.zeros(more, np.float32)])}


@functools.cache
def _plain_step(tx, loss):
    @jax.jit
    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value, grads

    return step


def train(tx, params, batches, loss=loss_fn):
    """Plain optax: ``(params, opt_state, losses, gradient norms)``."""
    step = _plain_step(tx, loss)
    opt_state, losses, norms = tx.init(params), [], []
    for batch in batches:
        params, opt_state, value, grads = step(params, opt_state, batch)
        losses.append(float(value))
        norms.append(norm(grads))
    return params, opt_state, losses, norms


def make_mesh(devices: int = 8, explicit: bool = False):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    return jax.make_mesh((devices,), ("data",), axis_types=(kind,), devices=jax.devices()[:devices])


def make_grid(shape: tuple[int, ...], names: tuple[str, ...], kinds: str = "auto"):
    """A mesh of several axes; ``kinds`` is ``"auto"``, ``"explicit"`` or ``"mixed"``."""
    types = {"auto": "A", "explicit": "E", "mixed": "EAE"}[kinds] * len(shape)
    by_letter = {"A": jax.sharding.AxisType.Auto, "E": jax.sharding.AxisType.Explicit}
    kinds = tuple(by_letter[letter] for letter in types[: len(shape)])
    return jax.make_mesh(shape, names, axis_types=kinds, devices=jax.devices()[: int(np.prod(shape))])


def prepare(params, tx, loss=loss_fn, mesh=None, base_specs=None, **config):
    """``(plan, state, step)`` of the library for parameters that exist."""
    config = zerojax.ZeroConfig(**config)
    plan = zerojax.make_plan(lambda key: params, tx, mesh or make_mesh(), config, base_specs=base_specs)
    state = zerojax.init_state(lambda key: params, tx, plan, jax.random.key(0))
    return plan, state, zerojax.make_train_step(loss, tx, plan)


def train_zero(tx, params, batches, loss=loss_fn, mesh=None, base_specs=None, **config):
    """The library: ``(state, losses, gradient norms)``."""
    _, state, step = prepare(params, tx, loss, mesh, base_specs, **config)
    metrics = []
    for batch in batches:
        state, metric = step(state, batch)
        metrics.append(metric)
    return state, [float(m["loss"]) for m in metrics], [float(m["grad_norm"]) for m in metrics]
