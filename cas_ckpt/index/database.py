"""The database below the index: opening it, its transactions, and statements over many keys or rows at once.

It is SQLite in a file or in memory (sqlite.py), or a schema of PostgreSQL by URL (postgres.py). Keys are asked for and
rows are put in ascending order, which is three times as fast as any order. What every commit asks and writes goes to
SQLite's driver as text that SQLAlchemy compiled once: to build, compile and bind a statement anew costs ten times what
SQLite needs for it. Temporary tables of numbers are for questions whose answers are too many for Python; see
`scratch_tables`.

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
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from urllib.parse import quote

from sqlalchemy import (
    ARRAY,
    URL,
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Dialect,
    Engine,
    Integer,
    MetaData,
    Row,
    Select,
    SmallInteger,
    Table,
    any_,
    bindparam,
    literal_column,
    select,
    text,
)
from sqlalchemy.dialects.sqlite import Insert as SqliteInsert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.schema import CreateIndex, CreateTable, DropTable

from cas_ckpt.arguments import check_path
from cas_ckpt.errors import CkptError, ConflictError, InvalidInputError
from cas_ckpt.held_signals import held_signals
from cas_ckpt.index import postgres, sqlite
from cas_ckpt.index.db_errors import REFUSED, UNREADABLE, file_refused, refused, translated, unreadable
from cas_ckpt.index.open_lock import OpenLock, may_write, while_closed
from cas_ckpt.index.rows import UNKNOWN_KIND
from cas_ckpt.index.schema import OBJECTS, refuse_foreign
from cas_ckpt.index.statements import KEYS_PER_ARRAY, KEYS_PER_QUERY, batches, plain_rows

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
    read_only: bool
    read_lock: AbstractContextManager[object]
    write_lock: AbstractContextManager[object]
    open_lock: OpenLock | None = None
    in_memory: bool = False
    path: Path | None = None
    schema: str | None = None
    temporary: bool = False

    @property
    def address(self) -> str:
        """What `open_database` opens it by again: with the password, so it is not for messages."""
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
                        sqlite.begin_writing(connection, wait_s)
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
        return Database(engine, str(url), read_only, nullcontext(), Lock(), schema=schema)  # str() hides the password
    if not name:
        raise InvalidInputError("the place of an index is empty: give a path, or a URL of a database")
    check_path(name)
    path = Path(name)
    if read_only:
        engine = sqlite.open_engine(sqlite.reader(path), afresh=not may_write(path))
        return Database(engine, str(path), True, nullcontext(), Lock(), OpenLock(path, read_only=True), path=path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise file_refused(error, f"{path}: its folder cannot be made") from error
    if not may_write(path):
        raise file_refused(PermissionError(errno.EACCES, os.strerror(errno.EACCES)), f"{path}: it may only be read")
    open_lock = OpenLock(path, read_only=False)
    engine = sqlite.open_engine(lambda: sqlite.writer(path))
    return Database(engine, str(path), False, nullcontext(), Lock(), open_lock, path=path)


def _in_memory(connect: Callable[[], sqlite3.Connection], place: str) -> Database:
    lock = Lock()
    return Database(sqlite.open_engine(connect, shared=True), place, False, lock, lock, in_memory=True)


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
        return Database(engine, str(url), False, lock, lock, schema=postgres.TEMPORARY)
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
    engine = sqlite.open_engine(lambda: sqlite.writer(made))
    return Database(engine, str(made), False, nullcontext(), Lock(), open_lock, path=made, temporary=True)


def unguarded_file(path: Path) -> Database:
    """The database in the file `path`; the caller ensures that no process has it open."""
    engine = sqlite.open_engine(lambda: sqlite.connect(f"file:{quote(os.fsencode(path))}?mode=rw"))
    return Database(engine, str(path), False, nullcontext(), Lock(), path=path)


def copy_into_memory(database: Database) -> Database:
    """A database in memory with the same content, which may be written and ends with its process."""
    with database.reading() as source:
        if source.dialect.name != "sqlite":
            raise InvalidInputError(
                f"index {database.place}: it has to be brought up to date, and it is opened for reading only: "
                "open the repository once for writing"
            )
        copy = sqlite.memory_connection()
        cast(sqlite3.Connection, source.connection.driver_connection).backup(copy)
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
        _drop_schema(postgres.parse_url(name), postgres.schema_of(store_id), drop_views)
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


def _drop_schema(url: URL, schema: str, drop_views: Callable[[Connection], None]) -> None:
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


def table_names(connection: Connection) -> set[str]:
    """The tables and views where the index is, or is to be."""
    if connection.dialect.name != "sqlite":
        return postgres.table_names(connection)
    return set(connection.exec_driver_sql(sqlite.TABLES).scalars())


def view_names(connection: Connection) -> set[str]:
    """Those of them that are views."""
    if connection.dialect.name != "sqlite":
        return postgres.view_names(connection)
    return set(connection.exec_driver_sql(sqlite.VIEWS).scalars())


# --- statements over many keys or rows ------------------------------------------------------

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql

    Upsert: TypeAlias = SqliteInsert | postgresql.Insert


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
        ordered = sorted(set(keys))
        if not connection.dialect.positional:
            text, named = _asking_for_array(self, connection.dialect)
            for batch in batches(ordered, KEYS_PER_ARRAY):
                yield from plain_rows(connection, text, {**named, _KEYS: batch})
            return
        driver = cast(sqlite3.Connection, connection.connection.driver_connection)
        for start in range(0, len(ordered), KEYS_PER_QUERY):
            batch = ordered[start : start + KEYS_PER_QUERY]
            num_keys = min(1 << (len(batch) - 1).bit_length(), KEYS_PER_QUERY)
            (begin, end), fixed = _asking(self, connection.dialect)
            asked = [*fixed, *batch, *[batch[-1]] * (num_keys - len(batch))]
            yield from driver.execute(f"{begin}{', '.join('?' * num_keys)}{end}", asked).fetchall()


@lru_cache(maxsize=64)
def _asking(asked: KeyQuery, dialect: Dialect) -> tuple[tuple[str, str], tuple[Any, ...]]:
    """The text of the question before and after the places of keys, and what the query itself binds before them.

    Without these places: to compile a question takes a millisecond or more, so it is done once for any number of keys.
    """
    text, values = _compiled(asked.query.where(asked.column.op("IN")(literal_column(f"({_PLACES})"))), dialect)
    begin, end = text.split(_PLACES)
    return (begin, end), values


_KEYS, _PLACES = "keys", "{keys}"


@lru_cache(maxsize=64)
def _asking_for_array(asked: KeyQuery, dialect: Dialect) -> tuple[str, dict[str, Any]]:
    """The same for PostgreSQL, with one place for all keys, called `_KEYS`, and what the query itself binds."""
    keys = bindparam(_KEYS, type_=ARRAY(asked.column.type))
    compiled = asked.query.where(asked.column == any_(keys)).compile(dialect=dialect)
    text = str(compiled).replace(f"%({_KEYS})s", f"%({_KEYS})b")  # as bytes: as text, digests cost six times as much
    return text, {name: value for name, value in compiled.params.items() if name != _KEYS}


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


def insert_missing(connection: Connection, table: Table, rows: Sequence[tuple[Any, ...]]) -> int:
    """Insert the rows whose key is not there yet; returns how many that were.

    Args:
        rows: Tuples in the order of the table's columns.
    """
    if not rows:
        return 0
    if connection.dialect.positional:  # straight to the driver: SQLAlchemy's binding costs twice the insert
        driver = cast(sqlite3.Connection, connection.connection.driver_connection)
        count, whole = 0, len(rows) - len(rows) % _ROWS_PER_STATEMENT
        if whole:
            text = _inserting(table, connection.dialect, _ROWS_PER_STATEMENT)
            for batch in batches(rows[:whole], _ROWS_PER_STATEMENT):
                count += driver.execute(text, tuple(chain.from_iterable(batch))).rowcount
        if whole < len(rows):
            count += driver.executemany(_inserting(table, connection.dialect, 1), rows[whole:]).rowcount
        return count
    if len(rows) >= _ROWS_TO_COPY and postgres.copy_new(connection, table, rows):
        return len(rows)
    text, count = postgres.inserting(table, connection.dialect), 0
    for batch in batches(rows, _ROWS_PER_INSERT):
        arrays = tuple(map(list, zip(*batch, strict=True)))
        count += connection.exec_driver_sql(text, arrays).rowcount
    return count


_ROWS_PER_INSERT = 10_000
_ROWS_TO_COPY = 1_000
_ROWS_PER_STATEMENT = 32
"""Measured: a row costs SQLite's driver a quarter less than one by one, and 100 are no better."""


@lru_cache(maxsize=128)
def _inserting(table: Table, dialect: Dialect, num_rows: int) -> str:
    """The text of the insert; to compile it costs as much as to insert a few rows."""
    text = str(sqlite_insert(table).on_conflict_do_nothing().compile(dialect=dialect))
    row = f"({', '.join('?' * len(table.columns))})"
    return text.replace(f"VALUES {row}", f"VALUES {', '.join([row] * num_rows)}")


def insert_into(connection: Connection, table: Table) -> Upsert:
    """An INSERT of the connection's dialect, which knows ON CONFLICT."""
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects import postgresql  # costs 20 ms, which `log` on SQLite need not pay

        return postgresql.insert(table)
    return sqlite_insert(table)


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
    return str(_upserting(sqlite_insert(table), table).compile(dialect=dialect))


def _upserting(insert: Upsert, table: Table) -> Upsert:
    keys = sorted(column.name for column in table.primary_key)
    changes = {column.name: insert.excluded[column.name] for column in table.columns if column.name not in keys}
    return insert.on_conflict_do_update(index_elements=keys, set_=changes)


# --- temporary tables of numbers --------------------------------------------------------------

_SCRATCH = MetaData()

OBJECTS_BY_ID = KeyQuery(select(OBJECTS.c.digest, OBJECTS.c.object_id, OBJECTS.c.kind), OBJECTS.c.digest)
"""Id, number and kind of objects."""


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


def execute(connection: Connection, sql: str, **values: Any) -> int:
    """Run a statement; returns how many rows it changed."""
    return connection.execute(text(sql), values).rowcount


def fill_numbers(connection: Connection, table: Table, digests: Iterable[bytes]) -> list[bytes]:
    """Put the numbers of `digests` into `table`; returns those that are in no known pack."""
    wanted = set(digests)
    known = set()
    numbers = []
    for digest, number, kind in OBJECTS_BY_ID.rows(connection, wanted):
        numbers.append((number,))
        if kind != UNKNOWN_KIND:
            known.add(digest)
    for batch in batches(sorted(numbers), _ROWS_PER_INSERT):
        insert_missing(connection, table, batch)
    return sorted(wanted - known)
