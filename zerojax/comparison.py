"""No ZeRO against stages 1, 2 and 3: measured on simulated devices, compiled for absent ones, computed for all others.

Gives plain dictionaries; `zerojax.comparison_page` makes files of them.
"""

import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import date
from typing import Any

import jax
import numpy as np
import optax

import zerojax
from zerojax import planning
from zerojax.accounting import live_bytes, report
from zerojax.config import ZeroConfig
from zerojax.hardware import machine
from zerojax.models import Transformer
from zerojax.plan import make_plan
from zerojax.state import init_state
from zerojax.step import make_train_step

Tell = Callable[[str], None]

STAGES = range(4)
COMPILED_MODEL = "gpt-1.3b"
COMPILED_ROWS = 4
LARGEST_ON = ("v100-32gb:64", "h100:8", "h100:64", "h100:1024", "v5p:4x4x4")
FEWEST_OF = ("megatron-8.3b", "gpt3-175b")
FEWEST_ON = ("v100-32gb:1", "h100:1", "v5p:1x1x1")


@dataclass(frozen=True)
class Settings:
    """What is compared.

    Attributes:
      steps: measured ones of each way.
      devices: simulated ones.
      width, layers, sequence, rows: of the small GPT that is trained, and of its batch over all devices.
      targets: machines that are compiled for.

    Raises:
      ValueError: if the rows cannot be divided over the devices and four micro-batches.
    """

    steps: int = 10
    devices: int = 8
    width: int = 256
    layers: int = 4
    sequence: int = 32
    rows: int = 32
    targets: tuple[str, ...] = ("h100:8", "h100:64", "v5p:2x2x4")

    def __post_init__(self):
        if min(self.steps, self.devices, self.layers) < 1 or self.width % 64:
            raise ValueError("steps, devices and layers must be 1 or more, and width a multiple of 64")
        if self.rows % (4 * self.devices):
            raise ValueError(
                f"rows={self.rows} must be a multiple of {4 * self.devices}: 4 micro-batches on each device"
            )

    @property
    def model(self) -> Transformer:
        """The small GPT."""
        return Transformer(self.width, self.layers, self.width // 64, 512, self.sequence, remat=False)


def versions() -> dict[str, str]:
    """What the figures were made with, and where."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "date": date.today().isoformat(), "zerojax": zerojax.__version__, "jax": jax.__version__,
        "optax": optax.__version__, "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {cores} cores",
    }  # fmt: skip


# ---- measured ----


@dataclass
class _Way:
    """One setting of the step, and what was measured of it."""

    stage: int
    accumulate: int
    remat: bool
    figures: dict[str, Any] = field(default_factory=dict)
    state: Any = None
    step: Any = None
    seconds: list[float] = field(default_factory=list)
    loss: Any = None

    def run(self, batch: Any) -> float:
        start = time.perf_counter()
        self.state, metrics = self.step(self.state, batch)
        jax.block_until_ready((self.state, metrics))
        self.loss = metrics["loss"]
        return time.perf_counter() - start


def measured(settings: Settings, tell: Tell) -> list[dict[str, Any]]:
    """The small GPT trained from the same start on the same batches, one step of each way in turn.

    Returns:
      For each stage, with 1 and 4 micro-batches, with and without remat: step seconds (quartiles), tokens a second,
      compile seconds, bytes of a device at rest (live arrays) and at peak (compiled with the scheduler that saves
      memory), bytes sent in a step, and the last loss.
    """
    data = _batches(settings)
    ways = [_Way(stage, k, remat) for stage in STAGES for k in (1, 4) for remat in (False, True)]
    for number, way in enumerate(ways):
        tell(f"compiling way {number + 1} of {len(ways)}: stage {way.stage}")
        _prepare(way, settings, data[0])
    for turn in range(settings.steps):
        tell(f"round {turn + 1} of {settings.steps}")
        first = turn % len(ways)  # who is next to whom changes, so that a slow moment is everybody's
        for way in (ways[first:] + ways[:first])[:: -1 if turn % 2 else 1]:
            way.seconds.append(way.run(data[turn % len(data)]))
    return [_result(way, settings) for way in ways]


def _prepare(way: _Way, settings: Settings, batch: Any):
    model, tx = settings.model, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))
    mesh = jax.make_mesh((settings.devices,), ("data",), devices=jax.devices()[: settings.devices])
    config = ZeroConfig(stage=way.stage, accumulate=way.accumulate, remat="unit" if way.remat else None)
    plan = make_plan(model.init, tx, mesh, config)
    way.state, way.step = init_state(model.init, tx, plan, jax.random.key(0)), make_train_step(model.loss, tx, plan)
    found = report(way.step, plan.abstract_state, batch)
    at_rest = max(live_bytes(way.state).values())
    first = way.run(batch)
    way.figures = {
        "compile_seconds": first - way.run(batch), "at_rest": at_rest, "peak": found.memory.peak,
        "wire_bytes": found.wire_bytes,
    }  # fmt: skip


def _result(way: _Way, settings: Settings) -> dict[str, Any]:
    quartiles = np.percentile(way.seconds, [25, 50, 75]).tolist()
    tokens = settings.rows * settings.sequence / statistics.median(way.seconds)
    own = {"stage": way.stage, "accumulate": way.accumulate, "remat": way.remat}
    return own | way.figures | {"seconds": quartiles, "tokens_per_second": tokens, "final_loss": float(way.loss)}


def _batches(settings: Settings) -> list[np.ndarray]:
    """Tokens, small ones the likeliest."""
    rng, shape = np.random.default_rng(0), (4, settings.rows, settings.sequence + 1)
    return list((rng.random(shape) ** 3 * 512).astype(np.int32))


# ---- compiled ----


def compiled(settings: Settings, tell: Tell) -> Iterator[planning.Answer]:
    """A GPT of 1.3 B parameters at every stage, by the compilers of machines that are not there.

    Raises:
      ImportError: if a compiler is not installed.
    """
    workload = planning.transformer(COMPILED_MODEL)
    for name, stage in itertools.product(settings.targets, STAGES):
        tell(f"compiling {COMPILED_MODEL} at stage {stage} for {name}")
        setting = planning.Setting(machine(name), COMPILED_ROWS, stage=stage)
        yield planning.answer(workload, setting, exact=True)


# ---- computed ----


def largest(name: str, stage: int) -> dict[str, Any] | None:
    """The largest GPT of usual proportions (width is 128 times the layers) that fits, one row a device.

    >>> largest("h100:8", 0)["layers"] < largest("h100:8", 3)["layers"]
    True
    """
    setting = planning.Setting(machine(name), stage=stage)
    best, low, high = None, 0, 400
    while low + 1 < high:
        layers = (low + high) // 2
        model = _usual(layers, setting.machine.devices)
        found = planning.answer(planning.transformer("gpt", **model), setting)
        if found.fits:
            best, low = {"parameters": Transformer(**model).parameters, "layers": layers, "peak": found.peak}, layers
        else:
            high = layers
    return best and {"on": name, "stage": stage, **best}


def _usual(layers: int, devices: int) -> dict[str, Any]:
    """Sizes of a GPT whose width is 128 times its layers, or near to that where more devices must divide it."""
    unit = max(128, devices)
    width = max(1, round(128 * layers / unit)) * unit
    return {"width": width, "layers": layers, "heads": width // 128, "vocabulary": 51_200, "sequence": 2048}


def fewest(model: str, name: str, stage: int) -> dict[str, Any]:
    """The fewest devices, as a power of two, on which a model fits, one row a device; ``None`` if on none."""
    workload = planning.transformer(model)
    setting = planning.Setting(machine(name), stage=stage)
    found = planning.find("devices", lambda one: planning.answer(workload, one), setting)
    best = found.best
    return {
        "model": model, "accelerator": setting.machine.kind, "stage": stage,
        "devices": best and best.setting.machine.devices, "peak": best and best.peak,
        "beyond": found.beyond and found.beyond.peak,
    }  # fmt: skip


# ---- all of it ----


def compare(settings: Settings, tell: Tell) -> dict[str, Any]:
    """Everything, as plain numbers and strings; what cannot be compiled here is left out, with the reason."""
    result: dict[str, Any] = {"versions": versions(), "settings": asdict(settings)}
    result["parameters"] = settings.model.parameters
    result["measured"] = measured(settings, tell)
    result["compiled"], result["not_compiled"] = [], ""
    try:
        result["compiled"].extend(_short(one) for one in compiled(settings, tell))
    except ImportError as error:
        result["not_compiled"] = str(error)
    tell("computing the largest models and the fewest devices")
    result["largest"] = [found for on in LARGEST_ON for stage in STAGES if (found := largest(on, stage))]
    result["fewest"] = [fewest(model, on, stage) for model in FEWEST_OF for on in FEWEST_ON for stage in STAGES]
    return result


def _short(one: planning.Answer) -> dict[str, Any]:
    setting = one.setting
    gathered, reduced = (
        one.compiled and one.compiled.overlapped(*kinds)
        for kinds in (("all-gather",), ("reduce-scatter", "all-reduce"))
    )
    return {
        "on": setting.machine.name, "stage": setting.stage, "peak": one.peak, "predicted": one.predicted.peak,
        **planning.parts(one), "fits": one.fits, "wire_bytes": one.wire_bytes, "wire_formula": one.predicted.wire_bytes,
        "gathered_beside_products": gathered, "reduced_beside_products": reduced,
        "bound_seconds": one.bound.seconds, "bound_by": one.bound.by,
    }  # fmt: skip
