"""Four real processes with gloo between them commit and restore real models."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from cas_ckpt import Repository
from tests.ranks import results, run_processes
from tests.training.training_cases import KINDS

CASES = "tests.training.training_cases"


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank found, of one launch for all tests."""
    path = tmp_path_factory.mktemp("ranks") / "repo"
    Repository.init(path).close()
    return results(run_processes(4, f"{CASES}:all_cases", str(path), timeout_s=110))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_divided_model_has_the_root_of_the_whole_one_and_comes_back(facts: list[dict[str, Any]], kind: str) -> None:
    found = [fact["divisions"][kind] for fact in facts]
    assert {each["root"] for each in found} == {found[0]["alone"]}
    assert all(each["restored"] for each in found)
    assert len({each["id"] for each in found}) == 1


@pytest.mark.slow
def test_what_one_division_committed_is_restored_into_another(facts: list[dict[str, Any]]) -> None:
    assert all(fact["divisions"]["across"] for fact in facts)


@pytest.mark.slow
def test_each_rank_gets_back_its_own_values_and_another_world_leaves_them_alone(facts: list[dict[str, Any]]) -> None:
    for fact in facts:
        assert fact["own"]["restored"] == (True, True, ())
        assert fact["own"]["skipped"] == ["loader", "rng"]
        assert fact["own"]["left"] == -1


@pytest.mark.slow
def test_pipeline_stages_are_one_commit_and_come_back(facts: list[dict[str, Any]]) -> None:
    assert all(fact["stages"]["restored"] for fact in facts)
    keys = [f"layer{number}.{name}" for number in range(4) for name in ("bias", "weight")]
    assert all(fact["stages"]["keys"] == keys for fact in facts)


@pytest.mark.slow
def test_two_groups_of_one_job_commit_side_by_side(facts: list[dict[str, Any]]) -> None:
    assert all(fact["half"]["root"] == fact["half"]["alone"] and fact["half"]["restored"] for fact in facts)
    assert facts[0]["half"]["root"] != facts[2]["half"]["root"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "when"),
    [
        (1, "commit, while describing"),
        (1, "commit, while writing"),
        (0, "commit, at the swap"),
        (1, "checkout, while verifying"),
        (2, "checkout, at the end"),
    ],
)
def test_a_killed_rank_makes_the_others_raise_in_time(tmp_path: Path, victim: int, when: str) -> None:
    path = tmp_path / "repo"
    Repository.init(path).close()
    outcomes = run_processes(3, f"{CASES}:a_rank_is_killed", str(path), victim, when, timeout_s=60)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    for rank in {0, 1, 2} - {victim}:
        assert outcomes[rank].error is None, outcomes[rank]
        assert outcomes[rank].value.startswith(f"({victim},): "), outcomes[rank]
    with Repository.open(path) as repo:
        assert [info.message for info in repo.log()] == [""]
        assert repo.load("main")["model"]
        assert repo.commit({"model": repo.load("main")["model"]}).parents
