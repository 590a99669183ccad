"""The trainee of ``zerojax train``: a small GPT that learns Python's own standard library byte by byte."""

import functools
import math
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from zerojax import tables
from zerojax.config import LossScale, Precision, ZeroConfig

VOCABULARY = 256  # every byte is a token
UNIFORM_LOSS = math.log(VOCABULARY)  # of a model that knows nothing
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class RunConfig:
    """What is trained, on what, and for how long; the defaults are those of ``zerojax train``.

    Attributes:
      stage: ZeRO's stage, 0 to 3.
      devices: how many devices share the state and the rows.
      steps: updates to make.
      rows: sequences per step, over all devices and micro-batches.
      accumulate: micro-batches per step.
      seed: of the initial parameters, the order of the data and the sampled text.
      width, layers, heads, sequence: the model's size.
      learning_rate: the highest, after warm-up.
      precision: the short form of a `zerojax.Precision`. With float16 in it the loss is scaled dynamically.
      corpus_bytes: the most that is read as data.

    Raises:
      ValueError: if a value is out of range or does not divide, with what to write instead.

    >>> RunConfig(rows=64).tokens_per_step
    8192
    """

    stage: int = 3
    devices: int = 8
    steps: int = 200
    rows: int = 16
    accumulate: int = 1
    seed: int = 0
    width: int = 192
    layers: int = 6
    heads: int = 6
    sequence: int = 128
    learning_rate: float = 2e-3  # at twice that a change of the weights in the third digit moves the last loss by 3 %
    precision: str = "c=f32"
    corpus_bytes: int = 8 * 2**20

    def __post_init__(self):
        if self.stage not in range(4):
            raise ValueError(f"stage={self.stage} is not one of 0, 1, 2, 3")
        for name in ("devices", "steps", "rows", "accumulate", "width", "layers", "heads", "sequence"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is too few; use 1 or more")
        if self.seed not in range(2**32):
            raise ValueError(f"seed={self.seed} is not between 0 and 2**32 - 1")
        parts = self.devices * self.accumulate
        if self.rows % parts:
            nearest = max(1, round(self.rows / parts)) * parts
            raise ValueError(
                f"rows={self.rows} cannot be divided over {tables.count(self.devices, 'device')} x {self.accumulate} "
                f"micro-batches; use a multiple of {parts}, such as {nearest}"
            )
        Precision.parse(self.precision)
        if self.width % self.heads:
            raise ValueError(f"width={self.width} cannot be divided over heads={self.heads}")
        if self.stage and self.width % self.devices:  # all parameters have a dim of this size
            numbers = [n for n in range(1, self.width + 1) if self.width % n == 0]
            use = f"use one of {', '.join(map(str, numbers))}, or stage 0"
            raise ValueError(f"devices={self.devices} cannot share parameters of width {self.width}; {use}")

    @property
    def tokens_per_step(self) -> int:
        """Bytes that one step predicts."""
        return self.rows * self.sequence

    @property
    def zero(self) -> ZeroConfig:
        """What the library is asked for."""
        dtypes = Precision.parse(self.precision)
        half = "float16" in (dtypes.param_dtype, dtypes.compute_dtype, dtypes.reduce_dtype)
        scale = LossScale(initial=2.0**15) if half else None  # at the default a short run's first is skipped
        return ZeroConfig(stage=self.stage, accumulate=self.accumulate, precision=dtypes, loss_scale=scale)


# ---- data ----


def corpus(limit: int = 8 * 2**20) -> np.ndarray:
    """Python's standard library as one array of bytes, the same on every call.

    Args:
      limit: the most bytes to return.

    Raises:
      ValueError: if there are no sources, as in some frozen distributions.

    >>> corpus(1000).shape, corpus(1000).dtype
    ((1000,), dtype('uint8'))
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found, size = [], 0
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts):
            continue
        try:
            found.append(path.read_bytes())
        except OSError:
            continue  # one unreadable file is no reason not to train
        size += len(found[-1])
        if size >= limit:
            break
    if not size:
        raise ValueError(f"no Python sources under {root} to train on")
    return np.frombuffer(b"".join(found)[:limit], np.uint8)


def split(data: np.ndarray, held_out: float = 0.05) -> tuple[np.ndarray, np.ndarray]:
    """The bytes to train on, and a tail that is kept for evaluation.

    >>> [part.size for part in split(np.zeros(1000, np.uint8))]
    [950, 50]
    """
    cut = data.size - int(data.size * held_out)
    return data[:cut], data[cut:]


def batches(data: np.ndarray, rows: int, sequence: int, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Endless host batches ``{"tokens": int32 (rows, sequence + 1)}``, in an order that the seed decides.

    A row holds one byte more than the model sees, since every byte's target is the next one. Every epoch has its own
    order.

    Raises:
      ValueError: if the data are too few for one batch.

    >>> next(batches(np.arange(200, dtype=np.uint8), rows=2, sequence=8))["tokens"].shape
    (2, 9)
    """
    windows = (data.size - 1) // sequence
    if windows < rows:
        raise ValueError(f"{data.size} bytes of data are too few for {rows} rows of {sequence + 1}")

    def window(index: int) -> dict[str, np.ndarray]:
        return {"tokens": data[index * sequence : (index + 1) * sequence + 1].astype(np.int32)}

    dataset = grain.MapDataset.source(range(windows)).seed(seed).shuffle().repeat().map(window)
    # The data are in memory: threads would only compete with the devices for the interpreter.
    in_line = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return iter(dataset.batch(rows, drop_remainder=True).to_iter_dataset(in_line))


# ---- model ----

_small = nn.initializers.normal(0.02)
_LOOKS_BACK = 3  # bytes that the input holds beside its own: a short run need not learn first to attend to them


def _attend(q, k, v):  # each (rows, heads, sequence, head width)
    """Causal attention. Written out since on CPUs it takes half the time of `jax.nn.dot_product_attention`."""
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])  # (rows, heads, to, from)
    scores = jnp.where(jnp.tri(scores.shape[-1], dtype=bool), scores, -1e9)
    return jax.nn.softmax(scores) @ v


class Block(nn.Module):
    """One pre-norm transformer block: causal attention, then a gelu MLP, each added to its input."""

    heads: int
    out_init: Callable  # of the two projections that add to the residual stream

    @nn.compact
    def __call__(self, x):  # (rows, sequence, width)
        rows, sequence, width = x.shape
        h = nn.Dense(3 * width, kernel_init=_small, name="qkv")(nn.LayerNorm(name="norm1")(x))
        h = _attend(*h.reshape(rows, sequence, 3, self.heads, width // self.heads).transpose(2, 0, 3, 1, 4))
        h = h.transpose(0, 2, 1, 3).reshape(rows, sequence, width)
        x = x + nn.Dense(width, kernel_init=self.out_init, name="out")(h)
        h = nn.gelu(nn.Dense(4 * width, kernel_init=_small, name="up")(nn.LayerNorm(name="norm2")(x)))
        return x + nn.Dense(width, kernel_init=self.out_init, name="down")(h)


class GPT(nn.Module):
    """A byte-level GPT whose output layer is its embedding, transposed.

    Attributes:
      config: gives the size.

    >>> config = RunConfig(width=16, layers=1, heads=2, sequence=8)
    >>> tokens = jnp.zeros((1, 8), jnp.int32)
    >>> jax.eval_shape(GPT(config).init_with_output, jax.random.key(0), tokens)[0].shape
    (1, 8, 256)
    """

    config: RunConfig

    @nn.compact
    def __call__(self, tokens):  # (rows, sequence) -> logits (rows, sequence, vocabulary)
        c = self.config
        embed = nn.Embed(VOCABULARY, c.width, embedding_init=_small, name="embed")
        position = self.param("position", _small, (c.sequence, c.width))
        x = embed(tokens) + position[: tokens.shape[1]]
        for back in range(1, _LOOKS_BACK + 1):
            earlier = jnp.pad(tokens, ((0, 0), (back, 0)))[:, :-back]
            x = x + nn.Embed(VOCABULARY, c.width, embedding_init=_small, name=f"back{back}")(earlier)
        out_init = nn.initializers.normal(0.02 / math.sqrt(2 * c.layers))  # so that depth does not raise the variance
        for layer in range(c.layers):
            x = Block(c.heads, out_init, name=f"block{layer}")(x)
        return embed.attend(nn.LayerNorm(name="norm")(x))


def make_init(config: RunConfig) -> Callable:
    """``init_fn(key) -> params`` for ``make_plan`` and ``init_state``.

    >>> shapes = jax.eval_shape(make_init(RunConfig()), jax.random.key(0))
    >>> sum(leaf.size for leaf in jax.tree.leaves(shapes))
    2890752
    """
    return lambda key: GPT(config).init(key, jnp.zeros((1, config.sequence), jnp.int32))["params"]


def _logits(config: RunConfig, params: Any, tokens: jax.Array) -> jax.Array:
    return jnp.asarray(GPT(config).apply({"params": params}, tokens), jnp.float32)


def make_loss(config: RunConfig) -> Callable:
    """``loss_fn(params, batch, rng) -> scalar``: the mean cross entropy of the next byte, in nats and float32.

    >>> config = RunConfig(width=16, layers=1, heads=2, sequence=8)
    >>> params = jax.jit(make_init(config))(jax.random.key(0))
    >>> loss = jax.jit(make_loss(config))(params, {"tokens": jnp.arange(18).reshape(2, 9)}, None)
    >>> abs(float(loss) - UNIFORM_LOSS) < 0.3
    True
    """

    def loss_fn(params, batch, rng):
        tokens = batch["tokens"]  # (rows, sequence + 1)
        logits = _logits(config, params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss_fn


def make_optimizer(config: RunConfig) -> optax.GradientTransformation:
    """AdamW with clipping, a short warm-up and a cosine decay over the run's steps.

    >>> isinstance(make_optimizer(RunConfig()), optax.GradientTransformation)
    True
    """
    warmup = min(20, config.steps // 10)
    rate = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, warmup, config.steps, config.learning_rate / 20
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.1))


# ---- loop ----


def train(
    step: Callable, state: Any, data: Iterator[dict], config: RunConfig, on_step: Callable[[dict[str, float]], Any]
) -> Any:
    """Makes ``config.steps`` updates and returns the last state.

    Args:
      step: from ``make_train_step``.
      on_step: called once a step with its number, loss, grad_norm and tokens_per_second, and where the loss is scaled
        loss_scale and skipped. A step's numbers are fetched while the next step runs, so that the devices never wait
        for them.

    >>> def step(state, batch):
    ...     return state + 1, {"loss": 2.0, "grad_norm": 1.0, "step": state + 1}
    >>> seen = []
    >>> train(step, 0, iter([{}] * 3), RunConfig(steps=3), lambda line: seen.append(line["step"]))
    3
    >>> seen
    [1, 2, 3]
    """
    pending, then = None, 0.0
    for number in range(config.steps + 1):
        running = None
        if number < config.steps:
            state, running = step(state, next(data))
        if number == 0:
            then = time.perf_counter()  # the first call compiles, which is no measure of speed
        if pending is not None:
            names = [name for name in ("loss", "grad_norm", "loss_scale", "skipped") if name in pending]
            line = {name: float(pending[name]) for name in names}  # waits for the step
            now = time.perf_counter()
            on_step({"step": number, **line, "tokens_per_second": config.tokens_per_step / (now - then)})
            then = now
        pending = running
    return state


# ---- text ----


@functools.partial(jax.jit, static_argnums=0)
def _continue(config: RunConfig, params: Any, buffer: jax.Array, start: jax.Array, key: jax.Array, temperature):
    """``buffer`` (bytes in all) with every byte from ``start`` on replaced by a sampled one."""

    def write(i, buffer):
        first = jnp.maximum(i - config.sequence, 0)  # of the window that ends before byte i
        window = jax.lax.dynamic_slice(buffer, (first,), (config.sequence,))
        logits = _logits(config, params, window[None])[0, i - 1 - first]
        scaled = logits / jnp.maximum(temperature, 1e-6)  # zero temperature: the likeliest byte
        byte = jax.random.categorical(jax.random.fold_in(key, i), scaled)
        return buffer.at[i].set(byte.astype(buffer.dtype))

    return jax.lax.fori_loop(start, buffer.size, write, buffer)


def sample(
    config: RunConfig, params: Any, prompt: bytes, length: int, key: jax.Array, temperature: float = 0.8
) -> bytes:
    """The prompt and ``length`` sampled bytes after it. Compiled once for each total length.

    Args:
      config: of the model.
      params: whole parameters, as ``gather_params`` returns them; one device's copy does the work.
      prompt: what the text begins with; not empty, since the model has no token for a beginning.

    Raises:
      ValueError: if the prompt is empty.

    >>> config = RunConfig(width=16, layers=1, heads=2, sequence=8)
    >>> len(sample(config, jax.jit(make_init(config))(jax.random.key(0)), b"def ", 10, jax.random.key(1)))
    14
    """
    if not prompt:
        raise ValueError("the prompt is empty; give at least one byte, such as b'\\n'")
    total = len(prompt) + length
    buffer = np.zeros(max(total, config.sequence), np.int32)  # a window always fits
    buffer[: len(prompt)] = np.frombuffer(prompt, np.uint8)
    params = jax.tree.map(lambda leaf: leaf.addressable_data(0), params)
    text = _continue(config, params, buffer, len(prompt), key, temperature)
    return np.asarray(text[:total]).astype(np.uint8).tobytes()


def printable(text: bytes) -> str:
    r"""The text in plain ASCII, all else escaped, so that it cannot send a terminal anything but characters and lines.

    >>> print(printable(b"a\x1b[2J\n\xffb"))
    a\x1b[2J
    \xffb
    """
    return "".join(chr(b) if 32 <= b < 127 or b in b"\n\t" else f"\\x{b:02x}" for b in text)


# ---- plot ----

_WINDOW = 10  # steps that are averaged
# The colours are Okabe and Ito's, which the colour-blind can tell apart.


def plot_loss(lines: list[dict[str, float]], held_out: float | None, title: str, path: Path):
    """Write the loss of every step, its running mean and the held-out loss as a PNG of 1200 x 750 pixels.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "loss.png"
    >>> plot_loss([{"step": 1, "loss": 5.5}, {"step": 2, "loss": 5.0}], 5.1, "two steps", path)
    >>> path.stat().st_size > 10_000
    True
    """
    steps, losses = ([line[name] for line in lines] for name in ("step", "loss"))
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    marker = "o" if len(steps) < 2 * _WINDOW else None  # a line alone shows nothing of a single step
    axes.plot(steps, losses, marker=marker, color="#56B4E9", linewidth=1.2, label="training, each step")
    if len(steps) >= _WINDOW:
        middle = np.asarray(steps[_WINDOW - 1 :]) - (_WINDOW - 1) / 2  # of each window, so that the mean does not lag
        mean = np.convolve(losses, np.full(_WINDOW, 1 / _WINDOW), "valid")
        axes.plot(middle, mean, color="#0072B2", linewidth=2.4, label=f"training, mean of {_WINDOW} steps")
    if held_out is not None:
        label = f"held-out text, at the end: {held_out:.2f}"
        axes.plot(steps[-1:], [held_out], "D", color="#D55E00", markersize=9, label=label, clip_on=False, zorder=3)
    label = f"uniform guess: ln {VOCABULARY} = {UNIFORM_LOSS:.2f}"
    axes.axhline(UNIFORM_LOSS, color="0.35", linewidth=1.2, linestyle="--", label=label)
    axes.set_xlabel("step", fontsize=14)
    axes.set_ylabel("loss (nats per byte)", fontsize=14)
    axes.set_title(title, fontsize=15)
    axes.tick_params(labelsize=12)
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=12, frameon=False)
    figure.savefig(path)
