"""Turns on a name: writers wait for one another, but for no longer than a while."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import commit_of
from cas_ckpt.core.revisions import resolve
from cas_ckpt.storage import disk
from cas_ckpt.storage.disk import TakesTurns, file_turn, in_turn
from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.memory import MemoryStore
from tests.builders import commit, new_repository


def test_whoever_comes_second_waits_until_the_first_is_through(tmp_path: Path) -> None:
    inside, order = threading.Event(), []

    def second() -> None:
        inside.wait()
        with file_turn(tmp_path, "main"):
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with file_turn(tmp_path, "main"):
        inside.set()
        thread.join(0.05)  # it would be through by now if it did not wait
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_nobody_waits_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "STUCK_S", 0.02)
    with file_turn(tmp_path, "main"), file_turn(tmp_path, "main"):
        pass
    with file_turn(tmp_path, "main"):
        pass


@pytest.mark.parametrize(("changes_hands", "taken"), [(True, True), (False, False)])
def test_a_turn_that_changes_hands_is_waited_for_and_a_stuck_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes_hands: bool, taken: bool
) -> None:
    held = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    looks: list[float] = []

    def pause(_: float) -> None:
        looks.append(0.0)
        if changes_hands:
            os.pwrite(held, len(looks).to_bytes(16, "little"), 0)
        if len(looks) == 20:  # ten times as long as one holder is waited for
            fcntl.flock(held, fcntl.LOCK_UN)

    fake = SimpleNamespace(monotonic_s=lambda: len(looks) * disk.STUCK_S / 2, pause=pause)
    monkeypatch.setattr(disk, "clock", fake)
    waiting = os.open(tmp_path / "lock", os.O_RDWR)
    assert disk._take(waiting) is taken
    os.close(waiting)
    os.close(held)


def test_other_names_and_other_stores_do_not_wait(tmp_path: Path) -> None:
    assert isinstance(FileStore(tmp_path), TakesTurns)
    assert not isinstance(MemoryStore(), TakesTurns)
    with file_turn(tmp_path, "main"), file_turn(tmp_path, "other"):
        pass
    with in_turn(MemoryStore(), "main"), in_turn(FileStore(tmp_path / "nowhere"), "main"):
        pass


def test_a_stopped_process_that_has_the_turn_delays_a_commit_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "STUCK_S", 0.02)
    new_repository(tmp_path / "repo").close()
    handle = RepositoryHandle.open(tmp_path / "repo")
    commit(handle, {"step": 1})
    held = [os.open(path, os.O_RDWR) for path in (tmp_path / "repo" / "tmp").glob("lock-*")]
    assert held
    for fd in held:
        fcntl.flock(fd, fcntl.LOCK_EX)
    second = commit(handle, {"step": 2})
    for fd in held:
        os.close(fd)
    assert resolve(handle, "main").hex() == second.id


def test_threads_that_commit_to_one_branch_upload_hardly_anything_twice(tmp_path: Path) -> None:
    new_repository(tmp_path / "repo").close()
    handles = [RepositoryHandle.open(tmp_path / "repo") for _ in range(4)]

    def work(handle: RepositoryHandle) -> None:
        for step in range(10):
            commit(handle, {"step": step})

    threads = [threading.Thread(target=work, args=(handle,)) for handle in handles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    handle = handles[0]
    handle.sync()
    seen, head = 0, resolve(handle, "main")
    while head:
        seen, parents = seen + 1, commit_of(handle, head).parents
        head = parents[0] if parents else b""
    assert seen == 40
    assert sum(1 for _ in handle.store.list("packs/")) <= 44
