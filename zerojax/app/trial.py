"""A run of the demo: planned, trained and measured. It shows nothing and writes nothing, it tells."""

import contextlib
import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax

import zerojax
from zerojax import tables
from zerojax.app import demo

_HELD_OUT_BATCHES = 8
_SAMPLED = 300  # bytes

Tell = Callable[[str, Any], None]  # a name and a value


class Trial:
    """A run that is planned and has its data; `run` trains and measures.

    Args:
      config: what to run.
      phase: told in words what begins that takes a while.

    Attributes:
      prompt: what the sample goes on from.

    Raises:
      ValueError: if the config asks for what cannot be.
    """

    prompt = b"def "

    def __init__(self, config: demo.RunConfig, phase: Callable[[str], None]):
        self.config, mesh = config, _mesh(config.devices)
        self.platform = _platform(mesh)
        self.init_fn, self.tx = demo.make_init(config), demo.make_optimizer(config)
        self.loss_fn = demo.make_loss(config)
        self.plan = zerojax.make_plan(self.init_fn, self.tx, mesh, config.zero)
        phase("reading Python's own sources")
        parts = demo.split(demo.corpus(config.corpus_bytes))
        self.data, self.held_out = (demo.batches(part, config.rows, config.sequence, config.seed) for part in parts)

    def run(self, tell: Tell):
        """Train, then measure.

        Args:
          tell: told every ``"phase"`` (in words) and ``"step"`` (see `zerojax.app.demo.train`), and the results by
            name: platform, versions, held_out_loss (nats per byte), sample (text) and memory (bytes per device of
            this stage and, to compare, of stage 0).
        """
        tell("platform", self.platform)
        tell("versions", {name: version(name) for name in ("jax", "jaxlib")})
        state = self._train(tell)
        tell("phase", "measuring the loss on held-out text")
        tell("held_out_loss", self._held_out_loss(state))
        tell("phase", f"sampling {_SAMPLED} bytes")
        tell("sample", self._sample(state))
        tell("memory", [self._memory(stage, tell) for stage in sorted({0, self.config.stage}, reverse=True)])

    def _train(self, tell: Tell) -> zerojax.TrainState:
        config, size = self.config, sum(leaf.size for leaf in self.plan.params)
        tell("phase", f"making the state: {size:,} parameters, stage {config.stage}, {self.platform}")
        state = zerojax.init_state(self.init_fn, self.tx, self.plan, jax.random.key(config.seed))
        step = zerojax.make_train_step(self.loss_fn, self.tx, self.plan)
        tell("phase", f"compiling the step, then {config.steps} steps of {config.tokens_per_step:,} bytes")
        return demo.train(step, state, self.data, config, lambda line: tell("step", line))

    def _held_out_loss(self, state: zerojax.TrainState) -> float:
        evaluate = zerojax.make_eval_step(self.loss_fn, self.plan)
        losses = [float(evaluate(state, next(self.held_out))["loss"]) for _ in range(_HELD_OUT_BATCHES)]
        return sum(losses) / len(losses)

    def _sample(self, state: zerojax.TrainState) -> str:
        whole = zerojax.gather_params(state.params, self.plan)
        key = jax.random.key(self.config.seed)
        return demo.printable(demo.sample(self.config, whole, self.prompt, _SAMPLED, key))

    def _memory(self, stage: int, tell: Tell) -> dict[str, int]:
        """From a compilation, no arrays."""
        tell("phase", f"compiling stage {stage} to count its bytes")
        plan, config = self.plan.with_stage(stage), self.config
        tokens = jax.ShapeDtypeStruct((config.rows, config.sequence + 1), "int32", sharding=plan.batch_sharding)
        step = zerojax.make_train_step(self.loss_fn, self.tx, plan)
        peak = zerojax.report(step, plan.abstract_state, {"tokens": tokens}).memory.peak
        return {"stage": stage, "at_rest": plan.bytes_per_device(), "peak": peak}


def _mesh(count: int) -> jax.sharding.Mesh:
    """A mesh of ``count`` devices: real ones if there are as many, else simulated on the CPU."""
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


def _platform(mesh: jax.sharding.Mesh) -> str:
    kind = mesh.devices.flat[0].device_kind
    return tables.count(mesh.size, "simulated CPU device" if kind == "cpu" else f"{kind} device")
