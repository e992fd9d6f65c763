"""Pack writers: every chunk lands in a durable pack, or the error is raised and nothing is left."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest

from cas_ckpt.core.packs import read_directory
from cas_ckpt.errors import OutOfSpaceError, StorageError
from cas_ckpt.native import leaf_digests
from cas_ckpt.objects.digest import chunk_id
from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.testing import FaultyStore, fail_at, no_space_from
from cas_ckpt.transfer.pack_writer import ChunkSink, EncodedChunk
from tests.meddling import MeddledStore


def chunk(number: int, size: int = 100_000) -> EncodedChunk:
    data = number.to_bytes(4, "little") * (size // 4)
    digests = leaf_digests(memoryview(data), 65536)
    return EncodedChunk(chunk_id(len(data), digests), len(data), 65536, digests, 0, data)


def test_chunks_of_many_threads_land_in_packs_of_the_wanted_size(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    store = FileStore(tmp_path / "store")
    sink = ChunkSink(store, pack_bytes=1_000_000)
    released: list[int] = []

    def feed(start: int) -> None:
        for number in range(start, start + 50):
            sink.put(chunk(number), release=partial(released.append, number))

    threads = [threading.Thread(target=feed, args=(start,)) for start in (0, 50, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    packs = sink.finish()
    assert sorted(released) == list(range(150))
    assert sum(len(pack.entries) for pack in packs) == 150
    assert all(pack.size_bytes < 1_300_000 for pack in packs) and len(packs) >= 12
    for pack in packs:
        trailer, infos = read_directory(store, pack.key)
        assert trailer.size_bytes == pack.size_bytes
        assert {info.digest for info in infos} == {entry.digest for entry in pack.entries}


@pytest.mark.parametrize("at", [1, 2, 3, 10, 30, 60])
def test_a_full_disk_is_raised_and_every_buffer_comes_back(at: int) -> None:
    inner = MemoryStore()
    sink = ChunkSink(FaultyStore(inner, no_space_from(at)), pack_bytes=1_000_000)
    released: list[int] = []
    handed = 0
    with pytest.raises(OutOfSpaceError):  # noqa: PT012 - either call may be the one that raises
        for number in range(40):
            handed += 1
            sink.put(chunk(number), release=partial(released.append, number))
        sink.finish()
    sink.abort()
    assert sorted(released) == list(range(handed))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("cas-ckpt-pack")]


def test_giving_up_leaves_no_unfinished_pack() -> None:
    store = MemoryStore()
    sink = ChunkSink(store, pack_bytes=10_000_000)
    for number in range(5):
        sink.put(chunk(number))
    sink.abort()
    assert list(store.list("packs/")) == []


@pytest.mark.parametrize("k", [4, 5, 6])
def test_an_error_that_only_the_end_of_a_pack_meets_is_raised_by_finish(k: int) -> None:
    sink = ChunkSink(FaultyStore(MemoryStore(), fail_at(k)), pack_bytes=1 << 20)
    sink.put(chunk(1))
    with pytest.raises(StorageError):
        sink.finish()


def test_chunks_that_wait_when_a_writer_fails_give_their_buffers_back() -> None:
    released: list[int] = []
    go_on = threading.Event()

    def refuse_when_told() -> None:
        go_on.wait(30)
        raise OutOfSpaceError("no space left")

    sink = ChunkSink(MeddledStore(MemoryStore(), refuse_when_told, before="open_writer", times=99), pack_bytes=1 << 20)
    for number in range(5):
        sink.put(chunk(number), release=partial(released.append, number))
    go_on.set()
    with pytest.raises(OutOfSpaceError):
        sink.finish()
    assert sorted(released) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("at", [1, 2])
def test_a_writer_that_fails_at_its_header_or_first_chunk_leaves_no_temporary_file(tmp_path: Path, at: int) -> None:
    root = tmp_path / "store"
    root.mkdir()
    sink = ChunkSink(FaultyStore(FileStore(root), no_space_from(at)), pack_bytes=1 << 20)
    sink.put(chunk(1))
    with pytest.raises(OutOfSpaceError):
        sink.finish()
    assert [path.name for path in root.rglob("*") if path.is_file() and path.name != "lock"] == []
