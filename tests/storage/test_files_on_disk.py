"""What the file store does on disk: order of effects, leftovers, links, rights, other processes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from cas_ckpt.clock import fixed, now_s
from cas_ckpt.errors import (
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    StorageError,
)
from cas_ckpt.storage.disk import DescriptorCache, leaves_of_file, open_for_reading
from cas_ckpt.storage.file import FileStore
from cas_ckpt.testing.store_values import at_once, noise

FAR_FUTURE_S = 4e10


def leftovers(store: FileStore) -> list[str]:
    return sorted(name for name in os.listdir(store.root / "tmp") if name != "lock")


def log_of_effects(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> list[str]:
    log: list[str] = []
    with monkeypatch.context() as patch:
        for name in ("fsync", "replace", "link"):
            patch.setattr(os, name, _logging(log, name, getattr(os, name)))
        act()
    return log


def _logging(log: list[str], name: str, real: Callable[..., None]) -> Callable[..., None]:
    def logged(*arguments: object) -> None:
        is_folder = name == "fsync" and os.path.isdir(f"/proc/self/fd/{arguments[0]}")
        log.append("fsync folder" if is_folder else name)
        real(*arguments)

    return logged


def test_bytes_are_synced_before_they_get_their_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path)
    for key in ("a", "b"):  # makes the folders, and a value to swap
        store.put(f"refs/{key}", b"old")
    writer = store.open_writer("refs/streamed")
    writer.write(noise(100_000))
    acts: dict[str, Callable[[], None]] = {
        "replace": lambda: store.put("refs/a", b"new"),
        "replace ": lambda: store.compare_and_swap("refs/a", b"new", b"newer"),
        "link": lambda: store.put_if_absent("refs/c", b"new"),
        "link ": writer.commit,
    }
    for naming, act in acts.items():
        assert log_of_effects(monkeypatch, act) == ["fsync", naming.strip(), "fsync folder"]


def test_every_new_folder_is_synced_into_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path)
    store.put("warm", b"")
    log = log_of_effects(monkeypatch, lambda: store.put("a/b/c/value", b"x"))
    assert log.count("fsync folder") == 4


def test_a_failed_sync_leaves_the_older_value_and_no_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path)
    store.put("refs/main", b"old")

    def failing(fd: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        writes: list[Callable[[], None]] = [
            lambda: store.put("refs/main", b"new"),
            lambda: store.compare_and_swap("refs/main", b"old", b"new"),
            lambda: store.put_if_absent("refs/other", b"new"),
        ]
        for write in writes:
            with pytest.raises(StorageError, match="refs/"):
                write()
    assert store.get("refs/main") == b"old"
    assert list(store.list("")) == [("refs/main", 3)]
    assert leftovers(store) == []


def test_without_hard_links_a_key_is_still_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path)

    def refused(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "as a filesystem without hard links says")

    monkeypatch.setattr(os, "link", refused)
    answers = at_once(lambda value: store.put_if_absent("config", value), [b"one", b"two", b"three"])
    assert sum(isinstance(answer, ConflictError) for answer in answers) == 2
    assert store.get("config") in (b"one", b"two", b"three")
    assert leftovers(store) == []


def test_temporaries_of_the_dead_are_swept_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("makes-the-lock", b"")
    living = store.open_writer("packs/living")
    living.write(b"x")
    abandoned = store.open_writer("packs/abandoned")
    abandoned.write(b"x")
    del abandoned  # never committed nor aborted, as when a process dies
    assert len(leftovers(store)) == 2
    assert store.sweep_temporaries(now_s() - 3600).num_files == 0, "too young"
    with fixed(lambda: FAR_FUTURE_S):
        assert store.sweep_temporaries(now_s() - 3600).num_files == 1
    living.commit()
    assert store.get("packs/living") == b"x"
    assert os.listdir(tmp_path / "tmp") == ["lock"], "a lock that is removed no longer excludes who holds it"


def test_sweeping_a_store_that_is_not_there_makes_nothing(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "none")
    assert store.sweep_temporaries(now_s()).num_files == 0
    store.delete("a")
    assert list(store.list("")) == []
    assert not store.root.exists()


def test_temporaries_and_foreign_names_are_not_listed(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("packs/a", b"xyz")
    with store.open_writer("packs/b") as writer:
        writer.write(b"x")
        (tmp_path / "packs" / "notes of mine~").write_text("x")
        (tmp_path / "empty").mkdir()
        assert list(store.list("")) == [("packs/a", 3)]


def test_a_crash_between_link_and_unlink_is_harmless(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put_if_absent("packs/a", b"value")
    os.link(tmp_path / "packs" / "a", tmp_path / "tmp" / "1-left")
    assert list(store.list("")) == [("packs/a", 5)]
    with fixed(lambda: FAR_FUTURE_S):
        assert store.sweep_temporaries(now_s()).num_files == 1
    assert store.get("packs/a") == b"value"


def test_a_link_planted_under_a_key_leads_nobody_outside(tmp_path: Path) -> None:
    outside = tmp_path / "secret"
    outside.write_bytes(b"secret")
    store = FileStore(tmp_path / "store")
    store.put("refs/real", b"x")
    (tmp_path / "store/refs/link").symlink_to(outside)
    for read in (store.get, store.head, lambda key: store.get_range(key, 0, 1), lambda key: store.get_tail(key, 1)):
        with pytest.raises(NotFoundError, match="refs/link"):
            read("refs/link")
    assert list(store.list("")) == [("refs/real", 1)]
    store.put("refs/link", b"ours")
    assert outside.read_bytes() == b"secret"
    assert store.get("refs/link") == b"ours"


def test_a_pipe_planted_under_a_key_hangs_nobody(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    os.mkfifo(tmp_path / "config")
    with pytest.raises(NotFoundError):
        store.get("config")


def test_a_key_below_a_value_or_above_keys_is_refused(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("a", b"x")
    store.put("folder/b", b"x")
    for key in ("a/b", "folder"):
        with pytest.raises(InvalidInputError, match=key):
            store.put(key, b"y")
    assert leftovers(store) == []


def test_a_pack_cut_short_under_an_open_descriptor_is_corruption_not_a_crash(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    value = noise(3 << 20)
    store.put("packs/a", value)
    before = store.get_range("packs/a", 0, len(value))
    os.truncate(tmp_path / "packs" / "a", 1 << 20)
    assert before == value
    for length in (2 << 20, (1 << 20) + 1):
        with pytest.raises(CorruptionError, match="packs/a"):
            store.get_range("packs/a", 0, length)


def test_a_range_that_the_system_reads_in_parts_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path)
    value = noise(10_000)
    store.put("packs/a", value)
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, length, offset: pread(fd, min(length, 999), offset))
    assert store.get_range("packs/a", 10, 9_000) == value[10:9_010]
    assert store.get_tail("packs/a", 5_000) == (10_000, value[5_000:])
    assert store.get_range("packs/a", 10_000, 0) == b""


def test_a_pack_replaced_by_another_process_is_served_new(tmp_path: Path) -> None:
    store, other = FileStore(tmp_path), FileStore(tmp_path)
    store.put("packs/a", b"old value")
    assert store.get_range("packs/a", 0, 3) == b"old"
    other.put("packs/a", b"new")
    assert store.get_tail("packs/a", 10) == (3, b"new")
    other.delete("packs/a")
    with pytest.raises(NotFoundError):
        store.get_range("packs/a", 0, 3)


def test_what_memory_holds_only_in_part_is_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path)
    store.put("packs/a", b"value")

    def half(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        buffers[0][:2] = b"va"
        return 2

    monkeypatch.setattr(os, "preadv", half)
    assert not store.read_into("packs/a", 0, memoryview(bytearray(5)), cached_only=True)


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_a_filesystem_that_cannot_tell_has_nothing_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store = FileStore(tmp_path)
    store.put("packs/a", b"value")

    def refused(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        raise OSError(code, "refused")

    monkeypatch.setattr(os, "preadv", refused)
    assert not store.read_into("packs/a", 0, memoryview(bytearray(5)), cached_only=True)
    with pytest.raises(StorageError, match="packs/a"):
        store.read_into("packs/a", 0, memoryview(bytearray(5)))


def test_a_file_that_is_cut_short_while_its_leaves_are_read_is_told_as_truncated(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 300)
    descriptor = open_for_reading(tmp_path / "a", "packs/a")  # its size was looked at, then it was cut
    for size in (100, 250):
        target = np.zeros(250, np.uint8)
        assert leaves_of_file(descriptor.fd, "packs/a", 50, 0, 250, 100, None, [target], False) == 3 and target.all()
        os.truncate(tmp_path / "a", size)
        with pytest.raises(CorruptionError, match=f"packs/a: wanted bytes 50 to 300, but the value ends at {size}"):
            leaves_of_file(descriptor.fd, "packs/a", 50, 0, 250, 100, None, [target], False)
        (tmp_path / "a").write_bytes(b"x" * 300)


def test_a_descriptor_is_not_closed_under_a_reader(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}" for number in range(12)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 100)
    cache = DescriptorCache(lambda key: open_for_reading(tmp_path / key, key), capacity=2)

    def read(start: int) -> bool:
        for step in range(600):
            number = (start + step * 5) % len(paths)
            descriptor, _ = cache.get(str(number))
            if set(os.pread(descriptor.fd, 100, 0)) != {number}:
                return False
        return True

    assert at_once(read, range(6)) == [True] * 6
    assert len(cache) == 2


def test_open_descriptors_stay_few_and_close_gives_them_back(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(100):
        store.put(f"packs/{number}", b"value")
        store.get_range(f"packs/{number}", 0, 1)
    assert len(os.listdir("/proc/self/fd")) <= before + 64
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before


@contextmanager
def folder_that_cannot_be_written() -> Iterator[Path]:
    """A store that holds config=x, seen by somebody who may only read it."""
    with tempfile.TemporaryDirectory() as folder:
        FileStore(folder).put("config", b"x")
        os.chmod(folder, 0o755)
        is_root = os.geteuid() == 0
        try:
            if is_root:
                os.seteuid(65534)
            else:
                os.chmod(folder, 0o555)
                os.chmod(Path(folder) / "tmp", 0o555)
            yield Path(folder)
        finally:
            if is_root:
                os.seteuid(0)
            os.chmod(folder, 0o755)
            os.chmod(Path(folder) / "tmp", 0o755)


def test_a_folder_that_cannot_be_written_says_so_and_can_be_read() -> None:
    with folder_that_cannot_be_written() as root:
        store = FileStore(root)
        assert store.abilities.read_only
        assert store.get("config") == b"x"
        for write in (
            lambda: store.put("config", b"y"),
            lambda: store.put_if_absent("other", b"y"),
            lambda: store.compare_and_swap("config", b"x", b"y"),
            lambda: store.open_writer("packs/p"),
            lambda: store.delete("config"),
        ):
            with pytest.raises(PermissionDeniedError):
                write()
        assert list(store.list("")) == [("config", 1)]
    assert not FileStore(Path("/")).abilities.read_only or os.geteuid() != 0


STREAMER = """
import sys
from cas_ckpt.storage.file import FileStore
store = FileStore(sys.argv[1])
piece = bytes(range(256)) * 4096
for number in range(10_000):
    with store.open_writer(f"packs/{number}") as writer:
        for _ in range(10):
            writer.write(piece)
            print("piece", flush=True)
        writer.commit()
    store.put("head", b"%d" % number)
"""


@pytest.mark.parametrize("num_pieces", [3, 12, 25])
def test_a_process_killed_while_it_writes_leaves_whole_values_only(tmp_path: Path, num_pieces: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", STREAMER, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    for _ in range(num_pieces):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    store = FileStore(tmp_path)
    for key, size in store.list("packs/"):
        assert size == 10 << 20, key
    with fixed(lambda: FAR_FUTURE_S):
        store.sweep_temporaries(now_s())
    assert leftovers(store) == []
    store.put("head", b"the next process needs no repair")


APPENDER = """
import sys
from cas_ckpt.errors import ConflictError
from cas_ckpt.storage.file import FileStore
store, done = FileStore(sys.argv[1]), 0
while done < 25:
    current = store.get("ref")
    try:
        store.compare_and_swap("ref", current, current + sys.argv[2].encode())
    except ConflictError:
        continue
    done += 1
"""


def test_swaps_of_two_processes_lose_no_update(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("ref", b"")
    processes = [subprocess.Popen([sys.executable, "-c", APPENDER, str(tmp_path), mark]) for mark in "ab"]
    assert [process.wait() for process in processes] == [0, 0]
    assert sorted(store.get("ref")) == sorted(b"a" * 25 + b"b" * 25)


FORKER = """
import os, sys
from pathlib import Path
from cas_ckpt.storage.file import FileStore
store = FileStore(Path(sys.argv[1]))
store.open_writer("before").commit()  # leaves its buffer for the next writer
told, tell = os.pipe()
child = os.fork()
writer = store.open_writer("child" if child == 0 else "parent")
if child == 0:
    os.read(told, 1)
    writer.write(b"c" * 5000)
    writer.commit()
    os._exit(0)
writer.write(b"p" * 5000)
os.write(tell, b"!")
assert os.waitpid(child, 0)[1] == 0
writer.commit()
"""


def test_a_process_and_the_one_that_it_forks_write_each_into_a_buffer_of_its_own(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKER, str(tmp_path)], check=True, timeout=60)
    store = FileStore(tmp_path)
    assert (store.get("parent"), store.get("child")) == (b"p" * 5000, b"c" * 5000)
