"""A store that is on another computer, as far as anybody can tell; it notes what is read of it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from cas_ckpt.arguments import Buffer
from cas_ckpt.storage.store import Store
from tests.remote_store import RemoteStore


class FarStore(RemoteStore):
    """A store that is not local. It is never asked for what is cached: nothing is.

    Attributes:
        reads: (key, offset, length) of every range that was asked for.
        before_read: Called with the key and the number of the read, from 1 on, before it is done.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner, parallel=16)
        self.reads: list[tuple[str, int, int]] = []
        self.before_read: Callable[[str, int], object] = lambda key, number: None
        self._reads_lock = threading.Lock()

    def get_range(self, key: str, offset: int, length: int) -> Buffer:
        self._note(key, offset, length)
        return bytes(super().get_range(key, offset, length))

    def read_into(self, key: str, offset: int, target: memoryview, *, cached_only: bool = False) -> bool:
        assert not cached_only, "a network is no memory"
        self._note(key, offset, len(target))
        return super().read_into(key, offset, target)

    def _note(self, key: str, offset: int, length: int) -> None:
        with self._reads_lock:
            self.reads.append((key, offset, length))
            number = len(self.reads)
        self.before_read(key, number)

    @property
    def data_reads(self) -> list[tuple[str, int, int]]:
        """Those of data packs."""
        return [each for each in self.reads if each[0].endswith(".data")]

    def bytes_read_twice(self) -> int:
        """Bytes that were asked for more than once."""
        twice, reached = 0, ("", 0)
        for key, offset, length in sorted(self.reads):
            if key == reached[0]:
                twice += max(0, min(reached[1], offset + length) - offset)
                reached = key, max(reached[1], offset + length)
            else:
                reached = key, offset + length
        return twice
