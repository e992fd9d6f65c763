"""A collection over a network: what is copied out of packs is read in long stretches, each byte once."""

from __future__ import annotations

import pytest

from cas_ckpt.core.packs import read_directory
from cas_ckpt.core.records import commit_of
from cas_ckpt.core.revisions import resolve
from cas_ckpt.objects.digest import ObjectKind
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.ops.refs import delete_branch
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.transfer.sources import GAP_BYTES
from tests.builders import commit, numbers, same_bytes, stored_arrays
from tests.committing import new_store, on
from tests.far import FarStore

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
    delete_branch(handle, "side")
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
