"""Mistakes: each a `ValueError` before compilation, which names what is wrong and what to do."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from reference import even_batch, even_params, loss_fn, make_mesh, odd_params, prepare

import zerojax
from zerojax import Precision, ZeroConfig, make_plan
from zerojax.cost.prediction import predict

SGD = optax.sgd(0.1)


def plan_of(params=None, tx=SGD, mesh=None, base_specs=None, **config):
    params = even_params() if params is None else params
    return make_plan(lambda key: params, tx, mesh or make_mesh(), ZeroConfig(**config), base_specs=base_specs)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"stage": 4}, "stage=4 is not one of 0, 1, 2, 3"),
        ({"stage": True}, "stage"),
        ({"stage": "3"}, "stage"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"shard_axes": ()}, "shard_axes"),
        ({"shard_axes": ("data", "data")}, "shard_axes"),
        ({"keep_whole_below": -1}, "keep_whole_below"),
        ({"precision": "c=int8"}, "int8.*bfloat16"),
        ({"precision": "x=bf16"}, "cannot read 'x=bf16'"),
        ({"precision": 16}, "precision=16"),
        ({"overrides": {"w1": "data"}}, "override 'w1'"),
    ],
)
def test_a_setting_out_of_range(arguments, words):
    with pytest.raises(ValueError, match=words):
        ZeroConfig(**arguments)


@pytest.mark.parametrize("name", ["floaty", "int32", "fp31", None, 3])
def test_a_wrong_dtype_name(name):
    with pytest.raises(ValueError, match=r"compute_dtype=.* is not a floating dtype"):
        Precision(compute_dtype=name)


def test_an_axis_that_the_mesh_lacks():
    with pytest.raises(ValueError, match=r"\['model'\] are not in the mesh, which has {'data': 8}"):
        plan_of(shard_axes=("data", "model"))


def test_leaves_that_cannot_be_partitioned():
    with pytest.raises(ValueError, match=r"w1 \(5, 7\) 140 B \(no free dim that 8 divides\).*allow_whole=True"):
        plan_of(odd_params())
    plan = plan_of(odd_params(), allow_whole=True)
    assert "no free dim that 8 divides" in str(plan)
    assert plan.with_stage(0).config.stage == 0


@pytest.mark.parametrize(
    ("config", "specs", "words"),
    [
        ({"overrides": {"w9": 0}}, None, "match no parameter"),
        ({"overrides": {"w1": 2}}, None, r"w1: there is no dim 2 in shape \(16, 32\)"),
        ({}, {"w1": P("tensor")}, "look at"),
        ({}, {"w1": P("tensor"), "b1": None, "w2": None, "b2": None}, "names axes"),
        ({}, {"w1": P(None, None, "data"), "b1": None, "w2": None, "b2": None}, "more entries"),
    ],
)
def test_overrides_and_specs_that_do_not_fit(config, specs, words):
    with pytest.raises(ValueError, match=words):
        plan_of(base_specs=specs, **config)


def test_base_specs_are_respected_and_not_collided_with():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"))
    specs = {"w1": P(None, "tensor"), "b1": P("tensor"), "w2": P("tensor", None), "b2": None}
    plan = plan_of(mesh=mesh, base_specs=specs, allow_whole=True)
    placed = {path: tuple(s.spec) for path, s in plan.state_shardings.params.items()}
    assert placed == {"w1": ("data", "tensor"), "b1": ("tensor",), "w2": ("tensor", "data"), "b2": ("data",)}
    with pytest.raises(ValueError, match=r"w1: dim 1 of shape .* is taken by axis 'tensor'"):
        plan_of(mesh=mesh, base_specs=specs, overrides={"w1": 1})


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("rows", [1, 12, 19])
def test_rows_that_do_not_divide(rows, k):
    """Physical-Intelligence/openpi#607: a crash deep inside, silently dropped rows, or padding in the mean."""
    _, state, step = prepare(even_params(), SGD, accumulate=k)
    batch = even_batch(rows)
    with pytest.raises(ValueError, match=rf"batch\['x'\] has {rows} rows .* 8 devices .*'data': 8"):
        step(state, batch)
    state, _ = step(state, even_batch(16))  # nothing was lost


def test_batches_of_other_forms():
    _, state, step = prepare(even_params(), SGD)
    with pytest.raises(ValueError, match=r"batch\['t'\] is a scalar"):
        step(state, {**even_batch(), "t": 1.0})
    with pytest.raises(ValueError, match="different numbers of rows"):
        step(state, {"x": even_batch(16)["x"], "y": even_batch(32)["y"]})
    with pytest.raises(ValueError, match="no arrays"):
        step(state, {})


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda p, b: b["x"] @ p["w1"], r"must return a scalar, a zerojax.Loss or \(loss, aux\)"),
        (lambda p, b: (jnp.float32(0), {}, {}), "must return a scalar"),
        (lambda p, b: jnp.int32(3), "floating scalar"),
        (lambda p, b: zerojax.Loss(jnp.ones(2), 1.0), "total has shape"),
        (lambda p, b: zerojax.Loss(jnp.sum(p["b1"]), jnp.ones(2)), "weight has shape"),
        (lambda p, b: zerojax.Loss(jnp.sum(p["b1"]), 1.0, {"loss": 1.0}), "step's own"),
    ],
)
def test_a_loss_that_is_no_scalar(loss, words):
    _, state, step = prepare(even_params(), SGD, loss)
    with pytest.raises(ValueError, match=words):
        step(state, even_batch())


def test_a_loss_with_other_arguments():
    plan = plan_of()
    with pytest.raises(ValueError, match=r"must take \(params, batch"):
        zerojax.make_train_step(lambda p: 0.0, SGD, plan)


def test_an_optimizer_that_does_not_fit_the_plan():
    plan = plan_of()
    for make in (
        lambda: zerojax.make_train_step(loss_fn, optax.adam(1e-3), plan),
        lambda: zerojax.init_state(lambda key: even_params(), optax.adam(1e-3), plan, jax.random.key(0)),
    ):
        with pytest.raises(ValueError, match="optimizer state of tx do not fit the plan"):
            make()


def test_the_state_of_another_plan():
    _, state, step = prepare(even_params(), SGD)
    _, whole, _ = prepare(even_params(), SGD, stage=0)
    with pytest.raises(ValueError, match=r"state\.params\['b1'\] is placed as .*device_put"):
        step(whole, even_batch())
    _, four, _ = prepare(even_params(), SGD, mesh=make_mesh(4))
    with pytest.raises(ValueError, match="placed as"):
        step(four, even_batch())
    _, other, _ = prepare({"w": jnp.zeros((16, 8))}, SGD, lambda p, b: jnp.sum(p["w"]))
    with pytest.raises(ValueError, match="another tree"):
        step(other, even_batch())
    with pytest.raises(ValueError, match="not placed"):
        step(dataclasses.replace(state, params=jax.tree.map(np.asarray, state.params)), even_batch())
    with pytest.raises(ValueError, match=r"zerojax\.TrainState"):
        step({"params": 0}, even_batch())
    with pytest.raises(ValueError, match=r"another tree|do not fit"):
        zerojax.gather_params(other.params, step.plan)


def test_a_donated_state_used_again():
    """jax-ml/jax#25346: 'Array has been deleted' named nothing."""
    _, state, step = prepare(even_params(), SGD)
    step(state, even_batch())
    with pytest.raises(ValueError, match="was donated: this train state went into an earlier step"):
        step(state, even_batch())
    with pytest.raises(ValueError, match="was donated"):
        zerojax.gather_params(state.params, step.plan)


def test_what_is_no_array():
    for made in ({"w": jnp.zeros(8), "f": jax.nn.relu}, {"w": "text"}):
        with pytest.raises(ValueError, match="tree of arrays"):
            plan_of(made)
    with pytest.raises(ValueError, match="complex"):
        plan_of({"w": jnp.zeros(8, jnp.complex64)})
    with pytest.raises(ValueError, match=r"jax\.sharding\.Mesh"):
        make_plan(lambda key: even_params(), SGD, jax.devices())


def test_a_model_state_of_another_form():
    def loss(params, batch, rng, model_state):
        return zerojax.Loss(jnp.sum(params["w"]), 1.0, model_state={"n": jnp.zeros(3)})

    def init(key):
        return zerojax.Variables({"w": jnp.ones(8)}, {"n": jnp.zeros(2)})

    plan = make_plan(init, SGD, make_mesh())
    state = zerojax.init_state(init, SGD, plan, jax.random.key(0))
    with pytest.raises(ValueError, match="model_state unlike"):
        zerojax.make_train_step(loss, SGD, plan)(state, even_batch())


def test_another_active_mesh_around_value_and_grad():
    explicit = make_mesh(explicit=True)
    plan = plan_of(mesh=explicit)
    params = jax.device_put(even_params(), plan.state_shardings.params)
    f = jax.jit(zerojax.value_and_grad(loss_fn, plan))
    with jax.set_mesh(explicit), pytest.raises(ValueError, match=r"jax\.set_mesh\(plan\.mesh\)"):
        f(params, even_batch())
    with jax.set_mesh(plan.mesh):
        assert jnp.isfinite(f(params, even_batch())[0])
    _, state, step = prepare(even_params(), SGD, mesh=explicit)
    with jax.set_mesh(explicit):  # the library's own steps do not mind
        step(state, even_batch())


@pytest.mark.parametrize(("call", "says"), [
    (lambda m: zerojax.make_plan(even_params(), optax.sgd(0.1), m), "lambda key: params"),
    (lambda m: zerojax.make_plan(lambda key: even_params(), optax.sgd(0.1), m, 3), r"ZeroConfig\(stage=3\)"),
    (lambda m: zerojax.init_state(*prepared(m)[:3], 0), r"jax\.random\.key\(0\)"),
    (lambda m: zerojax.value_and_grad(lambda params: 0.0, prepared(m)[2]), "not closed over"),
    (lambda m: zerojax.ZeroConfig(precision="bf16"), "'c=bf16'"),
])  # fmt: skip
def test_arguments_of_the_wrong_kind(call, says):
    with pytest.raises(ValueError, match=says):
        call(make_mesh())


def prepared(mesh):
    init_fn, tx = lambda key: even_params(), optax.sgd(0.1)
    return init_fn, tx, zerojax.make_plan(init_fn, tx, mesh)


def test_a_module_in_the_place_of_init_fn():
    with pytest.raises(ValueError, match=r"init_fn is a Dense, a Flax module.*zerojax\.linen\.init_fn"):
        zerojax.make_plan(nn.Dense(8), optax.sgd(0.1), make_mesh())


@pytest.mark.parametrize("remat", [jax.checkpoint_policies.save_only_these_names, jax.checkpoint, lambda: True])
def test_remat_that_is_no_policy(remat):
    with pytest.raises(ValueError, match=r"remat=<function .*must be called first"):
        zerojax.ZeroConfig(remat=remat)


def test_predictions_check_the_batch():
    plan, _, _ = prepare(even_params(), optax.adam(1e-3))
    for batch, words in ((even_batch(19), "cannot be divided"), (even_batch(0), "has no rows"), ({"x": 1.0}, "scalar")):
        with pytest.raises(ValueError, match=words):
            predict(loss_fn, plan, batch)


def test_reports_of_what_is_no_step():
    with pytest.raises(ValueError, match="not function: wrap it"):
        zerojax.report(lambda x: x, jnp.ones(2))
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(2))
    assert zerojax.report(lowered).memory.argument == 8


@pytest.mark.parametrize("words", [np.array(["a"] * 16), np.array([None] * 16), ["a"] * 16])
def test_batches_of_what_no_device_holds(words):
    _, state, step = prepare(even_params(), optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"batch\['s'\].* has dtype .*, which no device can hold"):
        step(state, {**even_batch(16), "s": words})


def test_init_fn_that_makes_numbers():
    with pytest.raises(ValueError, match=r"nothing else: blocks/scale is the float 1\.0; make"):
        zerojax.make_plan(lambda key: {"blocks": {"scale": 1.0}}, optax.sgd(0.1), make_mesh())


def test_tx_that_sums_over_the_mesh():
    summing = optax.stateless(lambda updates, params: jax.lax.psum(updates, "data"))
    plan = plan_of(tx=summing)
    with pytest.raises(ValueError, match="needs no collective over mesh axes: leave it out"):
        zerojax.make_train_step(loss_fn, summing, plan)


def test_explaining_what_cannot_be_traced():
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(2))
    for one in (lowered, lowered.compile()):
        with pytest.raises(ValueError, match="pass the step"):
            zerojax.explain(one, jnp.ones(2))


# ---- where numbers are not finite ----


def log_of_negative(params, batch):
    return jnp.mean(jnp.log(batch["x"] @ params["w1"] - 100.0))


def log_in_layers(params, batch):
    def layer(h, w):
        return jnp.log(h * w - 100.0), None

    return jnp.mean(jax.lax.scan(layer, batch["x"], jnp.stack([params["b2"][0], params["b2"][1]]))[0])


@pytest.mark.parametrize(("loss", "stage"), [(log_of_negative, 3), (log_in_layers, 1)])
def test_the_line_of_the_loss_that_makes_nan(loss, stage):
    """With ``jax_debug_nans``, as under ``jax.jit`` on one device."""
    _, state, step = prepare(even_params(), SGD, loss, stage=stage, accumulate=2 if stage == 3 else 1)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan") as raised:
        step(state, even_batch())
    assert raised.traceback[-1].path == Path(__file__)
    assert "jnp.log" in str(raised.traceback[-1].statement) or loss is log_in_layers
