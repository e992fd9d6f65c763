"""The example of docs/distributed.md, "Who held what": four ranks commit, and the commands print what is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from cas_ckpt import limits
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.parallel.peers import Peers
from tests.builders import numbers
from tests.divided import mesh, over, state_of
from tests.test_docs import not_as_shown
from tests.thread_peers import run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "distributed.md"
GRID = mesh(2, 2, names=("dp", "tp"))
PLACED = {"model/wq": over(GRID, "R", "S(0)"), "model/wo": over(GRID, "R", "S(1)")}


def test_the_commands_print_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    init_repository(tmp_path / "ckpts").close()
    weights = {name: numbers(1024, 1024) for name in ("wq", "wo")} | {"norm": numbers(1024)}

    def work(peers: Peers) -> str:
        handle = RepositoryHandle.open(tmp_path / "ckpts")
        state = state_of({"model": weights, "step": 1000}, PLACED, peers.rank)
        try:
            with limits(num_threads=1):
                return commit_tree(handle, state, CommitRequest(message="four ranks"), peers=peers).id
        finally:
            handle.close()

    assert len(set(run_ranks(4, work, timeout_s=30))) == 1
    section = PAGE.read_text().partition("## Who held what")[2].partition("\n## ")[0]
    session = section.partition("```console\n")[2].partition("```")[0]
    assert session.count("$ ") >= 3
    assert not_as_shown(session, tmp_path) == []
