"""Four real processes restore together; when one of them is killed, in whatever phase, the others raise."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from cas_ckpt.transfer.scatter import PARTLY_WRITTEN
from tests.builders import commit, new_repository
from tests.ops.checkout.collective_processes import ARRAYS, VICTIM
from tests.ranks import results, run_processes

CASES = "tests.ops.checkout.collective_processes"


@pytest.fixture
def repo(tmp_path: Path) -> tuple[str, str]:
    handle = new_repository(tmp_path / "repo")
    info = commit(handle, ARRAYS)
    handle.close()
    return str(tmp_path / "repo"), info.root


@pytest.mark.slow
def test_four_processes_restore_what_one_has_committed(repo: tuple[str, str]) -> None:
    assert results(run_processes(4, f"{CASES}:restores", *repo)) == [24] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "number", "touches"),
    [("gather_all", 1, False), ("gather_all", 2, False), ("exchange", 1, True), ("gather_all", 4, True)],
    ids=["while they tell what they want", "while they verify", "while they exchange", "at the end"],
)
def test_a_rank_that_is_killed_fails_all_the_others(
    repo: tuple[str, str], method: str, number: int, touches: bool
) -> None:
    outcomes = run_processes(4, f"{CASES}:loses_a_rank", *repo, method, number)
    assert outcomes[VICTIM].exit_code == -signal.SIGKILL
    for kind, text, ranks, untouched in results([one for one in outcomes if one.rank != VICTIM]):
        assert (kind, ranks) == ("PeerError", (VICTIM,)), text
        assert touches or untouched
        assert (PARTLY_WRITTEN in text) == touches


@pytest.mark.slow
@pytest.mark.parametrize("late", [1, 3])
def test_when_a_rank_begins_after_another_has_stopped_all_name_the_rank_that_was_lost(
    repo: tuple[str, str], late: int
) -> None:
    outcomes = run_processes(4, f"{CASES}:begins_after_a_loss", *repo, late)
    assert outcomes[VICTIM].exit_code == -signal.SIGKILL
    for kind, text, ranks, untouched in results([one for one in outcomes if one.rank != VICTIM]):
        assert (kind, ranks) == ("PeerError", (VICTIM,)), text
        assert untouched
