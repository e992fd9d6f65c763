"""Errors for what a database, or the operating system below it, refuses.

Invariant: no error of SQLAlchemy, of sqlite3 or of a PostgreSQL driver leaves the index room.
Must not know: which question was being asked.
"""

from __future__ import annotations

import errno
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from cas_ckpt.errors import (
    CkptError,
    ConflictError,
    CorruptionError,
    InvalidInputError,
    OutOfSpaceError,
    PermissionDeniedError,
    StorageError,
    TooLargeError,
    TransientStorageError,
)

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
    "53": TransientStorageError,
    "53100": OutOfSpaceError,
    "28": PermissionDeniedError,
    "42501": PermissionDeniedError,
    "25006": PermissionDeniedError,
    "22": InvalidInputError,
    "2BP01": ConflictError,
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
    ConflictError: "something else is in the way",
    InvalidInputError: "a value is outside of what the database can hold",
    StorageError: "the database refused",
}


_MORE_ADVICE = {
    "28": "the server refused the role or its password: correct them in the URL, in a password file (PGPASSFILE) or a "
    "service file; docs/remotes.md shows each",
    "25006": "the server is a standby, or lets this role only read: open the repository with read_only=True, or name "
    "the primary server",
    "53300": "the server has no connection left: try again, or let it have more (max_connections)",
    "57014": "the server has a time limit for statements, or somebody cancelled this one: nothing was changed. Without "
    "a limit for this role it would go on: ALTER ROLE NAME SET statement_timeout = 0",
    "57P03": "the server is starting or stopping: try again in a moment",
    "3D000": "there is no such database on that server: make it (`createdb NAME`), or correct the URL",
    "3F000": "there is no such schema, and it cannot be made: ask for the right to CREATE in that database",
    "42501": "this role may not do that: use one that may, or grant it what it needs; on the command line, cas-ckpt "
    "index roles prints the SQL. For a new index it needs CREATE on the database, or a schema that was made for it",
    "55P03": "another client holds the index and does not go on. Nothing is lost; try again, and if it stays so, "
    "SELECT pid, application_name, client_addr FROM pg_stat_activity JOIN pg_locks USING (pid) "
    "WHERE locktype = 'advisory' says who it is, and SELECT pg_terminate_backend(pid) ends it",
    "2BP01": "something that somebody made rests on it, and has to be replaced with it: drop that, try again, and "
    "make it again afterwards",
    "25P03": "this client stopped for so long inside a transaction that the server ended it, so that others could go "
    "on; nothing is lost, try again",
}
"""By SQLSTATE, where more is known than the kind of error."""

_REFUSED_CONNECTION = {
    re.compile(r'database "[^"]*" does not exist'): "3D000",
    re.compile(
        r'password authentication failed|role "[^"]*" (does not exist|is not permitted to log in)|no pg_hba\.conf entry'
        "|no password supplied|permission denied for database"
    ): "28000",
    re.compile(r"too many (clients|connections)|remaining connection slots"): "53300",
    re.compile(r"the database system is (starting up|shutting down|in recovery mode|not yet accepting)"): "57P03",
}
"""A driver that was refused a connection has the server's words, and no SQLSTATE."""


UNREADABLE = (TypeError, ValueError, AttributeError, LookupError)
"""Raised by reading a row that the index cannot have written: NULL, an unknown kind, text that is not JSON."""

REFUSED = (SQLAlchemyError, sqlite3.Error, UnicodeError, OverflowError)
"""Raised by a statement that the database refused."""


@contextmanager
def translated(place: str) -> Iterator[None]:
    """Turn what the database refuses in the block into an error that names `place`."""
    try:
        yield
    except REFUSED as error:
        raise refused(error, place) from error


def unreadable(error: Exception, place: str) -> CorruptionError:
    """The error to raise for one of `UNREADABLE`; it names `place`."""
    return CorruptionError(f"index {place}: a row cannot be read ({error}); {REBUILD}")


def file_refused(error: OSError, what: str) -> CkptError:
    """The error to raise when the operating system refused something about the index's files."""
    kind: type[CkptError] = StorageError
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        kind = PermissionDeniedError
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        kind = OutOfSpaceError
    return kind(f"index {what} ({error.strerror}); {_ADVICE[kind]}")


def refused(error: Exception, place: str) -> CkptError:
    """The error to raise for one of `REFUSED`; it names `place`."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    kind = _kind(cause)
    state = _state(cause) or ""
    advice = _MORE_ADVICE.get(state, _MORE_ADVICE.get(state[:2], _ADVICE[kind]))
    return kind(f"index {place}: {str(cause).strip() or type(cause).__name__}; {advice}")


_OF_THE_QUERY = (
    "SQLITE_ERROR", "SQLITE_AUTH", "SQLITE_READONLY", "SQLITE_MISMATCH", "SQLITE_RANGE", "SQLITE_CONSTRAINT",
    "SQLITE_MISUSE",
)  # fmt: skip
_NOT_OF_THE_QUERY = ("08", "28", "40", "53", "55P", "57", "58", "XX001", "XX002")
_PROTOCOL = "08P01"
"""Of a query with $1 in it, for which there is no value."""

_OF_THE_DRIVER = frozenset({"ProgrammingError", "DataError", "NotSupportedError"})
"""Errors that a driver raises by itself: parameters, several statements, text that the database cannot hold."""

_NOT_SQL = re.compile(r"^near .*: syntax error$|^incomplete input$")

_UNKNOWN_NAMES = ("no such table", "no such column", "42P01", "42703")


TOO_LARGE = "too large: "
"""In the words of a database when a view ends a query (`view_sql`): what is said up to the last ":" is the reason."""


def query_refused(error: Exception, place: str) -> CkptError:
    """The error to raise for what was refused of a query that a person wrote: mostly, the query is wrong."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    name, state = getattr(cause, "sqlite_errorname", None), _state(cause)
    if name:
        is_wrong = name.startswith(_OF_THE_QUERY)
    elif state:
        is_wrong = not state.startswith(_NOT_OF_THE_QUERY) or state == _PROTOCOL
    else:
        is_wrong = isinstance(cause, (sqlite3.Error, UnicodeError, OverflowError)) or bool(
            _OF_THE_DRIVER.intersection(each.__name__ for each in type(cause).__mro__)
        )
    if not is_wrong:
        return refused(error, place)
    first_line = getattr(getattr(cause, "diag", None), "message_primary", None)  # of what PostgreSQL says
    words = " ".join((first_line or str(cause)).split())
    if TOO_LARGE in words:
        return TooLargeError(f"sql: {words.split(TOO_LARGE)[1].rpartition(':')[0]}")
    if name == "SQLITE_AUTH" or "prohibited" in words:
        words += ": it may only read"
    if state == "42601" or _NOT_SQL.search(words):
        words += "; wanted one query: SELECT, VALUES or WITH"
    if (state or words).startswith(_UNKNOWN_NAMES):
        words += "; on the command line: cas-ckpt sql --views lists the views and their columns"
    return InvalidInputError(f"sql: {words}")


def _state(cause: BaseException) -> str | None:
    """The SQLSTATE of an error of PostgreSQL."""
    state: str | None = getattr(cause, "sqlstate", None)
    return state or next((code for words, code in _REFUSED_CONNECTION.items() if words.search(str(cause))), None)


def _kind(cause: BaseException) -> type[CkptError]:
    sqlite_name = getattr(cause, "sqlite_errorname", None)
    if sqlite_name:
        return _longest(_SQLITE, sqlite_name)
    if isinstance(cause, UnicodeDecodeError):
        return CorruptionError  # sqlite3, when there is damage in its own message
    if isinstance(cause, (OverflowError, UnicodeEncodeError)):
        return InvalidInputError
    state = _state(cause)
    if state:
        return _longest(_POSTGRES, state)
    if isinstance(cause, sqlite3.OperationalError | sqlite3.DatabaseError):
        return CorruptionError  # e.g. "Could not decode to UTF-8", which carries no code
    return TransientStorageError if type(cause).__name__ == "OperationalError" else StorageError


def _longest(table: dict[str, type[CkptError]], code: str) -> type[CkptError]:
    matches = [head for head in table if code.startswith(head)]
    return table[max(matches, key=len)] if matches else StorageError
