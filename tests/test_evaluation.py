"""Evaluation of any number of rows, of every kind of state: as one device evaluates the whole batch.

Tolerance 1e-6 relative: float32 sums in another order.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_close, even_batch, even_params, make_grid, make_mesh, prepare

import zerojax
import zerojax.linen
import zerojax.nnx

SGD = optax.sgd(0.1)
CLOSE = 1e-6


def named(params, batch):
    """Means over the rows, one of them an array."""
    errors = reference.forward(params, batch["x"]) - batch["y"]
    return {"square": jnp.mean(errors**2), "each": jnp.mean(jnp.abs(errors), 0)}


def weighted(params, batch):
    """Rows weigh 0, 1, 2, 0, ...; the last few have much of the weight, or none."""
    weight = batch["x"].shape[-1] * jnp.floor(jnp.abs(batch["x"][:, 0]) * 3)
    errors = reference.per_row(params, batch)
    mean = jnp.sum(errors * weight) / jnp.maximum(jnp.sum(weight), 1)
    return zerojax.Loss(jnp.sum(errors * weight), jnp.sum(weight), {"mean": mean})


def right(metric, params, batch):
    value = metric(params, batch)
    if isinstance(value, zerojax.Loss):
        return {"loss": value.total / value.weight, **value.metrics}
    return value if isinstance(value, dict) else {"loss": value}


@pytest.mark.parametrize(
    ("metric", "rows"),
    [
        (reference.loss_fn, 1),
        (reference.loss_fn, 19),
        (named, 7),
        (named, 19),
        (weighted, 8),
        (weighted, 21),
    ],
)
def test_any_number_of_rows(metric, rows):
    """Physical-Intelligence/openpi#607: padded rows in the mean, or the last rows dropped."""
    plan, state, _ = prepare(even_params(), SGD)
    batch = even_batch(rows)
    got = zerojax.make_eval_step(metric, plan)(state, jax.device_get(batch))
    assert_close(got, right(metric, even_params(), batch), CLOSE)


@pytest.mark.parametrize(("stage", "shape", "axes", "specs", "kind"), [
    (0, (8,), ("data",), None, "auto"),
    pytest.param(1, (2, 4), ("data", "other"), None, "explicit", marks=pytest.mark.long),
    (3, (4, 2), ("data",), {"w1": P(None, "other"), "b1": P("other"), "w2": P("other"), "b2": None}, "auto"),
    (2, (4, 2), ("data",), {"w1": P(None, "other"), "b1": P("other"), "w2": P("other"), "b2": None}, "explicit"),
])  # fmt: skip
def test_rows_that_do_not_divide_on_every_mesh(stage, shape, axes, specs, kind):
    mesh = make_grid(shape, ("data", "other")[: len(shape)], kind)
    config = {"stage": stage, "shard_axes": axes, "allow_whole": True}
    plan, state, _ = prepare(even_params(), SGD, mesh=mesh, base_specs=specs, **config)
    evaluate, want = zerojax.make_eval_step(named, plan), right(named, even_params(), even_batch(19))
    placed = jax.device_put(even_batch(19), NamedSharding(mesh, P()))
    for batch in (even_batch(19), placed):
        assert_close(evaluate(state, batch), want, CLOSE)


def test_an_epoch_with_a_last_batch_that_does_not_divide():
    """Batches of 16, 16 and 11 rows, weighed by their rows, are the 43 rows at once; two programs are compiled."""
    plan, state, _ = prepare(even_params(), SGD)
    evaluate, whole = zerojax.make_eval_step(reference.loss_fn, plan), jax.device_get(even_batch(43))
    total = 0.0
    for start in range(0, 43, 16):
        rows = jax.tree.map(lambda a, s=start: a[s : s + 16], whole)
        total += float(evaluate(state, rows)["loss"]) * len(rows["x"])
    assert total / 43 == pytest.approx(float(reference.loss_fn(even_params(), whole)), rel=CLOSE)
    assert evaluate.jitted._cache_size() == 2


def across_devices(params, batch):
    return jax.lax.pmean(reference.loss_fn(params, batch), "data")


def batch_norm(params, batch):
    x = nn.BatchNorm(use_running_average=False, axis_name="data", use_bias=False, use_scale=False)
    hidden, _ = x.apply({"batch_stats": {}}, batch["x"] @ params["w1"], mutable=["batch_stats"])
    return jnp.mean(hidden**4)


@pytest.mark.parametrize("metric", [across_devices, batch_norm])
def test_what_is_computed_across_devices_needs_rows_that_divide(metric):
    """On the rows that remain a sum over the devices would count each row eight times."""
    plan, state, _ = prepare(even_params(), SGD)
    evaluate = zerojax.make_eval_step(metric, plan)
    assert np.isfinite(float(evaluate(state, even_batch(16))["loss"]))
    for rows in (19, 3):
        with pytest.raises(ValueError, match=r"across the axes \('data',\).* multiple of 8 rows"):
            evaluate(state, even_batch(rows))


def test_batches_that_cannot_be_evaluated():
    plan, state, _ = prepare(even_params(), SGD)
    evaluate = zerojax.make_eval_step(reference.loss_fn, plan)
    for batch, words in (
        (even_batch(0), "has no rows"),
        ({}, "no arrays"),
        ({**even_batch(3), "t": 1.0}, r"batch\['t'\] is a scalar"),
        ({"x": even_batch(3)["x"], "y": even_batch(5)["y"]}, "different numbers of rows"),
    ):
        with pytest.raises(ValueError, match=words):
            evaluate(state, batch)
    with pytest.raises(NameError, match="not_there"):
        zerojax.make_eval_step(lambda p, b: not_there, plan)(state, even_batch(3))  # noqa: F821


def test_several_processes_need_rows_that_divide(monkeypatch):
    """No process sees the others' rows."""
    plan, state, _ = prepare(even_params(), SGD)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"has 38 rows .* multiple of 8 rows"):
        zerojax.make_eval_step(reference.loss_fn, plan)(state, jax.device_get(even_batch(19)))


def test_keys_differ_on_the_rows_that_remain():
    """Every row of 19 has a mask of its own, but for rows of one device; the remaining three have another."""

    def mask(params, batch, rng):
        rows = jnp.zeros((19, 64)).at[batch["row"]].set(jax.random.bernoulli(rng, 0.5, (64,)) * 1.0)
        return zerojax.Loss(0.0, 1.0, {"rows": rows})

    plan, state, _ = prepare(even_params(), SGD, rows="apart")
    rows = np.asarray(zerojax.make_eval_step(mask, plan)(state, {"row": np.arange(19)})["rows"])
    assert len({row.tobytes() for row in rows}) == 9


# ---- Flax's states ----


class State(TrainState):
    model_state: dict | None = None


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(8)(nn.BatchNorm(use_running_average=not train, axis_name="data" if train else None)(x))


def test_a_linen_state():
    net = Net()
    init = zerojax.linen.init_fn(net, jnp.ones((1, 16)))
    plan = zerojax.make_plan(init, SGD, make_mesh())
    state = zerojax.linen.create_train_state(init, SGD, plan, jax.random.key(0), apply_fn=net.apply, state_class=State)

    def loss(params, batch, rng=None, model_state=None):
        return jnp.mean((net.apply({"params": params, **model_state}, batch["x"]) - batch["y"]) ** 2)

    evaluate, batch = zerojax.make_eval_step(loss, plan), jax.device_get(even_batch(19))
    variables = net.init(jax.random.key(0), jnp.ones((1, 16)))
    want = loss(variables["params"], batch, None, {"batch_stats": variables["batch_stats"]})
    assert float(evaluate(state, batch)["loss"]) == pytest.approx(float(want), rel=CLOSE)
    assert_close(jax.device_get(zerojax.gather_params(state.params, plan)), variables["params"], CLOSE)
    with pytest.raises(ValueError, match=r"state\.model_state do not fit the plan"):
        evaluate(state.replace(model_state=None), batch)
    with pytest.raises(ValueError, match=r"state\.params\['BatchNorm_0'\]\['bias'\] is placed as"):
        evaluate(state.replace(params=jax.device_put(variables["params"], make_mesh().devices[0])), batch)
    with pytest.raises(ValueError, match="requires rng, a random key, and none is given"):
        zerojax.make_eval_step(lambda p, b, rng: 0.0, plan)(state, batch)


def test_an_nnx_module():
    """Dropout in a module that trains draws anew on every device; evaluation leaves the module as it was."""

    def make(rngs):
        return nnx.Sequential(nnx.Linear(16, 32, rngs=rngs), nnx.Dropout(0.5, rngs=rngs), nnx.Linear(32, 8, rngs=rngs))

    plan = zerojax.nnx.make_plan(make, SGD, make_mesh())
    model, _ = zerojax.nnx.create(make, SGD, plan, jax.random.key(0))
    evaluate = zerojax.nnx.make_eval_step(lambda m, b: {"error": jnp.mean((m(b["x"]) - b["y"]) ** 2)}, plan)
    batch = jax.device_get(even_batch(19))
    before = jax.device_get(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    noisy = [float(evaluate(model, batch)["error"]) for _ in range(2)]
    assert noisy[0] == noisy[1]
    model.eval()
    whole = zerojax.nnx.gather_model(model, plan)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(nnx.state(whole, nnx.Param)))
    exact = jnp.mean((whole(batch["x"]) - batch["y"]) ** 2)
    assert float(evaluate(model, batch)["error"]) == pytest.approx(float(exact), rel=CLOSE)
    assert noisy[0] != pytest.approx(float(exact), rel=1e-3)
    reference.assert_same(jax.device_get(nnx.to_pure_dict(nnx.state(model, nnx.Param))), before)
