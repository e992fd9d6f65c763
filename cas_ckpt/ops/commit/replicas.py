"""Compares what several ranks hold of one tensor before only one of them writes it.

Every rank sums all that it holds of what others hold too (transfer/hashing.py), hashes the same random stretches of it
as they do, and sends one digest of both for each shard to the first of the ranks that have the shard. Collective.
Invariant: every byte that two ranks hold is compared, unless only samples were asked for; which is compared
follows from the plan and a seed that all ranks share.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TypeAlias

import msgpack
import numpy as np
from blake3 import blake3

from cas_ckpt.layout.grid import range_boxes, touches
from cas_ckpt.layout.holdings import Shard, one_replica
from cas_ckpt.layout.save_plan import Held
from cas_ckpt.objects.digest import LEAF_BYTES
from cas_ckpt.objects.spec import Box, Placement
from cas_ckpt.objects.state import ArraySource
from cas_ckpt.parallel.peers import Peers
from cas_ckpt.transfer.hashing import as_raw

MOST_TOLD = 100
"""Regions that are named, at most, when replicas differ."""

TOLD_BYTES = 16
"""Sums that a rank sends about all that it holds of a shard."""

Checksums: TypeAlias = Callable[[Sequence[tuple[int, Box]]], Sequence[bytes]]
"""The checksum of each (tensor number, region) on this rank."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Replicas that differ.

    Attributes:
        tensor: Number of the tensor.
        text: A sentence that names key, ranks and region; empty after the first `MOST_TOLD` of a rank.
        ranks: Those that hold other bytes than the first one.
    """

    tensor: int
    text: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A region and all ranks that hold it; the first one compares. `at` tells those of one tensor apart."""

    tensor: int
    at: int
    pieces: tuple[Box, ...]
    ranks: tuple[int, ...]


def compare_replicas(
    held: Sequence[Held],
    sources: Sequence[ArraySource],
    peers: Peers,
    *,
    checksums: Checksums | None,
    share: float,
    seed: bytes,
) -> list[Divergence]:
    """Differences between replicas; the same answer on every rank.

    Args:
        held: All tensors, alike on every rank; `sources` are this rank's.
        checksums: Compares every byte by checksums; None: nothing but the sample is compared.
        share: Of the stretches of each shard how many are hashed and compared too (0..1); one at least, none for 0.
        seed: Equal on all ranks, other at every commit.
    """
    if peers.size == 1 or not (share or checksums):
        return []
    mine = [each for each in _comparisons(held) if peers.rank in each.ranks]
    regions = [(each.tensor, piece) for each in mine for piece in each.pieces]
    sums = iter(checksums(regions) if checksums else ())
    messages: list[list[bytes]] = [[] for _ in range(peers.size)]
    for each in mine:
        digest = blake3()
        for _ in each.pieces if checksums else ():
            digest.update(next(sums))
        if share:
            _sample(digest, each, sources[each.tensor], held[each.tensor].spec.item_bytes, share, seed)
        messages[each.ranks[0]].append(digest.digest(length=TOLD_BYTES))
    received = [memoryview(data) for data in peers.exchange([b"".join(digests) for digests in messages])]
    found = _compare(held, [each for each in mine if each.ranks[0] == peers.rank], received)
    rows = [astuple(each if at < MOST_TOLD else replace(each, text="")) for at, each in enumerate(found)]
    told = peers.gather_all(msgpack.packb(rows))
    return [Divergence(*row) for data in told for row in msgpack.unpackb(data, use_list=False)]


def one_replica_of(held: Held, placements: Sequence[Placement]) -> Held:
    """`held` as if one replica alone had it: the lowest rank that has the whole tensor, or that of its mesh.

    Where nobody has a replica (boxes that overlap by no rule), the lowest rank of each shard stands for it.
    """
    whole = _whole(held)
    if whole is not None:
        return replace(held, shards=(_by_one(held.shards[whole]),), disjoint=True)
    members = one_replica(placements)
    chosen = [replace(shard, ranks=tuple(sorted(members.intersection(shard.ranks)))[:1]) for shard in held.shards]
    chosen = [shard for shard in chosen if shard.ranks]
    covered = sum(piece.num_elements for shard in chosen for piece in shard.pieces)
    if covered == held.spec.box.num_elements:
        return replace(held, shards=tuple(chosen), disjoint=True)
    return replace(held, shards=tuple(map(_by_one, held.shards)))


def _by_one(shard: Shard) -> Shard:
    return replace(shard, ranks=shard.ranks[:1])


def _comparisons(held: Sequence[Held]) -> Iterator[_Comparison]:
    overlaps: dict[tuple[object, ...], list[tuple[tuple[Box, ...], tuple[int, ...]]]] = {}
    for number, tensor in enumerate(held):
        whole = None if tensor.disjoint else _whole(tensor)
        everything = () if whole is None else tensor.shards[whole].ranks
        for at, shard in enumerate(tensor.shards):
            ranks = shard.ranks if at == whole or not everything else tuple(sorted({*shard.ranks, *everything}))
            if len(ranks) > 1:
                yield _Comparison(number, at, shard.pieces, ranks)
        if not tensor.disjoint and len(tensor.shards) > 1:
            # By identity, as in save_plan.py: tensors that are divided alike share one tuple.
            like = (tensor.spec.shape, tensor.grid, id(tensor.shards))
            if like not in overlaps:
                overlaps[like] = list(_overlaps(tensor, whole))
            for at, (pieces, ranks) in enumerate(overlaps[like], start=len(tensor.shards)):
                yield _Comparison(number, at, pieces, ranks)


def _overlaps(held: Held, whole: int | None) -> Iterator[tuple[tuple[Box, ...], tuple[int, ...]]]:
    """Intersections of two shards, neither of which is the whole tensor, and the ranks of both."""
    pairs = {
        (one.shard, other.shard)
        for found in touches(held.grid, held.shards)
        for at, one in enumerate(found)
        for other in found[at + 1 :]
        if one.shard != other.shard and whole not in (one.shard, other.shard)
    }
    for one, other in sorted(pairs):
        first, second = held.shards[one], held.shards[other]
        common = [a.intersect(b) for a in first.pieces for b in second.pieces]
        pieces = tuple(box for box in common if box is not None)
        if pieces:
            yield pieces, tuple(sorted({*first.ranks, *second.ranks}))


def _whole(held: Held) -> int | None:
    """Number of the shard that is the whole tensor, if there is one."""
    return next((at for at, shard in enumerate(held.shards) if shard.pieces == (held.spec.box,)), None)


def _sample(
    digest: blake3, comparison: _Comparison, source: ArraySource, item_bytes: int, share: float, seed: bytes
) -> None:
    for box in _stretches(comparison, share, item_bytes, seed):
        array = np.ascontiguousarray(as_raw(source.read(box), item_bytes))
        digest.update(array.reshape(-1).view(np.uint8).data)


def _stretches(comparison: _Comparison, share: float, item_bytes: int, seed: bytes) -> Iterator[Box]:
    """The boxes of a random choice of stretches of up to a leaf's length, consecutive elements of a piece."""
    length = max(1, LEAF_BYTES // item_bytes)
    counts = [-(-piece.num_elements // length) for piece in comparison.pieces]
    total = sum(counts)
    # Not for secrets: it only has to differ from commit to commit.
    chance = random.Random(f"{seed.hex()}:{comparison.tensor}:{comparison.at}")
    chosen = sorted(chance.sample(range(total), min(total, max(1, round(total * share)))))
    before = 0
    for piece, count in zip(comparison.pieces, counts, strict=True):
        for at in chosen:
            if before <= at < before + count:
                start = (at - before) * length
                for box in range_boxes(piece.sizes, start, min(start + length, piece.num_elements)):
                    yield Box(tuple(a + b for a, b in zip(piece.offsets, box.offsets, strict=True)), box.sizes)
        before += count


def _compare(
    held: Sequence[Held], comparisons: Sequence[_Comparison], received: Sequence[memoryview]
) -> list[Divergence]:
    taken = [0] * len(received)
    found = []
    for each in comparisons:
        digests = {}
        for rank in each.ranks:
            digests[rank] = received[rank][taken[rank] : taken[rank] + TOLD_BYTES]
            taken[rank] += TOLD_BYTES
        others = [rank for rank in each.ranks if digests[rank] != digests[each.ranks[0]]]
        if others:
            region = each.pieces[0]
            found.append(
                Divergence(
                    each.tensor,
                    f"{held[each.tensor].key}: ranks {', '.join(map(str, others))} hold other bytes than rank "
                    f"{each.ranks[0]} in the region at {region.offsets} of sizes {region.sizes}",
                    tuple(others),
                )
            )
    return found
