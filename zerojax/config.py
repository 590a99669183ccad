"""What the user decides: ``ZeroConfig`` and ``Precision``, validated on construction."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

_SHORT = {
    "f32": "float32",
    "fp32": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "f64": "float64",
}
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_KEYS = {"p": "param_dtype", "c": "compute_dtype", "g": "gather_dtype", "r": "reduce_dtype"}


def _dtype_name(value: Any, where: str) -> str:
    """The canonical name of a floating dtype given as name, short name or dtype."""
    if isinstance(value, str):
        name = _SHORT.get(value.strip(), value.strip())
    else:
        try:
            name = jnp.dtype(value).name if value is not None else "None"  # None would mean float64
        except TypeError:
            name = repr(value)
    if name not in _DTYPES:
        raise ValueError(f"{where}={value!r} is not a floating dtype; use one of {', '.join((*_DTYPES, *_SHORT))}")
    return name


def _pairs(by_pattern: Any) -> tuple[tuple[Any, Any], ...]:
    """What is given by path pattern, in its order."""
    pairs = by_pattern.items() if isinstance(by_pattern, Mapping) else by_pattern
    return tuple((pattern, value) for pattern, value in pairs)


@dataclass(frozen=True)
class Precision:
    """The dtypes of a step.

    Attributes:
      param_dtype: of the parameters at rest. Floating leaves are cast to it when they are born. The optimizer state
        keeps the dtypes that ``tx.init`` gives it for such parameters.
      compute_dtype: of the parameters that the loss sees; cast before they are gathered, so it is also the dtype on
        the wire. `ZeroConfig` has ``compute_dtypes`` for single parameters.
      gather_dtype: of the parameters on the wire, if not ``compute_dtype``: they are rounded to it, also those that
        need not travel, so that every stage computes the same; gradients flow as if they were not. Parameters of
        ``compute_dtypes`` travel in the dtype that is given there.
      reduce_dtype: of the gradients on the wire. They are accumulated, averaged and given to ``tx`` in float32 (or
        float64 if that is the ``reduce_dtype``).

    Raises:
      ValueError: if a name is no floating dtype.

    >>> Precision(compute_dtype="bf16")
    Precision(param_dtype='float32', compute_dtype='bfloat16', reduce_dtype='float32', gather_dtype=None)
    >>> Precision.parse("c=bf16,r=bf16").reduce_dtype
    'bfloat16'
    """

    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    reduce_dtype: str = "float32"
    gather_dtype: str | None = None

    def __post_init__(self):
        for name in _KEYS.values():
            if name != "gather_dtype" or self.gather_dtype is not None:
                object.__setattr__(self, name, _dtype_name(getattr(self, name), name))

    @classmethod
    def parse(cls, text: str) -> "Precision":
        """From a short form: comma-separated ``p=``, ``c=``, ``g=`` and ``r=`` (param, compute, gather, reduce), others
        by default."""
        found = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            key, equals, value = (p.strip() for p in part.partition("="))
            name = _KEYS.get(key, key)
            if not equals or name not in _KEYS.values() or name in found:
                raise ValueError(
                    f"cannot read {part!r} in precision {text!r}; write for example 'c=bf16' or 'p=f32,c=bf16,r=f32'"
                )
            found[name] = value
        return cls(**found)


@dataclass(frozen=True)
class ZeroConfig:
    """How training is partitioned.

    Attributes:
      stage: ZeRO's stage, 0 to 3 (arXiv 1910.02054, section 5). It belongs to the step; 1, 2 and 3 share one state.
      shard_axes: the mesh axes that the state is partitioned over and the batch's rows are divided over.
      accumulate: micro-batches per step.
      precision: a `Precision`, or its short form (``"c=bf16"``).
      keep_whole_below: leaves with fewer elements stay whole on every device. Leaves with fewer elements than there
        are devices always do.
      allow_whole: accept that leaves that cannot be partitioned stay whole although they are over 1 % of the bytes.
      remat: what backward makes again, besides what the loss's own `jax.checkpoint` does: ``None`` for nothing,
        ``"unit"`` for all that a gather unit makes (about a layer), or a policy for each unit, such as
        ``jax.checkpoint_policies.dots_saveable``.
      overrides: per leaf, by glob pattern on its path (``{"*/embedding": 1, "head/*": None}``): the dim to partition,
        or ``None`` to keep it whole. The first pattern that matches counts.
      trainable: patterns likewise of the parameters that are trained (``"*/lora_*"`` or several of them).
      frozen: patterns of those that are not, although ``trainable`` matches them. They are partitioned and gathered as
        the others; they have no gradient, no part in ``grad_norm`` and no state in the optimizer, and do not change.
      compute_dtypes: likewise the dtype in which the loss sees a parameter (``{"*/norm*": "float32"}``), where it is
        not the ``compute_dtype`` of the precision.

    Raises:
      ValueError: if a value is out of range, with what to write instead.

    >>> ZeroConfig(stage=2, shard_axes="data", accumulate=4).shard_axes
    ('data',)
    """

    stage: int = 3
    shard_axes: tuple[str, ...] = ("data",)
    accumulate: int = 1
    precision: Precision = field(default_factory=Precision)
    keep_whole_below: int = 0
    allow_whole: bool = False
    remat: str | Callable[..., Any] | None = None
    overrides: tuple[tuple[str, int | None], ...] = ()
    trainable: tuple[str, ...] = ("*",)
    frozen: tuple[str, ...] = ()
    compute_dtypes: tuple[tuple[str, str], ...] = ()

    def __post_init__(self):
        if isinstance(self.precision, str):
            object.__setattr__(self, "precision", Precision.parse(self.precision))
        for name in ("shard_axes", "trainable", "frozen"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        object.__setattr__(self, "overrides", _pairs(self.overrides))
        dtypes = [(p, _dtype_name(dtype, f"compute_dtypes: {p!r}")) for p, dtype in _pairs(self.compute_dtypes)]
        object.__setattr__(self, "compute_dtypes", tuple(dtypes))
        self._check()

    def _check(self):
        if type(self.stage) is not int or self.stage not in range(4):
            raise ValueError(f"stage={self.stage!r} is not one of 0, 1, 2, 3")
        if type(self.accumulate) is not int or self.accumulate < 1:
            raise ValueError(f"accumulate={self.accumulate!r} is not a number of micro-batches; use 1 or more")
        if type(self.keep_whole_below) is not int or self.keep_whole_below < 0:
            raise ValueError(f"keep_whole_below={self.keep_whole_below!r} is not a number of elements; use 0 or more")
        if not isinstance(self.precision, Precision):
            raise ValueError(f"precision={self.precision!r} is neither a Precision nor its short form such as 'c=bf16'")
        if not (self.remat is None or (isinstance(self.remat, str) and self.remat == "unit") or callable(self.remat)):
            raise ValueError(f"remat={self.remat!r} is neither None nor 'unit' nor a policy of jax.checkpoint, such as "
                             "jax.checkpoint_policies.dots_saveable")  # fmt: skip
        axes = self.shard_axes
        if not axes or len(set(axes)) < len(axes) or not all(isinstance(a, str) for a in axes):
            raise ValueError(f"shard_axes={axes!r} must be one or more different names of mesh axes")
        for pattern, dim in self.overrides:
            if not isinstance(pattern, str) or not (dim is None or type(dim) is int):
                raise ValueError(f"override {pattern!r}: {dim!r} is not a path pattern with a dim (an int) or None")
        for name in ("trainable", "frozen"):
            wrong = [pattern for pattern in getattr(self, name) if not isinstance(pattern, str)]
            if wrong:
                raise ValueError(f"{name}: {wrong[0]!r} is not a path pattern such as '*/lora_*'")
        for pattern, _ in self.compute_dtypes:
            if not isinstance(pattern, str):
                raise ValueError(f"compute_dtypes: {pattern!r} is not a path pattern such as '*/norm*'")
