"""Opening the index's database: SQLite in a file or in memory, or PostgreSQL by URL.

Invariant: a transaction opened with `writing` is the only writing one, so what it read stays true
until it commits. Knows nothing of tables.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import cast
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, MetaData, QueuePool, StaticPool, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from cas_ckpt.errors import InvalidInputError, NotFoundError
from cas_ckpt.index.presence import Presence, nobody_present
from cas_ckpt.index.trouble import refused, translated

IN_MEMORY = ":memory:"
"""Place of an index that ends with its process."""

PAGE_BYTES = 512
"""Measured (docs/decisions/003-index.md): one commit dirties seven pages or so, whatever their size."""

BUSY_TIMEOUT_S = 60.0
"""How long a writer waits for another process's transaction."""

_TURNS = 1000
"""Times that a process steps aside for others that make the same database."""

_WRITER_LOCK = 0x6361735F636B7074
"""Advisory lock of PostgreSQL that every writing transaction holds ("cas_ckpt")."""

_PRAGMAS = (
    "temp_store=MEMORY",
    "cell_size_check=ON",  # finds some damage early
    "trusted_schema=OFF",
    "cache_size=-16384",
)
_WRITER_PRAGMAS = (
    f"page_size={PAGE_BYTES}",
    "journal_mode=WAL",
    "synchronous=NORMAL",  # derived data: after a power cut the last commits may be missing, never torn
    "wal_autocheckpoint=8192",
    "journal_size_limit=4194304",
)


@dataclass(frozen=True, slots=True)
class Database:
    """An engine, the name of its place in messages, and whether writing is out of the question.

    Threads may share it. `write_lock` spares the threads of one process the polling that SQLite
    does between processes; `read_lock` is the same lock where all share one connection.
    """

    engine: Engine
    place: str
    read_only: bool
    read_lock: AbstractContextManager[object]
    write_lock: AbstractContextManager[object]
    presence: Presence | None = None
    in_memory: bool = False

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection in a transaction that sees one state of the database."""
        with self.read_lock, translated(self.place), self.engine.connect() as connection:
            if connection.dialect.name == "postgresql":  # its default would show each statement a newer state
                connection = connection.execution_options(isolation_level="REPEATABLE READ")
            with connection.begin():
                yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A connection in the one writing transaction; committed at the end, rolled back on any error."""
        with self.write_lock, translated(self.place), self.engine.connect() as plain:
            connection = plain.execution_options(writes=True)
            with connection.begin():
                if connection.dialect.name == "postgresql":
                    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_WRITER_LOCK})")
                yield connection

    def close(self) -> None:
        """Close every connection; the last one to close a SQLite file folds its log into it."""
        with translated(self.place):
            self.engine.dispose()
        if self.presence is not None:
            self.presence.close()


def open_database(place: str | Path, *, read_only: bool) -> Database:
    """The database at `place`: a path, `:memory:`, or a URL of SQLAlchemy.

    Raises:
        NotFoundError: `read_only`, and there is no such file.
        PermissionDeniedError: the file cannot be opened, or not for writing.
        CorruptionError: the file is no SQLite database.
    """
    name = str(place)
    if name == IN_MEMORY:
        lock = Lock()
        return Database(_sqlite_engine(_memory_connection, shared=True), "in memory", False, lock, lock, in_memory=True)
    if "://" in name:
        url = _parsed(name)  # its str() hides the password
        return Database(_url_engine(url), str(url), read_only, nullcontext(), Lock())
    return _sqlite_database(Path(name), read_only=read_only)


def copy_into_memory(database: Database) -> Database:
    """A database in memory with the same content, which may be written and ends with its process."""
    with database.reading() as source:
        if source.dialect.name != "sqlite":
            raise InvalidInputError(f"index {database.place}: only an index in a file can be copied into memory")
        copy = _memory_connection()
        cast(sqlite3.Connection, source.connection.driver_connection).backup(copy)
    lock = Lock()
    engine = _sqlite_engine(lambda: copy, shared=True)
    return Database(engine, f"{database.place} in memory", False, lock, lock, in_memory=True)


def discard_database(place: str | Path) -> None:
    """Remove what is at `place`, damaged or not; nothing there is fine.

    Raises:
        ConflictError: a process has the file open; nothing was removed.
        PermissionDeniedError: the file cannot be removed.
    """
    name = str(place)
    if "://" in name:
        _drop_everything(_parsed(name))
    elif name != IN_MEMORY:
        _unlink_files(Path(name))


def _unlink_files(path: Path) -> None:
    """The log goes first: a log without its database is nothing, but not the other way round."""
    if not path.parent.is_dir():
        return
    try:
        with nobody_present(path):
            for suffix in ("-wal", "-shm", ""):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
    except OSError as error:
        raise refused(error, f"{path}: cannot be removed, remove {path}* by hand") from error


def _drop_everything(url: URL) -> None:
    engine = _url_engine(url)
    with translated(str(url)), engine.begin() as connection:
        found = MetaData()
        found.reflect(connection)
        found.drop_all(connection)
    engine.dispose()


def _parsed(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise InvalidInputError(f"index: {error}; wanted a path or postgresql+psycopg://...") from error
    if parsed.get_backend_name() != "postgresql":
        raise InvalidInputError(f"index {parsed}: an index lies in a file (give its path) or in PostgreSQL")
    return parsed


def _url_engine(url: URL) -> Engine:
    try:
        return create_engine(url)
    except ImportError as error:
        raise InvalidInputError(f"index {url}: no driver ({error}); pip install 'cas-ckpt[postgres]'") from error


def _sqlite_database(path: Path, *, read_only: bool) -> Database:
    if read_only:
        engine = _sqlite_engine(_reader(path))
        return Database(engine, str(path), True, nullcontext(), Lock(), Presence(path, read_only=True))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refused(error, f"{path}: its folder cannot be made") from error
    presence = Presence(path, read_only=False)
    return Database(_sqlite_engine(lambda: _writer(path)), str(path), False, nullcontext(), Lock(), presence)


def _sqlite_engine(connect: Callable[[], sqlite3.Connection], *, shared: bool = False) -> Engine:
    pool = {"poolclass": StaticPool} if shared else {"poolclass": QueuePool, "pool_size": 4, "max_overflow": 28}
    engine = create_engine("sqlite://", creator=connect, **pool)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _connect(target: str) -> sqlite3.Connection:
    """A connection that begins transactions only when told to."""
    connection = sqlite3.connect(
        target, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, cached_statements=64
    )
    for pragma in _PRAGMAS:
        connection.execute("PRAGMA " + pragma)
    return connection


def _memory_connection() -> sqlite3.Connection:
    return _connect(IN_MEMORY)


def _writer(path: Path) -> sqlite3.Connection:
    connection = _connect(f"file:{quote(str(path))}?mode=rwc")
    for pragma in _WRITER_PRAGMAS:
        _in_turn(connection, "PRAGMA " + pragma)
    return connection


def _in_turn(connection: sqlite3.Connection, statement: str) -> None:
    """Execute `statement`, after whoever else is about to make the same new database.

    SQLite does not wait for others where it turns a database to its write-ahead log, but it does
    where a transaction begins.
    """
    for _ in range(_TURNS):
        try:
            connection.execute(statement)
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    connection.execute(statement)


def _reader(path: Path) -> Callable[[], sqlite3.Connection]:
    if not os.path.lexists(path):
        raise NotFoundError(f"index {path}: there is none; `cas-ckpt index rebuild` makes it")
    uri = f"file:{quote(str(path))}?mode=ro"

    def connect() -> sqlite3.Connection:
        try:
            return _probed(uri)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
                raise
            return _probed(uri + "&immutable=1")  # a read-only medium, where no shared memory file can be made

    return connect


def _probed(uri: str) -> sqlite3.Connection:
    connection = _connect(uri)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.Error:
        connection.close()
        raise
    return connection
