"""fsck over a network: whole stretches of packs by one request each, and the same findings."""

from __future__ import annotations

import pytest

from cas_ckpt.core.packs import read_directory
from cas_ckpt.errors import PermissionDeniedError, StorageError, TransientStorageError
from cas_ckpt.ops.fsck.check import check_open
from cas_ckpt.ops.fsck.packs import DataOptions
from cas_ckpt.ops.fsck.report import FsckReport
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.transfer.scan import find_entries, unit_bytes_of
from tests.builders import commit, numbers
from tests.committing import new_store, on
from tests.far import FarStore

STATE = {"wide": numbers(900, 4096, seed=1), **{f"small{n}": numbers(50, 41 + n, seed=n) for n in range(60)}}


@pytest.fixture
def store() -> MemoryStore:
    made = new_store()
    commit(on(made), STATE)
    return made


def checked(store: FarStore | MemoryStore) -> FsckReport:
    handle = on(store, cache=None)
    handle.sync()
    if isinstance(store, FarStore):
        store.reads.clear()
    return check_open(handle, DataOptions())


def test_data_is_read_in_long_stretches_each_byte_once(store: MemoryStore) -> None:
    far = FarStore(store)
    report = checked(far)
    assert report.ok and report.read_packs == report.num_packs
    sizes = [size for key, size in store.list("packs/") if key.endswith(".data")]
    headers = [each for each in far.data_reads if each[1] == 0]
    payloads = [each for each in far.data_reads if each[1] > 0]
    assert len(headers) == len(sizes)
    assert sum(length for _, _, length in payloads) <= sum(sizes)
    assert len(payloads) <= sum(2 * size // unit_bytes_of(far) + 1 for size in sizes)


@pytest.mark.parametrize("place", ["offset", "end"])
def test_damage_is_reported_as_that_of_a_local_store(store: MemoryStore, place: str) -> None:
    key = next(key for key, _ in store.list("packs/") if key.endswith(".data"))
    for info in read_directory(store, key)[1][::20]:
        data = bytearray(store.get(key))
        data[getattr(info, place) - (place == "end")] ^= 8
        store.put(key, bytes(data))
    found, far = checked(store), checked(FarStore(store))
    assert found.problems and far.problems == found.problems


def test_a_store_that_cannot_be_reached_is_no_damaged_one(store: MemoryStore) -> None:
    far = FarStore(store)

    def cut(key: str, number: int) -> None:
        if key.endswith(".data") and number > 4:
            raise TransientStorageError(f"{key}: connection reset")

    handle = on(far, cache=None)
    handle.sync()
    far.before_read = cut
    with pytest.raises(TransientStorageError):
        check_open(handle, DataOptions())


@pytest.mark.parametrize("kind", [TransientStorageError, PermissionDeniedError])
def test_entries_of_a_pack_without_a_directory_are_not_lost_with_the_connection(
    store: MemoryStore, kind: type[StorageError]
) -> None:
    key, size = max(store.list("packs/"), key=lambda each: len(read_directory(store, each[0])[1]))
    far = FarStore(store)
    assert len(list(find_entries(far, key, size))) > 5
    last = len(far.reads)
    for cut_at in sorted({1, 2, last // 2, last}):
        far.reads.clear()

        def cut(key: str, number: int, cut_at: int = cut_at) -> None:
            if number == cut_at:
                raise kind(f"{key}: connection reset")

        far.before_read = cut
        with pytest.raises(kind):
            list(find_entries(far, key, size))
