"""`CasShards`: trainings by strategies of Lightning that write files of their own (ModelParallel, FSDP) as commits.

    trainer = Trainer(strategy=..., callbacks=[CasShards("runs/ckpts")])
    trainer.fit(model, loader)

Such a strategy takes no CheckpointIO. So all ranks commit the live objects together at the end of an epoch, and `fit`
begins with what the newest commit has; any number of ranks may go on.

Invariant: the state is that of the end of an epoch: no place inside of the data has to be found again.
"""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from cas_ckpt import InvalidInputError, PerRank, Repository, RNGState
from cas_ckpt.arguments import OnSaveError, check_whole
from cas_ckpt.integrations.ranks import Ranks
from cas_ckpt.integrations.saves import Saves


class CasShards(Saves, Checkpoint):
    """Commits a training at the end of epochs, on all ranks, and resumes the newest commit when `fit` begins.

    Lightning calls it after all other callbacks, and adds no ModelCheckpoint beside it.

    Attributes:
        repository: Open, from the beginning of `fit` on.
        last_commit: The commit of the last save that succeeded, or None.
        last_error: What the last save failed of; None if it did not.
    """

    def __init__(
        self,
        repository: Repository | str | os.PathLike[str],
        *,
        branch: str | None = None,
        every_n_epochs: int = 1,
        on_save_error: OnSaveError = "warn",
    ) -> None:
        """Nothing is read or written yet.

        Args:
            repository: A path, a URL or an open repository; all ranks must see it.
            branch: Where commits go, and where it is resumed from; None: the default branch.
            every_n_epochs: How often it commits.
            on_save_error: "warn": what a commit fails of is logged as an error, and the training goes on. "raise": it
                ends the training.
        Raises:
            InvalidInputError: another word for `on_save_error`, or no whole number of epochs.
        """
        self._on_error(on_save_error)
        self._every = check_whole("every_n_epochs", every_n_epochs, least=1)
        self.repository = repository if isinstance(repository, Repository) else None
        self._place, self._branch = repository, branch

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the newest commit of the branch, if there is one; collective.

        Raises:
            InvalidInputError: `fit` was given a checkpoint to resume from, too. MismatchError: the commit is of another
            model or of other callbacks.
        """
        if trainer.ckpt_path is not None:
            raise InvalidInputError("fit resumes from ckpt_path, and CasShards from its repository: leave one out")
        if self.repository is None:
            self.repository = Repository.open(self._place, create=True)  # type: ignore[arg-type]
        self._branch = self._branch or self.repository.default_branch
        newest = Ranks().from_first(lambda: self.repository.latest(self._branch))  # type: ignore[union-attr]
        if newest is not None:
            self.repository.checkout(newest, into=_live_objects(trainer, pl_module, self))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Commit; collective.

        Raises:
            CkptError: the commit failed, and `on_save_error` is "raise".
        """
        if self.repository is None or (trainer.current_epoch + 1) % self._every or trainer.fast_dev_run:
            return
        self.last_error = None
        try:
            self.last_commit = self.repository.commit(
                _live_objects(trainer, pl_module, self), step=trainer.global_step, branch=self._branch,
                options=Ranks().on_top(self.repository, str(self._branch)),
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001
            self._failed(error, f"step {trainer.global_step} was not committed, training goes on")


def _live_objects(trainer: Trainer, module: LightningModule, own: Checkpoint) -> dict[str, Any]:
    """What a commit holds of a training, as it lives; of callbacks and the rest, those that have a state."""
    precision, data = trainer.precision_plugin, trainer.datamodule
    callbacks = {each.state_key: each for each in trainer.callbacks if each is not own and each.state_dict()}
    return {
        "model": module,
        "optimizers": list(trainer.optimizers),
        "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
        "loop": trainer.fit_loop,
        "rng": RNGState(),
        # Each rank has its own: what they saw of the data need not be the same.
        **({"callbacks": {key: PerRank(each) for key, each in callbacks.items()}} if callbacks else {}),
        **({"data": PerRank(data)} if data is not None and data.state_dict() else {}),
        **({"precision": precision} if precision.state_dict() else {}),
    }
