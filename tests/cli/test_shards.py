"""shards, and the log by layouts, on the command line; what show says of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cas_ckpt import Repository, limits
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.objects.spec import Mesh, Placement
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.parallel.peers import Peers
from tests.builders import numbers
from tests.cli.running import call, ok
from tests.divided import mesh, over, state_of
from tests.thread_peers import run_ranks


def commit_by(path: Path, size: int, message: str, placed: dict[str, Placement]) -> None:
    """A commit by `size` ranks that are threads."""
    items = {"w": numbers(1024, 1024), "b": numbers(40), "odd\nkey": 1}

    def work(peers: Peers) -> None:
        handle = RepositoryHandle.open(path)
        state = state_of(items, placed, peers.rank)
        try:
            with limits(num_threads=1):
                commit_tree(handle, state, CommitRequest(message=message), peers=peers)
        finally:
            handle.close()

    run_ranks(size, work, timeout_s=30)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shards") / "repo"
    init_repository(path).close()
    commit_by(path, 1, "solo", {})
    commit_by(
        path, 3, "experts", {"w": over(mesh(3, names=["ep"]), "S(0)"), "b": over(Mesh(("",), (3,), (2, 1, 0)), "R")}
    )
    commit_by(path, 4, "tp", {"w": over(mesh(2, 2, names=["dp", "tp"]), "R", "S(0)")})
    return path


def test_a_row_for_each_region_says_who_held_it(place: Path) -> None:
    assert ok("-C", place, "shards").splitlines() == [
        "ranks  replicas     size  chunks  shared with  region           key",
        "0-3           4    160 B       0               0:40             b",
        "0-3           4      1 B       0               0:1              odd\\x0akey",
        "0,2           2  2.10 MB       4  1,3          0:512,0:1024     w",
        "1,3           2  2.10 MB       4  0,2          512:1024,0:1024  w",
    ]


def test_keys_and_a_rank_choose_rows(place: Path) -> None:
    assert [line.split()[0] for line in ok("-C", place, "shards", "main~1", "w").splitlines()] == [
        "ranks",
        "0",
        "1",
        "2",
    ]
    assert len(ok("-C", place, "shards", "main~1", "w", "b", "--rank", "2").splitlines()) == 3
    assert call("-C", place, "shards", "main", "nothing").code == 15
    refused = call("-C", place, "shards", "main", "--rank", "4")
    assert (refused.code, "is by 4 ranks" in refused.err) == (2, True)
    assert call("-C", place, "shards", "main", "--rank", "-1").code == 2


def test_json_has_numbers(place: Path) -> None:
    found = json.loads(ok("-C", place, "shards", "main", "w", "--json"))
    assert found == [
        {
            "key": "w", "ranks": [at, at + 2], "offsets": [512 * at, 0], "sizes": [512, 1024], "num_bytes": 1 << 21,
            "num_chunks": 4, "shared_with": [1 - at, 3 - at], "replica": None,
        }
        for at in (0, 1)
    ]  # fmt: skip
    assert json.loads(ok("-C", place, "shards", "main", "w", "--json", "--rank", "3"))[0]["replica"] == 1


def test_json_without_rows_is_an_empty_array(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit({})
    assert ok("-C", tmp_path / "repo", "shards", "--json") == "[]\n"


def test_the_log_chooses_by_ranks_and_dimensions(place: Path) -> None:
    def chosen(*words: str) -> list[str]:
        found = ok("-C", place, "log", "--quiet", "--oneline", *words)
        return [line.rsplit(maxsplit=1)[-1] for line in found.splitlines()]

    assert chosen("--world-size", "4") == ["tp"]
    assert chosen("--world-size", "1") == ["solo"]
    assert chosen("--axis", "tp=2", "--axis", "dp") == ["tp"]
    assert chosen("--axis", "ep") == ["experts"]
    assert chosen("--axis", "dim0=3") == ["experts"]
    assert chosen("--axis", "tp=4") == chosen("--axis", "tp", "--axis", "ep") == []
    assert call("-C", place, "log", "--axis", "tp=x").code == 2
    assert call("-C", place, "log", "--world-size", "0").code == 2


def test_show_says_the_mesh(place: Path) -> None:
    assert "Ranks:   4 (dp=2,tp=2)" in ok("-C", place, "show").splitlines()
    assert "Ranks:   1" in ok("-C", place, "show", "main~2").splitlines()
    assert json.loads(ok("-C", place, "show", "main~1", "--json"))["mesh"] == "ep=3"
