"""Losses that look across rows are those of one device: whole batch, plain JAX.

Float32 sums in another order differ by some 1e-7 of their largest number; a division by a small deviation makes ten
times that of it, so the tolerance is 1e-5.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import test_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec
from reference import assert_close, make_mesh, wave

import zerojax
from zerojax.units.rows import judge
from zerojax.units.spread import UnfitError, spread

TX = optax.sgd(0.02, momentum=0.9)
WIDTH = 16
KEY = jax.random.key(3)
QUEUE = {"queue": wave((8, 8), 5)}


def params() -> dict:
    shapes = {"w": ((WIDTH, 32), 1, 0.3), "b": ((32,), 2, 0.1), "v": ((32, 8), 3, 0.3), "layers": ((4, 8, 8), 4, 0.3)}
    return {name: wave(*args) for name, args in shapes.items()}


def net(p, x):
    return jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]


def layered(p, x):
    return lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), net(p, x), p["layers"])[0]


def normed(h):
    return (h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-3)


def unit(z):
    return z / jnp.linalg.norm(z, axis=-1, keepdims=True)


# ---- losses ----


def advantages(p, b):
    a = b["y"][:, 0]
    a = (a - a.mean()) / (a.std() + 1e-6)
    return -jnp.mean(jax.nn.log_softmax(layered(p, b["x"]))[:, 0] * a)


def masked_mean(p, b):
    mask = b["y"][:, 0] > 0
    return jnp.sum(jnp.mean(layered(p, b["x"]) ** 2, -1) * mask) / jnp.sum(mask)


def batch_norm(p, b):
    return jnp.mean((normed(jnp.tanh(b["x"] @ p["w"] + p["b"])) @ p["v"] - b["y"]) ** 2)


def batch_norm_in_layers(p, b):
    def layer(h, w):
        return h + jnp.tanh(normed(h) @ w), jnp.mean(h)

    h, means = lax.scan(layer, net(p, b["x"]), p["layers"])
    return jnp.mean((h - b["y"]) ** 2) + means[1] ** 2


def checkpointed(p, b):
    return jnp.mean((jax.checkpoint(lambda h: normed(jnp.tanh(h)))(layered(p, b["x"])) - b["y"]) ** 2)


def in_a_branch(p, b):
    h = layered(p, b["x"])
    h = lax.cond(jnp.sum(p["b"]) > 0, lambda h: normed(h), lambda h: h * 0.5, h)
    return jnp.mean((h - b["y"]) ** 2)


def contrastive(p, b):
    z, y = unit(layered(p, b["x"])), unit(b["y"])
    logits = z @ y.T / 0.2
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(logits)) + jnp.diag(jax.nn.log_softmax(logits, axis=0)))


def sigmoid_pairs(p, b):
    z = unit(layered(p, b["x"]))
    signs = 2 * jnp.eye(len(z)) - 1
    return -jnp.mean(jnp.sum(jax.nn.log_sigmoid(signs * (z @ unit(b["y"]).T * 3 - 1)), -1))


def variance_and_covariance(p, b):
    z = layered(p, b["x"])
    z = z - z.mean(0)
    covariance = z.T @ z / (len(z) - 1)
    return jnp.mean((covariance - jnp.diag(jnp.diag(covariance))) ** 2) + jnp.mean(jax.nn.softplus(1 - z.std(0)))


def ranked(p, b):
    scores = layered(p, b["x"])[:, 0]
    return jnp.mean(jnp.sort(scores) * jnp.arange(len(scores)))


def pairs_in_order(p, b):
    scores, y = layered(p, b["x"])[:, 0], b["y"][:, 0]
    wanted = (y[:, None] > y[None]) & jnp.triu(jnp.ones((len(y), len(y)), bool))
    return jnp.sum(jax.nn.softplus(scores[None] - scores[:, None]) * wanted) / jnp.maximum(jnp.sum(wanted), 1)


def hardest(p, b):
    return jnp.mean(lax.top_k(jnp.mean((layered(p, b["x"]) - b["y"]) ** 2, -1), 6)[0])


def a_sum(p, b):
    return jnp.sum(layered(p, b["x"]) ** 2) / 100


def ratio_in_a_loss(p, b):
    error = jnp.mean((layered(p, b["x"]) - b["y"]) ** 2, -1)
    weight = jax.nn.softmax(b["y"][:, 0])
    return zerojax.Loss(jnp.sum(error * weight), jnp.sum(weight), {"worst": jnp.max(error)})


def two_means(p, b):
    return jnp.mean(layered(p, b["x"])) ** 2 + jnp.log(jnp.mean(jnp.exp(net(p, b["x"]))))


LOSSES = [
    *(advantages, masked_mean, batch_norm, batch_norm_in_layers, checkpointed, in_a_branch, contrastive, sigmoid_pairs),
    *(variance_and_covariance, ranked, pairs_in_order, hardest, a_sum, ratio_in_a_loss, two_means),
]


# ---- beside one device ----


def batch(rows: int = 64, seed: int = 0) -> dict:
    numbers = np.random.default_rng(seed).standard_normal((rows, WIDTH + 8)).astype(np.float32)
    return {"x": numbers[:, :WIDTH], "y": numbers[:, WIDTH:]}


def mean_of(loss):
    def value(p, b):
        made = loss(p, b)
        return made.total / made.weight if isinstance(made, zerojax.Loss) else made

    return value


@functools.cache
def right(loss, k: int):
    """Of three steps on one device: parameters, optimizer state, losses, norms."""

    def parts(p, b):
        values = [mean_of(loss)(p, jax.tree.map(lambda a, i=i: a[i::k], b)) for i in range(k)]
        if loss is ratio_in_a_loss:
            made = [loss(p, jax.tree.map(lambda a, i=i: a[i::k], b)) for i in range(k)]
            return sum(m.total for m in made) / sum(m.weight for m in made)
        return sum(values) / k

    return reference.train(TX, params(), [batch(seed=i) for i in range(3)], parts)


def assert_as_one_device(loss, k=1, **config):
    made, opt_state, losses, norms = right(loss, k)
    batches = [batch(seed=i) for i in range(3)]
    state, *ours = reference.train_zero(TX, params(), batches, loss, accumulate=k, **config)
    assert_close(ours, [losses, norms])
    assert_close(jax.device_get((state.params, state.opt_state)), (made, opt_state))


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_losses_across_rows_are_those_of_one_device(loss):
    assert_as_one_device(loss, stage=3)


@pytest.mark.parametrize("loss", [batch_norm_in_layers, contrastive, masked_mean], ids=lambda f: f.__name__)
def test_as_one_program(loss):
    assert_as_one_device(loss, k=2, stage=3, rows="together")


@pytest.mark.parametrize(("loss", "stage"), [(advantages, 2), (batch_norm, 1), (ranked, 0), (ratio_in_a_loss, 3)])
def test_in_micro_batches(loss, stage):
    assert_as_one_device(loss, k=4, stage=stage)


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(LOSSES)), ids=lambda i: LOSSES[i].__name__)
def test_by_turns(number):
    """Each loss once; of four or eight micro-batches a device has two rows each, or one."""
    k, devices, stage = [(1, 2, 2), (4, 8, 1), (4, 2, 3), (8, 8, 3), (2, 8, 0)][number % 5]
    assert_as_one_device(LOSSES[number], k=k, stage=stage, mesh=make_mesh(devices))


@pytest.mark.night
@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_everywhere(loss, k, devices):
    for stage in range(4):
        assert_as_one_device(loss, k=k, stage=stage, mesh=make_mesh(devices))


# ---- random programs ----


def difference(loss, devices: int = 4) -> float:
    """Of loss and gradient, spread over devices and of one, relative to the largest number."""
    mesh, w, x = make_mesh(devices), test_rows.W, test_rows.X
    axes = {"data": devices}

    def mean(made):
        return made.total / made.weight if isinstance(made, zerojax.Loss) else made

    def local(w, x):
        def own(w):
            made = spread(loss, axes)(w, x)
            if not isinstance(made, zerojax.Loss):
                return made / devices
            return made.total / lax.stop_gradient(lax.psum(made.weight, "data"))

        return jax.tree.map(lambda a: lax.psum(a, "data"), jax.value_and_grad(own)(w))

    specs = (PartitionSpec(), PartitionSpec("data"))
    ours = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False))(w, x)

    def value(w, x):
        made = loss(w, x)
        return made.total / lax.stop_gradient(made.weight) if isinstance(made, zerojax.Loss) else made

    right = jax.jit(jax.value_and_grad(value))(w, x)
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(right), strict=True)
    return max(float(jnp.abs(a - b).max() / (1e-3 + jnp.abs(b).max())) for a, b in pairs)


@settings(max_examples=max(10, settings().max_examples // 4))
@given(st.lists(test_rows.steps, max_size=4), st.integers(0, len(test_rows.ENDS) - 1), st.sampled_from([4, 8]))
def test_random_programs_are_those_of_one_device(some, end, devices):
    """With two rows on each device, and with one."""
    loss = test_rows.program(some, end)
    if judge(loss, test_rows.W, test_rows.X).apart:
        return
    try:
        assert not difference(loss, devices) > 1e-3  # what is no number says nothing
    except UnfitError:
        return
