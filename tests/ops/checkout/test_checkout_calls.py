"""Ranks that check out together must ask for the same; what is skipped is told."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from cas_ckpt import PerRank, Repository, StateDict
from cas_ckpt.errors import PeerError
from cas_ckpt.parallel.peers import Peers
from tests.thread_peers import run_ranks


def test_ranks_that_ask_for_different_commits_are_told() -> None:
    url = "memory://different-commits"
    with Repository.init(url, group=None) as repo:
        repo.commit({"step": 1})
        repo.commit({"step": 2})

    def work(peers: Peers) -> Any:
        into = {"step": 0}
        with Repository.open(url, group=peers) as repo:
            try:
                repo.checkout("main" if peers.rank else "main~1", into=into)
            except PeerError as error:
                return str(error), into["step"]
            return None

    found = run_ranks(3, work, timeout_s=20)
    told = "the ranks disagree on the revision: rank 0 says 'main~1', ranks 1, 2 say 'main'"
    assert all(told in text for text, _ in found)
    assert [step for _, step in found] == [0, 0, 0]


def test_values_of_each_rank_that_are_left_alone_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    url = "memory://left-alone"
    Repository.init(url, group=None).close()

    def commit(peers: Peers) -> None:
        with Repository.open(url, group=peers) as repo:
            repo.commit({"loader": PerRank(StateDict(position=peers.rank)), "step": 1})

    run_ranks(2, commit, timeout_s=20)
    loader = PerRank(StateDict(position=7))
    with caplog.at_level(logging.WARNING, "cas_ckpt"), Repository.open(url, group=None) as repo:
        report = repo.checkout("main", into={"loader": loader, "step": 0})
    assert report.per_rank_skipped == ("loader",)
    assert loader.value["position"] == 7
    assert "loader: left as they are" in caplog.text
