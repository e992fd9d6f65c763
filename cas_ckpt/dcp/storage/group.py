"""The ranks that save together through DCP, whose turn it is, and the repository that they save into.

Invariant: all writers over one process group of torch share one `GroupPeers`, because making
one is collective and writers are often made anew for every save. Over one such group, and
to one branch of a repository, one save of this process runs at a time, and saves to a branch
land in the order in which they were begun, or not at all. A save waits for those that `async_save` began before it
(`wait_for_saves`); one that began in a way that we cannot see (with a stager of somebody else's) is a conflict.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from os import PathLike
from types import FrameType
from typing import Any, ParamSpec, Protocol, TypeVar

import torch.distributed as dist

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.host_cache import AUTO
from cas_ckpt.core.refs import Head
from cas_ckpt.errors import ConflictError, InvalidInputError, out_of_memory
from cas_ckpt.held_signals import held_signals
from cas_ckpt.training.process_group import GroupPeers
from cas_ckpt.training.torch_internals import ASYNC_SAVE, INNER_SAVE, callers, calling

P = ParamSpec("P")
T = TypeVar("T")

_BUSY = (
    "another save to this branch, or over this process group, is not finished: wait for its future first "
    "(the commits would follow each other in any order, and DCP's own collectives would mix up two saves)"
)
_OVERTAKEN = (
    "a save to this branch that was begun later has come first, and this one would be committed on top of it: "
    "wait for the future of a save before the next one is begun"
)

_numbers = itertools.count(1)


def next_save() -> int:
    """Number of a save that begins now in this process: larger than those of all before it."""
    return next(_numbers)


class Alive(Protocol):
    """A thread that others started: what is asked of one, for threads are started in transfer/ alone."""

    @property
    def ident(self) -> int | None:
        """Its number in this process."""
        ...

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        ...


class DCPFuture(Protocol):
    """What `dcp.async_save` gives: a future of Python's, which is asked for two things here."""

    def done(self) -> bool:
        """Whether the save has ended."""
        ...

    def add_done_callback(self, call: Callable[[Any], object], /) -> None:
        """Call it when the save has ended; at once if it has."""
        ...


class Turn:
    """Who saves now. A save plans first, then writes; both in one thread.

    A save whose planning failed elsewhere is never reported to us. So a thread that planned loses
    its turn when it is not inside of DCP's save any more, plans again, or is the main thread (which
    cannot be inside a save while another one begins, but for a moment).
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._planner: Turns | None = None
        self._writer: Turns | None = None
        self._latest = 0

    def plan(self, save: Turns, number: int | None = None) -> None:
        """Note that `save` begins, in this thread.

        Args:
            number: Of the save, from `next_save`; None: it begins now.
        Raises:
            ConflictError: another thread is at it, or a save of a higher number was.
        """
        with self._lock:
            other = self._planner
            if self._is_written() or (other is not None and other.is_planned_elsewhere()):
                raise ConflictError(_BUSY)
            if number is not None and number < self._latest:
                raise ConflictError(_OVERTAKEN)
            self._planner = save
            self._latest = max(self._latest, next_save() if number is None else number)

    def write(self, save: Turns) -> None:
        """Note that the part of `save` begins that talks to the other ranks.

        Raises:
            ConflictError: another save is at it.
        """
        with self._lock:
            if self._is_written():
                raise ConflictError(_BUSY)
            self._writer = save

    def _is_written(self) -> bool:
        return self._writer is not None and not self._writer.are_over


def _is_saving(thread: Alive) -> bool:
    """Whether `thread` is inside of a save of DCP now."""
    frame = sys._current_frames().get(thread.ident or 0) if thread.is_alive() else None
    return calling(frame, INNER_SAVE) is not None


class Turns:
    """The two turns that one save needs, taken together or not at all.

    Attributes:
        are_over: The save has ended, however; set by whoever takes them, in one step, which no Ctrl-C divides.
    """

    def __init__(self, branch: Turn, group: Turn | None) -> None:
        """Nothing is taken yet.

        Args:
            group: That of the process group; None where one rank saves alone.
        """
        self.are_over = False
        self._thread: Alive = threading.current_thread()
        self._branch = branch
        self._every = (branch,) if group is None else (group, branch)

    def plan(self, number: int | None) -> None:
        """See `Turn.plan`; the order of saves is that of the branch."""
        try:
            for turn in self._every:
                turn.plan(self, number if turn is self._branch else None)
        except BaseException:
            self.are_over = True
            raise

    def write(self) -> None:
        """See `Turn.write`."""
        for turn in self._every:
            turn.write(self)

    def overlap(self, other: Turns) -> bool:
        """Whether one of two saves has to wait for the other."""
        return not {id(turn) for turn in self._every}.isdisjoint(id(turn) for turn in other._every)

    def is_planned_elsewhere(self) -> bool:
        """Whether another thread is in the save, which has planned."""
        elsewhere = self._thread not in (threading.current_thread(), threading.main_thread())
        return not self.are_over and elsewhere and _is_saving(self._thread)


# ------------------------------------------------------------ saves in the background


@dataclass(slots=True, eq=False)
class BackgroundSave:
    """A save of `dcp.async_save`, from the copy of its state on.

    Attributes:
        number: From `next_save`.
        url: Of the repository, as the writer was given it.
        future: DCP's, which is done when nothing of the save goes on any more; None: not known (yet).
        turns: Those that it takes, once it has come to its writer in this process.
        thread: The one that saves, once it has come to its writer in this process.
        pid: The process that began it.
        staged: The state that it saves, until DCP brings that to the writer.
    """

    number: int
    url: str
    future: DCPFuture | None = None
    turns: Turns | None = None
    thread: int | None = None
    pid: int = field(default_factory=os.getpid)
    staged: object = None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing of it goes on, however it ends; whether nothing does.

        At once where it cannot be waited for: in its own thread, and in a process that was forked meanwhile.
        """
        future = self.future
        if future is None or future.done() or self.thread == threading.get_ident() or self.pid != os.getpid():
            return True
        if timeout_s is not None and timeout_s <= 0:  # a look, which leaves no callback behind
            return False
        ended = threading.Event()
        future.add_done_callback(partial(_tell, ended))
        return ended.wait(timeout_s)


_in_background: list[BackgroundSave] = []


def note_in_background(save: BackgroundSave) -> None:
    """Let later saves wait for this one."""
    with held_signals(), _making:
        _in_background[:] = [each for each in _in_background if each.future is None or not each.future.done()]
        _in_background.append(save)


def forget_in_background(save: BackgroundSave) -> None:
    """It never came to DCP's executor."""
    with held_signals(), _making:
        _in_background[:] = [each for each in _in_background if each is not save]


def _tell(ended: threading.Event, _: object) -> None:
    ended.set()


def wait_for_saves(url: str, turns: Callable[[], Turns], *, before: int | None = None) -> None:
    """Wait for the saves in the background that were begun earlier and need one of the same turns.

    How they end is told by their own futures. A save of the same repository that has not come to its writer yet (it
    plans, or is made by another process) is waited for as well: nobody knows its turns.

    Args:
        turns: Asked only if there is a save in the background.
        before: The number of the save that waits; None: it begins now.
    """
    with _making:
        earlier = [each for each in _in_background if before is None or each.number < before]
    running = [each for each in earlier if not each.wait(0)]
    if not running:
        return
    own = turns()
    for each in running:
        if each.url == url if each.turns is None else own.overlap(each.turns):
            each.wait()


_branches: dict[tuple[str, str, str], Turn] = {}


def branch_turn(handle: RepositoryHandle, branch: str | None) -> Turn:
    """The turn of all saves of this process to a branch, through whatever writers.

    Args:
        branch: As the writer was given it; None: the one that is checked out, else the default branch.
    """
    name = branch or handle.head.branch or handle.default_branch
    with _making:
        return _branches.setdefault((handle.config.store_id, handle.store.url, name), Turn())


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """Our connections over a process group of torch, and the turn of those who use it."""

    peers: GroupPeers
    turn: Turn = field(default_factory=Turn)


_groups: dict[tuple[Any, float], SharedGroup] = {}
_making = threading.RLock()


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


def translates_memory_errors(hook: Callable[P, T]) -> Callable[P, T]:
    """A hook that DCP calls, which raises a `MemoryError` in it as `TooLargeError`, as the verbs of a Repository."""

    @wraps(hook)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return hook(*args, **kwargs)
        except MemoryError as error:
            raise out_of_memory(error) from error

    return called


class RepositoryPlace:
    """Which repository a storage writer or reader works on: an open one, or a URL to be opened.

    What is pickled holds no handle, lock or connection; what was opened here is closed here.

    Attributes:
        brought: Head of an open repository in the process that this one was sent from, without its commit if a
            branch was checked out: what is saved there since moves that, unnoticed here. Else None.
    """

    brought: Head | None = None
    _refuse_inside: Callable[[str], None] | None = None
    _wait_for_pending: Callable[[], None] | None = None
    _note_in_flight: Callable[[BackgroundSave], None] | None = None

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
        self._refuse_inside = getattr(repository, "_refuse_inside", None)
        self._wait_for_pending = getattr(repository, "_wait_for_pending", None)
        self._note_in_flight = getattr(repository, "_note_in_flight", None)
        self._index_url = index_url
        self._cache = cache if self._handle is None else self._handle.cache_place
        if self._handle is None and not isinstance(repository, str | os.PathLike):
            raise InvalidInputError(
                f"{type(repository).__name__} is not a repository: give a path, a URL or a Repository"
            )
        self.url = str(os.fspath(repository)) if self._handle is None else self._handle.store.url

    def refuse_inside(self, frame: FrameType) -> None:
        """Refuse a save that a signal handler begins inside of another one, or of a commit or checkout, of its thread.

        It would wait for that, or take its place in the writer.

        Args:
            frame: Of the function of DCP that asks for the first hook of the save.
        Raises:
            InvalidInputError: both are into the same repository.
        """
        outer = [each for each in callers(frame, INNER_SAVE, ASYNC_SAVE) if self._is_place_of(each)][1:]
        if outer:
            raise InvalidInputError(
                "a save of torch.distributed.checkpoint was begun inside of another one into the same repository, in "
                "the same thread, which cannot go on meanwhile: in a signal handler, note the signal, and save after it"
            )
        if self._refuse_inside is not None:
            self._refuse_inside("dcp.save")

    def wait_for_commits(self) -> None:
        """Wait for the commits in the background that an open repository has begun: they come first.

        Raises:
            InvalidInputError: in a callback of one of them.
        """
        if self._wait_for_pending is not None:
            self._wait_for_pending()

    def _is_place_of(self, frame: FrameType) -> bool:
        """Whether the writer of a save of DCP, which this frame is of, saves here."""
        place = getattr(frame.f_locals.get("storage_writer"), "_place", None)
        return isinstance(place, RepositoryPlace) and place.url == self.url

    def note(self, save: BackgroundSave) -> None:
        """Let what is begun from now on through an open repository come after this save."""
        if self._note_in_flight is not None:
            self._note_in_flight(save)

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
        if self.url.startswith("memory://"):
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
