"""Stores around another one: `FaultyStore` fails on purpose, `CountingStore` counts calls and bytes.

Invariant: without a plan and without damage, both answer exactly as the inner store does.
Must not know: what is stored. effects.py says how to write a crash test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import StorageError
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.storage.store import Abilities, Store, StreamWriter
from cas_ckpt.testing.effects import Effects, FaultPlan

Damage = Callable[[bytes], bytes]


def flip_bit(offset: int, bit: int = 0) -> Damage:
    """Damage that flips one bit of the byte at `offset` (negative: from the end)."""

    def damage(value: bytes) -> bytes:
        damaged = bytearray(value)
        damaged[offset] ^= 1 << bit
        return bytes(damaged)

    return damage


def truncate(size: int) -> Damage:
    """Damage that keeps the first `size` bytes (negative: leaves out as many at the end)."""
    return lambda value: value[:size]


class _StoreAround:
    """What every store around an `inner` one answers alike."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    @property
    def url(self) -> str:
        """See `Store.url`."""
        return self.inner.url

    @property
    def abilities(self) -> Abilities:
        """See `Store.abilities`."""
        return self.inner.abilities

    def close(self) -> None:
        """See `Store.close`; works after a planned death too, so that tests can tidy up."""
        self.inner.close()


class _WriterAround:
    """What every writer around an `inner` one does alike."""

    def __init__(self, inner: StreamWriter) -> None:
        self.inner = inner

    def abort(self) -> None:
        """See `StreamWriter.abort`."""
        self.inner.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.abort()


class FaultyStore(_StoreAround):
    """A `Store` around `inner` whose effects follow a plan.

    Attributes:
        effects: The count and log of effects; pass one in to share it.
        damage: Key -> what its bytes go through when they are read; change it at any time.
    """

    def __init__(self, inner: Store, plan: FaultPlan | None = None, *, effects: Effects | None = None) -> None:
        super().__init__(inner)
        self.effects = effects or Effects(plan)
        self.damage: dict[str, Damage] = {}

    def _source(self, key: str) -> Store:
        """Where `key` is read: in the inner store, or in memory, where its damaged bytes are."""
        self.effects.require_alive()
        if key not in self.damage:
            return self.inner
        memory = MemoryStore(url=self.url)
        memory.put(key, self.damage[key](self.inner.get(key)))
        return memory

    def get(self, key: str) -> bytes:
        """See `Store.get`."""
        return self._source(key).get(key)

    def get_range(self, key: str, offset: int, length: int) -> Buffer:
        """See `Store.get_range`."""
        return self._source(key).get_range(key, offset, length)

    def get_tail(self, key: str, length: int) -> tuple[int, bytes]:
        """See `Store.get_tail`."""
        return self._source(key).get_tail(key, length)

    def read_into(self, key: str, offset: int, target: memoryview, *, cached_only: bool = False) -> bool:
        """See `Store.read_into`."""
        return self._source(key).read_into(key, offset, target, cached_only=cached_only)

    def prefetch(self, key: str, offset: int, length: int) -> None:
        """See `Store.prefetch`."""
        self.effects.require_alive()
        self.inner.prefetch(key, offset, length)

    def put(self, key: str, data: Buffer) -> None:
        """See `Store.put`."""
        self.effects.perform("put", key, lambda: self.inner.put(key, data))

    def open_writer(self, key: str) -> FaultyWriter:
        """See `Store.open_writer`."""
        self.effects.require_alive()
        return FaultyWriter(self.effects, key, self.inner.open_writer(key))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """See `Store.put_if_absent`."""
        self.effects.perform("put_if_absent", key, lambda: self.inner.put_if_absent(key, data))

    def compare_and_swap(self, key: str, expected: bytes, data: Buffer) -> None:
        """See `Store.compare_and_swap`."""
        self.effects.perform("compare_and_swap", key, lambda: self.inner.compare_and_swap(key, expected, data))

    def head(self, key: str) -> int:
        """See `Store.head`."""
        return self._source(key).head(key)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """See `Store.list`."""
        self.effects.require_alive()
        return ((key, self.head(key) if key in self.damage else size) for key, size in self.inner.list(prefix))

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        self.effects.perform("delete", key, lambda: self.inner.delete(key))


class FaultyWriter(_WriterAround):
    """The `StreamWriter` of a `FaultyStore`; after death it leaves its temporary behind."""

    def __init__(self, effects: Effects, key: str, inner: StreamWriter) -> None:
        super().__init__(inner)
        self._effects = effects
        self._key = key
        self._poisoned = False

    def write(self, data: Buffer) -> None:
        """See `StreamWriter.write`."""
        self._perform("write", lambda: self.inner.write(data))

    def commit(self) -> None:
        """See `StreamWriter.commit`."""
        self._perform("commit", self.inner.commit)

    def abort(self) -> None:
        """See `StreamWriter.abort`."""
        self._effects.require_alive()
        super().abort()

    def _perform(self, name: str, action: Callable[[], None]) -> None:
        if self._poisoned:
            raise StorageError(f"{self._key}: this writer is poisoned by an earlier error; open a new one")
        self._poisoned = True
        self._effects.perform(name, self._key, action)
        self._poisoned = False


# --- counting -------------------------------------------------------------------------------

_READS = frozenset({"get", "get_range", "get_tail", "read_into"})
_WRITES = frozenset({"put", "put_if_absent", "compare_and_swap", "write"})


@dataclass(frozen=True, slots=True)
class Tally:
    """Calls of one method, and the bytes that they moved."""

    calls: int = 0
    num_bytes: int = 0


class CountingStore(_StoreAround):
    """A `Store` around `inner` that keeps a `Tally` per method (`write`, `commit`: of its writers).

    A call counts when it returns; one that raised does not. Bytes of a mapped range count when it is asked for.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._tallies: dict[str, Tally] = {}
        self._lock = threading.Lock()

    def tally(self, method: str) -> Tally:
        """What `method` did since the last `reset`."""
        with self._lock:
            return self._tallies.get(method, Tally())

    def reset(self) -> None:
        """Start to count from zero."""
        with self._lock:
            self._tallies.clear()

    @property
    def bytes_read(self) -> int:
        """Bytes that any method brought out."""
        return sum(self.tally(method).num_bytes for method in _READS)

    @property
    def bytes_written(self) -> int:
        """Bytes that any method, and any writer, took in; committed or not."""
        return sum(self.tally(method).num_bytes for method in _WRITES)

    @property
    def num_calls(self) -> int:
        """Calls of all methods together."""
        with self._lock:
            return sum(tally.calls for tally in self._tallies.values())

    def count(self, method: str, num_bytes: int = 0) -> None:
        """Add one call of `method` that moved `num_bytes`."""
        with self._lock:
            before = self._tallies.get(method, Tally())
            self._tallies[method] = Tally(before.calls + 1, before.num_bytes + num_bytes)

    def get(self, key: str) -> bytes:
        """See `Store.get`."""
        value = self.inner.get(key)
        self.count("get", len(value))
        return value

    def get_range(self, key: str, offset: int, length: int) -> Buffer:
        """See `Store.get_range`."""
        value = self.inner.get_range(key, offset, length)
        self.count("get_range", length)
        return value

    def get_tail(self, key: str, length: int) -> tuple[int, bytes]:
        """See `Store.get_tail`."""
        size, tail = self.inner.get_tail(key, length)
        self.count("get_tail", len(tail))
        return size, tail

    def read_into(self, key: str, offset: int, target: memoryview, *, cached_only: bool = False) -> bool:
        """See `Store.read_into`; an answer of False counts as a call of no bytes."""
        done = self.inner.read_into(key, offset, target, cached_only=cached_only)
        self.count("read_into", target.nbytes if done else 0)
        return done

    def prefetch(self, key: str, offset: int, length: int) -> None:
        """See `Store.prefetch`; its bytes do not count as read."""
        self.inner.prefetch(key, offset, length)
        self.count("prefetch")

    def put(self, key: str, data: Buffer) -> None:
        """See `Store.put`."""
        self.inner.put(key, data)
        self.count("put", memoryview(data).nbytes)

    def open_writer(self, key: str) -> CountingWriter:
        """See `Store.open_writer`."""
        writer = CountingWriter(self, self.inner.open_writer(key))
        self.count("open_writer")
        return writer

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """See `Store.put_if_absent`."""
        self.inner.put_if_absent(key, data)
        self.count("put_if_absent", memoryview(data).nbytes)

    def compare_and_swap(self, key: str, expected: bytes, data: Buffer) -> None:
        """See `Store.compare_and_swap`."""
        self.inner.compare_and_swap(key, expected, data)
        self.count("compare_and_swap", memoryview(data).nbytes)

    def head(self, key: str) -> int:
        """See `Store.head`."""
        size = self.inner.head(key)
        self.count("head")
        return size

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """See `Store.list`."""
        self.count("list")
        return self.inner.list(prefix)

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        self.inner.delete(key)
        self.count("delete")


class CountingWriter(_WriterAround):
    """The `StreamWriter` of a `CountingStore`."""

    def __init__(self, store: CountingStore, inner: StreamWriter) -> None:
        super().__init__(inner)
        self._store = store

    def write(self, data: Buffer) -> None:
        """See `StreamWriter.write`."""
        self.inner.write(data)
        self._store.count("write", memoryview(data).nbytes)

    def commit(self) -> None:
        """See `StreamWriter.commit`."""
        self.inner.commit()
        self._store.count("commit")
