"""Four gloo processes save and load through DCP: one commit, the same as one process makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cas_ckpt import Repository
from tests.dcp.rank_cases import VICTIM, full_state, small_state
from tests.ranks import results, run_processes

pytestmark = pytest.mark.timeout(240)  # the first test waits for the whole launch


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    """The root of the state in one process, and what each of four ranks saw."""
    folder = tmp_path_factory.mktemp("ranks")
    with Repository.init(folder / "repo") as repo:
        root = repo.commit(full_state()).root
    seen = results(run_processes(4, "tests.dcp.rank_cases:saves_and_loads", str(folder), timeout_s=200))
    return root, seen


Seen = tuple[str, list[dict[str, Any]]]


def test_the_root_is_that_of_one_process_over_every_mesh(wanted: Seen) -> None:
    root, seen = wanted
    assert [rank["roots"] for rank in seen] == [[root, root]] * 4


def test_other_planners_make_the_same_commit(wanted: Seen) -> None:
    root, seen = wanted
    assert [rank["every_planner"] for rank in seen] == [[root, root, root]] * 4


def test_a_load_over_any_mesh_gives_what_was_saved(wanted: Seen) -> None:
    assert [rank["loads_over_other_meshes"] for rank in wanted[1]] == [[True] * 3] * 4


def test_a_save_without_collectives_is_one_whole_commit(wanted: Seen) -> None:
    root, seen = wanted
    assert [rank["without_collectives"] for rank in seen] == [(root, True)] * 4


def test_ranks_that_save_for_themselves_do_and_a_lone_shard_is_refused(wanted: Seen) -> None:
    for rank in wanted[1]:
        assert rank["alone_among_many"] is not None and "w" in rank["alone_among_many"]


def test_part_of_the_ranks_saves_over_its_own_group(wanted: Seen) -> None:
    assert [rank["part_of_the_ranks"] for rank in wanted[1]] == [None, None, True, True]


def test_a_save_in_the_background_does_not_meet_the_training(wanted: Seen) -> None:
    root, seen = wanted
    assert [rank["in_the_background"] for rank in seen] == [[root, True]] * 4


def test_fully_sharded_models_come_back_over_another_mesh(wanted: Seen) -> None:
    assert [rank["fully_sharded"] for rank in wanted[1]] == [[True, True]] * 4


def test_values_kept_per_rank_come_back_to_their_rank_alone(wanted: Seen) -> None:
    assert [rank["each_its_own"] for rank in wanted[1]] == [[True, True]] * 4


def test_ranks_that_diverged_are_named_and_nothing_is_saved(wanted: Seen) -> None:
    for rank in wanted[1]:
        tensor, value, branches, warned = rank["diverged"]
        assert "PeerError" in tensor and "w: ranks 1 hold other bytes than rank 0" in tensor
        assert "seed: the value differs" in value
        assert "put the rank into its key" in tensor and "put the rank into its key" in value
        assert "diverged" not in branches
        assert warned == {"seed": 0}


def test_one_rank_that_fails_is_named_by_all_and_the_next_save_works(wanted: Seen) -> None:
    root, seen = wanted
    for rank in seen:
        told, after = rank["one_rank_fails"]
        assert "UnsupportedValueError: f" in told and after == root


def test_ranks_that_disagree_on_the_message_save_nothing(wanted: Seen) -> None:
    assert all("the ranks disagree on the message" in rank["disagreeing"] for rank in wanted[1])


def test_cached_plans_keep_neither_dtypes_nor_ids(wanted: Seen) -> None:
    assert [rank["cached_plans"] for rank in wanted[1]] == [[True] * 6] * 4


def test_after_a_rank_came_late_the_next_save_works(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo", group=None) as repo:
        wanted = repo.commit(small_state()).root
    cases = run_processes(3, "tests.dcp.rank_cases:a_rank_comes_late", str(tmp_path / "repo"), timeout_s=200)
    for told, root in results(cases):
        assert f"rank {VICTIM} has not come to" in told
        assert root == wanted
