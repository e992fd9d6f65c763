"""The parts of views: columns, recursive queries, and their text in the words of each database.

    columns        of a kind and with what they are about; times as text and in seconds, objects as id and number
    WORD[...]      what SQLite and PostgreSQL say otherwise
    Each           a query that follows references for one row of what stands before it at a time

Invariant: both databases give equal rows of equal tables. Must not know which views there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from cas_ckpt.index.db_errors import TOO_LARGE

TEXT, INTEGER, FLOAT = "text", "integer", "float"

POSTGRES = "postgresql"

_LATEST_US: Final = 253_402_300_799_999_999
"""The end of the year 9999: later times are numbers only."""

_WORDS: Final[Mapping[str, tuple[str, str]]] = {
    "HEX": ("lower(hex({0}))", "encode({0}, 'hex')"),
    "HEX_IF_ANY": ("CASE WHEN {0} IS NOT NULL THEN lower(hex({0})) END", "encode({0}, 'hex')"),
    "TIME": (
        f"CASE WHEN {{0}} BETWEEN 0 AND {_LATEST_US} "
        "THEN strftime('%Y-%m-%d %H:%M:%S', {0} / 1000000, 'unixepoch') END",
        f"CASE WHEN {{0}} BETWEEN 0 AND {_LATEST_US} "
        "THEN to_char(to_timestamp({0} / 1000000) AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS') END",
    ),
    "SECONDS": ("({0} / 1000000.0)", "({0}::double precision / 1000000)"),
    "EXACT": ("{0}", '({0}) COLLATE "C"'),
    "STAT": ("json_extract(c.stats, '$.{0}')", "substring(c.stats from '[{{,]\"{0}\":(-?[0-9]+)')::bigint"),
    "DEEPEST_FIRST": ("ORDER BY {0} DESC", ""),
    "AT_MOST": ("LIMIT {0}", ""),
    "TOO_LARGE": (f"json_extract('[]', '{TOO_LARGE}' || {{0}}) = 0", f"CAST('{TOO_LARGE}' || {{0}} AS INTEGER) = 0"),
    "FIRST_LINE": ("rtrim(substr({0}, 1, instr({0} || char(10), char(10)) - 1))", "rtrim(split_part({0}, chr(10), 1))"),
    "ENTRIES_OF": ("t_entries", "LATERAL (SELECT i.* FROM t_entries i WHERE i.node_id = {0} OFFSET 0)"),
    "FEW": ("likelihood({0}, 0.0001)", "{0}"),
}
"""Word -> its SQL in SQLite and in PostgreSQL. HEX: of what is never null, as SQLite makes "" of null. EXACT: text that
is compared byte by byte. FEW: a condition that few rows meet, so that it is the one to begin with: without
statistics SQLite takes all tables for equally long. FIRST_LINE: of a text. ENTRIES_OF: t_entries where the node is
asked for as well: PostgreSQL, which takes every walk for a long one, would read the whole table for each commit.
STAT: one of the numbers in the stats of a commit. DEEPEST_FIRST: in which order, by a column, a recursive query of
SQLite goes on: else a whole level waits in memory. AT_MOST: rows of a recursive query, which SQLite 3.53 may make
whole before it looks at what comes of it; PostgreSQL makes no more than are taken. TOO_LARGE: ends the query, and
says why by a text and the number of a row, on which it must depend."""

_WORD = re.compile(rf"\b({'|'.join(_WORDS)})\[([^\[\]]*)\]")


def in_words_of(dialect: str, sql: str) -> str:
    """`sql` with each WORD[argument] as the dialect has it."""
    place, before = int(dialect == POSTGRES), ""
    while before != sql:
        before, sql = sql, _WORD.sub(lambda found: _WORDS[found[1]][place].format(found[2]), sql)
    return sql


@dataclass(frozen=True, slots=True)
class ViewColumn:
    """A column of a view.

    Attributes:
        kind: "text", "integer" or "float".
        sql: What it is made of.
    """

    name: str
    kind: str
    sql: str
    about: str


@dataclass(frozen=True, slots=True)
class Each:
    """A recursive query that is made for each row of what stands before it.

    Attributes:
        recursion: name(columns) AS (...), which may name what stands before it.
        postgres: The same for PostgreSQL, where that has another way.
        source: What follows FROM, to take its rows.
        columns: Those that it is asked for.
    """

    recursion: str
    source: str
    columns: tuple[str, ...]
    postgres: str | None = None

    def text(self, dialect: str) -> str:
        """It as an item of FROM."""
        names = ", ".join(self.columns)
        recursion = self.postgres if self.postgres is not None and dialect == POSTGRES else self.recursion
        body = f"WITH RECURSIVE {in_words_of(dialect, recursion)} SELECT"
        if dialect == POSTGRES:
            return f"LATERAL ({body} {names} FROM {self.source}) each"
        row = names if len(self.columns) == 1 else f"json_array({names})"
        return f"json_each(({body} json_group_array({row}) FROM {self.source})) each"

    def column(self, name: str, dialect: str) -> str:
        """One of its columns."""
        if dialect == POSTGRES:
            return f"each.{name}"
        return "each.value" if len(self.columns) == 1 else f"json_extract(each.value, '$[{self.columns.index(name)}]')"


class View:
    """A view.

    Attributes:
        about: What it has a row for.
        source: What follows FROM. In it, and in columns, EACH stands for `each`, EACH.name for a column of that.
    """

    def __init__(self, name: str, about: str, source: str, *columns: ViewColumn, each: Each | None = None) -> None:
        self.name, self.about, self.source, self.columns, self.each = name, about, source, columns, each

    def text(self, dialect: str) -> str:
        """The statement that makes it."""
        columns = ",\n    ".join(f"{column.sql} AS {column.name}" for column in self.columns)
        body = in_words_of(dialect, f"CREATE VIEW {self.name} AS SELECT\n    {columns}\nFROM {self.source}")
        if self.each is not None:
            for name in self.each.columns:
                body = body.replace(f"EACH.{name}", self.each.column(name, dialect))
            body = body.replace("EACH", self.each.text(dialect))
        return body


# --- what columns are made of -----------------------------------------------------------------


def text(name: str, sql: str, about: str) -> ViewColumn:
    """A column of text."""
    return ViewColumn(name, TEXT, sql, about)


def integer(name: str, sql: str, about: str) -> ViewColumn:
    """A column of whole numbers."""
    return ViewColumn(name, INTEGER, sql, about)


def real(name: str, sql: str, about: str) -> ViewColumn:
    """A column of numbers."""
    return ViewColumn(name, FLOAT, sql, about)


def moment(name: str, sql: str, about: str) -> tuple[ViewColumn, ViewColumn]:
    """A time in microseconds, as text and in seconds."""
    return text(name, f"TIME[{sql}]", about), real(f"{name}_s", f"SECONDS[{sql}]", "the same in seconds since 1970")


def one(name: str, number: str, about: str) -> tuple[ViewColumn, ViewColumn]:
    """Id and number of an object, of its number."""
    digest = f"(SELECT HEX[n.digest] FROM t_objects n WHERE n.object_id = {number})"
    return text(f"{name}_id", digest, about), integer(f"{name}_no", number, "its number")


def one_called(name: str, digest: str, about: str) -> tuple[ViewColumn, ViewColumn]:
    """Id and number of an object, of its digest."""
    return text(f"{name}_id", f"HEX_IF_ANY[{digest}]", about), integer(f"{name}_no", number_of(digest), "its number")


def number_of(digest: str) -> str:
    """The number of an object, of its digest."""
    return f"(SELECT n.object_id FROM t_objects n WHERE n.digest = {digest})"


def named(number: str, names: Mapping[int, str]) -> str:
    """A number as its name."""
    return f"CASE {number} {' '.join(f'WHEN {each} THEN {quoted([name])}' for each, name in names.items())} END"


def quoted(names: Iterable[str]) -> str:
    """Names as texts of SQL."""
    return ", ".join(f"'{name}'" for name in sorted(names))
