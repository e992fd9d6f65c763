"""Trainings by transformers.Trainer that tests run, kill and resume: tiny models with dropout, so that random matters.

Processes are forked from a server that has imported this module: see tests/processes.py.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging

from cas_ckpt import CommitInfo
from cas_ckpt.integrations.hf import CasCallback
from tests import processes

if __name__ not in processes.IMPORTED:
    processes.IMPORTED.append(__name__)
logging.disable_progress_bar()

STEPS = 8  # of six in an epoch


class Sentences(torch.utils.data.Dataset[dict[str, Any]]):
    """24 sentences of 8 tokens, the same each time."""

    def __init__(self) -> None:
        self.tokens = torch.randint(0, 50, (24, 8), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def gpt2(seed: int) -> Any:
    """With tied embeddings and a dropout of 0.1."""
    torch.manual_seed(seed)
    small = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**small, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"))


def llama_with_lora(seed: int) -> Any:
    """The base is the same for each seed, the adapter is not."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    base = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=50,
            bos_token_id=0, eos_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip
    torch.manual_seed(seed)
    config = LoraConfig(r=2, lora_dropout=0.3, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(base, config)


def sft_trainer(folder: Path, cb: CasCallback, *callbacks: Any, seed: int = 1) -> Any:
    """TRL's SFTTrainer, which makes the adapter itself."""
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(WordLevel({f"w{number}": number for number in range(50)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    config = {**arguments(folder).to_dict(), "max_length": 8, "bf16": False, "activation_checkpointing": False}
    known = {name: value for name, value in config.items() if name in SFTConfig.__dataclass_fields__}
    torch.manual_seed(seed)
    return SFTTrainer(
        model=gpt2(1), args=SFTConfig(**known), callbacks=[*callbacks, cb],
        train_dataset=Dataset.from_dict({"text": [" ".join(f"w{n * n % 47}" for n in range(9))] * 24}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w49", eos_token="w1"),
        peft_config=LoraConfig(r=2, lora_dropout=0.3, target_modules=["c_attn"], init_lora_weights=False),
    )  # fmt: skip


def arguments(folder: Path, **changed: Any) -> Any:
    given: dict[str, Any] = {
        "output_dir": str(folder / "out"), "max_steps": STEPS, "save_steps": 2, "logging_steps": 1,
        "per_device_train_batch_size": 4, "report_to": "none", "use_cpu": True, "disable_tqdm": True,
        "learning_rate": 1e-2, "seed": 5, "dataloader_pin_memory": False, "ddp_find_unused_parameters": False,
    }  # fmt: skip
    return TrainingArguments(**{**given, **changed})


def trainer_of(
    folder: Path,
    cb: CasCallback,
    *callbacks: Any,
    model: Callable[[int], Any] = gpt2,
    seed: int = 1,
    kind: type = Trainer,
    **changed: Any,
) -> Any:
    return kind(
        model=model(seed), args=arguments(folder, **changed), train_dataset=Sentences(), eval_dataset=Sentences(),
        callbacks=[*callbacks, cb],
    )  # fmt: skip


def train(folder: Path, *callbacks: Any, make: Callable[..., Any] = trainer_of, **given: Any) -> list[CommitInfo]:
    """Train to the end, from where the repository in `folder` is; all its commits, the newest first."""
    cb = CasCallback(folder / "ckpts")
    make(folder, cb, *callbacks, **given).train(resume_from_checkpoint=cb.latest())
    assert cb.repository is not None
    with cb.repository as repository:
        return repository.log()


class KillAt(TrainerCallback):
    """SIGKILL after a step, before a save; or as the save of that step is about to touch a path with this in it.

    Attributes:
        touches: How often it may touch it, the last time included.
    """

    def __init__(self, step: int, path: str | None = None, touches: int = 1) -> None:
        self.step, self.path, self.armed, self.touches = step, path, False, touches
        if path is not None:
            sys.addaudithook(self.on_event)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step and self.path is None:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.armed = state.global_step == self.step

    def on_event(self, event: str, args: tuple[Any, ...]) -> None:
        touches = self.armed and event in ("open", "os.link", "os.rename")
        if touches and any(str(self.path) in str(arg) for arg in args):
            self.touches -= 1
            if not self.touches:
                os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(folder: Path, step: int, path: str | None, touches: int, given: dict[str, Any]) -> None:
    train(folder, KillAt(step, path, touches), **given)


# ------------------------------------------------------------ ranks


def train_rank(folder: str, step: int | None, path: str | None, given: dict[str, Any]) -> list[CommitInfo]:
    """A rank of a data-parallel training, as torchrun starts one; rank 0 is killed at `step`."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": "2"})
    killers = [KillAt(step, path)] if step is not None and rank == 0 else []
    checks = [ChecksShards()] if given.get("kind") is ShardingTrainer else []
    return train(Path(folder), *killers, *checks, **given)


class ShardingTrainer(Trainer):
    """FSDP2 over ranks of a CPU. Accelerate decides for FSDP on accelerators only; all that follows works here, too."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["GPT2Block"],
            reshard_after_forward=True, cpu_offload=False,
        )  # fmt: skip
        self.is_fsdp_enabled = True


class ChecksShards(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        assert all(isinstance(each, torch.distributed.tensor.DTensor) for each in model.parameters())


def train_sharded_rank(folder: str, step: int | None, path: str | None, given: dict[str, Any]) -> list[CommitInfo]:
    """As `train_rank`, with parameters and optimizer divided over the ranks."""
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    os.environ["FSDP_VERSION"] = "2"
    return train_rank(folder, step, path, {**given, "kind": ShardingTrainer})
