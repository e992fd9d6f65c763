"""Intersections of shards with the cells and leaves of a tensor (its grid: objects/spec.py).

    `touches`    which parts of which shards are in each cell. The boxes of one piece tile it exactly, one box
                 per cell that it touches. The cost is that of the answer, never cells times shards.
    `leaf_map`   where the leaves of a straddling cell come from, of which several shards hold parts. Most leaves
                 are whole in one part; the others are put together from pieces, on the part that has most of them.

Invariant: pure. Knows nothing of bytes, or of ranks beyond the shards' own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from cas_ckpt.layout.holdings import Shard
from cas_ckpt.objects.spec import Box, Grid

# --- which parts of which shards are in each cell -------------------------------------------


@dataclass(frozen=True, slots=True)
class Touch:
    """The intersection of a cell with a piece of a shard.

    Attributes:
        shard: Position of the shard in the sequence that was asked about.
        piece: Position of the piece in the shard.
        box: The common box, in global coordinates; never empty.
    """

    shard: int
    piece: int
    box: Box


def touches(grid: Grid, shards: Sequence[Shard]) -> list[tuple[Touch, ...]]:
    """For every cell of `grid`, in order: what each shard has of it, by (shard, piece).

    Pieces must lie inside the tensor.
    """
    found: list[list[Touch]] = [[] for _ in range(grid.num_cells)]
    for at, shard in enumerate(shards):
        for number, piece in enumerate(shard.pieces):
            for cell, box in grid.cells_in(piece):
                found[cell].append(Touch(at, number, box))
    return [tuple(each) for each in found]


# --- which parts of a straddling cell its leaves come from -----------------------------------


@dataclass(frozen=True, slots=True)
class LeafPiece:
    """A box of a straddling leaf (relative to the cell), and the part that holds it."""

    part: int
    box: Box


@dataclass(frozen=True, slots=True)
class LeafMap:
    """Where the leaves of one cell come from.

    Attributes:
        owners: For each leaf the number of the part that hashes it.
        pieces: The boxes of each straddling leaf in the leaf's own order; leaves that are whole in their
            owner's part are not here.
        equals: The parts that have most of a leaf, where several have as much: any may own it.
    """

    owners: tuple[int, ...]
    pieces: dict[int, tuple[LeafPiece, ...]]
    equals: dict[int, tuple[int, ...]]

    def owners_in_turn(self, turn: int) -> tuple[int, ...]:
        """The owners, where equals share the leaves: in long stretches, that there be few extents; turned by `turn`."""
        if not self.equals:
            return self.owners
        owners = list(self.owners)
        for leaf, parts in self.equals.items():
            owners[leaf] = parts[(leaf * len(parts) // len(owners) + turn) % len(parts)]
        return tuple(owners)


@lru_cache(maxsize=4096)
def leaf_map(sizes: tuple[int, ...], leaf_items: int, parts: tuple[Box, ...]) -> LeafMap:
    """The leaves of a cell of `sizes` whose disjoint `parts` (relative to it) cover it.

    Args:
        leaf_items: Elements of a full leaf.
    """
    total = math.prod(sizes)
    spans = [part.span_in(sizes) for part in parts]
    owners: list[int] = []
    pieces: dict[int, tuple[LeafPiece, ...]] = {}
    equals: dict[int, tuple[int, ...]] = {}
    for leaf, start in enumerate(range(0, total, leaf_items)):
        stop = min(start + leaf_items, total)
        whole = next((at for at, span in enumerate(spans) if span and span[0] <= start and stop <= span[1]), None)
        if whole is None:
            found = tuple(
                LeafPiece(at, common)
                for band in range_boxes(sizes, start, stop)
                for at, part in enumerate(parts)
                if (common := band.intersect(part)) is not None
            )
            held = Counter[int]()
            for piece in found:
                held[piece.part] += piece.box.num_elements
            most = max(held.values())
            largest = tuple(sorted(part for part, count in held.items() if count == most))
            whole = largest[0]
            if any(piece.part != whole for piece in found):
                pieces[leaf] = found
            if len(largest) > 1:
                equals[leaf] = largest
        owners.append(whole)
    return LeafMap(tuple(owners), pieces, equals)


def range_boxes(sizes: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The elements `start` to `stop` (C order) of a box of `sizes` as boxes, in their order."""
    if start >= stop:
        return
    if not sizes:
        yield Box((), ())
        return
    row = math.prod(sizes[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        yield from _in_row(sizes, first - 1, start - (first - 1) * row, stop - (first - 1) * row)
        return
    if start < first * row:
        yield from _in_row(sizes, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield Box((first, *(0,) * (len(sizes) - 1)), (last - first, *sizes[1:]))
    if last * row < stop:
        yield from _in_row(sizes, last, 0, stop - last * row)


def _in_row(sizes: tuple[int, ...], at: int, start: int, stop: int) -> Iterator[Box]:
    for box in range_boxes(sizes[1:], start, stop):
        yield Box((at, *box.offsets), (1, *box.sizes))
