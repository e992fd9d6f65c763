"""`CasCheckpoints`: what a loop under ray.train saves and resumes by.

    checkpoints = CasCheckpoints("/shared/ckpts")  # in the function that Ray runs in each worker
    for step in range(checkpoints.resume(state) or 0, 100):
        ...
        checkpoints.report({"loss": loss}, state, step + 1)

1. All workers commit the live state together.
2. Rank 0 reports a `ray.train.Checkpoint` that names the commit, in its metadata: Ray stores that folder, a few hundred
   bytes, inside of its storage_path, and gives it back when it has started the workers again.
3. Commits of the training whose checkpoints Ray has deleted (`CheckpointConfig.num_to_keep`) are forgotten at the next
   report.

Invariant: what Ray knows of is committed, and durable. Must not know private names of Ray.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from numbers import Real
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import ray.train

from cas_ckpt import CkptError, CommitInfo, InvalidInputError, Repository
from cas_ckpt.arguments import OnSaveError
from cas_ckpt.integrations.ranks import Ranks
from cas_ckpt.integrations.rotation import forget_own
from cas_ckpt.integrations.saves import Saves

_LOGGER = logging.getLogger("cas_ckpt")

RUN = "ray_run"
"""In the `meta` of each commit: which training it is of, from its first step on, however often it was started again."""

COMMIT = "cas_ckpt_commit"
"""In the metadata of each checkpoint: the id of the commit."""


class CasCheckpoints(Saves):
    """Commits a state and reports it to Ray, and restores what Ray resumes from; all workers call all of it together.

    Attributes:
        repository: The repository, open.
        last_commit: The commit of the last report that succeeded, or None.
        last_error: What the last save failed of; None if it did not.
    """

    def __init__(
        self, repository: Repository | str | os.PathLike[str], *, branch: str | None = None,
        on_save_error: OnSaveError = "warn",
    ) -> None:  # fmt: skip
        """Open the repository, when the process group is there.

        Args:
            repository: Its URL, or a path that all workers see, absolute; it is made if there is none. Or one that is
                open.
            branch: Where commits go. None: the default branch.
            on_save_error: Log what a save fails of, and report without a checkpoint; or "raise" it.
        Raises:
            InvalidInputError: a relative path, which Ray has in another folder each time; or no process group has all
                workers.
            CkptError: it cannot be opened; see `Repository.open`.
        """
        self._on_error(on_save_error)
        self._ranks, context = Ranks(), ray.train.get_context()
        if self._ranks.size != context.get_world_size():
            raise InvalidInputError(
                f"there are {context.get_world_size()} workers and {self._ranks.size} ranks: open it in a process "
                "group of all workers, as TorchTrainer makes it"
            )
        if not isinstance(repository, Repository):
            place = os.fspath(repository)
            if "://" not in place and not Path(place).expanduser().is_absolute():
                raise InvalidInputError(
                    f"{place!r} is in the folder of this Ray session: give a URL, or an absolute path that all see"
                )
            repository = Repository.open(place, create=True)
        self.repository = repository
        self._branch = branch or repository.default_branch
        self._run = self._ranks.from_first(lambda: f"{context.get_experiment_name()} {uuid4()}")
        self._left: str | None = None

    def resume(self, state: Mapping[str, Any]) -> int | None:
        """Restore the commit of the checkpoint that Ray resumes from into `state`.

        Returns:
            Its step; None: there is none, and nothing was touched.
        Raises:
            InvalidInputError: the checkpoint was made by something else.
            CkptError: it cannot be restored; see `Repository.checkout`.
        """
        commit = self._ranks.from_first(self._found)
        if commit is None:
            return None
        self.repository.checkout(commit.id, into=state)
        self.last_commit, self._left = commit, commit.id
        self._run = _run_of(commit) or self._run
        return commit.step

    def report(self, metrics: dict[str, Any], state: Mapping[str, Any], step: int) -> None:
        """Commit `state` and report it, in place of `ray.train.report`; the state may change when it returns.

        Args:
            metrics: As Ray takes them; numbers of rank 0 are those of the commit, too.
            state: As `Repository.commit` takes it: live objects, `PerRank` for what each worker has for itself.
            step: Steps that are done, which `resume` returns.
        Raises:
            CkptError: the commit failed, and `on_save_error` is "raise"; see `Repository.commit`.
        """
        self.last_error, made = None, None
        try:
            options = self._ranks.on_top(self.repository, self._branch, self._left)
            made = self.repository.commit(
                state, step=step, branch=self._branch, metrics=self._ranks.from_first(lambda: _numbers(metrics)),
                meta={RUN: self._run},
                options=replace(options, create=True, orphan=self.last_commit is None),
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001
            self._failed(error, "a save failed, training goes on")
        else:
            self.last_commit, self._left = made, None
        if made is None or self._ranks.rank:
            ray.train.report(metrics)
            return
        self._forget(made)
        with TemporaryDirectory() as folder:
            checkpoint = ray.train.Checkpoint.from_directory(folder)
            checkpoint.set_metadata({COMMIT: made.id, "repository": self.repository.url, "step": step})
            ray.train.report(metrics, checkpoint, checkpoint_dir_name=made.id)

    def _found(self) -> CommitInfo | None:
        """The commit that Ray resumes from."""
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            return None
        commit = checkpoint.get_metadata().get(COMMIT)
        if not isinstance(commit, str):
            raise InvalidInputError(f"{checkpoint} names no commit: it was not made by CasCheckpoints")
        return self.repository.log(commit, limit=1)[0]

    def _forget(self, newest: CommitInfo) -> None:
        """Forget commits of this training whose checkpoints Ray does not have any more; by one rank."""
        reported = ray.train.get_all_reported_checkpoints(ray.train.CheckpointConsistencyMode.COMMITTED)
        if not reported:  # as in local mode, which stores none
            return
        kept = {newest.id, *(os.path.basename(each.checkpoint.path) for each in reported)}
        try:
            history = self.repository.log(newest, first_parent=True)
            old = [each for each in history if _run_of(each) == self._run and each.id not in kept]
            forget_own(self.repository, self._branch, old)
        except CkptError as error:  # on this rank alone, so it cannot end the training of all
            _LOGGER.warning("step %s is committed, but older ones were not forgotten: %s", newest.step, error)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, Real)}


def _run_of(commit: CommitInfo) -> str | None:
    """Which training a commit is of."""
    return commit.meta.get(RUN) if isinstance(commit.meta, dict) else None
