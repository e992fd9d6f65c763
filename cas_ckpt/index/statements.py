"""Bulk statements that SQLite and PostgreSQL both take: many keys in, many rows in.

Invariant: keys are asked for and rows are put in ascending order, which is three times as fast
as any order. Knows no table.

What every commit asks and writes goes to SQLite's driver as text that SQLAlchemy compiled once: to
build, compile and bind a statement anew costs ten times what SQLite needs for it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from sqlalchemy import ColumnElement, Connection, Dialect, Row, Select, Table
from sqlalchemy.dialects import sqlite

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql

    Upsert: TypeAlias = sqlite.Insert | postgresql.Insert

KEYS_PER_QUERY = 250
"""Measured: more keys in one IN list are slower on SQLite."""

ROWS_PER_FETCH = 1000


def rows_for(
    connection: Connection, query: Select[Any], column: ColumnElement[Any], keys: Iterable[Any]
) -> Iterator[Row[Any]]:
    """The rows of `query` whose `column` is one of `keys`, batch by batch."""
    for batch in batches(sorted(set(keys)), KEYS_PER_QUERY):
        yield from connection.execute(query.where(column.in_(batch))).all()


@dataclass(frozen=True, eq=False)
class KeyQuery:
    """A question that is asked again and again with other keys; made once, when a module is imported.

    Attributes:
        query: What is asked.
        column: Whose values the keys are.
    """

    query: Select[Any]
    column: ColumnElement[Any]

    def rows(self, connection: Connection, keys: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
        """The rows whose column is one of `keys`, as plain tuples."""
        if not connection.dialect.positional:
            yield from map(tuple, rows_for(connection, self.query, self.column, keys))
            return
        for batch in batches(sorted(set(keys)), KEYS_PER_QUERY):
            num_keys = min(1 << (len(batch) - 1).bit_length(), KEYS_PER_QUERY)
            text, fixed = _asking(self, connection.dialect, num_keys)
            asked = [*fixed, *batch, *[batch[-1]] * (num_keys - len(batch))]
            yield from _driver(connection).execute(text, asked).fetchall()


@lru_cache(maxsize=256)
def _asking(asked: KeyQuery, dialect: Dialect, num_keys: int) -> tuple[str, tuple[Any, ...]]:
    """The text of the question with `num_keys` places, and what the query itself binds before them."""
    text, values = _compiled(asked.query.where(asked.column.in_([None] * num_keys)), dialect)
    return text, values[: len(values) - num_keys]


@lru_cache(maxsize=64)
def _text(statement: Select[Any], dialect: Dialect) -> tuple[str, tuple[Any, ...]]:
    return _compiled(statement, dialect)


def _compiled(statement: Select[Any], dialect: Dialect) -> tuple[str, tuple[Any, ...]]:
    compiled = statement.compile(dialect=dialect, compile_kwargs={"render_postcompile": True})
    return str(compiled), tuple(compiled.params[name] for name in compiled.positiontup or ())


def _driver(connection: Connection) -> sqlite3.Connection:
    return cast(sqlite3.Connection, connection.connection.driver_connection)


def rows_of(connection: Connection, statement: Select[Any]) -> Sequence[Any]:
    """The rows of a statement without parameters that was made once, when a module was imported."""
    if not connection.dialect.positional:
        return connection.execute(statement).all()
    return _driver(connection).execute(*_text(statement, connection.dialect)).fetchall()


def batches(values: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """`values` cut into runs of at most `size`."""
    for start in range(0, len(values), size):
        yield values[start : start + size]


def insert_missing(connection: Connection, table: Table, rows: Sequence[tuple[Any, ...]]) -> int:
    """Insert the rows whose key is not there yet; returns how many that were.

    Args:
        rows: Tuples in the order of the table's columns.
    """
    if not rows:
        return 0
    if connection.dialect.positional:  # straight to the driver: SQLAlchemy's binding costs twice the insert
        return _driver(connection).executemany(_inserting(table, connection.dialect), rows).rowcount
    statement = insert_into(connection, table).on_conflict_do_nothing()
    names = [column.name for column in table.columns]
    return connection.execute(statement, [dict(zip(names, row, strict=True)) for row in rows]).rowcount


@lru_cache(maxsize=64)
def _inserting(table: Table, dialect: Dialect) -> str:
    """The text of the insert; to compile it costs as much as to insert a few rows."""
    return str(sqlite.insert(table).on_conflict_do_nothing().compile(dialect=dialect))


def insert_into(connection: Connection, table: Table) -> Upsert:
    """An INSERT of the connection's dialect, which knows ON CONFLICT."""
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects import postgresql  # costs 20 ms, which `log` on SQLite need not pay

        return postgresql.insert(table)
    return sqlite.insert(table)


def upsert(connection: Connection, table: Table, row: dict[str, Any]) -> None:
    """Insert `row`, which has all columns, or replace what stands under its key."""
    if connection.dialect.positional:
        values = [row[column.name] for column in table.columns]
        _driver(connection).execute(_replacing(table, connection.dialect), values)
    else:
        connection.execute(_upserting(insert_into(connection, table), table), row)


@lru_cache(maxsize=16)
def _replacing(table: Table, dialect: Dialect) -> str:
    return str(_upserting(sqlite.insert(table), table).compile(dialect=dialect))


def _upserting(insert: Upsert, table: Table) -> Upsert:
    keys = sorted(column.name for column in table.primary_key)
    changes = {column.name: insert.excluded[column.name] for column in table.columns if column.name not in keys}
    return insert.on_conflict_do_update(index_elements=keys, set_=changes)
