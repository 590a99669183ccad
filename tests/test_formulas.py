"""The papers' figures from the formulas, to the digit that is printed; published sizes of models."""

import itertools
import math

import jax
import pytest

from zerojax.cost import formulas, hardware, models
from zerojax.cost.formulas import deepspeed_bytes, largest_model, model_state_bytes, paper_model_state_bytes

# arXiv 1910.02054, table 1: GB of a device at stages 1, 2 and 3, by devices and billions of parameters.
TABLE_1 = {
    (1, 7.5): ("120", "120", "120"), (1, 128): ("2048", "2048", "2048"), (1, 1000): ("16000", "16000", "16000"),
    (4, 7.5): ("52.5", "41.3", "30"), (4, 128): ("896", "704", "512"), (4, 1000): ("7000", "5500", "4000"),
    (16, 7.5): ("35.6", "21.6", "7.5"), (16, 128): ("608", "368", "128"), (16, 1000): ("4750", "2875", "1000"),
    (64, 7.5): ("31.4", "16.6", "1.88"), (64, 128): ("536", "284", "32"), (64, 1000): ("4187", "2218", "250"),
    (256, 7.5): ("30.4", "15.4", "0.47"), (256, 128): ("518", "263", "8"), (256, 1000): ("4046", "2054", "62.5"),
    (1024, 7.5): ("30.1", "15.1", "0.12"), (1024, 128): ("513", "257", "2"), (1024, 1000): ("4011", "2013", "15.6"),
}  # fmt: skip
# The same paper, table 2: billions of parameters on 64 V100s of 32 GB without model parallelism, stages 0 to 3.
TABLE_2 = ("2", "7.6", "14.4", "128")


def is_printed(value: float, text: str) -> bool:
    """Rounded or cut off to the digits of the text; the paper does both."""
    unit = 10.0 ** -len(text.partition(".")[2])
    return -unit / 2 - 1e-9 <= value - float(text) < unit


@pytest.mark.parametrize(("devices", "billions"), TABLE_1)
def test_the_papers_table_of_bytes(devices, billions):
    for stage, text in enumerate(TABLE_1[devices, billions], start=1):
        assert is_printed(paper_model_state_bytes(billions * 1e9, devices, stage) / 1e9, text)


def test_the_papers_figure_of_7_5_billion_on_64():
    found = [paper_model_state_bytes(7.5e9, 64, stage) / 1e9 for stage in range(4)]
    assert all(map(is_printed, found, ("120", "31.4", "16.6", "1.9")))
    ours = [model_state_bytes(7.5e9, 64, stage) / 1e9 for stage in range(4)]
    assert ours[:3] == found[:3]
    assert is_printed(ours[3], "1.64")  # 14 bytes over the devices, not 16: no second copy of the shards


@pytest.mark.parametrize("stage", range(4))
def test_the_papers_largest_models(stage):
    paper = 32e9 / paper_model_state_bytes(1, 64, stage)
    assert is_printed(paper / 1e9, TABLE_2[stage])
    ours = largest_model(32e9, 64, stage)
    assert ours == (pytest.approx(paper) if stage < 3 else pytest.approx(paper * 16 / 14))


def test_largest_models_grow_with_the_stage_and_the_devices():
    for name in ("v100-32gb", "h100"):
        memory = hardware.ACCELERATORS[name].memory_bytes
        table = [[largest_model(memory, n, stage) for stage in range(4)] for n in (1, 8, 64, 1024)]
        assert all(a < b for row in table[1:] for a, b in itertools.pairwise(row))
        assert all(a <= b for row, more in itertools.pairwise(table) for a, b in zip(row, more, strict=True))
        assert len({row[0] for row in table}) == 1  # more devices do not help without ZeRO


def test_the_papers_volumes():
    """Section 7: 2, 2, 2 and 3 times the parameters; accumulation multiplies what each micro-batch sends."""
    assert [formulas.communication_volume(1, stage) for stage in range(4)] == [2, 2, 2, 3]
    assert [formulas.communication_volume(1, stage, 8) for stage in range(4)] == [2, 2, 9, 24]


def test_deepspeeds_estimator_beside_ours():
    """Its page says 15.93 GB and 6.1 GB for 2,851 M parameters on 8 GPUs, with a largest layer of 32 M."""
    assert deepspeed_bytes(2851e6, 8, 2) / 2**30 == pytest.approx(15.93, abs=0.005)
    # What it has beyond ours: gradients as whole, in 2 bytes, and once more as shards in 4 instead of 2
    assert deepspeed_bytes(1e9, 8, 2) - model_state_bytes(1e9, 8, 2) == 2e9 + 2e9 / 8
    # and at stage 3: 2-byte shards of the parameters and 4-byte ones of the gradients, and the layer twice
    assert deepspeed_bytes(1e9, 8, 3, 5e7) - model_state_bytes(1e9, 8, 3) == 4e9 / 8 + 4 * 5e7
    with pytest.raises(ValueError, match="stages 2 and 3 only"):
        deepspeed_bytes(1e9, 8, 1)


# ---- models and machines ----

PUBLISHED = {
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "llama3-405b": 405_853_388_800,
}  # fmt: skip
NEARLY = {
    "megatron-1.2b": 1.2e9, "megatron-2.5b": 2.5e9, "megatron-4.2b": 4.2e9, "megatron-8.3b": 8.3e9, "gpt3-13b": 13e9,
    "turing-nlg-17b": 17e9, "gpt3-175b": 175e9, "gpt-1.3b": 1.3e9,
}  # fmt: skip


def test_models_have_the_parameters_that_were_published():
    assert {name: models.named(name).parameters for name in PUBLISHED} == PUBLISHED
    for name, parameters in NEARLY.items():
        assert models.named(name).parameters == pytest.approx(parameters, rel=0.03)
    assert {*PUBLISHED, *NEARLY} == {*models.MODELS}


@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_models_learn(style):
    model = models.Transformer(32, 2, 4, 64, 16, style, kv_heads=2, tied=style == "gpt")
    params = model.init(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (4, 17), 0, 64)

    @jax.jit
    def descend(params):
        loss, grads = jax.value_and_grad(model.loss)(params, tokens)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    losses = []
    for _ in range(20):
        params, loss = descend(params)
        losses.append(float(loss))
    assert losses[0] == pytest.approx(math.log(64), abs=0.1)
    assert losses[-1] < losses[0] - 0.1


def test_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match="3 heads must divide width 32"):
        models.Transformer(32, 2, 3)
    with pytest.raises(ValueError, match="layers=0 is not 1 or more"):
        models.Transformer(32, 0, 2)


@pytest.mark.parametrize(("name", "devices", "bandwidth"), [
    ("h100:8", 8, 450e9), ("h100:16", 16, 400e9), ("v100-32gb:16", 16, 150e9), ("v5e:4x4", 16, 90e9),
    ("v5p:2x2x4", 16, 180e9),
])  # fmt: skip
def test_machines(name, devices, bandwidth):
    found = hardware.machine(name)
    assert (found.devices, found.bandwidth) == (devices, bandwidth)
    assert found.resized(devices).devices == devices
    assert found.resized(64).devices == 64
