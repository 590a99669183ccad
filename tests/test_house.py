"""The house's own rules: import order, public names, documents that tell the truth, a clear line for a wrong Python."""

import ast
import dataclasses
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import zerojax

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "zerojax"
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p.name != "__init__.py")
README, CONTRIBUTING = ROOT / "README.md", ROOT / "CONTRIBUTING.md"

# A module imports only modules that stand before it. The rooms follow each other: core, cost, app; `units` is within
# the core, below `gradient`.
ORDER = [
    *("tables", "contracts", "config", "precision", "scaling", "compilers", "placement", "boxes", "plan", "optimizer"),
    *("collectives", "losses"),
    *(
        f"units.{name}"
        for name in ("jaxprs", "rowrules", "rows", "spread", "cutting", "passes", "loops", "gradient", "explanation")
    ),
    *("ways", "gradient", "state", "evaluation", "step", "equality", "linen", "nnx"),
    *(f"cost.{name}" for name in ("hlo", "buffers", "liveness", "hardware", "formulas", "traces", "prediction")),
    *(f"cost.{name}" for name in ("report", "targets", "models", "planning")),
    *("accounting", "targets"),  # doors: public names of what stands in a room
    *(f"app.{name}" for name in ("background", "comparison", "comparison_page", "demo", "trial", "run_folder", "cli")),
    "__main__",
]
ROOMS = ("units", "cost", "app")
ONLY = {f"cost.{name}": set() for name in ("hlo", "buffers", "hardware", "formulas")}  # less than the order would allow
ONLY |= {
    f"units.{name}": {"tables", "contracts", "placement", "precision", "collectives"}
    | {f"units.{other}" for other in ("jaxprs", "rowrules", "rows", "cutting", "passes", "loops", "gradient")}
    for name in ("jaxprs", "rowrules", "rows", "spread", "cutting", "passes", "loops", "gradient", "explanation")
}
MAX_LINES = 600


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


# ---- the package ----


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imports(path: Path) -> set[str]:
    """The package's modules that a file imports; ``zerojax`` stands for the package itself."""
    found = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, ["zerojax" if node.level else "", node.module]))
            is_room = base in ("zerojax", *(f"zerojax.{room}" for room in ROOMS))
            names = [f"{base}.{alias.name}" for alias in node.names] if is_room else [base]
        else:
            continue
        for name in names:
            first, _, module = name.partition(".")
            if first == "zerojax":
                found.add(module if module in ORDER else "zerojax")
    return found


def test_every_module_has_its_place_in_the_order():
    assert sorted(map(name_of, MODULES)) == sorted(ORDER)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_upwards(path):
    name = name_of(path)
    before = set(ORDER[: ORDER.index(name)])
    allowed = before & ONLY.get(name, before)
    if imports(PACKAGE / "__init__.py") <= before:
        allowed = allowed | {"zerojax"}
    assert imports(path) <= allowed


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_say_what_they_are_for(room):
    """In a few lines, and hold nothing else: names come from modules."""
    tree = parse(PACKAGE / room / "__init__.py")
    assert len(tree.body) == 1
    told = ast.get_docstring(tree) or ""
    assert len(told.splitlines()) <= 5
    assert "May import" in told


@pytest.mark.parametrize("path", [PACKAGE / "__init__.py", *MODULES], ids=name_of)
def test_no_assert_statements(path):
    assert [node.lineno for node in ast.walk(parse(path)) if isinstance(node, ast.Assert)] == []


@pytest.mark.parametrize("path", [PACKAGE / "__init__.py", *MODULES], ids=name_of)
def test_public_definitions_have_docstrings(path):
    tree = parse(path)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    public = [node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
    missing = [getattr(node, "name", "the module") for node in (tree, *public) if not ast.get_docstring(node)]
    assert missing == []


def test_public_names_exist_and_are_sorted():
    assert zerojax.__all__ == sorted(zerojax.__all__)
    assert [name for name in zerojax.__all__ if not hasattr(zerojax, name)] == []


def test_public_names_are_what_type_checkers_see():
    """They come on first use, from a table beside the imports that only type checkers follow."""
    lines = [node for node in ast.walk(parse(PACKAGE / "__init__.py")) if isinstance(node, ast.ImportFrom)]
    own = [node for node in lines if str(node.module).startswith("zerojax.")]
    seen = {alias.name: importlib.import_module(node.module) for node in own for alias in node.names}
    assert sorted(seen) == zerojax.__all__
    assert [name for name, module in seen.items() if getattr(zerojax, name) is not getattr(module, name)] == []
    assert set(dir(zerojax)) > {*zerojax.__all__, "__version__"}


def test_the_command_does_not_wait_for_jax():
    code = (
        "import sys, zerojax.app.cli; print({'jax', 'flax', 'optax', 'numpy', 'importlib.metadata'} & {*sys.modules})"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_the_command_has_the_trainees_defaults():
    from zerojax.app import cli, demo

    given = inspect.signature(cli._train).parameters
    wanted = {field.name: field.default for field in dataclasses.fields(demo.RunConfig) if field.name in given}
    assert {name: given[name].default for name in wanted} == wanted


def test_no_file_is_too_long():
    folders = (PACKAGE, ROOT / "tests", ROOT / "benchmarks", ROOT / "examples")
    lengths = {p: len(p.read_text(encoding="utf-8").splitlines()) for f in folders for p in f.rglob("*.py")}
    assert {str(p.relative_to(ROOT)): n for p, n in lengths.items() if n > MAX_LINES} == {}


def test_oldest_versions_are_the_lower_bounds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["demo"]
    lines = (ROOT / "requirements-oldest.txt").read_text(encoding="utf-8").splitlines()
    pins = {line for line in lines if line and not line.startswith("#")}
    jax = next(name for name in wanted if name.startswith("jax>="))
    assert pins == {name.replace(">=", "==") for name in [*wanted, jax.replace("jax", "jaxlib")]}


# ---- the documents ----


def code_blocks(text: str) -> list[tuple[str, int, str]]:
    """Language, number of the first line, and code of every fenced block."""
    blocks = re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```\s*$", text, re.MULTILINE | re.DOTALL)
    return [(b[1], text.count("\n", 0, b.start(2)) + 1, b[2]) for b in blocks]


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```\s*$", "", text, flags=re.MULTILINE | re.DOTALL)


def test_the_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 200


def test_readme_python_blocks_run(tmp_path):
    """All in one program, in their order, every line under its number in the README."""
    lines = []
    for language, number, code in code_blocks(README.read_text(encoding="utf-8")):
        if language == "python":
            lines += [""] * (number - 1 - len(lines)) + code.splitlines()
    assert lines, "README.md has no python block"
    (tmp_path / "README.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
    flags = [f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f]
    environment = {**os.environ, "XLA_FLAGS": " ".join(flags), "JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error::DeprecationWarning:__main__", "README.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("document", [README, CONTRIBUTING], ids=lambda p: p.name)
def test_paths_in_documents_exist(document):
    text = prose(document.read_text(encoding="utf-8"))
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    links += re.findall(r"<img[^>]* src=\"([^\"]+)\"", text)
    unlinked = re.sub(r"\[[^\]]*\]\([^)\s]+\)", "", text)  # a link says with its target where the file is
    quoted = re.findall(r"`([\w.-]+(?:/[\w.-]+)*/?)`", unlinked)
    quoted = [name for name in quoted if "/" in name or name.endswith((".py", ".md", ".toml"))]
    made = ("runs/", ".venv/")  # by the user's own commands
    names = {n for n in (*links, *quoted) if n and "://" not in n and not n.startswith(("mailto:", *made))}
    assert sorted(n for n in names if not (document.parent / n).exists()) == []


@pytest.mark.parametrize("document", [README, CONTRIBUTING], ids=lambda p: p.name)
def test_make_targets_in_documents_exist(document):
    text = document.read_text(encoding="utf-8")
    code = [line for language, _, block in code_blocks(text) if language != "python" for line in block.splitlines()]
    code += re.findall(r"^    (.*)", text, re.MULTILINE) + re.findall(r"`([^`\n]+)`", prose(text))
    commands = [re.match(r"(?:\$ )?(?:\w+=\S+ )*make((?: +[\w=.-]+)*)", line.strip()) for line in code]
    named = {word for match in commands if match for word in match[1].split() if "=" not in word}
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert named
    assert named <= targets


# ---- the Makefile ----


@pytest.fixture
def make(tmp_path):
    """Runs make in a folder with nothing but what it needs, with a Python of which only a shell script is there."""
    if not shutil.which("make"):
        pytest.fail("the tests of the Makefile need make")
    folder = tmp_path / "a folder with spaces"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)

    def run(script: str | None) -> subprocess.CompletedProcess:
        python = folder / "python"
        if script is not None:
            python.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
            python.chmod(0o755)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "VENV", "PYTHON"))}
        command = ["make", "demo", f"PYTHON={python}"]
        return subprocess.run(command, cwd=folder, env=inherited, capture_output=True, text=True)

    return run


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo Python 3.8.1", "needs Python 3.11 or newer, but .* is Python 3.8.1; name another: make PYTHON="),
        ("echo Python 2.7.18 >&2", "needs Python 3.11 or newer, but .* is Python 2.7.18; name another: make PYTHON="),
        ("echo one; echo two; exit 127", "needs Python 3.11 or newer, but .* is no working Python; name another"),
        (None, "needs Python 3.11 or newer, but .* is no working Python; name another"),
        ('case "$2" in *ensurepip*) exit 1;; *) echo True;; esac', "needs Python's venv module, but .* lacks it"),
    ],
    ids=["old", "ancient", "broken", "missing", "without venv"],
)
def test_make_tells_a_wrong_python_in_one_line(make, script, told):
    done = make(script)
    own = [line for line in done.stderr.splitlines() if not re.match(r"make(\[\d+\])?: ", line)]
    assert done.returncode != 0
    assert done.stdout == ""
    assert len(own) == 1
    assert re.match(f"zerojax {told}", own[0])
