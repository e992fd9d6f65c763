"""Repositories that stay open between snapshots, and the branches that snapshots go to.

A repository is opened once for each process group and kept, with the memory that `async_take` copies into.
`close_repositories` closes all of them; a folder that was deleted meanwhile is noticed, and opened anew.

Snapshots of one run follow one another on a branch, so that `cas-ckpt log` shows the run:

    the first in a repository                        the default branch, "main"
    after another one of this process                the branch of that one
    after a restore of the newest snapshot of a branch       that branch: a run that was resumed
    after a restore of an older one                  a new branch, "run-...", that begins there; without a parent if
                                                     that was replaced or deleted meanwhile
    otherwise: another run                           a new branch, "run-...", without a parent

Invariant: which tag a snapshot has says what it is; branches say only what followed what. Must not know states.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from cas_ckpt import CkptError, NotFoundError, Repository
from cas_ckpt.integrations.ranks import Ranks
from cas_ckpt.torchsnapshot.places import RUN, Place


@dataclass(slots=True, eq=False)
class Opened:
    """A repository that is kept open.

    Attributes:
        where: Its path or URL.
        folder: The folder it is in, held so that no other one can be taken for it; -1: none of this computer.
        group: The process group that it was opened with.
        branch: Where the next snapshot goes; None: not known yet.
    """

    repo: Repository
    where: str
    folder: int
    group: Any = None
    branch: str | None = None
    pid: int = field(default_factory=os.getpid)

    @property
    def is_there(self) -> bool:
        """Whether the repository is where it was when it was opened."""
        if self.folder < 0:
            return True
        try:
            now, then = os.stat(self.where), os.fstat(self.folder)
        except OSError:
            return False
        return (now.st_dev, now.st_ino) == (then.st_dev, then.st_ino)

    def close(self) -> None:
        """Wait for pending snapshots, and release everything. What they failed of was logged."""
        if self.folder >= 0:
            os.close(self.folder)
            self.folder = -1
        self.repo.close()

    def let_go(self) -> None:
        """Close it, if it is this process's; of a group or a folder that is gone it raises nothing."""
        if self.pid == os.getpid():
            with suppress(CkptError):  # what pending snapshots failed of was logged
                self.close()


_kept: dict[tuple[str, bool], Opened] = {}
_changing = Lock()


def reader(place: Place) -> Repository:
    """The repository of a snapshot, for this process alone.

    Raises:
        NoRepositoryError: there is none.
    """
    return _opened(place, (place.repository, False), None, lambda: _open(place, read_only=None, group=None)).repo


def is_kept(place: Place, ranks: Ranks) -> bool:
    """Whether the repository is open with these ranks: they open it anew together unless this holds on all."""
    found = _kept.get((place.repository, True))
    return found is not None and _is_good(found, ranks.group)


def together(place: Place, ranks: Ranks, *, create: bool) -> Opened:
    """The repository, with which the ranks commit and check out together. Collective, unless `is_kept` on all ranks.

    Args:
        create: Make an empty one if there is none.
    """
    key, group = (place.repository, True), ranks.group
    rights = {"create": True} if create else {"read_only": None}
    return _opened(place, key, group, lambda: _open(place, group=group, **rights))


def forget(place: Place) -> None:
    """Close the repository that ranks have open: one of them has not."""
    with _changing:
        found = _kept.pop((place.repository, True), None)
    if found is not None:
        found.let_go()


def close_repositories() -> None:
    """Close what snapshots keep open, after what is pending is taken. In a distributed job all ranks call it."""
    with _changing:
        found = [*_kept.values()]
        _kept.clear()
    for each in found:
        if each.pid == os.getpid():
            each.close()


def new_branch() -> str:
    """A branch for another run."""
    return f"{RUN}{secrets.token_hex(4)}"


def branch_for(opened: Opened) -> tuple[str, bool]:
    """The branch that the next snapshot goes to, and whether it has no parent there; for rank 0 to choose."""
    head = opened.repo.head
    is_unknown = head.commit is None or (head.branch is None and _is_gone(opened.repo, head.commit))
    if opened.branch is not None:
        return opened.branch, is_unknown
    if head.branch is not None and head.commit is not None:
        return head.branch, False
    if head.commit is not None:
        ends = [name for name, commit in opened.repo.branches().items() if commit == head.commit]
        return next(iter(ends), new_branch()), is_unknown
    is_empty = opened.repo.latest(opened.repo.default_branch) is None
    return opened.repo.default_branch if is_empty else new_branch(), True


def _is_gone(repo: Repository, commit: str) -> bool:
    """Whether nothing can follow a commit, as another process has replaced or deleted the snapshot that it was."""
    try:
        return repo.log(commit, limit=1)[0].forgotten
    except NotFoundError:
        return True


def _open(place: Place, **how: Any) -> Repository:
    return Repository.open(place.repository, **how, **place.options)


def _is_good(found: Opened, group: Any) -> bool:
    return found.group is group and found.pid == os.getpid() and found.is_there


def _opened(place: Place, key: tuple[str, bool], group: Any, make: Callable[[], Repository]) -> Opened:
    with _changing:
        found = _kept.get(key)
        if found is not None and _is_good(found, group):
            return found
        _kept.pop(key, None)
    if found is not None:
        found.let_go()
    repo = make()
    folder = -1 if "://" in place.repository else os.open(place.repository, os.O_RDONLY | os.O_DIRECTORY)
    made = Opened(repo, place.repository, folder, group)
    with _changing:
        _kept[key] = made
    return made
