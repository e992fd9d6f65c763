"""Ranks that make a repository together: all have it, or all are told why not, at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from cas_ckpt import Repository
from cas_ckpt.errors import ConflictError, NoRepositoryError, PeerError
from cas_ckpt.parallel.peers import Peers
from cas_ckpt.training import process_group
from tests.thread_peers import run_ranks

STATE = {"step": 1}


def test_ranks_that_make_a_repository_commit_to_it_together(tmp_path: Path) -> None:
    def work(peers: Peers) -> str:
        with Repository.init(tmp_path / "repo", group=peers) as repo:
            return repo.commit(STATE).id

    assert len(set(run_ranks(3, work, timeout_s=8))) == 1


def test_all_ranks_hear_at_once_that_rank_0_could_not(tmp_path: Path) -> None:
    Repository.init(tmp_path / "repo", group=None).close()
    found = run_ranks(3, lambda peers: Repository.init(tmp_path / "repo", group=peers), timeout_s=8, outcomes=True)
    assert isinstance(found[0], ConflictError)
    assert all(isinstance(each, PeerError) and "rank 0 failed: ConflictError" in str(each) for each in found[1:])


def test_all_ranks_hear_at_once_that_another_rank_could_not(tmp_path: Path) -> None:
    def work(peers: Peers) -> Any:
        return Repository.init(tmp_path / ("elsewhere" if peers.rank == 1 else "repo"), group=peers)

    found = run_ranks(3, work, timeout_s=8, outcomes=True)
    assert isinstance(found[1], NoRepositoryError)
    assert all(isinstance(found[at], PeerError) and "rank 1 failed" in str(found[at]) for at in (0, 2))


def test_init_and_the_commits_after_it_use_one_group(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    before = process_group._num_made[(0,)]
    try:
        with Repository.init(tmp_path / "repo", group=dist.group.WORLD) as repo:
            repo.commit(STATE)
        assert process_group._num_made[(0,)] == before + 1
    finally:
        dist.destroy_process_group()
