"""Folders as the Trainer of Hugging Face and Accelerate lay them out, written with torch.save and safetensors.

Neither is a dependency: what they save, and under which names, is repeated here.
"""

from __future__ import annotations

import enum
import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file


class TrainingArguments:
    """Stands for the class of Hugging Face's trainer: training_args.bin is a pickle of one."""


def stepped() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    """A model, its optimizer and a scheduler after one step."""
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 2))
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 10)
    model(torch.randn(4, 40)).sum().backward()
    optim.step()
    scheduler.step()
    return model, optim, scheduler


def trainer_rng() -> dict[str, Any]:
    """What `Trainer._save_rng_state` saves."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}


def accelerate_rng() -> dict[str, Any]:
    """What `save_accelerator_state` saves of the random states."""
    return {
        "step": 0, "random_state": random.getstate(), "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(), "torch_cuda_manual_seed": [torch.arange(16, dtype=torch.uint8)],
    }  # fmt: skip


def trainer_folder(folder: Path, *, ranks: int = 1, with_arguments: bool = True) -> dict[str, Any]:
    """`checkpoint-500` of a Trainer; what it holds, by file."""
    folder.mkdir()
    model, optim, scheduler = stepped()
    content: dict[str, Any] = {
        "optimizer.pt": optim.state_dict(),
        "scheduler.pt": scheduler.state_dict(),
        "scaler.pt": {"scale": 65536.0, "growth_factor": 2.0, "_growth_tracker": 3},
    }
    for rank in range(ranks):
        content["rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth"] = trainer_rng()
        random.random(), np.random.rand(), torch.rand(1)
    for name, value in content.items():
        torch.save(value, folder / name)
    content["model.safetensors"] = model.state_dict()
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text('{"hidden_size": 30}')
    (folder / "trainer_state.json").write_text('{"global_step": 500, "log_history": []}')
    if with_arguments:
        torch.save(TrainingArguments(), folder / "training_args.bin")
    return content


def accelerate_folder(folder: Path) -> dict[str, Any]:
    """What `Accelerator.save_state` leaves for two models on two ranks; what it holds, by file."""
    folder.mkdir()
    models = [stepped(), stepped()]
    content: dict[str, Any] = {
        "optimizer.bin": models[0][1].state_dict(),
        "optimizer_1.bin": models[1][1].state_dict(),
        "scheduler.bin": models[0][2].state_dict(),
        "scaler.pt": {"scale": 65536.0},
        "sampler.bin": {"epoch": 3, "initial_seed": 17},
        "dl_state_dict.bin": {"_num_yielded": 12},
        "random_states_0.pkl": accelerate_rng(),
        "random_states_1.pkl": accelerate_rng(),
        "custom_checkpoint_0.pkl": {"tokens": 1000, "curve": np.linspace(0, 1, 50), "best": np.float32(0.25)},
    }
    for name, value in content.items():
        torch.save(value, folder / name)
    for name, (model, _, _) in zip(("model.safetensors", "model_1.safetensors"), models, strict=True):
        content[name] = model.state_dict()
        save_file(model.state_dict(), folder / name, metadata={"format": "pt"})
    return content


# --- DeepSpeed ------------------------------------------------------------------------------


class DynamicLossScaler:
    """Stands for DeepSpeed's."""

    def __init__(self, init_scale: float) -> None:
        self.cur_scale, self.scale_window, self.dynamic = init_scale, 1000, True


@dataclass
class fragment_address:  # noqa: N801
    """Likewise."""

    numel: int
    start: int


class ZeroStageEnum(int, enum.Enum):
    """Likewise."""

    gradients = 2


_HOMES = {
    "deepspeed.runtime.fp16.loss_scaler": DynamicLossScaler, "deepspeed.utils.tensor_fragment": fragment_address,
    "deepspeed.runtime.zero.config": ZeroStageEnum,
}  # fmt: skip


@contextmanager
def deepspeeds_classes() -> Iterator[None]:
    """Its classes are where its files say that they are."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "deepspeed"}
    sys.modules.update({name: ModuleType(name) for name in ("deepspeed", *_HOMES)})
    for name, home in _HOMES.items():
        home.__module__ = name
        setattr(sys.modules[name], home.__name__, home)
    try:
        yield
    finally:
        for name in ("deepspeed", *_HOMES):
            del sys.modules[name]
        sys.modules.update(before)


def deepspeed_folder(folder: Path) -> None:
    """What `engine.save_checkpoint` of two ranks leaves with ZeRO of stage 2, beside other files that may be there."""
    (folder / "global_step3").mkdir(parents=True)
    model, optim, scheduler = stepped()
    shapes = [{name: value.shape for name, value in model.named_parameters()}]
    model_states = {"module": model.state_dict(), "param_shapes": shapes, "lr_scheduler": scheduler.state_dict()}
    with deepspeeds_classes():
        torch.save(model_states, folder / "global_step3" / "mp_rank_00_model_states.pt")
        for rank in range(2):
            state = {
                "loss_scaler": DynamicLossScaler(2.0**rank), "zero_stage": ZeroStageEnum.gradients,
                "param_slice_mappings": [{"0.weight": fragment_address(30, rank)}],
                "single_partition_of_fp32_groups": [torch.randn(3000)], "base_optimizer_state": optim.state_dict(),
            }  # fmt: skip
            name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": state, "ds_version": "0.19.8"}, folder / "global_step3" / name)
    (folder / "latest").write_text("global_step3")
    (folder / "zero_to_fp32.py").write_text("print()")


# --- torch_checkpointing --------------------------------------------------------------------


def torch_checkpointing_folder(folder: Path) -> None:
    """What a `CheckpointManager` of two ranks leaves of items with and without a resharder."""
    folder.mkdir()
    sharding = {"metadata": {"model": {"nested": {'["w"]': [{"global_shape": [4], "ranks": (0, 1)}]}}}, "world_size": 2}
    (folder / "metadata.pkl").write_bytes(pickle.dumps({**sharding, "rank_to_layout_info": {0: None}}, protocol=4))
    for rank in range(2):
        torch.save({"w": torch.full((2,), float(rank))}, folder / f"model_{rank}.pt")
        torch.save(rank, folder / f"my_step_{rank}.pt")
