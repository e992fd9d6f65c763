"""A store that fails on purpose: dies, runs full, loses replies, damages what is read.

Invariant: without a plan and without damage, answers exactly as the inner store does.
Must not know: what is stored. effects.py tells how to write a crash test with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import StorageError
from cas_ckpt.storage.store import Abilities, Store, StreamWriter, check_range, too_short, writable_view
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


class FaultyStore:
    """A `Store` around `inner` whose effects follow a plan.

    Attributes:
        effects: The count and log of effects; pass one in to share it.
        damage: Key -> what its bytes go through when they are read; change it at any time.
    """

    def __init__(self, inner: Store, plan: FaultPlan | None = None, *, effects: Effects | None = None) -> None:
        self.inner = inner
        self.effects = effects or Effects(plan)
        self.damage: dict[str, Damage] = {}

    @property
    def url(self) -> str:
        """See `Store.url`."""
        return self.inner.url

    @property
    def abilities(self) -> Abilities:
        """See `Store.abilities`."""
        return self.inner.abilities

    def get(self, key: str) -> bytes:
        """See `Store.get`."""
        self.effects.require_alive()
        value = self.inner.get(key)
        return self.damage[key](value) if key in self.damage else value

    def get_range(self, key: str, offset: int, length: int) -> Buffer:
        """See `Store.get_range`."""
        self.effects.require_alive()
        if key not in self.damage:
            return self.inner.get_range(key, offset, length)
        check_range(key, offset, length)
        value = self.get(key)
        if offset + length > len(value):
            raise too_short(key, offset, length, len(value))
        return memoryview(value)[offset : offset + length]

    def get_tail(self, key: str, length: int) -> tuple[int, bytes]:
        """See `Store.get_tail`."""
        self.effects.require_alive()
        if key not in self.damage:
            return self.inner.get_tail(key, length)
        value = self.get(key)
        return len(value), value[max(0, len(value) - length) :]

    def read_into(self, key: str, offset: int, target: memoryview, *, cached_only: bool = False) -> bool:
        """See `Store.read_into`."""
        self.effects.require_alive()
        if key not in self.damage:
            return self.inner.read_into(key, offset, target, cached_only=cached_only)
        view = writable_view(target)
        view[:] = memoryview(self.get_range(key, offset, view.nbytes))
        return True

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
        self.effects.require_alive()
        return len(self.get(key)) if key in self.damage else self.inner.head(key)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """See `Store.list`."""
        self.effects.require_alive()
        return ((key, self.head(key) if key in self.damage else size) for key, size in self.inner.list(prefix))

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        self.effects.perform("delete", key, lambda: self.inner.delete(key))

    def close(self) -> None:
        """See `Store.close`; works after death too, so that tests can tidy up."""
        self.inner.close()


class FaultyWriter:
    """The `StreamWriter` of a `FaultyStore`; after death it leaves its temporary behind."""

    def __init__(self, effects: Effects, key: str, inner: StreamWriter) -> None:
        self._effects = effects
        self._key = key
        self._inner = inner
        self._poisoned = False

    def write(self, data: Buffer) -> None:
        """See `StreamWriter.write`."""
        self._perform("write", lambda: self._inner.write(data))

    def commit(self) -> None:
        """See `StreamWriter.commit`."""
        self._perform("commit", self._inner.commit)

    def abort(self) -> None:
        """See `StreamWriter.abort`."""
        self._effects.require_alive()
        self._inner.abort()

    def _perform(self, name: str, action: Callable[[], None]) -> None:
        if self._poisoned:
            raise StorageError(f"{self._key}: this writer is poisoned by an earlier error; open a new one")
        self._poisoned = True
        self._effects.perform(name, self._key, action)
        self._poisoned = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


# DOC of cas_ckpt.testing.faults:
# A store that counts: how often it was called, and how many bytes went in and out.
#
# Invariant: answers exactly as the inner store does.
# Must not know: what is stored. Bytes of a mapped range count when it is asked for.
#

_READS = frozenset({"get", "get_range", "get_tail", "read_into"})
_WRITES = frozenset({"put", "put_if_absent", "compare_and_swap", "write"})


@dataclass(frozen=True, slots=True)
class Tally:
    """Calls of one method, and the bytes that they moved."""

    calls: int = 0
    num_bytes: int = 0


class CountingStore:
    """A `Store` around `inner` that keeps a `Tally` per method (`write`, `commit`: of its writers).

    A call counts when it returns; one that raised does not.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
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

    @property
    def url(self) -> str:
        """See `Store.url`."""
        return self.inner.url

    @property
    def abilities(self) -> Abilities:
        """See `Store.abilities`."""
        return self.inner.abilities

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
        """See `Store.prefetch`; its bytes are no reads."""
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

    def close(self) -> None:
        """See `Store.close`."""
        self.inner.close()


class CountingWriter:
    """The `StreamWriter` of a `CountingStore`."""

    def __init__(self, store: CountingStore, inner: StreamWriter) -> None:
        self._store = store
        self._inner = inner

    def write(self, data: Buffer) -> None:
        """See `StreamWriter.write`."""
        self._inner.write(data)
        self._store.count("write", memoryview(data).nbytes)

    def commit(self) -> None:
        """See `StreamWriter.commit`."""
        self._inner.commit()
        self._store.count("commit")

    def abort(self) -> None:
        """See `StreamWriter.abort`."""
        self._inner.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
