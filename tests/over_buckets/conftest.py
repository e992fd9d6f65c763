"""Object stores over buckets in memory, in the place of folders and of stores in memory.

What is tested here is `ObjectStore` and what rests on it; what the vendors' files do: on servers, in tests/storage and
test_servers.py.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from cas_ckpt.core import create
from cas_ckpt.errors import NotFoundError
from cas_ckpt.storage import url
from cas_ckpt.storage.object_store import ObjectStore
from cas_ckpt.storage.store import Store, StreamWriter
from tests.memory_bucket import MemoryBucket
from tests.schedule.soundness import Shelf
from tests.wrapped_stores import _WriterAround


@pytest.fixture
def generations() -> bool:
    """Whether each write has a version of its own; modules whose tests swap values try both."""
    return False


@pytest.fixture
def in_buckets(generations: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder is a prefix of one bucket, the same one for the same path; each world of a schedule is a new one."""
    bucket, numbers, opened = MemoryBucket(generations=generations), itertools.count(), list[Store]()
    prefixes: dict[str, str] = {}

    def store(prefix: str) -> Store:
        opened.append(ObjectStore(bucket, f"{prefix}/", url=f"s3://bucket/{prefix}"))
        return opened[-1]

    def of_folder(path: Path) -> Store:
        return store(prefixes.setdefault(str(path), f"folder-{len(prefixes)}"))

    def in_memory() -> Callable[[], Store]:
        return partial(store, f"memory-{next(numbers)}")

    monkeypatch.setattr(create, "REMOTE_ENCODING", create.DEFAULT_ENCODING)  # tests know how long its packs are
    monkeypatch.setattr(url, "FileStore", of_folder)
    monkeypatch.setitem(url.SCHEMES, "s3", lambda text: store(text.removeprefix("s3://bucket/")))
    monkeypatch.setattr(Shelf, "copy", lambda shelf: BucketShelf(in_memory(), shelf.values))
    yield
    for one in opened:
        one.close()


class BucketShelf(Shelf):
    """The values of a schedule's world in a bucket. Each actor, a thread, has an object store of its own over it.

    What the schedule looks at after each request is a copy in memory, of each key as it was read back from the bucket.
    """

    def __init__(self, open_store: Callable[[], Store], values: dict[str, bytes]) -> None:
        self._open_store, self._mine = open_store, threading.local()
        super().__init__(url=self.store.url)
        for key, value in values.items():
            self.put(key, value)

    @property
    def store(self) -> Store:
        if not hasattr(self._mine, "store"):
            self._mine.store = self._open_store()
        return self._mine.store  # type: ignore[no-any-return]

    def copy(self) -> Shelf:
        other = Shelf(url=self.url)
        other._values = dict(self._values)
        return other

    def read_back(self, key: str) -> None:
        try:
            self._values[key] = self.store.get(key)
        except NotFoundError:
            self._values.pop(key, None)

    def open_writer(self, key: str) -> BucketWriter:  # type: ignore[override]
        return BucketWriter(self, key, self.store.open_writer(key))

    def __getattribute__(self, name: str) -> object:
        if name in READS:
            return getattr(self.store, name)
        return partial(self.effect, name) if name in EFFECTS else super().__getattribute__(name)

    def effect(self, name: str, key: str, *arguments: bytes) -> None:
        try:
            getattr(self.store, name)(key, *arguments)
        finally:
            self.read_back(key)


class BucketWriter(_WriterAround):
    """A writer of a `BucketShelf`."""

    def __init__(self, shelf: BucketShelf, key: str, inner: StreamWriter) -> None:
        super().__init__(inner)
        self.shelf, self.key = shelf, key

    def write(self, data: bytes) -> None:
        self.inner.write(data)

    def commit(self) -> None:
        self.inner.commit()
        self.shelf.read_back(self.key)


READS = frozenset({"get", "get_range", "get_tail", "read_into", "prefetch", "head", "list"})
EFFECTS = frozenset({"put", "put_if_absent", "compare_and_swap", "delete"})
