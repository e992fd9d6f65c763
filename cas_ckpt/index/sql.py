"""Bulk statements that SQLite and PostgreSQL both take: many keys in, many rows in.

Invariant: keys are asked for and rows are put in ascending order, which is three times as fast
as any order. Knows no table.

What every commit asks and writes goes to SQLite's driver as text that SQLAlchemy compiled once: to
build, compile and bind a statement anew costs ten times what SQLite needs for it.
"""

from __future__ import annotations

import errno
import re
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
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.schema import CreateIndex, CreateTable, DropTable

from cas_ckpt.errors import (
    CkptError,
    CorruptionError,
    InvalidInputError,
    OutOfSpaceError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from cas_ckpt.index.rows import UNKNOWN_KIND
from cas_ckpt.index.schema import OBJECTS

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


# DOC of cas_ckpt.index.sql:
# Temporary tables of numbers, for questions whose answers are too many for Python.
#
# Invariant: they belong to one connection and are gone after the block. Loops go from the temporary
# table to the large one: SQLite has no statistics of either and would as soon scan the large one, so the
# statements that use these tables are written out, with CROSS JOIN, which SQLite takes as the order.
# Knows nothing of what the numbers mean.
#

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


# DOC of cas_ckpt.index.sql:
# What to raise when a database refuses.
#
# Invariant: no error of SQLAlchemy, of sqlite3 or of a PostgreSQL driver leaves the index room.
# Must not know: which question was being asked.
#

REBUILD = "it holds nothing that the packs do not hold: on the command line, cas-ckpt index rebuild makes it anew"

_SQLITE = {
    "SQLITE_CORRUPT": CorruptionError,
    "SQLITE_NOTADB": CorruptionError,
    "SQLITE_ERROR": CorruptionError,
    "SQLITE_FORMAT": CorruptionError,
    "SQLITE_MISMATCH": CorruptionError,
    "SQLITE_CONSTRAINT": CorruptionError,
    "SQLITE_FULL": OutOfSpaceError,
    "SQLITE_IOERR_SHMSIZE": OutOfSpaceError,  # no room for the shared memory of a write-ahead log
    "SQLITE_READONLY": PermissionDeniedError,
    "SQLITE_PERM": PermissionDeniedError,
    "SQLITE_AUTH": PermissionDeniedError,
    "SQLITE_CANTOPEN": PermissionDeniedError,
    "SQLITE_BUSY": TransientStorageError,
    "SQLITE_LOCKED": TransientStorageError,
}
"""Heads of SQLite's result codes. An SQL error can only mean that tables are not as they should be."""

_POSTGRES: dict[str, type[CkptError]] = {
    "08": TransientStorageError,
    "25P03": TransientStorageError,
    "3D000": InvalidInputError,
    "55P03": TransientStorageError,
    "40": TransientStorageError,
    "57": TransientStorageError,
    "53": OutOfSpaceError,
    "28": PermissionDeniedError,
    "42501": PermissionDeniedError,
    "25006": PermissionDeniedError,
    "22": InvalidInputError,
    "42": CorruptionError,
    "23": CorruptionError,
    "XX": CorruptionError,
}
"""Heads of SQLSTATE, the longest match wins."""

_ADVICE: dict[type[CkptError], str] = {
    CorruptionError: f"it is damaged; {REBUILD}",
    OutOfSpaceError: "no space is left; free some and repeat, what was stored stays valid",
    PermissionDeniedError: "it cannot be written or opened; check owner and mode, and that it is not read-only",
    TransientStorageError: "the database is busy or out of reach; try again",
    InvalidInputError: "a value is outside of what the database can hold",
    StorageError: "the database refused",
}


_MORE_ADVICE = {
    "3D000": "there is no such database on that server: make it (`createdb NAME`), or correct the URL",
    "3F000": "there is no such schema, and it cannot be made: ask for the right to CREATE in that database",
    "42501": "this role may not do that: grant it CREATE on the database, or make the schema and give it to the role",
    "55P03": "another client holds the index and does not go on. Nothing is lost; try again, and if it stays so, "
    "SELECT pid, application_name, client_addr FROM pg_stat_activity JOIN pg_locks USING (pid) "
    "WHERE locktype = 'advisory' says who it is, and SELECT pg_terminate_backend(pid) ends it",
    "25P03": "this client stopped for so long inside a transaction that the server ended it, so that others could go "
    "on; nothing is lost, try again",
}
"""By SQLSTATE, where more is known than the kind of error."""

_REFUSED_CONNECTION = {
    re.compile(r'database "[^"]*" does not exist'): "3D000",
    re.compile(r'password authentication failed|role "[^"]*" does not exist|no pg_hba\.conf entry'): "28000",
}
"""A driver that was refused a connection has the server's words, and no SQLSTATE."""


@contextmanager
def translated(place: str) -> Iterator[None]:
    """Turn every database error of the block into one of cas_ckpt.errors that names `place`."""
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error) as error:
        raise _typed(error, place) from error
    except UnicodeDecodeError as error:  # sqlite3, when damage stands in its own message
        raise CorruptionError(f"index {place}: {error}; {_ADVICE[CorruptionError]}") from error
    except (OverflowError, UnicodeEncodeError) as error:
        raise InvalidInputError(f"index {place}: {error}; {_ADVICE[InvalidInputError]}") from error


@contextmanager
def decoding(place: str) -> Iterator[None]:
    """Turn values that the index cannot have written (NULL, an unknown kind, no JSON) into damage."""
    try:
        yield
    except CkptError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise CorruptionError(f"index {place}: a row cannot be read ({error}); {REBUILD}") from error


def refused(error: OSError, what: str) -> CkptError:
    """The error to raise when the operating system refused something about the index's files."""
    kind: type[CkptError] = StorageError
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        kind = PermissionDeniedError
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        kind = OutOfSpaceError
    return kind(f"index {what} ({error.strerror}); {_ADVICE[kind]}")


def _typed(error: Exception, place: str) -> CkptError:
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    kind = _kind(cause)
    advice = _MORE_ADVICE.get(_state(cause) or "", _ADVICE[kind])
    return kind(f"index {place}: {str(cause).strip() or type(cause).__name__}; {advice}")


def _state(cause: BaseException) -> str | None:
    """The SQLSTATE of an error of PostgreSQL."""
    state: str | None = getattr(cause, "sqlstate", None)
    return state or next((code for words, code in _REFUSED_CONNECTION.items() if words.search(str(cause))), None)


def _kind(cause: BaseException) -> type[CkptError]:
    sqlite_name = getattr(cause, "sqlite_errorname", None)
    if sqlite_name:
        return _longest(_SQLITE, sqlite_name)
    state = _state(cause)
    if state:
        return _longest(_POSTGRES, state)
    if isinstance(cause, sqlite3.OperationalError | sqlite3.DatabaseError):
        return CorruptionError  # e.g. "Could not decode to UTF-8", which carries no code
    return TransientStorageError if type(cause).__name__ == "OperationalError" else StorageError


def _longest(table: dict[str, type[CkptError]], code: str) -> type[CkptError]:
    matches = [head for head in table if code.startswith(head)]
    return table[max(matches, key=len)] if matches else StorageError
