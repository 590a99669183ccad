"""Options for XLA's compilers. They go with one step, never with the whole process."""

# Each turn of a loop needs the layer that is on its way where the present one was. Two turns in one save the copies in
# between, and XLA's scheduler then lays each gather and reduction beside matrix products. Gradient of the 24 stacked
# layers of benchmarks/accelerators.py on 8 H100s, reduced in bfloat16: from 51 % to 96 % of the gathered bytes, from
# none to 96 % of the reduced ones, for 44 MiB more.
_STACKED: dict[str, bool | int] = {"xla_gpu_enable_while_loop_double_buffering": True}

# XLA holds back reductions to combine them: the whole gradients of several layers. The same layers unrolled then reduce
# beside nothing (19 % of the bytes for 98 %). In a loop it combines those of one turn, which is better left so (a GPT
# in a scan: 96 % of the gathered bytes beside products for 90 %, and 32 MiB less).
_UNROLLED: dict[str, bool | int] = {"xla_gpu_reduce_scatter_combine_threshold_bytes": 0}


def options(platform: str, stage: int, stacked: bool) -> dict[str, bool | int]:
    """For ``jax.jit(..., compiler_options=...)``; empty where the compiler's own choice is as good.

    Args:
      platform: as ``jax.Device.platform``.
      stage: only stage 3 gathers while the loss runs.
      stacked: whether the layers lie in stacks, over which a loop runs.

    >>> options("gpu", stage=3, stacked=True)
    {'xla_gpu_enable_while_loop_double_buffering': True}
    >>> options("cpu", stage=3, stacked=True)
    {}
    """
    if platform != "gpu" or stage < 3:
        return {}
    return dict(_STACKED if stacked else _UNROLLED)
