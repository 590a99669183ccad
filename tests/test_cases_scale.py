"""Averages: over rows, devices and micro-batches, with and without weights; schedules and evaluation count steps only.

Tolerance 1e-5 relative: float32 sums in another order. Numbers without another source are those of one device.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from allpairspy import AllPairs
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from reference import (
    assert_close,
    even_batch,
    even_params,
    make_grid,
    make_mesh,
    odd_batch,
    odd_params,
    prepare,
    train_zero,
)  # fmt: skip

import zerojax

LOSSES = [0.5705336332, 0.5940284729, 0.5618704557]  # odd, AdamW


# SGD shows a wrong scale, which Adam hides
OPTIMIZERS = {"adamw": optax.adamw(1e-2, weight_decay=0.01), "sgd": optax.sgd(0.1)}


# ---- accumulation ----

FACTORS = {"stage": range(4), "accumulate": [1, 2, 4, 8], "devices": [1, 2, 4, 8], "name": ["sgd", "adamw"]}
# sixteen rows; AllPairs builds rows from the left
PAIRS = [
    tuple(p) for p in AllPairs(list(FACTORS.values()), filter_func=lambda row: len(row) < 3 or row[1] * row[2] <= 16)
]


@pytest.mark.parametrize(tuple(FACTORS), PAIRS)
def test_accumulation_changes_nothing(stage, accumulate, devices, name):
    """deepspeedai/DeepSpeed#1107, deepspeedai/DeepSpeed#1488, deepspeedai/DeepSpeed#545 and
    huggingface/transformers#45305: k times too large or too small. All combinations are in test_equality.py."""
    batches, tx = [odd_batch(16, seed) for seed in range(3)], OPTIMIZERS[name]
    config = {"stage": stage, "accumulate": accumulate, "mesh": make_mesh(devices), "allow_whole": True}
    state, losses, norms = train_zero(tx, odd_params(), batches, **config)
    params, opt_state, right_losses, right_norms = reference.train(tx, odd_params(), batches)
    if name == "adamw":
        assert_close(losses, LOSSES)
    assert_close((losses, norms), (right_losses, right_norms))
    assert_close(jax.device_get(state.params), params)  # a sum for the mean moves SGD's by 0.075
    assert_close(jax.device_get(state.opt_state), opt_state, 1e-4)  # Adam's moments are small differences


@pytest.mark.parametrize(("stage", "devices"), [(1, 4), (2, 1), (3, 2)])
def test_every_micro_batch_counts(stage, devices):
    """allenai/open-instruct#1498, InfiniTensor/InfiniTrain#213: only the last counted, norm 1.615 for 0.456."""
    plan, state, _ = prepare(
        odd_params(), optax.sgd(1.0), stage=stage, accumulate=4, mesh=make_mesh(devices), allow_whole=True
    )
    loss, grads = jax.jit(zerojax.value_and_grad(reference.loss_fn, plan))(state.params, odd_batch(16))
    assert float(loss) == pytest.approx(LOSSES[0], rel=1e-5)
    assert reference.norm(grads) == pytest.approx(0.4557501202, rel=1e-5)
    assert_close(jax.device_get(grads), jax.grad(reference.loss_fn)(odd_params(), odd_batch(16)))


@pytest.mark.parametrize("stage", [1, 3])
def test_micro_batches_are_the_same_rows_on_every_mesh(stage):
    """InfiniTensor/InfiniTrain#213: a loss that is not linear in the micro-batch shows which rows it was given."""

    def loss(params, batch):
        return zerojax.Loss(jnp.sum(params["w"]), 1.0, {"square": lax.psum(batch["x"].sum(), "data") ** 2})

    batch = {"x": np.arange(16, dtype=np.float32)}
    right = np.mean([batch["x"][i::2].sum() ** 2 for i in range(2)])
    for devices in (1, 8):
        config = {"stage": stage, "accumulate": 2, "mesh": make_mesh(devices)}
        _, state, step = prepare({"w": jnp.zeros(8)}, optax.sgd(0.1), loss, **config)
        assert float(step(state, batch)[1]["square"]) == pytest.approx(right, rel=1e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_collectives_per_step(stage):
    """AI-Hypercomputer/maxtext#5056, pytorch/torchtitan#292: a reduction per micro-batch, hoisted gathers, per leaf."""
    plan, _, step = prepare(even_params(), optax.adam(1e-3), stage=stage, accumulate=4)
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=plan.batch_sharding), even_batch(32)
    )
    text = step.lower(plan.abstract_state, shapes).compile().as_text()

    def count(text):
        return [len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in ("all-gather", "reduce-scatter")]

    entry = count(text[text.index("\nENTRY") :])
    inside = [all_of - once for all_of, once in zip(count(text), entry, strict=True)]
    once_and_per_micro_batch = {1: ([1, 1], [0, 0]), 2: ([1, 0], [0, 1]), 3: ([0, 0], [2, 1])}
    assert (entry, inside) == once_and_per_micro_batch[stage]
    assert len(re.findall(r" all-reduce(?:-start)?\(", text)) <= 2  # loss and weight; the norm


# ---- weights ----

VALID = (1, 5, 0, 2, 8, 3, 7, 6)  # of eight tokens on each device; one has none


def masked_batch(counts=VALID):
    mask = np.concatenate([np.arange(8) < count for count in counts])
    return {**jax.device_get(odd_batch(64)), "weight": mask.astype(np.float32)}


@pytest.mark.parametrize(
    ("stage", "devices", "accumulate"), [(0, 8, 1), (1, 8, 2), (2, 4, 2), (3, 8, 1), (3, 4, 4), (2, 1, 8)]
)
def test_every_valid_token_has_the_same_weight(stage, devices, accumulate):
    """pytorch/torchtitan#2206, huggingface/transformers#34242: the mean of the devices' means."""
    batch = masked_batch()

    def twin(params, batch):
        return jnp.sum(reference.per_row(params, batch) * batch["weight"]) / 32

    config = {"stage": stage, "accumulate": accumulate, "mesh": make_mesh(devices), "allow_whole": True}
    state, losses, norms = train_zero(optax.sgd(0.1), odd_params(), [batch], reference.weighted_loss, **config)
    params, _, right, right_norms = reference.train(optax.sgd(0.1), odd_params(), [batch], twin)
    assert_close((losses, norms), (right, right_norms))
    assert_close(jax.device_get(state.params), params)
    rows = np.asarray(reference.per_row(odd_params(), batch) * batch["weight"]).reshape(8, 8).sum(1)
    assert abs(losses[0] - np.mean(rows / np.maximum(VALID, 1))) > 0.01


@pytest.mark.parametrize("kind", [np.bool_, np.int32, np.float16])
def test_weights_of_any_dtype(kind):
    """huggingface/transformers#34191: token counts are integers, masks booleans."""

    def loss(params, batch):
        rows = reference.per_row(params, batch)
        return zerojax.Loss(jnp.sum(rows, where=batch["weight"] != 0), jnp.sum(batch["weight"]))

    batch = masked_batch()
    _, right, _ = train_zero(optax.sgd(0.1), odd_params(), [batch], reference.weighted_loss, stage=1, allow_whole=True)
    batch["weight"] = batch["weight"].astype(kind)
    _, losses, _ = train_zero(optax.sgd(0.1), odd_params(), [batch], loss, stage=3, allow_whole=True)
    assert_close(losses, right)


def test_metrics_of_a_device_without_weight_do_not_count():
    """pytorch/torchtitan#2206: the thin device's own mean is 0 / 0, and has weight zero."""

    def loss(params, batch):
        value = reference.weighted_loss(params, batch)
        return zerojax.Loss(value.total, value.weight, {"error": value.total / value.weight})

    _, state, step = prepare(odd_params(), optax.sgd(0.1), loss, stage=3, allow_whole=True)
    metrics = step(state, masked_batch())[1]
    assert float(metrics["error"]) == pytest.approx(float(metrics["loss"]), rel=1e-6)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_batch_of_padding_only_moves_nothing(stage):
    """PrimeIntellect-ai/prime-rl#1960: no valid token anywhere is neither NaN nor a step."""
    batch = masked_batch((0,) * 8)
    state, losses, norms = train_zero(
        optax.sgd(0.1), odd_params(), [batch], reference.weighted_loss, stage=stage, accumulate=2, allow_whole=True
    )
    assert (losses, norms) == ([0.0], [0.0])
    reference.assert_same(jax.device_get(state.params), jax.device_get(odd_params()))


def test_value_and_grad_tells_sum_and_weight():
    """huggingface/transformers#34242: what a user needs for his own totals over steps."""
    plan, state, _ = prepare(odd_params(), optax.sgd(0.1), stage=2, accumulate=2, allow_whole=True)
    gradient = zerojax.value_and_grad(reference.weighted_loss, plan, has_aux=True)
    (loss, aux), _ = jax.jit(gradient)(state.params, masked_batch())
    assert float(aux.weight) == 32
    assert float(aux.total) == pytest.approx(32 * float(loss), rel=1e-6)


# ---- the scale of gradients under shard_map ----

ROWS = np.arange(1, 17, dtype=np.float32)
SLOPE = 187.0  # of the mean of (w x)^2 with respect to w: 2 w mean(x^2); 561 at w = 3


def weights(shape):
    return jnp.asarray(3 + np.arange(int(np.prod(shape))).reshape(shape), jnp.float32)


FORMS = {
    "plain": lambda w, x: jnp.mean(jnp.sum((w * x) ** 2, axis=range(1, w.ndim + 1))),
    "pmean": lambda w, x: lax.pmean(FORMS["plain"](w, x), "data"),
    "jit": lambda w, x: jax.jit(FORMS["plain"])(w, x),
    "remat": lambda w, x: jax.checkpoint(FORMS["plain"])(w, x),
    "scan": lambda w, x: lax.scan(lambda c, row: (c + jnp.sum((w * row) ** 2), None), 0.0, x)[0] / len(x),
    "cond": lambda w, x: lax.cond(x.sum() > 0, FORMS["plain"], lambda w, x: 0.0, w, x),
}


def check_slope(stage, mesh, shape, form="plain", base=None, accumulate=1, axes=("data",)):
    def loss(params, batch):
        return FORMS[form](params["w"], batch.reshape(-1, *[1] * len(shape)))

    params, tx = {"w": weights(shape)}, optax.sgd(1.0)
    config = zerojax.ZeroConfig(stage=stage, shard_axes=axes, accumulate=accumulate)
    plan = zerojax.make_plan(lambda key: params, tx, mesh, config, base_specs={"w": base})
    placed = jax.device_put(params, plan.state_shardings.params)
    _, grads = jax.jit(zerojax.value_and_grad(loss, plan))(placed, ROWS)
    assert_close(jax.device_get(grads), {"w": SLOPE * params["w"]}, 1e-6)  # small integers: all but exact
    assert float(jnp.ravel(grads["w"])[0]) == pytest.approx(561, rel=1e-6)
    assert grads["w"].sharding.is_equivalent_to(plan.state_shardings.params["w"], len(shape))


@pytest.mark.parametrize(("stage", "shape"), [(0, (8, 3)), (1, ()), (1, (8, 3)), (2, (8, 3)), (3, ()), (3, (8, 3))])
def test_gradients_are_of_the_mean_at_every_stage(stage, shape):
    """jax-ml/jax#3970, jax-ml/jax#21855: n times too large, or local; 4488 and 53856 for 561."""
    check_slope(stage, make_mesh(8), shape, accumulate=1 + stage % 2)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "plain"])
def test_gradients_are_of_the_mean_in_every_form_of_loss(form):
    """jax-ml/jax#21855: the factor depended on where the collective and the inner function stood."""
    check_slope(3, make_mesh(8, explicit=True), (8, 3), form)


@pytest.mark.parametrize(("stage", "shape", "names", "axes", "base", "kinds"), [
    (1, (2, 4), ("a", "b"), ("a", "b"), None, "auto"),
    (3, (2, 4), ("a", "b"), ("b", "a"), None, "explicit"),
    (2, (4, 2), ("data", "tensor"), ("data",), P(None, "tensor"), "auto"),
    (3, (4, 2), ("data", "tensor"), ("data",), P("tensor"), "mixed"),
    (0, (4, 2), ("data", "tensor"), ("data",), P(None, "tensor"), "explicit"),
    (3, (2, 2, 2), ("a", "b", "c"), ("c", "a", "b"), None, "mixed"),
    (2, (2, 2, 2), ("a", "b", "t"), ("a", "b"), P("t"), "auto"),
    (3, (2, 2, 2), ("a", "b", "c"), ("a", "c"), P(None, ("a", "c")), "auto"),
    (1, (2, 4), ("replica", "data"), ("data",), None, "auto"),
    (3, (1, 8), ("one", "data"), ("one", "data"), None, "auto"),
])  # fmt: skip
def test_gradients_are_of_the_mean_on_several_axes(stage, shape, names, axes, base, kinds):
    """jax-ml/jax#3970: divided twice or not at all, 4488 and 70.125 for 561."""
    check_slope(stage, make_grid(shape, names, kinds), (8, 8), base=base, accumulate=2 - stage % 2, axes=axes)


# ---- what counts steps ----


@pytest.mark.parametrize(("stage", "devices", "accumulate"), [(1, 1, 4), (2, 8, 4), (3, 8, 1)])
def test_schedules_move_once_per_step(stage, devices, accumulate):
    """huggingface/accelerate#662, vllm-project/speculators#900: once per micro-batch or device."""
    tx = optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(0.0, 0.1, 5))
    config = {"stage": stage, "accumulate": accumulate, "mesh": make_mesh(devices), "allow_whole": True}
    _, state, step = prepare(odd_params(), tx, **config)
    batches, rates = [odd_batch(32, seed) for seed in range(3)], []
    for batch in batches:
        state, metrics = step(state, batch)
        rates.append(float(state.opt_state.hyperparams["learning_rate"]))
    assert rates == pytest.approx([0.0, 0.02, 0.04], rel=1e-6)  # per micro-batch 0, 0.08, 0.1
    assert int(state.step) == int(metrics["step"]) == int(state.opt_state.count) == 3
    assert_close(jax.device_get(state.params), reference.train(tx, odd_params(), batches)[0])


def test_schedules_by_sixteen_rows():
    """huggingface/accelerate#662: the parameters that three steps of the schedule give."""
    tx = optax.sgd(optax.linear_schedule(0.0, 0.1, 5))
    batches = [odd_batch(16, seed) for seed in range(3)]
    state, _, _ = train_zero(tx, odd_params(), batches, stage=3, accumulate=2, allow_whole=True)
    np.testing.assert_allclose(state.params["b1"], [
        0.03742271662, -0.03267278522, -0.08586651832, -0.09831646085, -0.05742501467, 0.01198104490, 0.07300947607,
    ], rtol=1e-5)  # fmt: skip


@pytest.mark.parametrize("stage", [1, 3])
def test_evaluation_between_steps_changes_nothing(stage):
    """deepspeedai/DeepSpeed#3068, deepspeedai/DeepSpeed#4922: gathered copies stayed, or old weights were shown."""
    plan, state, step = prepare(even_params(), optax.adam(1e-2), stage=stage)
    evaluate, losses, seen, arrays = zerojax.make_eval_step(reference.loss_fn, plan), [], [], []
    batches = [zerojax.state.place_batch(even_batch(16, seed), plan) for seed in range(6)]
    for seed, evaluations in ((0, 2), (1, 1), (2, 0)):
        state, metrics = step(state, batches[seed])
        losses.append(float(metrics["loss"]))
        before = [leaf.unsafe_buffer_pointer() for leaf in shards(state)]
        seen.append([float(evaluate(state, batches[5])["loss"]) for _ in range(evaluations)])
        zerojax.gather_params(state.params, plan)
        assert [leaf.unsafe_buffer_pointer() for leaf in shards(state)] == before
        arrays.append(len(jax.live_arrays()))
        del before
    assert_close(losses, [0.5587825775, 0.5443706512, 0.5407691002])
    assert seen[0] == pytest.approx([0.5356667042] * 2, rel=1e-5)
    assert seen[0][0] == seen[0][1] != seen[1][0]
    assert arrays[1] == arrays[2]
    whole = zerojax.gather_params(state.params, plan)
    assert reference.norm(whole) == pytest.approx(5.8595773071, rel=1e-5)


def shards(state):
    return [leaf.addressable_shards[0].data for leaf in jax.tree.leaves((state.params, state.opt_state))]


def test_evaluation_weighs_rows_as_training_does():
    """pytorch/torchtitan#2206: a validation loss over padded rows; NamedSharding or host arrays alike."""
    plan, state, _ = prepare(odd_params(), optax.sgd(0.1), stage=3, accumulate=2, allow_whole=True)
    batch = reference.pad_rows(jax.device_get(odd_batch(19)), 8)  # 24 rows: no two micro-batches, and none are needed
    evaluate = zerojax.make_eval_step(reference.weighted_loss, plan)
    placed = jax.device_put(batch, NamedSharding(plan.mesh, P()))
    for given in (batch, placed):
        assert float(evaluate(state, given)["loss"]) == pytest.approx(0.5231629610, rel=1e-5)


# ---- losses that compute across the devices; what travels in float16 ----


def normalized(params, batch, axis=None):
    """A hidden layer normalized over all rows of the micro-batch, and a weighted mean."""
    h = batch["x"] @ params["w"]
    moments = jnp.mean(h, 0), jnp.mean(h**2, 0)
    mean, square = lax.pmean(moments, axis) if axis else moments
    h = (h - mean) / jnp.sqrt(square - mean**2 + 1e-3)
    each = jnp.mean((jax.nn.relu(h) @ params["v"] - batch["y"]) ** 2, -1) * batch["mask"]
    return zerojax.Loss(jnp.sum(each), jnp.sum(batch["mask"]))


def in_micro_batches(loss, params, batch, k):
    """The same on one device: sums over micro-batches of the same rows."""
    parts = [loss(params, jax.tree.map(lambda a, i=i: a[i::k], batch)) for i in range(k)]
    return sum(part.total for part in parts) / sum(part.weight for part in parts)


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("stage", range(4))
def test_cotangents_that_cross_devices_are_in_one_unit(stage, k):
    """Devices have other weights; one whole device has none. With a divisor of its own each, off by 4.6e-1."""
    x = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)
    batch = {"x": x, "y": np.sin(3 * x), "mask": (np.arange(32) < 27).astype(np.float32)}
    keys = jax.random.split(jax.random.key(0))
    params = {"w": jax.random.normal(keys[0], (16, 32)) / 4, "v": jax.random.normal(keys[1], (32, 16)) / 6}
    right = jax.jit(jax.value_and_grad(lambda p: in_micro_batches(normalized, p, batch, k)))(params)
    plan = zerojax.make_plan(
        lambda key: params, optax.sgd(0.1), make_mesh(4), zerojax.ZeroConfig(stage=stage, accumulate=k)
    )
    f = jax.jit(zerojax.value_and_grad(lambda p, b: normalized(p, b, "data"), plan))
    ours = jax.device_get(f(jax.device_put(params, plan.state_shardings.params), batch))
    assert_close(ours[0], right[0], 1e-6)
    for name, gradient in right[1].items():
        np.testing.assert_allclose(ours[1][name], gradient, rtol=0, atol=1e-6 * np.abs(gradient).max())


ROW_SUMS = {
    "mean": lambda p, x: jnp.mean(x * p["w"].sum()),
    "loss": lambda p, x: zerojax.Loss(jnp.sum(x * p["w"].sum()), x.shape[0]),
    "weights": lambda p, x: zerojax.Loss(jnp.sum(x * p["w"].sum()), jnp.sum(x != 0)),
}


@pytest.mark.parametrize("slope", [1.0, 40_000.0])
@pytest.mark.parametrize("kind", list(ROW_SUMS))
def test_what_travels_is_of_the_size_of_a_mean(kind, slope):
    """In float16, of which the largest is 65,504: sums over rows, and sums of means over devices, would be infinite."""
    x, tx = jnp.full((8 * 4 * 128,), slope), optax.sgd(1.0)
    for stage in range(4):
        for k in (1, 4):
            config = zerojax.ZeroConfig(stage=stage, accumulate=k, precision="r=fp16")
            plan = zerojax.make_plan(lambda key: {"w": jnp.zeros((16,))}, tx, make_mesh(), config)
            f = jax.jit(zerojax.value_and_grad(ROW_SUMS[kind], plan))
            gradient = f(jax.device_put({"w": jnp.zeros((16,))}, plan.state_shardings.params), x)[1]
            np.testing.assert_allclose(gradient["w"], np.full(16, slope), rtol=1e-3)  # half a step of float16
