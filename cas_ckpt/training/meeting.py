"""How the ranks of a group come together: all are connected to all, or all know who is missing.

1. Every rank says in the store of torch.distributed that it is coming, and waits until all have said so.
2. gloo connects all to all, in a thread of its own: it may take far longer than it is told to.
3. Every rank says that it is connected, and waits until all have said so.

Steps 2 and 3 together have a limit of their own, which begins for all ranks at the same moment; so
whoever has said nothing at its end is gone. A rank that cannot connect for a reason of its own (no
file descriptors) says so on the board, and all others stop at once.

Invariant: the ranks that return are all there is of the group. Knows nothing of messages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from cas_ckpt import clock
from cas_ckpt.errors import StorageError
from cas_ckpt.training.links import Links
from cas_ckpt.training.notices import GRACE_S, Findings, NoticeBoard
from cas_ckpt.transfer import blame
from cas_ckpt.transfer.blame import Blame
from cas_ckpt.transfer.workers import StillRunning, call_within

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

THE_CALL = "the making of the group"
COMING, CONNECTED = "coming", "connected"

LOOK_S = 0.5
"""How often a rank that waits looks whether somebody has stopped."""

_OF_THE_OTHERS = re.compile(r"time.?out|timed out|connection|reset by peer|broken pipe|no route|unreachable|EOF", re.I)
"""What gloo says when the other end does not answer; everything else is a fault of this rank."""


class Meeting:
    """The coming together of one group, as one rank goes through it.

    Args:
        store: For this group alone.
        timeout_s: For the coming, and once more for the connecting.
    """

    def __init__(self, store: Store, board: NoticeBoard, rank: int, size: int, *, timeout_s: float) -> None:
        self._store = store
        self._board = board
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s

    def connect(self) -> Links:
        """The connections; all ranks do it at the same time.

        Raises:
            PeerError: Somebody did not come, or is gone; names those.
            StorageError: This rank cannot connect, for a reason of its own.
        """
        try:
            if self._board.has_stopped():
                raise self._stopped().error()
            self._say(COMING)
            self._wait_for_all(COMING, clock.monotonic_s() + self._timeout_s)
            left_s = max(self._timeout_s - GRACE_S, self._timeout_s / 2)  # so that what is missing is found in time
            return self._connected(clock.monotonic_s() + left_s)
        except RuntimeError as error:
            text = f"the store of torch.distributed does not answer ({error}): the rank that hosts it may be gone"
            raise Blame(text, ()).error() from error

    def _say(self, step: str) -> None:
        self._store.set(f"{step}/{self._rank}", "")

    def _connected(self, deadline_s: float) -> Links:
        links = None
        try:
            with _spare_descriptor():
                links = call_within(
                    lambda: Links(self._store, self._rank, self._size, timeout_s=self._timeout_s),
                    timeout_s=deadline_s - clock.monotonic_s(), look_s=LOOK_S, give_up=self._board.has_stopped,
                )  # fmt: skip
            self._say(CONNECTED)
        except StillRunning:
            pass  # time is up, or somebody has stopped: which of the two, and because of whom, is found out below
        except (RuntimeError, OSError) as error:  # of the others: found out below as well
            if not _OF_THE_OTHERS.search(str(error)):
                raise self._own_fault(error) from error
        self._wait_for_all(CONNECTED, deadline_s)  # without links it ends with the name of whoever is not there
        if links is None:
            raise self._given_up(CONNECTED).error()
        return links

    def _own_fault(self, error: Exception) -> StorageError:
        self._board.post(fault=f"failed in {THE_CALL}: {blame.told(error)}")
        return StorageError(
            f"this rank ({self._rank}) cannot connect to the {self._size - 1} others: {error}: it needs a free file "
            "descriptor for each of them (ulimit -n), and a network interface that they reach"
        )

    def _wait_for_all(self, step: str, deadline_s: float) -> None:
        keys = [f"{step}/{peer}" for peer in range(self._size)]
        while True:
            left_s = deadline_s - clock.monotonic_s()
            if self._is_there(keys, min(max(left_s, 0.01), LOOK_S)):
                return
            if self._board.has_stopped():
                raise self._stopped().error()
            if left_s <= 0:
                raise self._given_up(step).error()

    def _is_there(self, keys: list[str], timeout_s: float) -> bool:
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError:  # that it took too long; if it is anything else, the next question says so
            return False
        return True

    def _missing(self, step: str) -> tuple[int, ...]:
        others = (peer for peer in range(self._size) if peer != self._rank)
        return tuple(peer for peer in others if not self._store.check([f"{step}/{peer}"]))

    def _given_up(self, step: str) -> Blame:
        """Who is to blame that this rank waits no longer."""
        missing = self._missing(step)
        # All wait for one another until they are connected: whoever is left then, and does not stop as well, is gone.
        self._board.post(suspects=missing if step == COMING else (), is_late=True)
        found = self._board.find(missing, is_enough=_has_fault)
        if found.faults:
            return blame.stopped(found.faults)
        return self._without(found) if step == CONNECTED else blame.late(missing, THE_CALL, self._timeout_s)

    def _without(self, found: Findings) -> Blame:
        if found.silent:
            return blame.late(found.silent, THE_CALL, self._timeout_s)
        return Blame(
            f"all ranks have come to {THE_CALL}, and not all could connect to one another within {self._timeout_s:g} "
            "s: look at the network between them, and at GLOO_SOCKET_IFNAME",
            (),
        )

    def _stopped(self) -> Blame:
        """Somebody else has stopped: because of whom?"""
        self._board.post(is_late=True)
        others = [peer for peer in range(self._size) if peer != self._rank]
        found = self._board.find(others, is_enough=_has_fault)
        if found.faults:
            return blame.stopped(found.faults)
        if found.accused_by:
            return blame.overdue(self._rank, found.accused_by, THE_CALL)
        return self._without(found)


def _has_fault(found: Findings) -> bool:
    return bool(found.faults)


@contextmanager
def _spare_descriptor() -> Iterator[None]:
    """Keep one file descriptor, for what has to be said when all others are taken."""
    spare = os.open(os.devnull, os.O_RDONLY)
    try:
        yield
    finally:
        os.close(spare)
