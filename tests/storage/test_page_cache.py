"""Reads of what is in memory alone."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from cas_ckpt.storage import page_cache
from cas_ckpt.storage.page_cache import read_cached

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
    call, asked = page_cache._system_call(), (page_cache._Range(0, BYTES), page_cache._Pages())
    if not call or call(page_cache._CACHESTAT, file, *map(ctypes.byref, asked), 0):
        pytest.skip("this kernel does not say what is in memory")
    view = memoryview(bytearray(BYTES))
    assert not read_cached(file, 0, view)
    assert not read_cached(file, BYTES - 1, view), "one page of several is a hole"
    os.close(file)


def test_a_kernel_that_does_not_say_is_asked_by_the_read_alone(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_cache, "_system_call", lambda: lambda *_: -1)
    assert read_cached(file, BYTES, memoryview(bytearray(BYTES)))
    monkeypatch.setattr(page_cache, "_system_call", lambda: None)
    assert read_cached(file, BYTES, memoryview(bytearray(BYTES)))
    os.close(file)
