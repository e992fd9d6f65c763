"""What a killed commit leaves in tmp/: it is reported, and collected; what a living one writes is left alone."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cas_ckpt.clock import fixed
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.protocol import PREFIX, VERSION
from cas_ckpt.objects.digest import seal
from cas_ckpt.ops.fsck.check import check_url
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.ops.history.usage import repository_stats
from cas_ckpt.storage import disk
from cas_ckpt.storage.disk import LOCK_NAME
from cas_ckpt.storage.file import FileStore
from tests.cli.running import call
from tests.processes import PIPE, Forked

AT_ONCE = GcOptions(min_age_s=0)
FAR_FUTURE_S = 4e9


def _write(path: Path) -> None:
    """Write 16 MiB of a pack, and wait for a line before it is committed."""
    writer = FileStore(path).open_writer("packs/aa/" + 32 * "a" + ".data")
    writer.write(bytes(16 << 20))
    print("written", flush=True)
    sys.stdin.readline()
    writer.commit()


@contextmanager
def _writer(path: Path) -> Iterator[Forked]:
    """A process in which `_write` has written."""
    with Forked(_write, path, stdin=PIPE, stdout=PIPE) as process:
        assert process.stdout.readline() == "written\n"
        yield process
        process.kill()


def _killed(path: Path) -> None:
    with _writer(path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _temporaries(path: Path) -> list[str]:
    return [name for name in os.listdir(path / "tmp") if not name.startswith(LOCK_NAME)]


def _path(handle: RepositoryHandle) -> Path:
    assert isinstance(handle.store, FileStore)
    return handle.store.root


def test_what_a_killed_commit_left_is_reported_and_collected(handle: RepositoryHandle) -> None:
    path = _path(handle)
    _killed(path)
    stats = repository_stats(handle)
    assert (stats.num_temporaries, stats.temporary_bytes) == (1, 16 << 20)
    notes = [note.what for note in check_url(path).notes if note.where == "tmp"]
    assert len(notes) == 1
    assert f"1 unfinished files ({16 << 20} bytes)" in notes[0]
    foreseen = collect_garbage(handle, AT_ONCE, dry_run=True)
    assert (foreseen.temporaries, foreseen.temporary_bytes) == (1, 16 << 20)
    assert len(_temporaries(path)) == 1
    report = collect_garbage(handle, AT_ONCE)
    assert (report.temporaries, report.temporary_bytes) == (1, 16 << 20)
    assert _temporaries(path) == []
    assert repository_stats(handle).num_temporaries == 0
    assert [note for note in check_url(path).notes if note.where == "tmp"] == []


def test_a_young_temporary_is_left_alone_for_the_minimum_age(handle: RepositoryHandle) -> None:
    _killed(_path(handle))
    assert collect_garbage(handle).temporaries == 0
    with fixed(lambda: FAR_FUTURE_S):
        assert collect_garbage(handle).temporaries == 1


def test_a_file_that_a_living_process_writes_stays_however_old_it_is(handle: RepositoryHandle) -> None:
    path = _path(handle)
    with _writer(path) as process, fixed(lambda: FAR_FUTURE_S):
        assert repository_stats(handle).num_temporaries == 0
        assert collect_garbage(handle, AT_ONCE).temporaries == 0
        assert process.communicate("go\n")[0] == ""
        assert process.returncode == 0
    assert (path / "packs" / "aa" / f"{32 * 'a'}.data").stat().st_size == 16 << 20


def test_a_file_that_this_process_writes_stays_however_old_it_is(handle: RepositoryHandle) -> None:
    with handle.store.open_writer("packs/bb") as writer, fixed(lambda: FAR_FUTURE_S):
        writer.write(b"x")
        assert collect_garbage(handle, AT_ONCE).temporaries == 0
        writer.commit()
    assert handle.store.get("packs/bb") == b"x"


def test_what_may_belong_to_a_session_of_another_machine_stays(handle: RepositoryHandle) -> None:
    path = _path(handle)
    _killed(path)
    written_us = int((path / "tmp" / _temporaries(path)[0]).stat().st_mtime * 1e6)
    session = {"host": "another-machine", "process": 7, "started_us": written_us - 1, "heard_us": written_us}
    handle.store.put(PREFIX + 32 * "c", seal("session", VERSION, session, key=PREFIX + 32 * "c"))
    assert collect_garbage(handle, AT_ONCE).temporaries == 0
    session["started_us"] = written_us + 1_000_000
    handle.store.put(PREFIX + 32 * "c", seal("session", VERSION, session, key=PREFIX + 32 * "c"))
    with fixed(lambda: written_us / 1e6 + 5):
        assert collect_garbage(handle, AT_ONCE).temporaries == 1


def test_a_temporary_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection may look at the folder between the two system calls that make a temporary."""
    store, sweeper = FileStore(tmp_path), FileStore(tmp_path)
    real, swept = disk.fcntl.flock, []

    def flock(fd: int, operation: int) -> None:
        if not swept and operation == disk.fcntl.LOCK_EX:
            swept.append(0)
            swept[0] = sweeper.sweep_temporaries(FAR_FUTURE_S).num_files
        real(fd, operation)

    monkeypatch.setattr(disk.fcntl, "flock", flock)
    store.put("a", b"value")
    assert swept == [1]
    assert store.get("a") == b"value"


def test_init_leaves_no_folder_of_its_probe(handle: RepositoryHandle) -> None:
    assert sorted(os.listdir(_path(handle))) == ["config", "gc", "index", "tmp"]


def test_the_command_line_says_what_was_left(handle: RepositoryHandle) -> None:
    path = _path(handle)
    _killed(path)

    def run(*words: str) -> str:
        return call("-C", path, *words).out

    assert "16.8 MB in 1 temporary files of killed commits, which cas-ckpt gc removes" in run("stats")
    assert json.loads(run("--json", "stats"))["temporary_bytes"] == 16 << 20
    assert "would be removed  16.8 MB in 1 temporary files" in run("gc", "-n", "--min-age", "0")
    assert "removed     16.8 MB in 1 temporary files" in run("gc", "--min-age", "0")
    assert "temporary" not in run("stats")
