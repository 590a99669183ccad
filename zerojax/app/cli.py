"""The ``zerojax`` command: thin printing over the library, which it imports late, so that help comes at once."""

import contextlib
import dataclasses
import io
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import zerojax
from zerojax import tables
from zerojax.app import background
from zerojax.app.run_folder import RunFolder

if TYPE_CHECKING:
    from zerojax.app.trial import Trial

_EVERY = 10  # steps between two lines where there is no terminal
_EXTRAS = ("grain", "matplotlib")  # what the demo needs and the library does not

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class _Mistake(Exception):
    """The user's; told in one line."""


# ---- the command line ----


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
):
    """ZeRO for JAX: the memory of training partitioned over devices."""
    if version:
        print(f"zerojax {zerojax.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())
    else:
        return
    raise typer.Exit()


@app.command("train")
def _train(
    stage: Annotated[int, typer.Option(help="ZeRO's stage, 0 to 3.")] = 3,
    devices: Annotated[int, typer.Option(help="How many devices; simulated on the CPU if there are fewer.")] = 8,
    steps: Annotated[int, typer.Option(help="Updates to make.")] = 200,
    rows: Annotated[int, typer.Option(help="Sequences per step, over all devices.")] = 16,
    accumulate: Annotated[int, typer.Option(help="Micro-batches per step.")] = 1,
    precision: Annotated[str, typer.Option(help="Dtypes, such as c=bf16; fp16 gets a dynamic loss scale.")] = "c=f32",
    run_dir: Annotated[Path | None, typer.Option(help="Folder to write.", show_default="runs/<timestamp>")] = None,
    seed: Annotated[int, typer.Option(help="Of the parameters, the data's order and the sample.")] = 0,
):
    """Train a small GPT on Python's own sources, partitioned, and show what it cost and what it learned."""
    settings = dict(stage=stage, devices=devices, steps=steps, rows=rows, accumulate=accumulate, precision=precision)
    settings |= dict(seed=seed)
    return lambda: run(run_dir, **settings)  # outside the parser, which has its own ways with Ctrl-C and closed pipes


@app.command("plan")
def _plan(
    model: Annotated[str, typer.Argument(help="A name such as gpt3-175b (any other word lists them); gpt or llama with "
                                              "sizes; or module:function returning (init_fn, loss_fn, tx, batch).")],
    on: Annotated[str, typer.Option(help="h100:8, h200:64, a100-80gb:16, v5p:4x4x8, ...")] = "h100:8",
    stage: Annotated[int | None, typer.Option(help="One stage.", show_default="all")] = None,
    rows: Annotated[int | None, typer.Option(help="Of a device in a micro-batch.", show_default="1 or yours")] = None,
    accumulate: Annotated[int, typer.Option(help="Micro-batches per step.")] = 1,
    precision: Annotated[str, typer.Option(help="Dtypes.")] = "c=bf16",
    exact: Annotated[bool, typer.Option("--exact", help="Ask the compiler of these accelerators.")] = False,
    find: Annotated[str | None, typer.Option(help="batch, devices or stage: search what fits.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
    width: int | None = None,
    layers: int | None = None,
    heads: int | None = None,
    vocabulary: int | None = None,
    sequence: int | None = None,
    remat: Annotated[bool | None, typer.Option(help="Blocks computed again in backward.", show_default="yes")] = None,
):  # fmt: skip
    """What each stage of a model needs on accelerators that need not be there: memory, communication, time."""
    sizes = dict(width=width, layers=layers, heads=heads, vocabulary=vocabulary, sequence=sequence, remat=remat)
    setting = dict(on=on, rows=rows, accumulate=accumulate, precision=precision)
    return lambda: plan(model, sizes, setting, stage, exact, find, json_file)


@app.command("bench")
def _bench(
    steps: Annotated[int, typer.Option(help="Measured steps of each way.")] = 10,
    devices: Annotated[int, typer.Option(help="Simulated devices.")] = 8,
    targets: Annotated[str, typer.Option(help="Machines to compile for, with commas; none for none.")] = (
        "h100:8,h100:64,v5p:2x2x4"
    ),
    run_dir: Annotated[Path | None, typer.Option(help="Folder to write.", show_default="runs/bench-<time>")] = None,
):
    """No ZeRO against stages 1, 2 and 3: time, memory, communication, largest models. Takes some ten minutes."""
    names = tuple(name for name in targets.split(",") if name not in ("", "none"))
    return lambda: bench(dict(steps=steps, devices=devices, targets=names), run_dir)


def main(arguments: list[str] | None = None):
    """Entry point of the ``zerojax`` script. Exit code 2 is a mistake of the user, 130 is Ctrl-C.

    >>> import contextlib
    >>> with contextlib.suppress(SystemExit):
    ...     main(["--version"])  # doctest: +ELLIPSIS
    zerojax ...
    """
    leave(lambda: _call(arguments))


def _call(arguments: list[str] | None) -> Any:
    try:
        command = app(arguments, prog_name="zerojax", standalone_mode=False)
    except Exception as error:
        told = getattr(error, "format_message", None)  # of the parser, whose errors' class depends on the version
        if told is None:
            raise
        raise _Mistake(told()) from None
    return command() if callable(command) else command


def leave(call: Callable[[], Any]):
    """End the process with the exit code that ``call()`` returns; mistakes and Ctrl-C are told in one line."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # grain says on import which jaxlib it would profile workers with
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a character must not end a run
            stream.reconfigure(errors="backslashreplace")
    code = _exit_code(call)
    sys.stdout.flush()
    sys.stderr.flush()
    if background.running():
        os._exit(code)
    sys.exit(code)


def _exit_code(call: Callable[[], Any]) -> int:
    try:
        return call() or 0
    except _Mistake as mistake:
        return _fail(str(mistake), 2)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read the output has had enough
        return 1
    except OSError as error:
        return _fail(str(error), 1)


def _fail(message: str, code: int) -> int:
    print("zerojax:", " ".join(message.split()), file=sys.stderr)
    return code


# ---- train ----


def run(run_dir: Path | str | None = None, **settings: Any) -> int:
    """Train the demo, show how it goes and write the run folder.

    Args:
      run_dir: the folder to write; ``runs/<timestamp>`` by default.
      settings: fields of `zerojax.app.demo.RunConfig`.

    Returns:
      The exit code: 0, or 130 after Ctrl-C.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born deaf to it
    began, path = time.perf_counter(), Path(run_dir or Path("runs", datetime.now().strftime("%Y%m%d-%H%M%S")))
    with contextlib.closing(_view()) as view:
        trial = background.call(lambda phase: _prepare(settings, phase), view.phase)
        with _mistakes():
            folder = RunFolder(path, trial.config, began)
        code = 1
        try:
            code = _follow(trial, view, folder)
        finally:
            folder.finish(interrupted=code != 0)
    _show_result(folder.result, trial.prompt.decode())
    print(f"{len(folder.lines)} of {trial.config.steps} steps done; wrote", *folder.written, sep="\n  ")
    return code


def _prepare(settings: dict[str, Any], phase: Callable[[str], None]) -> "Trial":
    phase("starting JAX")
    with _extras("train"):
        from zerojax.app import demo, trial
    with _mistakes():
        return trial.Trial(demo.RunConfig(**settings), phase)


@contextlib.contextmanager
def _extras(command: str):
    """What a command needs and the library does not may be absent."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _EXTRAS:
            raise
        raise _Mistake(f"{command} needs {name}, which is not installed: pip install 'zerojax[demo]'") from None


@contextlib.contextmanager
def _mistakes():
    """A ``ValueError`` about settings is a mistake of the user."""
    try:
        yield
    except ValueError as error:
        raise _Mistake(str(error)) from None


def _follow(trial: "Trial", view: "_Lines | _Bar", folder: RunFolder) -> int:
    """Run the trial, showing and writing what it tells; returns the exit code."""

    def tell(kind: str, value: Any):
        if kind == "step":
            folder.add(value)
            view.step(value, trial.config.steps)
        elif kind == "phase":
            view.phase(value)
        else:
            folder.result[kind] = value

    try:
        background.call(trial.run, tell)
        return 0
    except KeyboardInterrupt:
        view.close()
        print("interrupted; writing what was reached", file=sys.stderr)
        return 130


# ---- plan ----


def plan(
    model: str, sizes: dict[str, Any], setting: dict[str, Any], stage: int | None = None, exact: bool = False,
    find: str | None = None, json_file: Path | None = None,
) -> int:  # fmt: skip
    """Show what the stages of a model need; see ``zerojax plan --help``.

    Returns:
      The exit code: 0, or 1 if a search found nothing that fits.
    """
    with _mistakes(), _progress() as show:
        answers, lines = background.call(lambda tell: _answers(tell, model, sizes, setting, stage, exact, find), show)
    from zerojax.cost import planning

    if answers:
        print(f"{planning.table(answers)}\n\n{planning.notes(answers)}")
    print("\n".join(lines))
    if json_file:
        json_file.write_text(json.dumps([one.to_dict() for one in answers], indent=1) + "\n")
    return 0 if answers else 1


def _answers(tell, model, sizes, setting, stage, exact, find) -> tuple[list[Any], list[str]]:
    """Answers to show, and lines to print below them."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # nothing runs; a compiler for absent devices needs no others
    from zerojax.cost import hardware, planning

    workload, own_rows = planning.workload(model, sizes)
    machine, given = hardware.machine(setting.pop("on")), setting.pop("rows")
    base = planning.Setting(machine, 1 if given is None else given, **setting)
    if given is None and own_rows > 1:
        rows, rest = divmod(own_rows, machine.devices * base.accumulate)
        if rest:
            raise ValueError(
                f"the {own_rows} rows of {model} cannot be divided over {tables.count(machine.devices, 'device')} x "
                f"{base.accumulate} micro-batches; say --rows, those of a device in a micro-batch"
            )
        base = dataclasses.replace(base, rows=rows)
    searched = {"stage": ("stage", stage), "batch": ("rows", given)}.get(find or "", ("", None))
    if searched[1] is not None:
        raise ValueError(f"--find {find} searches what --{searched[0]} would say; leave it out")
    chosen = range(4) if stage is None else (stage,)

    def ask(setting, exact=exact):
        by = "compiling" if exact else "tracing"
        tell(f"{by} stage {setting.stage} on {setting.machine.name}, {tables.count(setting.rows, 'row')} a device")
        return planning.answer(workload, setting, exact)

    if find is None:
        return [ask(dataclasses.replace(base, stage=one)) for one in chosen], []
    found = {}
    for one in (3,) if find == "stage" else chosen:
        start, guess = dataclasses.replace(base, stage=one), 1
        if exact and find == "batch":  # the formula is near, and costs nothing
            best = planning.find(find, lambda s: ask(s, exact=False), start).best
            guess = best.setting.rows if best else 1
        found[one] = planning.find(find, ask, start, guess)
    lines = ["", *(planning.told(find, one, result) for one, result in found.items())]
    return [result.best for result in found.values() if result.best], lines


# ---- bench ----


def bench(settings: dict[str, Any], run_dir: Path | None = None) -> int:
    """Compare the stages and write the files; see ``zerojax bench --help``.

    Returns:
      The exit code, 0.
    """
    path = Path(run_dir or Path("runs", datetime.now().strftime("bench-%Y%m%d-%H%M%S")))
    if path.exists() and any(path.iterdir()):
        raise _Mistake(f"{path} is not empty; choose another with --run-dir")
    with _mistakes(), _extras("bench"), _progress() as show:
        page, written = background.call(lambda tell: _compare(settings, path, tell), show)
    print(f"{page}\nwrote", *written, sep="\n  ")
    return 0


def _compare(settings: dict[str, Any], path: Path, tell: Callable[[str], None]) -> tuple[str, list[Path]]:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", settings["devices"])
    from zerojax.app import comparison, comparison_page

    result = comparison.compare(comparison.Settings(**settings), tell)
    return comparison_page.page(result), comparison_page.write(result, path)


# ---- what is shown ----


def _view() -> "_Lines | _Bar":
    console = Console(highlight=False, markup=False)
    return _Bar(console) if console.is_interactive else _Lines()


class _Lines:
    """The view where there is no terminal: plain lines, a few."""

    def phase(self, text: str):
        print(f"{text} ...", flush=True)

    def step(self, line: dict[str, Any], steps: int):
        if line["step"] % _EVERY == 0 or line["step"] in (1, steps):
            print(f"step {line['step']}/{steps}  {_numbers(line)}", flush=True)

    def close(self):
        pass


class _Bar:
    """The view on a terminal: a spinner for what has no length, a bar for the steps. One of them at a time."""

    def __init__(self, console: Console):
        columns = (TextColumn("step {task.completed:.0f}/{task.total:.0f}"), BarColumn(20))
        self.bar = Progress(*columns, TextColumn("{task.description}"), TimeRemainingColumn(), console=console)
        self.task = self.bar.add_task("")
        self.spinner = console.status("")

    def phase(self, text: str):
        self.bar.stop()
        self.spinner.update(f"{text} ...")
        self.spinner.start()

    def step(self, line: dict[str, Any], steps: int):
        self.spinner.stop()
        self.bar.update(self.task, total=steps, completed=line["step"], description=_numbers(line))
        self.bar.start()

    def close(self):
        self.spinner.stop()
        self.bar.stop()


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """``show(text)``: what is done now, beside a spinner and the seconds since the start; in a log, lines."""
    console, began = Console(stderr=True, highlight=False, markup=False), time.perf_counter()
    if not console.is_terminal:
        yield lambda text: print(f"{time.perf_counter() - began:5.0f} s  {text}", file=sys.stderr, flush=True)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting JAX")
        yield lambda text: bar.update(task, description=text)


def _numbers(line: dict[str, Any]) -> str:
    skipped = "  skipped" if line.get("skipped") else ""
    return f"loss {line['loss']:.3f}  {line['tokens_per_second']:,.0f} tokens/s{skipped}"


def _show_result(result: dict[str, Any], prompt: str):
    if "memory" in result:
        rows = [(f"stage {m['stage']}", tables.size(m["at_rest"]), tables.size(m["peak"])) for m in result["memory"]]
        columns = ("per device", "state at rest", "compiled peak")
        print("\n" + tables.render(columns, rows, "Memory of this model and of this step"))
        print(
            "State at rest: parameters and optimizer state between steps.\n"
            "Compiled peak: all that a step needs at once (arguments, outputs and temporaries, less what\n"
            "shares memory), as the compiler lays it out; on CPUs with the scheduler that saves memory."
        )
    if "held_out_loss" in result:
        print(f"\nLoss on text that was held out: {result['held_out_loss']:.3f} nats per byte")
    if "sample" in result:
        print(f"\nSampled after {prompt!r}:\n\n{result['sample']}\n")
