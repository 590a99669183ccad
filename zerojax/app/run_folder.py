"""What a run of ``zerojax train`` leaves behind: metrics, plot, sample and summary."""

import dataclasses
import json
import math
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import zerojax
from zerojax import tables

if TYPE_CHECKING:
    from zerojax.app.demo import RunConfig


class RunFolder:
    """A new folder, whose ``metrics.jsonl`` grows with the run; `finish` writes the other files.

    Args:
      path: of the folder.
      config: what is run.
      began: when, by `time.perf_counter`.

    Attributes:
      lines: of ``metrics.jsonl``, one for each step.
      result: what comes after the steps, by name: held-out loss, sample, memory.
      written: the paths of the files.

    Raises:
      ValueError: if the folder cannot be written or holds a run already.
    """

    def __init__(self, path: Path, config: "RunConfig", began: float):
        self.path, self.config, self.began = path, config, began
        self.lines: list[dict[str, Any]] = []
        self.result: dict[str, Any] = {}
        self._metrics = _create(path / "metrics.jsonl")
        self.written = [path / "metrics.jsonl"]

    def add(self, line: dict[str, Any]):
        """One step, on disk at once, so that nothing is lost whatever happens next."""
        self.lines.append(line)
        self._metrics.write(_json(line) + "\n")
        self._metrics.flush()

    def finish(self, interrupted: bool):
        """Write the other files, as far as the run came."""
        self._metrics.close()
        if self.lines:
            self._plot()
        if "sample" in self.result:
            self._write("sample.txt", self.result["sample"] + "\n")
        self._write("summary.json", _json(self._summary(interrupted), indent=2) + "\n")

    def _plot(self):
        from zerojax.app import demo  # here, since it imports JAX

        path, devices = self.path / "loss.png", tables.count(self.config.devices, "device")
        title = f"ZeRO stage {self.config.stage}, {devices}: learning Python's sources byte by byte"
        demo.plot_loss(self.lines, self.result.get("held_out_loss"), title, path)
        self.written.append(path)

    def _write(self, name: str, text: str):
        (self.path / name).write_text(text, encoding="utf-8")
        self.written.append(self.path / name)

    def _summary(self, interrupted: bool) -> dict[str, Any]:
        last = [line["loss"] for line in self.lines[-10:]]
        speeds = sorted(line["tokens_per_second"] for line in self.lines)
        return {
            "interrupted": interrupted,
            "steps": len(self.lines),
            "loss_last_10_steps": sum(last) / len(last) if last else None,
            "held_out_loss": self.result.get("held_out_loss"),
            "tokens_per_second_median": speeds[len(speeds) // 2] if speeds else None,
            "seconds": time.perf_counter() - self.began,
            "bytes_per_device": self.result.get("memory"),
            "platform": self.result.get("platform"),
            "config": dataclasses.asdict(self.config),
            "versions": {
                "zerojax": zerojax.__version__,
                "python": platform.python_version(),
                **self.result.get("versions", {}),
            },
        }


def _create(path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("x", encoding="utf-8")
    except FileExistsError:
        problem = "holds a run already" if path.parent.is_dir() else "is a file"
    except OSError as error:
        problem = f"cannot be written ({error.strerror or error})"
    raise ValueError(f"run folder {path.parent} {problem}; choose another with --run-dir")


def _json(value: Any, indent: int | None = None) -> str:
    """Strict JSON: a loss that is not a number becomes null, since many readers refuse NaN."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(v) for key, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(v) for v in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(value), indent=indent, allow_nan=False)
