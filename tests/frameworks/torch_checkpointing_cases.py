"""Trainings that save by a manager of checkpoints, that of torch_checkpointing or ours, and are killed."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder

from cas_ckpt import CommitInfo, NotFoundError, Repository
from cas_ckpt.integrations.torch_checkpointing import CasCheckpointManager
from tests import processes

if __name__ not in processes.IMPORTED:
    processes.IMPORTED.append(__name__)

STEPS = 6


def config(*, asynchronous: bool = False) -> CheckpointManager.Config:
    resharding = ItemSpec(resharder=DefaultResharder())
    saver = AsyncCheckpointSaverConfig() if asynchronous else SyncCheckpointSaverConfig()
    return CheckpointManager.Config(items={"model": resharding, "optimizer": resharding}, save=saver)


def train(folder: str, kill_at: tuple[int, str | None] | None = None, asynchronous: bool = False) -> list[CommitInfo]:
    """Train, dividing the model over the ranks if there are several; all commits, the newest first.

    Args:
        kill_at: SIGKILL of rank 0 before the save of this step, or as that save is about to touch a path.
    """
    random.seed(1)
    np.random.seed(1)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1))
    if size > 1:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    place = {"at": rank}
    manager = CasCheckpointManager(Path(folder) / "ckpts", config(asynchronous=asynchronous), on_save_error="raise")
    step = 0
    for saved in range(STEPS, 0, -1):
        weights, states = get_state_dict(model, optimizer)
        try:
            found = manager.load(
                f"step_{saved}", into={"model": weights, "optimizer": states, "step": 0, "place": place}, strict=True
            )
        except NotFoundError:
            continue
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        step, place = found["step"], found["place"]
        break
    killer = KillAt(kill_at[1]) if kill_at is not None and rank == 0 else None
    while step < STEPS:
        step += 1
        place["at"] += 2
        data = torch.rand(4, 8, generator=torch.Generator().manual_seed(place["at"]))
        model(data).square().mean().backward()
        with manager.lock():
            optimizer.step()
        optimizer.zero_grad()
        if killer is not None and kill_at is not None and step == kill_at[0]:
            killer.arm()
        if step % 2 == 0:
            weights, states = get_state_dict(model, optimizer)
            manager.save(f"step_{step}", {"model": weights, "optimizer": states, "step": step, "place": place})
    manager.close()
    with Repository.open(Path(folder) / "ckpts", group=None) as repository:
        return repository.log()


def load_anew(folder: str) -> str:
    """Load what fewer ranks had for themselves as new objects; the error that each rank gets."""
    manager = CasCheckpointManager(Path(folder) / "ckpts")
    try:
        manager.load(f"step_{STEPS}", into={"place": None})
    except Exception as error:  # noqa: BLE001 - whatever a user would see
        return f"{type(error).__name__}: {error}"
    finally:
        manager.close()
    return ""


class KillAt:
    def __init__(self, path: str | None) -> None:
        self.path = path

    def arm(self) -> None:
        if self.path is None:
            os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(self.on_event)

    def on_event(self, event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.link", "os.rename") and any(str(self.path) in str(arg) for arg in args):
            os.kill(os.getpid(), signal.SIGKILL)
