"""A process that lives in a repository with others: commits, branches, checks out, forgets and collects.

    Forked(live, path, number)            until the file PATH.stop is there, or it is killed
    Forked(commit_stalled, path, number)  commits once, stopped (SIGSTOP) right before its swap

What a commit must hold follows from its step, so whoever reads one knows. Each thing that is durable is told on
stdout, in a line. An error of a kind that such a process need not expect ends it with a traceback.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cas_ckpt.core.config import INDEX_PATH
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.refs import RefKind
from cas_ckpt.errors import ConflictError, NotFoundError
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.ops.history.log import log_commits
from cas_ckpt.ops.refs import create_branch, delete_branch
from cas_ckpt.ops.retention.forget import forget_by_policy
from cas_ckpt.ops.retention.policy import Policy, Retention
from cas_ckpt.storage.file import FileStore
from tests.builders import commit, same_bytes, stored_arrays
from tests.meddling import MeddledStore

STEPS_PER_PROCESS = 1_000_000
KEPT = 4

EAGER = GcOptions(min_age_s=0, reflog_expire_s=0, max_unused=0.1, many_small=16)


def state_of(step: int) -> dict[str, Any]:
    """What step `step` commits: a tensor of its own, one that ten steps share, one that all share."""
    return {
        "own": np.random.default_rng(step).integers(0, 255, 30_000, np.uint8),
        "decade": np.random.default_rng(step // 10).integers(0, 255, 30_000, np.uint8),
        "all": np.arange(20_000, dtype=np.int32),
        "step": step,
    }


def is_whole(handle: RepositoryHandle, root: bytes, step: int) -> bool:
    found, wanted = stored_arrays(handle, root.hex()), state_of(step)
    return all(same_bytes(found[key], wanted[key]) for key in ("own", "decade", "all"))


class Citizen:
    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.handle = RepositoryHandle.open(path)
        self.number = number
        self.step = number * STEPS_PER_PROCESS
        self.random = random.Random(number)
        self.own = f"own-{number}"

    def live(self) -> None:
        """Do one thing after another."""
        verbs: list[Callable[[], None]] = [
            *[self.commit_to_main] * 3, *[self.commit_to_own] * 3, *[self.read] * 3, self.branch, self.delete,
            self.forget, *[self.collect] * 2,
        ]  # fmt: skip
        while not self.path.with_suffix(".stop").exists():
            self.random.choice(verbs)()

    def commit_to(self, branch: str) -> None:
        self.step += 1
        info = commit(self.handle, state_of(self.step), branch=branch, step=self.step)
        print("committed", branch, info.id, self.step, flush=True)

    def commit_to_main(self) -> None:
        self.commit_to("main")

    def commit_to_own(self) -> None:
        self.commit_to(self.own)

    def read(self) -> None:
        """Check out some commit of some branch: whole, or gone, never wrong."""
        branch = self.random.choice(list(self.handle.refs.list(RefKind.BRANCH)))
        try:
            info = self.random.choice(list(log_commits(self.handle, (branch.name,), limit=2 * KEPT)))
            if info.step is None or not is_whole(self.handle, bytes.fromhex(info.root), info.step):
                sys.exit(f"commit {info.id} of {branch.name} holds other bytes than it was given")
            print("read", flush=True)
        except NotFoundError as error:
            print("gone", error, flush=True)

    def branch(self) -> None:
        """A branch at an old commit of somebody."""
        back = self.random.randrange(2 * KEPT)
        try:
            create_branch(self.handle, f"fork-{self.step}-{self.random.randrange(10**6)}", start=f"main~{back}")
        except (NotFoundError, ConflictError) as error:
            print("no branch", error, flush=True)

    def delete(self) -> None:
        forks = [ref.name for ref in self.handle.refs.list(RefKind.BRANCH) if ref.name.startswith("fork-")]
        try:
            if forks:
                delete_branch(self.handle, self.random.choice(forks), force=True)
        except (NotFoundError, ConflictError) as error:
            print("not deleted", error, flush=True)

    def forget(self) -> None:
        forget_by_policy(self.handle, Retention(Policy(keep_last=KEPT)))
        print("forgot", flush=True)

    def collect(self) -> None:
        try:
            report = collect_garbage(self.handle, EAGER)
            print("collected", report.deleted_packs, report.took_over, flush=True)
        except ConflictError:
            print("beaten", flush=True)


def commit_stalled(path: Path, number: int) -> None:
    """Commit, stopped before the first swap of a branch as a suspended laptop would be."""
    stop = lambda: os.kill(os.getpid(), signal.SIGSTOP)  # noqa: E731
    store = MeddledStore(FileStore(path), stop, before="compare_and_swap", key="refs/*")
    handle = RepositoryHandle.on_store(store, index_url=str(path / INDEX_PATH))
    print("committed", commit(handle, state_of(number), step=number).id, flush=True)


def live(path: Path, number: int) -> None:
    Citizen(path, number).live()
