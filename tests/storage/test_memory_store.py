"""The conformance suite over memory, and over the wrappers that tests put around a store."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import pytest

from cas_ckpt.storage import memory
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.storage.store import Store
from cas_ckpt.testing import StoreConformance
from cas_ckpt.testing.store_values import noise
from tests.wrapped_stores import CountingStore, FaultyStore


class TestMemoryStore(StoreConformance):
    def store(self) -> Store:
        return MemoryStore()


class TestFaultyStoreWithoutFaults(StoreConformance):
    def store(self) -> Store:
        return FaultyStore(MemoryStore())


class TestCountingStore(StoreConformance):
    def store(self) -> Store:
        return CountingStore(MemoryStore())


def most_held_bytes(work: Callable[[], object]) -> int:
    """The most memory that the process holds while `work` runs, beyond what it held before."""
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark is that of now
    before = peak_bytes()
    work()
    return peak_bytes() - before


def peak_bytes() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs a system that tells the peak of memory")
def test_a_long_value_is_in_memory_once_while_it_is_streamed_and_committed() -> None:
    store, piece = MemoryStore(), noise(4 << 20)

    def stream() -> None:
        with store.open_writer("packs/p") as writer:
            for _ in range(16):
                writer.write(piece)
            writer.commit()

    assert most_held_bytes(stream) < 80 << 20
    view = memoryview(store.get_range("packs/p", 0, 64 << 20))
    assert view.readonly and view == piece * 16


class OfOneLength(mmap.mmap):
    """Mapped memory as systems have it on which it cannot grow."""

    def resize(self, newsize: int) -> None:
        raise SystemError("mmap: resizing not available--no mremap()")


def test_a_value_grows_also_where_mapped_memory_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "new_buffer", lambda num_bytes: OfOneLength(-1, num_bytes))
    store, pieces = MemoryStore(), [noise(size) for size in (700_000, 900_000, 1 << 20, 5)]
    with store.open_writer("packs/p") as writer:
        for piece in pieces:
            writer.write(piece)
        writer.commit()
    assert store.get("packs/p") == b"".join(pieces)
