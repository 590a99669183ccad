"""Plain text for people: tables and sizes. Used by the plan, the report and the command line."""

import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import Box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_BOX = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)  # one rule under the head, nothing else
_NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+(e[-+]?\d+)?( ?(%|x|[KMGT]iB|B|s|ms))?", re.IGNORECASE)
_UNITS = (("KiB", 1), ("MiB", 1), ("GiB", 2), ("TiB", 2), ("PiB", 2))  # with digits after the point


def size(bytes: float) -> str:
    """Bytes for people, in binary units; exact below 10 KiB.

    >>> size(1234), size(12_595), size(2**22), size(1.25 * 2**30), size(250.123 * 2**30)
    ('1,234 B', '12.3 KiB', '4.0 MiB', '1.25 GiB', '250.1 GiB')
    """
    if abs(bytes) < 10 * 1024:
        return f"{bytes:,.0f} B"
    for power, (unit, digits) in enumerate(_UNITS, start=1):
        value = bytes / 1024**power
        text = f"{value:,.{1 if abs(value) >= 100 else digits}f} {unit}"
        if round(abs(value), digits) < 1024:
            break
    return text


def duration(seconds: float) -> str:
    """Seconds for people, with three digits.

    >>> duration(0.0421), duration(27.909), duration(1234), duration(2e-6)
    ('42.1 ms', '27.9 s', '1,234 s', '2.00 us')
    """
    scale, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
    value = seconds * scale
    return f"{value:,.{max(0, 3 - len(str(int(value))))}f} {unit}"


def count(number: int, noun: str) -> str:
    """A number of things, for people.

    >>> count(1, "device"), count(8, "simulated CPU device")
    ('1 device', '8 simulated CPU devices')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def render(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "", width: int = 120) -> str:
    """A table in plain text without colour codes, no line longer than ``width``.

    Columns that hold numbers or sizes are right-aligned. Where space is short, long cells such as paths go on in the
    next line; nothing is cut off unless not even the numbers fit.

    >>> print(render(["leaf", "bytes"], [["embed", 2048], ["head/kernel", size(512)]]))
     leaf          bytes
    ---------------------
     embed          2048
     head/kernel   512 B
    """
    cells = [[str(cell) for cell in row] for row in rows]
    for row in cells:
        if len(row) != len(columns):
            raise ValueError(f"a row of {len(row)} cells for {len(columns)} columns: {row!r}")
    table = Table(title=Text(title) if title else None, title_justify="left", box=_BOX, show_edge=False)
    for i, name in enumerate(columns):
        numbers = _is_numeric([row[i] for row in cells])
        table.add_column(
            Text(name), justify="right" if numbers else "left", no_wrap=numbers, overflow="crop" if numbers else "fold"
        )
    for row in cells:
        table.add_row(*map(Text, row))  # Text: a shape such as "[8, 4]" is no markup
    out = io.StringIO()
    # everything is given: what the terminal or its environment variables say must not change a table in a log
    console = Console(file=out, width=width, height=25, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _is_numeric(cells: Sequence[str]) -> bool:
    """Whether all cells are numbers, or sizes, or empty, and one at least is not empty."""
    filled = [cell for cell in cells if cell not in ("", "-")]
    return bool(filled) and all(_NUMBER.fullmatch(cell) for cell in filled)
