"""The database below the index: opening it, its transactions, and statements over many rows at once.

It is SQLite in a file or in memory (sqlite.py), or a schema of PostgreSQL by URL (postgres.py). What is asked and
changed goes to the driver as text (rows.py). Temporary tables of numbers are for questions whose answers are too
many for Python; see `scratch_tables`.

Invariant: a transaction opened with `writing` is the only writing one, so what it read stays true until it commits.
Signals wait until a transaction has ended: whatever their handlers raise leaves no lock and no transaction behind, and
they may use the index themselves.
Knows nothing of what tables, rows and numbers mean.
"""

from __future__ import annotations

import errno
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from threading import Lock
from typing import Any, cast
from urllib.parse import quote

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Integer,
    MetaData,
    NullPool,
    QueuePool,
    SmallInteger,
    StaticPool,
    Table,
    create_engine,
)
from sqlalchemy.schema import CreateIndex, CreateTable, DropTable

from cas_ckpt.arguments import check_path
from cas_ckpt.errors import CkptError, ConflictError, InvalidInputError
from cas_ckpt.held_signals import held_signals
from cas_ckpt.index import postgres, sqlite
from cas_ckpt.index.db_errors import REFUSED, UNREADABLE, file_refused, refused, translated, unreadable
from cas_ckpt.index.rows import UNKNOWN_KIND, batches, change, objects_by_id, rows, sqlite_driver
from cas_ckpt.index.schema import refuse_foreign
from cas_ckpt.index.sqlite import OpenLock, may_write, while_closed

IN_MEMORY = ":memory:"
"""Place of an index that ends with its process."""


@dataclass(frozen=True, slots=True)
class Database:
    """An engine, the name of its place in messages, and whether writing is out of the question.

    Threads may share it. `write_lock` spares the threads of one process the polling that SQLite
    does between processes; `read_lock` is the same lock where all share one connection.

    Attributes:
        path: The file of SQLite, if it is one.
        schema: The schema of PostgreSQL, if it is one.
        temporary: The file is removed when it is closed.
    """

    engine: Engine
    place: str
    read_only: bool = False
    open_lock: OpenLock | None = None
    in_memory: bool = False
    path: Path | None = None
    schema: str | None = None
    temporary: bool = False
    read_lock: AbstractContextManager[object] = field(default_factory=nullcontext)
    write_lock: AbstractContextManager[object] = field(default_factory=Lock)

    @property
    def address(self) -> str:
        """The place by which `open_database` opens it again: with the password, so it is not for messages."""
        if self.in_memory:
            return IN_MEMORY
        return str(self.path) if self.path is not None else self.engine.url.render_as_string(hide_password=False)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection in a transaction that sees one state of the database; rows that cannot be read are damage."""
        try:
            with held_signals(), self.read_lock:
                if self.schema is None:
                    with self.engine.connect() as connection, connection.begin():
                        connection.exec_driver_sql("BEGIN")
                        yield connection
                else:  # its default would show each statement a newer state
                    with postgres.entered(self.engine, self.schema, isolation="REPEATABLE READ") as connection:
                        yield connection
        except CkptError:
            raise  # some of them are ValueErrors and LookupErrors too
        except UnicodeEncodeError as error:
            raise refused(error, self.place) from error  # what was asked for, not what is stored
        except UNREADABLE as error:
            raise unreadable(error, self.place) from error
        except REFUSED as error:
            raise refused(error, self.place) from error

    @contextmanager
    def writing(self, *, wait_s: float | None = None) -> Iterator[Connection]:
        """A connection in the one writing transaction; committed at the end, rolled back on any error.

        Args:
            wait_s: How long to wait for another client; None: as long as is usual for the database.
        """
        try:
            with held_signals(), self.write_lock:
                if self.schema is None:
                    with self.engine.connect() as connection, connection.begin():
                        _begin_writing(connection, wait_s)
                        yield connection
                else:
                    with postgres.writing(self.engine, self.schema, wait_s) as connection:
                        yield connection
        except REFUSED as error:
            raise refused(error, self.place) from error

    @contextmanager
    def writing_both(self, other: Database) -> Iterator[tuple[Connection, str, str]]:
        """A transaction that writes here and in `other`, which this one was made beside; what is here is not kept.

        Yields:
            The connection, which sees the tables of here, and the names of both for tables in SQL: here, `other`.
        """
        with held_signals(), self.write_lock, other.write_lock, translated(other.place), ExitStack() as stack:
            if other.schema is not None:
                plain = stack.enter_context(
                    postgres.writing(self.engine, postgres.TEMPORARY, idle_s=postgres.REPLACING_IDLE_S)
                )
                postgres.take_writer_lock(plain, other.schema)
                yield plain, postgres.TEMPORARY, postgres.quoted(other.schema)
                return
            plain = stack.enter_context(self.engine.connect())
            sqlite.attach(plain, str(other.path))
            try:
                with plain.begin():
                    plain.exec_driver_sql("BEGIN IMMEDIATE")
                    yield plain, "main", sqlite.OTHER
            finally:
                plain.invalidate()

    def close(self) -> None:
        """Close every connection; the last one to close a SQLite file folds its log into it."""
        with translated(self.place):
            self.engine.dispose()
        if self.open_lock is not None:
            self.open_lock.close()
        if self.temporary and self.path is not None:
            unlink_files(self.path)


def _begin_writing(connection: Connection, wait_s: float | None) -> None:
    if wait_s is not None:
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {round(1000 * wait_s)}")
    try:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    finally:
        if wait_s is not None:
            connection.exec_driver_sql(f"PRAGMA busy_timeout = {round(1000 * sqlite.BUSY_TIMEOUT_S)}")


def open_database(place: str | Path, *, store_id: str, read_only: bool) -> Database:
    """The database at `place`: a path, `:memory:`, or a URL of SQLAlchemy.

    Args:
        store_id: Names the schema of PostgreSQL, so that any number of repositories share a database.
    Raises:
        NotFoundError: `read_only`, and there is no such file.
        PermissionDeniedError: the file cannot be opened, or not for writing.
        CorruptionError: the file is not a SQLite database.
    """
    name = str(place)
    if name == IN_MEMORY:
        return _in_memory(sqlite.memory_connection, "in memory")
    if "://" in name:
        url, schema = postgres.parse_url(name), postgres.schema_of(store_id)
        engine = postgres.open_engine(url, schema)
        return Database(engine, str(url), read_only, schema=schema)  # str() hides the password
    if not name:
        raise InvalidInputError("the place of an index is empty: give a path, or a URL of a database")
    check_path(name)
    path = Path(name)
    if read_only:
        # What is open cannot notice that others write, where this user may not: each transaction gets a new connection.
        engine = _engine(sqlite.reader(path)) if may_write(path) else _engine(sqlite.reader(path), poolclass=NullPool)
        return Database(engine, str(path), True, OpenLock(path, read_only=True), path=path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise file_refused(error, f"{path}: its folder cannot be made") from error
    if not may_write(path):
        raise file_refused(PermissionError(errno.EACCES, os.strerror(errno.EACCES)), f"{path}: it may only be read")
    open_lock = OpenLock(path, read_only=False)
    return Database(_engine(lambda: sqlite.writer(path)), str(path), open_lock=open_lock, path=path)


def _engine(connect: Callable[[], sqlite3.Connection], **pool: Any) -> Engine:
    pool = pool or {"poolclass": QueuePool, "pool_size": 4, "max_overflow": 28}
    return create_engine("sqlite://", creator=connect, **pool)


def _in_memory(connect: Callable[[], sqlite3.Connection], place: str) -> Database:
    """A database of one connection, which all threads take in turn."""
    lock, engine = Lock(), _engine(connect, poolclass=StaticPool)
    return Database(engine, place, in_memory=True, read_lock=lock, write_lock=lock)


def database_beside(place: str | Path) -> Database:
    """An empty database from which `writing_both` can reach the one at `place`; it is gone when it is closed.

    A file begins its name with that of its neighbour; those that dead processes left are removed.

    Raises:
        PermissionDeniedError, OutOfSpaceError: no file can be made there.
    """
    name = str(place)
    if name == IN_MEMORY:
        return _in_memory(sqlite.memory_connection, "in memory")
    if "://" in name:
        url, lock = postgres.parse_url(name), Lock()
        engine = postgres.open_engine(url, postgres.TEMPORARY)
        return Database(engine, str(url), schema=postgres.TEMPORARY, read_lock=lock, write_lock=lock)
    path = Path(name)
    family = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(ConflictError), while_closed(family):  # another process has it open: what is there may be its own
            for left in path.parent.iterdir():
                if left.name.startswith(family.name + "-"):
                    left.unlink(missing_ok=True)
    except OSError as error:
        raise file_refused(error, f"{path}: nothing can be made beside it") from error
    open_lock = OpenLock(family, read_only=False)
    made = path.with_name(f"{family.name}-{secrets.token_hex(8)}")
    return Database(_engine(lambda: sqlite.writer(made)), str(made), open_lock=open_lock, path=made, temporary=True)


def unguarded_file(path: Path) -> Database:
    """The database in the file `path`; the caller ensures that no process has it open."""
    uri = f"file:{quote(os.fsencode(path))}?mode=rw"
    return Database(_engine(lambda: sqlite.connect(uri)), str(path), path=path)


def memory_copy(database: Database) -> sqlite3.Connection:
    """A connection to a copy in memory."""
    with database.reading() as source:
        if source.dialect.name != "sqlite":
            raise InvalidInputError(
                f"index {database.place}: it has to be brought up to date, and it is opened for reading only: "
                "open the repository once for writing"
            )
        copy = sqlite.memory_connection()
        cast(sqlite3.Connection, source.connection.driver_connection).backup(copy)
    return copy


def copy_into_memory(database: Database) -> Database:
    """A database in memory with the same content, which may be written and ends with its process."""
    copy = memory_copy(database)
    return _in_memory(lambda: copy, f"{database.place} in memory")


def discard_database(place: str | Path, *, store_id: str, drop_views: Callable[[Connection], None]) -> None:
    """Remove the index at `place`, damaged or not; nothing there is fine. Of a shared database only what is ours.

    Args:
        drop_views: Drops what rests on the tables, where they are dropped one by one.
    Raises:
        ConflictError: a process has the file open, or what is there is not an index of ours; nothing was removed.
        PermissionDeniedError: the file cannot be removed.
    """
    name = str(place)
    if "://" in name:
        url, schema = postgres.parse_url(name), postgres.schema_of(store_id)
        engine = postgres.open_engine(url, schema)
        try:
            with translated(str(url)), postgres.writing(engine, schema) as connection:
                names = table_names(connection)
                refuse_foreign(names, f"{url}, schema {schema}")
                if names:
                    drop_views(connection)
                    postgres.drop_tables(connection, schema)
        finally:
            engine.dispose()
    elif name != IN_MEMORY and (path := Path(name)).parent.is_dir():
        try:
            with while_closed(path):
                unlink_files(path)
        except OSError as error:
            raise file_refused(error, f"{path}: cannot be removed, remove {path}* by hand") from error


def unlink_files(path: Path) -> None:
    """The log goes first: a log without its database is nothing, but not the other way round."""
    for suffix in ("-wal", "-shm", ""):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def table_names(connection: Connection) -> set[str]:
    """The tables and views where the index is, or is to be."""
    if connection.dialect.name != "sqlite":
        return postgres.table_names(connection)
    return {name for (name,) in rows(connection, sqlite.TABLES)}


def view_names(connection: Connection) -> set[str]:
    """Those of them that are views."""
    if connection.dialect.name != "sqlite":
        return postgres.view_names(connection)
    return {name for (name,) in rows(connection, sqlite.VIEWS)}


# --- statements over many rows ----------------------------------------------------------------

_ROWS_PER_INSERT = 10_000
_ROWS_TO_COPY = 1_000
_ROWS_PER_STATEMENT = 32
"""Measured: a row costs SQLite's driver a quarter less than one by one, and 100 are no better."""


def insert_missing(connection: Connection, table: Table, new: Iterable[tuple[Any, ...]]) -> int:
    """Insert the rows whose key is not there yet; returns how many that were.

    Args:
        new: Tuples in the order of the table's columns, any number: some are taken at a time.
    """
    rest, count = iter(new), 0
    while some := list(islice(rest, _ROWS_PER_INSERT)):
        count += _insert(connection, table, some)
    return count


def _insert(connection: Connection, table: Table, new: Sequence[tuple[Any, ...]]) -> int:
    driver = sqlite_driver(connection)
    if driver is not None:
        count, whole = 0, len(new) - len(new) % _ROWS_PER_STATEMENT
        for batch in batches(new[:whole], _ROWS_PER_STATEMENT):
            text = _inserting(table, _ROWS_PER_STATEMENT)
            count += driver.execute(text, tuple(chain.from_iterable(batch))).rowcount
        if whole < len(new):
            count += driver.executemany(_inserting(table, 1), new[whole:]).rowcount
        return count
    if len(new) >= _ROWS_TO_COPY and postgres.copy_new(connection, table, new):
        return len(new)
    arrays = tuple(map(list, zip(*new, strict=True)))
    return connection.exec_driver_sql(postgres.inserting(table, connection.dialect), arrays).rowcount


def columns_of(table: Table) -> str:
    """The names of all columns, in SQL."""
    return ", ".join(f'"{column.name}"' for column in table.columns)


@lru_cache(maxsize=128)
def _inserting(table: Table, num_rows: int) -> str:
    row = f"({', '.join('?' * len(table.columns))})"
    return f"INSERT INTO {table.name} ({columns_of(table)}) VALUES {', '.join([row] * num_rows)} ON CONFLICT DO NOTHING"


def upsert(connection: Connection, table: Table, row: tuple[Any, ...]) -> None:
    """Insert `row`, a tuple in the order of the table's columns, or replace what is stored under its key."""
    names = [column.name for column in table.columns]
    change(connection, _upserting(table), **dict(zip(names, row, strict=True)))


@lru_cache(maxsize=16)
def _upserting(table: Table) -> str:
    names = [column.name for column in table.columns]
    keys = [column.name for column in table.primary_key]
    changes = ", ".join(f"{name} = excluded.{name}" for name in names if name not in keys)
    return (
        f"INSERT INTO {table.name} ({columns_of(table)}) VALUES ({', '.join(f':{name}' for name in names)}) "
        f"ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {changes}"
    )


# --- temporary tables of numbers --------------------------------------------------------------

_SCRATCH = MetaData()


def number_table(name: str, *columns: Column[Any]) -> Table:
    """A temporary table of numbers, each with `columns`: one row a number, more where some of these are in the key."""
    key = Column("object_id", BigInteger().with_variant(Integer(), "sqlite"), primary_key=True, autoincrement=False)
    in_key = any(column.primary_key for column in columns)
    return Table(name, _SCRATCH, key, *columns, prefixes=["TEMPORARY"], sqlite_with_rowid=not in_key)


def key_column(name: str) -> Column[int]:
    """A column of numbers that is part of the key."""
    return Column(name, BigInteger, primary_key=True, autoincrement=False)


def flag(name: str) -> Column[int]:
    """A small number that every row has."""
    return Column(name, SmallInteger, nullable=False)


_BY_INDEXES = "SELECT " + ", ".join(
    f"set_config('{name}', '{value}', true)"
    for name, value in {
        "join_collapse_limit": "1", "enable_hashjoin": "off", "enable_mergejoin": "off", "enable_seqscan": "off",
        "jit": "off",
    }.items()
)  # fmt: skip


@contextmanager
def scratch_tables(connection: Connection, *tables: Table) -> Iterator[None]:
    """Temporary `tables`, empty, for the block. After an error the end of the transaction takes them away.

    PostgreSQL has no statistics of them: left to itself it would read large tables whole to join a few rows. So until
    the end of the transaction it does what SQLite does, in the order of the statement, by indexes.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(_BY_INDEXES)
    for table in tables:
        connection.execute(CreateTable(table))
        for index in table.indexes:
            connection.execute(CreateIndex(index))
    yield
    for table in reversed(tables):
        connection.execute(DropTable(table))


def fill_numbers(connection: Connection, table: Table, digests: Iterable[bytes]) -> list[bytes]:
    """Put the numbers of `digests` into `table`; returns those that are in no known pack."""
    wanted = set(digests)
    found = list(objects_by_id(connection, wanted))
    insert_missing(connection, table, sorted((number,) for _, number, _ in found))
    return sorted(wanted.difference(digest for digest, _, kind in found if kind != UNKNOWN_KIND))
