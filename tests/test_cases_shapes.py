"""Leaves and batches that do not divide, degenerate leaves, many small ones.

Tolerance 1e-5 relative: float32 sums in another order; bitwise where nothing is computed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax.sharding import PartitionSpec as P
from reference import assert_close, assert_same, make_grid, make_mesh, odd_batch, odd_params, pad_rows, prepare, wave

import zerojax
from zerojax import collectives

# ---- odd leaves, odd worlds ----

LOSSES = [0.5705336332, 0.5940803289, 0.5619395971, 0.5464571714]
ADAMW, SGD = optax.adamw(1e-2), optax.sgd(0.1)


@pytest.mark.parametrize(
    ("world", "stage"), [(1, 3), (2, 1), (3, 3), (4, 2), (5, 3), (5, 1), (7, 2), (7, 3), (8, 0), (8, 3)]
)
def test_no_element_is_lost_in_any_world(world, stage):
    """deepspeedai/DeepSpeed#1380, deepspeedai/DeepSpeed#5105: 67 numbers, of which a floor split loses up to four."""
    batches = [pad_rows(jax.device_get(odd_batch(16, seed)), world) for seed in range(4)]
    config = {"stage": stage, "mesh": make_mesh(world), "allow_whole": True}
    plan, state, step = prepare(odd_params(), ADAMW, reference.weighted_loss, **config)
    assert_same(jax.device_get(zerojax.gather_params(state.params, plan)), jax.device_get(odd_params()))
    partitioned = {leaf.path for leaf in plan.params if leaf.dim is not None}
    assert partitioned == {3: {"b2", "w2"}, 5: {"w1"}, 7: {"b1", "w1", "w2"}}.get(world, set())
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert_close(losses, LOSSES)
    right = reference.train(ADAMW, odd_params(), [odd_batch(16, seed) for seed in range(4)])[0]
    assert_close(jax.device_get(zerojax.gather_params(state.params, plan)), right)


# ---- degenerate leaves ----

LEAVES = {"s": (), "one": (1,), "one_one": (1, 1), "three": (3,), "empty": (0, 4), "none": (8, 0), "w": (5, 3)}


def degenerate_params():
    return {name: wave(shape, seed, 0.3) + 1.0 for seed, (name, shape) in enumerate(LEAVES.items())}


def degenerate_loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"] * params["s"] + params["three"])
    extra = params["empty"].sum() + params["none"].sum() + params["one_one"][0, 0]
    return jnp.mean((hidden * params["one"] + extra - batch["y"]) ** 2)


@pytest.mark.parametrize(("stage", "devices", "accumulate"), [(0, 8, 1), (1, 1, 2), (2, 8, 1), (3, 3, 2), (3, 8, 2)])
def test_degenerate_leaves_train(stage, devices, accumulate):
    """pytorch/pytorch#132934, pytorch/pytorch#144045: scalars refused, tiny leaves with zero gradients at world 1."""
    batches, tx = [odd_batch(48, seed) for seed in range(3)], ADAMW
    config = {"stage": stage, "accumulate": accumulate, "mesh": make_mesh(devices), "allow_whole": True}
    state, losses, norms = reference.train_zero(tx, degenerate_params(), batches, degenerate_loss, **config)
    params, _, right_losses, right_norms = reference.train(tx, degenerate_params(), batches, degenerate_loss)
    assert_close((losses, norms), (right_losses, right_norms))
    assert_close(jax.device_get(state.params), params)
    moments = jax.device_get(state.opt_state[0].mu)
    assert all(np.all(moments[name] != 0) for name, shape in LEAVES.items() if np.prod(shape))


@pytest.mark.parametrize("params", [{}, {"z": jnp.zeros((0, 8))}, {"n": jnp.arange(16), "a": None}])
def test_nothing_to_train_is_no_accident(params):
    """komikndr/raylight#5: trees without one trained number."""
    state, losses, norms = reference.train_zero(
        optax.adam(1e-2),
        params,
        [{"x": np.ones((8, 2), np.float32)}],
        lambda p, b: b["x"].mean(),
        stage=3,
        allow_whole=True,
    )
    assert (losses, norms, int(state.step)) == ([1.0], [0.0], 1)


@pytest.mark.parametrize("shape", [(18, 4), (18,), (2, 3), (67,), (1,), (3, 8, 5), (9, 16)])
def test_shapes_are_the_users(shape):
    """NCAR/miles-credit#416: (18, 4) over eight devices came back as (24, 4)."""
    params, tx = {"w": wave(shape, 1)}, optax.adam(1e-2)
    plan = zerojax.make_plan(lambda key: params, tx, make_mesh(), zerojax.ZeroConfig(allow_whole=True))
    state = zerojax.init_state(lambda key: params, tx, plan, jax.random.key(0))
    assert_same(jax.device_get(zerojax.gather_params(state.params, plan)), jax.device_get(params))
    assert [leaf.shape for leaf in jax.tree.leaves(state.opt_state)] == [(), shape, shape]
    assert plan.bytes_per_device("params") == sum(s.data.nbytes for s in state.params["w"].addressable_shards[:1])


# ---- what does not divide says so ----


def test_a_leaf_that_cannot_be_divided_is_named():
    """jax-ml/jax#27808, LargeWorldModel/LWM#39: JAX raises late, or lets it pass whole."""
    params = {"block": {"kernel": jnp.arange(67.0)}, "other": jnp.zeros((8, 8))}
    with pytest.raises(ValueError, match=r"block/kernel \(67,\).*8.*allow_whole"):
        prepare(params, optax.adam(1e-2))
    prepare(params, optax.adam(1e-2), mesh=make_mesh(1))
    prepare(params, optax.adam(1e-2), stage=0)
    with pytest.raises(ValueError, match="block/kernel"):
        prepare(params, optax.adam(1e-2), stage=0)[0].with_stage(2)


def test_a_leaf_that_cannot_be_divided_may_stay_whole():
    """jax-ml/jax#27808: the library says which, and computes the right mean."""
    plan, state, _ = prepare({"w": jnp.arange(67.0), "v": jnp.zeros((67, 8))}, SGD, allow_whole=True)
    assert [(leaf.path, leaf.dim) for leaf in plan.params] == [("v", 1), ("w", None)]
    assert "w" in str(plan)
    assert "no free dim that 8 divides" in str(plan)
    mean = zerojax.make_eval_step(lambda p, b: {"mean": p["w"].mean()}, plan)
    assert float(mean(state, {"x": np.zeros(8)})["mean"]) == 33.0


@pytest.mark.parametrize(("specs", "config", "message"), [
    ({"w": P(None, "t")}, {}, "w: dim 1 .*67.*'t'"),
    ({"w": P(None, "data")}, {}, "w: dim 1 .*67.*4"),
    (None, {"overrides": {"w": 1}}, "w: dim 1 .*67.*4"),
    (None, {"overrides": {"w": 2}}, "w: there is no dim 2"),
    ({"w": P("no")}, {}, "w: .*'no'"),
    ({"w": P("t", None, None)}, {}, "w: .*more entries"),
    (None, {"shard_axes": ("data", "no")}, "no.*not in the mesh"),
])  # fmt: skip
def test_a_wish_that_cannot_be_met_is_named(specs, config, message):
    """LargeWorldModel/LWM#39: leaf, dim, size and axis."""
    mesh = make_grid((4, 2), ("data", "t"), "mixed")
    with pytest.raises(ValueError, match=message):
        prepare({"w": jnp.zeros((8, 67))}, SGD, mesh=mesh, base_specs=specs, **config)


# ---- rows ----


def test_rows_that_do_not_divide_are_refused_by_name():
    """Physical-Intelligence/openpi#607, jax-ml/jax#12185: a crash deep inside, or a silent drop (0.571 for 0.523)."""
    plan, state, step = prepare(odd_params(), SGD, stage=2, accumulate=2, allow_whole=True)
    gradient = jax.jit(zerojax.value_and_grad(reference.loss_fn, plan))
    host = jax.device_get(odd_batch(19))
    for given in (host, odd_batch(19)):
        for call in (step, lambda state, batch: gradient(state.params, batch)):
            with pytest.raises(ValueError, match=r"batch\['x'\] has 19 rows .* 8 devices .*'data': 8"):
                call(state, given)
    with pytest.raises(ValueError, match=r"24 rows.* 2 micro-batches.*16"):
        step(state, odd_batch(24))
    with pytest.raises(ValueError, match="has no rows"):
        step(state, odd_batch(0))
    with pytest.raises(ValueError, match="different numbers of rows"):
        step(state, {"x": host["x"][:16], "y": np.zeros((32, 3), np.float32)})
    with pytest.raises(ValueError, match=r"batch\['t'\] is a scalar"):
        step(state, {**odd_batch(16), "t": np.float32(1)})
    with pytest.raises(ValueError, match="no arrays"):
        step(state, {})
    state, _ = step(state, odd_batch(16))  # none of these has used up the state
    assert int(state.step) == 1


@pytest.mark.parametrize(("stage", "devices", "accumulate"), [(1, 8, 2), (3, 8, 1), (3, 5, 3)])
def test_padded_rows_of_weight_zero_do_not_count(stage, devices, accumulate):
    """jax-ml/jax#27808: 19 rows; over 24 the mean would be 0.416, without the last ones 0.571."""
    batch = pad_rows(jax.device_get(odd_batch(19)), devices * accumulate)
    config = {"stage": stage, "accumulate": accumulate, "mesh": make_mesh(devices), "allow_whole": True}
    state, losses, norms = reference.train_zero(SGD, odd_params(), [batch], reference.weighted_loss, **config)
    assert_close((losses, norms), ([0.5231629610], [0.4302819311]))
    assert_close(jax.device_get(state.params), reference.train(SGD, odd_params(), [odd_batch(19)])[0])


def test_another_number_of_rows_is_another_compilation():
    """Physical-Intelligence/openpi#607: a last batch that is smaller but divides; float64 is taken too."""
    _, state, step = prepare(odd_params(), SGD, stage=3, mesh=make_mesh(4), allow_whole=True)
    params = odd_params()
    for rows in (16, 4):
        batch = {name: np.asarray(a, np.float64) for name, a in odd_batch(rows).items()}
        state, metrics = step(state, batch)
        params, _, losses, _ = reference.train(SGD, params, [odd_batch(rows)])
        assert float(metrics["loss"]) == pytest.approx(losses[0], rel=1e-5)


# ---- many small leaves ----

SHAPES = [
    (8,), (16, 2), (3,), (), (24,), (2, 8), (7,), (8, 3), (4, 4), (40,),
    (1,), (5, 16), (3, 8, 2), (32,), (6,), (9, 8), (11,), (8, 8), (16,),
]  # fmt: skip


def small_params():
    return [wave(shape, seed, 0.2) for seed, shape in enumerate(SHAPES)]


def small_loss(params, batch):
    """Every element of every leaf has a gradient of its own."""
    parts = [jnp.tanh(batch["x"][:, i] * (leaf.ravel() @ wave((leaf.size,), 30 + i))) for i, leaf in enumerate(params)]
    return jnp.mean((sum(parts) - batch["y"]) ** 2)


def small_batch(seed):
    return {"x": wave((16, len(SHAPES)), 40 + seed), "y": wave((16,), 50 + seed)}


def flat(loss_and_grads):
    """As one vector: the smallest gradient is a difference of large ones and has fewer digits."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(jax.device_get(loss_and_grads))])


@pytest.mark.parametrize(
    ("stage", "reverse", "base"),
    [
        pytest.param(1, True, False, marks=pytest.mark.long),
        (2, False, True),
        pytest.param(3, True, False, marks=pytest.mark.long),
    ],
)
def test_what_travels_together_does_not_matter(stage, reverse, base, monkeypatch):
    """deepspeedai/DeepSpeed#2343, deepspeedai/DeepSpeed#6351: results hung on the bucket and the order of leaves."""
    params, batch, loss = small_params(), small_batch(0), small_loss
    specs = [P("other") if shape and shape[0] % 2 == 0 else None for shape in SHAPES] if base else None
    if reverse:
        params, loss = params[::-1], lambda params, batch: small_loss(params[::-1], batch)
    right = flat(jax.jit(jax.value_and_grad(loss))(params, batch))
    mesh = make_grid((4, 2), ("data", "other"), "mixed") if base else make_mesh(8)
    config = zerojax.ZeroConfig(stage=stage, accumulate=2, allow_whole=True)
    plan = zerojax.make_plan(lambda key: params, SGD, mesh, config, base_specs=specs)
    placed, results = jax.device_put(params, plan.state_shardings.params), []
    for limit in (1, 7, 64, 10**9):
        monkeypatch.setattr(collectives, "TOGETHER_BELOW", limit)
        results.append(flat(jax.jit(zerojax.value_and_grad(loss, plan))(placed, batch)))
        assert_close(results[-1], right)
        assert_close(results[-1], results[0], 1e-6)  # the same sums in another layout


@pytest.mark.parametrize("stage", [1, 3])
def test_many_small_leaves_train(stage):
    """deepspeedai/DeepSpeed#6351: two steps, to the optimizer's end."""
    batches, tx = [small_batch(seed) for seed in range(2)], ADAMW
    config = {"stage": stage, "allow_whole": True}
    state, losses, norms = reference.train_zero(tx, small_params(), batches, small_loss, **config)
    params, _, right_losses, right_norms = reference.train(tx, small_params(), batches, small_loss)
    assert_close((losses, norms), (right_losses, right_norms))
    assert_close(jax.device_get(state.params), params)
