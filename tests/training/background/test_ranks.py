"""Real processes with gloo between them commit in the background: same ids, and one rank's failure is everybody's."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from cas_ckpt import PerRank, Repository
from cas_ckpt.memory import python_gc_paused
from cas_ckpt.parallel.peers import Peers
from cas_ckpt.training.background import commits
from tests.ranks import results, run_processes
from tests.thread_peers import run_ranks

CASES = "tests.training.background.rank_cases"
pytestmark = pytest.mark.slow


@pytest.fixture
def path(tmp_path: Path) -> str:
    Repository.init(tmp_path / "repo").close()
    return str(tmp_path / "repo")


def test_ranks_commit_the_state_of_the_call_while_training_goes_on(path: str) -> None:
    facts: list[dict[str, Any]] = results(run_processes(2, f"{CASES}:commits", path))
    assert facts[0] == facts[1]
    assert {name: (same, moved) for name, (same, _, moved) in facts[0].items()} == dict.fromkeys(facts[0], (True, True))
    assert len(facts[0]) == 6


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_lazy_commits_of_ranks_are_the_state_of_the_call_and_a_change_on_one_fails_them_on_all(
    path: str, worker: str
) -> None:
    first, second = results(run_processes(2, f"{CASES}:lazily", path, worker))
    for kind in ("fsdp", "ddp"):
        assert first[kind] == second[kind] and first[kind][:2] == (True, True)
        for changed in ("changed", "changed late"):
            assert second[f"{kind}, {changed}"].startswith("StateChangedError: model/")
            assert first[f"{kind}, {changed}"].startswith("PeerError: rank 1 failed: ")
        assert "rank 1 failed: StateChangedError: model/" in first[f"{kind}, changed"]
        assert first[f"{kind}, in the end"] == second[f"{kind}, in the end"] == first[kind][2]


def test_what_one_rank_fails_of_is_told_on_all_and_all_go_on(path: str) -> None:
    first, second = results(run_processes(2, f"{CASES}:failures", path))
    assert first["at the call"].startswith("PeerError: rank 1 failed: UnsupportedValueError: x")
    assert second["at the call"].startswith("UnsupportedValueError: x")
    assert first["an argument"].startswith("InvalidInputError: snapshot")
    assert second["an argument"].startswith("PeerError: rank 0 failed: InvalidInputError: snapshot")
    assert "rank 1 failed: OSError: the device is gone" in first["behind it"]
    assert "rank 1 failed: BackgroundCommitError" in first["the next"]
    assert second["the next"].startswith("BackgroundCommitError") and "the device is gone" in second["the next"]
    assert first["after that"] == second["after that"] == 4
    assert first["in the end"] == second["in the end"] == 7
    assert first["steps"] == [7, 4, 1]


def test_an_interrupt_when_a_call_has_staged_its_state_leaves_the_ranks_in_step(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else this rank's next commit would meet the one after it of the others, from then on."""
    interrupted = threading.Event()

    @contextmanager
    def paused() -> Iterator[None]:
        with python_gc_paused():
            yield
        if threading.current_thread().name == "rank 1" and not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt  # where Python runs the handler of a signal that came before

    monkeypatch.setattr(commits, "python_gc_paused", paused)

    def work(peers: Peers) -> list[int | None]:
        with Repository.open(path, group=peers) as repo:
            for step in range(4):
                interrupts = peers.rank == 1 and step == 0
                with pytest.raises(KeyboardInterrupt) if interrupts else nullcontext():
                    repo.commit_async({"w": PerRank(torch.full((9,), step))}, step=step)
            assert repo.drain()
            return [each.step for each in repo.log("main")]

    assert run_ranks(2, work, timeout_s=20) == [[3, 2, 1, 0]] * 2


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_rank_that_is_killed_is_named_and_nobody_waits_for_it(path: str, when: str) -> None:
    outcomes = run_processes(2, f"{CASES}:killed", path, when)
    assert outcomes[1].exit_code == -signal.SIGKILL
    said, after, closed, steps = results(outcomes[:1])[0]
    assert said.startswith("PeerError") and "rank 1" in said
    assert "PeerError" in after and "rank 1" in after
    assert closed == "nothing"
    assert steps == "[1]"
