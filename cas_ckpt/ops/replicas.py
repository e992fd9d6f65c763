"""Compares what several ranks hold of one tensor before only one of them writes it.

Every rank that holds a shard hashes the same random stretches of it and sends one digest of them to
the first of these ranks. Collective. Invariant: the stretches follow from a seed that all ranks
share; at least one of every shard is compared, so replicas that drifted apart are found, not hidden.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace

import msgpack
import numpy as np
from blake3 import blake3

from cas_ckpt.layout.holdings import Shard
from cas_ckpt.layout.leaves import range_boxes
from cas_ckpt.layout.save_plan import Held
from cas_ckpt.objects.digest import DIGEST_BYTES, LEAF_BYTES
from cas_ckpt.objects.spec import Box
from cas_ckpt.objects.state import ArraySource
from cas_ckpt.transfer.hashing import as_raw
from cas_ckpt.transfer.peers import Peers

MOST_TOLD = 100
"""Tensors that are named, at most, when replicas differ."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Replicas that differ.

    Attributes:
        tensor, shard: Numbers of the tensor and of its shard.
        text: A sentence that names key, ranks and region.
        ranks: Those that hold other bytes than the first one.
    """

    tensor: int
    shard: int
    text: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Comparison:
    """One shard and all ranks that have it, those that have the whole tensor too; the first one compares."""

    tensor: int
    at: int
    shard: Shard
    ranks: tuple[int, ...]


def compare_replicas(
    held: Sequence[Held], sources: Sequence[ArraySource], peers: Peers, *, share: float, seed: bytes
) -> list[Divergence]:
    """What differs between ranks; the same answer on every rank.

    Args:
        held: All tensors, alike on every rank; `sources` are this rank's.
        share: Of the stretches of each shard how many are compared (0..1), one at least.
        seed: Equal on all ranks, other at every commit.
    """
    if peers.size == 1 or not share:
        return []
    mine = [each for each in _comparisons(held) if peers.rank in each.ranks]
    messages: list[list[bytes]] = [[] for _ in range(peers.size)]
    for each in mine:
        source = sources[each.tensor]
        messages[each.ranks[0]].append(_digest(held[each.tensor], each, source, share, seed))
    received = [memoryview(data) for data in peers.exchange([b"".join(digests) for digests in messages])]
    found = _compare(held, [each for each in mine if each.ranks[0] == peers.rank], received)
    told = peers.gather_all(msgpack.packb([astuple(each) for each in found[:MOST_TOLD]]))
    return [Divergence(*row) for data in told for row in msgpack.unpackb(data, use_list=False)]


def without_divergence(held: Held, diverged: Sequence[Divergence]) -> Held:
    """`held` as if only one rank had what differs: the lowest one, or whoever has all of the tensor."""
    whole = _whole(held)
    if whole is not None and any(each.shard != whole for each in diverged):
        shard = held.shards[whole]
        return replace(held, shards=(replace(shard, ranks=shard.ranks[:1]),), disjoint=True)
    numbers = {each.shard for each in diverged}
    shards = tuple(
        replace(shard, ranks=shard.ranks[:1]) if at in numbers else shard for at, shard in enumerate(held.shards)
    )
    return replace(held, shards=shards)


def _comparisons(held: Sequence[Held]) -> Iterator[_Comparison]:
    for number, tensor in enumerate(held):
        whole = None if tensor.disjoint else _whole(tensor)
        everything = () if whole is None else tensor.shards[whole].ranks
        for at, shard in enumerate(tensor.shards):
            ranks = shard.ranks if at == whole or not everything else tuple(sorted({*shard.ranks, *everything}))
            if len(ranks) > 1:
                yield _Comparison(number, at, shard, ranks)


def _whole(held: Held) -> int | None:
    """Number of the shard that is the whole tensor, if there is one."""
    return next((at for at, shard in enumerate(held.shards) if shard.pieces == (held.spec.box,)), None)


def _digest(held: Held, comparison: _Comparison, source: ArraySource, share: float, seed: bytes) -> bytes:
    digest = blake3()
    item_bytes = held.spec.item_bytes
    for box in _stretches(comparison, share, item_bytes, seed):
        array = np.ascontiguousarray(as_raw(source.read(box), item_bytes))
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.digest()


def _stretches(comparison: _Comparison, share: float, item_bytes: int, seed: bytes) -> Iterator[Box]:
    """The boxes of a random choice of stretches of up to 64 KiB, consecutive elements of a piece."""
    length = max(1, LEAF_BYTES // item_bytes)
    counts = [-(-piece.num_elements // length) for piece in comparison.shard.pieces]
    total = sum(counts)
    # Not for secrets: it only has to differ from commit to commit.
    chance = random.Random(f"{seed.hex()}:{comparison.tensor}:{comparison.at}")
    chosen = sorted(chance.sample(range(total), min(total, max(1, round(total * share)))))
    before = 0
    for piece, count in zip(comparison.shard.pieces, counts, strict=True):
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
            digests[rank] = received[rank][taken[rank] : taken[rank] + DIGEST_BYTES]
            taken[rank] += DIGEST_BYTES
        others = [rank for rank in each.ranks if digests[rank] != digests[each.ranks[0]]]
        if others:
            region = each.shard.pieces[0]
            found.append(
                Divergence(
                    each.tensor, each.at,
                    f"{held[each.tensor].key}: ranks {', '.join(map(str, others))} hold other bytes than rank "
                    f"{each.ranks[0]} in the region at {region.offsets} of sizes {region.sizes}",
                    tuple(others),
                )
            )
    return found
