"""The storage contract: what every store MUST do, and the reason for each rule.

Duty: name the operations, the keys, the abilities and the errors that the rooms above rely on.
Invariant: a value is stored whole or not at all, for every reader, whatever dies.
Must not know: hashes, packs, refs, tensors or SQL; a value is bytes.

The rules in words for adapter writers are in docs/adding-a-store.md (how to add one: docs/adding.md); the same rules as
running checks are `cas_ckpt.testing.StoreConformance`.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import (
    CkptError,
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    OutOfSpaceError,
    PermissionDeniedError,
    StorageError,
    TooLargeError,
)
from cas_ckpt.native import Part

MAX_KEY_BYTES = 1024
"""Longest key: the limit of S3 and GCS, kept by every store so that a repository can move."""

MAX_PART_BYTES = 255
"""Longest part of a key: the limit of a file name."""

MOST_VALUE_BYTES = 8 * 1024 * 1024
"""Longest value that `get` answers: it is for records, and what is longer is read in ranges."""

MOST_KEYS = 100_000
"""Keys of records of one kind, that `few_keys` answers."""

RESERVED_PART = "tmp"
"""First part that no key may have: file stores keep what is not yet a value there."""

_PART = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_PART_BYTES}}}")
_STEM = re.compile(rf"[A-Za-z0-9._-]{{0,{MAX_PART_BYTES}}}")


@dataclass(frozen=True, slots=True)
class Abilities:
    """Optional abilities of a store beyond the contract; declared, never faked.

    Attributes:
        durable: What a write returned for outlives the process and a power failure; else no other process has it.
        local: The values are on this computer: to read them twice costs little.
        conditional: `put_if_absent` and `compare_and_swap` are honoured by the medium. Where
            this is False both MUST raise `StorageError`: a silently ignored condition loses commits.
        read_only: Every write raises `PermissionDeniedError`.
        parallel: Requests at once that are of use: 1 where the medium answers at once, more where each waits for a
            network. Readers choose their threads by it.
        max_key_bytes: Longest key; shorter than `MAX_KEY_BYTES` where a prefix takes a part of the name.
        writer_bytes: Memory that each open writer takes. in_flight_bytes: What all writers take besides, together.
    """

    durable: bool
    local: bool
    conditional: bool = True
    read_only: bool = False
    parallel: int = 1
    max_key_bytes: int = MAX_KEY_BYTES
    writer_bytes: int = 0
    in_flight_bytes: int = 0


@runtime_checkable
class StreamWriter(Protocol):
    """A value that is being written in pieces; a context manager that aborts unless committed.

    One thread at a time. After a write or commit that raised, the writer is poisoned: it
    MUST refuse everything but `abort` (after a failed fsync the kernel may have dropped the
    pages, so that a second fsync would report success for bytes that are gone).
    """

    def write(self, data: Buffer) -> None:
        """Append `data`; it MUST NOT be kept after return, for callers reuse their buffers."""
        ...

    def commit(self) -> None:
        """Make the value visible, whole and durable.

        Raises:
            ConflictError: the key has a value, which stays as it is (streamed keys are write-once).
        """
        ...

    def abort(self) -> None:
        """Forget what was written; harmless when called twice, or after `commit`."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class OneWriter(StreamWriter):
    """What writers have in common: one that was committed, aborted, or that an error poisoned, refuses more."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._open = True

    def _leave_open(self) -> None:
        """Poison the writer for as long as the caller is at work: an error leaves it so."""
        if not self._open:
            raise StorageError(
                f"{self._key}: this writer was committed, aborted or poisoned by an error; open a new one"
            )
        self._open = False


@runtime_checkable
class Store(Protocol):
    """Key -> bytes.

    Every method MAY be called from many threads at once. Every method that takes a key MUST
    refuse a bad one by `check_key` before it touches the medium. Errors of the medium MUST be
    translated (`PermissionDeniedError`, `OutOfSpaceError`, `NotFoundError`, else `StorageError`)
    and name the key. A `StorageError` from a write means "outcome unknown": the caller reads
    back, and its values carry nonces so that it can tell.
    """

    @property
    def url(self) -> str:
        """Where the values are, in a form that `open_store` takes."""
        ...

    @property
    def abilities(self) -> Abilities:
        """Optional abilities of this store."""
        ...

    def get(self, key: str) -> bytes:
        """The whole value: MUST be the newest one, for refs are read this way.

        Raises:
            NotFoundError: no such key.
            CorruptionError: longer than `MOST_VALUE_BYTES`, which MUST be found out before so much memory is taken:
                what is stored, and what a server claims, may be by somebody who means harm.
        """
        ...

    def get_range(self, key: str, offset: int, length: int) -> Buffer:
        """Exactly `length` bytes from `offset`, as read-only bytes or a view that stays valid.

        Other processes MUST treat the key as write-once: a store MAY keep it open. Once it is replaced or deleted
        through this handle, the old bytes MUST NOT be returned.

        Raises:
            NotFoundError: no such key.
            CorruptionError: the value ends before the range does (never a short answer: a
                truncated pack must not look like a small one).
        """
        ...

    def get_tail(self, key: str, length: int) -> tuple[int, bytes]:
        """(size of the value, its last min(length, size) bytes): one trip for a pack's directory.

        Raises:
            NotFoundError: no such key.
        """
        ...

    def read_into(self, key: str, offset: int, target: memoryview, *, cached_only: bool = False) -> bool:
        """Fill `target` whole from `offset` and answer True.

        With `cached_only` the store MAY answer False instead of touching the medium, and then
        the content of `target` is undefined: so a caller can take what is in memory already
        and leave the rest to its readers.

        Raises:
            NotFoundError, CorruptionError: as `get_range`.
            InvalidInputError: `target` cannot be written or is not contiguous.
        """
        ...

    def prefetch(self, key: str, offset: int, length: int) -> None:
        """Hint that the range will be read soon; MUST NOT fail for a key that is not there."""
        ...

    def put(self, key: str, data: Buffer) -> None:
        """Set the value; atomic, and durable on return. Replaces an older value."""
        ...

    def open_writer(self, key: str) -> StreamWriter:
        """A streamed, write-once `put`; nothing is visible before its `commit`."""
        ...

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Create the value; of any number of racing calls exactly one MUST succeed.

        Raises:
            ConflictError: the key has a value, which stays as it is.
        """
        ...

    def compare_and_swap(self, key: str, expected: bytes, data: Buffer) -> None:
        """Replace `expected` by `data` in one step: the commit point of the whole project.

        Raises:
            ConflictError: the value is not `expected`, or is gone; it stays as it is.
        """
        ...

    def head(self, key: str) -> int:
        """Size of the value in bytes.

        Raises:
            NotFoundError: no such key.
        """
        ...

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """(key, size in bytes) of every key that starts with the string `prefix`, by code point.

        Whole values only. A key that is there from start to end of the listing MUST be listed,
        and an error on the way MUST raise: garbage collection deletes what it does not see used.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove the value, durably; a key that is not there is not an error (deletes are redone)."""
        ...

    def close(self) -> None:
        """Release descriptors and connections; values stay. Harmless when called twice."""
        ...


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Unfinished values that writers left when they died."""

    num_files: int = 0
    num_bytes: int = 0

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Leftovers:
        """Those of these sizes, in bytes."""
        return cls(len(sizes), sum(sizes))


@runtime_checkable
class LeavesTemporaries(Protocol):
    """A store in which a writer that is killed leaves an unfinished value; such a value is never listed."""

    def sweep_temporaries(self, before_s: float, *, dry_run: bool = False) -> Leftovers:
        """Remove unfinished values that were last written before `before_s` (seconds since 1970).

        One whose writer lives, in whatever process of this machine, MUST stay, however old it is; a store that cannot
        tell (an object storage) goes by the age alone, and spares what is younger than any value takes.

        Args:
            dry_run: Only count them.
        Returns:
            What was removed (or would be), without those that this process has no right to remove.
        """
        ...


def sweep_temporaries(store: Store, before_s: float, *, dry_run: bool = False) -> Leftovers:
    """The same for any store: some have nothing to sweep."""
    return store.sweep_temporaries(before_s, dry_run=dry_run) if isinstance(store, LeavesTemporaries) else Leftovers()


@dataclass(frozen=True, slots=True)
class ListedVersion:
    """A value as a listing shows it; `version` changes whenever the value does, and means nothing else."""

    key: str
    num_bytes: int
    version: str


@runtime_checkable
class ListsVersions(Protocol):
    """A store whose listing tells which values changed since the last one, without reading them."""

    def list_versions(self, prefix: str) -> Iterator[ListedVersion]:
        """As `Store.list`, with the version of each value."""
        ...


@runtime_checkable
class EmulatesConditions(Protocol):
    """A store whose service may ignore conditions, and that can do without, for one writer at a time."""

    def emulate_conditions(self) -> None:
        """From now on `put_if_absent` and `compare_and_swap` read before they write.

        That is no single step: a second process that writes meanwhile, garbage collection included, loses data.
        """
        ...


@runtime_checkable
class ReadsLeaves(Protocol):
    """A store that verifies what it reads, and puts it into place, at less than the cost of a read and a copy."""

    def read_leaves(
        self, key: str, offset: int, first: int, size: int, leaf_bytes: int, digests: Buffer | None,
        parts: Sequence[Part], cached_only: bool = False,
    ) -> int:  # fmt: skip
        """As `native.read_leaves` of the value: how many leaves are intact and in place.

        Raises:
            NotFoundError, CorruptionError: as `Store.get_range`.
        """
        ...


@runtime_checkable
class ReadsPastCache(Store, Protocol):
    """A store that reads from its medium without leaving what it read in the memory of the operating system.

    Attributes:
        block_bytes: Offsets, lengths and addresses are multiples of it.
    """

    block_bytes: int

    def read_past_cache(self, key: str, offset: int, target: memoryview) -> int | None:
        """Bring what there is from `offset` on into `target`: how many bytes, fewer at the end of the value only.

        None, `target` being undefined, where the medium cannot do this.

        Raises:
            NotFoundError: no such key.
        """
        ...


@runtime_checkable
class DeletesMany(Protocol):
    """A store that deletes many keys at less than the cost of each."""

    def delete_many(self, keys: Sequence[str]) -> None:
        """As `Store.delete` of each, in any order; all are gone durably when it returns, some when it raises."""
        ...


def delete_many(store: Store, keys: Sequence[str]) -> None:
    """Remove these keys durably; those that are not there are no error."""
    if isinstance(store, DeletesMany):
        store.delete_many(keys)
        return
    for key in keys:
        store.delete(key)


def exists(store: Store, key: str) -> bool:
    """Whether something is stored under `key`."""
    try:
        store.head(key)
    except NotFoundError:
        return False
    return True


def few_keys(
    store: Store, prefix: str, *, most: int | None = None, instead: str = "nobody writes so many"
) -> list[str]:
    """The keys that start with `prefix`, under which there are records: few, except in a hostile store.

    Args:
        most: How many that may be; None: `MOST_KEYS`. instead: What the message says of more.
    Raises:
        TooLargeError: more.
    """
    most = MOST_KEYS if most is None else most
    keys = [key for key, _ in islice(store.list(prefix), most + 1)]
    if len(keys) > most:
        raise TooLargeError(f"{store.url} has more than {most} records under {prefix}: {instead}")
    return keys


def check_key(key: str) -> str:
    """`key`, if every store can hold it.

    Raises:
        InvalidInputError: empty, too long, reserved, or with characters or parts that a file
            system or a URL would read as something else.
    """
    if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY_BYTES:
        raise InvalidInputError(f"a key is text of 1 to {MAX_KEY_BYTES} characters, found {key!r:.80}")
    return _checked(key)


@lru_cache(maxsize=4096)
def _checked(key: str) -> str:
    """`key`, if its parts are allowed; the same few keys are asked for again and again."""
    parts = key.split("/")
    if parts[0] == RESERVED_PART:
        raise InvalidInputError(f"key {key!r:.80} starts with {RESERVED_PART!r}, which is reserved for temporaries")
    for part in parts:
        if part in (".", "..") or not _PART.fullmatch(part):
            raise InvalidInputError(
                f"key {key!r:.80}: part {part!r:.80} must be 1 to {MAX_PART_BYTES} of [A-Za-z0-9._-] "
                "and neither '.' nor '..'"
            )
    return key


def is_key(text: str) -> bool:
    """Whether every store can hold a value under `text`."""
    try:
        check_key(text)
    except InvalidInputError:
        return False
    return True


def check_prefix(prefix: str) -> str:
    """`prefix`, if it is the beginning of some key.

    Raises:
        InvalidInputError: no key could start like this.
    """
    folder, _, stem = prefix.rpartition("/")
    if folder or prefix.startswith("/"):
        check_key(folder)
    if not _STEM.fullmatch(stem):
        raise InvalidInputError(f"prefix {prefix!r:.80}: {stem!r:.80} must be of [A-Za-z0-9._-]")
    return prefix


def check_range(key: str, offset: int, length: int) -> None:
    """Refuse a range that no value can have.

    Raises:
        InvalidInputError: negative offset or length.
    """
    if offset < 0 or length < 0:
        raise InvalidInputError(f"{key}: a range needs offset and length >= 0, found {offset} and {length}")


def byte_view(data: Buffer) -> memoryview:
    """`data` as a flat view of its bytes, without a copy.

    Raises:
        InvalidInputError: `data` is not contiguous, or of a format that has no plain bytes.
    """
    view = memoryview(data)
    if view.format == "B" and view.ndim == 1 and view.c_contiguous:
        return view
    if view.nbytes == 0:
        return memoryview(b"")
    try:
        return view.cast("B")
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"a value must be contiguous plain bytes: {error}") from error


def writable_view(target: memoryview) -> memoryview:
    """`target` as a flat writable view of its bytes.

    Raises:
        InvalidInputError: read-only or not contiguous.
    """
    if target.readonly:
        raise InvalidInputError("the target of read_into is read-only; pass a writable view")
    return byte_view(target)


class Closed:
    """Replaces the store and the index of a repository that was closed."""

    def __init__(self, url: str) -> None:
        self.url = url

    def close(self) -> None:
        """Nothing is left to be closed."""

    def __getattr__(self, name: str) -> Any:
        raise InvalidInputError(f"{self.url} was closed: open it again")


# --- what to raise when the operating system, or a short value, refuses ------------------------
# Every error names the key and what was being done, and chains its cause.

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


class reading:  # noqa: N801 - a function for those who use it; as a generator it took longer than a call of the system
    """Translate every OSError of the block; a file that is not there is a key that is not there."""

    __slots__ = ("_key",)

    def __init__(self, key: str) -> None:
        self._key = key

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError):
            # Under no name: this frame is in the error's traceback, and a cycle would keep all that its callers hold.
            raise (
                missing(self._key) if error.errno in _MISSING else translated(error, "reading", self._key)
            ) from error


@contextmanager
def writing(key: str) -> Iterator[None]:
    """Translate every OSError of the block."""
    try:
        yield
    except OSError as error:
        if error.errno in _NESTED:
            raise InvalidInputError(f"{key}: is a folder of other keys, or is below a key that is a value") from error
        raise translated(error, "writing", key) from error


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


def too_long(key: str, size: int) -> CorruptionError:
    """The error of `get` for a value of `size` bytes."""
    return CorruptionError(
        f"{key}: {size} bytes, and no record is longer than {MOST_VALUE_BYTES}: nobody reads it whole; restore it from "
        "a copy, or delete it"
    )


def too_short(key: str, offset: int, length: int, size: int) -> CorruptionError:
    """The error for a range that reaches past the end of its value."""
    return CorruptionError(
        f"{key}: wanted bytes {offset} to {offset + length}, but the value ends at {size}: "
        "truncated; restore it from a copy"
    )
