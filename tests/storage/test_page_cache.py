"""Reads of what is in memory alone."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace

import pytest

from cas_ckpt.storage import disk
from cas_ckpt.storage.disk import leaves_of_file, read_cached

BYTES = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> int:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"x" * BYTES, BYTES)
    os.fsync(fd)
    return fd


def test_what_is_in_memory_is_read(file: int) -> None:
    view = memoryview(bytearray(BYTES))
    assert read_cached(file, BYTES, view) and bytes(view) == b"x" * BYTES
    assert not read_cached(file, BYTES + 1, view), "the last byte is past the end"
    os.close(file)


def test_what_the_disk_would_give_at_once_is_not_what_is_in_memory(file: int) -> None:
    """Holes are read at once, as a fast disk is when this thread is put off at the wrong moment."""
    system, asked = disk._system(), (disk._Range(0, BYTES), disk._Pages())
    if not system or system.syscall(disk._CACHESTAT, file, *map(ctypes.byref, asked), 0):
        pytest.skip("this kernel does not say what is in memory")
    view = memoryview(bytearray(BYTES))
    assert not read_cached(file, 0, view)
    assert not read_cached(file, BYTES - 1, view), "one page of several is a hole"
    os.close(file)


def test_a_kernel_that_does_not_say_is_asked_by_the_read_alone(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = disk._system()
    silent = SimpleNamespace(syscall=lambda *_: -1, fstatfs=real and real.fstatfs)
    monkeypatch.setattr(disk, "_system", lambda: silent)
    assert read_cached(file, BYTES, memoryview(bytearray(BYTES)))
    os.close(file)


def test_a_filesystem_in_memory_needs_no_second_look_at_what_was_verified() -> None:
    """tmpfs refuses reads that wait for nothing: each chunk of a checkout was read, and hashed, once more."""
    if not os.path.ismount("/dev/shm"):
        pytest.skip("no such file system here")
    with NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(b"x" * BYTES)
        file.flush()
        view, fd = memoryview(bytearray(BYTES)), file.fileno()
        assert read_cached(fd, 0, view) and bytes(view) == b"x" * BYTES
        assert leaves_of_file(fd, "packs/a", 0, 0, BYTES, BYTES, None, [], cached_only=True) == 1
        assert not read_cached(fd, 1, view), "the last byte is past the end"
