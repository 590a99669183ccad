"""Stage 3 in gather units: exact for every structure of a loss, and never more whole than two units at a time."""

import functools

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from reference import assert_close, make_mesh, wave

import zerojax
from zerojax.units import cutting

LAYERS, WIDTH, ROWS = 4, 16, 16


def init_fn(key):
    """Stacked layers, an embedding, a vector, a parameter that no loss uses, one that is not trained."""
    return {
        "up": wave((LAYERS, WIDTH, 2 * WIDTH), 1, 0.3),
        "down": wave((LAYERS, 2 * WIDTH, WIDTH), 2, 0.3),
        "bias": wave((LAYERS, WIDTH), 3, 0.1),
        "embed": wave((32, WIDTH), 4),
        "scale": 1 + wave((WIDTH,), 5, 0.1),
        "unused": wave((8,), 6),
        "count": jnp.arange(8),
    }


def batch() -> dict:
    return {"x": wave((ROWS, WIDTH), 7), "tokens": jnp.arange(ROWS * 3).reshape(ROWS, 3) % 32}


def layer(w, x):
    x = x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"] + w["bias"]


def stacked(p):
    return {name: p[name] for name in ("up", "down", "bias")}


def at(p, i):
    return jax.tree.map(lambda a: a[i], stacked(p))


def mean_square(x):
    return jnp.mean(x**2)


LOSSES = {}


def loss(fn):
    LOSSES[fn.__name__] = fn
    return fn


@loss
def unrolled(p, b):
    x = b["x"]
    for i in range(LAYERS):
        x = layer(at(p, i), x)
    return mean_square(x * p["scale"])


@loss
def scanned(p, b):
    return mean_square(lax.scan(lambda x, w: (layer(w, x), None), b["x"], stacked(p))[0] * p["scale"])


@loss
def scanned_backwards_collecting(p, b):
    x, (norms, weights) = lax.scan(
        lambda x, w: (layer(w, x), (jnp.mean(x**2), w["bias"] * 2)), b["x"], stacked(p), reverse=True
    )
    return mean_square(x) + jnp.sum(norms * jnp.arange(4.0)) + mean_square(weights)


@loss
def scanned_with_more(p, b):
    """Constants that gradients flow to, other things to scan over, integers and keys carried."""
    shared, others = jnp.tanh(b["x"] * p["scale"]), jnp.outer(jnp.arange(4.0), p["scale"])

    def turn(carry, each):
        x, number, key = carry
        w, other, index = each
        key, own = jax.random.split(key)
        x = layer(w, x) + shared * other + jax.random.normal(own, (WIDTH,)) + p["embed"][index]
        return (x, number + 1, key), number

    start = (b["x"], jnp.int32(0), jax.random.key(1))
    (x, _, _), numbers = lax.scan(turn, start, (stacked(p), others, jnp.arange(LAYERS)))
    return mean_square(x) * jnp.sum(numbers)


@loss
def scanned_with_remat(p, b):
    dots = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)
    x, _ = lax.scan(lambda x, w: (jax.checkpoint(layer)(w, x), None), b["x"], stacked(p))
    x, _ = lax.scan(lambda x, w: (dots(w, x), None), x, stacked(p))
    return mean_square(x)


@loss
def scanned_twice_and_unrolled(p, b):
    return scanned(p, b) + unrolled(p, b) + scanned(p, {"x": b["x"] * 2})


@loss
def scanned_in_a_scan(p, b):
    groups = jax.tree.map(lambda a: a.reshape(2, 2, *a.shape[1:]), stacked(p))
    inner = lambda x, w: (layer(w, x), None)  # noqa: E731
    return mean_square(lax.scan(lambda x, w: (lax.scan(inner, x, w)[0], None), b["x"], groups)[0])


@loss
def parameters_as_constants_of_a_scan(p, b):
    return mean_square(lax.scan(lambda x, _: (layer(at(p, 0), x), None), b["x"], None, length=3)[0])


@loss
def tied_embedding(p, b):
    x = p["embed"][b["tokens"]]
    logits = layer(at(p, 1), x) @ p["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, b["tokens"]).mean()


@loss
def joined_weights(p, b):
    both = jnp.concatenate([p["up"][0], p["up"][1] * 2], axis=1)
    return mean_square(b["x"] @ both) + mean_square(b["x"] @ p["embed"].T.astype(jnp.float32))


@loss
def branches(p, b):
    x = lax.cond(b["x"].sum() > 1e9, lambda x: x, lambda x: layer(at(p, 0), x), b["x"])
    x = lax.switch(b["tokens"][0, 1] % 3, [jnp.sin, lambda x: layer(at(p, 1), x), jnp.cos], x)
    return mean_square(x)


@loss
def loops(p, b):
    x = lax.fori_loop(0, 3, lambda i, x: layer(at(p, 0), x), b["x"])
    turns = lax.while_loop(lambda n: n < 5, lambda n: n + 1, 0)
    return mean_square(x) * turns


@jax.custom_jvp
def cubed(x):
    return x**3


cubed.defjvp(lambda primals, tangents: (cubed(*primals), 3 * primals[0] ** 2 * tangents[0]))


@jax.custom_vjp
def product(x, w):
    return x @ w


product.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, d: (d @ saved[1].T, saved[0].T @ d))


@loss
def custom_derivatives(p, b):
    return mean_square(product(cubed(b["x"] * p["scale"]), p["up"][0]))


@loss
def rematerialised(p, b):
    every = jax.checkpoint(lambda p, x: unrolled(p, {"x": x}), policy=jax.checkpoint_policies.nothing_saveable)
    one = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    return every(p, b["x"]) + mean_square(one(at(p, 2), b["x"]))


@loss
def vmapped(p, b):
    return mean_square(jax.vmap(lambda w, x: layer(w, x), in_axes=(0, None))(stacked(p), b["x"]))


@loss
def jitted(p, b):
    twice = jax.jit(layer)
    return mean_square(twice(at(p, 1), twice(at(p, 0), b["x"])))


@loss
def stopped(p, b):
    return mean_square(b["x"] * lax.stop_gradient(p["scale"]) * p["scale"]) + jnp.sum(p["count"]) * 0.5


@loss
def penalty(p, b):
    slope = jax.grad(lambda x: mean_square(jnp.tanh(x @ p["up"][0]) @ p["down"][0]))(b["x"])
    return mean_square(b["x"] @ p["up"][0]) + jnp.sum(slope**2)


@loss
def regularised(p, b):
    return mean_square(b["x"] * p["scale"]) + sum(jnp.sum(w**2) for w in jax.tree.leaves(stacked(p)))


@loss
def parameters_returned(p, b):
    return zerojax.Loss(
        jnp.sum((b["x"] * p["scale"]) ** 2), b["x"].size, {"bias": p["bias"][0, 0], "embed": jnp.max(p["embed"])}
    )


@loss
def no_parameters(p, b):
    return mean_square(b["x"])


@loss
def printed(p, b):
    x = layer(at(p, 0), b["x"])
    jax.debug.callback(lambda x: None, x.sum())
    return mean_square(x)


@loss
def one_stack_twice(p, b):
    pair = (p["up"], p["up"])
    return mean_square(lax.scan(lambda x, w: (jnp.tanh(x @ w[0]) @ w[1].T, None), b["x"], pair)[0])


@loss
def literals_carried(p, b):
    def turn(carry, w):
        x, total, half = carry
        return (layer(w, x) * half, total + jnp.mean(x**2), 0.5), None

    (x, total, _), _ = lax.scan(turn, (b["x"], 0.0, 1.0), stacked(p))
    return mean_square(x) + total


@loss
def complex_numbers(p, b):
    z = jnp.fft.fft(layer(at(p, 0), b["x"])) * jnp.mean(p["embed"])
    z, _ = lax.scan(lambda z, w: (z @ w["up"] @ w["down"], None), z, stacked(p))
    return mean_square(jnp.abs(z))


@loss
def metrics_without_a_gradient(p, b):
    """The gradient of the norm of zeros is not a number; nothing asks for it."""
    x, norms = lax.scan(lambda x, w: (layer(w, x), jnp.linalg.norm(w["bias"] * 0)), b["x"], stacked(p))
    return zerojax.Loss(jnp.sum(x**2), x.size, {"norm": jnp.linalg.norm(p["scale"] * 0), "norms": norms.sum()})


@loss
def carried_without_a_gradient(p, b):
    """A while loop has no reverse derivative, and needs none."""

    def turn(carry, w):
        x, number = carry
        number = lax.while_loop(lambda n: n > 1, lambda n: n / 2, number + 2)
        return (layer(w, x) * number, number), None

    stopped = lax.while_loop(lambda n: n > 1, lambda n: n / 2, lax.stop_gradient(jnp.sum(p["embed"] ** 2)))
    return mean_square(lax.scan(turn, (b["x"], jnp.float32(0)), stacked(p))[0][0]) * stopped


@loss
def carried_views_of_a_layer(p, b):
    """What the next turn multiplies by is only another view of this turn's parameters."""

    def turn(carry, w):
        x, turned, part = carry
        x = layer(w, x) + jnp.tanh(x @ turned) @ turned.T + x @ part
        return (x, w["up"][:, ::-1] * 2, w["down"].T[:, :WIDTH]), None

    first = b["x"], jnp.zeros((WIDTH, 2 * WIDTH)), jnp.zeros((WIDTH, WIDTH))
    return mean_square(lax.scan(turn, first, stacked(p), reverse=True)[0][0])


@loss
def mutable_arrays(p, b):
    ref = jax.new_ref(b["x"])
    ref[...] += layer(at(p, 0), ref[...])
    ref[...] += lax.scan(lambda x, w: (layer(w, x), None), ref[...], stacked(p))[0]
    return mean_square(ref[...])


def value(fn):
    """The loss as a scalar on the whole batch."""

    def whole(p, b):
        result = fn(p, b)
        return result.total / result.weight if isinstance(result, zerojax.Loss) else result

    return whole


@functools.cache
def right(name: str):
    """Mean loss and gradient on one device."""
    trained = {k: v for k, v in init_fn(None).items() if k != "count"}

    def f(trained, b):
        return value(LOSSES[name])({**trained, "count": jnp.arange(8)}, b)

    return jax.device_get(jax.jit(jax.value_and_grad(f))(trained, batch()))


def assert_right_gradients(name: str, config: zerojax.ZeroConfig):
    """Loss and gradients of a structure are those of one device."""
    plan = zerojax.make_plan(init_fn, optax.sgd(0.1), make_mesh(), config)
    params = jax.device_put(init_fn(None), plan.state_shardings.params)
    loss, grads = jax.jit(zerojax.value_and_grad(LOSSES[name], plan))(params, batch())
    right_loss, right_grads = right(name)
    assert float(loss) == pytest.approx(float(right_loss), rel=1e-5)
    assert grads.pop("count") is None
    assert_close(jax.device_get(grads), right_grads)


AT_STAGE_2 = ["unrolled", "scanned", "one_stack_twice", "tied_embedding"]
IN_OTHERS = [  # dear ones
    *("mutable_arrays", "rematerialised", "metrics_without_a_gradient"),
    *("scanned_twice_and_unrolled", "literals_carried"),
]
STRUCTURES = [
    *(pytest.param(3, name, marks=pytest.mark.long if name in IN_OTHERS else ()) for name in LOSSES),
    *(pytest.param(2, name, marks=() if name in AT_STAGE_2 else pytest.mark.long) for name in LOSSES),
]


@pytest.mark.parametrize(("stage", "name"), STRUCTURES)
def test_gradients_of_every_structure(name, stage):
    config = zerojax.ZeroConfig(stage=stage, keep_whole_below=0, overrides={"bias": 1, "up": 2, "down": 1})
    assert_right_gradients(name, config)


@jax.custom_vjp
def product(x, w):
    return x @ w


product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_derivative_of_another_dtype(stage, scan):
    """A user's own derivative may be float32 for a parameter in bfloat16, as JAX allows."""

    def loss_fn(p, x):
        if scan:
            return mean_square(lax.scan(lambda x, w: (product(x, w), None), x, p["stack"])[0])
        return mean_square(product(jnp.tanh(product(x, p["w"])), p["w"]))

    def init_fn(key):
        return {"w": wave((WIDTH, WIDTH), 1), "stack": wave((LAYERS, WIDTH, WIDTH), 2)}

    config = zerojax.ZeroConfig(stage=stage, precision="c=bf16")
    plan = zerojax.make_plan(init_fn, optax.sgd(0.1), make_mesh(), config)
    params = jax.device_put(init_fn(None), plan.state_shardings.params)
    _, grads = jax.jit(zerojax.value_and_grad(loss_fn, plan))(params, batch()["x"])
    right_grads = jax.jit(jax.grad(loss_fn))(init_fn(None), batch()["x"])
    name = "stack" if scan else "w"
    chex.assert_trees_all_close(
        grads[name], right_grads[name], rtol=0.1, atol=0.05 * float(abs(right_grads[name]).max())
    )


DOTS = jax.checkpoint_policies.dots_saveable


@pytest.mark.parametrize("remat", ["unit", pytest.param(DOTS, marks=pytest.mark.long)], ids=["unit", "dots"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", ["scanned", pytest.param("unrolled", marks=pytest.mark.long), "tied_embedding"])
def test_gradients_with_remat(name, stage, remat):
    assert_right_gradients(name, zerojax.ZeroConfig(stage=stage, remat=remat))


@pytest.mark.parametrize("stage", [1, 3])
def test_remat_makes_activations_again(stage):
    """Of layers through which many rows go, only what passes from one to the next is kept."""

    def temp(remat):
        config = zerojax.ZeroConfig(stage=stage, remat=remat)
        plan = zerojax.make_plan(stack_of(8), optax.sgd(0.1), make_mesh(), config)
        rows = jax.ShapeDtypeStruct((8 * 64, WIDE), jnp.float32, sharding=plan.batch_sharding)
        f = jax.jit(zerojax.value_and_grad(scan_loss, plan), out_shardings=(None, plan.state_shardings.params))
        return zerojax.report(f, plan.abstract_state.params, rows).memory.temp

    hidden = 64 * 4 * WIDE * 4  # bytes that a layer makes inside, on one device
    assert temp(None) - temp("unit") >= 6 * hidden


# ---- what is said of units ----


def explained(stage: int, function=None, **config):
    def loss_fn(p, x):
        x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), jnp.tanh(x @ p["in"]), p["stack"])
        return mean_square(x @ p["out"])

    def init_fn(key):
        return {"in": jnp.zeros((256, 512)), "stack": jnp.zeros((LAYERS, 512, 512)), "out": jnp.zeros((512, 256))}

    plan = zerojax.make_plan(init_fn, optax.sgd(0.1), make_mesh(), zerojax.ZeroConfig(stage=stage, **config))
    step = zerojax.make_train_step(loss_fn, optax.sgd(0.1), plan) if function is None else function(loss_fn, plan)
    rows = jax.ShapeDtypeStruct((16, 256), jnp.float32)
    return zerojax.explain(step, plan.abstract_state, rows)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_units_of_a_scan_between_two_products(accumulate):
    found = explained(3, accumulate=accumulate)
    assert [unit.params for unit in found.units] == [("in",), ("stack",), ("out",)]
    assert [unit.turns for unit in found.units] == [1, LAYERS, 1]
    assert [unit.gathers for unit in found.units] == [(1, 1), (LAYERS, LAYERS), (1, 0)]
    assert found.whole_bytes == 2 * 512 * 512 * 4


def test_stages_that_gather_no_units():
    for stage in range(3):
        assert "all parameters are whole" in str(explained(stage))
        assert [unit.gathers for unit in explained(stage).units] == [(0, 0)] * 3
    assert "no gather units" in str(explained(3, zerojax.make_eval_step))


def test_units_of_a_step_of_ones_own():
    def two_losses(loss_fn, plan):
        def step(state, x):
            return [
                zerojax.value_and_grad(f, plan)(state.params, x) for f in (loss_fn, lambda p, x: mean_square(p["in"]))
            ]

        return jax.jit(step)

    assert [unit.params for unit in explained(3, two_losses).units] == [("in",), ("stack",), ("out",), ("in",)]

    class Trainer:
        @functools.partial(jax.jit, static_argnums=0)
        def step(self, state, x):
            return zerojax.value_and_grad(self.loss_fn, self.plan)(state.params, x)

    def method(loss_fn, plan):
        trainer = Trainer()
        trainer.loss_fn, trainer.plan = loss_fn, plan
        return trainer.step

    assert len(explained(3, method).units) == 3


# ---- what is whole at a time ----

WIDE = 64
LAYER_BYTES = 2 * 4 * WIDE * WIDE * 4  # of one layer, whole


def stack_of(layers: int):
    def init_fn(key):
        return {"up": jnp.zeros((layers, WIDE, 4 * WIDE)), "down": jnp.zeros((layers, 4 * WIDE, WIDE))}

    return init_fn


def unrolled_layers(layers: int):
    def init_fn(key):
        return [{name: a[0] for name, a in stack_of(1)(key).items()} for _ in range(layers)]

    return init_fn


def through(w, x):
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def scan_loss(p, x):
    return mean_square(lax.scan(lambda x, w: (through(w, x), None), x, p)[0])


def unrolled_loss(p, x):
    return mean_square(functools.reduce(lambda x, w: through(w, x), p, x))


def temporaries(init_fn, loss_fn, stage: int) -> int:
    """Bytes that a gradient needs beside parameters, rows and result; with so few rows, nearly all of parameters."""
    plan = zerojax.make_plan(init_fn, optax.sgd(0.1), make_mesh(), zerojax.ZeroConfig(stage=stage))
    rows = jax.ShapeDtypeStruct((8, WIDE), jnp.float32, sharding=plan.batch_sharding)
    f = jax.jit(zerojax.value_and_grad(loss_fn, plan), out_shardings=(None, plan.state_shardings.params))
    return zerojax.report(f, plan.abstract_state.params, rows).memory.temp


@pytest.mark.parametrize(("layers_of", "loss_fn"), [(stack_of, scan_loss), (unrolled_layers, unrolled_loss)])
def test_more_layers_make_no_more_whole_at_a_time(layers_of, loss_fn, monkeypatch):
    """One unit in use and one on its way; what grows with the layers are shards and a few rows."""
    monkeypatch.setattr(cutting, "TOGETHER_BELOW", LAYER_BYTES // 8)  # a layer is a unit
    few, more = (temporaries(layers_of(layers), loss_fn, 3) for layers in (8, 12))
    assert few <= 4.2 * LAYER_BYTES  # two layers, a gradient, and the shards of one on their way
    assert more - few <= (4 / 8 + 0.1) * LAYER_BYTES  # the shards of the gradients of four layers
    assert temporaries(layers_of(8), loss_fn, 1) >= 8 * LAYER_BYTES  # all parameters


def test_parameters_that_stay_whole_are_not_gathered():
    found = explained(3, overrides={"in": None}, allow_whole=True)
    assert "in" in found.units[0].params
    assert (found.units[0].bytes, found.units[0].gathers) == (0, (0, 0))
