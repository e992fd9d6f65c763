"""The base of all groups of methods: an open repository, and the ranks that it works together with."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import InvalidInputError
from cas_ckpt.held_signals import Turn
from cas_ckpt.ops.commit.options import CommitOptions
from cas_ckpt.parallel.peers import collective_errors
from cas_ckpt.repository.ranks import AUTO, TIMEOUT_S, Ranks
from cas_ckpt.uncopied import Uncopied

if TYPE_CHECKING:
    from cas_ckpt.ops.commit.frozen import FrozenMemory
    from cas_ckpt.ops.sync.push import BackgroundPushes
    from cas_ckpt.training.background.commits import BackgroundCommits, InFlight


_ONE_AT_A_TIME = frozenset({"commit", "commit_async", "checkout", "import_file"})
"""Verbs that one thread is in once, at most."""


class Opened(Uncopied):
    """An open repository, without verbs."""

    def __init__(
        self, handle: RepositoryHandle, *, group: Any = AUTO, timeout_s: float = TIMEOUT_S, ranks: Ranks | None = None,
        commit_options: CommitOptions | None = None,
    ) -> None:  # fmt: skip
        """Take over `handle`, and `ranks` if the group is made already."""
        self._handle = handle
        self._ranks = ranks or Ranks(group, timeout_s)
        self.commit_options = commit_options or CommitOptions()
        self._frozen: FrozenMemory | None = None
        self._pushes: BackgroundPushes | None = None
        self._background: BackgroundCommits | None = None
        self._others: list[InFlight] = []
        self._pid, self._committing = os.getpid(), Turn()
        if "torch" in sys.modules:  # who trains opens once, and is not to wait for modules in the first commit
            import cas_ckpt.training.verbs  # noqa: F401

    def _common_work(self, verb: str) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        """Where a verb runs (see `reads_arguments`): one commit or checkout at a time, each one work of all ranks.

        Raises:
            InvalidInputError: in a commit or checkout of this thread, which it would wait for.
        """
        if verb in _ONE_AT_A_TIME:
            self._refuse_inside(verb)
        if verb == "commit_async":
            return nullcontext(), self._in_background().calling(self._ranks.background)
        if verb not in ("commit", "checkout"):
            return nullcontext(), nullcontext()
        try:
            self._wait_for_pending(*self._in_flight())
        except BaseException:
            with collective_errors(self._ranks.peers):  # the others would wait for this rank
                raise
        return self._turn(), self._work_of_all(verb)

    @contextmanager
    def _work_of_all(self, verb: str) -> Iterator[None]:
        with collective_errors(self._ranks.peers):
            if verb == "commit" and self._background is not None:
                self._background.queue.raise_failure()
            yield

    def _refuse_inside(self, verb: str) -> None:
        """Refuse what would wait for a verb that this very thread is in: a signal handler calls it, or the state does.

        The locks say so, and no state beside them, which an interrupted call might leave behind.
        """
        if self._turn().is_mine or (self._background is not None and self._background.calls.is_mine):
            raise InvalidInputError(
                f"{verb} was called inside of a commit, import or checkout of the same repository, in the same thread, "
                "and would wait for it for ever: in a signal handler, note the signal, and call it after that"
            )

    def _turn(self) -> Turn:
        """No other commit or checkout through this object runs inside. The lock itself: see `reads_arguments`."""
        if self._pid != os.getpid():  # forked while a thread was inside, which is not here to leave it
            self._pid, self._committing = os.getpid(), Turn()
        return self._committing

    def _in_background(self) -> BackgroundCommits:
        """The commits in the background of this process."""
        if self._background is None or self._background.queue.pid != os.getpid():
            from cas_ckpt.training.background.commits import BackgroundCommits

            self._background = BackgroundCommits(self._handle, self._turn)
        return self._background

    def _note_in_flight(self, other: InFlight) -> None:
        """Order everything that begins from now on after `other`."""
        self._others = [*self._in_flight(), other]

    def _in_flight(self) -> list[InFlight]:
        """Pending work of others that this thread can wait for."""
        return [each for each in self._others if not each.wait(0)]

    def _wait_for_pending(self, *others: InFlight) -> None:
        """Commits in the background that were begun before, and `others`, come before what is begun now.

        A save of DCP waits, too, which is no work of this object's ranks: its failure is not reported here.
        """
        for each in others:
            each.wait()
        if self._background is not None and self._background.queue.pid == os.getpid():
            self._background.queue.drain()
