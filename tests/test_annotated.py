"""Losses that say where arrays lie, also along the shard axes, beside one device that knows of no axes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from reference import assert_close, make_grid, make_mesh, prepare, wave

import zerojax
import zerojax.linen
import zerojax.nnx

TX = optax.sgd(0.1, momentum=0.9)
PARAMS = {"w": wave((16, 32), 1, 0.3), "v": wave((32, 8), 2, 0.3)}
SPECS = {"w": P(None, "tensor"), "v": P("tensor", None)}
X = jax.device_get(wave((32, 16), 3))
RULES = (("batch", "data"), ("mlp", "tensor"))


def plain(p, x):
    return jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"]) ** 2)


def constrained(p, x):
    hidden = lax.with_sharding_constraint(jnp.tanh(x @ p["w"]), P("data", "tensor"))
    return jnp.mean((hidden @ p["v"]) ** 2)


def logical(p, x):
    with nn.logical_axis_rules(RULES):
        hidden = nn.with_logical_constraint(jnp.tanh(x @ p["w"]), ("batch", "mlp"))
    return jnp.mean((hidden @ p["v"]) ** 2)


def written_out(p, x):
    hidden = jnp.tanh(jnp.einsum("bd,df->bf", x, p["w"], out_sharding=P("data", "tensor")))
    return jnp.mean(jnp.einsum("bf,fo->bo", hidden, p["v"], out_sharding=P("data", None)) ** 2)


def tensor_only(p, x):
    hidden = jnp.tanh(jnp.einsum("bd,df->bf", x, p["w"], out_sharding=P(None, "tensor")))
    return jnp.mean(jnp.einsum("bf,fo->bo", hidden, p["v"], out_sharding=P()) ** 2)


@pytest.mark.parametrize(("loss", "kinds", "config"), [
    (constrained, "auto", {"stage": 3}), (logical, "auto", {"stage": 2, "accumulate": 2}),
    (written_out, "explicit", {"stage": 3}), (written_out, "explicit", {"stage": 1, "accumulate": 4}),
    (tensor_only, "explicit", {"stage": 2}), (tensor_only, "mixed", {"stage": 3}),
])  # fmt: skip
def test_losses_that_place_arrays(loss, kinds, config):
    mesh = make_grid((4, 2), ("data", "tensor"), kinds)
    _, state, step = prepare(PARAMS, TX, loss, mesh, SPECS, **config)
    params, opt_state = PARAMS, TX.init(PARAMS)
    for _ in range(2):
        state, metrics = step(state, X)
        value, grads = jax.value_and_grad(plain)(params, X)
        updates, opt_state = TX.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        assert_close(metrics["loss"], value)
    assert_close(jax.device_get((state.params, state.opt_state)), (params, opt_state))
    assert state.params["w"].sharding.shard_shape((16, 32)) == ((4, 16) if config["stage"] else (16, 16))


def test_a_module_written_for_explicit_axes():
    class Block(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "tensor"))
            self.up = nnx.Linear(16, 32, kernel_init=init, use_bias=False, rngs=rngs)
            self.down = nnx.Param(wave((32, 8), 2, 0.3), out_sharding=("tensor", None))

        def __call__(self, x):
            hidden = jnp.tanh(self.up(x, out_sharding=P("data", "tensor")))
            return jnp.dot(hidden, self.down[...], out_sharding=P("data", None))

    mesh = make_grid((4, 2), ("data", "tensor"), "explicit")
    plan = zerojax.nnx.make_plan(Block, TX, mesh)
    model, optimizer = zerojax.nnx.create(Block, TX, plan, jax.random.key(0))
    kernels = jax.device_get((model.up.kernel[...], model.down[...]))
    loss, grads = nnx.jit(zerojax.nnx.value_and_grad(lambda m, x: jnp.mean(m(x) ** 2), plan))(model, X)
    right = jax.value_and_grad(lambda k: jnp.mean((jnp.tanh(X @ k[0]) @ k[1]) ** 2))(kernels)
    assert_close((loss, jax.device_get((grads.up.kernel[...], grads.down[...]))), right)
    optimizer.update(model, grads)


def test_what_fails_everywhere_is_told_as_it_is():
    _, state, step = prepare(PARAMS, TX, lambda p, x: jnp.mean(x @ p["v"]))
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions to have the same shape"):
        step(state, X)


# ---- the mesh that the plan was made for is active, with Explicit axes ----


def test_own_loops_under_an_active_explicit_mesh():
    """As ``jax.set_mesh(jax.make_mesh(...))`` at the top of a program makes it."""
    tx, mesh = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-4)), make_mesh(8, explicit=True)
    params, opt_state = PARAMS, tx.init(PARAMS)
    with jax.set_mesh(mesh):
        plan, state, step = prepare(PARAMS, tx, plain, mesh)
        evaluate = zerojax.make_eval_step(plain, plan)

        @jax.jit
        def own_step(params, opt_state, x):
            loss, grads = zerojax.value_and_grad(plain, plan)(params, x)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        ours = state.params, state.opt_state
        for _ in range(3):
            measured = evaluate(state.__class__(**{**vars(state), "params": ours[0]}), X)["loss"]
            *ours, loss = own_step(*ours, X)
            state, metrics = step(state, X)
            value, grads = jax.value_and_grad(plain)(params, X)
            updates, opt_state = tx.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
            assert_close((loss, metrics["loss"], measured), (value,) * 3)
        assert_close(jax.device_get(tuple(ours)), (params, opt_state))
        assert_close(jax.device_get(zerojax.gather_params(ours[0], plan)), params)
        assert ours[0]["w"].sharding.shard_shape((16, 32)) == (16, 4)


def test_a_module_under_an_active_explicit_mesh():
    mesh, make = make_mesh(8, explicit=True), lambda rngs: nnx.Linear(16, 8, rngs=rngs)
    loss = lambda model, x: jnp.mean((model(x) - 0.3) ** 2)  # noqa: E731
    right = make(nnx.Rngs(jax.random.key(0)))
    by_flax = nnx.Optimizer(right, TX, wrt=nnx.Param)
    with jax.set_mesh(mesh):
        plan = zerojax.nnx.make_plan(make, TX, mesh)
        model, optimizer = zerojax.nnx.create(make, TX, plan, jax.random.key(0))

        @nnx.jit
        def train(model, optimizer, x):
            value, grads = zerojax.nnx.value_and_grad(loss, plan)(model, x)
            optimizer.update(model, grads)
            return value

        ours = [train(model, optimizer, X) for _ in range(2)]
        whole = zerojax.nnx.gather_model(model, plan)
    values = []
    for _ in range(2):
        value, grads = nnx.value_and_grad(loss)(right, X)
        by_flax.update(right, grads)
        values.append(value)
    assert_close(ours, values)
    assert_close(jax.device_get(whole.kernel[...]), jax.device_get(right.kernel[...]))


def test_linen_under_an_active_explicit_mesh():
    """Its example, as other host arrays, was made under the mesh."""
    with jax.set_mesh(make_mesh(8, explicit=True)):
        model, x = nn.Dense(8), jnp.asarray(X)
        init = zerojax.linen.init_fn(model, x[:1])
        plan = zerojax.make_plan(init, TX, make_mesh(8, explicit=True))
        state = zerojax.linen.create_train_state(init, TX, plan, jax.random.key(0), apply_fn=model.apply)
        loss = lambda params, x: jnp.mean(model.apply({"params": params}, x) ** 2)  # noqa: E731
        value, grads = jax.jit(zerojax.value_and_grad(loss, plan))(state.params, x)
        after = state.apply_gradients(grads=grads)
        host, _ = jax.jit(zerojax.value_and_grad(loss, plan))(jax.device_get(state.params), X)
    right = jax.value_and_grad(loss)(jax.device_get(state.params), X)
    assert_close((value, jax.device_get(grads)), right)
    assert_close(host, value)
    assert int(after.step) == 1
