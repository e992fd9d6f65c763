"""What the processes of test_failing_ranks.py do; each function runs on every rank and returns what it saw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException

from cas_ckpt.clock import monotonic_s
from cas_ckpt.dcp import CasStorageWriter
from cas_ckpt.errors import PeerError
from tests.ranks import die

VICTIM = 1
Told = tuple[str, tuple[int, ...], float]


def state() -> dict[str, Any]:
    return {"w": torch.arange(3000.0), "b": torch.ones(7), "epoch": 3}


class FailsInFinish(DefaultSavePlanner):
    def finish_plan(self, new_plan: Any) -> Any:
        if dist.get_rank() == VICTIM:
            raise ValueError("no plan today")
        return super().finish_plan(new_plan)


class Meets(DefaultSavePlanner):
    """What one rank does when its data is asked for."""

    on_resolve: Callable[[], None] | None = None

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == VICTIM and self.on_resolve is not None:
            self.on_resolve()
        return super().resolve_data(write_item)


class SaysThatItGaveUp(CasStorageWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except PeerError:
            _store().set(f"gave up/{dist.get_rank()}", "")
            raise


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def a_planner_raises(place: str) -> tuple[Told, str, str]:
    """In finish_plan, on one rank; then the next save, and the same planner with another writer."""
    planner = FailsInFinish()
    told = error_of(lambda: dcp.save(state(), storage_writer=CasStorageWriter(place, timeout_s=60), planner=planner))
    writer = CasStorageWriter(place, timeout_s=60)
    dcp.save(state(), storage_writer=writer)
    elsewhere = dcp.FileSystemWriter(place + "-files")
    other = error_of(lambda: dcp.save(state(), storage_writer=elsewhere, planner=planner))
    dcp.save(state(), storage_writer=writer)
    assert "finish_plan" not in vars(planner)
    return told, writer.commit.root if writer.commit else "", other[0]


def a_rank_comes_late(place: str) -> tuple[Told, str]:
    """One rank comes to a save when all others have given up on it; the next save needs nothing from anybody."""
    others = [rank for rank in range(dist.get_world_size()) if rank != VICTIM]

    def wait_for_the_others() -> None:
        planner.on_resolve = None
        _store().wait([f"gave up/{rank}" for rank in others])

    planner = Meets()
    planner.on_resolve = wait_for_the_others
    CasStorageWriter(place, timeout_s=4)  # connects
    told = error_of(lambda: dcp.save(state(), storage_writer=SaysThatItGaveUp(place, timeout_s=4), planner=planner))
    writer = CasStorageWriter(place, timeout_s=4)
    dcp.save(state(), storage_writer=writer)
    return told, writer.commit.root if writer.commit else ""


def a_rank_is_killed(place: str) -> Told:
    """While its data is asked for; the others must not wait in DCP's own gather."""
    planner = Meets()
    planner.on_resolve = die
    return error_of(lambda: dcp.save(state(), storage_writer=CasStorageWriter(place, timeout_s=60), planner=planner))


def error_of(work: Callable[[], object]) -> Told:
    """What dcp.save raised: text, blamed ranks where it says so, seconds."""
    began_s = monotonic_s()
    try:
        work()
    except CheckpointException as error:
        return str(error), (), monotonic_s() - began_s
    except PeerError as error:
        return f"PeerError: {error}", error.ranks, monotonic_s() - began_s
    return "", (), monotonic_s() - began_s
