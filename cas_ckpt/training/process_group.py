"""`Peers` over torch.distributed: a gloo group of our own beside whatever the training uses.

How a collective goes:

1. Every rank sends every other one a header of fixed size: which call this is, the how many-th, and
   the length of the message that will follow for that very rank.
2. All have the same headers now (lengths apart) and so come to the same end: if a rank came with
   `fail`, its text follows instead of all messages and everybody raises it; if the calls differ,
   everybody raises that. Both leave the group in step, so it stays usable.
3. The messages follow, each straight from its sender to its receiver.
4. A rank that does not come within the timeout, or whose connection breaks, ends the connections on this
   rank for good: a report for the others is posted (training/connections.py), and the `PeerError` names those that
   are dead or late. The others find out at their next step.
5. If nobody was dead, the next common work (`begin`) connects the ranks anew (training/connections.py). All ranks
   count their works, and the number names the new connections in the store: so only ranks that begin
   the same work meet, and what was sent over the old connections can never be taken for a new message.

A message is held once by its sender and once by its receiver. A rank that dies while messages are under
way may leave ranks that got theirs: those raise at their next call.

Invariant: ranks of a usable group have made the same number of calls. Knows nothing of what messages mean.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from cas_ckpt import clock
from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import InvalidInputError, PeerError, StorageError
from cas_ckpt.parallel import peers as blame
from cas_ckpt.parallel.peers import Blame
from cas_ckpt.training.connections import ConnectionsLost, Rendezvous, StopReports
from cas_ckpt.training.torch_internals import DEFAULT_STORE, private

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MAX_TEXT_BYTES = 4096
_HAS_LEFT = "has left the group"

# How many groups this process has made of the same ranks: the same number on each of them, so it names the group.
_num_made: Counter[tuple[int, ...]] = Counter()


class Op(Enum):
    """The calls, as headers number them."""

    FAIL = 0
    GATHER_ALL = 1
    GATHER = 2
    BROADCAST = 3
    EXCHANGE = 4


@dataclass(frozen=True, slots=True)
class Call:
    """A collective call; all ranks must make the same one."""

    op: Op
    number: int

    def __str__(self) -> str:
        return f"{self.op.name.lower()}(), call {self.number} of this group"


@dataclass(slots=True)
class _Taken:
    """A call or a `begin` that is under way; `is_over` is set in one step, which no Ctrl-C divides."""

    is_over: bool = False


_HEADER = struct.Struct("<3q")
"""As it is sent: operation, number of the call, bytes of the message."""


class GroupPeers:
    """The ranks of a process group, connected by gloo whatever the group's own backend is.

    Making one is collective over the ranks of the group, and all of them make theirs in the same order. It uses the
    store of torch.distributed, but none of its groups: collectives of the training may run at the same time.

    After a `PeerError` about a rank that died the object is broken: all later calls say so, and the ranks that are
    left need a new process group and a new `GroupPeers`. After one about a rank that came late all calls say so
    until the next `begin`, which connects all ranks anew.

    Attributes:
        members: The ranks of the job that are in the group, by their number in it.
        has_lost_ranks: It is broken for good: a rank is dead, or has left.

    Args:
        process_group: The ranks; None: all of them.
        timeout_s: For each collective, from this rank's call until its result, transfer included; for all
            ranks to come and connect, and then for the connecting.

    Raises:
        InvalidInputError: torch.distributed is not initialised, or this rank is not of the group.
        PeerError: Somebody did not come to make it within the timeout, or was lost in it.
        StorageError: This rank cannot connect, such as for want of file descriptors.
    """

    def __init__(self, process_group: ProcessGroup | None = None, *, timeout_s: float = 300.0) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise InvalidInputError("GroupPeers needs torch.distributed: call init_process_group first")
        self.rank = dist.get_rank(process_group)
        if self.rank < 0:
            raise InvalidInputError(f"rank {dist.get_rank()} of the job is not of the given process group")
        members = tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))
        self.members = members
        self.size = len(members)
        self._timeout_s = timeout_s
        self._num_calls = 0
        self._num_works = 0
        self._taking = threading.RLock()  # a signal handler may call from inside of it
        self._taken: _Taken | None = None
        self._broken: Blame | None = None
        self.has_lost_ranks = False
        digest = hashlib.sha256(repr(members).encode()).hexdigest()
        self._name = f"cas_ckpt/{digest}/{_num_made[members]}"
        _num_made[members] += 1
        self._connect(self._name)

    def _connect(self, name: str) -> None:
        try:
            # A connection of our own: another thread may be waiting in the training's one, for the rank that died.
            store = PrefixStore(name, private(DEFAULT_STORE)().clone())
        except (RuntimeError, OSError) as error:
            text = f"this rank ({self.rank}) does not reach the store of torch.distributed: {error}"
            raise StorageError(text) from error
        self._reports = StopReports(store, self.rank, self._num_works)
        self._connections = Rendezvous(store, self._reports, self.rank, self.size, timeout_s=self._timeout_s).connect()

    def begin(self) -> None:
        """Begin a common work, as `Peers.begin` says: after one that broke the connections, all ranks connect anew.

        Raises:
            PeerError, StorageError: As for making the group.
        """
        self._num_works += 1
        if self.has_lost_ranks or (self._broken is None and not self._reports.has_stopped()):
            self._reports.work = self._num_works
            return
        taken = _Taken()
        try:
            if not self._take(taken):
                return  # another thread's work is under way: this one will be refused
            stopped = self._reports.stopped(self._others())
            absent = self._reports.absent_from(self._num_works, stopped)
            if absent:  # such as those who have begun this very work: they would not come to connect anew for it
                self._reports.work = self._num_works
                lost = ConnectionsLost(set(), is_late=False)
                raise self._break(self._blame_for(lost, "this commit or checkout", absent)).error()
            self._reports.post(after=stopped)  # for ranks that began before those had stopped, and wait for this one
            self._break(self._broken or Blame("other ranks have given it up", ()))
            self._num_calls = 0
            self._connect(f"{self._name}/work {self._num_works}")
            self._broken = None
        except PeerError as error:
            self._broken = Blame(str(error), error.ranks)
            raise
        finally:
            taken.is_over = True

    # ------------------------------------------------------------ the calls

    def gather_all(self, message: Buffer) -> list[bytes]:
        found = self._collect(Op.GATHER_ALL, dict.fromkeys(self._others(), message))
        return self._by_rank(found, message)

    def gather(self, message: Buffer) -> list[bytes] | None:
        found = self._collect(Op.GATHER, {0: message} if self.rank else {})
        return None if self.rank else self._by_rank(found, message)

    def broadcast(self, message: Buffer | None) -> bytes:
        own = blame.check_broadcast(self.rank, message)
        found = self._collect(Op.BROADCAST, dict.fromkeys(self._others(), own))
        return bytes(found.get(0, own))

    def exchange(self, messages: Sequence[Buffer]) -> list[Buffer]:
        blame.check_exchange(messages, self.size)
        found = self._collect(Op.EXCHANGE, {peer: messages[peer] for peer in self._others()})
        found[self.rank] = messages[self.rank]
        return [found[peer] for peer in range(self.size)]

    def fail(self, error: BaseException) -> None:
        if isinstance(error, PeerError) or self._broken is not None:
            return  # known to all; too late
        text, taken = blame.error_text(error), _Taken()
        try:
            if not self._take(taken):
                return  # another thread's work is under way and is not the one that failed
            self._report(text.encode(errors="replace")[:MAX_TEXT_BYTES])
        except ConnectionsLost as lost:
            self._reports.post(fault=f"failed: {text}")
            self._break(self._blame_for(lost, "fail"))
        except BaseException as other:
            self._put_out_of_step(taken, "fail", other)
            raise
        finally:
            taken.is_over = True

    def close(self) -> None:
        if not self.has_lost_ranks:
            if self._broken is None:  # else this rank has reported another reason already
                self._reports.post(fault=_HAS_LEFT)
                self._reports.end()
            self._break(Blame("it was closed on this rank", (self.rank,)))
            self.has_lost_ranks = True

    # ------------------------------------------------------------ how they go

    def _others(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]

    def _by_rank(self, found: Mapping[int, Buffer], own: Buffer) -> list[bytes]:
        return [bytes(own if peer == self.rank else found[peer]) for peer in range(self.size)]

    def _collect(self, op: Op, outgoing: Mapping[int, Buffer]) -> dict[int, Buffer]:
        """Make one call together; what the others sent, by rank."""
        lengths = {peer: memoryview(message).nbytes for peer, message in outgoing.items()}
        call, taken = Call(op, self._num_calls), _Taken()
        try:
            if not self._take(taken):
                raise blame.overlapping(self.rank, str(call))
            self._check_whole()
            deadline_s = clock.monotonic_s() + self._timeout_s
            headers = self._agree(call, lengths, deadline_s)
            incoming = {peer: num_bytes for peer, (_, num_bytes) in headers.items() if peer != self.rank}
            found: dict[int, Buffer] = dict(self._connections.swap(outgoing, incoming, deadline_s=deadline_s))
            return found
        except PeerError:
            raise
        except ConnectionsLost as lost:
            raise self._break(self._blame_for(lost, str(call))).error() from lost
        except BaseException as error:
            self._put_out_of_step(taken, str(call), error)
            raise
        finally:
            taken.is_over = True

    def _agree(self, call: Call, lengths: Mapping[int, int], deadline_s: float) -> dict[int, tuple[Call, int]]:
        """By rank: the call, and how many bytes follow for this rank; once it is clear that all make the same call."""
        headers = self._swap_headers(call, lengths, deadline_s)
        failing = {peer: num_bytes for peer, (theirs, num_bytes) in headers.items() if theirs.op is Op.FAIL}
        if failing:
            texts = self._connections.swap({}, failing, deadline_s=deadline_s)
            raise blame.failed({peer: bytes(text).decode(errors="replace") for peer, text in texts.items()}).error()
        found = blame.disagreement([str(headers[peer][0]) for peer in range(self.size)])
        if found is not None:
            raise found.error()
        return headers

    def _report(self, text: bytes) -> None:
        """Take part in the others' next call, as the one that fails; hear the texts of others that fail too."""
        deadline_s = clock.monotonic_s() + self._timeout_s
        call = Call(Op.FAIL, self._num_calls)
        headers = self._swap_headers(call, dict.fromkeys(self._others(), len(text)), deadline_s)
        failing = {peer: headers[peer][1] for peer in self._others() if headers[peer][0].op is Op.FAIL}
        self._connections.swap(dict.fromkeys(self._others(), text), failing, deadline_s=deadline_s)

    def _swap_headers(self, call: Call, lengths: Mapping[int, int], deadline_s: float) -> dict[int, tuple[Call, int]]:
        fixed = (call.op.value, call.number)
        own = {peer: _HEADER.pack(*fixed, lengths.get(peer, 0)) for peer in self._others()}
        found = self._connections.swap(own, dict.fromkeys(own, _HEADER.size), deadline_s=deadline_s)
        self._num_calls += 1
        headers = {self.rank: (call, 0)}
        for peer, data in found.items():
            op, number, num_bytes = _HEADER.unpack(data)
            headers[peer] = Call(Op(op), number), num_bytes
        return headers

    # ------------------------------------------------------------ when they do not

    def _take(self, call: _Taken) -> bool:
        """Whether the call may go on: one at a time, until whoever took it says that it is over, also on a Ctrl-C."""
        with self._taking:
            if self._taken is not None and not self._taken.is_over:
                return False
            self._taken = call
            return True

    def _check_whole(self) -> None:
        """Raise `PeerError` if this group is broken."""
        if self._broken is not None:
            advice = (
                "The ranks that are left need a new process group, and a repository opened with it (with "
                "torch.distributed.checkpoint: cas_ckpt.dcp.close_groups(), then writers over the new group)"
                if self.has_lost_ranks
                else "The next commit or checkout connects the ranks anew"
            )
            raise PeerError(f"this group of ranks is broken: {self._broken.message}. {advice}", self._broken.ranks)

    def _put_out_of_step(self, taken: _Taken, call: str, error: BaseException) -> None:
        """Break the group if the call that ends by `error` had begun: this rank is out of step with the others."""
        if self._taken is taken:
            self._reports.post(fault=f"failed: {blame.error_text(error)}")
            self._break(Blame(f"rank {self.rank} failed within {call}: {blame.error_text(error)}", (self.rank,)))

    def _break(self, why: Blame) -> Blame:
        self._broken = why
        self._connections.close()
        if self.has_lost_ranks:
            self._reports.end()
        return why

    def _blame_for(self, lost: ConnectionsLost, call: str, stopped: Collection[int] = ()) -> Blame:
        """Who is to blame that connections were lost, or, if none was, that the ranks `stopped` have."""
        self._reports.post(suspects=lost.suspects, after=stopped, is_late=lost.is_late)
        self._connections.close()  # before the search: ranks that wait for this one shall stop and say what they know
        found = self._reports.find(stopped or lost.suspects)
        if found.faults:
            self.has_lost_ranks = _HAS_LEFT in found.faults.values()
            return blame.stopped(found.faults)
        if found.accused_by and not found.silent:
            return blame.overdue(self.rank, found.accused_by, call)
        silent = found.silent or tuple(sorted(lost.suspects or stopped))
        is_late = lost.is_late or found.is_late
        self.has_lost_ranks = not is_late
        why = blame.late(silent, call, self._timeout_s) if is_late else blame.lost(silent, call)
        if not found.store_lost:
            return why
        others = "" if len(found.silent) == 1 else "; without it, those that stopped for another look the same"
        store = f" (the store of torch.distributed is gone as well, with the rank that hosted it{others})"
        return Blame(why.message + store, why.ranks)
