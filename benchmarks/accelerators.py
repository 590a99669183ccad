"""What the compilers of absent accelerators make of stage 3, beside the ways that JAX users have today.

    python benchmarks/accelerators.py layers --on h100:8       # 24 unrolled layers, the gradient only
    python benchmarks/accelerators.py scan --on v5e:4x4        # 24 stacked layers in a scan, rematerialised
    python benchmarks/accelerators.py gpt --on h100:8          # whole train steps of a GPT with 1.3 B parameters
    python benchmarks/accelerators.py stages --on h100:8       # the same at stages 0 to 3
    python benchmarks/accelerators.py tails --on h100:8        # the same with losses that look across rows

Needs `pip install 'zerojax[gpu-target]'` or `'zerojax[tpu-target]'`. Nothing runs: each way is compiled in a process of
its own, and memory, collectives and schedule are read from the compiled program. ``state`` is what is held between two
steps, ``temp`` what comes on top; ``peak`` is both. ``gathered`` and ``reduced`` are the bytes on their way while a
matrix product is scheduled beside them.
"""

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import flavours
import gpt
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.status import Status

import zerojax
from zerojax import accounting, tables, targets
from zerojax.cost import hlo

LAYERS, WIDTH, DTYPE = 24, 2048, jnp.bfloat16
GPT = gpt.Size(width=2048, layers=24, sequence=1024, rows=4, vocabulary=32768, head=128)  # rows of one device
# XLA's own pipelining of loops; refused as options of one compilation.
PIPELINED = {
    "XLA_FLAGS": "--xla_gpu_enable_pipelined_all_gather=true --xla_gpu_enable_pipelined_reduce_scatter=true "
    "--xla_gpu_enable_pipelined_all_reduce=true --xla_gpu_enable_while_loop_double_buffering=true"
}
Lowered = Callable[[], jax.stages.Lowered]


# ---- what is compiled ----


def layer(w, h):
    """The layer of ``layers`` and ``scan``: 33.5 M parameters."""
    x = h * jax.lax.rsqrt((h.astype(jnp.float32) ** 2).mean(-1, keepdims=True) + 1e-6).astype(h.dtype)
    return h + jax.nn.gelu(x @ w[0]) @ w[1]


def layers_loss(ws, h, layer=layer):
    for w in ws:
        h = layer(w, h)
    return (h.astype(jnp.float32) ** 2).mean()


def scan_loss(ws, h, layer=layer):
    h, _ = jax.lax.scan(lambda h, w: (jax.checkpoint(layer)(w, h), None), h, ws)
    return (h.astype(jnp.float32) ** 2).mean()


def one_layer(_):
    return [jnp.zeros((WIDTH, 4 * WIDTH)), jnp.zeros((4 * WIDTH, WIDTH))]


def unrolled(key):
    return [one_layer(key) for _ in range(LAYERS)]


def stacked(key):
    return [jnp.zeros((LAYERS, *w.shape)) for w in one_layer(key)]


def cast(params):
    return jax.tree.map(lambda a: a.astype(DTYPE), params)


def ours(mesh: Mesh, init: Callable, loss: Callable, batch: Any, **config: Any) -> Lowered:
    """The gradient alone, as in `make_train_step`."""
    plan = _plan(mesh, init, optax.sgd(0.1), **config)
    out = plan.replicated, plan.state_shardings.params
    value_and_grad = zerojax.value_and_grad(loss, plan)
    jitted = jax.jit(value_and_grad, out_shardings=out, compiler_options=plan.compiler_options)
    return lambda: _within(plan.mesh, jitted, plan.abstract_state.params, _placed(batch, plan.batch_sharding))


def our_step(mesh: Mesh, init: Callable, loss: Callable, batch: Any, **config: Any) -> Lowered:
    plan = _plan(mesh, init, gpt.optimizer(), **config)
    step = zerojax.make_train_step(loss, gpt.optimizer(), plan)
    return lambda: step.lower(plan.abstract_state, _placed(batch, plan.batch_sharding))


def _plan(mesh, init, tx, *, stage=3, reduce="f32", stacks=False, **config):
    config |= {"overrides": {"*": 1}} if stacks else {}
    config |= {"stage": stage, "shard_axes": mesh.axis_names, "precision": f"c=bf16,r={reduce}"}
    return zerojax.make_plan(init, tx, mesh, zerojax.ZeroConfig(**config))


def _placed(batch, sharding):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), batch)


def _within(mesh, jitted, *args):
    with jax.set_mesh(mesh):
        return jitted.lower(*args)


def _shardings(mesh: Mesh, shapes: Any, stacked: Callable[[Any], bool]) -> Any:
    """Each array on the largest dim that the devices divide, but not along stacked layers."""

    def one(path, leaf):
        first = 1 if stacked(path) else 0
        dims = [dim for dim in range(first, len(leaf.shape)) if leaf.shape[dim] % mesh.size == 0]
        if not dims:
            return NamedSharding(mesh, PartitionSpec())
        dim = max(dims, key=lambda dim: leaf.shape[dim])
        return NamedSharding(mesh, PartitionSpec(*[None] * dim, mesh.axis_names))

    return jax.tree_util.tree_map_with_path(one, shapes)


def by_shardings(mesh: Mesh, init: Callable, loss: Callable, batch: Any, *, stacked: Callable) -> Lowered:
    """The gradient with shardings given to ``jit``."""
    shapes = jax.eval_shape(init, jax.random.key(0))
    placed, rows = _shardings(mesh, shapes, stacked), NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    grad = jax.jit(jax.grad(lambda params, batch: loss(cast(params), batch)), out_shardings=placed)
    params = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, placed)
    return lambda: _within(mesh, grad, params, _placed(batch, rows))


def step_by_shardings(mesh: Mesh, init: Callable, loss: Callable, batch: Any, *, stacked: Callable) -> Lowered:
    """A train step with shardings given to ``jit``."""
    tx = gpt.optimizer()

    def whole(key):
        params = init(key)
        return params, tx.init(params)

    def step(state, batch):
        params, opt_state = state
        value, grads = jax.value_and_grad(lambda p: loss(cast(p), batch))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    shapes = jax.eval_shape(whole, jax.random.key(0))
    placed, rows = _shardings(mesh, shapes, stacked), NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    state = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, placed)
    out = placed, NamedSharding(mesh, PartitionSpec())
    jitted = jax.jit(step, donate_argnums=0, in_shardings=(placed, rows), out_shardings=out)
    return lambda: _within(mesh, jitted, state, _placed(batch, rows))


def gathered_in_the_body(mesh: Mesh, init: Callable, batch: Any, *, remat: Callable) -> Lowered:
    """Stage 3 by hand: ``shard_map``, and a gather in each layer; ``remat(layer)`` says what backward makes again."""
    (axis,), stacks = mesh.axis_names, init is stacked

    def gathering(w, h):
        return layer([jax.lax.all_gather(s.astype(DTYPE), axis, axis=0, tiled=True) for s in w], h)

    def grad(ws, h):
        return jax.grad(scan_loss if stacks else layers_loss)(ws, h, remat(gathering))

    shapes = jax.eval_shape(init, jax.random.key(0))
    spec = PartitionSpec(None, axis) if stacks else PartitionSpec(axis)
    specs = jax.tree.map(lambda _: spec, shapes)
    mapped = jax.shard_map(grad, mesh=mesh, in_specs=(specs, PartitionSpec(axis)), out_specs=specs, check_vma=False)
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    params = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, placed)
    rows = NamedSharding(mesh, PartitionSpec(axis))
    return lambda: _within(mesh, jax.jit(mapped, out_shardings=placed), params, _placed(batch, rows))


# ---- the ways ----


def rows(mesh: Mesh, each: int) -> Any:
    return jax.ShapeDtypeStruct((mesh.size * each, WIDTH), DTYPE)


def tokens(mesh: Mesh, micro_batches: int = 1) -> Any:
    return jax.ShapeDtypeStruct((micro_batches * mesh.size * GPT.rows, GPT.sequence + 1), jnp.int32)


def in_list(path):
    return False


def in_stack(path):
    return "blocks" in jax.tree_util.keystr(path)


Ways = dict[str, Callable[[], Lowered]]


def layers_ways(mesh: Mesh) -> Ways:
    batch = rows(mesh, 1024)
    ways: Ways = {
        "stage 3": partial(ours, mesh, unrolled, layers_loss, batch),
        "stage 3, reduced in bf16": partial(ours, mesh, unrolled, layers_loss, batch, reduce="bf16"),
        "shardings given to jit": partial(by_shardings, mesh, unrolled, layers_loss, batch, stacked=in_list),
    }
    if len(mesh.axis_names) == 1:

        def no_gather(primitive, *_, **__):
            return primitive.name != "all_gather"

        refused = partial(jax.checkpoint, policy=no_gather)
        ways["gather in each layer"] = partial(gathered_in_the_body, mesh, unrolled, batch, remat=lambda f: f)
        ways["the same, refused by remat"] = partial(gathered_in_the_body, mesh, unrolled, batch, remat=refused)
    return ways


def scan_ways(mesh: Mesh) -> Ways:
    batch = rows(mesh, 4096)
    ways: Ways = {
        "stage 3": partial(ours, mesh, stacked, scan_loss, batch, stacks=True),
        "stage 3, reduced in bf16": partial(ours, mesh, stacked, scan_loss, batch, stacks=True, reduce="bf16"),
        "shardings given to jit": partial(by_shardings, mesh, stacked, scan_loss, batch, stacked=lambda path: True),
    }
    if len(mesh.axis_names) == 1:
        ways["gather in each layer"] = partial(gathered_in_the_body, mesh, stacked, batch, remat=lambda f: f)
    return ways


def plain(stack: bool, rows: NamedSharding | None = None, loss_fn: Callable = gpt.loss_fn) -> tuple[Callable, Callable]:
    """``(init_fn, loss_fn)``; ``rows`` keeps the activations apart by rows, which XLA does not do by itself."""
    init = gpt.stacked_init_fn if stack else gpt.init_fn
    block = jax.checkpoint(partial(gpt.block_fn, GPT))

    def constrain(x):
        return jax.lax.with_sharding_constraint(x, rows) if rows else x

    return partial(init, GPT), lambda params, tokens: loss_fn(GPT, params, tokens, block, constrain)


def gpt_ways(mesh: Mesh) -> Ways:
    batch = tokens(mesh)
    models = {
        "functions, scan": plain(True),
        "functions": plain(False),
        "linen, nn.scan": flavours.linen(GPT, True),
        "linen": flavours.linen(GPT, False),
        "NNX": flavours.nnx_gpt(GPT),
    }
    ways: Ways = {f"stage 3, {name}": partial(our_step, mesh, *model, batch) for name, model in models.items()}
    ways["stage 3, functions, scan, reduced in bf16"] = partial(our_step, mesh, *plain(True), batch, reduce="bf16")
    for name, stack in (("functions, scan", True), ("functions", False)):
        rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        way = partial(step_by_shardings, mesh, *plain(stack, rows), batch, stacked=in_stack if stack else in_list)
        ways[f"shardings given to jit, {name}"] = way
    return ways


def stages_ways(mesh: Mesh) -> Ways:
    ways: Ways = {}
    for stack, k, stage in itertools.product((True, False), (1, 4), range(4)):
        name = f"stage {stage}, {'scan' if stack else 'unrolled'}, k={k}"
        ways[name] = partial(our_step, mesh, *plain(stack), tokens(mesh, k), stage=stage, accumulate=k)
    return ways


def tails_ways(mesh: Mesh) -> Ways:
    batch, ways, rows = tokens(mesh), {}, NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    losses = {"mean": gpt.loss_fn, "masked mean": gpt.masked_loss_fn, "contrastive": gpt.contrastive_loss_fn}
    for name, loss_fn in losses.items():
        ways[f"stage 3, {name}"] = partial(our_step, mesh, *plain(True, None, loss_fn), batch)
    for name, loss_fn in losses.items():
        ways[f"all rows together, {name}"] = partial(
            our_step, mesh, *plain(True, rows, loss_fn), batch, rows="together"
        )
        way = partial(step_by_shardings, mesh, *plain(True, rows, loss_fn), batch, stacked=in_stack)
        ways[f"shardings given to jit, {name}"] = way
    return ways


WORKLOADS = {"layers": layers_ways, "scan": scan_ways, "gpt": gpt_ways, "stages": stages_ways, "tails": tails_ways}


# ---- measuring ----


def measure(lowered: Lowered, text: str | None) -> dict:
    start = time.perf_counter()
    low = lowered()
    middle = time.perf_counter()
    compiled = low.compile()
    end = time.perf_counter()
    memory, program = accounting.memory(compiled), compiled.as_text()
    if text:
        with open(text, "w") as file:
            file.write(program)
    seen = hlo.overlap(program)
    return {
        "state": memory.argument, "temp": memory.temp, "peak": memory.peak,
        "wire": sum(one.collective.wire_bytes for one in seen),
        "gathered": beside(seen, ("all-gather",)), "reduced": beside(seen, ("reduce-scatter", "all-reduce")),
        "lower_seconds": middle - start, "compile_seconds": end - middle,
    }  # fmt: skip


def beside(seen: list[hlo.Seen], kinds: tuple[str, ...]) -> float | None:
    """Of the bytes of these collectives, the part that travels beside matrix products."""
    chosen = [one for one in seen if one.collective.kind in kinds]
    total = sum(one.collective.wire_bytes for one in chosen)
    return sum(one.collective.wire_bytes for one in chosen if one.overlapped) / total if total else None


def formula(workload: str) -> int:
    """Wire bytes of a step at stage 3 but for the factor (N - 1) / N: two gathers in bf16, a reduction in f32."""
    parameters = gpt.parameters(GPT) if workload in ("gpt", "stages", "tails") else 24 * 8 * WIDTH**2
    return (2 + 2 + 4) * parameters


# ---- words ----


def table(workload: str, on: str, devices: int, figures: dict[str, dict]) -> str:
    wire = formula(workload) * (devices - 1) / devices
    columns = (
        "way",
        "state",
        "temp",
        "peak MiB",
        "wire MiB",
        "of formula",
        "gathered",
        "reduced",
        "lower s",
        "compile s",
    )
    cells = [row(name, result, wire) for name, result in figures.items()]
    title = f"{workload} on {on}, jax {jax.__version__}; a device; formula {wire / 2**20:,.0f} MiB"
    return tables.render(columns, cells, title)


def row(name: str, result: dict, wire: float) -> tuple[str, ...]:
    mib = (f"{result[part] / 2**20:,.0f}" for part in ("state", "temp", "peak", "wire"))
    shares = ("-" if result[part] is None else f"{result[part]:.0%}" for part in ("gathered", "reduced"))
    seconds = (f"{result[part]:.1f}" for part in ("lower_seconds", "compile_seconds"))
    return name, *mib, f"{result['wire'] / wire:.3f}", *shares, *seconds


def apart(name: str, options: argparse.Namespace, env: dict[str, str]) -> dict:
    """One way in a process of its own, since flags of the whole process may be among what is compared."""
    command = [sys.executable, __file__, options.workload, "--on", options.on, "--way", name]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--on", default="h100:8", help="see zerojax.targets.target (default h100:8)")
    parser.add_argument("--only", default="", help="ways whose name holds this")
    parser.add_argument("--way", help="compile this way only, and print its figures as JSON")
    parser.add_argument("--text", metavar="FILE", help="with --way: write the compiled program there")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    target = targets.target(options.on)
    ways = WORKLOADS[options.workload](target.mesh())
    if options.way:
        print(json.dumps(measure(ways[options.way](), options.text)))
        return
    runs = {name: (name, {}) for name in ways if options.only in name}
    if target.platform == "gpu" and options.workload != "stages":
        by_jit = [name for name in runs if name.startswith("shardings given to jit")]
        runs |= {f"{name}, XLA pipelining": (name, PIPELINED) for name in by_jit}
    figures = {}
    with Status("", console=Console(stderr=True)) as status:
        for number, (name, run) in enumerate(runs.items()):
            status.update(f"{number + 1} of {len(runs)}: {name}")
            figures[name] = apart(run[0], options, run[1])
    print(table(options.workload, options.on, math.prod(target.grid), figures))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"jax": jax.__version__, "on": options.on, "figures": figures}, file, indent=1)


if __name__ == "__main__":
    main()
