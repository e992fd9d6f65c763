"""Stores around another one: `FaultyStore` fails on purpose, `CountingStore` counts calls and bytes.

Invariant: without a plan and without damage, both answer exactly as the inner store does.
Must not know: what is stored. effects.py says how to write a crash test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self, TypeVar

from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import StorageError
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.storage.store import Abilities, Store, StreamWriter
from tests.effects import CONDITIONALS, Effects, FaultPlan

T = TypeVar("T")

Damage = Callable[[bytes], bytes]

_READS = frozenset({"get", "get_range", "get_tail", "read_into", "head"})
_EFFECTS = frozenset({"put", "delete", *CONDITIONALS})


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


def _no_bytes(answer: object) -> int:
    """Bytes of a request that moves no values."""
    return 0


class _StoreAround:
    """A `Store` around an `inner` one: every request of a key goes through `_ask`."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def _ask(self, request: str, key: str, ask: Callable[[Store], T], *, moved: Callable[[T], int] = _no_bytes) -> T:
        """The answer to one request.

        Args:
            request: The name of the method.
            ask: Puts the request to a store.
            moved: Bytes of values that it moved, from the answer.
        """
        raise NotImplementedError

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def abilities(self) -> Abilities:
        return self.inner.abilities

    def get(self, key: str) -> bytes:
        return self._ask("get", key, lambda store: store.get(key), moved=len)

    def get_range(self, key: str, offset: int, length: int) -> Buffer:
        return self._ask("get_range", key, lambda store: store.get_range(key, offset, length), moved=lambda _: length)

    def get_tail(self, key: str, length: int) -> tuple[int, bytes]:
        return self._ask("get_tail", key, lambda store: store.get_tail(key, length), moved=lambda found: len(found[1]))

    def read_into(self, key: str, offset: int, target: memoryview, *, cached_only: bool = False) -> bool:
        return self._ask(
            "read_into", key, lambda store: store.read_into(key, offset, target, cached_only=cached_only),
            moved=lambda done: target.nbytes if done else 0,
        )  # fmt: skip

    def prefetch(self, key: str, offset: int, length: int) -> None:
        self._ask("prefetch", key, lambda store: store.prefetch(key, offset, length))

    def put(self, key: str, data: Buffer) -> None:
        self._ask("put", key, lambda store: store.put(key, data), moved=lambda _: memoryview(data).nbytes)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self._ask(
            "put_if_absent", key, lambda store: store.put_if_absent(key, data), moved=lambda _: memoryview(data).nbytes
        )

    def compare_and_swap(self, key: str, expected: bytes, data: Buffer) -> None:
        self._ask(
            "compare_and_swap",
            key,
            lambda store: store.compare_and_swap(key, expected, data),
            moved=lambda _: memoryview(data).nbytes,
        )

    def head(self, key: str) -> int:
        return self._ask("head", key, lambda store: store.head(key))

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        return self._ask("list", prefix, lambda store: store.list(prefix))

    def delete(self, key: str) -> None:
        self._ask("delete", key, lambda store: store.delete(key))

    def close(self) -> None:
        """Works after a planned death too, so that tests can tidy up."""
        self.inner.close()


class _WriterAround:
    """Base of writers that wrap an `inner` one."""

    def __init__(self, inner: StreamWriter) -> None:
        self.inner = inner

    def abort(self) -> None:
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

    def _ask(self, request: str, key: str, ask: Callable[[Store], T], *, moved: Callable[[T], int] = _no_bytes) -> T:
        if request in _EFFECTS:
            return self.effects.perform(request, key, lambda: ask(self.inner))
        self.effects.require_alive()
        if request not in _READS or key not in self.damage:
            return ask(self.inner)
        memory = MemoryStore(url=self.url)
        whole = bytes(self.inner.get_range(key, 0, self.inner.head(key)))  # a pack is longer than `get` reads
        memory.put(key, self.damage[key](whole))
        return ask(memory)

    def open_writer(self, key: str) -> FaultyWriter:
        self.effects.require_alive()
        return FaultyWriter(self.effects, key, self.inner.open_writer(key))

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """A damaged value has the size that it is read with."""
        return ((key, self.head(key) if key in self.damage else size) for key, size in super().list(prefix))


class FaultyWriter(_WriterAround):
    """The `StreamWriter` of a `FaultyStore`; after death it leaves its temporary behind."""

    def __init__(self, effects: Effects, key: str, inner: StreamWriter) -> None:
        super().__init__(inner)
        self._effects = effects
        self._key = key
        self._poisoned = False

    def write(self, data: Buffer) -> None:
        self._perform("write", lambda: self.inner.write(data))

    def commit(self) -> None:
        self._perform("commit", self.inner.commit)

    def abort(self) -> None:
        self._effects.require_alive()
        super().abort()

    def _perform(self, name: str, action: Callable[[], None]) -> None:
        if self._poisoned:
            raise StorageError(f"{self._key}: this writer is poisoned by an earlier error; open a new one")
        self._poisoned = True
        self._effects.perform(name, self._key, action)
        self._poisoned = False


# --- counting -------------------------------------------------------------------------------

_WRITES = frozenset({"put", "put_if_absent", "compare_and_swap", "write"})


@dataclass(frozen=True, slots=True)
class Tally:
    """Calls of one method, and the bytes that they moved."""

    calls: int = 0
    num_bytes: int = 0


class CountingStore(_StoreAround):
    """A `Store` around `inner` that keeps a `Tally` per method (`write`, `commit`: of its writers).

    A call counts when it returns; one that raised does not. Bytes of a mapped range count when it is asked for;
    bytes of a hint (`prefetch`) do not, and a `read_into` that answers False is a call of no bytes.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._tallies: dict[str, Tally] = {}
        self._lock = threading.Lock()

    def tally(self, method: str) -> Tally:
        """Calls and bytes of `method` since the last `reset`."""
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

    def _ask(self, request: str, key: str, ask: Callable[[Store], T], *, moved: Callable[[T], int] = _no_bytes) -> T:
        answer = ask(self.inner)
        self.count(request, moved(answer))
        return answer

    def open_writer(self, key: str) -> CountingWriter:
        writer = CountingWriter(self, self.inner.open_writer(key))
        self.count("open_writer")
        return writer


class CountingWriter(_WriterAround):
    """The `StreamWriter` of a `CountingStore`."""

    def __init__(self, store: CountingStore, inner: StreamWriter) -> None:
        super().__init__(inner)
        self._store = store

    def write(self, data: Buffer) -> None:
        self.inner.write(data)
        self._store.count("write", memoryview(data).nbytes)

    def commit(self) -> None:
        self.inner.commit()
        self._store.count("commit")
