"""Evaluation: means over any number of rows, without a gradient."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zerojax import collectives, tables, ways
from zerojax.contracts import Loss, TrainState, Tree
from zerojax.losses import add_metrics, as_loss, divide, fold, named, weighted, with_arguments, without_aux
from zerojax.placement import with_paths
from zerojax.plan import Plan, mesh_context
from zerojax.precision import merge, numbers
from zerojax.state import check_batch, evaluated, place_rows, shapes_of
from zerojax.units.spread import UnfitError
from zerojax.ways import Way


@dataclass(frozen=True)
class EvalStep:
    """A compiled evaluation with its checks: ``step(state, batch)``, for any number of rows.

    Attributes:
      plan: what the state must fit.
      jitted: the function under ``jax.jit``, of the state, the rows that are divided over the devices, and the others.
    """

    plan: Plan
    jitted: Any

    def __call__(self, state: Any, batch: Tree) -> dict[str, jax.Array]:
        state, (rows, rest) = evaluated(state, self.plan), place_rows(batch, self.plan)
        with mesh_context(self.plan.mesh):
            return self.jitted(state, rows, rest)

    def lower(self, state: TrainState, batch: Tree) -> jax.stages.Lowered:
        """Lower the step for arrays or shapes, with rows that divide."""
        batch = shapes_of(batch)
        check_batch(batch, self.plan, micro_batches=1)
        with mesh_context(self.plan.mesh):
            return self.jitted.lower(replace(state, opt_state=None, loss_scale=None), batch, None)


def make_eval_step(metric_fn: Callable, plan: Plan) -> EvalStep:
    """Means over a batch of any number of rows, without a gradient and without touching the state.

    As many rows as the devices divide are divided over them. The few that remain are evaluated by every device alike,
    and count once.

    Args:
      metric_fn: takes what a loss takes, and returns what a loss returns, or a mapping of means over the rows. Scalars
        and mappings count by their rows, a `Loss` by its weight.

    Returns:
      ``step(state, batch) -> metrics``; the value of a scalar or a `Loss` is ``metrics["loss"]``. The state is a
      `TrainState`, or any object with ``params``, such as Flax's, whose ``model_state`` is used if the plan has one;
      for such a state there is no ``rng``.

    Raises:
      ValueError: for a state that does not fit the plan; for rows that do not divide, if there are several processes or
        if ``metric_fn`` computes across the shard axes, on which the remaining rows are not.

    >>> import jax.numpy as jnp, optax
    >>> from zerojax import init_state, make_plan
    >>> init_fn, tx = lambda key: {"w": jnp.ones((8,))}, optax.sgd(0.5)
    >>> plan = make_plan(init_fn, tx, jax.make_mesh((8,), ("data",)))
    >>> step = make_eval_step(lambda p, x: {"mean": jnp.mean(x @ p["w"])}, plan)
    >>> float(step(init_state(init_fn, tx, plan, jax.random.key(0)), jnp.ones((16, 8)))["mean"])
    8.0
    """
    call, everywhere = with_arguments(metric_fn), PartitionSpec()

    def gather(params):
        return merge(ways.whole_params(numbers(params), plan.wire, plan), params)

    gathered = ways.on_devices(gather, (ways.param_specs(plan),), everywhere, plan)

    def eval_step(state, rows, rest=None):
        rng = None if state.rng is None else jax.random.fold_in(state.rng, state.step)
        batch = rest if rows is None else rows
        params = gathered(state.params)

        def use(way):
            if way.axes and not way.keys and rest is not None:
                raise UnfitError("some rows are left when the others are divided over the devices")
            sums = _apart if way.axes else _together
            return sums(call, plan, way, params, rows, rest, rng, state.model_state)

        totals, weight = ways.along(use, call, plan, state.params, batch, rng, state.model_state)
        return jax.tree.map(lambda total: divide(total, weight), totals)

    placed = (replace(plan.state_shardings, opt_state=None, loss_scale=None), plan.batch_sharding, plan.replicated)
    return EvalStep(plan, jax.jit(eval_step, in_shardings=placed, out_shardings=plan.replicated))


def _apart(call: Callable, plan: Plan, way: Way, params: Tree, rows: Tree, rest: Tree, rng: Any, *args: Any):
    """``({name: weighted sum}, weight)``: of the divided rows by every device for its own, of the rest by all alike."""
    measure, everywhere = _measure(way.of_device(call), way), PartitionSpec()

    def measure_all(*args):
        return collectives.all_reduce(measure(*args), way.axes)

    specs = (everywhere, plan.batch_sharding.spec, everywhere, everywhere)
    sums = [] if rows is None else [way.run(measure_all, specs, everywhere)(params, rows, rng, *args)]
    if rest is not None:
        key = None if rng is None else jax.random.fold_in(rng, plan.devices)
        sums.append(_off_axes(measure, plan)(params, rest, key, *args))
    return jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *sums)


def _together(call: Callable, plan: Plan, way: Way, params: Tree, rows: Tree, rest: Tree, *args: Any):
    """The same, of all rows at once."""
    parts = [part for part in (rows, rest) if part is not None]
    batch = jax.tree.map(lambda *parts: jnp.concatenate(parts), *parts)
    return _measure(way.of_device(call), way)(params, batch, *args)


def _measure(call: Callable, way: Way) -> Callable:
    """``(whole parameters, rows, rng, model_state) -> ({name: weighted sum}, weight)``."""

    def measure(params, batch, rng, model_state):
        value, aux = without_aux(call(params, batch, fold(rng, 0, way.keys), model_state))
        rows, is_named = len(jax.tree.leaves(batch)[0]), isinstance(value, Mapping)
        loss = as_loss(Loss(0.0, rows, value) if is_named else value, "metric_fn", rows)
        loss = weighted(replace(loss, metrics=add_metrics(dict(loss.metrics), _means(*aux))))
        return add_metrics({} if is_named else {"loss": loss.total}, loss.metrics), loss.weight

    return measure


def _means(aux: Tree = None) -> Mapping:
    """What a loss returned beside its value, if that is numbers."""
    found = named(aux)
    for path, leaf in with_paths(found):
        if jnp.ndim(leaf):
            raise ValueError(f"metric_fn returned {path} of shape {jnp.shape(leaf)} beside its value; evaluation "
                             "returns means: take the mean, or return zerojax.Loss(..., metrics=...)")  # fmt: skip
    return found


def _off_axes(measure: Callable, plan: Plan) -> Callable:
    """``measure`` for rows that every device has; the shard axes, over which they would count again, have no names."""

    def run(*args):
        try:
            return measure(*args)
        except NameError as error:
            if "axis name" not in str(error):
                raise
            raise ValueError(
                f"metric_fn computes across the axes {tuple(plan.axes)}, which needs rows that can be divided over "
                f"{tables.count(plan.devices, 'device')}; use a multiple of {plan.devices} rows, or give metric_fn a "
                f"row mask and pad ({error})"
            ) from error

    return run
