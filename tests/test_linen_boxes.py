"""Linen's metadata boxes and logical rules: read for the plan, and the same training as on one device without them."""

import contextlib
import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P
from reference import assert_close, assert_same, make_grid, make_mesh, wave

import zerojax
import zerojax.linen

WIDTH, HIDDEN, ROWS, STEPS = 16, 32, 16, 3
RULES = {"data": (("embed", "data"),), "tensor": (("embed", "data"), ("mlp", "tensor"), ("hidden", "tensor"))}
OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "muon": optax.contrib.muon(1e-2),
    "sm3": optax.sm3(1e-2),
}
NORMAL = nn.initializers.lecun_normal()
TOLERANCE = 1e-6  # of a leaf's largest number: sums in another order differ by some 1e-7, three steps make that 6e-7


@functools.cache
def mesh_of(kind):
    return make_mesh() if kind == "data" else make_grid((4, 2), ("data", "tensor"))


def init_of(names, init=NORMAL):
    """An initializer in a box: of `nn.with_partitioning` for names of axes, of logical partitioning for others."""
    box = nn.with_partitioning if set(names) <= {"data", "tensor", None} else nn.with_logical_partitioning
    return box(init, names)


class Layer(nn.Module):
    """Matrices and biases in boxes; ``names`` are those of width and hidden."""

    names: tuple
    constraint: str | None = None

    @nn.compact
    def __call__(self, x):
        width, hidden = self.names
        dense = functools.partial(nn.Dense, bias_init=init_of((None,), nn.initializers.normal(0.1)))
        h = dense(HIDDEN, kernel_init=init_of((width, hidden)))(x)
        if self.constraint:
            h = nn.with_logical_constraint(h, (None, self.constraint))
        return x + dense(WIDTH, kernel_init=init_of((hidden, width)))(jnp.tanh(h))


class Scanned(nn.Module):
    names: tuple
    layers: int = 8
    name_of_layers: str | None = "layers"

    @nn.compact
    def __call__(self, x):
        body = lambda layer, x: (layer(x), None)  # noqa: E731
        scan = nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers,
                       metadata_params={nn.meta.PARTITION_NAME: self.name_of_layers})  # fmt: skip
        return scan(Layer(self.names), x)[0]


class Centred(nn.Module):
    """With a running mean in a box."""

    names: tuple

    @nn.compact
    def __call__(self, x):
        h = Layer(self.names)(x)
        zeros = nn.with_partitioning(nn.initializers.zeros_init(), (self.names[1],))
        mean = self.variable("batch_stats", "mean", zeros, None, (WIDTH,))
        out = h - mean.value
        if not self.is_initializing():
            mean.value = 0.9 * mean.value + 0.1 * jnp.mean(h, 0)
        return out


MODELS = {  # by the kind of mesh
    "boxes": {"data": Layer((None, "data")), "tensor": Layer((None, "tensor"))},
    "rules": {kind: Layer(("embed", "mlp"), "hidden") for kind in RULES},
    "scan": {"data": Scanned((None, None)), "tensor": Scanned((None, "tensor"))},
    "scan, rules": {kind: Scanned(("embed", "mlp")) for kind in RULES},
}
WANTED = {  # of the first kernel
    ("boxes", "data"): P(None, "data"), ("boxes", "tensor"): P("data", "tensor"),
    ("rules", "data"): P("data"), ("rules", "tensor"): P("data", "tensor"),
    ("scan", "data"): P(None, None, "data"), ("scan", "tensor"): P(None, "data", "tensor"),
    ("scan, rules", "data"): P(None, "data"), ("scan, rules", "tensor"): P(None, "data", "tensor"),
}  # fmt: skip
EXAMPLE = jax.ShapeDtypeStruct((1, WIDTH), "float32")


def batches():
    """Far from zero in the mean, so that no gradient is what is left of large numbers that cancel."""
    return [{"x": wave((ROWS, WIDTH), 10 + i) + 1, "y": wave((ROWS, WIDTH), 20 + i) - 2} for i in range(STEPS)]


def loss_of(model):
    def loss(params, batch):
        return jnp.mean((model.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)

    return loss


def rules_of(model, kind):
    logical = "embed" in model.names
    return nn.logical_axis_rules(RULES[kind]) if logical else contextlib.nullcontext()


@functools.cache
def twin(network, optimizer):
    """Parameters, optimizer state and losses of plain Flax and optax on one device, whatever the names."""
    model, tx = network((None, None)), OPTIMIZERS[optimizer]
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), jnp.zeros(EXAMPLE.shape)))["params"]
    opt_state, losses = tx.init(params), []

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_of(model))(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for batch in batches():
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(loss)
    return params, opt_state, losses


def check_like_one_device(name, kind, optimizer, stage, tolerance=TOLERANCE):
    model, tx = MODELS[name][kind], OPTIMIZERS[optimizer]
    init, losses = zerojax.linen.init_fn(model, EXAMPLE), []
    with rules_of(model, kind):
        plan = zerojax.make_plan(init, tx, mesh_of(kind), zerojax.ZeroConfig(stage=stage))
        state = zerojax.init_state(init, tx, plan, jax.random.key(0))
        step = zerojax.make_train_step(loss_of(model), tx, plan)
        for batch in batches():
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
    kernel = next(leaf for leaf in plan.params if leaf.path.endswith("Dense_0/kernel"))
    assert kernel.spec(plan.config.shard_axes) == WANTED[name, kind]
    assert_close((state.params, state.opt_state, losses), twin(type(model), optimizer), tolerance)


ORDINARY = {
    ("boxes", "data", "adafactor", 1), ("boxes", "tensor", "adamw", 0), ("boxes", "tensor", "adafactor", 3),
    ("rules", "data", "adamw", 3), ("rules", "tensor", "adafactor", 2), ("rules", "tensor", "adamw", 1),
    ("scan", "tensor", "adafactor", 3),
}  # fmt: skip
CASES = itertools.product(MODELS, RULES, ("adamw", "adafactor", "muon"), range(4))


@pytest.mark.parametrize(
    ("name", "kind", "optimizer", "stage"),
    [pytest.param(*case, marks=[] if case in ORDINARY else pytest.mark.long) for case in CASES],
)
def test_training_is_that_of_one_device(name, kind, optimizer, stage):
    check_like_one_device(name, kind, optimizer, stage)


@pytest.mark.long
@pytest.mark.parametrize("stage", range(4))
def test_state_of_sm3(stage):
    """It divides each gradient by what it has seen: one that is nearly zero, and so the sum's rounding, counts as much
    as the largest. Measured is 1.3e-5; a state of another shape would be off by as much as there is."""
    check_like_one_device("boxes", "tensor", "sm3", stage, 1e-4)


# ---- what a plan reads ----


def plan_of(init, kind="tensor", rules=(), mesh=None, **options):
    with nn.logical_axis_rules(rules):
        return zerojax.make_plan(init, OPTIMIZERS["adafactor"], mesh or mesh_of(kind), **options)


def dense(names, **box):
    """Logical names if they are given rules, or are those that the other models use."""
    logical = box or set(names) & {"embed", "mlp", "other"}
    partitioning = nn.with_logical_partitioning if logical else nn.with_partitioning
    kernel_init = partitioning(NORMAL, names, **box)
    return zerojax.linen.init_fn(nn.Dense(HIDDEN, kernel_init=kernel_init), EXAMPLE)


def kernel_of(plan):
    kernel = next(leaf for leaf in plan.params if leaf.path == "kernel")
    return kernel.spec(plan.config.shard_axes), kernel.why


NO_BOX = (P(None, "data"), "largest free dim")
TWO_RULES = (("embed", "data"), ("mlp", "tensor"))


@pytest.mark.parametrize(("names", "rules", "box", "wanted"), [
    ((None, None), (), {}, NO_BOX),
    ((P.UNCONSTRAINED, None), (), {}, NO_BOX),
    (("tensor",), (), {}, (P("tensor", "data"), "largest free dim")),
    (("data", "tensor"), (), {}, (P("data", "tensor"), "base spec")),
    (("embed", "mlp"), (), {}, NO_BOX),
    (("embed", "embed"), (), {}, NO_BOX),
    (("embed", "mlp"), TWO_RULES, {}, (P("data", "tensor"), "base spec")),
    (("other", "mlp"), TWO_RULES, {}, (P("data", "tensor"), "largest free dim")),
    (("tensor", None), (), {"rules": ()}, NO_BOX),
    (("tensor", "mlp"), (), {"rules": (("tensor", "data"), ("mlp", "tensor"))}, (P("data", "tensor"), "base spec")),
    (("embed", "mlp"), TWO_RULES, {"rules": (("embed", "tensor"),)}, (P("tensor", "data"), "largest free dim")),
    (("embed", "mlp"), (("embed", "data"), ("mlp", "data")), {}, (P("data"), "base spec")),
    (("embed", "mlp"), (("embed", None), ("mlp", ("tensor",))), {}, (P("data", ("tensor",)), "largest free dim")),
])  # fmt: skip
def test_names_in_boxes(names, rules, box, wanted):
    assert kernel_of(plan_of(dense(names, **box), rules=rules)) == wanted


def test_names_of_axes_may_follow_rules_too():
    make = nn.with_partitioning(NORMAL, ("embed", "tensor"))
    init = zerojax.linen.init_fn(nn.Dense(HIDDEN, kernel_init=make), EXAMPLE)
    assert kernel_of(plan_of(init, rules=TWO_RULES)) == (P("data", "tensor"), "base spec")
    assert kernel_of(plan_of(init, rules=(("embed", None),))) == (P("data", "tensor"), "largest free dim")


@pytest.mark.parametrize(("names", "rules", "told"), [
    (("embedded", "tensor"), (), r"kernel: .*\('embedded', 'tensor'\).*\['embedded'\].*'tensor': 2.*logical_axis"),
    (("embed", "mlp"), (("embed", "fsdp"),), r"kernel: .*\('embed', 'mlp'\).*\['fsdp'\].*'tensor': 2"),
    (("embed", "embed"), (("embed", "data"),), r"kernel: .*\('embed', 'embed'\).*more than once"),
    (("tensor", "tensor"), (), "kernel: .*more than once"),
    (("data", None, "tensor"), (), r"kernel: .*more entries than shape \(16, 32\)"),
    ((("data", "tensor"), None), (), "kernel: .*mixes shard axes .*leave them to the plan"),
])  # fmt: skip
def test_names_that_do_not_fit(names, rules, told):
    with pytest.raises(ValueError, match=told):
        plan_of(dense(names), rules=rules)


def test_a_dim_that_the_axis_does_not_divide():
    init = zerojax.linen.init_fn(nn.Dense(6, kernel_init=init_of((None, "data"))), EXAMPLE)
    with pytest.raises(ValueError, match=r"kernel: dim 1 of shape \(16, 6\) cannot be divided over 4 devices"):
        plan_of(init)


def test_errors_of_init_fn_are_its_own():
    def init(key):
        raise ValueError("no such file")

    with pytest.raises(ValueError, match=r"^no such file"):
        plan_of(init)


@pytest.mark.parametrize("name", MODELS)
def test_ways_to_give_the_names(name):
    """All make the same plan: boxes in any ``init_fn``, and specs read from them."""
    model, rules = MODELS[name]["tensor"], RULES["tensor"]
    init = zerojax.linen.init_fn(model, EXAMPLE)
    own = lambda key: model.init(key, jnp.zeros(EXAMPLE.shape))["params"]  # noqa: E731
    bare = lambda key: nn.unbox(own(key))  # noqa: E731
    plan = plan_of(init, rules=rules)
    assert not any("value" in leaf.path for leaf in (*plan.params, *plan.opt_state))
    assert plan_of(own, rules=rules) == plan
    specs = nn.logical_to_mesh(nn.get_partition_spec(jax.eval_shape(own, jax.random.key(0))), (
        *rules, ("data", "data"), ("tensor", "tensor")))  # fmt: skip
    assert plan_of(bare, base_specs=specs) == plan
    assert plan_of(init, base_specs=specs) == plan
    in_boxes = nn.meta.replace_boxed(jax.eval_shape(own, jax.random.key(0)), specs)
    assert plan_of(init, base_specs=in_boxes) == plan
    unnamed = plan_of(bare)
    assert [leaf.base for leaf in unnamed.params] == [(None,) * len(leaf.shape) for leaf in unnamed.params]


@pytest.mark.parametrize("unbox", [False, True])
@pytest.mark.parametrize("name_of_layers", ["layers", None])
@pytest.mark.parametrize("names", [(None, "tensor"), ("embed", "mlp")])
def test_layers_are_no_dim_to_partition(names, name_of_layers, unbox):
    """The scan's name for its layers is no axis; 64 of them would be the largest dim of the biases."""
    made = zerojax.linen.init_fn(Scanned(names, 64, name_of_layers), EXAMPLE)
    init = (lambda key: nn.unbox(made(key))) if unbox else made
    plan = plan_of(init)
    assert {leaf.dim for leaf in plan.params} <= {1, 2}
    assert {leaf.base[0] for leaf in plan.params} == {None}


def test_a_rule_for_layers_is_a_wish():
    plan = plan_of(zerojax.linen.init_fn(Scanned(("embed", "mlp")), EXAMPLE), rules=(("layers", "data"),))
    assert {leaf.dim for leaf in plan.params if leaf.path.endswith("kernel")} == {0}


# ---- the state ----


def test_parameters_in_boxes_and_out_of_them():
    model, tx = MODELS["boxes"]["tensor"], OPTIMIZERS["adafactor"]
    init = zerojax.linen.init_fn(model, EXAMPLE)
    plan = plan_of(init)
    made = zerojax.init_state(init, tx, plan, jax.random.key(0))
    in_boxes = jax.jit(init)(jax.random.key(0))
    for params in (in_boxes, nn.unbox(in_boxes), jax.tree.map(np.asarray, in_boxes)):
        state = zerojax.init_state(init, tx, plan, jax.random.key(1), params=params)
        assert_same(state.params, made.params)
        assert_same(zerojax.gather_params(state.params, plan), nn.unbox(in_boxes))
    flax_state = zerojax.linen.create_train_state(
        init, tx, plan, jax.random.key(1), apply_fn=model.apply, params=in_boxes
    )
    assert isinstance(flax_state, TrainState)
    assert_same(flax_state.params, made.params)
    with pytest.raises(ValueError, match=r"in no boxes .*flax\.linen\.unbox"):
        zerojax.gather_params(in_boxes, plan)


def test_the_state_of_an_init_that_unboxes_names_of_no_axis():
    """`nn.unbox` under a mesh constrains by the names; these parameters are still made, each device its part."""
    made = zerojax.linen.init_fn(Scanned((None, "tensor")), EXAMPLE)
    init, tx = (lambda key: nn.unbox(made(key))), OPTIMIZERS["adafactor"]
    state = zerojax.init_state(init, tx, plan_of(init), jax.random.key(0))
    assert_close(state.params, jax.jit(init)(jax.random.key(0)), TOLERANCE)


class StateWithStatistics(TrainState):
    model_state: dict


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)])
def test_statistics_in_boxes(stage):
    """In a user's own loop with Flax's state; model state is whole, whatever its names."""
    model, tx = Centred((None, "tensor")), optax.adamw(1e-2)
    init = zerojax.linen.init_fn(model, EXAMPLE)
    made = jax.jit(init)(jax.random.key(0))
    assert made.model_state["batch_stats"]["mean"].names == ("tensor",)
    plan = zerojax.make_plan(init, tx, mesh_of("tensor"), zerojax.ZeroConfig(stage=stage))
    assert [(leaf.path, leaf.base) for leaf in plan.model_state] == [("batch_stats/mean", (None,))]

    def loss(params, batch, rng=None, model_state=None):
        out, new = model.apply({"params": params, **model_state}, batch["x"], mutable=["batch_stats"])
        return zerojax.Loss(jnp.sum(jnp.mean((out - batch["y"]) ** 2, -1)), len(out), model_state=new)

    @jax.jit
    def zero(state, batch):
        (_, aux), grads = zerojax.value_and_grad(loss, plan, has_aux=True)(
            state.params, batch, model_state=state.model_state
        )
        return state.apply_gradients(grads=grads, model_state=aux.model_state)

    @jax.jit
    def plain(state, batch):
        def mean(params):
            value = loss(params, batch, None, state.model_state)
            return value.total / value.weight, value.model_state

        grads, model_state = jax.grad(mean, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, model_state=model_state)

    state = zerojax.linen.create_train_state(
        init, tx, plan, jax.random.key(0), apply_fn=model.apply, state_class=StateWithStatistics
    )
    made = nn.unbox(made)
    right = StateWithStatistics.create(apply_fn=model.apply, tx=tx, params=made.params, model_state=made.model_state)
    for batch in batches():
        state, right = zero(state, batch), plain(right, batch)
    assert_close((state.params, state.opt_state, state.model_state), (right.params, right.opt_state, right.model_state),
                 TOLERANCE)  # fmt: skip
