"""The mesh axis of a collective: from every form in which compilers write groups, and on meshes with other axes."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from reference import make_grid, wave

import zerojax
from zerojax.cost.hlo import collectives

SIZES = {"a": 2, "b": 4}  # devices 0 to 7, b first to change


def _entry(line):
    return f"HloModule m, num_partitions=8\n\nENTRY %main (x: f32[8]) -> f32[8] {{\n  {line}\n}}\n"


@pytest.mark.parametrize(("groups", "axis"), [
    ("replica_groups={{0,1,2,3},{4,5,6,7}}", "b"), ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", "a"),
    ("replica_groups={{0,1,2,3,4,5,6,7}}", "a+b"), ("replica_groups={}", "a+b"), ("replica_groups=[2,4]<=[8]", "b"),
    ("replica_groups=[4,2]<=[2,4]T(1,0)", "a"), ("replica_groups=[1,8]<=[8]", "a+b"),
    ("replica_groups=[4,2]<=[4,2]", "b"), ("replica_groups=mesh['a'=2,'b'=4] {'b'}", "b"),
    ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", "a+b"), ("replica_groups=mesh['axis_1'=8] {'axis_1'}", "a+b"),
])  # fmt: skip
def test_the_mesh_axis_of_a_collective(groups, axis):
    text = _entry(f"%c = f32[8]{{0}} all-reduce(%x), {groups}, to_apply=%add")
    assert [c.axis for c in collectives(text, SIZES)] == [axis]
    assert [c.axis for c in collectives(text)] == [""]


def test_the_mesh_axis_of_a_permute():
    text = _entry("%c = f32[8]{0} collective-permute(%x), source_target_pairs={{0,4},{4,0},{1,5},{5,1}}")
    assert [c.axis for c in collectives(text, SIZES)] == ["a"]


def test_an_axis_of_three():
    axes = {"x": 2, "data": 2, "z": 2}
    text = _entry("%c = f32[8]{0} all-reduce(%x), replica_groups=[4,2]<=[2,2,2]T(0,2,1), to_apply=%add")
    assert [c.axis for c in collectives(text, axes)] == ["data"]


@pytest.mark.parametrize(("axes", "name"), [("a", "a"), ("b", "b"), (("a", "b"), "a+b")])
def test_the_mesh_axis_in_a_compiled_program(axes, name):
    mesh = make_grid((2, 4), ("a", "b"))
    f = jax.shard_map(
        lambda x: jax.lax.psum(x, axes), mesh=mesh, in_specs=P(("a", "b")), out_specs=P(), check_vma=False
    )
    text = jax.jit(f).lower(jnp.ones(8)).compile().as_text()
    assert {c.axis for c in collectives(text, SIZES)} <= {name, ""}
    assert name in {c.axis for c in collectives(text, SIZES)}


# ---- tensor axes ----


def two_layers(params, x):
    return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"] - x) ** 2)


def scanned(params, x):
    layer = lambda x, w: (x + jax.nn.relu(x @ w["up"]) @ w["down"], None)  # noqa: E731
    return jnp.mean((jax.lax.scan(layer, x, params)[0]) ** 2)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("loss", [two_layers, scanned])
@pytest.mark.parametrize("kinds", ["auto", pytest.param("explicit", marks=pytest.mark.long)])
def test_what_tensor_axes_partition_travels_in_parts(stage, loss, kinds):
    """Whole matrices were gathered and reduced on every device of the tensor axis, three times the bytes."""
    lead = (3,) if loss is scanned else ()
    shapes = {"up": (*lead, 256, 512), "down": (*lead, 512, 256)}
    specs = {"up": P(*(None,) * len(lead), None, "tensor"), "down": P(*(None,) * len(lead), "tensor", None)}
    mesh = make_grid((4, 2), ("data", "tensor"), kinds)
    plan = zerojax.make_plan(
        lambda key: {name: wave(shape, 1) for name, shape in shapes.items()}, optax.sgd(0.1), mesh,
        zerojax.ZeroConfig(stage=stage), base_specs=specs,
    )  # fmt: skip
    step = zerojax.make_train_step(loss, optax.sgd(0.1), plan)
    report = zerojax.report(step, plan.abstract_state, jax.ShapeDtypeStruct((32, 256), "float32"))
    of_data = [c for c in report.collectives if c.axis == "data" and c.elements > 16]
    assert {c.kind for c in of_data} == {"all-gather", "reduce-scatter"}
    assert max(c.elements for c in of_data) <= 256 * 512 // 2 * (lead or (1,))[0]
    assert sum(c.wire_bytes for c in of_data) <= report.predicted.wire_bytes
    others = sum(c.wire_bytes for c in report.collectives if c.axis != "data")
    assert others <= 20 * 32 // 4 * 256 * 4 * 3  # of activations, some for each layer
    assert report.predicted.flops == pytest.approx(2 * 8 * 256 * 512 * 2 * 3 * (lead or (1,))[0] / 2, rel=0.2)
