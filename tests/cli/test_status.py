"""`cas-ckpt status`: where a repository stands."""

from __future__ import annotations

import json
import os
import socket
from contextlib import closing
from pathlib import Path

import torch

from cas_ckpt import Repository
from cas_ckpt.core.config import INDEX_PATH
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.protocol import GcPhase, Session, read_gc_state, swap_gc_state
from cas_ckpt.core.refs import Generation
from cas_ckpt.ops.history.usage import repository_status
from cas_ckpt.storage.file import FileStore
from tests.cli.running import call, ok
from tests.wrapped_stores import CountingStore


def new(folder: Path, *, commits: int = 2) -> list[str]:
    """A repository with so many commits on main; their ids, the oldest first."""
    with Repository.init(folder) as repo:
        return [repo.commit({"w": torch.ones(9) * n}, message=f"number {n}").id for n in range(commits)]


def test_an_empty_repository_has_a_branch_and_no_commits(tmp_path: Path) -> None:
    new(tmp_path / "repo", commits=0)
    assert ok("-C", tmp_path / "repo", "status") == "On branch main\nHead:  no commits yet\n"
    assert json.loads(ok("-C", tmp_path / "repo", "status", "--json"))["commit"] is None


def test_status_shows_the_head_and_the_other_names(tmp_path: Path) -> None:
    first, second = new(tmp_path / "repo")
    for number in range(10):
        ok("-C", tmp_path / "repo", "branch", f"ft-{number}", "main~1")
    ok("-C", tmp_path / "repo", "tag", "v1")
    ok("-C", tmp_path / "repo", "pin", "v1", "--name", "paper")
    names = ", ".join(f"ft-{number}" for number in range(8))
    assert ok("-C", tmp_path / "repo", "status").splitlines() == [
        "On branch main",
        f"Head:      {second[:12]} number 1",
        f"Branches:  10 ({names} and 2 more)",
        "Tags:      1 (v1)",
        "Pins:      1 (paper)",
    ]
    found = json.loads(ok("-C", tmp_path / "repo", "status", "--json"))
    assert (found["default_branch"], found["commit"]["commit_id"]) == ("main", second)
    assert found["branches"] == {"main": second} | {f"ft-{number}": first for number in range(10)}
    assert (found["tags"], found["pins"]) == ({"v1": second}, {"paper": second})
    assert "head" not in found


def test_a_commit_under_way_is_listed_until_it_ends(tmp_path: Path) -> None:
    new(tmp_path / "repo")
    with closing(RepositoryHandle.open(tmp_path / "repo")) as handle, Session(handle.store) as session:
        session.announce()
        (line,) = [text for text in ok("-C", tmp_path / "repo", "status").splitlines() if "Writing" in text]
        assert f"process {os.getpid()} on {socket.gethostname()}, since 20" in line
    assert "Writing" not in ok("-C", tmp_path / "repo", "status")


def test_a_collection_that_was_broken_off_is_shown_and_gc_ends_it(tmp_path: Path) -> None:
    new(tmp_path / "repo")
    with closing(RepositoryHandle.open(tmp_path / "repo")) as handle:
        state = read_gc_state(handle.store)
        packs = sorted(handle.present_packs())
        swap_gc_state(
            handle.store, state, generation=Generation(1, b"n" * 16), phase=GcPhase.CONDEMNED, condemned=packs
        )
    shown = ok("-C", tmp_path / "repo", "status")
    assert f"gc:    collection 1 has chosen {len(packs)} packs; if its process died, cas-ckpt gc goes on" in shown
    ok("-C", tmp_path / "repo", "gc", "-q")
    assert "gc:" not in ok("-C", tmp_path / "repo", "status")


def test_forgotten_commits_and_leftovers_are_counted(tmp_path: Path) -> None:
    first, _ = new(tmp_path / "repo")
    ok("-C", tmp_path / "repo", "forget", "-q", first)
    (tmp_path / "repo" / "tmp").mkdir(exist_ok=True)
    (tmp_path / "repo" / "tmp" / ("a" * 32)).write_bytes(b"x" * 5000)
    shown = ok("-C", tmp_path / "repo", "status")
    assert "Forgotten:  1 commits\n" in shown
    assert "Left over:  5.00 KB in 1 temporary files of killed commits, which cas-ckpt gc removes\n" in shown


def test_in_python_status_knows_what_this_process_checked_out(tmp_path: Path) -> None:
    first, _ = new(tmp_path / "repo")
    with Repository.open(tmp_path / "repo") as repo:
        repo.checkout(first, into={"w": torch.empty(9)})
        found = repo.status()
    assert (found.head.branch, found.head.commit, found.default_branch) == (None, first, "main")


def test_status_costs_the_same_after_more_commits(tmp_path: Path) -> None:
    counts = []
    for commits in (2, 20):
        path = tmp_path / str(commits)
        new(path, commits=commits)
        store = CountingStore(FileStore(path))
        with closing(RepositoryHandle.on_store(store, index_url=str(path / INDEX_PATH))) as handle:
            store.reset()
            repository_status(handle)
            counts.append(store.num_calls)
    assert counts[0] == counts[1]


def test_a_repository_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    assert call("-C", tmp_path, "status").code == 10
