"""One process of several, each with its own devices and rows: trains at every stage, and prints what it finds as JSON.

python tests/processes.py COORDINATOR PROCESSES NUMBER
"""

import hashlib
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zerojax

ROWS, STEPS = 32, 2
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def init_fn(key):
    keys = jax.random.split(key)
    return {"w": jax.random.normal(keys[0], (16, 32)) / 4, "v": jax.random.normal(keys[1], (32, 16)) / 6}


def loss_fn(params, batch):
    each = jnp.mean((jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2, -1) * batch["mask"]
    return zerojax.Loss(jnp.sum(each), jnp.sum(batch["mask"]))


def batch(process: int = 0, processes: int = 1) -> dict:
    """This process's rows of the global batch."""
    x = np.random.default_rng(0).normal(size=(ROWS, 16)).astype(np.float32)
    mask = (np.arange(ROWS) < 27).astype(np.float32)
    own = slice(ROWS // processes * process, ROWS // processes * (process + 1))
    return {"x": x[own], "y": np.sin(3 * x[own]), "mask": mask[own]}


def train(stage: int, k: int, rows: dict) -> dict:
    """What one run gives: numbers to compare, and the digest of all parameters to the bit."""
    plan = zerojax.make_plan(init_fn, TX, jax.make_mesh((8,), ("data",)), zerojax.ZeroConfig(stage=stage, accumulate=k))
    state, step = zerojax.init_state(init_fn, TX, plan, jax.random.key(0)), zerojax.make_train_step(loss_fn, TX, plan)
    found = {"wire": zerojax.report(step, state, rows).wire_bytes if k == 1 else 0, "losses": [], "norms": []}
    for _ in range(STEPS):
        state, metrics = step(state, rows)
        found["losses"].append(float(metrics["loss"]))
        found["norms"].append(float(metrics["grad_norm"]))
    found["evaluated"] = float(zerojax.make_eval_step(loss_fn, plan)(state, rows)["loss"])
    whole = [np.asarray(a.addressable_data(0)) for a in jax.tree.leaves(zerojax.gather_params(state.params, plan))]
    found["params"] = [float(number) for a in whole for number in (a.sum(), np.abs(a).max(), a[3, 5])]
    return {**found, "digest": hashlib.sha256(b"".join(a.tobytes() for a in whole)).hexdigest()}


def runs(rows: dict) -> dict[str, dict]:
    return {f"stage {stage}, k = {k}": train(stage, k, rows) for stage in range(4) for k in (1, 4)}


if __name__ == "__main__":
    coordinator, processes, number = sys.argv[1], *map(int, sys.argv[2:])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, processes, number)
    print("found:", json.dumps(runs(batch(number, processes))))
