"""A store whose every request waits for its turn.

Invariant: answers exactly as the inner store does at the moment of the turn. Writes of a stream
are nobody's business before they are committed, so they wait for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from cas_ckpt.arguments import Buffer
from cas_ckpt.storage.store import Abilities, Store, StreamWriter
from tests.schedule.scheduler import Request, Scheduler

T = TypeVar("T")


class GatedStore:
    """The store as the actor `name` sees it.

    Args:
        paged: A listing answers one key a request, as large ones do in pages: what changes
            meanwhile may be seen or not.
    """

    def __init__(self, inner: Store, scheduler: Scheduler, name: str, *, paged: bool = False) -> None:
        self._inner = inner
        self.scheduler = scheduler
        self.name = name
        self._paged = paged

    def _ask(self, method: str, key: str, action: Callable[[], T]) -> T:
        return self.scheduler.ask(self.name, Request(method, key), action)

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def abilities(self) -> Abilities:
        return self._inner.abilities

    def get(self, key: str) -> bytes:
        return self._ask("get", key, lambda: self._inner.get(key))

    def get_range(self, key: str, offset: int, length: int) -> Buffer:
        return self._ask("get_range", key, lambda: self._inner.get_range(key, offset, length))

    def get_tail(self, key: str, length: int) -> tuple[int, bytes]:
        return self._ask("get_tail", key, lambda: self._inner.get_tail(key, length))

    def read_into(self, key: str, offset: int, target: memoryview, *, cached_only: bool = False) -> bool:
        if cached_only:
            return False
        return self._ask("read_into", key, lambda: self._inner.read_into(key, offset, target))

    def prefetch(self, key: str, offset: int, length: int) -> None:
        pass

    def put(self, key: str, data: Buffer) -> None:
        self._ask("put", key, lambda: self._inner.put(key, data))

    def open_writer(self, key: str) -> GatedWriter:
        return GatedWriter(self._inner.open_writer(key), lambda action: self._ask("commit", key, action))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self._ask("put_if_absent", key, lambda: self._inner.put_if_absent(key, data))

    def compare_and_swap(self, key: str, expected: bytes, data: Buffer) -> None:
        self._ask("compare_and_swap", key, lambda: self._inner.compare_and_swap(key, expected, data))

    def head(self, key: str) -> int:
        return self._ask("head", key, lambda: self._inner.head(key))

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        if self._paged:
            return self._pages(prefix)
        return self._ask("list", prefix, lambda: self._inner.list(prefix))

    def _pages(self, prefix: str) -> Iterator[tuple[str, int]]:
        found = self._first_after(prefix, "")
        while found is not None:
            yield found
            found = self._first_after(prefix, found[0])

    def _first_after(self, prefix: str, last: str) -> tuple[str, int] | None:
        return self._ask(
            "list", prefix, lambda: next((pair for pair in self._inner.list(prefix) if pair[0] > last), None)
        )

    def delete(self, key: str) -> None:
        self._ask("delete", key, lambda: self._inner.delete(key))

    def close(self) -> None:
        pass


class GatedWriter(StreamWriter):
    """The `StreamWriter` of a `GatedStore`."""

    def __init__(self, inner: StreamWriter, ask: Callable[[Callable[[], Any]], Any]) -> None:
        self._inner = inner
        self._ask = ask

    def write(self, data: Buffer) -> None:
        self._inner.write(data)

    def commit(self) -> None:
        self._ask(self._inner.commit)

    def abort(self) -> None:
        self._inner.abort()
