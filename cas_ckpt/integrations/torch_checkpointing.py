"""`CasCheckpointManager`: what torch_checkpointing's CheckpointManager does, with commits in place of folders.

    manager = CasCheckpointManager("runs/ckpts", CheckpointManager.Config(items={"model": ItemSpec(resharder=...)}))
    manager.save("step_1000", {"model": model.state_dict(), "step": 1000})
    manager.load("step_1000", into={"model": model.state_dict(), "step": 0})

1. `save` commits the payload; its id is in the commit, so that there is no moment at which the one is there without the
   other. With an asynchronous `save` in the Config (its default) the commit is made in the background.
2. `load` finds the newest commit with that id, and checks it out into the live values.
3. As in torch_checkpointing, an item whose `ItemSpec` has a resharder is one for all ranks, divided in any way; any
   other is each rank's own, unless it holds DTensors.

Invariant: a save that fails leaves the ones before it. Must not know private names of torch_checkpointing.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.config import SyncCheckpointSaverConfig

from cas_ckpt import CommitInfo, InvalidInputError, MismatchError, NotFoundError, PendingCommit, PerRank, Repository
from cas_ckpt.arguments import OnSaveError
from cas_ckpt.integrations.ranks import Ranks
from cas_ckpt.integrations.saves import Saves

_LOGGER = logging.getLogger("cas_ckpt")

ID, PER_RANK = "checkpoint_id", "per_rank"
"""In the `meta` of each commit: what it was saved as, and which items each rank has for itself."""

FILES_ONLY = ("storage_config", "subprocess_init_fn", "pre_finalize_callback", "finalize_callback")
"""Settings that have a meaning for files alone."""


class CasCheckpointManager(Saves):
    """Takes the place of a CheckpointManager, with its Config; all ranks call each method together.

    Attributes:
        repository: The repository, open.
        last_commit: The commit of the last save that succeeded, or None.
        last_error: What the last save failed of; None if it did not.
    """

    def __init__(
        self,
        repository: Repository | str | os.PathLike[str],
        config: CheckpointManager.Config | None = None,
        *,
        branch: str | None = None,
        on_save_error: OnSaveError = "warn",
    ) -> None:
        """Open the repository, or make it.

        Args:
            repository: A path, a URL or an open repository; all ranks must see it.
            config: Of torch_checkpointing: `items`, `default`, and by the class of `save` whether saves return at once.
            branch: Where commits go; None: the default branch.
            on_save_error: "warn": what a save fails of is logged as an error. "raise": it is raised, of a save in the
                background by the next. The future that `save` returns raises it in any case.
        Raises:
            InvalidInputError: a setting that means nothing here, or another word for `on_save_error`.
            CkptError: it cannot be opened; see `Repository.open`.
        """
        config = config or CheckpointManager.Config()
        self._on_error(on_save_error)
        specs = {**config.items, "default": config.default}
        given = [name for name in FILES_ONLY if getattr(config, name) is not None]
        given += [f"layout of {name}" for name, spec in specs.items() if spec is not None and spec.layout is not None]
        if given:
            raise InvalidInputError(f"{', '.join(given)}: a commit has no files, leave this out")
        self._config = config
        self._pending: PendingCommit | None = None
        self._left: str | None = None
        self._is_closed = False
        self.repository = repository if isinstance(repository, Repository) else Repository.open(repository, create=True)
        self._branch = branch or self.repository.default_branch

    def save(self, checkpoint_id: str | os.PathLike[str], checkpoint: Mapping[str, Any]) -> PendingCommit | None:
        """Commit the items; the commit in the background, whose `result` waits for it, or None if it was made at once.

        Raises:
            InvalidInputError: an item that the Config does not allow, or one that it requires is not there.
            CkptError: it cannot be committed, or the save before could not, and `on_save_error` is "raise".
        """
        self._check_open()
        specs = self._specs(checkpoint)
        self._attempt(self._settled)
        own = [name for name, spec in specs.items() if spec.resharder is None and _is_own(checkpoint[name])]
        state = {name: PerRank(value) if name in own else value for name, value in checkpoint.items()}
        said: dict[str, Any] = {
            "message": os.fspath(checkpoint_id), "branch": self._branch, "step": _step(checkpoint_id, checkpoint),
            "meta": {ID: os.fspath(checkpoint_id), PER_RANK: own},
        }  # fmt: skip
        at_once = isinstance(self._config.save, SyncCheckpointSaverConfig)
        commit = self.repository.commit if at_once else self.repository.commit_async

        def begin() -> CommitInfo | PendingCommit:
            options = Ranks().on_top(self.repository, self._branch, self._left)
            return commit(state, **said, options=replace(options, create=True, orphan=self.last_commit is None))

        self._attempt(begin)
        return self._pending

    def load(
        self,
        checkpoint_id: str | os.PathLike[str],
        into: Mapping[str, Any] | None = None,
        *,
        map_location: Any = None,
        strict: bool = False,
        metadata_format: Any = None,
    ) -> dict[str, Any]:
        """The items of what was saved as this; those that `into` has a value for are restored in place, verified.

        Args:
            into: By item: a state dict of live tensors, a module, an optimizer, or None for new objects. If not given:
                new objects of the items that the Config names, else of all.
            map_location: Where new objects go; host memory if not given.
            strict: The entries of each item must agree; else what only one side has is left, and the log says so.
        Raises:
            NotFoundError: nothing was saved as this, or an item was not.
            MismatchError: shapes or dtypes do not agree, or entries if `strict`; `into` is untouched. Or a new object
                of an item that fewer ranks had for themselves.
            CkptError: it cannot be loaded; see `Repository.checkout`.
        """
        self._check_open()
        if metadata_format is not None:
            raise InvalidInputError("metadata_format: a commit has no files, leave this out")
        if into is None:
            into = dict.fromkeys(self._config.items)
        else:
            self._specs(into)
        self._attempt(self._settled)
        commit = self._find(os.fspath(checkpoint_id))
        own = commit.meta[PER_RANK]
        made = {name for name, value in into.items() if value is None}
        found = self._new_objects(commit, list(made), map_location) if made or not into else {}
        target: dict[str, Any] = {
            name: PerRank(into[name]) if name in own else into[name] for name in into if name not in made
        }
        if target:
            report = self.repository.checkout(commit.id, into=target, keys=list(target), strict=strict)
            left = [*report.missing, *report.unexpected]
            if left:
                _LOGGER.warning("%s: %d entries were left as they are, such as %s", checkpoint_id, len(left), left[0])
        self.last_commit, self._left = commit, commit.id
        found.update({name: value.value if isinstance(value, PerRank) else value for name, value in target.items()})
        return {name: found[name] for name in into or found}

    def latest(self) -> str | None:
        """The id of the newest save that succeeded; None if there is none."""
        self._check_open()
        self._attempt(self._settled)
        newest = self.repository.latest(self._branch)
        commits = [] if newest is None else self.repository.log(newest, first_parent=True)
        return next((str(each.meta[ID]) for each in commits if _is_saved(each)), None)

    def prewarm_staging(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: memory for copies is got by the first save, and kept."""

    def lock(self) -> AbstractContextManager[None]:
        """For an update of the state beside a save: nothing to wait for, as `save` returns when the state is copied."""
        return nullcontext()

    def close(self) -> None:
        """Wait for the commit in the background, and close the repository.

        Raises:
            CkptError: that commit failed, and `on_save_error` is "raise".
        """
        if not self._is_closed:
            self._is_closed = True
            try:
                self._attempt(self._settled)
            finally:
                self.repository.close()

    # ------------------------------------------------------------ steps

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidInputError("this CasCheckpointManager was closed: make another one")

    def _specs(self, payload: Mapping[str, Any]) -> dict[str, ItemSpec]:
        """The spec of each item."""
        items, default = self._config.items, self._config.default
        missing = [name for name, spec in items.items() if spec.required and name not in payload]
        unknown = [name for name in payload if name not in items and default is None]
        odd = [name for name in payload if not re.fullmatch(r"[A-Za-z_-][A-Za-z0-9_-]*", name)]
        for names, told in ((missing, "are required"), (unknown, "have no ItemSpec"), (odd, "are no names of items")):
            if names:
                raise InvalidInputError(f"{sorted(names)} {told}: give the items {sorted(items)}")
        return {name: items.get(name, default) for name in payload}

    def _attempt(self, save: Callable[[], CommitInfo | PendingCommit | None]) -> None:
        try:
            made = save()
        except Exception as error:  # noqa: BLE001
            self._failed(error, "a save failed, what was saved before is there")
            return
        if isinstance(made, PendingCommit):
            self._pending = made
        elif made is not None:
            self.last_commit, self.last_error, self._left = made, None, None

    def _settled(self) -> CommitInfo | None:
        """The commit in the background, when it is made; None if there is none."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def _find(self, checkpoint_id: str) -> CommitInfo:
        """The newest commit that was saved as this."""
        newest = self.repository.latest(self._branch)
        commits = [] if newest is None else self.repository.log(newest, first_parent=True)
        for commit in commits:
            if _is_saved(commit) and commit.meta[ID] == checkpoint_id:
                return commit
        raise NotFoundError(f"{checkpoint_id}: no commit of {self._branch} in {self.repository.url} was saved as this")

    def _new_objects(self, commit: CommitInfo, names: list[str], map_location: Any) -> dict[str, Any]:
        loaded = self.repository.load(commit, keys=names or None, map_location=map_location)
        ranks, own = Ranks(), [name for name in loaded if name in commit.meta[PER_RANK]]
        for name in own:
            if ranks.size > len(loaded[name]):
                raise MismatchError(
                    f"{name}: each rank's own, of {len(loaded[name])} ranks, so that there is nothing for "
                    f"{ranks.size - len(loaded[name])} of {ranks.size}: give live values for it, which stay as they are"
                )
        return {name: value[ranks.rank] if name in own else value for name, value in loaded.items()}


def _is_saved(commit: CommitInfo) -> bool:
    return isinstance(commit.meta, dict) and ID in commit.meta and not commit.forgotten


def _is_own(value: Any) -> bool:
    """Whether ranks may each have another one: there are several, and it holds no DTensor."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return False
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
        value = value.state_dict()
    children = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return not isinstance(value, DTensor) and all(map(_is_own, children))


def _step(checkpoint_id: str | os.PathLike[str], checkpoint: Mapping[str, Any]) -> int | None:
    """The step that the payload names, else the number that the id ends with."""
    step = checkpoint.get("step")
    digits = re.search(r"[0-9]{1,15}\Z", os.fspath(checkpoint_id))
    return step if type(step) is int else int(digits[0]) if digits else None
