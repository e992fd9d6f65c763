"""`ObjectStore`: the `Store` over any object storage. A vendor's file implements `Bucket`, and nothing else.

Who does what:
    Bucket        one request each, translated errors, the vendor's own retries of requests
    ObjectStore   keys under a prefix; conditions by value; values in parts; bodies that break off are read on

The story of a write: 1. a value of up to one part is one request; 2. a longer one is an upload of parts that are sent
at once by the store's threads; 3. its completion carries the condition, if there is one. Nothing is visible before.

The story of a conditional write: 1. it carries a nonce in the metadata of the object; 2. where the vendor's retry may
have met our own write (`ConditionFailed.retried`), or a reply was lost, the key is looked at: our nonce says that it
was done; 3. what stays unknown is raised as `TransientStorageError`, as the contract wants.

Invariants: bytes of two values are never mixed (every further request of a read asks for the version that it began
with); memory in flight is at most `parallel` parts for the whole store, and one part for each open writer.
Must not know: vendors, URLs; what is stored.
"""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self, TypeVar

from cas_ckpt import clock
from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import (
    CkptError,
    ConflictError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    StorageError,
    TooLargeError,
    TransientStorageError,
)
from cas_ckpt.storage.store import (
    MAX_KEY_BYTES,
    Abilities,
    Leftovers,
    ListedVersion,
    already_there,
    byte_view,
    changed_meanwhile,
    check_key,
    check_prefix,
    check_range,
    too_short,
    writable_view,
)

T = TypeVar("T")

MAX_PREFIX_BYTES = 512
"""Longest prefix: what is left of an object's name has room for every key of a repository."""

ABSENT = ""
"""As `if_version`: only if there is no such object."""

MIN_UPLOAD_AGE_S = 3600.0
"""An unfinished upload that is younger may be of a writer that lives on another machine: a pack takes minutes."""

_READ_BYTES = 1 << 20
"""Bytes taken from a body at once: they stay in the processor's cache on their way to where they go."""

_MOST_AT_ONCE_BYTES = 64 << 20
"""More than this is not allocated on the word of a caller or a server alone."""

_MOST_BREAKS = 5
"""A body may break off so often in a row before `_PROGRESS_BYTES` of it came."""

_PROGRESS_BYTES = 256 << 10
_BREAK_PAUSE_S = 0.2
_PATIENCE_S = 60.0
_LEAST_BYTES = 32 << 10
"""A body that brings less in so long a time is as good as broken off: a server could go on like that for ever."""

_MOST_WHOLE_BYTES = 128 << 20
"""`get` is for records; what is longer is read in ranges."""

_MOST_RESTARTS = 5
"""A value may be replaced so often while it is read."""

_MOST_LISTED = 50_000_000
"""Objects in one listing: more is an endless one."""

_NOTED_VALUES = 256
_NOTED_BYTES = 16 << 10


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
    """What is known of an object without its bytes; `nonce` is empty if it was written without."""

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
    """What came for a read: `body` has the bytes from `first` to `first + length` of a value of `size` bytes."""

    size: int
    version: str
    first: int
    length: int
    body: Body


class Bucket(Protocol):
    """What `ObjectStore` asks of a vendor. Names are whole names of objects; every call is one request or few.

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
        """In a child process: forget connections without a word on them, they are the parent's."""
        ...


# --- threads and memory for parts --------------------------------------------------------------


class PartWorkers:
    """The threads of a store for parts of values, and the buffers of its writers.

    At most `num` parts are in flight. Nothing that a thread does waits for another part, so none waits for ever.
    """

    def __init__(self, num: int, part_bytes: int) -> None:
        self._num = num
        self._part_bytes = part_bytes
        self.reset()

    def reset(self) -> None:
        """Forget everything: in a child process the threads are not there, and locks may be held for ever."""
        self._lock = threading.Lock()
        self._free: list[bytearray] = []
        self._writers = 0
        self._slots = threading.BoundedSemaphore(self._num)
        self._pool: ThreadPoolExecutor | None = None

    def run(self, work: Callable[[], T]) -> Future[T]:
        """Have `work` done by a thread; waits while as many parts are in flight as may be."""
        self._slots.acquire()
        try:
            with self._lock:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(self._num, thread_name_prefix="cas-ckpt-parts")
                pool = self._pool
            future = pool.submit(work)
        except BaseException:
            self._slots.release()
            raise
        future.add_done_callback(lambda _: self._slots.release())
        return future

    def writer_opened(self) -> None:
        """A writer will take buffers; `writer_closed` must follow."""
        with self._lock:
            self._writers += 1

    def writer_closed(self) -> None:
        """After the last one no memory is kept."""
        with self._lock:
            self._writers -= 1
            if self._writers <= 0:
                self._free.clear()

    def buffer(self) -> bytearray:
        """Memory for a part."""
        with self._lock:
            return self._free.pop() if self._free else bytearray(self._part_bytes)

    def give_back(self, buffer: bytearray) -> None:
        """Let another writer have it."""
        with self._lock:
            if self._writers > 0 and len(self._free) < self._num:
                self._free.append(buffer)

    def close(self) -> None:
        """Let the threads end once they have done what they were given."""
        with self._lock:
            pool, self._pool = self._pool, None
            self._free.clear()
        if pool is not None:
            pool.shutdown(wait=True)


_live_uploads: set[str] = set()
"""Uploads of this process that go on: they are no leftovers, however old."""

_stores: weakref.WeakSet[ObjectStore] = weakref.WeakSet()


def _after_fork() -> None:
    _live_uploads.clear()
    for store in list(_stores):
        store.after_fork()


os.register_at_fork(after_in_child=_after_fork)


# --- the store -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Noted:
    """A value as it was last read or written, and its version: what a swap compares needs no request then."""

    value: bytes
    version: str


class ObjectStore:
    """A `Store` over the objects of a `Bucket` whose names start with `prefix`."""

    def __init__(self, bucket: Bucket, prefix: str, *, url: str) -> None:
        """Nothing is asked of the bucket yet.

        Args:
            prefix: Empty, or what `Store` allows for a key, followed by "/".
            url: What opens this store again; it holds no secret.
        """
        if prefix:
            if len(prefix) > MAX_PREFIX_BYTES or not prefix.endswith("/"):
                raise InvalidInputError(f"prefix {prefix!r:.80}: up to {MAX_PREFIX_BYTES} characters that end with '/'")
            check_key(prefix[:-1])
        self.url = url
        self.bucket = bucket
        self.prefix = prefix
        self._workers = PartWorkers(bucket.parallel, bucket.part_bytes)
        self._noted: OrderedDict[str, _Noted] = OrderedDict()
        self._lock = threading.Lock()
        self._one_writer: threading.Lock | None = None
        _stores.add(self)

    @property
    def abilities(self) -> Abilities:
        """See `Store.abilities`."""
        return Abilities(
            durable=True, local=False, parallel=self.bucket.parallel, max_key_bytes=MAX_KEY_BYTES - len(self.prefix)
        )

    def after_fork(self) -> None:
        """Begin anew in a child process."""
        self._lock = threading.Lock()
        if self._one_writer is not None:
            self._one_writer = threading.Lock()
        self._workers.reset()
        self.bucket.after_fork()

    def name(self, key: str) -> str:
        """The object's name for `key`, which is checked."""
        check_key(key)
        name = self.prefix + key
        if len(name) > MAX_KEY_BYTES:
            raise InvalidInputError(f"key {key!r:.80}: with the prefix {self.prefix!r} longer than {MAX_KEY_BYTES}")
        return name

    # --- reading ---------------------------------------------------------------------------------

    def get(self, key: str) -> bytes:
        """See `Store.get`."""
        name = self.name(key)
        value, version = self._steady(name, lambda: self._read_whole(name))
        self._note(key, value, version)
        return value

    def get_range(self, key: str, offset: int, length: int) -> Buffer:
        """See `Store.get_range`; long ranges are read in parts at once."""
        name = self.name(key)
        check_range(key, offset, length)
        if length > _MOST_AT_ONCE_BYTES or not length:
            size = self.bucket.head(name).size
            if offset + length > size:
                raise too_short(key, offset, length, size)
            if not length:
                return b""
        target = memoryview(bytearray(length))
        self._read_span(key, name, offset, target)
        return target.toreadonly()

    def get_tail(self, key: str, length: int) -> tuple[int, bytes]:
        """See `Store.get_tail`; one request."""
        name = self.name(key)
        check_range(key, 0, length)
        if not length:
            return self.bucket.head(name).size, b""

        def read() -> tuple[int, bytes]:
            answer = self.bucket.read_tail(name, length)
            if answer.length != min(length, answer.size) or answer.first != answer.size - answer.length:
                answer.body.close()
                raise _other_range(name, answer)
            return answer.size, self._read_all(name, answer)[0]

        try:
            return self._steady(name, read)
        except RangeNotThere:  # it is empty, or the server has no last bytes of objects that are shorter (rclone)
            size = self.bucket.head(name).size
            if size > length:
                raise
            value = self._steady(name, lambda: self._read_whole(name))[0] if size else b""
            return len(value), value

    def read_into(self, key: str, offset: int, target: memoryview, *, cached_only: bool = False) -> bool:
        """See `Store.read_into`; nothing is kept in memory here, so with `cached_only` the answer is False."""
        name = self.name(key)
        check_range(key, offset, 0)
        view = writable_view(target)
        if cached_only:
            return False
        if view.nbytes:
            self._read_span(key, name, offset, view)
        else:
            self.get_range(key, offset, 0)
        return True

    def prefetch(self, key: str, offset: int, length: int) -> None:
        """See `Store.prefetch`; nothing to do."""
        check_range(check_key(key), offset, length)

    def head(self, key: str) -> int:
        """See `Store.head`."""
        return self.bucket.head(self.name(key)).size

    def _read_span(self, key: str, name: str, offset: int, view: memoryview) -> None:
        """Fill `view`, which is not empty, with the bytes from `offset` on, all of one version."""
        try:
            self._steady(name, lambda: self._read_parts(name, offset, view))
        except RangeNotThere:
            raise too_short(key, offset, view.nbytes, self.bucket.head(name).size) from None
        except _Short as error:
            raise too_short(key, offset, view.nbytes, error.size) from None

    def _read_parts(self, name: str, offset: int, view: memoryview) -> None:
        part_bytes = self.bucket.part_bytes
        if view.nbytes < 2 * part_bytes:
            self._read_part(name, offset, view)
            return
        futures = []
        try:
            for at in range(0, view.nbytes, part_bytes):
                part = view[at : at + part_bytes]
                futures.append(self._workers.run(_call(self._read_part, name, offset + at, part)))
            versions = {future.result() for future in futures}
        finally:
            _settled(futures)
        if len(versions) > 1:
            raise ConditionFailed(f"{name}: was replaced while it was read")

    def _read_part(self, name: str, first: int, view: memoryview) -> str:
        """Fill `view`; the version that it came from."""
        answer = self.bucket.read(name, first, view.nbytes)
        try:
            if answer.first != first or answer.length > view.nbytes:
                raise _other_range(name, answer)
            if answer.length < view.nbytes:
                raise _Short(answer.size)
            answer = self._fill(name, answer, first, view)
        finally:
            answer.body.close()
        return answer.version

    def _read_whole(self, name: str) -> tuple[bytes, str]:
        """The bytes of an object and their version.

        Raises:
            TooLargeError: longer than any record; what the server claims may be a lie as well.
        """
        answer = self.bucket.read(name)
        if answer.length > _MOST_WHOLE_BYTES:
            answer.body.close()
            raise TooLargeError(
                f"{name}: the server claims {answer.length} bytes; values of more than {_MOST_WHOLE_BYTES} are read in "
                "ranges"
            )
        return self._read_all(name, answer)

    def _read_all(self, name: str, answer: Answer) -> tuple[bytes, str]:
        """The bytes of `answer` and their version; memory is taken as they come, whatever size the server claims."""
        pieces = []
        try:
            at, end = answer.first, answer.first + answer.length
            while at < end:
                piece = bytearray(min(end - at, 8 * _READ_BYTES))
                answer = self._fill(name, answer, at, memoryview(piece), end=end)
                pieces.append(piece)
                at += len(piece)
        finally:
            answer.body.close()
        return b"".join(pieces), answer.version

    def _fill(self, name: str, answer: Answer, at: int, view: memoryview, *, end: int | None = None) -> Answer:
        """Fill `view` from `answer`, whose next byte is that at `at`; the answer that further bytes come from.

        Where a body breaks off, the rest up to `end` is asked for anew, of the same version.
        """
        end = at + view.nbytes if end is None else end
        done = since_break = breaks = 0
        pace = _Pace(name)
        while done < view.nbytes:
            try:
                got = answer.body.readinto(view[done : done + _READ_BYTES])
                if not got:
                    raise TransientStorageError(f"reading {name}: the connection was closed before the end")
                done += got
                since_break += got
                if done < view.nbytes:
                    pace.count(got)
            except TransientStorageError:
                breaks = 1 if since_break >= _PROGRESS_BYTES else breaks + 1
                since_break = 0
                if breaks > _MOST_BREAKS:
                    raise
                answer = self._read_on(name, answer, at + done, end, breaks)
                pace = _Pace(name)
        return answer

    def _read_on(self, name: str, broken: Answer, first: int, end: int, breaks: int) -> Answer:
        broken.body.close()
        clock.pause(_BREAK_PAUSE_S * (breaks - 1))
        answer = self.bucket.read(name, first, end - first, if_version=broken.version)
        if (answer.first, answer.length, answer.size) != (first, end - first, broken.size):
            answer.body.close()
            raise _other_range(name, answer)
        if answer.version != broken.version:
            answer.body.close()
            raise ConditionFailed(f"{name}: was replaced while it was read")
        return answer

    def _steady(self, name: str, read: Callable[[], T]) -> T:
        """What `read` answers, begun anew where the value was replaced meanwhile."""
        for _ in range(_MOST_RESTARTS):
            with suppress(ConditionFailed):
                return read()
        raise TransientStorageError(f"{name}: was replaced {_MOST_RESTARTS} times while it was read; try again")

    # --- writing -----------------------------------------------------------------------------------

    def put(self, key: str, data: Buffer) -> None:
        """See `Store.put`; a long value is sent in parts at once."""
        name, view = self.name(key), byte_view(data)
        self._forget(key)
        if view.nbytes <= self.bucket.part_bytes:
            self._note(key, view, self.bucket.put(name, view, nonce=""))
            return
        upload = PartUpload(self, name, nonce=_new_nonce())
        try:
            for at in range(0, view.nbytes, self.bucket.part_bytes):
                upload.send(view[at : at + self.bucket.part_bytes])
            upload.complete(None)
        finally:
            upload.abort()

    def open_writer(self, key: str) -> ObjectWriter:
        """See `Store.open_writer`."""
        return ObjectWriter(self, key, self.name(key))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """See `Store.put_if_absent`; one request."""
        name, view = self.name(key), byte_view(data)
        self._forget(key)
        if self._one_writer is not None:
            with self._one_writer:
                self.require_absent(key, name)
                self._note(key, view, self.bucket.put(name, view, nonce=""))
            return
        nonce = _new_nonce()
        try:
            version = self.bucket.put(name, view, nonce=nonce, if_version=ABSENT)
        except (ConditionFailed, TransientStorageError) as error:
            version = self.settle(name, nonce, error, already_there(key))
        self._note(key, view, version)

    def compare_and_swap(self, key: str, expected: bytes, data: Buffer) -> None:
        """See `Store.compare_and_swap`; one request, if the value was read or written here before, else two."""
        name, view = self.name(key), byte_view(data)
        if self._one_writer is not None:
            with self._one_writer:
                current, _ = self._current(key, name)
                if current != expected:
                    raise changed_meanwhile(key, gone=current is None)
                self._note(key, view, self.bucket.put(name, view, nonce=""))
            return
        noted = self._recall(key)
        if noted is not None and noted.value == expected:
            with suppress(_Stale):
                self._swap(key, name, noted.version, view)
                return
        for _ in range(_MOST_RESTARTS):
            current, version = self._current(key, name)
            if current != expected:
                raise changed_meanwhile(key, gone=current is None)
            with suppress(_Stale):  # another version: of the same bytes, perhaps
                self._swap(key, name, version, view)
                return
        raise changed_meanwhile(key, gone=False)

    def emulate_conditions(self) -> None:
        """See `EmulatesConditions.emulate_conditions`; threads of this process keep to it too."""
        if self._one_writer is None:
            self._one_writer = threading.Lock()

    @property
    def completion_condition(self) -> str | None:
        """What the completion of an upload asks for: nothing where the service ignores conditions."""
        return ABSENT if self._one_writer is None else None

    def require_absent(self, key: str, name: str) -> None:
        """Raise ConflictError if there is a value."""
        with suppress(NotFoundError):
            self.bucket.head(name)
            raise already_there(key)

    def _current(self, key: str, name: str) -> tuple[bytes | None, str]:
        try:
            return self._steady(name, lambda: self._read_whole(name))
        except NotFoundError:
            return None, ""

    def _swap(self, key: str, name: str, version: str, view: memoryview) -> None:
        """Replace what is of `version`.

        Raises:
            _Stale: it is of another version.
        """
        self._forget(key)
        nonce = _new_nonce()
        try:
            after = self.bucket.put(name, view, nonce=nonce, if_version=version)
        except (ConditionFailed, TransientStorageError) as error:
            after = self.settle(name, nonce, error, _Stale())
        self._note(key, view, after)

    def settle(self, name: str, nonce: str, error: CkptError, refused: CkptError) -> str:
        """The version of our own write, whose outcome `error` leaves open.

        Raises:
            TransientStorageError: nobody can tell. `refused`: it was not done.
        """
        if isinstance(error, ConditionFailed) and not error.retried:
            raise refused from error
        try:
            found = self.bucket.head(name)
        except NotFoundError:
            found = Head(0, "")
        except StorageError:
            raise error from None
        if found.nonce == nonce:
            return found.version
        if isinstance(error, TransientStorageError):
            raise error
        raise TransientStorageError(
            f"{name}: a reply was lost and the object is another one now, so it is not known whether ours was there "
            "in between; read it again"
        ) from error

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        name = self.name(key)
        self._forget(key)
        for error in self.bucket.delete([name]).values():
            raise error

    def delete_many(self, keys: Sequence[str]) -> None:
        """See `DeletesMany.delete_many`; as many in a request as the vendor takes, several requests at once.

        Raises:
            CkptError: of the first key that could not be deleted; the others were tried all the same.
        """
        names = [self.name(key) for key in keys]
        for key in keys:
            self._forget(key)
        at_once = self.bucket.deleted_at_once
        batches = [names[at : at + at_once] for at in range(0, len(names), at_once)]
        if len(batches) < 2:
            answers = [self.bucket.delete(batch) for batch in batches]
        else:
            futures = [self._workers.run(_call(self.bucket.delete, batch)) for batch in batches]
            wait(futures)
            answers = [future.result() for future in futures]
        failed = {name: error for answer in answers for name, error in answer.items()}
        for name in names:
            if name in failed:
                raise failed[name]

    # --- listing -----------------------------------------------------------------------------------

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """See `Store.list`."""
        check_prefix(prefix)
        return ((found.key, found.num_bytes) for found in self._listed(prefix))

    def list_versions(self, prefix: str) -> Iterator[ListedVersion]:
        """See `ListsVersions.list_versions`."""
        check_prefix(prefix)
        return self._listed(prefix)

    def _listed(self, prefix: str) -> Iterator[ListedVersion]:
        """The keys of all pages. Objects that could be no key of a store (other programs') are left out."""
        whole = self.prefix + prefix
        last, count = "", 0
        more = True
        while more:
            page = self.bucket.list_page(whole, last)
            more, before = page.more, last
            for item in page.items:
                if item.name <= last:
                    raise StorageError(f"listing {whole}: {item.name!r:.200} comes after {last!r:.200}: out of order")
                last = item.name
                key = item.name.removeprefix(self.prefix)
                if item.name.startswith(whole) and _is_key(key):
                    yield ListedVersion(key, item.size, item.version)
            count += len(page.items)
            if more and last == before:
                raise StorageError(f"listing {whole}: a page without objects says that more follow")
            if count > _MOST_LISTED:
                raise TooLargeError(f"listing {whole}: more than {_MOST_LISTED} objects")

    # --- what writers left, and the end ---------------------------------------------------------------

    def sweep_temporaries(self, before_s: float, *, dry_run: bool = False) -> Leftovers:
        """See `LeavesTemporaries`: uploads that were begun so long ago, by the server's clock, are aborted.

        Those of this process that go on stay; those of others cannot be told from orphans but by their age, so none is
        aborted before `MIN_UPLOAD_AGE_S`.
        """
        min_age_s = max(clock.now_s() - before_s, MIN_UPLOAD_AGE_S)
        sizes: list[int] = []
        with suppress(PermissionDeniedError):  # who may not list uploads leaves them to others, or to a lifecycle rule
            sizes.extend(self._swept(min_age_s, dry_run=dry_run))
        return Leftovers.of(sizes)

    def _swept(self, min_age_s: float, *, dry_run: bool) -> Iterator[int]:
        """The size of each upload that is older, and gone now."""
        for upload in self.bucket.uploads(self.prefix):
            key = upload.name.removeprefix(self.prefix)
            ours = upload.name.startswith(self.prefix) and _is_key(key)
            if not ours or upload.id in _live_uploads or upload.age_s <= min_age_s:
                continue
            try:
                size = self.bucket.upload_bytes(upload.name, upload.id)
                if not dry_run:
                    self.bucket.abort(upload.name, upload.id)
            except (UploadGone, PermissionDeniedError):
                continue
            yield size

    def close(self) -> None:
        """See `Store.close`."""
        self._workers.close()
        self.bucket.close()
        with self._lock:
            self._noted.clear()

    # --- versions of what was read ------------------------------------------------------------------------

    def _note(self, key: str, value: Buffer, version: str) -> None:
        if len(value) > _NOTED_BYTES:
            return
        with self._lock:
            self._noted[key] = _Noted(bytes(value), version)
            self._noted.move_to_end(key)
            if len(self._noted) > _NOTED_VALUES:
                self._noted.popitem(last=False)

    def _recall(self, key: str) -> _Noted | None:
        with self._lock:
            return self._noted.get(key)

    def _forget(self, key: str) -> None:
        with self._lock:
            self._noted.pop(key, None)


class _Stale(ConflictError):
    """The object is of another version than the condition names."""


class _Pace:
    """Whether the bytes of a body come at a rate that can be borne."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._since_s = clock.monotonic_s()
        self._num_bytes = 0

    def count(self, num_bytes: int) -> None:
        """Note so many more.

        Raises:
            TransientStorageError: they came too slowly.
        """
        now_s = clock.monotonic_s()
        self._num_bytes += num_bytes
        if self._num_bytes >= _LEAST_BYTES:
            self._since_s, self._num_bytes = now_s, 0
        elif now_s - self._since_s > _PATIENCE_S:
            raise TransientStorageError(
                f"reading {self._name}: {self._num_bytes} bytes came in {_PATIENCE_S:.0f} s: too slow to go on"
            )


class _Short(StorageError):
    """The answer ends before the range does."""

    def __init__(self, size: int) -> None:
        super().__init__(f"it ends at {size}")
        self.size = size


def _other_range(name: str, answer: Answer) -> StorageError:
    return StorageError(
        f"reading {name}: the server answered bytes {answer.first} to {answer.first + answer.length} of {answer.size}, "
        "which is not what was asked for: it does not keep to ranges"
    )


def _new_nonce() -> str:
    return secrets.token_hex(16)


def _is_key(text: str) -> bool:
    try:
        check_key(text)
    except InvalidInputError:
        return False
    return True


def _call(work: Callable[..., T], *arguments: object) -> Callable[[], T]:
    return lambda: work(*arguments)


def _settled(futures: Sequence[Future[T]]) -> None:
    """Wait until none of them runs any more; those that have not begun never do."""
    for future in futures:
        future.cancel()
    wait(futures)


# --- uploads ---------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class PartUpload:
    """One upload of parts, sent by the store's threads. One thread at a time calls it."""

    store: ObjectStore
    name: str
    nonce: str
    id: str = ""
    _futures: list[Future[str]] = field(default_factory=list)
    _num_checked: int = 0

    def send(self, data: memoryview, *, done: Callable[[], None] = lambda: None) -> None:
        """Have the next part sent; `done` is called when `data` is not needed any more.

        Raises:
            StorageError: a part before it could not be sent.
        """
        bucket = self.store.bucket
        if not self.id:
            self.id = bucket.begin(self.name, nonce=self.nonce)
            _live_uploads.add(self.id)
        number = len(self._futures) + 1
        if number > bucket.max_parts:
            raise TooLargeError(
                f"{self.name}: longer than {bucket.max_parts} parts of {bucket.part_bytes} bytes: open the store with "
                "larger parts (part_bytes), or write smaller packs"
            )

        def work() -> str:
            return bucket.put_part(self.name, self.id, number, data)

        future = self.store._workers.run(work)
        future.add_done_callback(lambda _: done())
        self._futures.append(future)
        self.check()

    def check(self) -> None:
        """Raise what a part that is through raised."""
        while self._num_checked < len(self._futures) and self._futures[self._num_checked].done():
            self._futures[self._num_checked].result()
            self._num_checked += 1

    def complete(self, if_version: str | None) -> str:
        """Wait for the parts and make the object of them; its version.

        Raises:
            ConditionFailed: of the condition. TransientStorageError: the outcome is unknown.
        """
        tags = [future.result() for future in self._futures]
        bucket = self.store.bucket
        try:
            version = bucket.complete(self.name, self.id, tags, if_version=if_version)
        except (ConditionFailed, TransientStorageError) as error:
            refused = ConditionFailed(f"{self.name}: the condition does not hold")
            version = self.store.settle(self.name, self.nonce, error, refused)
        except UploadGone as error:
            version = self._completed_before(error, if_version)
        self._finished()
        return version

    def _completed_before(self, error: UploadGone, if_version: str | None) -> str:
        """The version, if an attempt whose reply was lost has completed the upload."""
        try:
            found = self.store.bucket.head(self.name)
        except NotFoundError:
            found = None
        if found is not None and found.nonce == self.nonce:
            return found.version
        if found is not None and if_version == ABSENT:
            raise ConditionFailed(f"{self.name}: exists already") from error
        raise StorageError(
            f"{self.name}: the upload is gone, by an old age that a lifecycle rule or a collection gave it: write again"
        ) from error

    def abort(self) -> None:
        """Stop, and let the server forget the parts; harmless when called twice, or after `complete`."""
        _settled(self._futures)
        self._futures.clear()
        if self.id:
            with suppress(CkptError):  # it is swept later
                self.store.bucket.abort(self.name, self.id)
            self._finished()

    def _finished(self) -> None:
        _live_uploads.discard(self.id)
        self.id = ""


class ObjectWriter:
    """The `StreamWriter` of an `ObjectStore`: what fits into one part is one request, the rest an upload of parts."""

    def __init__(self, store: ObjectStore, key: str, name: str) -> None:
        self._store = store
        self._key = key
        self._upload = PartUpload(store, name, _new_nonce())
        store._workers.writer_opened()
        self._buffer = store._workers.buffer()
        self._filled = 0
        self._open = True

    def write(self, data: Buffer) -> None:
        """See `StreamWriter.write`; waits while all threads of the store are busy."""
        self._require_open()
        self._open = False  # poisoned, should anything raise
        view = byte_view(data)
        while view.nbytes:
            if self._filled == len(self._buffer):
                self._send()
            taken = min(view.nbytes, len(self._buffer) - self._filled)
            self._buffer[self._filled : self._filled + taken] = view[:taken]
            self._filled += taken
            view = view[taken:]
        self._upload.check()
        self._open = True

    def commit(self) -> None:
        """See `StreamWriter.commit`."""
        self._require_open()
        self._open = False
        store, upload = self._store, self._upload
        try:
            if upload.id:
                self._send()
                if store.completion_condition is None:
                    store.require_absent(self._key, upload.name)
                upload.complete(store.completion_condition)
            else:
                store.put_if_absent(self._key, memoryview(self._buffer)[: self._filled])
        except ConditionFailed as error:
            raise already_there(self._key) from error
        finally:
            self.abort()

    def abort(self) -> None:
        """See `StreamWriter.abort`."""
        self._open = False
        self._upload.abort()
        buffer, self._buffer = self._buffer, bytearray()
        if buffer:
            self._store._workers.give_back(buffer)
            self._store._workers.writer_closed()

    def _send(self) -> None:
        workers, buffer = self._store._workers, self._buffer
        self._buffer = workers.buffer()
        part, self._filled = memoryview(buffer)[: self._filled], 0
        self._upload.send(part, done=lambda: workers.give_back(buffer))

    def _require_open(self) -> None:
        if not self._open:
            raise StorageError(
                f"{self._key}: this writer was committed, aborted or poisoned by an error; open a new one"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
