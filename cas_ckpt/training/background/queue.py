"""The order of a repository's commits in the background: one thread, one after another, none lost.

    1. `admit` waits until fewer commits are in flight than the caller allows, and raises what an earlier one failed of.
    2. `submit` puts a commit behind those that wait; the thread lives as long as there is one.
    3. The thread runs it and tells the `PendingCommit` how it ended; a failure is logged there and then.
    4. `drain` waits for all of them; at the interpreter's exit every queue is drained, for `EXIT_TIMEOUT_S` at most.

Invariant: what was submitted is run, in the order of the calls, or is named in the log as not made. A process that was
forked has none of its parent's threads: a queue belongs to the process that made it. Knows nothing of what is run.
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

from cas_ckpt import clock
from cas_ckpt.core.records import CommitInfo
from cas_ckpt.errors import BackgroundCommitError, CancelledError, InvalidInputError, out_of_memory
from cas_ckpt.parallel.peers import error_text
from cas_ckpt.parallel.workers import Background, before_threads_end
from cas_ckpt.training.background.pending import PendingCommit

_LOGGER = logging.getLogger("cas_ckpt")

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
