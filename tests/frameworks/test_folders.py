"""Checkpoints that frameworks wrote, imported and exported again: the framework resumes from what is exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from cas_ckpt import CommitOptions, ConflictError, InvalidInputError, Repository
from cas_ckpt.integrations.hf import CasCallback
from cas_ckpt.integrations.hf_files import write_checkpoint
from tests.frameworks.hf_cases import Sentences, gpt2, llama_with_lora

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


def through_a_repository(before: Path, after: Path, framework: str) -> list[str]:
    """Import one folder and export another of it; the files that the import left out."""
    with Repository.init(after.parent / "repo") as repo:
        imported = repo.import_file(before)
        repo.export(imported, after, format=framework)
        return [each.name for each in imported.left_out]


def train(
    folder: Path, resume: Path | None = None, *, seed: int, model: Any = gpt2, callbacks: Any = None
) -> dict[str, torch.Tensor]:
    """Train for four steps; the weights in the last checkpoint."""
    args = TrainingArguments(
        str(folder), max_steps=4, save_steps=2, logging_steps=1, report_to="none", use_cpu=True, seed=7,
        per_device_train_batch_size=4,
    )  # fmt: skip
    trainer = Trainer(model=model(seed), args=args, train_dataset=Sentences(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    (weights,) = (folder / "checkpoint-4").glob("*model.safetensors")
    return load_file(weights)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_trainer_resumes_exactly_from_an_exported_checkpoint(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", seed=1)
    exported = tmp_path / "checkpoint-2"
    assert through_a_repository(tmp_path / "whole" / "checkpoint-2", exported, "trainer") == ["training_args.bin"]
    assert equal(whole, train(tmp_path / "resumed", exported, seed=9))


@pytest.mark.parametrize("model", [gpt2, llama_with_lora])
def test_a_trainer_without_the_callback_resumes_exactly_from_a_checkpoint_that_was_written(
    tmp_path: Path, model: Any
) -> None:
    """Written into the folder that the callback left, as configs and adapter_config.json are there."""
    whole = train(tmp_path / "whole", seed=1, model=model)
    train_with = [CasCallback(tmp_path / "ckpts")]
    with pytest.raises(ValueError, match="not enough values"):  # of the weights, which are a commit now
        train(tmp_path / "out", seed=1, model=model, callbacks=train_with)
    with Repository.open(tmp_path / "ckpts") as repo:
        written = tmp_path / "out" / "checkpoint-2"
        assert write_checkpoint(repo, "main~1", written).step == 2
        assert not [path.name for path in written.iterdir() if path.name.startswith(".")]
        with pytest.raises(ConflictError, match="checkpoint-2 has .*model.safetensors already"):
            write_checkpoint(repo, "main", written)
        repo.commit({"w": torch.zeros(2)}, branch="other", options=CommitOptions(orphan=True))
        with pytest.raises(InvalidInputError, match="not of a CasCallback"):
            write_checkpoint(repo, "other", tmp_path / "other")
    assert equal(whole, train(tmp_path / "resumed", written, seed=9, model=model))


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


# --- folders that serve ---------------------------------------------------------------------

SIZES = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32}


def tied_models() -> dict[str, Any]:
    """Models that tie weights, in different ways."""
    t5 = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    return {
        "gpt2": lambda: gpt2(1), "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
        "t5": lambda: T5ForConditionalGeneration(t5), "bert": lambda: BertForMaskedLM(BertConfig(**SIZES)),
    }  # fmt: skip


@pytest.mark.parametrize("name", tied_models())
@pytest.mark.parametrize("max_shard_bytes", [None, 6000])
def test_a_live_model_becomes_a_folder_with_the_names_of_save_pretrained(
    tmp_path: Path, name: str, max_shard_bytes: int | None
) -> None:
    model = tied_models()[name]().eval()
    model.save_pretrained(tmp_path / "theirs")
    with Repository.init(tmp_path / "repo") as repo:
        committed = repo.commit({"model": model})
        repo.export(committed, tmp_path / "ours", max_shard_bytes=max_shard_bytes)
        repo.import_file(tmp_path / "ours", branch="again")
        assert repo.show("again").aliases == repo.show(committed).aliases != ()
    ours = {key: value for each in (tmp_path / "ours").glob("*.safetensors") for key, value in load_file(each).items()}
    assert equal(load_file(tmp_path / "theirs" / "model.safetensors"), ours)
    assert (tmp_path / "ours" / "model.safetensors.index.json").exists() == (max_shard_bytes is not None)
    model.config.save_pretrained(tmp_path / "ours")
    loaded = type(model).from_pretrained(tmp_path / "ours").eval()
    given = {"input_ids": torch.arange(8)[None]} | (
        {"decoder_input_ids": torch.arange(8)[None]} if name == "t5" else {}
    )
    assert torch.equal(model(**given).logits, loaded(**given).logits)


def test_what_a_training_commits_serves_when_it_is_exported(tmp_path: Path) -> None:
    args = TrainingArguments(
        str(tmp_path / "out"), max_steps=1, save_steps=1, report_to="none", use_cpu=True, save_only_model=True
    )
    trainer = Trainer(gpt2(1), args, train_dataset=Sentences(), callbacks=[CasCallback(tmp_path / "ckpts")])
    trainer.train()
    with Repository.open(tmp_path / "ckpts") as repo:
        repo.export("main", tmp_path / "served", keys="model")
    trainer.model.config.save_pretrained(tmp_path / "served")
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "served")
    tokens = torch.arange(8)[None]
    assert torch.equal(trainer.model.eval()(tokens).logits, served.eval()(tokens).logits)
    trainer.model.save_pretrained(tmp_path / "theirs")
    with Repository.init(tmp_path / "repo") as repo:
        repo.export(repo.import_file(tmp_path / "theirs"), tmp_path / "back")
    for path in (tmp_path / "theirs").iterdir():
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()
