"""Trainings by transformers.Trainer that tests run, kill and resume: a tiny GPT-2 with dropout."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from cas_ckpt.integrations.hf import CasCallback

STEPS = 8


class Sentences(torch.utils.data.Dataset[dict[str, Any]]):
    """24 sentences of 8 tokens, the same each time."""

    def __init__(self) -> None:
        self.tokens = torch.randint(0, 50, (24, 8), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def tiny_model(seed: int = 1) -> Any:
    torch.manual_seed(seed)
    config = GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0
    )  # fmt: skip
    return GPT2LMHeadModel(config)  # its dropout is 0.1


def arguments(folder: Path, **changed: Any) -> Any:
    given: dict[str, Any] = {
        "output_dir": str(folder / "out"), "max_steps": STEPS, "save_steps": 2, "logging_steps": 1,
        "per_device_train_batch_size": 4, "report_to": "none", "use_cpu": True, "disable_tqdm": True,
        "learning_rate": 1e-2, "seed": 5, "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(**{**given, **changed})


def trained(folder: Path, *callbacks: Any, seed: int = 1, cb: CasCallback | None = None, **changed: Any) -> CasCallback:
    """Train to the end from where the repository in `folder` is; the callback that committed it."""
    cb = cb or CasCallback(folder / "ckpts")
    trainer = Trainer(
        model=tiny_model(seed), args=arguments(folder, **changed), train_dataset=Sentences(), eval_dataset=Sentences(),
        callbacks=[*callbacks, cb],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=cb.latest())
    return cb
