"""A rank that fails, comes late or dies within a save: the others are told at once, and the next save works."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from cas_ckpt import Repository
from tests.dcp.failing_cases import VICTIM, state
from tests.ranks import results, run_processes

CASES = "tests.dcp.failing_cases"
# Far below the timeout of the writers (60 s) and of the process group (30 minutes), far above what a machine needs.
SOON_S = 40.0

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def place(tmp_path: Path) -> tuple[str, str]:
    """A repository, and the root of the state."""
    with Repository.init(tmp_path / "repo", group=None) as repo:
        root = repo.commit(state()).root
    return str(tmp_path / "repo"), root


def test_an_error_in_finish_plan_is_told_at_once_and_the_next_save_works(place: tuple[str, str]) -> None:
    for told, root, elsewhere in results(run_processes(3, f"{CASES}:a_planner_raises", place[0], timeout_s=200)):
        assert "ValueError: no plan today" in told[0] and told[2] < SOON_S
        assert f"rank {VICTIM} failed: ValueError: no plan today" in told[0]
        assert root == place[1]
        assert "no plan today" in elsewhere and "PeerError" not in elsewhere


def test_after_a_rank_came_late_the_next_save_works(place: tuple[str, str]) -> None:
    for told, root in results(run_processes(3, f"{CASES}:a_rank_comes_late", place[0], timeout_s=200)):
        assert f"rank {VICTIM} has not come to" in told[0]
        assert root == place[1]


def test_a_rank_that_is_killed_while_its_data_is_asked_for_is_named_by_all_others(place: tuple[str, str]) -> None:
    outcomes = run_processes(3, f"{CASES}:a_rank_is_killed", place[0], timeout_s=200)
    assert outcomes[VICTIM].exit_code == -signal.SIGKILL
    for text, ranks, seconds in results([one for one in outcomes if one.rank != VICTIM]):
        assert text.startswith(f"PeerError: rank {VICTIM} is gone, killed or crashed"), text
        assert ranks == (VICTIM,)
        assert seconds < SOON_S
