"""DDP, FSDP1 and FSDP2 over two real processes: one state, one set of names, whatever wraps it."""

from __future__ import annotations

from tests.ranks import results, run_processes


def test_a_commit_of_one_process_is_the_same_state_under_every_wrapper() -> None:
    outcomes = run_processes(2, "tests.training.wrapped_cases:everything", timeout_s=120)
    assert results(outcomes) == [[], []]
