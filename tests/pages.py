"""The pages of the documentation: their Python, which runs as one program a page, and what it prints.

A ``text`` block below a ``python`` block is what that block prints. To write them anew:

    python tests/pages.py
"""

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))

_BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```$(?:\n\n```text\n(?P<output>.*?)^```$)?", re.MULTILINE | re.DOTALL)


def blocks_of(page: Path) -> list[re.Match]:
    """The Python of a page, as matches with ``code``, and with ``output`` where the page says what it prints."""
    return list(_BLOCK.finditer(page.read_text(encoding="utf-8")))


def run(page: Path) -> Iterator[tuple[re.Match, str]]:
    """Every block of Python of a page, and what it prints; each runs when it is asked for."""
    names = {"__name__": page.stem}
    for block in blocks_of(page):
        before = block.string.count("\n", 0, block.start("code"))
        lines = "\n" * before + block["code"]  # so that errors name the page's lines
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(lines, str(page), "exec"), names)
        yield block, printed.getvalue()


def written_anew(page: Path) -> str:
    """The page with what its blocks print now."""
    text = page.read_text(encoding="utf-8")
    for block, printed in reversed(list(run(page))):
        if block["output"] is not None:
            text = text[: block.start("output")] + printed + text[block.end("output") :]
    return text


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    import conftest  # noqa: F401 (sets the devices, before JAX starts)

    for page in PAGES:
        page.write_text(written_anew(page), encoding="utf-8")
