"""Low precision: sums, norms and clips are in float32 whatever the parameters and the loss are in.

Where the numbers are powers of two the right value is exact and the tolerance 1e-6 or none.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from reference import assert_close, even_batch, even_params, make_mesh, prepare

import zerojax

# ---- the accumulator ----

TERMS = np.array([1.0] + [2.0**-9] * 255, np.float32)  # each exact in bfloat16, the sum of any two not
MEAN = 1.498046875 / 256


def product(params, batch):
    return jnp.mean(batch.astype(params["w"].dtype)[:, None] * params["w"])


@pytest.mark.parametrize(("stage", "devices", "precision"), [
    (0, 1, "c=bf16"), (1, 8, "c=bf16"), (2, 8, "p=bf16,c=bf16"), (3, 1, "c=bf16,r=bf16"), (3, 8, "c=bf16"),
])  # fmt: skip
def test_micro_gradients_add_up_in_float32(stage, devices, precision):
    """deepspeedai/DeepSpeed#1800, deepspeedai/DeepSpeed#5154: a bfloat16 accumulator stays at 1, not 1.498."""
    config = {"stage": stage, "accumulate": 256 // devices, "precision": precision, "mesh": make_mesh(devices)}
    _, state, step = prepare({"w": jnp.ones(8)}, optax.sgd(0.0), product, **config)
    metrics = step(state, TERMS)[1]
    # the loss is a mean over eight equal columns, and each column's gradient an eighth
    assert float(metrics["grad_norm"]) == pytest.approx(MEAN / np.sqrt(8), rel=1e-6)
    assert float(metrics["loss"]) == pytest.approx(MEAN, rel=1e-6)
    assert metrics["loss"].dtype == metrics["grad_norm"].dtype == jnp.float32


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_handed_out_were_added_in_float32(stage):
    """deepspeedai/DeepSpeed#2352, deepspeedai/DeepSpeed#2768: and come in the dtype of the parameters."""
    config = {"stage": stage, "accumulate": 256, "precision": "c=bf16", "mesh": make_mesh(1)}
    plan, state, _ = prepare({"w": jnp.ones(8)}, optax.sgd(0.0), product, **config)
    _, grads = jax.jit(zerojax.value_and_grad(product, plan))(state.params, TERMS)
    assert grads["w"].dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(grads["w"]), MEAN / 8, rtol=1e-6)


def test_small_updates_reach_float32_parameters():
    """deepspeedai/DeepSpeed#5154: the parameters at rest are the master weights; a bfloat16 one would stay at 1."""
    _, state, step = prepare({"w": jnp.ones((8, 1))}, optax.sgd(2.0**-10), product, stage=3, precision="c=bf16")
    for _ in range(4):
        state, _ = step(state, np.ones(8, np.float32))
    np.testing.assert_array_equal(np.asarray(state.params["w"]), np.full((8, 1), 1 - 4 * 2.0**-13, np.float32))


# ---- norm and clip ----


def steep(params, batch):
    """Every gradient is 64."""
    return jnp.mean(batch.astype(params["w"].dtype)) * jnp.sum(params["w"] * 64)


@pytest.mark.parametrize(("stage", "precision"), [
    (0, "c=fp16"), (1, "p=fp16,c=fp16"), (2, "p=fp16,c=fp16,r=fp16"), (3, "p=fp16,c=fp16"), (3, "p=bf16,c=bf16,r=bf16"),
])  # fmt: skip
def test_norm_and_clip_do_not_overflow(stage, precision):
    """pytorch/pytorch#90028: 4096 gradients of 64; in float16 the norm is inf, and clipping by it moves nothing."""
    tx = optax.chain(optax.clip_by_global_norm(64.0), optax.sgd(1.0))
    _, state, step = prepare({"w": jnp.zeros(4096)}, tx, steep, stage=stage, precision=precision)
    state, metrics = step(state, np.ones(8, np.float32))
    assert float(metrics["grad_norm"]) == 4096
    assert metrics["grad_norm"].dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(state.params["w"], np.float32), np.full(4096, -1.0, np.float32))


@pytest.mark.parametrize("stage", [1, 3])
def test_norm_has_more_digits_than_the_parameters(stage):
    """pytorch/pytorch#90028: sqrt(2^17) is 362.03867; in bfloat16 it is 362."""

    def loss(params, batch):
        return jnp.mean(batch) * jnp.sum(params["w"].astype(jnp.float32))

    config = {"stage": stage, "precision": "p=bf16,c=bf16", "accumulate": 2}
    _, state, step = prepare({"w": jnp.zeros(2**17)}, optax.sgd(0.0), loss, **config)
    assert float(step(state, np.ones(16, np.float32))[1]["grad_norm"]) == pytest.approx(362.0386720, rel=1e-6)


@pytest.mark.parametrize("precision", ["p=bf16,c=bf16", "c=fp16"])
def test_norm_is_the_same_at_every_stage_in_low_precision(precision):
    """deepspeedai/DeepSpeed#1800: 1e-5 between the stages, as only float32 sums differ; 1 % to float32's own norm."""
    norms = []
    for stage in (0, 2, 3):
        config = {"stage": stage, "accumulate": 2, "precision": precision}
        _, _, norm = reference.train_zero(optax.sgd(0.1), even_params(), [even_batch(16)], **config)
        norms += norm
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)
    assert norms[0] == pytest.approx(0.7280805410, rel=1e-2)


@pytest.mark.parametrize("precision", ["c=fp16", "c=bf16"])
def test_a_loss_given_as_sum_does_not_overflow(precision):
    """pytorch/pytorch#90028: 2,048 rows a device, each with gradients of 64; only their mean fits into float16."""

    def loss(params, batch):
        rows = (batch.astype(params["w"].dtype) * jnp.sum(params["w"])).astype(jnp.float32)
        return zerojax.Loss(64 * jnp.sum(rows), len(batch))

    _, state, step = prepare({"w": jnp.zeros(8)}, optax.sgd(1.0), loss, stage=3, precision=precision)
    assert float(step(state, np.ones(2**14, np.float32))[1]["grad_norm"]) == pytest.approx(64 * np.sqrt(8), rel=1e-6)


# ---- dtypes stay ----

OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2, mu_dtype=jnp.float32),
    "adafactor": lambda: optax.MultiSteps(optax.adafactor(1e-2, min_dim_size_to_factor=4), 2),
    "clip_adam": lambda: optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), 2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_dtypes_of_the_state_never_change(name):
    """deepspeedai/DeepSpeed#1800: bfloat16 parameters under optimizers that work in float32, over several steps."""
    plan, state, step = prepare(even_params(), OPTIMIZERS[name](), stage=3, precision="p=bf16,c=bf16")
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, plan.abstract_state)
    for seed in range(3):
        state, _ = step(state, even_batch(16, seed))
        assert jax.tree.map(lambda leaf: leaf.dtype, state) == dtypes
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(state.params))
    born = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), even_params())
    assert reference.difference(state.params, born) > 1e-3


@pytest.mark.parametrize("stage", [3])
def test_low_precision_follows_plain_low_precision(stage):
    """deepspeedai/DeepSpeed#2352: float32 parameters, bfloat16 loss; the plain loop casts them itself.

    Tolerance 2 %: a bfloat16 gradient over two rows and one over sixteen are rounded otherwise, by 2^-8 each.
    """
    batches = [even_batch(16, seed) for seed in range(3)]

    def loss(params, batch):
        low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, batch))
        return reference.loss_fn(*low).astype(jnp.float32)

    state, losses, _ = reference.train_zero(
        optax.sgd(0.1), even_params(), batches, loss, stage=stage, precision="c=bf16"
    )
    params, _, right, _ = reference.train(optax.sgd(0.1), even_params(), batches, loss)
    assert losses == pytest.approx(right, rel=2e-2)
    moved, right = (jax.tree.map(lambda a, b: np.asarray(a) - b, p, even_params()) for p in (state.params, params))
    assert_close(moved, right, 2e-2)
