"""Losses that look across rows are those of one device: whole batch, plain JAX.

Float32 sums in another order differ by some 1e-7 of their largest number; a division by a small deviation makes ten
times that of it, so the tolerance is 1e-5.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import test_rows
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec
from reference import assert_close, make_mesh, wave

import zerojax
import zerojax.linen
import zerojax.nnx
from zerojax.units.rows import judge
from zerojax.units.spread import UnfitError, spread

TX = optax.sgd(0.02, momentum=0.9)
WIDTH = 16
KEY = jax.random.key(3)


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


# ---- what goes with a loss ----


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(nn.Dense(32)(x))
        return nn.Dense(8)(nn.relu(x))


@pytest.mark.parametrize(("stage", "k"), [(3, 1), pytest.param(1, 2, marks=pytest.mark.long)])
def test_statistics_of_the_whole_batch_without_an_axis_name(stage, k):
    """Flax linen, running statistics too: threaded through the micro-batches, the variance that of all rows."""
    model = Normalized()

    def loss(params, batch, rng=None, model_state=None):
        out, new = model.apply({"params": params, **model_state}, batch["x"], mutable=["batch_stats"])
        return zerojax.Loss(jnp.sum((out - batch["y"]) ** 2), out.size, model_state=new)

    init = zerojax.linen.init_fn(model, jnp.ones((1, WIDTH)))
    plan = zerojax.make_plan(init, TX, make_mesh(), zerojax.ZeroConfig(stage=stage, accumulate=k))
    state, step = zerojax.init_state(init, TX, plan, jax.random.key(0)), zerojax.make_train_step(loss, TX, plan)
    made, stats = init(jax.random.key(0)).params, init(jax.random.key(0)).model_state
    opt_state = TX.init(made)

    def whole(p, stats, b):
        total = 0.0
        for i in range(k):
            one = loss(p, jax.tree.map(lambda a, i=i: a[i::k], b), None, stats)
            total, stats = total + one.total / one.weight / k, one.model_state
        return total, stats

    for seed in range(2):
        state, metrics = step(state, batch(seed=seed))
        (value, stats), grads = jax.jit(jax.value_and_grad(whole, has_aux=True))(made, stats, batch(seed=seed))
        updates, opt_state = TX.update(grads, opt_state, made)
        made = optax.apply_updates(made, updates)
        assert_close(metrics["loss"], value)
    assert_close(jax.device_get(state.model_state), jax.device_get(dict(stats)))
    moved = jax.tree.map(lambda a, b: a - b, jax.device_get(state.params), jax.device_get(made))
    assert max(np.abs(a).max() for a in jax.tree.leaves(moved)) < 1e-5  # a bias before a norm has no gradient but noise


def test_negatives_from_a_queue():
    """The queue is model state: the newest rows go in front, whole on every device."""

    def loss(p, b, rng=None, model_state=None):
        z, queue = unit(layered(p, b["x"])), model_state["queue"]
        own = jnp.sum(z * unit(b["y"]), -1, keepdims=True)
        logits = jnp.concatenate([own, z @ queue.T], 1) / 0.2
        newest = lax.stop_gradient(jnp.concatenate([unit(b["y"]), queue])[: len(queue)])
        return zerojax.Loss(-jnp.mean(jax.nn.log_softmax(logits)[:, 0]), 1.0, model_state={"queue": newest})

    init = lambda key: zerojax.Variables(params(), {"queue": unit(wave((96, 8), 5))})  # noqa: E731
    plan = zerojax.make_plan(init, TX, make_mesh())
    state, step = zerojax.init_state(init, TX, plan, KEY), zerojax.make_train_step(loss, TX, plan)
    made, opt_state, queue = params(), TX.init(params()), init(None).model_state
    for seed in range(2):
        state, metrics = step(state, batch(seed=seed))
        f = lambda p, b, queue: ((one := loss(p, b, None, queue)).total, one.model_state)  # noqa: E731
        (value, queue), grads = jax.jit(jax.value_and_grad(f, has_aux=True))(made, batch(seed=seed), queue)
        updates, opt_state = TX.update(grads, opt_state, made)
        made = optax.apply_updates(made, updates)
        assert_close(metrics["loss"], value)
    assert_close(jax.device_get((state.params, state.model_state)), (made, jax.device_get(queue)))


@pytest.mark.parametrize("precision", ["c=bf16", pytest.param("c=fp16", marks=pytest.mark.long)])
def test_in_16_bits(precision):
    """Beside one device that computes in the same; sums of parts are rounded once more: 1e-2."""
    scale = zerojax.LossScale(initial=1024) if "fp16" in precision else None
    _, state, step = reference.prepare(params(), TX, contrastive, stage=2, precision=precision, loss_scale=scale)
    dtype = jnp.bfloat16 if "bf16" in precision else jnp.float16
    cast = lambda p: jax.tree.map(lambda a: a.astype(dtype), p)  # noqa: E731
    small = jax.tree.map(lambda a: jnp.asarray(a, dtype), batch())
    value, grads = jax.jit(jax.value_and_grad(lambda p: contrastive(cast(p), small)))(params())
    metrics = step(state, small)[1]
    assert_close((metrics["loss"], metrics["grad_norm"]), (value, optax.tree.norm(grads)), 1e-2)


def test_a_permutation_drawn_for_all_rows():
    """Mixup: each row meets another of the whole batch, with one key as on one device."""

    def loss(p, b, rng):
        other = jax.random.permutation(rng, len(b["x"]))
        mixed = 0.7 * b["x"] + 0.3 * b["x"][other]
        return jnp.mean((layered(p, mixed) - 0.7 * b["y"] - 0.3 * b["y"][other]) ** 2), {"other": other}

    _, state, step = reference.prepare(params(), TX, loss)
    metrics = step(state, batch())[1]
    other = np.asarray(metrics["other"])
    assert sorted(other) == list(range(64))
    mixed = 0.7 * batch()["x"] + 0.3 * batch()["x"][other]
    wanted = 0.7 * batch()["y"] + 0.3 * batch()["y"][other]
    assert_close(metrics["loss"], jnp.mean((layered(params(), mixed) - wanted) ** 2))


@pytest.mark.parametrize("rows", [64, 19])
def test_evaluation_across_rows(rows):
    """Also of rows that do not divide: one mean over a mask, not a mean of the devices' means."""
    plan, state, _ = reference.prepare(params(), TX, masked_mean)
    found = zerojax.make_eval_step(lambda p, b: {"masked": masked_mean(p, b), "deviation": net(p, b["x"]).std()}, plan)
    right = {"masked": masked_mean(params(), batch(rows)), "deviation": net(params(), batch(rows)["x"]).std()}
    assert_close(found(state, batch(rows)), right)


def test_modules_across_rows():
    """NNX's BatchNorm: statistics of all rows, in the module that was passed in."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.one, self.norm = nnx.Linear(WIDTH, 32, rngs=rngs), nnx.BatchNorm(32, rngs=rngs)
            self.two = nnx.Linear(32, 8, rngs=rngs)

        def __call__(self, x):
            return self.two(nnx.relu(self.norm(self.one(x))))

    loss = lambda model, b: jnp.mean((model(b["x"]) - b["y"]) ** 2)  # noqa: E731
    plan = zerojax.nnx.make_plan(Net, TX, make_mesh())
    model, optimizer = zerojax.nnx.create(Net, TX, plan, KEY)
    right = Net(nnx.Rngs(KEY))
    by_flax = nnx.Optimizer(right, TX, wrt=nnx.Param)

    @nnx.jit
    def train(model, optimizer, b):
        value, grads = zerojax.nnx.value_and_grad(loss, plan)(model, b)
        optimizer.update(model, grads)
        return value

    for seed in range(2):
        ours = train(model, optimizer, batch(seed=seed))
        value, grads = nnx.jit(nnx.value_and_grad(loss))(right, batch(seed=seed))
        by_flax.update(right, grads)
        assert_close(ours, value)
    stats = [nnx.as_pure(nnx.state(m, nnx.BatchStat)) for m in (model, right)]
    assert_close(*map(jax.device_get, stats))
    measured = zerojax.nnx.make_eval_step(loss, plan)(model, batch())
    assert_close(measured["loss"], loss(right, batch()))


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
