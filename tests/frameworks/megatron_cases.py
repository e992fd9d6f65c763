"""Trainings by megatron-core that tests run, kill and resume: a small GPT by its local layers, on CPUs over gloo.

What Megatron asks a GPU for (devices, streams of random numbers, names of types) is answered here: `on_cpu`.
Processes are forked from a server that has imported this module: see tests/processes.py.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import socket
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core import optimizer as optimizers
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
from megatron.core.safe_globals import register_safe_globals
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch.overrides import TorchFunctionMode

from cas_ckpt import CkptError, CommitInfo, Repository
from cas_ckpt.integrations.megatron import CasStrategy
from tests.frameworks.programs import program, run
from tests.frameworks.torch_checkpointing_cases import KillAt

STEPS = 6


class OnCpu(TorchFunctionMode):
    """What is asked for on a GPU is made on the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class FusedAdam(torch.optim.Optimizer):
    """As that of Transformer Engine: the number of steps is in the groups, not in the state."""

    def __init__(
        self, params: Any, *, lr: float, weight_decay: float, betas: Any, eps: float, adam_w_mode: bool
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                state, grad = self.state[param], param.grad
                mean = state.setdefault("exp_avg", torch.zeros_like(param))
                square = state.setdefault("exp_avg_sq", torch.zeros_like(param))
                mean.lerp_(grad, 0.1)
                square.lerp_(grad * grad, 0.01)
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.addcdiv_(mean, square.sqrt() + group["eps"], value=-group["lr"])


def on_cpu() -> None:
    """Let Megatron run in this process without a GPU and Transformer Engine, from now on."""
    type_of: Callable[..., str] = torch.Tensor.type
    names = {torch.float32: "FloatTensor", torch.bfloat16: "BFloat16Tensor", torch.float16: "HalfTensor"}

    def told(self: torch.Tensor, *to: Any) -> str:
        return type_of(self, *to) if to else f"torch.cuda.{names[self.dtype]}"

    changed: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: "cpu"),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.Tensor, "cuda", lambda self, *_, **__: self),
        (torch.Tensor, "type", told),
        (CudaRNGStatesTracker, "fork", lambda *_: nullcontext()),
        (optimizers, "USING_PYTORCH_OPTIMIZER", False),
        (optimizers, "Adam", FusedAdam),
        (distrib_optimizer, "Adam", FusedAdam),
        (distrib_optimizer, "HAVE_APEX_OR_TE", True),
        (distrib_optimizer, "USING_TE_OPTIMIZER", True),
    ]
    for place, name, value in changed:
        setattr(place, name, value)
    OnCpu().__enter__()


class Training:
    """A GPT under Megatron's own data parallel and distributed optimizer, and its state as Megatron-LM has it."""

    def __init__(
        self, *, tp: int = 1, dtype: torch.dtype = torch.float32, sharding: str = "fully_reshardable", vocab: int = 64,
        with_rng: bool = True,
    ) -> None:  # fmt: skip
        self.with_rng = with_rng
        on_cpu()
        register_safe_globals()
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(3)
        if not parallel_state.is_initialized():
            parallel_state.initialize_model_parallel(tp)
        config = TransformerConfig(
            num_layers=2, hidden_size=16, num_attention_heads=4, use_cpu_initialization=True, attention_dropout=0.0,
            hidden_dropout=0.0, tensor_model_parallel_size=tp, pipeline_dtype=dtype,
            params_dtype=dtype, bf16=dtype == torch.bfloat16,
            gradient_accumulation_fusion=False,
        )  # fmt: skip
        model = GPTModel(
            config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=vocab, max_sequence_length=16
        )
        if config.bf16:
            model = Float16Module(config, model)
        self.model = DistributedDataParallel(
            config, DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False), model
        )
        wanted = OptimizerConfig(
            optimizer="adam", bf16=config.bf16, params_dtype=dtype, lr=1e-2, use_distributed_optimizer=True,
            clip_grad=0.0,
        )  # fmt: skip
        self.optimizer = get_megatron_optimizer(wanted, [self.model])
        self.bare = model.module if config.bf16 else model
        self.iteration = 0
        self.about = {
            "distrib_optim_sharding_type": sharding, "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }  # fmt: skip

    def step(self) -> None:
        """One step; where there are several data parallel ranks, each has rows of its own."""
        self.iteration += 1
        rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        rows = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(self.iteration))
        rows = rows[rank * 4 // size : (rank + 1) * 4 // size]
        mask = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), 1)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        places = torch.arange(16).expand(len(rows), 16)
        self.model(rows[:, :-1], places, mask, labels=rows[:, 1:]).mean().backward()
        self.model.finish_grad_sync()
        self.optimizer.step()
        torch.rand(1 + rank)  # so that random states move

    def state(self, *, is_loading: bool = False) -> dict[str, Any]:
        model = self.bare.sharded_state_dict(metadata=self.about)
        rng = [{"torch": torch.get_rng_state(), "random": random.getstate(), "numpy": np.random.get_state()}]
        shape = (1, parallel_state.get_tensor_model_parallel_world_size())
        offset = (0, parallel_state.get_tensor_model_parallel_rank())
        replica = parallel_state.get_data_parallel_rank()
        state = {
            "iteration": self.iteration,
            "args": Namespace(lr=1e-2, dtype=torch.float32, kind=ModelType.encoder_or_decoder),
            "model": model,
            "optimizer": self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=self.about),
            "here": LocalNonpersistentObject(dist.get_rank()),
        }
        if self.with_rng:  # of each tensor parallel rank
            state["rng_state"] = ShardedObject("rng_state", rng, shape, offset, replica)
        return state

    def tensors(self) -> list[tuple[str, Any, torch.Tensor]]:
        """What this rank has of the tensors of the state: the key, where in the whole tensor it is, and a copy."""
        found = [each for each in nested_values(self.state()) if isinstance(each, ShardedTensor)]
        return [(each.key, each.global_slice(), each.data.detach().clone()) for each in found]

    def load(self, folder: str, **given: Any) -> dict[str, Any]:
        found: dict[str, Any] = dist_checkpointing.load(self.state(is_loading=True), folder, **given)
        self.bare.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])
        self.iteration = found["iteration"]
        if self.with_rng:
            rng = found["rng_state"][0]
            torch.set_rng_state(rng["torch"])
            random.setstate(rng["random"])
            np.random.set_state(rng["numpy"])
        return found

    def save(self, folder: Path, strategy: Any, *, queue: AsyncCallsQueue | None = None, run: bool = False) -> None:
        place = folder / f"iter_{self.iteration:07}"
        place.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        request = dist_checkpointing.save(
            self.state(), str(place), strategy, async_sharded_save=run or queue is not None,
            content_metadata={"sharding": self.about["distrib_optim_sharding_type"]},
        )  # fmt: skip
        if queue is not None:
            queue.schedule_async_request(request)
        elif run:
            request.execute_sync()


def newest(folder: Path) -> str | None:
    """The folder of the last save that ended."""
    found = sorted(path for path in folder.glob("iter_*") if dist_checkpointing.check_is_distributed_checkpoint(path))
    return str(found[-1]) if found else None


def train(
    folder: str, kill_at: tuple[int, str | None] | None = None, given: dict[str, Any] | None = None
) -> list[CommitInfo]:
    """Train to the end, from the newest folder on; all commits, the newest first.

    Args:
        kill_at: SIGKILL of rank 0 before the save of this step, or as that save is about to touch a path.
    """
    asked = {"asynchronous": False, "steps": STEPS, **(given or {})}
    asynchronous, steps = asked.pop("asynchronous"), asked.pop("steps")
    training = Training(**asked)
    strategy = CasStrategy(Path(folder) / "ckpts", on_save_error="raise")
    queue = AsyncCallsQueue() if asynchronous else None
    last = newest(Path(folder) / "out")
    if last is not None:
        training.load(last)
    dist.barrier()
    killer = KillAt(kill_at[1]) if kill_at is not None and dist.get_rank() == 0 else None
    while training.iteration < steps:
        training.step()
        if killer is not None and kill_at is not None and training.iteration == kill_at[0]:
            killer.arm()
        if training.iteration % 2 == 0:
            training.save(Path(folder) / "out", strategy, queue=queue)
        if queue is not None:
            queue.maybe_finalize_async_calls()
    if queue is not None:
        queue.close()
    with Repository.open(Path(folder) / "ckpts", group=None) as repository:
        return repository.log()


def save_and_load_fully_parallel(folder: str) -> tuple[str, list[int]]:
    """Replicas save and load a part each, as Megatron distributes it; the root, and whether each tensor came back."""
    training = Training(with_rng=False)
    strategy = CasStrategy(Path(folder) / "ckpts", on_save_error="raise")
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    training.step()
    training.step()
    training.save(Path(folder) / "out", FullyParallelSaveStrategyWrapper(strategy, group))
    before = {name: value.clone() for name, value in training.bare.state_dict().items() if value is not None}
    training.step()
    training.load(str(newest(Path(folder) / "out")), sharded_strategy=FullyParallelLoadStrategyWrapper(strategy, group))
    assert strategy.last_commit is not None
    after = training.bare.state_dict()
    return strategy.last_commit.root, [torch.equal(value, after[name]) for name, value in before.items()]


def save_stages(folder: str, number: int) -> str:
    """The root of a model of which each rank has a stage of the pipeline, from the newest folder if there is one."""
    on_cpu()
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(1, size)
    torch.manual_seed(number)
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, use_cpu_initialization=True,
        pipeline_model_parallel_size=size, pipeline_dtype=torch.float32,
    )  # fmt: skip
    model = GPTModel(
        config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    )  # fmt: skip
    strategy = CasStrategy(Path(folder) / "ckpts", on_save_error="raise")
    last = newest(Path(folder) / "out")
    dist.barrier()
    if last is not None:
        found = dist_checkpointing.load({"model": model.sharded_state_dict()}, last)
        model.load_state_dict(found["model"])
    place = Path(folder) / "out" / f"iter_{number}"
    place.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save({"model": model.sharded_state_dict()}, str(place), strategy)
    assert strategy.last_commit is not None
    return strategy.last_commit.root


def save_again(folder: str, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Load the newest folder and save what it gave; the root, and what was loaded besides tensors."""
    training = Training(**given)
    training.step()  # so that nothing is right by chance
    strategy = CasStrategy(Path(folder) / "ckpts", on_save_error="raise")
    found = training.load(str(newest(Path(folder) / "out")))
    training.save(Path(folder) / "again", strategy)
    assert strategy.last_commit is not None
    return strategy.last_commit.root, {name: found[name] for name in ("iteration", "args", "here", "content_metadata")}


def save_without_a_repository(folder: str, on_save_error: str, asynchronous: bool) -> tuple[Any, ...]:
    """Nothing can be committed from step 4 on: errors, what was logged, and what the last folder gives."""
    told: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(f"{record.levelname} {record.getMessage()}")

    logging.getLogger("cas_ckpt").addHandler(Listener())
    place = Path(folder)
    training = Training()
    strategy = CasStrategy(place / "ckpts", on_save_error=on_save_error)
    raised = ""
    while training.iteration < 4:
        training.step()
        if training.iteration == 4:
            dist.barrier()
            if dist.get_rank() == 0:
                (place / "ckpts").rename(place / "lost")
            dist.barrier()
        if training.iteration % 2 == 0:
            try:
                training.save(place / "out", strategy, run=asynchronous)
            except CkptError as error:
                raised = type(error).__name__
    dist.barrier()
    if dist.get_rank() == 0:
        (place / "lost").rename(place / "ckpts")
    dist.barrier()
    loaded = None if raised else training.load(str(place / "out" / "iter_0000004"))["iteration"]
    return type(strategy.last_error).__name__, raised, loaded, told


def look(folder: str) -> tuple[Any, ...]:
    """What Megatron's own functions say of a folder, without being told a strategy."""
    training = Training()
    strategy = CasStrategy(Path(folder) / "ckpts")
    strategy.name_commit(Path(folder) / "named", "main~1")
    named = str(Path(folder) / "named")
    about = dist_checkpointing.load_tensors_metadata(named)
    wanted = training.state(is_loading=True)
    wanted["model"].pop("decoder.final_layernorm.bias")
    wanted["model"]["output_layer.weight"].key = "nowhere"
    _, missing, unexpected = dist_checkpointing.load(wanted, named, strict="return_all")
    return (
        dist_checkpointing.load_common_state_dict(named)["iteration"],
        dist_checkpointing.load_content_metadata(named),
        {key: (tuple(each.global_shape), each.dtype) for key, each in about.items()},
        missing,
        unexpected,
        {key for key, each in dist_checkpointing.load_plain_tensors(named).items() if isinstance(each, torch.Tensor)},
    )


def errors_of(folder: str) -> list[tuple[str, str]]:
    """What a load raises of a tensor of another shape, and of one that is not there."""
    training = Training()
    CasStrategy(Path(folder) / "ckpts")
    told = []
    for key in ("output_layer.weight", "nowhere"):
        wanted = training.state(is_loading=True)
        wanted["model"]["decoder.final_layernorm.bias"].key = key
        try:
            dist_checkpointing.load(wanted, str(newest(Path(folder) / "out")), validate_access_integrity=False)
        except Exception as error:  # noqa: BLE001 - whatever a user would see
            told.append((type(error).__name__, str(error)))
    return told


def load_another_vocabulary(folder: str, vocab: int) -> torch.Tensor:
    """The embedding of a model with another one, which Megatron pads."""
    training = Training(vocab=vocab)
    CasStrategy(Path(folder) / "ckpts")
    found = dist_checkpointing.load({"model": training.bare.sharded_state_dict()}, str(newest(Path(folder) / "out")))
    weight: torch.Tensor = found["model"]["embedding.word_embeddings.weight"]
    return weight.detach()


def save_by_megatron(folder: str, given: dict[str, Any]) -> None:
    """A folder by Megatron's own strategies, while ours is registered; and it is loaded again."""
    multiprocessing.current_process().daemon = False  # they start processes
    sys.stdin = open(os.devnull)  # noqa: SIM115 - which they close: a thread of the tests reads the other one
    training = Training(**given)
    CasStrategy(Path(folder) / "ckpts")
    training.step()
    training.save(Path(folder) / "out", None)
    with torch.no_grad():
        assert training.load(str(Path(folder) / "out" / "iter_0000001"))["iteration"] == 1


def import_and_go_on(folder: str, given: dict[str, Any]) -> tuple[Any, ...]:
    """Import what Megatron wrote, load that by Megatron, and commit it again: what was left out, and what differs."""
    training = Training(**given)
    training.step()
    strategy = CasStrategy(Path(folder) / "ckpts", on_save_error="raise")
    made = strategy.repository.import_file(Path(folder) / "out" / "iter_0000001", branch="imported")
    strategy.name_commit(Path(folder) / "named", "imported")
    known = dist_checkpointing.load_tensors_metadata(str(Path(folder) / "named"))
    with torch.no_grad():
        found = training.load(str(Path(folder) / "named"))
    training.save(Path(folder) / "again", strategy)
    changed = strategy.repository.diff("imported", "main")
    kind = found["args"].kind
    return made.left_out, [each.key for each in changed.entries], kind is ModelType.encoder_or_decoder, len(known)


def go_on_by_megatron(folder: str, steps: int, given: dict[str, Any]) -> tuple[Any, ...]:
    """Load a folder by Megatron's own strategies alone and train on: what is no tensor, the tensors then and after."""
    training = Training(**given)
    training.step()  # so that nothing is right by chance
    with torch.no_grad():
        found = training.load(folder)
    known = {str(each) for each in dist_checkpointing.load_tensors_metadata(folder)}
    about = (found["iteration"], repr(sorted(vars(found["args"]).items())), found["content_metadata"], known)
    before = training.tensors()
    for _ in range(steps):
        training.step()
    return about, before, training.tensors(), torch.get_rng_state()


def run_program(folder: str, kill_at: int | None) -> None:
    """The program of docs/integrations.md, as the one rank that torchrun would start."""
    on_cpu()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    Path(folder).mkdir(exist_ok=True)
    run(program("Megatron-core"), folder, kill_at)
