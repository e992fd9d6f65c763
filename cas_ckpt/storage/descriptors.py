"""Open files: closed when the last reader lets go, and a small cache of them.

Invariant: a descriptor number is never closed while a reader uses it (its number could be
given to another file at once, and the reader would get that file's bytes), and a file that
was unlinked or replaced is never served again.
Must not know: keys' meaning, writing.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable

from cas_ckpt.storage.trouble import missing

DEFAULT_CAPACITY = 64
"""Open files kept per store: far below any limit on descriptors, above the packs in use at once."""


class Descriptor:
    """An open file number that is closed when nobody refers to it any more."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)


def open_for_reading(path: str | os.PathLike[str], key: str) -> Descriptor:
    """The file at `path`, open; symbolic links, folders and devices are no values.

    Raises:
        NotFoundError: no such file, or not a plain one.
        OSError: as the system says; the caller translates it.
    """
    # O_NONBLOCK: a FIFO planted under a key must not hang us; plain files ignore it.
    descriptor = Descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(descriptor.fd).st_mode):
        raise missing(key)
    return descriptor


class DescriptorCache:
    """The most recently read files of a store, kept open; safe for many threads."""

    def __init__(self, opener: Callable[[str], Descriptor], *, capacity: int = DEFAULT_CAPACITY) -> None:
        self._opener = opener
        self._capacity = capacity
        self._open: OrderedDict[str, Descriptor] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> tuple[Descriptor, int]:
        """(descriptor, size in bytes now) of `key`; hold on to the descriptor while reading."""
        kept = self._recall(key)
        if kept is not None:
            status = os.fstat(kept.fd)
            if status.st_nlink:
                return kept, status.st_size
        # Not open yet, or deleted or replaced since, perhaps by another process.
        fresh = self._opener(key)
        self._keep(key, fresh)
        return fresh, os.fstat(fresh.fd).st_size

    def drop(self, key: str) -> None:
        """Forget `key`; readers that hold its descriptor finish undisturbed."""
        with self._lock:
            self._open.pop(key, None)

    def clear(self) -> None:
        """Forget all keys."""
        with self._lock:
            self._open.clear()

    def __len__(self) -> int:
        return len(self._open)

    def _recall(self, key: str) -> Descriptor | None:
        with self._lock:
            kept = self._open.get(key)
            if kept is not None:
                self._open.move_to_end(key)
            return kept

    def _keep(self, key: str, descriptor: Descriptor) -> None:
        with self._lock:
            self._open[key] = descriptor
            if len(self._open) > self._capacity:
                self._open.popitem(last=False)
