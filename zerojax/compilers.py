"""Options for XLA's compilers. They go with one step, never with the whole process."""

_OPTIONS: dict[str, dict[str, bool | int]] = {
    # Each turn of a loop needs the layer that is on its way where the present one was. Two turns in one save the
    # copies in between, and XLA's scheduler then lays each gather and reduction beside matrix products. Gradient of the
    # 24 stacked layers of benchmarks/accelerators.py on 8 H100s, reduced in bfloat16: from 51 % to 96 % of the gathered
    # bytes, from none to 96 % of the reduced ones, for 44 MiB more.
    #
    # XLA holds back reductions to combine them: the whole gradients of several layers. With unrolled layers of the same
    # size the reductions then run beside nothing (19 % of the bytes for 98 %).
    "gpu": {
        "xla_gpu_enable_while_loop_double_buffering": True,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 0,
    },
}


def options(platform: str, stage: int) -> dict[str, bool | int]:
    """For ``jax.jit(..., compiler_options=...)``; empty where the compiler's own choice is as good.

    Args:
      platform: as ``jax.Device.platform``.
      stage: only stage 3 gathers in loops.

    >>> sorted(options("gpu", stage=3))
    ['xla_gpu_enable_while_loop_double_buffering', 'xla_gpu_reduce_scatter_combine_threshold_bytes']
    >>> options("cpu", stage=3)
    {}
    """
    return dict(_OPTIONS.get(platform, {})) if stage == 3 else {}
