"""Compares what several ranks hold of one tensor before only one of them writes it.

Every replica of a shard hashes the same random stretches and sends the digests to the first of them.
Collective. Invariant: the stretches follow from a seed that all ranks share; at least one of every
shard is compared, so replicas that drifted apart are found, not hidden.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np

from cas_ckpt.layout.holdings import Shard
from cas_ckpt.layout.save_plan import Held
from cas_ckpt.objects.digest import LEAF_BYTES, leaf_digest
from cas_ckpt.objects.spec import Box
from cas_ckpt.objects.state import ArraySource
from cas_ckpt.transfer.hashing import as_raw
from cas_ckpt.transfer.peers import Peers


def diverged_replicas(
    held: Sequence[Held], sources: Sequence[ArraySource], peers: Peers, *, share: float, seed: bytes
) -> list[str]:
    """Sentences on tensors whose replicas differ, of those whose first replica this rank is.

    Args:
        held: All tensors, alike on every rank; `sources` are this rank's.
        share: Of the stretches of each shard how many are compared (0..1), one at least.
        seed: Equal on all ranks, other at every commit.
    """
    if peers.size == 1 or not share:
        return []
    messages: list[list[bytes]] = [[] for _ in range(peers.size)]
    own: dict[tuple[int, int], list[bytes]] = {}
    for number, at, shard in _replicated(held, peers.rank):
        boxes = _stretches(held[number], shard, share, f"{seed.hex()}:{number}:{at}")
        digests = [_digest(sources[number], box, held[number].spec.item_bytes) for box in boxes]
        if shard.ranks[0] == peers.rank:
            own[number, at] = digests
        else:
            messages[shard.ranks[0]].extend(digests)
    received = [memoryview(data) for data in peers.exchange([b"".join(digests) for digests in messages])]
    return _compare(held, peers.rank, own, received)


def _replicated(held: Sequence[Held], rank: int) -> Iterator[tuple[int, int, Shard]]:
    """(tensor, shard number, shard) of everything that this rank and others hold."""
    for number, tensor in enumerate(held):
        for at, shard in enumerate(tensor.shards):
            if len(shard.ranks) > 1 and rank in shard.ranks:
                yield number, at, shard


def _stretches(held: Held, shard: Shard, share: float, seed: str) -> list[Box]:
    """A random choice of boxes of about 64 KiB inside the shard."""
    all_boxes = [(piece, count) for piece, count in ((piece, _count(held, piece)) for piece in shard.pieces)]
    total = sum(count for _, count in all_boxes)
    # Not for secrets: it only has to differ from commit to commit.
    chosen = sorted(random.Random(seed).sample(range(total), min(total, max(1, round(total * share)))))
    found: list[Box] = []
    before = 0
    for piece, count in all_boxes:
        found.extend(_stretch(held, piece, at - before) for at in chosen if before <= at < before + count)
        before += count
    return found


def _rows(held: Held, piece: Box) -> tuple[int, int]:
    """(dimension that a piece is stretched along, rows of one stretch)."""
    dim = next((at for at, size in enumerate(piece.sizes) if size > 1), 0)
    row_bytes = piece.num_elements // max(piece.sizes[dim : dim + 1], default=1) * held.spec.item_bytes
    return dim, max(1, LEAF_BYTES // max(row_bytes, 1))


def _count(held: Held, piece: Box) -> int:
    if not piece.sizes:
        return 1
    dim, rows = _rows(held, piece)
    return -(-piece.sizes[dim] // rows)


def _stretch(held: Held, piece: Box, at: int) -> Box:
    if not piece.sizes:
        return piece
    dim, rows = _rows(held, piece)
    offsets, sizes = list(piece.offsets), list(piece.sizes)
    offsets[dim] += at * rows
    sizes[dim] = min(rows, piece.sizes[dim] - at * rows)
    return Box(tuple(offsets), tuple(sizes))


def _digest(source: ArraySource, box: Box, item_bytes: int) -> bytes:
    array = np.ascontiguousarray(as_raw(source.read(box), item_bytes))
    return leaf_digest(array.reshape(-1).view(np.uint8).data)


def _compare(
    held: Sequence[Held], rank: int, own: dict[tuple[int, int], list[bytes]], received: Sequence[memoryview]
) -> list[str]:
    found = []
    taken = [0] * len(received)
    for number, at, shard in _replicated(held, rank):
        if shard.ranks[0] != rank:
            continue
        mine = b"".join(own[number, at])
        others = []
        for other in shard.ranks[1:]:
            start = taken[other]
            taken[other] += len(mine)
            if received[other][start : start + len(mine)] != mine:
                others.append(other)
        if others:
            region = shard.pieces[0]
            found.append(
                f"{held[number].key}: ranks {', '.join(map(str, others))} hold other bytes than rank {rank} in the "
                f"region at {region.offsets} of sizes {region.sizes}"
            )
    return found


