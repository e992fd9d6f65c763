"""Who held what, of four real processes: FSDP2, hybrid sharding, tensor parallelism, FSDP1, a pipeline, and DCP."""

from __future__ import annotations

from typing import Any

import pytest

from cas_ckpt import Repository
from tests.ranks import results, run_processes
from tests.training.training_cases import KINDS


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank found wrong, of one launch for all tests."""
    path = tmp_path_factory.mktemp("ranks") / "repo"
    Repository.init(path).close()
    return results(run_processes(4, "tests.training.shards_cases:all_shards", str(path), timeout_s=110))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "boxes"])
def test_each_rank_held_what_the_commit_says(facts: list[dict[str, Any]], kind: str) -> None:
    assert [fact[kind] for fact in facts] == [[]] * 4


@pytest.mark.slow
def test_stages_of_a_pipeline_held_their_own_layers_over_their_own_meshes(facts: list[dict[str, Any]]) -> None:
    held = {"extra": "0", "layer0/norm": "0-1", "layer1/norm": "2-3"}
    held |= {f"loader/{rank}/position": f"{rank}" for rank in range(4)}
    assert [fact["pipeline"] for fact in facts] == [([], held, True)] * 4


@pytest.mark.slow
def test_a_commit_by_dcp_says_who_held_what(facts: list[dict[str, Any]]) -> None:
    assert [fact["dcp"] for fact in facts] == [([], [None])] * 4
