"""Print how far bfloat16 and float16 runs of the demo's GPT end from the float32 run, at several stages."""

import argparse

import jax
import zerojax
from zerojax import tables
from zerojax.app import demo

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=demo.RunConfig.steps, help="updates of each run")
parser.add_argument("--stages", type=int, nargs="+", default=[0, 3])
parser.add_argument(
    "--precisions",
    nargs="+",
    default=["c=f32", "c=bf16", "c=fp16", "p=bf16,c=bf16,rounding=stochastic", "p=bf16,c=bf16"],
)
parser.add_argument("--width", type=int, default=demo.RunConfig.width)
parser.add_argument("--layers", type=int, default=demo.RunConfig.layers)
parser.add_argument("--markdown", action="store_true", help="as docs/precision.md has it")
options = parser.parse_args()

mesh = jax.make_mesh((jax.device_count(),), ("data",))
size = dict(width=options.width, layers=options.layers, devices=mesh.size, steps=options.steps)


def losses(precision: str, stage: int) -> tuple[float, float, int]:
    """The mean loss of the last ten steps, that of held-out text, and how many steps were skipped."""
    config = demo.RunConfig(stage=stage, precision=precision, **size)
    init_fn, tx, loss_fn = demo.make_init(config), demo.make_optimizer(config), demo.make_loss(config)
    plan = zerojax.make_plan(init_fn, tx, mesh, config.zero)
    train, held_out = (demo.batches(p, config.rows, config.sequence) for p in demo.split(demo.corpus()))
    lines = []
    state = zerojax.init_state(init_fn, tx, plan, jax.random.key(config.seed))
    state = demo.train(zerojax.make_train_step(loss_fn, tx, plan), state, train, config, lines.append)
    evaluate = zerojax.make_eval_step(loss_fn, plan)
    seen = [float(evaluate(state, next(held_out))["loss"]) for _ in range(8)]
    last = [line["loss"] for line in lines[-10:]]
    return sum(last) / len(last), sum(seen) / len(seen), sum(int(line.get("skipped", 0)) for line in lines)


columns = ("precision", "stage", "loss, last 10 steps", "beside float32", "held-out loss", "beside float32", "skipped")
rows, right = [], {}
for stage in options.stages:
    for precision in options.precisions:
        *found, skipped = losses(precision, stage)
        right.setdefault(stage, found)  # the first precision is what the others are compared with
        pairs = [(f"{a:.4f}", f"{a / b - 1:+.2%}") for a, b in zip(found, right[stage], strict=True)]
        rows.append((precision, str(stage), *pairs[0], *pairs[1], str(skipped)))
        print(f"done: {'  '.join(rows[-1])}", flush=True)

print(f"\nThe demo's GPT, {options.steps} steps, {mesh.size} devices\n")
if options.markdown:
    print("\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)))
else:
    print(tables.render(columns, rows))
