"""`commit_async(snapshot="lazy")`: the state of the call, whatever training does while it is staged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from cas_ckpt import CommitOptions, Repository, StateChangedError
from cas_ckpt.errors import BackgroundCommitError, CancelledError, StillPendingError, TooLargeError
from cas_ckpt.training.background import commits, staged
from cas_ckpt.training.background.staged import Snapshot
from cas_ckpt.transfer import staging
from tests.meddling import held_elsewhere
from tests.training.background.loops import KINDS, Training

_NUMBERS = count()
TIMEOUT_S = 60


def new_repo() -> Repository:
    return Repository.init(f"memory://lazy-{next(_NUMBERS)}")


@pytest.fixture
def repo(monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    monkeypatch.setattr(staging, "GRANULE_BYTES", 4096)  # small states that do not fit their staging memory
    with new_repo() as made:
        yield made
    assert not commits._held


def root_of(training: Training) -> str:
    with new_repo() as other:
        return other.commit(training.state).root


class HeldStager:
    """The thread that stages, which goes on when the test says so."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def run(self, stager: Any) -> None:
        assert self.go_on.wait(TIMEOUT_S)
        _RUN(stager)


_RUN = commits._Stager._run


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldStager]:
    stager = HeldStager()
    monkeypatch.setattr(commits._Stager, "_run", lambda self: stager.run(self))
    yield stager
    stager.go_on.set()


def in_a_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


# ------------------------------------------------------------ training goes on


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("staging_bytes", [None, 70_000])
def test_a_training_loop_gives_the_ids_of_synchronous_commits(
    repo: Repository, kind: str, staging_bytes: int | None
) -> None:
    beside, training = Training(kind), Training(kind)
    wanted, pending = [], []
    for seed in range(3):
        torch.manual_seed(seed)
        wanted.append(root_of(beside))
        beside.step()
        torch.manual_seed(seed)
        pending.append(
            repo.commit_async(
                training.state,
                step=seed,
                snapshot="lazy",
                options=CommitOptions(staging_bytes=staging_bytes, max_in_flight=2),
            )
        )
        training.step()
    assert [each.result().root for each in pending] == wanted


def test_the_call_returns_before_anything_is_staged_and_a_step_waits(repo: Repository, held: HeldStager) -> None:
    training = Training()
    wanted = root_of(training)
    pending = repo.commit_async(training.state, snapshot="lazy")
    assert not pending.staged and not pending.wait_staged(0) and not pending.done()
    training.forward_and_backward()
    before = [param.detach().clone() for param in training.model.parameters()]
    stepping = in_a_thread(training.step)
    stepping.join(0.05)
    assert stepping.is_alive()
    assert all(map(torch.equal, before, training.model.parameters()))
    held.go_on.set()
    stepping.join(TIMEOUT_S)
    assert not any(map(torch.equal, before, training.model.parameters()))
    assert pending.staged and pending.result().root == wanted


def test_what_a_forward_may_change_and_all_that_is_loose_is_copied_at_the_call(
    repo: Repository, held: HeldStager
) -> None:
    training = Training()
    wanted = root_of(training)
    pending = repo.commit_async(training.state, snapshot="lazy")
    training.model(torch.randn(8, 60))  # moves the running means
    training.loose.zero_()
    training.loose.numpy()[:] = 3
    training.progress["step"] = 77
    training.progress["seen"][1]["a"] = 5
    for group in training.optim.param_groups:
        group["lr"] = 1e-9
    training.schedule.last_epoch = 99
    held.go_on.set()
    assert pending.result().root == wanted


def test_an_optimizer_that_steps_inside_of_backward_waits(repo: Repository, held: HeldStager) -> None:
    model = torch.nn.Linear(60, 70)
    optims = {name: torch.optim.SGD([param], lr=0.1) for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: optims[name].step())  # type: ignore[misc]
    state = {"model": model, "optims": optims}
    wanted = new_repo().commit(state).root
    pending = repo.commit_async(state, snapshot="lazy")
    backward = in_a_thread(lambda: model(torch.ones(2, 60)).sum().backward())
    backward.join(0.05)
    assert backward.is_alive()
    held.go_on.set()
    backward.join(TIMEOUT_S)
    assert pending.result().root == wanted


def test_what_becomes_of_the_objects_after_the_call_changes_nothing(repo: Repository, held: HeldStager) -> None:
    training = Training()
    wanted = root_of(training)
    pending = repo.commit_async(training.state, snapshot="lazy")
    training.model.to(torch.bfloat16)
    for values in training.optim.state.values():
        for value in values.values():
            value.data = torch.zeros(3)
    training.optim.state.clear()
    training.state.clear()
    del training
    held.go_on.set()
    assert pending.result().root == wanted


def test_after_wait_staged_anything_may_be_changed_in_any_way(repo: Repository) -> None:
    training = Training()
    wanted = root_of(training)
    pending = repo.commit_async(training.state, snapshot="lazy")
    assert pending.wait_staged() and pending.staged
    for param in training.model.parameters():
        param.data.zero_()
        param.detach().add_(5)
    assert pending.result().root == wanted


def test_a_state_without_modules_and_optimizers_is_copied_at_the_call(repo: Repository, held: HeldStager) -> None:
    training = Training()
    state = {"model": training.model.state_dict(), "loose": training.loose}
    wanted = new_repo().commit(state).root
    pending = repo.commit_async(state, snapshot="lazy")
    assert pending.staged
    training.step()
    assert pending.result().root == wanted


@pytest.mark.parametrize("staging_bytes", [0, 4096])
def test_where_not_even_what_the_call_copies_fits_all_is_staged_or_saved_by_the_call(
    repo: Repository, staging_bytes: int
) -> None:
    training = Training()
    wanted = root_of(training)
    pending = repo.commit_async(training.state, snapshot="lazy", options=CommitOptions(staging_bytes=staging_bytes))
    assert pending.staged
    for tensor in (training.loose, *training.model.buffers(), *training.model.parameters()):
        tensor.data.zero_()
    assert pending.result().root == wanted
    assert repo._background is not None and repo._background._pool is not None
    assert repo._background._pool.held_bytes <= staging_bytes


@pytest.mark.parametrize("staging_bytes", [0, 4096])
@pytest.mark.parametrize("worker", ["thread", "process"])
def test_where_the_call_stages_all_the_next_step_is_no_change(tmp_path: Path, staging_bytes: int, worker: str) -> None:
    """Nobody waits for the commit or asks it anything before the step, which comes while its packs are written."""
    training = Training()
    with Repository.init(tmp_path / "repo") as repo:
        for _ in range(4):
            wanted = root_of(training)
            pending = repo.commit_async(
                training.state, snapshot="lazy", options=CommitOptions(staging_bytes=staging_bytes), worker=worker
            )
            training.step()
            assert pending.result().root == wanted


def test_a_thread_that_only_looks_whether_all_is_staged_does_not_end_the_watch(
    repo: Repository, held: HeldStager
) -> None:
    training = Training()
    pending = repo.commit_async(training.state, snapshot="lazy")
    assert pending._snapshot is not None
    watch = pending._snapshot.watch
    with repo._turn():
        held.go_on.set()
        looked: list[bool] = []
        in_a_thread(lambda: looked.append(_until(lambda: pending.staged))).join(TIMEOUT_S)
        assert looked == [True] and not watch._is_settled
        with torch.no_grad():
            training.model.first.weight.add_(1)  # ends after that look, as if it had begun before it
    with pytest.raises(StateChangedError, match="first.weight"):
        pending.result()


def _until(true: Callable[[], bool]) -> bool:
    for _ in range(TIMEOUT_S * 100):
        if true():
            return True
        time.sleep(0.01)
    return False


def test_several_commits_wait_for_one_another_and_a_step_for_all_of_them(repo: Repository, held: HeldStager) -> None:
    training = Training()
    wanted, pending = [], []
    for step in range(3):
        training.progress["step"] = step
        wanted.append(root_of(training))
        pending.append(
            repo.commit_async(training.state, step=step, snapshot="lazy", options=CommitOptions(max_in_flight=3))
        )
    stepping = in_a_thread(training.step)
    held.go_on.set()
    stepping.join(TIMEOUT_S)
    assert [each.result().root for each in pending] == wanted
    assert [each.step for each in repo.log("main")] == [2, 1, 0]


# ------------------------------------------------------------ changes that no hook sees


def in_inference_mode(weight: torch.Tensor) -> None:
    with torch.inference_mode():
        weight.mul_(2)


UNSEEN: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda weight: weight.detach().add_(1),
    "one element": lambda weight: weight.detach()[3].__setitem__(4, 7.0),
    "foreach": lambda weight: torch._foreach_mul_([weight.detach()], 2.0),
    "in inference mode": in_inference_mode,
    ".data": lambda weight: weight.data.mul_(2),
    "NumPy": lambda weight: weight.detach().numpy().__imul__(2),
}


@pytest.mark.parametrize("staging_bytes", [None, 70_000])
@pytest.mark.parametrize("name", UNSEEN)
def test_a_change_that_no_hook_sees_fails_the_commit_and_names_the_key(
    repo: Repository, held: HeldStager, name: str, staging_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    first = repo.commit(training.state)
    released = threading.Event()
    if staging_bytes == 70_000:  # then the commit begins beside the stager: let it wait too
        monkeypatch.setattr(commits._Stager, "begin", _begin_held(released))
    pending = repo.commit_async(training.state, snapshot="lazy", options=CommitOptions(staging_bytes=staging_bytes))
    UNSEEN[name](training.model.second.weight)
    released.set()
    held.go_on.set()
    with pytest.raises(StateChangedError, match=r"^model/second\.weight: .*wait_staged"):
        pending.result()
    assert repo.latest() == first
    training.step()
    assert repo.commit_async(training.state, snapshot="lazy").result().root == root_of(training)


def test_a_worker_process_gets_the_state_of_the_call_or_nothing(tmp_path: Path, held: HeldStager) -> None:
    training = Training()
    with Repository.init(tmp_path / "repo") as repo:
        wanted = repo.commit(training.state).root
        pending = repo.commit_async(training.state, snapshot="lazy", worker="process")
        assert not pending.staged
        held.go_on.set()
        training.step()
        made = pending.result()
        assert made.root == wanted

        held.go_on.clear()
        pending = repo.commit_async(training.state, snapshot="lazy", worker="process")
        UNSEEN[".data"](training.model.second.weight)
        held.go_on.set()
        with pytest.raises(StateChangedError, match=r"^model/second\.weight: .*wait_staged"):
            pending.result()
        assert repo.latest() == made


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_a_change_that_is_seen_after_all_was_saved_is_not_published(
    tmp_path: Path, worker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation may begin before the copy and end after it; its version counter moves at the end."""
    training = Training()
    with Repository.init(tmp_path / "repo") as repo:
        first = repo.commit(training.state)
        check = Snapshot.check

        def ends_before(snapshot: Snapshot) -> None:
            with torch.no_grad():
                training.model.second.weight.add_(0)
            check(snapshot)

        monkeypatch.setattr(Snapshot, "check", ends_before)
        pending = repo.commit_async(training.state, snapshot="lazy", worker=worker)
        assert isinstance(pending.exception(TIMEOUT_S), StateChangedError)
        assert repo.latest() == first


@pytest.mark.parametrize("has_started", [False, True])
def test_ctrl_c_while_the_thread_that_copies_starts_holds_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_started: bool
) -> None:
    class Interrupted(commits.Background):
        def wake(self) -> None:
            if has_started:
                super().wake()
            raise KeyboardInterrupt

    training = Training()
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit(training.state)
        with monkeypatch.context() as patched:
            patched.setattr(commits, "Background", Interrupted)
            with pytest.raises(KeyboardInterrupt):
                repo.commit_async(training.state, snapshot="lazy")
        assert repo.drain(TIMEOUT_S)
        assert repo.commit_async(training.state, snapshot="lazy", step=2).result(TIMEOUT_S).step == 2


def test_the_portions_of_many_small_tensors_are_counted_once_each() -> None:
    class Tensor:
        asked = 0

        @property
        def num_bytes(self) -> int:
            Tensor.asked += 1
            return commits.PORTION_BYTES // 1000 + 1

    portions = list(commits._portions([Tensor() for _ in range(3000)]))  # type: ignore[misc]
    assert Tensor.asked == 3000 and sum(map(len, portions)) == 3000 and len(portions) == 3


def _begin_held(released: threading.Event) -> Callable[[Any], None]:
    begin = commits._Stager.begin

    def held(stager: Any) -> None:
        may_begin = stager._may_begin
        stager._may_begin = lambda: in_a_thread(lambda: (released.wait(TIMEOUT_S), may_begin()))
        begin(stager)

    return held


def test_a_step_is_made_though_the_commit_failed(repo: Repository, held: HeldStager) -> None:
    training = Training()
    pending = repo.commit_async(training.state, snapshot="lazy")
    with torch.no_grad():
        training.model.first.weight.add_(1)
    stepping = in_a_thread(training.step)
    held.go_on.set()
    stepping.join(TIMEOUT_S)
    assert training.progress["step"] == 2
    assert isinstance(pending.exception(), StateChangedError)


def test_a_change_that_nobody_asked_about_is_raised_by_the_next_commit(repo: Repository, held: HeldStager) -> None:
    training = Training()
    repo.commit_async(training.state, snapshot="lazy")
    with torch.no_grad():
        training.model.first.weight.add_(1)
    held.go_on.set()
    with pytest.raises(BackgroundCommitError, match="model/first.weight"):
        repo.commit(training.state)


# ------------------------------------------------------------ ends


def test_a_cancelled_commit_lets_the_step_go_on(repo: Repository, held: HeldStager) -> None:
    training = Training()
    pending = repo.commit_async(training.state, snapshot="lazy")
    stepping = in_a_thread(training.step)
    cancelling = in_a_thread(pending.cancel)
    held.go_on.set()
    cancelling.join(TIMEOUT_S)
    stepping.join(TIMEOUT_S)
    assert not stepping.is_alive()
    if pending.cancelled():
        with pytest.raises(CancelledError):
            pending.result()


def test_a_stager_that_fails_fails_the_commit_and_holds_nobody(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(tensors: Any) -> Any:
        raise MemoryError("no")

    training = Training()
    monkeypatch.setattr(commits, "_portions", fails)
    pending = repo.commit_async(training.state, snapshot="lazy")
    training.step()
    with pytest.raises(TooLargeError, match="no memory left"):
        pending.result()


def test_memory_goes_back_only_when_nothing_is_copied_into_it_any_more(repo: Repository, held: HeldStager) -> None:
    training = Training()
    pending = repo.commit_async(training.state, snapshot="lazy")
    snapshot = pending._snapshot
    assert snapshot is not None
    cancelling = in_a_thread(pending.cancel)
    cancelling.join(0.05)
    assert cancelling.is_alive() and snapshot.arenas
    held.go_on.set()
    cancelling.join(TIMEOUT_S)
    assert not snapshot.arenas


def test_memory_into_which_a_copy_goes_on_beside_the_commit_goes_back_when_that_copy_has_ended(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the state does not fit, the commit runs beside the thread that stages, and may end before it."""
    caller, copies = threading.get_ident(), staged.copy_all
    is_copying, go_on = threading.Event(), threading.Event()

    def held(some: Any, **how: Any) -> None:
        if threading.get_ident() != caller:
            is_copying.set()
            assert go_on.wait(TIMEOUT_S)
        copies(some, **how)

    monkeypatch.setattr(staged, "copy_all", held)
    training = Training()
    wanted = root_of(training)
    with held_elsewhere(repo._turn()):  # the commit has to wait
        pending = repo.commit_async(training.state, snapshot="lazy", options=CommitOptions(staging_bytes=70_000))
        snapshot = pending._snapshot
        assert snapshot is not None and is_copying.wait(TIMEOUT_S)
    while repo.latest() is None:
        pass
    with pytest.raises(StillPendingError):
        pending.result(0.1)
    assert snapshot.arenas
    go_on.set()
    assert pending.result().root == wanted
    assert not snapshot.arenas


def test_closing_waits_for_what_is_staged_later(tmp_path: Any) -> None:
    training = Training()
    wanted = root_of(training)
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit_async(training.state, step=3, snapshot="lazy")
    with Repository.open(tmp_path / "repo") as repo:
        made = repo.latest()
        assert made is not None and (made.root, made.step) == (wanted, 3)


def test_a_stager_that_no_thread_can_be_started_for_fails_the_call_and_holds_nobody(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: object) -> None:
        raise RuntimeError("can't start new thread")

    training = Training()
    background = commits.Background
    monkeypatch.setattr(commits, "Background", type("NoThread", (background,), {"wake": fails}))
    with pytest.raises(RuntimeError, match="can't start"):
        repo.commit_async(training.state, snapshot="lazy")
    assert repo.drain(TIMEOUT_S)
    training.step()
    assert repo.latest() is None
