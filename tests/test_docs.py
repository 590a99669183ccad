"""The documentation tells the truth: its Python runs, its outputs, names, paths, links and formulas are right."""

import dataclasses
import importlib
import inspect
import re

import jax
import optax
import pytest
from flax import nnx
from pages import PAGES, ROOT, blocks_of, run
from test_house import code_blocks, prose

import zerojax
from zerojax import accounting

WITH_PYTHON = [page for page in PAGES if "```python" in page.read_text(encoding="utf-8")]
OF_COMPILERS = 0.1  # by how much a compiler's figures may differ from those of the versions that a page was made with
ROOTS = {"zerojax": zerojax, "jax": jax, "optax": optax, "nnx": nnx, "plan": zerojax.Plan, "state": zerojax.TrainState}
NUMBER = r"[-+]?[\d,]*\.?\d+"


def of_each(pages):
    return pytest.mark.parametrize("page", pages, ids=lambda page: page.stem)


def text_of(page) -> str:
    return page.read_text(encoding="utf-8")


# ---- what runs ----


def same(printed: str, written: str) -> bool:
    """The same words, and numbers as near as two compilers' are; the width of columns does not count."""
    ours, theirs = (re.sub(r"-{3,}", "", text).split() for text in (printed, written))
    return len(ours) == len(theirs) and all(map(_same_word, ours, theirs))


def _same_word(ours: str, theirs: str) -> bool:
    if ours == theirs or not (re.fullmatch(NUMBER, ours) and re.fullmatch(NUMBER, theirs)):
        return ours == theirs
    return float(ours.replace(",", "")) == pytest.approx(float(theirs.replace(",", "")), rel=OF_COMPILERS)


def test_outputs_are_compared():
    assert same("peak   1.02 MiB\n--------", "peak 1.0 MiB\n----")
    assert not same("peak 1.2 MiB", "peak 1.0 MiB")
    assert not same("peak 1.0 KiB", "peak 1.0 MiB")
    assert not same("peak 1.0 MiB", "peak 1.0 MiB more")


@of_each(WITH_PYTHON)
def test_python_runs_and_prints_what_the_page_says(page):
    for block, printed in run(page):
        written = block["output"]
        assert same(printed, written or ""), f"{page.name} says\n{written}\nand its Python prints\n{printed}"


@of_each(PAGES)
def test_every_block_is_known(page):
    """None looks as if it ran and does not, and no output stands where nothing prints it."""
    blocks = code_blocks(text_of(page))
    languages = [language for language, _, _ in blocks]
    assert {*languages} <= {"python", "text", ""}  # the last are directives
    assert [code for language, _, code in blocks if language == "python"] == [b["code"] for b in blocks_of(page)]
    assert languages.count("text") == sum(block["output"] is not None for block in blocks_of(page))


# ---- what is named ----


def quoted(page) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(text_of(page)))


@of_each(PAGES)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(text_of(page))):
        name, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = page.parent / name if name else page
        assert target.is_file(), link
        if target.suffix != ".md":
            continue
        headings = re.findall(r"^#+ (.*)$", prose(text_of(target)), re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, link


@of_each(PAGES)
def test_paths_and_commands_are_there(page):
    lines = quoted(page) + re.findall(r"^    (.+)$", prose(text_of(page)), re.MULTILINE)
    words = [word for line in lines for word in re.sub(r"\w+\(.*", "", line).split()]
    paths = {word for word in words if re.fullmatch(r"(zerojax|tests|docs|examples|benchmarks)/[\w./-]+", word)}
    assert sorted(path for path in paths if not (ROOT / path).exists()) == []
    named = {match[1] for line in lines if (match := re.match(r"make ([\w-]+)", line))}
    assert named <= set(re.findall(r"^([a-z][a-z-]*):", text_of(ROOT / "Makefile"), re.MULTILINE))


def resolve(name: str):
    """The object of a dotted name, its modules imported on the way."""
    first, *rest = name.split(".")
    found = ROOTS[first]
    for part in rest:
        if inspect.ismodule(found) and not hasattr(found, part):
            importlib.import_module(f"{found.__name__}.{part}")
        fields = getattr(found, "__dataclass_fields__", {})
        found = fields[part] if part in fields else getattr(found, part)
    return found


@of_each(PAGES)
def test_names_are_there(page):
    """Dotted ones in quotes, and the settings that are given to ours."""
    for text in quoted(page):
        for name in re.findall(rf"(?<![\w./-])(?:{'|'.join(ROOTS)})(?:\.[A-Za-z_]\w*)+", text):
            resolve(name)
        for owner, setting in re.findall(r"\b(ZeroConfig|Precision|LossScale)\((\w+)", text):
            assert setting in {field.name for field in dataclasses.fields(getattr(zerojax, owner))}, text


def test_the_glossary_names_what_is_there():
    rows = re.findall(r"^\|.*\| ([^|]*) \|$", text_of(ROOT / "docs/glossary.md"), re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    settings = {field.name for owner in (zerojax.ZeroConfig, zerojax.Precision) for field in dataclasses.fields(owner)}
    assert len(rows) > 20
    assert names
    assert names <= settings


def test_the_reference_has_every_public_name():
    text = text_of(ROOT / "docs/api.md")
    assert sorted(re.findall(r"^\.\. auto(?:function|class):: zerojax\.(\w+)$", text, re.MULTILINE)) == zerojax.__all__
    for module in re.findall(r"^\.\. automodule:: (\S+)$", text, re.MULTILINE):
        importlib.import_module(module)


@pytest.mark.parametrize("name", ["linen_gpt", "nnx_gpt"])
def test_the_quickstart_has_the_lines_that_change(name):
    """Those of the examples; dots stand for anything."""
    twin, ours = (text_of(ROOT / "examples" / f"{folder}{name}.py") for folder in ("plain/", ""))
    flavour = name.partition("_")[0]
    section = text_of(ROOT / "docs/quickstart.md").split("\n## Flax ")[1 if flavour == "linen" else 2]
    rows = re.findall(r"^\| (`.*`)? ?\| (`.*`) \|$", section, re.MULTILINE)
    for texts, (has, lacks) in zip(zip(*rows, strict=True), ((twin, ours), (ours, twin)), strict=True):
        for cell in filter(None, texts):
            pattern = ".*".join(map(re.escape, cell.strip("`").split("...")))
            assert re.search(pattern, has), cell
            assert not re.search(pattern, lacks), cell
    added = {*ours.splitlines()} - {*twin.splitlines()}
    assert len(rows) == len(added)


# ---- formulas and figures ----


def value(formula: str, psi: float, n: int, k: int) -> float:
    """Of a cell such as ``4 Ψ + 12 Ψ / N`` or ``(1 + k) Ψ``; what is said in words counts nothing."""
    factors = re.sub(r"\+ the.*", "", formula).replace("k Ψ", "* k * Ψ")
    python = re.sub(r"(?<=[\d)]) Ψ", " * Ψ", factors)
    return eval(python, {"Ψ": psi, "N": n, "k": k})


@pytest.mark.parametrize(("n", "k"), [(8, 1), (64, 4)])
def test_the_formulas_are_those_of_accounting(n, k):
    rows = re.findall(
        r"^\| ([0-3]) \| (.*Ψ.*) \| (.*Ψ.*) \| (.*Ψ.*) \|$", text_of(ROOT / "docs/stages.md"), re.MULTILINE
    )
    assert [int(stage) for stage, *_ in rows] == [0, 1, 2, 3]
    for stage, *cells in ((int(row[0]), *row[1:]) for row in rows):
        right = [
            accounting.at_rest_bytes(1e6, n, stage),
            accounting.model_state_bytes(1e6, n, stage),
            accounting.communication_volume(1e6, stage, accumulate=k),
        ]
        assert [value(cell, 1e6, n, k) for cell in cells] == pytest.approx(right, rel=1e-12)


def test_figures_of_the_case_studies_are_printed_there():
    """Those with a unit; the others are the models' own, and arguments of the Python that prints them."""
    page = ROOT / "docs/case_studies.md"
    figures = re.findall(rf"({NUMBER})[ -](?:GB/s|GB|TFLOP/s|s|days|heads|tokens|words|layers)\b", prose(text_of(page)))
    printed = "".join(output for _, output in run(page))
    code = "".join(block for language, _, block in code_blocks(text_of(page)) if language == "python")
    known = {*re.findall(NUMBER, printed), *re.findall(NUMBER, code.replace("_", ",")), "32"}  # GB of a V100
    assert len(figures) > 10
    assert sorted(set(figures) - known) == []
