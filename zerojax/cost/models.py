"""Transformers by name, as plain functions over stacked layers, for ``zerojax plan`` and ``zerojax bench``."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from zerojax.contracts import Tree


@dataclass(frozen=True)
class Transformer:
    """A decoder, of GPT's kind or of Llama's.

    GPT's has LayerNorm, biases, learned positions, a GELU of four times the width, and its head is the embedding.
    Llama's has RMSNorm, rotary positions, a gated SiLU, and may have fewer heads for keys and values.

    Attributes:
      width, layers, heads, vocabulary: the usual.
      sequence: tokens of a row.
      style: "gpt" or "llama".
      kv_heads: heads of keys and values, by default all.
      hidden: width of the feed-forward part, by default four times the width.
      tied: whether the head is the embedding.
      remat: whether backward computes each block again.

    Raises:
      ValueError: if heads do not divide the width, or key heads the heads.

    >>> Transformer(width=768, layers=12, heads=12).parameters
    124439808
    """

    width: int
    layers: int
    heads: int
    vocabulary: int = 50257
    sequence: int = 1024
    style: Literal["gpt", "llama"] = "gpt"
    kv_heads: int | None = None
    hidden: int | None = None
    tied: bool = True
    remat: bool = True

    def __post_init__(self):
        for name in ("width", "layers", "heads", "vocabulary", "sequence"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not 1 or more")
        if self.width % self.heads or self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"{self.heads} heads must divide width {self.width}, and "
                             f"{self.kv_heads or self.heads} key heads must divide the heads")  # fmt: skip

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.width // self.heads

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(jax.eval_shape(self.init, jax.random.key(0))))

    def init(self, key: Any) -> Tree:
        """Parameters in float32; those of the layers are stacked in dim 0."""
        shapes, keys = self._shapes(), iter(jax.random.split(key, 32))
        deep = 0.02 / math.sqrt(2 * self.layers)

        def make(path, shape):
            name = path[-1].key
            if name.endswith("norm"):
                return jnp.ones(shape)
            if name.endswith("bias"):
                return jnp.zeros(shape)
            return (deep if name in ("out", "down") else 0.02) * jax.random.normal(next(keys), shape)

        return jax.tree_util.tree_map_with_path(make, shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))

    def _shapes(self) -> dict:
        d, hidden, gpt = self.width, self.hidden or 4 * self.width, self.style == "gpt"
        projected = d + 2 * (self.kv_heads or self.heads) * self.head
        block = {"attention_norm": (d,), "qkv": (d, projected), "out": (d, d), "mlp_norm": (d,)}
        block |= {"up": (d, hidden), "down": (hidden, d)} | ({} if gpt else {"gate": (d, hidden)})
        if gpt:
            block |= {"attention_norm_bias": (d,), "qkv_bias": (projected,), "out_bias": (d,)}
            block |= {"mlp_norm_bias": (d,), "up_bias": (hidden,), "down_bias": (d,)}
        whole = {"embed": (self.vocabulary, d), "norm": (d,)}
        whole |= {"position": (self.sequence, d), "norm_bias": (d,)} if gpt else {}
        whole |= {} if self.tied else {"head": (d, self.vocabulary)}
        return {**whole, "blocks": {name: (self.layers, *shape) for name, shape in block.items()}}

    def loss(self, params: Tree, tokens: jax.Array) -> jax.Array:
        """Mean cross entropy of the next token; ``tokens`` are (rows, sequence + 1) integers."""
        x = params["embed"][tokens[:, :-1]]
        if self.style == "gpt":
            x = x + params["position"]
        block = jax.checkpoint(self._block) if self.remat else self._block
        x, _ = jax.lax.scan(lambda x, p: (block(p, x), None), x, params["blocks"])
        x = self._norm(params, "norm", x)
        logits = x @ (params["embed"].T if self.tied else params["head"])
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:]).mean()

    def _block(self, p: dict, x: jax.Array) -> jax.Array:
        x = x + self._attention(p, self._norm(p, "attention_norm", x))
        h = self._norm(p, "mlp_norm", x)
        if self.style == "gpt":
            return x + jax.nn.gelu(h @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]

    def _attention(self, p: dict, x: jax.Array) -> jax.Array:
        projected = x @ p["qkv"] + p.get("qkv_bias", jnp.zeros((), x.dtype))
        kv = (self.kv_heads or self.heads) * self.head
        parts = jnp.split(projected, [self.width, self.width + kv], axis=-1)
        q, k, v = (part.reshape(*part.shape[:2], -1, self.head) for part in parts)
        if self.style == "llama":
            q, k = _rotated(q), _rotated(k)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        return mixed @ p["out"] + p.get("out_bias", jnp.zeros((), x.dtype))

    def _norm(self, p: dict, name: str, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        if self.style == "gpt":
            return (jax.nn.standardize(wide, epsilon=1e-5).astype(x.dtype)) * p[name] + p[f"{name}_bias"]
        scale = jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)
        return (wide * scale).astype(x.dtype) * p[name]


def _rotated(x: jax.Array) -> jax.Array:
    """Rotary positions (arXiv 2104.09864) with base 500,000; x is (rows, sequence, heads, head)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 500_000.0 ** (-jnp.arange(half) / half)
    sin, cos = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.sin, jnp.cos))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _llama(width: int, layers: int, heads: int, hidden: int) -> Transformer:
    return Transformer(width, layers, heads, 128_256, 8192, "llama", kv_heads=8, hidden=hidden, tied=False)


def _megatron(width: int, layers: int, heads: int) -> Transformer:
    return Transformer(width, layers, heads, 51_200)


# GPT-2: Radford et al. 2019, table 2. Megatron-LM: arXiv 1909.08053, table 1, with its padded vocabulary. Turing-NLG:
# Microsoft's announcement of 2020, with Megatron-LM's vocabulary. GPT-3: arXiv 2005.14165, table 2.1, where the 13B's
# width of 5140 is taken as 5120, 40 heads of 128. Llama 3: arXiv 2407.21783, table 3.
MODELS = {
    "gpt2": Transformer(768, 12, 12),
    "gpt2-medium": Transformer(1024, 24, 16),
    "gpt2-large": Transformer(1280, 36, 20),
    "gpt2-xl": Transformer(1600, 48, 25),
    "gpt-1.3b": Transformer(2048, 24, 16, 32_768),
    "megatron-1.2b": _megatron(1536, 40, 16),
    "megatron-2.5b": _megatron(1920, 54, 20),
    "megatron-4.2b": _megatron(2304, 64, 24),
    "megatron-8.3b": _megatron(3072, 72, 32),
    "turing-nlg-17b": _megatron(4256, 78, 28),
    "gpt3-13b": Transformer(5120, 40, 40, sequence=2048),
    "gpt3-175b": Transformer(12288, 96, 96, sequence=2048),
    "llama3-8b": _llama(4096, 32, 32, 14336),
    "llama3-70b": _llama(8192, 80, 64, 28672),
    "llama3-405b": _llama(16384, 126, 128, 53248),
}


def named(name: str, **changes: Any) -> Transformer:
    """A model by name, with other sizes where they are given.

    Raises:
      ValueError: for a name that is not known, with those that are.

    >>> named("gpt2", sequence=512).sequence
    512
    >>> named("gpt-4")
    Traceback (most recent call last):
    ...
    ValueError: 'gpt-4' is no model that is known; known: gpt2, gpt2-medium, ...
    """
    if name not in MODELS:
        raise ValueError(f"{name!r} is no model that is known; known: {', '.join(MODELS)}")
    return dataclasses.replace(MODELS[name], **changes)
