"""What the user decides: ``ZeroConfig``, ``Precision`` and ``LossScale``, validated on construction."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
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
_SMALL = ("float8_e4m3fn", "float8_e5m2")  # for parameters at rest
_KEYS = {"p": "param_dtype", "c": "compute_dtype", "g": "gather_dtype", "r": "reduce_dtype"}
_ROUNDINGS = ("nearest", "stochastic")
_LEAST, _LARGEST = float(jnp.finfo("float32").smallest_normal), float(jnp.finfo("float32").max)


def _dtype_name(value: Any, where: str, more: tuple[str, ...] = ()) -> str:
    """The canonical name of a floating dtype given as name, short name or dtype."""
    if isinstance(value, str):
        name = _SHORT.get(value.strip(), value.strip())
    else:
        try:
            name = jnp.dtype(value).name if value is not None else "None"  # None would mean float64
        except TypeError:
            name = repr(value)
    if name not in (*_DTYPES, *more):
        known = ", ".join((*_DTYPES, *more, *_SHORT))
        raise ValueError(f"{where}={value!r} is not a floating dtype; use one of {known}")
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
      rounding: of parameters that rest in less than float32, after an update. ``"nearest"`` loses every update that
        is less than half a step of the dtype. ``"stochastic"`` computes the update in float32, from the parameters
        in float32, and rounds up or down with probabilities that make the mean right (arXiv 1502.02551, section 3);
        the random bits are the same on every mesh and at every stage. Of `make_train_step` only.

    Raises:
      ValueError: if a name is no floating dtype, or parameters in float32 shall be rounded stochastically.

    >>> Precision(compute_dtype="bf16").compute_dtype
    'bfloat16'
    >>> Precision.parse("c=bf16,r=bf16").reduce_dtype
    'bfloat16'
    >>> Precision.parse("p=bf16,c=bf16,rounding=stochastic").rounding
    'stochastic'
    """

    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    reduce_dtype: str = "float32"
    gather_dtype: str | None = None
    rounding: str = "nearest"

    def __post_init__(self):
        for name in _KEYS.values():
            if name != "gather_dtype" or self.gather_dtype is not None:
                object.__setattr__(self, name, _dtype_name(getattr(self, name), name))
        if self.rounding not in _ROUNDINGS:
            raise ValueError(f"rounding={self.rounding!r} is not one of {', '.join(map(repr, _ROUNDINGS))}")
        if self.rounding == "stochastic" and self.param_dtype not in ("bfloat16", "float16"):
            raise ValueError(f"rounding='stochastic' has nothing to round in param_dtype={self.param_dtype!r}; use it "
                             "with param_dtype='bfloat16' or 'float16', or leave it out")  # fmt: skip

    @classmethod
    def parse(cls, text: str) -> "Precision":
        """From a short form: comma-separated ``p=``, ``c=``, ``g=``, ``r=`` (param, compute, gather, reduce) and
        ``rounding=``; others by default."""
        found = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            key, equals, value = (p.strip() for p in part.partition("="))
            name = _KEYS.get(key, key)
            if not equals or name not in (*_KEYS.values(), "rounding") or name in found:
                raise ValueError(
                    f"cannot read {part!r} in precision {text!r}; write for example 'c=bf16' or 'p=f32,c=bf16,r=f32'"
                )
            found[name] = value
        return cls(**found)


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling (arXiv 1710.03740, section 3.2), which keeps small gradients of float16 from vanishing.

    The loss is multiplied by a scale before it is differentiated, and the gradient divided by it in float32. A step
    with a gradient that is not finite (an overflow) is skipped, and the scale lowered; after enough good steps it is
    raised. With both factors 1 the scale is constant.

    Attributes:
      initial: the first scale.
      growth_interval: good steps in a row, since the scale last changed, after which it is raised.
      growth_factor: by which it is raised; 1 or more.
      backoff_factor: by which it is lowered; more than 0, at most 1.
      hysteresis: the overflows that it takes to lower the scale; all but the last only skip their step. From then on
        every overflow lowers it, until the scale is raised.
      consecutive_hysteresis: whether any good step makes it take as many overflows again.
      minimum: below which the scale is never lowered.
      patience: overflows in a row that no lower scale can help (at the minimum, or with a constant scale), after which
        training raises a `FloatingPointError`. It comes up to 8 steps later, so that the host never waits for a step.

    Raises:
      ValueError: if a value is out of range.

    >>> LossScale(initial=1024, growth_interval=1000).initial
    1024.0
    """

    initial: float = 2.0**16
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    hysteresis: int = 1
    consecutive_hysteresis: bool = False
    minimum: float = 1.0
    patience: int = 10

    def __post_init__(self):
        for name in ("initial", "growth_factor", "backoff_factor", "minimum"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not _LEAST <= value <= _LARGEST:
                raise ValueError(f"{name}={value!r} is not a positive number that float32 can hold")
            object.__setattr__(self, name, float(value))
        for name in ("growth_interval", "hysteresis", "patience"):
            if type(getattr(self, name)) is not int or not 1 <= getattr(self, name) < 2**31:
                raise ValueError(f"{name}={getattr(self, name)!r} is not a number of steps; use 1 or more")
        if self.growth_factor < 1 or self.backoff_factor > 1:
            raise ValueError(f"growth_factor={self.growth_factor} must be 1 or more, backoff_factor="
                             f"{self.backoff_factor} at most 1")  # fmt: skip
        if self.minimum > self.initial:
            raise ValueError(f"minimum={self.minimum} is more than initial={self.initial}; give both or neither")
        if type(self.consecutive_hysteresis) is not bool:
            raise ValueError(f"consecutive_hysteresis={self.consecutive_hysteresis!r} is neither True nor False")


@dataclass(frozen=True)
class ZeroConfig:
    """How training is partitioned.

    Attributes:
      stage: ZeRO's stage, 0 to 3 (arXiv 1910.02054, section 5). It belongs to the step; 1, 2 and 3 share one state.
      shard_axes: the mesh axes that the state is partitioned over and the batch's rows are divided over.
      accumulate: micro-batches per step.
      rows: what a loss sees. ``"auto"``: a loss that looks across rows (BatchNorm, a masked mean, other rows as
        negatives) the whole micro-batch, as one device does, others their device's rows, which is the same and the
        faster way. ``"apart"``: always a device's own rows; ``"together"``: always all.
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
      param_dtypes: likewise the dtype in which a parameter rests, where it is not the ``param_dtype`` of the precision:
        ``{"base/*": "bf16"}`` for a frozen base. Also floats of 8 bits (``"float8_e4m3fn"``), for what is not trained.
      loss_scale: a `LossScale`, or ``True`` for one with its defaults; ``None`` (or ``False``) for no loss scaling.
      skip_nonfinite: skip steps whose gradient is not finite, without loss scaling; with it they always are. A skipped
        step changes nothing of the state, not even ``step``, but the loss scale.

    Raises:
      ValueError: if a value is out of range, with what to write instead.

    >>> ZeroConfig(stage=2, shard_axes="data", accumulate=4).shard_axes
    ('data',)
    """

    stage: int = 3
    shard_axes: tuple[str, ...] = ("data",)
    accumulate: int = 1
    rows: Literal["auto", "apart", "together"] = "auto"
    precision: Precision = field(default_factory=Precision)
    keep_whole_below: int = 0
    allow_whole: bool = False
    remat: str | Callable[..., Any] | None = None
    overrides: tuple[tuple[str, int | None], ...] = ()
    trainable: tuple[str, ...] = ("*",)
    frozen: tuple[str, ...] = ()
    compute_dtypes: tuple[tuple[str, str], ...] = ()
    param_dtypes: tuple[tuple[str, str], ...] = ()
    loss_scale: LossScale | bool | None = None
    skip_nonfinite: bool = False

    def __post_init__(self):
        if isinstance(self.precision, str):
            object.__setattr__(self, "precision", Precision.parse(self.precision))
        for name in ("shard_axes", "trainable", "frozen"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        object.__setattr__(self, "overrides", _pairs(self.overrides))
        for name, more in (("compute_dtypes", ()), ("param_dtypes", _SMALL)):
            pairs = _pairs(getattr(self, name))
            dtypes = tuple((p, _dtype_name(dtype, f"{name}: {p!r}", more)) for p, dtype in pairs)
            object.__setattr__(self, name, dtypes)
        if isinstance(self.loss_scale, bool):
            object.__setattr__(self, "loss_scale", LossScale() if self.loss_scale else None)
        self._check()

    @property
    def scaling(self) -> LossScale | None:
        """What decides about skipped steps: the loss scale, or a constant one of 1 for ``skip_nonfinite``."""
        if isinstance(self.loss_scale, LossScale):
            return self.loss_scale
        return LossScale(initial=1, growth_factor=1, backoff_factor=1) if self.skip_nonfinite else None

    def _check(self):
        if type(self.stage) is not int or self.stage not in range(4):
            raise ValueError(f"stage={self.stage!r} is not one of 0, 1, 2, 3")
        if type(self.accumulate) is not int or self.accumulate < 1:
            raise ValueError(f"accumulate={self.accumulate!r} is not a number of micro-batches; use 1 or more")
        if self.rows not in ("auto", "apart", "together"):
            raise ValueError(f"rows={self.rows!r} is not one of 'auto', 'apart', 'together'")
        if type(self.keep_whole_below) is not int or self.keep_whole_below < 0:
            raise ValueError(f"keep_whole_below={self.keep_whole_below!r} is not a number of elements; use 0 or more")
        if not isinstance(self.precision, Precision):
            raise ValueError(f"precision={self.precision!r} is neither a Precision nor its short form such as 'c=bf16'")
        if not (self.remat is None or (isinstance(self.remat, str) and self.remat == "unit") or callable(self.remat)):
            raise ValueError(f"remat={self.remat!r} is neither None nor 'unit' nor a policy of jax.checkpoint, such as "
                             "jax.checkpoint_policies.dots_saveable")  # fmt: skip
        if callable(self.remat) and _is_no_policy(self.remat):
            raise ValueError(f"remat={self.remat!r} does not answer as a policy does; a function that makes policies, "
                             "such as jax.checkpoint_policies.save_only_these_names, must be called first")  # fmt: skip
        if not (self.loss_scale is None or isinstance(self.loss_scale, LossScale)):
            raise ValueError(f"loss_scale={self.loss_scale!r} is neither True nor a LossScale, such as "
                             "LossScale(initial=1024)")  # fmt: skip
        if type(self.skip_nonfinite) is not bool:
            raise ValueError(f"skip_nonfinite={self.skip_nonfinite!r} is neither True nor False")
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
        for name in ("compute_dtypes", "param_dtypes"):
            wrong = [pattern for pattern, _ in getattr(self, name) if not isinstance(pattern, str)]
            if wrong:
                raise ValueError(f"{name}: {wrong[0]!r} is not a path pattern such as '*/norm*'")


def _is_no_policy(remat: Callable[..., Any]) -> bool:
    """Whether a function, asked about an equation as `jax.checkpoint` asks, returns yet another one or refuses."""
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        return callable(remat(jax.lax.exp_p, shape, accuracy=None))
    except TypeError:
        return True
