"""Flax's fp8 operations: scales and histories of maxima are overwritten by their gradients, as on one device.

The twin is Flax's own `TrainState` with the whole batch. The maxima of the first layer's inputs and of all kernels are
those of the same numbers, and what is made of them is bitwise equal; others come out of float32 sums in another order.
Those could also decide how a number is rounded to fp8, by 1/8 of it; in these cases they do not.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from flax import nnx
from flax.linen import fp8_ops
from flax.training.train_state import TrainState
from reference import assert_close, assert_same, make_mesh

import zerojax
import zerojax.linen
import zerojax.nnx

OVERWRITTEN = "_overwrite_with_gradient"
ROWS, WIDTH, STEPS = 32, 16, 3
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-4))
TOLERANCE = 1e-5
DIRECT = functools.partial(fp8_ops.Fp8DirectDotGeneralOp, amax_history_length=4)  # shorter than a run is no matter


class MLP(nn.Module):
    """Layers of which the first may be used twice."""

    uses: int = 1
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x):
        first = nn.Dense(WIDTH, dot_general_cls=DIRECT, dtype=self.dtype)
        for _ in range(self.uses):
            x = nn.tanh(first(x))
        return nn.Dense(8, dot_general_cls=DIRECT, dtype=self.dtype)(x)


class Faked(nn.Module):
    """By rounding to fp8 and back, with an uneven layer."""

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(WIDTH + 1, dot_general_cls=fp8_ops.Fp8DotGeneralOp)(x))
        return nn.Dense(8)(x)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.tanh(nn.Dense(WIDTH, dot_general_cls=DIRECT)(x)), None


class Scanned(nn.Module):
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Layer) if self.remat else Layer
        axes = {"params": 0, OVERWRITTEN: 0}
        x, _ = nn.scan(layer, variable_axes=axes, split_rngs={"params": True}, length=3)()(x, None)
        return x[:, :8]


def batch_of(seed):
    x, y = reference.wave((ROWS, WIDTH), seed + 1, 2.0 + seed), reference.wave((ROWS, 8), seed + 5)
    return {"x": x, "y": y, "weight": jnp.asarray(np.arange(ROWS) % 5 > seed, jnp.float32)}


def errors(model, params, batch):
    return jnp.mean((model.apply(params, batch["x"]) - batch["y"]) ** 2, -1).astype(jnp.float32)


def mean_loss(model, params, batch):
    return jnp.mean(errors(model, params, batch))


def of_maxima(model, params, batch):
    """As Flax has it for layers that are used more than once: gradients are not added up, the largest counts."""
    meta = jax.tree.map(lambda a: jax.lax.convert_element_type(a, fp8_ops.fm32), params[OVERWRITTEN])
    return mean_loss(model, {**params, OVERWRITTEN: meta}, batch)


def weighted(model, params, batch):
    return zerojax.Loss((errors(model, params, batch) * batch["weight"]).sum(), batch["weight"].sum())


def init_of(model):
    return zerojax.linen.init_fn(model, jnp.ones((1, WIDTH)))


@functools.cache
def train_twin(model, loss_fn):
    def loss(params, batch):
        value = loss_fn(model, params, batch)
        return value.total / value.weight if isinstance(value, zerojax.Loss) else value

    @jax.jit
    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state.params, batch)
        return state.apply_gradients(grads=grads), value, optax.tree.norm(grads["params"])

    params = jax.jit(init_of(model))(jax.random.key(0))
    state, metrics = TrainState.create(apply_fn=model.apply, params=params, tx=TX), []
    for seed in range(STEPS):
        state, *metric = step(state, batch_of(seed))
        metrics.append([float(m) for m in metric])
    return jax.device_get(state), metrics


def plan_of(model, tx=TX, **config):
    return zerojax.make_plan(init_of(model), tx, make_mesh(), zerojax.ZeroConfig(allow_whole=True, **config))


def train(model, loss_fn=mean_loss, **config):
    plan = plan_of(model, **config)
    step = zerojax.make_train_step(functools.partial(loss_fn, model), TX, plan)
    state, metrics = zerojax.init_state(init_of(model), TX, plan, jax.random.key(0)), []
    for seed in range(STEPS):
        state, metric = step(state, batch_of(seed))
        metrics.append([float(metric["loss"]), float(metric["grad_norm"])])
    return jax.device_get(state), metrics


FAKED = pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated:DeprecationWarning")
LONG = pytest.mark.long


@pytest.mark.parametrize(("model", "loss", "config"), [
    (MLP(), weighted, {"stage": 0}),
    (MLP(), mean_loss, {"stage": 3, "accumulate": 2}),
    (MLP(uses=2), of_maxima, {"stage": 3, "remat": "unit"}),
    pytest.param(Faked(), mean_loss, {"stage": 2, "accumulate": 2}, marks=[FAKED, LONG]),
    pytest.param(Faked(), weighted, {"stage": 3}, marks=[FAKED, LONG]),
    pytest.param(Scanned(), of_maxima, {"stage": 3}, marks=LONG),
    pytest.param(Scanned(), mean_loss, {"stage": 2, "remat": "unit"}, marks=LONG),
    pytest.param(MLP(uses=2), of_maxima, {"stage": 1, "accumulate": 4}, marks=LONG),
    pytest.param(Scanned(remat=True), mean_loss, {"stage": 3, "accumulate": 2}, marks=LONG),
    pytest.param(MLP(), mean_loss, {"stage": 0}, marks=LONG),
    pytest.param(MLP(), mean_loss, {"stage": 1}, marks=LONG),
    pytest.param(MLP(), mean_loss, {"stage": 2, "accumulate": 2}, marks=LONG),
    pytest.param(MLP(), weighted, {"stage": 3}, marks=LONG),
])  # fmt: skip
def test_training_in_fp8_is_flax_on_one_device(model, loss, config):
    right, right_metrics = train_twin(model, loss)
    ours, metrics = train(model, loss, **config)
    assert_close(metrics, right_metrics, TOLERANCE)
    assert_close(ours.params["params"], right.params["params"], TOLERANCE)
    assert_close(ours.params[OVERWRITTEN], right.params[OVERWRITTEN], TOLERANCE)
    assert_close(ours.opt_state, right.opt_state, TOLERANCE)
    if isinstance(model, MLP) and model.uses == 1:
        first = [state.params[OVERWRITTEN]["Dense_0"]["Fp8DirectDotGeneralOp_0"] for state in (ours, right)]
        assert_same(*({name: meta[name] for name in ("input_amax_history", "input_scale")} for meta in first))
    history = jax.tree.leaves_with_path(ours.params[OVERWRITTEN])
    assert all(np.any(a != 0) for _, a in history)


def test_statistics_of_one_device_alone_are_seen_as_wrong(monkeypatch):
    """The test of the test: without the maximum over devices each would keep that of its own rows."""
    right, _ = train_twin(MLP(), mean_loss)
    monkeypatch.setattr(jax.lax, "pmax", lambda arrays, axes: arrays)
    ours, _ = train(MLP(), stage=1)
    with pytest.raises(AssertionError, match="is off by"):
        assert_close(ours.params[OVERWRITTEN], right.params[OVERWRITTEN], TOLERANCE)


def test_statistics_stay_float32_and_no_optimizer_sees_them():
    model = MLP(dtype="bfloat16")
    plan = plan_of(model, stage=3, precision="p=bf16,c=bf16,g=fp16,r=bf16", compute_dtypes={"*bias": "f32"})
    statistics = [leaf for leaf in plan.params if leaf.overwritten]
    assert len(statistics) == 12
    assert {(leaf.dim, leaf.dtype.name, leaf.why) for leaf in statistics} == {
        (None, "float32", "overwritten by its gradient")
    }
    assert not any(OVERWRITTEN in leaf.path for leaf in plan.opt_state)
    moments = [leaf.follows for leaf in plan.opt_state if leaf.follows]
    assert sorted(moments) == sorted(2 * [leaf.path for leaf in plan.params if not leaf.overwritten])
    seen = []

    def loss(params, batch):
        seen.extend(a.dtype.name for a in jax.tree.leaves(params[OVERWRITTEN]))
        return mean_loss(model, params, batch)

    step = zerojax.make_train_step(loss, TX, plan)
    state = zerojax.init_state(init_of(model), TX, plan, jax.random.key(0))
    state, _ = step(state, batch_of(0))
    found = state.params[OVERWRITTEN]["Dense_0"]["Fp8DirectDotGeneralOp_0"]["input_amax_history"]
    assert set(seen) == {found.dtype.name} == {"float32"}
    # the layer sees its input in bfloat16
    assert float(found[0]) == float(jnp.abs(batch_of(0)["x"].astype(jnp.bfloat16)).max())


def test_the_linen_way_and_existing_parameters():
    model = MLP()
    plan = plan_of(model, stage=3, accumulate=2)
    right, right_metrics = train_twin(model, mean_loss)
    gradient = zerojax.value_and_grad(functools.partial(mean_loss, model), plan)

    @jax.jit
    def step(state, batch):
        value, grads = gradient(state.params, batch)
        return state.apply_gradients(grads=grads), value, optax.tree.norm(grads["params"])

    given = jax.device_get(jax.jit(init_of(model))(jax.random.key(0)))
    state = zerojax.linen.create_train_state(
        init_of(model), TX, plan, jax.random.key(1), apply_fn=model.apply, params=given
    )
    for seed in range(STEPS):
        state, *metric = step(state, batch_of(seed))
        assert_close([float(m) for m in metric], right_metrics[seed], TOLERANCE)
    assert_close(jax.device_get((state.params, state.opt_state)), (right.params, right.opt_state), TOLERANCE)


# ---- what is refused ----


def test_other_trees_than_flax_has_are_refused():
    meta = {"scale": jnp.ones(1)}
    for params in (
        {"model": {"params": {"w": jnp.ones(8)}, OVERWRITTEN: meta}},
        {"params": {"w": jnp.ones(8)}, OVERWRITTEN: meta, "head": jnp.ones(8)},
    ):
        with pytest.raises(ValueError, match=rf"parameters with '{OVERWRITTEN}' must be .* look at \['(head|model/)"):
            reference.prepare(params, TX)


def test_statistics_are_not_partitioned():
    path = f"{OVERWRITTEN}/Dense_0/*/input_amax_history"
    with pytest.raises(ValueError, match="is overwritten by its gradient and stays whole"):
        plan_of(MLP(), overrides={path: 0})
    with pytest.raises(ValueError, match="match no parameter"):
        plan_of(MLP(), compute_dtypes={path: "bf16"})


def test_weights_that_vary_by_micro_batch_are_refused():
    plan = plan_of(MLP(), accumulate=2)
    step = zerojax.make_train_step(functools.partial(weighted, MLP()), TX, plan)
    with pytest.raises(ValueError, match=r"accumulate > 1, parameters that their gradient overwrites \(fp8\)"):
        step.lower(plan.abstract_state, jax.eval_shape(lambda: batch_of(0)))


def test_a_batch_without_weight_still_notes_its_maxima():
    """Trained parameters have no gradient then; the next values of the others are not made zero with it."""
    model = MLP()
    batch = {**batch_of(0), "weight": jnp.zeros(ROWS)}
    plan = plan_of(model)
    params = init_of(model)(jax.random.key(0))

    def of_sums(params):
        return weighted(model, params, batch).total

    right = jax.jit(jax.grad(of_sums, allow_int=True))(params)[OVERWRITTEN]
    loss, grads = jax.jit(zerojax.value_and_grad(functools.partial(weighted, model), plan))(
        jax.device_put(params, plan.state_shardings.params), batch
    )
    assert float(loss) == 0
    assert float(optax.tree.norm(grads["params"])) == 0
    assert_close(jax.device_get(grads[OVERWRITTEN]), right)
    assert max(float(jnp.max(a)) for a in jax.tree.leaves(right)) > 0


def test_nnx_has_no_place_for_them():
    def make(rngs):
        return nnx.bridge.ToNNX(nn.Dense(8, dot_general_cls=DIRECT), rngs=rngs).lazy_init(jnp.ones((1, WIDTH)))

    with pytest.raises(ValueError, match=r"input_amax_history.* overwritten by their gradients \(fp8\)"):
        zerojax.nnx.make_plan(make, TX, make_mesh())
