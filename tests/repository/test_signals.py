"""Signals in the middle of a call: a Ctrl-C leaves no lock held, and a handler may use the repository, or is told."""

from __future__ import annotations

import fcntl
import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cas_ckpt import InvalidInputError, Repository
from cas_ckpt.storage.disk import file_turn
from cas_ckpt.storage.file import FileStore
from tests.interrupts import Place, interrupted, places_in, told

LOCKING = ("contextlib.py", "held_signals.py", "storage/disk.py", "index/database.py", "index/sqlite.py")
"""Where locks change hands."""


@contextmanager
def handled(handler: Callable[..., Any] | signal.Handlers) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with Repository.init(tmp_path / "repo", group=None) as repo:
        repo.commit({"w": np.arange(5000)}, step=1)
        yield repo


def left_held(work: Callable[[], object], *, of: tuple[str, ...], is_held: Callable[[], bool]) -> list[str]:
    """The places where a Ctrl-C leaves something held, as seen while its traceback is still there."""
    found = []
    with handled(signal.default_int_handler):
        work()
        places = places_in(work, of=lambda path: path.endswith(of))
        assert len(places) > 10
        for place in places:
            try:
                interrupted(work, place)
            except KeyboardInterrupt:
                if is_held():
                    found.append(told(place))
    return found


def is_locked(path: Path) -> bool:
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def test_a_ctrl_c_while_names_of_files_change_leaves_no_lock(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("value", b"1")

    def swap() -> None:
        before = store.get("value")
        store.compare_and_swap("value", before, bytes([before[0] ^ 1]))

    assert left_held(swap, of=LOCKING, is_held=lambda: is_locked(tmp_path / "tmp" / "lock")) == []


def test_a_ctrl_c_while_a_turn_is_taken_leaves_it_to_others(tmp_path: Path) -> None:
    def take() -> None:
        with file_turn(tmp_path, "main"):
            pass

    take()
    (lock,) = tmp_path.iterdir()
    left = left_held(take, of=("storage/disk.py",), is_held=lambda: is_locked(lock))
    assert all("__exit__ begins" in place for place in left)  # the next one goes ahead after STUCK_S


def test_a_ctrl_c_in_a_transaction_of_the_index_leaves_neither_lock_nor_transaction(repo: Repository) -> None:
    index = repo._handle.index
    database = index._database
    assert database.path is not None
    other = sqlite3.connect(database.path, timeout=0, isolation_level=None)

    def is_held() -> bool:
        if not database.write_lock.acquire(blocking=False):  # type: ignore[attr-defined]
            return True
        database.write_lock.release()  # type: ignore[attr-defined]
        try:
            other.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
        other.execute("ROLLBACK")
        return False

    def change() -> None:
        index.write_soon(lambda connection: connection.exec_driver_sql("DELETE FROM t_scrubs"))
        index.packs()

    assert left_held(change, of=LOCKING, is_held=is_held) == []
    other.close()


def test_a_ctrl_c_in_a_commit_leaves_the_turn_to_the_next_one(repo: Repository) -> None:
    state = {"w": np.arange(5000)}

    def commit() -> None:
        repo.commit(state)

    of = (
        "contextlib.py", "held_signals.py", "repository/opened.py", "cas_ckpt/errors.py", "repository/repository.py",
        "parallel/peers.py",
    )  # fmt: skip
    assert left_held(commit, of=of, is_held=repo._committing._is_owned) == []  # type: ignore[attr-defined]
    repo.commit(state)


@contextmanager
def calling(work: Callable[[], object]) -> Iterator[list[object]]:
    """A signal handler that does `work` once; what that returned."""
    done: list[object] = []

    def handler(number: int, frame: object) -> None:
        if not done:
            done.append(None)
            done[0] = work()

    with handled(handler):
        yield done


def test_a_handler_that_loads_inside_of_a_load_gets_its_state(repo: Repository) -> None:
    def load() -> Any:
        return repo.load("HEAD")

    load()
    with calling(load):
        places: list[Place] = places_in(load, of=lambda path: path.endswith(("index/database.py", "storage/disk.py")))
    assert len(places) > 10
    for place in places:
        with calling(load) as done:
            interrupted(load, place)
        assert len(done[0]["w"]) == 5000, told(place)  # type: ignore[index]


class Signalling:
    """A state in which a signal comes while it is captured or restored."""

    def __init__(self) -> None:
        self.armed = False

    def _strike(self) -> None:
        if self.armed:
            self.armed = False
            signal.raise_signal(signal.SIGINT)

    def state_dict(self) -> dict[str, Any]:
        self._strike()
        return {"w": np.arange(5000)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._strike()


CALLS: dict[str, Callable[[Repository, Signalling], object]] = {
    "commit": lambda repo, state: repo.commit({"x": state}),
    "commit_async": lambda repo, state: repo.commit_async({"x": state}).result(),
    "checkout": lambda repo, state: repo.checkout("HEAD", into={"x": state}),
}


INNER: dict[str, Callable[[Repository, Signalling], object]] = {
    **CALLS, "import_file": lambda repo, _: repo.import_file("model.safetensors"),
    "drain": lambda repo, _: repo.drain(), "close": lambda repo, _: repo.close(),
}  # fmt: skip


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("outer", CALLS)
def test_a_handler_whose_commit_would_wait_for_the_one_that_it_interrupted_is_told(
    repo: Repository, outer: str, inner: str
) -> None:
    state = Signalling()
    repo.commit({"x": state})
    state.armed = True
    call = partial(INNER[inner], repo, state)
    with calling(call), pytest.raises(InvalidInputError, match=f"{inner} was called inside of"):
        CALLS[outer](repo, state)
    assert CALLS[outer](repo, state)
