"""Every optimizer and transformation of optax trains as it does on one device.

The library has no code for any of them: they see global arrays. So one table covers all, and what optax adds to its
public names has to be added there.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizers
import pytest
from jax.sharding import PartitionSpec as P
from reference import make_mesh

import zerojax

STEPS = 4
NAMES = list(optimizers.available(optimizers.TABLE))


def test_the_table_is_complete():
    """A new name in optax must be added to the table, or to those that are no transformation."""
    others = {name for names in optimizers.NO_TRANSFORMATION.values() for name in names}
    known = {*optimizers.TABLE, *optimizers.REFUSED, *optimizers.APART, *others}
    assert sorted(set(optimizers.exported()) - known) == []


def test_the_page_lists_the_table():
    text = (Path(__file__).parent.parent / "docs" / "optimizers.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE))
    assert listed == {*optimizers.TABLE, *optimizers.REFUSED}


def twin(tx, params):
    """Plain optax on one device: ``(params, opt_state, losses)``."""

    @jax.jit
    def step(params, opt_state, rows):
        value, grads = jax.value_and_grad(optimizers.loss_fn)(params, rows)
        updates, opt_state = tx.update(grads, opt_state, params, value=value, grad=grads)
        return optax.apply_updates(params, updates), opt_state, value

    opt_state, losses = jax.jit(tx.init)(params), []
    for i in range(STEPS):
        params, opt_state, loss = step(params, opt_state, optimizers.rows(i))
        losses.append(loss)
    return params, opt_state, losses


def partitioned(tx, params, stage, **config):
    mesh = make_mesh(explicit=stage % 2 == 1)
    plan = zerojax.make_plan(lambda key: params, tx, mesh, zerojax.ZeroConfig(stage=stage, allow_whole=True, **config))
    state = zerojax.init_state(lambda key: params, tx, plan, jax.random.key(0))
    step, losses = zerojax.make_train_step(optimizers.loss_fn, tx, plan), []
    for i in range(STEPS):
        state, metrics = step(state, optimizers.rows(i))
        losses.append(metrics["loss"])
    return plan, state, losses


def numbers(leaf) -> np.ndarray:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf).astype(np.float64)


def differences(ours, right) -> dict[str, float]:
    """By path: the largest difference relative to the leaf's largest number."""
    assert jax.tree.structure(ours) == jax.tree.structure(right)
    found = {}
    for (keys, a), b in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(right), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), jax.tree_util.keystr(keys)
        a, b = numbers(a), numbers(b)
        apart = np.subtract(a, b, where=a != b, out=np.zeros_like(a))  # infinities that are the same differ by nothing
        largest = np.abs(b).max(initial=0, where=np.isfinite(b))
        error = np.abs(apart).max(initial=0) / max(largest, 1e-30)
        found[jax.tree_util.keystr(keys, simple=True, separator="/")] = float(error)
    return found


def check(names, stage, leaves, **config):
    transformations = {name: optimizers.TABLE[name].make() for name in names}
    tx, params = optimizers.abreast(transformations), optimizers.parameters(names, leaves)
    right = jax.device_get(twin(tx, params))
    _, state, losses = partitioned(tx, params, stage, **config)
    np.testing.assert_allclose(jax.device_get(losses), right[2], rtol=1e-6)
    wrong = {}
    for ours, theirs in ((state.params, right[0]), (state.opt_state, right[1])):
        for path, error in differences(jax.device_get(ours), theirs).items():
            if not error <= optimizers.TABLE[path.split("/")[0]].tolerance:
                wrong[path] = error
    assert wrong == {}
    still = {name for name in names if jax.tree.all(jax.tree.map(np.array_equal, right[0][name], params[name]))}
    assert still <= {"set_to_zero"}  # the others must train, or equality shows nothing


@pytest.mark.filterwarnings("ignore:.* is deprecated:DeprecationWarning")  # optax still exports these
@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("stage", range(4))
def test_optimizers_train_as_on_one_device(stage, part):
    """Each at one stage, by turns; what they are made of is in the long run."""
    names = list(optimizers.available(optimizers.OPTIMIZERS | optimizers.WRAPPERS))
    check(names[stage + 4 * part :: 8], stage, ("matrix", "scalar"))


@pytest.mark.night
@pytest.mark.filterwarnings("ignore:.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("stage", range(4))
def test_all_train_as_on_one_device(stage, part):
    """All, each at another stage, with two micro-batches: stages 1, 2 and 3 give the optimizer the same arrays."""
    check(NAMES[(stage + 2) % 4 + 4 * part :: 8], stage, ("matrix", "odd", "scalar"), accumulate=2)


@pytest.mark.filterwarnings('ignore:"seed" is deprecated:DeprecationWarning')
@pytest.mark.parametrize("name", list(optimizers.available(optimizers.REFUSED)))
def test_what_a_step_cannot_serve_is_refused(name):
    make, words = optimizers.REFUSED[name]
    params = optimizers.parameters([name])
    plan = zerojax.make_plan(lambda key: params, make(), make_mesh(), zerojax.ZeroConfig(allow_whole=True))
    with pytest.raises(ValueError, match=words):
        zerojax.make_train_step(optimizers.loss_fn, make(), plan)


# ---- the check for a user's own ----

PLAN = {
    "data": lambda: zerojax.make_plan(big, optax.sgd(0.1), make_mesh(), zerojax.ZeroConfig(stage=2)),
    "grid": lambda: zerojax.make_plan(
        big, optax.sgd(0.1), jax.make_mesh((4, 2), ("data", "tensor")), zerojax.ZeroConfig(overrides={"layers/w": 0}),
        base_specs={"layers": {"w": P(None, None, "tensor"), "b": None}, "embed": P("tensor", None), "count": None},
    ),
}  # fmt: skip


def big(key):
    layers = {"w": jax.random.normal(key, (16, 300, 600)), "b": jnp.zeros((16, 600))}
    return {"layers": layers, "embed": jnp.ones((4000, 304)), "count": jnp.int32(3)}


def local_norm(grads, params):
    """Wrong: as carried over from code that sees shards, each divides by the norm of its own."""
    mesh = jax.sharding.get_abstract_mesh()
    spec = P(None, "data")
    divide = jax.shard_map(lambda g: g / jnp.linalg.norm(g), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return {**grads, "embed": divide(grads["embed"])}


@pytest.mark.night
@pytest.mark.parametrize("kind", list(PLAN))
def test_a_right_transformation_passes_the_check(kind):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(1e-2, mask=by_path))
    found = zerojax.check_optimizer(tx, PLAN[kind](), steps=3)
    assert 0 < max(difference.error for difference in found.differences) < 1e-5
    assert {d.path for d in found.differences} >= {"losses", "params/layers/w", "params/layers/b", "params/embed"}
    assert "largest difference" in str(found)


def by_path(params):
    return jax.tree.map_with_path(lambda keys, p: keys[-1].key == "w", params)


def test_the_check_names_what_differs():
    tx = optax.chain(optax.stateless(local_norm), optax.sgd(0.1, momentum=0.9))
    with pytest.raises(ValueError, match=r"params/embed by .*\n(.*\n)*.*one device") as error:
        zerojax.check_optimizer(tx, PLAN["data"]())
    assert "trace/embed" in str(error.value)
    assert "layers/w by" not in str(error.value)


def test_the_check_needs_devices_and_what_a_step_can_serve():
    abstract = zerojax.make_plan(big, optax.sgd(0.1), jax.sharding.AbstractMesh((8,), ("data",)))
    with pytest.raises(ValueError, match="no devices"):
        zerojax.check_optimizer(optax.sgd(0.1), abstract)
    with pytest.raises(ValueError, match="value_fn"):
        zerojax.check_optimizer(optax.lbfgs(), PLAN["data"](), steps=1)
