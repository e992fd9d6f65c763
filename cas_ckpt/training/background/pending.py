"""Commits that go on in the background, as their callers see them, and their order: one thread, none lost.

`PendingCommit` is what the caller gets; `CommitQueue` makes the commits of one open repository, one after another:

    1. `admit` waits until fewer commits are in flight than the caller allows, and raises what an earlier one failed of.
    2. `submit` puts a commit behind those that wait; the thread lives as long as there is one.
    3. The thread runs it and tells the `PendingCommit` how it ended; a failure is logged there and then.
    4. `drain` waits for all of them; at the interpreter's exit every queue is drained, for `EXIT_TIMEOUT_S` at most.

Invariant: what was submitted is run, in the order of the calls, or is named in the log as not made. A commit ends
exactly once, made, failed or cancelled; whoever waits hears of it, and every callback is called once after that. A
process that was forked has none of its parent's threads: a queue belongs to the process that made it. Knows nothing of
what is run.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from cas_ckpt import clock
from cas_ckpt.arguments import check_real
from cas_ckpt.errors import (
    BackgroundCommitError,
    CancelledError,
    InvalidInputError,
    StillPendingError,
    out_of_memory,
    shown_value,
)
from cas_ckpt.parallel.peers import error_text
from cas_ckpt.parallel.workers import Background, before_threads_end
from cas_ckpt.uncopied import Uncopied

if TYPE_CHECKING:
    from cas_ckpt.core.records import CommitInfo
    from cas_ckpt.progress import Progress
    from cas_ckpt.training.background.staged import Snapshot

_LOGGER = logging.getLogger("cas_ckpt")


class Stage(Enum):
    """How far a pending commit has come."""

    WAITING = "waits for its turn"
    RUNNING = "is being made"
    MADE = "is made"
    FAILED = "failed"
    CANCELLED = "was cancelled"


_ENDS = (Stage.MADE, Stage.FAILED, Stage.CANCELLED)


@dataclass(frozen=True, slots=True)
class PendingProgress:
    """How far a pending commit has come, in bytes.

    Attributes:
        total_bytes: Of the tensors that are staged, tied ones once.
        staged_bytes: Of these, copied or saved: from then on the live state may change.
        saved_bytes: Hashed and, as far as they are new, handed to the writers of packs. Of several ranks this one's;
            what ranks share counts where it is hashed.
    """

    total_bytes: int
    staged_bytes: int
    saved_bytes: int


class PendingCommit(Uncopied):
    """A commit that `commit_async` began. Threads may share it.

    A failure is logged at once. It is raised by `result`; if nobody has asked for that (or for `exception`) by then, by
    the next `commit` or `commit_async` of the repository as the cause of a `BackgroundCommitError`, or by `close`.

    Attributes:
        what: What messages call it.
        told: What it fails of was raised to somebody.
    """

    def __init__(self, what: str) -> None:
        """`what` names it in messages."""
        self.what = what
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._stage = Stage.WAITING
        self._made: CommitInfo | None = None
        self._error: BaseException | None = None
        self.told = False
        self._callbacks: list[Callable[[PendingCommit], object]] = []
        self._snapshot: Snapshot | None = None
        self._saved_bytes = 0
        self._totals = (0, 0)
        self._is_worker: Callable[[], bool] = lambda: False

    def __repr__(self) -> str:
        return f"PendingCommit({self.what}: {self._stage.value})"

    # ------------------------------------------------------------ what callers ask

    @property
    def staged(self) -> bool:
        """Whether the live state may change: the commit does not read it any more.

        Of `snapshot="lazy"` the thread that called `commit_async` may change it then; another one that wants to calls
        `wait_staged`.
        """
        snapshot = self._snapshot
        return self.done() if snapshot is None else snapshot.is_settled

    def wait_staged(self, timeout_s: float | None = None) -> bool:
        """Wait until the live state may change; whether it may. With `snapshot="copy"` it may when the call returns.

        An interrupt (Ctrl-C) ends the wait alone: the commit goes on, and the state must stay as it is until then.

        Raises:
            InvalidInputError: in a process that was forked after the call.
        """
        self._check(timeout_s)
        snapshot = self._snapshot
        return self._wait(timeout_s) if snapshot is None else snapshot.wait_settled(timeout_s)

    def done(self) -> bool:
        """Whether it has ended: made, failed or cancelled."""
        return self._stage in _ENDS

    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self._stage is Stage.CANCELLED

    def result(self, timeout_s: float | None = None) -> CommitInfo:
        """The commit, once it is made and durable.

        Raises:
            Whatever the commit failed of, each time. CancelledError: it was cancelled. StillPendingError: it has not
            ended in time. InvalidInputError: asked where it would wait for itself (a callback), or in a process that
            was forked after the call.
        """
        error = self.exception(timeout_s)
        if error is not None:
            raise error
        made = self._made
        if made is None:
            raise CancelledError(f"{self.what} was cancelled")
        return made

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Its exception, once it has ended; None if it succeeded or was cancelled.

        Raises:
            As `result`, but for what it failed of.
        """
        self._check(timeout_s)
        if not self.done() and self._is_worker():
            raise InvalidInputError(f"{self.what} waits for this very callback: ask for its result elsewhere")
        if not self._wait(timeout_s):
            raise StillPendingError(
                f"{self.what} has not ended after {timeout_s:g} s, it {self._stage.value}: it goes on, wait longer"
            )
        self.told = True
        return self._error

    def add_done_callback(self, callback: Callable[[PendingCommit], object]) -> None:
        """Call `callback(self)` when it has ended, from the thread that makes commits; at once if it has.

        What it raises is logged. It must not wait for other commits of the repository: they wait for it.

        Raises:
            InvalidInputError: it cannot be called.
        """
        if not callable(callback):
            raise InvalidInputError(f"callback is {shown_value(callback)}: give a function of the pending commit")
        with self._changed:
            if not self.done():
                self._callbacks.append(callback)
                return
        self._call(callback)

    @property
    def progress(self) -> PendingProgress:
        """How far it has come, in bytes."""
        snapshot = self._snapshot
        total, staged = self._totals if snapshot is None else (snapshot.num_bytes, snapshot.staged_bytes)
        return PendingProgress(total, staged, self._saved_bytes)

    def cancel(self) -> bool:
        """Let it not be made, if that is still possible; whether it was.

        One that has begun is broken off at the next tensor; this waits for that. In a distributed job the commit
        fails on the other ranks (PeerError) once it is its turn.
        """
        self._check()
        snapshot = self._snapshot
        if self.done() or snapshot is None:
            return self.cancelled()
        snapshot.abort(CancelledError(f"{self.what} was cancelled"))
        if not self._is_worker():
            self._wait(None)
        return self.cancelled()

    def _wait(self, timeout_s: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(self.done, timeout_s)

    def _check(self, timeout_s: float | None = None) -> None:
        if timeout_s is not None:
            check_real("timeout_s", timeout_s)
        if self._pid != os.getpid() and not self.done():
            raise InvalidInputError(
                f"{self.what} is made by the process {self._pid}, from which this one was forked: ask there"
            )

    # ------------------------------------------------------------ what makes it

    def watch(self, snapshot: Snapshot, is_worker: Callable[[], bool]) -> None:
        """Say of `snapshot` how far it is; `is_worker` says whether this thread is the one that makes commits."""
        self._snapshot, self._is_worker = snapshot, is_worker

    def begin(self) -> None:
        """It is being made."""
        with self._changed:
            self._stage = Stage.RUNNING

    def end(self, made: CommitInfo | None, error: BaseException | None) -> None:
        """It has ended: made, or failed of `error`."""
        with self._changed:
            if self.done():
                return
            self._made = made
            if isinstance(error, CancelledError):
                self._stage = Stage.CANCELLED
            else:
                self._error = error
                self._stage = Stage.MADE if error is None else Stage.FAILED
            self._totals = (self.progress.total_bytes, self.progress.staged_bytes)
            self._snapshot = None
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            self._call(callback, BaseException)  # SystemExit, too: the commits behind this one go on

    def _call(self, callback: Callable[[PendingCommit], object], logged: type[BaseException] = Exception) -> None:
        try:
            callback(self)
        except logged:
            _LOGGER.exception("a callback of %s raised", self.what)

    def take_failure(self) -> BaseException | None:
        """Its exception if it failed and that was not reported yet: the caller raises it."""
        with self._changed:
            if self._error is None or self.told:
                return None
            self.told = True
            return self._error

    def counted(self, progress: Progress) -> Progress:
        """`progress`, of which this one learns what is saved."""
        return _Counted(self, progress)

    def add_saved(self, num_bytes: int) -> None:
        """So many bytes more are saved."""
        with self._changed:
            self._saved_bytes += num_bytes


class _Counted:
    """A `Progress` that lets a pending commit know what is saved, and passes all on."""

    def __init__(self, pending: PendingCommit, told: Progress) -> None:
        self._pending, self._told = pending, told

    def start(self, phase: str, total_bytes: int | None) -> None:
        self._told.start(phase, total_bytes)

    def advance(self, num_bytes: int) -> None:
        self._pending.add_saved(num_bytes)
        self._told.advance(num_bytes)

    def finish(self) -> None:
        self._told.finish()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._told, name)


# ------------------------------------------------------------ the queue

EXIT_TIMEOUT_S = 300.0
"""How long the end of the interpreter waits for commits that are pending."""


@dataclass(frozen=True, slots=True)
class _Job:
    """One commit, and what makes it."""

    pending: PendingCommit
    run: Callable[[], CommitInfo]


class CommitQueue:
    """The commits in the background of one open repository. Threads may share it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._running: _Job | None = None
        self._ended: deque[PendingCommit] = deque()
        self._worker: int | None = None
        self._background = Background(self._run_all, failed=self._log_bug)
        _watch(self)

    # ------------------------------------------------------------ the callers' side

    def admit(self, max_in_flight: int) -> None:
        """Wait until fewer than `max_in_flight` commits are in flight.

        Raises:
            BackgroundCommitError: an earlier one failed, and nobody has heard of that.
            InvalidInputError: in a callback.
        """
        self.refuse_worker()
        with self._changed:
            while len(self._in_flight()) >= max_in_flight:
                self._changed.wait()
        self.raise_failure()

    def submit(self, pending: PendingCommit, run: Callable[[], CommitInfo]) -> None:
        """Run it when those before it have ended.

        Raises:
            MemoryError: no thread can be started, and it will not be run.
        """
        job = _Job(pending, run)
        with self._changed:
            self._waiting.append(job)
        try:
            self._background.wake()
        except BaseException:
            with self._changed:
                with suppress(ValueError):  # the thread is there, and has taken it
                    self._waiting.remove(job)
                self._changed.notify_all()
            raise

    def is_worker(self) -> bool:
        """Whether this is the thread that makes the commits."""
        return self._worker == threading.get_ident()

    def wait_turn(self, pending: PendingCommit) -> None:
        """Wait until all that was submitted before `pending` has ended."""
        with self._changed:
            while (flight := self._in_flight()) and pending in flight and flight[0] is not pending:
                self._changed.wait()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until no commit is in flight; whether none is. Raises nothing that they failed of.

        Raises:
            InvalidInputError: in a callback, which they wait for.
        """
        self.refuse_worker()
        with self._changed:
            return self._changed.wait_for(lambda: not self._in_flight(), timeout_s)

    def raise_failure(self, so: str = "This call did nothing: mend the cause, and call it again") -> None:
        """Raise what an earlier commit failed of, if nobody has heard of that yet; of several the first.

        Args:
            so: What the caller is told to do.
        """
        with self._changed:
            ended = list(self._ended)
            self._ended.clear()
        failures = [(each, error) for each in ended if (error := each.take_failure()) is not None]
        if not failures:
            return
        pending, error = failures[0]
        more = f" (and {len(failures) - 1} more, see the log)" if len(failures) > 1 else ""
        raise BackgroundCommitError(
            f"{pending.what} failed in the background: {type(error).__name__}: {error}{more}. {so}"
        ) from error

    def pending(self) -> list[PendingCommit]:
        """Those in flight, in their order."""
        with self._changed:
            return self._in_flight()

    def _in_flight(self) -> list[PendingCommit]:
        running = [] if self._running is None else [self._running]
        return [each.pending for each in (*running, *self._waiting)]

    def refuse_worker(self) -> None:
        """Raise InvalidInputError where waiting would be for oneself."""
        if self.is_worker():
            raise InvalidInputError(
                "a callback of a pending commit cannot wait for the commits of its repository: they wait for it"
            )

    # ------------------------------------------------------------ the thread's side

    def _run_all(self) -> None:
        self._worker = threading.get_ident()
        try:
            while True:
                with self._changed:
                    if not self._waiting:
                        return
                    job = self._running = self._waiting.popleft()
                try:
                    self._run(job)
                finally:
                    with self._changed:
                        self._running = None
                        self._ended.append(job.pending)
                        self._changed.notify_all()
        finally:
            self._worker = None

    def _run(self, job: _Job) -> None:
        made, error = _attempt(job)
        try:
            if error is not None and not job.pending.told:
                _clear(error)
                if not isinstance(error, CancelledError):
                    _LOGGER.error("%s failed: %s", job.pending.what, error_text(error))
        except BaseException as other:  # noqa: BLE001 - of a handler of the log, or the text of somebody's exception
            traceback.print_exception(other)  # where logging itself reports that it cannot log
        finally:
            job.pending.end(made, error)

    def _log_bug(self, error: Exception) -> None:
        _LOGGER.error("the thread of pending commits was stopped: %r", error)


def _attempt(job: _Job) -> tuple[CommitInfo | None, BaseException | None]:
    try:
        job.pending.begin()
        return job.run(), None
    except MemoryError as raised:
        error = out_of_memory(raised)
        error.__cause__ = raised
        return None, error
    except BaseException as raised:  # noqa: BLE001 - kept for whoever asks, and told
        return None, raised


def _clear(error: BaseException) -> None:
    """Let go of what the functions that raised `error` had: who keeps the error would keep staged memory with it."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            waiting += (each.__cause__, each.__context__)


# ------------------------------------------------------------ the end of the interpreter

_queues: weakref.WeakSet[CommitQueue] = weakref.WeakSet()
_is_watched = False


def _watch(queue: CommitQueue) -> None:
    global _is_watched
    _queues.add(queue)
    if not _is_watched:
        _is_watched = True
        before_threads_end(finish_all)


def finish_all() -> None:
    """Wait for the commits that are pending in this process, say so, and name those that were not made in time."""
    timeout_s = EXIT_TIMEOUT_S
    queues = [each for each in _queues if each.pid == os.getpid() and each.pending()]
    deadline_s = clock.monotonic_s() + timeout_s
    for queue in queues:
        waiting = ", ".join(each.what for each in queue.pending())
        _LOGGER.warning("the interpreter ends: waits up to %g s for %s", timeout_s, waiting)
        if not queue.drain(max(0.0, deadline_s - clock.monotonic_s())):
            left = ", ".join(each.what for each in queue.pending())
            _LOGGER.error("not made, for the interpreter ends: %s", left)
