"""A rank that comes late to a save: the others are told in time, and the next save works."""

from __future__ import annotations

from pathlib import Path

import pytest

from cas_ckpt import Repository
from tests.dcp.failing_cases import VICTIM, state
from tests.ranks import results, run_processes

CASES = "tests.dcp.failing_cases"

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def place(tmp_path: Path) -> tuple[str, str]:
    """A repository, and the root of the state."""
    with Repository.init(tmp_path / "repo", group=None) as repo:
        root = repo.commit(state()).root
    return str(tmp_path / "repo"), root


def test_after_a_rank_came_late_the_next_save_works(place: tuple[str, str]) -> None:
    for told, root in results(run_processes(3, f"{CASES}:a_rank_comes_late", place[0], timeout_s=200)):
        assert f"rank {VICTIM} has not come to" in told
        assert root == place[1]
