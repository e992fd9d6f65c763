"""The ranks of one job, as commits and checkouts see them.

Every method but `close` is collective: all ranks call the same ones in the same order, from one
thread each. A rank that cannot go on calls `fail` instead of the next one; then every other rank
gets a `PeerError` that names it, at its next call at the latest. Nobody waits longer than the
timeout of the group.

    try:
        plans = peers.gather_all(plan)      # and whatever else the work needs
        ...
    except BaseException as error:
        peers.fail(error)                   # ends the work for the others; no effect on a PeerError
        raise

Invariant: a collective gives its answer on every rank or raises on every rank. An error on one rank is reported to the
others exactly once, whoever catches it first (`collective_errors`). The first exchange of every collective call is
`compare_calls`, so that calls of different kinds never take each other's messages for their own. What a digest stands
for comes from the lowest rank that has it (`distinct_messages`), so every rank gets the same bytes.

Knows nothing of tensors or torch; tests/thread_peers.py has ranks that are threads, training/process_group.py the ones
of torch.distributed. Both say who is to blame by the functions at the end of this file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgpack
from blake3 import blake3

from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import InvalidInputError, PeerError

V = TypeVar("V")


class Peers(Protocol):
    """A group of ranks. Messages are bytes of any length; every call verifies that all ranks make the same one.

    A message may be reused by its sender as soon as the call returns; what a call returns belongs
    to the caller. Work on one group must not overlap: while one thread commits, another one waits
    or uses a group of its own. Two calls at the same moment are refused (`InvalidInputError`);
    calls of two works that take turns are the caller's to prevent, with a lock around each work.

    Every collective raises:
        PeerError: A rank failed, left, did not come in time, or made another call.
        InvalidInputError: This very call is wrong; the others do not know yet, so call `fail`.
    """

    @property
    def rank(self) -> int:
        """The own rank, 0 to size - 1."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def begin(self) -> None:
        """A common work begins on this rank; after one that failed, connect the ranks anew where that is needed.

        Collective only where it connects. `collective_errors` calls it, once for each work.
        """
        ...

    def gather_all(self, message: Buffer) -> list[bytes]:
        """The message of every rank, by rank."""
        ...

    def gather(self, message: Buffer) -> list[bytes] | None:
        """The message of every rank on rank 0, None on the others."""
        ...

    def broadcast(self, message: Buffer | None) -> bytes:
        """The message of rank 0; the others pass None."""
        ...

    def exchange(self, messages: Sequence[Buffer]) -> list[Buffer]:
        """One message to each rank, by rank (b"" for nothing); those that the ranks sent to this one.

        The own one passes through. Messages may be large: the caller bounds them.
        """
        ...

    def fail(self, error: BaseException) -> None:
        """Report to the others that this rank cannot go on, and why; never raises. The caller then raises `error`.

        The group is usable again afterwards: each rank's call here, or the `PeerError` it got,
        is the end of the common work that failed. A `PeerError` is known to the others, so
        it is not reported again: a rank that raises one by its own decision must do so on all ranks.
        May wait, up to the timeout, until the others have heard.
        """
        ...

    def close(self) -> None:
        """Leave the group; not collective. Idempotent."""
        ...


class SoloPeers:
    """A world of one."""

    rank = 0
    size = 1

    def begin(self) -> None:
        """See `Peers.begin`."""

    def gather_all(self, message: Buffer) -> list[bytes]:
        """See `Peers.gather_all`."""
        return [bytes(message)]

    def gather(self, message: Buffer) -> list[bytes] | None:
        """See `Peers.gather`."""
        return [bytes(message)]

    def broadcast(self, message: Buffer | None) -> bytes:
        """See `Peers.broadcast`."""
        return bytes(check_broadcast(self.rank, message))

    def exchange(self, messages: Sequence[Buffer]) -> list[Buffer]:
        """See `Peers.exchange`."""
        check_exchange(messages, self.size)
        return list(messages)

    def fail(self, error: BaseException) -> None:
        """See `Peers.fail`."""

    def close(self) -> None:
        """See `Peers.close`."""


SOLO: Peers = SoloPeers()
"""The world of one, the default."""


# --- common work: ranks make the same call, and end it together --------------------------------

_MAX_SHOWN = 200
"""Characters of an argument in a message."""


@dataclass(frozen=True, slots=True)
class Call:
    """A collective call of the ranks.

    Attributes:
        verb: As people know it: commit, checkout, init, dcp.save.
        arguments: Those that must be the same on all ranks, by name: plain values (others count by their repr).
    """

    verb: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        said = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items() if value)
        return f"{self.verb}({said:.{_MAX_SHOWN}})"


def compare_calls(peers: Peers, call: Call, own: Any = None) -> list[Any]:
    """Find out whether all ranks make this very call; what each of them says of itself (`own`), by rank.

    Collective: one exchange, in which the arguments travel as a digest; one more if the ranks disagree. None for one.

    Raises:
        PeerError: On every rank: who makes another call, or gives which other argument.
    """
    if peers.size == 1:
        return [own]
    arguments = msgpack.packb(dict(call.arguments), default=repr, unicode_errors="surrogatepass")
    reports = [msgpack.unpackb(data) for data in peers.gather_all(
        msgpack.packb([call.verb, blake3(arguments).digest(), own])
    )]  # fmt: skip
    if any(each[:2] != reports[0][:2] for each in reports):
        said = map(msgpack.unpackb, peers.gather_all(msgpack.packb([call.verb, arguments])))
        raise _difference([Call(verb, msgpack.unpackb(data, unicode_errors="surrogatepass")) for verb, data in said])
    return [each[2] for each in reports]


def _difference(calls: Sequence[Call]) -> PeerError:
    """The first thing in which the calls of the ranks differ, and who says what."""
    verbs = Counter(call.verb for call in calls)
    usual = verbs.most_common(1)[0][0]
    if len(verbs) > 1:
        wrong = tuple(rank for rank, call in enumerate(calls) if call.verb != usual)
        return Blame(_other_calls(map(str, calls)), wrong).error()
    # By their text, for -0.0 and 0.0 are equal and other numbers all the same.
    texts = {name: [repr(call.arguments.get(name)) for call in calls] for name in calls[0].arguments}
    name = next(name for name, said in texts.items() if len(set(said)) > 1)
    most = Counter(texts[name]).most_common(1)[0][0]
    wrong = tuple(rank for rank, text in enumerate(texts[name]) if text != most)
    parts = ", ".join(
        f"{named(ranks)} {'says' if len(ranks) == 1 else 'say'} {text:.{_MAX_SHOWN}}"
        for text, ranks in ranks_by(texts[name]).items()
    )
    return PeerError(
        f"the ranks disagree on the {name}: {parts}: call {usual} with the same arguments on all ranks", wrong
    )


@dataclass(slots=True)
class _Work:
    """Common work that is under way in this thread."""

    peers: Peers
    reported: bool = False
    is_over: bool = False


_UNDER_WAY: ContextVar[tuple[_Work, ...]] = ContextVar("common work", default=())


@contextmanager
def collective_errors(peers: Peers) -> Iterator[None]:
    """Common work: whatever is raised inside makes every other rank raise `PeerError` too. May be nested.

    A `PeerError` is not passed on: a rank that raises one by its own decision does so on all ranks.
    """
    if peers is SOLO:
        yield
        return
    for under_way in _UNDER_WAY.get():
        if under_way.peers is peers and not under_way.is_over:
            yield
            return
    work = _Work(peers)
    before = _UNDER_WAY.set((*_UNDER_WAY.get(), work))
    try:
        peers.begin()
        yield
    except PeerError:
        raise  # the others know, or are to blame
    except BaseException as error:
        if not work.reported:
            peers.fail(error)
        raise
    finally:
        work.is_over = True
        with suppress(ValueError):  # a Ctrl-C in contextlib left it to Python's collector, which another thread ran
            _UNDER_WAY.reset(before)


def report_instead(peers: Peers, error: BaseException) -> None:
    """Report `error` to the others now, in place of what is about to be raised inside `collective_errors`."""
    for work in _UNDER_WAY.get():
        if work.peers is peers and not work.reported and not work.is_over:
            work.reported = True
            peers.fail(error)


# --- messages that are the same on many ranks travel once --------------------------------------


def distinct_messages(digests: Sequence[bytes], own: bytes, peers: Peers) -> dict[bytes, bytes]:
    """Digest -> message, of all that ranks have; no call is made if all have the same.

    Args:
        digests: Of every rank's message, by rank: known to all before.
        own: This rank's message.
    """
    if len(set(digests)) == 1:
        return {digests[0]: own}
    first = digests.index(digests[peers.rank]) == peers.rank
    sent = peers.gather_all(own if first else b"")
    return {digest: sent[digests.index(digest)] for digest in digests}


def ranks_by(values: Iterable[V]) -> dict[V, list[int]]:
    """Value (a digest, a text) -> the ranks that have it, ascending; the lowest rank's first."""
    found: dict[V, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, []).append(rank)
    return found


# --- who is to blame when ranks cannot go on together: equal inputs give equal words on every rank --


@dataclass(frozen=True, slots=True)
class Blame:
    """Content of a `PeerError`; each rank raises its own."""

    message: str
    ranks: tuple[int, ...]

    def error(self) -> PeerError:
        """A new error that says this."""
        return PeerError(self.message, self.ranks)


def named(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 1, 3`; of many ranks the first eight and how many more."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def error_text(error: BaseException) -> str:
    """An error as it is reported to the other ranks."""
    return f"{type(error).__name__}: {error}"


def failed(reasons: Mapping[int, str]) -> Blame:
    """Ranks that said why they cannot go on (`error_text`), by rank."""
    ranks = sorted(reasons)
    more = f" ({named(ranks[1:])} failed too)" if len(ranks) > 1 else ""
    return Blame(f"rank {ranks[0]} failed: {reasons[ranks[0]]}{more}", tuple(ranks))


def stopped(faults: Mapping[int, str]) -> Blame:
    """Ranks that said how they ended, by rank: `failed: ...`, `has left the group`."""
    ranks = sorted(faults)
    return Blame("; ".join(f"rank {rank} {faults[rank]}" for rank in ranks), tuple(ranks))


def gone(rank: int) -> Blame:
    """A rank that has closed its end."""
    return Blame(f"rank {rank} has left the group", (rank,))


def late(missing: Sequence[int], call: str, timeout_s: float) -> Blame:
    """Ranks that did not come within the timeout."""
    verb = "has" if len(missing) == 1 else "have"
    return Blame(
        f"{named(missing)} {verb} not come to {call} within {timeout_s:g} s: dead, hanging, or slower than the "
        "timeout of the group allows",
        tuple(missing),
    )


def lost(ranks: Sequence[int], call: str) -> Blame:
    """Ranks whose connections broke and that said nothing."""
    verb = "is" if len(ranks) == 1 else "are"
    return Blame(f"{named(ranks)} {verb} gone, killed or crashed: the connection broke during {call}", tuple(ranks))


def overdue(rank: int, waiting: Sequence[int], call: str) -> Blame:
    """The own rank, which others gave up waiting for."""
    return Blame(f"this rank ({rank}) came too late to {call}: {named(waiting)} had given up on it", (rank,))


def disagreement(calls: Sequence[str]) -> Blame | None:
    """None if all ranks make the same call; else those that differ from the most (or the lowest rank) are to blame."""
    counts = Counter(calls)
    if len(counts) == 1:
        return None
    usual = counts.most_common(1)[0][0]
    wrong = tuple(rank for rank, call in enumerate(calls) if call != usual)
    return Blame(_other_calls(calls), wrong)


def _other_calls(calls: Iterable[str]) -> str:
    said = "; ".join(f"{named(ranks)}: {call}" for call, ranks in ranks_by(calls).items())
    return f"the ranks do not make the same call ({said}): all ranks must commit and check out in the same order"


def check_broadcast(rank: int, message: Buffer | None) -> Buffer:
    """The argument of this rank to a broadcast: the message of rank 0, which must have one."""
    if rank:
        return b""
    if message is None:
        raise InvalidInputError("rank 0 gives the message of a broadcast, got None")
    return message


def check_exchange(messages: Sequence[Buffer], size: int) -> None:
    """Refuse an exchange that has not one message for each rank."""
    if len(messages) != size:
        raise InvalidInputError(f"exchange needs one message for each of {size} ranks, got {len(messages)}")


def overlapping(rank: int, call: str) -> InvalidInputError:
    """Two threads of one rank in one group at the same time."""
    return InvalidInputError(
        f"rank {rank} calls {call} while another of its threads is in a call on the same group: commits and "
        "checkouts that overlap need a group each; wait for the first, or open the repository once more"
    )
