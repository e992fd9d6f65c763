"""A collection over a network: what is copied out of packs is read in long stretches, each byte once."""

from __future__ import annotations

import threading

import pytest

from cas_ckpt.arguments import Buffer
from cas_ckpt.core.packs import read_directory
from cas_ckpt.core.protocol import GcPhase, read_gc_state
from cas_ckpt.core.records import commit_of
from cas_ckpt.core.revisions import resolve
from cas_ckpt.errors import StorageError
from cas_ckpt.objects.digest import ObjectKind
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.ops.refs import create_branch, delete_branch
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.transfer.sources import GAP_BYTES
from tests.builders import commit, numbers, same_bytes, stored_arrays
from tests.committing import new_store, on
from tests.far import FarStore
from tests.remote_store import RemoteStore

NOW = GcOptions(min_age_s=0, reflog_expire_s=0, max_unused=0)
KEPT = {f"{n:02}, kept": numbers(150, 100, seed=n) for n in range(80)}
LOST = {f"{n:02}, lost": numbers(150, 100, seed=100 + n) for n in range(80)}


@pytest.fixture
def store() -> MemoryStore:
    """Packs of which about a half is needed."""
    made = new_store()
    handle = on(made)
    commit(handle, dict(sorted({**KEPT, **LOST}.items())), branch="side")
    commit(handle, KEPT)
    delete_branch(handle, "side", force=True)
    return made


def test_what_is_copied_is_read_once_in_few_requests(store: MemoryStore) -> None:
    far = FarStore(store)
    handle = on(far, cache=None)
    handle.sync()
    far.reads.clear()
    report = collect_garbage(handle, NOW)
    assert report.copied_bytes > sum(array.nbytes for array in KEPT.values()) * 0.5
    found = [(key, offset, length) for key, offset, length in far.data_reads if length > 1000]
    assert len(found) == len(set(found)) < len(KEPT) // 2
    assert sum(length for _, _, length in found) <= report.copied_bytes + GAP_BYTES * len(KEPT)
    arrays = stored_arrays(handle, root_of(store))
    assert all(same_bytes(arrays[name], array) for name, array in KEPT.items())


def test_a_damaged_chunk_keeps_its_pack(store: MemoryStore) -> None:
    key = next(key for key, _ in store.list("packs/") if key.endswith(".data"))
    for info in read_directory(store, key)[1]:
        if info.kind == ObjectKind.CHUNK:
            data = bytearray(store.get(key))
            data[info.end - 1] ^= 1
            store.put(key, bytes(data))
    far = FarStore(store)
    handle = on(far, cache=None)
    handle.sync()
    collect_garbage(handle, NOW)
    assert key in dict(store.list("packs/"))


def root_of(store: MemoryStore) -> str:
    handle = on(store)
    handle.sync()
    return commit_of(handle, resolve(handle, "main")).root.hex()


class Together(RemoteStore):
    """A swap of a ref waits until four are under way."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.swapped: list[str] = []
        self._four = threading.Barrier(4, timeout=30)

    def compare_and_swap(self, key: str, expected: bytes, data: Buffer) -> None:
        if key.startswith("refs/"):
            self._four.wait()
            self.swapped.append(key)
        super().compare_and_swap(key, expected, data)


def test_refs_are_fenced_each_by_a_swap_of_its_own_and_several_at_once(store: MemoryStore) -> None:
    handle = on(store)
    for number in range(10):
        create_branch(handle, f"b{number}")
    far = Together(store)
    collector = on(far, cache=None)
    assert collect_garbage(collector, NOW).deleted_packs
    keys = [key for key, _ in store.list("refs/")]
    assert sorted(far.swapped) == sorted(keys) and len(keys) == 12
    generation = read_gc_state(store).generation
    assert {ref.generation for ref in collector.refs.every()} == {generation}


def test_a_ref_that_moves_while_others_are_fenced_is_fenced_where_it_is(store: MemoryStore) -> None:
    for number in range(10):
        create_branch(on(store), f"b{number}")

    class Moving(RemoteStore):
        moved = False

        def compare_and_swap(self, key: str, expected: bytes, data: Buffer) -> None:
            if key.endswith("b5.ref") and not self.moved:
                self.moved = True
                create_branch(on(store), "b5", start="main", force=True)
            super().compare_and_swap(key, expected, data)

    collector = on(Moving(store), cache=None)
    collect_garbage(collector, NOW)
    assert {ref.generation for ref in collector.refs.every()} == {read_gc_state(store).generation}
    assert all(same_bytes(stored_arrays(collector, root_of(store))[name], array) for name, array in KEPT.items())


def test_an_error_while_refs_are_fenced_ends_the_collection_with_nothing_deleted(store: MemoryStore) -> None:
    create_branch(on(store), "b")
    before = [key for key, _ in store.list("packs/")]

    class Failing(RemoteStore):
        def compare_and_swap(self, key: str, expected: bytes, data: Buffer) -> None:
            if key.endswith("main.ref"):
                raise StorageError("the network is down")
            super().compare_and_swap(key, expected, data)

    with pytest.raises(StorageError, match="the network is down"):
        collect_garbage(on(Failing(store), cache=None), NOW)
    assert set(before) <= {key for key, _ in store.list("packs/")}
    assert read_gc_state(store).phase == GcPhase.CONDEMNED
    assert collect_garbage(on(store), NOW).took_over == GcPhase.CONDEMNED.value
