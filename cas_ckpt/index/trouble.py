"""What to raise when a database refuses.

Invariant: no error of SQLAlchemy, of sqlite3 or of a PostgreSQL driver leaves the index room.
Must not know: which question was being asked.
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from cas_ckpt.errors import (
    CkptError,
    CorruptionError,
    InvalidInputError,
    OutOfSpaceError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)

REBUILD = "it holds nothing that the packs do not hold: run `cas-ckpt index rebuild`"

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

_POSTGRES = {
    "08": TransientStorageError,
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
    return kind(f"index {place}: {str(cause).strip() or type(cause).__name__}; {_ADVICE[kind]}")


def _kind(cause: BaseException) -> type[CkptError]:
    sqlite_name = getattr(cause, "sqlite_errorname", None)
    if sqlite_name:
        return _longest(_SQLITE, sqlite_name)
    state = getattr(cause, "sqlstate", None)
    if state:
        return _longest(_POSTGRES, state)
    if isinstance(cause, sqlite3.OperationalError | sqlite3.DatabaseError):
        return CorruptionError  # e.g. "Could not decode to UTF-8", which carries no code
    return TransientStorageError if type(cause).__name__ == "OperationalError" else StorageError


def _longest(table: dict[str, type[CkptError]], code: str) -> type[CkptError]:
    matches = [head for head in table if code.startswith(head)]
    return table[max(matches, key=len)] if matches else StorageError
