"""sql: a query over the views of the index."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from cas_ckpt.cli.command import Pair, Settings, flag, verb
from cas_ckpt.cli.output import escaped, table

if TYPE_CHECKING:
    from cas_ckpt.ops.history.sql import SqlResult

_STDIN = "-"


@verb(
    "sql",
    examples=[
        "cas-ckpt sql 'SELECT name, kind, commit_id FROM refs'",
        'cas-ckpt sql "SELECT key, num_bytes FROM refs r JOIN entries USING (commit_no) WHERE r.name = :r" -p r=main',
        "cas-ckpt sql --csv 'SELECT * FROM commits'",
        "cas-ckpt sql --views",
    ],
)
@click.argument("query", required=False)
@click.option(
    "-p",
    "--parameter",
    "parameters",
    type=Pair("NAME=VALUE"),
    multiple=True,
    metavar="NAME=VALUE",
    help='The value of :NAME in the query. JSON numbers, null and "text" are that, all else is text. May be repeated.',
)
@flag("--csv", "as_csv", help="Print CSV.")
@flag("--views", "list_views", help="Print the views and their columns instead; no repository is needed.")
@click.option("--max-rows", type=click.IntRange(min=1), default=1_000_000, metavar="N", help="More rows are an error.")
@click.option("--max-bytes", type=click.IntRange(min=1), default=1 << 28, metavar="N", help="So are more bytes.")
@click.option("--timeout", "timeout_s", type=float, default=60.0, metavar="SECONDS", help="And more time.")
@click.pass_obj
def sql(
    settings: Settings, query: str | None, parameters: tuple[tuple[str, str], ...], as_csv: bool, list_views: bool,
    max_rows: int, max_bytes: int, timeout_s: float,
) -> None:  # fmt: skip
    """Ask the index in SQL: one query over its views, read-only. With - it is read from standard input.

    --views lists the views and their columns; docs/sql.md has questions to begin with. The dialect is that of the
    index: SQLite, or PostgreSQL where --index says so. With --json each row is an object. Bytes are shown in
    hexadecimal.
    """
    if as_csv and settings.json:
        raise click.UsageError("--csv or --json, not both")
    if list_views != (query is None):
        raise click.UsageError("wanted a QUERY, or --views")
    if query is None:
        _print_views(settings)
        return
    text = sys.stdin.read() if query == _STDIN else query
    given = {name: _value(value) for name, value in parameters}
    if len(given) < len(parameters):
        raise click.UsageError("a parameter is given twice")
    with settings.open() as repo:
        found = repo.sql(text, given, max_rows=max_rows, max_bytes=max_bytes, timeout_s=timeout_s)
    if as_csv:
        click.echo(_csv(found, is_terminal=settings.width is not None), nl=False)
    else:
        rows = [_with_hexadecimal(row) for row in found.to_dicts()] if settings.json else None
        settings.page(rows, _lines(found, settings.width))


def _print_views(settings: Settings) -> None:
    from cas_ckpt.index.views import VIEWS

    shown = [
        {
            "view": view.name,
            "about": view.about,
            "columns": [{"name": each.name, "kind": each.kind, "about": each.about} for each in view.columns],
        }
        for view in VIEWS
    ]
    lines = [("view", "column", "kind", "what"), ("", "", "", "")]
    for view in VIEWS:
        lines += [(view.name, "", "", f"a row for {view.about}")]
        lines += [("", each.name, each.kind, each.about) for each in view.columns]
    settings.page(shown, table(lines, width=settings.width))


def _value(text: str) -> Any:
    """A parameter: a number, null or quoted text of JSON; all else is text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if value is None or isinstance(value, (int, float, str)) else text


def _lines(found: SqlResult, width: int | None) -> Iterator[str]:
    numbers = [at for at in range(len(found.columns)) if all(isinstance(row[at], (int, float)) for row in found)]
    rows = [tuple(map(escaped, found.columns)), *(tuple(map(_cell, row)) for row in found)]
    yield from table(rows, right=frozenset(numbers if len(found) else ()), width=width)


def _with_hexadecimal(row: dict[str, Any]) -> dict[str, Any]:
    """`row`, with bytes as a table and CSV show them."""
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in row.items()}


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return value.hex() if isinstance(value, bytes) else escaped(str(value))


def _csv(found: SqlResult, *, is_terminal: bool) -> str:
    """The answer as CSV: nothing for null, bytes in hexadecimal. A terminal gets no control characters."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(found.columns)
    for row in found:
        writer.writerow([value.hex() if isinstance(value, bytes) else value for value in row])
    text = out.getvalue()
    return "\n".join(map(escaped, text.split("\n"))) if is_terminal else text
