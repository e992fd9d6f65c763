"""The regions of a tensor that ranks held: who, how many chunks they touch, and who else held a part of one of these.

Invariant: pure. The cost is that of the distinct shards and of the chunks that they touch, never ranks times ranks:
ranks are sets of spans, and what a chunk has of ranks is put together once for all shards that touch it. What a
division unfolds into is counted before it is made.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.layout.holdings import holdings
from cas_ckpt.objects.layouts import Division
from cas_ckpt.objects.limits import check_entries
from cas_ckpt.objects.rank_runs import RankSet
from cas_ckpt.objects.spec import Box, BoxPlacement, Grid


@dataclass(frozen=True, slots=True)
class HeldRegion:
    """A region, and the ranks that held it.

    Attributes:
        ranks: Those that held just this region: replicas of one another.
        num_chunks: Chunks that have elements of it.
        shared_with: Ranks that held another part of one of these chunks.
    """

    box: Box
    ranks: RankSet
    num_chunks: int
    shared_with: RankSet


def held_regions(shape: Sequence[int], grid: Grid | None, division: Division) -> list[HeldRegion]:
    """What ranks held of a tensor, by offsets, sizes and ranks; an empty tensor is one region.

    Args:
        grid: How the tensor is cut into chunks; None if it is not: it is stored with its entry.
    Raises:
        InvalidInputError: the division does not fit the shape.
        TooLargeError: it has more pieces than this call may make.
    """
    check_entries(most_pieces(shape, division), "the ways in which ranks held one tensor stand")
    for placement in division.placements:
        for box, _ in placement.boxes if isinstance(placement, BoxPlacement) else ():
            _check_inside(box, shape)
    shards = holdings(shape, division.placements, division.everywhere)
    if math.prod(shape) == 0:
        return [whole_region(shape, None, _ranks_of(division))]
    ranks = [RankSet.of(shard.ranks) for shard in shards]
    pieces = [(at, piece) for at, shard in enumerate(shards) for piece in shard.pieces]
    counts = [0 if grid is None else num_cells(grid, piece) for _, piece in pieces]
    if grid is None or len(pieces) == 1:
        shared = [RankSet()] * len(pieces)
    else:
        check_entries(sum(counts), "the chunks that ranks held one tensor in stand")
        shared = _shared(grid, pieces, ranks)
    found = [
        HeldRegion(piece, ranks[at], count, others)
        for (at, piece), count, others in zip(pieces, counts, shared, strict=True)
    ]
    return sorted(found, key=lambda region: (region.box.offsets, region.box.sizes, region.ranks.spans))


def whole_region(shape: Sequence[int], grid: Grid | None, ranks: RankSet) -> HeldRegion:
    """All of a tensor, held by `ranks`; arguments as for `held_regions`."""
    box = Box((0,) * len(shape), tuple(shape))
    return HeldRegion(box, ranks, 0 if grid is None else num_cells(grid, box), RankSet())


def _check_inside(box: Box, shape: Sequence[int]) -> None:
    fits = len(box.offsets) == len(shape) and all(
        start + size <= whole for start, size, whole in zip(box.offsets, box.sizes, shape, strict=True)
    )
    if not fits:
        raise InvalidInputError(f"a box at {box.offsets} of sizes {box.sizes} does not lie inside of {tuple(shape)}")


def _ranks_of(division: Division) -> RankSet:
    ranks = list(division.everywhere)
    for placement in division.placements:
        if isinstance(placement, BoxPlacement):
            ranks += [rank for _, holders in placement.boxes for rank in holders]
        else:
            ranks += placement.mesh.ranks
    return RankSet.of(ranks)


def most_pieces(shape: Sequence[int], division: Division) -> int:
    """The pieces of a tensor of this shape are at most so many; found without cutting anything."""
    total = 1 if division.everywhere else 0
    for placement in division.placements:
        if isinstance(placement, BoxPlacement):
            total += len(placement.boxes)
            continue
        pieces = 1
        for size, split in zip(placement.mesh.shape, placement.splits, strict=False):
            if split.dim is not None and split.dim < len(shape):
                pieces *= size * max(min(split.stride, shape[split.dim]), 1)
        total += pieces
    return total


def num_cells(grid: Grid, box: Box) -> int:
    """How many cells have elements of `box`."""
    if not box.num_elements:
        return 0
    bounds = zip(box.offsets, box.sizes, grid.cell, strict=True)
    return math.prod((start + size - 1) // step - start // step + 1 for start, size, step in bounds)


def _shared(grid: Grid, pieces: Sequence[tuple[int, Box]], ranks: Sequence[RankSet]) -> list[RankSet]:
    """For each piece (number of its shard, box) the ranks that hold another part of a cell that it touches."""
    holders: dict[int, dict[Box, set[int]]] = defaultdict(dict)
    for at, piece in pieces:
        for cell, part in grid.cells_in(piece):
            holders[cell].setdefault(part, set()).add(at)
    united: dict[frozenset[int], RankSet] = {}

    def ranks_of(shards: Iterable[int]) -> RankSet:
        key = frozenset(shards)
        if key not in united:
            united[key] = RankSet.union([ranks[at] for at in key])
        return united[key]

    everyone: dict[int, RankSet] = {}
    found = []
    for at, piece in pieces:
        others: set[RankSet] = set()
        for cell, part in grid.cells_in(piece):
            parts = holders[cell]
            if len(parts) == 1:
                continue
            if len(parts[part]) > 1:  # who holds the same part of this cell does not count
                others.add(ranks_of(each for box, holding in parts.items() if box != part for each in holding))
                continue
            if cell not in everyone:
                everyone[cell] = ranks_of(each for holding in parts.values() for each in holding)
            others.add(everyone[cell])
        found.append(RankSet.union(others).without(ranks[at]) if others else RankSet())
    return found
