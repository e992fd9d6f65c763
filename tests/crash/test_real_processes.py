"""Real processes: killed in the middle of commits, and committing beside one another."""

from __future__ import annotations

import random
import threading
from pathlib import Path

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.revisions import resolve
from cas_ckpt.index import history
from tests.builders import new_repository, same_bytes, stored_arrays
from tests.crash.committer import commits, state_of
from tests.processes import PIPE, Forked


def start(path: Path, first: int, count: int, branch: str = "main") -> Forked:
    return Forked(commits, path, first, count, branch, stdout=PIPE)


def read_until(process: Forked, text: str) -> list[str]:
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line.strip())
        if line.startswith(text):
            break
    return seen


def kill_while_committing(process: Forked, first: int, delay_s: float) -> list[str]:
    """Kill it some time after its first commit; what it reported as done after that."""
    read_until(process, f"done {first}")
    killer = threading.Timer(delay_s, process.kill)
    killer.start()
    finished = [line for line in process.stdout if line.startswith("done")]
    killer.join()
    return finished


def check_head(path: Path, at_least: int) -> int:
    """The head holds exactly its step's state; returns the step."""
    handle = RepositoryHandle.open(path)
    row = handle.index.read(history.read_commit, resolve(handle, "main"))
    if row is None:
        handle.sync()
        row = handle.index.read(history.read_commit, resolve(handle, "main"))
    assert row is not None and row.step is not None and row.step >= at_least
    back = stored_arrays(handle, row.root.hex())
    wanted = state_of(row.step)
    assert same_bytes(back["changing"], wanted["changing"]) and same_bytes(back["constant"], wanted["constant"])
    handle.close()
    return row.step


def test_a_process_killed_at_any_moment_leaves_the_last_commit_and_needs_no_repair(tmp_path: Path) -> None:
    path = tmp_path / "repo"
    new_repository(path).close()
    rng = random.Random(3)
    done = 0
    for _ in range(8):
        with start(path, done + 1, 10_000) as process:
            finished = kill_while_committing(process, done + 1, rng.uniform(0, 0.08))
        reported = int(finished[-1].split()[1]) if finished else done + 1
        done = check_head(path, reported)
        assert done <= reported + 1


def test_processes_that_commit_to_one_branch_lose_no_commit(tmp_path: Path) -> None:
    path = tmp_path / "repo"
    new_repository(path).close()
    processes = [start(path, first, 6) for first in (100, 200, 300)]
    ids = set()
    for process in processes:
        out, _ = process.communicate()
        assert process.returncode == 0
        ids |= {line.split()[2] for line in out.splitlines() if line.startswith("done")}
    assert len(ids) == 18
    handle = RepositoryHandle.open(path)
    handle.sync()
    found = {row.digest.hex() for row in history.log(handle.index, [resolve(handle, "main")])}
    assert found == ids
