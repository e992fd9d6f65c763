"""`CasCheckpointIO`: what Trainer and Fabric of Lightning save is a commit, and a file names it.

    trainer = Trainer(plugins=[CasCheckpointIO("runs/ckpts")], callbacks=[ModelCheckpoint("runs/files")])
    fabric = Fabric(plugins=[CasCheckpointIO("runs/ckpts")])

A save, which Lightning makes on rank 0 alone:

1. The checkpoint, a dict, is committed by a repository that rank 0 opened for itself, with its step and metrics.
2. Once the commit is durable, a tag names it, and a small file at Lightning's path says which commit it is. Lightning
   goes by such files: it looks whether they are there, compares, links and removes them.
3. Then goes what the save replaces: what the path named before, and what Lightning wanted removed meanwhile.

A commit is given up by deleting its tag, forgetting it and collecting garbage; the file goes before. As long as a save
is under way, or the last one failed, nothing is removed.

Invariant: no commit is given up before the one that follows it is durable. Must not know private names of Lightning,
nor its Trainer, which Fabric does not import.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem

from cas_ckpt import (
    CkptError,
    CommitInfo,
    CommitOptions,
    InvalidInputError,
    NotFoundError,
    Repository,
    UnsupportedValueError,
)
from cas_ckpt.arguments import OnSaveError, check_choice
from cas_ckpt.integrations.lightning_files import absolute, file_of, read_file, write_file
from cas_ckpt.integrations.rotation import alone

_LOGGER = logging.getLogger("cas_ckpt")

REVISION = "cas:"
"""Beginning of a path that is no file but a revision: `ckpt_path="cas:main~2"`."""

METRICS, RNG = "cas_ckpt.metrics", "cas_ckpt.rng"
"""What `CasModelCheckpoint` adds to a checkpoint: the metrics of the commit, and random states by rank."""

BY_KEY = ("state_dict", "optimizer_states", "lr_schedulers", "loops", RNG)
"""Parts of a checkpoint that are read by key. Elsewhere the order of dicts is kept: of equal metrics Lightning takes
the checkpoint that comes first."""


class CasCheckpointIO(TorchCheckpointIO):
    """Where Lightning's checkpoints go: `Trainer(plugins=[CasCheckpointIO("runs/ckpts")])`, `Fabric(plugins=[...])`.

    Paths are those that Lightning, or the caller of `fabric.save`, chooses; the files there name commits. What is no
    such file is read as Lightning's own, so that a training may go on from one. Hidden files (`.temp.ckpt`), by which
    Lightning hands something over and which it removes again, stay its own.

    Attributes:
        branch: Where commits go; None: the default branch.
        last_commit: The commit of the last save that succeeded, or None.
        last_error: What the last save failed of; None if it did not.
        loaded: The commit that was loaded last, or None.
        last_files: Paths at which a file shall name the branch.
    """

    def __init__(
        self,
        repository: Repository | str | os.PathLike[str],
        *,
        branch: str | None = None,
        on_save_error: OnSaveError = "warn",
        asynchronous: bool = False,
        collect: bool = True,
        options: CommitOptions | None = None,
    ) -> None:
        """Prepare; the repository is opened when it is needed, and made by the first save if there is none.

        Args:
            repository: A path or a URL, which all ranks that load must see. Of an open repository its URL, as Lightning
                saves on rank 0 alone: it is opened anew, for one process.
            branch: Where commits go, and what `last.ckpt` names; None: the default branch.
            on_save_error: "warn": what a save fails of is logged as an error, and training goes on. "raise": it is
                raised on rank 0, whose end Lightning's launchers and torchrun answer by ending the others.
            asynchronous: A save returns when the state is copied; commit, tag and file follow behind it. In place of
                Lightning's AsyncCheckpointIO, which is refused: it removes files that it has not yet written.
            collect: Collect garbage whenever a checkpoint is removed. False: forget it only, `repo.gc()` frees it.
            options: Of the commits. `allow_pickle=True` also unpickles; only for commits that you trust.
        Raises:
            InvalidInputError: another word for `on_save_error`.
        """
        check_choice("on_save_error", on_save_error, OnSaveError)
        self.branch, self.last_files = branch, list[str]()
        self.last_commit: CommitInfo | None = None
        self.loaded: CommitInfo | None = None
        self._unnamed: CommitInfo | None = None
        self.last_error: Exception | None = None
        self.url = repository.url if isinstance(repository, Repository) else os.fspath(repository)
        self._options, self._raise = options or CommitOptions(), on_save_error == "raise"
        self._asynchronous, self._collect = asynchronous, collect
        self.__setstate__({})

    def __getstate__(self) -> dict[str, Any]:
        """For a process that is spawned, which opens the repository for itself."""
        of_process = ("_repository", "_lock", "_thread")
        return {name: value for name, value in vars(self).items() if name not in of_process}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._repository: Repository | None = None
        self._lock, self._thread, self._pid = threading.RLock(), threading.current_thread(), os.getpid()
        self._saves, self._may_remove, self._to_remove = 0, True, list[str]()
        self._to_give_up = list[str]()

    # ------------------------------------------------------------ what Lightning calls

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Commit the checkpoint, and let a file at `path` name the commit. Called on rank 0 alone.

        Raises:
            InvalidInputError: `storage_options` are given; AsyncCheckpointIO is around it; or saves are asynchronous
                and there are links beside the file, as `ModelCheckpoint(save_last="link")` makes them.
            CkptError: the commit failed, and `on_save_error` is "raise"; see `Repository.commit`. If it is
                asynchronous, the next save raises it, or `teardown`.
        """
        if storage_options is not None:
            raise InvalidInputError("a commit has no storage_options: see the arguments of CasCheckpointIO")
        if os.path.basename(path).startswith("."):
            for added in (METRICS, RNG):  # Lightning reads it by torch, which takes no random states of NumPy
                checkpoint.pop(added, None)
            super().save_checkpoint(checkpoint, path)
            return
        self._open(create=True)
        if threading.current_thread() is not self._thread:
            raise InvalidInputError(
                "a CasCheckpointIO saves in the thread that made it: in place of AsyncCheckpointIO, which removes "
                "files that it has not yet written, say CasCheckpointIO(..., asynchronous=True)"
            )
        file = absolute(path)
        if self._asynchronous and any(each.is_symlink() for each in Path(file).parent.glob("*.ckpt")):
            raise InvalidInputError(
                f'there are links beside {file}: where saves are asynchronous, save_last="link" links to files that '
                "are not written yet; say save_last=True, or take CasModelCheckpoint"
            )
        self._raise_earlier()
        with self._lock:
            self._saves, self._may_remove = self._saves + 1, False
        try:
            self._commit(checkpoint, file)
        except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
            self._note_failure(file, error)
            self._raise_earlier()

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint whose commit the file at `path` names, or `cas:REVISION`; verified. Each rank for itself.

        Args:
            path: Where a save put it.
            map_location: The device that tensors go to; a function (Lightning's default) means host memory.
            weights_only: True: unpickle nothing, whatever `options` say. Nothing is unpickled without these.
        Raises:
            FileNotFoundError: there is no file.
            NotFoundError: the commit is not in the repository, or there is none yet.
            InvalidInputError: the commit is no checkpoint of Lightning.
            UnsupportedValueError: a value of it was pickled, and may not be unpickled.
        """
        named = {"commit": str(path)[len(REVISION) :]} if str(path).startswith(REVISION) else read_file(path)
        if named is None:
            place = {} if map_location is None else {"map_location": map_location}
            theirs: dict[str, Any] = super().load_checkpoint(path, weights_only=weights_only is not False, **place)
            return theirs
        repository = self._open()
        repository.drain()
        commit = repository.log(named.get("commit") or named["branch"], limit=1)[0]
        file = file_of(commit)
        if file is None:
            raise InvalidInputError(f"{path} is the commit {commit.short_id}, which is no checkpoint of Lightning")
        state = repository.load(
            commit, map_location=None if callable(map_location) else map_location,
            allow_pickle=self._options.allow_pickle and weights_only is not True,
        )  # fmt: skip
        folders = {os.path.dirname(absolute(each)) for each in (path, *self.last_files)}
        is_newest = "branch" in named and os.path.dirname(file) in folders
        if "branch" in named and not is_newest:
            _LOGGER.warning("%s is the newest commit of %s, which was saved as %s", path, named["branch"], file)
        self.loaded, self._unnamed = commit, commit if is_newest else None
        _reorder(state, commit.meta["lightning"]["order"])
        return state

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the file at `path` and give up the commit that it names, once the save that follows it is durable.

        A link goes alone. The newest commit of a branch, and what other tags name, stays until that changes.

        Raises:
            CkptError: the repository refused, and `on_save_error` is "raise".
        """
        with self._lock:
            self._to_remove.append(absolute(path))
            if not self._may_remove:
                return
        try:
            self._remove_waiting()
        except (CkptError, OSError) as error:
            if self._raise:
                raise
            _LOGGER.warning("%s was not removed, or not all that it held: %s", path, error)

    def teardown(self) -> None:
        """Wait for the save that is under way, and close the repository.

        Raises:
            CkptError: that save failed, and `on_save_error` is "raise".
        """
        if self._repository is not None and self._pid == os.getpid():
            self._repository.close()
            self._repository = None
        self._raise_earlier()

    def complete(self) -> None:
        """Let tag and file name what `last.ckpt` led to, if its process was killed before it did. On rank 0."""
        file = self._unnamed and file_of(self._unnamed)
        if self._unnamed is not None and file and not get_filesystem(file).exists(file):
            self._name(file, self._unnamed)

    # ------------------------------------------------------------ steps

    def _open(self, *, create: bool = False) -> Repository:
        """The repository, opened for this process alone."""
        if self._pid != os.getpid():  # forked
            self.__setstate__({})
        if self._repository is None:
            self._repository = Repository.open(self.url, create=create, group=None)
        return self._repository

    def _commit(self, checkpoint: Mapping[str, Any], file: str) -> None:
        repository = self._open()
        get_filesystem(file).makedirs(os.path.dirname(file), exist_ok=True)
        metrics, state = checkpoint.get(METRICS), {name: checkpoint[name] for name in checkpoint if name != METRICS}
        order = [[name, None if name in BY_KEY else _order(value, name)] for name, value in state.items()]
        steps = [state[name] for name in ("global_step", "step") if type(state.get(name)) is int]
        branch, options = self.branch or repository.default_branch, self._options
        if self.loaded is not None and branch not in repository.branches():
            options = replace(options, came_from=self.loaded)
        commit = repository.commit_async if self._asynchronous else repository.commit
        made = commit(
            state, message=os.path.basename(file), step=steps[0] if steps else None, metrics=metrics, branch=branch,
            meta={"lightning": {"file": file, "order": order}}, options=options,
        )  # fmt: skip
        if isinstance(made, CommitInfo):
            self._settle(file, self._saves, made)
        else:
            made.add_done_callback(partial(self._on_made, file, self._saves))

    def _on_made(self, file: str, number: int, pending: Any) -> None:
        """A commit in the background has ended: called by the thread that made it."""
        try:
            self._settle(file, number, pending.result())
        except Exception as error:  # noqa: BLE001 - the next save raises it, or `teardown`
            self._note_failure(file, error)

    def _settle(self, file: str, number: int, commit: CommitInfo) -> None:
        """The commit of the save of this number is durable: name it, and let go what it replaces."""
        with self._lock:
            old = None if os.path.islink(file) else read_file(file)
            self._name(file, commit)
            self.last_commit, self.last_error = commit, None
            self._may_remove = number == self._saves  # else the next one is under way, for which Lightning removes
            # What a process that was killed before it named it had committed for the same path is replaced, too.
            parents = [self._open().log(each, limit=1)[0] for each in commit.parents]
            replaced = {each.id for each in parents if file_of(each) == file} | {old and old.get("commit")}
            self._to_give_up += [each for each in replaced if each and each != commit.id]
        try:
            if self._may_remove:
                self._remove_waiting()
        except (CkptError, OSError) as error:
            _LOGGER.warning("%s is committed, but what it replaces stays: %s", file, error)

    def _name(self, file: str, commit: CommitInfo) -> None:
        """Let a tag, and the file, name the commit."""
        repository = self._open()
        branch, stem = self.branch or repository.default_branch, Path(file).stem[-100:]
        stem = re.sub("[^A-Za-z0-9._-]+|[.]{2,}", "-", stem).lstrip(".-_")
        repository.tag(f"{branch}/{stem}-{commit.short_id}", commit, force=True)
        write_file(file, {"cas_ckpt": 1, "repository": repository.url, "commit": commit.id})
        for last in self.last_files:  # each time: of several files Lightning takes the one that was written last
            write_file(last, {"cas_ckpt": 1, "repository": repository.url, "branch": branch})

    def _remove_waiting(self) -> None:
        """Remove the files that Lightning wants removed, and give up what they and older ones named."""
        with self._lock:
            while self._to_remove:
                named = None if os.path.islink(self._to_remove[0]) else read_file(self._to_remove[0])
                self._to_give_up += [named["commit"]] if named and "commit" in named else []
                super().remove_checkpoint(self._to_remove.pop(0))
            waiting, self._to_give_up = self._to_give_up, []
            for commit in waiting:
                self._give_up(commit)
            if len(self._to_give_up) < len(waiting) and self._collect:
                self._open().gc()

    def _give_up(self, commit: str) -> None:
        """Forget the commit; later, if it is the newest one of its branch, or somebody else has tagged it.

        What another branch leads to stays.
        """
        repository = self._open()
        branch = self.branch or repository.default_branch
        for tag, named in repository.tags().items():
            if named == commit and tag.endswith(f"-{commit[:12]}"):
                repository.delete_tag(tag)
        try:
            if alone(repository, branch, commit, limit=1):
                repository.forget(revisions=commit)
        except InvalidInputError:
            self._to_give_up.append(commit)
        except NotFoundError:
            pass  # of another repository

    def _note_failure(self, file: str, error: Exception) -> None:
        self.last_error = error
        _LOGGER.error("%s was not committed, what was saved before it stays: %s", file, error)

    def _raise_earlier(self) -> None:
        """Raise what a save failed of, once, if that was wanted."""
        error = self.last_error
        if self._raise and error is not None:
            self.last_error = None
            raise error


# ------------------------------------------------------------ the order of dicts


def _order(value: Any, key: str) -> list[list[Any]] | None:
    """The keys of dicts in `value`, in their order, each with the order of what it leads to.

    Raises:
        UnsupportedValueError: there is an object that has a state, of which a commit would hold no more than that.
    """
    if hasattr(value, "state_dict"):
        raise UnsupportedValueError(
            f"{key} is a {type(value).__name__}: a checkpoint is a dict of tensors and plain values; of an object give "
            "its state_dict(), or leave it out, save_hyperparameters(ignore=...)"
        )
    if isinstance(value, dict):
        return [[name, _order(each, f"{key}/{name}")] for name, each in value.items()] or None
    if isinstance(value, (list, tuple)):
        found = [[at, _order(each, f"{key}/{at}")] for at, each in enumerate(value)]
        return [each for each in found if each[1]] or None
    return None


def _reorder(value: Any, order: list[list[Any]] | None) -> None:
    """Bring the keys of dicts in `value` into that order, in place."""
    for key, inner in order or ():
        _reorder(value[key], inner)
        if isinstance(value, dict):
            value[key] = value.pop(key)
