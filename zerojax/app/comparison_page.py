"""The comparison of the stages as files: JSON, CSV, plots and one page."""

import csv
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from zerojax import tables

GIB, MIB = 2**30, 2**20
# Okabe and Ito's colours, which colour-blind people tell apart; one for each stage, and for each part of memory.
_STAGES = ("#7F7F7F", "#E69F00", "#56B4E9", "#0072B2")
_PARTS = {
    "parameters": "#0072B2", "optimizer": "#56B4E9", "gradients": "#E69F00", "gathered": "#009E73", "rest": "#BBBBBB",
}  # fmt: skip
_NAMES = ("no ZeRO", "stage 1", "stage 2", "stage 3")

Rows = list[dict[str, Any]]


def write(result: dict[str, Any], folder: Path) -> list[Path]:
    """Everything that `zerojax.app.comparison.compare` found, in a folder; returns the paths, the page first."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "comparison.md"]
    for name in ("measured", "compiled", "largest", "fewest"):
        if result[name]:
            written.append(_csv(result[name], folder / f"{name}.csv"))
    written.append(folder / "comparison.json")
    written[-1].write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    written += [path for plot in _PLOTS if (path := plot(result, folder))]
    written[0].write_text(page(result), encoding="utf-8")
    return written


def _csv(rows: Rows, path: Path) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        flat = [{key: json.dumps(v) if isinstance(v, list) else v for key, v in row.items()} for row in rows]
        writer = csv.DictWriter(file, fieldnames=list(flat[0]))
        writer.writeheader()
        writer.writerows(flat)
    return path


# ---- plots, 1,200 pixels wide ----


def _figure(width: int = 1, height: float = 5) -> tuple[Figure, Any]:
    figure = Figure(figsize=(8, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, width, squeeze=False)[0]


def _style(axes: Any, title: str, label: str):
    axes.set_title(title, fontsize=13)
    axes.set_ylabel(label, fontsize=12)
    axes.tick_params(labelsize=11)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _plot_memory(result: dict[str, Any], folder: Path) -> Path:
    """At rest and at peak on the simulated devices; by parts on the first machine that was compiled for."""
    first = next((row["on"] for row in result["compiled"]), None)
    figure, axes = _figure(2 if first else 1)
    plain = [row for row in result["measured"] if row["accumulate"] == 1 and not row["remat"]]
    places = np.arange(len(plain))
    for n, (name, color) in enumerate((("at_rest", "#56B4E9"), ("peak", "#0072B2"))):
        axes[0].bar(places + 0.4 * n - 0.2, [row[name] / MIB for row in plain], 0.38, color=color)
    axes[0].legend(["at rest", "peak"], fontsize=11, frameon=False)
    axes[0].set_xticks(places, _NAMES, rotation=20)
    devices = result["settings"]["devices"]
    _style(axes[0], f"{result['parameters'] / 1e6:.1f} M parameters,\n{devices} simulated devices", "MiB a device")
    if first:
        rows, bottom = [row for row in result["compiled"] if row["on"] == first], np.zeros(4)
        for part, color in _PARTS.items():
            sizes = np.array([row[part] / GIB for row in rows])
            axes[1].bar(places, sizes, 0.7, bottom, color=color, label=part)
            bottom += sizes
        axes[1].legend(fontsize=11, frameon=False)
        axes[1].set_xticks(places, _NAMES, rotation=20)
        _style(axes[1], f"1.3 B parameters, {first},\nas compiled", "GiB a device")
    return _save(figure, folder / "memory.png")


def _plot_time(result: dict[str, Any], folder: Path) -> Path:
    figure, (axes,) = _figure()
    groups = [(1, False), (1, True), (4, False), (4, True)]
    for stage, color in enumerate(_STAGES):
        rows = [_pick(result["measured"], stage, *group) for group in groups]
        low, middle, high = 1000 * np.array([row["seconds"] for row in rows]).T
        places = np.arange(len(groups)) + 0.2 * stage - 0.3
        axes.bar(places, middle, 0.18, color=color, label=_NAMES[stage])
        axes.errorbar(places, middle, [middle - low, high - middle], fmt="none", ecolor="0.15", capsize=3)
    words = [f"{k} micro-batch{'es' if k > 1 else ''}\n{'remat' if remat else 'no remat'}" for k, remat in groups]
    axes.set_xticks(range(len(groups)), words)
    axes.legend(fontsize=11, frameon=False, ncols=4, loc="upper left")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.12)
    _style(axes, f"One step on {result['settings']['devices']} simulated devices: median and quartiles", "milliseconds")
    return _save(figure, folder / "time.png")


def _plot_largest(result: dict[str, Any], folder: Path) -> Path:
    figure, (axes,) = _figure()
    machines = list(dict.fromkeys(row["on"] for row in result["largest"]))
    for stage, color in enumerate(_STAGES):
        found = {row["on"]: row["parameters"] / 1e9 for row in result["largest"] if row["stage"] == stage}
        places = np.arange(len(machines)) + 0.2 * stage - 0.3
        bars = axes.bar(places, [found.get(on, 0) for on in machines], 0.18, color=color, label=_NAMES[stage])
        axes.bar_label(bars, [_digits(found[on]) if on in found else "" for on in machines], fontsize=7.5)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xticks(range(len(machines)), machines)
    axes.legend(fontsize=11, frameon=False, loc="upper left")
    _style(axes, "Largest GPT that fits, one row of 2,048 tokens a device (computed)", "billion parameters")
    return _save(figure, folder / "largest.png")


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path)
    return path


_PLOTS: tuple[Callable[[dict[str, Any], Path], Path], ...] = (_plot_memory, _plot_time, _plot_largest)


# ---- the page ----

_KINDS = (
    "*Measured* figures come from steps that ran, on simulated devices that share the cores of one machine: their "
    "times say what a stage adds to the work, not what a network costs. *Compiled* ones are read from programs that "
    "the compilers of absent accelerators made. *Computed* ones come from formulas and the trace of the loss. No ZeRO "
    "is data parallelism with everything whole on each device (stage 0). With one micro-batch stages 1 and 2 are the "
    "same: nothing is summed, so gradients are reduced as they are made."
)
_MEASURED = (
    "k is the number of micro-batches. At rest: live arrays. Peak: the compiled program's, with the scheduler that "
    "saves memory. Sent: by a device in a step."
)
_COMPILED = (
    "24 layers of width 2,048, 4 rows of 1,024 tokens a device, blocks computed again in backward, bf16 computation, "
    "AdamW in float32. Predicted: the peak by formula and trace, before compilation, as part of the compiled one. "
    "Beside products: the part of the bytes that travel while matrix products are scheduled. At least: no step is "
    "faster."
)
_LARGEST = (
    "GPTs of usual proportions (width 128 times the layers, but a multiple of the devices; heads of 128), one row of "
    "2,048 tokens a device, blocks computed again, bf16 computation, AdamW in float32; parameters in billions."
)
_FEWEST = (
    "As a power of two, one row a device, without tensor or pipeline parallelism. -: it does not fit, however many "
    "devices, since what is whole on each is too large."
)


def page(result: dict[str, Any]) -> str:
    """Markdown, with tables and links to the plots beside it."""
    made, settings = result["versions"], result["settings"]
    tokens = settings["rows"] * settings["sequence"]
    parts = [
        "# No ZeRO against stages 1, 2 and 3",
        f"Made by `zerojax bench` on {made['date']}: zerojax {made['zerojax']}, jax {made['jax']}, "
        f"optax {made['optax']}, Python {made['python']}; {made['machine']}.",
        _KINDS,
        "## Measured: a small GPT",
        f"{result['parameters'] / 1e6:.1f} M parameters, {tokens:,} tokens a step over {settings['devices']} devices, "
        f"AdamW in float32, {settings['steps']} steps of each way in turn. {_MEASURED}",
        _measured(result["measured"]),
        _findings(result["measured"]),
        "![Step time](time.png)",
        "![Memory](memory.png)",
        "## Compiled: a GPT of 1.3 B parameters",
        f"Not compiled here: {result['not_compiled']}" if result["not_compiled"] else _COMPILED,
        _compiled(result["compiled"]),
        "## Computed: the largest model that fits",
        _LARGEST,
        _largest(result["largest"]),
        "![Largest model](largest.png)",
        "## Computed: the fewest devices for models that were",
        _FEWEST,
        _fewest(result["fewest"]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _measured(rows: Rows) -> str:
    columns = (
        "way",
        "k",
        "remat",
        "step, ms",
        "quartiles",
        "tokens/s",
        "compile, s",
        "at rest",
        "peak",
        "sent",
        "loss",
    )
    return _table(columns, (
        (_NAMES[r["stage"]], r["accumulate"], "yes" if r["remat"] else "no", f"{1000 * r['seconds'][1]:.0f}",
         f"{1000 * r['seconds'][0]:.0f} to {1000 * r['seconds'][2]:.0f}", f"{r['tokens_per_second']:,.0f}",
         f"{r['compile_seconds']:.1f}", tables.size(r["at_rest"]), tables.size(r["peak"]), tables.size(r["wire_bytes"]),
         f"{r['final_loss']:.5f}") for r in rows))  # fmt: skip


def _findings(rows: Rows) -> str:
    """Sentences that the figures decide."""
    lines = []
    for k in (1, 4):
        none, *stages = [_pick(rows, stage, k, False) for stage in range(4)]
        words = [
            f"{_NAMES[row['stage']]} takes {row['seconds'][1] / none['seconds'][1]:.2f} of its time and "
            f"{row['peak'] / none['peak']:.2f} of its memory, and sends "
            f"{row['wire_bytes'] / none['wire_bytes']:.2f} of its bytes" for row in stages
        ]  # fmt: skip
        lines.append(f"Beside no ZeRO, with k = {k} and no remat: {'; '.join(words)}.")
    losses = [row["final_loss"] for row in rows]
    lines.append(f"The last losses of all ways lie within {max(losses) - min(losses):.1e}.")
    return "\n".join(lines)


def _compiled(rows: Rows) -> str:
    columns = ("on", "way", "parameters", "optimizer", "gradients", "gathered", "rest", "peak", "predicted", "sent",
               "gathered beside products", "reduced", "at least")  # fmt: skip
    return "" if not rows else _table(columns, (
        (r["on"], _NAMES[r["stage"]], *(tables.size(r[part]) for part in _PARTS), tables.size(r["peak"]),
         f"{r['predicted'] / r['peak']:.0%}", tables.size(r["wire_bytes"]), _percent(r["gathered_beside_products"]),
         _percent(r["reduced_beside_products"]), f"{tables.duration(r['bound_seconds'])} ({r['bound_by']})")
        for r in rows))  # fmt: skip


def _largest(rows: Rows) -> str:
    machines = list(dict.fromkeys(row["on"] for row in rows))
    found = {(row["on"], row["stage"]): _digits(row["parameters"] / 1e9) for row in rows}
    return _table(("on", *_NAMES), ((on, *(found.get((on, stage), "-") for stage in range(4))) for on in machines))


def _fewest(rows: Rows) -> str:
    pairs = list(dict.fromkeys((row["model"], row["accelerator"]) for row in rows))
    found = {(row["model"], row["accelerator"], row["stage"]): row["devices"] for row in rows}
    return _table(
        ("model", "accelerator", *_NAMES), ((*pair, *(found[*pair, n] or "-" for n in range(4))) for pair in pairs)
    )


def _table(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    columns = list(columns)
    lines = [columns, ["---"] * len(columns), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _pick(rows: Rows, stage: int, accumulate: int, remat: bool) -> dict[str, Any]:
    own = (stage, accumulate, remat)
    return next(row for row in rows if (row["stage"], row["accumulate"], row["remat"]) == own)
