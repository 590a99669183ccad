"""Closed formulas: bytes of model state on a device, elements on the wire; the papers', DeepSpeed's estimator's, ours.

Ψ is the number of parameters, N that of devices; moments are Adam's. Bytes are bytes, a paper's GB is 1e9 of them.
"""


def model_state_bytes(parameters: float, devices: int, stage: int) -> float:
    """Peak bytes per device of parameters, gradients and Adam's state in a step, without activations.

    With 2-byte parameters and gradients in the step and 4-byte parameters and moments at rest (arXiv 1910.02054,
    section 5). The paper's stage 3 is 16 bytes per parameter over the devices; here it is 14, since the 2-byte
    parameters are cast from the 4-byte shards and gathered a unit at a time, and no partitioned copy of them is kept.
    The units in flight come on top.

    >>> [model_state_bytes(7.5e9, 64, stage) / 1e9 for stage in range(4)]
    [120.0, 31.40625, 16.640625, 1.640625]
    """
    _check(stage, devices)
    whole, shared = ((16, 0), (4, 12), (2, 14), (0, 14))[stage]
    return parameters * (whole + shared / devices)


def paper_model_state_bytes(parameters: float, devices: int, stage: int) -> float:
    """The same as the paper has it (arXiv 1910.02054, figure 1 and table 1): stage 3 keeps 2-byte shards besides.

    >>> [round(paper_model_state_bytes(7.5e9, 64, stage) / 1e9, 1) for stage in range(4)]
    [120.0, 31.4, 16.6, 1.9]
    """
    _check(stage, devices)
    whole, shared = ((16, 0), (4, 12), (2, 14), (0, 16))[stage]
    return parameters * (whole + shared / devices)


def deepspeed_bytes(parameters: float, devices: int, stage: int, largest_layer: float = 0) -> float:
    """What DeepSpeed's estimator says for stages 2 and 3 without offload (its "Memory Requirements" page).

    Stage 2 counts 2-byte gradients as whole and 4-byte gradients as partitioned: 4 Ψ + 16 Ψ/N, where the paper has
    2 Ψ + 14 Ψ/N. Stage 3 counts 18 Ψ/N, and both 2-byte copies of the largest layer. Activations are left out.

    Args:
      largest_layer: parameters of the largest layer; stage 3 needs it.

    >>> round(deepspeed_bytes(2851e6, 8, stage=2) / 2**30, 2), round(deepspeed_bytes(2851e6, 8, 3, 32e6) / 2**30, 2)
    (15.93, 6.09)
    """
    _check(stage, devices)
    if stage < 2:
        raise ValueError(f"stage={stage}: DeepSpeed estimates stages 2 and 3 only")
    return 4 * parameters + 16 * parameters / devices if stage == 2 else 4 * largest_layer + 18 * parameters / devices


def at_rest_bytes(parameters: float, devices: int, stage: int) -> float:
    """Bytes per device of the state between steps: 4-byte parameters and Adam's two moments.

    >>> at_rest_bytes(1000, 8, stage=0), at_rest_bytes(1000, 8, stage=1)
    (12000.0, 1500.0)
    """
    _check(stage, devices)
    return 12 * parameters / (devices if stage else 1)


def communication_volume(parameters: float, stage: int, accumulate: int = 1) -> float:
    """Elements that each device sends in a step, for many devices (times ``(N - 1) / N`` for N of them).

    For one micro-batch 2 Ψ, 2 Ψ, 2 Ψ and 3 Ψ (arXiv 1910.02054, section 7).

    >>> [communication_volume(1000, stage, accumulate=4) for stage in range(4)]
    [2000, 2000, 5000, 12000]
    """
    _check(stage)
    if accumulate < 1:
        raise ValueError(f"accumulate={accumulate!r} is not a number of micro-batches; use 1 or more")
    return parameters * (2, 2, 1 + accumulate, 3 * accumulate)[stage]


def largest_model(memory_bytes: float, devices: int, stage: int) -> float:
    """The most parameters whose model state fits, with no room for activations.

    >>> round(largest_model(32e9, 64, 0) / 1e9, 1), round(largest_model(32e9, 64, 3) / 1e9, 1)
    (2.0, 146.3)
    """
    return memory_bytes / model_state_bytes(1, devices, stage)


def _check(stage: int, devices: int = 1):
    if stage not in range(4):
        raise ValueError(f"stage={stage!r} is not one of 0, 1, 2, 3")
    if devices < 1:
        raise ValueError(f"devices={devices!r} is not a number of devices; use 1 or more")
