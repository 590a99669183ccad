"""The state between steps: numbers set by hand, states that a step knows again, containers of all kinds, idle axes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import assert_close, make_mesh

import zerojax
import zerojax.step

TX = optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)
X = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)


def init_fn(key):
    return {"w": jax.random.normal(key, (16, 16)) / 4}


def loss_fn(params, x):
    return jnp.mean((x @ params["w"] - 1) ** 2)


def made(tx=TX, init=init_fn, loss=loss_fn, **config):
    plan = zerojax.make_plan(init, tx, make_mesh(), zerojax.ZeroConfig(**config))
    return plan, zerojax.init_state(init, tx, plan, jax.random.key(0)), zerojax.make_train_step(loss, tx, plan)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("given", [float, np.float64, jnp.float32, jnp.asarray], ids=lambda f: f.__name__)
def test_numbers_set_between_steps(given, stage):
    """As optax documents; one compilation for all steps, and the twin is set alike."""
    traced = []

    def loss(params, x):
        traced.append(stage)
        return loss_fn(params, x)

    _, state, step = made(loss=loss, stage=stage)
    params = init_fn(jax.random.key(0))
    opt_state, first = TX.init(params), 0
    for rate in (1e-2, 5e-3, 2e-3):
        state.opt_state.hyperparams["learning_rate"] = given(rate)
        opt_state.hyperparams["learning_rate"] = jnp.float32(rate)
        state, metrics = step(state, X)
        first = first or len(traced)
        value, grads = jax.value_and_grad(loss_fn)(params, X)
        updates, opt_state = TX.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        assert_close(float(metrics["loss"]), float(value))
    assert_close(jax.device_get(state.params["w"]), params["w"])
    assert len(traced) == first


def test_what_is_no_number_is_told():
    _, state, step = made()
    state.opt_state.hyperparams["learning_rate"] = "fast"
    with pytest.raises(ValueError, match=r"learning_rate.* is the str 'fast'"):
        step(state, X)


def test_a_step_knows_its_own_state():
    """It looks at the arrays of another state, and of its own if one was put in by hand or donated elsewhere."""
    plan, state, step = made()
    state, _ = step(state, X)
    assert step.returned.is_it(state)
    state.opt_state.hyperparams["learning_rate"] = 1e-3
    assert not step.returned.is_it(state)
    state, _ = step(state, X)
    zerojax.make_train_step(loss_fn, TX, plan.with_stage(2))(state, X)
    with pytest.raises(ValueError, match="was donated"):
        step(state, X)


def test_no_second_look_at_what_a_step_returned(monkeypatch):
    looks = []
    check = zerojax.step.check_state
    monkeypatch.setattr(zerojax.step, "check_state", lambda *args: looks.append(args) or check(*args))
    _, state, step = made()
    for _ in range(3):
        state, _ = step(state, X)
    assert len(looks) == 1
    step(state.__class__(**vars(state)), X)  # another object, which may hold anything
    assert len(looks) == 2


@jax.tree_util.register_pytree_node_class
class Box:
    """A container without ``__eq__``."""

    def __init__(self, array):
        self.array = array

    def tree_flatten(self):
        return (self.array,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_model_state_in_a_container_that_cannot_be_compared():
    def init(key):
        return zerojax.Variables(init_fn(key), Box(jnp.zeros(8)))

    def loss(params, x, rng, model_state):
        return zerojax.Loss(jnp.sum(x @ params["w"]), x.size, model_state=Box(model_state.array + 1))

    _, state, step = made(init=init, loss=loss)
    state, _ = step(step(state, X)[0], X)
    np.testing.assert_array_equal(state.model_state.array, np.full(8, 2.0))


def test_a_model_state_of_another_shape_is_told():
    def loss(params, x, rng, model_state):
        return zerojax.Loss(jnp.sum(x @ params["w"]), x.size, model_state=Box(jnp.zeros(9)))

    _, state, step = made(init=lambda key: zerojax.Variables(init_fn(key), Box(jnp.zeros(8))), loss=loss)
    with pytest.raises(ValueError, match="unlike the one it was given"):
        step(state, X)


def test_the_plan_tells_of_idle_axes():
    mesh = jax.make_mesh((2, 4), ("replica", "data"))
    plan = zerojax.make_plan(init_fn, TX, mesh)
    assert "Nothing is divided over replica=2" in str(plan)
    assert "Nothing is divided" not in str(zerojax.make_plan(init_fn, TX, make_mesh()))
