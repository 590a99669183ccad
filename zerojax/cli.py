"""The ``zerojax`` command: thin printing over the library.

JAX runs in a second thread: a compilation cannot be interrupted, but the first thread, which shows what goes on, can
always hear Ctrl-C, write down what was reached and leave.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import logging
import math
import os
import platform
import queue
import signal
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_EVERY = 10  # steps between two lines where there is no terminal
_PROMPT = b"def "
_SAMPLED = 300  # bytes
_EXTRAS = ("grain", "matplotlib")  # what the demo needs and the library does not
_HELD_OUT_BATCHES = 8
_WORKER = "zerojax-worker"
_PATIENCE = 2.0  # seconds that Ctrl-C leaves a running step to finish

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
        print(f"zerojax {_version()}")
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
    rows: Annotated[int, typer.Option(help="Sequences per step, over all devices.")] = 32,
    accumulate: Annotated[int, typer.Option(help="Micro-batches per step.")] = 1,
    run_dir: Annotated[Path | None, typer.Option(help="Folder to write.", show_default="runs/<timestamp>")] = None,
    seed: Annotated[int, typer.Option(help="Of the parameters, the data's order and the sample.")] = 0,
):
    """Train a small GPT on Python's own sources, partitioned, and show what it cost and what it learned."""
    settings = dict(stage=stage, devices=devices, steps=steps, rows=rows, accumulate=accumulate, seed=seed)
    return lambda: run(run_dir, **settings)  # outside the parser, which has its own ways with Ctrl-C and closed pipes


def main(arguments: list[str] | None = None):
    """Entry point of the ``zerojax`` script. Exit code 2 is a mistake of the user, 130 is Ctrl-C.

    >>> import contextlib
    >>> with contextlib.suppress(SystemExit):
    ...     main(["--version"])  # doctest: +ELLIPSIS
    zerojax ...
    """
    leave(lambda: _call(arguments))


def leave(call: Any):
    """End the process with the exit code that ``call()`` returns; mistakes and Ctrl-C are told in one line."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # grain says on import which jaxlib it would profile workers with
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that lacks a character must not end a run
            stream.reconfigure(errors="backslashreplace")
    try:
        code = call() or 0
    except _Mistake as mistake:
        code = _fail(str(mistake), 2)
    except (KeyboardInterrupt, typer.Abort):
        code = _fail("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read the output has had enough
        code = 1
    except OSError as error:
        code = _fail(str(error), 1)
    sys.stdout.flush()
    sys.stderr.flush()
    if any(thread.name == _WORKER and thread.is_alive() for thread in threading.enumerate()):
        os._exit(code)  # an ordinary exit would tear down the interpreter under a compilation that still runs
    sys.exit(code)


def _call(arguments: list[str] | None) -> int:
    try:
        command = app(arguments, prog_name="zerojax", standalone_mode=False)
    except Exception as error:
        if hasattr(error, "format_message"):  # of the argument parser; its class is not the same in all versions
            raise _Mistake(error.format_message()) from None
        raise
    return command() if callable(command) else command


def _fail(message: str, code: int) -> int:
    print("zerojax:", " ".join(message.split()), file=sys.stderr)
    return code


def _version() -> str:
    try:
        return importlib.metadata.version("zerojax")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


# ---- the first thread: shows and writes ----


def run(run_dir: Path | str | None = None, **settings: Any) -> int:
    """Train the demo, show how it goes and write the run folder.

    Args:
      run_dir: the folder to write; ``runs/<timestamp>`` by default.
      settings: fields of `zerojax.demo.RunConfig`.

    Returns:
      The exit code: 0, or 130 after Ctrl-C.
    """
    console, events, stop = Console(highlight=False, markup=False), queue.SimpleQueue(), threading.Event()
    worker = threading.Thread(target=_work, args=(settings, events.put, stop.is_set), name=_WORKER, daemon=True)
    worker.start()
    view = _Bar(console) if console.is_terminal else _Lines()
    folder, code, done = _Folder(run_dir), 0, False
    try:
        with _interrupts_as_events(events.put), view:
            _follow(worker, events, view, folder)
        done = True
    except KeyboardInterrupt:
        stop.set()
        code = 130
        print("interrupted; writing what was reached", file=sys.stderr)
        _drain(worker, events, folder)
    finally:
        folder.finish(interrupted=not done)
    if folder.result:
        _show_result(folder)
    _show_paths(folder)
    return code


def _follow(worker: threading.Thread, events: queue.SimpleQueue, view: Any, folder: "_Folder"):
    """Show and record what the worker tells, until it is done; raises what it raised."""
    while True:
        kind, value = events.get()
        if kind in ("done", "error"):
            worker.join()
            if value is not None:
                raise value
            return
        if kind == "interrupt":
            raise KeyboardInterrupt
        if kind == "phase":
            view.phase(value)
        elif kind == "step":
            folder.add(value)
            view.step(value, folder.config.steps)
        elif kind == "config":
            folder.open(value)
        else:
            folder.result[kind] = value


@contextlib.contextmanager
def _interrupts_as_events(put: Any):
    """Ctrl-C waits its turn, so that it never cuts a line of a file in two; a second one does not wait."""
    before = signal.getsignal(signal.SIGINT)

    def handle(*_):
        signal.signal(signal.SIGINT, before)
        put(("interrupt", None))

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _drain(worker: threading.Thread, events: queue.SimpleQueue, folder: "_Folder"):
    """Record the steps that were made while Ctrl-C was on its way."""
    worker.join(_PATIENCE)
    while not events.empty():
        kind, value = events.get()
        if kind == "step":
            folder.add(value)


class _Lines:
    """The view where there is no terminal: plain lines, a few."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def phase(self, text: str):
        print(f"{text} ...", flush=True)

    def step(self, line: dict, steps: int):
        if line["step"] % _EVERY == 0 or line["step"] in (1, steps):
            print(f"step {line['step']}/{steps}  {_numbers(line)}", flush=True)


class _Bar:
    """The view on a terminal: a spinner for what has no length, a bar for the steps. One of them at a time."""

    def __init__(self, console: Console):
        self.console, self.live = console, None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._show(None)

    def phase(self, text: str):
        self._show(self.console.status(f"{text} ..."))

    def step(self, line: dict, steps: int):
        if not isinstance(self.live, Progress):
            columns = (TextColumn("step {task.completed:.0f}/{task.total:.0f}"), BarColumn(20))
            bar = Progress(*columns, TextColumn("{task.description}"), TimeRemainingColumn(), console=self.console)
            self.task = bar.add_task("", total=steps)
            self._show(bar)
        self.live.update(self.task, completed=line["step"], description=_numbers(line))

    def _show(self, live: Any):
        if self.live is not None:
            self.live.stop()
        self.live = live
        if live is not None:
            live.start()


def _numbers(line: dict) -> str:
    return f"loss {line['loss']:.3f}  {line['tokens_per_second']:,.0f} tokens/s"


def _show_result(folder: "_Folder"):
    from zerojax import tables

    result = folder.result
    if "memory" in result:
        rows = [(f"stage {m['stage']}", *(tables.size(m[k]) for k in ("at_rest", "peak"))) for m in result["memory"]]
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
        print(f"\nSampled after {_PROMPT.decode()!r}:\n\n{result['sample']}\n")


def _show_paths(folder: "_Folder"):
    made = f"{len(folder.lines)} of {folder.config.steps} steps" if folder.config else "nothing"
    print(f"{made} done" + ("; wrote" if folder.written else ""))
    for path in folder.written:
        print(f"  {path}")


class _Folder:
    """What a run leaves behind.

    Attributes:
      lines: of ``metrics.jsonl``, one for each step.
      result: what came after the steps: memory, sample, held-out loss.
      written: the paths of the files.
    """

    def __init__(self, path: Path | str | None):
        self.path = Path(path or Path("runs", datetime.now().strftime("%Y%m%d-%H%M%S")))
        self.config, self.lines, self.result, self.written, self.metrics = None, [], {}, [], None
        self.began = time.perf_counter()

    def open(self, config: Any):
        """Make the folder and the file that grows with the run, now that the settings are known to be good."""
        name = self.path / "metrics.jsonl"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.metrics = name.open("x")
        except FileExistsError:
            what = "holds a run already" if self.path.is_dir() else "is a file"
            raise _Mistake(f"run folder {self.path} {what}; choose another with --run-dir") from None
        except OSError as error:
            reason = error.strerror or error
            raise _Mistake(
                f"run folder {self.path} cannot be written ({reason}); choose another with --run-dir"
            ) from None
        self.config = config
        self.written.append(name)

    def add(self, line: dict):
        """One step, on disk at once, so that nothing is lost whatever happens next."""
        self.lines.append(line)
        self.metrics.write(_json(line) + "\n")
        self.metrics.flush()

    def finish(self, interrupted: bool):
        """Write the other files, as far as the run came."""
        if self.metrics is None:
            return
        self.metrics.close()
        if self.lines:
            self._plot()
        if "sample" in self.result:
            self._write("sample.txt", self.result["sample"] + "\n")
        self._write("summary.json", _json(self._summary(interrupted), indent=2) + "\n")

    def _plot(self):
        from zerojax import demo

        c, path = self.config, self.path / "loss.png"
        title = f"ZeRO stage {c.stage}, {c.devices} devices: learning Python's sources byte by byte"
        demo.plot_loss(self.lines, self.result.get("held_out_loss"), title, path)
        self.written.append(path)

    def _write(self, name: str, text: str):
        (self.path / name).write_text(text, encoding="utf-8")
        self.written.append(self.path / name)

    def _summary(self, interrupted: bool) -> dict:
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
            "versions": {"zerojax": _version(), "python": platform.python_version(), **self.result.get("versions", {})},
        }


def _json(value: Any, indent: int | None = None) -> str:
    """Strict JSON: a loss that is not a number becomes null, since many readers refuse NaN."""

    def plain(value):
        if isinstance(value, dict):
            return {key: plain(v) for key, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(v) for v in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(value), indent=indent, allow_nan=False)


# ---- the second thread: works ----


def _work(settings: dict, put: Any, stopped: Any):
    """Do the run; tells ``(kind, value)`` pairs: phase, config, step, results by name, and error or done at last."""
    try:
        _train_and_measure(settings, lambda kind, value: put((kind, value)), stopped)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        what = _Mistake(f"train needs {name}, which is not installed: pip install 'zerojax[demo]'")
        put(("error", what if name in _EXTRAS else error))
    except BaseException as error:
        put(("error", error))
    else:
        put(("done", None))


def _train_and_measure(settings: dict, tell: Any, stopped: Any):
    tell("phase", "starting JAX")
    import jax

    import zerojax
    from zerojax import demo

    with _mistakes():
        config = demo.RunConfig(**settings)
        mesh = _mesh(config.devices)
        init_fn, tx, loss_fn = demo.make_init(config), demo.make_optimizer(config), demo.make_loss(config)
        zero = zerojax.ZeroConfig(stage=config.stage, accumulate=config.accumulate)
        plan = zerojax.make_plan(init_fn, tx, mesh, zero)
        tell("phase", "reading Python's own sources")
        parts = demo.split(demo.corpus(config.corpus_bytes))
        data, held_out = (demo.batches(part, config.rows, config.sequence, config.seed) for part in parts)
    tell("config", config)
    tell("versions", {"jax": jax.__version__, "jaxlib": jax.lib.__version__})
    tell("platform", _platform(mesh))

    tell("phase", f"making the state: {_count(plan.abstract_state.params)}, stage {config.stage}, {_platform(mesh)}")
    state = zerojax.init_state(init_fn, tx, plan, jax.random.key(config.seed))
    step = zerojax.make_train_step(loss_fn, tx, plan)
    tell("phase", f"compiling the step, then {config.steps} steps of {config.tokens_per_step:,} bytes")

    def on_step(line):
        tell("step", line)
        return stopped()

    state = demo.train(step, state, data, config, on_step)
    if stopped():
        return
    tell("phase", "measuring the loss on held-out text")
    evaluate = zerojax.make_eval_step(loss_fn, plan)
    losses = [float(evaluate(state, next(held_out))["loss"]) for _ in range(_HELD_OUT_BATCHES)]
    tell("held_out_loss", sum(losses) / len(losses))
    tell("phase", f"sampling {_SAMPLED} bytes")
    whole = zerojax.gather_params(state.params, plan)
    text = demo.sample(config, whole, _PROMPT, _SAMPLED, jax.random.key(config.seed))
    tell("sample", demo.printable(text))
    tell("memory", _memory(plan, loss_fn, tx, config, tell))


def _memory(plan: Any, loss_fn: Any, tx: Any, config: Any, tell: Any) -> list[dict[str, int]]:
    """Bytes per device of this stage and, to compare, of stage 0; from compilations, no arrays."""
    import jax

    import zerojax

    tokens = jax.ShapeDtypeStruct((config.rows, config.sequence + 1), "int32", sharding=plan.batch_sharding)
    memory = []
    for stage in sorted({0, config.stage}, reverse=True):
        tell("phase", f"compiling stage {stage} to count its bytes")
        staged = plan.with_stage(stage)
        step = zerojax.make_train_step(loss_fn, tx, staged)
        peak = zerojax.report(step, staged.abstract_state, {"tokens": tokens}).memory.peak
        memory.append({"stage": stage, "at_rest": staged.bytes_per_device(), "peak": peak})
    return memory


def _mesh(count: int) -> Any:
    """A mesh of ``count`` devices: real ones if there are as many, else simulated on the CPU."""
    import jax

    flag = "--xla_force_host_platform_device_count"  # an older way to say it, refused beside the newer one
    flags = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join(f for f in flags if not f.startswith(flag))
    with contextlib.suppress(RuntimeError):  # the devices exist already, in a process that has used JAX
        jax.config.update("jax_num_cpu_devices", count)  # accelerators do not mind
    devices = jax.devices()
    if len(devices) < count:
        devices = jax.devices("cpu")
        jax.config.update("jax_default_device", devices[0])
    if len(devices) < count:
        raise ValueError(f"devices={count} asked for, but this process has started JAX with {len(devices)} already")
    return jax.sharding.Mesh(devices[:count], ("data",))


def _platform(mesh: Any) -> str:
    device = mesh.devices.flat[0]
    return f"{mesh.size} x {'simulated CPU device' if device.platform == 'cpu' else device.device_kind}"


def _count(tree: Any) -> str:
    import jax

    return f"{sum(leaf.size for leaf in jax.tree.leaves(tree)):,} parameters"


@contextlib.contextmanager
def _mistakes():
    """What the library says about settings, as a mistake of the user."""
    try:
        yield
    except ValueError as error:
        raise _Mistake(str(error)) from None
