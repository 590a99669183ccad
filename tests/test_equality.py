"""Every stage trains as plain optax does on one device with the whole batch."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from allpairspy import AllPairs
from models import CASES
from reference import assert_close, make_mesh

import zerojax

STEPS = 4
# Float32 sums in another order differ by some 1e-7; four steps and division by small Adam moments add to that.
TWIN = 1e-5
# Stages 1, 2 and 3 do the same sums in almost the same order: 1e-6, but for the momentum of an attention's key matrix,
# whose gradient is a small difference of large numbers (1.0e-6 measured). Adam divides by the root of its second
# moment, a square: both enlarge what rounding leaves in small gradients.
STAGES = {"sgd": 2e-6, "adamw": 4e-6}


OPTIMIZERS = {
    # SGD shows a wrong scale, which Adam and clipping hide.
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-4, weight_decay=0.01)),
}
FACTORS = {
    "case": list(CASES),
    "devices": [1, 2, 4, 8],
    "accumulate": [1, 2, 4],
    "axis_types": ["auto", "explicit"],
    "optimizer": list(OPTIMIZERS),
}
PAIRS = [tuple(row) for row in AllPairs([*FACTORS.values(), list(range(4))])]
# In the whole product the two optimizers take turns.
PRODUCT = [(*row, list(OPTIMIZERS)[i % 2]) for i, row in enumerate(itertools.product(*list(FACTORS.values())[:-1]))]


@functools.cache
def train_twin(name: str, optimizer: str, parts: int):
    """Plain optax on one device; over ``parts`` micro-batches of strided rows where the model sees them singly."""
    case, tx = CASES[name], OPTIMIZERS[optimizer]()
    made = jax.jit(case.init)(jax.random.key(0))
    params, model_state = (made.params, made.model_state) if isinstance(made, zerojax.Variables) else (made, None)

    @jax.jit
    def step(params, opt_state, model_state, batch):
        losses, grads = [], []
        for i in range(parts):
            rows = jax.tree.map(lambda a, i=i: a[i::parts], batch)
            (loss, model_state), grad = jax.value_and_grad(case.twin, has_aux=True)(params, rows, model_state)
            losses.append(loss)
            grads.append(grad)
        grad = jax.tree.map(lambda *g: sum(g) / parts, *grads)
        updates, opt_state = tx.update(grad, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, model_state, sum(losses) / parts, optax.tree.norm(grad)

    opt_state, metrics = tx.init(params), []
    for seed in range(STEPS):
        params, opt_state, model_state, *metric = step(params, opt_state, model_state, case.batch(seed))
        metrics.append(jnp.stack(metric))
    return jax.device_get((params, opt_state, model_state, np.array(metrics)))


def train_zero(case, tx, plan: zerojax.Plan, state: zerojax.TrainState):
    """The same by the library: parameters, optimizer state, model state, losses and norms."""
    step, metrics = zerojax.make_train_step(case.loss, tx, plan), []
    state = jax.tree.map(jnp.copy, state)
    for seed in range(STEPS):
        state, metric = step(state, case.batch(seed))
        metrics.append(jnp.stack([metric["loss"], metric["grad_norm"]]))
    assert int(state.step) == int(metric["step"]) == STEPS
    return jax.device_get((state.params, state.opt_state, state.model_state, np.array(metrics)))


def check(name, devices, accumulate, axis_types, optimizer, stages):
    """These stages equal the twin, and 1, 2 and 3 each other."""
    case, tx = CASES[name], OPTIMIZERS[optimizer]()
    config = zerojax.ZeroConfig(stage=0, accumulate=accumulate, allow_whole=case.allow_whole)
    plan = zerojax.make_plan(case.init, tx, make_mesh(devices, axis_types == "explicit"), config)
    plans = {stage: plan.with_stage(stage) for stage in stages}
    born = {
        whole: zerojax.init_state(
            case.init, tx, next(p for s, p in plans.items() if (s == 0) == whole), jax.random.key(0)
        )
        for whole in {stage == 0 for stage in stages}
    }
    results = {stage: train_zero(case, tx, plan, born[stage == 0]) for stage, plan in plans.items()}
    twin = train_twin(name, optimizer, accumulate if case.splits else 1)
    for result in results.values():
        assert_close(result, twin, TWIN)
    for stage in set(stages) - {0, 1}:
        assert_close(results[stage], results.get(1, results[stage]), STAGES[optimizer])


@pytest.mark.parametrize((*FACTORS, "stage"), PAIRS)
def test_every_stage_equals_plain_optax(case, devices, accumulate, axis_types, optimizer, stage):
    check(case, devices, accumulate, axis_types, optimizer, [stage])


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("case", ["even", "masked"])
def test_stages_equal_each_other(case, optimizer):
    check(case, 8, 2, "auto", optimizer, [0, 1, 2, 3])


@pytest.mark.long
@pytest.mark.parametrize(tuple(FACTORS), PRODUCT)
def test_every_stage_equals_plain_optax_in_full(case, devices, accumulate, axis_types, optimizer):
    check(case, devices, accumulate, axis_types, optimizer, [0, 1, 2, 3])


def test_the_comparison_sees_a_wrong_scale():
    """The test of the test: a gradient that is larger by one in ten thousand is caught."""
    case, tx = CASES["even"], OPTIMIZERS["sgd"]()
    plan = zerojax.make_plan(case.init, tx, make_mesh())
    state = zerojax.init_state(case.init, tx, plan, jax.random.key(0))
    state, _ = zerojax.make_train_step(lambda p, b, rng: 1.0001 * case.loss(p, b, rng), tx, plan)(state, case.batch(0))
    right, _ = zerojax.make_train_step(case.loss, tx, plan)(
        zerojax.init_state(case.init, tx, plan, jax.random.key(0)), case.batch(0)
    )
    with pytest.raises(AssertionError, match="is off by"):
        assert_close(jax.device_get(state.opt_state), jax.device_get(right.opt_state), TWIN)


# ---- a user's loss ----


@pytest.mark.parametrize(("loss", "config"), [
    (reference.loss_fn, {"stage": 3}), (reference.weighted_loss, {"stage": 2, "accumulate": 4}),
    (lambda p, b: jnp.std(reference.forward(p, b["x"])), {"stage": 1}),
])  # fmt: skip
def test_a_loss_beside_one_device(loss, config):
    plan, *_ = reference.prepare(reference.even_params(), optax.sgd(0.1), **config)
    batch = {**jax.device_get(reference.even_batch(64)), "weight": np.arange(64.0, dtype="float32") % 3}
    found = zerojax.check_loss(loss, plan, batch, tolerance=1e-4)  # a small deviation is divided by
    assert len(found.differences) == 5
    assert str(found).startswith(f"stage {plan.config.stage} on 8 devices")


def test_a_loss_that_differs_is_told():
    plan, *_ = reference.prepare(reference.even_params(), optax.sgd(0.1), rows="apart")
    with pytest.raises(
        ValueError, match=r"(?s)loss or gradient differ by more than 1e-05.*gradient/w2.*apart, by the config"
    ):
        zerojax.check_loss(
            lambda p, b: jnp.std(reference.forward(p, b["x"])), plan, jax.device_get(reference.even_batch(64))
        )
