"""Reported bugs of partitioned optimizers: norms and products of shards, lost initial state, aliases, counters.

Tolerance 1e-5 relative: float32 sums in another order. Numbers without another source are those of one device.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizers
import orbax.checkpoint as ocp
import pytest
import reference
from optax import contrib
from reference import (
    assert_close,
    assert_same,
    even_batch,
    even_params,
    make_mesh,
    odd_batch,
    odd_params,
    prepare,
    wave,
)

import zerojax
from zerojax import accounting

EVEN = [even_batch(16, seed) for seed in range(3)]
ODD = [odd_batch(16, seed) for seed in range(5)]
OTHER_DIMS = {"w1": 0, "w2": 1}  # not those that the plan would choose


def run(tx, params, batches, loss=reference.loss_fn, **config):
    """``(state, losses)``; the state on the host."""
    state, losses, _ = reference.train_zero(tx, params, batches, loss, allow_whole=True, **config)
    return jax.device_get(state), losses


def check(tx, params, batches, right=None, tolerance=1e-5, **config):
    """As on one device, and as reported to be right."""
    state, losses = run(tx, params, batches, **config)
    twin = reference.train(tx, params, batches)
    assert_close((state.params, state.opt_state), jax.device_get(twin[:2]), tolerance)
    assert_close(losses, twin[2] if right is None else right)
    return state


# ---- norms and products of whole arrays ----


LAMB = (lambda: optax.lamb(0.02, weight_decay=0.01), [0.5587825775, 0.5316491723, 0.5057901144])
LARS = (lambda: optax.lars(0.5, weight_decay=0.01), [0.5587825775, 0.5673406720, 0.5403577089])
LONG = pytest.mark.long


@pytest.mark.parametrize(("case", "stage", "overrides"), [
    (LAMB, 1, OTHER_DIMS), (LARS, 3, {}), pytest.param(LAMB, 3, {}, marks=LONG),
    pytest.param(LARS, 2, OTHER_DIMS, marks=LONG),
])  # fmt: skip
def test_trust_ratios_are_of_whole_layers(case, stage, overrides):
    """deepspeedai/DeepSpeed#490, hpcaitech/ColossalAI#6431, intel/ipex-llm#2810: taken over a shard or a flat chunk."""
    make, losses = case
    check(make(), even_params(), EVEN, losses, stage=stage, overrides=overrides)


@functools.cache
def orthogonal(shape):
    """The first update of Muon for a given gradient: what one device makes of it."""
    tx = contrib.muon(0.05, muon_weight_dimension_numbers=last_two)
    grads = {"w": wave(shape, 3)}
    return jax.jit(lambda g: tx.update(g, tx.init(g), g)[0])(grads)["w"]


def last_two(params):
    return jax.tree.map(lambda p: contrib.MuonDimensionNumbers(p.ndim - 2, p.ndim - 1), params)


@pytest.mark.parametrize(("shape", "dim", "stage"), [
    ((32, 16), 0, 1), ((8, 32, 16), 0, 3), ((8, 32, 16), 1, 2), pytest.param((32, 16), 1, 3, marks=LONG),
    pytest.param((8, 32, 16), 2, 1, marks=LONG),
])  # fmt: skip
def test_muon_makes_whole_matrices_orthogonal(shape, dim, stage):
    """deepspeedai/DeepSpeed#8437, google-deepmind/optax#1660, mindspore-ai/hyper-parallel#513: it took shards."""
    tx = contrib.muon(0.05, muon_weight_dimension_numbers=last_two)
    loss = lambda p, rows: jnp.mean(rows) * jnp.sum(p["w"] * wave(shape, 3))  # noqa: E731 (its gradient is the wave)
    params = {"w": jnp.zeros(shape)}
    state, _ = run(tx, params, [jnp.ones(8)], loss, stage=stage, overrides={"w": dim})
    # The gradient has two singular values; five iterations enlarge the rounding of the others 3.4445**5 = 485 times.
    assert_close(state.params["w"], jax.device_get(orthogonal(shape)), 2e-4)
    if shape == (32, 16):  # shards apart: 0.427
        assert reference.norm(state.params) == pytest.approx(0.0776014694, rel=1e-5)
        found = np.linalg.svd(state.params["w"], compute_uv=False)
        np.testing.assert_allclose(found[:2], [0.0566933230, 0.0529891998], rtol=1e-5)


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=LONG)])
def test_whole_matrices_on_a_device_cost_muon_no_communication(stage):
    """mindspore-ai/hyper-parallel#513: partitioned along the layers, each device has whole matrices of some layers."""

    def sent(tx, overrides):
        plan, _, step = prepare({"w": wave((8, 32, 16), 1)}, tx, stacked, stage=stage, overrides=overrides)
        return accounting.report(step, plan.abstract_state, jax.ShapeDtypeStruct((8, 16), "float32")).wire_bytes

    def stacked(params, rows):
        layer = lambda x, w: (x + jnp.tanh(x @ w.T) @ w, None)  # noqa: E731
        return jnp.mean(jax.lax.scan(layer, rows, params["w"])[0] ** 2)

    muon = contrib.muon(0.05, muon_weight_dimension_numbers=last_two)
    assert sent(muon, {"w": 0}) == sent(optax.sgd(0.1), {"w": 0})


# ---- the state at its birth ----


@pytest.mark.parametrize("stage", [2, *(pytest.param(stage, marks=LONG) for stage in (0, 1, 3))])
def test_adagrad_starts_from_its_accumulator(stage):
    """huggingface/accelerate#4142: lost when the state was made for shards, first update 2.817 for 0.228."""
    losses = [0.5587825775, 0.5497720242, 0.5583174229]
    tx = optax.adagrad(0.1)
    check(tx, even_params(), EVEN, losses, stage=stage)
    _, state, step = prepare(even_params(), tx, stage=stage)
    state = jax.device_get(step(state, EVEN[0])[0])
    update = jax.tree.map(lambda a, b: a - b, state.params, jax.device_get(even_params()))
    assert reference.norm(update) == pytest.approx(0.2280544500, rel=1e-5)


@pytest.mark.parametrize("make", [
    lambda: optax.adagrad(0.1, initial_accumulator_value=0.5), lambda: optax.rmsprop(0.01, initial_scale=0.3),
    lambda: optax.rprop(0.01), lambda: optax.inject_hyperparams(optax.sgd)(0.1), lambda: contrib.muon(0.02),
    lambda: optax.yogi(0.01), lambda: contrib.prodigy(1.0), lambda: contrib.cocob(),
], ids=["adagrad", "rmsprop", "rprop", "inject", "muon", "yogi", "prodigy", "cocob"])  # fmt: skip
def test_state_is_born_with_the_values_of_init(make):
    """huggingface/accelerate#4142: zeros of the right shapes are another state for these."""
    _, state, _ = prepare(odd_params(), make(), stage=2, allow_whole=True)
    assert_close(jax.device_get(state.opt_state), jax.device_get(make().init(odd_params())), 1e-6)


ALIASING = {
    "prodigy": lambda: contrib.prodigy(0.1), "dog": lambda: contrib.dog(0.1), "dowg": lambda: contrib.dowg(0.1),
    "mechanize": lambda: contrib.mechanize(optax.sgd(0.1)), "cocob": lambda: contrib.cocob(),
    "schedule_free": lambda: contrib.schedule_free_sgd(0.1), "sam": lambda: contrib.sam(optax.sgd(0.1), optax.sgd(0.1)),
}  # fmt: skip
if hasattr(contrib, "madgrad"):
    ALIASING["madgrad"] = lambda: contrib.madgrad(0.1)


def buffers(tree) -> list[int]:
    return [s.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards]


@pytest.mark.parametrize("steps", [0, pytest.param(2, marks=LONG)])
@pytest.mark.parametrize("stage", [0, 3])
def test_states_that_are_the_parameters_get_memory_of_their_own(stage, steps):
    """google-deepmind/optax#1059, jax-ml/jax#9635: the first donated step raised, or hung."""
    tx = optimizers.abreast({name: make() for name, make in ALIASING.items()})
    _, state, step = prepare(optimizers.parameters(ALIASING), tx, optimizers.loss_fn, stage=stage, allow_whole=True)
    for i in range(steps + 1):
        held = buffers((state.params, state.opt_state))
        assert len(set(held)) == len(held)
        state = step(state, optimizers.rows(i))[0] if i < steps else state


@pytest.mark.parametrize("stage", [3, pytest.param(0, marks=LONG)])
def test_lookahead_trains_two_copies_of_the_parameters(stage):
    """google-deepmind/optax#1059: slow and fast parameters begin as one array."""
    tx = optax.lookahead(optax.sgd(0.1), 2, 0.5)
    params = optax.LookaheadParams.init_synced(even_params())
    loss = lambda p, batch: reference.loss_fn(p.fast, batch)  # noqa: E731
    state, losses = run(tx, params, EVEN, loss, stage=stage)
    plain = optax.GradientTransformation(tx.init, lambda grads, state, params: tx.update(grads.fast, state, params))
    twin = reference.train(plain, params, EVEN, loss)
    assert_close(tuple(state.params), jax.device_get(tuple(twin[0])))
    assert_close(losses, twin[2])


# ---- trees with holes ----


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=LONG)])
def test_a_transformation_for_each_kind_of_parameter(stage, tmp_path):
    """google/flax#5372, google-deepmind/optax#132, google/flax#1177: masked nodes broke specs, maps and checkpoints."""
    kinds = {"w1": "adam", "b1": "frozen", "w2": "muon", "b2": "frozen"}
    parts = {"adam": optax.adam(1e-2), "muon": contrib.muon(0.02), "frozen": optax.set_to_zero()}
    tx, losses = optax.partition(parts, kinds), [0.5587825775, 0.5505395532, 0.5387452841]
    state = check(tx, even_params(), EVEN, losses, stage=stage)
    for name in ("b1", "b2"):
        np.testing.assert_array_equal(state.params[name], even_params()[name])
    assert len(jax.tree.leaves(state.opt_state)) == 7  # no memory for frozen parameters

    plan, state, step = prepare(even_params(), tx, stage=stage)
    state, _ = step(state, EVEN[0])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        back = checkpointer.restore(tmp_path / "state", plan.abstract_state)
    assert_same(jax.device_get(back.opt_state), jax.device_get(state.opt_state))
    assert any(isinstance(node, optax.MaskedNode) for node in jax.tree.leaves(back.opt_state, is_leaf=is_masked))
    step(back, EVEN[1])


def is_masked(node):
    return isinstance(node, optax.MaskedNode)


@pytest.mark.parametrize("mask", [
    {"w1": True, "b1": False, "w2": True, "b2": False}, lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
], ids=["tree", "callable"])  # fmt: skip
@LONG
def test_weight_decay_by_mask(mask):
    """google-deepmind/optax#132: a mask as a tree and by a function of the parameters are the same."""
    check(optax.adamw(1e-2, weight_decay=0.3, mask=mask), even_params(), EVEN, stage=3)


# ---- hyperparameters and counters in the state ----


def test_hyperparameters_in_the_state():
    """google-deepmind/optax#415, #1532, #206: extra scalars, a counter off by one."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.01, 3, 10)
    tx = optax.inject_hyperparams(optax.adam)(schedule)
    plan, state, step = prepare(even_params(), tx, stage=2)
    used, losses = [], []
    for batch in EVEN:
        state, metrics = step(state, batch)
        used.append(float(state.opt_state.hyperparams["learning_rate"]))
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(used, [0.0, 0.01 / 3, 0.02 / 3], rtol=1e-6)
    np.testing.assert_allclose(losses, [0.5587825775, 0.5689336061, 0.5082919598], rtol=1e-6)
    assert int(state.opt_state.count) == 3
    plain = reference.train(optax.adam(schedule), even_params(), EVEN)[0]
    assert_close(jax.device_get(state.params), jax.device_get(plain), 1e-6)
    whole = [leaf for leaf in plan.opt_state if leaf.shape == ()]
    assert len(whole) >= 6
    assert {leaf.dim for leaf in whole} == {None}


@pytest.mark.parametrize("stage", [3, pytest.param(0, marks=LONG)])
def test_a_hyperparameter_can_be_set_between_two_steps(stage):
    """google-deepmind/optax#206: the learning rate is an array in the state that the user may replace."""
    tx = optax.inject_hyperparams(optax.sgd)(0.1)
    plan, state, step = prepare(even_params(), tx, stage=stage)
    state, _ = step(state, EVEN[0])
    before = jax.device_get(state.params)
    hyperparams = {**state.opt_state.hyperparams, "learning_rate": jax.device_put(jnp.float32(0), plan.replicated)}
    still = dataclasses.replace(state, opt_state=state.opt_state._replace(hyperparams=hyperparams))
    state, _ = step(still, EVEN[1])
    assert_same(jax.device_get(state.params), before)


@pytest.mark.parametrize(
    ("stage", "devices", "accumulate"),
    [
        (2, 2, 4),
        pytest.param(1, 8, 1, marks=LONG),
        pytest.param(0, 1, 4, marks=LONG),
        pytest.param(3, 4, 2, marks=LONG),
    ],
)
def test_schedules_count_steps_and_go_on_after_a_restart(stage, devices, accumulate):
    """deepspeedai/DeepSpeed#3875, huggingface/accelerate#662, huggingface/transformers#27710: the schedule restarted,
    or counted micro-batches, devices or epochs."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.05, 2, 6)
    tx = optax.inject_hyperparams(optax.sgd)(schedule)
    config = {"accumulate": accumulate, "mesh": make_mesh(devices), "allow_whole": True}
    _, state, step = prepare(odd_params(), tx, stage=stage, **config)
    used = []
    for i, batch in enumerate(ODD):
        if i == 3:  # a new process: the state from the host, at another stage
            host = jax.device_get(dataclasses.replace(state, rng=jax.random.key_data(state.rng)))
            plan, _, step = prepare(odd_params(), tx, stage=3 - stage, **config)
            host = dataclasses.replace(host, rng=jax.random.wrap_key_data(host.rng))
            state = jax.device_put(host, plan.state_shardings)
        state, metrics = step(state, batch)
        used.append(float(state.opt_state.hyperparams["learning_rate"]))
        assert int(metrics["step"]) == int(state.opt_state.count) == i + 1
    np.testing.assert_allclose(used, [0, 0.025, 0.05, 0.0426776717, 0.025], rtol=1e-6)
    assert_close(jax.device_get(state.params), reference.train(tx, odd_params(), ODD)[0])


# ---- accumulation by the optimizer ----


INNER = {
    "adafactor": lambda: optax.adafactor(1e-1, min_dim_size_to_factor=2),
    "adamw": lambda: optax.adamw(1e-1, mu_dtype=jnp.float32),
    "schedule_free": lambda: contrib.schedule_free_adamw(1e-1),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-1)),
}


@pytest.mark.parametrize("inner", [list(INNER)[:2], pytest.param(list(INNER)[2:], marks=LONG)], ids="-".join)
def test_multi_steps_with_bfloat16_parameters(inner):
    """google-deepmind/optax#377, #1039, #1038: a branch returned another dtype than the other."""
    tx = optimizers.abreast({name: optax.MultiSteps(INNER[name](), 2) for name in inner})
    params, config = optimizers.parameters(inner), {"stage": 3, "precision": "p=bf16", "allow_whole": True}
    _, state, step = prepare(params, tx, optimizers.loss_fn, **config)
    dtypes, born = jax.tree.map(lambda a: a.dtype, (state.params, state.opt_state)), jax.device_get(state.params)
    for i in range(4):
        state, _ = step(state, optimizers.rows(i))
        assert jax.tree.map(lambda a: a.dtype, (state.params, state.opt_state)) == dtypes
        if i == 0:
            assert_same(jax.device_get(state.params), born)  # the first of two changes nothing
    for name, own in state.opt_state.items():
        right = jax.eval_shape(optax.MultiSteps(INNER[name](), 2).init, born[name])  # float32 from optax 0.2.8 on
        ours, right = (jax.tree.leaves(state.acc_grads) for state in (own, right))
        assert {a.dtype for a in ours} == {a.dtype for a in right}
        assert int(own.gradient_step) == 2
        assert reference.difference(jax.device_get(state.params[name]), born[name]) > 0.05


# ---- the loss for the optimizer ----


def weighted(params, batch):
    """The mean over copies of the parameters."""
    losses = [reference.weighted_loss(copy, batch) for copy in params.values()]
    return zerojax.Loss(sum(loss.total for loss in losses) / len(losses), losses[0].weight)


@pytest.mark.parametrize(
    ("stage", "accumulate"), [(3, 2), pytest.param(0, 1, marks=LONG), pytest.param(1, 2, marks=LONG)]
)
def test_the_optimizer_is_given_the_loss_of_the_whole_batch(stage, accumulate):
    """Rows of unequal weight: neither a device's loss nor the mean of the devices' means."""
    parts = {
        "polyak": optax.polyak_sgd(10.0, f_min=0.3), "momo": contrib.momo(10.0),
        "multi_steps": optax.MultiSteps(optax.polyak_sgd(1.0), 2),
        "plateau": optax.chain(optax.sgd(0.1), contrib.reduce_on_plateau(0.5, 1, rtol=0.9)),
    }  # fmt: skip
    tx, seen, params = optimizers.abreast(parts), [], {name: odd_params() for name in parts}
    batch = {**odd_batch(16), "weight": np.repeat([1.0, 0.0], [11, 5]).astype(np.float32)}

    @jax.jit
    def twin(params, opt_state):
        mean = lambda p: jnp.mean(reference.per_row(p, odd_batch(16))[:11])  # noqa: E731
        value, grads = jax.value_and_grad(lambda p: sum(map(mean, p.values())) / len(p))(params)
        updates, opt_state = tx.update(grads, opt_state, params, value=value)
        return optax.apply_updates(params, updates), opt_state, value

    config = {"stage": stage, "accumulate": accumulate, "mesh": make_mesh(8 // accumulate)}
    state, losses = run(tx, params, [batch] * 3, weighted, **config)
    opt_state = tx.init(params)
    for _ in range(3):
        params, opt_state, value = twin(params, opt_state)
        seen.append(float(value))
    assert_close(losses, seen)
    assert_close((state.params, state.opt_state), jax.device_get((params, opt_state)))


# ---- averages of the parameters ----


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=LONG)])
def test_averages_of_partitioned_parameters(stage):
    """OpenRLHF/OpenRLHF#1357, pytorch/pytorch#117742, facebookresearch/fairscale#789: on a gathered copy, not written
    back."""
    plan, state, step = prepare(even_params(), optax.adam(1e-2), stage=stage)
    average = jax.tree.map(jnp.copy, state.params)
    update = jax.jit(lambda new, old: optax.incremental_update(new, old, 0.1), donate_argnums=1)
    for batch in EVEN:
        state, _ = step(state, batch)
        average = update(state.params, average)
        assert jax.tree.map(lambda a: a.sharding, average) == plan.state_shardings.params
    assert reference.norm(jax.device_get(average)) == pytest.approx(5.892269733931614, rel=1e-6)
    assert reference.difference(jax.device_get(average), even_params()) > 0.005
    metrics = zerojax.make_eval_step(reference.loss_fn, plan)(dataclasses.replace(state, params=average), EVEN[0])
    assert float(metrics["loss"]) == pytest.approx(float(reference.loss_fn(jax.device_get(average), EVEN[0])), rel=1e-5)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=LONG)])
def test_averages_in_the_optimizer_state(dtype):
    """facebookresearch/fairscale#789: an average of updates is partitioned and has the dtype that was asked for."""
    tx = optax.chain(optax.sgd(0.1), optax.ema(0.9, accumulator_dtype=dtype))
    plan, state, _ = prepare(even_params(), tx, stage=3)
    assert {leaf.dim is None for leaf in plan.opt_state if leaf.shape} == {False}
    assert {a.dtype.name for a in jax.tree.leaves(state.opt_state[1].ema)} == {dtype}
    check(tx, even_params(), EVEN, stage=3, tolerance=1e-5 if dtype == "float32" else 1e-2)


# ---- where arrays go that are shaped like no parameter ----


def test_state_of_other_shapes_is_partitioned_too():
    """Factored moments, stacks of parameters and integers; counters and keys stay whole."""

    def odd_state(params):
        int8 = jax.tree.map(lambda p: jnp.zeros((p.size // 8, 8), jnp.int8), params)
        return {"int8": int8, "keys": jax.random.split(jax.random.key(0), 3), "flags": jnp.zeros(64, bool)}

    own = optax.GradientTransformation(odd_state, lambda grads, state, params=None: (grads, state))
    tx = optax.chain(
        own, optax.scale_by_factored_rms(min_dim_size_to_factor=8), optax.scale_by_lbfgs(3), optax.scale(-0.1)
    )
    params = {"w": wave((64, 128), 1), "v": wave((128, 64), 2), "stack": wave((16, 64, 128), 3)}
    plan, _, step = prepare(params, tx, lambda p, rows: jnp.mean(rows) * optax.tree.norm(p, squared=True), stage=3,
                            overrides={"stack": 0})  # fmt: skip
    whole = [leaf for leaf in plan.opt_state if leaf.dim is None]
    assert max(leaf.size for leaf in whole) <= 3
    memory = {leaf.path: leaf.dim for leaf in plan.opt_state if leaf.path.endswith("memory/stack")}
    assert set(memory.values()) == {1}  # as the parameter, behind the memory's own dim
    state, _ = step(zerojax.init_state(lambda key: params, tx, plan, jax.random.key(0)), jnp.ones(8))
    assert set(accounting.live_bytes(state).values()) == {plan.bytes_per_device()}
