"""Stacked layers in a scan: neither their parameters nor what is made of them are ever whole for all layers at once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec
from reference import assert_close, make_mesh, wave

import zerojax

WIDTH, ROWS = 32, 16
LAYER = WIDTH * (WIDTH + 1)  # elements, the bias included


def plain(layers: int, body):
    """``(init_fn, loss_fn)`` of ``body(x, w) -> (x, ys)``; the loss drops ``ys``."""

    def init_fn(key):
        return {"w": wave((layers, WIDTH, WIDTH), 1, 0.2), "b": wave((layers, WIDTH), 2, 0.1)}

    return init_fn, lambda p, x: jnp.mean(lax.scan(body, x, p)[0] ** 2)


def layer(x, w):
    return jnp.tanh(x @ w["w"] + w["b"]), None


def returning_its_parameters(x, w):
    return layer(x, w)[0], w


def linen_scan(layers: int, remat: bool):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return jnp.tanh(nn.Dense(WIDTH)(x)), None

    block = nn.remat(Layer, prevent_cse=False) if remat else Layer
    stack = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=layers)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return stack()(x, None)[0]

    model = Model()
    return lambda key: model.init(key, jnp.zeros((1, WIDTH))), lambda p, x: jnp.mean(model.apply(p, x) ** 2)


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.dense(x))


def nnx_scan(layers: int, remat: bool):
    """The body hands the layer's state back, as `nnx.scan` does with all that it is given."""

    def make(rngs):
        return nnx.split_rngs(splits=layers)(nnx.vmap(NnxLayer, in_axes=0, out_axes=0))(rngs)

    graph, _ = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

    def init_fn(key):
        return nnx.state(make(nnx.Rngs(params=key)), nnx.Param)

    def call(layer, x):
        return layer(x)

    def loss_fn(p, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return nnx.remat(call)(layer, x) if remat else layer(x)

        return jnp.mean(run(x, nnx.merge(graph, p)) ** 2)

    return init_fn, loss_fn


MODELS = {
    "plain": lambda n: plain(n, layer),
    "remat": lambda n: plain(n, jax.checkpoint(layer)),
    "parameters-returned": lambda n: plain(n, returning_its_parameters),
    "parameters-returned-remat": lambda n: plain(n, jax.checkpoint(returning_its_parameters)),
    "linen": lambda n: linen_scan(n, False),
    "linen-remat": lambda n: linen_scan(n, True),
    "nnx": lambda n: nnx_scan(n, False),
    "nnx-remat": lambda n: nnx_scan(n, True),
}


def prepared(model: str, layers: int, stage: int = 3):
    init_fn, loss_fn = MODELS[model](layers)
    plan = zerojax.make_plan(init_fn, optax.sgd(0.1), make_mesh(), zerojax.ZeroConfig(stage=stage))
    f = zerojax.value_and_grad(loss_fn, plan)
    return init_fn, loss_fn, plan, jax.jit(f, out_shardings=(None, plan.state_shardings.params))


@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_gathered_by_the_layer_in_both_directions(model):
    """pytorch/xla#6379, jax-ml/jax#25010: kept from forward to backward; AI-Hypercomputer/maxtext#4405: stacked."""
    temps = {}
    for layers in (6, 12):
        _, _, plan, f = prepared(model, layers)
        rows = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=plan.batch_sharding)
        report = zerojax.report(f, plan.abstract_state.params, rows)
        temps[layers] = report.memory.temp
        gathers = [c for c in report.collectives if c.kind == "all-gather"]
        assert all(c.elements <= LAYER for c in gathers)
        assert sum(c.elements * c.times for c in gathers) == 2 * layers * LAYER
        reduces = [c for c in report.collectives if c.kind == "reduce-scatter"]
        assert sum(c.elements * c.times for c in reduces) == layers * LAYER
    assert (
        temps[12] - temps[6] <= 0.2 * 6 * LAYER * 4
    )  # shards of gradients, and a few rows: of six layers not two whole


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_of_scanned_layers(model, stage):
    init_fn, loss_fn, plan, f = prepared(model, 6, stage)
    params, x = jax.jit(init_fn)(jax.random.key(0)), wave((ROWS, WIDTH), 3)
    loss, grads = f(jax.device_put(params, plan.state_shardings.params), x)
    right_loss, right_grads = jax.jit(jax.value_and_grad(loss_fn))(params, x)
    np.testing.assert_allclose(loss, right_loss, rtol=1e-5)
    assert_close(jax.device_get(grads), jax.device_get(right_grads))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_loss_with_a_shard_map_over_a_tensor_axis(stage):
    """Manual over the tensor axis inside, where the step is manual over the data axis already."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = {"up": PartitionSpec(None, "model"), "down": PartitionSpec("model", None)}

    def init_fn(key):
        return {"up": wave((WIDTH, 4 * WIDTH), 1, 0.2), "down": wave((4 * WIDTH, WIDTH), 2, 0.2)}

    def dense(p, x):
        return jnp.tanh(x @ p["up"]) @ p["down"]

    def tensor_parallel(p, x):
        def local(p, x):
            return lax.psum(dense(p, x), "model")

        rest = PartitionSpec()
        return jax.shard_map(local, in_specs=(specs, rest), out_specs=rest, axis_names={"model"}, check_vma=False)(p, x)

    config = zerojax.ZeroConfig(stage=stage)
    plan = zerojax.make_plan(init_fn, optax.sgd(0.1), mesh, config, base_specs=specs)
    f = jax.jit(zerojax.value_and_grad(lambda p, x: jnp.mean(tensor_parallel(p, x) ** 2), plan))
    params, x = init_fn(None), wave((ROWS, WIDTH), 3)
    loss, grads = f(jax.device_put(params, plan.state_shardings.params), x)
    right_loss, right_grads = jax.jit(jax.value_and_grad(lambda p, x: jnp.mean(dense(p, x) ** 2)))(params, x)
    np.testing.assert_allclose(loss, right_loss, rtol=1e-5)
    assert_close(jax.device_get(grads), jax.device_get(right_grads))
