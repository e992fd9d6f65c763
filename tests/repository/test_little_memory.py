"""A process that is allowed no more memory gets errors of ours, whatever it could not have."""

from __future__ import annotations

import os
import resource
import sqlite3
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cas_ckpt import CkptError, Repository, TooLargeError, limits
from cas_ckpt.memory import new_buffer
from tests.no_threads import no_thread_can_be_started
from tests.processes import PIPE, Forked

MIB = 1 << 20


def _limited(path: Path) -> None:
    state = {"w": np.arange(6 * MIB)}
    with Repository.open(path, group=None) as repo:
        repo.commit({"w": np.arange(5000)})
        repo.load("HEAD")
        refused = 0
        for room in (0, 1, 4, 12, 40):
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            for work in (
                lambda: repo.commit(state),
                lambda: repo.commit_async(state).result(),
                lambda: repo.load("HEAD"),
            ):
                resource.setrlimit(resource.RLIMIT_AS, (mapped + room * MIB, resource.RLIM_INFINITY))
                try:
                    work()
                except CkptError as error:
                    refused += isinstance(error, TooLargeError)
                finally:
                    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        repo.commit(state)
        print("refused" if refused > 1 else "never refused")
    sys.stdout.flush()


@pytest.mark.slow
def test_under_a_limit_of_the_address_space_every_error_is_one_of_ours(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo", group=None) as repo:
        repo.commit({"w": np.arange(5000)})
    with Forked(_limited, tmp_path / "repo", stdout=PIPE, stderr=PIPE) as process:
        out, err = process.communicate()
    assert out == "refused\n", err


QUESTIONS: list[tuple[str, tuple[Any, ...]]] = [
    ("find", ()), ("find_commits", ()), ("log", ()), ("ls", ()), ("du", ()), ("show", ()), ("plan", ("HEAD", 2)),
    ("sql", ("SELECT * FROM entries",)),
]  # fmt: skip


def _no_memory_for_sqlite() -> None:
    with Repository.init("memory://many-rows", group=None) as repo:
        repo.commit({str(number): number for number in range(5000)})
        for name, arguments in QUESTIONS:
            getattr(repo, name)(*arguments)
        # SQLite's own limit, of the process. Under one of the address space the interpreter itself may end in a
        # fault once it cannot have the few bytes of a MemoryError.
        with pytest.raises(MemoryError):
            sqlite3.connect(":memory:").execute("PRAGMA hard_heap_limit=1").fetchone()
        for name, arguments in QUESTIONS:
            with pytest.raises(TooLargeError):
                getattr(repo, name)(*arguments)
            print(name)
    sys.stdout.flush()


@pytest.mark.slow
def test_a_question_with_more_rows_than_there_is_memory_is_too_large() -> None:
    with Forked(_no_memory_for_sqlite, stdout=PIPE, stderr=PIPE) as process:
        out, err = process.communicate()
    assert out.split() == [name for name, _ in QUESTIONS], err


@pytest.mark.parametrize("name", ["cas-ckpt-background", "cas-ckpt-1"])
def test_a_thread_that_cannot_be_had_is_said(tmp_path: Path, name: str) -> None:
    with Repository.init(tmp_path / "repo", group=None) as repo:
        state = {"w": np.arange(6 * MIB)}
        with (
            no_thread_can_be_started(name),
            pytest.raises(TooLargeError, match="no thread can be started"),
            limits(num_threads=3),
        ):
            repo.commit_async(state).result()
        repo.commit(state)


def test_a_buffer_that_cannot_be_had_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="a buffer of"):
        new_buffer(1 << 62)
