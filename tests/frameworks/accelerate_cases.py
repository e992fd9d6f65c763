"""Loops over Accelerate that tests run, kill and resume; the model has dropout, so that random states matter."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.distributed.tensor
from accelerate import Accelerator, PartialState
from accelerate.utils import DataLoaderConfiguration, DistributedType, FullyShardedDataParallelPlugin, set_seed
from torch.utils.data import DataLoader, TensorDataset

from cas_ckpt import CommitInfo
from cas_ckpt.integrations.accelerate import CasCheckpoints
from tests import processes

if __name__ not in processes.IMPORTED:
    processes.IMPORTED.append(__name__)

EPOCHS = 2


def prepared(seed: int = 1, *, sharded: bool = False, **options: Any) -> tuple[Any, ...]:
    """An Accelerator, and what it prepared: model, optimizer, loader of 6 batches in all, scheduler.

    Accelerate decides for FSDP on accelerators only; all that follows works on ranks of a CPU, too.
    """
    set_seed(seed)
    loading = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7)
    accelerator = Accelerator(cpu=True, dataloader_config=loading, **options)
    if sharded:
        os.environ.update({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"})
        accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, reshard_after_forward=True, cpu_offload=False, auto_wrap_policy="no_wrap"
        )
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = TensorDataset(torch.arange(96.0).reshape(24, 4) / 96)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    return (accelerator, *accelerator.prepare(model, optimizer, loader, scheduler))


def train(
    folder: Path, kill_at: int | None = None, seed: int = 1, *, kill_in: str = "", sharded: bool = False
) -> list[CommitInfo]:
    """Train to the end from where the repository in `folder` is; a commit every two steps.

    Args:
        kill_at: SIGKILL after this step, on one rank.
        kill_in: Only as the commit after that step is about to touch a path with this in it.
    """
    accelerator, model, optimizer, loader, scheduler = prepared(seed, sharded=sharded)
    assert sharded == isinstance(next(model.parameters()), torch.distributed.tensor.DTensor)
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    checkpoints = CasCheckpoints(accelerator, folder / "ckpts", on_save_error="raise", **objects)
    with checkpoints.repository as repo:
        step = checkpoints.resume()
        for epoch in range(step // len(loader), EPOCHS):
            for (batch,) in checkpoints.batches(loader, epoch):
                with accelerator.accumulate(model):
                    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                step += 1
                if step == kill_at and accelerator.is_main_process:
                    sys.addaudithook(lambda event, args: die() if kill_in and kill_in in str(args) else None)
                    if not kill_in:
                        die()
                if step % 2 == 0:
                    checkpoints.save(step)
        return repo.log()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_rank(folder: str, kill_at: int | None, seed: int, kill_in: str, sharded: bool) -> list[CommitInfo]:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": "2"})
    return train(Path(folder), kill_at, seed, kill_in=kill_in, sharded=sharded)


class Odd:
    """An object of a user whose state cannot be had on one rank."""

    is_fine = False

    def state_dict(self) -> dict[str, int]:
        if torch.distributed.get_rank() == 1 and not self.is_fine:
            raise ValueError("sorry")
        return {"x": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def fail_on_one_rank(folder: str) -> list[str]:
    rank = torch.distributed.get_rank()
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    accelerator, model, *_ = prepared()
    checkpoints = CasCheckpoints(accelerator, Path(folder) / "ckpts", model=model, odd=Odd())
    assert checkpoints.save(1) is None
    errors = [type(checkpoints.last_error).__name__]
    Odd.is_fine = True
    saved = checkpoints.save(2)
    assert saved is not None and saved.step == 2 and checkpoints.last_error is None
    return errors
