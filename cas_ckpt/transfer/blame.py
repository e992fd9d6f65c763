"""Who is to blame when ranks cannot go on together, in the words that every kind of `Peers` uses.

Pure: equal inputs give equal words on every rank. Knows nothing of how ranks are reached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cas_ckpt.buffer import Buffer
from cas_ckpt.errors import InvalidInputError, PeerError


@dataclass(frozen=True, slots=True)
class Blame:
    """What a `PeerError` will say; each rank raises an error of its own."""

    message: str
    ranks: tuple[int, ...]

    def error(self) -> PeerError:
        """A new error that says this."""
        return PeerError(self.message, self.ranks)


def named(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 1, 3`; of many ranks the first eight and how many more."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def told(error: BaseException) -> str:
    """An error as the other ranks are told about it."""
    return f"{type(error).__name__}: {error}"


def failed(reasons: Mapping[int, str]) -> Blame:
    """Ranks that said why they cannot go on (`told`), by rank."""
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
    by_call = {call: [rank for rank, other in enumerate(calls) if other == call] for call in counts}
    told_calls = "; ".join(f"{named(ranks)}: {call}" for call, ranks in by_call.items())
    wrong = tuple(rank for rank, call in enumerate(calls) if call != usual)
    return Blame(
        f"the ranks do not make the same call ({told_calls}): all ranks must commit and check out in the same order",
        wrong,
    )


def check_root(root: int, size: int) -> None:
    """Refuse a root that is no rank."""
    if not 0 <= root < size:
        raise InvalidInputError(f"root must be a rank from 0 to {size - 1}, got {root}")


def check_broadcast(rank: int, root: int, size: int, message: Buffer | None) -> Buffer:
    """What this rank gives to a broadcast: its message if it is the root, which must have one."""
    check_root(root, size)
    if rank != root:
        return b""
    if message is None:
        raise InvalidInputError(f"rank {root} is the root of this broadcast and must give a message, got None")
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
