"""Every optimizer of optax, partitioned, beside itself on one device; and what its half of the step sends.

    python benchmarks/optimizers.py --markdown > docs/optimizers.md

It takes some minutes on two cores. The transformations, with their arguments, are those of `tests/optimizers.py`.
"""

import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from conftest import DEVICES  # noqa: E402, I001 (and what sets the devices, before JAX starts)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
import optimizers  # noqa: E402
import test_optimizers  # noqa: E402
import typer  # noqa: E402
import ways  # noqa: E402
from optax import contrib  # noqa: E402

import zerojax  # noqa: E402
from zerojax import tables  # noqa: E402

GROUP = 15  # trained side by side, in one program
LARGE = {"matrix": (256, 512), "odd": (512, 128), "scalar": ()}
LAYERS, WIDTH, HIDDEN = 8, 64, 256


def differences(names: list[str], way: str) -> dict[str, float]:
    """The largest relative difference of any array of parameters or state, over stages 0 and 3, of what is served."""
    worst = dict.fromkeys(ways.served(way, names), 0.0)
    for stage in (0, 3):
        found = ways.differences(way, list(worst), stage)
        for by_path in (found["params"], found["opt_state"]):
            for path, error in by_path.items():
                name = path.partition("/")[0]
                worst[name] = max(worst[name], error)
    return worst


def sent(make, name: str) -> float:
    """Bytes that a device sends in a step of stage 1, for `LARGE` parameters."""
    tx = optimizers.abreast({name: make()})
    plan = zerojax.make_plan(
        lambda key: {name: {leaf: jnp.zeros(shape) for leaf, shape in LARGE.items()}},
        tx,
        jax.make_mesh((DEVICES,), ("data",)),
        zerojax.ZeroConfig(stage=1, allow_whole=True),
    )
    step = zerojax.make_train_step(optimizers.loss_fn, tx, plan)
    rows = jax.ShapeDtypeStruct((DEVICES, 2), "float32")
    return zerojax.report(step, plan.abstract_state, rows).wire_bytes


# ---- Muon on stacked layers ----


def init_stacked(key):
    def layer(key):
        up, down = jax.random.split(key)
        return {"up": jax.random.normal(up, (WIDTH, HIDDEN)), "down": jax.random.normal(down, (HIDDEN, WIDTH))}

    return {"blocks": jax.lax.map(layer, jax.random.split(key, LAYERS))}


def stacked_loss(params, x):
    def block(x, layer):
        return x + jax.nn.relu(x @ layer["up"]) @ layer["down"], None

    return jnp.mean(jax.lax.scan(block, x, params["blocks"])[0] ** 2)


def last_two(params):
    return jax.tree.map(lambda p: contrib.MuonDimensionNumbers(p.ndim - 2, p.ndim - 1), params)


def stacked() -> Iterable[tuple[str, ...]]:
    """Sent per step, and the step's temporaries, for SGD and Muon; partitioned by the rule and along the layers."""
    makers = {"SGD": optax.sgd(0.1), "Muon": contrib.muon(0.02, muon_weight_dimension_numbers=last_two)}
    for where, overrides in (("within the layers", {}), ("along the layers", {"blocks/*": 0})):
        for stage in (1, 2, 3):
            config = zerojax.ZeroConfig(stage=stage, overrides=overrides)
            cells = []
            for tx in makers.values():
                plan = zerojax.make_plan(init_stacked, tx, jax.make_mesh((DEVICES,), ("data",)), config)
                step = zerojax.make_train_step(stacked_loss, tx, plan)
                rows = jax.ShapeDtypeStruct((32, WIDTH), "float32")
                report = zerojax.report(step, plan.abstract_state, rows)
                cells += [tables.size(report.wire_bytes), tables.size(report.memory.temp)]
            yield where, str(stage), *cells


# ---- the page ----

HEAD = ("transformation", "own step", "linen", "NNX", "sent beyond the stage's own")
STACKED = ("partitioned", "stage", "SGD sends", "temporaries", "Muon sends", "temporaries")


def rows() -> Iterable[tuple[str, ...]]:
    names = list(optimizers.available(optimizers.TABLE))
    own = sent(lambda: optax.sgd(0.1), "sgd")
    for start in range(0, len(names), GROUP):
        group = names[start : start + GROUP]
        by_way = [differences(group, way) for way in ("own", "linen", "nnx")]
        for name in group:
            more = sent(optimizers.TABLE[name].make, name) - own
            cells = (f"{errors[name]:.0e}" if name in errors else "needs `value`" for errors in by_way)
            yield f"`{name}`", *cells, f"{tables.size(more)} ({more / own:.1%})"
            print(name, file=sys.stderr)


def refused() -> Iterable[tuple[str, ...]]:
    for name, (_, words) in optimizers.available(optimizers.REFUSED).items():
        yield f"`{name}`", optimizers.REASONS[words]


def table(head: tuple[str, ...], cells: Iterable[tuple[str, ...]], markdown: bool) -> str:
    if not markdown:
        return tables.render(head, cells)
    lines = [head, ("---",) * len(head), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(markdown: bool) -> str:
    size = tables.size(4 * sum(int(jnp.prod(jnp.array(shape))) for shape in LARGE.values()))
    return f"""# Optimizers

Made by `python benchmarks/optimizers.py --markdown > docs/optimizers.md` with jax {jax.__version__}, optax
{optax.__version__}, on {DEVICES} simulated CPU devices.

The optimizer's half of a step sees global arrays, so the library has no code for any optimizer, and what optax
computes on one device is what it computes here. Every optimizer and transformation that optax exports is trained for
{test_optimizers.STEPS} steps at stages 0 and 3, on arrays that the devices divide and on others, through each of the
three ways in: the *own step* of `make_train_step`, beside plain optax on one device; *linen*'s `TrainState`, and
*NNX*'s `nnx.Optimizer`, each beside itself on one device. The numbers are the largest difference of any number of the
parameters or the state, in parts of the largest number of its array. *Needs `value`*: it asks for the loss, which
Flax's `TrainState.apply_gradients` cannot hand over; `optimizer.update(model, grads, value=loss)` of NNX does. The
arguments are those in `tests/optimizers.py`; that the differences stay within its tolerances is a test, as it is that
the first states are the same. *Sent beyond the stage's own* is what a device sends in a step of stage 1 more than with
`optax.sgd`, for {size} of parameters in two matrices: nothing for what works on each number by itself; a few numbers
for norms; rows and columns for factored moments; and much for products and decompositions of whole matrices.

Inner products of whole arrays (`prodigy`, `dadapt_adamw`, `mechanize`, `momo`, `lbfgs`) flatten them first, for which
the compiler gathers what is not partitioned along dim 0. With `overrides` that partition the large matrices along dim
0, these send only a few numbers.

`flatten` makes one long array of all parameters; where the devices do not divide its length, its state stays whole,
which the plan refuses unless `allow_whole=True`.

For your own transformation `zerojax.check_optimizer(tx, plan)` does the like.

{table(HEAD, rows(), markdown)}

Around others, `MultiSteps` and the like are measured with a simple optimizer inside. `lookahead` trains
`optax.LookaheadParams.init_synced(params)`, as in optax; your loss reads `params.fast`.

## What a step hands over

The mean gradient in float32, the state, the parameters; and as extra arguments `value`, the mean loss of the whole
batch, and `grad`. What needs more is refused by `make_train_step`, before compilation:

{table(("transformation", "why"), refused(), markdown)}

## Muon on stacked layers

Muon multiplies whole matrices. Partitioned within the layers, as the rule has it, the compiler sums partial products
over the devices. Partitioned along the layers (`ZeroConfig(overrides={{"blocks/*": 0}})`, if the number of devices
divides that of the layers), each device has the whole matrices of some layers, and Muon sends nothing. Stacks need
`muon_weight_dimension_numbers`. At stages 1 and 2 that costs nothing else. At stage 3 it does: a scan cannot gather a
layer at a time when the layers themselves lie on different devices, so the whole stack is gathered before the loop,
and the memory is that of stage 2. {LAYERS} layers of {WIDTH} x {HIDDEN} and back, by the compiled step:

{table(STACKED, stacked(), markdown)}
"""


def main(markdown: bool = False):
    """Print the page; with ``--markdown`` as it stands in docs/."""
    warnings.simplefilter("ignore", DeprecationWarning)
    print(page(markdown), end="")


if __name__ == "__main__":
    typer.run(main)
