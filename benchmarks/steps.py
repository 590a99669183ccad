"""Time of one train step: each stage of zerojax beside the same step written by hand, on simulated CPU devices.

    python benchmarks/steps.py --steps 40

All ways train one small GPT from the same parameters on the same batches. They take turns, one step each a round, and
are compared within a round, so that a machine that is slower for a while is slower for all of them. The devices share
the machine's cores and memory: the figures show what a way adds to the work, not what a network would cost.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from gpt import Size, block_fn, init_fn, loss_fn, optimizer, parameters
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.status import Status

import zerojax
from zerojax import tables
from zerojax.app.comparison import Timed, in_turns

AGREE = 1e-4  # the most that the losses of two ways may differ
BATCHES = 8  # different ones, in turn


# ---- the ways' data ----


def batches(size: Size, sharding: NamedSharding) -> list[jax.Array]:
    """Tokens, small ones the likeliest, placed on the devices so that no step waits for them."""
    rng = np.random.default_rng(0)
    draws = rng.random((BATCHES, size.rows, size.sequence + 1)) ** 3 * size.vocabulary
    return [jax.device_put(tokens, sharding) for tokens in draws.astype(np.int32)]


# ---- the ways ----


@dataclasses.dataclass
class Way(Timed):
    """One way to write the step; its result is the loss."""

    name: str
    rivals: tuple[str, ...]  # compared with the fastest of these

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))


def by_hand(name: str, init_fn: Callable, mesh: Mesh, placed: Callable, loss: Callable) -> Way:
    """A step under plain ``jax.jit``; ``placed(shape)`` is the `PartitionSpec` of an array of the state."""
    tx = optimizer()

    def init(key):
        params = init_fn(key)
        return params, tx.init(params)

    def step(state, batch):
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        grads = jax.lax.with_sharding_constraint(grads, shardings[0])
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    key = jax.random.key(0)
    shardings = jax.tree.map(lambda leaf: NamedSharding(mesh, placed(leaf.shape)), jax.eval_shape(init, key))
    rows, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    jitted = jax.jit(step, in_shardings=(shardings, rows), out_shardings=(shardings, whole), donate_argnums=0)
    return Way(name, (), state=jax.jit(init, out_shardings=shardings)(key), step=jitted)


def replicated(size: Size, mesh: Mesh) -> Way:
    return by_hand("replicated", partial(init_fn, size), mesh, lambda shape: PartitionSpec(), partial(loss_fn, size))


def fsdp(size: Size, mesh: Mesh, recomputed: str = "") -> Way:
    """Every array partitioned on its largest dim, the activations kept apart by rows.

    What backward makes again: nothing, so that the whole parameters are kept for it; ``"gathers"``, as our stage 3
    does; or ``"blocks"``, the usual remat of a layer.
    """
    rows, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())

    def gathering_block(p, x):
        return block_fn(size, jax.lax.with_sharding_constraint(p, whole), x)

    def all_but_gathers(primitive, *_, **__):
        return primitive.name != "sharding_constraint"

    block = {
        "": None,
        "gathers": jax.checkpoint(gathering_block, policy=all_but_gathers),
        "blocks": jax.checkpoint(partial(block_fn, size)),
    }[recomputed]

    def placed(shape):
        dims = [dim for dim in range(len(shape)) if shape[dim] % mesh.size == 0]
        return PartitionSpec(*[None] * max(dims, key=lambda dim: shape[dim]), "data") if dims else PartitionSpec()

    def loss(params, tokens):
        return loss_fn(size, params, tokens, block, lambda x: jax.lax.with_sharding_constraint(x, rows))

    return by_hand(" ".join(filter(None, ("FSDP", recomputed))), partial(init_fn, size), mesh, placed, loss)


def stage(size: Size, mesh: Mesh, number: int) -> Way:
    """zerojax's step. The metric stands in for the bare loss of the others."""
    tx = optimizer()
    plan = zerojax.make_plan(lambda key: init_fn(size, key), tx, mesh, zerojax.ZeroConfig(stage=number))
    state = zerojax.init_state(lambda key: init_fn(size, key), tx, plan, jax.random.key(0))
    step = zerojax.make_train_step(lambda params, batch: loss_fn(size, params, batch), tx, plan)

    def run(state, batch):
        state, metrics = step(state, batch)
        return state, metrics["loss"]

    return Way(f"stage {number}", ("FSDP gathers",) if number == 3 else ("replicated",), state=state, step=run)


def make_ways(size: Size, mesh: Mesh) -> list[Way]:
    hand = [replicated(size, mesh), *(fsdp(size, mesh, recomputed) for recomputed in ("", "gathers", "blocks"))]
    return hand + [stage(size, mesh, number) for number in range(4)]


# ---- measuring ----


def measure(ways: list[Way], data: list[jax.Array], steps: int):
    with Status("", console=Console(stderr=True)) as status:
        for way in ways:
            status.update(f"compiling {way.name}")
            way.warm_up(data[0])
        in_turns(ways, data, steps, status.update)


def disagreement(ways: list[Way]) -> float:
    """The largest difference between the losses of two ways in any step."""
    losses = np.array([jax.device_get(way.results) for way in ways])
    return float(np.ptp(losses, axis=0).max())


def summary(way: Way, ways: list[Way]) -> dict:
    """What was measured of a way; ratios are quartiles over the rounds, each within its round."""
    result = {"way": way.name, "compile_seconds": way.compile_seconds, "seconds": quartiles(way.seconds)}
    rival = min((other for other in ways if other.name in way.rivals), key=lambda other: other.median, default=None)
    if rival:
        ratios = np.divide(way.seconds, rival.seconds)
        result |= {"rival": rival.name, "ratio": quartiles(ratios)}
    return result


def quartiles(values: Any) -> list[float]:
    return np.percentile(values, [25, 50, 75]).tolist()


# ---- words ----


def table(figures: dict) -> str:
    title = (
        f"jax {figures['jax']}: {figures['devices']} CPU devices, {figures['parameters'] / 1e6:.1f} M parameters, "
        f"{figures['rows']} rows of {figures['sequence']} tokens, {figures['steps']} steps each"
    )
    columns = ("way", "compile s", "step ms", "quartiles", "beside", "ratio", "quartiles")
    text = tables.render(columns, [row(result) for result in figures["ways"]], title)
    return f"{text}\nThe losses of all ways agree within {figures['disagreement']:.1e}."


def row(result: dict) -> tuple[str, ...]:
    low, middle, high = (1e3 * value for value in result["seconds"])
    cells = (result["way"], f"{result['compile_seconds']:.1f}", f"{middle:.0f}", f"{low:.0f} to {high:.0f}")
    if "ratio" not in result:
        return *cells, "", "", ""
    low, middle, high = result["ratio"]
    return *cells, result["rival"], f"{middle:.3f}", f"{low:.3f} to {high:.3f}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"steps": 40, "width": 256, "layers": 10, "sequence": 64, "rows": 16, "devices": 8}
    helps = {"steps": "measured steps of each way", "width": "of the model, a multiple of 64", "rows": "of a step"}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{helps.get(name, '')} (default {default})")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    if options.width % 64 or options.rows % options.devices or min(options.steps, options.layers) < 1:
        parser.error("--width must be a multiple of 64, --rows one of --devices, --steps and --layers 1 or more")
    return options


def main():
    options = arguments()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.devices)
    size = Size(options.width, options.layers, options.sequence, options.rows)
    mesh = jax.make_mesh((options.devices,), ("data",), axis_types=(AxisType.Auto,))
    ways, data = make_ways(size, mesh), batches(size, NamedSharding(mesh, PartitionSpec("data")))
    measure(ways, data, options.steps)
    figures = {"jax": jax.__version__, **vars(options), "parameters": parameters(size)}
    figures |= {"disagreement": disagreement(ways), "ways": [summary(way, ways) for way in ways]}
    print(table(figures))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=1)
    if not figures["disagreement"] <= AGREE:  # a NaN is no agreement either
        sys.exit(f"the ways do not train the same thing: their losses differ by more than {AGREE}")


if __name__ == "__main__":
    main()
