"""``zerojax plan`` and ``zerojax bench``: what fits, searches, users' own models, mistakes, files."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from zerojax.app import comparison, comparison_page
from zerojax.cost import planning
from zerojax.cost.hardware import machine
from zerojax.cost.prediction import Prediction

ROOT = Path(__file__).parent.parent
SMALL = planning.transformer("gpt", width=512, layers=4, heads=8, vocabulary=1024, sequence=128)
TIGHT = planning.Setting(machine("v5e:2x4"))


def ask(setting, workload=SMALL):
    return planning.answer(workload, setting)


@pytest.fixture(autouse=True)
def small_devices(monkeypatch):
    """Devices with 256 MiB, so that small models are large."""
    from zerojax.cost import hardware

    tiny = dataclasses.replace(hardware.ACCELERATORS["v5e"], memory_bytes=2**28)
    monkeypatch.setitem(hardware.ACCELERATORS, "v5e", tiny)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_memory_never_rises_with_the_stage(accumulate):
    answers = [ask(dataclasses.replace(TIGHT, stage=stage, accumulate=accumulate)) for stage in range(4)]
    peaks = [one.peak for one in answers]
    assert peaks == sorted(peaks, reverse=True)
    text = f"{planning.table(answers)}\n{planning.notes(answers)}"
    assert max(map(len, text.splitlines())) <= 120
    for one in answers:
        assert sum(planning.parts(one).values()) == one.peak
        assert one.fits == (one.peak <= 2**28 * 0.95)
        assert one.bound.seconds == max(one.bound.compute, one.bound.memory, one.bound.links)


def formula(setting):
    """An answer of a model whose state takes 12 GiB over the devices from stage 1 on, and a row 100 MiB."""
    state = 12 * 2**30 // (setting.machine.devices if setting.stage else 1)
    whole = (3 - setting.stage) * 2**28
    zero = dict.fromkeys((field.name for field in dataclasses.fields(Prediction)), 0)
    predicted = Prediction(**zero | {"optimizer": state, "gathered": whole, "activations": setting.rows * 100 * 2**20})
    return planning.Answer("model", setting, predicted, None, 0)


@pytest.mark.parametrize("guess", [1, 7, 5000])
@pytest.mark.parametrize("devices", ["1x8", "8x8"])
def test_the_most_rows(guess, devices):
    setting = planning.Setting(machine(f"v6e:{devices}"))
    best, beyond = planning.find("batch", formula, setting, guess)
    assert best.fits
    assert not beyond.fits
    assert beyond.setting.rows == best.setting.rows + 1
    told = planning.told("batch", 3, planning.Found(best, beyond))
    assert f"{beyond.setting.rows} rows would need" in told
    assert "of which rest" in told


def test_the_fewest_devices():
    best, beyond = planning.find("devices", formula, TIGHT)
    assert best.fits
    assert not beyond.fits
    assert best.setting.machine.devices == 2 * beyond.setting.machine.devices == 128


@pytest.mark.parametrize(("rows", "stage"), [(1, 0), (196, 1), (305, 2)])
def test_the_lowest_stage(rows, stage):
    setting = planning.Setting(machine("v6e:8x8"), rows=rows)
    best, beyond = planning.find("stage", formula, setting)
    assert best.setting.stage == stage, best
    assert beyond is None or beyond.setting.stage == stage - 1


def test_nothing_fits():
    for what in ("stage", "batch", "devices"):
        found = planning.find(what, lambda s: formula(dataclasses.replace(s, rows=10**6)), TIGHT)
        assert found.best is None
        assert "nothing fits" in planning.told(what, 3, found)
    with pytest.raises(ValueError, match="'rows' is not one of 'batch', 'devices', 'stage'"):
        planning.find("rows", formula, TIGHT)


def test_what_cannot_be_divided_is_told():
    odd = planning.transformer("gpt", width=513, layers=2, heads=3, vocabulary=1023, sequence=100)
    one = ask(TIGHT, odd)
    assert one.whole_bytes > 0
    assert "stay whole on every device" in planning.notes([one])


# ---- the command ----


def zerojax(*arguments, folder, env=()):
    code = "from zerojax.app.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", **dict(env)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=1200)


MODULE = """
import jax, jax.numpy as jnp, optax

def make():
    init_fn = lambda key: {"w": jax.random.normal(key, (256, 256))}
    return init_fn, lambda p, x: jnp.mean((x @ p["w"]) ** 2), optax.sgd(0.1), jnp.ones((64, 256))

def wrong():
    return 5
"""


def test_the_command_answers_for_a_users_model(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    done = zerojax("plan", "mine:make", "--on", "h100:8", "--json", "out.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "mine:make on h100:8, 8 rows a device" in done.stdout
    answers = json.loads((tmp_path / "out.json").read_text())
    assert [one["setting"]["stage"] for one in answers] == [0, 1, 2, 3]
    assert [one["predicted"]["parameters"] for one in answers] == [2**18, 2**15, 2**15, 2**15]
    assert answers[3]["wire_bytes"] == 2**16 * (2 + 2 + 4) * 7 / 8


@pytest.mark.parametrize(("arguments", "words"), [
    (["gpt-5"], "known: gpt2, gpt2-medium"), (["gpt2", "--on", "b7:8"], "no target"),
    (["gpt"], "needs --width, --layers, --heads"), (["mine:wrong"], r"must return \(init_fn, loss_fn, tx, batch\)"),
    (["mine:nothing"], "cannot import"), (["mine:make", "--width", "8"], "--width is for named models"),
    (["mine:jnp"], "mine:jnp is no function"),
    (["mine:make", "--accumulate", "3"], "64 rows of mine:make cannot be divided over 8 devices x 3 micro-batches"),
    (["gpt2", "--find", "rows"], "not one of 'batch'"), (["gpt2", "--precision", "c=int8"], "int8"),
    (["gpt2", "--stage", "4"], "stage=4"), (["gpt2", "--rows", "0"], "rows=0"),
    (["mine:make", "--accumulate", "0"], "accumulate=0"), (["gpt2", "--find", "stage", "--stage", "3"], "leave it out"),
])  # fmt: skip
def test_mistakes_are_told_in_a_line(arguments, words, tmp_path, monkeypatch, capsys):
    from zerojax.app import cli

    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *arguments])
    assert ended.value.code == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("zerojax: ")
    assert re.search(words, told)


def test_a_search_by_the_command(tmp_path, capsys):
    from zerojax.app import cli

    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "gpt3-175b", "--on", "h100:64", "--find", "devices", "--stage", "3"])
    assert ended.value.code == 0
    assert "stage 3: 64 devices; 32 devices would need" in capsys.readouterr().out


# ---- the comparison ----

MADE = ROOT / "docs" / "comparison.json"


def test_the_page_in_the_docs_is_the_generated_one():
    result = json.loads(MADE.read_text())
    assert (MADE.parent / "comparison.md").read_text() == comparison_page.page(result)
    assert {row["stage"] for row in result["measured"]} == set(range(4))
    assert {row["on"] for row in result["compiled"]} == {"h100:8", "h100:64", "v5p:2x2x4"}


def test_what_the_page_claims():
    """Memory falls with the stage, nothing else trains, and what was computed is computed again."""
    result = json.loads(MADE.read_text())
    for rows in (result["compiled"][i : i + 4] for i in range(0, 12, 4)):
        peaks = [row["peak"] for row in rows]
        assert peaks == sorted(peaks, reverse=True)
        assert all(row["peak"] == pytest.approx(row["predicted"], rel=0.15) for row in rows)
    losses = [row["final_loss"] for row in result["measured"]]
    assert max(losses) - min(losses) < 1e-4
    for row in result["largest"][4:6]:
        assert comparison.largest(row["on"], row["stage"])["parameters"] == row["parameters"]


def test_the_files(tmp_path):
    result = json.loads(MADE.read_text())
    written = comparison_page.write(result, tmp_path / "new")
    names = {path.name for path in written}
    assert names == {"comparison.md", "comparison.json", "measured.csv", "compiled.csv", "largest.csv", "fewest.csv",
                     "memory.png", "time.png", "largest.png"}  # fmt: skip
    for path in written:
        if path.suffix == ".png":
            assert int.from_bytes(path.read_bytes()[16:20]) == 1200  # pixels wide
    result["compiled"], result["not_compiled"] = [], "no compiler"
    page = comparison_page.page(result)
    assert "Not compiled here: no compiler" in page
    comparison_page.write(result, tmp_path / "without")


def test_a_comparison_that_cannot_be_written(tmp_path, capsys):
    from zerojax.app import cli

    (tmp_path / "kept.txt").write_text("mine")
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "--run-dir", str(tmp_path)])
    assert ended.value.code == 2
    assert "is not empty" in capsys.readouterr().err
    with pytest.raises(ValueError, match="rows=8 must be a multiple of 32"):
        comparison.Settings(rows=8)


@pytest.mark.night
def test_the_whole_comparison(tmp_path):
    done = zerojax("bench", "--steps", "2", "--targets", "none", "--run-dir", "out", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "# No ZeRO against stages 1, 2 and 3" in done.stdout
    result = json.loads((tmp_path / "out" / "comparison.json").read_text())
    for k in (1, 4):
        rows = [row for row in result["measured"] if row["accumulate"] == k and not row["remat"]]
        assert [row["peak"] for row in rows] == sorted((row["peak"] for row in rows), reverse=True)
