"""Whether a loss looks across rows: decided from its equations, and checked by numbers.

*Apart* is right if the loss of a batch is the mean over the losses of its slices (or sum of totals over sum of weights)
and so are its gradients; float32 sums in another order: relative 2e-5.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import zerojax
from zerojax.units.rows import judge

N, D, T, V = 8, 6, 4, 10
SLICES = 4
KEYS = jax.random.split(jax.random.key(0), 8)
W = {
    "a": jax.random.normal(KEYS[0], (D, D)),
    "layers": jax.random.normal(KEYS[1], (3, D, D)) / 3,
    "table": jax.random.normal(KEYS[2], (V, D)),
    "kernel": jax.random.normal(KEYS[3], (3, D, D)),
}
X = jax.random.normal(KEYS[4], (N, D))
SEQ = jax.random.normal(KEYS[5], (N, T, D))
TOKENS = jax.random.randint(KEYS[6], (N, T), 0, V)


def net(w, x):
    return lax.scan(lambda h, k: (h + jnp.tanh(h @ k), None), jnp.tanh(x @ w["a"]), w["layers"])[0]


def per_row(w, x):
    return jnp.mean(net(w, x) ** 2, 1)


def logits(w, t):
    return w["table"][t] @ w["a"] @ w["table"].T


@jax.custom_vjp
def clipped(x):
    return x * 2


clipped.defvjp(lambda x: (x * 2, x), lambda x, g: (jnp.clip(g, -1, 1) * 2,))


@jax.custom_vjp
def normed(x):
    return x * 2


normed.defvjp(lambda x: (x * 2, x), lambda x, g: (g / (1e-3 + jnp.max(jnp.abs(g))),))


def attention(w, x):
    scores = jnp.einsum("btd,bsd->bts", x @ w["a"], x)
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e9)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), x)


def masked(w, x):
    keep = x[:, 0] > 0
    return zerojax.Loss(jnp.sum(per_row(w, x) * keep), jnp.sum(keep))


def sliced_loop(w, x):
    return jnp.mean(lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ w["layers"][i]), x) ** 2)


def cross_entropy(w, t):
    return optax.softmax_cross_entropy_with_integer_labels(logits(w, t)[:, :-1], t[:, 1:]).mean()


def by_number(w, t):
    logp = jax.nn.log_softmax(logits(w, t)[:, -1])
    return -jnp.mean(logp[jnp.arange(t.shape[0]), t[:, 0]])


APART = {
    "mean": (lambda w, x: jnp.mean(per_row(w, x)), X),
    "sum over rows by literal": (lambda w, x: jnp.sum(per_row(w, x)) / x.shape[0], X),
    "mean of scaled rows": (lambda w, x: jnp.sum(per_row(w, x) / x.shape[0]), X),
    "weighted means and free": (lambda w, x: jnp.mean(per_row(w, x)) + 0.3 * jnp.mean(x) + jnp.sum(w["a"] ** 2), X),
    "zero and more": (lambda w, x: 0.0 + sum(jnp.mean(net(w, x)[:, i] ** 2) for i in range(3)), X),
    "Loss, literal weight": (lambda w, x: zerojax.Loss(jnp.sum(per_row(w, x)), x.shape[0]), X),
    "Loss, masked": (masked, X),
    "Loss, metrics": (lambda w, x: zerojax.Loss(jnp.sum(per_row(w, x)), len(x), {"m": jnp.mean(x)}), X),
    "tokens": (cross_entropy, TOKENS),
    "tokens, flattened": (
        lambda w, t: jnp.mean(
            optax.softmax_cross_entropy_with_integer_labels(logits(w, t).reshape(-1, V), t.reshape(-1))
        ),
        TOKENS,
    ),
    "rows by their number": (by_number, TOKENS),
    "positions": (lambda w, x: jnp.mean(jnp.tanh((x + jnp.arange(T)[:, None]) @ w["a"])), SEQ),
    "positions, flattened": (
        lambda w, x: jnp.mean((x + jnp.arange(T)[:, None]).reshape(-1, D) @ w["a"] * x.reshape(-1, D)),
        SEQ,
    ),
    "attention": (lambda w, x: jnp.mean(attention(w, x) ** 2), SEQ),
    "time major": (lambda w, x: jnp.mean(jnp.swapaxes(x, 0, 1).reshape(-1, D) @ w["a"]), SEQ),
    "over time": (
        lambda w, x: jnp.mean(
            lax.scan(lambda h, y: (jnp.tanh(h @ w["a"] + y),) * 2, jnp.zeros((x.shape[0], D)), jnp.swapaxes(x, 0, 1))[1]
        ),
        SEQ,
    ),
    "convolution": (lambda w, x: jnp.mean(lax.conv_general_dilated(
        x, w["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")) ** 2), SEQ),
    "sorted within": (lambda w, x: jnp.mean(jnp.sort(net(w, x), 1)[:, :2] * jnp.cumsum(x, 1)[:, :2]), X),
    "padded within": (lambda w, x: jnp.mean(jnp.concatenate([jnp.pad(net(w, x), ((0, 0), (1, 1))), x], 1) ** 2), X),
    "written within": (lambda w, x: jnp.mean(net(w, x).at[:, 1].set(x[:, 0]) ** 2), X),
    "vmap, penalty": (
        lambda w, x: jnp.mean(jax.vmap(jax.grad(lambda r: jnp.sum(jnp.tanh(r @ w["a"]) ** 2)))(x) ** 2), X),
    "remat": (lambda w, x: jnp.mean(jax.checkpoint(net)(w, x) ** 2), X),
    "loop": (sliced_loop, X),
    "branch": (lambda w, x: jnp.mean(lax.cond(w["a"][0, 0] > 0, net, lambda w, x: x, w, x) ** 2), X),
    "own rule": (lambda w, x: jnp.mean(clipped(net(w, x)) ** 2), X),
    "ones over rows": (lambda w, x: jnp.ones(x.shape[0]) @ per_row(w, x) / x.shape[0], X),
    "one column": (lambda w, x: jnp.mean(x @ w["a"][:, :1] * jnp.ones((x.shape[0], 1))), X),
}  # fmt: skip

RULE = {"own rule that mixes": (lambda w, x: jnp.mean(normed(net(w, x)) ** 2), X)}
MIXED = {
    "sum": (lambda w, x: jnp.sum(per_row(w, x)), X),
    "sum by a number": (lambda w, x: jnp.sum(per_row(w, x)) / 1000, X),
    "mean times rows": (lambda w, x: jnp.mean(per_row(w, x)) * len(x), X),
    "mean times ones": (lambda w, x: jnp.mean(per_row(w, x)) * jnp.sum(jnp.ones(len(x))), X),
    "Loss of a mean": (lambda w, x: zerojax.Loss(jnp.mean(per_row(w, x)), len(x)), X),
    "Loss, weight of one": (lambda w, x: zerojax.Loss(jnp.sum(per_row(w, x)), 1.0), X),
    "Loss and a free term": (lambda w, x: zerojax.Loss(jnp.sum(per_row(w, x)) + jnp.sum(w["a"] ** 2), len(x)), X),
    "mask of places": (lambda w, x: jnp.mean(per_row(w, x) * (jnp.arange(len(x)) < 3)), X),
    "weights by place": (lambda w, x: jnp.mean(per_row(w, x) * np.arange(len(x))), X),
    "flattened places": (lambda w, x: jnp.mean(x.reshape(-1, D) * jnp.arange(x.shape[0] * T)[:, None]), SEQ),
    "normalised": (lambda w, x: jnp.mean((x - x.mean(0)) / (x.std(0) + 0.1) * net(w, x)), X),
    "ratio": (lambda w, x: jnp.sum(per_row(w, x) * (x[:, 0] > 0)) / jnp.sum(x[:, 0] > 0), X),
    "contrastive": (lambda w, x: jax.nn.logsumexp(net(w, x) @ net(w, x).T, 1).mean(), X),
    "covariance": (lambda w, x: jnp.sum((net(w, x).T @ net(w, x)) ** 2), X),
    "ranking": (lambda w, x: jnp.mean(jnp.diff(net(w, x)[jnp.argsort(x[:, 0]), 0]) ** 2), X),
    "hardest": (lambda w, x: lax.top_k(per_row(w, x), 2)[0].mean(), X),
    "largest": (lambda w, x: jnp.mean(net(w, x) - net(w, x).max(0)), X),
    "square of the mean": (lambda w, x: jnp.mean(net(w, x)) ** 2, X),
    "mixup": (lambda w, x: jnp.mean(net(w, x + x[::-1]) ** 2), X),
    "first row": (lambda w, x: jnp.mean(net(w, x + x[:1]) ** 2), X),
    "half of the rows": (lambda w, x: jnp.mean(net(w, x[: len(x) // 2]) ** 2), X),
    "over rows": (lambda w, x: lax.scan(lambda c, r: (c * 0.9 + jnp.sum(r @ w["a"]), None), 0.0, x)[0], X),
    "merged wrongly": (lambda w, x: jnp.mean(jnp.max(x.reshape(T, -1, D), 0)), SEQ),
    "cumulative": (lambda w, x: jnp.mean(jnp.cumsum(per_row(w, x))), X),
    "until rows say": (lambda w, x: jnp.mean(lax.while_loop(
        lambda c: jnp.sum(c) < 30, lambda c: c + 1, lax.stop_gradient(x))) + 0 * jnp.sum(w["a"]), X),
    "model state": (lambda w, x: zerojax.Loss(jnp.sum(per_row(w, x)), len(x), model_state={"m": jnp.max(x)}), X),
    "metric": (lambda w, x: zerojax.Loss(jnp.sum(per_row(w, x)), len(x), {"m": jnp.max(x)}), X),
}  # fmt: skip


def value(loss, w, x):
    """(sum, weight), of a scalar as many as there are rows, and everything else."""
    out = loss(w, x)
    if not isinstance(out, zerojax.Loss):
        return out * len(x), float(len(x)), ()
    return out.total, out.weight, (dict(out.metrics), out.model_state)


def difference(loss, x, gradients=True, slices=SLICES):
    """The largest relative difference between the whole batch and its slices."""

    def mean(w, parts):
        sums = [value(loss, w, part) for part in parts]
        total, weight = (sum(s[i] for s in sums) for i in (0, 1))
        extras = jax.tree.map(lambda *a: sum(a) / len(a), *(s[2] for s in sums))
        return total / lax.stop_gradient(weight), extras

    run = jax.jit(jax.value_and_grad(mean, has_aux=True)) if gradients else lambda w, p: mean(w, p)
    whole, parts = run(W, [x]), run(W, jnp.split(x, slices))
    pairs = zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True)
    return max(float(jnp.max(jnp.abs(a - b)) / (1e-3 + jnp.max(jnp.abs(a)))) for a, b in pairs)


@pytest.mark.parametrize("name", APART)
def test_apart(name):
    loss, x = APART[name]
    assert judge(loss, W, x).why == ""
    assert difference(loss, x) < 2e-5


@pytest.mark.parametrize("name", {**MIXED, **RULE})
def test_mixed(name):
    loss, x = {**MIXED, **RULE}[name]
    found = judge(loss, W, x)
    assert not found.apart
    assert difference(loss, x, gradients=name in RULE) > 1e-4


def test_why_names_the_users_line():
    def loss(w, x):
        h = net(w, x)
        return jnp.mean(jnp.sort(h, 0))

    line = loss.__code__.co_firstlineno + 2
    assert judge(loss, W, X).why == f"sort goes from row to row ({__file__}:{line})"


def test_rows_as_many_as_other_dims_and_one_row():
    for rows in (1, T, D):
        x = jnp.ones((rows, T, D))
        assert judge(lambda w, x: jnp.mean(attention(w, x) ** 2), W, x).apart
        assert not judge(lambda w, x: jnp.mean(jnp.sort(x, 0)), W, x).apart


def test_several_leaves_of_other_dims():
    batch = {"x": SEQ, "t": TOKENS, "y": X}
    assert judge(lambda w, b: jnp.mean((b["x"] + w["table"][b["t"]]).sum(1) * b["y"]), W, batch).apart
    assert "no common number of rows" in judge(lambda w, b: 0.0, W, {"x": X, "y": jnp.ones(3)}).why


def test_noise_of_each_row():
    def loss(w, x, key):
        return jnp.mean(jnp.where(jax.random.bernoulli(key, 0.5, x.shape), net(w, x), 0))

    assert judge(loss, W, X, jax.random.key(0)).apart
    by_row = lambda w, x, key: jnp.mean(  # noqa: E731
        jax.vmap(lambda k, r: jnp.sum(r * jax.random.normal(k, r.shape)))(jax.random.split(key, len(x)), x)
    )
    assert judge(by_row, W, X, jax.random.key(0)).apart
    assert not judge(lambda w, x, key: jnp.mean(jax.random.permutation(key, x) * x), W, X, jax.random.key(0)).apart


def test_collectives_over_all_shard_axes_make_free():
    def loss(w, x, names):
        return jnp.mean((x - lax.stop_gradient(lax.pmean(jnp.mean(x, 0), names))) ** 2)

    axes = {"a": 2, "b": 2}
    assert judge(partial(loss, names=("a", "b")), W, X, axes=axes).apart
    assert not judge(partial(loss, names="a"), W, X, axes=axes).apart
    assert not judge(lambda w, x: jnp.mean(x) * lax.axis_index("a"), W, X, axes=axes).apart
    assert judge(lambda w, x, key: jnp.mean(x * jax.random.normal(
        jax.random.fold_in(key, lax.axis_index("a")), x.shape)), W, X, jax.random.key(0), axes=axes).apart  # fmt: skip


# ---- random programs ----

UNARY = [
    jnp.tanh, jnp.abs, lambda x: x * 0.5, lambda x: x[::-1], lambda x: jnp.sort(x, 0), lambda x: jnp.sort(x, 1),
    lambda x: jnp.cumsum(x, 1), lambda x: jnp.cumsum(x, 0), lambda x: x - x.mean(0), lambda x: x - x.mean(1)[:, None],
    lambda x: x / x.shape[0], lambda x: x * (jnp.arange(len(x)) < 2)[:, None], lambda x: x * jnp.arange(D),
    lambda x: x.T.reshape(x.shape), lambda x: x.reshape(-1).reshape(x.shape), lambda x: x @ (x.T @ x),
    lambda x: jnp.roll(x, 1, 0), lambda x: jnp.roll(x, 1, 1), lambda x: jnp.where(x > 0, x, 0), lambda x: x @ W["a"],
    lambda x: x * jnp.sum(jnp.ones(len(x))), lambda x: x.reshape(-1, 2).max(1).repeat(2).reshape(x.shape),
    lambda x: x.reshape(2, -1).max(0)[None].repeat(2, 0).reshape(x.shape),
    lambda x: jnp.concatenate([x[:, 1:], x[:, :1]], 1),
    lambda x: x.at[0].set(1.0), lambda x: x.at[:, 0].add(1.0), lambda x: jnp.take_along_axis(x, jnp.argsort(x, 1), 1),
    lambda x: x[jnp.arange(len(x)), jnp.argmax(x, 1)][:, None] + x,
    lambda x: x[jnp.argmax(x, 0)[0] + 0 * jnp.arange(len(x))],
    lambda x: jnp.swapaxes(x.reshape(len(x), 2, -1), 0, 1).reshape(2 * len(x), -1)[: len(x)].repeat(2, 1),
    lambda x: lax.fori_loop(0, 2, lambda i, h: jnp.tanh(h) + x, x), lambda x: jnp.zeros_like(x) + x[0],
    lambda x: W["table"][jnp.clip(jnp.int32(jnp.abs(x[:, 0]) * 3), 0, V - 1)] * x, lambda x: x * jnp.mean(x),
    lambda x: x - 1 / x.shape[0], lambda x: jnp.flip(x.reshape(-1)).reshape(x.shape),
    lambda x: jax.ops.segment_sum(x, jnp.int32(x[:, 0] > 0), 2).sum(0) + x, lambda x: x.sum(0)[None] + 0 * x,
]  # fmt: skip
BINARY = [jnp.add, jnp.multiply, jnp.subtract, jnp.maximum, lambda a, b: jnp.where(a > 0, b, a)]
ENDS = [
    jnp.mean, lambda x: jnp.sum(x) / len(x), jnp.sum, jnp.max, lambda x: jnp.mean(x) ** 2, lambda x: jnp.mean(x[:, 0]),
    lambda x: jnp.mean(x) + jnp.mean(x**2), lambda x: jnp.sum(x) / 7, lambda x: jnp.mean(x) + 3.0, lambda x: x[0, 0],
    lambda x: zerojax.Loss(jnp.sum(x), len(x)), lambda x: zerojax.Loss(jnp.sum(x), jnp.sum(x[:, 0] > -9.0)),
    lambda x: zerojax.Loss(jnp.sum(x) + 1.0, len(x)), lambda x: zerojax.Loss(jnp.mean(x), 1.0),
    lambda x: jnp.sum(x) / jnp.sum(jnp.ones(len(x))), lambda x: jnp.einsum("nd,nd->", x, x) / len(x),
]  # fmt: skip


def program(steps, end):
    def loss(w, x):
        made = [x]
        for pick, unary, binary, other in steps:
            new = UNARY[unary](made[pick % len(made)])
            made.append(new if binary is None else BINARY[binary](new, made[other % len(made)]))
        return ENDS[end](made[-1])

    return loss


numbers = st.integers(0, 5)
steps = st.tuples(numbers, st.integers(0, len(UNARY) - 1), st.none() | st.integers(0, len(BINARY) - 1), numbers)


@settings(max_examples=4 * settings().max_examples)
@given(st.lists(steps, max_size=4), st.integers(0, len(ENDS) - 1))
def test_random_programs_are_never_apart_where_slices_differ(some, end):
    loss = program(some, end)
    if judge(loss, W, X).apart:
        assert not difference(loss, X, gradients=False, slices=2) > 1e-4  # what is no number says nothing


def test_rows_in_stacks():
    def moments(w, x):
        mean, square = jnp.stack([x.mean(1), (x**2).mean(1)])
        return jnp.mean(square - mean**2) + jnp.mean(jnp.stack([x @ w["a"], x], 1))

    assert judge(moments, W, X).apart
