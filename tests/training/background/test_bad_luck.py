"""Pending commits that are cancelled, interrupted, overtaken by collections, and shared by threads and repositories."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch

from cas_ckpt import (
    CancelledError,
    CommitOptions,
    InvalidInputError,
    Lineage,
    Policy,
    Repository,
    StillPendingError,
    limits,
    memory,
)
from cas_ckpt.errors import CkptError, FrozenChangedError, TooLargeError
from cas_ckpt.objects.spec import Box
from cas_ckpt.training.background import staged
from cas_ckpt.training.background.pending import PendingCommit
from cas_ckpt.transfer import save, staging
from tests.no_threads import no_thread_can_be_started

_NUMBERS = count()


@pytest.fixture
def repo() -> Iterator[Repository]:
    with Repository.init(f"memory://luck-{next(_NUMBERS)}") as made:
        yield made


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((400, 400), float(step)), "v": torch.full((300,), float(step))}


class Held:
    """Inside, until `let_go`, commits in the background wait for their turn, which a thread of its own has."""

    def __init__(self, repo: Repository) -> None:
        self._held, self.leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold, args=(repo,))

    def _hold(self, repo: Repository) -> None:
        with repo._committing:
            self._held.set()
            self.leave.wait(60)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._held.wait(20)
        return self

    def let_go(self) -> None:
        self.leave.set()

    def __exit__(self, *exc_info: object) -> None:
        self.let_go()
        self._thread.join(20)


def value_at(repo: Repository, ref: str) -> float:
    return float(repo.load(ref)["w"][0, 0])


def test_a_call_whose_state_does_not_fit_returns_as_soon_as_the_rest_does(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read, returned = threading.Semaphore(0), threading.Event()
    real, were_read = staged.StagedTensor.read, set[str]()
    found: list[PendingCommit] = []

    def read(self: staged.StagedTensor, box: Box) -> np.ndarray[Any, Any]:
        assert may_read.acquire(timeout=30)
        were_read.add(self.key)
        return real(self, box)

    def call() -> None:
        with limits(num_threads=1):
            found.append(repo.commit_async(state, options=CommitOptions(staging_bytes=24 << 20)))
        returned.set()

    monkeypatch.setattr(staged.StagedTensor, "read", read)
    state = {str(number): torch.full((1 << 21,), float(number)) for number in range(8)}
    caller = threading.Thread(target=call)
    caller.start()
    assert not returned.wait(0.3), "five of eight are live still"
    while not returned.wait(0.1 if len(were_read) < 7 else 30):
        may_read.release()
    assert 5 <= len(were_read) <= 7
    for tensor in state.values():
        tensor.fill_(-1)
    may_read.release(100)
    found[0].result()
    caller.join()
    assert [float(tensor[0]) for tensor in repo.load("main").values()] == list(range(8))


# ------------------------------------------------------------ cancelled, interrupted


def test_one_that_waits_is_cancelled_and_the_others_are_made(repo: Repository) -> None:
    with Held(repo):
        first = repo.commit_async(state_of(1), step=1, options=CommitOptions(max_in_flight=3))
        second = repo.commit_async(state_of(2), step=2, options=CommitOptions(max_in_flight=3))
        third = repo.commit_async(state_of(3), step=3, options=CommitOptions(max_in_flight=3))
        canceller = threading.Thread(target=second.cancel)
        canceller.start()
        while second._snapshot is not None and second._snapshot.error is None:
            pass
    canceller.join()
    assert second.cancelled()
    assert not first.cancel()
    with pytest.raises(CancelledError):
        second.result()
    assert second.exception() is None
    assert third.result().parents == (first.result().id,)
    repo.commit(state_of(4), step=4)  # nobody has to hear of what was cancelled
    assert [each.step for each in repo.log()] == [4, 3, 1]


def test_one_that_is_being_made_is_broken_off_at_the_next_tensor(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, go = threading.Event(), threading.Event()
    real, were_read = staged.StagedTensor.read, set[str]()

    def read(self: staged.StagedTensor, box: Box) -> np.ndarray[Any, Any]:
        were_read.add(self.key)
        at.set()
        assert go.wait(30)
        return real(self, box)

    monkeypatch.setattr(staged.StagedTensor, "read", read)
    state = {str(number): torch.full((1 << 20,), float(number)) for number in range(6)}
    with limits(num_threads=1):
        pending = repo.commit_async(state)
    assert at.wait(30)
    found: list[bool] = []
    canceller = threading.Thread(target=lambda: found.append(pending.cancel()))
    canceller.start()
    while pending._snapshot is not None and pending._snapshot.error is None:
        pass
    go.set()
    canceller.join()
    assert found == [True]
    assert repo.latest() is None
    assert len(were_read) < len(state)


def test_an_interrupt_ends_the_wait_alone(repo: Repository) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    with Held(repo):
        pending = repo.commit_async(state_of(1))
        for wait in (pending.result, lambda: PendingCommit.wait_staged(waiting(pending))):
            timer = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                wait()
            timer.join()
        with pytest.raises(StillPendingError, match="waits for its turn|is being made"):
            pending.result(0.01)
        with pytest.raises(TimeoutError):
            pending.exception(0)
    signal.signal(signal.SIGINT, before)
    assert pending.result().id == repo.latest().id  # type: ignore[union-attr]


def waiting(pending: PendingCommit) -> PendingCommit:
    """Like `pending`, with a snapshot that is not settled."""
    assert pending._snapshot is not None
    pending._snapshot.settled = False
    return pending


def test_an_interrupt_while_the_state_is_copied_leaves_no_commit_and_no_memory_taken(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*copies: object, **how: object) -> None:
        raise KeyboardInterrupt

    for staging_bytes in (None, 200_000):
        with monkeypatch.context() as patch:
            patch.setattr(staged, "copy_all", interrupted)
            patch.setattr(staged.StagedTensor, "copied", interrupted)
            with pytest.raises(KeyboardInterrupt):
                repo.commit_async(
                    {**state_of(1), "small": torch.ones(3)}, options=CommitOptions(staging_bytes=staging_bytes)
                )
        assert repo.drain()
        assert repo.latest() is None
        assert repo._background is not None and repo._background._pool is not None
        assert not repo._background._pool._taken
    assert repo.commit_async(state_of(2)).result().parents == ()


def test_draining_takes_no_longer_than_it_may_and_says_that_something_is_pending(repo: Repository) -> None:
    found: list[bool] = []
    with Held(repo):
        pending = repo.commit_async(state_of(1), step=1)
        draining = threading.Thread(target=lambda: found.append(repo.drain(timeout_s=0.01)))
        draining.start()
        draining.join(30)
        assert found == [False] and not pending.done()
    assert repo.drain(60) and pending.done()
    assert value_at(repo, "main") == 1


# ------------------------------------------------------------ callbacks


def test_what_a_callback_raises_is_logged_and_the_others_are_called(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Any] = []

    def waits(pending: PendingCommit) -> None:
        for call in (
            lambda: repo.commit(state_of(3)),
            repo.drain,
            lambda: repo.commit_async(state_of(3)),
            later.result,
        ):
            with pytest.raises(InvalidInputError, match="callback"):
                call()
            heard.append("refused")

    with Held(repo):
        pending = repo.commit_async(state_of(1), step=1, options=CommitOptions(max_in_flight=2))
        later = repo.commit_async(state_of(2), step=2, options=CommitOptions(max_in_flight=2))
        pending.add_done_callback(lambda _: 1 / 0)
        pending.add_done_callback(lambda _: sys.exit("of a callback"))
        pending.add_done_callback(waits)
        pending.add_done_callback(lambda each: heard.append(each.result().step))
    assert later.result().step == 2
    assert heard == ["refused"] * 4 + [1]
    assert "ZeroDivisionError" in caplog.text and "SystemExit: of a callback" in caplog.text
    pending.add_done_callback(lambda each: heard.append("at once"))
    assert heard[-1] == "at once"


def test_a_failure_that_cannot_be_logged_ends_the_commit_all_the_same(
    repo: Repository, capfd: pytest.CaptureFixture[str]
) -> None:
    class Full(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("no space left for the log")

    handler = Full()
    logging.getLogger("cas_ckpt").addHandler(handler)
    try:
        pending = repo.commit_async(state_of(1), options=CommitOptions(parents=["0123456789"]))
        with pytest.raises(CkptError, match="0123456789"):
            pending.result(60)
    finally:
        logging.getLogger("cas_ckpt").removeHandler(handler)
    assert "no space left for the log" in capfd.readouterr().err
    assert repo.commit_async(state_of(2), step=2).result(60).step == 2


def test_a_failure_that_somebody_keeps_keeps_no_staged_memory(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(save.codec, "encode_extent", refuse)
        failed = repo.commit_async({"x": torch.randn(1 << 20)})
        assert isinstance(failed.exception(60), ZeroDivisionError)
    assert repo._background is not None and repo._background._pool is not None
    (arena,) = repo._background._pool._free
    assert arena.grow(16 << 20)  # False: somebody looks at it


def refuse(*_: object, **__: object) -> None:
    raise ZeroDivisionError


def test_a_callback_cannot_close_the_repository_under_what_is_pending(repo: Repository) -> None:
    refused: list[Exception] = []

    def close(_: PendingCommit) -> None:
        try:
            repo.close()
        except InvalidInputError as error:
            refused.append(error)

    with Held(repo):
        first = repo.commit_async(state_of(1), step=1, options=CommitOptions(max_in_flight=2))
        first.add_done_callback(close)
        second = repo.commit_async(state_of(2), step=2, options=CommitOptions(max_in_flight=2))
    assert second.result(60).step == 2
    assert len(refused) == 1


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_an_interrupt_while_closing_waits_leaves_what_is_pending_to_be_made(tmp_path: Path, worker: str) -> None:
    repo = Repository.init(tmp_path / "repo")
    with Held(repo):
        pending = repo.commit_async(state_of(1), step=1, worker=worker)
        with interrupt_soon(), pytest.raises(KeyboardInterrupt):
            repo.close()
    assert pending.result(60).step == 1
    background = repo._background
    assert background is not None
    repo.close()
    assert background._worker is None or background._worker.pid is None
    with Repository.open(tmp_path / "repo") as again:
        assert value_at(again, "main") == 1


@contextmanager
def interrupt_soon() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_commit_whose_push_cannot_begin_is_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Repository.init(tmp_path / "there").close()
    with Repository.init(tmp_path / "here") as repo:
        repo.add_remote("tier", str(tmp_path / "there"))
        with Held(repo) as turn:
            pending = repo.commit_async(state_of(1), step=1, push_to="tier")
            with no_thread_can_be_started("cas-ckpt-background"):
                turn.let_go()
                made = pending.result(60)
        assert made.step == 1 and repo.head.commit == made.id
        assert "not pushed to tier yet" in caplog.text
        assert repo.commit(state_of(2), step=2, push_to="tier").step == 2
        repo.wait_pushed()
    with Repository.open(tmp_path / "there") as there:
        assert there.latest("main").step == 2  # type: ignore[union-attr]


def test_what_is_asked_of_a_pending_commit_is_checked(repo: Repository) -> None:
    with Held(repo):
        pending = repo.commit_async(state_of(1))
        for wrong in ("x", float("nan"), float("inf")):
            for ask in (pending.result, pending.exception, pending.wait_staged):
                with pytest.raises(InvalidInputError, match="timeout_s is"):
                    ask(wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidInputError, match="callback is None"):
            pending.add_done_callback(None)  # type: ignore[arg-type]
        with pytest.raises(StillPendingError, match="has not ended after 0.01 s, it (is being made|waits)"):
            pending.result(0.01)


# ------------------------------------------------------------ others at the same time


def test_an_error_that_leaves_the_block_of_a_repository_waits_for_what_is_pending(tmp_path: Path) -> None:
    pending: list[PendingCommit] = []

    def fail() -> None:
        with Repository.init(tmp_path / "repo") as repo:
            held = Held(repo).__enter__()
            pending.append(repo.commit_async(state_of(1), step=1))
            threading.Timer(0.2, held.let_go).start()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert pending[0].done() and pending[0].result().step == 1
    with Repository.open(tmp_path / "repo") as repo:
        assert value_at(repo, "main") == 1


def test_what_is_said_of_a_commit_is_what_was_said_at_the_call(repo: Repository) -> None:
    words: dict[str, Any] = {"metrics": {"loss": 0.5}, "meta": {"x": [1]}}
    provenance = {"job": 3}
    with Held(repo):
        pending = repo.commit_async(state_of(1), **words, options=CommitOptions(provenance=provenance))
        words["metrics"]["loss"] = 9.0
        words["meta"]["x"].append(2)
        provenance["job"] = 4
    made = pending.result()
    assert made.metrics == {"loss": 0.5} and made.meta == {"x": [1]}
    assert repo.show(made.id).provenance["job"] == 3


def test_a_commit_that_no_thread_can_be_started_for_fails_the_call_and_holds_nobody(repo: Repository) -> None:
    with no_thread_can_be_started("cas-ckpt-background"), pytest.raises(TooLargeError, match="can't start"):
        repo.commit_async(state_of(1))
    assert repo.drain(10)
    assert repo.commit_async(state_of(2), step=2).result(60).step == 2 and value_at(repo, "main") == 2


def test_a_collection_between_staging_and_publishing_takes_nothing(repo: Repository) -> None:
    repo.commit_async(state_of(1), step=1).result()
    repo.commit_async(state_of(2), step=2).result()
    state = state_of(1)
    with Held(repo):
        pending = repo.commit_async(state, step=3)
        state["w"].zero_()
        with Repository.open(repo.url) as other:
            other.forget(Policy(keep_last=1), gc=True)
            other.gc(min_age_s=0, reflog_expire_s=0)
    assert pending.result().step == 3
    assert value_at(repo, "main") == 1
    assert repo.fsck(read_data=True).ok


def test_a_collection_under_a_commit_that_does_not_fit_is_an_error_and_not_another_state(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit begins anew, and what it had saved from live memory may have changed by then."""
    from cas_ckpt.core import publish
    from cas_ckpt.errors import ConflictError
    from cas_ckpt.ops.commit import commit as module

    real, state = module.publish_commit, state_of(5)

    def moved(*args: Any, **kwargs: Any) -> Any:
        state["w"].zero_()
        raise publish.GenerationMoved

    monkeypatch.setattr(module, "publish_commit", moved)
    pending = repo.commit_async(state, options=CommitOptions(staging_bytes=0))
    with pytest.raises(ConflictError, match="staging_bytes"):
        pending.result()
    monkeypatch.setattr(module, "publish_commit", real)
    assert repo.latest() is None
    calls: list[int] = []

    def moved_once(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise publish.GenerationMoved
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "publish_commit", moved_once)
    state = state_of(6)
    pending = repo.commit_async(state)
    state["w"].zero_()
    pending.result()
    assert value_at(repo, "main") == 6


def test_two_repositories_commit_side_by_side() -> None:
    with (
        Repository.init(f"memory://luck-{next(_NUMBERS)}") as one,
        Repository.init(f"memory://luck-{next(_NUMBERS)}") as two,
    ):
        state = state_of(0)
        for step in range(5):
            state["w"].fill_(step)
            with Held(one):  # which does not keep the other one waiting
                one.commit_async(state, step=step, options=CommitOptions(max_in_flight=9))
                other = two.commit_async(state, step=step)
                state["w"].fill_(-1)
                assert other.result(60).step == step
        one.drain()
        for each in (one, two):
            assert [value_at(each, f"step:{step}") for step in range(5)] == [0, 1, 2, 3, 4]


def test_a_note_of_lineage_is_that_of_the_call(repo: Repository) -> None:
    first, note = repo.commit(state_of(0)), {"x": [1]}
    with Held(repo):
        pending = repo.commit_async(state_of(1), options=CommitOptions(lineage=[Lineage("like", first.id, note)]))
        note["x"].append(2)
    assert pending.result().lineage[0].meta == {"x": [1]}


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_the_provenance_is_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: str) -> None:
    (tmp_path / "before").mkdir()
    monkeypatch.chdir(tmp_path / "before")
    monkeypatch.setattr(sys, "argv", ["train.py", "--before"])
    of_somebody = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in (["init", "-q"], [*of_somebody, "commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run(["git", *words], check=True)
    with Repository.init(tmp_path / "repo", group=None) as repo:
        with Held(repo):
            pending = repo.commit_async(state_of(1), options=CommitOptions(provenance=True), worker=worker)
            monkeypatch.chdir(tmp_path)
            sys.argv[:] = ["later.py"]
        said = repo.show(pending.result().id).provenance
    assert said["command"] == ["train.py", "--before"]
    assert "commit" in said["git"]


def test_threads_that_call_at_once_get_a_commit_each(repo: Repository) -> None:
    found: list[tuple[int, PendingCommit]] = []

    def call(step: int) -> None:
        state = state_of(step)
        found.append((step, repo.commit_async(state, step=step, options=CommitOptions(max_in_flight=3))))
        state["w"].zero_()

    threads = [threading.Thread(target=call, args=(step,)) for step in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for step, pending in found:
        assert pending.result().step == step
        assert value_at(repo, f"step:{step}") == step


def test_a_checkout_waits_for_what_is_pending_and_the_next_commit_goes_on_from_it(repo: Repository) -> None:
    first = repo.commit_async(state_of(1), step=1)
    state = state_of(0)
    repo.checkout("main", into=state)
    assert state["w"][0, 0] == 1
    assert repo.commit(state, step=2).parents == (first.result().id,)


def test_no_more_are_in_flight_than_the_call_allows(repo: Repository) -> None:
    seen: list[int] = []
    state = state_of(1)
    for step in range(4):
        repo.commit_async(state, step=step, options=CommitOptions(max_in_flight=2))
        assert repo._background is not None
        seen.append(len(repo._background.queue.pending()))
    assert max(seen) <= 2


@pytest.mark.parametrize("num_neighbours", [1, 2])
def test_by_default_the_ranks_of_a_machine_stage_in_half_of_what_is_available(
    repo: Repository, num_neighbours: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 16384 kB\n")
    monkeypatch.setattr(memory, "PROC", tmp_path)
    repo._ranks.num_neighbours = num_neighbours
    state = {"w": torch.ones(4 << 20)}
    pending = repo.commit_async(state)
    state["w"].zero_()
    pending.result()
    assert repo.load("main")["w"].min() == 1
    assert repo._background is not None and repo._background._pool is not None
    assert repo._background._pool.held_bytes == (8 << 20) // num_neighbours


def test_nothing_is_kept_of_commits_that_have_ended_or_could_not_begin(repo: Repository) -> None:
    for step in range(5):
        repo.commit_async(state_of(step), step=step).result()
        with no_thread_can_be_started("cas-ckpt-background"), pytest.raises(TooLargeError):
            repo.commit_async(state_of(step))
    assert repo._background is not None and len(repo._background._declared) <= 1


def test_memory_of_the_live_state_and_of_the_staged_one_is_given_back(repo: Repository) -> None:
    state = state_of(1)
    storage = weakref.ref(state["w"].untyped_storage())
    pending = repo.commit_async(state)
    with Held(repo):
        del state
        gc.collect()
        assert storage() is None  # the commit holds a copy, not the state
    pending.result()
    assert repo._background is not None and repo._background._pool is not None
    assert repo._background._pool.held_bytes
    repo.close()
    assert not repo._background._pool.held_bytes


# ------------------------------------------------------------ frozen


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every copy that was made."""
    found: list[int] = []
    real = staged.copy_all

    def copy_all(copies: list[staging.Copy], *, num_threads: int) -> None:
        found.append(sum(copy.target.nbytes for copy in copies))
        real(copies, num_threads=num_threads)

    monkeypatch.setattr(staged, "copy_all", copy_all)
    return found


@pytest.mark.parametrize("check", ["checksum", "version"])
def test_what_is_frozen_and_known_is_not_copied(repo: Repository, copied: list[int], check: str) -> None:
    state = {"base": torch.randn(500, 500), "head": torch.randn(100, 100)}
    given: Any = CommitOptions(frozen_check=check, frozen_audit=0.5)
    options: dict[str, Any] = {"frozen": "base", "options": given}
    made = []
    for step in range(3):
        state["head"].fill_(step)
        pending = repo.commit_async(state, step=step, **options)
        state["head"].fill_(-1)
        made.append(pending.result())
        assert value_of_head(repo, step) == step
    assert copied == [500 * 500 * 4 + 100 * 100 * 4, 100 * 100 * 4, 100 * 100 * 4]
    assert torch.equal(repo.load("main")["base"], state["base"])
    repo.commit_async(state, step=9).result()  # not declared frozen: forgotten, and copied again
    repo.commit_async(state, step=10, **options).result()
    assert copied[-2:] == [500 * 500 * 4 + 100 * 100 * 4] * 2


def value_of_head(repo: Repository, step: int) -> float:
    return float(repo.load(f"step:{step}")["head"][0, 0])


def test_what_is_frozen_and_changes_before_it_is_looked_at_is_an_error(repo: Repository) -> None:
    state = {"base": torch.randn(500, 500), "head": torch.randn(100, 100)}
    repo.commit_async(state, step=1, frozen="base").result()
    with Held(repo):
        pending = repo.commit_async(state, step=2, frozen="base")
        state["base"].add_(1)
    with pytest.raises(FrozenChangedError, match="base"):
        pending.result()
    assert repo.latest().step == 1  # type: ignore[union-attr]


def test_what_was_known_at_the_call_counts_whatever_is_committed_before_it(repo: Repository) -> None:
    """A commit in between that does not declare it frozen makes the process forget it; the pending one does not."""
    state = {"base": torch.randn(500, 500), "head": torch.randn(100, 100)}
    repo.commit_async(state, step=1, frozen="base").result()
    with Held(repo):
        repo.commit_async(state, step=2, options=CommitOptions(max_in_flight=3))
        pending = repo.commit_async(state, step=3, frozen="base", options=CommitOptions(max_in_flight=3))
    assert pending.result().step == 3
    assert torch.equal(repo.load("main")["base"], state["base"])


def test_what_a_pending_commit_makes_free_to_change_is_staged_as_it_is(repo: Repository) -> None:
    state = {"base": torch.randn(500, 500), "head": torch.randn(100, 100)}
    repo.commit_async(state, step=1, frozen="base").result()
    state["base"].add_(1)
    with Held(repo):
        repo.commit_async(state, step=2, frozen="head", options=CommitOptions(max_in_flight=3))
        pending = repo.commit_async(state, step=3, frozen="base", options=CommitOptions(max_in_flight=3))
        wanted = state["base"].clone()
        state["base"].add_(1)
    assert pending.result().step == 3
    assert torch.equal(repo.load("main")["base"], wanted)


def test_the_staged_states_of_both_workers_together_keep_to_the_budget(tmp_path: Path) -> None:
    budget = 9 << 20
    with Repository.init(tmp_path / "repo") as repo:
        with Held(repo) as turn:
            first = repo.commit_async(
                {"x": torch.ones(1 << 21)}, step=1, options=CommitOptions(max_in_flight=2, staging_bytes=budget)
            )
            background = repo._background
            assert background is not None and background._pool is not None
            former = background._pool
            held: list[int] = []
            threading.Timer(0.5, turn.let_go).start()
            second = repo.commit_async(
                {"x": torch.zeros(1 << 21)},
                step=2,
                options=CommitOptions(max_in_flight=2, staging_bytes=budget),
                worker="process",
            )
            held.append(former.held_bytes + background._pool.held_bytes)
            second.result(60)
        assert first.done() and max(held) <= budget


def test_a_repository_that_nobody_closes_gives_shared_memory_back(tmp_path: Path) -> None:
    def commit_and_drop() -> None:
        repo = Repository.init(tmp_path / "repo")
        repo.commit_async(state_of(1), worker="process").result(60)
        background = repo._background
        assert background is not None and background._worker is not None
        found.append(weakref.ref(background))

    before, found = _shared_memory(), list[Any]()
    commit_and_drop()
    for _ in range(500):
        gc.collect()
        if found[0]() is None:
            break
        threading.Event().wait(0.01)  # the thread of the queue ends
    assert found[0]() is None
    assert _shared_memory() == before


def _shared_memory() -> list[str]:
    links = [os.path.join("/proc/self/fd", each) for each in os.listdir("/proc/self/fd")]
    return [each for each in links if os.path.exists(each) and "cas-ckpt-staging" in os.readlink(each)]


def test_progress_of_what_goes_on_in_the_background(repo: Repository, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with Held(repo):
        pending = repo.commit_async(state_of(1))
        assert pending.progress.total_bytes == pending.progress.staged_bytes == 400 * 400 * 4 + 300 * 4
        assert pending.progress.saved_bytes == 0
        assert "called at test_bad_luck.py" in repr(pending)
    pending.result()
    assert pending.progress.saved_bytes == 400 * 400 * 4 + 300 * 4
