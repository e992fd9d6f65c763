"""What a host keeps of remote repositories: quick where it is there, and nothing is wrong where it is not."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cas_ckpt.core import host_cache
from cas_ckpt.core.config import Config
from cas_ckpt.core.create import new_store_id, write_config
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.host_cache import HostCache
from cas_ckpt.core.records import log_rows
from cas_ckpt.core.refs import RefKind
from cas_ckpt.core.tree import load_tree
from cas_ckpt.errors import CorruptionError
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.fsck.repair import rebuild_at, refill_index
from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.storage.store import ListedVersion
from tests.committing import commit
from tests.processes import PIPE, Forked
from tests.remote_store import RemoteStore


@pytest.fixture
def bucket() -> MemoryStore:
    """A bucket with a repository of three commits."""
    inner = MemoryStore(url="s3://bucket/llm")
    fill(inner, 3)
    return inner


def fill(inner: MemoryStore, num_commits: int) -> str:
    config = Config(new_store_id())
    write_config(inner, config)
    with closing(RepositoryHandle.on_store(RemoteStore(inner), cache=None)) as handle:
        for number in range(num_commits):
            commit(handle, {"w": np.full(5000, number, np.float32)}, message=f"{number}")
    return config.store_id


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def messages(handle: RepositoryHandle) -> list[str]:
    head = handle.refs.get(RefKind.BRANCH, "main").target
    assert head is not None
    return [row.message for row in log_rows(handle, [head])]


def opened(bucket: MemoryStore, place: Path | None) -> RepositoryHandle:
    return RepositoryHandle.on_store(RemoteStore(bucket), cache=place)


def test_a_second_process_finds_the_index_and_reads_no_pack(bucket: MemoryStore, place: Path) -> None:
    with closing(opened(bucket, place)) as handle:
        handle.sync()
    store = RemoteStore(bucket)
    with closing(RepositoryHandle.on_store(store, cache=place)) as handle:
        assert messages(handle) == ["2", "1", "0"]
        root = next(log_rows(handle, [head_of(handle)])).root
        load_tree(handle, Digest(root))
    assert store.asked == {"get": 3}  # the config, and the ref twice


def head_of(handle: RepositoryHandle) -> Digest:
    head = handle.refs.get(RefKind.BRANCH, "main").target
    assert head is not None
    return head


def test_a_sync_reads_small_meta_packs_whole_by_one_request_each(bucket: MemoryStore, place: Path) -> None:
    store = RemoteStore(bucket)
    with closing(RepositoryHandle.on_store(store, cache=place)) as handle:
        store.reset()
        handle.sync()
        assert store.tally("get_range").calls == 3
        assert store.tally("list").calls == 1


def test_an_index_that_was_lost_is_made_anew_from_the_cache(bucket: MemoryStore, place: Path) -> None:
    with closing(opened(bucket, place)) as handle:
        handle.sync()
    for path in place.rglob("index.sqlite*"):
        path.unlink()
    store = RemoteStore(bucket)
    with closing(RepositoryHandle.on_store(store, cache=place)) as handle:
        handle.sync()
        assert messages(handle) == ["2", "1", "0"]
    assert store.tally("get_range").calls == 0


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "grown", "folder", "link", "pipe"])
def test_a_damaged_file_is_dropped_and_the_store_is_asked(bucket: MemoryStore, place: Path, damage: str) -> None:
    with closing(opened(bucket, place)) as handle:
        handle.sync()
    for path in place.rglob("index.sqlite*"):
        path.unlink()
    blobs = [path for path in place.glob("*/blobs/*/*")]
    assert blobs
    for path in blobs:
        data = path.read_bytes()
        path.unlink()
        if damage == "flipped":
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        elif damage == "cut":
            path.write_bytes(data[:-7])
        elif damage == "empty":
            path.touch()
        elif damage == "grown":
            with path.open("wb") as file:
                file.truncate(host_cache.MOST_FILE_BYTES + 1)
        elif damage == "folder":
            path.mkdir()
        elif damage == "link":
            path.symlink_to("/dev/zero")
        else:
            os.mkfifo(path)
    store = RemoteStore(bucket)
    with closing(RepositoryHandle.on_store(store, cache=place)) as handle:
        handle.sync()
        assert messages(handle) == ["2", "1", "0"]
    assert store.tally("get_range").calls == 3


def test_a_file_of_false_bytes_with_a_right_hash_is_found_out(bucket: MemoryStore, place: Path) -> None:
    with closing(opened(bucket, place)) as handle:
        handle.sync()
        root = Digest(next(log_rows(handle, [head_of(handle)])).root)
        kept = handle.cache
        assert kept is not None
        for key, size in bucket.list("packs/"):
            data = bytearray(bucket.get(key))
            data[100:-200] = bytes(len(data) - 300)
            kept.put(key, data)
            assert len(data) == size
        load_tree(handle, root)
    for path in place.rglob("index.sqlite*"):
        path.unlink()
    with closing(opened(bucket, place)) as handle:
        handle.sync()
        assert not handle.damaged
        load_tree(handle, root)


def test_two_repositories_of_one_url_are_never_mixed(place: Path) -> None:
    first, second = MemoryStore(url="s3://bucket/llm"), MemoryStore(url="s3://bucket/llm")
    fill(first, 3)
    fill(second, 1)
    for bucket, wanted in ((first, ["2", "1", "0"]), (second, ["0"]), (first, ["2", "1", "0"])):
        with closing(opened(bucket, place)) as handle:
            assert messages(handle) == wanted
            assert set(handle.index.packs()) <= {key for key, _ in bucket.list("packs/")}


def test_who_claims_the_id_and_the_version_tags_of_another_repository_is_not_believed_for_it(place: Path) -> None:
    ours, theirs = MemoryStore(url="s3://bucket/llm"), MemoryStore(url="s3://strangers/llm")
    store_id = fill(ours, 3)
    for key, _ in list(ours.list("")):
        theirs.put(key, ours.get(key))
    with closing(RepositoryHandle.on_store(OneTag(theirs), cache=None)) as handle:
        commit(handle, {"w": np.full(5000, 66, np.float32)}, message="harm")
    for bucket, wanted in (
        (theirs, ["harm", "2", "1", "0"]),
        (ours, ["2", "1", "0"]),
        (theirs, ["harm", "2", "1", "0"]),
    ):
        with closing(RepositoryHandle.on_store(OneTag(bucket), cache=place)) as handle:
            assert handle.config.store_id == store_id
            list(handle.refs.list())
            assert messages(handle) == wanted
            assert [ref.target for ref in handle.refs.list()] == [handle.refs.get(RefKind.BRANCH, "main").target]
    host = HostCache.open(place)
    assert host is not None
    assert sorted(str(each.url) for each in host.repositories()) == ["s3://bucket/llm", "s3://strangers/llm"]


class OneTag(RemoteStore):
    """A server that gives every value the same version tag."""

    def list_versions(self, prefix: str) -> Iterator[ListedVersion]:
        return (replace(each, version="1") for each in super().list_versions(prefix))


def test_a_folder_that_cannot_be_had_is_gone_without(bucket: MemoryStore, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    for place in (tmp_path / "taken", tmp_path / "taken" / "below", None):
        with closing(opened(bucket, place)) as handle:
            assert handle.cache is None and handle.index.in_memory
            assert messages(handle) == ["2", "1", "0"]


def test_others_may_not_look_into_it(bucket: MemoryStore, place: Path) -> None:
    with closing(opened(bucket, place)) as handle:
        handle.sync()
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    for path in place.rglob("*"):
        if path.is_dir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o700, path


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777, 0o702], ids=oct)
def test_a_folder_into_which_others_may_write_is_gone_without(
    bucket: MemoryStore, place: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    place.mkdir()
    place.chmod(mode)
    with closing(opened(bucket, place)) as handle:
        assert handle.cache is None and handle.index.in_memory
        assert messages(handle) == ["2", "1", "0"]
    assert "others may write into it" in caplog.text
    assert not list(place.iterdir())
    place.chmod(0o755)
    with closing(opened(bucket, place)) as handle:
        assert handle.cache is not None


def test_a_local_repository_keeps_nothing_there(handle: RepositoryHandle, place: Path) -> None:
    with closing(RepositoryHandle.open(handle.store.url, cache=place)) as again:
        assert again.cache is None
    assert not place.exists()


def test_what_was_not_used_for_longest_goes_first(place: Path) -> None:
    host = HostCache.open(place)
    assert host is not None
    kept = host.repository(new_store_id(), "s3://bucket/llm")
    assert kept is not None
    for number in range(10):
        kept.put(f"{number}", bytes(1000))
        os.utime(kept._path(f"{number}"), (number * 10_000, number * 10_000))
    assert kept.get("0") is not None  # used just now
    host.set_limit(6000)
    assert kept.get("0") is not None and kept.get("9") is not None
    assert kept.get("1") is None and kept.get("2") is None
    again = HostCache.open(place)
    assert again is not None and again.limit_bytes == 6000
    assert sum(each.num_bytes for each in again.repositories()) <= 6000


def test_the_limit_holds_while_it_is_written(place: Path) -> None:
    host = HostCache.open(place)
    assert host is not None
    host.set_limit(100_000)
    kept = host.repository(new_store_id(), "s3://bucket/llm")
    assert kept is not None
    for number in range(300):
        kept.put(f"{number}", bytes(1000))
    assert sum(path.stat().st_size for path in place.rglob("*") if path.is_file()) <= 110_000


def test_clear_removes_all_but_an_index_that_is_open(bucket: MemoryStore, place: Path) -> None:
    host = HostCache.open(place)
    assert host is not None
    with closing(opened(bucket, place)) as handle:
        handle.sync()
        freed, busy = host.clear()
        assert freed > 0 and [name[:32] for name in busy] == [handle.config.store_id]
        assert messages(handle) == ["2", "1", "0"]
    freed, busy = host.clear()
    assert freed > 0 and not busy and not host.repositories()
    with closing(opened(bucket, place)) as handle:
        assert messages(handle) == ["2", "1", "0"]


def test_threads_share_a_cache(bucket: MemoryStore, place: Path) -> None:
    errors: list[BaseException] = []

    def look() -> None:
        try:
            for _ in range(5):
                with closing(opened(bucket, place)) as handle:
                    handle.sync()
                    assert messages(handle) == ["2", "1", "0"]
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def _write_for_ever(place: Path) -> None:
    kept = HostCache.open(place).repository("0" * 32, "s3://bucket/llm")
    print("begun", flush=True)
    while True:
        for number in range(20):
            kept.put(f"{number}", b"%d" % number * 100_000)


@contextmanager
def _two(function: Callable[..., None], *args: Path) -> Iterator[None]:
    """Two processes that have begun, and are killed at the end of the block."""
    with Forked(function, *args, stdout=PIPE) as first, Forked(function, *args, stdout=PIPE) as second:
        for process in (first, second):
            process.stdout.readline()
        yield
        for process in (first, second):
            process.kill()


@pytest.mark.slow
def test_processes_that_are_killed_while_they_write_leave_whole_values_or_none(place: Path) -> None:
    for _ in range(3):
        with _two(_write_for_ever, place):
            for _, number in zip(range(200), _forever(20), strict=False):
                check(place, number)
        for number in range(20):
            check(place, number)


def _forever(count: int) -> Iterator[int]:
    while True:
        yield from range(count)


def check(place: Path, number: int) -> None:
    host = HostCache.open(place)
    assert host is not None
    kept = host.repository("0" * 32, "s3://bucket/llm")
    assert kept is not None
    assert kept.get(f"{number}") in (None, b"%d" % number * 100_000)


def test_a_damaged_index_in_the_cache_is_made_anew(bucket: MemoryStore, place: Path) -> None:
    with closing(opened(bucket, place)) as handle:
        handle.sync()
        path = Path(handle.cache.index_place)  # type: ignore[union-attr]
    path.write_bytes(b"no database" * 1000)
    with closing(opened(bucket, place)) as handle:
        assert not handle.index.in_memory
        assert messages(handle) == ["2", "1", "0"]


def test_what_is_damaged_in_the_store_is_still_found(bucket: MemoryStore, place: Path) -> None:
    with closing(opened(bucket, None)) as handle:
        handle.sync()
        root = Digest(next(log_rows(handle, [head_of(handle)])).root)
    for key, _ in list(bucket.list("packs/")):
        if key.endswith(".meta"):
            data = bytearray(bucket.get(key))
            data[150:-400] = bytes(len(data) - 550)
            bucket.put(key, data)
    with closing(opened(bucket, place)) as handle, pytest.raises(CorruptionError):
        load_tree(handle, root)


def test_an_index_in_the_cache_is_rebuilt(bucket: MemoryStore, place: Path) -> None:
    with closing(opened(bucket, place)) as handle:
        handle.sync()
        before = handle.index.packs()
        assert handle.cache is not None
        where = handle.cache.index_place
    Path(where).write_bytes(b"no database" * 1000)
    with host_cache.cache_at(place):
        report = rebuild_at(RemoteStore(bucket), handle.config.store_id, where)
    assert report.stats.num_commits == 3 and not report.damaged
    with closing(opened(bucket, place)) as handle:
        assert handle.index.packs() == before and handle.index.place == where
        refill_index(handle)
        assert handle.index.packs() == before


def _look_for_ever(path: Path, place: Path) -> None:
    print("begun", flush=True)
    while True:
        with closing(RepositoryHandle.on_store(RemoteStore(FileStore(path)), cache=place)) as handle:
            handle.sync()
            messages(handle)
            list(handle.refs.list())
        HostCache.open(place).clear()


@pytest.mark.slow
def test_processes_that_are_killed_while_they_look_leave_a_cache_that_answers_right(tmp_path: Path) -> None:
    path, place = tmp_path / "bucket", tmp_path / "cache"
    write_config(FileStore(path), Config(new_store_id()))
    with closing(RepositoryHandle.on_store(RemoteStore(FileStore(path)), cache=None)) as writer:
        for number in range(20):
            commit(writer, {"w": np.full(300, number, np.float32)}, message=f"{number}")
    wanted = [f"{number}" for number in range(19, -1, -1)]
    for wait_s in (0.05, 0.3, 0.6):
        with _two(_look_for_ever, path, place):
            threading.Event().wait(wait_s)
        for _ in range(2):
            with closing(RepositoryHandle.on_store(RemoteStore(FileStore(path)), cache=place)) as handle:
                assert messages(handle) == wanted
                handle.sync()
                assert handle.index.packs() == dict(handle.store.list("packs/")) and messages(handle) == wanted
