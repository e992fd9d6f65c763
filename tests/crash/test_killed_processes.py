"""Processes that commit, branch, read, forget and collect in one repository; some are killed, or stopped."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from cas_ckpt.core.forgotten import read_forgotten
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import commit_of
from cas_ckpt.core.refs import RefKind
from cas_ckpt.ops.fsck.check import check_open
from cas_ckpt.ops.fsck.packs import DataOptions
from cas_ckpt.ops.gc.gc import collect_garbage
from tests.builders import commit, new_repository
from tests.crash.citizen import EAGER, commit_stalled, is_whole, live, state_of
from tests.processes import PIPE, Forked

NUM_PROCESSES = 4


@dataclass
class Town:
    """The processes of one repository, and what they told."""

    path: Path
    running: dict[int, Forked] = field(default_factory=dict)
    lines: list[list[str]] = field(default_factory=list)
    num_killed: int = 0
    started: int = 0

    def start(self) -> None:
        """One more process; it tells what it does in a file, which does not fill up as a pipe does."""
        self.started += 1
        out = self.path.with_suffix(f".out{self.started}").open("w")
        with out:
            self.running[self.started] = Forked(live, self.path, self.started, stdout=out, stderr=out)

    def kill(self, number: int) -> None:
        process = self.running.pop(number)
        assert process.poll() is None, self.told(number)
        process.kill()
        process.wait()
        self.num_killed += 1
        self.lines += self.told(number)

    def stop(self) -> None:
        """Let the others end by themselves."""
        self.path.with_suffix(".stop").touch()
        for number, process in self.running.items():
            assert process.wait() == 0, self.told(number)
            self.lines += self.told(number)

    def told(self, number: int) -> list[list[str]]:
        text = self.path.with_suffix(f".out{number}").read_text()
        return [line.split() for line in text.split("\n")[:-1]]


def live_together(path: Path, *, seed: int, num_killed: int = 0, seconds: float = 0) -> Town:
    """Let processes live, killing one of them now and then, for so long and until so many were killed."""
    rng, town = random.Random(seed), Town(path)
    end_s = time.monotonic() + seconds
    for _ in range(NUM_PROCESSES):
        town.start()
    while town.num_killed < num_killed or time.monotonic() < end_s:
        time.sleep(rng.uniform(0.05, 0.6))
        at_work = [number for number in town.running if town.told(number)]
        if at_work:
            town.kill(rng.choice(at_work))
            town.start()
    town.stop()
    return town


def verify(town: Town) -> None:
    """Every commit that was told is in the history, what is live is whole, and nothing else is left."""
    handle = RepositoryHandle.open(town.path)
    assert handle.sync() >= 0
    collect_garbage(handle, replace(EAGER, max_unused=0.0))
    forgotten = read_forgotten(handle.store)
    refs = [ref for kind in RefKind for ref in handle.refs.list(kind)]
    heads = {ref.target for ref in refs}
    todo, seen = [target for target in heads if target], set()
    while todo:
        digest = todo.pop()
        if digest in seen:
            continue
        seen.add(digest)
        row = commit_of(handle, digest)
        todo.extend(row.parents)  # type: ignore[arg-type]
        if digest not in forgotten or digest in heads:
            assert row.step is not None and is_whole(handle, row.root, row.step)
    told = {bytes.fromhex(line[2]) for line in town.lines if line[0] == "committed"}
    assert told <= seen
    found = check_open(handle, DataOptions())
    assert not found.problems, found.problems
    assert collect_garbage(handle, EAGER, dry_run=True).dead_objects == 0
    handle.close()


def begin(folder: Path) -> Path:
    path = folder / "repo"
    with_one = new_repository(path, pack_bytes=1 << 20)
    commit(with_one, state_of(0), step=0)
    with_one.close()
    return path


def what_happened(town: Town) -> set[str]:
    return {line[0] for line in town.lines if line}


def test_processes_that_are_killed_at_random_leave_a_whole_repository(tmp_path: Path) -> None:
    town = live_together(begin(tmp_path), seed=1, num_killed=5)
    assert {"committed", "read"} <= what_happened(town)
    verify(town)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_processes_that_are_killed_for_ten_minutes_leave_a_whole_repository(tmp_path: Path) -> None:
    town = live_together(begin(tmp_path), seed=2, seconds=600)
    assert {"committed", "read", "collected", "forgot", "gone"} <= what_happened(town)
    verify(town)


def test_a_writer_that_is_stopped_before_its_swap_while_its_packs_are_collected_commits_whole(tmp_path: Path) -> None:
    path = begin(tmp_path)
    with Forked(commit_stalled, path, 7, stdout=PIPE) as process:
        process.wait_for_stop()
        collector = RepositoryHandle.open(path)
        collector.sync()
        before = {key for key, _ in collector.store.list("packs/")}
        assert collect_garbage(collector, EAGER).deleted_packs  # as far as seen, the stopped writer's are nobody's
        assert {key for key, _ in collector.store.list("packs/")} < before
        process.send_signal(signal.SIGCONT)
        id_ = process.stdout.read().split()[1]
    assert process.returncode == 0
    handle = RepositoryHandle.open(path)
    row = commit_of(handle, bytes.fromhex(id_))  # type: ignore[arg-type]
    assert is_whole(handle, row.root, 7)
    assert row.parents
