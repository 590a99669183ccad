"""Loss scaling and skipped steps: the scale's rules, what a skipped step leaves alone, and who is told."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax.sharding import PartitionSpec as P
from models import CASES
from reference import (
    assert_close,
    assert_same,
    even_batch,
    even_params,
    make_grid,
    make_mesh,
    odd_batch,
    odd_params,
    prepare,
    train_zero,
)

import zerojax
from zerojax import LossScale, ZeroConfig
from zerojax.scaling import all_finite, first_scale, next_scale

# ---- the rules ----

RULES = {  # (settings, overflows, scales used, the next scale)
    "interval": (
        {"growth_interval": 2},
        [1, 1, 1, 0, 0, 0, 0, 1, 0],
        [65536, 32768, 16384, 8192, 8192, 16384, 16384, 32768, 16384],
        16384,
    ),
    "hysteresis": ({"hysteresis": 2}, [1, 1, 0, 1, 1, 0], [65536, 65536, 32768, 32768, 16384, 8192], 8192),
    "consecutive": (
        {"hysteresis": 2, "consecutive_hysteresis": True},
        [1, 1, 0, 1, 1, 0],
        [65536, 65536, 32768, 32768, 32768, 16384],
        16384,
    ),
    "refilled by growth": (
        {"hysteresis": 2, "growth_interval": 2},
        [1, 1, 0, 0, 1, 1],
        [65536, 65536, 32768, 32768, 65536, 65536],
        32768,
    ),
    "overflow restarts the interval": (
        {"growth_interval": 2},
        [0, 1, 0, 1, 0, 0],
        [65536, 65536, 32768, 32768, 16384, 16384],
        32768,
    ),
    "minimum": ({"initial": 16}, [1] * 8, [16, 8, 4, 2, 1, 1, 1, 1], 1),
    "between powers": ({"initial": 10, "minimum": 3}, [1, 1, 1], [10, 5, 3], 3),
    "largest": ({"initial": 2.0**126, "growth_interval": 1}, [0, 0, 0], [2.0**126, 2.0**127, 2.0**127], 2.0**127),
    "constant": ({"initial": 8, "growth_factor": 1, "backoff_factor": 1}, [1, 0, 1], [8, 8, 8], 8),
    "other factors": (
        {"growth_factor": 4, "backoff_factor": 0.25, "growth_interval": 1},
        [1, 0, 0],
        [65536, 16384, 65536],
        2.0**18,
    ),
}  # fmt: skip


@functools.partial(jax.jit, static_argnums=0)
def follow(config, overflows):
    def step(state, overflow):
        new = next_scale(config, state, ~overflow)
        return new, (state.scale, new.stuck)

    last, (used, stuck) = jax.lax.scan(step, first_scale(config), overflows)
    return used, stuck, last


@pytest.mark.parametrize(("settings", "overflows", "scales", "after"), RULES.values(), ids=RULES)
def test_the_scale_follows_its_rules(settings, overflows, scales, after):
    """deepspeedai/DeepSpeed#1599, #1593, #931: the first overflow counts, one reduction a step, hysteresis exactly."""
    used, _, last = follow(LossScale(**settings), np.array(overflows, bool))
    assert used.tolist() == scales
    assert float(last.scale) == after
    assert last.scale.dtype == jnp.float32
    assert {a.dtype for a in (last.good_steps, last.hysteresis, last.stuck)} == {jnp.dtype("int32")}


@pytest.mark.parametrize("name", ["interval", "hysteresis"])
def test_the_scale_of_a_training_follows_its_rules(name):
    """deepspeedai/DeepSpeed#1599: the same sequence as metrics of real steps, at stage 3."""
    settings, overflows, scales, after = RULES[name]
    _, state, step = prepare(even_params(), optax.sgd(0.1), loss_scale=LossScale(**settings))
    batches, seen = {0: even_batch(), 1: {**even_batch(), "x": jnp.full((16, 16), jnp.inf)}}, []
    for overflow in overflows:
        state, metrics = step(state, batches[overflow])
        seen.append((float(metrics["loss_scale"]), bool(metrics["skipped"])))
    assert seen == [(scale, bool(overflow)) for scale, overflow in zip(scales, overflows, strict=True)]
    assert float(state.loss_scale.scale) == after
    assert int(state.step) == int(metrics["step"]) == overflows.count(0)


@pytest.mark.parametrize(("settings", "words"), [
    ({"initial": 0}, "initial=0"), ({"initial": float("inf")}, "initial=inf"), ({"initial": True}, "initial=True"),
    ({"initial": 1e39}, "float32"), ({"minimum": -1.0}, "minimum"), ({"minimum": 2.0**17}, "more than initial"),
    ({"initial": float("nan")}, "initial=nan"), ({"growth_interval": 0}, "growth_interval=0"),
    ({"growth_interval": 2.0}, "number of steps"), ({"growth_factor": 0.5}, "growth_factor=0.5 must be 1 or more"),
    ({"backoff_factor": 2.0}, "at most 1"), ({"backoff_factor": 0.0}, "positive"), ({"hysteresis": 0}, "hysteresis=0"),
    ({"patience": 0}, "patience=0"), ({"consecutive_hysteresis": 1}, "consecutive_hysteresis"),
    ({"initial": "1024"}, "initial='1024'"),
])  # fmt: skip
def test_rules_out_of_range(settings, words):
    with pytest.raises(ValueError, match=words):
        LossScale(**settings)


@pytest.mark.parametrize("settings", [{"loss_scale": 1024.0}, {"loss_scale": "dynamic"}, {"skip_nonfinite": 1}])
def test_settings_of_the_wrong_kind(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        ZeroConfig(**settings)


def test_short_forms():
    assert ZeroConfig(loss_scale=True).loss_scale == LossScale()
    assert ZeroConfig(loss_scale=False) == ZeroConfig()
    assert hash(ZeroConfig(loss_scale=True)) == hash(ZeroConfig(loss_scale=LossScale()))


# ---- a scaled step is the step ----

POWERS = {"loss_scale": LossScale(initial=2.0**10, growth_interval=2)}


@pytest.mark.parametrize(("case", "stage", "accumulate", "explicit"), [
    ("even", 0, 2, True), ("masked", 1, 1, False), ("cnn", 2, 2, False), ("odd", 3, 1, False),
    pytest.param("nnx_gpt", 3, 2, True, marks=pytest.mark.long),
])  # fmt: skip
@pytest.mark.parametrize("settings", [POWERS, {"skip_nonfinite": True}], ids=["scaled", "skipping"])
def test_scaling_changes_no_number(case, stage, accumulate, explicit, settings):
    """Scales are powers of two: exact in float32 but for where the compiler joins products, 1e-6."""
    case, tx = CASES[case], optax.sgd(0.1, momentum=0.9)
    results = []
    for more in ({}, settings):
        config = ZeroConfig(stage=stage, accumulate=accumulate, allow_whole=case.allow_whole, **more)
        plan = zerojax.make_plan(case.init, tx, make_mesh(explicit=explicit), config)
        state, step = (
            zerojax.init_state(case.init, tx, plan, jax.random.key(0)),
            zerojax.make_train_step(case.loss, tx, plan),
        )
        metrics = []
        for seed in range(3):
            state, metric = step(state, case.batch(seed))
            metrics.append({name: metric[name] for name in ("loss", "grad_norm", "step")})
        results.append(jax.device_get((state.params, state.opt_state, state.model_state, metrics)))
        assert {leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state.loss_scale)} <= {True}
    assert_close(results[1], results[0], 1e-6)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("precision", "tolerance"), [("c=f32", 1e-5), ("c=fp16", 2e-3), ("c=fp16,r=fp16", 2e-3)])
def test_the_norm_is_unscaled_by_the_scale_that_was_used(stage, precision, tolerance):
    """deepspeedai/DeepSpeed#2686, deepspeedai/DeepSpeed#2695: by the next one it would be half. 2^-11 is float16's."""
    scale = LossScale(initial=1024, growth_interval=1)
    config = {"stage": stage, "precision": precision, "loss_scale": scale, "accumulate": 2}
    _, state, step = prepare(even_params(), optax.sgd(0.1), low_loss, **config)
    state, metrics = step(state, even_batch())
    assert float(metrics["grad_norm"]) == pytest.approx(0.7280805410, rel=tolerance)
    assert (float(metrics["loss_scale"]), float(state.loss_scale.scale)) == (1024, 2048)
    assert metrics["grad_norm"].dtype == jnp.float32


def low_loss(params, batch):
    return reference.loss_fn(params, jax.tree.map(lambda a: a.astype(params["w1"].dtype), batch))


def test_small_gradients_of_float16_survive():
    """Gradients of 2^-26 vanish in float16, whose least number is 2^-24."""

    def loss(params, batch):
        return jnp.mean(batch.astype(params["w"].dtype) * params["w"]).astype(jnp.float32) * 2.0**-23

    norms = []
    for settings in ({}, {"loss_scale": True}):
        _, state, step = prepare({"w": jnp.zeros(8)}, optax.sgd(1.0), loss, precision="c=fp16,r=fp16", **settings)
        norms.append(float(step(state, np.ones((8, 8), np.float32))[1]["grad_norm"]))
    assert norms == [0, pytest.approx(2.0**-26 * np.sqrt(8), rel=1e-6)]


def test_training_in_float16_finds_its_scale():
    """From a scale at which every gradient overflows float16: skipped until it fits, then as float32 does, 1 %."""
    batches = [even_batch(16, seed) for seed in range(16)]
    config = {"precision": "c=fp16", "loss_scale": LossScale(initial=2.0**24)}
    _, state, step = prepare(even_params(), optax.sgd(0.1), low_loss, **config)
    skipped = []
    for batch in batches:
        state, metrics = step(state, batch)
        skipped.append(bool(metrics["skipped"]))
    first = skipped.index(False)
    assert 4 < first < 12
    assert not any(skipped[first:])
    right = reference.train(optax.sgd(0.1), even_params(), batches[first:])[0]
    moved, wanted = (jax.tree.map(lambda a, b: np.asarray(a) - b, p, even_params()) for p in (state.params, right))
    assert_close(moved, wanted, 1e-2)


@pytest.mark.parametrize("experts", [1, 2, 4])
def test_gradients_of_experts_do_not_grow_with_their_group(experts):
    """deepspeedai/DeepSpeed#6545, #5618, #5259: twice and four times too large over 2 and 4 groups of devices."""
    params = {"w": reference.wave((4, 5, 3), 9)}
    batch = {"x": reference.wave((16, 5), 10), "expert": jnp.arange(16) % 4}

    def loss(params, batch):
        out = jnp.einsum("ti,tij->tj", batch["x"], params["w"][batch["expert"]])
        return jnp.mean(jnp.sum(out**2, axis=-1))

    mesh = make_grid((8 // experts, experts), ("data", "expert"))
    for stage, settings in ((1, {}), (3, {}), (3, {"loss_scale": True})):
        _, state, step = prepare(
            params, optax.sgd(1.0), loss, mesh, {"w": P("expert")}, stage=stage, allow_whole=True, **settings
        )
        state, metrics = step(state, batch)
        assert float(metrics["grad_norm"]) == pytest.approx(0.9340861513, rel=1e-5)
        moved = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), params, jax.device_get(state.params))
        assert_close(moved, jax.device_get(jax.grad(loss)(params, batch)))


# ---- a skipped step ----


def spoil(batch, row, value):
    return {**batch, "x": jnp.asarray(batch["x"]).at[row, 0].set(value)}


@pytest.mark.parametrize(("stage", "accumulate", "settings", "value"), [
    (0, 1, {"skip_nonfinite": True}, np.nan),
    (1, 2, {"skip_nonfinite": True, "precision": "c=bf16"}, np.nan),
    (2, 2, {"loss_scale": True}, np.inf),
    (3, 1, {"skip_nonfinite": True}, np.nan),
    (3, 2, {"loss_scale": LossScale(initial=256), "precision": "c=fp16"}, -np.inf),
])  # fmt: skip
def test_a_skipped_step_moves_nothing(stage, accumulate, settings, value):
    """deepspeedai/DeepSpeed#8415, deepspeedai/DeepSpeed#8417: the schedule moved on while steps were skipped, unseen.

    One row of one device is bad. Bitwise: good, bad, good is good, good.
    """
    tx = optax.adam(optax.linear_schedule(0.0, 0.1, 5))
    config = {"stage": stage, "accumulate": accumulate, "allow_whole": True, **settings}
    good = [odd_batch(16, 0), odd_batch(16, 1)]
    ends, skipped = [], []
    for batches in ([good[0], spoil(odd_batch(16, 2), 11, value), good[1]], good):
        _, state, step = prepare(odd_params(), tx, **config)
        for batch in batches:
            before = jax.device_get((state.params, state.opt_state, state.step))
            state, metrics = step(state, batch)
            skipped.append(int(metrics["skipped"]))
            if skipped[-1]:
                assert_same(jax.device_get((state.params, state.opt_state, state.step)), before)
                assert not np.isfinite(float(metrics["grad_norm"]))
        ends.append(jax.device_get((state.params, state.opt_state, state.step)))
    assert_same(*ends)
    assert skipped == [0, 1, 0, 0, 0]
    assert int(state.step) == int(state.opt_state[0].count) == int(state.opt_state[1].count) == 2


def test_good_bad_good_gives_the_parameters_of_two_steps():
    """deepspeedai/DeepSpeed#8415: the numbers of plain optax on the two good batches."""
    tx = optax.adam(optax.linear_schedule(0.0, 0.1, 5))
    batches = [odd_batch(16, 0), odd_batch(16, 1)]
    right, opt_state, _, _ = reference.train(tx, odd_params(), batches)
    batches.insert(1, spoil(odd_batch(16, 2), 0, np.nan))
    state, _, _ = train_zero(tx, odd_params(), batches, skip_nonfinite=True, allow_whole=True)
    assert_close(jax.device_get((state.params, state.opt_state)), jax.device_get((right, opt_state)))


@pytest.mark.parametrize("name", ["MultiSteps", "muon", "schedule_free", "inject", "noise", "prodigy"])
def test_every_kind_of_optimizer_state_stays(name):
    """deepspeedai/DeepSpeed#8417: counters, micro-step accumulators, keys and copies of parameters too."""
    tx = {
        "MultiSteps": optax.MultiSteps(optax.adam(1e-2), 2),
        "muon": optax.contrib.muon(1e-2),
        "schedule_free": optax.contrib.schedule_free_adamw(1e-2),
        "inject": optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.01, 0.1, 5)),
        "noise": optax.chain(optax.add_noise(0.1, 0.1, jax.random.key(1)), optax.sgd(0.1)),
        "prodigy": optax.contrib.prodigy(),
    }[name]
    _, state, step = prepare(even_params(), tx, skip_nonfinite=True)
    state, _ = step(state, even_batch())
    before = jax.device_get(jax.tree.map(plain, (state.params, state.opt_state)))
    state, metrics = step(state, spoil(even_batch(), 3, np.nan))
    assert metrics["skipped"]
    assert_same(jax.device_get(jax.tree.map(plain, (state.params, state.opt_state))), before)
    state, metrics = step(state, even_batch(16, 1))
    assert not metrics["skipped"]
    assert not np.array_equal(*(jax.tree.leaves(tree)[-1] for tree in (before, jax.device_get(state.params))))


def plain(leaf):
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def test_statistics_of_a_skipped_batch_are_not_kept():
    """deepspeedai/DeepSpeed#8415: BatchNorm's running mean would stay NaN for ever."""
    case, tx = CASES["cnn"], optax.adam(1e-2)
    plan = zerojax.make_plan(case.init, tx, make_mesh(), ZeroConfig(skip_nonfinite=True))
    state, step = (
        zerojax.init_state(case.init, tx, plan, jax.random.key(0)),
        zerojax.make_train_step(case.loss, tx, plan),
    )
    state, _ = step(state, case.batch(0))
    before = jax.device_get((state.params, state.opt_state, state.model_state))
    bad = case.batch(1)
    bad["x"][5] = np.nan
    state, metrics = step(state, bad)
    assert metrics["skipped"]
    assert_same(jax.device_get((state.params, state.opt_state, state.model_state)), before)


def test_gradients_that_are_not_finite_are_found_wherever_they_are():
    for value in (np.nan, np.inf, -np.inf):
        assert not all_finite([jnp.ones(3), jnp.ones((2, 2)).at[1, 0].set(value)])
    assert all_finite([jnp.full(4, 3e38), jnp.float32(-3e38)])  # their norm is not
    assert all_finite([])


def test_a_finite_gradient_whose_norm_overflows_is_no_overflow():
    def loss(params, batch):
        return jnp.mean(batch) * jnp.sum(params["w"])

    _, state, step = prepare({"w": jnp.zeros(8)}, optax.sgd(1e-25), loss, skip_nonfinite=True)
    state, metrics = step(state, np.full(8, 1e25, np.float32))
    assert not metrics["skipped"]
    np.testing.assert_allclose(state.params["w"], np.full(8, -1.0), rtol=1e-6)


def test_without_the_setting_nothing_is_skipped():
    _, state, step = prepare(even_params(), optax.sgd(0.1))
    state, metrics = step(state, spoil(even_batch(), 3, np.nan))
    assert state.loss_scale is None
    assert set(metrics) == {"loss", "grad_norm", "step"}
    assert np.isnan(np.asarray(state.params["w1"])).any()


@pytest.mark.parametrize("stage", [0, 3])
def test_the_state_is_not_held_twice(stage):
    """The step writes into the memory of the state it is given, and needs at most the gradient beside it."""
    needs = []
    for settings in ({}, {"loss_scale": True}):
        plan, _, step = prepare({"w": jnp.ones((64, 1024))}, optax.adam(1e-2), slope, stage=stage, **settings)
        rows = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=plan.batch_sharding)
        needs.append(zerojax.report(step, plan.abstract_state, rows).memory)
        state = plan.bytes_per_device() - 8 - 4 * bool(settings)  # the key is returned as it is, the scale too
        assert needs[-1].alias >= state - 64
    assert needs[1].temp - needs[0].temp <= plan.bytes_per_device("params") + 1024


def slope(params, batch):
    return jnp.mean(batch) * jnp.sum(params["w"] ** 2)


# ---- no way out ----


@pytest.mark.parametrize("settings", [
    {"loss_scale": LossScale(initial=16, patience=3)}, {"loss_scale": LossScale(initial=16, patience=3, hysteresis=2)},
    {"loss_scale": LossScale(initial=1, growth_factor=1, backoff_factor=1, patience=7)},
])  # fmt: skip
def test_a_run_that_is_stuck_is_told(settings):
    """deepspeedai/DeepSpeed#697: every step was skipped for ever without a word."""
    scale = settings["loss_scale"]
    _, state, step = prepare(even_params(), optax.adam(1e-2), **settings)
    before, bad, seen = jax.device_get((state.params, state.opt_state)), spoil(even_batch(), 3, np.inf), []

    def train(state):
        while True:
            state, metrics = step(state, bad)
            seen.append(
                {name: metrics[name].item() for name in ("loss_scale", "skipped", "stuck", "step")} | {"state": state}
            )

    with pytest.raises(FloatingPointError, match=f"{scale.patience} steps in a row had gradients that are not finite"):
        train(state)
    down = [s["loss_scale"] for s in seen]
    first = 4 + (scale.hysteresis - 1) if scale.backoff_factor < 1 else 0  # the first overflow at the minimum
    assert len(seen) == first + scale.patience - 1 + 8
    assert [s["stuck"] for s in seen] == [max(0, i - first + 1) for i in range(len(seen))]
    assert down[first:] == [1.0] * (len(seen) - first)
    assert all(s["skipped"] and s["step"] == 0 for s in seen)
    last = seen[-1]["state"]
    assert_same(jax.device_get((last.params, last.opt_state)), before)
    state, metrics = step(last, even_batch())  # the state was not lost, and good data help
    assert not metrics["skipped"]
    assert int(metrics["stuck"]) == 0


def test_good_steps_between_overflows_are_no_standstill():
    _, state, step = prepare(
        even_params(), optax.sgd(0.0), loss_scale=LossScale(initial=1, patience=2, growth_interval=99)
    )
    for turn in range(24):
        state, metrics = step(state, even_batch() if turn % 2 else spoil(even_batch(), 0, np.nan))
        assert int(metrics["stuck"]) == (turn + 1) % 2


def test_steps_do_not_wait_for_each_other():
    """Only the count of eight steps before is read."""

    class Count:
        def __init__(self, number):
            self.number = number

        def copy_to_host_async(self):
            pass

        def __int__(self):
            read.append(self.number)
            return 0

    watch, read = type(prepare(even_params(), optax.sgd(0.1), skip_nonfinite=True)[2].watch)(LossScale()), []
    for number in range(12):
        watch.check()
        watch.add(Count(number))
    assert read == [0, 1, 2, 3]  # by the calls 8 to 11


# ---- the state ----


def test_the_state_goes_through_everything():
    plan, state, step = prepare(even_params(), optax.adam(1e-2), stage=3, loss_scale=LossScale(initial=2.0**12))
    abstract = plan.abstract_state
    assert jax.tree.map(lambda a: (a.shape, a.dtype), abstract) == jax.tree.map(lambda a: (a.shape, a.dtype), state)
    assert jax.tree.structure(plan.state_shardings) == jax.tree.structure(state)
    through = jax.jit(lambda s: s)(state)
    assert jax.tree.structure(through) == jax.tree.structure(state)
    assert plan.bytes_per_device() == sum(
        leaf.addressable_shards[0].data.nbytes if hasattr(leaf, "nbytes") else 0 for leaf in jax.tree.leaves(state)
    )  # fmt: skip
    state, _ = step(state, even_batch())
    for stage in (1, 0):
        other = plan.with_stage(stage)
        state = jax.device_put(state, other.state_shardings)
        state, metrics = zerojax.make_train_step(reference.loss_fn, optax.adam(1e-2), other)(state, even_batch())
    assert float(metrics["loss_scale"]) == 2.0**12
    assert int(state.loss_scale.good_steps) == 3
    assert "loss scaled by 4096 at first" in str(plan)
    assert zerojax.make_eval_step(reference.loss_fn, other)(state, even_batch())["loss"].shape == ()


def test_a_saved_scale_comes_back(tmp_path):
    """deepspeedai/DeepSpeed#762: what a run needs to go on as if it had not stopped."""
    checkpoints = pytest.importorskip("orbax.checkpoint")
    config = {"loss_scale": LossScale(initial=64, growth_interval=2, hysteresis=3), "precision": "c=fp16"}
    batches = [even_batch(16, 0), spoil(even_batch(), 0, np.nan), *(even_batch(16, seed) for seed in (1, 2, 3))]
    plan, state, step = prepare(even_params(), optax.adam(1e-2), low_loss, **config)
    with checkpoints.StandardCheckpointer() as checkpointer:
        for number, batch in enumerate(batches):
            if number == 2:
                checkpointer.save(tmp_path / "state", state)
                checkpointer.wait_until_finished()
            state, metrics = step(state, batch)
        again = checkpointer.restore(tmp_path / "state", plan.abstract_state)
    for batch in batches[2:]:
        again, metrics_again = step(again, batch)
    values = jax.tree.map(plain, (state, metrics)), jax.tree.map(plain, (again, metrics_again))
    assert_same(*jax.device_get(values))
    assert int(again.loss_scale.hysteresis) == 3
    assert float(again.loss_scale.scale) == 128


def test_states_with_and_without_a_scale_are_told_apart():
    _, state, step = prepare(even_params(), optax.sgd(0.1))
    scaled, other, scaled_step = prepare(even_params(), optax.sgd(0.1), loss_scale=True)
    with pytest.raises(ValueError, match=r"the plan scales the loss .* made without.*first_scale"):
        scaled_step(state, even_batch())
    with pytest.raises(ValueError, match=r"the state has a loss_scale.*loss_scale=None"):
        step(other, even_batch())
    scale = zerojax.scaling.first_scale(scaled.config.scaling)
    moved = jax.device_put(dataclasses.replace(state, loss_scale=scale), scaled.state_shardings)
    assert float(scaled_step(moved, even_batch())[1]["loss_scale"]) == 2.0**16


# ---- other ways in ----

ASKED = {
    "loss_scale": {"loss_scale": True},
    "skip_nonfinite": {"skip_nonfinite": True},
    "rounding": {"precision": "p=bf16,rounding=stochastic"},
}


@pytest.mark.parametrize("name", ASKED)
def test_where_the_update_is_the_users_it_is_said(name):
    linen, nnx = pytest.importorskip("zerojax.linen"), pytest.importorskip("zerojax.nnx")
    plan, tx = prepare(even_params(), optax.sgd(0.1), **ASKED[name])[0], optax.sgd(0.1)
    key, words = jax.random.key(0), rf"leaves the update to you.*{name}.*make_train_step"
    with pytest.raises(ValueError, match=words):
        zerojax.value_and_grad(reference.loss_fn, plan)
    with pytest.raises(ValueError, match=words):
        linen.create_train_state(lambda key: even_params(), tx, plan, key, apply_fn=reference.forward)
    with pytest.raises(ValueError, match=words):
        nnx.create(lambda rngs: None, tx, plan, key)
    with pytest.raises(ValueError, match=words):
        nnx.value_and_grad(lambda model, batch: 0.0, plan)
