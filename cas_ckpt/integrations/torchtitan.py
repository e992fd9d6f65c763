"""`CasCheckpointManager`: checkpoints of torchtitan's Trainer as commits.

    config.checkpoint = CasCheckpointManager.Config(enable=True, repository="runs/ckpts", interval=100)

1. Trainer builds the manager on all ranks, which open the repository together.
2. `load`: the newest commit of the branch is checked out into the live objects. If there is none yet, torchtitan's own
   manager looks for files, by its own rules: `folder`, then `initial_load_path`.
3. `save`: each `interval` steps all ranks commit, at once or in the background (`async_mode`). What the last save did
   not keep of the branch beyond `keep_latest_k` is forgotten then.

Parameters and optimizer state go by the names that torchtitan gives them, so that a commit resumes on any number of
ranks, sharded in any way.

Invariant: a save that fails leaves the one before it. Must not know private names of torchtitan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torchtitan.components.checkpointer import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    AsyncMode,
    BaseCheckpointManager,
    CheckpointManager,
    ModelWrapper,
)

from cas_ckpt import (
    CkptError,
    CommitInfo,
    CommitOptions,
    InvalidInputError,
    NotFoundError,
    PendingCommit,
    Repository,
    RNGState,
)
from cas_ckpt.arguments import OnSaveError, check_choice
from cas_ckpt.integrations.ranks import Ranks
from cas_ckpt.integrations.rotation import forget_own
from cas_ckpt.integrations.saves import Saves

_LOGGER = logging.getLogger("cas_ckpt")

RNG = "rng"
"""Key of the random states of each rank, which torchtitan itself does not save."""

MARK = "torchtitan"
"""In the `meta` of each commit: FULL, or ONLY_MODEL."""

FULL, ONLY_MODEL = "full", "model"


class CasCheckpointManager(Saves, BaseCheckpointManager):
    """Saves to a repository and resumes from it; Trainer builds it of its `Config` and calls the rest.

    Attributes:
        repository: The repository, open.
        last_commit: The commit of the last save that succeeded, or None.
        last_error: What the last save failed of; None if it did not.
        states: What is saved, by key.
        save_future: The commit in the background, if there is one.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """Settings of torchtitan, which mean what they mean there, and those of the repository."""

        repository: str = ""
        """Path or URL of the repository, which all ranks see; it is made if there is none."""

        branch: str = ""
        """Where commits go and where training resumes from; if empty, the default branch."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
        """Commit at once; or in the background: then training waits until the state is copied, in pinned memory."""

        on_save_error: OnSaveError = "warn"
        """What a save fails of is logged as an error and training goes on; or it ends the training."""

        def __post_init__(self) -> None:
            """Refuse what cannot be meant.

            Raises:
                InvalidInputError: no repository, or another word than there are.
                ValueError: what torchtitan itself refuses.
            """
            BaseCheckpointManager.Config.__post_init__(self)
            if self.enable and not self.repository:
                raise InvalidInputError('repository is "": give the path or URL of a repository')
            modes = [mode.value for mode in AsyncMode]
            if self.async_mode not in modes:
                raise InvalidInputError(f"async_mode is {self.async_mode!r}: wanted one of {modes}")
            check_choice("on_save_error", self.on_save_error, OnSaveError)

    def __init__(
        self, config: Config, *, dataloader: Any, model_parts: list[torch.nn.Module], optimizers: Any,
        lr_schedulers: Any, states: dict[str, Any], sd_adapter: Any, base_folder: str = "",
    ) -> None:  # fmt: skip
        """Open the repository, which all ranks do together; torchtitan gives the arguments.

        Raises:
            InvalidInputError: `exclude_from_loading` names what is not there, or there are no names of Hugging Face.
            CkptError: the repository cannot be opened; see `Repository.open`.
        """
        self.enable = config.enable
        self.save_future: PendingCommit | None = None
        if not self.enable:
            return
        live = {MODEL: ModelWrapper(model_parts), OPTIMIZER: optimizers, LR_SCHEDULER: lr_schedulers, RNG: RNGState()}
        states.update({**live, **({} if dataloader is None else {DATALOADER: dataloader})})
        unknown = [name for name in config.exclude_from_loading if name not in states]
        if unknown:
            raise InvalidInputError(f"exclude_from_loading has {unknown}: there are {sorted(states)}")
        if config.last_save_in_hf and sd_adapter is None:
            raise InvalidInputError("last_save_in_hf: torchtitan has no names of Hugging Face for this model")
        self.states = states
        self._on_error(config.on_save_error)
        self._config = config
        self._files: Any = None
        self._live = {
            "dataloader": dataloader, "model_parts": model_parts, "optimizers": optimizers,
            "lr_schedulers": lr_schedulers, "sd_adapter": sd_adapter, "base_folder": base_folder,
        }  # fmt: skip
        self._has_history = False
        self._left: str | None = None
        writes = not config.load_only
        self.repository = Repository.open(config.repository, create=writes, read_only=not writes)
        self._branch = config.branch or self.repository.default_branch

    # ------------------------------------------------------------ what the base class calls

    def _load(self, step: int = -1) -> bool:
        """Restore the commit of `step`, or the newest; whether there was one.

        Raises:
            NotFoundError: no commit of the branch is of this step.
            CkptError: it cannot be restored; see `Repository.checkout`.
        """
        found: tuple[str, int | None] | None = Ranks().from_first(lambda: self._find(step))
        if found is None:
            _LOGGER.info("no commit on %s of %s yet: torchtitan looks for files", self._branch, self.repository.url)
            return bool(self._own_manager().load())
        commit, saved_step = found
        names = [name for name in self.states if name not in self._config.exclude_from_loading]
        if saved_step == 0:
            names = [MODEL]
        self._keep_generator()
        self.repository.checkout(
            commit, into={name: self.states[name] for name in names},
            keys=None if len(names) == len(self.states) else names,
        )  # fmt: skip
        self._has_history = True
        self._left = commit
        _LOGGER.info("training goes on from step %s of %s", saved_step, self.repository.url)
        return True

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Commit if it is time to; whether a commit was made, or begun.

        Raises:
            CkptError: a commit failed, and `on_save_error` is "raise"; see `Repository.commit`.
        """
        config = self._config
        is_first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (is_first or last_step or curr_step % config.interval == 0):
            return False
        self.maybe_wait_for_saving()
        only_model = last_step and config.last_save_model_only
        state: dict[str, Any] = {MODEL: self._exported()} if only_model else self.states
        said: dict[str, Any] = {
            "step": curr_step, "branch": self._branch, "meta": {MARK: ONLY_MODEL if only_model else FULL},
        }  # fmt: skip
        at_once = last_step or config.async_mode == AsyncMode.DISABLED.value
        commit = self.repository.commit if at_once else self.repository.commit_async
        succeeded = self._attempt(lambda: commit(state, **said, options=self._options()))
        if only_model and config.last_save_in_hf:
            own = self._own_manager()
            own.dcp_save(state[MODEL], f"{own.folder}/step-{curr_step}", AsyncMode.DISABLED, to_hf=True)
        return succeeded

    def _maybe_wait_for_staging(self) -> None:
        """Nothing to wait for: `save` returns when the state is copied."""

    def _wait_for_saving(self) -> None:
        """Return when the commit in the background is made, or has failed."""
        pending, self.save_future = self.save_future, None
        if pending is not None:
            self._attempt(pending.result)

    def _close(self) -> None:
        """Wait for the commit in the background, and close the repository."""
        try:
            self.maybe_wait_for_saving()
        finally:
            self.repository.close()

    # ------------------------------------------------------------ steps

    def _attempt(self, save: Callable[[], CommitInfo | PendingCommit]) -> bool:
        """Save, and tidy up after a commit that was made; whether it succeeded, as far as is known yet."""
        self.last_error = None
        try:
            made = save()
        except Exception as error:  # noqa: BLE001
            self._failed(error, "a save failed, training goes on")
            return False
        if isinstance(made, PendingCommit):
            self.save_future = made
            return True
        self.last_commit, self._has_history, self._left = made, True, None
        if self._config.keep_latest_k and Ranks().rank == 0:
            try:
                self._forget(made)
            except CkptError as error:  # on this rank alone, so it cannot end the training of all
                _LOGGER.warning("step %s is committed, but older ones were not forgotten: %s", made.step, error)
        return True

    def _find(self, step: int) -> tuple[str, int | None] | None:
        """The commit to resume from, and its step; None: there is none yet."""
        newest = self.repository.latest(self._branch)
        if newest is None and step == -1:
            return None
        commits = [] if newest is None else self.repository.log(newest, first_parent=True)
        found = [each for each in commits if not each.forgotten and (each.step == 0 or not _is_only_model(each))]
        for commit in found:
            if step in (-1, commit.step):
                return commit.id, commit.step
        if step == -1:
            if commits:
                _LOGGER.warning("no commit on %s has more than a model: training begins anew", self._branch)
            return None
        steps = [each.step for each in found]
        raise NotFoundError(f"load_step is {step}: {self._branch} of {self.repository.url} has the steps {steps}")

    def _options(self) -> CommitOptions:
        """Of the next commit: a new training may begin its branch, and one that went back says where it came from."""
        options = Ranks().on_top(self.repository, self._branch, self._left)
        return replace(options, create=True, orphan=not self._has_history)

    def _exported(self) -> dict[str, Any]:
        """The model in the dtype of exports."""
        dtype = getattr(torch, self._config.export_dtype)
        state = self.states[MODEL].state_dict()
        return {
            name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for name, value in state.items()
        }

    def _forget(self, newest: CommitInfo) -> None:
        """Forget the commits of this training on the branch but for the `keep_latest_k` youngest; by one rank.

        Of models alone there may be as many: the youngest that training resumes from stays in any case.
        """
        own = [
            each for each in self.repository.log(newest, first_parent=True)
            if isinstance(each.meta, dict) and MARK in each.meta and not each.forgotten
        ]  # fmt: skip
        whole = next((each for each in own if not _is_only_model(each)), None)
        old = [each for each in own[self._config.keep_latest_k :] if each is not whole]
        forget_own(self.repository, self._branch, old)

    def _keep_generator(self) -> None:
        """Let the loader draw its seed elsewhere, when it begins, than from the random state that is restored now."""
        loader = self.states.get(DATALOADER)
        if isinstance(loader, torch.utils.data.DataLoader) and loader.generator is None:
            loader.generator = torch.Generator().set_state(torch.get_rng_state())

    def _own_manager(self) -> Any:
        """Torchtitan's own manager, for files."""
        if self._files is None:
            shared = {each.name: getattr(self._config, each.name) for each in fields(BaseCheckpointManager.Config)}
            shared.update(keep_latest_k=0, exclude_from_loading=[
                name for name in self._config.exclude_from_loading if name != RNG
            ])  # fmt: skip
            states = {name: value for name, value in self.states.items() if name != RNG}
            self._files = CheckpointManager.Config(**shared).build(states=states, **self._live)
        return self._files


def _is_only_model(commit: CommitInfo) -> bool:
    return isinstance(commit.meta, dict) and commit.meta.get(MARK) == ONLY_MODEL
