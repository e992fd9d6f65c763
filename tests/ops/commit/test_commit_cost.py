"""What a commit costs follows what changed: not the history behind it, and not how many pieces the state is in.

Counted, not timed: steps of SQLite's virtual machine, transactions, threads.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import event

from cas_ckpt import limits
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from tests.builders import commit, new_repository, numbers

_STEPS = 10
"""Steps of the virtual machine between two looks."""


@contextmanager
def _counted(handle: RepositoryHandle) -> Iterator[Counter[str]]:
    """What the index does in the block: `transactions`, and `steps` of SQLite by tens."""
    found: Counter[str] = Counter()
    engine = handle.index._database.engine

    def step() -> int:
        found["steps"] += 1
        return 0

    def begin(connection: Any) -> None:
        found["transactions"] += 1
        connection.connection.driver_connection.set_progress_handler(step, _STEPS)

    event.listen(engine, "begin", begin)
    try:
        yield found
    finally:
        event.remove(engine, "begin", begin)
        with engine.connect() as connection:
            connection.connection.driver_connection.set_progress_handler(None, 0)  # type: ignore[union-attr]


def _steps_of_a_commit(handle: RepositoryHandle, number: int) -> int:
    """The fewest of three: a page that splits now and then costs a little more."""
    counts = []
    for again in range(3):
        with _counted(handle) as found:
            commit(handle, {"w": numbers(1000, seed=1_000_000 + 3 * number + again)})
        counts.append(found["steps"])
    return min(counts)


def test_what_a_commit_asks_of_the_index_does_not_grow_with_history() -> None:
    handle = init_repository("memory://cost-of-history")
    counts = []
    for more in (20, 280):
        for number in range(more):
            commit(handle, {"w": numbers(1000, seed=1000 * more + number)})
        counts.append(_steps_of_a_commit(handle, more))
    few, many = counts
    assert many <= 1.1 * few


@pytest.mark.parametrize("changed", [True, False])
def test_many_small_tensors_are_asked_about_together(changed: bool) -> None:
    handle = init_repository(f"memory://cost-of-pieces-{changed}")
    tensors = {f"layer {n}": numbers(500, seed=n) for n in range(300)}
    commit(handle, tensors)
    if changed:
        tensors = {name: array + 1 for name, array in tensors.items()}
    with _counted(handle) as found:
        made = commit(handle, tensors)
    assert made.stats.num_new_chunks == (300 if changed else 0)
    assert found["transactions"] <= 8


def test_a_small_commit_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = init_repository("memory://cost-of-threads")
    begun: list[str] = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        begun.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    with limits(num_threads=4):
        commit(handle, {"w": numbers(1000)})
    assert begun == []


def test_1024_bytes_are_inline_and_1025_are_not(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    assert commit(handle, {"a": np.ones(1024, np.uint8)}).stats.num_chunks == 0
    assert commit(handle, {"a": np.ones(1025, np.uint8)}).stats.num_chunks == 1


def _bytes_written() -> int:
    """By this process since it began, to whatever."""
    said = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(said["wchar"])


def test_one_changed_entry_of_100_000_writes_64_kib_at_most_store_and_index_together(tmp_path: Path) -> None:
    lengths = (1, 2, 3, 5, 8, 13, 21, 33)

    def entry(n: int) -> Any:
        return (np.float32(n), np.full(lengths[n // 4 % len(lengths)], n, np.float32), n * 7919, n / 7)[n % 4]

    state = {f"group{g:03d}": {f"entry{n:03d}": entry(1000 * g + n) for n in range(1000)} for g in range(100)}
    handle = new_repository(tmp_path / "repo")
    commit(handle, {"entries": state})
    handle.close()
    handle = RepositoryHandle.open(tmp_path / "repo")
    state["group050"]["entry002"] = -1
    before = _bytes_written()
    made = commit(handle, {"entries": state})
    written = _bytes_written() - before
    handle.close()
    assert made.stats.num_entries == 100_000
    assert written <= 64 * 1024
