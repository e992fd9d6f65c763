"""Checkpoints that frameworks wrote, imported and exported again: the framework resumes from what is exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

from cas_ckpt import Repository
from tests.frameworks.hf_cases import Sentences, gpt2

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


def through_a_repository(before: Path, after: Path, framework: str) -> list[str]:
    """Import one folder and export another of it; the files that the import left out."""
    with Repository.init(after.parent / "repo") as repo:
        imported = repo.import_file(before)
        repo.export(imported, after, format=framework)
        return [each.name for each in imported.left_out]


def test_trainer_resumes_exactly_from_an_exported_checkpoint(tmp_path: Path) -> None:
    def train(folder: Path, resume: Path | None, seed: int) -> dict[str, torch.Tensor]:
        args = TrainingArguments(
            str(folder), max_steps=4, save_steps=2, logging_steps=1, report_to="none", use_cpu=True, seed=7,
            per_device_train_batch_size=4,
        )  # fmt: skip
        trainer = Trainer(model=gpt2(seed), args=args, train_dataset=Sentences())
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return load_file(folder / "checkpoint-4" / "model.safetensors")

    whole = train(tmp_path / "whole", None, seed=1)
    exported = tmp_path / "checkpoint-2"
    assert through_a_repository(tmp_path / "whole" / "checkpoint-2", exported, "trainer") == ["training_args.bin"]
    resumed = train(tmp_path / "resumed", exported, seed=9)
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_accelerate_loads_an_exported_save(tmp_path: Path) -> None:
    def begun(seed: int) -> tuple[Accelerator, Any, Any, Any]:
        torch.manual_seed(seed)
        accelerator, model = Accelerator(cpu=True), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout())
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return accelerator, *accelerator.prepare(model, optimizer, scheduler)

    def step(accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any) -> None:
        optimizer.zero_grad()
        accelerator.backward(model(torch.rand(8, 4)).square().sum())
        optimizer.step()
        scheduler.step()

    training = begun(1)
    step(*training)
    training[0].save_state(str(tmp_path / "in"))
    step(*training)
    assert through_a_repository(tmp_path / "in", tmp_path / "out", "accelerate") == []
    other = begun(9)
    other[0].load_state(str(tmp_path / "out"))
    step(*other)
    for one, resumed in zip(training[1].parameters(), other[1].parameters(), strict=True):
        assert torch.equal(one, resumed)
    assert training[3].get_last_lr() == other[3].get_last_lr()
