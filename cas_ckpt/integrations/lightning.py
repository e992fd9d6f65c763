"""`CasModelCheckpoint`: Lightning's ModelCheckpoint, whose checkpoints are commits.

    trainer = Trainer(callbacks=[CasModelCheckpoint("runs/ckpts", every_n_train_steps=5)])
    trainer.fit(model, ckpt_path="last")

1. It lets a `CasCheckpointIO` (lightning_io.py) take the place of the Trainer's; that one commits, on rank 0.
2. To what Lightning saves it adds metrics and the random states of all ranks.
3. `last.ckpt` names a branch, so that it is the newest commit even if a process was killed between commit and file.
4. A training that goes on gets its random states back when nothing draws numbers any more, and goes on between two
   epochs as Lightning does it right.

Invariant: an equal training has equal roots, however often it was killed and wherever its folders are. Must not know
private names of Lightning.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy

from cas_ckpt import InvalidInputError, Repository, RNGState
from cas_ckpt.integrations.lightning_io import METRICS, RNG, CasCheckpointIO

__all__ = ["CasCheckpointIO", "CasModelCheckpoint"]

_LOGGER = logging.getLogger("cas_ckpt")


class CasModelCheckpoint(ModelCheckpoint):
    """Lightning's ModelCheckpoint, whose checkpoints are commits: all of its triggers, metrics and `save_top_k`.

    It puts a `CasCheckpointIO` in the place of the Trainer's. Beside what Lightning saves, it saves the random states
    of all ranks, and restores them where a training goes on.

    Attributes:
        io: The `CasCheckpointIO`: `io.last_commit`, `io.last_error`.
    """

    def __init__(
        self,
        repository: CasCheckpointIO | Repository | str | os.PathLike[str],
        *,
        dirpath: str | os.PathLike[str] | None = None,
        save_last: bool | Literal["link"] = True,
        **options: Any,
    ) -> None:
        """As ModelCheckpoint.

        Args:
            repository: As for `CasCheckpointIO`; or one, with options of its own.
            dirpath: A folder for the small files that name commits. None: that of the repository with `-files` at the
                end of its name, and in it one for the branch, if one is given.
            save_last: Let `last.ckpt` there, and with it `ckpt_path="last"`, name the branch.
            **options: Further arguments of ModelCheckpoint: `monitor`, `save_top_k`, `every_n_train_steps`, ...
        Raises:
            InvalidInputError: there is no folder that `dirpath` could stand for.
        """
        self.io = repository if isinstance(repository, CasCheckpointIO) else CasCheckpointIO(repository)
        place = self.io.url.removeprefix("file://").rstrip("/")
        if dirpath is None and "://" in place:
            raise InvalidInputError(f"{place} is no folder here: say where files that name commits go, dirpath=")
        super().__init__(dirpath=dirpath or Path(f"{place}-files", self.io.branch or ""), save_last=None, **options)
        self._waits_for_validation = options.get("save_on_train_epoch_end") is False
        self._rng: dict[str, Any] | None = None
        self._is_between_epochs, self._max_steps = False, None  # type: tuple[bool, int | None]
        if save_last:
            self.last_model_path = f"{self.dirpath}/{self.CHECKPOINT_NAME_LAST}{self.FILE_EXTENSION}"

    # ------------------------------------------------------------ what Trainer calls

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let the Trainer's checkpoints be commits.

        Raises:
            InvalidInputError: its strategy has files of its own, or another CheckpointIO is in the place.
        """
        super().setup(trainer, pl_module, stage)
        self._rng, self._is_between_epochs = None, False
        kind = type(trainer.strategy)
        if (kind.save_checkpoint, kind.load_checkpoint) != (Strategy.save_checkpoint, Strategy.load_checkpoint):
            raise InvalidInputError(
                f"{kind.__name__} reads and writes files of its own, not by a CheckpointIO: commit live objects on all "
                'ranks, repo.commit({"model": pl_module, "optimizer": trainer.optimizers[0], ...}), see "Shards" in '
                "docs/integrations.md"
            )
        present = trainer.strategy.checkpoint_io
        if isinstance(present, CasCheckpointIO) and (present.url, present.branch) == (self.io.url, self.io.branch):
            self.io = present
        elif type(present) is not TorchCheckpointIO:
            raise InvalidInputError(
                f"the Trainer has a {type(present).__name__}: leave it out, or give one CasCheckpointIO to all; in "
                "place of AsyncCheckpointIO say CasCheckpointIO(..., asynchronous=True)"
            )
        trainer.strategy.checkpoint_io = self.io
        if self.last_model_path and self.last_model_path not in self.io.last_files:
            self.io.last_files.append(self.last_model_path)

    def state_dict(self) -> dict[str, Any]:
        """As ModelCheckpoint's, with paths inside of `dirpath`: equal trainings in two folders have equal states."""
        return {**self._with_paths(super().state_dict(), os.path.relpath), "dirpath": None, "last_model_path": ""}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        inside = self._with_paths(state_dict, lambda path, folder: os.path.join(folder, path))
        super().load_state_dict({**inside, "dirpath": self.dirpath, "last_model_path": self.last_model_path})

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add metrics, and the random states of all ranks, which all ranks call together."""
        numbers = {name: value for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        checkpoint[METRICS] = {name: float(value) for name, value in numbers.items()}
        states: list[Any] = [RNGState().state_dict()] * trainer.world_size
        if trainer.world_size > 1:
            torch.distributed.all_gather_object(states, states[0])
        checkpoint[RNG] = dict(enumerate(states))

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Note the random state of this rank, and mend what a killed process left."""
        epoch = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
        self._is_between_epochs = epoch["processed"] == epoch["started"]
        states = checkpoint.get(RNG, {})
        if len(states) == trainer.world_size:
            self._rng = states[trainer.global_rank]
        elif states:
            _LOGGER.warning("%d ranks saved random states, %d load: left alone", len(states), trainer.world_size)
        if trainer.is_global_zero:
            self.io.complete()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Between two epochs: restore random states before loaders begin one, which draws numbers."""
        if self._is_between_epochs:
            self._restore_rng()
            # With a limit of steps Lightning goes on as if it were inside of the epoch, and trains one batch too many.
            if trainer.max_steps != -1:  # else there is none, or another callback of this kind has put it aside
                self._max_steps, trainer.fit_loop.epoch_loop.max_steps = trainer.max_steps, -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Inside of an epoch: restore random states when loaders have gone to where they were."""
        super().on_train_start(trainer, pl_module)
        self._restore_rng()
        self._restore_max_steps(trainer)

    def on_train_batch_end(self, trainer: Trainer, *given: Any) -> None:
        """Save, if it is time; after the last batch of an epoch at its end, as Lightning resumes that exactly."""
        if not self._waits_for_end(trainer):
            super().on_train_batch_end(trainer, *given)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save, if it is time, or was after the last batch."""
        if self._waits_for_end(trainer):
            super().on_train_batch_end(trainer, pl_module, None, None, trainer.fit_loop.batch_idx)
        super().on_train_epoch_end(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the Trainer as it was given, and save, if that is wanted."""
        self._restore_max_steps(trainer)
        super().on_exception(trainer, pl_module, exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the Trainer as it was given."""
        self._restore_max_steps(trainer)

    def _waits_for_end(self, trainer: Trainer) -> bool:
        """Whether this is the end of an epoch, and Lightning does not wait for a validation, which has its metric."""
        is_usual = trainer.check_val_every_n_epoch == 1 and trainer.val_check_interval == 1.0
        return trainer.is_last_batch and (self.monitor is None or (is_usual and not self._waits_for_validation))

    def _restore_rng(self) -> None:
        if self._rng is not None:
            RNGState().load_state_dict(self._rng)
            self._rng = None

    def _restore_max_steps(self, trainer: Trainer) -> None:
        if self._max_steps is not None:
            trainer.fit_loop.epoch_loop.max_steps, self._max_steps = self._max_steps, None
        self._is_between_epochs = False

    def _with_paths(self, state: dict[str, Any], changed: Callable[[str, str], str]) -> dict[str, Any]:
        """ModelCheckpoint's state with other paths."""
        folder, names = str(self.dirpath), ("best_model_path", "kth_best_model_path")
        paths = {name: changed(state[name], folder) if state[name] else "" for name in names}
        return {**state, **paths, "best_k_models": {changed(k, folder): v for k, v in state["best_k_models"].items()}}
