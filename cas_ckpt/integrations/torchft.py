"""`CasTransport`: replicas of torchft heal from a repository, in place of one another's memory.

    manager = Manager(..., checkpoint_transport=CasTransport("s3://bucket/healing"))

1. Manager tells `metadata` to the other replicas: the branch that this rank commits to, and what its commits have in
   their `meta`, so that none that an earlier process left there is taken for one of them.
2. `send_checkpoint`: a rank of a healthy replica commits its state at that step; it may change when the call returns.
3. `recv_checkpoint`: the same rank of a replica that is behind waits for the commit of that step, and loads it, every
   byte verified. Any number of replicas may do so, and none of them asks the one that sent it.
4. The next send forgets all but the commit before it; `shutdown` deletes the branch.

torchft heals each rank by itself, from one replica or another, so nothing here is collective: of what is divided over
the ranks of a replica each rank commits its own part.

Invariant: what is loaded is the state of the step that was asked for, or an error. Nothing is unpickled.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from threading import Event
from typing import Any, TypeVar, cast
from uuid import uuid4

import torch
from torch.distributed.tensor import DTensor
from torchft.checkpointing import CheckpointTransport

from cas_ckpt import CkptError, InvalidInputError, MismatchError, PendingCommit, Policy, Repository, StillPendingError
from cas_ckpt.arguments import OnSaveError
from cas_ckpt.integrations.saves import Saves

_LOGGER = logging.getLogger("cas_ckpt")

TOLD = "a state for other replicas was not committed, training goes on"

POLL_S = 0.1
"""How often it is looked for a commit that another replica makes."""

DIVIDED = "divided"
"""In the `meta` of a commit: where it has a part of a tensor that is divided over ranks."""

SENDER = "sender"
"""In the `meta` of a commit: the transport that made it."""

T = TypeVar("T")


class CasTransport(Saves, CheckpointTransport[T]):
    """Give it to a `Manager` of torchft; each rank of each replica makes one.

    Attributes:
        repository: The repository, open, for this process alone.
        branch: Where this rank commits.
        last_error: What the last send failed of; None if it did not.
    """

    def __init__(
        self,
        repository: str | os.PathLike[str],
        *,
        branch: str | None = None,
        state_dict: Callable[[], Mapping[str, Any]] | None = None,
        on_save_error: OnSaveError = "warn",
    ) -> None:
        """Open the repository, or make it.

        Args:
            repository: A path or URL that all replicas see.
            branch: Where this rank commits, another one than all other ranks; None: a new name.
            state_dict: Where the state is divided over ranks (DTensors): the function that the Manager has for it, so
                that what is loaded is divided as the live tensors are.
            on_save_error: "warn": what a send fails of is logged as an error, the replica that sends goes on, and the
                one that heals tries again. "raise": the step fails on both.
        Raises:
            InvalidInputError: another word for `on_save_error`, or an open repository, which may have a process group.
            CkptError: it cannot be opened; see `Repository.open`.
        """
        self._on_error(on_save_error)
        if not isinstance(repository, (str, os.PathLike)):
            raise InvalidInputError("repository: give a path or URL, which is opened without a process group")
        self.repository = Repository.open(repository, create=True, group=None)
        self._sender = uuid4().hex
        self.branch = branch or f"torchft-{self._sender}"
        self._state_dict = state_dict
        self._pending: PendingCommit | None = None

    def metadata(self) -> str:
        """The branch that this rank commits to, and which of its commits are those of this transport."""
        return f"{self.branch} {self._sender}"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Begin the commit of `state_dict`, which may change when this returns.

        Raises:
            CkptError: it cannot be committed, or the send before could not, and `on_save_error` is "raise".
        """
        before: list[Callable[[], None]] = [lambda: self._settle(timeout), self._tidy]
        for each in before:
            try:
                each()
            except Exception as error:  # noqa: BLE001 - what a commit in the background raised
                self._failed(error, TOLD)
                if self._pending is not None:  # it goes on, and another one would wait for it
                    return
        self.last_error = None
        try:
            self._pending = self.repository.commit_async(
                {"state": _mapped(state_dict, _local)}, step=step, branch=self.branch,
                message=f"for the replicas {dst_ranks}",
                options=replace(self.repository.commit_options, create=True, orphan=True),
                meta={SENDER: self._sender, DIVIDED: [list(path) for path, _ in _parts(state_dict)]},
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001
            self._failed(error, TOLD)

    def disallow_checkpoint(self) -> None:
        """Tell what the last send failed of, if it has. There is nothing to wait for: the state was copied."""
        if self._pending is not None and self._pending.done():
            try:
                self._settle()
            except Exception as error:  # noqa: BLE001 - what a commit in the background raised
                self._failed(error, TOLD)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Wait until the state of `step` is committed to the branch `metadata`, and load it.

        Tensors are in host memory; those that are divided over ranks where the live ones are.

        Raises:
            StillPendingError: it was not committed in time.
            MismatchError: a part is divided, and the live tensor is not, or `state_dict` was not given.
            CkptError: it cannot be loaded; see `Repository.load`.
        """
        branch, _, sender = metadata.partition(" ")
        for _ in range(1 + int(timeout.total_seconds() / POLL_S)):
            commit = self.repository.latest(branch)
            said = commit.meta if commit is not None and isinstance(commit.meta, dict) else {}
            if commit is not None and commit.step == step and said.get(SENDER) == sender:
                return cast(T, self._divided(self.repository.load(commit)["state"], said[DIVIDED]))
            Event().wait(min(POLL_S, timeout.total_seconds()))
        raise StillPendingError(
            f"timed out after {timeout}: replica {src_rank} has committed no state of step {step} to {branch} of "
            f"{self.repository.url}"
        )

    def shutdown(self, wait: bool = True) -> None:
        """Delete what was committed for others, and close the repository; without `wait` the last send is dropped."""
        pending, self._pending = self._pending, None
        try:
            if pending is not None and not (wait or pending.done()):
                pending.cancel()
            elif pending is not None:
                pending.exception()
            if self.repository.latest(self.branch) is not None:
                self.repository.delete_branch(self.branch, force=True)
                self.repository.gc()
        except CkptError as error:
            _LOGGER.warning("branch %s was not deleted: %s", self.branch, error)
        self.repository.close()

    # ------------------------------------------------------------ steps

    def _settle(self, timeout: timedelta | None = None) -> None:
        """Wait for the last send; raises what it failed of."""
        if self._pending is not None:
            try:
                self._pending.result(None if timeout is None else timeout.total_seconds())
            finally:
                if self._pending.done():
                    self._pending = None

    def _tidy(self) -> None:
        """Forget all that was sent but the last."""
        if self.repository.latest(self.branch) is not None:
            self.repository.forget(Policy(keep_last=1), branches=self.branch, gc=True)

    def _divided(self, state: Any, parts: list[list[Any]]) -> Any:
        """`state` with a new DTensor in place of each part, divided as the live one."""
        live = dict(_parts(self._state_dict() if parts and self._state_dict is not None else {}))
        wanted = {tuple(path) for path in parts}

        def join(path: tuple[Any, ...], value: Any) -> Any:
            if path not in wanted:
                return value
            found = live.get(path, live.get(path[2:]))  # a Manager has them below "user" and a name
            if found is None:
                raise MismatchError(f"{path} is part of a divided tensor, and there is none here: give state_dict=")
            local = found.to_local()
            if (local.shape, local.dtype) != (value.shape, value.dtype):
                held, sent = ((tuple(each.shape), each.dtype) for each in (local, value))
                raise MismatchError(f"{path}: this rank holds {held} of it, it was sent {sent}")
            made = cast(DTensor, torch.empty_like(found))  # a replica that heals goes on with the live one meanwhile
            made.to_local().copy_(value)
            return made

        return _mapped(state, join)


def _local(path: tuple[Any, ...], value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _parts(state: Any) -> list[tuple[tuple[Any, ...], DTensor]]:
    """The DTensors in `state`, by path."""
    found: list[tuple[tuple[Any, ...], DTensor]] = []

    def note(path: tuple[Any, ...], value: Any) -> None:
        if isinstance(value, DTensor):
            found.append((path, value))

    _mapped(state, note)
    return found


def _mapped(value: Any, change: Callable[[tuple[Any, ...], Any], Any], path: tuple[Any, ...] = ()) -> Any:
    """`value` with `change(path, leaf)` in place of each leaf."""
    if isinstance(value, Mapping):
        return {name: _mapped(child, change, (*path, name)) for name, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(child, change, (*path, number)) for number, child in enumerate(value))
    return change(path, value)
