"""Bulk statements that SQLite and PostgreSQL both take: many keys in, many rows in.

Invariant: keys are asked for and rows are put in ascending order, which is three times as fast
as any order. Knows no table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

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
        return connection.exec_driver_sql(_inserting(table, connection.dialect), list(rows)).rowcount
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
    """Insert `row`, or replace what stands under its key."""
    statement = insert_into(connection, table).values(row)
    keys = {column.name for column in table.primary_key}
    changes = {name: value for name, value in row.items() if name not in keys}
    connection.execute(statement.on_conflict_do_update(index_elements=sorted(keys), set_=changes))
