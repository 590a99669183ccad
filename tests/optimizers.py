"""Every optimizer and gradient transformation that optax exports, by name, made as for training a small model."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from zerojax import optimizer

# Float32 sums in another order (the mean over rows, norms over shards) differ by some 1e-7 of their size.
SUMS = 1e-5
# Five Newton-Schulz iterations enlarge the rounding of small singular values 3.4445**5 = 485 times; L-BFGS divides by
# products of small differences.
ITERATED = 1e-4


@dataclass(frozen=True)
class Entry:
    """``make()`` gives a transformation; ``tolerance`` is of a leaf's largest number, with its reason beside it."""

    make: Callable[[], Any]
    tolerance: float = SUMS


def then(*parts: Any) -> Any:
    """Transformations followed by a step downhill."""
    return optax.chain(*parts, optax.scale(-0.02))


def before(*parts: Any) -> Any:
    return optax.chain(*parts, optax.sgd(0.1))


def matrices(params):
    """A mask by callable: weight decay of matrices only."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


def labels(params):
    return jax.tree.map_with_path(lambda keys, p: "matrix" if p.ndim > 1 else "other", params)


def not_matrices(params):
    return jax.tree.map(lambda p: p.ndim < 2, params)


def not_scalars(params):
    return jax.tree.map(lambda p: p.ndim > 0, params)


def dimensions(params):
    return jax.tree.map(lambda p: contrib.MuonDimensionNumbers(), params)


def every_other(step, **extra):
    return step % 2 == 0


def square(grads, params):
    """Stands for the diagonal of a Hessian."""
    return jax.tree.map(lambda g: g**2 + 0.1, grads)


def settled(tx):
    """With the state's structure from the first: that of `optax.monitor` grows with its first update."""

    def init(params):
        return tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)[1]

    return optax.GradientTransformationExtraArgs(init, tx.update)


NONE_FROZEN = {"selective_transform": False}  # a tree: a function would be taken for true
WARMUP = optax.warmup_cosine_decay_schedule(0.0, 0.02, 2, 6)

OPTIMIZERS: dict[str, Entry] = {
    "adabelief": Entry(lambda: optax.adabelief(0.01, eps=1e-6)),
    "adadelta": Entry(lambda: optax.adadelta(0.5)),
    "adafactor": Entry(lambda: optax.adafactor(0.02, min_dim_size_to_factor=4)),
    "adagrad": Entry(lambda: optax.adagrad(0.1)),
    "adam": Entry(lambda: optax.adam(0.01)),
    "adamax": Entry(lambda: optax.adamax(0.01)),
    "adamaxw": Entry(lambda: optax.adamaxw(0.01, mask=matrices)),
    "adamw": Entry(lambda: optax.adamw(WARMUP, weight_decay=0.1, mask=matrices)),
    "adan": Entry(lambda: optax.adan(0.01)),
    "amsgrad": Entry(lambda: optax.amsgrad(0.01)),
    "fromage": Entry(lambda: optax.fromage(0.01)),
    "lamb": Entry(lambda: optax.lamb(0.02, weight_decay=0.01, mask=matrices)),
    "lars": Entry(lambda: optax.lars(0.5, weight_decay=0.01, trust_ratio_mask=matrices)),
    "lbfgs": Entry(lambda: optax.lbfgs(0.1, memory_size=3, linesearch=None), ITERATED),
    "lion": Entry(lambda: optax.lion(0.01)),
    "nadam": Entry(lambda: optax.nadam(0.01)),
    "nadamw": Entry(lambda: optax.nadamw(0.01)),
    "noisy_sgd": Entry(lambda: optax.noisy_sgd(0.1, key=jax.random.key(1))),
    "novograd": Entry(lambda: optax.novograd(0.01)),
    "optimistic_adam": Entry(lambda: optax.optimistic_adam(0.01)),
    "optimistic_adam_v2": Entry(lambda: optax.optimistic_adam_v2(0.01)),
    "optimistic_gradient_descent": Entry(lambda: optax.optimistic_gradient_descent(0.1)),
    "polyak_sgd": Entry(lambda: optax.polyak_sgd(1.0)),
    "radam": Entry(lambda: optax.radam(0.01)),
    "rmsprop": Entry(lambda: optax.rmsprop(0.01, momentum=0.9, centered=True)),
    "rprop": Entry(lambda: optax.rprop(0.01)),
    "sgd": Entry(lambda: optax.sgd(0.1, momentum=0.9, nesterov=True)),
    "sign_sgd": Entry(lambda: optax.sign_sgd(0.01)),
    "signum": Entry(lambda: optax.signum(0.01)),
    "sm3": Entry(lambda: optax.masked(optax.sm3(0.1), not_scalars)),
    "yogi": Entry(lambda: optax.yogi(0.01)),
    "contrib.acprop": Entry(lambda: contrib.acprop(0.01, eps=1e-2)),
    "contrib.ademamix": Entry(lambda: contrib.ademamix(0.01)),
    "contrib.adopt": Entry(lambda: contrib.adopt(0.01)),
    "contrib.cocob": Entry(lambda: contrib.cocob()),
    "contrib.dadapt_adamw": Entry(lambda: contrib.dadapt_adamw(0.1, estim_lr0=1e-2)),
    "contrib.dog": Entry(lambda: contrib.dog(1.0, init_step=("heuristic", 1e-2))),
    "contrib.dowg": Entry(lambda: contrib.dowg(1.0)),
    "contrib.galore": Entry(lambda: contrib.galore(0.01, rank=2, update_proj_gap=2), ITERATED),
    "contrib.madgrad": Entry(lambda: contrib.madgrad(0.01)),
    "contrib.momo": Entry(lambda: contrib.momo(0.5)),
    "contrib.momo_adam": Entry(lambda: contrib.momo_adam(0.01)),
    "contrib.muon": Entry(lambda: contrib.muon(0.02), ITERATED),
    "contrib.prodigy": Entry(lambda: contrib.prodigy(0.1, estim_lr0=1e-2)),
    "contrib.schedule_free": Entry(lambda: contrib.schedule_free(optax.sgd(0.1), 0.1, b1=0.9)),
    "contrib.schedule_free_adamw": Entry(lambda: contrib.schedule_free_adamw(0.01)),
    "contrib.schedule_free_sgd": Entry(lambda: contrib.schedule_free_sgd(0.1)),
    "contrib.simplified_ademamix": Entry(lambda: contrib.simplified_ademamix(0.001)),
    "contrib.sophia": Entry(
        lambda: contrib.sophia(0.01, hessian_diagonal_fn=optax.stateless(square), update_interval=2)
    ),
}
DIRECTIONS: dict[str, Entry] = {
    "centralize": Entry(lambda: then(optax.centralize())),
    "contrib.normalize": Entry(lambda: then(contrib.normalize())),
    "contrib.scale_by_acprop": Entry(lambda: then(contrib.scale_by_acprop(eps=1e-2))),
    "contrib.scale_by_ademamix": Entry(lambda: then(contrib.scale_by_ademamix())),
    "contrib.scale_by_adopt": Entry(lambda: then(contrib.scale_by_adopt())),
    "contrib.scale_by_cocob": Entry(lambda: optax.chain(contrib.scale_by_cocob())),
    "contrib.scale_by_galore": Entry(lambda: then(contrib.scale_by_galore(rank=2, update_proj_gap=2)), ITERATED),
    "contrib.scale_by_madgrad": Entry(lambda: contrib.scale_by_madgrad(0.01)),
    "contrib.scale_by_muon": Entry(
        lambda: optax.masked(then(contrib.scale_by_muon(weight_dimension_numbers=dimensions)), matrices), ITERATED
    ),
    "contrib.scale_by_simplified_ademamix": Entry(lambda: then(contrib.scale_by_simplified_ademamix())),
    "normalize_by_update_norm": Entry(lambda: then(optax.normalize_by_update_norm())),
    "scale_by_adadelta": Entry(lambda: then(optax.scale_by_adadelta())),
    "scale_by_adam": Entry(lambda: then(optax.scale_by_adam(mu_dtype=jnp.bfloat16)), 1e-2),
    "scale_by_adamax": Entry(lambda: then(optax.scale_by_adamax())),
    "scale_by_adan": Entry(lambda: then(optax.scale_by_adan())),
    "scale_by_amsgrad": Entry(lambda: then(optax.scale_by_amsgrad())),
    "scale_by_belief": Entry(lambda: then(optax.scale_by_belief(eps=1e-6))),
    "scale_by_distance_over_gradients": Entry(
        lambda: optax.masked(then(optax.scale_by_distance_over_gradients()), not_scalars)
    ),
    "scale_by_factored_rms": Entry(lambda: then(optax.scale_by_factored_rms(min_dim_size_to_factor=2))),
    "scale_by_lbfgs": Entry(lambda: then(optax.scale_by_lbfgs(memory_size=3)), ITERATED),
    "scale_by_learning_rate": Entry(lambda: optax.scale_by_learning_rate(WARMUP)),
    "scale_by_lion": Entry(lambda: then(optax.scale_by_lion())),
    "scale_by_novograd": Entry(lambda: then(optax.scale_by_novograd())),
    "scale_by_optimistic_gradient": Entry(lambda: then(optax.scale_by_optimistic_gradient())),
    "scale_by_param_block_norm": Entry(lambda: then(optax.scale_by_param_block_norm())),
    "scale_by_param_block_rms": Entry(lambda: then(optax.scale_by_param_block_rms())),
    "scale_by_polyak": Entry(lambda: then(optax.scale_by_polyak())),
    "scale_by_radam": Entry(lambda: then(optax.scale_by_radam())),
    "scale_by_rms": Entry(lambda: then(optax.scale_by_rms())),
    "scale_by_rprop": Entry(lambda: optax.scale_by_rprop(0.01)),
    "scale_by_rss": Entry(lambda: then(optax.scale_by_rss())),
    "scale_by_schedule": Entry(lambda: before(optax.scale_by_schedule(WARMUP))),
    "scale_by_sign": Entry(lambda: then(optax.scale_by_sign())),
    "scale_by_sm3": Entry(lambda: optax.masked(then(optax.scale_by_sm3()), not_scalars)),
    "scale_by_stddev": Entry(lambda: then(optax.scale_by_stddev())),
    "scale_by_trust_ratio": Entry(lambda: then(optax.scale_by_trust_ratio())),
    "scale_by_yogi": Entry(lambda: then(optax.scale_by_yogi())),
}
PARTS: dict[str, Entry] = {
    "adaptive_grad_clip": Entry(lambda: before(optax.adaptive_grad_clip(0.02))),
    "add_decayed_weights": Entry(lambda: before(optax.add_decayed_weights(0.1, matrices))),
    "add_noise": Entry(lambda: before(optax.add_noise(0.01, 0.5, key=jax.random.key(2)))),
    "apply_every": Entry(lambda: before(optax.apply_every(2))),
    "clip": Entry(lambda: before(optax.clip(0.01))),
    "clip_by_block_rms": Entry(lambda: before(optax.clip_by_block_rms(0.01))),
    "clip_by_global_norm": Entry(lambda: before(optax.clip_by_global_norm(0.1))),
    "contrib.reduce_on_plateau": Entry(lambda: optax.chain(optax.sgd(0.1), contrib.reduce_on_plateau(0.5, 1, 1e-2))),
    "ema": Entry(lambda: before(optax.ema(0.9))),
    "identity": Entry(lambda: before(optax.identity())),
    "keep_params_nonnegative": Entry(lambda: optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative())),
    "measure_with_ema": Entry(
        lambda: before(settled(optax.monitor({"norm": optax.measure_with_ema(optax.tree.norm, 0.9)})))
    ),
    "monitor": Entry(lambda: before(settled(optax.monitor({"norm": optax.tree.norm})))),
    "scale": Entry(lambda: optax.scale(-0.1)),
    "set_to_zero": Entry(lambda: optax.set_to_zero()),
    "snapshot": Entry(lambda: before(optax.snapshot("norm", optax.tree.norm))),
    "stateless": Entry(lambda: before(optax.stateless(lambda grads, params: grads))),
    "stateless_with_tree_map": Entry(lambda: before(optax.stateless_with_tree_map(lambda g, p: g + 0.01 * p))),
    "trace": Entry(lambda: then(optax.trace(0.9))),
    "zero_nans": Entry(lambda: before(optax.zero_nans())),
}
WRAPPERS: dict[str, Entry] = {
    "MultiSteps": Entry(lambda: optax.MultiSteps(optax.adam(0.01), 2)),
    "apply_if_finite": Entry(lambda: optax.apply_if_finite(optax.adam(0.01), 3)),
    "chain": Entry(lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.01))),
    "conditionally_mask": Entry(lambda: optax.conditionally_mask(optax.adam(0.01), every_other)),
    "conditionally_transform": Entry(lambda: before(optax.conditionally_transform(optax.clip(0.01), every_other))),
    "contrib.mechanize": Entry(lambda: contrib.mechanize(optax.sgd(0.1), s_init=1e-2)),
    "contrib.sam": Entry(lambda: contrib.sam(optax.sgd(0.1), optax.chain(contrib.normalize(), optax.sgd(0.05)))),
    "contrib.split_real_and_imaginary": Entry(lambda: contrib.split_real_and_imaginary(optax.adam(0.01))),
    "flatten": Entry(lambda: optax.flatten(optax.adam(0.01))),
    "freeze": Entry(lambda: optax.chain(optax.adam(0.01), optax.freeze(not_matrices))),
    "inject_hyperparams": Entry(lambda: optax.inject_hyperparams(optax.adamw)(WARMUP, weight_decay=0.1)),
    "inject_stateful_hyperparams": Entry(lambda: optax.inject_stateful_hyperparams(optax.adam)(WARMUP)),
    "masked": Entry(lambda: optax.masked(optax.adam(0.01), matrices)),
    "multi_transform": Entry(
        lambda: optax.multi_transform({"matrix": optax.adam(0.01), "other": optax.sgd(0.1)}, labels)
    ),
    "named_chain": Entry(
        lambda: optax.named_chain(("clip", optax.clip_by_global_norm(0.1)), ("adam", optax.adam(0.01)))
    ),
    "partition": Entry(
        lambda: optax.partition({"matrix": contrib.muon(0.02), "other": optax.adam(0.01)}, labels), ITERATED
    ),
    "selective_transform": Entry(lambda: optax.selective_transform(optax.adam(0.01), freeze_mask=NONE_FROZEN)),
    "with_extra_args_support": Entry(lambda: optax.with_extra_args_support(optax.adam(0.01))),
}

TABLE = OPTIMIZERS | DIRECTIONS | PARTS | WRAPPERS

# What a step cannot serve, with the words of the error that says so.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "lbfgs": (lambda: optax.lbfgs(0.1), "value_fn"),
    "monitor": (lambda: before(optax.monitor({"norm": optax.tree.norm})), "another tree structure"),
    "scale_by_backtracking_linesearch": (lambda: then(optax.scale_by_backtracking_linesearch(5)), "value_fn"),
    "scale_by_zoom_linesearch": (lambda: then(optax.scale_by_zoom_linesearch(5)), "value_fn"),
    "contrib.differentially_private_aggregate": (
        lambda: contrib.differentially_private_aggregate(1.0, 0.1, key=jax.random.key(0)), "batch dimension"
    ),
    "contrib.dpsgd": (lambda: contrib.dpsgd(0.1, 1.0, 0.1, 0), "batch dimension"),
    "contrib.hutchinson_estimator_diag_hessian": (lambda: contrib.hutchinson_estimator_diag_hessian(), "obj_fn"),
    "contrib.sam": (lambda: contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True), "grad_fn"),
    "contrib.sophia": (lambda: contrib.sophia(0.01), "obj_fn"),
    "scale_by_distance_over_gradients": (lambda: then(optax.scale_by_distance_over_gradients()), "another shape"),
}  # fmt: skip

REASONS = {
    "value_fn": "a line search evaluates the loss again within the update (`value_fn`); `linesearch=None` is served",
    "obj_fn": "an estimate of the Hessian evaluates the loss again (`obj_fn`); an estimate from gradients is served",
    "grad_fn": "it evaluates the gradient again (`grad_fn`, `opaque_mode=True`); its default mode is served",
    "batch dimension": "it needs the gradient of every row, of which a step has only the mean",
    "another tree structure": "its state grows with the first update; let `init` make what `update` returns",
    "another shape": "it gives a scalar parameter the shape (1,), as in plain optax; mask scalars",
}

# Flax's `TrainState.apply_gradients` has no extra arguments for a transformation, `nnx.Optimizer.update` has.
NEED_VALUE = {
    "polyak_sgd", "scale_by_polyak", "contrib.momo", "contrib.momo_adam", "contrib.reduce_on_plateau",
}  # fmt: skip

# Tested by itself: it takes parameters of its own form.
APART = {"lookahead"}

NO_TRANSFORMATION = {
    "what a step does with updates or averages": ["apply_updates", "incremental_update", "periodic_update"],
    "arithmetic on moments and counters": [
        "bias_correction", "safe_increment", "safe_int32_increment", "update_infinity_moment", "update_moment",
        "update_moment_per_elem_norm",
    ],
    "norms and linear algebra": [
        "global_norm", "matrix_inverse_pth_root", "nnls", "power_iteration", "safe_norm", "safe_root_mean_squares",
        "transforms.unitwise_clip", "transforms.unitwise_norm",
    ],
    "gradients of single rows, before they are a mean": [
        "per_example_global_norm_clip", "per_example_layer_norm_clip", "microbatch",
    ],
    "a condition for MultiSteps": ["skip_large_updates", "skip_not_finite"],
    "a layer or a distribution": ["multi_normal", "scale_gradient"],
    "helps with states": ["init_empty_state", "tree_map_params", "contrib.schedule_free_eval_params"],
    "a line search's value_and_grad": ["value_and_grad_from_state"],
}  # fmt: skip


def exported() -> dict[str, Any]:
    """The lower-case public functions of optax, without losses and schedules, and `MultiSteps`; ``contrib.`` before."""
    found = {"MultiSteps": optax.MultiSteps}
    for prefix, module in (("", optax), ("transforms.", optax.transforms), ("contrib.", contrib)):
        for name, value in vars(module).items():
            function = callable(value) and not inspect.isclass(value) and name[0].islower()
            schedule = hasattr(optax.schedules, name) and not name.startswith("inject_")
            if function and name not in found and not schedule and not hasattr(optax.losses, name):
                found[prefix + name] = value
    return found


def available(names: dict[str, Any]) -> dict[str, Any]:
    """Those that the installed optax has."""
    have = exported()
    return {name: entry for name, entry in names.items() if name in have}


# ---- several side by side, each with parameters of its own: one compilation for all ----

SHAPES = {"matrix": (8, 16), "odd": (5, 3), "scalar": ()}
ROWS = 16


def parameters(names, leaves=tuple(SHAPES)) -> dict:
    """The same for each name; matrices of full rank."""
    rng = np.random.default_rng(0)
    one = {leaf: jnp.asarray(rng.normal(size=SHAPES[leaf]), jnp.float32) for leaf in leaves}
    return {name: one for name in names}


def rows(step: int) -> np.ndarray:
    return np.random.default_rng(step + 1).normal(size=(ROWS, 2)).astype(np.float32)


def loss_fn(params: dict, batch_R2: jax.Array) -> jax.Array:
    """Each number of a parameter has a quadratic of its own, other in every row; the mean over the copies."""

    def of_leaf(p):
        target = 0.3 * jnp.cos(jnp.arange(p.size, dtype=jnp.float32)).reshape(p.shape)
        slope, shift = (batch_R2[:, i].reshape(-1, *[1] * p.ndim) for i in range(2))
        return jnp.mean((p * (1 + 0.3 * slope) - target + 0.1 * shift) ** 2)

    losses = [sum(map(of_leaf, jax.tree.leaves(copy))) for copy in params.values()]
    return sum(losses) / len(losses)


def abreast(transformations: dict) -> optax.GradientTransformationExtraArgs:
    """Each on its own copy, whose gradient is that of its own loss; ``value`` is the mean of all, where there is one.

    The copies are in a container of any kind, and each transformation sees its own in one of that kind.
    """

    def only(name, tree):
        return type(tree)({name: getattr(tree, "raw_mapping", tree)[name]})  # an nnx.State would wrap what it gives out

    def init(params):
        return {name: tx.init(only(name, params)) for name, tx in transformations.items()}

    def update(grads, state, params, *, value=None, **extra):
        updates, new = {}, {}
        for name, tx in transformations.items():
            scaled = jax.tree.map(lambda g: g * len(transformations), only(name, grads))
            own = (scaled, state[name], only(name, params))
            out, new[name] = tx.update(*own) if value is None else optimizer.update(tx, *own, value)
            updates[name] = jax.tree.leaves(out)
        return jax.tree.structure(params).unflatten(jax.tree.leaves(updates)), new

    return optax.GradientTransformationExtraArgs(init, update)
