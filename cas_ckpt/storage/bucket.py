"""`Bucket`: what a vendor of object storage implements for `ObjectStore`; and what vendors have in common.

    the interface   the requests, what they answer, and errors that are typed for the caller. Versions are opaque text
                    (S3: ETag; Google Cloud Storage: generation); two values never share one
    the client      timeouts of HTTP, a client for each process, bounded answers, errors without secrets

Python's HTTP client accepts a truncated head, so headers that were sent are missing. It applies its timeout to each
piece received, so a server that sends a byte now and then keeps it waiting forever; and to a request body as a whole,
so an upload that is slow but makes progress is given up.

    1. the head, from the first byte to the empty line, comes within the timeout, or TimeoutError is raised
    2. a head that ends before its empty line is a ConnectionResetError: the request is sent again, as after any break
    3. of the body at least `LEAST_BYTES` come in each such time, or its end
    4. of a request each `LEAST_BYTES` go within the timeout of the connection

Only the time that is spent waiting for the server counts: the reader may pause.

Invariant: what a server says takes bounded memory and time, and is shown without secrets and control characters.
Must not know: keys, parts of reads, vendors.
"""

from __future__ import annotations

import http.client
import io
import re
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cas_ckpt import clock
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


# --- what vendors have in common: timeouts of HTTP ---------------------------------------------

LEAST_BYTES = 32 << 10


class _TimedStream(io.RawIOBase):
    """Reads from `connection`, with a deadline."""

    def __init__(self, stream: Any, connection: socket.socket) -> None:
        self._stream = stream
        self._connection = connection
        self._timeout_s = connection.gettimeout()
        self._left_s = self._timeout_s
        self._num_bytes = 0
        self.in_head = True

    def body_follows(self) -> None:
        """The head has come."""
        self.in_head = False
        self._left_s, self._num_bytes = self._timeout_s, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._left_s is None:  # the connection was made without a timeout
            return int(self._stream.readinto(buffer))
        if self._left_s <= 0:
            raise TimeoutError(f"{self._num_bytes} bytes came in {self._timeout_s} s: too slow to go on")
        before_s = clock.monotonic_s()
        self._connection.settimeout(self._left_s)
        try:
            got = int(self._stream.readinto(buffer))
        finally:
            self._connection.settimeout(self._timeout_s)
            self._left_s -= clock.monotonic_s() - before_s
        if not got and self.in_head and self._num_bytes:
            raise ConnectionResetError("the connection was closed before the headers had come whole")
        self._num_bytes += got
        if self._num_bytes >= LEAST_BYTES and not self.in_head:
            self._left_s, self._num_bytes = self._timeout_s, 0
        return got

    def close(self) -> None:
        self._stream.close()
        super().close()


class TimedAnswer(http.client.HTTPResponse):
    """An HTTP response with a deadline for its head and a least rate for its body."""

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self._timed = _TimedStream(self.fp.detach(), sock)
        self.fp = io.BufferedReader(self._timed)

    def begin(self) -> None:
        """Read the head."""
        super().begin()
        self._timed.body_follows()


class _TimedConnection:
    response_class = TimedAnswer

    def send(self, data: Any) -> None:
        """Send `data`, in pieces; a file, or another iterable, comes in pieces of its own."""
        if isinstance(data, (bytes, bytearray, memoryview)):
            view = memoryview(data)
            for at in range(0, view.nbytes, LEAST_BYTES):
                super().send(view[at : at + LEAST_BYTES])  # type: ignore[misc]
        else:
            super().send(data)  # type: ignore[misc]


def timed(pools: Mapping[str, Any]) -> dict[str, Any]:
    """The same classes of pools of connections (those of urllib3), whose requests and answers are timed.

    Those that are timed already stay: one adapter may be reached by several ways.
    """
    made = dict(pools)
    for scheme, pool in pools.items():
        if issubclass(pool.ConnectionCls, _TimedConnection):
            continue
        connection = type(pool.ConnectionCls.__name__, (_TimedConnection, pool.ConnectionCls), {})
        made[scheme] = type(pool.__name__, (pool,), {"ConnectionCls": connection})
    return made


# --- one client a process, bounded answers, errors without secrets -----------------------------

_MOST_REPLY_BYTES = 32 << 20
"""Longest answer that is not an object: a page of a listing is some hundred KB."""

_LONGEST_REPLY_S = 120


class ClientOfProcess:
    """A vendor's client, made with the first request, as it reads files and looks for credentials. Threads share it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._client: Any = None
        self._lock = threading.RLock()

    def get(self) -> Any:
        """The client of this process."""
        client = self._client
        if client is not None:
            return client
        with self._lock:
            if self._client is None:
                self._client = self._make()
            return self._client

    @property
    def made(self) -> Any:
        """The client, or None before the first request."""
        return self._client

    def close(self) -> None:
        """Close its connections; the next request makes a new client."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def after_fork(self) -> None:
        """In a child process: the connections are the parent's."""
        self._lock = threading.RLock()
        self._client = None


def whole_reply(pieces: Iterable[bytes], drop: Callable[[], object]) -> bytes:
    """An answer that is not an object, from its pieces.

    Raises:
        StorageError: it is too long, or takes too long; `drop` was called then.
    """
    begun_s, taken, size = clock.monotonic_s(), [], 0
    for piece in pieces:
        taken.append(piece)
        size += len(piece)
        if size > _MOST_REPLY_BYTES or clock.monotonic_s() - begun_s > _LONGEST_REPLY_S:
            drop()
            raise StorageError(
                f"an answer of more than {_MOST_REPLY_BYTES >> 20} MiB, or of {_LONGEST_REPLY_S} s: it was dropped"
            )
    return b"".join(taken)


_SHORT = 8


def _found(secret: str) -> re.Pattern[str]:
    """Where a text says `secret`; a short one only as a word of its own, for it may be part of any."""
    literal = re.escape(secret)
    return re.compile(rf"(?<![A-Za-z0-9]){literal}(?![A-Za-z0-9])" if len(secret) < _SHORT else literal)


def shown(text: str, secrets: Collection[str]) -> str:
    """`text` without secrets, which a hostile server may send back, and without what moves the cursor of a terminal."""
    for secret in secrets:
        text = _found(secret).sub("***", text)
    return "".join(character if character.isprintable() else "?" for character in text)


def is_clean(error: BaseException | None, secrets: Collection[str]) -> bool:
    """Whether the texts of `error`, and of what it was raised from, hold no secret."""
    while error is not None:
        if any(_found(secret).search(str(error)) for secret in secrets):
            return False
        error = error.__cause__ or error.__context__
    return True
