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
"""As soon as nobody has more than this times the mean, more rounds are not worth their time."""

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
    loaded of its candidates. If that leaves somebody with clearly more than the mean, every demand
    is taken back once more and poured anew, a few times over.

    Args:
        size: Number of ranks of the world.
    """
    loads = np.zeros(size, np.int64)
    order = sorted(range(len(demands)), key=lambda at: _precedence(demands[at], at))
    candidates = _candidates(demands)
    poured: list[Array | None] = [None] * len(demands)
    before = math.inf
    for _ in range(_ROUNDS):
        for at in order:
            _pour(demands[at], candidates[demands[at].ranks], loads, poured, at)
        most = int(loads.max(initial=0))
        if most * size <= SLACK * loads.sum() or most > _WORTHWHILE * before:
            break
        before = most
    return [_shares(candidates[demand.ranks], counts) for demand, counts in zip(demands, poured, strict=True)]


def relieve(
    demands: Sequence[Demand], shares: Sequence[tuple[Share, ...]], size: int, *, slack: float
) -> list[tuple[Share, ...]]:
    """The same shares, but whoever has more than `slack` times the mean gives pieces to the least loaded.

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
    return _moved(demands, [dict(each) for each in shares], loads, limit)


def _precedence(demand: Demand, at: int) -> tuple[int, int, int]:
    return len(demand.ranks), -demand.num_bytes * demand.count, at


def _candidates(demands: Sequence[Demand]) -> dict[tuple[int, ...], Array]:
    """Each distinct set of candidates once: there are far fewer sets than demands."""
    return {ranks: np.array(sorted(ranks), np.int64) for ranks in {demand.ranks for demand in demands}}


def _pour(demand: Demand, ranks: Array, loads: Array, poured: list[Array | None], at: int) -> None:
    before = poured[at]
    if before is not None:
        loads[ranks] -= before * demand.num_bytes
    counts = _level(loads[ranks], demand.num_bytes, demand.count)
    loads[ranks] += counts * demand.num_bytes
    poured[at] = counts


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


def _shares(ranks: Array, counts: Array | None) -> tuple[Share, ...]:
    if counts is None:
        return ()
    used = np.flatnonzero(counts)
    return tuple(zip(ranks[used].tolist(), counts[used].tolist(), strict=True))


def _moved(
    demands: Sequence[Demand], shares: list[dict[int, int]], loads: list[int], limit: float
) -> list[tuple[Share, ...]]:
    takers = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(takers)
    for at in sorted(range(len(demands)), key=lambda at: (-demands[at].num_bytes, at)):
        for giver in sorted(shares[at]):
            while shares[at][giver] and loads[giver] > limit:
                taker = _least(takers, loads)
                count = min(_worth(demands[at].num_bytes, loads[giver], loads[taker], limit), shares[at][giver])
                if not count:
                    break
                _move(shares[at], giver, taker, count)
                for rank, moved in ((giver, -count), (taker, count)):
                    loads[rank] += moved * demands[at].num_bytes
                    heapq.heappush(takers, (loads[rank], rank))
    return [tuple(sorted((rank, count) for rank, count in each.items() if count)) for each in shares]


def _least(takers: list[tuple[int, int]], loads: Sequence[int]) -> int:
    """The least loaded rank; entries of loads that have changed since are dropped on the way."""
    while takers[0][0] != loads[takers[0][1]]:
        heapq.heappop(takers)
    return takers[0][1]


def _worth(num_bytes: int, giver: int, taker: int, limit: float) -> int:
    """How many pieces to move at once from the one load to the other; 0 if it would not help."""
    if not num_bytes or taker + num_bytes >= giver:
        return 0
    too_much = math.ceil((giver - limit) / num_bytes)
    return max(1, min(too_much, (giver - taker) // (2 * num_bytes), int(limit - taker) // num_bytes))


def _move(shares: dict[int, int], giver: int, taker: int, count: int) -> None:
    shares[giver] -= count
    shares[taker] = shares.get(taker, 0) + count
