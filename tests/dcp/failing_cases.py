"""What the processes of test_failing_ranks.py do; each function runs on every rank and returns what it saw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException

from cas_ckpt.dcp import CasStorageWriter
from cas_ckpt.errors import PeerError

VICTIM = 1


def state() -> dict[str, Any]:
    return {"w": torch.arange(3000.0), "b": torch.ones(7), "epoch": 3}


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


def a_rank_comes_late(place: str) -> tuple[str, str]:
    """One rank comes to a save when all others have given up on it; the next save needs nothing from anybody."""
    others = [rank for rank in range(dist.get_world_size()) if rank != VICTIM]

    def wait_for_the_others() -> None:
        planner.on_resolve = None
        _store().wait([f"gave up/{rank}" for rank in others])

    planner = Meets()
    planner.on_resolve = wait_for_the_others
    CasStorageWriter(place, timeout_s=4)  # connects
    with pytest.raises(CheckpointException) as told:
        dcp.save(state(), storage_writer=SaysThatItGaveUp(place, timeout_s=4), planner=planner)
    writer = CasStorageWriter(place, timeout_s=4)
    dcp.save(state(), storage_writer=writer)
    return str(told.value), writer.commit.root if writer.commit else ""
