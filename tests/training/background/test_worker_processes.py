"""`commit_async(worker="process")`: the state at the call, whatever becomes of the process that commits it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from cas_ckpt import CancelledError, CommitOptions, FrozenChangedError, InvalidInputError, PerRank, Repository
from cas_ckpt.errors import PermissionDeniedError
from cas_ckpt.parallel import child_process
from cas_ckpt.training.background import commits
from tests.processes import PIPE, Forked, is_gone
from tests.ranks import results, run_processes
from tests.searches import tries
from tests.servers import S3Server
from tests.training.background.test_commit_async import spoil, training
from tests.training.background.worker_cases import train_until_killed, train_until_killed_by_the_worker, wait_in_drain
from tests.training.test_any_state import STATES

ROOT = Path(__file__).resolve().parent.parent.parent.parent


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with Repository.init(tmp_path / "repo") as made:
        yield made
        pid = pid_of(made)
    assert pid is None or not Path(f"/proc/{pid}").exists(), "it was left behind"


def pid_of(repo: Repository) -> int | None:
    background = repo._background
    return None if background is None or background._worker is None else background._worker.pid


def wait_until(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_the_commit_is_the_state_at_the_call(repo: Repository) -> None:
    with Repository.init("memory://") as other:
        wanted = other.commit(training(3)).root
    for staging_bytes in (None, 2 << 20, 300_000, 0):
        state = training(3)
        pending = repo.commit_async(state, step=5, worker="process", options=CommitOptions(staging_bytes=staging_bytes))
        spoil(state)
        made = pending.result()
        assert (made.root, repo.head.commit) == (wanted, made.id)
        assert pending.progress.staged_bytes == pending.progress.total_bytes > 0


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Repository, Repository]]:
    folder = tmp_path_factory.mktemp("beside")
    with Repository.init(folder / "one") as one, Repository.init(folder / "two") as two:
        yield one, two


@given(STATES)
@settings(max_examples=tries(10, 25), deadline=None)
def test_any_state_has_the_same_id_by_a_worker(beside: tuple[Repository, Repository], state: dict[str, Any]) -> None:
    here, there = beside
    assert there.commit_async(state, worker="process").result().root == here.commit(state).root


def test_values_of_all_kinds_have_the_same_id_by_a_worker(beside: tuple[Repository, Repository]) -> None:
    here, there = beside
    weights = torch.randn(40, 60)
    state = {
        "tied": [weights, weights], "view": weights[:, ::2], "step": torch.tensor(3), "none": torch.empty(0, 5),
        "sparse": weights.to_sparse(), "half": weights.to(torch.bfloat16), "generator": torch.Generator(),
        "ordered": OrderedDict(b=1, a=torch.ones(3)), "long": "x" * 100_000, "object": {1, 2},
        "array": np.arange(9)[::-1], "own": PerRank({"x": 1}), "pickled": Fraction(1, 3),
    }  # fmt: skip
    made = there.commit_async(state, worker="process", options=CommitOptions(allow_pickle=True)).result()
    assert made.root == here.commit(state, options=CommitOptions(allow_pickle=True)).root


def test_threads_and_a_process_take_turns(repo: Repository) -> None:
    state = {"w": torch.zeros(300, 300), "x": torch.zeros(5)}
    for step in range(8):
        state["w"].fill_(step)
        if step % 4 == 3:
            repo.commit(state, step=step)
        else:
            repo.commit_async(
                state, step=step, options=CommitOptions(max_in_flight=8), worker="process" if step % 2 else "thread"
            )
    repo.drain()
    assert [each.step for each in repo.log("main")] == [7, 6, 5, 4, 3, 2, 1, 0]
    for step in range(8):
        assert repo.load(f"step:{step}")["w"][7, 7].item() == step


def test_memory_that_the_pool_gave_up_is_not_kept_by_the_worker(repo: Repository) -> None:
    state = {"w": torch.zeros(3 << 20)}
    repo.commit_async(state, worker="process").result()
    state["w"] = torch.zeros(6 << 20)  # the arena grows: it is mapped anew
    repo.commit_async(state, worker="process").result()
    state["w"] = torch.ones(1 << 20)
    pending = repo.commit_async(
        state, worker="process", options=CommitOptions(staging_bytes=4 << 20)
    )  # it holds no more than that
    pending.result()
    pid = pid_of(repo)
    maps = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "cas-ckpt-staging" in line]
    sizes = [int(end, 16) - int(begin, 16) for begin, end in (line.split()[0].split("-") for line in maps)]
    assert sum(sizes) == 4 << 20


def test_what_is_frozen_is_believed_until_a_checkout(repo: Repository) -> None:
    state = {"w": torch.ones(300, 300), "x": torch.ones(300, 300)}
    first = repo.commit_async(state, worker="process", frozen="w").result()
    assert repo.commit_async(state, worker="process", frozen="w").result().root == first.root
    state["w"].add_(1)
    with pytest.raises(FrozenChangedError, match="w: "):
        repo.commit_async(state, worker="process", frozen="w").result()
    repo.checkout("main", into={"w": torch.empty(300, 300), "x": torch.empty(300, 300)})
    assert repo.commit_async(state, worker="process", frozen="w").result().root != first.root


def test_a_remote_gets_what_a_worker_committed(repo: Repository, tmp_path: Path) -> None:
    Repository.init(tmp_path / "tier").close()
    repo.add_remote("tier", str(tmp_path / "tier"))
    made = repo.commit_async({"w": torch.ones(300, 300)}, worker="process", push_to="tier").result()
    repo.wait_pushed()
    with Repository.open(tmp_path / "tier") as tier:
        assert [each.id for each in tier.log("main")] == [made.id]


@pytest.mark.slow
def test_an_object_store_takes_commits_of_a_worker(s3: S3Server) -> None:
    with Repository.init(s3.url(s3.new_bucket())) as repo:
        state = {"w": torch.ones(300, 300)}
        first = repo.commit_async(state, worker="process").result()
        state["w"].add_(1)
        second = repo.commit_async(state, worker="process").result()
        assert second.parents == (first.id,)
        assert repo.load("main")["w"].min() == 2


@pytest.mark.slow
def test_an_interrupt_of_everybody_in_the_terminal_leaves_the_commit_to_drain(tmp_path: Path) -> None:
    Repository.init(tmp_path / "repo").close()
    with Forked(wait_in_drain, tmp_path / "repo", stdout=PIPE) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "drains\n"
        os.killpg(trainer.pid, signal.SIGINT)
        assert trainer.stdout.readline() == "interrupted\n"
        assert trainer.stdout.readline() == "drained True\n"
    with Repository.open(tmp_path / "repo") as repo:
        assert [each.step for each in repo.log("main")] == [1, 0]


def test_a_commit_that_is_cancelled_is_not_made_and_the_worker_stays(repo: Repository) -> None:
    state = {str(number): torch.randn(1 << 20) for number in range(6)}
    repo.commit_async(state, worker="process").result()
    pid, head = pid_of(repo), repo.head
    state["0"].add_(1)
    pending = repo.commit_async(state, worker="process")
    if pending.cancel():
        with pytest.raises(CancelledError):
            pending.result()
        assert repo.head == head
    assert repo.commit_async(state, worker="process").result().id == repo.log("main")[0].id
    assert pid_of(repo) == pid


def test_a_worker_that_was_stopped_before_a_commit_is_waited_for_or_replaced(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.ones(300, 300)}
    repo.commit_async(state, worker="process").result()
    pid = pid_of(repo)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    state["w"].add_(1)
    pending = repo.commit_async(state, worker="process")
    assert not pending.done()
    os.kill(pid, signal.SIGCONT)
    pending.result()
    assert pid_of(repo) == pid
    monkeypatch.setattr(child_process, "STOPPED_S", 1.0)
    os.kill(pid, signal.SIGSTOP)
    state["w"].add_(1)
    made = repo.commit_async(state, worker="process").result()
    assert repo.head.commit == made.id == repo.log("main")[0].id
    assert is_gone(pid)
    assert pid_of(repo) != pid


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_a_repository_that_was_opened_to_be_read_is_refused_at_the_call(tmp_path: Path, worker: str) -> None:
    with Repository.init(tmp_path / "repo") as made:
        first = made.commit({"x": torch.zeros(9)})
    with Repository.open(tmp_path / "repo", read_only=True) as repo:
        with pytest.raises(PermissionDeniedError, match="was opened to be read"):
            repo.commit_async({"x": torch.ones(9)}, worker=worker)
        assert repo.latest("main").id == first.id  # type: ignore[union-attr]


def test_threads_that_call_first_at_once_have_one_worker(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Slow(commits.CommitWorker):
        def __init__(self, handle: Any) -> None:
            super().__init__(handle)
            made.append(self)
            time.sleep(0.05)

    monkeypatch.setattr(commits, "CommitWorker", Slow)
    calls = [
        threading.Thread(target=repo.commit_async, args=({"x": torch.full((9,), step)},), kwargs={"worker": "process"})
        for step in range(3)
    ]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert repo.drain(60) and len(made) == 1


def test_a_repository_in_memory_is_refused_at_the_call() -> None:
    with Repository.init("memory://") as repo:
        with pytest.raises(InvalidInputError, match='worker="thread"'):
            repo.commit_async({"a": 1}, worker="process")
        repo.commit_async({"a": 1}).result()


def test_a_program_without_a_guard_that_ends_at_once_has_its_commit_made(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from cas_ckpt import Repository\n"
        "print('begun')\n"
        f"repo = Repository.init({str(tmp_path / 'repo')!r})\n"
        "state = {'w': torch.ones(3000, 1000)}\n"
        "repo.commit_async(state, worker='process', step=1)\n"
        "state['w'].zero_()\n"
        "print(repo._background._worker.pid)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    begun, pid = done.stdout.split()
    wait_until(lambda: is_gone(int(pid)))
    assert begun == "begun"
    with Repository.open(tmp_path / "repo") as repo:
        assert repo.load("main")["w"].min() == 1


@pytest.mark.slow
def test_a_trainer_that_is_killed_leaves_whole_commits_and_no_process(tmp_path: Path) -> None:
    Repository.init(tmp_path / "repo").close()
    rng, pids = random.Random(3), set()
    for _ in range(3):
        with Forked(train_until_killed, tmp_path / "repo", stdout=PIPE) as trainer:
            assert trainer.stdout is not None
            for _ in range(rng.randrange(2, 5)):
                pids.add(int(trainer.stdout.readline()))
            time.sleep(rng.uniform(0, 0.15))
            trainer.kill()
    wait_until(lambda: all(map(is_gone, pids)))
    with Repository.open(tmp_path / "repo") as repo:
        log = repo.log("main", limit=None)
        assert log
        for commit in log:
            found = repo.load(commit.id)
            assert commit.step is not None
            assert all((found[key] == commit.step).all() for key in "ab")
        assert not repo.fsck(read_data=True).problems
        repo.commit({"a": 1}, branch="next", options=CommitOptions(orphan=True))


@pytest.mark.slow
def test_a_trainer_that_is_killed_after_any_effect_of_its_worker_leaves_the_commit_made_or_not(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit({"a": torch.zeros(40_000), "b": torch.zeros(30_000)}, step=0)
    outcomes, head = [], 0
    for number in range(1, 40):
        with Forked(train_until_killed_by_the_worker, tmp_path / "repo", number, stdout=PIPE) as trainer:
            assert trainer.stdout is not None
            pid = int(trainer.stdout.readline())
        wait_until(lambda pid=pid: is_gone(pid))  # type: ignore[misc]
        with Repository.open(tmp_path / "repo", group=None) as repo:
            found = repo.latest("main")
            assert found is not None and found.step in (head, number)
            state = repo.load("main")
            assert all((state[key] == found.step).all() for key in "ab")
        if trainer.returncode == 0:
            assert found.step == number
            break
        assert trainer.returncode == -signal.SIGKILL
        outcomes.append("made" if found.step == number else "not made")
        head = found.step
    assert sorted(outcomes, reverse=True) == outcomes and set(outcomes) == {"made", "not made"}
    with Repository.open(tmp_path / "repo") as repo:
        assert not repo.fsck(read_data=True).problems
        repo.commit({"a": 1})


@pytest.mark.slow
def test_ranks_commit_divided_states_through_workers(tmp_path: Path) -> None:
    Repository.init(tmp_path / "repo").close()
    for roots in results(
        run_processes(2, "tests.training.background.worker_cases:commits_of_ranks", str(tmp_path / "repo"))
    ):
        assert len(set(roots)) == 1


@pytest.mark.slow
def test_real_ranks_know_of_a_commit_though_the_worker_of_one_died_right_after_it(tmp_path: Path) -> None:
    Repository.init(tmp_path / "repo").close()
    case = "tests.training.background.worker_cases:commits_whose_worker_dies_right_after"
    first, second = results(run_processes(2, case, str(tmp_path / "repo")))
    assert first == second
    for made, head, history in first:
        assert made == head == history[1]
    assert len(first[1][2]) == 4
