"""No ZeRO against stages 1, 2 and 3: measured on simulated devices, compiled for absent ones, computed for all others.

Gives plain dictionaries; `zerojax.app.comparison_page` makes files of them.
"""

import bisect
import functools
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
from zerojax.config import ZeroConfig
from zerojax.cost import planning
from zerojax.cost.hardware import machine
from zerojax.cost.models import Transformer
from zerojax.cost.report import live_bytes, report
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


@dataclass(kw_only=True)
class Timed:
    """A step ``(state, batch) -> (state, results)``, and what was measured of it."""

    state: Any
    step: Callable
    compile_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)

    def run(self, batch: Any) -> float:
        """Makes one step and returns its seconds, calls and checks on the host included."""
        start = time.perf_counter()
        self.state, results = self.step(self.state, batch)
        jax.block_until_ready((self.state, results))
        self.results.append(results)
        return time.perf_counter() - start

    def warm_up(self, batch: Any):
        """The first step, which compiles, and a second; neither is measured."""
        self.compile_seconds = self.run(batch) - self.run(batch)


def in_turns(ways: list[Any], data: list[Any], steps: int, tell: Tell):
    """Rounds in which each of the ways (`Timed`) makes one step, on the same batch.

    Who is next to whom changes from round to round, so that a slow moment is everybody's.
    """
    for number in range(steps):
        tell(f"round {number + 1} of {steps}")
        first = number % len(ways)
        for way in (ways[first:] + ways[:first])[:: -1 if number % 2 else 1]:
            way.seconds.append(way.run(data[number % len(data)]))


@dataclass
class _Way(Timed):
    """One setting of the step."""

    setting: dict[str, Any]
    figures: dict[str, Any]


def measured(settings: Settings, tell: Tell) -> list[dict[str, Any]]:
    """The small GPT trained from the same start on the same batches, one step of each way in turn.

    Returns:
      For each stage, with 1 and 4 micro-batches, with and without remat: step seconds (quartiles), tokens a second,
      compile seconds, bytes of a device at rest (live arrays) and at peak (compiled with the scheduler that saves
      memory), bytes sent in a step, and the last loss.
    """
    data, ways = _batches(settings), []
    choices = list(itertools.product(STAGES, (1, 4), (False, True)))
    for number, (stage, k, remat) in enumerate(choices):
        tell(f"compiling way {number + 1} of {len(choices)}: stage {stage}")
        ways.append(_way(settings, data[0], stage, k, remat))
    in_turns(ways, data, settings.steps, tell)
    return [_result(way, settings) for way in ways]


def _way(settings: Settings, batch: Any, stage: int, accumulate: int, remat: bool) -> _Way:
    model, tx = settings.model, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))
    mesh = jax.make_mesh((settings.devices,), ("data",), devices=jax.devices()[: settings.devices])
    config = ZeroConfig(stage=stage, accumulate=accumulate, remat="unit" if remat else None)
    plan = make_plan(model.init, tx, mesh, config)
    state, step = init_state(model.init, tx, plan, jax.random.key(0)), make_train_step(model.loss, tx, plan)
    found = report(step, plan.abstract_state, batch)
    figures = {
        "at_rest": max(live_bytes(state).values()), "peak": found.memory.peak, "wire_bytes": found.wire_bytes,
    }  # fmt: skip
    way = _Way({"stage": stage, "accumulate": accumulate, "remat": remat}, figures, state=state, step=step)
    way.warm_up(batch)
    return way


def _result(way: _Way, settings: Settings) -> dict[str, Any]:
    quartiles = np.percentile(way.seconds, [25, 50, 75]).tolist()
    tokens, loss = settings.rows * settings.sequence / statistics.median(way.seconds), way.results[-1]["loss"]
    measured = {"seconds": quartiles, "tokens_per_second": tokens, "final_loss": float(loss)}
    return way.setting | {"compile_seconds": way.compile_seconds} | way.figures | measured


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

    @functools.cache
    def answer(layers):
        return planning.answer(planning.transformer("gpt", **_usual(layers, setting.machine.devices)), setting)

    layers = bisect.bisect_left(range(1, 400), True, key=lambda n: not answer(n).fits)
    if not layers:
        return None
    parameters = Transformer(**_usual(layers, setting.machine.devices)).parameters
    return {
        "on": name, "stage": stage, "parameters": parameters, "layers": layers, "peak": answer(layers).peak,
    }  # fmt: skip


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
