"""Values of objects in parts: the threads and buffers for them, reads that go on where a body broke off, uploads.

The story of a read: 1. one request, or one for each part of a long range, sent at once by the store's threads; 2. what
comes is compared with what was asked for; 3. where a body breaks off, or comes too slowly, the rest is asked for anew,
of the same version; 4. where the object was replaced meanwhile, the read begins again.

The story of a conditional write: 1. it carries a nonce in the metadata of the object; 2. where the vendor's retry may
have met our own write (`ConditionFailed.retried`), or a reply was lost, the object is looked at: our nonce says that it
was written; 3. what stays unknown is raised as `TransientStorageError`, as the contract wants.

Invariants: what is in flight is bounded for the whole store, however many values are read and written at once; these
are the only threads that storage/ starts. Bytes of two values are never mixed; memory is taken as bytes come, not on a
server's word. Nothing of an upload is visible before its completion, which carries the condition, if there is one.
Must not know: keys, vendors.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from functools import partial
from typing import Generic, TypeVar

from cas_ckpt import clock
from cas_ckpt.errors import (
    CkptError,
    NotFoundError,
    PermissionDeniedError,
    StorageError,
    TooLargeError,
    TransientStorageError,
)
from cas_ckpt.storage.bucket import ABSENT, Answer, Bucket, ConditionFailed, Head, Listed, RangeNotThere, UploadGone
from cas_ckpt.storage.store import MOST_VALUE_BYTES, is_key, too_long

T = TypeVar("T")


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
        self._lock = threading.RLock()
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


class Parts(Generic[T]):
    """The parts of one value that were given to the threads. One thread at a time calls it."""

    def __init__(self, workers: PartWorkers) -> None:
        self._workers = workers
        self._futures: list[Future[T]] = []
        self._num_checked = 0

    def __len__(self) -> int:
        return len(self._futures)

    def run(self, work: Callable[[], T], *, done: Callable[[], None] = lambda: None) -> None:
        """Have the next part done; waits while as many are in flight as may be. `done` is called after it."""
        future = self._workers.run(work)
        future.add_done_callback(lambda _: done())
        self._futures.append(future)

    def check(self) -> None:
        """Raise what a part that is through raised."""
        while self._num_checked < len(self._futures) and self._futures[self._num_checked].done():
            self._futures[self._num_checked].result()
            self._num_checked += 1

    def results(self) -> list[T]:
        """Wait for all of them; what they answered, in their order.

        Raises:
            Exception: what the first of those that failed raised.
        """
        wait(self._futures)
        return [future.result() for future in self._futures]

    def stop(self) -> None:
        """Wait until none of them runs any more; those that have not begun never do."""
        for future in self._futures:
            future.cancel()
        wait(self._futures)


# --- reads ------------------------------------------------------------------------------------

_READ_BYTES = 1 << 20
"""Bytes taken from a body at once: they stay in the processor's cache on their way to where they go."""

_PIECE_BYTES = 8 << 20
"""Memory that is taken at once for a value whose size is only what the server claims."""

_MOST_BREAKS = 5
"""Times that a body may break off in a row without `_PROGRESS_BYTES` coming in between."""

_PROGRESS_BYTES = 256 << 10
_BREAK_PAUSE_S = 0.2

_MOST_RESTARTS = 5
"""Times that a value is read from its beginning, as it was replaced meanwhile."""


class EndsBefore(StorageError):
    """The object ends, at `size`, before the range does."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__(f"{name}: ends at {size}")
        self.size = size


class ObjectReads:
    """Reads of the objects of a bucket. Threads may share it."""

    def __init__(self, bucket: Bucket, workers: PartWorkers) -> None:
        self._bucket = bucket
        self._workers = workers

    def whole(self, name: str) -> tuple[bytes, str]:
        """The bytes of an object, and their version.

        Raises:
            NotFoundError. CorruptionError: longer than any record; what the server claims may be a lie as well.
        """
        return self._steady(name, lambda: self._whole(name))

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        """(size of the object, its last min(`length`, size) bytes); `length` is greater than 0."""
        try:
            return self._steady(name, lambda: self._tail(name, length))
        except RangeNotThere:  # it is empty, or the server has no last bytes of objects that are shorter (rclone)
            size = self._bucket.head(name).size
            if size > length:
                raise
            value = self.whole(name)[0] if size else b""
            return len(value), value

    def fill(self, name: str, offset: int, view: memoryview) -> None:
        """Fill `view`, which is not empty, with the bytes from `offset` on, all of one version.

        Raises:
            NotFoundError. EndsBefore: the object ends before the range does.
        """
        try:
            self._steady(name, lambda: self._parts(name, offset, view))
        except RangeNotThere as error:
            raise EndsBefore(name, self._bucket.head(name).size) from error

    def _steady(self, name: str, read: Callable[[], T]) -> T:
        """The result of `read`, restarted if the value was replaced meanwhile."""
        for _ in range(_MOST_RESTARTS):
            with suppress(ConditionFailed):  # replaced by another value: that one is read
                return read()
        raise TransientStorageError(f"{name}: was replaced {_MOST_RESTARTS} times while it was read; try again")

    def _whole(self, name: str) -> tuple[bytes, str]:
        with closing(_Stream(self._bucket, name, self._bucket.read(name))) as stream:
            if stream.length > MOST_VALUE_BYTES:
                raise too_long(name, stream.length)
            return stream.rest(), stream.version

    def _tail(self, name: str, length: int) -> tuple[int, bytes]:
        answer = self._bucket.read_tail(name, length)
        with closing(_Stream(self._bucket, name, answer)) as stream:
            if answer.length != min(length, answer.size) or answer.first != answer.size - answer.length:
                raise _other_range(name, answer)
            return answer.size, stream.rest()

    def _parts(self, name: str, offset: int, view: memoryview) -> None:
        part_bytes = self._bucket.part_bytes
        if view.nbytes < 2 * part_bytes:
            self._part(name, offset, view)
            return
        parts = Parts[str](self._workers)
        try:
            for at in range(0, view.nbytes, part_bytes):
                parts.run(partial(self._part, name, offset + at, view[at : at + part_bytes]))
                parts.check()
            versions = set(parts.results())
        finally:
            parts.stop()
        if len(versions) > 1:
            raise _replaced(name)

    def _part(self, name: str, first: int, view: memoryview) -> str:
        """Fill `view`; the version that it came from."""
        answer = self._bucket.read(name, first, view.nbytes)
        with closing(_Stream(self._bucket, name, answer)) as stream:
            if answer.first != first or answer.length > view.nbytes:
                raise _other_range(name, answer)
            if answer.length < view.nbytes:
                raise EndsBefore(name, answer.size)
            stream.fill(view)
            return stream.version


class _Stream:
    """The bytes of an answer in order. Where its body breaks off, the rest is asked for anew, of the same version."""

    def __init__(self, bucket: Bucket, name: str, answer: Answer) -> None:
        self._bucket = bucket
        self._name = name
        self._answer = answer
        self._at = answer.first
        self._end = answer.first + answer.length
        self.length = answer.length
        self.version = answer.version

    def close(self) -> None:
        """Give the connection back."""
        self._answer.body.close()

    def rest(self) -> bytes:
        """All that is left; memory is taken as the bytes come, whatever size the server claims."""
        pieces = []
        while self._at < self._end:
            piece = bytearray(min(self._end - self._at, _PIECE_BYTES))
            self.fill(memoryview(piece))
            pieces.append(piece)
        return b"".join(pieces)

    def fill(self, view: memoryview) -> None:
        """Fill `view`, which is not longer than what is left, with the next bytes."""
        done = since_break = breaks = 0
        while done < view.nbytes:
            try:
                got = self._answer.body.readinto(view[done : done + _READ_BYTES])
                if not got:
                    raise TransientStorageError(f"reading {self._name}: the connection was closed before the end")
                done += got
                self._at += got
                since_break += got
            except TransientStorageError:
                breaks = 1 if since_break >= _PROGRESS_BYTES else breaks + 1
                since_break = 0
                if breaks > _MOST_BREAKS:
                    raise
                self._read_on(breaks)

    def _read_on(self, breaks: int) -> None:
        """Ask for the rest."""
        self.close()
        clock.pause(_BREAK_PAUSE_S * (breaks - 1))
        size, length = self._answer.size, self._end - self._at
        self._answer = self._bucket.read(self._name, self._at, length, if_version=self.version)
        if (self._answer.first, self._answer.length, self._answer.size) != (self._at, length, size):
            raise _other_range(self._name, self._answer)
        if self._answer.version != self.version:
            raise _replaced(self._name)


def _replaced(name: str) -> ConditionFailed:
    return ConditionFailed(f"{name}: was replaced while it was read")


def _other_range(name: str, answer: Answer) -> StorageError:
    return StorageError(
        f"reading {name}: the server answered bytes {answer.first} to {answer.first + answer.length} of {answer.size}, "
        "which is not what was asked for: it does not keep to ranges"
    )


MOST_HELD_BYTES = 64 << 20
"""Most bytes of held-back items; beyond that the order is taken for that of code points: a listing may be endless."""

# --- listings in order of code points --------------------------------------------------------
#
# S3 promises code points: `ft-b` before `ft/a`. Services that keep objects in folders (SeaweedFS) list folder by
# folder: all of `ft/` first, since `ft` is less than `ft-b`. Then what is in a folder is held back until no name that
# belongs before it can follow: of packs one folder in 256. What is beside folders is passed on as it comes.

_ITEM_BYTES = 400
"""An object of a listing in memory, besides the characters of its name."""


def by_code_points(listed: Iterable[Listed], prefix: str) -> Iterator[Listed]:
    """`listed`, whose names start with `prefix`, in order of code points.

    Raises:
        StorageError: they are in neither order.
    """
    folders: list[tuple[str, list[Listed]]] = []  # held back, each until a name comes that is past its end
    held_bytes, last = 0, ""
    points = paths = True
    for item in listed:
        place = _in_folders(item.name)
        points = points and item.name > last
        paths = paths and place > _in_folders(last) and held_bytes <= MOST_HELD_BYTES
        if not points and not paths:
            raise StorageError(f"listing {prefix}: {item.name!r:.200} comes after {last!r:.200}: out of order")
        last = item.name
        while folders and (place > folders[-1][0] or not paths):
            yield from sorted(folders.pop()[1], key=_name)
            held_bytes = held_bytes if folders else 0
        folder, slash, _ = item.name[len(prefix) :].partition("/")
        if not slash or not paths:
            yield item
            continue
        end = _in_folders(prefix) + folder + "/"  # "-" and "." come before it, all else that is in names after it
        if not folders or folders[-1][0] != end:
            folders.append((end, []))
        folders[-1][1].append(item)
        held_bytes += _ITEM_BYTES + len(item.name)
    while folders:
        yield from sorted(folders.pop()[1], key=_name)


def _in_folders(name: str) -> str:
    """Sort key that orders names folder by folder."""
    return name.replace("/", "\0")


def _name(item: Listed) -> str:
    return item.name


# --- writes whose outcome must be found out, and uploads of parts ------------------------------

MIN_UPLOAD_AGE_S = 3600.0
"""A younger upload may belong to a writer that is running on another machine: a pack takes minutes."""

_live_uploads: set[str] = set()
"""Ids of the uploads that this process has under way: they are not swept, however old."""

os.register_at_fork(after_in_child=_live_uploads.clear)  # they are the parent's


def new_nonce() -> str:
    """A token that identifies our own write."""
    return secrets.token_hex(16)


def settle(bucket: Bucket, name: str, nonce: str, error: CkptError, refused: CkptError) -> str:
    """The version of our own write, whose outcome `error` leaves open.

    Raises:
        TransientStorageError: it cannot be decided. `refused`: it was not done.
    """
    if isinstance(error, ConditionFailed) and not error.retried:
        raise refused from error
    found = _look(bucket, name, error)
    if found.nonce == nonce:
        return found.version
    if isinstance(error, TransientStorageError):
        raise error
    raise TransientStorageError(
        f"{name}: a reply was lost and the object is another one now, so it is not known whether ours was there "
        "in between; read it again"
    ) from error


def _look(bucket: Bucket, name: str, error: CkptError) -> Head:
    """The object that is there after `error`; without a version if there is none.

    Raises:
        TransientStorageError: it cannot be decided.
    """
    try:
        return bucket.head(name)
    except NotFoundError:
        return Head(0, "")
    except StorageError as failed:
        raise TransientStorageError(
            f"{name}: a reply was lost, and then the object could not be looked at ({failed}), so it is not known "
            "whether it was written; read it again"
        ) from error


class PartUpload:
    """One upload of parts, sent by the store's threads. One thread at a time calls it.

    Attributes:
        id: Empty before the first part, and once the upload was completed or aborted.
    """

    def __init__(self, bucket: Bucket, workers: PartWorkers, name: str) -> None:
        self._bucket = bucket
        self.name = name
        self.id = ""
        self._nonce = new_nonce()
        self._parts = Parts[str](workers)

    def send(self, data: memoryview, *, done: Callable[[], None] = lambda: None) -> None:
        """Have the next part sent; `done` is called when `data` is not needed any more.

        Raises:
            StorageError: a part before it could not be sent.
        """
        bucket = self._bucket
        if not self.id:
            self.id = bucket.begin(self.name, nonce=self._nonce)
            _live_uploads.add(self.id)
        number = len(self._parts) + 1
        if number > bucket.max_parts:
            raise TooLargeError(
                f"{self.name}: longer than {bucket.max_parts} parts of {bucket.part_bytes} bytes: open the store with "
                "larger parts (part_bytes), or write smaller packs"
            )
        self._parts.run(partial(bucket.put_part, self.name, self.id, number, data), done=done)
        self._parts.check()

    def check(self) -> None:
        """Raise what a part that is through raised."""
        self._parts.check()

    def complete(self, if_version: str | None) -> str:
        """Wait for the parts and make the object of them; its version.

        Raises:
            ConditionFailed: of the condition. TransientStorageError: the outcome is unknown.
        """
        tags = self._parts.results()
        try:
            version = self._bucket.complete(self.name, self.id, tags, if_version=if_version)
        except (ConditionFailed, TransientStorageError) as error:
            refused = ConditionFailed(f"{self.name}: the condition does not hold")
            version = settle(self._bucket, self.name, self._nonce, error, refused)
        except UploadGone as error:
            version = self._completed_before(error, if_version)
        self._finished()
        return version

    def _completed_before(self, error: UploadGone, if_version: str | None) -> str:
        """The version, if an attempt whose reply was lost has completed the upload."""
        found = _look(self._bucket, self.name, error)
        if found.nonce == self._nonce:
            return found.version
        if found.version and if_version == ABSENT:
            raise ConditionFailed(f"{self.name}: exists already") from error
        raise StorageError(
            f"{self.name}: the upload is gone, removed for its age by a lifecycle rule or a collection: write again"
        ) from error

    def abort(self) -> None:
        """Stop, and let the server forget the parts; harmless when called twice, or after `complete`."""
        self._parts.stop()
        if self.id:
            with suppress(CkptError):  # the server keeps the parts; `sweep_uploads` removes them later
                self._bucket.abort(self.name, self.id)
            self._finished()

    def _finished(self) -> None:
        _live_uploads.discard(self.id)
        self.id = ""


def sweep_uploads(bucket: Bucket, prefix: str, min_age_s: float, *, dry_run: bool) -> Iterator[int]:
    """Abort the uploads of keys under `prefix` that are older; the size of each in bytes, once it is gone.

    Those of this process that go on stay; those of others cannot be told from orphans but by their age, so none is
    aborted before `MIN_UPLOAD_AGE_S`.
    """
    min_age_s = max(min_age_s, MIN_UPLOAD_AGE_S)
    for upload in bucket.uploads(prefix):
        is_ours = upload.name.startswith(prefix) and is_key(upload.name.removeprefix(prefix))
        if not is_ours or upload.id in _live_uploads or upload.age_s <= min_age_s:
            continue
        try:
            size = bucket.upload_bytes(upload.name, upload.id)
            if not dry_run:
                bucket.abort(upload.name, upload.id)
        except (UploadGone, PermissionDeniedError):  # completed meanwhile, or not ours to remove
            continue
        yield size
