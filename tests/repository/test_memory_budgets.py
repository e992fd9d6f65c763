"""What a call holds beyond the state stays below its budget of memory, measured in processes of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cas_ckpt import MemoryBudgetError, Repository, limits
from cas_ckpt.memory import DEFAULT_BYTES
from tests.ranks import results, run_processes

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells the peak")]

CASES = "tests.repository.memory_cases:"
MB = 1000**2


def above(peaks: dict[str, int], budget_bytes: int) -> dict[str, int]:
    """The verbs that took more, and how much."""
    return {verb: peak for verb, peak in peaks.items() if peak > budget_bytes}


def limited(memory_bytes: int | None, call: Callable[[], object]) -> None:
    with limits(memory_bytes=memory_bytes):
        call()


@pytest.mark.parametrize("encoding", ["raw", "planes"])
def test_verbs_on_few_large_tensors_keep_to_a_small_budget(tmp_path: Path, encoding: str) -> None:
    budget = 72 * MB
    outcomes = run_processes(1, f"{CASES}few_large_tensors", str(tmp_path), encoding, budget, timeout_s=120)
    (peaks,) = results(outcomes)
    assert not above(peaks, budget)


def test_verbs_on_a_tensor_of_twice_the_budget_keep_to_it(tmp_path: Path) -> None:
    budget = 72 * MB
    (peaks,) = results(run_processes(1, f"{CASES}one_huge_tensor", str(tmp_path), budget, timeout_s=120))
    assert not above(peaks, budget)


def test_commits_in_the_background_keep_to_their_memory_for_staging_and_their_budget(tmp_path: Path) -> None:
    staging, budget = 64 << 20, 72 * MB
    (peaks,) = results(run_processes(1, f"{CASES}in_the_background", str(tmp_path), staging, budget, timeout_s=120))
    assert not above(peaks, budget)


def test_what_a_worker_process_is_shown_of_a_state_that_is_not_staged_counts(tmp_path: Path) -> None:
    budget = 150 * MB
    (peaks,) = results(run_processes(1, f"{CASES}by_a_worker", str(tmp_path), budget, timeout_s=120))
    assert not above(peaks, budget)


def test_verbs_on_small_tensors_keep_to_what_lets_a_hundred_thousand_keep_to_the_default(tmp_path: Path) -> None:
    (peaks,) = results(run_processes(1, f"{CASES}many_small_tensors", str(tmp_path)))
    assert not above(peaks, 2 * DEFAULT_BYTES // 5)


def test_ranks_that_share_cells_keep_to_their_budgets(tmp_path: Path) -> None:
    budget = 72 * MB
    for peaks in results(run_processes(3, f"{CASES}sharded", str(tmp_path), budget, timeout_s=120)):
        assert not above(peaks, budget)


def test_what_is_too_little_is_refused_before_anything_is_done_and_says_how_much_is_needed(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo", group=None) as repo:
        state = {"w": torch.arange(3 << 20, dtype=torch.int32)}
        with pytest.raises(MemoryBudgetError, match=r"memory_bytes is 1000: a commit .* needs \d+ at least") as caught:
            limited(1000, lambda: repo.commit(state))
        assert not repo.log()
        limited(caught.value.least_bytes, lambda: repo.commit(state))
        target = {"w": torch.zeros_like(state["w"])}
        for restore in (lambda: repo.checkout("main", into=target), lambda: target.update(repo.load("main"))):
            with pytest.raises(MemoryBudgetError, match=r"a restore of 1 tensors needs") as caught:
                limited(1000, restore)
            assert not target["w"].any()
            limited(caught.value.least_bytes, restore)
            assert torch.equal(target["w"], state["w"])
            target["w"].zero_()


def test_an_import_in_too_little_memory_is_refused_and_with_what_it_asks_for_it_works(tmp_path: Path) -> None:
    state = {"w": torch.arange(3 << 20, dtype=torch.int32)}
    torch.save(state, tmp_path / "w.pt")
    with Repository.init(tmp_path / "repo", group=None) as repo:
        with pytest.raises(MemoryBudgetError, match="needs") as caught, limits(memory_bytes=1000):
            repo.import_file(tmp_path / "w.pt")
        assert not repo.branches()
        with limits(memory_bytes=caught.value.least_bytes):
            repo.import_file(tmp_path / "w.pt")
        assert torch.equal(repo.load("main")["w"], state["w"])


def test_push_and_export_in_too_little_memory_are_refused_and_with_what_they_ask_for_they_work(tmp_path: Path) -> None:
    Repository.init(tmp_path / "other").close()
    with Repository.init(tmp_path / "repo", group=None) as repo:
        made = repo.commit({"w": torch.arange(3 << 20, dtype=torch.int32)})
        for call in (
            lambda: repo.push(tmp_path / "other"),
            lambda: repo.export("main", tmp_path / "w.safetensors"),
            lambda: repo.export("main", tmp_path / "dcp", format="dcp"),
            lambda: repo.export("main", tmp_path / "w.pt"),
        ):
            with pytest.raises(MemoryBudgetError, match="needs") as caught:
                limited(1000, call)
            limited(caught.value.least_bytes, call)
    with Repository.open(tmp_path / "other") as other:
        assert other.resolve("main") == made.id
    assert {path.name for path in tmp_path.iterdir()} == {"repo", "other", "w.safetensors", "dcp", "w.pt"}
