"""The index in SQLite: connections to a file or to memory, and how processes make one file together.

Invariant: a connection begins transactions only when told to, and a file that holds tables of others is not touched.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import cast
from urllib.parse import quote

from sqlalchemy import Connection, Engine, NullPool, QueuePool, StaticPool, create_engine

from cas_ckpt.errors import NotFoundError
from cas_ckpt.index.db_errors import file_refused
from cas_ckpt.index.open_lock import may_write
from cas_ckpt.index.schema import refuse_foreign

PAGE_BYTES = 512
"""Measured (docs/decisions/003-index.md): one commit dirties seven pages or so, whatever their size."""

BUSY_TIMEOUT_S = 60.0
"""How long a writer waits for another process's transaction."""

_TURNS = 1000
"""Times that a process steps aside for others that make the same database."""

TABLES = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT GLOB 'sqlite_*'"

VIEWS = "SELECT name FROM sqlite_master WHERE type = 'view'"

OTHER = "other"
"""Name of a database that was attached."""

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
_ATTACHED_PRAGMAS = ("synchronous=NORMAL", "journal_size_limit=4194304")


def open_engine(connect: Callable[[], sqlite3.Connection], *, shared: bool = False, afresh: bool = False) -> Engine:
    """An engine over such connections; `shared`: over one, which all threads take in turn.

    Args:
        afresh: Each transaction gets a new one: what is open cannot notice that others write.
    """
    if afresh:
        return create_engine("sqlite://", creator=connect, poolclass=NullPool)
    pool = {"poolclass": StaticPool} if shared else {"poolclass": QueuePool, "pool_size": 4, "max_overflow": 28}
    return create_engine("sqlite://", creator=connect, **pool)


def connect(target: str) -> sqlite3.Connection:
    """A connection that begins transactions only when told to."""
    connection = sqlite3.connect(
        target, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, cached_statements=64
    )
    with _closed_if_not_taken(connection):
        for pragma in _PRAGMAS:
            connection.execute("PRAGMA " + pragma)
    return connection


@contextmanager
def _closed_if_not_taken(connection: sqlite3.Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


def begin_writing(connection: Connection, wait_s: float | None = None) -> None:
    """Begin the one writing transaction; `wait_s`: wait so long for another process, not as long as usual."""
    if wait_s is not None:
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {round(1000 * wait_s)}")
    try:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    finally:
        if wait_s is not None:
            connection.exec_driver_sql(f"PRAGMA busy_timeout = {round(1000 * BUSY_TIMEOUT_S)}")


def attach(connection: Connection, path: str) -> None:
    """Let `connection` see the database in the file `path`, which must be there, under the name `OTHER`."""
    raw = cast(sqlite3.Connection, connection.connection.driver_connection)
    raw.execute(f"ATTACH ? AS {OTHER}", (f"file:{quote(os.fsencode(path))}?mode=rw",))
    for pragma in _ATTACHED_PRAGMAS:
        raw.execute(f"PRAGMA {OTHER}.{pragma}")


def memory_connection() -> sqlite3.Connection:
    """A new, empty database in memory."""
    return connect(":memory:")


def writer(path: Path) -> sqlite3.Connection:
    """A connection to the file `path`, which is made if it is not there.

    Raises:
        ConflictError: it is a database of somebody else.
    """
    _make(path)
    connection = connect(f"file:{quote(os.fsencode(path))}?mode=rw")
    with _closed_if_not_taken(connection):
        if connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):  # else it is ours, or not made just now
            refuse_foreign({name for (name,) in connection.execute(TABLES)}, str(path))
        for pragma in _WRITER_PRAGMAS:
            _in_turn(connection, "PRAGMA " + pragma)
    return connection


def _make(path: Path) -> None:
    """Make the file, if it is not there: as any other, and writable for the group where the folder is.

    SQLite makes it 0644 whatever the umask allows, and gives the files beside it the same mode and the user who happens
    to come first: then the others are locked out.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError:  # it is there; else SQLite says why it cannot be made
        return
    try:
        folder = os.stat(path.parent).st_mode
        if folder & stat.S_IWGRP and not folder & stat.S_ISVTX:
            os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) | stat.S_IRGRP | stat.S_IWGRP)
    except OSError:
        pass  # a filesystem without modes
    finally:
        os.close(fd)


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


def reader(path: Path) -> Callable[[], sqlite3.Connection]:
    """What opens the file `path` for reading, also on a medium where no shared memory file can be made.

    Who may not write the file makes none beside it either: it would be this user's, and lock the others out.

    Raises:
        NotFoundError: there is no such file.
    """
    if not os.path.lexists(path):
        raise NotFoundError(f"index {path}: there is none; on the command line, cas-ckpt index rebuild makes it")
    uri = f"file:{quote(os.fsencode(path))}?mode=ro"
    beside = [path.with_name(path.name + suffix) for suffix in ("-wal", "-shm")]

    def open_one() -> sqlite3.Connection:
        try:
            if may_write(path):
                return _probed(uri)
            if all(file.exists() for file in beside):  # another process has it open
                return _probed(uri + "&readonly_shm=1")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
                raise
        if beside[0].exists() and beside[0].stat().st_size > 0:  # a process died before it was folded into the file
            return _copied(path)
        return _probed(uri + "&immutable=1")

    return open_one


def _copied(path: Path) -> sqlite3.Connection:
    """A copy of file and log in memory: where nothing can be written, SQLite reads no log."""
    memory = memory_connection()
    try:
        with _closed_if_not_taken(memory), tempfile.TemporaryDirectory(prefix="cas-ckpt-index-") as folder:
            copy = Path(folder) / path.name
            for suffix in ("", "-wal"):
                shutil.copyfile(path.with_name(path.name + suffix), copy.with_name(copy.name + suffix))
            with closing(connect(f"file:{quote(os.fsencode(copy))}?mode=rw")) as source:
                source.backup(memory)
    except OSError as error:
        raise file_refused(error, f"{path}: it cannot be copied into the folder for temporary files") from error
    return memory


def _probed(uri: str) -> sqlite3.Connection:
    connection = connect(uri)
    with _closed_if_not_taken(connection):
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return connection
