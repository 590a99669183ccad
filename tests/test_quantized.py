"""What is not trained is partitioned and gathered as it is: integers, booleans, small floats; a base in few bits, with
adapters in float32 (QLoRA, arXiv 2305.14314). One dtype at rest for some parameters, another for others.

Tolerance 1e-6 relative: float32 sums in another order.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from reference import assert_close, make_mesh

import zerojax

WIDTH, RANK, LAYERS, ROWS = 32, 4, 3, 16
DTYPES = ("int8", "uint8", "int16", "int4", "uint4", "bool", "float8_e4m3fn", "float8_e5m2")
TX = optax.adam(1e-2)


def batch() -> dict:
    x = np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(2 * x)}


def codes(key, dtype: str, *shape: int):
    numbers = jax.random.randint(key, shape, 0, 2 if dtype == "bool" else 7)
    return numbers.astype(dtype)


def init_fn(dtype: str, stacked: bool):
    """Layers of a quantized base, its scales, and low-rank adapters."""

    def layer(key):
        keys = jax.random.split(key, 4)
        return {
            "base": {
                "codes": codes(keys[0], dtype, WIDTH, WIDTH), "scale": jax.random.normal(keys[1], (1, WIDTH)) / 20
            },
            "lora": {
                "a": jax.random.normal(keys[2], (WIDTH, RANK)) / 6, "b": jax.random.normal(keys[3], (RANK, WIDTH)) / 6,
            },
        }  # fmt: skip

    def init(key):
        keys = jax.random.split(key, LAYERS)
        return jax.vmap(layer)(keys) if stacked else {str(i): layer(k) for i, k in enumerate(keys)}

    return init


def block(x, p):
    base = (p["base"]["codes"].astype(jnp.float32) - 3) * p["base"]["scale"]
    return x + jnp.tanh(x @ base + x @ p["lora"]["a"] @ p["lora"]["b"])


def loss_fn(params, batch):
    x = batch["x"]
    if "lora" in params:
        x, _ = lax.scan(lambda x, p: (block(x, p), None), x, params)
    else:
        for p in params.values():
            x = block(x, p)
    return jnp.mean((x - batch["y"]) ** 2)


def adapters(params):
    return jax.tree.map_with_path(lambda keys, a: a if "lora" in jax.tree_util.keystr(keys) else None, params)


def twin(params, loss=loss_fn, steps: int = 3):
    """One device; only the adapters are trained."""

    def put(trained, params):
        return jax.tree.map(lambda t, p: p if t is None else t, trained, params, is_leaf=lambda t: t is None)

    @jax.jit
    def step(trained, opt_state):
        value, grads = jax.value_and_grad(lambda t: loss(put(t, params), batch()))(trained)
        updates, opt_state = TX.update(grads, opt_state, trained)
        return optax.apply_updates(trained, updates), opt_state, value

    trained = adapters(params)
    opt_state, losses = TX.init(trained), []
    for _ in range(steps):
        trained, opt_state, value = step(trained, opt_state)
        losses.append(float(value))
    return losses, put(trained, params), float(loss(put(trained, params), batch()))


def train(init, loss=loss_fn, steps: int = 3, **config):
    plan = zerojax.make_plan(init, TX, make_mesh(), zerojax.ZeroConfig(**config))
    state, step = zerojax.init_state(init, TX, plan, jax.random.key(0)), zerojax.make_train_step(loss, TX, plan)
    losses = []
    for _ in range(steps):
        state, metrics = step(state, batch())
        losses.append(float(metrics["loss"]))
    return plan, losses, state, float(zerojax.make_eval_step(loss, plan)(state, batch())["loss"])


def numbers(tree):
    return jax.tree.map(lambda a: np.asarray(a).astype(np.float32), tree)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("stacked", [False, True])
def test_adapters_of_a_quantized_base_train_as_on_one_device(stacked, stage, k):
    init = init_fn("int8", stacked)
    params = init(jax.random.key(0))
    right = twin(params)
    plan, losses, state, evaluated = train(init, stage=stage, accumulate=k, trainable="*lora/*")
    assert_close((losses, evaluated), (right[0], right[2]), 1e-6)
    whole = jax.device_get(zerojax.gather_params(state.params, plan))
    assert_close(numbers(whole), numbers(right[1]), 1e-5)  # Adam divides small differences
    of_codes = [leaf for leaf in plan.params if leaf.path.endswith("codes")]
    shares = [plan._bytes(leaf) for leaf in of_codes]
    assert sum(shares) == LAYERS * WIDTH * WIDTH // (8 if stage else 1)  # bytes of int8
    assert all((leaf.dim is not None) and not leaf.trained for leaf in of_codes)
    assert [a.dtype for a in jax.tree.leaves(state.params)] == [leaf.dtype for leaf in plan.params]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_gathered_as_it_is(dtype):
    """In a scan and beside one, by turns."""
    stacked = DTYPES.index(dtype) % 2 == 0
    init = init_fn(dtype, stacked)
    params = init(jax.random.key(0))
    right = twin(params, steps=2)
    plan, losses, state, evaluated = train(init, steps=2, trainable="*lora/*")
    assert_close((losses, evaluated), (right[0], right[2]), 1e-6)
    whole = jax.device_get(zerojax.gather_params(state.params, plan))
    assert_close(numbers(whole), numbers(right[1]), 1e-5)
    assert {str(a.dtype) for a in jax.tree.leaves(state.params)} == {dtype, "float32"}


def test_branches_see_them_whole():
    def loss(params, batch):
        p = params["0"]
        x = lax.cond(batch["x"].shape[0] > 0 + jnp.int32(0), lambda x: block(x, p), lambda x: x, batch["x"])
        return jnp.mean((x - batch["y"]) ** 2)

    init = init_fn("int8", False)
    right = twin(init(jax.random.key(0)), loss)
    _, losses, _, evaluated = train(init, loss, trainable="*lora/*")
    assert_close((losses, evaluated), (right[0], right[2]), 1e-6)


def test_embedding_tables_of_integers():
    table = np.round(127 * np.sin(np.arange(64 * 16.0))).reshape(64, 16).astype(np.int8)
    head = np.cos(np.arange(128.0)).reshape(16, 8).astype(np.float32) / 4
    params = {"table": jnp.asarray(table), "head": jnp.asarray(head)}

    def loss(p, tokens):
        return jnp.mean((p["table"][tokens].astype(jnp.float32).mean(1) / 127 @ p["head"] - 1) ** 2)

    tokens = (7 * np.arange(64) % 64).reshape(16, 4)
    for stage in range(4):
        for overrides in ({}, {"table": 0}):
            config = zerojax.ZeroConfig(stage=stage, overrides=overrides)
            plan = zerojax.make_plan(lambda key: params, TX, make_mesh(), config)
            state = zerojax.init_state(lambda key: params, TX, plan, jax.random.key(0))
            assert_close(float(zerojax.make_eval_step(loss, plan)(state, tokens)["loss"]), 1.0030694)
            assert_close(float(zerojax.make_train_step(loss, TX, plan)(state, tokens)[1]["loss"]), 1.0030694)


def test_unpacked_weights_are_not_kept():
    """Two codes in a byte: what is unpacked of them is made again in backward, as a cast is."""

    def loss(params, batch):
        x = batch["x"]
        for p in params.values():
            low, high = p["codes"] & 15, p["codes"] >> 4
            w = (jnp.concatenate([low, high], 1).astype(jnp.float32) - 7) / 40
            x = x + jnp.tanh(x @ w) * p["gain"]
        return jnp.mean((x - batch["y"]) ** 2)

    def init(key):
        packed = codes(key, "uint8", WIDTH, WIDTH // 2) * 17
        return {str(i): {"codes": packed, "gain": jnp.ones(WIDTH)} for i in range(4)}

    plan = zerojax.make_plan(init, TX, make_mesh())
    step = zerojax.make_train_step(loss, TX, plan)
    state = zerojax.init_state(init, TX, plan, jax.random.key(0))
    state, metrics = step(state, batch())
    assert_close(float(metrics["loss"]), float(loss(init(jax.random.key(0)), batch())), 1e-6)
    units = zerojax.explain(step, plan.abstract_state, jax.eval_shape(batch)).units
    assert all("codes" in " ".join(unit.params) for unit in units if unit.bytes)


# ---- dtypes at rest ----


@pytest.mark.parametrize("small", ["bf16", "float8_e4m3fn"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_frozen_base_rests_in_few_bits(stage, small):
    """Seen in the dtype of computation, sent in that at rest, which is smaller; the twin has a rounded base."""
    name = "bfloat16" if small == "bf16" else small
    shapes = {"base": (64, 64), "lora_a": (64, 8), "lora_b": (8, 64)}

    def init(key):
        keys = jax.random.split(key, 3)
        return {n: jax.random.normal(k, s) / 8 for k, (n, s) in zip(keys, shapes.items(), strict=True)}

    def loss(p, x):
        return jnp.mean((jnp.tanh(x @ p["base"] + x @ p["lora_a"] @ p["lora_b"]) - x) ** 2)

    x = np.random.default_rng(0).normal(size=(ROWS, 64)).astype(np.float32)
    config = zerojax.ZeroConfig(stage=stage, frozen="base", param_dtypes={"base": small})
    plan = zerojax.make_plan(init, TX, make_mesh(), config)
    state = zerojax.init_state(init, TX, plan, jax.random.key(0))
    assert {n: str(a.dtype) for n, a in state.params.items()} == {
        "base": name,
        "lora_a": "float32",
        "lora_b": "float32",
    }
    bytes_of = {n: int(np.prod(s)) * (1 if n == "base" and small != "bf16" else 2 if n == "base" else 4) for n, s in
                shapes.items()}  # fmt: skip
    assert plan.bytes_per_device("params") == sum(bytes_of.values()) // (8 if stage else 1)
    params = init(jax.random.key(0))
    rounded = params["base"].astype(name).astype(jnp.float32)

    def of_adapters(p):
        return loss({**p, "base": rounded}, x)

    trained = {n: params[n] for n in ("lora_a", "lora_b")}
    opt_state, step = TX.init(trained), zerojax.make_train_step(loss, TX, plan)
    for _ in range(3):
        value, grads = jax.value_and_grad(of_adapters)(trained)
        updates, opt_state = TX.update(grads, opt_state, trained)
        trained = optax.apply_updates(trained, updates)
        state, metrics = step(state, x)
        assert_close(float(metrics["loss"]), float(value), 1e-6)
    if stage == 3:
        text = step.lower(plan.abstract_state, x).as_text()
        assert ("bf16" if small == "bf16" else "f8E4M3FN") in text
        assert {leaf.gather_dtype for leaf in plan.wire if leaf.path == "base"} == {name}


def test_mistakes_are_told():
    def init(key):
        return {"w": jnp.ones((64, 64)), "filter": jnp.ones((8, 8), "complex64")}

    for devices in (1, 8):
        with pytest.raises(ValueError, match=r"filter \(8, 8\) is complex .*frozen='filter'"):
            zerojax.make_plan(init, TX, make_mesh(devices))
    config = zerojax.ZeroConfig(frozen="filter", param_dtypes={"w": "float8_e4m3fn"})
    with pytest.raises(ValueError, match=r"w .* shall rest in float8_e4m3fn, in which it cannot be trained"):
        zerojax.make_plan(init, TX, make_mesh(), config)
    with pytest.raises(ValueError, match="match no parameter"):
        zerojax.make_plan(init, TX, make_mesh(), zerojax.ZeroConfig(frozen="filter", param_dtypes={"v": "bf16"}))
    with pytest.raises(ValueError, match="match no trainable parameter"):
        zerojax.make_plan(init, TX, make_mesh(), zerojax.ZeroConfig(trainable="filter"))


def test_frozen_complex_numbers_are_gathered():
    spectrum = jnp.asarray(np.exp(1j * np.arange(64.0)).reshape(8, 8), "complex64")

    def loss(p, batch):
        return jnp.mean(jnp.abs(jnp.fft.fft(jnp.tanh(batch["x"] @ p["w"])[:, :8]) @ p["filter"]) ** 2)

    def init(key):
        return {"w": jax.random.normal(key, (WIDTH, WIDTH)) / 6, "filter": spectrum}

    plan, losses, state, _ = train(init, loss, steps=1, frozen="filter")
    assert_close(losses[0], float(loss(init(jax.random.key(0)), batch())))
    assert next(leaf for leaf in plan.params if leaf.path == "filter").dim is not None
    np.testing.assert_array_equal(state.params["filter"], spectrum)
