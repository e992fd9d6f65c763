"""How the story is printed: headings, sizes, aligned columns."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any


def heading(text: str) -> None:
    """A line that begins a chapter."""
    print(f"\n\033[1m{text}\033[0m" if _is_terminal() else f"\n{text}\n{'-' * len(text)}", flush=True)


def say(text: str = "") -> None:
    """One indented line, at once."""
    print(f"  {text}", flush=True)


def _is_terminal() -> bool:
    return sys.stdout.isatty()


def size(num_bytes: float) -> str:
    """Bytes as a person reads them: 39.1 MB."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 999.5 or unit == "MB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return ""


def table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Rows under their titles, text to the left and all else to the right."""
    cells = [[str(cell) for cell in row] for row in (titles, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = [isinstance(cell, str) and cell[:1].isalpha() for cell in (rows[0] if rows else titles)]
    for at, row in enumerate(cells):
        columns = zip(row, widths, left, strict=True)
        say("  ".join(text.ljust(width) if to_left else text.rjust(width) for text, width, to_left in columns).rstrip())
        if at == 0:
            say("  ".join("-" * width for width in widths))
