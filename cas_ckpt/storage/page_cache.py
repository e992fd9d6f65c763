"""Bytes of a file that are in the page cache, and nothing from the disk.

A read with RWF_NOWAIT waits for nothing, but it may ask the disk for what is not there, and if the disk answers at once
it returns that. Whoever takes what was verified a moment ago must not get bytes that were read since, so the system is
asked first which pages it has (cachestat, Linux 6.5). A file system in memory refuses such reads, and needs none.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import sys
from typing import Any

_CACHESTAT = 451
"""The number of the system call, the same on every processor."""

_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)
_NOT_CACHED = frozenset({errno.EAGAIN, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})

_MEMORY = frozenset({0x01021994, 0x858458F6})
"""What `fstatfs` calls tmpfs and ramfs."""

_STATFS_BYTES = 256
"""More than `struct statfs` has, whose first field is the type."""


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "evicted_lately"))


def read_cached(fd: int, offset: int, view: memoryview) -> bool:
    """Fill `view` if the page cache has all of it and the system can tell; else it is undefined.

    Raises:
        OSError: as a read does.
    """
    if not may_be_cached(fd, offset, view.nbytes):
        return False
    try:
        return os.preadv(fd, [view], offset, 0 if is_in_memory(fd) else _NOWAIT or 0) == view.nbytes
    except OSError as error:
        if error.errno in _NOT_CACHED:
            return False
        raise


def may_be_cached(fd: int, offset: int, length: int) -> bool:
    """False if a page of them is not in memory, or no read stops there; True if all are, or the system does not say."""
    if _NOWAIT is None:
        return False
    system = _system()
    if system is None or not length:
        return True
    pages = _Pages()
    if system.syscall(_CACHESTAT, fd, ctypes.byref(_Range(offset, length)), ctypes.byref(pages), 0) != 0:
        return True  # an older kernel, or a file of somebody else
    wanted: int = (offset + length - 1) // mmap.PAGESIZE - offset // mmap.PAGESIZE + 1
    cached: int = pages.cached
    return cached >= wanted


def is_in_memory(fd: int) -> bool:
    """Whether an open file, or folder, is of a file system that has memory alone to keep it in."""
    system = _system() if sys.platform == "linux" else None
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if system is None or system.fstatfs(fd, found) != 0:
        return False
    return ctypes.c_long.from_buffer(found).value in _MEMORY


@functools.cache
def _system() -> Any:
    try:
        library = ctypes.CDLL(None)
        return library if library.syscall and library.fstatfs else None
    except (OSError, AttributeError):
        return None
