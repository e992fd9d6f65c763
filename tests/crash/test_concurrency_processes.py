"""Processes that commit, create branches and rebuild the index at the same time. All are real."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from cas_ckpt import CommitOptions, Repository
from cas_ckpt.errors import ConflictError
from cas_ckpt.ops.fsck.repair import rebuild_index
from tests.processes import PIPE, Forked

NAMES = [f"branch-{number}" for number in range(6)]
NUM_COMMITS = 12


def tensor(number: int) -> torch.Tensor:
    return torch.rand(20_000, generator=torch.Generator().manual_seed(number))


def create_branches(path: Path, number: int) -> None:
    """Commit to branches that are not there yet, and create others at old commits."""
    for name in NAMES:
        with Repository.open(path) as repo:
            info = repo.commit({"w": tensor(number)}, branch=name, step=number, options=CommitOptions(orphan=True))
            print("committed", name, info.id)
            try:
                print("created", f"fork-of-{name}", repo.branch(f"fork-of-{name}", start=info.id))
            except ConflictError:
                print("lost", name)


def commit(path: Path, number: int) -> None:
    """Commit again and again to one branch; every commit is read back at once."""
    with Repository.open(path) as repo:
        for step in range(NUM_COMMITS):
            info = repo.commit({"w": tensor(100 * number + step)}, step=step)
            assert torch.equal(repo.load(info.id)["w"], tensor(100 * number + step))
            print("committed", "main", info.id)


def rebuild(path: Path, number: int) -> None:
    """Rebuild the index again and again: even numbers in place, odd ones from nothing."""
    for _ in range(6):
        if number % 2:
            report = rebuild_index(path)
        else:
            with Repository.open(path) as repo:
                report = repo.rebuild_index()
        assert not report.damaged


WORKS = {work.__name__: work for work in (create_branches, commit, rebuild)}


def work_when_told(work: str, path: Path, number: int) -> None:
    """One of the processes."""
    print("ready", flush=True)
    sys.stdin.readline()
    WORKS[work](path, number)


def run_together(path: Path, *works: str) -> list[list[str]]:
    """What each of the processes printed, in words; all begin at once and all succeed.

    They may warn that they commit to one branch beside each other.
    """
    processes = [
        Forked(work_when_told, work, path, n, stdin=PIPE, stdout=PIPE, stderr=PIPE) for n, work in enumerate(works)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate() for process in processes]
    for process, (_, err) in zip(processes, outputs, strict=True):
        warned = [line for line in err.splitlines() if "which somebody else put on branch" not in line]
        assert (process.returncode, warned) == (0, []), err
    return [line.split() for out, _ in outputs for line in out.splitlines()]


def place(tmp_path: Path) -> Path:
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit({"w": tensor(0)})
    return tmp_path / "repo"


def test_processes_that_create_the_same_branches_share_them(tmp_path: Path) -> None:
    path = place(tmp_path)
    told = run_together(path, *["create_branches"] * 3)
    with Repository.open(path) as repo:
        for name in NAMES:
            made = {line[2] for line in told if line[:2] == ["committed", name]}
            assert len(made) == 3
            assert {info.id for info in repo.log(name)} == made
            assert sorted(repo.load(info.id)["w"].sum().item() for info in repo.log(name)) == sorted(
                tensor(number).sum().item() for number in range(3)
            )
            forks = [line[2] for line in told if line[:2] == ["created", f"fork-of-{name}"]]
            assert forks == [repo.branches()[f"fork-of-{name}"]]


@pytest.mark.parametrize(
    "works", [("rebuild", "commit"), ("commit", "rebuild"), ("rebuild", "rebuild", "commit", "commit")]
)
def test_commits_are_whole_while_another_process_rebuilds_the_index(tmp_path: Path, works: tuple[str, ...]) -> None:
    path = place(tmp_path)
    made = {line[2] for line in run_together(path, *works) if line[0] == "committed"}
    assert len(made) == NUM_COMMITS * works.count("commit")
    with Repository.open(path) as repo:
        history = [info.id for info in repo.log()]
        assert len(history) == len(made) + 1
        assert set(history) > made
        for number in (at for at, work in enumerate(works) if work == "commit"):
            wanted = {tensor(100 * number + step).sum().item() for step in range(NUM_COMMITS)}
            assert wanted <= {repo.load(commit)["w"].sum().item() for commit in history}
