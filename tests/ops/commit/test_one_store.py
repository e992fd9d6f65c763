"""Ranks on copies of a repository are found before anything is published: its data would not be there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cas_ckpt import PerRank, Repository
from cas_ckpt.errors import PeerError
from cas_ckpt.parallel.peers import Peers
from tests.builders import numbers
from tests.ranks import results, run_processes
from tests.thread_peers import run_ranks


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    """A repository with one commit, twice a copy of it."""
    with Repository.init(tmp_path / "0", group=None) as repo:
        repo.commit(state_of(0))
    for copy in ("1", "2"):
        shutil.copytree(tmp_path / "0", tmp_path / copy)
    return [tmp_path / name for name in "012"]


def state_of(rank: int, step: int = 0) -> dict[str, Any]:
    return {"own": PerRank(numbers(50_000, seed=10 * step + rank)), "step": step}


def heads(places: list[Path]) -> list[str]:
    found = []
    for place in places:
        with Repository.open(place, group=None, read_only=True) as repo:
            found.append(repo.resolve("main"))
            assert repo.fsck(read_data=True).ok
    return found


@pytest.mark.parametrize("copies", [(1,), (1, 2)])
def test_a_rank_on_a_copy_is_named_and_no_branch_moves(places: list[Path], copies: tuple[int, ...]) -> None:
    before = heads(places)

    def work(peers: Peers) -> Any:
        with Repository.open(places[peers.rank if peers.rank in copies else 0], group=peers) as repo:
            return repo.commit(state_of(peers.rank, 1))

    for error in run_ranks(3, work, timeout_s=20, outcomes=True):
        assert isinstance(error, PeerError), error
        assert error.ranks == copies
        assert "a copy" in str(error) and str(places[0]) in str(error)
    assert heads(places) == before
    assert not [left for place in places for left in (place / "sessions").glob("*")]


def test_a_rank_that_opens_a_copy_later_is_found_too(places: list[Path]) -> None:
    def work(peers: Peers) -> Any:
        repo = Repository.open(places[0], group=peers)
        repo.commit(state_of(peers.rank, 1))
        if peers.rank == 1:
            repo = Repository.open(places[1], group=peers)
        return repo.commit(state_of(peers.rank, 2))

    found = run_ranks(2, work, timeout_s=20, outcomes=True)
    assert all(isinstance(error, PeerError) and error.ranks == (1,) for error in found), found


class _LosesPacks:
    """Peers of a rank whose packs vanish, or are cut short, once it has told of them."""

    def __init__(self, inner: Peers, place: Path, *, cut: bool) -> None:
        self._inner = inner
        self._place = place
        self._cut = cut

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def gather(self, message: Any) -> Any:
        for pack in (self._place / "packs").rglob("*.data"):
            if self._cut:
                pack.write_bytes(pack.read_bytes()[:-1])
            else:
                pack.unlink()
        return self._inner.gather(message)


@pytest.mark.parametrize("cut", [False, True], ids=["gone", "cut short"])
def test_a_pack_that_is_not_there_when_the_commit_is_published_is_named(tmp_path: Path, cut: bool) -> None:
    Repository.init(tmp_path / "repo", group=None).close()

    def work(peers: Peers) -> Any:
        losing: Any = _LosesPacks(peers, tmp_path / "repo", cut=cut) if peers.rank == 1 else peers
        with Repository.open(tmp_path / "repo", group=losing) as repo:
            return repo.commit({"own": PerRank(np.zeros(1) if peers.rank != 1 else numbers(50_000))})

    for error in run_ranks(3, work, timeout_s=20, outcomes=True):
        assert isinstance(error, PeerError), error
        assert error.ranks == (1,)
        assert "packs/" in str(error)
    with Repository.open(tmp_path / "repo", group=None) as repo:
        assert not repo.log()


def commits_from(places: list[str]) -> tuple[str, tuple[int, ...]]:
    """On every process: a commit from the folder of its rank."""
    import torch.distributed as dist

    rank = dist.get_rank()
    with Repository.open(places[rank], timeout_s=60) as repo:
        try:
            return repo.commit(state_of(rank, 1)).id, ()
        except PeerError as error:
            return str(error), error.ranks


@pytest.mark.slow
def test_processes_with_a_folder_each_publish_nothing(places: list[Path]) -> None:
    before = heads(places)
    told = results(run_processes(3, "tests.ops.commit.test_one_store:commits_from", [str(place) for place in places]))
    assert [ranks for _, ranks in told] == [(1, 2)] * 3, told
    assert heads(places) == before
