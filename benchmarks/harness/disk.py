"""Files of a scratch folder: make them durable, push them out of the page cache, pull them in, weigh them."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_READ_BYTES = 8 << 20


def files(folder: Path) -> Iterator[Path]:
    """All regular files below `folder`."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def sync_tree(folder: Path) -> None:
    """fsync every file and folder below `folder`, and `folder` itself."""
    for path in (*sorted(folder.rglob("*")), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def used_bytes(folder: Path) -> int:
    """Bytes that the files occupy on disk (like `du`), folders not counted."""
    return sum(path.stat().st_blocks * 512 for path in files(folder))


def length_bytes(folder: Path) -> int:
    """Sum of the files' lengths."""
    return sum(path.stat().st_size for path in files(folder))


def evict(folder: Path) -> int:
    """Make the files cold; returns the bytes of them that stayed in the page cache all the same."""
    sync_tree(folder)
    for path in files(folder):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    left = resident_bytes(folder)
    if left and os.access(_DROP_CACHES, os.W_OK):
        _DROP_CACHES.write_text("1")
        left = resident_bytes(folder)
    return left


def warm(folder: Path) -> None:
    """Read every file once, so that the page cache holds it."""
    buffer = bytearray(_READ_BYTES)
    for path in files(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def resident_bytes(folder: Path) -> int:
    """Bytes of the files that are in the page cache (mincore)."""
    return sum(_resident(path) for path in files(folder))


def _resident(path: Path) -> int:
    length = path.stat().st_size
    if not length:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), length, mmap.MAP_PRIVATE) as mapped:
        pages = -(-length // mmap.PAGESIZE)
        flags = (ctypes.c_ubyte * pages)()
        view = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(length), flags
        )
        del view
    if failed:
        raise OSError(ctypes.get_errno(), "mincore failed", str(path))
    return sum(flag & 1 for flag in bytes(flags)) * mmap.PAGESIZE
