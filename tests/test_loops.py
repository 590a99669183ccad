"""What users do around and inside a step: each beside the same on one device, with plain jax and optax.

Tolerance 1e-5 relative: float32 sums in another order; bitwise where nothing is computed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax import lax
from jax.sharding import PartitionSpec as P
from reference import (
    assert_close,
    assert_same,
    even_batch,
    even_params,
    make_grid,
    make_mesh,
    prepare,
    train_zero,
    wave,
)

import zerojax

SGD = optax.sgd(0.1, momentum=0.9)
BATCHES = [even_batch(16, seed) for seed in range(3)]


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


def check(loss, stage, tx=SGD, params=None, batches=BATCHES, twin_loss=None, **config):
    """Losses, norms and parameters of every step are those of one device."""
    params = even_params() if params is None else params
    state, losses, norms = train_zero(tx, params, batches, loss, stage=stage, **config)
    right, opt_state, right_losses, right_norms = reference.train(tx, params, batches, twin_loss or loss)
    assert_close((losses, norms), (right_losses, right_norms))
    assert_close(jax.device_get(state.params), right)
    assert_close(jax.device_get(state.opt_state), opt_state)


# ---- averages of parameters ----

AVERAGE = [
    0.0442899242, -0.0269192550, -0.0819053277, -0.0923761129, -0.0530706793, 0.0154599641, 0.0772157460, 0.0950322151,
    0.0687953457, 0.0051494646, -0.0637921318, -0.1027486250, -0.0915672630, -0.0349066816, 0.0388805009, 0.0961765200,
]  # fmt: skip


@pytest.mark.parametrize(("stage", "decay"), [(3, 0.9), (1, 0.999), long(0, 0.9), long(2, 0.999)])
def test_moving_averages_of_partitioned_parameters(stage, decay):
    """OpenRLHF/OpenRLHF#1357, pytorch/pytorch#117742, facebookresearch/fairscale#789: not written back; too coarse."""
    tx = optax.adam(1e-2)
    plan, state, step = prepare(even_params(), tx, stage=stage)
    placed = plan.state_shardings.params
    average = jax.tree.map(jnp.copy, state.params)
    follow = jax.jit(lambda new, old: optax.incremental_update(new, old, 1 - decay), donate_argnums=1)
    evaluate = zerojax.make_eval_step(reference.loss_fn, plan)
    right, opt_state = even_params(), tx.init(even_params())
    right_average = right
    gradient = jax.jit(jax.value_and_grad(reference.loss_fn))
    for batch in BATCHES:
        state, _ = step(state, batch)
        average = follow(state.params, average)
        updates, opt_state = tx.update(gradient(right, batch)[1], opt_state, right)
        right = optax.apply_updates(right, updates)
        right_average = jax.tree.map(lambda new, old: (1 - decay) * new + decay * old, right, right_average)
        assert jax.tree.map(lambda leaf: leaf.sharding, average) == placed
    moved = jax.tree.map(lambda a, b: np.asarray(a, np.float64) - np.asarray(b), jax.device_get(average), even_params())
    right_moved = jax.tree.map(lambda a, b: np.asarray(a, np.float64) - np.asarray(b), right_average, even_params())
    # What is compared is how far it moved: some 1e-5 of numbers near 1, of which float32 knows 1e-7 each step.
    assert_close(moved, right_moved, 2e-3 if decay == 0.9 else 2e-2)
    assert_close(jax.device_get(average), right_average)
    if decay == 0.9:
        flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(jax.device_get(average))])
        np.testing.assert_allclose(flat[: len(AVERAGE)], AVERAGE, rtol=1e-5, atol=1e-7)
        assert reference.norm(average) == pytest.approx(5.8922697339, rel=1e-6)
    as_state = zerojax.TrainState(state.step, average, state.opt_state, state.rng, state.model_state)
    got = float(evaluate(as_state, even_batch(16, 5))["loss"])
    assert got == pytest.approx(float(reference.loss_fn(right_average, even_batch(16, 5))), rel=1e-5)


@pytest.mark.parametrize("shape", [(18, 4), long((2, 3)), (67,), long((1,)), ()])
def test_shapes_are_the_users(shape, tmp_path):
    """NCAR/miles-credit#416: (18, 4) over 8 devices came back as (24, 4)."""
    params = {"odd": wave(shape, 1), "even": wave((64, 64), 2, 0.1)}
    plan, state, _ = prepare(params, optax.adam(1e-2), allow_whole=True)
    average = jax.jit(lambda p: optax.incremental_update(p, p, 0.1))(state.params)
    for tree in (state.params, average, zerojax.gather_params(state.params, plan)):
        assert {name: leaf.shape for name, leaf in tree.items()} == {"odd": shape, "even": (64, 64)}
    host = jax.device_get(zerojax.gather_params(state.params, plan))
    np.savez(tmp_path / "export.npz", **host)
    with np.load(tmp_path / "export.npz") as exported:
        assert_same(dict(exported), jax.device_get(params))
    assert {leaf.shape for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim} <= {shape, (64, 64)}


# ---- parts that other axes own ----


@pytest.mark.parametrize(
    ("stage", "axes"),
    [
        (3, ("data",)),
        long(1, ("data",)),
        (0, ("data",)),
        long(2, ("data", "expert")),
    ],
)
def test_the_norm_of_parts_with_different_owners(stage, axes):
    """deepspeedai/DeepSpeed#8475, hpcaitech/ColossalAI#2192: owners' norms were averaged, 7.236 for 10.954."""
    specs = {"experts": P("expert"), "whole": None} if len(axes) == 1 else None
    coefficients = jnp.array([[2.0, 4.0], [6.0, 8.0]])

    def loss(params, batch):  # two experts: the gradient of each is a row of the coefficients
        return jnp.sum(params["experts"] * coefficients) * jnp.mean(batch) + 0 * jnp.sum(params["whole"])

    params = {"experts": jnp.ones((2, 2)), "whole": jnp.ones(8)}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    config = {"mesh": make_grid((4, 2), ("data", "expert")), "shard_axes": axes, "allow_whole": True}
    state, _, norms = train_zero(tx, params, [jnp.ones((16, 1))], loss, base_specs=specs, stage=stage, **config)
    assert norms[0] == pytest.approx(120**0.5, rel=1e-6)
    np.testing.assert_allclose(1 - state.params["experts"], coefficients * 0.0912870929, rtol=1e-5)


# ---- losses ----


def tied(params, batch):
    """One matrix used twice."""
    hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w1"].T - batch["x"]) ** 2) + jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2)


def input_penalty(params, batch):
    slope = jax.grad(lambda x: jnp.sum(reference.forward(params, x)))(batch["x"])
    return reference.loss_fn(params, batch) + 0.1 * jnp.mean(jnp.sum(slope**2, -1))


def parameter_penalty(params, batch):
    """By rows, so that it is a mean over them whatever the number of devices."""
    one = jax.vmap(lambda x, y: jax.grad(reference.loss_fn)(params, {"x": x[None], "y": y[None]}))
    slopes = one(batch["x"], batch["y"])
    return reference.loss_fn(params, batch) + 0.01 * sum(jnp.mean(g**2) for g in jax.tree.leaves(slopes))


def scanned_penalty(params, batch):
    def net(x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["stack"])[0]

    slope = jax.grad(lambda x: jnp.sum(net(x) ** 2))(batch["x"])
    return jnp.mean((net(batch["x"]) @ params["w"] - batch["y"]) ** 2) + 0.1 * jnp.mean(jnp.sum(slope**2, -1))


def stacked_params():
    return {"stack": wave((3, 16, 16), 1, 0.3), "w": wave((16, 8), 2, 0.3)}


@pytest.mark.parametrize(("loss", "stage"), [
    (input_penalty, 3), (parameter_penalty, 3), long(tied, 3),
    *(long(loss, stage) for loss in (tied, input_penalty, parameter_penalty) for stage in range(3)),
])  # fmt: skip
def test_losses_of_every_kind(loss, stage):
    check(loss, stage)


@pytest.mark.parametrize("stage", [long(0), long(1), long(2), 3])
def test_a_gradient_penalty_through_a_scan(stage):
    check(scanned_penalty, stage, params=stacked_params())


def test_batches_of_every_structure():
    """A tuple of a mapping and arrays, and ``None`` for what is left out."""

    def loss(params, batch):
        first, (scale, nothing) = batch
        assert nothing is None
        return jnp.mean(reference.per_row(params, first) * scale)

    batches = [(b, (1 + wave((16,), seed) ** 2, None)) for seed, b in enumerate(BATCHES)]
    check(loss, 3, batches=batches, accumulate=2)


@pytest.mark.parametrize("stage", [long(0), long(1), long(2), 3])
def test_two_losses_in_a_step_of_ones_own(stage):
    """Two gradients of one plan, weighed and added."""
    plan, state, _ = prepare(even_params(), SGD, stage=stage)

    @jax.jit
    def step(params, opt_state, batch):
        first, grads = zerojax.value_and_grad(reference.loss_fn, plan)(params, batch)
        second, more = zerojax.value_and_grad(tied, plan)(params, batch)
        grads = jax.tree.map(lambda a, b: a + 0.5 * b, grads, more)
        updates, opt_state = SGD.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, first + 0.5 * second

    params, opt_state, losses = state.params, state.opt_state, []
    for batch in BATCHES:
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    both = lambda p, b: reference.loss_fn(p, b) + 0.5 * tied(p, b)  # noqa: E731
    right, _, right_losses, _ = reference.train(SGD, even_params(), BATCHES, both)
    assert_close((jax.device_get(params), losses), (right, right_losses))


@pytest.mark.parametrize("stage", [long(1), 3])
def test_two_networks_that_train_against_each_other(stage):
    """Two plans in one step; what the other network needs of whole parameters comes as rows, or as whole copies."""
    makes = {"g": {"w": wave((16, 16), 1, 0.3), "b": wave((16,), 2, 0.1)}, "d": {"v": wave((16, 8), 3, 0.3)}}
    tx = optax.adam(1e-2)
    plans = {k: prepare(v, tx, stage=stage)[0] for k, v in makes.items()}

    def fake(g, x):
        return jnp.tanh(x @ g["w"] + g["b"])

    def score(d, x):
        return jnp.mean(jnp.tanh(x @ d["v"]), -1)

    def critic(d, batch):
        return jnp.mean(score(d, batch["fake"]) - score(d, batch["x"]))

    def step(gradient_d, gradient_g, generate, params, states, batch):
        rows = {**batch, "fake": generate(params["g"], batch["x"])}
        loss_d, of_d = gradient_d(params["d"], rows)
        loss_g, of_g = gradient_g(params["g"], batch, params["d"])
        for k, grads in (("d", of_d), ("g", of_g)):
            updates, state = tx.update(grads, states[k], params[k])
            params, states = {**params, k: optax.apply_updates(params[k], updates)}, {**states, k: state}
        return params, states, jnp.stack([loss_d, loss_g])

    def generator(d):
        return lambda g, batch: -jnp.mean(score(d, fake(g, batch["x"])))

    def gradient_g(g, batch, d):  # the other network's parameters pass through unchanged, frozen in the same plan
        both = zerojax.value_and_grad(lambda p, batch: generator(p["d"])(p["g"], batch), joint)
        loss, grads = both({"g": g, "d": d}, batch)
        assert jax.tree.leaves(grads["d"]) == []
        return loss, grads["g"]

    joint = prepare(makes, tx, stage=stage, frozen="d/*")[0]
    ours = jax.jit(lambda *args: step(zerojax.value_and_grad(critic, plans["d"]), gradient_g, fake, *args))
    plain = jax.jit(
        lambda *args: step(
            jax.value_and_grad(critic), lambda g, b, d: jax.value_and_grad(generator(d))(g, b), fake, *args
        )
    )
    placed = {k: jax.device_put(v, plans[k].state_shardings.params) for k, v in makes.items()}
    states = {k: jax.device_put(tx.init(v), plans[k].state_shardings.opt_state) for k, v in makes.items()}
    right, right_states = makes, {k: tx.init(v) for k, v in makes.items()}
    for batch in BATCHES[:2]:
        placed, states, losses = ours(placed, states, batch)
        right, right_states, right_losses = plain(right, right_states, batch)
        assert_close(losses, right_losses)
    assert_close(jax.device_get(placed), right)


# ---- randomness ----


@pytest.mark.parametrize("remat", ["unit", long("checkpoint")])
def test_dropout_with_remat_draws_the_same_in_backward(remat):
    """Where a mask is zero the gradient is zero; the stages agree. One device computes it with each device's key."""

    def loss(params, batch, rng):
        def layer(w, x):
            mask = jax.random.bernoulli(rng, 0.5, x.shape)
            return jnp.tanh(x * mask @ w)

        layer = jax.checkpoint(layer) if remat == "checkpoint" else layer
        return jnp.mean((layer(params["w"], batch["x"]) - batch["y"]) ** 2)

    params = {"w": wave((16, 8), 1, 0.3)}
    results = []
    for stage in (0, 3):
        _, state, step = prepare(params, optax.sgd(1.0), loss, stage=stage, remat="unit" if remat == "unit" else None)
        rng = jax.random.fold_in(jax.random.fold_in(state.rng, 0), 0)
        keys = [jax.random.fold_in(rng, device) for device in range(8)]
        state, metrics = step(state, BATCHES[0])
        results.append((jax.device_get(state.params), float(metrics["loss"])))
    parts = [jax.tree.map(lambda a, i=i: a[2 * i : 2 * i + 2], BATCHES[0]) for i in range(8)]
    whole = lambda p: sum(loss(p, part, key) for part, key in zip(parts, keys, strict=True)) / 8  # noqa: E731
    value, grads = jax.jit(jax.value_and_grad(whole))(params)
    for result in results:
        assert_close(result, (jax.tree.map(lambda p, g: p - g, params, grads), float(value)))


def test_a_key_that_the_loss_requires_is_missed():
    plan, state, _ = prepare(even_params(), SGD)

    def loss(params, batch, rng):
        return reference.loss_fn(params, batch) + jax.random.uniform(rng)

    for wrong in (loss, lambda p, b, *, rng: loss(p, b, rng), lambda p, x, y: loss(p, x, y)):
        with pytest.raises(ValueError, match=r"requires (rng|y), a random key, and none is given: .*rng=None"):
            jax.jit(zerojax.value_and_grad(wrong, plan))(state.params, BATCHES[0])
    optional = zerojax.value_and_grad(lambda p, b, rng=None: reference.loss_fn(p, b), plan)
    right, _ = jax.jit(optional)(state.params, BATCHES[0])
    assert float(right) == pytest.approx(float(reference.loss_fn(even_params(), BATCHES[0])), rel=1e-5)


# ---- the loop ----


@pytest.mark.parametrize("accumulate", [long(1), 2])
def test_schedules_count_steps(accumulate):
    """huggingface/accelerate#662: they moved once for each micro-batch or device."""
    schedule = optax.linear_schedule(0.0, 0.1, 5)
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)
    state, _, _ = train_zero(tx, even_params(), BATCHES, stage=3, accumulate=accumulate)
    assert int(state.opt_state.count) == int(state.step) == 3
    assert float(state.opt_state.hyperparams["learning_rate"]) == pytest.approx(0.04)
    assert_close(jax.device_get(state.params), reference.train(tx, even_params(), BATCHES)[0])


def test_steps_of_ones_own_under_an_active_mesh():
    """The same numbers with and without ``jax.set_mesh(plan.mesh)``."""
    plan, state, _ = prepare(even_params(), SGD)
    gradient = zerojax.value_and_grad(reference.loss_fn, plan)
    alone = jax.jit(gradient)(state.params, BATCHES[0])
    with jax.set_mesh(plan.mesh):
        active = jax.jit(gradient)(state.params, BATCHES[0])
    assert_same(jax.device_get(active), jax.device_get(alone))


@pytest.mark.parametrize("stage", [long(0), long(1), 3])
def test_one_bad_row_skips_the_step_everywhere(stage):
    """NaN in the rows of one device: all see it, and all skip alike."""
    tx = optax.apply_if_finite(optax.adam(1e-2), max_consecutive_errors=3)
    bad = jax.device_get(BATCHES[1])
    bad["x"] = bad["x"].copy()
    bad["x"][5, 3] = np.nan
    _, state, step = prepare(even_params(), tx, stage=stage)
    placed = [leaf.sharding for leaf in jax.tree.leaves(state)]
    for batch in (BATCHES[0], bad, BATCHES[2]):
        before = jax.device_get(state.params)
        state, metrics = step(state, batch)
        seen = [np.isnan(shard.data) for name in ("loss", "grad_norm") for shard in metrics[name].addressable_shards]
        assert set(seen) == {batch is bad}
        if batch is bad:
            assert_same(jax.device_get(state.params), before)
    assert [leaf.sharding for leaf in jax.tree.leaves(state)] == placed
    for leaf in jax.tree.leaves((state.opt_state.total_notfinite, state.opt_state.notfinite_count)):
        assert len({int(shard.data) for shard in leaf.addressable_shards}) == 1
    assert int(state.opt_state.total_notfinite) == 1
    right = reference.train(optax.adam(1e-2), even_params(), [BATCHES[0], BATCHES[2]])[0]
    assert_close(jax.device_get(state.params), right)


@pytest.mark.parametrize("stage", [3, long(0)])
def test_steps_read_nothing_from_the_devices(stage):
    """Neither do they send anything that is not a batch."""
    plan, state, step = prepare(even_params(), optax.adam(1e-2), stage=stage)
    evaluate = zerojax.make_eval_step(reference.loss_fn, plan)
    placed, host = jax.device_put(BATCHES, plan.batch_sharding), jax.device_get(BATCHES)
    last = jax.device_put(even_batch(19), plan.replicated)
    state, kept = step(state, placed[0])[0], []
    evaluate(state, last)
    with jax.transfer_guard("disallow"):
        for batch in (*placed, *host):
            state, metrics = step(state, batch)
            kept += [metrics, evaluate(state, batch), evaluate(state, last)]
    assert all(np.isfinite(jax.device_get(jax.tree.leaves(kept))))


def test_training_and_evaluation_take_turns():
    """deepspeedai/DeepSpeed#3068: evaluation changes nothing, with rows that do not divide either."""
    plan, state, step = prepare(even_params(), SGD, mesh=make_mesh(8, explicit=True))
    evaluate, losses = zerojax.make_eval_step(reference.loss_fn, plan), []
    for batch in BATCHES:
        evaluate(state, even_batch(19))
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert_close(losses, reference.train(SGD, even_params(), BATCHES)[2])
