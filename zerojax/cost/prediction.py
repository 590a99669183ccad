"""What a step will need, before anything is compiled: exact where the plan decides it, traced where the loss does."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zerojax.contracts import Tree
from zerojax.cost import traces
from zerojax.gradient import gradient_of, reduces_each
from zerojax.losses import as_loss, with_arguments, without_aux
from zerojax.placement import Leaf, axes_of
from zerojax.plan import Plan
from zerojax.precision import gradient_dtype, merge
from zerojax.state import check_batch
from zerojax.units import explanation
from zerojax.ways import on_devices


@dataclass(frozen=True)
class Prediction:
    """Bytes of one device, operations and communication of one step.

    Attributes:
      parameters, optimizer, other: the state at rest; other is model state, key, step and loss scale.
      batch: this device's rows.
      gradients: what is held of them at the end of backward: whole, or this device's part.
      gathered: parameters in the dtype of computation that are whole at a time; at stage 3 those of two units.
      activations: what else the loss makes in one micro-batch, at most at a time, if equations run one by one and what
        is made element by element is not stored.
      wire_bytes: that a device sends in a step.
      flops: of matrix products, of one device in a step; what backward makes again is counted again. Axes that are no
        shard axes (of tensor parallelism) are taken to divide them evenly.
    """

    parameters: int
    optimizer: int
    other: int
    batch: int
    gradients: int
    gathered: int
    activations: int
    wire_bytes: float
    flops: float

    @property
    def at_rest(self) -> int:
        """Between steps."""
        return self.parameters + self.optimizer + self.other

    @property
    def peak(self) -> int:
        """All of it."""
        return self.at_rest + self.batch + self.gradients + self.gathered + self.activations

    def to_dict(self) -> dict:
        """Plain numbers, for JSON."""
        return asdict(self) | {"at_rest": self.at_rest, "peak": self.peak}


def predict(loss_fn: Callable, plan: Plan, batch: Tree) -> Prediction:
    """What a train step of this loss will need; traced only. Also for a mesh of abstract devices.

    Args:
      loss_fn: as for ``make_train_step``.
      batch: the global batch of a step, arrays or shapes.

    >>> import optax
    >>> from zerojax import ZeroConfig, make_plan
    >>> mesh = jax.sharding.AbstractMesh((64,), ("data",))
    >>> plan = make_plan(lambda key: {"w": jnp.zeros((512, 512))}, optax.adam(0.1), mesh, ZeroConfig(stage=1))
    >>> rows = jax.ShapeDtypeStruct((256, 512), "float32")
    >>> found = predict(lambda p, x: jnp.mean((x @ p["w"]) ** 2), plan, rows)
    >>> found.parameters, found.optimizer, found.gradients, found.gathered, found.wire_bytes
    (16384, 32772, 16384, 1048576, 2064384.0)
    """
    check_batch(batch, plan, micro_batches=plan.config.accumulate)
    part = jax.tree.map(lambda a: jax.ShapeDtypeStruct(_micro_batch(a.shape, plan), a.dtype), batch)
    closed = _trace(loss_fn, plan, part)
    return Prediction(
        parameters=plan.bytes_per_device("params"),
        optimizer=plan.bytes_per_device("opt_state"),
        other=plan.bytes_per_device() - sum(map(plan.bytes_per_device, ("params", "opt_state"))),
        batch=sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(batch)) // plan.devices,
        gradients=gradient_bytes(loss_fn, plan, batch),
        gathered=gathered_bytes(loss_fn, plan, batch),
        activations=traces.peak_bytes(closed, results=False),
        wire_bytes=wire_bytes(plan),
        flops=plan.config.accumulate * traces.flops(closed) * plan.devices / plan.mesh.size,
    )


def gradient_bytes(loss_fn: Callable, plan: Plan, batch: Tree) -> int:
    """Of the gradients that a device holds at the end of backward.

    Reduced ones are this device's part, in ``reduce_dtype``. Whole ones are in the dtype of computation; at stage 0
    the copies of parameters go while reduced gradients come, which makes no more. Several micro-batches need their sum
    besides, in float32: whole gradients are added to it unit by unit, those of stacked layers all at once.
    """
    config, in_part = plan.config, plan.config.stage > 0 and reduces_each(plan)
    total, sum_size = 0, jnp.dtype(gradient_dtype(config.precision)).itemsize if config.accumulate > 1 else 0
    units = () if in_part or config.accumulate == 1 else _units(loss_fn, plan.with_stage(1), batch)
    stacked = {path for unit in units if unit.turns > 1 for path in unit.params}
    for leaf in plan.wire:
        size = leaf.size // _other_axes(leaf, plan) if leaf.trained else 0
        own = jnp.dtype(config.precision.reduce_dtype if in_part else leaf.compute_dtype).itemsize
        each = sum_size if units and leaf.path not in stacked else sum_size + own
        total += size * each // (plan.devices if in_part and leaf.dim is not None else 1)
    return total + max((unit.bytes for unit in units if unit.turns == 1), default=0)


def gathered_bytes(loss_fn: Callable, plan: Plan, batch: Tree) -> int:
    """Of parameters in the dtype of computation that are whole at a time, and not the state itself."""
    if plan.config.stage < 3:
        return sum(
            leaf.size * jnp.dtype(leaf.compute_dtype).itemsize // _other_axes(leaf, plan)
            for leaf in plan.wire
            if leaf.dim is not None or leaf.compute_dtype != leaf.dtype.name
        )
    return explanation.Explanation(_units(loss_fn, plan, batch), True).whole_bytes


def _units(loss_fn: Callable, plan: Plan, batch: Tree) -> tuple[explanation.UnitUse, ...]:
    """The gather units of the loss, with what a device holds of their parameters when they are whole."""
    gradient, state = gradient_of(loss_fn, plan), plan.abstract_state
    scale = None if state.loss_scale is None else jax.ShapeDtypeStruct((), "float32")
    units = explanation.explain(gradient, state.params, batch, state.rng, state.model_state, scale).units
    return tuple(_divided(unit, plan) for unit in units)


def _divided(unit: explanation.UnitUse, plan: Plan) -> explanation.UnitUse:
    """What other axes than the shard axes leave of a unit's parameters on a device."""
    leaves = [leaf for leaf in plan.wire if leaf.path in unit.params]
    part = sum(leaf.size / _other_axes(leaf, plan) for leaf in leaves) / max(1, sum(leaf.size for leaf in leaves))
    return replace(unit, bytes=int(unit.bytes * part))


def wire_bytes(plan: Plan) -> float:
    """Bytes that a device sends in a step by the plan's stage: parameters gathered, gradients reduced, ring rule.

    >>> import optax
    >>> from zerojax import ZeroConfig, make_plan
    >>> mesh, config = jax.sharding.AbstractMesh((8,), ("data",)), ZeroConfig(precision="c=bf16", accumulate=4)
    >>> plan = make_plan(lambda key: {"w": jnp.zeros((8, 1000))}, optax.adam(0.1), mesh, config)
    >>> wire_bytes(plan) == 7 / 8 * 8000 * (4 * 2 * 2 + 4 * 4)  # twice bf16 and once float32, four times
    True
    """
    config = plan.config
    reduced = jnp.dtype(config.precision.reduce_dtype).itemsize
    turns = config.accumulate if reduces_each(plan) else 1
    gathers = 2 * config.accumulate if config.stage == 3 else 1
    total = 0.0
    for leaf in plan.wire:
        size = leaf.size / _other_axes(leaf, plan)
        if leaf.dim is not None:
            total += size * gathers * jnp.dtype(leaf.gather_dtype).itemsize
        if leaf.trained:
            total += size * turns * reduced * (1 if leaf.dim is not None else 2)
    return total * (plan.devices - 1) / plan.devices


def _other_axes(leaf: Leaf, plan: Plan) -> int:
    """Into how many parts axes that are no shard axes divide a leaf."""
    return math.prod(plan.mesh.shape[axis] for entry in leaf.base for axis in axes_of(entry))


def _micro_batch(shape: tuple[int, ...], plan: Plan) -> tuple[int, ...]:
    """Of one device in one micro-batch, times the devices."""
    return (shape[0] // plan.config.accumulate, *shape[1:])


def _trace(loss_fn: Callable, plan: Plan, batch: Tree) -> Any:
    """The gradient of one micro-batch on one device, on whole parameters in the dtype of computation."""
    call = with_arguments(loss_fn)

    def local(whole, others, batch, rng, model_state):
        def loss(trained):
            given = iter(trained)
            seen = [next(given) if leaf.trained else a for a, leaf in zip(whole, plan.wire, strict=True)]
            found = as_loss(without_aux(call(merge(seen, others), batch, rng, model_state))[0], "loss_fn")
            return found.total / found.weight, (found.metrics, found.model_state)

        return jax.grad(loss, has_aux=True)([a for a, leaf in zip(whole, plan.wire, strict=True) if leaf.trained])

    state = plan.abstract_state
    whole = [jax.ShapeDtypeStruct(leaf.shape, leaf.compute_dtype) for leaf in plan.wire]
    everywhere = PartitionSpec()
    specs = (everywhere, everywhere, plan.batch_sharding.spec, everywhere, everywhere)
    run = on_devices(local, specs, everywhere, plan)
    params = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state.params)
    traced = jax.make_jaxpr(run)(whole, params, batch, jax.random.key(0), state.model_state)
    (mapped,) = [eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "shard_map"]
    return mapped.params["jaxpr"]
