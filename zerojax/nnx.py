"""Flax NNX: a module and an ``nnx.Optimizer`` as users have them, partitioned; by ``nnx.split`` and ``nnx.merge``."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from zerojax import evaluation, losses, step
from zerojax import plan as plans
from zerojax.config import ZeroConfig
from zerojax.contracts import Loss, Tree, Variables
from zerojax.plan import Plan
from zerojax.precision import OVERWRITTEN
from zerojax.state import check_own_update, gather_params, init_state


def make_plan(
    make_model: Callable[[nnx.Rngs], nnx.Module],
    tx: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
    config: ZeroConfig | None = None,
    *,
    wrt: Any = nnx.Param,
) -> Plan:
    """A `Plan` for a module; its sharding annotations are the base specs.

    Args:
      make_model: ``rngs -> module``; runs under ``jit``, so that nothing is made whole.
      tx, mesh, config: as for `zerojax.make_plan`.
      wrt: which variables are parameters. All others are model state, whole on every device. To train some of the
        parameters only, freeze the others in ``config``: then they are partitioned too.

    Raises:
      ValueError: as `zerojax.make_plan`; for linen's fp8 operations in a module, of which NNX knows nothing; and if
        ``tx.init`` fails on the ``nnx.State`` of parameters, such as for a mask of another form.

    >>> plan = make_plan(lambda rngs: nnx.Linear(8, 16, rngs=rngs), optax.adam(1e-3), jax.make_mesh((8,), ("data",)))
    >>> [(leaf.path, leaf.dim) for leaf in plan.params]
    [('bias', 0), ('kernel', 1)]
    """
    model = _abstract(make_model)
    kinds = [(path, type(v).__name__) for path, v in nnx.to_flat_state(nnx.state(model)) if isinstance(v, nnx.Variable)]
    overwritten = ["/".join(map(str, path)) for path, kind in kinds if kind == OVERWRITTEN]
    if overwritten:  # nnx.Optimizer has no place for them, and as model state they would keep their first values
        raise ValueError(f"{overwritten[:3]} are to be overwritten by their gradients (fp8), which NNX's optimizer "
                         "does not do; use linen, or another way to quantize")  # fmt: skip
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(model, wrt)))
    told = optax.GradientTransformation(_told(tx.init), tx.update)
    return plans.make_plan(_init_fn(make_model, wrt), told, mesh, config, base_specs=specs)


def create(
    make_model: Callable[[nnx.Rngs], nnx.Module],
    tx: optax.GradientTransformation,
    plan: Plan,
    key: Any,
    *,
    wrt: Any = nnx.Param,
) -> tuple[nnx.Module, nnx.Optimizer]:
    """The module and its ``nnx.Optimizer``, born partitioned; their values are those of ``make_model(nnx.Rngs(key))``.

    >>> make, tx = lambda rngs: nnx.Linear(8, 16, rngs=rngs), optax.adam(1e-3)
    >>> plan = make_plan(make, tx, jax.make_mesh((8,), ("data",)))
    >>> model, optimizer = create(make, tx, plan, jax.random.key(0))
    >>> tuple(model.kernel.sharding.spec)
    (None, 'data')
    """
    check_own_update(plan, "nnx.create")
    made = init_state(_init_fn(make_model, wrt), tx, plan, key)
    model, of_all = _abstract(make_model), plan.transform(tx)
    with _unplaced():
        optimizer = nnx.eval_shape(lambda model: nnx.Optimizer(model, of_all, wrt=wrt), model)
    _, params, rest = nnx.split(model, wrt, ...)
    nnx.update(model, _like(params, made.params), _like(rest, made.model_state))
    # By place in the tree: `nnx.state` of it would be in the order of names.
    optimizer.opt_state = nnx.data(_like(optimizer.opt_state, made.opt_state))
    optimizer.step.set_value(made.step.astype(optimizer.step.get_value().dtype))
    _as_usual(model)
    _as_usual(optimizer)
    return model, optimizer


def value_and_grad(loss_fn: Callable, plan: Plan, *, wrt: Any = nnx.Param, has_aux: bool = False) -> Callable:
    """Drop-in for ``nnx.value_and_grad`` inside a user's own ``nnx.jit``.

    Args:
      loss_fn: ``loss_fn(model, batch)`` or ``loss_fn(model, batch, rng)``, with several parts of the batch
        ``loss_fn(model, images, labels)``; returns the mean over the rows that it was given, a `zerojax.Loss`, or a
        tuple of one of them and of other arrays. ``rng`` may be an ``nnx.Rngs``. What it changes in the module
        (BatchNorm statistics, random counters) is changed in the module that was passed in.
      plan: from `make_plan`.
      has_aux: return ``(loss, aux)`` for ``loss``; ``aux`` as for `zerojax.value_and_grad`.

    Returns:
      ``f(model, batch, rng=None) -> (loss, gradients)``; ``optimizer.update(model, gradients)`` takes them. They are
      ``None`` for what is not trained.

    >>> import jax.numpy as jnp
    >>> make, tx = lambda rngs: nnx.Linear(8, 16, rngs=rngs), optax.adam(1e-3)
    >>> plan = make_plan(make, tx, jax.make_mesh((8,), ("data",)))
    >>> model, optimizer = create(make, tx, plan, jax.random.key(0))
    >>> @nnx.jit
    ... def train_step(model, optimizer, x):
    ...     loss, grads = value_and_grad(lambda model, x: (model(x) ** 2).mean(), plan)(model, x)
    ...     optimizer.update(model, grads)
    ...     return loss
    >>> before, after = (train_step(model, optimizer, jnp.ones((16, 8))) for _ in range(2))
    >>> bool(after < before)
    True
    """
    check_own_update(plan, "nnx.value_and_grad")

    def run(model, *arguments, **named):
        streams = any(isinstance(a, nnx.Rngs) for a in arguments)
        arguments = [a() if isinstance(a, nnx.Rngs) else a for a in arguments]
        batch, rng, _ = step.of_call(*arguments, **named)
        graphdef, params, rest = nnx.split(model, wrt, ...)

        def pure_loss(pure_params, batch, rng=None, model_state=None):
            own = _like(rest, model_state)
            module = nnx.merge(graphdef, _like(params, pure_params), _map_keys(_fold_device(plan), own))
            value, aux = losses.without_aux(call(module, batch, nnx.Rngs(rng) if streams else rng, None))
            loss = value if isinstance(value, Loss) else Loss(value, 1.0)
            after = _map_keys(lambda _, old: old, nnx.split(module, wrt, ...)[2], own)
            return Loss(loss.total, loss.weight, loss.metrics, nnx.as_pure(after)), *aux

        everything = step.sums_and_grad(pure_loss, plan)
        loss, sums, aux, grads = everything(nnx.as_pure(params), batch, rng, nnx.as_pure(rest))
        if aux and not has_aux:
            raise ValueError("the loss returned (loss, aux): pass has_aux=True to value_and_grad, and get both")
        nnx.update(model, _like(rest, sums.model_state))
        grads = _like(plan.trained(params), grads)
        return ((loss, aux[0] if aux else sums), grads) if has_aux else (loss, grads)

    call = losses.with_arguments(loss_fn)
    return run


def make_eval_step(metric_fn: Callable, plan: Plan, *, wrt: Any = nnx.Param) -> Callable:
    """As `zerojax.make_eval_step`, for a module: ``step(model, batch) -> metrics``; the module is left as it was.

    Args:
      metric_fn: ``metric_fn(model, batch)``; returns what a loss returns, or a mapping of means over the rows.
      plan: from `make_plan`.
      wrt: as for `make_plan`.

    >>> import jax.numpy as jnp
    >>> make, tx = lambda rngs: nnx.Linear(8, 16, rngs=rngs), optax.adam(1e-3)
    >>> plan = make_plan(make, tx, jax.make_mesh((8,), ("data",)))
    >>> model, optimizer = create(make, tx, plan, jax.random.key(0))
    >>> evaluate = make_eval_step(lambda model, x: {"zeros": jnp.mean(model(x) == 0)}, plan)
    >>> float(evaluate(model, jnp.zeros((19, 8)))["zeros"])
    1.0
    """
    call = losses.with_arguments(metric_fn)

    @functools.cache
    def of_module(graphdef, params_treedef, rest_treedef):
        def measure(params, batch, rng=None, model_state=None):
            own = _map_keys(_fold_device(plan), rest_treedef.unflatten(jax.tree.leaves(model_state)))
            return call(nnx.merge(graphdef, params_treedef.unflatten(jax.tree.leaves(params)), own), batch, rng, None)

        return evaluation.make_eval_step(measure, plan)

    def run(model, batch):
        graphdef, params, rest = nnx.split(model, wrt, ...)
        evaluate = of_module(graphdef, jax.tree.structure(params), jax.tree.structure(rest))
        return evaluate(_Pure(nnx.as_pure(params), nnx.as_pure(rest)), batch)

    return run


def gather_model(model: nnx.Module, plan: Plan, *, wrt: Any = nnx.Param) -> nnx.Module:
    """The module with whole parameters on every device, for sampling or export; a copy.

    >>> make, tx = lambda rngs: nnx.Linear(8, 16, rngs=rngs), optax.adam(1e-3)
    >>> plan = make_plan(make, tx, jax.make_mesh((8,), ("data",)))
    >>> model, optimizer = create(make, tx, plan, jax.random.key(0))
    >>> gather_model(model, plan).kernel.addressable_shards[0].data.shape
    (8, 16)
    """
    graphdef, params, rest = nnx.split(model, wrt, ...)
    whole = gather_params(nnx.as_pure(params), plan)
    return nnx.merge(graphdef, _like(params, whole), jax.tree.map(jnp.copy, rest))


_UNPLACED = 0  # false, yet not the False of a user who wants a variable so for good


class _Pure(NamedTuple):
    """A module's variables as a state that evaluation takes."""

    params: Tree
    model_state: Tree


def _told(init: Callable) -> Callable:
    """``tx.init``, whose errors say what form a module's parameters have."""

    def told(params):
        try:
            return init(params)
        except (TypeError, ValueError) as error:
            raise ValueError(f"tx.init fails on the parameters of the module: {error}\nIt is given an nnx.State of "
                             "arrays, as nnx.Optimizer does. Masks and labels must be functions of that, or such a "
                             "State: nnx.as_pure(jax.tree.map(f, nnx.state(model, nnx.Param)))") from error  # fmt: skip

    return told


def _init_fn(make_model: Callable, wrt: Any) -> Callable[[Any], Variables]:
    def init(key):
        with _unplaced():
            _, params, rest = nnx.split(make_model(nnx.Rngs(key)), wrt, ...)
        return Variables(nnx.as_pure(params), nnx.as_pure(rest))

    return init


def _abstract(make_model: Callable) -> nnx.Module:
    """The module with shapes for arrays, unplaced whatever its annotations."""
    with _unplaced():
        return nnx.eval_shape(lambda: make_model(nnx.Rngs(0)))


def _unplaced() -> contextlib.AbstractContextManager:
    """Variables made herein are not placed by their annotations: the plan decides that."""
    return nnx.use_eager_sharding(cast(bool, _UNPLACED))


def _as_usual(node: Any):
    """Give variables the metadata that they have if made where `_unplaced` is not active."""
    for _, variable in nnx.iter_graph(node):
        if isinstance(variable, nnx.Variable) and variable.get_metadata("eager_sharding") is _UNPLACED:
            variable.set_metadata("eager_sharding", nnx.using_eager_sharding())


def _like(state: Any, values: Tree) -> Any:
    """The ``nnx.State`` with other values, given as any tree of the same leaves in the same order."""
    return jax.tree.structure(state).unflatten(jax.tree.leaves(values))


def _map_keys(f: Callable, state: Any, *others: Any) -> Any:
    """``f`` on the keys of random streams, everything else as it is."""
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    return jax.tree.map(
        lambda v, *vs: v.replace(f(v.get_value(), *(o.get_value() for o in vs))) if isinstance(v, nnx.RngKey) else v,
        state,
        *others,
        is_leaf=is_variable,
    )


def _fold_device(plan: Plan) -> Callable:
    """One stream on every device would drop the same units everywhere. Stacked layers have an array of keys."""

    def fold(keys):
        number = losses.device_number(plan.axes)
        fold_one = lambda key: jax.random.fold_in(key, number)  # noqa: E731
        for _ in range(keys.ndim):
            fold_one = jax.vmap(fold_one)
        return fold_one(keys)

    return fold
