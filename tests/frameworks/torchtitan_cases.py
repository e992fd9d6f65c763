"""Trainings by torchtitan's own Trainer that tests run, kill and resume: a small Llama with noise, on CPUs over gloo.

What torchtitan asks a GPU for (its name, its memory) is answered here. Sharding is that of torchtitan, by FSDP2.
Processes are forked from a server that has imported this module: see tests/processes.py.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torchtitan.distributed.utils
import torchtitan.tools.utils
import torchtitan.trainer
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ConfigManager, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.models.common import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from cas_ckpt import CommitInfo, Repository
from cas_ckpt.integrations.torchtitan import CasCheckpointManager
from tests import processes
from tests.frameworks.programs import program

if __name__ not in processes.IMPORTED:
    processes.IMPORTED.append(__name__)
_CPU = SimpleNamespace(
    set_device=lambda device: None, current_device=lambda: 0, synchronize=lambda *_: None,
    get_device_name=lambda device: "cpu", get_device_properties=lambda device: SimpleNamespace(total_memory=1 << 30),
    reset_peak_memory_stats=lambda *_: None, empty_cache=lambda: None, memory_stats=lambda *_: defaultdict(int),
    manual_seed=torch.manual_seed,
)  # fmt: skip
for _module in [module for name, module in sys.modules.items() if name.startswith("torchtitan")]:
    for _name, _value in (("device_type", "cpu"), ("device_module", _CPU)):
        if hasattr(_module, _name):
            setattr(_module, _name, _value)
torchtitan.distributed.utils.set_pg_timeouts = lambda **_: None  # torch 2.13 has no set_timeout
torchtitan.trainer.time.sleep = lambda seconds: None  # at the end of a training

STEPS = 8


class Tokens(torch.utils.data.IterableDataset[Any]):
    """Rows of tokens without an end, others for each rank."""

    def __init__(self, rank: int, length: int) -> None:
        self.rank, self.length, self.at = rank, length, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            generator = torch.Generator().manual_seed(100 * self.at + self.rank)
            self.at += 1
            row = torch.randint(0, 64, (self.length + 1,), generator=generator)
            yield {"input": row[:-1]}, row[1:]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Loader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """Nothing to choose."""

    def __init__(
        self, config: Config, *, dp_rank: int, dp_world_size: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        super().__init__(Tokens(dp_rank, seq_len), dp_rank, dp_world_size, batch_size=local_batch_size)


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to choose."""

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 64


def for_cpus(config: Trainer.Config, folder: Path, steps: int, **parallel: Any) -> Trainer.Config:
    """`config` with a smaller model, tokens of our own, and without what needs a GPU."""
    spec = config.model_spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:1]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    divide = spec.parallelize_fn

    def parallelize(model: Any, **given: Any) -> Any:
        model = divide(model, **given)
        for each in model.modules():
            if isinstance(each, FSDPModule):
                each.set_force_sum_reduction_for_comms(True)  # gloo has no other
        return model

    spec.parallelize_fn = parallelize
    config.dump_folder, config.hf_assets_path = str(folder / "outputs"), str(folder)
    config.loss = CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size)
    config.dataloader, config.tokenizer = Loader.Config(), NoTokenizer.Config()
    config.optimizer = default_adamw(lr=1e-2)
    config.optimizer.implementation = "for-loop"
    config.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=2, total_steps=STEPS)
    config.training = TrainingConfig(
        local_batch_size=2, seq_len=8, steps=steps, disable_cuda_graphs=True, mixed_precision_param="float32"
    )
    config.parallelism = ParallelismConfig(spmd_backend="partial_dtensor", **parallel)
    config.debug = DebugConfig(seed=1, enable_structured_logging=False)
    config.metrics.log_freq = 100
    return config


def trainer_of(
    folder: Path, *, steps: int = STEPS, config: Trainer.Config | None = None, parallel: dict[str, Any] | None = None,
    checkpoint: BaseCheckpointManager.Config | None = None, **given: Any,
) -> Any:  # fmt: skip
    """A Trainer that saves each second step to the repository in `folder`; `given` are settings of its checkpoints."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)})
    random.seed(1)  # torchtitan seeds torch alone
    np.random.seed(1)
    saving = {"enable": True, "repository": str(folder / "ckpts"), "interval": 2, "last_save_model_only": False}
    config = config or Trainer.Config(checkpoint=checkpoint or CasCheckpointManager.Config(**{**saving, **given}))
    trainer = for_cpus(config, folder, steps, **(parallel or {})).build()
    for part in trainer.model_parts:
        if part.tok_embeddings is not None:  # stages of a pipeline after the first have none
            part.tok_embeddings.register_forward_hook(lambda _, __, out: out + 0.1 * torch.rand_like(out))
    return trainer


class KillAt:
    """SIGKILL of rank 0 before the save of a step; or as that save is about to touch a path with this in it."""

    def __init__(self, step: int, path: str | None = None) -> None:
        self.step, self.path, self.armed = step, path, False

    def watch(self, trainer: Any) -> None:
        save: Callable[..., bool] = trainer.checkpointer.save

        def watched(step: int, last_step: bool = False) -> bool:
            if step == self.step and self.path is None:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == self.step:
                pending = trainer.checkpointer.save_future
                if pending is not None:  # what was saved before is to be whole
                    pending.exception()
                self.armed = True
            return save(step, last_step=last_step)

        trainer.checkpointer.save = watched
        sys.addaudithook(self.on_event)

    def on_event(self, event: str, args: tuple[Any, ...]) -> None:
        touches = self.path is not None and self.armed and event in ("open", "os.link", "os.rename")
        if touches and any(str(self.path) in str(arg) for arg in args):
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    folder: str, kill_at: tuple[int, str | None] | None = None, given: dict[str, Any] | None = None
) -> list[CommitInfo]:
    """Train to the end, from where the repository in `folder` is; all its commits, the newest first."""
    trainer = trainer_of(Path(folder), **(given or {}))
    if kill_at is not None and dist.get_rank() == 0:
        KillAt(*kill_at).watch(trainer)
    trainer.train()
    trainer.close()
    with Repository.open(Path(folder) / "ckpts", group=None) as repository:
        return repository.log()


def train_into_failure(folder: str, on_save_error: str, async_mode: str) -> tuple[Any, ...]:
    """From step 4 on nothing can be committed: the last error, the last step that was committed, what was logged."""
    told: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.ERROR:
                told.append(record.getMessage())

    logging.getLogger("cas_ckpt").addHandler(Listener())
    trainer = trainer_of(Path(folder), on_save_error=on_save_error, async_mode=async_mode)
    manager = trainer.checkpointer
    save: Callable[..., bool] = manager.save

    def watched(step: int, last_step: bool = False) -> bool:
        if step == 4:
            manager.maybe_wait_for_saving()
            (Path(folder) / "ckpts").rename(Path(folder) / "lost")
        return save(step, last_step=last_step)

    manager.save = watched
    trainer.train()
    trainer.close()
    (Path(folder) / "lost").rename(Path(folder) / "ckpts")
    return type(manager.last_error).__name__, manager.last_commit.step, trainer.step, told


def load_and_look(folder: str, given: dict[str, Any]) -> tuple[Any, ...]:
    """Load as training does, and go no further: whether there was something, and what the training has then."""
    trainer = trainer_of(Path(folder), **given)
    manager = trainer.checkpointer
    rng = torch.get_rng_state()
    found = manager.load(trainer.config.checkpoint.load_step)
    weights = {name: value for part in trainer.model_parts for name, value in part.state_dict().items()}
    weights = {name: getattr(value, "full_tensor", value.clone)() for name, value in weights.items()}
    kept_rng = torch.equal(rng, torch.get_rng_state())
    next(iter(trainer.dataloader))
    at = trainer.dataloader.dataset.at
    trainer.close()
    return found, trainer.step, trainer.lr_schedulers.schedulers[0].last_epoch, at, kept_rng, weights


def save_once(folder: str, step: int, last_step: bool, given: dict[str, Any]) -> bool:
    """Save what was not trained yet, as `create_seed_checkpoint` does for step 0."""
    trainer = trainer_of(Path(folder), **given)
    trainer.step = step
    saved: bool = trainer.checkpointer.save(step, last_step=last_step)
    trainer.close()
    return saved


def train_by_files(folder: str, steps: int) -> None:
    """By torchtitan's own manager of checkpoints."""
    own = CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False)
    trainer = trainer_of(Path(folder), steps=steps, checkpoint=own)
    trainer.train()
    trainer.close()


def errors_of(folder: str, *each: dict[str, Any]) -> list[tuple[str, str]]:
    """Class and message of what making a Trainer and loading raises, with each of the settings."""
    return [_error_of(folder, given) for given in each]


def _error_of(folder: str, given: dict[str, Any]) -> tuple[str, str]:
    try:
        trainer = trainer_of(Path(folder), **given)
        trainer.checkpointer.load(trainer.config.checkpoint.load_step)
    except Exception as error:  # noqa: BLE001 - whatever a user would see
        return type(error).__name__, str(error)
    return "", ""


def parse(arguments: list[str]) -> BaseCheckpointManager.Config:
    """The settings of checkpoints that torchtitan makes of a command line."""
    found: BaseCheckpointManager.Config = ConfigManager().parse_args(arguments).checkpoint
    return found


exec(program("torchtitan"))  # llama3_committed, a configuration that a command line names
