"""`Bucket`: the interface that a vendor of object storage implements for `ObjectStore`.

Duty: the requests, what they answer, and errors that are typed for the caller.
Invariant: versions are opaque text (S3: ETag; Google Cloud Storage: generation); two values never share one.
Must not know: keys, parts of reads, vendors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from cas_ckpt.errors import CkptError, ConflictError, StorageError

ABSENT = ""
"""As `if_version`: only if there is no such object."""


class ConditionFailed(ConflictError):
    """The condition of a request does not hold.

    Attributes:
        retried: The vendor had sent the request before, so that it may have met its own write.
    """

    def __init__(self, message: str, *, retried: bool = False) -> None:
        super().__init__(message)
        self.retried = retried


class RangeNotThere(StorageError):
    """The object ends before the range begins."""


class UploadGone(StorageError):
    """There is no such upload: completed by an attempt whose reply was lost, or aborted."""


@dataclass(frozen=True, slots=True)
class Head:
    """Metadata of an object; `nonce` is empty if it was written without."""

    size: int
    version: str
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class Listed:
    """An object of a listing; `name` is its whole name in the bucket."""

    name: str
    size: int
    version: str


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a listing.

    Attributes:
        items: In order of their names.
        more: Others may follow.
    """

    items: Sequence[Listed]
    more: bool


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload that was begun and neither completed nor aborted.

    Attributes:
        age_s: By the server's clock, so that a wrong clock here does no harm.
    """

    name: str
    id: str
    age_s: float


class Body(Protocol):
    """The bytes of an answer as they come."""

    def readinto(self, target: memoryview) -> int:
        """Bytes that were put at the beginning of `target`; 0 at the end.

        Raises:
            TransientStorageError: the connection broke off, or nothing came for too long.
        """
        ...

    def close(self) -> None:
        """Give the connection back, or drop it if bytes are left; harmless when called twice."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a read: `body` has the bytes from `first` to `first + length` of a value of `size` bytes."""

    size: int
    version: str
    first: int
    length: int
    body: Body


class Bucket(Protocol):
    """The requests of `ObjectStore` to a vendor. Names are whole names of objects; every call is one request or few.

    Every method may be called from many threads. Errors are those of `cas_ckpt.errors`, they name the object and hold
    no secret: `NotFoundError` for an object that is not there (and nothing else: a missing bucket is `StorageError`),
    `PermissionDeniedError`, `TransientStorageError` once the vendor's own retries gave up, else `StorageError`.
    """

    part_bytes: int
    """Size of a part of an upload; values up to this are written by one request."""

    max_parts: int
    """Parts of an upload at most."""

    parallel: int
    """Requests at once that are of use."""

    deleted_at_once: int
    """Names that `delete` takes at most."""

    def read(self, name: str, first: int = 0, length: int | None = None, *, if_version: str | None = None) -> Answer:
        """The bytes from `first` on, `length` (> 0) of them or up to the end; fewer if the object ends before.

        Raises:
            NotFoundError, RangeNotThere. ConditionFailed: it is not of `if_version`.
        """
        ...

    def read_tail(self, name: str, length: int) -> Answer:
        """The last `length` (> 0) bytes, or all; of an empty object an empty answer, or RangeNotThere."""
        ...

    def head(self, name: str) -> Head:
        """Size, version and nonce."""
        ...

    def put(self, name: str, data: memoryview, *, nonce: str, if_version: str | None = None) -> str:
        """Write an object whole; its version.

        Raises:
            ConditionFailed: it is not of `if_version`, or is there and that is `ABSENT`.
        """
        ...

    def list_page(self, prefix: str, after: str) -> Page:
        """Objects whose names start with `prefix` and come after the name `after` ("": from the first on)."""
        ...

    def delete(self, names: Sequence[str]) -> dict[str, CkptError]:
        """Remove them; those that could not be removed, with the reason. One that is not there is removed."""
        ...

    def begin(self, name: str, *, nonce: str) -> str:
        """Begin an upload; its id."""
        ...

    def put_part(self, name: str, upload: str, number: int, data: memoryview) -> str:
        """Send part `number` (from 1 on), maybe again; its tag for `complete`."""
        ...

    def complete(self, name: str, upload: str, tags: Sequence[str], *, if_version: str | None = None) -> str:
        """Make the object of its parts; its version.

        Raises:
            ConditionFailed: as `put`. UploadGone.
        """
        ...

    def abort(self, name: str, upload: str) -> None:
        """Forget an upload and its parts; one that is not there is forgotten."""
        ...

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Unfinished uploads of objects whose names start with `prefix`."""
        ...

    def upload_bytes(self, name: str, upload: str) -> int:
        """Bytes of the parts that an unfinished upload has."""
        ...

    def close(self) -> None:
        """Close connections; the next call makes new ones."""
        ...

    def after_fork(self) -> None:
        """In a child process: drop the connections without using or closing them, for they are the parent's."""
        ...
