"""Every error that cas_ckpt raises on purpose, grouped by what the caller does next.

    CkptError
    ├── NotFoundError (KeyError)         object, ref, repository or key     ask for something else
    │   └── NoRepositoryError            the path holds no repository       init, or another path
    ├── ConflictError                    ref moved, already exists          re-read and retry
    ├── InvalidInputError (ValueError)   spec mismatch, bad name, bad file  fix the call
    │   ├── AmbiguousIdError             means several ids, or several refs give more digits, or refs/...
    │   ├── MismatchError                target and commit do not agree     fix the target
    │   ├── MemoryBudgetError            memory_bytes is too little         give what it says
    │   ├── FrozenChangedError           a tensor declared frozen changed   thaw it, or find who wrote
    │   ├── StateChangedError            changed before it was staged       wait_staged(), or snapshot="copy"
    │   └── UnsupportedValueError        a value that cannot be expressed   drop it, or allow_pickle
    ├── TooLargeError                    more entries, bytes, rows or time  ask for less, or raise the limit
    ├── PartialRestoreError              an object's load_state_dict raised mend it, check out again
    ├── CorruptionError                  digest mismatch, truncation        restore it from a copy
    ├── SignatureError                   unsigned, bad, or by nobody trusted sign it, or see whose key it is
    ├── UnsupportedVersionError          newer format or schema             upgrade cas_ckpt
    ├── StorageError                     the environment refused            look at the cause
    │   ├── TransientStorageError        a retry may help                   retried already; try later
    │   ├── PermissionDeniedError        read-only, access denied           fix the rights
    │   └── OutOfSpaceError              no space left                      free space, commit again
    ├── BackgroundCommitError            a commit in the background failed  see its cause; commit again
    ├── CancelledError                   a pending commit was cancelled     nothing
    ├── StillPendingError (TimeoutError) it has not ended in time           wait longer
    ├── PeerError                        another rank failed or is gone     mend that rank; abort the step together
    ├── WorkerError                      a commit's own process died        see why it did; commit again
    └── InternalError                    our bug                            report it

A message says what was wanted, what was found and what to do. `exit_code` is what the
command line returns for that kind of error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import PurePath
from typing import ParamSpec, TypeVar

E = TypeVar("E", bound="CkptError")
P = ParamSpec("P")
T = TypeVar("T")


class CkptError(Exception):
    """The root of every error that cas_ckpt raises on purpose.

    Attributes:
        overwritten: Keys of tensors into which `checkout(atomic=False)` had written something when it raised this.
    """

    exit_code = 1
    overwritten: tuple[str, ...] = ()


class NotFoundError(CkptError, KeyError):
    """An object, ref or key that was asked for is not there."""

    exit_code = 15

    def __str__(self) -> str:
        # KeyError quotes its argument, which spoils a sentence.
        return Exception.__str__(self)


class NoRepositoryError(NotFoundError):
    """The path or URL holds no repository."""

    exit_code = 10


class ConflictError(CkptError):
    """Somebody else changed the value first, or it exists already."""

    exit_code = 14


class InvalidInputError(CkptError, ValueError):
    """The call, its arguments or an input file cannot be accepted as they are."""

    exit_code = 2


class AmbiguousIdError(InvalidInputError):
    """First digits of several ids, or a name of several refs, or of a ref and an id."""


class MismatchError(InvalidInputError):
    """The target state and the commit do not agree in keys, shapes, dtypes or ties."""


class MemoryBudgetError(InvalidInputError):
    """The memory budget (`memory_bytes=`) is too small for the call.

    Attributes:
        least_bytes: With so much it can.
    """

    def __init__(self, message: str, *, least_bytes: int = 0) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


class TooLargeError(CkptError):
    """More than this call may make or take: entries or bytes of a state (`cas_ckpt.limits`), rows or time of SQL."""


class PartialRestoreError(CkptError):
    """A target's own `load_state_dict` raised (the cause is chained) when other parts were restored already.

    Attributes:
        key: Of the object that raised.
        restored: Keys of the objects that took their state before it.
    """

    exit_code = 3

    def __init__(self, message: str, *, key: str = "", restored: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.key = key
        self.restored = restored


class FrozenChangedError(InvalidInputError):
    """A tensor that was declared frozen does not hold the bytes that it held."""


class StateChangedError(InvalidInputError):
    """A tensor was changed after an asynchronous commit was called and before it was staged: nothing is published."""


class UnsupportedValueError(InvalidInputError):
    """A value that the format cannot express, and `allow_pickle` was not given."""


class CorruptionError(CkptError):
    """Stored bytes are not the bytes that were written: never restored, always reported."""

    exit_code = 13


class SignatureError(CkptError):
    """A commit or tag that had to be signed by somebody trusted, and is not."""

    exit_code = 17


class UnsupportedVersionError(CkptError):
    """Written by a newer format or schema than this version knows."""

    exit_code = 16


class StorageError(CkptError):
    """The storage environment refused; the cause is chained."""


class TransientStorageError(StorageError):
    """A failure that a retry may cure."""


class PermissionDeniedError(StorageError):
    """Read-only storage, or rights that are missing."""

    exit_code = 12


class OutOfSpaceError(StorageError):
    """No space is left on the device or in the quota."""


class BackgroundCommitError(CkptError):
    """An earlier `commit_async` failed (the cause is chained) and its result was never read; raised once."""


class CancelledError(CkptError):
    """A pending commit was cancelled: it is not made."""


class StillPendingError(CkptError, TimeoutError):
    """A pending commit has not ended within the time that the caller gave it; it goes on."""


class PeerError(CkptError):
    """Another rank failed, died, took too long or disagreed; says who and what. This rank did nothing wrong.

    Attributes:
        ranks: The ranks that are to blame, as far as known.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class WorkerError(CkptError):
    """The process that made the commit (`worker="process"`) died or was stopped for long; the commit is not made.

    The next commit starts another one.
    """


class InternalError(CkptError):
    """An invariant of cas_ckpt itself does not hold: a bug of ours."""


_PLAIN = (type(None), bool, int, float, complex, str, bytes, PurePath)
_MOST_SHOWN = 80
_MOST_BITS = 256
"""Longer integers are not written out: Python refuses some thousands of digits."""
_FEW = 4


def out_of_memory(error: MemoryError) -> TooLargeError:
    """The error to raise for a `MemoryError` inside a call."""
    return TooLargeError(
        f"there is no memory left ({str(error) or 'the system gives none'}): this process or its container is limited "
        "(ulimit -v, -u): raise the limit, or take less: with cas_ckpt.limits(num_threads=..., memory_bytes=...)"
    )


def translates_memory_errors(call: Callable[P, T]) -> Callable[P, T]:
    """`call`, which raises a `MemoryError` in it as `TooLargeError`."""

    @wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except MemoryError as error:
            raise out_of_memory(error) from error

    return called


def shown_value(given: object) -> str:
    """How a message shows what somebody passed: plain values as they are written, others by their kind.

    The text of an unknown object is not asked for: it may be long, may raise and, of a tensor whose memory was
    freed, ends the process.
    """
    if isinstance(given, type):
        return f"the class {given.__name__}"
    if isinstance(given, int) and not _is_short(given):
        return f"an integer of {given.bit_length()} bits"
    if isinstance(given, _PLAIN):
        return _cut(repr(given))
    name = type(given).__name__
    shape = getattr(given, "shape", None)
    if isinstance(shape, tuple):
        return f"a {name} of shape {tuple(shape)}"
    if type(given) in (list, tuple, set) and len(given) <= _FEW and all(map(_is_short, given)):  # type: ignore[arg-type,call-overload]
        return _cut(repr(given))
    if isinstance(given, (list, tuple, dict, set, frozenset)):
        return f"a {name} of {len(given)}"
    return f"a {name}" if name[:1].lower() not in "aeiou" else f"an {name}"


def _is_short(given: object) -> bool:
    return isinstance(given, _PLAIN) and not (isinstance(given, int) and given.bit_length() > _MOST_BITS)


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def reworded(error: E, message: str) -> E:
    """The same error, all of its attributes too, with another message: to be raised from the first."""
    made = type(error).__new__(type(error), message)  # not called: some take other arguments than a message
    vars(made).update(vars(error))
    return made
