"""dcp.async_save by threads and by a process; one rank over gloo, as DCP wants a process group for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from cas_ckpt import CommitInfo, CommitOptions, Repository
from cas_ckpt.dcp import CasStorageReader, CasStorageWriter
from cas_ckpt.dcp.group import Save
from cas_ckpt.errors import InvalidInputError
from tests.dcp.states import plain_state, same
from tests.meddling import held_elsewhere
from tests.thread_peers import run_ranks


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_one_rank_over_gloo_saves_and_loads(repo: Repository) -> None:
    writer = CasStorageWriter(repo)
    dcp.save(plain_state(4), storage_writer=writer)
    assert writer.commit is not None and writer.commit.root == repo.commit(plain_state(4)).root
    target = plain_state(0)
    dcp.load(target, storage_reader=CasStorageReader(repo, ref="HEAD~1"))
    assert same(target, plain_state(4))


_STAGES_ONCE = pytest.mark.skipif(
    "2.11" <= torch.__version__ < "2.13", reason="a DefaultStager of torch 2.11 and 2.12 is closed by its first save"
)


@pytest.mark.parametrize("own_stager", [False, pytest.param(True, marks=_STAGES_ONCE)])
def test_each_save_in_the_background_holds_the_values_of_its_call(repo: Repository, own_stager: bool) -> None:
    """A stager that is used again writes into the memory of the save before: that one has to be through."""
    weights = torch.zeros(100_000)
    writer = CasStorageWriter(repo)
    stager = _stager() if own_stager else None
    for step in range(1, 4):
        weights.fill_(step)
        future: Any = dcp.async_save({"w": weights}, storage_writer=writer, async_stager=stager)
        weights.fill_(-1)
        future.result()
        assert writer.commit is not None and writer.commit.id == future.result().storage_meta.save_id
    if stager is not None:
        stager.close()
    values = [repo.read(f"HEAD~{back}", "w", region=99_999).item() for back in (2, 1, 0)]
    assert values == [1, 2, 3]


@pytest.mark.parametrize("save", [dcp.save, lambda *args, **named: dcp.async_save(*args, **named).result()])
def test_a_save_comes_after_the_commits_in_the_background_that_were_begun_before_it(
    repo: Repository, save: Callable[..., Any]
) -> None:
    with held_elsewhere(repo._turn()):  # the commit has to wait
        pending = repo.commit_async({"w": torch.ones(1000)}, step=1)
        writer = CasStorageWriter(repo, step=2)
        saving = _in_a_thread(lambda: save({"w": torch.zeros(1000)}, storage_writer=writer))
        saving.join(0.3)
    saving.join(60)
    pending.result(60)
    assert [commit.step for commit in repo.log()] == [2, 1]
    assert writer.commit is not None and repo.head.commit == writer.commit.id


class _Waits(CasStorageWriter):
    """Lets the test decide when the first write goes on."""

    def __init__(self, repo: Any, **given: Any) -> None:
        super().__init__(repo, **given)
        self.writing, self.go_on = threading.Event(), threading.Event()

    def _commit(self, *args: Any) -> Any:
        self.writing.set()
        assert self.go_on.wait(60)
        return super()._commit(*args)


def _in_a_thread(call: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def _commit(repo: Repository) -> CommitInfo:
    return repo.commit({"w": torch.zeros(9)}, step=2)


def _commit_async(repo: Repository) -> CommitInfo:
    return repo.commit_async({"w": torch.zeros(9)}, step=2).result(60)


def _commit_what_does_not_fit(repo: Repository) -> CommitInfo:
    return repo.commit_async({"w": torch.zeros(400_000)}, step=2, options=CommitOptions(staging_bytes=0)).result(60)


def _commit_in_the_save(repo: Repository) -> CommitInfo:
    return repo.commit({"w": torch.zeros(9)}, step=0)


@pytest.mark.parametrize("commit", [_commit, _commit_async, _commit_what_does_not_fit])
@pytest.mark.parametrize("save_fails", [False, True])
def test_a_commit_comes_after_the_save_in_the_background_that_was_begun_before_it(
    repo: Repository, commit: Callable[[Repository], CommitInfo], save_fails: bool
) -> None:
    repo.commit({"w": torch.ones(1)}, step=0)
    writer = _Waits(repo, step=1)
    state: dict[str, Any] = {"w": torch.ones(1000), **({"f": threading.get_ident} if save_fails else {})}
    saving: Any = dcp.async_save(state, storage_writer=writer)
    assert writer.writing.wait(60)
    made: list[CommitInfo] = []
    thread = _in_a_thread(lambda: made.append(commit(repo)))
    thread.join(0.3)
    assert not made
    writer.go_on.set()
    thread.join(60)
    assert (saving.exception() is not None) == save_fails
    assert [each.step for each in repo.log()] == ([2, 0] if save_fails else [2, 1, 0])
    assert repo.head.commit == made[0].id


def test_closing_and_draining_wait_for_a_save_in_the_background(tmp_path: Path) -> None:
    repo = Repository.init(tmp_path / "repo")
    writer = _Waits(repo)
    saving: Any = dcp.async_save({"w": torch.ones(1000)}, storage_writer=writer)
    assert writer.writing.wait(60)
    assert not repo.drain(timeout_s=0.01)
    thread = _in_a_thread(repo.close)
    thread.join(0.3)
    assert not saving.done()
    writer.go_on.set()
    thread.join(60)
    assert saving.result().storage_meta.save_id == Repository.open(tmp_path / "repo").latest().id


@pytest.mark.parametrize("commit", [_commit_in_the_save, _commit_async, _commit_what_does_not_fit])
def test_a_commit_inside_of_a_save_does_not_wait_for_that_save(
    repo: Repository, commit: Callable[[Repository], CommitInfo]
) -> None:
    repo.commit({"w": torch.ones(1)}, step=0)
    made: list[CommitInfo] = []

    class Commits(DefaultSavePlanner):
        def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
            made.append(commit(repo))
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    saving: Any = dcp.async_save(
        {"w": torch.ones(1000)}, storage_writer=CasStorageWriter(repo, step=3), planner=Commits()
    )
    assert saving.result(60).storage_meta.save_id == repo.latest().id
    assert repo.latest().parents == (made[0].id,)


@pytest.fixture
def somebody_waits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a save waits for one in the background."""
    waits, wait = threading.Event(), Save.wait

    def noted(self: Save, timeout_s: float | None = None) -> bool:
        if timeout_s is None:
            waits.set()
        return wait(self, timeout_s)

    monkeypatch.setattr(Save, "wait", noted)
    return waits


@pytest.mark.parametrize("in_the_background", [True, False])
def test_a_save_waits_for_the_one_before_it_and_both_keep_their_values(
    repo: Repository, somebody_waits: threading.Event, in_the_background: bool
) -> None:
    weights = torch.ones(5000)
    first_writer = _Waits(repo)
    first: Any = dcp.async_save({"w": weights}, storage_writer=first_writer)
    weights.fill_(2)
    assert first_writer.writing.wait(60)
    writer = CasStorageWriter(repo)

    def second() -> None:
        if in_the_background:
            dcp.async_save({"w": weights}, storage_writer=writer).result()  # type: ignore[union-attr]
        else:
            dcp.save({"w": weights}, storage_writer=writer)

    thread = _in_a_thread(second)
    assert somebody_waits.wait(60)
    assert not first.done()
    first_writer.go_on.set()
    thread.join()
    assert [repo.read(ref, "w", region=4999).item() for ref in ("HEAD~1", "HEAD")] == [1, 2]
    assert first.result().storage_meta.save_id == repo.log("main")[1].id and len(repo.log("main")) == 2


def test_a_call_returns_when_the_save_before_it_has_ended_so_that_one_copy_is_held_at_a_time(
    repo: Repository, somebody_waits: threading.Event
) -> None:
    first_writer = _Waits(repo, step=1)
    first: Any = dcp.async_save({"w": torch.ones(5000)}, storage_writer=first_writer)
    assert first_writer.writing.wait(60)
    second: list[Any] = []
    writer = CasStorageWriter(repo, step=2)
    calling = _in_a_thread(lambda: second.append(dcp.async_save({"w": torch.zeros(5000)}, storage_writer=writer)))
    assert somebody_waits.wait(60)
    calling.join(0.3)
    assert not second and not first.done()
    first_writer.go_on.set()
    calling.join(60)
    assert first.done()
    second[0].result()
    assert [commit.step for commit in repo.log()] == [2, 1]


def test_a_save_waits_through_whatever_writer_the_one_before_it_went(
    repo: Repository, somebody_waits: threading.Event
) -> None:
    repo.commit({"w": torch.zeros(1)})
    for writer in (CasStorageWriter(repo), CasStorageWriter(repo, branch="main"), CasStorageWriter(repo.url)):
        first_writer = _Waits(repo)
        first: Any = dcp.async_save({"w": torch.ones(5000)}, storage_writer=first_writer)
        assert first_writer.writing.wait(60)
        thread = _in_a_thread(partial(dcp.save, {"w": torch.zeros(7)}, storage_writer=writer))
        assert somebody_waits.wait(60)
        first_writer.go_on.set()
        thread.join()
        first.result()
        somebody_waits.clear()
    assert [len(repo.load(commit.id)["w"]) for commit in repo.log("main")] == [7, 5000] * 3 + [1]


def test_a_save_to_another_branch_waits_for_nobody(repo: Repository) -> None:
    repo.commit({"w": torch.zeros(1)})
    first_writer = _Waits(repo)
    first: Any = dcp.async_save({"w": torch.ones(5000)}, storage_writer=first_writer)
    assert first_writer.writing.wait(60)
    elsewhere = CasStorageWriter(repo.url, branch="side", orphan=True)
    dcp.async_save({"w": torch.zeros(3)}, storage_writer=elsewhere).result()  # type: ignore[union-attr]
    assert not first.done() and len(repo.log("side")) == 1
    first_writer.go_on.set()
    first.result()


def test_a_save_that_fails_in_the_background_lets_the_next_one_go_on(
    repo: Repository, somebody_waits: threading.Event
) -> None:
    first_writer = _Waits(repo)
    first: Any = dcp.async_save({"f": threading.get_ident}, storage_writer=first_writer)
    assert first_writer.writing.wait(60)
    thread = _in_a_thread(partial(dcp.save, {"w": torch.zeros(7)}, storage_writer=CasStorageWriter(repo)))
    assert somebody_waits.wait(60)
    first_writer.go_on.set()
    thread.join()
    with pytest.raises(CheckpointException, match="UnsupportedValueError"):
        first.result()
    assert same(repo.load("HEAD"), {"w": torch.zeros(7)})


def _stager() -> DefaultStager:
    return DefaultStager(StagingOptions(False, False, False, False))


def test_a_save_that_overlaps_one_with_a_stager_of_the_callers_is_refused_and_disturbs_nothing(
    repo: Repository,
) -> None:
    """DCP tells nobody of it before it comes to the writer, nor when it has ended."""
    first_writer, stager = _Waits(repo), _stager()
    first: Any = dcp.async_save({"w": torch.ones(5000)}, storage_writer=first_writer, async_stager=stager)
    assert first_writer.writing.wait(60)
    for other in (CasStorageWriter(repo), CasStorageWriter(repo, branch="main"), CasStorageWriter(repo.url)):
        with pytest.raises(CheckpointException, match="another save to this branch"):
            dcp.async_save({"w": torch.zeros(5000)}, storage_writer=other).result()  # type: ignore[union-attr]
        with pytest.raises(CheckpointException, match="another save to this branch"):
            dcp.save({"w": torch.zeros(5000)}, storage_writer=other)
    first_writer.go_on.set()
    first.result()
    stager.close()
    dcp.save({"w": torch.zeros(7)}, storage_writer=CasStorageWriter(repo))
    assert [len(repo.load(commit.id)["w"]) for commit in repo.log("main")] == [7, 5000]


class _PlansLater(DefaultSavePlanner):
    """A save that has begun, and comes to its writer when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.begun.set()
        assert self.go_on.wait(60)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


@_STAGES_ONCE
@pytest.mark.parametrize("second_in_the_background", [True, False])
def test_a_save_that_a_later_one_overtook_is_refused(repo: Repository, second_in_the_background: bool) -> None:
    """Its commit would follow the later one's, and be the newest of the branch with the older values."""
    planner, second, stager = _PlansLater(), CasStorageWriter(repo, step=2), _stager()
    first: Any = dcp.async_save(
        {"w": torch.ones(5)}, storage_writer=CasStorageWriter(repo, step=1), planner=planner, async_stager=stager
    )
    assert planner.begun.wait(60)
    if second_in_the_background:
        dcp.async_save({"w": torch.ones(5)}, storage_writer=second).result()  # type: ignore[union-attr]
    else:
        dcp.save({"w": torch.ones(5)}, storage_writer=second)
    planner.go_on.set()
    with pytest.raises(CheckpointException, match="begun later has come first"):
        first.result()
    stager.close()
    dcp.save({"w": torch.ones(5)}, storage_writer=CasStorageWriter(repo, step=3))
    assert [commit.step for commit in repo.log("main")] == [3, 2]


class _ComesLate(CasStorageWriter):
    """Its saves in the background come to it when the test says so, as where DCP starts a process for them first."""

    go_on = threading.Event()

    def storage_meta(self) -> Any:
        assert self.go_on.wait(60)
        return super().storage_meta()


def test_a_save_that_does_not_come_to_its_writer_in_time_is_waited_for_no_longer_and_is_refused(
    repo: Repository,
) -> None:
    """DCP says nowhere that a save failed before it came, such as for want of a process."""
    first: Any = dcp.async_save({"w": torch.ones(5)}, storage_writer=_ComesLate(repo, step=1, timeout_s=0.1))
    dcp.save({"w": torch.ones(5)}, storage_writer=CasStorageWriter(repo, step=2))
    _ComesLate.go_on.set()
    with pytest.raises(CheckpointException, match=r"came to its writer later than 0.1 s"):
        first.result()
    assert [commit.step for commit in repo.log("main")] == [2]


def test_a_save_that_failed_before_it_came_to_the_writer_holds_up_no_other(repo: Repository) -> None:
    writer, other = CasStorageWriter(repo, step=1), CasStorageWriter(repo, step=2)
    failed: Any = dcp.async_save({"a": {"b": 1}, "a.b": 2}, storage_writer=writer)
    with pytest.raises(CheckpointException, match="duplicate"):
        failed.result()
    for each in (other, writer):
        dcp.save({"w": torch.ones(5)}, storage_writer=each)
    assert [commit.step for commit in repo.log("main")] == [1, 2]


def test_a_save_that_failed_in_the_background_leaves_the_turn_free_and_is_logged(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    writer = CasStorageWriter(repo, step=7)
    failed: Any = dcp.async_save({"w": torch.ones(5), "f": threading.get_ident}, storage_writer=writer)
    with pytest.raises(CheckpointException, match="UnsupportedValueError"):
        failed.result()
    assert writer.commit is None
    found = [each for each in caplog.records if each.levelname == "ERROR" and each.name == "cas_ckpt"]
    (line,) = found
    assert "the save of step 7 that dcp.async_save began failed: " in line.message
    assert "UnsupportedValueError" in line.message
    dcp.async_save({"w": torch.ones(5)}, storage_writer=writer).result()  # type: ignore[union-attr]
    assert same(repo.load("HEAD"), {"w": torch.ones(5)})


@pytest.mark.parametrize("wrong", [{"step": "0"}, {"on_conflict": "x"}, {"metrics": {"a": "b"}}, {"branch": "a b"}])
def test_arguments_of_a_writer_are_checked_when_it_is_made(repo: Repository, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(wrong)).removesuffix("s")):
        CasStorageWriter(repo, **wrong)


def test_a_turn_that_nobody_ended_is_lost_with_the_save_though_its_thread_lives_on(repo: Repository) -> None:
    class Fails(DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            raise ZeroDivisionError

    with ThreadPoolExecutor(1) as pool:
        failed = pool.submit(dcp.save, {"w": torch.ones(5)}, storage_writer=CasStorageWriter(repo), planner=Fails())
        with pytest.raises(CheckpointException, match="ZeroDivisionError"):
            failed.result()
        dcp.save({"w": torch.ones(5)}, storage_writer=CasStorageWriter(repo, step=3))
    assert [commit.step for commit in repo.log("main")] == [3]


class _SlowPlanner(DefaultSavePlanner):
    """As of a large state."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        time.sleep(0.1)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


@pytest.mark.parametrize("pause_s", [0, 0.05])
@pytest.mark.parametrize("one_planner", [False, True])
@pytest.mark.parametrize("tag", [None, "final"])
def test_a_writer_may_save_again_at_once_and_each_save_keeps_its_state_and_tag(
    repo: Repository, pause_s: float, one_planner: bool, tag: str | None
) -> None:
    writer, planner = CasStorageWriter(repo), _SlowPlanner()
    weights = torch.ones(1000)
    first: Any = dcp.async_save(
        {"w": weights}, storage_writer=writer, planner=planner, checkpoint_id=None if tag is None else "first"
    )
    time.sleep(pause_s)
    dcp.save(
        {"w": weights + 1}, storage_writer=writer, planner=planner if one_planner else _SlowPlanner(),
        checkpoint_id=tag,
    )  # fmt: skip
    first.result()
    assert [repo.load(each.id)["w"][0].item() for each in repo.log("main")] == [2, 1]
    assert set(repo.tags()) == ({"first", "final"} if tag else set())
    if tag:
        assert [repo.load(name)["w"][0].item() for name in ("first", "final")] == [1, 2]
    dcp.save({"w": weights + 2}, storage_writer=writer)  # without a tag, whatever was given before
    assert len(repo.tags()) == (2 if tag else 0)


def test_a_save_that_is_interrupted_while_it_waits_for_a_commit_tells_no_other_ranks_of_the_repository(
    tmp_path: Path,
) -> None:
    Repository.init(tmp_path / "repo").close()

    def work(peers: Any) -> list[int | None]:
        with Repository.open(tmp_path / "repo", group=peers) as repo:
            repo.commit_async({"w": torch.zeros(1000)}, step=1).result(60)
            if peers.rank == 0:
                assert repo._background is not None
                interrupted = patch.object(repo._background.queue, "drain", side_effect=KeyboardInterrupt)
                with interrupted, pytest.raises(KeyboardInterrupt):
                    CasStorageWriter(repo, no_dist=True).storage_meta()
            for step in (2, 3):
                repo.commit({"w": torch.full((1000,), step)}, step=step)
            return [each.step for each in repo.log("main")]

    assert run_ranks(2, work, timeout_s=20) == [[3, 2, 1]] * 2


def test_a_process_saves_and_tells_the_commit(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second save is begun while the first goes on: DCP's pipe to the process would mix them up."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    writer = CasStorageWriter(repo, message="elsewhere", step=9)
    wanted = [repo.commit(plain_state(seed)).root for seed in (2, 3)]
    futures: list[Any] = []
    state = plain_state(2)
    for seed in (2, 3):
        state.update(plain_state(seed))
        futures.append(
            dcp.async_save(state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS)
        )
    ids = [future.result().storage_meta.save_id for future in futures]
    made = repo.log("main")[:2][::-1]
    assert [(each.id, each.root, each.step) for each in made] == [(ids[0], wanted[0], 9), (ids[1], wanted[1], 9)]
    assert writer.commit is None
    executor._CHECKPOINT_PROCESS = None  # ends the process
