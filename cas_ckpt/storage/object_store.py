"""`ObjectStore`: the `Store` over any object storage. A vendor's file implements `Bucket`, and nothing else.

Who does what:
    bucket.py          one request each, translated errors, the vendor's own retries of requests
    object_parts.py    ranges in parts, bodies that break off, values that are replaced while they are read; values in
                       parts, lost replies, uploads that were never completed; the threads and the memory for parts
    here               keys under a prefix, conditions by value, listings

The story of a write: 1. a value of up to one part is one request; 2. a longer one is an upload of parts that are sent
at once by the store's threads; 3. its completion carries the condition, if there is one. Nothing is visible before.

The story of a swap: 1. its condition is the version under which the expected bytes were read or written here before,
else they are read now; 2. a version that was refused may be of the same bytes, so they are read and compared again.

Invariant: memory in flight is at most `parallel` parts for the whole store, and one part for each open writer.
Must not know: vendors, URLs; what is stored.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

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
from cas_ckpt.memory import copy_bytes
from cas_ckpt.storage.bucket import ABSENT, Bucket, ConditionFailed, Listed
from cas_ckpt.storage.object_parts import (
    EndsBefore,
    ObjectReads,
    Parts,
    PartUpload,
    PartWorkers,
    by_code_points,
    new_nonce,
    settle,
    sweep_uploads,
)
from cas_ckpt.storage.store import (
    MAX_KEY_BYTES,
    Abilities,
    Leftovers,
    ListedVersion,
    OneWriter,
    already_there,
    byte_view,
    changed_meanwhile,
    check_key,
    check_prefix,
    check_range,
    is_key,
    too_short,
    writable_view,
)
from cas_ckpt.uncopied import Uncopied

MAX_PREFIX_BYTES = 512
"""Longest prefix: what is left of an object's name has room for every key of a repository."""

_MOST_AT_ONCE_BYTES = 64 << 20
"""For a longer range the size of the object is asked for before memory is taken."""

_MOST_SWAPS = 5
"""A value may be replaced so often by the same bytes before a swap gives up."""

_MOST_VERSION_CHARS = 1024
"""Of a version tag, which is kept for each object of a listing."""

_MOST_LISTED = 50_000_000
"""Objects in one listing at most: a server that names more does not end."""

_NOTED_VALUES = 256
_NOTED_BYTES = 16 << 10

_stores: weakref.WeakSet[ObjectStore] = weakref.WeakSet()


def _after_fork() -> None:
    for store in list(_stores):
        store.after_fork()


os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True, slots=True)
class _Noted:
    """A value as it was last read or written, and its version: what a swap compares needs no request then."""

    value: bytes
    version: str


class ObjectStore(Uncopied):
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
        self._reads = ObjectReads(bucket, self._workers)
        self._noted: OrderedDict[str, _Noted] = OrderedDict()
        self._lock = threading.RLock()
        self._one_writer: threading.Lock | None = None
        _stores.add(self)

    @property
    def abilities(self) -> Abilities:
        return Abilities(
            durable=True,
            local=False,
            parallel=self.bucket.parallel,
            max_key_bytes=MAX_KEY_BYTES - len(self.prefix),
            writer_bytes=self.bucket.part_bytes,
            in_flight_bytes=self.bucket.parallel * self.bucket.part_bytes,
        )

    def after_fork(self) -> None:
        """Begin anew in a child process."""
        self._lock = threading.RLock()
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
        name = self.name(key)
        value, version = self._reads.whole(name)
        self._note(key, value, version)
        return value

    def get_range(self, key: str, offset: int, length: int) -> Buffer:
        """Long ranges are read in parts at once."""
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
        """One request."""
        name = self.name(key)
        check_range(key, 0, length)
        if not length:
            return self.bucket.head(name).size, b""

        return self._reads.tail(name, length)

    def read_into(self, key: str, offset: int, target: memoryview, *, cached_only: bool = False) -> bool:
        """Nothing is kept in memory here, so with `cached_only` the answer is False."""
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
        """Nothing to do."""
        check_range(check_key(key), offset, length)

    def head(self, key: str) -> int:
        return self.bucket.head(self.name(key)).size

    def _read_span(self, key: str, name: str, offset: int, view: memoryview) -> None:
        """Fill `view`, which is not empty, with the bytes from `offset` on."""
        try:
            self._reads.fill(name, offset, view)
        except EndsBefore as error:
            raise too_short(key, offset, view.nbytes, error.size) from None

    # --- writing -----------------------------------------------------------------------------------

    def put(self, key: str, data: Buffer) -> None:
        """A long value is sent in parts at once."""
        name, view = self.name(key), byte_view(data)
        self._forget(key)
        if view.nbytes <= self.bucket.part_bytes:
            self._note(key, view, self.bucket.put(name, view, nonce=""))
            return
        upload = PartUpload(self.bucket, self._workers, name)
        try:
            for at in range(0, view.nbytes, self.bucket.part_bytes):
                upload.send(view[at : at + self.bucket.part_bytes])
            upload.complete(None)
        finally:
            upload.abort()

    def open_writer(self, key: str) -> ObjectWriter:
        return ObjectWriter(self, key, self.name(key))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """One request."""
        name, view = self.name(key), byte_view(data)
        self._forget(key)
        if self._one_writer is not None:
            with self._one_writer:
                self.require_absent(key, name)
                self._note(key, view, self.bucket.put(name, view, nonce=""))
            return
        nonce = new_nonce()
        try:
            version = self.bucket.put(name, view, nonce=nonce, if_version=ABSENT)
        except (ConditionFailed, TransientStorageError) as error:
            version = settle(self.bucket, name, nonce, error, already_there(key))
        self._note(key, view, version)

    def compare_and_swap(self, key: str, expected: bytes, data: Buffer) -> None:
        """One request, if the value was read or written here before, else two."""
        name, view = self.name(key), byte_view(data)
        if self._one_writer is not None:
            with self._one_writer:
                current, _ = self._current(name)
                if current != expected:
                    raise changed_meanwhile(key, gone=current is None)
                self._note(key, view, self.bucket.put(name, view, nonce=""))
            return
        with self._lock:
            noted = self._noted.get(key)
        if noted is not None and noted.value == expected:
            with suppress(_Stale):  # it was changed elsewhere, which is looked at below
                self._swap(key, name, noted.version, view)
                return
        for _ in range(_MOST_SWAPS):
            current, version = self._current(name)
            if current != expected:
                raise changed_meanwhile(key, gone=current is None)
            with suppress(_Stale):  # another version: of the same bytes, perhaps
                self._swap(key, name, version, view)
                return
        raise changed_meanwhile(key, gone=False)

    def emulate_conditions(self) -> None:
        """Threads of this process keep to it too."""
        if self._one_writer is None:
            self._one_writer = threading.Lock()

    @property
    def completion_condition(self) -> str | None:
        """Condition for the completion of an upload; none if the service ignores conditions."""
        return ABSENT if self._one_writer is None else None

    def require_absent(self, key: str, name: str) -> None:
        """Raise ConflictError if there is a value."""
        with suppress(NotFoundError):
            self.bucket.head(name)
            raise already_there(key)

    def _current(self, name: str) -> tuple[bytes | None, str]:
        try:
            return self._reads.whole(name)
        except NotFoundError:
            return None, ""

    def _swap(self, key: str, name: str, version: str, view: memoryview) -> None:
        """Replace what is of `version`.

        Raises:
            _Stale: it is of another version.
        """
        self._forget(key)
        nonce = new_nonce()
        try:
            after = self.bucket.put(name, view, nonce=nonce, if_version=version)
        except (ConditionFailed, TransientStorageError) as error:
            after = settle(self.bucket, name, nonce, error, _Stale())
        self._note(key, view, after)

    def delete(self, key: str) -> None:
        name = self.name(key)
        self._forget(key)
        for error in self.bucket.delete([name]).values():
            raise error

    def delete_many(self, keys: Sequence[str]) -> None:
        """As many in a request as the vendor takes, several requests at once.

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
            requests = Parts[dict[str, CkptError]](self._workers)
            for batch in batches:
                requests.run(partial(self.bucket.delete, batch))
            answers = requests.results()
        failed = {name: error for answer in answers for name, error in answer.items()}
        for name in names:
            if name in failed:
                raise failed[name]

    # --- listing -----------------------------------------------------------------------------------

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        check_prefix(prefix)
        return ((found.key, found.num_bytes) for found in self._listed(prefix))

    def list_versions(self, prefix: str) -> Iterator[ListedVersion]:
        check_prefix(prefix)
        return self._listed(prefix)

    def _listed(self, prefix: str) -> Iterator[ListedVersion]:
        """The keys of all pages. Objects that could be no key of a store (other programs') are left out."""
        whole = self.prefix + prefix
        for item in by_code_points(self._pages(whole), whole):
            key = item.name.removeprefix(self.prefix)
            if is_key(key):
                yield ListedVersion(key, item.size, item.version)

    def _pages(self, whole: str) -> Iterator[Listed]:
        """All objects whose names start with `whole`, page by page, in the order of the service."""
        last, count = "", 0
        more = True
        while more:
            page = self.bucket.list_page(whole, last)
            more, before = page.more, last
            for item in page.items:
                if len(item.version) > _MOST_VERSION_CHARS:
                    raise StorageError(f"listing {whole}: {item.name!r:.200} has the version {item.version!r:.80}...")
                last = item.name
                if item.name.startswith(whole):
                    yield item
            count += len(page.items)
            if more and last == before:
                raise StorageError(f"listing {whole}: a page without objects says that more follow")
            if count > _MOST_LISTED:
                raise TooLargeError(f"listing {whole}: more than {_MOST_LISTED} objects")

    # --- what writers left, and the end ---------------------------------------------------------------

    def sweep_temporaries(self, before_s: float, *, dry_run: bool = False) -> Leftovers:
        """Uploads that were begun so long ago, by the server's clock, are aborted.

        See `object_parts.sweep_uploads` for which are spared.
        """
        age_s = clock.now_s() - before_s
        sizes: list[int] = []
        with suppress(PermissionDeniedError):  # who may not list uploads leaves them to others, or to a lifecycle rule
            sizes.extend(sweep_uploads(self.bucket, self.prefix, age_s, dry_run=dry_run))
        return Leftovers.of(sizes)

    def close(self) -> None:
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

    def _forget(self, key: str) -> None:
        with self._lock:
            self._noted.pop(key, None)


class _Stale(ConflictError):
    """The object is of another version than the condition names."""


class ObjectWriter(OneWriter):
    """The `StreamWriter` of an `ObjectStore`: what fits into one part is one request, the rest an upload of parts."""

    def __init__(self, store: ObjectStore, key: str, name: str) -> None:
        super().__init__(key)
        self._store = store
        self._upload = PartUpload(store.bucket, store._workers, name)
        store._workers.writer_opened()
        self._buffer = store._workers.buffer()
        self._filled = 0

    def write(self, data: Buffer) -> None:
        """Waits while all threads of the store are busy."""
        self._leave_open()
        view = byte_view(data)
        while view.nbytes:
            if self._filled == len(self._buffer):
                self._send()
            taken = min(view.nbytes, len(self._buffer) - self._filled)
            copy_bytes(memoryview(self._buffer)[self._filled : self._filled + taken], view[:taken])
            self._filled += taken
            view = view[taken:]
        self._upload.check()
        self._open = True

    def commit(self) -> None:
        self._leave_open()
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
