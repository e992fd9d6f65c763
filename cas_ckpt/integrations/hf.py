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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import broadcast_object_list, gather_object
from safetensors.torch import save_file
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cas_ckpt import (
    CkptError,
    CommitInfo,
    InvalidInputError,
    NotFoundError,
    Policy,
    Repository,
    RNGState,
    StateDict,
    StorageError,
)

_LOGGER = logging.getLogger("cas_ckpt")

FOLDER = "cas_ckpt-resume-"
"""Beginning of the names of folders that `latest` makes; Trainer's rotation looks for `checkpoint-*`."""

HEAVY = (
    "model*.safetensors", "model.safetensors.index.json", "pytorch_model*", "adapter_model.*", "*/adapter_model.*",
    "optimizer*", "scheduler.pt", "scaler.pt", "rng_state*.pth",
)  # fmt: skip
"""What a commit holds of Trainer's folder, files and folders of FSDP."""

MARK = "cas_ckpt.json"
"""A file in each of Trainer's folders whose weights were removed: which commit of which repository has them."""

WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin", "adapter_model.*")

STUB = "restored by cas_ckpt.integrations.hf.CasCallback when training begins"
"""The one tensor of the file in place of weights. Trainer names it in a warning where the callback is missing."""

NOT_OF_THE_STATE = ("is_local_process_zero", "is_world_process_zero", "best_model_checkpoint", "log_history")
"""Of a TrainerState: what differs between ranks, folders and clocks, so that equal trainings have equal roots."""


class CasCallback(TrainerCallback):
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
        on_save_error: Literal["warn", "raise"] = "warn",
        keep_files: bool = False,
    ) -> None:
        """Prepare; the repository is opened, or made, when the Trainer is made.

        Args:
            repository: Where commits go: a path, a URL or an open repository. All ranks must see it.
            branch: Where commits go and where it is resumed from; None: the default branch.
            on_save_error: "warn": what a save fails of is logged as an error, training goes on, and Trainer's own
                folder of that step stays whole. "raise": it ends the training. The same on all ranks.
            keep_files: Leave everything in Trainer's own folders.
        Raises:
            InvalidInputError: another word for `on_save_error`.
        """
        if on_save_error not in ("warn", "raise"):
            raise InvalidInputError(f'on_save_error is {on_save_error!r}: wanted "warn" or "raise"')
        self.repository = repository if isinstance(repository, Repository) else None
        self.last_commit: CommitInfo | None = None
        self.last_error: CkptError | None = None
        self._path = None if isinstance(repository, Repository) else repository
        self._branch = branch
        self._raise = on_save_error == "raise"
        self._keep_files = keep_files
        self._args: TrainingArguments | None = None
        self._model: Any = None
        self._resumed: tuple[str, int | None] | None = None
        self._filling: Any = None
        self._num_logged = 0

    def latest(self) -> str | None:
        """A folder for `train(resume_from_checkpoint=...)` that resumes the newest commit; None: there is no commit.

        On many ranks all call it: one writes, all get the same path. The folder is in the `output_dir` of the Trainer,
        is good for a Trainer that has this callback, and goes when the next save has succeeded or training has ended.

        Raises:
            InvalidInputError: no Trainer has been made with this callback yet.
            StorageError: the folder cannot be written.
        """
        args, repository = self._ready()
        newest = repository.latest(self._branch)
        self._resumed = broadcast_object_list([newest and (newest.id, newest.step)])[0]  # what rank 0 sees
        if self._resumed is None:
            return None
        commit = self._resumed[0]
        folder = Path(args.output_dir) / f"{FOLDER}{commit[:16]}"
        self._on_writers(lambda: self._write_folder(repository, commit, folder))
        if self._filling is None:
            self._filling = self._model.register_load_state_dict_pre_hook(_fill_in)
        return str(folder)

    # ------------------------------------------------------------ what Trainer calls

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Open the repository, which all ranks do together.

        Raises:
            InvalidInputError: the Trainer uses DeepSpeed, whose state only DeepSpeed saves.
        """
        if getattr(args, "deepspeed", None):
            raise InvalidInputError("CasCallback cannot save what DeepSpeed holds: use FSDP, or Trainer's own folders")
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
        self._num_logged = 0
        if self._resumed is None or state.global_step != self._resumed[1]:
            return
        repository.checkout(self._resumed[0], into={**_live_objects(**live), "trainer": StateDict()})
        self._num_logged = len(state.log_history)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **live: Any) -> None:
        """Commit; then remove from Trainer's folder what the commit holds.

        Raises:
            CkptError: the commit failed, and `on_save_error` is "raise"; see `Repository.commit`.
        """
        _, repository = self._ready()
        # Other ranks than 0 have not all of it, and what they log need not be the same.
        trainer, metrics, meta = broadcast_object_list([_plain(state), _metrics(state), self._logged_since(state)])
        self.last_error = None
        try:
            self.last_commit = repository.commit(
                {**_live_objects(**live), "trainer": trainer}, step=state.global_step, metrics=metrics, meta=meta,
                branch=self._branch, frozen="requires_grad",
            )  # fmt: skip
        except CkptError as error:
            self.last_error = error
            if self._raise:
                raise
            _LOGGER.error(  # noqa: TRY400 - the trace of a collective call says less than its words
                "step %d was not committed, training goes on: %s", state.global_step, error
            )
            return
        self._num_logged = meta["log_from"] + len(meta["log"])
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

    def _logged_since(self, state: TrainerState) -> dict[str, Any]:
        entries = json.loads(json.dumps(state.log_history[self._num_logged :]))
        return {"log_from": self._num_logged, "log": entries}

    def _on_writers(self, write: Callable[[], None]) -> None:
        """Call `write` on the ranks that write Trainer's files; all raise if one fails."""
        args, _ = self._ready()
        error: Exception | None = None
        if args.should_save:
            try:
                write()
            except (CkptError, OSError) as caught:
                error = caught
        failed = {rank: each for rank, each in enumerate(gather_object([error and str(error)])) if each}
        if isinstance(error, CkptError):
            raise error
        if failed:
            raise StorageError(f"no folder to resume from could be made, by rank: {failed}") from error

    def _write_folder(self, repository: Repository, commit: str, folder: Path) -> None:
        try:
            stored = repository.load(commit, keys=["trainer", "rng"])
        except NotFoundError as error:
            raise InvalidInputError(f"{commit[:16]}, the newest of {self._branch}, is not of a CasCallback") from error
        _remove(folder.parent.glob(f"{FOLDER}*"))
        folder.mkdir(parents=True)
        trainer = {**stored["trainer"], "log_history": _history(repository, commit)}
        written = folder.parent / f"checkpoint-{trainer['global_step']}" / "trainer_state.json"
        if written.exists() and _plain(TrainerState.load_from_json(str(written))) == stored["trainer"]:
            _mark(written.parent, repository, commit)  # a process was killed between the commit and this
        trainer["best_model_checkpoint"] = self._best_folder(repository, trainer["best_global_step"])
        (folder / "trainer_state.json").write_text(json.dumps(trainer), encoding="utf-8")
        rng = stored["rng"]
        if "torch" in rng:
            torch.save(_rng_of_trainer(rng, all_devices=False), folder / "rng_state.pth")
        else:
            for rank, each in rng.items():
                torch.save(_rng_of_trainer(each, all_devices=True), folder / f"rng_state_{rank}.pth")
        save_file({STUB: torch.zeros(1)}, folder / "model.safetensors")

    def _best_folder(self, repository: Repository, step: int | None) -> str | None:
        """Trainer's folder of the best step, if it is there, or can be made again from the commit that was tagged."""
        args, _ = self._ready()
        folder = Path(args.output_dir) / f"checkpoint-{step}"
        if step is None or not args.load_best_model_at_end or any(_matches(folder, WEIGHTS)):
            return str(folder) if folder.is_dir() else None
        try:
            best = repository.log(self._best_tag, limit=1)[0]
        except NotFoundError:
            return None
        if best.step != step:  # the save of that step failed, and its folder is gone
            return None
        folder.mkdir(parents=True, exist_ok=True)
        adapters = getattr(self._model, "peft_config", None)
        if adapters:
            adapter = self._model.active_adapters[0]
            adapters[adapter].save_pretrained(str(folder))
            repository.export(best.id, folder, keys="model", adapter=adapter)
        else:
            repository.export(best.id, folder / "model.safetensors", keys="model")
        _mark(folder, repository, best.id)
        return str(folder)

    @property
    def _best_tag(self) -> str:
        return f"{self._branch}-best"

    def _tidy(self, args: TrainingArguments, state: TrainerState, repository: Repository, commit: CommitInfo) -> None:
        """What follows a commit: refs and retention, by one rank; and files, by the ranks that write them."""
        if args.process_index == 0:
            if state.best_global_step == state.global_step:
                repository.tag(self._best_tag, commit, force=True)
            if args.save_total_limit and args.save_total_limit > 0:
                repository.forget(Policy(keep_last=args.save_total_limit), branches=self._branch or (), gc=True)
        if not args.should_save:
            return
        output = Path(args.output_dir)
        if not args.auto_find_batch_size:  # which begins again with the same folder when memory runs out
            _remove(output.glob(f"{FOLDER}*"))
        if self._keep_files or args.push_to_hub:  # an upload to the hub may be reading them
            return
        folder = output / f"checkpoint-{state.global_step}"
        if folder.is_dir():
            _mark(folder, repository, commit.id)
        for each in output.glob(f"checkpoint-*/{MARK}"):
            is_best = args.load_best_model_at_end and each.parent.name == f"checkpoint-{state.best_global_step}"
            kept = set(_matches(each.parent, WEIGHTS if is_best else ()))
            _remove(path for path in _matches(each.parent, HEAVY) if path not in kept)


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


def _plain(state: TrainerState) -> dict[str, Any]:
    """The trainer's state as plain values, without its place and without its history: see `_history`."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(state)))
    return {name: value for name, value in plain.items() if name not in NOT_OF_THE_STATE}


def _metrics(state: TrainerState) -> dict[str, float]:
    """Numbers that were logged at this step, but for those that the clock made."""
    entries = [entry for entry in state.log_history if entry.get("step") == state.global_step]
    return {
        name: float(value) for entry in entries for name, value in entry.items()
        if isinstance(value, (int, float)) and name != "step" and not name.endswith(("_runtime", "_per_second"))
    }  # fmt: skip


def _history(repository: Repository, commit: str) -> list[dict[str, Any]]:
    """The log_history of a commit, put together: each commit has what was logged since the one before.

    Commits have it as `meta`, outside of the root, as it tells times, and counts that some trainers begin anew when
    they resume; and in parts, as the whole of 10,000 entries would take each commit a second.
    """
    parts: list[list[dict[str, Any]]] = []
    for each in repository.log(commit, first_parent=True):
        if not isinstance(each.meta, dict) or "log_from" not in each.meta:
            break
        parts.append(each.meta["log"])
        if each.meta["log_from"] == 0:
            break
    return [entry for part in reversed(parts) for entry in part]


def _rng_of_trainer(stored: Mapping[str, Any], *, all_devices: bool) -> dict[str, Any]:
    """A stored `RNGState` in the form of Trainer's rng_state.pth."""
    cuda = [state for _, state in sorted(stored["cuda"].items())]
    form = {"python": stored["python"], "numpy": stored["numpy"], "cpu": stored["torch"]}
    return {**form, "cuda": cuda if all_devices else cuda[0]} if cuda else form


def _fill_in(module: Any, state_dict: dict[str, Any], *_: Any) -> None:
    """Before a module loads the file that stands in place of weights: give it what it has already."""
    if state_dict.pop(STUB, None) is not None:
        state_dict.update(module.state_dict())


def _mark(folder: Path, repository: Repository, commit: str) -> None:
    (folder / MARK).write_text(json.dumps({"repository": repository.url, "commit": commit}), encoding="utf-8")


def _matches(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return [path for pattern in patterns for path in folder.glob(pattern)]


def _remove(paths: Iterable[Path]) -> None:
    for path in list(paths):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
