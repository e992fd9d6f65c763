"""The conformance suite over memory, and over the wrappers that tests put around a store."""

from __future__ import annotations

from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.storage.store import Store
from cas_ckpt.testing import CountingStore, FaultyStore, StoreConformance


class TestMemoryStore(StoreConformance):
    def store(self) -> Store:
        return MemoryStore()


class TestFaultyStoreWithoutFaults(StoreConformance):
    def store(self) -> Store:
        return FaultyStore(MemoryStore())


class TestCountingStore(StoreConformance):
    def store(self) -> Store:
        return CountingStore(MemoryStore())
