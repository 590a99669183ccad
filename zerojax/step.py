"""The steps. Their upper half, the gradient, runs under `jax.shard_map` on every device's own rows. The lower half, the
optimizer, sees global arrays under ``jit``, so that norms, trust ratios and matrix products are those of whole
parameters.
"""

import dataclasses
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax import lax
from jax.sharding import PartitionSpec

from zerojax import optimizer
from zerojax.contracts import Loss, TrainState, Tree
from zerojax.gradient import gradient_of
from zerojax.losses import add_metrics, check_key, is_key_array, named
from zerojax.plan import Plan, is_kind_of, mesh_context, on_own_mesh
from zerojax.precision import cast_like, without_overwritten
from zerojax.scaling import Watch, unless_overflow
from zerojax.state import (
    check_batch,
    check_own_update,
    check_params,
    check_state,
    check_transform,
    place_batch,
    shapes_of,
    with_placed_scalars,
)


class _Returned:
    """Knows again the state that a step returned last, with the very arrays in it: looking at each takes long.

    It holds neither: memory is free when the user lets go of the state.
    """

    def __init__(self):
        self._state, self._arrays = lambda: None, ()

    def note(self, state: Any):
        self._state, self._arrays = weakref.ref(state), self._of(state)

    def is_it(self, state: Any) -> bool:
        return state is self._state() and not state.step.is_deleted() and self._of(state) == self._arrays

    def _of(self, state: Any) -> tuple[int, ...]:
        return tuple(map(id, jax.tree.leaves(state)))


@dataclass(frozen=True)
class Step:
    """A compiled step with its checks: ``step(state, batch)``.

    Attributes:
      plan: what the state must fit.
      micro_batches: into how many parts each device's rows are divided.
      jitted: the function under ``jax.jit``.
      loss_fn: what is differentiated, if anything is.
      watch: raises if training is stuck.
      returned: the state that it returned last, which fits the plan and needs no second look.
    """

    plan: Plan
    micro_batches: int
    jitted: Any
    loss_fn: Callable | None = None
    watch: Watch | None = dataclasses.field(default=None, compare=False, repr=False)
    returned: _Returned = dataclasses.field(default_factory=_Returned, compare=False, repr=False)

    def __call__(self, state: TrainState, batch: Tree) -> Any:
        if not self.returned.is_it(state):
            state = on_own_mesh(with_placed_scalars(state, self.plan), self.plan)
            check_state(state, self.plan)
        batch = place_batch(batch, self.plan)
        check_batch(batch, self.plan, micro_batches=self.micro_batches)
        if self.watch:
            self.watch.check()
        with mesh_context(self.plan.mesh):
            made = self.jitted(state, batch)
        if self.watch:
            self.watch.add(made[1]["stuck"])
        self.returned.note(made[0])
        return made

    def lower(self, state: TrainState, batch: Tree) -> jax.stages.Lowered:
        """Lower the step for arrays or shapes (``plan.abstract_state``, `jax.ShapeDtypeStruct`)."""
        batch = shapes_of(batch)
        check_batch(batch, self.plan, micro_batches=self.micro_batches)
        with mesh_context(self.plan.mesh):
            return self.jitted.lower(state, batch)


def make_train_step(loss_fn: Callable, tx: optax.GradientTransformation, plan: Plan) -> Step:
    """One training step of the plan's stage, compiled; it takes over the memory of the state that it is given.

    Args:
      loss_fn: ``loss_fn(params, batch, rng)``, with mutable model state ``loss_fn(params, batch, rng, model_state)``;
        trailing arguments may be left out. It sees whole parameters in ``compute_dtype`` and the rows of one
        micro-batch, and returns the mean over those rows, or a `Loss`, or a tuple of one of them and of other arrays.
        What it computes is what one device would (``ZeroConfig(rows=...)``). If the batch is a tuple, its parts may be
        arguments of their own: ``loss_fn(params, images, labels)``. The shard axes are named axes inside it
        (``nn.BatchNorm(axis_name="data")``). ``rng`` differs by step and micro-batch, and where rows stand alone by
        device.
      tx: the transformation that the plan was made for. It sees the mean gradient in float32, and gets ``value``, the
        mean loss, and ``grad`` as extra arguments if it takes such (`optax.GradientTransformationExtraArgs`).
      plan: from `make_plan`.

    Returns:
      ``step(state, batch) -> (state, metrics)``. The batch is a tree of arrays with rows in dim 0, on the host or
      placed by ``plan.batch_sharding``; micro-batch ``i`` of ``k`` holds the rows ``i, i + k, i + 2 k, ...``. Metrics:
      ``loss``; ``grad_norm`` of the whole mean gradient in float32, before ``tx``; ``step``, the updates made so far;
      and the loss's own: those of a `Loss`, and what stands beside the loss in a tuple, by its names or as ``aux``. Of
      that, what has rows in dim 0 comes back for all rows of the batch, in their order and divided over the devices;
      the rest is the mean over the micro-batches. All stay on the devices until they are read. Where the plan scales
      the loss or skips steps, also ``loss_scale``, the one that this step used (``grad_norm`` is that of the gradient
      without it); ``skipped``, whether the gradient was not finite, so that the state is the old one but for its loss
      scale; and ``stuck``, the overflows in a row that no lower scale could help.

    Raises:
      ValueError: for a ``tx`` that asks for more than that (a line search, gradients of single rows); for a ``tx`` or
        a state that does not fit the plan, a state that was donated before, rows that do not divide, a loss that is no
        scalar; all before compilation.
      FloatingPointError: from ``step``, if ``stuck`` reached ``patience`` 8 calls before. The state that it was given
        stays usable.

    >>> import jax.numpy as jnp
    >>> from zerojax import init_state, make_plan
    >>> init_fn, tx = lambda key: {"w": jnp.zeros((8,))}, optax.sgd(0.5)
    >>> plan = make_plan(init_fn, tx, jax.make_mesh((8,), ("data",)))
    >>> step = make_train_step(lambda p, x: jnp.mean((x @ p["w"] - 1) ** 2), tx, plan)
    >>> state, metrics = step(init_state(init_fn, tx, plan, jax.random.key(0)), jnp.ones((16, 8)))
    >>> float(metrics["loss"]), int(state.step)
    (1.0, 1)
    """
    check_transform(tx, plan)
    optimizer.check_update(tx, plan)
    gradient, scaling = gradient_of(loss_fn, plan), plan.config.scaling

    def train_step(state, batch):
        rng = jax.random.fold_in(state.rng, state.step)
        scale = state.loss_scale
        scale_now = scale and scale.scale
        loss, grads, model_state, aux = gradient(state.params, batch, rng, state.model_state, scale_now)
        params, opt_state = optimizer.updated(tx, grads, loss.total, state, plan)
        new = TrainState(state.step + 1, params, opt_state, state.rng, model_state, state.loss_scale)
        metrics = {"loss": loss.total, "grad_norm": optax.tree.norm(without_overwritten(grads))}
        if scaling and scale:
            new, judged = unless_overflow(scaling, scale, new, state, grads)
            metrics |= judged
        metrics = add_metrics({**metrics, "step": new.step}, loss.metrics)
        metrics = lax.with_sharding_constraint(metrics, plan.replicated)
        return new, add_metrics(metrics, named(*aux))

    placed = plan.state_shardings
    jitted = jax.jit(
        train_step,
        donate_argnums=() if getattr(jax.config, "jax_debug_infs", False) else 0,  # which looks at what was given again
        in_shardings=(placed, plan.batch_sharding),
        out_shardings=(placed, None),
        compiler_options=plan.compiler_options,
    )
    return Step(plan, plan.config.accumulate, jitted, loss_fn, Watch(scaling) if scaling else None)


def value_and_grad(loss_fn: Callable, plan: Plan, has_aux: bool = False) -> Callable:
    """Drop-in for `jax.value_and_grad` inside a user's own ``jax.jit``: the mean loss and its partitioned gradient.

    Args:
      loss_fn: as for `make_train_step`.
      plan: its stage, accumulation and precision hold.
      has_aux: return ``(loss, aux)`` for ``loss``, where ``aux`` is what the loss returned beside its value, if that
        was a tuple; else a `Loss` with the sum and weight of all rows, the mean metrics and the new model state.

    Returns:
      ``f(params, batch, rng=None, model_state=None) -> (loss, gradients)``, or with several parts of the batch,
      ``f(params, images, labels)``: the gradient of the mean over all rows,
      placed like the parameters and in their dtype; ``None`` for leaves that are not floating, or frozen. Fold the
      step into ``rng`` yourself; micro-batch and device are folded here.

    Raises:
      ValueError: as `make_train_step`, while tracing; also if another mesh than the plan's is active, or if the plan
        scales the loss, skips steps or rounds stochastically, which is part of the update and so yours here.

    >>> import jax.numpy as jnp
    >>> from zerojax import make_plan
    >>> params, tx = {"w": jnp.ones((8,))}, optax.sgd(0.5)
    >>> plan = make_plan(lambda key: params, tx, jax.make_mesh((8,), ("data",)))
    >>> f = jax.jit(value_and_grad(lambda p, x: jnp.mean(x @ p["w"]), plan))
    >>> loss, grads = f(jax.device_put(params, plan.state_shardings.params), jnp.ones((16, 8)))
    >>> float(loss), tuple(grads["w"].sharding.spec)
    (8.0, ('data',))
    """
    check_own_update(plan, "value_and_grad")
    everything = sums_and_grad(loss_fn, plan)

    def run(params, *arguments, **others):
        loss, sums, aux, grads = everything(params, *of_call(*arguments, **others))
        if aux and not has_aux:
            raise ValueError("the loss returned (loss, aux): pass has_aux=True to value_and_grad, and get both")
        return ((loss, aux[0] if aux else sums), grads) if has_aux else (loss, grads)

    return run


def sums_and_grad(loss_fn: Callable, plan: Plan) -> Callable:
    """``f(params, batch, rng, model_state) -> (mean loss, Loss of all rows, () or (aux,), gradients)``, with checks."""
    gradient = gradient_of(loss_fn, plan)

    def run(params, batch, rng, model_state):
        check_params(params, plan)
        check_batch(batch, plan, micro_batches=plan.config.accumulate)
        check_key(rng)
        return of_kind(params)(params, batch, rng, model_state)

    def computed(params, batch, rng, model_state):
        loss, grads, model_state, aux = gradient(params, batch, rng, model_state, None)
        sums = Loss(loss.total * loss.weight, loss.weight, loss.metrics, model_state)
        return loss.total, sums, aux, cast_like(grads, plan.trained(params))

    def of_kind(params) -> Callable:
        if not _is_explicit(params, plan):
            return computed
        placed = jax.tree.map(lambda sharding: sharding.spec, plan.trained(plan.state_shardings.params))
        auto_axes: Any = jax.sharding.auto_axes
        return auto_axes(computed, out_sharding=(PartitionSpec(), PartitionSpec(), PartitionSpec(), placed))

    return run


def of_call(*arguments: Any, rng: Any = None, model_state: Tree = None) -> tuple[Tree, Any, Tree]:
    """``(batch, rng, model_state)`` of a call as of ``loss_fn``: a batch, or its parts one by one; then the others."""
    parts = list(itertools.takewhile(lambda a: a is not None and not is_key_array(a), arguments))
    if not parts:
        raise ValueError("the batch comes first, then rng: f(params, batch, rng=None, model_state=None)")
    others = [*arguments[len(parts) :], *[None] * 2][:2]
    batch = parts[0] if len(parts) == 1 else tuple(parts)
    return batch, others[0] if rng is None else rng, others[1] if model_state is None else model_state


def _is_explicit(params: Tree, plan: Plan) -> bool:
    """Whether the plan's mesh is active with Explicit axes, and parameters lie on it so.

    Of other meshes than their own JAX refuses arrays in words that do not help.
    """
    active, own = jax.sharding.get_abstract_mesh(), plan.mesh.abstract_mesh
    if active.empty or (active.shape_tuple, active.axis_types) == (own.shape_tuple, own.axis_types):
        return False
    meshes = {jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(params)}
    if is_kind_of(active, plan) and all(mesh.empty or mesh == active for mesh in meshes):
        return True
    raise ValueError(f"the active mesh {active} is not the plan's, on which the state lies; use `with jax.set_mesh("
                     "plan.mesh)`, which has the same devices with Auto axes, or no active mesh")  # fmt: skip
