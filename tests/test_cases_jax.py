"""Random numbers, kinds of mesh, donation, placement and the Flax paths: what JAX does behind a user's back.

Tolerance 1e-5 relative: float32 sums in another order; bitwise where nothing is computed.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_close, assert_same, even_batch, even_params, make_grid, make_mesh, prepare

import zerojax
import zerojax.linen
import zerojax.nnx

# ---- random numbers ----

FIRST_ROW = [0, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 0, 1]


def random_params(key):
    mask = jax.random.bernoulli(key, 0.5, (16, 32)).astype(jnp.float32)
    return {"mask": mask, "w": jax.random.normal(key, (5, 24))}


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_initial_values_are_the_same_on_every_mesh(impl):
    """jax-ml/jax#21232, young-geng/scalax#6: bitwise."""
    key, tx = jax.random.key(7, impl=impl), optax.sgd(1e-3)
    right = jax.device_get(random_params(key))
    meshes = make_mesh(1), make_mesh(8, explicit=True), make_mesh(4), make_grid((2, 4), ("t", "data"))
    for stage, mesh in zip((3, 3, 0, 1), meshes, strict=True):
        plan = zerojax.make_plan(random_params, tx, mesh, zerojax.ZeroConfig(stage=stage))
        assert_same(jax.device_get(zerojax.init_state(random_params, tx, plan, key).params), right)
    if impl == "threefry2x32":
        assert right["mask"].sum() == 245
        assert right["mask"][0].tolist() == FIRST_ROW


ROWS = 16


def masks_of_two_steps(stage, accumulate=2, devices=8, key=None):
    """The dropout mask that each of 16 rows met, in two steps and an evaluation; and the parameters after the steps."""
    parts, tx = devices * accumulate, optax.sgd(0.1)

    def loss(params, batch, rng):
        mask = jax.random.bernoulli(rng, 0.5, (len(batch["row"]), 64)).astype(jnp.float32)
        seen = jnp.zeros((ROWS, 64)).at[batch["row"]].set(mask)
        return zerojax.Loss(jnp.mean(mask * params["w"]), 1.0, {"seen": seen})

    mesh, config = make_mesh(devices), zerojax.ZeroConfig(stage=stage, accumulate=accumulate, rows="apart")
    plan = zerojax.make_plan(lambda key: {"w": jnp.ones(64)}, tx, mesh, config)
    state = zerojax.init_state(lambda key: {"w": jnp.ones(64)}, tx, plan, jax.random.key(3) if key is None else key)
    step, evaluate = zerojax.make_train_step(loss, tx, plan), zerojax.make_eval_step(loss, plan)
    seen, batch = [], {"row": np.arange(ROWS)}
    for _ in range(2):
        state, metrics = step(state, batch)
        seen.append(np.asarray(metrics["seen"]) * parts)
    again = [np.asarray(evaluate(state, batch)["seen"]) * devices for _ in range(2)]
    assert_same(*again)
    return np.stack([*seen, again[0]]).astype(int), jax.device_get(state.params)


def test_dropout_differs_everywhere_and_not_by_stage():
    """jax-ml/jax#40232: one key in shard_map drops the same units on every device."""
    masks, params = masks_of_two_steps(3)
    assert set(np.unique(masks)) == {0, 1}
    assert len({row.tobytes() for row in masks.reshape(-1, 64)}) == 3 * ROWS
    assert 0.45 < masks.mean() < 0.55
    for stage in (0, 2):
        others, other_params = masks_of_two_steps(stage)
        assert_same(others, masks)
        assert_close(other_params, params)


@pytest.mark.parametrize(("accumulate", "devices"), [(16, 1), (4, 4)])
def test_dropout_differs_by_micro_batch_and_device(accumulate, devices):
    """jax-ml/jax#21663: with one row in each part, no two parts of two steps share a mask."""
    masks, _ = masks_of_two_steps(3, accumulate, devices)
    assert len({row.tobytes() for row in masks[:2].reshape(-1, 64)}) == 2 * ROWS


@pytest.mark.parametrize("key", [jax.random.PRNGKey(3), jax.random.key(3, impl="rbg")], ids=["legacy", "rbg"])
def test_keys_of_every_kind_train(key):
    """jax-ml/jax#40232: old uint32 keys and other generators."""
    masks, _ = masks_of_two_steps(1, 1, key=key)
    assert len({row.tobytes() for row in masks.reshape(-1, 64)}) == 3 * ROWS


# ---- kinds of mesh ----


def embedding_params(key):
    return {"table": jax.random.normal(key, (40, 16)), "w": jax.random.normal(key, (16, 8)), "bias": jnp.zeros(8)}


def embedding_loss(params, batch):
    hidden = params["table"][batch["token"]].mean(1) @ params["w"] + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(hidden, batch["label"]).mean()


def embedding_batch(seed):
    tokens = (np.arange(16 * 4) * (7 + seed)) % 40
    return {"token": tokens.reshape(16, 4), "label": np.arange(16) % 8}  # int64, as NumPy makes them


def train_embedding(mesh, stage=3, specs=None, place=lambda batch: batch):
    tx = optax.adamw(1e-2)
    plan = zerojax.make_plan(embedding_params, tx, mesh, zerojax.ZeroConfig(stage=stage), base_specs=specs)
    state = zerojax.init_state(embedding_params, tx, plan, jax.random.key(0))
    step, evaluate, losses = (
        zerojax.make_train_step(embedding_loss, tx, plan),
        zerojax.make_eval_step(embedding_loss, plan),
        [],
    )
    for seed in range(2):
        state, metrics = step(state, place(embedding_batch(seed)))
        losses.append(float(metrics["loss"]))
    losses.append(float(evaluate(state, place(embedding_batch(2)))["loss"]))
    return losses, jax.device_get(zerojax.gather_params(state.params, plan))


def check_embedding(*args, **options):
    losses, params = train_embedding(*args, **options)
    batches = [embedding_batch(seed) for seed in range(3)]
    right, _, right_losses, _ = reference.train(
        optax.adamw(1e-2), embedding_params(jax.random.key(0)), batches[:2], embedding_loss
    )
    assert_close(losses, [*right_losses, float(embedding_loss(right, batches[2]))])
    assert_close(params, right)


TENSOR = {"table": P(None, "t"), "w": P("t", None), "bias": None}


@pytest.mark.parametrize(("kinds", "stage", "specs"), [
    ("explicit", 0, None), ("explicit", 3, None), ("auto", 3, TENSOR), ("explicit", 2, TENSOR), ("mixed", 1, TENSOR),
])  # fmt: skip
def test_embeddings_train_on_meshes_of_every_kind(kinds, stage, specs):
    """google/flax#5209, jax-ml/jax#28542: a look-up raises under Explicit axes."""
    check_embedding(make_grid((4, 2), ("data", "t"), kinds), stage, specs)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_a_user_may_have_his_mesh_active(kind):
    """patrick-kidger/equinox#1175, vllm-project/tpu-inference#1917: key, plan, state, steps all under ``set_mesh``."""
    mesh = make_grid((8,), ("data",), kind)
    with jax.set_mesh(mesh):
        losses, params = train_embedding(mesh)
    assert_close((losses, params), train_embedding(make_mesh(8)))


def test_a_user_may_have_another_mesh_active():
    """google/flax#4180: parameters on a mesh that is not the active one."""
    with jax.set_mesh(make_grid((2, 4), ("a", "b"), "explicit")):
        losses, params = train_embedding(make_mesh(8))
    assert_close((losses, params), train_embedding(make_mesh(8)))


@pytest.mark.parametrize(("shape", "names", "kinds"), [
    ((8,), ("data",), "explicit"), ((2, 4), ("a", "b"), "auto"), ((8,), ("a",), "auto"), ((4,), ("data",), "auto"),
])  # fmt: skip
def test_an_active_mesh_that_a_users_own_jit_cannot_have_is_named(shape, names, kinds):
    """google/flax#4180: the gradient inside a jit of the user, who has another mesh active."""
    plan, state, _ = prepare(even_params(), optax.sgd(0.1))
    gradient = jax.jit(zerojax.value_and_grad(reference.loss_fn, plan))
    batch = jax.device_get(even_batch(16))
    with (
        jax.set_mesh(make_grid(shape, names, kinds)),
        pytest.raises(ValueError, match=r"active mesh .* is not the plan's"),
    ):
        gradient(state.params, batch)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_batches_and_parameters_on_the_users_own_mesh(kind):
    """jax-ml/jax#28542: arrays placed by the user's mesh, whose kind the library's is not."""
    mesh, tx = make_grid((8,), ("data",), kind), optax.sgd(0.1)
    batch = jax.device_put(even_batch(16), NamedSharding(mesh, P("data")))
    given = jax.device_put(even_params(), NamedSharding(mesh, P()))
    given = {**given, "w1": jax.device_put(even_params()["w1"].astype(jnp.bfloat16), NamedSharding(mesh, P("data")))}
    plan = zerojax.make_plan(lambda key: even_params(), tx, mesh)
    state = zerojax.init_state(lambda key: even_params(), tx, plan, jax.random.key(0), params=given)
    state, metrics = zerojax.make_train_step(reference.loss_fn, tx, plan)(state, batch)
    start = {**even_params(), "w1": even_params()["w1"].astype(jnp.bfloat16).astype(jnp.float32)}
    params, _, losses, _ = reference.train(tx, start, [even_batch(16)])
    assert float(metrics["loss"]) == pytest.approx(losses[0], rel=1e-5)
    assert_close(jax.device_get(state.params), params)


# ---- donation ----


@pytest.mark.parametrize(("stage", "precision"), [(0, "c=bf16"), (1, "p=bf16,c=bf16"), (3, "")])
def test_the_state_is_donated_and_says_so(stage, precision):
    """jax-ml/jax#25346, jax-ml/jax#9675: unusable buffers; a reused state told as `Array has been deleted`."""
    plan, state, step = prepare(even_params(), optax.adam(1e-2), stage=stage, precision=precision)
    old = state
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(2):
            state, _ = step(state, even_batch(16, seed))
    assert not [str(w.message) for w in caught if "donated" in str(w.message)]
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((old.params, old.opt_state)))
    for use in (step, zerojax.make_eval_step(reference.loss_fn, plan)):
        with pytest.raises(ValueError, match=r"train state .*earlier step"):
            use(old, even_batch(16))
    with pytest.raises(ValueError, match="donated"):
        zerojax.gather_params(old.params, plan)
    step(state, even_batch(16))


@pytest.mark.parametrize(("devices", "stage", "below"), [(1, 3, 0), (2, 0, 0), (8, 0, 0), (8, 3, 64), (8, 3, 0)])
def test_what_the_user_owns_outlives_the_steps(devices, stage, below):
    """jax-ml/jax#15368: parameters, key, batch and gathered copies are the user's, whatever is donated."""
    own, key, tx = even_params(), jax.random.key(0), optax.sgd(0.1)
    config = zerojax.ZeroConfig(stage=stage, keep_whole_below=below)
    plan = zerojax.make_plan(lambda key: own, tx, make_mesh(devices), config)
    placed, host = jax.device_put(own, plan.state_shardings.params), jax.tree.map(np.array, own)
    batch = jax.device_put(even_batch(16), plan.batch_sharding)
    step, kept = zerojax.make_train_step(reference.loss_fn, tx, plan), []
    for params in (None, own, placed, host):
        state = zerojax.init_state(lambda key: own, tx, plan, key, params=params)
        kept.append(zerojax.gather_params(state.params, plan))
        step(state, batch)
    for survivor in (own, placed, host, *kept):
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(survivor) if isinstance(leaf, jax.Array))
        assert_same(jax.device_get(survivor), jax.device_get(even_params()))
    assert not key.is_deleted()
    assert not batch["x"].is_deleted()


# ---- placement ----


def bytes_on_first_device(tree):
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(("stage", "moments", "params"), [(0, 33284, 16640), (1, 4164, 2080), (3, 4164, 2080)])
def test_the_state_stays_where_it_was_born(stage, moments, params):
    """AI-Hypercomputer/maxtext#5104, jax-ml/jax#15600: moments replicated (33,284 bytes), or drifting after a step."""
    tree = {"w": reference.wave((64, 64), 1, 0.1), "b": reference.wave((64,), 2)}
    plan, state, step = prepare(tree, optax.adam(1e-3), lambda p, b: jnp.mean((b @ p["w"] + p["b"]) ** 2), stage=stage)
    evaluate = zerojax.make_eval_step(lambda p, b: jnp.mean(b @ p["w"]), plan)
    for _ in range(3):
        assert bytes_on_first_device(state.opt_state) == plan.bytes_per_device("opt_state") == moments
        assert bytes_on_first_device(state.params) == plan.bytes_per_device("params") == params
        assert jax.tree.map(lambda leaf: leaf.sharding, state) == plan.state_shardings
        state, _ = step(state, np.ones((16, 64), np.float32))
        evaluate(state, np.ones((16, 64), np.float32))


def test_a_flax_train_state_stays_where_it_was_born():
    """google-deepmind/optax#548: a user's own jitted step, without output shardings."""
    tx = optax.adamw(1e-2)
    plan = zerojax.make_plan(lambda key: even_params(), tx, make_mesh(8), zerojax.ZeroConfig(keep_whole_below=64))
    state = zerojax.linen.create_train_state(lambda key: even_params(), tx, plan, jax.random.key(0), apply_fn=None)
    gradient, born = zerojax.value_and_grad(reference.loss_fn, plan), bytes_on_first_device(state)

    @jax.jit
    def step(state, batch):
        loss, grads = gradient(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    batches = [even_batch(16, seed) for seed in range(3)]
    losses = []
    for batch in batches:
        state, loss = step(state, batch)
        losses.append(float(loss))
        assert bytes_on_first_device(state) == born
    assert_close(losses, reference.train(tx, even_params(), batches)[2])


# ---- Flax NNX ----


class Stack(nnx.Module):
    """Three layers stacked along dim 0, run by a scan."""

    def __init__(self, rngs, names=None):
        init = nnx.initializers.lecun_normal()
        if names:
            init = nnx.with_partitioning(init, names)

        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: None} if names else {})
        def make(rngs):
            return nnx.Linear(16, 16, kernel_init=init, rngs=rngs)

        self.layers = make(rngs)

    def __call__(self, x):
        return nnx.scan(lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


def annotated(names):
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)


def adam_but_for_the_bias():
    def label(params):
        return jax.tree.map_with_path(
            lambda path, _: "none" if "bias" in jax.tree_util.keystr(path) else "adam", params
        )

    return optax.partition({"adam": optax.adam(1e-2), "none": optax.set_to_zero()}, label)


NNX = {
    "plain": (lambda rngs: nnx.Linear(16, 32, rngs=rngs), lambda: optax.adam(1e-2), P(None, "data")),
    "annotated": (
        lambda rngs: nnx.Linear(16, 32, kernel_init=annotated(("data", None)), rngs=rngs),
        lambda: optax.adam(1e-2),
        P("data"),
    ),
    "partition": (lambda rngs: nnx.Linear(16, 32, rngs=rngs), adam_but_for_the_bias, P(None, "data")),
    "stacked": (Stack, lambda: optax.adam(1e-2), P(None, "data")),
    "stacked_annotated": (lambda rngs: Stack(rngs, (None, "data")), lambda: optax.adam(1e-2), P(None, None, "data")),
}


def nnx_losses(model, optimizer, gradient, check=lambda: None):
    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = gradient(model, x)
        optimizer.update(model, grads)
        return loss

    losses = []
    for seed in range(3):
        losses.append(float(step(model, optimizer, even_batch(16, seed)["x"])))
        check()
    return losses


@pytest.mark.parametrize(("form", "kind"), [*((form, "explicit") for form in NNX), ("annotated", "auto")])
def test_nnx_modules_keep_the_plan(form, kind):
    """google/flax#5172, google/flax#5105, google/flax#5112: the optimizer applied annotations anew."""
    make, make_tx, kernel = NNX[form]
    tx, mesh = make_tx(), make_grid((8,), ("data",), kind)
    plan = zerojax.nnx.make_plan(make, tx, mesh)
    model, optimizer = zerojax.nnx.create(make, tx, plan, jax.random.key(0))

    def placed():
        return [
            leaf.sharding
            for part in (nnx.state(model, nnx.Param), optimizer.opt_state)
            for leaf in jax.tree.leaves(part)
        ]

    born = placed()
    assert born == [*jax.tree.leaves(plan.state_shardings.params), *jax.tree.leaves(plan.state_shardings.opt_state)]
    assert NamedSharding(plan.mesh, kernel) in born

    def check():
        assert placed() == born

    def loss(model, x):
        return (model(x) ** 2).mean()

    losses = nnx_losses(model, optimizer, zerojax.nnx.value_and_grad(loss, plan), check)
    with nnx.use_eager_sharding(False):
        twin = make(nnx.Rngs(jax.random.key(0)))
        right = nnx_losses(twin, nnx.Optimizer(twin, tx, wrt=nnx.Param), nnx.value_and_grad(loss))
    assert_close(losses, right)


def test_an_annotation_that_the_mesh_lacks_is_named():
    """google/flax#5112: logical names, or a dim that does not divide."""
    for features, names, message in (
        (32, (None, "mlp"), "kernel: .*'mlp'.*'data': 8"),
        (30, (None, "data"), "kernel: dim 1 .*30.*8"),
    ):
        with pytest.raises(ValueError, match=message):
            zerojax.nnx.make_plan(
                lambda rngs, f=features, n=names: nnx.Linear(16, f, kernel_init=annotated(n), rngs=rngs),
                optax.sgd(0.1),
                make_mesh(8),
            )
