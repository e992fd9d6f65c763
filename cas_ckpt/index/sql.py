"""Bulk statements that SQLite and PostgreSQL both take: many keys in, many rows in, and temporary tables of numbers.

Keys are asked for and rows are put in ascending order, which is three times as fast as any order. What every commit
asks and writes goes to SQLite's driver as text that SQLAlchemy compiled once: to build, compile and bind a
statement anew costs ten times what SQLite needs for it.

Temporary tables are for questions whose answers are too many for Python. They belong to one connection and are gone
after the block. Loops go from the temporary table to the large one: SQLite has no statistics of either and would as
soon scan the large one, so the statements that use these tables are written out, with CROSS JOIN, which SQLite takes
as the order.

Knows nothing of what rows and numbers mean.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Dialect,
    Integer,
    MetaData,
    Row,
    Select,
    SmallInteger,
    Table,
    select,
    text,
)
from sqlalchemy import Index as TableIndex
from sqlalchemy.dialects import sqlite
from sqlalchemy.schema import CreateIndex, CreateTable, DropTable

from cas_ckpt.index.rows import UNKNOWN_KIND
from cas_ckpt.index.schema import OBJECTS

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql

    Upsert: TypeAlias = sqlite.Insert | postgresql.Insert

KEYS_PER_QUERY = 250
"""Measured: more keys in one IN list are slower on SQLite."""


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
        driver = cast(sqlite3.Connection, connection.connection.driver_connection)
        ordered = sorted(set(keys))
        for start in range(0, len(ordered), KEYS_PER_QUERY):
            batch = ordered[start : start + KEYS_PER_QUERY]
            num_keys = min(1 << (len(batch) - 1).bit_length(), KEYS_PER_QUERY)
            text, fixed = _asking(self, connection.dialect, num_keys)
            asked = [*fixed, *batch, *[batch[-1]] * (num_keys - len(batch))]
            yield from driver.execute(text, asked).fetchall()


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


def rows_of(connection: Connection, statement: Select[Any]) -> Sequence[Any]:
    """The rows of a statement without parameters that was made once, when a module was imported."""
    if not connection.dialect.positional:
        return connection.execute(statement).all()
    driver = cast(sqlite3.Connection, connection.connection.driver_connection)
    return driver.execute(*_text(statement, connection.dialect)).fetchall()


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
        driver = cast(sqlite3.Connection, connection.connection.driver_connection)
        return driver.executemany(_inserting(table, connection.dialect), rows).rowcount
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


def upsert(connection: Connection, table: Table, row: tuple[Any, ...]) -> None:
    """Insert `row`, a tuple in the order of the table's columns, or replace what is stored under its key."""
    if connection.dialect.positional:
        driver = cast(sqlite3.Connection, connection.connection.driver_connection)
        driver.execute(_replacing(table, connection.dialect), row)
    else:
        names = [column.name for column in table.columns]
        connection.execute(_upserting(insert_into(connection, table), table), dict(zip(names, row, strict=True)))


@lru_cache(maxsize=16)
def _replacing(table: Table, dialect: Dialect) -> str:
    return str(_upserting(sqlite.insert(table), table).compile(dialect=dialect))


def _upserting(insert: Upsert, table: Table) -> Upsert:
    keys = sorted(column.name for column in table.primary_key)
    changes = {column.name: insert.excluded[column.name] for column in table.columns if column.name not in keys}
    return insert.on_conflict_do_update(index_elements=keys, set_=changes)


# --- temporary tables of numbers --------------------------------------------------------------

_ROWS_PER_INSERT = 10_000
_SCRATCH = MetaData()
_NUMBERED = KeyQuery(select(OBJECTS.c.object_id, OBJECTS.c.digest, OBJECTS.c.kind), OBJECTS.c.digest)


def number_table(name: str, *columns: Column[Any]) -> Table:
    """A temporary table with one row a number, and `columns` beside it."""
    key = Column("object_id", BigInteger().with_variant(Integer(), "sqlite"), primary_key=True, autoincrement=False)
    return Table(name, _SCRATCH, key, *columns, prefixes=["TEMPORARY"])


def flag(name: str) -> Column[int]:
    """A small number that every row has."""
    return Column(name, SmallInteger, nullable=False)


@contextmanager
def scratch_tables(connection: Connection, *tables: Table) -> Iterator[None]:
    """Temporary `tables`, empty, for the block. After an error the end of the transaction takes them away."""
    for table in tables:
        connection.execute(CreateTable(table))
        for index in table.indexes:
            connection.execute(CreateIndex(index))
    yield
    for table in reversed(tables):
        connection.execute(DropTable(table))


def execute(connection: Connection, sql: str, **values: Any) -> int:
    """Run a statement; returns how many rows it changed."""
    return connection.execute(text(sql), values).rowcount


def fill_numbers(connection: Connection, table: Table, digests: Iterable[bytes]) -> list[bytes]:
    """Put the numbers of `digests` into `table`; returns those that are in no known pack."""
    wanted = set(digests)
    known = set()
    numbers = []
    for number, digest, kind in _NUMBERED.rows(connection, wanted):
        numbers.append((number,))
        if kind != UNKNOWN_KIND:
            known.add(digest)
    for batch in batches(sorted(numbers), _ROWS_PER_INSERT):
        insert_missing(connection, table, batch)
    return sorted(wanted - known)


def by_number(table: Table, column: str) -> TableIndex:
    """An index over a column of a temporary table."""
    return TableIndex(f"{table.name}_by_{column}", table.c[column])
