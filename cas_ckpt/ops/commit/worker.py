"""`CommitWorker`: commits of one repository in a process of its own; what stays on this side of it.

    1. the process is started when the first commit wants it, and again when it has died
    2. the arenas that a state was staged in are lent to it; it keeps them mapped as long as the pool keeps them
    3. `commit` sends tree and request, and answers what the worker asks until the commit is made or has failed
    4. `_decide`, in one place, says whether the commit exists: received from rank 0, or announced here by a worker
       that came to its end; of one that died, whether the ref was swapped is looked up, so that "not made" is true,
       and the other ranks receive a commit that was made

Invariant: `handle.head` moves if and only if the commit is made. An error of the worker is raised here as what it is.
Knows nothing of torch.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

import numpy as np

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.publish import was_published
from cas_ckpt.core.records import CommitInfo, commit_row, info_from_row
from cas_ckpt.core.refs import Head
from cas_ckpt.errors import CkptError, InternalError, InvalidInputError, PeerError, WorkerError
from cas_ckpt.memory import current_limits
from cas_ckpt.objects.digest import SHORT_HEX, Digest, short
from cas_ckpt.objects.spec import Box, as_raw
from cas_ckpt.objects.state import ArraySource, Container, TensorItem
from cas_ckpt.ops.commit.agree import Made, Outcome, broadcast_outcome, made_message, outcome_not_received, read_outcome
from cas_ckpt.ops.commit.frozen import FrozenMemory
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.ops.commit.worker_process import (
    LOG,
    LOOK,
    PEERS,
    PROGRESS,
    PUBLISH,
    READ,
    SAVED,
    SUMS,
    Identities,
    Job,
    Lent,
    LentSource,
    Remote,
    sent_request,
    sent_tree,
)
from cas_ckpt.parallel.child_process import ChildEnded, ChildProcess, unpacked_error
from cas_ckpt.parallel.peers import SOLO, Peers, report_instead
from cas_ckpt.parallel.workers import core_of_main_thread
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.transfer.hashing import SummingSource
from cas_ckpt.transfer.staging import Arena

_LOGGER = logging.getLogger("cas_ckpt")

ENTRY = "cas_ckpt.ops.commit.worker_process:main"
"""What the worker process runs."""

_METHODS = frozenset({"gather_all", "gather", "broadcast", "exchange"})


@runtime_checkable
class Staged(Protocol):
    """A source that may be staged: then it is private, and each box is at a place in one of the commit's arenas."""

    @property
    def is_private(self) -> bool:
        """Whether it is staged."""
        ...

    @property
    def boxes(self) -> Sequence[Box]:
        """What it has, global boxes."""
        ...

    @property
    def places(self) -> Sequence[tuple[int, int]]:
        """Of each box: number of the arena (-1: none) and where it begins in it."""
        ...


def require_possible(handle: RepositoryHandle) -> None:
    """Raise InvalidInputError if no other process can commit to this repository."""
    if not handle.store.abilities.durable:
        raise InvalidInputError(
            f"{handle.store.url} is in the memory of this process, where no worker process can write: "
            'use worker="thread"'
        )
    if not hasattr(os, "memfd_create"):
        raise InvalidInputError(
            'worker="process" needs memory that processes share, as Linux has it: use worker="thread"'
        )


class CommitWorker:
    """Commits of one repository in a process of its own. One thread at a time, but for `forget` and `close`.

    Raises:
        InvalidInputError: no other process can commit to this repository.
    """

    def __init__(self, handle: RepositoryHandle) -> None:
        require_possible(handle)
        self._handle = handle
        self._child: ChildProcess | None = None
        self._is_closed = False
        self._lock, self._starting = threading.Lock(), threading.Lock()
        self._identities = Identities()
        self._names = itertools.count()
        self._lent: dict[int, tuple[Arena, int, int]] = {}
        self._frozen: tuple[FrozenMemory | None, int] = None, 0
        self._epoch = 0

    @property
    def pid(self) -> int | None:
        """The process id of the worker; None: there is none at the moment."""
        child = self._child
        return child.pid if child is not None and child.alive else None

    def start(self) -> ChildProcess:
        """Let the process start, if there is none: it is ready a second later. From any thread.

        Raises:
            StorageError: no process can be started. InvalidInputError: after `close`.
        """
        with self._starting:
            if self._is_closed:
                raise InvalidInputError("this repository was closed: open it again")
            if self._child is None:
                self._child = ChildProcess(ENTRY)
            return self._child

    def commit(
        self, tree: Container, request: CommitRequest, *, arenas: Sequence[Arena] = (), peers: Peers = SOLO,
        memory: FrozenMemory | None = None, progress: Progress = SILENT, check: Callable[[], object] = lambda: None,
    ) -> CommitInfo:  # fmt: skip
        """As `commit_live`: goes on from `handle.head`, and moves it. The caller is inside of `collective_errors`.

        Args:
            arenas: The memory that the sources of `tree` are staged in, as they number it.
            memory: What stands for what this process declared frozen; the worker has a memory of its own, which it
                gives up when this one is another, or was used for a commit that was made here.
            check: Asked now and then, and right before the commit is published; what it raises ends the commit.
        Raises:
            As `commit_live`. WorkerError: the process died; the commit is not made.
        """
        given = tree, request, arenas, peers, memory, progress, check
        try:
            return self._attempt(*given)
        except ChildEnded as ended:  # before it began: nothing was done
            _LOGGER.warning("the worker had not begun with this commit when it ended, another one makes it: %s", ended)
            self._discard()
        try:
            return self._attempt(*given)
        except ChildEnded as ended:
            return self._decide(None, request, peers, ended=ended)

    def _attempt(
        self, tree: Container, request: CommitRequest, arenas: Sequence[Arena], peers: Peers,
        memory: FrozenMemory | None, progress: Progress, check: Callable[[], object],
    ) -> CommitInfo:  # fmt: skip
        """The commit. Raises ChildEnded if the process died before it began with it."""
        if self._child is not None and not self._child.alive:
            _LOGGER.info("worker process %d has ended since the last commit: another one is started", self._child.pid)
            self._discard()
        child = self.start()
        asked = _Asked(self, child, request, peers, progress, check)
        try:
            job = self._job(child, tree, request, arenas, peers, self._frozen_epoch(memory), asked)
            branch = child.run(job, answer=asked.answer, note=asked.note)
        except ChildEnded as ended:
            if not ended.had_begun:
                raise
            return self._decide(asked, request, peers, ended=ended)
        finally:
            asked.end()
        made = self._decide(asked, request, peers, branch=branch)
        if memory is not None:
            memory.forget()  # what a commit here trusts was seen before this one
            self._frozen = memory, memory.num_changes
        return made

    def _frozen_epoch(self, memory: FrozenMemory | None) -> int:
        """Another number than the last time if what was frozen may hold other bytes now, rightly."""
        now = memory, 0 if memory is None else memory.num_changes
        if now[0] is not self._frozen[0] or now[1] != self._frozen[1]:
            self._frozen, self._epoch = now, self._epoch + 1
        return self._epoch

    def _job(
        self, child: ChildProcess, tree: Container, request: CommitRequest, arenas: Sequence[Arena], peers: Peers,
        epoch: int, asked: _Asked,
    ) -> Job:  # fmt: skip
        handle = self._handle
        names = [self._lend(child, arena) for arena in arenas]

        def sent_source(item: TensorItem) -> Any:
            source = item.source
            if isinstance(source, Staged) and source.is_private and source.places:
                return _sent_places(source, names, item)
            return asked.number(source, item)

        rows = sent_tree(
            tree, identities=self._identities, sent_source=sent_source, allow_pickle=request.allow_pickle
        )  # fmt: skip
        cache = None if handle.cache_place is None else os.fspath(handle.cache_place)
        return Job(
            (handle.store.url, handle.index_place, cache), handle.head, *sent_request(request), rows,
            None if peers is SOLO else (peers.rank, peers.size), epoch, core_of_main_thread(), current_limits(),
            _LOGGER.getEffectiveLevel(),
        )  # fmt: skip

    def _lend(self, child: ChildProcess, arena: Arena) -> int:
        """The name of `arena`, which the child has mapped as it is now."""
        with self._lock:
            known = self._lent.get(id(arena))
            if known is not None and known[2] == arena.num_bytes:
                return known[1]
            if known is not None:
                child.take_back(known[1])
            name = next(self._names)
            child.lend(name, arena.fd, arena.num_bytes)
            self._lent[id(arena)] = arena, name, arena.num_bytes
            return name

    def forget(self, arena: Arena) -> None:
        """The arena is about to be unmapped: the child must not keep its memory."""
        with self._lock:
            known, child = self._lent.pop(id(arena), None), self._child
            if known is None or child is None:
                return
            with suppress(ChildEnded):  # and its mappings with it
                child.take_back(known[1])

    def _decide(
        self, asked: _Asked | None, request: CommitRequest, peers: Peers, *, branch: str | None = None,
        ended: ChildEnded | None = None,
    ) -> CommitInfo:  # fmt: skip
        """The commit, if there is one; `handle.head` is moved to it, and all ranks are told that have not heard.

        Args:
            asked: What the worker asked; None: it did not begin.
            branch: Where the worker, which came to its end, put it. ended: How the worker died before that.
        Raises:
            WorkerError: it is not made. PeerError: it is, but not all ranks could be told; or another rank failed.
        """
        handle = self._handle
        if ended is not None:
            self._discard()
            handle.forget_chunks()  # packs may be durable that the index does not have: the next commit looks
        outcome = None if asked is None else asked.last_outcome()
        if isinstance(outcome, PeerError):
            raise outcome from ended  # as all ranks do: nobody waits for what this one would report
        if isinstance(outcome, tuple):
            made, branch = outcome
            handle.head = Head(branch, made.id)
        else:
            branch = branch or request.branch or handle.head.branch or handle.default_branch
            digest, data = self._announced(asked, branch, ended)
            made = info_from_row(commit_row(digest, data))
            handle.head = Head(branch, made.id)
            if ended is not None:  # the worker would have done this last
                if asked is not None and asked.lost is not None:
                    raise outcome_not_received(made, branch, asked.lost)
                broadcast_outcome(peers, made_message(digest, data, branch))
        if ended is not None:
            _LOGGER.warning("commit %s is made, but its worker died right after: %s", made.id[:SHORT_HEX], ended)
        return made

    def _announced(self, asked: _Asked | None, branch: str, ended: ChildEnded | None) -> tuple[Digest, bytes]:
        """The commit that the worker announced, which exists.

        Raises:
            WorkerError: it made none, or that cannot be found out. PeerError: it made none, and all ranks know why.
        """
        announced = None if asked is None else asked.announced
        if ended is None:
            if announced is None:
                raise InternalError("a worker process has made a commit that it did not announce")
            return announced
        not_made: CkptError = WorkerError(f"the commit is not made: its worker {ended}; commit again")
        if asked is not None and asked.lost is not None:
            not_made = asked.lost
        if announced is None:
            raise not_made from ended
        digest = announced[0]
        try:
            is_made = was_published(self._handle, branch, digest)
        except CkptError as error:
            raise WorkerError(
                f"whether the commit {short(digest)} was made is not known: its worker {ended}, and the branch "
                f"{branch!r} cannot be read: {error}; look at it before you commit again"
            ) from error
        if not is_made:
            raise not_made from ended
        return announced

    def _discard(self) -> None:
        child, self._child = self._child, None
        with self._lock:
            self._lent.clear()
        if child is not None:
            try:
                child.close()
            except ChildEnded as ended:
                _LOGGER.warning("a worker process is left until its medium answers: %s", ended)

    def close(self) -> None:
        """End the process, for good; a commit that it is making fails. Idempotent."""
        with self._starting:
            self._is_closed = True
        self._discard()


def _sent_places(source: Staged, names: Sequence[int], item: TensorItem) -> Lent | LentSource:
    numbers = {number for number, _ in source.places}
    if numbers == {-1}:
        item_bytes = item.spec.item_bytes
        return LentSource(tuple((box, as_raw(item.source.read(box), item_bytes)) for box in source.boxes), item_bytes)
    if len(numbers) != 1:
        raise InternalError("one tensor is staged in several arenas")
    begins = [begin for _, begin in source.places]
    return Lent(names[numbers.pop()], tuple(zip(source.boxes, begins, strict=True)))


class _Asked:
    """Answers what the worker asks while it makes one commit.

    Attributes:
        announced: The commit that the ref was about to be swapped to, id and bytes; None: it has not come so far.
        lost: How the work with the other ranks has ended before.
    """

    def __init__(
        self, worker: CommitWorker, child: ChildProcess, request: CommitRequest, peers: Peers, progress: Progress,
        check: Callable[[], object],
    ) -> None:  # fmt: skip
        self._child, self._request, self._peers, self._progress = child, request, peers, progress
        self._check = check
        self._unwanted: Exception | None = None
        self._names = worker._names
        self._sources: list[tuple[ArraySource, int]] = []
        self._numbers: dict[int, int] = {}
        self._slots: dict[int, tuple[Arena, int]] = {}
        self.announced: tuple[Digest, bytes] | None = None
        self._has_gathered = False  # what rank 0 has gathered, which tells all ranks now what came of it
        self._last_message: bytes | None = None
        self.lost: PeerError | None = None

    def number(self, source: ArraySource, item: TensorItem) -> Remote:
        """The source as the worker is told of it: its number, and whether it sums."""
        number = self._numbers.get(id(source))
        if number is None:
            number = self._numbers[id(source)] = len(self._sources)
            self._sources.append((source, item.spec.item_bytes))
        return Remote(number, isinstance(source, SummingSource))

    def answer(self, name: str, arguments: Sequence[Any]) -> Any:
        """See `child_process.Answer`."""
        if name == READ:
            return self._read(*arguments)
        if name == SAVED:
            report = getattr(self._sources[arguments[0]][0], "saved", None)
            return None if report is None else report()
        if name == SUMS:
            number, box = arguments
            source = self._sources[number][0]
            return source.sums(box) if isinstance(source, SummingSource) else None
        if name == PEERS:
            return self._collective(*arguments)
        if name in (LOOK, PUBLISH):
            if self._unwanted is not None:
                raise self._unwanted
            self._check()
            if name == LOOK:
                return None
            self.announced = arguments[0], arguments[1]
            return None
        raise InternalError(f"a worker process asks for {name!r}, which nobody knows here")

    def _read(self, number: int, box: Box, thread: int) -> int:
        """The name of memory that begins with the elements of a box; the thread's own until it asks again."""
        source, item_bytes = self._sources[number]
        array = as_raw(source.read(box), item_bytes)
        arena, name = self._slots.get(thread, (None, -1))
        if arena is None or arena.num_bytes < array.nbytes:
            if arena is not None:
                self._child.take_back(name)
                arena.close()
            arena, name = Arena(array.nbytes, shared=True), next(self._names)
            self._slots[thread] = arena, name
            self._child.lend(name, arena.fd, arena.num_bytes)
        arena.clear()
        _, memory = arena.room(array.nbytes)
        np.copyto(memory.view(array.dtype).reshape(array.shape), array)
        return name

    def _collective(self, method: str, message: Any) -> Any:
        if method == "fail":
            self._has_gathered, self._last_message = False, None
            report_instead(self._peers, unpacked_error(message))
            return None
        if method not in _METHODS:
            raise InternalError(f"a worker process asks for the collective {method!r}, which nobody knows here")
        had_given, self._has_gathered, self._last_message = self._has_gathered, False, None
        try:
            found = getattr(self._peers, method)(message)
        except PeerError as error:
            self.lost = error
            raise
        if method == "broadcast" and had_given:
            self._last_message = found
        self._has_gathered = method == "gather"
        return list(map(bytes, found)) if isinstance(found, list) else found

    def last_outcome(self) -> Outcome | Made | PeerError | None:
        """What rank 0 told last of the commit, if the worker has done nothing with the other ranks since.

        Collective where it is still to come: the worker has died, and rank 0 has what it gathered from this rank.

        Raises:
            PeerError: the work of the ranks ended before.
        """
        if self._has_gathered and self._peers.rank:
            self._last_message = broadcast_outcome(self._peers, None)
        return None if self._last_message is None else read_outcome(self._last_message)

    def note(self, name: str, arguments: Sequence[Any]) -> None:
        """See `child_process.Note`. What it raises ends the commit, at the latest when it is to be published."""
        try:
            self._check()
            self._note(name, arguments)
        except Exception as error:
            self._unwanted = self._unwanted or error
            raise

    def _note(self, name: str, arguments: Sequence[Any]) -> None:
        if name == PROGRESS:
            method, *values = arguments
            getattr(self._progress, method)(*values)
        elif name == LOG:
            record = arguments[0]
            to = logging.getLogger(record.name)
            if to.isEnabledFor(record.levelno):
                to.handle(record)

    def end(self) -> None:
        """The commit is over: its slots are taken back."""
        for arena, name in self._slots.values():
            with suppress(ChildEnded):  # and its mappings with it
                self._child.take_back(name)
            arena.close()
        self._slots = {}
