"""Temporary tables of numbers, for questions whose answers are too many for Python.

Invariant: they belong to one connection and are gone after the block. Loops go from the temporary
table to the large one: SQLite has no statistics of either and would as soon scan the large one, so the
statements that use these tables are written out, with CROSS JOIN, which SQLite takes as the order.
Knows nothing of what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import BigInteger, Column, Connection, Integer, MetaData, SmallInteger, Table, select, text
from sqlalchemy import Index as TableIndex
from sqlalchemy.schema import CreateIndex, CreateTable, DropTable

from cas_ckpt.index.rows import UNKNOWN_KIND
from cas_ckpt.index.schema import OBJECTS
from cas_ckpt.index.statements import KeyQuery, batches, insert_missing

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
    """Put the numbers of `digests` into `table`; returns those that stand in no known pack."""
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
