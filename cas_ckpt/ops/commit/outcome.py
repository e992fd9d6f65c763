"""The message of rank 0 to all ranks after a gather: continue, raise an error, or the commit is made.

Every `gather` of a commit is followed by one such message, so a rank that has given what rank 0 gathers can hear what
came of it though it does nothing more itself (process/worker.py: its worker died).

Invariant: who hears a refusal raises it and reports nothing, since all ranks end with it.
"""

from __future__ import annotations

from enum import IntEnum

import msgpack

from cas_ckpt.core.records import CommitInfo, commit_row, info_from_row
from cas_ckpt.errors import CorruptionError, PeerError
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.parallel.peers import Peers


class Outcome(IntEnum):
    """The report of rank 0 to the others."""

    COMMITTED = 0
    BEGIN_ANEW = 1
    REFUSED = 2
    GO_ON = 3


Made = tuple[CommitInfo, str]
"""A commit, and the branch that it went to."""


def simple_message(outcome: Outcome) -> bytes:
    """BEGIN_ANEW or GO_ON, with which nothing else is said."""
    message: bytes = msgpack.packb([outcome])
    return message


def refusal_message(refusal: PeerError) -> bytes:
    """All ranks are to raise this."""
    message: bytes = msgpack.packb([Outcome.REFUSED, str(refusal), refusal.ranks])
    return message


def made_message(digest: Digest, data: bytes, branch: str) -> bytes:
    """The commit is made: its id, its bytes, and the branch that names it."""
    message: bytes = msgpack.packb([Outcome.COMMITTED, digest, data, branch])
    return message


def read_outcome(message: bytes) -> Outcome | Made | PeerError:
    """Decode a message: the commit that is made, the error that all ranks raise, or BEGIN_ANEW or GO_ON.

    Raises:
        CorruptionError: it says nothing of that kind.
    """
    match msgpack.unpackb(message):
        case [Outcome.COMMITTED, digest, data, branch]:
            return info_from_row(commit_row(Digest(digest), data)), branch
        case [Outcome.REFUSED, text, ranks]:
            return PeerError(text, tuple(ranks))
        case [(Outcome.BEGIN_ANEW | Outcome.GO_ON) as outcome]:
            return Outcome(outcome)
    raise CorruptionError(
        "what rank 0 tells of the commit cannot be read: run the same version of cas_ckpt on all ranks"
    )


def broadcast_outcome(peers: Peers, message: bytes | None) -> bytes:
    """Broadcast `message` of rank 0; None on the others. Returns the message. Collective.

    Raises:
        PeerError: not all have heard it; says so if the commit is made.
    """
    try:
        return peers.broadcast(message)
    except PeerError as error:
        said = None if message is None else read_outcome(message)
        if isinstance(said, tuple):
            raise outcome_not_received(*said, error) from error
        raise


def outcome_not_received(made: CommitInfo, branch: str, lost: PeerError) -> PeerError:
    """Rank 0 has made a commit, and `lost` kept the others from hearing of it."""
    return PeerError(
        f"commit {short(bytes.fromhex(made.id))} is made and the branch {branch} names it, but not all ranks have "
        f"heard of it: {lost}; go on from there",
        lost.ranks,
    )
