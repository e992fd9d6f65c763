"""What ranks that cannot go on leave in the store of torch.distributed, so that the others blame the right one.

A rank that loses a connection only knows whom it lost: the one that died, or one that stopped because of
the one that died. So every rank that stops posts, once, either its own fault or whom it suspects, and
follows the suspicions of others until it comes to ranks with a fault of their own or to ranks that
are silent.

Invariant: one notice per rank and group, never changed. Never raises: a store that is gone is one more
thing to tell. Knows nothing of connections and messages.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cas_ckpt import clock

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# How long living ranks may take to notice that others have stopped, once their connections are closed.
GRACE_S = 2.0
POLL_S = 0.02


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


class NoticeBoard:
    """The notices of one group."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._posted = False

    def has_stopped(self) -> bool:
        """Whether any rank has; False if the store does not answer."""
        try:
            return bool(self._store.check(["stopped"]))
        except RuntimeError:
            return False

    def post(self, *, fault: str | None = None, suspects: Collection[int] = (), is_late: bool = False) -> None:
        """Tell the others that this rank has stopped; only the first notice counts.

        Args:
            is_late: It stopped because the suspects did not come in time.
        """
        if self._posted:
            return
        self._posted = True
        notice = json.dumps({"fault": fault, "suspects": sorted(suspects), "is_late": is_late})
        try:
            self._store.set(f"stopped/{self._rank}", notice)
            self._store.set("stopped", "")
        except RuntimeError:  # the store is gone: nobody could read this
            return

    def find(
        self, suspects: Collection[int], *, is_enough: Callable[[Findings], bool] = lambda _: False
    ) -> Findings:
        """Follow the suspicions, for at most `GRACE_S` or until what is found `is_enough`."""
        search = _Search(self._store, self._rank, set(suspects) - {self._rank})
        deadline_s = clock.monotonic_s() + GRACE_S
        pause = threading.Event()
        try:
            while search.unread and clock.monotonic_s() < deadline_s:
                if not search.step():
                    pause.wait(POLL_S)
                elif is_enough(search.findings()):
                    break
        except RuntimeError:
            return search.findings(store_lost=True)
        return search.findings()


class _Search:
    """Follows suspicions from notice to notice."""

    def __init__(self, store: Store, rank: int, suspects: set[int]) -> None:
        self.unread = suspects
        self._store = store
        self._rank = rank
        self._read = {rank}
        self._faults: dict[int, str] = {}
        self._accused_by: list[int] = []
        self._is_late = False

    def step(self) -> bool:
        """Read the notices that are there; whether there were any."""
        posted = sorted(rank for rank in self.unread if self._store.check([f"stopped/{rank}"]))
        for rank in posted:
            notice = json.loads(self._store.get(f"stopped/{rank}"))
            self._read.add(rank)
            self.unread |= set(notice["suspects"])
            self._is_late |= notice["is_late"]
            if notice["fault"] is not None:
                self._faults[rank] = notice["fault"]
            if self._rank in notice["suspects"]:
                self._accused_by.append(rank)
        self.unread -= self._read
        return bool(posted)

    def findings(self, *, store_lost: bool = False) -> Findings:
        """What is known so far."""
        silent = tuple(sorted(self.unread))
        return Findings(self._faults, silent, tuple(self._accused_by), self._is_late, store_lost)
