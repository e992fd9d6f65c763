"""Snapshots by several ranks, and what becomes of them in another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import results, run_processes

CASES = "tests.torchsnapshot.rank_cases"
pytestmark = pytest.mark.slow


def test_ranks_take_what_is_one_for_all_and_what_each_has_and_others_restore_it(tmp_path: Path) -> None:
    results(run_processes(2, f"{CASES}:take", str(tmp_path), timeout_s=40))
    results(run_processes(2, f"{CASES}:fail", str(tmp_path), timeout_s=40))
    told = results(run_processes(3, f"{CASES}:restore", str(tmp_path), timeout_s=40))
    assert [sum("nothing for rank 2 to take" in text for text in texts) for texts in told] == [0, 0, 2]
    results(run_processes(1, f"{CASES}:restore", str(tmp_path), timeout_s=40))


def test_asynchronous_snapshots_to_one_path_never_mix(tmp_path: Path) -> None:
    results(run_processes(2, f"{CASES}:overlap", str(tmp_path), timeout_s=40))


def test_a_model_under_fsdp_goes_on_in_another_number_of_ranks(tmp_path: Path) -> None:
    results(run_processes(2, f"{CASES}:take_fsdp", str(tmp_path), timeout_s=40))
    results(run_processes(3, f"{CASES}:restore_fsdp", str(tmp_path), timeout_s=40))
