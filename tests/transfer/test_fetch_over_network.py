"""Restoring over a network: each byte is read once, and no target is touched before all are verified."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cas_ckpt.core.config import Config
from cas_ckpt.core.create import new_store_id, write_config
from cas_ckpt.core.packs import read_directory
from cas_ckpt.core.tree import load_tree, stored_tensors
from cas_ckpt.errors import CorruptionError, NotFoundError, StorageError
from cas_ckpt.objects.pack import ExtentInfo
from cas_ckpt.objects.spec import Box, grid_for
from cas_ckpt.objects.state import StoredTensor, TensorCopy
from cas_ckpt.ops.checkout.checkout import fetch_tensors, read_array
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.transfer import sources
from tests.builders import ArrayMemory, commit, numbers, same_bytes
from tests.committing import on, together
from tests.divided import mesh, over, state_of
from tests.far import FarStore

MIB = 1 << 20
STATE = {
    "wide": numbers(600, 4096, seed=1),
    "line": numbers(3 * MIB // 2, seed=2),
    **{f"small{n}": numbers(50, 41 + n, seed=n) for n in range(20)},
}
UNTOUCHED = 7


def new_store(encoding: str = "raw") -> MemoryStore:
    store = MemoryStore()
    write_config(store, Config(new_store_id(), encoding=encoding))
    return store


@pytest.fixture(scope="module", params=["raw", "planes"])
def stored(request: pytest.FixtureRequest) -> tuple[MemoryStore, str]:
    """A store with one commit of STATE; its root."""
    store = new_store(request.param)
    return store, commit(on(store), STATE).root


def copied(store: MemoryStore) -> MemoryStore:
    made = MemoryStore()
    for key, size in store.list(""):
        made.put(key, store.get_range(key, 0, size))
    return made


class Restore:
    """One restore over a network."""

    def __init__(self, store: MemoryStore, root: str) -> None:
        self.far = FarStore(store)
        self.handle = on(self.far, cache=None)
        self.handle.sync()
        tree = load_tree(self.handle, bytes.fromhex(root))
        self.stored = {str(path[0]): stored for path, stored in stored_tensors(tree)}
        self.targets = {
            name: np.full(each.spec.shape, UNTOUCHED, each.spec.dtype) for name, each in self.stored.items()
        }
        self.copies = [TensorCopy((name,), self.stored[name], ArrayMemory(self.targets[name])) for name in self.stored]
        self.far.reads.clear()

    def run(self, **options: Any) -> None:
        fetch_tensors(self.handle, self.copies, **options)

    def check(self) -> None:
        assert all(same_bytes(self.targets[name], STATE[name]) for name in self.stored)

    def check_untouched(self) -> None:
        assert all((target == UNTOUCHED).all() for target in self.targets.values())

    def extents(self) -> list[tuple[str, ExtentInfo]]:
        """What the data packs hold, in order."""
        keys = sorted(key for key, _ in self.far.inner.list("packs/") if key.endswith(".data"))
        return [
            (key, info)
            for key in keys
            for info in sorted(read_directory(self.far.inner, key)[1], key=lambda info: info.offset)
        ]


def flip(store: MemoryStore, key: str, offset: int) -> None:
    data = bytearray(store.get_range(key, 0, store.head(key)))
    data[offset] ^= 4
    store.put(key, bytes(data))


@pytest.mark.parametrize("unseen", [False, True])
def test_each_byte_is_read_once_and_what_is_near_by_one_request(stored: tuple[MemoryStore, str], unseen: bool) -> None:
    one = Restore(*stored)
    one.run(unseen=unseen)
    one.check()
    extents = [info for _, info in one.extents()]
    sizes = [info.end - info.offset for info in extents]
    assert one.far.bytes_read_twice() == 0
    assert sum(length for _, _, length in one.far.data_reads) == sum(sizes), "the pack has no gaps"
    limit = sources.limits_of(one.far, sum(sizes)).span_bytes
    long = sum(size > limit // 2 for size in sizes)
    assert len(one.far.reads) <= 2 * long + 2 * sum(sizes) // limit + 1
    assert len(one.far.reads) < len(extents) * 2 // 3


@pytest.mark.parametrize("unseen", [False, True])
def test_the_first_request_to_a_pack_has_ended_before_others_begin(
    stored: tuple[MemoryStore, str], unseen: bool
) -> None:
    one = Restore(*stored)
    begun: Counter[str] = Counter()
    beside: list[str] = []

    def before_read(key: str, number: int) -> None:
        begun[key] += 1
        if begun[key] == 1:
            time.sleep(0.2)  # the others would come now
            beside.extend([key] * (begun[key] > 1))

    one.far.before_read = before_read
    one.run(unseen=unseen)
    one.check()
    assert not beside
    assert max(begun.values()) > 4, "there are others"


def test_what_nobody_has_seen_yet_is_filled_without_a_temporary_file(
    stored: tuple[MemoryStore, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Restore(*stored)
    monkeypatch.setattr(sources, "temporary_folders", lambda: pytest.fail("no folder is needed"))
    one.run(unseen=True)
    one.check()


@pytest.mark.slow
def test_damage_of_any_byte_is_found_before_a_target_is_touched(stored: tuple[MemoryStore, str]) -> None:
    places = [
        (key, place)
        for key, info in Restore(*stored).extents()[::3]
        for place in (info.offset, info.offset + info.header_bytes - 9, info.offset + info.header_bytes, info.end - 1)
    ]
    for key, place in places[:: max(1, len(places) // 12)]:
        store = copied(stored[0])
        flip(store, key, place)
        one = Restore(store, stored[1])
        with pytest.raises(CorruptionError, match=r"^(wide|line|small\d+): "):
            one.run()
        one.check_untouched()


def test_another_copy_of_a_damaged_chunk_is_read(stored: tuple[MemoryStore, str]) -> None:
    store = copied(stored[0])
    other = new_store(on(store).config.encoding)
    commit(on(other), STATE)
    for key, _ in other.list("packs/"):
        store.put(key, other.get_range(key, 0, other.head(key)))
    one = Restore(store, stored[1])
    (_, info), *_ = [each for each in one.extents() if each[1].num_bytes > MIB]
    place = one.handle.locate([info.digest])[info.digest]
    assert len({each.pack for each in place}) == 2
    for each in place[:1]:
        flip(store, each.pack, each.end - 1)
    one.run()
    one.check()
    assert one.far.bytes_read_twice() < 10 * MIB


def test_a_pack_that_was_collected_meanwhile_is_read_where_it_was_copied_to(stored: tuple[MemoryStore, str]) -> None:
    store = copied(stored[0])
    one = Restore(store, stored[1])
    old = next(key for key, _ in store.list("packs/") if key.endswith(".data"))
    other = new_store(on(store).config.encoding)
    commit(on(other), STATE)

    def collect(key: str, number: int) -> None:
        if number == 2:
            for copy, _ in other.list("packs/"):
                store.put(copy, other.get(copy))
            store.delete(old)

    one.far.before_read = collect
    one.run()
    one.check()


def test_a_connection_that_fails_in_one_thread_ends_all_before_a_target_is_touched(
    stored: tuple[MemoryStore, str],
) -> None:
    one = Restore(*stored)

    def break_off(key: str, number: int) -> None:
        if number == 3:
            raise StorageError(f"{key}: connection reset")

    one.far.before_read = break_off
    before = threading.active_count()
    with pytest.raises(StorageError, match="connection reset"):
        one.run()
    one.check_untouched()
    assert threading.active_count() == before


def test_what_a_collected_pack_held_is_missed_before_a_target_is_touched(stored: tuple[MemoryStore, str]) -> None:
    store = copied(stored[0])
    one = Restore(store, stored[1])
    for key, _ in list(store.list("packs/")):
        if key.endswith(".data"):
            store.delete(key)
    with pytest.raises((CorruptionError, NotFoundError), match=r"^(wide|line|small\d+): "):
        one.run()
    one.check_untouched()


# --- the temporary file -------------------------------------------------------------------------


def test_without_a_folder_for_temporary_files_it_is_read_twice_and_said(
    stored: tuple[MemoryStore, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sources, "temporary_folders", list)
    one = Restore(*stored)
    with caplog.at_level(logging.WARNING, "cas_ckpt"):
        one.run()
    one.check()
    sizes = sum(info.end - info.offset for _, info in one.extents())
    assert sum(length for _, _, length in one.far.data_reads) == 2 * sizes
    assert len(one.far.reads) < 2 * len(one.extents()), "the second time in spans, too"
    assert "downloaded twice" in caplog.text


@pytest.fixture
def disk_of_3_mib(stored: tuple[MemoryStore, str]) -> Iterator[None]:
    """Files of this process cannot be longer, as when the disk is full."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * MIB, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("disk_of_3_mib")
def test_what_does_not_fit_on_the_disk_is_read_twice_and_said(
    stored: tuple[MemoryStore, str], caplog: pytest.LogCaptureFixture
) -> None:
    one = Restore(*stored)
    with caplog.at_level(logging.WARNING, "cas_ckpt"):
        one.run()
    one.check()
    assert one.far.bytes_read_twice() > MIB
    assert caplog.text.count("downloaded twice") == 1


@pytest.fixture
def staging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """The descriptor of the temporary file, which is on a disk: what is in memory alone cannot be evicted."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        monkeypatch.setattr(sources, "temporary_folders", lambda: [folder])

        def find() -> int:
            for name in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/self/fd/{name}").startswith(f"{folder}/"):
                        return int(name)
            raise AssertionError("nothing is staged")

        yield find


def damage(number: int) -> None:
    """Flip a bit in every leaf of the file, which is then no longer in memory."""
    with open(f"/proc/self/fd/{number}", "r+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for at in range(0, size, 64 * 1024):
            byte = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), at)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_what_the_local_disk_damaged_is_read_from_the_store_again(
    stored: tuple[MemoryStore, str], staging: Callable[[], int]
) -> None:
    one = Restore(*stored)
    one.run(on_verified=lambda: damage(staging()))
    one.check()
    assert one.far.bytes_read_twice() > MIB


def test_what_the_local_disk_lost_is_read_from_the_store_again(
    stored: tuple[MemoryStore, str], staging: Callable[[], int]
) -> None:
    one = Restore(*stored)
    one.run(on_verified=lambda: os.ftruncate(staging(), MIB))
    one.check()
    assert one.far.bytes_read_twice() > MIB


def test_nothing_is_left_of_the_temporary_file(stored: tuple[MemoryStore, str], staging: Callable[[], int]) -> None:
    one = Restore(*stored)
    found: list[int] = []
    one.run(on_verified=lambda: found.append(staging()))
    assert found
    with pytest.raises(AssertionError, match="nothing is staged"):
        staging()


# --- parts of chunks ----------------------------------------------------------------------------


def region_copies(one: Restore, box: Box) -> tuple[list[TensorCopy], np.ndarray[Any, Any]]:
    target = np.full(box.sizes, UNTOUCHED, "float32")
    return [TensorCopy(("wide",), one.stored["wide"], ArrayMemory(target), box=box)], target


@pytest.mark.parametrize("box", [Box((10, 0), (3, 4096)), Box((0, 100), (600, 40)), Box((590, 4000), (10, 96))])
@pytest.mark.parametrize("damaged", [False, True])
def test_a_part_of_a_tensor_takes_the_leaves_that_it_touches(
    stored: tuple[MemoryStore, str], box: Box, damaged: bool, staging: Callable[[], int]
) -> None:
    one = Restore(*stored)
    copies, target = region_copies(one, box)
    fetch_tensors(one.handle, copies, on_verified=lambda: damage(staging()) if damaged else None)
    assert same_bytes(target, STATE["wide"][box.slices])
    assert (one.far.bytes_read_twice() > 0) == damaged


@pytest.mark.parametrize("box", [Box((10, 0), (3, 4096)), Box((0, 100), (600, 40)), Box((0, 0), (600, 4096))])
def test_a_region_is_read_once_in_few_requests(stored: tuple[MemoryStore, str], box: Box) -> None:
    one = Restore(*stored)
    assert same_bytes(read_array(one.handle, one.stored["wide"], box), STATE["wide"][box.slices])
    assert one.far.bytes_read_twice() == 0
    cells = sum(key.endswith(".data") for key, _, _ in one.far.reads)
    assert cells <= 2 * len(list(on_grid(one.stored["wide"], box)))


def on_grid(tensor: StoredTensor, box: Box) -> list[int]:
    return [cell for cell, _ in grid_for(tensor.spec).cells_in(box)]


def test_damage_inside_of_a_region_is_found(stored: tuple[MemoryStore, str]) -> None:
    box = Box((0, 0), (2, 4096))
    one = Restore(*stored)
    read_array(one.handle, one.stored["wide"], box)
    (key, start, length), *_ = sorted(one.far.data_reads, key=lambda read: -read[2])
    store = copied(stored[0])
    flip(store, key, start + length - 1)
    other = Restore(store, stored[1])
    with pytest.raises(CorruptionError):
        read_array(other.handle, other.stored["wide"], box)


# --- chunks in several extents ------------------------------------------------------------------


@pytest.fixture(scope="module")
def divided() -> tuple[MemoryStore, str]:
    """STATE committed by three ranks whose parts are off the cells."""
    store = new_store()
    placements = {"wide": over(mesh(3), "S(1)"), "line": over(mesh(3), "S(0)")}
    infos = together(store, 3, lambda rank: state_of(STATE, placements, rank))
    return store, infos[0].root


@pytest.mark.parametrize("unseen", [False, True])
def test_chunks_in_several_extents_are_put_together_from_bytes_that_are_read_once(
    divided: tuple[MemoryStore, str], unseen: bool
) -> None:
    one = Restore(*divided)
    assert any(info.num_leaves < info.chunk_leaves for _, info in one.extents()), "some chunk is in parts"
    one.run(unseen=unseen)
    one.check()
    assert one.far.bytes_read_twice() == 0


@pytest.mark.parametrize("unseen", [False, True])
def test_parts_of_many_chunks_that_are_near_one_another_are_read_together(unseen: bool) -> None:
    """As ranks write them that have some rows each: every pack has a part of every chunk."""
    state = {f"w{number}": numbers(1025, 150, seed=number) for number in range(12)}
    placements = {key: over(mesh(4), "S(0)") for key in state}
    store = new_store()
    infos = together(store, 4, lambda rank: state_of(state, placements, rank))
    one = Restore(store, infos[0].root)
    assert len([info for _, info in one.extents() if info.num_leaves < info.chunk_leaves]) >= 4 * len(state)
    one.run(unseen=unseen)
    assert all(same_bytes(target, state[name]) for name, target in one.targets.items())
    assert one.far.bytes_read_twice() == 0
    assert len(one.far.data_reads) <= 16, "not one for each part of each chunk"


def test_damage_of_one_extent_of_several_is_found_before_a_target_is_touched(divided: tuple[MemoryStore, str]) -> None:
    parts = [each for each in Restore(*divided).extents() if each[1].num_leaves < each[1].chunk_leaves]
    for key, info in (parts[0], parts[-1]):
        store = copied(divided[0])
        flip(store, key, info.end - 1)
        one = Restore(store, divided[1])
        with pytest.raises(CorruptionError, match="leaf"):
            one.run()
        one.check_untouched()


def test_whole_copies_stand_in_for_damaged_parts(divided: tuple[MemoryStore, str]) -> None:
    store, other = copied(divided[0]), new_store()
    parts = [each for each in Restore(store, divided[1]).extents() if each[1].num_leaves < each[1].chunk_leaves]
    commit(on(other), STATE)
    one = Restore(store, divided[1])
    for key, info in parts:
        flip(store, key, info.end - 1)
    for key, _ in other.list("packs/"):
        store.put(key, other.get_range(key, 0, other.head(key)))
    one.handle.sync()
    one.run()
    one.check()
