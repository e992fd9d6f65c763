"""The ranks that save together through DCP, what they save to one at a time, and the repository that they save into.

Invariant: all writers over one process group of torch share one `GroupPeers`, because making
one is collective and writers are often made anew for every save. Over one such group, and
to one branch of a repository, one save of this process writes at a time, in the order in which they were begun, or not
at all (`Turn`). A save waits for those that `async_save` began before it (`wait_for_saves`); one that it cannot know of
(begun with a stager of somebody else's, or by another thread) is a conflict.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from typing import Any

import torch.distributed as dist

from cas_ckpt.clock import monotonic_s, pause
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.host_cache import AUTO
from cas_ckpt.core.records import CommitInfo
from cas_ckpt.core.refs import Head
from cas_ckpt.errors import ConflictError, InvalidInputError
from cas_ckpt.held_signals import held_signals
from cas_ckpt.objects.state import Path
from cas_ckpt.storage.url import open_store
from cas_ckpt.training.process_group import GroupPeers

_BUSY = (
    "another save to this branch, or over this process group, is not finished: wait for its future first "
    "(the commits would follow each other in any order, and DCP's own collectives would mix up two saves)"
)
_OVERTAKEN = (
    "a save to this branch, or over this process group, that was begun later has come first, and this one would be "
    "committed on top of it: wait for the future of a save before the next one is begun"
)
_LOOK_S = 0.005

_numbers = itertools.count(1)

_making = threading.RLock()


class Turn:
    """A branch, or the connections over a process group, to which one save of this process writes at a time.

    Attributes:
        latest: The number of the last save that has begun to write.
    """

    def __init__(self) -> None:
        self.latest = 0
        self._writer: Save | None = None

    def take(self, save: Save) -> None:
        """Let `save` write, until it `is_over`.

        Raises:
            ConflictError: another save writes, or one that was begun later has written.
        """
        with held_signals(), _making:  # a handler may wait for a save of another thread
            if self._writer is not None and not self._writer.is_over:
                raise ConflictError(_BUSY)
            if save.number < self.latest:
                raise ConflictError(_OVERTAKEN)
            self._writer, self.latest = save, save.number


@dataclass(slots=True, eq=False)
class Save:
    """A save of DCP in this process.

    Attributes:
        versions: Of modules, by where DCP has their states.
        before: Of one that `async_save` began: the threads that were there before DCP started the one that saves.
        patience_s: How long the next save waits for that thread to come to the writer.
        tag: What its commit is to be called.
        thread: The one that saves a state that was staged, once it has come to the writer. It ends with the save.
        turns: Those that it needs; none of one that is made by another process, or is still to come.
        is_over: It has written, or never will; set in one step, which no Ctrl-C divides.
        number: Larger than that of all that were begun before it in this process.
    """

    versions: Mapping[Path, Mapping[str, int]]
    before: frozenset[Any] = frozenset()
    patience_s: float = 0.0
    tag: str | None = None
    coordinates: bool = False
    collective: bool = True
    num_plans: int | None = None
    thread: Any = None
    turns: tuple[Turn, ...] = ()
    commit: CommitInfo | None = None
    is_over: bool = False
    number: int = field(default_factory=partial(next, _numbers))

    def come(self) -> None:
        """Note that this thread is the one that saves.

        Raises:
            ConflictError: it was given up.
        """
        if self.is_over:
            raise ConflictError(
                f"this save came to its writer later than {self.patience_s:g} s after dcp.async_save was called, and a "
                "later one did not wait for it any longer: raise timeout_s of the writer"
            )
        self.thread = threading.current_thread()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing of it goes on, however it ends; whether nothing does. At once in its own thread."""
        until_s = monotonic_s() + (self.patience_s if timeout_s is None else timeout_s)
        while self.thread is None and not self.is_over:
            if monotonic_s() >= until_s:
                self.is_over = timeout_s is None  # DCP failed before it came, as where no process can be started
                return self.is_over
            pause(_LOOK_S)
        if self.thread in (None, threading.current_thread()):
            return True
        self.thread.join(timeout_s)
        return not self.thread.is_alive()


_in_background: list[Save] = []


def note_in_background(save: Save) -> None:
    """Let later saves wait for this one."""
    with held_signals(), _making:
        _in_background[:] = [*(each for each in _in_background if not each.wait(0)), save]


def wait_for_saves(turns: Callable[[], Iterable[Turn]]) -> None:
    """Wait for the saves in the background that were begun earlier and need one of the same turns.

    How they end is told by their own futures. Those of which nobody knows the turns (one that has not come to its
    writer yet, or is made by another process) are waited for as well.

    Args:
        turns: Asked only if there is a save in the background.
    """
    running = [each for each in list(_in_background) if not each.wait(0)]
    own = frozenset(turns()) if running else frozenset()
    for each in running:
        if not each.turns or not own.isdisjoint(each.turns):
            each.wait()


_branches: dict[tuple[str, str, str], Turn] = {}


def branch_turn(handle: RepositoryHandle, branch: str | None) -> Turn:
    """The turn of all saves of this process to a branch, through whatever writers.

    Args:
        branch: As the writer was given it; None: the one that is checked out, else the default branch.
    """
    name = branch or handle.head.branch or handle.default_branch
    return _branches.setdefault((handle.config.store_id, handle.store.url, name), Turn())  # one step


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """Our connections over a process group of torch, and the turn of those who use it."""

    peers: GroupPeers
    turn: Turn = field(default_factory=Turn)


_groups: dict[tuple[Any, float], SharedGroup] = {}


def world_size(process_group: Any) -> int:
    """Ranks of `process_group`, or of the default group; 1 without torch.distributed."""
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size(process_group)


def members_of(process_group: Any) -> tuple[int, ...] | None:
    """World ranks of the group's ranks, in order; None where they are the same numbers."""
    if process_group is None or world_size(process_group) == 1:
        return None
    ranks = tuple(dist.get_process_group_ranks(process_group))
    return None if ranks == tuple(range(len(ranks))) else ranks


def _is_alive(process_group: Any) -> bool:
    """Whether this process is of that group, which is not one of a torch.distributed that was shut down since."""
    try:
        dist.get_group_rank(process_group, dist.get_rank())
    except ValueError:
        return False
    return True


def shared_group(process_group: Any, timeout_s: float) -> SharedGroup:
    """Our group over `process_group` (None: the default one); made by the first call, which is collective.

    Args:
        timeout_s: How long a rank waits for the others.
    """
    parent = process_group if process_group is not None else dist.group.WORLD
    with _making:
        for key in [key for key in _groups if not _is_alive(key[0])]:
            _groups.pop(key).peers.close()
        found = _groups.get((parent, timeout_s))
        if found is None:
            found = _groups[parent, timeout_s] = SharedGroup(GroupPeers(process_group, timeout_s=timeout_s))
        return found


def close_groups() -> None:
    """Leave all our groups; before `destroy_process_group`. Not collective, idempotent."""
    with _making:
        while _groups:
            _groups.popitem()[1].peers.close()


class RepositoryPlace:
    """Which repository a storage writer or reader works on: an open one, or a URL to be opened.

    What is pickled holds no handle, lock or connection; what was opened here is closed here.

    Attributes:
        brought: Head of an open repository in the process that this one was sent from, without its commit if a
            branch was checked out: what is saved there since moves that, unnoticed here. Else None.
    """

    brought: Head | None = None
    _opened: Any = None

    def __init__(self, repository: Any, index_url: str | None = None, cache: str | PathLike[str] | None = AUTO) -> None:
        """Nothing is opened.

        Args:
            repository: A path, a URL, a `Repository`, or the handle of one.
            index_url, cache: As for `Repository.open`; for paths and URLs.
        Raises:
            InvalidInputError: something else.
        """
        handle = getattr(repository, "_handle", repository)  # a Repository's own; training/ is below core/handle.py
        self._handle = handle if isinstance(handle, RepositoryHandle) else None
        self._opened = None if handle is repository else repository
        self._index_url = index_url
        self._cache = cache if self._handle is None else self._handle.cache_place
        if self._handle is None and not isinstance(repository, str | os.PathLike):
            raise InvalidInputError(
                f"{type(repository).__name__} is not a repository: give a path, a URL or a Repository"
            )
        self.url = str(os.fspath(repository)) if self._handle is None else self._handle.store.url

    def begin(self) -> None:
        """Wait for the commits in the background that an open repository has begun: they come first.

        Raises:
            InvalidInputError: in a commit or checkout of it in this thread, or in a callback of such a commit.
        """
        if self._opened is not None:
            self._opened._refuse_inside("dcp.save")
            self._opened._wait_for_pending()

    def note(self, save: Save) -> None:
        """Let what is begun from now on, here and through an open repository, come after this save."""
        note_in_background(save)
        if self._opened is not None:
            self._opened._note_in_flight(save)

    @contextmanager
    def opened(self) -> Iterator[RepositoryHandle]:
        """The repository; closed again behind the caller if it was opened for this.

        Raises:
            NoRepositoryError: there is none at the URL.
        """
        if self._handle is not None:
            yield self._handle
            return
        handle = RepositoryHandle.open(self.url, index_url=self._index_url, cache=self._cache)
        handle.head = self.brought or handle.head
        try:
            yield handle
        finally:
            handle.close()

    def __getstate__(self) -> dict[str, Any]:
        if not open_store(self.url).abilities.durable:
            raise InvalidInputError(
                f"{self.url} lives in this process only: AsyncCheckpointerType.PROCESS needs a repository in a folder"
            )
        index_url = self._index_url
        if self._handle is not None and not self._handle.index.in_memory:
            index_url = self._handle.index.place
            if "://" in index_url:  # what an index says of its place leaves out the password
                raise InvalidInputError(
                    f"an open repository whose index is at {index_url} cannot be sent to another process: "
                    "give the writer the repository's URL and index_url="
                )
        brought = self.brought
        if self._handle is not None:
            head = self._handle.head
            brought = head if head.branch is None else Head(head.branch)
        return {
            "_handle": None, "_index_url": index_url, "_cache": self._cache, "url": self.url, "brought": brought,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
