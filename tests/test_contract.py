"""What a loss may take and return: several parts of a batch, arrays beside its value, by rows or as means."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from reference import assert_close, assert_same, even_batch, even_params, forward, make_mesh, prepare

import zerojax
import zerojax.nnx

SGD = optax.sgd(0.1)
ROWS = 32
BATCH = jax.device_get(even_batch(ROWS))
PARTS = (BATCH["x"], BATCH["y"])


def with_outputs(params, batch):
    """As most public loops have it."""
    outputs = forward(params, batch["x"])
    loss = jnp.mean((outputs - batch["y"]) ** 2)
    return loss, {"outputs": outputs, "mean": jnp.mean(outputs, 0), "sum": jnp.sum(outputs), "rms": jnp.sqrt(loss)}


def right(k: int):
    parts = [with_outputs(even_params(), jax.tree.map(lambda a, i=i: a[i::k], BATCH))[1] for i in range(k)]
    means = {name: np.mean([part[name] for part in parts], 0) for name in ("mean", "sum", "rms")}
    return {"outputs": with_outputs(even_params(), BATCH)[1]["outputs"], **means}


@pytest.mark.parametrize(("stage", "k", "devices", "rows"), [
    (3, 1, 8, "auto"), (2, 4, 4, "auto"), (3, 2, 8, "together"), (0, 4, 1, "auto"), (1, 16, 2, "auto"),
])  # fmt: skip
def test_what_is_returned_beside_the_loss(stage, k, devices, rows):
    """Rows in the order of the batch, divided over the devices; all else is the mean over the micro-batches."""
    plan, state, step = prepare(
        even_params(), SGD, with_outputs, make_mesh(devices), stage=stage, accumulate=k, rows=rows
    )
    grad_fn = jax.jit(zerojax.value_and_grad(with_outputs, plan, has_aux=True))
    (loss, aux), _ = grad_fn(state.params, BATCH)
    metrics = step(state, BATCH)[1]
    assert_close(aux, right(k))
    assert_same({name: metrics[name] for name in aux}, aux)
    assert_close(loss, metrics["loss"])
    assert aux["outputs"].sharding.is_equivalent_to(plan.batch_sharding, 2)
    assert all(a.sharding.is_fully_replicated for name, a in metrics.items() if name != "outputs")


def test_rows_stay_apart_with_what_is_beside_them(caplog):
    def loss(params, batch):
        outputs = forward(params, batch["x"])
        return jnp.mean((outputs - batch["y"]) ** 2), outputs

    _, state, step = prepare(even_params(), SGD, loss)
    metrics = step(state, BATCH)[1]
    assert_close(metrics["aux"], forward(even_params(), BATCH["x"]))
    assert caplog.text == ""


def test_as_many_rows_as_another_dim():
    """What has no rows is a mean, though its dim 0 is as large."""

    def loss(params, batch):
        outputs = forward(params, batch["x"])  # 8 columns, and on each device 8 rows
        return jnp.mean(outputs**2), (outputs, jnp.mean(outputs, 0), jnp.mean(outputs**2, 1))

    batch = jax.device_get(even_batch(64))
    _, state, step = prepare(even_params(), SGD, loss)
    assert_close(step(state, batch)[1]["aux"], loss(even_params(), batch)[1])


def test_parts_of_a_batch_as_arguments():
    def loss(params, x, y):
        return jnp.mean((forward(params, x) - y) ** 2)

    def noisy(params, x, y, rng):
        return jnp.mean((forward(params, x + jax.random.normal(rng, x.shape)) - y) ** 2)

    plan, state, step = prepare(even_params(), SGD, loss)
    right_loss, right_grads = jax.value_and_grad(loss)(even_params(), *PARTS)
    for arguments in ((PARTS,), PARTS):
        value, grads = jax.jit(zerojax.value_and_grad(loss, plan))(state.params, *arguments)
        assert_close((value, jax.device_get(grads)), (right_loss, right_grads))
    f = jax.jit(zerojax.value_and_grad(noisy, plan))
    assert_same(f(state.params, *PARTS, jax.random.key(1)), f(state.params, PARTS, rng=jax.random.key(1)))
    assert_close(step(state, PARTS)[1]["loss"], right_loss)
    assert_close(zerojax.make_eval_step(loss, plan)(prepare(even_params(), SGD)[1], PARTS)["loss"], right_loss)


def test_streams_and_outputs_of_a_module():
    """As in Flax's examples: ``loss_fn(model, batch, rngs) -> (loss, logits)``."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.one, self.two = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)
            self.drop = nnx.Dropout(0.5)

        def __call__(self, x, rngs):
            return self.two(self.drop(nnx.relu(self.one(x)), rngs=rngs))

    def loss(model, batch, rngs):
        logits = model(batch["x"], rngs)
        return jnp.mean((logits - batch["y"]) ** 2), logits

    plan = zerojax.nnx.make_plan(Net, SGD, make_mesh())
    model, _ = zerojax.nnx.create(Net, SGD, plan, jax.random.key(0))

    @nnx.jit
    def train(model, rngs):
        return zerojax.nnx.value_and_grad(loss, plan, has_aux=True)(model, BATCH, rngs)

    rngs = nnx.Rngs(0)
    (value, logits), grads = train(model, rngs)
    (_, others), _ = train(model, rngs)
    assert_close(value, jnp.mean((logits - BATCH["y"]) ** 2))
    assert logits.shape == (ROWS, 8)
    assert np.any(logits != others)
    assert jax.tree.structure(grads) == jax.tree.structure(nnx.state(model, nnx.Param))


def test_what_a_loss_may_not_return():
    plan, state, step = prepare(even_params(), SGD, lambda p, b: (jnp.mean(p["w1"]), {"name": "x"}))
    with pytest.raises(ValueError, match="returned name = 'x' beside its value"):
        step(state, BATCH)
    for made, words in (((0.0, 1, 2), "not a tuple of 3"), (jnp.ones(3), "a scalar, a zerojax.Loss or")):
        with pytest.raises(ValueError, match=words):
            zerojax.make_train_step(lambda p, b, made=made: made, SGD, plan)(state, BATCH)
    with pytest.raises(ValueError, match="pass has_aux=True"):
        jax.jit(zerojax.value_and_grad(with_outputs, plan))(state.params, BATCH)
    with pytest.raises(ValueError, match=r"mean of shape .* evaluation returns means"):
        zerojax.make_eval_step(with_outputs, plan)(state, BATCH)
    with pytest.raises(ValueError, match=r"requires \(p, x, y, z, u\)"):
        zerojax.make_train_step(lambda p, x, y, z, u: 0.0, SGD, plan)(state, BATCH)


@pytest.mark.parametrize("batch", [jax.random.key(0), jax.random.PRNGKey(0)])
def test_a_key_in_place_of_the_batch(batch):
    """Haiku's order is ``loss(params, rng, batch)``."""
    plan, state, step = prepare(even_params(), SGD)
    for call in (lambda: step(state, batch), lambda: zerojax.value_and_grad(step.loss_fn, plan)(state.params, batch)):
        with pytest.raises(ValueError, match=r"(batch is a random key|batch comes first)"):
            call()
