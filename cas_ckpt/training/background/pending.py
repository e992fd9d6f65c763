"""`PendingCommit`: a commit that goes on in the background, as its caller sees it.

Invariant: it ends exactly once, made, failed or cancelled; whoever waits hears of it, and every callback is called once
after that. Knows nothing of how a commit is made.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from cas_ckpt.errors import CancelledError, InvalidInputError, StillPendingError, shown_value
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
        self._check_process()
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
        self._check_process()
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
        self._check_process()
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

    def _check_process(self) -> None:
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
