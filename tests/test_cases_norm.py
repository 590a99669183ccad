"""The gradient norm and clipping: of the whole mean gradient, once, whatever the stage and the mesh.

Tolerance 1e-5 relative: float32 sums in another order. Numbers without another source are those of one device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from allpairspy import AllPairs
from jax.sharding import PartitionSpec as P
from reference import assert_close, even_batch, even_params, make_grid, make_mesh, odd_batch, odd_params, train_zero

NORM = {"even": 0.7280805410, "odd": 0.4557501202}  # of the mean gradient over 16 rows, seed 0
TREES = {"even": (even_params, even_batch), "odd": (odd_params, odd_batch)}
HALF = NORM["even"] / 2


IDLE = optax.chain(optax.clip_by_global_norm(1e9), optax.sgd(0.0))  # a clip that never acts, a step of length zero
CLIPPED = optax.chain(optax.clip_by_global_norm(HALF), optax.sgd(0.5))


def flat(tree):
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)])


def tiled(batch, times):
    """Twice the same rows have the same mean gradient."""
    return jax.tree.map(lambda a: np.concatenate([a] * times), batch)


FACTORS = {
    "stage": range(4),
    "devices": [1, 2, 4, 8],
    "accumulate": [1, 2, 4],
    "explicit": [False, True],
    "tree": ["even", "odd"],
}
PAIRS = [tuple(p) for p in AllPairs(list(FACTORS.values()))]


@pytest.mark.parametrize(tuple(FACTORS), PAIRS)
def test_norm_is_that_of_the_whole_mean_gradient(stage, devices, accumulate, explicit, tree):
    """deepspeedai/DeepSpeed#7837, deepspeedai/DeepSpeed#7749, modelscope/ms-swift#6815, pytorch/torchtitan#766: it
    depended on stage, rank and accumulation. All combinations of these models are in test_equality.py."""
    params, batch = TREES[tree]
    config = {"stage": stage, "accumulate": accumulate, "allow_whole": True, "mesh": make_mesh(devices, explicit)}
    _, state, step = reference.prepare(params(), IDLE, **config)
    state, metrics = step(state, tiled(batch(16), 2 if devices * accumulate > 16 else 1))
    seen = {float(shard.data) for shard in metrics["grad_norm"].addressable_shards}
    assert len(metrics["grad_norm"].addressable_shards) == devices
    assert len(seen) == 1
    assert seen.pop() == pytest.approx(NORM[tree], rel=1e-5)  # one even rank alone has 3.007, the ranks' mean is 3.232
    reference.assert_same(jax.device_get(state.params), jax.device_get(params()))


@pytest.mark.parametrize(("tree", "stage", "below"), [
    ("even", 1, 64), ("even", 3, 64), ("even", 2, 9), ("even", 3, 513), ("odd", 3, 22),
])  # fmt: skip
def test_leaves_that_stay_whole_count_once(tree, stage, below):
    """pytorch/pytorch#88955, mindspore-ai/hyper-parallel#526: small leaves counted once per device, 1.026 for 0.728."""
    params, batch = TREES[tree]
    plan, state, step = reference.prepare(params(), IDLE, stage=stage, keep_whole_below=below, allow_whole=True)
    whole = {leaf.path for leaf in plan.params if leaf.dim is None}
    assert whole >= {name for name, leaf in params().items() if leaf.size < below}
    assert float(step(state, batch(16))[1]["grad_norm"]) == pytest.approx(NORM[tree], rel=1e-5)


@pytest.mark.parametrize(("stage", "shape", "axes", "specs", "kinds"), [
    (3, (4, 2), ("data",), {"w1": P(None, "other"), "b1": P("other"), "w2": P("other"), "b2": None}, "auto"),
    (1, (4, 2), ("data",), {"w1": P("other", None), "b1": None, "w2": P(None, "other"), "b2": P("other")}, "mixed"),
    (2, (2, 4), ("data",), None, "explicit"),
    (3, (2, 4), ("data", "other"), None, "mixed"),
    (2, (2, 4), ("other", "data"), None, "auto"),
])  # fmt: skip
def test_norm_counts_every_part_once_on_two_axes(stage, shape, axes, specs, kinds):
    """pytorch/pytorch#88955: a second axis neither multiplies nor hides parts."""
    mesh = make_grid(shape, ("data", "other"), kinds)
    config = {"stage": stage, "shard_axes": axes, "mesh": mesh, "base_specs": specs, "allow_whole": True}
    state, losses, norms = train_zero(CLIPPED, even_params(), [even_batch(16)], **config)
    assert norms[0] == pytest.approx(NORM["even"], rel=1e-5)
    assert losses[0] == pytest.approx(0.5587825776, rel=1e-5)
    assert_close(jax.device_get(state.params), reference.train(CLIPPED, even_params(), [even_batch(16)])[0])


@pytest.mark.parametrize(("stage", "below"), [(1, 0), (2, 64), (3, 0)])
def test_clipping_is_by_the_norm_of_all_shards(stage, below):
    """pytorch/pytorch#170862, karpathy/llm.c#524: every shard had a coefficient of its own (0.364 for 0.182)."""
    state, _, _ = train_zero(CLIPPED, even_params(), [even_batch(16)], stage=stage, keep_whole_below=below)
    update = flat(jax.device_get(state.params)) - flat(even_params())
    # 2e-5: the update is the difference of parameters some twenty times as large, in float32
    assert np.linalg.norm(update) == pytest.approx(0.1820201211, rel=2e-5)
    gradient = flat(jax.grad(reference.loss_fn)(even_params(), even_batch(16)))
    cosine = -update @ gradient / (np.linalg.norm(update) * np.linalg.norm(gradient))
    assert cosine == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("clip", [
    lambda: optax.clip_by_block_rms(0.01), lambda: optax.adaptive_grad_clip(0.02), lambda: optax.scale_by_trust_ratio(),
], ids=["block_rms", "adaptive", "trust_ratio"])  # fmt: skip
def test_every_kind_of_clipping_sees_whole_leaves(clip):
    """facebookresearch/fairscale#98: norms by leaf, unit and tree are those of whole leaves."""
    batches = [even_batch(16, seed) for seed in range(2)]
    tx = optax.chain(clip(), optax.sgd(0.1))
    state, losses, norms = train_zero(tx, even_params(), batches, stage=3, accumulate=2)
    params, _, right_losses, right_norms = reference.train(tx, even_params(), batches)
    assert_close(jax.device_get(state.params), params)
    assert_close((losses, norms), (right_losses, right_norms))


@pytest.mark.parametrize(("stage", "devices", "accumulate"), [(0, 1, 8), (1, 2, 4), (2, 1, 4), (3, 4, 2)])
def test_clipping_is_once_on_the_mean_over_micro_batches(stage, devices, accumulate):
    """facebookresearch/lingua#59, google/praxis#6: each micro gradient was clipped, 0.352 for 0.713."""
    clip = 0.7130766262  # 0.6 of the norm
    tx = optax.chain(optax.clip_by_global_norm(clip), optax.sgd(1.0))
    config = {"stage": stage, "accumulate": accumulate, "mesh": make_mesh(devices), "allow_whole": True}
    state, _, norms = train_zero(tx, odd_params(), [odd_batch(8, 3)], **config)
    assert norms[0] == pytest.approx(1.1884610437, rel=1e-5)  # reported before the clip
    update = jax.tree.map(lambda a, b: np.asarray(a, np.float64) - b, jax.device_get(state.params), odd_params())
    assert reference.norm(update) == pytest.approx(clip, rel=1e-5)
    assert_close(jax.device_get(state.params), reference.train(tx, odd_params(), [odd_batch(8, 3)])[0])


def test_accumulation_by_the_optimizer_clips_once_too():
    """jenkspt/gpt-jax#2: `optax.MultiSteps` around the clip agrees with accumulation by the step."""
    clip = optax.chain(optax.clip_by_global_norm(0.7130766262), optax.sgd(1.0))
    batch = odd_batch(8, 3)
    parts = [jax.tree.map(lambda a, i=i: a[i::4], batch) for i in range(4)]
    tx = optax.MultiSteps(clip, 4)
    state, _, _ = train_zero(tx, odd_params(), parts, stage=3, mesh=make_mesh(2), allow_whole=True)
    assert_close(jax.device_get(state.params), reference.train(clip, odd_params(), [batch])[0])


def test_norm_of_a_weighted_loss_is_of_the_weighted_mean():
    """deepspeedai/DeepSpeed#7749: unequal weights on the devices; the norm is after the division, not before."""
    batch = reference.pad_rows(jax.device_get(odd_batch(19)), 8)
    _, losses, norms = train_zero(IDLE, odd_params(), [batch], reference.weighted_loss, stage=3, allow_whole=True)
    assert losses[0] == pytest.approx(0.5231629610, rel=1e-5)
    assert norms[0] == pytest.approx(0.4302819311, rel=1e-5)


def test_norm_shows_one_bad_number_on_one_device():
    """deepspeedai/DeepSpeed#7837: every device must see it, or they decide differently."""
    batch = jax.device_get(even_batch(16))
    batch["x"] = batch["x"].copy()
    batch["x"][5, 3] = np.nan
    _, state, step = reference.prepare(even_params(), IDLE, stage=3)
    metrics = step(state, batch)[1]
    assert all(np.isnan(shard.data) for shard in metrics["grad_norm"].addressable_shards)


def test_norm_leaves_out_what_is_not_trained():
    """modelscope/ms-swift#6815: integers and keys among the parameters have no gradient."""
    params = {**even_params(), "count": jnp.arange(16), "key": jax.random.key(3), "none": None}
    state, _, norms = train_zero(optax.adam(1e-2), params, [even_batch(16)], stage=3)
    assert norms[0] == pytest.approx(NORM["even"], rel=1e-5)
    np.testing.assert_array_equal(state.params["count"], np.arange(16))
