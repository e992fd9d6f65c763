"""Who does what, so that all have about as much to do.

Invariant: pure and deterministic, so all ranks find the same answer without talking. A demand is
`count` equal pieces of work (the same cell of `count` like tensors); its pieces may go to different
ranks. Cost grows with the number of candidates, not with `count`. Knows nothing of tensors.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    Array: TypeAlias = np.ndarray[Any, Any]

Share = tuple[int, int]
"""(rank, pieces that it does); pieces > 0."""

SLACK = 1.02
"""Stop when the largest share is at most this times the mean."""

_ROUNDS = 4

_WORTHWHILE = 0.998
"""A round that does not lower the top to this was the last: what is left follows from who can do what."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Equal pieces of work that some ranks can do.

    Attributes:
        num_bytes: Of one piece.
        count: Number of pieces.
        ranks: Who can do them; not empty, all different.
    """

    num_bytes: int
    count: int
    ranks: tuple[int, ...]


def assign(demands: Sequence[Demand], size: int) -> list[tuple[Share, ...]]:
    """For every demand who of its ranks does how many pieces, by rank; the counts sum to `count`.

    Demands with the fewest candidates come first, large ones before small; each fills up the least
    loaded of its candidates. If that leaves a rank with clearly more than the mean, every demand
    is taken back once more and poured anew, a few times over.

    Args:
        size: Number of ranks of the world.
    """
    loads = np.zeros(size, np.int64)
    order = sorted(
        range(len(demands)), key=lambda at: (len(demands[at].ranks), -demands[at].num_bytes * demands[at].count, at)
    )
    # Each distinct set of candidates once: there are far fewer sets than demands.
    candidates = {ranks: np.array(sorted(ranks), np.int64) for ranks in {demand.ranks for demand in demands}}
    poured: dict[int, Array] = {}
    before = math.inf
    for _ in range(_ROUNDS):
        for at in order:
            demand, ranks = demands[at], candidates[demands[at].ranks]
            if at in poured:
                loads[ranks] -= poured[at] * demand.num_bytes
            poured[at] = _level(loads[ranks], demand.num_bytes, demand.count)
            loads[ranks] += poured[at] * demand.num_bytes
        most = int(loads.max(initial=0))
        if most * size <= SLACK * loads.sum() or most > _WORTHWHILE * before:
            break
        before = most
    found: list[tuple[Share, ...]] = []
    for at, demand in enumerate(demands):
        used = np.flatnonzero(poured[at])
        found.append(tuple(zip(candidates[demand.ranks][used].tolist(), poured[at][used].tolist(), strict=True)))
    return found


def relieve(
    demands: Sequence[Demand], shares: Sequence[tuple[Share, ...]], size: int, *, slack: float
) -> list[tuple[Share, ...]]:
    """The same shares, but ranks with more than `slack` times the mean give pieces to the least loaded.

    Those who get them need not be among the candidates: they do the work for others. A piece moves
    only where that leaves its new owner below the old one, so a few large pieces stay where they are.
    """
    loads = [0] * size
    for demand, each in zip(demands, shares, strict=True):
        for rank, count in each:
            loads[rank] += count * demand.num_bytes
    limit = slack * sum(loads) / max(size, 1)
    if max(loads, default=0) <= limit:
        return list(shares)
    takers = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(takers)
    moved = [dict(each) for each in shares]
    for at in sorted(range(len(demands)), key=lambda at: (-demands[at].num_bytes, at)):
        num_bytes, share = demands[at].num_bytes, moved[at]
        for giver in sorted(share):
            while share[giver] and loads[giver] > limit:
                while takers[0][0] != loads[takers[0][1]]:  # of a load that has changed since
                    heapq.heappop(takers)
                taker = takers[0][1]
                count = min(_worth(num_bytes, loads[giver], loads[taker], limit), share[giver])
                if not count:
                    break
                for rank, change in ((giver, -count), (taker, count)):
                    share[rank] = share.get(rank, 0) + change
                    loads[rank] += change * num_bytes
                    heapq.heappush(takers, (loads[rank], rank))
    return [tuple(sorted((rank, count) for rank, count in each.items() if count)) for each in moved]


def _level(loads: Array, num_bytes: int, count: int) -> Array:
    """How many of `count` pieces each gets so that all end up at one level, as far as that goes.

    As if one piece after the other went to the least loaded (the first of equals).
    """
    if len(loads) == 1 or num_bytes == 0:
        return np.array([count] + [0] * (len(loads) - 1), np.int64)
    ascending = np.sort(loads, kind="stable")
    # Bytes that it takes to lift the k least loaded to the level of the next one.
    lift = ascending * np.arange(1, len(loads) + 1) - np.cumsum(ascending)
    wet = int(np.searchsorted(lift, count * num_bytes, side="right"))
    level = (count * num_bytes + int(ascending[:wet].sum())) // wet
    counts: Array = np.maximum(level - loads, 0) // num_bytes
    left = count - int(counts.sum())
    if left:
        filled = loads + counts * num_bytes
        counts[np.argsort(filled, kind="stable")[:left]] += 1
    return counts


def _worth(num_bytes: int, giver: int, taker: int, limit: float) -> int:
    """How many pieces to move at once from the one load to the other; 0 if it would not help."""
    if not num_bytes or taker + num_bytes >= giver:
        return 0
    too_much = math.ceil((giver - limit) / num_bytes)
    return max(1, min(too_much, (giver - taker) // (2 * num_bytes), int(limit - taker) // num_bytes))
