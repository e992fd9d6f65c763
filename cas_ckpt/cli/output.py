"""Text and JSON for people and programs.

Invariant: no byte of a repository reaches a terminal as a control character.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import click

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 and C1 controls, marks that turn the direction of text, and halves of surrogate pairs."""

LINES_PER_WRITE = 2000


def escaped(text: str) -> str:
    """`text` with every control character written out."""
    return text if text.isprintable() else _CONTROL.sub(_written_out, text)


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def subject(message: str) -> str:
    """The first line of a commit message, escaped."""
    return escaped(message.split("\n", 1)[0].rstrip())


def number(value: float) -> str:
    """A metric: short, and without losing that it is a number."""
    return f"{value:.6g}"


def shown_metrics(metrics: Mapping[str, float], between: str) -> str:
    """The metrics as name=number."""
    return between.join(f"{escaped(name)}={number(value)}" for name, value in metrics.items())


def cut(text: str, width: int | None) -> str:
    """`text` in at most `width` characters, so that a terminal shows one line of it; None: no limit."""
    return text if width is None or len(text) <= width else text[: max(width - 1, 0)] + "…"


def table(
    rows: Iterable[Sequence[str]], *, right: frozenset[int] = frozenset(), width: int | None = None
) -> list[str]:
    """Lines of aligned columns.

    Args:
        right: Columns that are aligned at their right side.
        width: Characters that a line may have; longer ones are cut.
    """
    cells = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(
            cell.rjust(size) if at in right else cell.ljust(size)
            for at, (cell, size) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )
    return [cut(line, width) for line in lines]


def echo(lines: Iterable[str], *, colour: bool = False) -> None:
    """Print lines, many in one write; what makes them is not asked for all of them first."""
    rest = iter(lines)
    while some := list(islice(rest, LINES_PER_WRITE)):
        click.echo("\n".join(some), color=colour or None)


def echo_json(value: Any) -> None:
    """Print `value` as JSON."""
    click.echo(json.dumps(plain(value), ensure_ascii=True, indent=2))


def plain(value: Any) -> Any:
    """`value` as what JSON has; dataclasses become objects, anything else its repr."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return plain(value.tolist()) if hasattr(value, "tolist") else repr(value)
