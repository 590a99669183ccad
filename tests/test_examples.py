"""Every example runs on eight devices, computes what its ordinary twin does, and is at most five lines away from it."""

import difflib
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = ("linen_gpt", "mlp_digits", "nnx_gpt")
MOST_LINES = 5
STEPS = 2
ENVIRONMENT = os.environ  # with eight devices, compiled in haste, as conftest.py has it


def losses(script: Path) -> list[float]:
    """What the script prints as its loss in each of `STEPS` steps."""
    paths = [str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(script), "--steps", str(STEPS)],
        env={**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", done.stdout, re.MULTILINE)]


def test_every_example_has_a_twin():
    """So that none is left out of the tests below."""
    twins = {path.stem for path in (FOLDER / "plain").glob("*.py")}
    assert twins == set(EXAMPLES)
    assert all((FOLDER / f"{name}.py").is_file() for name in EXAMPLES)


@pytest.mark.parametrize(
    "name", [name if "gpt" not in name else pytest.param(name, marks=pytest.mark.long) for name in EXAMPLES]
)
def test_example_computes_what_its_twin_does(name):
    ours, twins = losses(FOLDER / f"{name}.py"), losses(FOLDER / "plain" / f"{name}.py")
    assert len(ours) == STEPS
    assert all(map(math.isfinite, ours))
    assert ours == pytest.approx(twins, rel=1e-5)
    assert ours[1] < ours[0]


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_at_most_five_lines_away_from_its_twin(name):
    twin, ours = ((folder / f"{name}.py").read_text().splitlines() for folder in (FOLDER / "plain", FOLDER))
    added = [line for line in difflib.ndiff(twin, ours) if line.startswith("+ ")]
    assert 0 < len(added) <= MOST_LINES, added
