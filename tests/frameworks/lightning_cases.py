"""Trainings by Lightning that tests run, kill and resume: a tiny model with dropout, so that random matters.

Processes are forked from a server that has imported this module: see tests/processes.py.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader

from cas_ckpt import CommitInfo, Repository
from cas_ckpt.integrations.lightning import CasCheckpointIO, CasModelCheckpoint
from cas_ckpt.integrations.lightning_shards import CasShards
from tests import processes

if __name__ not in processes.IMPORTED:
    processes.IMPORTED.append(__name__)
logging.getLogger("lightning").setLevel(logging.ERROR)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")

STEPS = 14  # of five in an epoch: a save each two steps is at times at its end


class Net(LightningModule):
    """With dropout, a scheduler that goes by steps, and hyperparameters whose order matters."""

    def __init__(self, seed: int = 1, sizes: dict[str, int] | None = None) -> None:
        super().__init__()
        sizes = sizes or {"out": 4, "in": 8}
        self.save_hyperparameters(ignore="seed")
        torch.manual_seed(seed)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3))
        self.head = torch.nn.Linear(8, 1)

    def training_step(self, batch: Any, number: int) -> Any:
        loss = (self.head(self.layers(batch)) - batch.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("quality", float(self.global_step // 5 % 2), sync_dist=True)  # the same for two epochs, at times

    def test_step(self, batch: Any, number: int) -> None:
        self.log("height", self.head(self.layers(batch)).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ByEpoch(torch.utils.data.Sampler[int]):
    """An order that follows from the number of the epoch, which Lightning tells when loaders have begun it."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.state = {"epoch": 0, "at": 0}

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.state["epoch"])).tolist()
        while self.state["at"] < self.length:
            self.state["at"] += 1
            yield order[self.state["at"] - 1]

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.state["epoch"]:
            self.state = {"epoch": epoch, "at": 0}

    def state_dict(self) -> dict[str, int]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


def batches(kind: str) -> Any:
    """Batches in an order of each epoch: "plain", from a DataLoader, else from loaders that know where they are."""
    rows = torch.rand(20, 4, generator=torch.Generator().manual_seed(3))
    if kind == "plain":
        return torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)
    if kind == "shuffled":
        return StatefulDataLoader(rows, batch_size=4, shuffle=True)
    return StatefulDataLoader(rows, batch_size=4, sampler=ByEpoch(len(rows)))


def in_order() -> Any:
    """Batches in the order of the data."""
    rows = torch.rand(20, 4, generator=torch.Generator().manual_seed(3))
    return torch.utils.data.DataLoader(rows, batch_size=4)


def trainer_of(folder: Path, *callbacks: Any, **given: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return Trainer(
        **{"max_steps": STEPS, "default_root_dir": folder, "devices": 1, **quiet, **given}, callbacks=list(callbacks)
    )


def train(
    folder: Path,
    *callbacks: Any,
    seed: int = 1,
    data: str = "stateful",
    validate: bool = False,
    path: str = "last",
    trainer: dict[str, Any] | None = None,
    **given: Any,
) -> list[CommitInfo]:
    """Train to the end, from where the repository in `folder` is; all its commits, the newest first."""
    cb = CasModelCheckpoint(folder / "ckpts", **{"every_n_train_steps": 2, "save_top_k": -1, **given})
    fit = trainer_of(folder, *callbacks, cb, **(trainer or {}))
    model = Net(seed)
    seed_everything(5, verbose=False)  # the order of batches, and what is dropped
    fit.fit(model, batches(data), batches("plain") if validate else None, ckpt_path=path)
    with Repository.open(folder / "ckpts", group=None) as repository:
        return repository.log()


class KillAt(Callback):
    """SIGKILL after a step, before a save; or as the save of that step is about to touch a path with this in it."""

    def __init__(self, step: int, path: str | None = None) -> None:
        self.step, self.path, self.armed = step, path, False
        if path is not None:
            sys.addaudithook(self.on_event)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and self.path is None and trainer.is_global_zero:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_save_checkpoint(self, trainer: Trainer, *_: Any) -> None:
        self.armed = trainer.global_step == self.step and trainer.is_global_zero

    def on_event(self, event: str, args: tuple[Any, ...]) -> None:
        touches = self.armed and event in ("open", "os.link", "os.rename")
        if touches and any(str(self.path) in str(arg) for arg in args):
            os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(folder: Path, step: int, path: str | None, given: dict[str, Any]) -> None:
    train(folder, KillAt(step, path), **given)


def save_until_killed(folder: Path) -> None:
    """Two saves to one path, of which the second is committed, and no file says so."""
    io = CasCheckpointIO(folder / "ckpts")
    for number in (1, 2):
        if number == 2:
            killer = KillAt(0, "a.ckpt")
            killer.armed = True
        io.save_checkpoint({"x": torch.full((300,), number)}, folder / "a.ckpt")


# ------------------------------------------------------------ ranks


def train_rank(folder: str, step: int | None, path: str | None, given: dict[str, Any]) -> list[CommitInfo]:
    """A rank of a data-parallel training, as torchrun starts one; rank 0 is killed at `step`."""
    as_torchrun()
    killers = [] if step is None else [KillAt(step, path)]
    trainer = {"strategy": "ddp", "devices": 2, **given.pop("trainer", {})}
    return train(Path(folder), *killers, data="plain", trainer=trainer, **given)


def as_torchrun() -> None:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": "2"})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "1"})


def spawn_and_test(folder: str) -> None:
    """Lightning starts the ranks itself, and hands over the weights; the best checkpoint is read afterwards."""
    cb = CasModelCheckpoint(Path(folder, "ckpts"), every_n_train_steps=3)
    trainer = trainer_of(Path(folder), cb, strategy="ddp_spawn", devices=2, max_steps=6)
    model = Net()
    trainer.fit(model, batches("plain"), ckpt_path="last")
    trained = model.head.weight.clone()
    torch.nn.init.zeros_(model.head.weight)
    alone = trainer_of(Path(folder), cb)
    alone.test(model, batches("plain"), ckpt_path="best")
    assert torch.equal(trained, model.head.weight)


def fail_on_rank_0(folder: str) -> None:
    """A commit fails, and that is to end the training."""
    as_torchrun()
    Path(folder, "ckpts").touch()
    io = CasCheckpointIO(Path(folder, "ckpts"), on_save_error="raise")
    cb = CasModelCheckpoint(io, dirpath=Path(folder, "files"), every_n_train_steps=3)
    trainer_of(Path(folder), cb, strategy="ddp", devices=2, max_steps=3).fit(Net(), batches("plain"))


def fabric_rank(folder: str, steps: int, seed: int) -> list[CommitInfo]:
    """A loop of Fabric's on two ranks, saved every second step."""
    as_torchrun()
    fabric_loop(folder, steps, seed, strategy="ddp", devices=2)
    with Repository.open(Path(folder, "ckpts"), group=None) as repository:
        return repository.log()


def fabric_loop(folder: str, steps: int, seed: int = 1, **given: Any) -> Any:
    fabric = Fabric(accelerator="cpu", plugins=[CasCheckpointIO(Path(folder, "ckpts"))], **given)
    fabric.launch()
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 1)
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    state = {"model": wrapped, "optimizer": optimizer, "step": 0}
    file = Path(folder, "files", "newest.ckpt")
    if file.exists():
        fabric.load(file, state)
    while state["step"] < steps:
        state["step"] += 1
        fabric.backward(wrapped(torch.full((2, 4), float(state["step"]))).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if state["step"] % 2 == 0:
            fabric.save(file, state)
    return model


# ------------------------------------------------------------ shards


class Sharded(Net):
    """Divided over the ranks by FSDP2; batch norm's running averages are not parameters, so it has none."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(seed)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3))

    def configure_model(self) -> None:
        for each in (self.layers, self.head):
            fully_shard(each, mesh=self.device_mesh["data_parallel"])


def train_shards(folder: str, step: int | None, seed: int, epochs: int = 3) -> list[CommitInfo]:
    """A rank of a training by shards, which keeps runs/ckpts."""
    size = torch.distributed.get_world_size()
    as_torchrun()
    os.chdir(folder)
    stopping = EarlyStopping("loss", patience=9)
    callbacks = [CasShards("runs/ckpts", on_save_error="raise"), stopping, *([] if step is None else [KillAt(step)])]
    strategy = ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1)
    given = {"strategy": strategy, "devices": size, "max_epochs": epochs, "max_steps": -1}
    trainer, model = trainer_of(Path(folder), *callbacks, **given), Sharded(seed)
    seed_everything(5, verbose=False)
    trainer.fit(model, batches("plain"))
    assert all(isinstance(each, torch.distributed.tensor.DTensor) for each in model.parameters())
    with Repository.open("runs/ckpts", group=None) as repository:
        return repository.log()
