"""Whatever becomes of a state after a lazy commit was called: the commit is the state of the call, or fails.

A random walk, repeatable by its seed, goes through what a program may do. The thread that stages is stepped by the
walk, one tensor at a time, so every change meets every moment of the staging. Where the state does not fit the staging
memory, the commit reads live memory beside it, in threads of its own.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

import pytest
import torch

from cas_ckpt import CommitOptions, PendingCommit, Repository, StateChangedError
from cas_ckpt.errors import BackgroundCommitError
from cas_ckpt.training.background import commits
from cas_ckpt.training.background.staged import Snapshot, StagedTensor
from cas_ckpt.transfer import staging
from tests.training.background.loops import KINDS, Training

TIMEOUT_S = 60
NUM_MOVES = 25
_NUMBERS = count()
_STAGE = Snapshot.stage


class Stepper:
    """Lets the threads that stage go on, one call of `Snapshot.stage` at a time."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._done = threading.Semaphore(0)
        self._caller = threading.get_ident()

    def stage(self, snapshot: Snapshot, tensors: Any, **how: Any) -> None:
        if threading.get_ident() == self._caller:
            _STAGE(snapshot, tensors, **how)
            return
        assert self._permits.acquire(timeout=TIMEOUT_S)
        try:
            _STAGE(snapshot, tensors, **how)
        finally:
            self._done.release()

    def advance(self, snapshots: list[Snapshot]) -> None:
        """One step of some stager, if one has a step left."""
        self._permits.release()
        while not self._done.acquire(timeout=0.005):
            if all(each.settled or each.error is not None for each in snapshots):
                return

    def go_on(self) -> None:
        self._permits.release(1_000_000)


@dataclass
class Commit:
    """A commit of the walk, and what is to be expected of it."""

    pending: PendingCommit
    root: str
    snapshot: Snapshot
    is_settled: bool = False
    may_fail: bool = False
    must_fail: bool = False

    def tensor(self, key: str) -> StagedTensor:
        return next(each for each in self.snapshot.tensors if each.key == key)


@dataclass
class Walk:
    """One program."""

    seed: int
    repo: Repository
    other: Repository
    staging_bytes: int | None
    stepper: Stepper = field(default_factory=Stepper)
    commits: list[Commit] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.training = Training(self.random.choice(list(KINDS)), self.seed)
        self.is_stepped = True

    # ------------------------------------------------------------ moves

    def commit(self) -> None:
        if len(self.commits) == 3:
            return
        if self.commits and self.staging_bytes is not None:
            self._go_on()  # there is no room for another one before these have ended
        root = self.other.commit(self.training.state).root
        while True:
            with suppress(BackgroundCommitError):  # one of those before failed: nothing was begun
                pending = self.repo.commit_async(
                    self.training.state,
                    snapshot="lazy",
                    options=CommitOptions(max_in_flight=9, staging_bytes=self.staging_bytes),
                )
                break
        snapshot = pending._snapshot
        if snapshot is not None:
            self.commits.append(Commit(pending, root, snapshot))
        else:  # it has ended already: all of it was saved at the call
            assert pending.result().root == root

    def advance(self) -> None:
        if self.is_stepped:
            self.stepper.advance([each.snapshot for each in self.commits])

    def forward(self) -> None:
        self.training.forward_and_backward()

    def change_what_is_loose(self) -> None:
        self.training.loose.numpy()[:] = self.random.random()
        self.training.progress["seen"][1]["a"] = self.random.random()
        self.training.optim.param_groups[0]["weight_decay"] = 0.01 * self.random.random()

    def step(self) -> None:
        self._go_on()
        self.training.step()
        self._settled()

    def wait_staged(self) -> None:
        self._go_on()
        for each in self.commits:
            each.pending.wait_staged()
        self._settled()

    def new_memory(self) -> None:
        for param in self.training.model.parameters():
            param.data = param.data.clone()

    def change_in_place(self) -> None:
        key, tensor = self._any_tensor()
        with torch.no_grad():
            tensor.add_(1)
        self._changed(key, counted=True)

    def change_uncounted(self) -> None:
        key, tensor = self._any_tensor()
        tensor.data.mul_(3).add_(1)
        self._changed(key, counted=False)

    # ------------------------------------------------------------ what follows from them

    def _go_on(self) -> None:
        if self.is_stepped:
            self.is_stepped = False
            self.stepper.go_on()

    def _settled(self) -> None:
        for each in self.commits:
            each.is_settled = True

    def _any_tensor(self) -> tuple[str, torch.Tensor]:
        named = dict(self.training.model.named_parameters())
        found: list[tuple[str, torch.Tensor]] = [(f"model/{name}", param) for name, param in named.items()]
        for name, param in named.items():
            for part, value in self.training.optim.state.get(param, {}).items():
                if isinstance(value, torch.Tensor) and value.ndim:
                    found.append((f"optim/state/{name}/{part}", value))
        return self.random.choice(found)

    def _changed(self, key: str, *, counted: bool) -> None:
        for each in self.commits:
            if each.is_settled:
                continue
            watched = each.tensor(key).watched if any(key == one.key for one in each.snapshot.tensors) else None
            if watched is None:  # copied at the call
                continue
            each.may_fail = True
            if self.staging_bytes is None and self.is_stepped and each.tensor(key).live is not None:
                # New memory since: the counters still count, the bytes of the call are safe.
                each.must_fail = each.must_fail or counted

    def end(self) -> None:
        self._go_on()
        published = []
        for each in self.commits:
            error = each.pending.exception()
            assert error is None or (isinstance(error, StateChangedError) and each.may_fail), error
            assert not (each.must_fail and error is None)
            if error is None:
                assert each.pending.result().root == each.root
                published.append(each.pending.result().id)
        found = [commit.id for commit in self.repo.log()][::-1]
        assert [one for one in found if one in published] == published
        assert not commits._held


MOVES = {
    Walk.commit: 2, Walk.advance: 10, Walk.forward: 2, Walk.change_what_is_loose: 2, Walk.step: 1, Walk.wait_staged: 1,
    Walk.new_memory: 1,
}  # fmt: skip
UNSEEN = {Walk.change_in_place: 1, Walk.change_uncounted: 1}


@pytest.mark.parametrize("staging_bytes", [None, 100_000])
@pytest.mark.parametrize("unseen", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a_commit_is_the_state_of_its_call_or_fails(
    seed: int, unseen: bool, staging_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "GRANULE_BYTES", 4096)
    monkeypatch.setattr(commits, "PORTION_BYTES", 1)
    url = f"memory://walk-{next(_NUMBERS)}"
    with Repository.init(url) as repo, Repository.init(f"{url}-beside") as other:
        walk = Walk(seed, repo, other, staging_bytes)
        monkeypatch.setattr(Snapshot, "stage", lambda self, tensors, **how: walk.stepper.stage(self, tensors, **how))
        moves = {**MOVES, **UNSEEN} if unseen else MOVES
        walk.commit()
        for move in walk.random.choices(list(moves), list(moves.values()), k=NUM_MOVES):
            move(walk)
        walk.end()
