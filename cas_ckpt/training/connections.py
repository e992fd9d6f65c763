"""How the ranks of a group connect, swap messages, and find out because of whom that failed.

The ranks come together (`Rendezvous`): all are connected to all, or all know who is missing.

1. Every rank says in the store of torch.distributed that it is coming, and waits until all have said so.
2. gloo connects all to all, in a thread of its own: it may take far longer than it is told to.
3. Every rank says that it is connected, and waits until all have said so.

Steps 2 and 3 together have a limit of their own, which begins for all ranks at the same moment; so
whoever has said nothing at its end is gone. A rank that cannot connect for a reason of its own (no
file descriptors) reports that in the store, and all others stop at once.

Messages (`Connections`): many of known lengths at once, within one deadline. Every message goes straight from its
sender to its receiver, over a gloo group of our own, so that what does not arrive shows exactly who did not
send. (Gloo's own collectives go in rings: there a dead rank looks like a dead neighbour.) Memory that gloo may still
read or write is kept until the connections are closed.

Who is to blame (`StopReports`): a rank that loses a connection only knows whom it lost: the one that died, or one that
stopped because of the one that died. So every rank that stops reports, once, either its own fault or whom it
suspects, and follows the suspicions of others until it comes to ranks with a fault of their own or to ranks that are
silent. One report per rank and group, never changed; a store that is gone is one more thing to report, not an error.
A rank that connects anew leaves a report as well, for those that still wait for it over the old connections; one that
never connects again says so (`end`), so that nobody who begins the next work waits for it.

Invariant: the ranks that return are all there is of the group. Must not know what the messages mean.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cas_ckpt import clock
from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import StorageError
from cas_ckpt.parallel import peers as blame
from cas_ckpt.parallel.peers import Blame
from cas_ckpt.parallel.workers import StillRunning, call_within

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


class ConnectionsLost(Exception):
    """Messages did not come or go within the deadline; the connections cannot be used any more.

    Attributes:
        suspects: Ranks at the other end of those messages.
        is_late: The deadline passed; otherwise a connection broke.
    """

    def __init__(self, suspects: set[int], *, is_late: bool) -> None:
        super().__init__(sorted(suspects), is_late)
        self.suspects = suspects
        self.is_late = is_late


# How long living ranks may take to notice that others have stopped, once their connections are closed.
GRACE_S = 2.0
POLL_S = 0.02

LOOK_S = 0.5
"""How often a rank that waits looks whether a connection has broken, or somebody has stopped."""

_NEVER_SENT = 1
"""A tag of messages; all that are sent have 0."""

_IN_ONE_PIECE_BYTES = 1024
"""A message of this size is sent in one TCP segment, so that it comes whole or not at all."""


class Connections:
    """Connections from this rank to all others."""

    def __init__(self, store: Store, rank: int, size: int, *, timeout_s: float) -> None:
        """Connect; all ranks do it at the same time.

        Raises:
            RuntimeError: Somebody did not come within the timeout.
        """
        self._group: Any = torch.distributed.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
        # The other rank, the work to wait for, and its memory.
        self._under_way: list[tuple[int, Any, torch.Tensor]] = []

    def swap(self, outgoing: Mapping[int, Buffer], incoming: Mapping[int, int], *, deadline_s: float) -> dict[int, Any]:
        """Send messages and receive others; messages without bytes are not sent.

        Args:
            outgoing: What to send, by receiver.
            incoming: How many bytes will come, by sender.
            deadline_s: On `clock.monotonic_s`, for all of it.

        Returns:
            What came, as memoryviews, by sender.
        """
        memory = {peer: torch.empty(length, dtype=torch.uint8) for peer, length in incoming.items()}
        lost: set[int] = set()
        for peer, tensor in memory.items():
            self._start(self._group.recv, peer, tensor, lost)
        for peer, message in outgoing.items():
            self._start(self._group.send, peer, _over(message), lost)
        self._wait(lost, deadline_s)
        if lost:
            # A copy: a thread that was left may add to it.
            raise ConnectionsLost(set(lost), is_late=clock.monotonic_s() >= deadline_s)
        self._under_way.clear()
        return {peer: tensor.numpy().data for peer, tensor in memory.items()}

    def _start(self, start: Any, peer: int, memory: torch.Tensor, lost: set[int]) -> None:
        if not memory.numel():
            return
        try:
            self._under_way.append((peer, start([memory], peer, 0), memory))
        except RuntimeError:
            lost.add(peer)

    def _wait(self, lost: set[int], deadline_s: float) -> None:
        """Until all that is under way is done, or the deadline; adds the ranks at the other end of what is not.

        Gloo waits for the whole time that it was given where a connection breaks in the middle of a message, and breaks
        all connections where a wait times out: where that can be, it waits in a thread that this one can leave.
        """
        works, number, broken = list(self._under_way), 0, -1

        def wait() -> None:
            nonlocal number
            for number, (peer, work, _) in enumerate(works):  # noqa: B007 - `is_stuck` reads it
                left_s = deadline_s - clock.monotonic_s()
                if lost and left_s > 0:
                    break  # those who have not come yet are not late: it would be wrong to suspect them
                try:
                    # Past the deadline the rest is only asked whether it is there: zero would mean no limit at all.
                    work.wait(timedelta(milliseconds=max(math.ceil(left_s * 1000), 1)))
                except RuntimeError:
                    lost.add(peer)

        def is_stuck() -> bool:
            """At the second look: what came before the connection broke is there at the first one."""
            nonlocal broken
            at = number
            if at == broken:
                return True
            broken = at if self._is_broken(works[at][0]) else -1
            return False

        if all(memory.numel() <= _IN_ONE_PIECE_BYTES for _, _, memory in works):
            return wait()
        left_s = max(deadline_s - clock.monotonic_s(), 0.0)
        try:
            call_within(wait, timeout_s=left_s + GRACE_S, look_s=LOOK_S, give_up=is_stuck)
        except StillRunning:
            lost.add(works[number][0])

    def _is_broken(self, peer: int) -> bool:
        """Whether gloo refuses a new message over that connection."""
        try:
            self._group.recv([torch.empty(1, dtype=torch.uint8)], peer, _NEVER_SENT)
        except RuntimeError:
            return True
        return False

    def close(self) -> None:
        """Close the connections; what is under way on the other side fails there."""
        group, self._group = self._group, None
        if self._under_way and group is not None:
            # Works keep connections open, and threads and errors keep works: a wait that times out closes them all.
            for peer in range(group.size()):
                with suppress(RuntimeError):
                    group.recv([torch.empty(1, dtype=torch.uint8)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))
        self._under_way.clear()


def _over(message: Buffer) -> torch.Tensor:
    """A tensor over the bytes of `message`, without a copy where they are contiguous."""
    view = memoryview(message)
    if not view.c_contiguous:
        view = memoryview(bytes(view))
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    view = view.cast("B")
    address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    # As if it could be written: torch warns of tensors over memory that cannot, but gloo only reads.
    interface = {"data": (address, False), "shape": (view.nbytes,), "typestr": "|u1", "version": 3}
    return torch.from_numpy(np.asarray(SimpleNamespace(__array_interface__=interface, kept=view)))


@dataclass(frozen=True, slots=True)
class Findings:
    """Who is behind a broken connection.

    Attributes:
        faults: Ranks that said why they stopped, and what they said.
        silent: Ranks that said nothing at all.
        accused_by: Ranks that stopped because of this very one.
        is_late: Somebody stopped because time was up; otherwise connections broke.
        store_lost: The store did not answer, so `silent` is all that is known.
    """

    faults: dict[int, str]
    silent: tuple[int, ...]
    accused_by: tuple[int, ...] = ()
    is_late: bool = False
    store_lost: bool = False


class StopReports:
    """The reports of one group in the store of torch.distributed.

    Attributes:
        work: The number of the work that this rank is at; its report says so.
    """

    def __init__(self, store: Store, rank: int, work: int = 0) -> None:
        self._store = store
        self._rank = rank
        self._posted = False
        self.work = work

    def has_stopped(self) -> bool:
        """Whether any rank has; False if the store does not answer."""
        try:
            return bool(self._store.check(["stopped"]))
        except RuntimeError:
            return False

    def stopped(self, ranks: Iterable[int]) -> list[int]:
        """Those of `ranks` that have; none if the store does not answer."""
        try:
            return [rank for rank in ranks if self._store.check([f"stopped/{rank}"])]
        except RuntimeError:
            return []

    def absent_from(self, work: int, stopped: Iterable[int]) -> list[int]:
        """Those of `stopped` that do not come to connect anew for this work.

        They have stopped in it, not in one before, or never connect again; none if the store does not answer.
        """
        try:
            return [
                rank
                for rank in stopped
                if self._store.check([f"ended/{rank}"])
                or json.loads(self._store.get(f"stopped/{rank}"))["work"] >= work
            ]
        except RuntimeError:
            return []

    def end(self) -> None:
        """Say that this rank, which has stopped, will never connect again."""
        with suppress(RuntimeError):  # the store is gone: nobody could read this
            self._store.set(f"ended/{self._rank}", "")

    def post(
        self,
        *,
        fault: str | None = None,
        suspects: Collection[int] = (),
        after: Collection[int] = (),
        is_late: bool = False,
    ) -> None:
        """Report to the others that this rank has stopped; only the first report counts.

        Args:
            after: Ranks that had stopped before and are no suspects: their reports say more.
            is_late: It stopped because the suspects did not come in time.
        """
        if self._posted:
            return
        self._posted = True
        report = {"fault": fault, "suspects": sorted(suspects), "after": sorted(after), "is_late": is_late}
        try:
            self._store.set(f"stopped/{self._rank}", json.dumps(report | {"work": self.work}))
            self._store.set("stopped", "")
        except RuntimeError:  # the store is gone: nobody could read this
            return

    def find(self, suspects: Collection[int], *, until_fault: bool = False) -> Findings:
        """Follow the suspicions from report to report, for at most `GRACE_S`, or until a fault is found."""
        unread, read = set(suspects) - {self._rank}, {self._rank}
        faults: dict[int, str] = {}
        accused_by: list[int] = []
        is_late = store_lost = False
        deadline_s = clock.monotonic_s() + GRACE_S
        pause = threading.Event()
        try:
            while unread and clock.monotonic_s() < deadline_s and not (until_fault and faults):
                posted = sorted(rank for rank in unread if self._store.check([f"stopped/{rank}"]))
                for rank in posted:
                    report = json.loads(self._store.get(f"stopped/{rank}"))
                    read.add(rank)
                    unread |= {*report["suspects"], *report["after"]}
                    is_late |= report["is_late"]
                    if report["fault"] is not None:
                        faults[rank] = report["fault"]
                    if self._rank in report["suspects"]:
                        accused_by.append(rank)
                unread -= read
                if not posted:
                    pause.wait(POLL_S)
        except RuntimeError:
            store_lost = True
        return Findings(faults, tuple(sorted(unread)), tuple(accused_by), is_late, store_lost)


THE_CALL = "the making of the group"


class Step(StrEnum):
    """A step that every rank reports in the store."""

    COMING = "coming"
    CONNECTED = "connected"


_OF_THE_OTHERS = re.compile(r"time.?out|timed out|connection|reset by peer|broken pipe|no route|unreachable|EOF", re.I)
"""Messages of gloo when the other end does not answer; all others are faults of this rank."""


class Rendezvous:
    """The coming together of one group, as one rank goes through it.

    Args:
        store: For this group alone.
        timeout_s: For the coming, and once more for the connecting.
    """

    def __init__(self, store: Store, reports: StopReports, rank: int, size: int, *, timeout_s: float) -> None:
        self._store = store
        self._reports = reports
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s

    def connect(self) -> Connections:
        """The connections; all ranks do it at the same time.

        Raises:
            PeerError: Somebody did not come, or is gone; names those.
            StorageError: This rank cannot connect, for a reason of its own.
        """
        try:
            if self._reports.has_stopped():
                raise self._stopped().error()
            self._store.set(f"{Step.COMING}/{self._rank}", "")
            self._wait_for_all(Step.COMING, clock.monotonic_s() + self._timeout_s)
            left_s = max(self._timeout_s - GRACE_S, self._timeout_s / 2)  # so that what is missing is found in time
            return self._connected(clock.monotonic_s() + left_s)
        except RuntimeError as error:
            text = f"the store of torch.distributed does not answer ({error}): the rank that hosts it may be gone"
            raise Blame(text, ()).error() from error

    def _connected(self, deadline_s: float) -> Connections:
        connections = None
        try:
            with open(os.devnull, "rb"):  # a spare file descriptor, for what has to be said when all others are taken
                connections = call_within(
                    lambda: Connections(self._store, self._rank, self._size, timeout_s=self._timeout_s),
                    timeout_s=deadline_s - clock.monotonic_s(), look_s=LOOK_S, give_up=self._reports.has_stopped,
                )  # fmt: skip
            self._store.set(f"{Step.CONNECTED}/{self._rank}", "")
        except StillRunning:
            pass  # time is up, or somebody has stopped: which of the two, and because of whom, is found out below
        except (RuntimeError, OSError) as error:  # of the others: found out below as well
            if not _OF_THE_OTHERS.search(str(error)):
                self._reports.post(fault=f"failed in {THE_CALL}: {blame.error_text(error)}")
                raise StorageError(
                    f"this rank ({self._rank}) cannot connect to the {self._size - 1} others: {error}: it needs a free "
                    "file descriptor for each of them (ulimit -n), and a network interface that they reach"
                ) from error
        self._wait_for_all(
            Step.CONNECTED, deadline_s
        )  # without connections it ends with the name of whoever is not there
        if connections is None:
            raise self._given_up(Step.CONNECTED).error()
        return connections

    def _wait_for_all(self, step: Step, deadline_s: float) -> None:
        keys = [f"{step}/{peer}" for peer in range(self._size)]
        while True:
            left_s = deadline_s - clock.monotonic_s()
            with suppress(RuntimeError):  # that it took too long; if it is anything else, the next question says so
                self._store.wait(keys, timedelta(seconds=min(max(left_s, 0.01), LOOK_S)))
                return
            if self._reports.has_stopped():
                raise self._stopped().error()
            if left_s <= 0:
                raise self._given_up(step).error()

    def _given_up(self, step: Step) -> Blame:
        """Who is to blame that this rank waits no longer."""
        others = (peer for peer in range(self._size) if peer != self._rank)
        missing = tuple(peer for peer in others if not self._store.check([f"{step}/{peer}"]))
        # All wait for one another until they are connected: whoever is left then, and does not stop as well, is gone.
        self._reports.post(suspects=missing if step is Step.COMING else (), is_late=True)
        found = self._reports.find(missing, until_fault=True)
        if found.faults:
            return blame.stopped(found.faults)
        return self._without(found) if step is Step.CONNECTED else blame.late(missing, THE_CALL, self._timeout_s)

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
        self._reports.post(is_late=True)
        others = [peer for peer in range(self._size) if peer != self._rank]
        found = self._reports.find(others, until_fault=True)
        if found.faults:
            return blame.stopped(found.faults)
        if found.accused_by:
            return blame.overdue(self._rank, found.accused_by, THE_CALL)
        return self._without(found)
