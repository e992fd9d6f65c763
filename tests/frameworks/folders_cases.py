"""Trainings that write checkpoints of their own framework, and resume from such a folder: what each rank ends with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def _net(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))


def _batch(step: int) -> torch.Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.rand(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def torch_checkpointing(folder: str, resume: bool, seed: int) -> list[float]:
    """Three steps after the checkpoint that is made by the first one, or that is there; divided where there are ranks.

    torch_checkpointing 0.1.1 gathers its metadata over CUDA: here it is answered by the CPU.
    """
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    model = _net(seed)
    if dist.is_initialized():
        for name in ("tensor", "empty", "zeros"):
            setattr(torch, name, _on_host(getattr(torch, name)))
        torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    resharding = ItemSpec(resharder=DefaultResharder())
    config = CheckpointManager.Config(
        items={"model": resharding, "optimizer": resharding}, save=SyncCheckpointSaverConfig(),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    )  # fmt: skip
    manager = CheckpointManager(config)
    place = {"step": 0, "noise": torch.zeros(3)}
    if resume:
        weights, states = get_state_dict(model, optim)
        into = {"model": weights, "optimizer": states, "place": place}
        found = manager.load(folder, into=into, strict=True)
        place = found["place"]
        set_state_dict(model, optim, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    losses: list[float] = []
    while place["step"] < 4:
        place["step"] += 1
        loss = (model(_batch(place["step"])) + place["noise"].sum()).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
        if place["step"] == 1:
            place["noise"] = torch.full((3,), float(dist.get_rank() + 1 if dist.is_initialized() else 1))
            weights, states = get_state_dict(model, optim)
            manager.save(folder, {"model": weights, "optimizer": states, "place": place})
    manager.close()
    return losses[-3:]


def _on_host(make: Any) -> Any:
    def made(*args: Any, **given: Any) -> Any:
        return make(*args, **{**given, **({"device": "cpu"} if given.get("device") is not None else {})})

    return made


def deepspeed(folder: str, resume: bool, seed: int, stage: int, dtype: str) -> list[float]:
    """As `torch_checkpointing`, by an engine of DeepSpeed with ZeRO of a stage."""
    deepspeed = _deepspeed()
    model = _net(seed)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False, "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype == "bf16"},
    }  # fmt: skip
    schedule = torch.optim.lr_scheduler.StepLR(optim, 2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optim, lr_scheduler=schedule, config=config)
    if resume:
        assert engine.load_checkpoint(folder)[1]["mine"] == 7
    losses: list[float] = []
    while engine.global_steps < 4:
        data = _batch(engine.global_steps)
        loss = engine(data.to(next(engine.module.parameters()).dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if engine.global_steps == 1:
            engine.save_checkpoint(folder, client_state={"mine": 7})
    return losses[-3:]


def trainer_over_deepspeed(folder: str, resume: str | None, seed: int) -> dict[str, torch.Tensor]:
    """Four steps by transformers.Trainer over DeepSpeed, from the beginning or a checkpoint; the weights."""
    deepspeed = _deepspeed()
    deepspeed.init_distributed("gloo")
    from transformers import Trainer, TrainingArguments

    from tests.frameworks.hf_cases import Sentences, gpt2

    config = {
        "train_micro_batch_size_per_gpu": "auto", "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False, "zero_optimization": {"stage": 2},
    }  # fmt: skip
    given: dict[str, Any] = {"deepspeed": config, "optim": "adamw_torch", "report_to": "none", "seed": 7}
    args = TrainingArguments(folder, max_steps=4, save_steps=2, per_device_train_batch_size=4, **given)
    trainer = Trainer(gpt2(seed), args, train_dataset=Sentences())
    trainer.train(resume_from_checkpoint=resume)
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def _deepspeed() -> Any:
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update({"DS_ACCELERATOR": "cpu", "LOCAL_RANK": rank, "RANK": rank, "WORLD_SIZE": size})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0"})
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, which takes minutes
    return deepspeed


def lightning_shards(folder: str, resume: str | None, seed: int) -> dict[str, torch.Tensor]:
    """Three epochs by a Trainer that divides the model, from the beginning or a folder; the weights."""
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy

    from tests.frameworks.lightning_cases import Sharded, as_torchrun, in_order, trainer_of

    as_torchrun()
    saves = ModelCheckpoint(folder, every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = trainer_of(Path(folder), saves, strategy=strategy, devices=2, max_epochs=3, max_steps=-1)
    model = Sharded(seed)
    model.layers[1] = torch.nn.Identity()
    trainer.fit(model, in_order(), ckpt_path=resume)
    return {name: value.full_tensor() for name, value in model.state_dict().items()}
