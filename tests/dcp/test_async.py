"""dcp.async_save by threads and by a process; one rank over gloo, as DCP wants a process group for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from cas_ckpt import Repository
from cas_ckpt.dcp import CasStorageReader, CasStorageWriter
from cas_ckpt.errors import ConflictError
from cas_ckpt.training.dcp_group import Turn
from tests.dcp.states import plain_state, same


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with Repository.init(tmp_path / "repo") as opened:
        yield opened


def test_one_rank_over_gloo_saves_and_loads(repo: Repository) -> None:
    writer = CasStorageWriter(repo)
    dcp.save(plain_state(4), storage_writer=writer)
    assert writer.commit is not None and writer.commit.root == repo.commit(plain_state(4)).root
    target = plain_state(0)
    dcp.load(target, storage_reader=CasStorageReader(repo, ref="HEAD~1"))
    assert same(target, plain_state(4))


@pytest.mark.parametrize("own_stager", [False, True])
def test_each_save_in_the_background_holds_the_values_of_its_call(repo: Repository, own_stager: bool) -> None:
    """A stager that is used again writes into the memory of the save before: that one has to be through."""
    weights = torch.zeros(100_000)
    writer = CasStorageWriter(repo)
    stager = DefaultStager(StagingOptions(False, False, False, False)) if own_stager else None
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


class _Waits(CasStorageWriter):
    """Lets the test decide when the first write goes on."""

    def __init__(self, repo: Repository) -> None:
        super().__init__(repo)
        self.writing, self.go_on = threading.Event(), threading.Event()

    def _commit(self, *args: Any) -> Any:
        self.writing.set()
        assert self.go_on.wait(60)
        return super()._commit(*args)


def test_a_save_that_overlaps_another_is_refused_and_disturbs_nothing(repo: Repository) -> None:
    writer = _Waits(repo)
    first: Any = dcp.async_save({"w": torch.ones(5000)}, storage_writer=writer)
    assert writer.writing.wait(60)
    with pytest.raises(CheckpointException, match="another save through this writer"):
        dcp.async_save({"w": torch.zeros(5000)}, storage_writer=writer).result()  # type: ignore[union-attr]
    with pytest.raises(CheckpointException, match="another save through this writer"):
        dcp.save({"w": torch.zeros(5000)}, storage_writer=writer)
    writer.go_on.set()
    first.result()
    dcp.save({"w": torch.zeros(7)}, storage_writer=writer)
    assert same(repo.load("HEAD~1"), {"w": torch.ones(5000)}) and same(repo.load("HEAD"), {"w": torch.zeros(7)})
    assert len(repo.log("main")) == 2


def test_a_save_that_failed_in_the_background_leaves_the_turn_free(repo: Repository) -> None:
    writer = CasStorageWriter(repo)
    failed: Any = dcp.async_save({"w": torch.ones(5), "f": threading.get_ident}, storage_writer=writer)
    with pytest.raises(CheckpointException, match="UnsupportedValueError"):
        failed.result()
    assert writer.commit is None
    dcp.async_save({"w": torch.ones(5)}, storage_writer=writer).result()  # type: ignore[union-attr]
    assert same(repo.load("HEAD"), {"w": torch.ones(5)})


def test_a_turn_that_nobody_ended_is_lost_with_its_thread() -> None:
    turn = Turn()
    planner = threading.Thread(target=turn.plan)
    planner.start()
    planner.join()
    turn.plan()
    turn.plan()  # planned again by the same thread: the first plan failed elsewhere
    with turn.writing():
        turn.leave()


@pytest.mark.parametrize("phase", ["plan", "write"])
def test_while_one_thread_has_the_turn_another_is_refused(phase: str) -> None:
    turn, begun, done = Turn(), threading.Event(), threading.Event()

    def hold() -> None:
        turn.plan()
        with turn.writing() if phase == "write" else nullcontext():
            begun.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert begun.wait(60)
    with pytest.raises(ConflictError, match="wait for its future first"):
        turn.plan()
    if phase == "write":
        with pytest.raises(ConflictError, match="wait for its future first"), turn.writing():
            pytest.fail("two at once")
    done.set()
    holder.join()
    turn.plan()


def test_a_process_saves_and_tells_the_commit(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    writer = CasStorageWriter(repo, message="elsewhere", step=9)
    wanted = repo.commit(plain_state(2)).root
    for _ in range(2):
        future: Any = dcp.async_save(
            plain_state(2), storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS
        )
        metadata = future.result()
        made = repo.log("main")[0]
        assert (made.id, made.root, made.step) == (metadata.storage_meta.save_id, wanted, 9)
        assert writer.commit is None
    executor._CHECKPOINT_PROCESS = None  # ends the process
