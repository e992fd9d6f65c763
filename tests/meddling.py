"""A store in which something happens right before a request: somebody commits, collects, is killed, or it fails.

    store = MeddledStore(inner, lambda: collect_garbage(other), before="get", key="refs/*", at=2)

What happens may raise, which is then what the request raises; it may ask the inner store, or this one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from cas_ckpt.storage.store import Store
from tests.wrapped_stores import FaultyStore

REQUESTS = ("get", "get_range", "get_tail", "read_into", "open_writer", "put_if_absent", "compare_and_swap")


class MeddledStore(FaultyStore):
    """A store around `inner`.

    Args:
        happening: What happens; requests of its own pass.
        before: Names of requests, with spaces between them.
        key: Pattern of their keys, as in a shell; `*` is any text.
        at: The number, from 1, of the first of these requests that it happens before.
        times: How often it happens; change it at any time.

    Attributes:
        happened: How often it has happened.
    """

    def __init__(
        self, inner: Store, happening: Callable[[], object], *, before: str, key: str = "*", at: int = 1, times: int = 1
    ) -> None:
        super().__init__(inner)
        assert set(before.split()) <= set(REQUESTS)
        self.times, self.happened = times, 0
        self._happening, self._before, self._key, self._left = happening, before.split(), key, at
        self._lock, self._within = threading.Lock(), threading.local()

    def _meddle(self, request: str, key: str) -> None:
        with self._lock:
            if request not in self._before or not fnmatchcase(key, self._key) or hasattr(self._within, "happening"):
                return
            self._left -= 1
            if self._left > 0 or self.happened >= self.times:
                return
            self.happened += 1
        self._within.happening = True
        try:
            self._happening()
        finally:
            del self._within.happening


def _meddled(request: str) -> Any:
    ask = getattr(FaultyStore, request)

    def asked(self: MeddledStore, key: str, *args: Any, **named: Any) -> Any:
        self._meddle(request, key)
        return ask(self, key, *args, **named)

    return asked


for _request in REQUESTS:
    setattr(MeddledStore, _request, _meddled(_request))


@contextmanager
def held_elsewhere(lock: Any) -> Iterator[None]:
    """Inside the block another thread has `lock`."""
    with ThreadPoolExecutor(1) as other:
        other.submit(lock.acquire).result()
        try:
            yield
        finally:
            other.submit(lock.release).result()
