"""What to raise when the operating system, or a short value, refuses.

Invariant: every error names the key and what was being done, and chains its cause.
Must not know: which store asks.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from cas_ckpt.errors import (
    CkptError,
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    OutOfSpaceError,
    PermissionDeniedError,
    StorageError,
)

_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP})  # ELOOP: a link is no value
_NESTED = frozenset({errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY})


def translated(error: OSError, doing: str, where: str) -> CkptError:
    """The typed error for `error`, raised while `doing` something at `where` (a key or path)."""
    code = error.errno
    why = error.strerror or str(error)
    if code in _DENIED:
        return PermissionDeniedError(f"{doing} {where}: {why}; check owner and mode, and that it is not read-only")
    if code in _FULL:
        return OutOfSpaceError(f"{doing} {where}: {why}; free some space and repeat, what was stored stays valid")
    return StorageError(f"{doing} {where}: {why} ({errno.errorcode.get(code or 0, code)})")


@contextmanager
def reading(key: str) -> Iterator[None]:
    """Translate every OSError of the block; a file that is not there is a key that is not there."""
    try:
        yield
    except OSError as error:
        raise (missing(key) if error.errno in _MISSING else translated(error, "reading", key)) from error


@contextmanager
def writing(key: str) -> Iterator[None]:
    """Translate every OSError of the block."""
    try:
        yield
    except OSError as error:
        if error.errno in _NESTED:
            raise InvalidInputError(f"{key}: is a folder of other keys, or lies below a key that is a value") from error
        raise translated(error, "writing", key) from error


@contextmanager
def listing(folder: str) -> Iterator[None]:
    """Translate every OSError of the block: a listing that is cut short must not look whole."""
    try:
        yield
    except OSError as error:
        raise translated(error, "listing", folder) from error


def missing(key: str) -> NotFoundError:
    """The error for a key that has no value."""
    return NotFoundError(f"{key}: there is no such key")


def already_there(key: str) -> ConflictError:
    """The error for a write-once key that has a value."""
    return ConflictError(f"{key}: exists already and is kept as it is; choose another key, or read it first")


def changed_meanwhile(key: str, *, gone: bool) -> ConflictError:
    """The error for a swap whose expectation does not hold."""
    found = "it is gone" if gone else "somebody else changed it"
    return ConflictError(f"{key}: is not what the swap expected, {found}; read it again and retry")


def too_short(key: str, offset: int, length: int, size: int) -> CorruptionError:
    """The error for a range that reaches past the end of its value."""
    return CorruptionError(
        f"{key}: wanted bytes {offset} to {offset + length}, but the value ends at {size}: "
        "truncated; restore it from a copy"
    )
