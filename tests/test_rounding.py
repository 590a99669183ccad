"""Stochastic rounding: right in the mean, exact where nothing is to be rounded, the same on every mesh.

The rounding itself is tested with all random bits there are, so that its mean is exact and needs no tolerance.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from reference import (
    assert_same,
    even_batch,
    even_params,
    loss_fn,
    make_grid,
    make_mesh,
    odd_batch,
    odd_params,
    prepare,
    wave,
)

import zerojax
from zerojax import Precision
from zerojax.precision import round_stochastically

LONG = pytest.mark.long
PURE = "p=bf16,c=bf16,rounding=stochastic"
DTYPES = ["bfloat16", "float16"]

# ---- one rounding ----


def every_number(dtype):
    return jax.lax.bitcast_convert_type(jnp.arange(2**16, dtype=jnp.uint16), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [0, 0x80000000, 0xFFFFFFFF, 0x12345678])
def test_what_the_dtype_holds_stays(dtype, bits):
    """All of its 65,536 numbers, with zeros of both signs, infinities and NaN."""
    numbers = np.asarray(every_number(dtype))
    rounded = round_stochastically(jnp.asarray(numbers).astype(jnp.float32), dtype, jnp.full(2**16, bits, jnp.uint32))
    assert rounded.dtype == dtype
    whole = ~np.isnan(numbers.astype(np.float32))
    np.testing.assert_array_equal(np.asarray(rounded).view(np.uint16)[whole], numbers.view(np.uint16)[whole])
    assert np.isnan(np.asarray(rounded, np.float32)[~whole]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_is_the_number_itself(dtype):
    """Between two numbers anywhere: across powers of two, at the largest, negative, below the normal ones."""
    last = float(jnp.finfo(dtype).max)
    values = [1 + 2.0**-12, 2 - 2.0**-13, -1.001953125, 0.3, 3.0e-5, 1e-3, last * (1 - 2.0**-11), 123.4567, -(2.0**-20)]
    if dtype == "float16":
        values += [2.0**-24 * 1.25, 2.0**-24 / 8, -(2.0**-14) * (1 - 2.0**-12), 6.1e-5, 2.0**-25]
    x = np.array(values, np.float32)
    bits = jnp.arange(2**16, dtype=jnp.uint32) << 16
    rounded = jax.vmap(lambda x: round_stochastically(jnp.broadcast_to(x, bits.shape), dtype, bits))(x)
    rounded = np.asarray(rounded, np.float64)
    steps = np.array([np.diff(np.unique(row)).max(initial=0) for row in rounded])
    assert all(len(np.unique(row)) <= 2 for row in rounded)
    # float16 drops 13 bits and bfloat16 16: exact. Below float16's normal numbers more are dropped than there are here.
    error = np.abs(rounded.mean(1) - x.astype(np.float64))
    assert (error <= np.where(np.abs(x) < jnp.finfo(dtype).smallest_normal, steps * 2.0**-16, 0)).all()
    below, above = rounded.min(1), rounded.max(1)
    assert ((below <= x) & (x <= above)).all()


@pytest.mark.parametrize(("dtype", "value", "right"), [
    ("float16", 65519.0, 65504.0), ("float16", 65520.0, np.inf), ("float16", -1e6, -np.inf),
    ("bfloat16", 3.4028e38, np.inf), ("bfloat16", 3.39e38, 3.3895313892515355e38),
    ("bfloat16", np.inf, np.inf), ("float16", -np.inf, -np.inf), ("float16", np.nan, np.nan),
])  # fmt: skip
def test_beyond_the_largest_number_it_is_a_cast(dtype, value, right):
    for bits in (0, 0xFFFF_FFFF):
        rounded = round_stochastically(jnp.float32(value), dtype, jnp.uint32(bits))
        np.testing.assert_array_equal(np.float64(rounded), np.float64(right))


def test_settings():
    assert Precision.parse(PURE) == Precision("bfloat16", "bfloat16", rounding="stochastic")
    assert Precision.parse("p=fp16").rounding == "nearest"
    with pytest.raises(ValueError, match="rounding='up' is not one of 'nearest', 'stochastic'"):
        Precision(rounding="up")
    for dtype in ("float32", "float64"):
        with pytest.raises(ValueError, match=f"nothing to round in param_dtype='{dtype}'"):
            Precision(param_dtype=dtype, rounding="stochastic")


# ---- many updates ----


def slope(params, batch):
    """Gradients of -1 everywhere, exactly."""
    return -jnp.mean(batch) * sum(jnp.sum(p.astype(jnp.float32)) for p in jax.tree.leaves(params))


ONES = np.ones(8, np.float32)


@pytest.mark.parametrize(("stage", "dtype"), [
    (0, "bf16"), (3, "fp16"), *(pytest.param(*other, marks=LONG) for other in [(0, "fp16"), (3, "bf16")]),
])  # fmt: skip
def test_updates_too_small_to_see_add_up(stage, dtype):
    """karpathy/llm.c#702, NVIDIA/apex#42: 100 updates of 1e-3 to 1, where bfloat16 stays at 1.

    The mean of 4,096 such walks has a standard deviation of 4e-4.
    """
    ends = {}
    for rounding in ("nearest", "stochastic"):
        config = {"stage": stage, "precision": f"p={dtype},c={dtype},rounding={rounding}"}
        _, state, step = prepare({"w": jnp.ones((8, 512))}, optax.sgd(1e-3), slope, **config)
        for _ in range(100):
            state = jax.block_until_ready(step(state, ONES)[0])
        ends[rounding] = np.asarray(state.params["w"], np.float64)
    assert ends["stochastic"].mean() == pytest.approx(1.1, abs=2e-3)
    assert len(np.unique(ends["stochastic"])) > 5
    if dtype == "bf16":
        assert (ends["nearest"] == 1).all()


def test_bits_are_the_same_on_every_mesh_and_at_every_stage():
    """Bitwise: the gradients are exact here, so that nothing else can differ."""
    params = {
        "a": wave((8, 16), 1),
        "b": wave((16, 8), 2),
        "odd": wave((5, 3), 3),
        "n": jnp.int32(7),
        "s": jnp.float32(1),
    }
    specs = {"a": P(None, "tensor"), "b": P("tensor"), "odd": None, "n": None, "s": None}

    def loss(params, batch):
        return slope({name: leaf for name, leaf in params.items() if name != "n"}, batch)

    def train(mesh, stage, base_specs=None, accumulate=1):
        config = {"stage": stage, "precision": PURE, "allow_whole": True, "accumulate": accumulate}
        _, state, step = prepare(params, optax.sgd(1e-3), loss, mesh, base_specs, **config)
        for _ in range(3):
            state, _ = step(state, np.ones(16, np.float32))
        return jax.device_get(state.params)

    right = train(make_mesh(1), 0)
    assert_same(train(make_mesh(2), 1, accumulate=2), right)
    assert_same(train(make_mesh(8), 2), right)
    assert_same(train(make_mesh(8, explicit=True), 3, accumulate=2), right)
    assert_same(train(make_grid((4, 2), ("data", "tensor")), 3, specs), right)


def test_bits_differ_by_leaf_step_and_key():
    params = {"a": jnp.ones((8, 64)), "b": jnp.ones((8, 64))}
    plan, state, step = prepare(params, optax.sgd(1e-3), slope, precision=PURE)
    first, _ = step(state, ONES)
    moved = {name: np.asarray(p, np.float32) != 1 for name, p in first.params.items()}
    assert 0 < moved["a"].sum() < 512
    assert (moved["a"] != moved["b"]).any()
    restarted = zerojax.init_state(lambda key: params, optax.sgd(1e-3), plan, jax.random.key(1))
    assert (moved["a"] != (np.asarray(step(restarted, ONES)[0].params["a"], np.float32) != 1)).any()
    later = zerojax.init_state(lambda key: params, optax.sgd(1e-3), plan, jax.random.key(0))
    later = jax.device_put(dataclasses.replace(later, step=later.step + 1), plan.state_shardings)
    assert (moved["a"] != (np.asarray(step(later, ONES)[0].params["a"], np.float32) != 1)).any()


@pytest.mark.parametrize("kind", ["rbg", "unsafe_rbg"])
def test_bits_do_not_depend_on_the_default_generator(kind):
    """jax-ml/jax#40232: those of rbg depend on how an array is partitioned."""
    with jax.default_prng_impl(kind):
        ends = []
        for mesh, stage in ((make_mesh(1), 0), (make_mesh(8), 3)):
            _, state, step = prepare(
                {"w": jnp.ones((16, 64))}, optax.sgd(1e-3), slope, mesh, stage=stage, precision=PURE
            )
            ends.append(jax.device_get(step(state, ONES)[0].params))
    assert_same(*ends)
    assert 0 < (np.asarray(ends[0]["w"], np.float32) != 1).sum() < 1024


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2, mu_dtype=jnp.float32),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
    "multi": lambda: optax.MultiSteps(optax.adafactor(1e-2, min_dim_size_to_factor=4), 2),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("stage", "dtype"), [pytest.param(1, "fp16", marks=LONG), (3, "bf16")])
def test_each_update_is_one_of_float32_rounded_up_or_down(name, stage, dtype):
    """google-deepmind/optax#377, #1039, #1038: and the dtypes of the state are those that ``tx.init`` gave it."""
    tx, precision = OPTIMIZERS[name](), f"p={dtype},rounding=stochastic"
    plan, state, step = prepare(odd_params(), tx, stage=stage, precision=precision, allow_whole=True)
    gradients, update = jax.jit(jax.grad(loss_fn)), jax.jit(tx.update)
    for seed in range(3):
        old = jax.device_get(state)
        widened = jax.tree.map(lambda p: jnp.float32(p), old.params)
        updates, _ = update(gradients(widened, odd_batch(16, seed)), old.opt_state, widened)
        wanted = optax.apply_updates(widened, updates)
        state, _ = step(state, odd_batch(16, seed))
        assert jax.tree.map(lambda a: a.dtype, state) == jax.tree.map(lambda a: a.dtype, plan.abstract_state)
        for new, want in zip(jax.tree.leaves(state.params), jax.tree.leaves(wanted), strict=True):
            near = want.astype(new.dtype)
            step_size = np.abs(np.asarray(jnp.nextafter(near, jnp.full_like(near, np.inf)) - near, np.float64))
            off = np.abs(np.asarray(new, np.float64) - np.asarray(want, np.float64))
            assert (off <= step_size + 1e-5 * np.abs(want).max()).all()  # 1e-5: gradients of another order of sums
    assert jax.tree.map(lambda a: a.dtype, jax.eval_shape(tx.init, state.params)) == jax.tree.map(
        lambda a: a.dtype, state.opt_state
    )


def test_a_skipped_step_rounds_nothing():
    config = {"precision": PURE, "loss_scale": zerojax.LossScale(initial=4.0)}
    _, state, step = prepare({"w": jnp.ones((8, 64))}, optax.sgd(1e-3), slope, **config)
    state, _ = step(state, ONES)
    before = jax.device_get(state.params)
    state, metrics = step(state, ONES * np.inf)
    assert metrics["skipped"]
    assert_same(jax.device_get(state.params), before)
    assert len(np.unique(np.asarray(before["w"], np.float32))) == 2


def test_leaves_that_are_not_floating_are_left_alone():
    params = {"w": jnp.ones((8, 8)), "n": jnp.arange(8)}
    loss = lambda p, rows: slope({"w": p["w"]}, rows)  # noqa: E731
    _, state, step = prepare(params, optax.sgd(1e-3), loss, precision=PURE, allow_whole=True)
    np.testing.assert_array_equal(step(state, ONES)[0].params["n"], np.arange(8))


# ---- two copies ----


@pytest.mark.parametrize(
    "precision", [PURE, *(pytest.param(other, marks=LONG) for other in ("c=bf16", "p=fp16,rounding=stochastic"))]
)
def test_loaded_weights_are_the_weights(precision):
    """deepspeedai/DeepSpeed#762, NovaSky-AI/SkyRL#2149: a master copy brought the old weights back at the next step."""
    fives = jax.tree.map(lambda p: np.full(p.shape, 5, np.float32), even_params())
    init_fn, tx = lambda key: even_params(), optax.adamw(0.0)
    plan, state, step = prepare(even_params(), tx, loss_fn, precision=precision)
    loaded = zerojax.init_state(init_fn, tx, plan, jax.random.key(0), params=fives)
    replaced = dataclasses.replace(state, params=loaded.params)
    replaced = jax.tree.map(jnp.copy, replaced)
    for start in (loaded, replaced):
        after, _ = step(start, even_batch())
        assert all((np.asarray(p, np.float32) == 5).all() for p in jax.tree.leaves(after.params))


@pytest.mark.parametrize("precision", [pytest.param("c=bf16", marks=LONG), PURE])
def test_a_run_that_is_saved_and_resumed_ends_as_if_it_had_not_stopped(precision, tmp_path):
    """deepspeedai/DeepSpeed#4141: the low-precision copy was saved, not the master. Updates of 1e-3 to 1."""
    checkpoints = pytest.importorskip("orbax.checkpoint")
    plan, state, step = prepare({"w": jnp.ones((8, 8))}, optax.sgd(1e-3), slope, precision=precision)
    with checkpoints.StandardCheckpointer() as checkpointer:
        for number in range(100):
            if number == 50:
                checkpointer.save(tmp_path / "state", state)
                checkpointer.wait_until_finished()
            state = jax.block_until_ready(step(state, ONES)[0])
        again = checkpointer.restore(tmp_path / "state", plan.abstract_state)
    for _ in range(50):
        again = jax.block_until_ready(step(again, ONES)[0])
    assert_same(jax.device_get(again.params), jax.device_get(state.params))
    if precision == "c=bf16":
        np.testing.assert_array_equal(again.params["w"], np.full((8, 8), 1.1000046730041504, np.float32))
    else:
        assert np.asarray(again.params["w"], np.float32).mean() == pytest.approx(1.1, abs=0.02)


# ---- memory ----


def test_nothing_whole_is_made_for_the_rounding():
    """Neither random bits nor float32 copies of a partitioned array's whole size stand in the compiled step."""
    plan, _, step = prepare({"w": jnp.ones((64, 1024))}, optax.adam(1e-3), slope, stage=1, precision=PURE)
    rows = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=plan.batch_sharding)
    text = step.lower(plan.abstract_state, rows).compile().as_text()
    assert "u32[8192]" in text or "u32[8,1024]" in text or "u32[64,128]" in text
    assert not any(f"u32[{shape}]" in text for shape in ("64,1024", "65536"))
