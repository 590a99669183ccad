"""Parameters of which only some are trained: as optax trains them on one device with an update of zero for the others.

Tolerance 1e-5 relative: float32 sums in another order. What is frozen is bitwise what it was.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import reference
from flax import nnx
from jax import lax
from reference import assert_close, assert_same, even_batch, even_params, make_mesh, prepare, wave

import zerojax
import zerojax.linen
import zerojax.nnx
from zerojax import accounting, collectives

ADAMW = optax.chain(optax.clip_by_global_norm(0.15), optax.adamw(1e-2, weight_decay=0.1))


def only(tx, is_trained):
    """``tx`` for the parameters whose path it accepts; the norm that it clips by is that of their gradients."""

    def label(params):
        return jax.tree.map_with_path(
            lambda path, _: is_trained(jax.tree_util.keystr(path, simple=True, separator="/")), params
        )

    return optax.partition({True: tx, False: optax.set_to_zero()}, label)


def twin(tx, params, batches, loss, is_trained):
    """Parameters, losses and the norms of the trained gradients."""
    plain, norms = only(tx, is_trained), []
    state = plain.init(params)
    losses = []

    @jax.jit
    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = plain.update(grads, state, params)
        mine = [g for path, g in jax.tree.leaves_with_path(grads)
                if is_trained(jax.tree_util.keystr(path, simple=True, separator="/"))]  # fmt: skip
        return optax.apply_updates(params, updates), state, value, optax.tree.norm(mine)

    for batch in batches:
        params, state, value, size = step(params, state, batch)
        losses.append(float(value))
        norms.append(float(size))
    return jax.device_get(params), losses, norms


def check(init_fn, loss, batches, config, is_trained, tx=ADAMW):
    """Every step of the library is the twin's; returns the plan and the last state."""
    plan = zerojax.make_plan(init_fn, tx, make_mesh(), zerojax.ZeroConfig(**config))
    params = jax.device_get(init_fn(jax.random.key(0)))
    state = zerojax.init_state(init_fn, tx, plan, jax.random.key(1), params=params)
    step, losses, norms = zerojax.make_train_step(loss, tx, plan), [], []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    right, right_losses, right_norms = twin(tx, params, batches, loss, is_trained)
    ours = jax.device_get(state.params)
    assert_close((losses, norms), (right_losses, right_norms))
    assert_close(ours, right)
    for leaf, new, old in zip(plan.params, jax.tree.leaves(ours), jax.tree.leaves(params), strict=True):
        assert leaf.trained == is_trained(leaf.path)
        if not leaf.trained:
            assert_same(new, old)
    return plan, state


# ---- a plain function ----

FIRST = {"frozen": ("w1", "b1")}
BATCHES = [even_batch(16, seed) for seed in range(3)]


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(("stage", "more"), [
    (0, {}), (1, {"accumulate": 2}), long(1, {"remat": "unit"}), long(2, {}), (2, {"accumulate": 2}),
    long(3, {}), (3, {"remat": "unit", "accumulate": 2}),
])  # fmt: skip
def test_the_first_layer_is_frozen(stage, more):
    """deepspeedai/DeepSpeed#5439: frozen parameters were decayed."""
    check(
        lambda key: even_params(), reference.loss_fn, BATCHES, {"stage": stage, **FIRST, **more}, "w2 b2".__contains__
    )


@pytest.mark.parametrize("stage", [long(1), 3])
def test_the_last_layer_is_frozen(stage):
    """Backward has to go through it."""
    config = {"stage": stage, "trainable": ("?1", "b2"), "frozen": "b?"}
    check(lambda key: even_params(), reference.loss_fn, BATCHES, config, "w1".__contains__)


def test_frozen_parameters_are_saved_and_not_decayed(tmp_path):
    """deepspeedai/DeepSpeed#3090, deepspeedai/DeepSpeed#6771: saved, and restored over a new model's own values."""
    tx = optax.adamw(1e-2, weight_decay=0.1)
    plan, state, step = prepare(even_params(), tx, **FIRST)
    losses, norms = [], []
    for batch in BATCHES:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    assert_close(losses, [0.5587826371, 0.5459719896, 0.5123364925])
    assert_close(norms, [0.1941163833, 0.1888776829, 0.1089821458])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        other = plan.with_stage(1)
        fresh = zerojax.init_state(
            lambda key: jax.tree.map(lambda a: a * 0, even_params()), tx, other, jax.random.key(5)
        )
        assert reference.norm(fresh.params) == 0
        again = checkpointer.restore(tmp_path / "state", other.abstract_state)
    assert_same(jax.device_get(again.params), jax.device_get(state.params))
    frozen = [np.asarray(again.params[name]) for name in ("w1", "b1")]
    assert_same(frozen, [np.asarray(even_params()[name]) for name in ("w1", "b1")])
    assert reference.norm(frozen) == pytest.approx(4.8180536207, rel=1e-6)
    assert reference.norm(again.params["w2"]) == pytest.approx(3.3411343747, rel=1e-5)


@pytest.mark.parametrize("tx", [optax.adam(1e-2), optax.adamw(1e-2, weight_decay=0.1)])
def test_frozen_parameters_have_no_moments(tx):
    """deepspeedai/DeepSpeed#2653, deepspeedai/DeepSpeed#8214: 528 moments, 66 a device; with the frozen ones 1,616."""
    plan, state, _ = prepare(even_params(), tx, **FIRST)
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert sum(leaf.size for leaf in moments) == 528
    assert sum(leaf.addressable_shards[0].data.size for leaf in moments) == 66
    assert plan.bytes_per_device("opt_state") == 66 * 4 + 4
    rows = [line for line in str(plan).splitlines() if "frozen" in line]
    assert [line.split()[0] for line in rows] == ["b1", "w1"]


@pytest.mark.parametrize(("stage", "k"), [(1, 1), long(2, 2), (3, 2)])
def test_no_gradient_of_what_is_frozen_travels(stage, k, monkeypatch):
    monkeypatch.setattr(collectives, "TOGETHER_BELOW", 0)
    plan, _, step = prepare(even_params(), optax.sgd(0.1), stage=stage, accumulate=k, **FIRST)
    lowered = step.lower(plan.abstract_state, jax.eval_shape(lambda: even_batch(32)))
    found: dict = {}
    for c in accounting.collectives(lowered.compile().as_text()):
        if c.elements > 4:
            found.setdefault(c.kind, []).extend([c.elements] * c.times)
    assert sorted(found["reduce-scatter"]) == sorted([8, 256] * (1 if stage == 1 else k))
    # Nothing flows to the first layer, so backward gathers nothing of it again, and needs only the second's matrix.
    assert sorted(found["all-gather"]) == sorted([8, 32, 256, 512] * (k if stage == 3 else 1))


# ---- low-rank updates of linen modules ----

WIDTH, RANK, LAYERS = 16, 8, 3


class LowRank(nn.Module):
    """A dense layer with a low-rank update beside its matrix."""

    @nn.compact
    def __call__(self, x):
        down = self.param("lora_down", nn.initializers.normal(0.3), (x.shape[-1], RANK))
        up = self.param("lora_up", nn.initializers.normal(0.3), (RANK, WIDTH))
        return nn.Dense(WIDTH, name="base")(x) + x @ down @ up


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + jnp.tanh(LowRank()(nn.LayerNorm()(x))), None


class Net(nn.Module):
    scan: bool

    @nn.compact
    def __call__(self, x):
        if self.scan:
            x, _ = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)()(x, None)
        else:
            for _ in range(LAYERS):
                x, _ = Block()(x)
        return nn.Dense(8, name="head")(x)


def linen(scan):
    net = Net(scan)

    def loss(params, batch):
        return jnp.mean((net.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)

    return zerojax.linen.init_fn(net, jnp.ones((1, 16))), loss


def is_low_rank(path):
    return "lora_" in path


@pytest.mark.parametrize(("scan", "stage"), [long(True, 1), long(True, 2), (True, 3), (False, 3)])
def test_low_rank_updates(scan, stage):
    init_fn, loss = linen(scan)
    config = {"stage": stage, "trainable": "*/lora_*", "accumulate": 2 if stage == 2 else 1}
    plan, _ = check(init_fn, loss, BATCHES, config, is_low_rank)
    if scan and stage == 3:
        step = zerojax.make_train_step(loss, ADAMW, plan)
        (layers,) = (
            unit for unit in zerojax.explain(step, plan.abstract_state, BATCHES[0]).units if unit.does == "scan"
        )
        assert (layers.turns, layers.gathers) == (LAYERS, (LAYERS, LAYERS))
        assert {path.rpartition("/")[2] for path in layers.params} >= {"kernel", "lora_down", "lora_up"}
        text = step.lower(plan.abstract_state, BATCHES[0]).compile().as_text()
        reduced = sum(c.elements * c.times for c in accounting.collectives(text) if c.kind == "reduce-scatter")
        assert reduced == LAYERS * 2 * WIDTH * RANK


def test_linen_states_leave_alone_what_is_frozen():
    """``apply_gradients`` takes gradients that are ``None`` for it."""
    init_fn, loss = lambda key: even_params(), reference.loss_fn
    plan = zerojax.make_plan(init_fn, ADAMW, make_mesh(), zerojax.ZeroConfig(**FIRST))
    state = zerojax.linen.create_train_state(init_fn, ADAMW, plan, jax.random.key(0), apply_fn=None)
    born = jax.device_get(state.params)

    @jax.jit
    def step(state, batch):
        value, grads = zerojax.value_and_grad(loss, plan)(state.params, batch)
        assert jax.tree.structure(grads) == jax.tree.structure(plan.trained(state.params))
        return state.apply_gradients(grads=grads), value

    losses = []
    for batch in BATCHES:
        state, value = step(state, batch)
        losses.append(float(value))
    right, right_losses, _ = twin(ADAMW, born, BATCHES, loss, "w2 b2".__contains__)
    assert_close((jax.device_get(state.params), losses), (right, right_losses))
    assert_same(jax.device_get(state.params["w1"]), born["w1"])


def test_nnx_modules_leave_alone_what_is_frozen():
    def make(rngs):
        return nnx.Sequential(nnx.LoRALinear(16, 32, lora_rank=8, rngs=rngs), jnp.tanh, nnx.Linear(32, 8, rngs=rngs))

    def loss(model, batch):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    plan = zerojax.nnx.make_plan(make, ADAMW, make_mesh(), zerojax.ZeroConfig(trainable="*/lora_*"))
    model, optimizer = zerojax.nnx.create(make, ADAMW, plan, jax.random.key(0))
    whole = make(nnx.Rngs(jax.random.key(0)))
    own = nnx.Optimizer(whole, ADAMW, wrt=nnx.LoRAParam)
    born = jax.device_get(nnx.to_pure_dict(nnx.state(whole, nnx.Param)))

    def trainer(gradient):
        @nnx.jit
        def step(model, optimizer, batch):
            value, grads = gradient(model, batch)
            optimizer.update(model, grads)
            return value

        return step

    ours = trainer(zerojax.nnx.value_and_grad(loss, plan))
    right = trainer(nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam)))
    for batch in BATCHES:
        assert float(ours(model, optimizer, batch)) == pytest.approx(float(right(whole, own, batch)), rel=1e-5)
    after = jax.device_get(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    assert_close(after, jax.device_get(nnx.to_pure_dict(nnx.state(whole, nnx.Param))))
    assert_same(after["layers"][2], born["layers"][2])


# ---- what is kept for backward ----


@pytest.mark.parametrize(("stage", "remat"), [long(1, None), (3, None), long(1, "unit"), long(3, "unit")])
def test_no_activations_are_kept_for_gradients_that_nobody_wants(stage, remat):
    """A frozen stack of layers below the trained head keeps nothing at all; above a trained one, no inputs."""
    layers, width, rows = 8, 64, 512

    def init_fn(key):
        stack = {"up": jnp.zeros((layers, width, width)), "down": jnp.zeros((layers, width, width))}
        return {"first": jnp.zeros((width, width)), "stack": stack, "head": jnp.zeros((width, width))}

    def loss(p, x):
        x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w["up"]) @ w["down"], None), x @ p["first"], p["stack"])
        return jnp.mean((x @ p["head"]) ** 2)

    def temp(**config):
        config = zerojax.ZeroConfig(stage=stage, remat=remat, **config)
        plan = zerojax.make_plan(init_fn, optax.sgd(0.1), make_mesh(), config)
        batch = jax.ShapeDtypeStruct((8 * rows, width), jnp.float32, sharding=plan.batch_sharding)
        step = zerojax.make_train_step(loss, optax.sgd(0.1), plan)
        return zerojax.report(step, plan.abstract_state, batch).memory.temp

    everything, stack, below = temp(), temp(frozen="stack/*"), temp(trainable="head")
    activations = rows * width * 4 * layers  # one array of each layer
    assert everything - below >= (2 if remat is None else 1) * 0.9 * activations
    if remat is None:
        assert everything - stack >= 0.9 * activations


# ---- values, settings, errors ----


@pytest.mark.parametrize(("stage", "trained"), [(3, "*a"), long(2, "*b"), long(3, "b"), long(3, "*b")])
def test_gradients_of_every_structure_flow_around_what_is_frozen(stage, trained):
    """Views of both kinds of parameters, stacks of both in one scan, views of layers that are carried."""

    def init_fn(key):
        make = lambda seed, *shape: wave(shape, seed, 0.3)  # noqa: E731
        return {
            "a": make(1, 16, 16),
            "b": make(2, 16, 16),
            "stack_a": make(3, 4, 16, 16),
            "stack_b": make(4, 4, 16, 16),
        }

    def loss(p, x):
        both = jnp.concatenate([p["a"], p["b"]], 1) + jnp.tanh(jnp.concatenate([p["b"], p["a"]], 1))

        def turn(carry, w):
            x, before = carry
            return (jnp.tanh(x @ w["a"] + x @ w["b"] @ before), w["b"].T * 2), jnp.mean(w["a"] * w["b"])

        x = jnp.tanh(x @ both)[:, :16]
        (x, last), seen = lax.scan(turn, (x, p["b"]), {"a": p["stack_a"], "b": p["stack_b"]}, reverse=True)
        return jnp.mean((x @ last @ p["b"]) ** 2) + jnp.sum(seen * jnp.arange(4.0)) + jnp.mean(p["b"]) * 3

    right_loss, right = jax.jit(jax.value_and_grad(loss))(init_fn(None), even_batch(16)["x"])
    config = zerojax.ZeroConfig(stage=stage, trainable=trained)
    plan = zerojax.make_plan(init_fn, optax.sgd(0.1), make_mesh(), config)
    params = jax.device_put(init_fn(None), plan.state_shardings.params)
    value, grads = jax.jit(zerojax.value_and_grad(loss, plan))(params, even_batch(16)["x"])
    assert float(value) == pytest.approx(float(right_loss), rel=1e-5)
    assert_close(jax.device_get(grads), jax.device_get(plan.trained(right)))


def test_minus_zero_stays_minus_zero():
    """Bitwise: an update of plus zero would make it plus zero."""
    params = {"a": jnp.full(8, -0.0), "b": jnp.ones(8), "n": jnp.int32(3)}
    plan = zerojax.make_plan(lambda key: params, ADAMW, make_mesh(), zerojax.ZeroConfig(frozen="a"))
    tx = plan.transform(ADAMW)
    grads = {"a": None, "b": jnp.ones(8), "n": None}
    updates, _ = tx.update(grads, tx.init(params), params)
    after = optax.apply_updates(params, updates)
    assert np.signbit(after["a"]).all()
    assert after["b"][0] < 1
    assert_same(after["n"], params["n"])
    plain = zerojax.make_plan(lambda key: even_params(), ADAMW, make_mesh())
    assert plain.transform(ADAMW) is ADAMW


def test_patterns_that_do_not_fit():
    def plan(**config):
        params = {**even_params(), "count": jnp.arange(8)}
        return zerojax.make_plan(lambda key: params, ADAMW, make_mesh(), zerojax.ZeroConfig(**config))

    assert [leaf.path for leaf in plan(trainable=["w*", "b2"], frozen="w1").params if leaf.trained] == ["b2", "w2"]
    for config, words in (
        ({"frozen": "w3"}, r"\['w3'\] in trainable or frozen match no parameter; paths are such as \['b1'"),
        ({"trainable": ("w*", "x*")}, r"\['x\*'\] in trainable or frozen match no"),
        ({"trainable": "count"}, "match no trainable parameter"),
        ({"frozen": "*"}, "leave no parameter to train"),
        ({"trainable": "w1", "frozen": "w*"}, "leave no parameter to train"),
        ({"frozen": (3,)}, "frozen: 3 is not a path pattern"),
        ({"trainable": ({"w1": True},)}, r"trainable: \{'w1': True\} is not a path pattern"),
    ):
        with pytest.raises(ValueError, match=words):
            plan(**config)


def test_a_pattern_that_is_a_path_means_that_path():
    params = {"w[1]": jnp.ones((16, 8)), "w1": jnp.ones((8, 16))}
    config = zerojax.ZeroConfig(frozen="w[1]", overrides={"w[1]": 1})
    plan = zerojax.make_plan(lambda key: params, optax.adam(1e-3), make_mesh(), config)
    assert {leaf.path: (leaf.trained, leaf.dim) for leaf in plan.params} == {"w[1]": (False, 1), "w1": (True, 1)}


# ---- what is closed over instead ----


@pytest.mark.parametrize("given", ["argument", "array"])
def test_much_that_a_loss_closes_over_is_told(given):
    """It is whole on every device at once, where frozen parameters are gathered unit by unit."""
    init = lambda key: {f"w{i}": jnp.ones((256, 256)) for i in range(5)}  # noqa: E731
    plan = zerojax.make_plan(init, optax.sgd(0.1), make_mesh())
    params = zerojax.init_state(init, optax.sgd(0.1), plan, jax.random.key(0)).params

    def distilled(teacher, params, x):
        return jnp.mean(sum((x @ params[name] - x @ teacher[name]) ** 2 for name in params))

    def gradient(teacher, params, x):
        return zerojax.value_and_grad(functools.partial(distilled, teacher), plan)(params, x)

    arguments = params, params, jax.ShapeDtypeStruct((16, 256), "float32")
    call = functools.partial(jax.eval_shape, gradient, *arguments)
    if given == "array":
        call = functools.partial(jax.eval_shape, functools.partial(gradient, params), *arguments[1:])
    with pytest.warns(UserWarning, match=r"over 5 arrays of 1\.2 MiB .*float32\[256, 256\].*ZeroConfig\(frozen="):
        call()


@pytest.mark.filterwarnings("error")
def test_little_or_whole_that_a_loss_closes_over_is_fine():
    init = lambda key: {"w": jnp.ones((256, 256))}  # noqa: E731
    plan = zerojax.make_plan(init, optax.sgd(0.1), make_mesh())
    small, whole = jnp.ones((16, 256)), jax.device_put(jnp.ones((512, 1024)), plan.replicated)
    loss = lambda p, x: jnp.mean((x @ p["w"] + small[0]) ** 2) * whole[0, 0]  # noqa: E731
    jax.eval_shape(zerojax.value_and_grad(loss, plan), init(None), jnp.ones((16, 256)))
