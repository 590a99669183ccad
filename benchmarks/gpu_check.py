"""On one accelerator, in minutes: stage 3 beside plain optax, the compiler's memory beside the real one, the demo.

    python benchmarks/gpu_check.py

Needs `pip install 'zerojax[demo]'` and JAX for the accelerator. Both ways train the GPT with 1.3 B parameters of
`accelerators.py` (bfloat16 inside, AdamW in float32) on one device, one step in turn, from the same numbers; with one
device stage 3 moves nothing, so that what it costs beyond plain optax is its own. The memory is read in a process that
runs nothing else. Devices with less than 80 GiB, and CPUs, need ``--layers`` and ``--width`` smaller.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import accelerators
import gpt
import jax
import steps
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import zerojax
from zerojax import accounting, tables

TIME_AT_MOST, MEMORY_WITHIN, LOSSES_WITHIN = 1.02, 0.05, 2e-2  # a ratio; a share; bfloat16 in another order


def model(size: gpt.Size):
    """``(init_fn, loss_fn)``: a scan of rematerialised blocks, parameters as they come."""
    block = jax.checkpoint(partial(gpt.block_fn, size))
    return partial(gpt.stacked_init_fn, size), lambda params, tokens: gpt.loss_fn(size, params, tokens, block)


def plain(size: gpt.Size, mesh: Mesh) -> steps.Way:
    init, loss = model(size)

    def in_bfloat16(params, tokens):
        return loss(accelerators.cast(params), tokens)

    return steps.by_hand("plain optax", init, mesh, lambda shape: PartitionSpec(), in_bfloat16)


def stage_3(size: gpt.Size, mesh: Mesh) -> tuple[steps.Way, Callable]:
    init, loss = model(size)
    tx = gpt.optimizer()
    plan = zerojax.make_plan(init, tx, mesh, zerojax.ZeroConfig(precision="c=bf16"))
    step = zerojax.make_train_step(loss, tx, plan)
    state = zerojax.init_state(init, tx, plan, jax.random.key(0))

    def run(state, batch):
        state, metrics = step(state, batch)
        return state, metrics["loss"]

    return steps.Way("stage 3", ("plain optax",), state, run), step


def time(size: gpt.Size, mesh: Mesh, data: list, rounds: int) -> dict:
    """Both ways in turn; quartiles of their step times, and of the ratio within a round."""
    ways = [plain(size, mesh), stage_3(size, mesh)[0]]
    steps.warm_up(ways, data[0])
    steps.measure(ways, data, rounds)
    return {"ways": [steps.summary(way, ways) for way in ways], "disagreement": steps.disagreement(ways)}


def memory(size: gpt.Size, mesh: Mesh, data: list) -> dict:
    """The peak of stage 3 by the compiler and by the allocator (``None`` where that keeps no account), in bytes."""
    way, step = stage_3(size, mesh)
    predicted = accounting.memory(step.lower(way.state, data[0]).compile()).peak
    for batch in data[:3]:
        way.run(batch)
    stats = mesh.devices.flat[0].memory_stats() or {}
    return {"predicted": predicted, "measured": stats.get("peak_bytes_in_use")}


def demo() -> dict:
    """`zerojax train` on this accelerator, and its own account of it."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        call = "from zerojax.app.cli import main; main()"
        command = [sys.executable, "-c", call, "train", "--devices", "1", "--run-dir", str(run)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        return json.loads((run / "summary.json").read_text())


def apart(options: argparse.Namespace) -> dict:
    """The memory, in a process of its own: the allocator's peak is that of all that a process ever did."""
    numbers = [f"--{name}={getattr(options, name)}" for name in ("layers", "width", "rows", "sequence")]
    command = [sys.executable, __file__, "--memory-only", *numbers]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def table(figures: dict) -> str:
    times = [steps.row(way) for way in figures["time"]["ways"]]
    title = f"{figures['device']}, jax {figures['jax']}, {figures['parameters'] / 1e6:,.0f} M parameters"
    text = tables.render(("way", "compile s", "step ms", "quartiles", "beside", "ratio", "quartiles"), times, title)
    predicted, measured = figures["memory"]["predicted"], figures["memory"]["measured"]
    real = f"{tables.size(measured)}, {measured / predicted:.3f} of it" if measured else "not told by this device"
    return f"{text}\nPeak of stage 3 by the compiler: {tables.size(predicted)}; by the allocator: {real}."


def failures(figures: dict) -> list[str]:
    """What does not hold."""
    found, seen = [], figures["memory"]
    ratio = figures["time"]["ways"][1]["ratio"][1]
    if ratio > TIME_AT_MOST:
        found.append(f"stage 3 takes {ratio:.3f} of the time of plain optax, more than {TIME_AT_MOST}")
    if seen["measured"] and abs(seen["measured"] / seen["predicted"] - 1) > MEMORY_WITHIN:
        found.append(f"the allocator's peak is {seen['measured'] / seen['predicted']:.3f} of the compiler's")
    if not figures["time"]["disagreement"] <= LOSSES_WITHIN:
        found.append(f"the losses differ by {figures['time']['disagreement']:.1e}, more than {LOSSES_WITHIN}")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("layers", "width", "rows", "sequence"):
        parser.add_argument(f"--{name}", type=int, default=getattr(accelerators.GPT, name))
    parser.add_argument("--rounds", type=int, default=20, help="measured steps of each way")
    parser.add_argument("--memory-only", action="store_true", help="print the memory as JSON")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    kept = {"vocabulary": accelerators.GPT.vocabulary, "head": accelerators.GPT.head}
    size = gpt.Size(options.width, options.layers, options.sequence, options.rows, **kept)
    mesh = Mesh(jax.devices()[:1], ("data",))
    data = steps.batches(size, NamedSharding(mesh, PartitionSpec("data")))
    if options.memory_only:
        print(json.dumps(memory(size, mesh, data)))
        return
    figures = {"memory": apart(options), "device": jax.devices()[0].device_kind, "jax": jax.__version__}
    figures |= {"parameters": gpt.parameters(size), "time": time(size, mesh, data, options.rounds)}
    print(table(figures))
    figures["demo"] = demo()
    print(f"demo: held-out loss {figures['demo']['held_out_loss']:.3f}")
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1))
    if wrong := failures(figures):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
