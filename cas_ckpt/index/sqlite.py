"""The index in files of SQLite: who has one open, who may write it, and connections to it. Imports no SQLAlchemy.

Invariant: a connection begins transactions only when told to, a file that holds tables of others is not touched, and
files are removed only while no process has them open.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import quote

from cas_ckpt.errors import ConflictError, NotFoundError
from cas_ckpt.held_signals import held_signals
from cas_ckpt.uncopied import Uncopied

if TYPE_CHECKING:
    from sqlalchemy import Connection

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
    from cas_ckpt.index.schema import refuse_foreign  # with SQLAlchemy, as whoever asks this has

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
    """A function that opens the file `path` for reading, also on a medium where no shared memory file can be made.

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
    import shutil
    import tempfile

    from cas_ckpt.index.db_errors import file_refused

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


# --- who has a file open, and who may write it ------------------------------------------------


class OpenLock(Uncopied):
    """Says that a database file is open: a shared lock beside it, until `close` or the end of the process.

    SQLite's log and shared memory are found by name: whoever removes them while a process has the database open, or
    is about to, leaves two processes with files that do not belong together. So files are removed only by
    `while_closed`. The kernel ends a lock with its process, so that none goes stale.
    """

    def __init__(self, path: Path, *, read_only: bool) -> None:
        self._fd: int | None = None
        try:
            with suppress(OSError):  # a medium that cannot be written: nothing is removed
                self._fd = _open_lock_file(path, os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT)
                fcntl.flock(self._fd, fcntl.LOCK_SH)
        except BaseException:  # a signal: this object is lost, and a traceback would keep the lock
            self.close()
            raise

    def close(self) -> None:
        """The file may be removed. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    __del__ = close


@contextmanager
def while_closed(path: Path) -> Iterator[None]:
    """A time in which no process has the database open or opens it; others wait to open it, and signals wait.

    Raises:
        ConflictError: a process has it open.
        OSError: the lock cannot be had for another reason.
    """
    with held_signals():
        fd = _open_lock_file(path, os.O_RDWR | os.O_CREAT)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConflictError(
                    f"index {path}: a process has it open; end that process, or name another place (no two "
                    "repositories share one file), then try again"
                ) from None
            yield
        finally:
            os.close(fd)


def may_write(path: Path) -> bool:
    """Whether this user may write the file; else SQLite opens it all the same, and makes files beside it."""
    return not os.path.exists(path) or os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _open_lock_file(path: Path, flags: int) -> int:
    name = path.with_name(path.name + ".lock")
    try:
        return os.open(name, flags | os.O_CLOEXEC, 0o666)
    except PermissionError:  # of somebody who does not let us write, which a lock does not need here
        return os.open(name, os.O_RDONLY | os.O_CLOEXEC)
