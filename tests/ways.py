"""The ways in, each beside what Flax makes of it on one device: ``(initial optimizer state, params, opt_state)``.

All train `optimizers.loss_fn` on copies of the same parameters, one for each transformation.
"""

from typing import Any

import jax
import optax
import optimizers
import test_optimizers
from flax import nnx
from flax.training.train_state import TrainState
from reference import make_mesh

import zerojax
import zerojax.linen
import zerojax.nnx

STEPS = test_optimizers.STEPS
KEY = jax.random.key(0)


def served(way: str, names) -> list[str]:
    """Those that the way can serve, as Flax's own form of it can."""
    return [name for name in names if way != "linen" or name not in optimizers.NEED_VALUE]


def abreast(way: str, names) -> optax.GradientTransformationExtraArgs:
    return optimizers.abreast({name: _make(way, name) for name in names})


def _make(way: str, name: str) -> Any:
    if way == "nnx" and name == "selective_transform":  # its mask is a tree, here of NNX's kind
        return optax.selective_transform(optax.adam(0.01), freeze_mask=nnx.State(optimizers.NONE_FROZEN))
    return optimizers.TABLE[name].make()


# ---- the library's own step, beside plain optax ----


def own(tx, params, stage: int):
    def init_fn(key):
        return params

    plan = zerojax.make_plan(init_fn, tx, make_mesh(), zerojax.ZeroConfig(stage=stage, allow_whole=True))
    state = zerojax.init_state(init_fn, tx, plan, KEY)
    step, born = zerojax.make_train_step(optimizers.loss_fn, tx, plan), jax.device_get(state.opt_state)
    for i in range(STEPS):
        state, _ = step(state, optimizers.rows(i))
    return born, state.params, state.opt_state


def own_twin(tx, params):
    @jax.jit
    def step(params, opt_state, rows):
        value, grads = jax.value_and_grad(optimizers.loss_fn)(params, rows)
        updates, opt_state = tx.update(grads, opt_state, params, value=value, grad=grads)
        return optax.apply_updates(params, updates), opt_state

    born = opt_state = jax.jit(tx.init)(params)
    for i in range(STEPS):
        params, opt_state = step(params, opt_state, optimizers.rows(i))
    return born, params, opt_state


# ---- Flax linen ----


def linen(tx, params, stage: int):
    def init_fn(key):
        return params

    plan = zerojax.make_plan(init_fn, tx, make_mesh(), zerojax.ZeroConfig(stage=stage, allow_whole=True))
    state = zerojax.linen.create_train_state(init_fn, tx, plan, KEY, apply_fn=optimizers.loss_fn)
    return _linen(state, zerojax.value_and_grad(optimizers.loss_fn, plan))


def linen_twin(tx, params):
    create = jax.jit(lambda params: TrainState.create(apply_fn=optimizers.loss_fn, params=params, tx=tx))
    return _linen(create(params), jax.value_and_grad(optimizers.loss_fn))


def _linen(state, gradient):
    @jax.jit
    def step(state, rows):
        return state.apply_gradients(grads=gradient(state.params, rows)[1])

    born = state.opt_state
    for i in range(STEPS):
        state = step(state, optimizers.rows(i))
    return born, state.params, state.opt_state


# ---- Flax NNX ----


class Copies(nnx.Module):
    def __init__(self, params):
        for name, copy in params.items():
            setattr(self, name, nnx.Dict({leaf: nnx.Param(value) for leaf, value in copy.items()}))


def _module_loss(model, rows):
    return optimizers.loss_fn(nnx.to_pure_dict(nnx.state(model, nnx.Param)), rows)


def nnx_module(tx, params, stage: int):
    def make(rngs):
        return Copies(params)

    plan = zerojax.nnx.make_plan(make, tx, make_mesh(), zerojax.ZeroConfig(stage=stage, allow_whole=True))
    model, optimizer = zerojax.nnx.create(make, tx, plan, KEY)
    return _nnx(model, optimizer, zerojax.nnx.value_and_grad(_module_loss, plan))


def nnx_twin(tx, params):
    @nnx.jit
    def create():
        model = Copies(params)
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    return _nnx(*create(), nnx.value_and_grad(_module_loss))


def _nnx(model, optimizer, gradient):
    @nnx.jit
    def step(model, optimizer, rows):
        value, grads = gradient(model, rows)
        optimizer.update(model, grads, value=value)

    born = jax.device_get(nnx.as_pure(optimizer.opt_state))
    for i in range(STEPS):
        step(model, optimizer, optimizers.rows(i))
    return born, nnx.as_pure(nnx.state(model, nnx.Param)), nnx.as_pure(optimizer.opt_state)


WAYS = {"own": (own, own_twin), "linen": (linen, linen_twin), "nnx": (nnx_module, nnx_twin)}


# ---- what is compared ----


def differences(way: str, names, stage: int, leaves=tuple(optimizers.SHAPES)) -> dict[str, dict[str, float]]:
    """``{"born" | "params" | "opt_state": {path: largest difference relative to the leaf's largest number}}``; the
    first part of a path is the transformation's name."""
    ours, right = WAYS[way]
    tx, params = abreast(way, names), optimizers.parameters(names, leaves)
    pairs = zip(*(jax.device_get(trees) for trees in (ours(tx, params, stage), right(tx, params))), strict=True)
    return {
        what: test_optimizers.differences(*pair)
        for what, pair in zip(("born", "params", "opt_state"), pairs, strict=True)
    }
