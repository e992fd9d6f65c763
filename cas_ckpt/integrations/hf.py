"""`CasCallback`: checkpoints of transformers.Trainer, and of what is built on it, as commits.

    trainer = Trainer(..., callbacks=[cb := CasCallback("runs/ckpts")])
    trainer.train(resume_from_checkpoint=cb.latest())

A save:

1. Trainer writes its folder `checkpoint-N` and calls `on_save` on all ranks. No hook of a callback keeps it from
   writing weights; `save_only_model=True` spares the rest, `CasTrainerMixin` the weights too.
2. `on_save` commits model, optimizer, scheduler, gradient scaler, random states by rank and the trainer's state.
3. Once the commit is durable, what it holds is removed from `checkpoint-N`. `trainer_state.json` and the small files
   stay, so that Trainer's rotation goes on. With `load_best_model_at_end` the weights of the best one stay, too.

A resume:

1. `latest` makes a small folder that `train` takes: the trainer's state, the random states in Trainer's form (which
   it restores when the first batch has been read), and in place of weights a file that says where they come from.
2. Trainer builds and wraps everything, and skips the optimizer as it finds no file of it.
3. `on_train_begin` checks the commit out into the live objects, verified, in place. No byte of weights is written.

Invariant: nothing of Trainer's is removed before the commit that holds it is durable. Must not know private names of
transformers.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, broadcast_object_list
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cas_ckpt import CkptError, CommitInfo, InvalidInputError, Repository, RNGState, StateDict, StorageError
from cas_ckpt.arguments import OnSaveError
from cas_ckpt.integrations.hf_files import (
    MARK,
    best_step,
    is_ours,
    metrics_of,
    plain,
    read_mark,
    rng_files,
    saves,
    trainer_state,
    write_files,
)
from cas_ckpt.integrations.ranks import Ranks
from cas_ckpt.integrations.rotation import forget_own
from cas_ckpt.integrations.saves import Saves

_LOGGER = logging.getLogger("cas_ckpt")

FOLDER = "cas_ckpt-resume-"
"""Beginning of the names of folders that `latest` makes; Trainer's rotation looks for `checkpoint-*`."""

WEIGHTS = (
    "model.safetensors", "model-[0-9]*-of-[0-9]*.safetensors", "model.safetensors.index.json",
    "pytorch_model.bin", "pytorch_model-[0-9]*-of-[0-9]*.bin", "pytorch_model.bin.index.json", "pytorch_model_fsdp*",
    "adapter_model.safetensors", "adapter_model.bin", "*/adapter_model.safetensors", "*/adapter_model.bin",
)  # fmt: skip

HEAVY = (
    *WEIGHTS, "optimizer.pt", "optimizer.bin", "optimizer_[0-9]*", "scheduler.pt", "scaler.pt", "rng_state.pth",
    "rng_state_[0-9]*.pth",
)  # fmt: skip
"""What a commit holds of Trainer's folder, by the names that Trainer gives: files, and folders of FSDP."""

STUB = "restored by cas_ckpt.integrations.hf.CasCallback when training begins"
"""The one tensor of the file in place of weights. Trainer names it in a warning where the callback is missing."""


class CasCallback(Saves, TrainerCallback):
    """Commits at each save of a Trainer, and resumes it from the newest commit.

    On many ranks each makes one, as each makes a Trainer.

    Attributes:
        repository: The repository; None before the Trainer was made, if it was given by its path.
        last_commit: The commit of the last save that succeeded, or None.
        last_error: What the last save failed of; None if it did not.
    """

    def __init__(
        self,
        repository: Repository | str | os.PathLike[str],
        *,
        branch: str | None = None,
        on_save_error: OnSaveError = "warn",
        keep_files: bool = False,
        frozen: str | Sequence[str] | None = "requires_grad",
    ) -> None:
        """Prepare; the repository is opened, or made, when the Trainer is made.

        Args:
            repository: Where commits go: a path, a URL or an open repository. All ranks must see it.
            branch: Where commits go and where it is resumed from; None: the default branch.
            on_save_error: "warn": what a save fails of is logged as an error, training goes on, and Trainer's own
                folder of that step stays whole. "raise": it ends the training. The same on all ranks.
            keep_files: Leave everything in Trainer's own folders.
            frozen: What does not change, see `Repository.commit`: the base of an adapter is stored once. None, if
                parameters that require no gradient do change (adapters that are merged into the base on the way).
        Raises:
            InvalidInputError: another word for `on_save_error`.
        """
        self._on_error(on_save_error)
        self.repository = repository if isinstance(repository, Repository) else None
        self._path = None if isinstance(repository, Repository) else repository
        self._branch = branch
        self._keep_files = keep_files
        self._frozen = frozen
        self._args: TrainingArguments | None = None
        self._model: Any = None
        self._resumed: CommitInfo | None = None
        self._filling: Any = None
        self._is_fsdp = False
        self._num_saves = self._num_logged = 0

    def latest(self) -> str | None:
        """A folder for `train(resume_from_checkpoint=...)` that resumes the newest commit; None: there is no commit.

        On many ranks all call it: one writes, all get the same path. The folder is in the `output_dir` of the Trainer,
        is good for a Trainer that has this callback, and goes when the next save has succeeded or training has ended.

        Raises:
            InvalidInputError: no Trainer has been made with this callback yet.
            StorageError: the folder cannot be written.
        """
        args, repository = self._ready()
        commit: CommitInfo | None = Ranks().from_first(lambda: repository.latest(self._branch))
        self._resumed = commit
        if commit is None:
            return None
        folder = Path(args.output_dir) / f"{FOLDER}{commit.short_id}"
        Ranks().gather(lambda: self._make_folder(repository, commit, folder) if args.should_save else None)
        if self._filling is None and not self._is_fsdp:
            self._filling = self._model.register_load_state_dict_pre_hook(_fill_in)
        return str(folder)

    # ------------------------------------------------------------ what Trainer calls

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Open the repository, which all ranks do together.

        Raises:
            InvalidInputError: the Trainer uses DeepSpeed, whose state only DeepSpeed saves; or FSDP with PEFT, which
                Trainer resumes by files of its own alone.
        """
        kind = AcceleratorState().distributed_type
        self._is_fsdp = kind == DistributedType.FSDP
        if kind == DistributedType.DEEPSPEED or (self._is_fsdp and hasattr(model, "peft_config")):
            raise InvalidInputError(f"CasCallback cannot resume {kind.value} with such a model: use Trainer's folders")
        self._args, self._model = args, model
        if self.repository is None and self._path is not None:
            self.repository = Repository.open(self._path, create=True)
        if self._branch is None and self.repository is not None:
            self._branch = self.repository.default_branch

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **live: Any
    ) -> None:
        """Restore what `latest` gave, in place, if that is what the training resumes from.

        Raises:
            CkptError: it cannot be restored; see `Repository.checkout`.
        """
        _, repository = self._ready()
        if state.is_hyper_param_search:
            raise InvalidInputError("CasCallback cannot tell the trials of a hyperparameter search apart")
        self._num_saves = self._num_logged = 0
        if self._resumed is not None and self._resumed.step == state.global_step:
            Ranks().from_first(lambda: self._go_back(repository))
            repository.checkout(self._resumed, into={**_live_objects(**live), "trainer": StateDict()})
            self._num_saves, self._num_logged = self._resumed.meta["save"] + 1, len(state.log_history)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **live: Any) -> None:
        """Commit; then remove from Trainer's folder what the commit holds.

        Raises:
            CkptError: the commit failed, and `on_save_error` is "raise"; see `Repository.commit`.
        """
        _, repository = self._ready()
        # Other ranks than 0 have not all of it, and what they log need not be the same.
        logged = json.loads(json.dumps(state.log_history[self._num_logged :]))
        meta = {"save": self._num_saves, "log": logged, "best": best_step(state), "mark": uuid4().hex}
        trainer, metrics, meta = broadcast_object_list([plain(state), metrics_of(state), meta])
        self.last_error = None
        if args.should_save:
            with suppress(OSError):  # then a process that is killed after the commit leaves files twice, no more
                _mark(Path(args.output_dir) / f"checkpoint-{state.global_step}", {"pending": meta["mark"]})
        try:
            self.last_commit = repository.commit(
                {**_live_objects(**live), "trainer": trainer}, step=state.global_step, metrics=metrics, meta=meta,
                branch=self._branch, frozen=self._frozen, options=Ranks().on_top(repository, str(self._branch)),
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001
            self._failed(error, f"step {state.global_step} was not committed, training goes on")
            return
        self._num_saves, self._num_logged = self._num_saves + 1, len(state.log_history)
        try:
            self._tidy(args, state, repository, self.last_commit)
        except (CkptError, OSError) as error:  # on one rank alone, so it cannot end the training of all
            _LOGGER.warning("step %d is committed, but what it replaces stays: %s", state.global_step, error)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **live: Any) -> None:
        """Remove the folder that the training resumed from."""
        self._resumed = None
        if args.should_save:
            _remove(Path(args.output_dir).glob(f"{FOLDER}*"))

    # ------------------------------------------------------------ steps

    def _ready(self) -> tuple[TrainingArguments, Repository]:
        if self._args is None or self.repository is None:
            raise InvalidInputError("no Trainer has this callback yet: make it first, with callbacks=[callback]")
        return self._args, self.repository

    def _make_folder(self, repository: Repository, commit: CommitInfo, folder: Path) -> None:
        try:
            self._write_folder(repository, commit, folder)
        except (OSError, SafetensorError) as error:
            raise StorageError(f"no folder to resume from could be made: {error}") from error

    def _write_folder(self, repository: Repository, commit: CommitInfo, folder: Path) -> None:
        if not is_ours(commit):
            raise InvalidInputError(f"{commit.short_id}, the newest of {self._branch}, is not of a CasCallback")
        stored = repository.load(commit, keys=["trainer", "rng"])
        _remove(folder.parent.glob(f"{FOLDER}*"))
        folder.mkdir(parents=True)
        trainer = trainer_state(repository, commit, stored)
        written = folder.parent / f"checkpoint-{trainer['global_step']}"
        if read_mark(written).get("pending") == commit.meta["mark"]:  # a process was killed between the commit and this
            _mark(written, {"repository": repository.url, "commit": commit.id})
        trainer["best_model_checkpoint"] = self._best_folder(repository, commit)
        (folder / "trainer_state.json").write_text(json.dumps(trainer), encoding="utf-8")
        write_files(folder, {name: partial(torch.save, state) for name, state in rng_files(stored["rng"]).items()})
        # FSDP would read a folder of its own; what it loads from shards that an index names, it loads as others do.
        stub = "shards.safetensors" if self._is_fsdp else "model.safetensors"
        save_file({STUB: torch.zeros(1)}, folder / stub)
        if self._is_fsdp:
            index = {"metadata": {}, "weight_map": dict.fromkeys(self._model.state_dict(), stub)}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")

    def _go_back(self, repository: Repository) -> None:
        """Let the branch end where a training begins again that has saved since, as when memory ran out.

        What it saved meanwhile is on a branch of its own.
        """
        resumed, head = self._resumed, repository.latest(self._branch)
        if resumed is None or head is None or self.last_commit is None or head.id == resumed.id:
            return
        if head.id == self.last_commit.id:
            repository.branch(f"{self._branch}-{head.short_id}", start=head, force=True)
            repository.branch(str(self._branch), start=resumed, force=True)

    def _best_folder(self, repository: Repository, commit: CommitInfo) -> str | None:
        """Trainer's folder of the best step, if it is there, or can be made again from its commit."""
        args, _ = self._ready()
        step = commit.meta["best"]
        folder = Path(args.output_dir) / f"checkpoint-{step}"
        if step is None or not args.load_best_model_at_end or any(_matches(folder, WEIGHTS)):
            return str(folder) if folder.is_dir() else None
        own = [each for each in saves(repository, commit) if each.step == step and not each.forgotten]
        if not own or self._is_fsdp:  # the save of that step failed; or FSDP wants a folder of its own
            _LOGGER.warning("the best model, of step %d, is not there any more", step)
            return None
        best = own[0]
        folder.mkdir(parents=True, exist_ok=True)
        if hasattr(self._model, "peft_config"):
            adapter = self._model.active_adapters[0]
            self._model.peft_config[adapter].save_pretrained(str(folder))
            repository.export(best, folder, keys="model", adapter=adapter)
        else:
            repository.export(best, folder / "model.safetensors", keys="model")
        _mark(folder, {"repository": repository.url, "commit": best.id})
        return str(folder)

    def _tidy(self, args: TrainingArguments, state: TrainerState, repository: Repository, commit: CommitInfo) -> None:
        """What follows a commit: refs and retention, by one rank; and files, by the ranks that write them."""
        if args.process_index == 0:
            if commit.meta["best"] == state.global_step:
                repository.tag(f"{self._branch}-best", commit, force=True)
            if args.save_total_limit and args.save_total_limit > 0:
                forget_own(repository, str(self._branch), saves(repository, commit)[args.save_total_limit :])
        if not args.should_save:
            return
        output = Path(args.output_dir)
        if not args.auto_find_batch_size:  # which begins again with the same folder when memory runs out
            _remove(output.glob(f"{FOLDER}*"))
        if self._keep_files or args.push_to_hub:  # an upload to the hub may be reading them
            return
        _mark(output / f"checkpoint-{state.global_step}", {"repository": repository.url, "commit": commit.id})
        best = f"checkpoint-{commit.meta['best']}" if args.load_best_model_at_end else ""
        own: set[str] = set()
        for mark in output.glob(f"checkpoint-*/{MARK}"):
            kept = _matches(mark.parent, WEIGHTS if mark.parent.name == best else ())
            heavy = [path for path in _matches(mark.parent, HEAVY) if path not in kept]
            if not heavy:
                continue
            own = own or {each.id for each in saves(repository, commit)}
            found = read_mark(mark.parent)
            # What was written since is of another save, which may not have been committed.
            is_of_mark = all(path.stat().st_mtime_ns <= mark.stat().st_mtime_ns for path in (*heavy, *kept))
            if found.get("repository") == repository.url and found.get("commit") in own and is_of_mark:
                # Of the best one only the weights stay, so that nothing takes it for a folder to resume from.
                _remove([*heavy, mark.parent / "trainer_state.json"] if kept else heavy)


class CasTrainerMixin:
    """Before Trainer or a class derived from it: saves by a Trainer that has a `CasCallback` write no weights.

        class MyTrainer(CasTrainerMixin, Trainer): ...

    `save_model` of a user's own call writes as ever, as do saves with `load_best_model_at_end`, which reads the files.
    Without it Trainer writes them at each save, and the callback removes them.
    """

    args: Any
    callback_handler: Any

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model; or only make the folder, if a save calls it."""
        commits = any(isinstance(each, CasCallback) for each in self.callback_handler.callbacks)
        if _internal_call and commits and not self.args.load_best_model_at_end and output_dir is not None:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
        else:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]


def _live_objects(*, model: Any, optimizer: Any, lr_scheduler: Any, **_: Any) -> dict[str, Any]:
    """What a commit holds of a training, as it lives. Accelerate's wrapper of the optimizer has the gradient scaler."""
    scaler = getattr(optimizer, "scaler", None)
    return {
        "model": model, "optimizer": getattr(optimizer, "optimizer", optimizer), "scheduler": lr_scheduler,
        "rng": RNGState(), **({} if scaler is None else {"scaler": scaler}),
    }  # fmt: skip


def _fill_in(module: Any, state_dict: dict[str, Any], *_: Any) -> None:
    """Before a module loads the file that stands in place of weights: give it what it has already."""
    if state_dict.pop(STUB, None) is not None:
        state_dict.update(module.state_dict())


def _mark(folder: Path, said: dict[str, str]) -> None:
    """Note in Trainer's folder which commit holds what it holds, or that one with this mark is to be made."""
    if folder.is_dir():
        (folder / MARK).write_text(json.dumps(said), encoding="utf-8")


def _matches(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return [path for pattern in patterns for path in folder.glob(pattern)]


def _remove(paths: Iterable[Path]) -> None:
    for path in list(paths):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
