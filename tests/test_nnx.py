"""Flax NNX: modules and optimizers made by the library are those that Flax makes, and train as those do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from reference import assert_close, make_mesh, wave

import zerojax
import zerojax.nnx

KEY = jax.random.key(0)
STEPS = 4


def eleven(rngs):
    """More layers than digits sort, of two forms."""
    return nnx.Sequential(*[nnx.Linear(16, 16, use_bias=i % 2 == 0, rngs=rngs) for i in range(11)])


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.dropout = nnx.Linear(16, 16, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(nnx.tanh(self.linear(x)))


def stack(make, rngs):
    return nnx.split_rngs(splits=2)(nnx.vmap(make, in_axes=0, out_axes=0))(rngs)


def through(layer, x, layers):
    return nnx.scan(lambda x, one: layer(one, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, layers)


class Stacked(nnx.Module):
    """Two stacks of two blocks with dropout, themselves stacked: keys of two dims; and one block beside, of none."""

    def __init__(self, rngs):
        self.first, self.stacks = Block(rngs), stack(lambda rngs: stack(Block, rngs), rngs)

    def __call__(self, x):
        one = lambda block, x: block(x)  # noqa: E731
        return through(lambda blocks, x: through(one, x, blocks), self.first(x), self.stacks)


def annotated(rngs):
    """One variable placed by its annotation, one never to be placed."""
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "data"))
    return nnx.Linear(16, 32, kernel_init=init, bias_metadata={"eager_sharding": False}, rngs=rngs)


def normed(rngs):
    return nnx.Sequential(nnx.Linear(16, 32, rngs=rngs), nnx.BatchNorm(32, rngs=rngs))


def two(rngs):
    return nnx.Sequential(nnx.Linear(16, 32, rngs=rngs), nnx.tanh, nnx.Linear(32, 8, use_bias=False, rngs=rngs))


def mean_square(model, x):
    return jnp.mean((model(x) - 0.5) ** 2)


def made(make, tx, **config):
    plan = zerojax.nnx.make_plan(make, tx, make_mesh(), zerojax.ZeroConfig(allow_whole=True, **config))
    return plan, *zerojax.nnx.create(make, tx, plan, KEY)


def by_flax(make, tx):
    """Annotations that are followed need a mesh."""
    with jax.set_mesh(make_mesh()):
        model = make(nnx.Rngs(KEY))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def trained(model, optimizer, gradient):
    """The losses of some steps; module and optimizer are changed in place."""

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = gradient(model, x)
        optimizer.update(model, grads)
        return loss

    return [step(model, optimizer, wave((16, 16), seed)) for seed in range(STEPS)]


def check(make, tx, **config):
    """The same losses, parameters and slots of the optimizer as with Flax alone, after some steps."""
    plan, model, optimizer = made(make, tx, **config)
    right, right_optimizer = by_flax(make, tx)
    ours = trained(model, optimizer, zerojax.nnx.value_and_grad(mean_square, plan))
    assert_close(ours, trained(right, right_optimizer, nnx.value_and_grad(mean_square)))
    for a, b in ((model, right), (optimizer, right_optimizer)):
        assert_close(jax.device_get(nnx.as_pure(nnx.state(a))), jax.device_get(nnx.as_pure(nnx.state(b))))
    return optimizer


# ---- what is made ----


@pytest.mark.parametrize(
    ("make", "default"), [(eleven, True), (Stacked, True), (annotated, True), (annotated, False), (normed, True)]
)
def test_modules_and_optimizers_have_the_structure_and_values_of_flaxs(make, default):
    """Also metadata; also the gathered copy."""
    tx = optax.chain(optax.clip(1.0), optax.contrib.cocob(), optax.inject_hyperparams(optax.adam)(1e-2))
    with nnx.use_eager_sharding(default):
        plan, model, optimizer = made(make, tx)
        right, right_optimizer = by_flax(make, tx)
    for ours, flaxs in ((model, right), (optimizer, right_optimizer), (zerojax.nnx.gather_model(model, plan), right)):
        assert jax.tree.structure(nnx.state(ours)) == jax.tree.structure(nnx.state(flaxs))
        jax.tree.map(assert_same_numbers, nnx.state(ours), nnx.state(flaxs))
    assert jax.tree.structure(optimizer.opt_state) == jax.tree.structure(right_optimizer.opt_state)


def assert_same_numbers(a, b):
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)  # an initializer under jit rounds otherwise than without


# ---- transformations ----


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 3])
def test_the_optimizers_state_is_in_its_own_slots(stage):
    """Fields of the states are not in the order of their names, and parameters and scalars have their turns."""
    inner = optax.MultiSteps(optax.apply_if_finite(optax.adam(1e-2), 3), 2).gradient_transformation()
    check(eleven, optax.chain(optax.rprop(1e-2), optax.contrib.cocob(), inner), stage=stage)


def test_transformations_whose_init_reads_parameters():
    parts = (
        optax.contrib.schedule_free_sgd(1e-2),
        optax.contrib.prodigy(),
        optax.inject_hyperparams(optax.adamw)(1e-2),
    )
    for tx in parts:
        check(two, tx)


def pure_state(f):
    return nnx.as_pure(jax.tree.map(f, nnx.state(two(nnx.Rngs(0)), nnx.Param)))


MASKS = {
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.5, mask=pure_state(lambda p: p.ndim > 1)),
    "masked": lambda: optax.masked(optax.adam(1e-2), pure_state(lambda p: p.ndim > 1)),
    "multi_transform": lambda: optax.multi_transform(
        {"a": optax.adam(1e-2), "b": optax.sgd(0.1)}, pure_state(lambda p: "ab"[p.ndim > 1])
    ),
    "functions": lambda: optax.partition(
        {"a": optax.adam(1e-2), "b": optax.sgd(0.1, momentum=0.9)},
        lambda params: jax.tree.map_with_path(lambda path, _: "ab"["kernel" in jax.tree_util.keystr(path)], params),
    ),
}


@pytest.mark.parametrize("name", list(MASKS))
def test_masks_and_labels_are_states_as_for_flax(name):
    check(two, MASKS[name]())


def test_masks_with_frozen_parameters():
    """A mask of all parameters, as it is written for all."""
    plan, model, optimizer = made(two, MASKS["adamw"](), frozen="*/bias")
    before = jax.device_get(nnx.as_pure(nnx.state(model, nnx.Param)))
    trained(model, optimizer, zerojax.nnx.value_and_grad(mean_square, plan))
    after = jax.device_get(nnx.as_pure(nnx.state(model, nnx.Param)))
    moved = jax.tree.map_with_path(lambda path, a, b: path[-1].key == "bias" or not np.array_equal(a, b), before, after)
    assert jax.tree.all(moved)
    np.testing.assert_array_equal(before["layers"][0]["bias"], after["layers"][0]["bias"])


@pytest.mark.parametrize("wrong", [nnx.to_pure_dict, lambda state: state])
def test_masks_of_another_form_are_refused_with_the_right_one(wrong):
    mask = wrong(jax.tree.map(lambda p: p.ndim > 1, nnx.state(two(nnx.Rngs(0)), nnx.Param)))
    with pytest.raises(ValueError, match=r"must be functions of that, or such a State: nnx\.as_pure\(jax\.tree\.map"):
        zerojax.nnx.make_plan(two, optax.adamw(1e-2, mask=mask), make_mesh())


# ---- randomness ----


def test_stacked_layers_draw_with_keys_of_each_device():
    """Every key of an array is folded by the device's number; one device computes it with each device's keys."""
    tx = optax.sgd(0.1)
    plan, model, _ = made(Stacked, tx)
    right, _ = by_flax(Stacked, tx)
    x = wave((16, 16), 0)

    def folded(model, number):
        def fold(v):
            keys = v.get_value()
            new = [jax.random.fold_in(key, number) for key in keys.ravel()]
            return v.replace(jnp.stack(new).reshape(keys.shape))

        graphdef, state = nnx.split(model)
        is_variable = lambda v: isinstance(v, nnx.Variable)  # noqa: E731
        state = jax.tree.map(lambda v: fold(v) if isinstance(v, nnx.RngKey) else v.copy(), state, is_leaf=is_variable)
        return nnx.merge(graphdef, state)

    def whole_loss(model, x):
        return sum(mean_square(folded(model, i), x[2 * i : 2 * i + 2]) for i in range(8)) / 8

    value, grads = nnx.jit(nnx.value_and_grad(whole_loss))(right, x)
    measured = zerojax.nnx.make_eval_step(mean_square, plan)(model, x)["loss"]
    loss, ours = nnx.jit(zerojax.nnx.value_and_grad(mean_square, plan))(model, x)
    assert_close((loss, measured), (value, value))
    assert_close(*(jax.device_get(nnx.as_pure(nnx.state(g, nnx.Param))) for g in (ours, grads)))
