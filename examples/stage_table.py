"""Print what each stage holds and sends, per device, for a small GPT, on the devices that JAX finds."""

import argparse

import jax
import zerojax
from zerojax import accounting, tables
from zerojax.app import demo

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step, each of one row a device")
parser.add_argument("--markdown", action="store_true", help="as the README has it")
options = parser.parse_args()

devices, k = jax.device_count(), options.accumulate
config = demo.RunConfig(width=512, layers=2, heads=8, sequence=64, devices=devices, rows=devices * k, accumulate=k)
init_fn, tx, loss_fn = demo.make_init(config), demo.make_optimizer(config), demo.make_loss(config)
plan = zerojax.make_plan(init_fn, tx, jax.make_mesh((devices,), ("data",)), zerojax.ZeroConfig(accumulate=k))
tokens = jax.ShapeDtypeStruct((config.rows, config.sequence + 1), "int32", sharding=plan.batch_sharding)

rows = []
for stage in range(4):
    staged = plan.with_stage(stage)
    live = accounting.live_bytes(zerojax.init_state(init_fn, tx, staged, jax.random.key(0)))
    cost = zerojax.report(zerojax.make_train_step(loss_fn, tx, staged), staged.abstract_state, {"tokens": tokens})
    sizes = (staged.bytes_per_device(), max(live.values()), cost.memory.peak, cost.wire_bytes)
    rows.append((str(stage), *map(tables.size, sizes)))

title = (
    f"A GPT of {sum(leaf.size for leaf in plan.params):,} parameters in float32 with AdamW; {devices} devices, "
    f"{config.rows} rows of {config.sequence} bytes, micro-batches: {k}"
)
columns = ("stage", "state at rest, by the plan", "by the live arrays", "compiled peak", "sent per step")
print(title + "\n")
if options.markdown:
    print("\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)))
else:
    print(tables.render(columns, rows))
