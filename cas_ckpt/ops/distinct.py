"""Messages that are the same on many ranks travel once.

Invariant: what a digest stands for comes from the lowest rank that has it, so every rank gets the
same bytes. Collective, one call however many distinct messages there are.
"""

from __future__ import annotations

from collections.abc import Sequence

from cas_ckpt.transfer.peers import Peers


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


def ranks_by_message(digests: Sequence[bytes]) -> dict[bytes, list[int]]:
    """Digest -> the ranks that have it, ascending; the lowest rank's first."""
    found: dict[bytes, list[int]] = {}
    for rank, digest in enumerate(digests):
        found.setdefault(digest, []).append(rank)
    return found
