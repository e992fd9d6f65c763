"""Threads of one process standing for ranks: the real protocol of `Peers` without processes.

How a collective goes:

1. A rank that still owes the end of a failed work (below) ends it now: its call raises.
2. Every rank lays its call (which collective, which root) and its message into the current round.
3. The last one to come compares the calls and closes the round: all get the messages, or all get
   the `PeerError` that says who called what. No numbers are needed to compare, since a rank's
   n-th call can only meet the n-th calls of the others.
4. A rank that fails, leaves or does not come in time breaks the round: those who wait in it raise
   at once, and each of the others *owes* that error, so that its next call raises or, if that is
   `fail`, ends quietly. Thus each rank leaves the failed work exactly once, in its own time, and
   the next round belongs to the next work.

Invariant: a round is closed or broken exactly once, under the lock. Knows nothing of what the
messages mean; training/process_group.py is the same protocol over torch.distributed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, overload

from cas_ckpt import clock
from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import InvalidInputError, PeerError
from cas_ckpt.parallel import peers as blame
from cas_ckpt.parallel.peers import Blame, Peers

T = TypeVar("T")


def thread_world(size: int, *, timeout_s: float = 60.0) -> list[Peers]:
    """`size` ranks of one world, by rank; each is to be used by one thread at a time.

    Args:
        timeout_s: How long a rank waits in one collective for the others.
    """
    return list(_world(size, timeout_s))


def _world(size: int, timeout_s: float) -> list[ThreadPeers]:
    if size < 1:
        raise InvalidInputError(f"a world needs at least one rank, got size={size}")
    world = _World(size, timeout_s)
    return [ThreadPeers(world, rank) for rank in range(size)]


@overload
def run_ranks(
    size: int, work: Callable[[Peers], T], *, timeout_s: float = 60.0, outcomes: Literal[False] = False
) -> list[T]: ...


@overload
def run_ranks(
    size: int, work: Callable[[Peers], T], *, timeout_s: float = 60.0, outcomes: Literal[True]
) -> list[T | BaseException]: ...


def run_ranks(size: int, work: Callable[[Peers], T], *, timeout_s: float = 60.0, outcomes: bool = False) -> list[Any]:
    """Run `work(peers)` on a thread per rank; what they returned, by rank.

    A rank whose work ends leaves the group, so the others never wait for it until the timeout.

    Args:
        timeout_s: How long a rank waits in one collective for the others.
        outcomes: Give back each rank's result or exception, instead of raising.

    Raises:
        BaseException: The first error in time that is no `PeerError` (or else that of the lowest
            rank); what the other ranks raised stands in its notes.
    """
    ranks = [_RankThread(peers, work) for peers in _world(size, timeout_s)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if not outcomes:
        _raise_first(ranks)
    return [rank.result if rank.error is None else rank.error for rank in ranks]


class _RankThread(threading.Thread):
    """One rank's thread and what became of it."""

    def __init__(self, peers: ThreadPeers, work: Callable[[Peers], Any]) -> None:
        super().__init__(name=f"rank {peers.rank}", daemon=True)
        self.peers = peers
        self.work = work
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended_s = 0.0

    def run(self) -> None:
        try:
            self.result = self.work(self.peers)
        except BaseException as error:  # noqa: BLE001 - carried to the thread that waits
            self.error = error
        self.ended_s = clock.monotonic_s()
        self.peers.leave(self.error)


def _raise_first(ranks: Sequence[_RankThread]) -> None:
    failed = [rank for rank in ranks if rank.error is not None]
    if not failed:
        return
    first = min(failed, key=lambda rank: (isinstance(rank.error, PeerError), rank.ended_s))
    error = first.error or InvalidInputError("no error")
    error.add_note(f"raised on rank {first.peers.rank} of {len(ranks)}")
    for rank in failed:
        if rank is not first:
            error.add_note(f"rank {rank.peers.rank} raised {type(rank.error).__name__}: {rank.error}")
    raise error


@dataclass(slots=True)
class _Round:
    """One collective: the calls and messages of those who have come."""

    calls: dict[int, str] = field(default_factory=dict)
    messages: dict[int, Any] = field(default_factory=dict)
    closed: bool = False
    blame: Blame | None = None


class _World:
    """What the ranks share: the current round, who left, who owes the end of which failed works."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        self._round = _Round()
        self._left: dict[int, Blame] = {}
        self._owed: list[deque[Blame]] = [deque() for _ in range(size)]

    def meet(self, rank: int, call: str, message: Any) -> list[Any]:
        """The messages of all ranks, by rank, once all have made the same call."""
        with self._changed:
            self._check_may_call(rank, call)
            current = self._round
            current.calls[rank], current.messages[rank] = call, message
            self._advance()
            if not self._changed.wait_for(lambda: current.closed, self.timeout_s):
                missing = tuple(sorted(set(range(self.size)) - set(current.calls)))
                self._break_round(blame.late(missing, call, self.timeout_s))
            if current.blame is not None:
                raise current.blame.error()
            return [current.messages[peer] for peer in range(self.size)]

    def fail(self, rank: int, why: Blame) -> None:
        """End the work of `rank`; breaks the round unless this rank merely had not heard of the end yet."""
        with self._changed:
            # In the round already: another thread of this rank is at work, and its work is not the one that failed.
            if rank in self._left or rank in self._round.calls:
                return
            if self._owed[rank]:
                self._owed[rank].popleft()
                return
            self._break_round(why, also=rank)

    def leave(self, rank: int, why: Blame) -> None:
        """Let nobody wait for `rank` any more."""
        with self._changed:
            self._left.setdefault(rank, why)
            self._owed[rank].clear()
            self._advance()

    def _check_may_call(self, rank: int, call: str) -> None:
        if rank in self._left:
            raise PeerError(f"this rank ({rank}) has left the group and cannot call {call}: open a new one", (rank,))
        if rank in self._round.calls:
            raise blame.overlapping(rank, call)
        if self._owed[rank]:
            raise self._owed[rank].popleft().error()

    def _advance(self) -> None:
        """Close the round if all have come, break it if somebody never will."""
        current = self._round
        gone = [peer for peer in sorted(self._left) if peer not in current.calls]
        if gone and current.calls:
            self._break_round(self._left[gone[0]])
        elif len(current.calls) == self.size:
            current.blame = blame.disagreement([current.calls[peer] for peer in range(self.size)])
            self._close_round()

    def _break_round(self, why: Blame, *, also: int | None = None) -> None:
        told = {*self._round.calls, *self._left, also}
        for peer in range(self.size):
            if peer not in told:
                self._owed[peer].append(why)
        self._round.blame = why
        self._close_round()

    def _close_round(self) -> None:
        self._round.closed = True
        self._round = _Round()
        self._changed.notify_all()


class ThreadPeers:
    """One rank of `thread_world`."""

    def __init__(self, world: _World, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.size = world.size

    def begin(self) -> None:
        """See `Peers.begin`; threads are never apart."""

    def gather_all(self, message: Buffer) -> list[bytes]:
        """See `Peers.gather_all`."""
        return self._world.meet(self.rank, "gather_all", bytes(message))

    def gather(self, message: Buffer) -> list[bytes] | None:
        """See `Peers.gather`."""
        found = self._world.meet(self.rank, "gather", bytes(message))
        return None if self.rank else found

    def broadcast(self, message: Buffer | None) -> bytes:
        """See `Peers.broadcast`."""
        own = bytes(blame.check_broadcast(self.rank, message))
        found: bytes = self._world.meet(self.rank, "broadcast", own)[0]
        return found

    def exchange(self, messages: Sequence[Buffer]) -> list[Buffer]:
        """See `Peers.exchange`."""
        blame.check_exchange(messages, self.size)
        # Copied, as the sender may reuse its memory before the receiver has looked.
        copies = [message if peer == self.rank else bytes(message) for peer, message in enumerate(messages)]
        found = self._world.meet(self.rank, "exchange", copies)
        return [sent[self.rank] for sent in found]

    def fail(self, error: BaseException) -> None:
        """See `Peers.fail`."""
        if not isinstance(error, PeerError):
            self._world.fail(self.rank, blame.failed({self.rank: blame.error_text(error)}))

    def leave(self, error: BaseException | None) -> None:
        """Leave the group for good; the others are told `error` if they still wait for this rank."""
        why = blame.gone(self.rank) if error is None else blame.failed({self.rank: blame.error_text(error)})
        self._world.leave(self.rank, why)

    def close(self) -> None:
        """See `Peers.close`."""
        self.leave(None)
