"""Folders as the Trainer of Hugging Face and Accelerate lay them out, written with torch.save and safetensors.

Neither is a dependency: what they save, and under which names, is repeated here.
"""

from __future__ import annotations

import random
from pathlib import Path
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
