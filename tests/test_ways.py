"""Every transformation of optax through Flax's own forms of a step, linen's and NNX's, as on one device.

The library's own step is in `test_optimizers.py`, and the table of the transformations in `optimizers.py`.
"""

import optimizers
import pytest
import ways

# States with fields that are not in the order of their names, of no parameter's shape, with numbers of the parameters,
# with others inside, or with holes.
FEW = (
    *("adafactor", "rprop", "contrib.cocob", "contrib.schedule_free_sgd", "MultiSteps", "apply_if_finite"),
    *("inject_hyperparams", "masked", "multi_transform"),
)
PARTS = 6
# Norms of whole arrays, summed in another order over shards; all other initial states are the same to the last bit.
BORN_OF_NORMS = {"contrib.dog", "scale_by_distance_over_gradients", "snapshot"}


def check(way, names, stage, leaves):
    found = ways.differences(way, ways.served(way, names), stage, leaves)
    wrong = {}
    for what, by_path in found.items():
        for path, error in by_path.items():
            name = path.split("/")[0]
            exact = what == "born" and name not in BORN_OF_NORMS
            if not error <= (0 if exact else optimizers.TABLE[name].tolerance):
                wrong[what, path] = error
    assert wrong == {}


@pytest.mark.parametrize(("way", "stage"), [("linen", 0), ("nnx", 3)])
def test_states_of_all_forms_through_flax(way, stage):
    check(way, list(optimizers.available(dict.fromkeys(FEW))), stage, ("matrix",))


def turns():
    for way in ("linen", "nnx"):
        for part in range(PARTS):
            for stage in (0, 3):
                rare = pytest.mark.long if (part % 2 == 0) == (stage == 0) else pytest.mark.night
                yield pytest.param(way, stage, part, marks=rare, id=f"{way}-{stage}-{part}")


@pytest.mark.filterwarnings("ignore:.* is deprecated:DeprecationWarning")  # optax still exports these
@pytest.mark.parametrize(("way", "stage", "part"), list(turns()))
def test_all_through_flax(way, stage, part):
    """Each at stages 0 and 3: one of them in the long run, the other at night."""
    check(way, list(optimizers.available(optimizers.TABLE))[part::PARTS], stage, ("matrix", "odd", "scalar"))
