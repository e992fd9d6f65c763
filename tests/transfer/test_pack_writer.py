"""Pack writers: every chunk lands in a durable pack, or the error is raised and nothing is left."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

import pytest

from cas_ckpt.core.packs import read_directory
from cas_ckpt.errors import OutOfSpaceError, StorageError
from cas_ckpt.native import leaf_digests
from cas_ckpt.objects.digest import chunk_id
from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.transfer import pack_writer
from cas_ckpt.transfer.pack_writer import ChunkSink, EncodedChunk
from tests.effects import CrashNow, die_before, fail_at, no_space_from
from tests.meddling import MeddledStore
from tests.wrapped_stores import CountingStore, FaultyStore


def chunk(number: int, size: int = 100_000) -> EncodedChunk:
    data = number.to_bytes(4, "little") * (size // 4)
    digests = leaf_digests(memoryview(data), 65536)
    return EncodedChunk(chunk_id(len(data), digests), len(data), 65536, digests, 0, data)


def puts(sink: ChunkSink, *numbers: int) -> None:
    for number in numbers:
        sink.put(chunk(number))


def at_once(sink: ChunkSink, *runs: range) -> list[BaseException | None]:
    """Put each run of chunks in a thread of its own; what each raised."""
    raised: list[BaseException | None] = [None] * len(runs)
    all_ready = threading.Barrier(len(runs))

    def feed(at: int) -> None:
        all_ready.wait(30)
        try:
            puts(sink, *runs[at])
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            raised[at] = error

    threads = [threading.Thread(target=feed, args=(at,)) for at in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return raised


def files_in(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and path.name != "lock"]


@pytest.fixture
def many_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another pack is begun whenever nobody has one to lend."""
    monkeypatch.setattr(pack_writer, "BYTES_BEFORE_ANOTHER", 0)


@pytest.mark.usefixtures("many_packs")
def test_chunks_of_many_threads_land_in_packs_of_the_wanted_size(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    sink = ChunkSink(store, pack_bytes=1_000_000, num_writers=3)
    assert at_once(sink, range(50), range(50, 100), range(100, 150)) == [None] * 3
    packs = sink.finish()
    assert sum(len(pack.entries) for pack in packs) == 150
    assert all(pack.size_bytes < 1_300_000 for pack in packs) and len(packs) >= 12
    for pack in packs:
        trailer, infos = read_directory(store, pack.key)
        assert trailer.size_bytes == pack.size_bytes
        assert {info.digest for info in infos} == {entry.digest for entry in pack.entries}


def test_whoever_hands_chunks_in_has_written_them_when_put_returns() -> None:
    store = CountingStore(MemoryStore())
    sink = ChunkSink(store, pack_bytes=1 << 20)
    buffer = bytearray(b"a" * 100_000)
    digests = leaf_digests(memoryview(buffer), 65536)
    sink.put(EncodedChunk(chunk_id(len(buffer), digests), len(buffer), 65536, digests, 0, buffer))
    assert store.bytes_written > len(buffer)
    buffer[:] = b"b" * len(buffer)
    [pack] = sink.finish()
    [entry] = pack.entries
    assert bytes(store.get_range(pack.key, entry.offset + entry.header_bytes, entry.stored_bytes)) == b"a" * 100_000


def test_little_from_many_threads_is_one_pack(tmp_path: Path) -> None:
    another = threading.Event()  # which does not come: the one pack is slow to begin, and the others wait for it
    begun: list[int] = []

    def slowly() -> None:
        begun.append(1)
        if len(begun) > 1:
            another.set()
        another.wait(0.2)

    store = MeddledStore(FileStore(tmp_path), slowly, before="open_writer", times=99)
    sink = ChunkSink(store, pack_bytes=1 << 29, num_writers=4)
    assert at_once(sink, *(range(at, at + 10) for at in range(0, 40, 10))) == [None] * 4
    assert [len(pack.entries) for pack in sink.finish()] == [40]


@pytest.mark.parametrize("at", [1, 2, 3, 10, 30, 60])
def test_a_full_disk_is_raised_by_whoever_meets_it_and_by_finish(at: int) -> None:
    inner = MemoryStore()
    sink = ChunkSink(FaultyStore(inner, no_space_from(at)), pack_bytes=1_000_000)
    with pytest.raises(OutOfSpaceError):
        puts(sink, *range(40))
    with pytest.raises(OutOfSpaceError):
        sink.put(chunk(41))
    with pytest.raises(OutOfSpaceError):
        sink.finish()
    assert all(read_directory(inner, key) for key, _ in inner.list("packs/"))


def test_giving_up_leaves_no_unfinished_pack(tmp_path: Path) -> None:
    sink = ChunkSink(FileStore(tmp_path), pack_bytes=10_000_000)
    puts(sink, *range(5))
    sink.abort()
    assert files_in(tmp_path) == []
    with pytest.raises(InterruptedError):
        sink.put(chunk(5))


@pytest.mark.parametrize("k", [4, 5, 6])
def test_an_error_that_only_the_end_of_a_pack_meets_is_raised_by_finish(k: int, tmp_path: Path) -> None:
    sink = ChunkSink(FaultyStore(FileStore(tmp_path), fail_at(k)), pack_bytes=1 << 20)
    sink.put(chunk(1))
    for _ in range(2):
        with pytest.raises(StorageError, match="planned"):
            sink.finish()
    assert files_in(tmp_path) == []


def test_who_waits_for_a_pack_hears_of_the_error_of_whoever_has_it() -> None:
    second_is_there = threading.Event()

    def refuse_when_told() -> None:
        second_is_there.wait(30)
        raise OutOfSpaceError("no space left")

    store = MeddledStore(MemoryStore(), refuse_when_told, before="open_writer", times=99)
    sink = ChunkSink(store, pack_bytes=1 << 20)

    raised: list[BaseException] = []

    def second() -> None:
        second_is_there.set()
        try:
            sink.put(chunk(2))
        except OutOfSpaceError as error:
            raised.append(error)

    thread = threading.Thread(target=second)
    thread.start()
    with pytest.raises(OutOfSpaceError):
        sink.put(chunk(1))
    thread.join(30)
    assert len(raised) == 1


@pytest.mark.usefixtures("many_packs")
@pytest.mark.parametrize("at", [2, 7, 20])
def test_an_error_of_one_thread_leaves_nothing_of_the_packs_of_others(tmp_path: Path, at: int) -> None:
    sink = ChunkSink(FaultyStore(FileStore(tmp_path), no_space_from(at)), pack_bytes=1 << 29, num_writers=3)
    raised = at_once(sink, range(20), range(20, 40), range(40, 60))
    assert {type(error) for error in raised} == {OutOfSpaceError}
    with pytest.raises(OutOfSpaceError):
        sink.finish()
    assert files_in(tmp_path) == []


@pytest.mark.usefixtures("many_packs")
@pytest.mark.parametrize("k", [2, 15, 35, 60])
def test_dying_with_several_packs_open_leaves_only_whole_packs(tmp_path: Path, k: int) -> None:
    sink = ChunkSink(FaultyStore(FileStore(tmp_path), die_before(k)), pack_bytes=600_000, num_writers=3)
    raised = at_once(sink, range(20), range(20, 40), range(40, 60))
    assert CrashNow in {type(error) for error in raised}
    with pytest.raises(CrashNow):
        sink.finish()
    fresh = FileStore(tmp_path)
    for key, size in fresh.list("packs/"):
        assert read_directory(fresh, key)[0].size_bytes == size


@pytest.mark.parametrize("begun", [False, True])
def test_a_signal_that_comes_as_a_pack_is_lent_lets_nobody_wait_and_leaves_nothing(tmp_path: Path, begun: bool) -> None:
    store = FileStore(tmp_path / "store")
    sink = ChunkSink(store, pack_bytes=1 << 20, num_writers=1)
    if begun:
        sink.put(chunk(0))

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame.f_code.co_name == "_lend":
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    with pytest.raises(KeyboardInterrupt):
        sink.put(chunk(1))
    raised = at_once(sink, range(2, 4))
    assert [type(error) for error in raised] == [KeyboardInterrupt]
    sink.abort()
    assert not files_in(tmp_path)
