"""Which parts of which shards lie in each cell of a grid.

Invariant: the boxes of one piece tile it exactly, one box per cell that it touches. Cells are
regular, so a piece touches a sub-lattice of them, found by division along each dimension: the cost
is that of the answer, never cells times shards. Knows nothing of ranks beyond the shards' own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cas_ckpt.layout.holdings import Shard
from cas_ckpt.objects.spec import Box, Grid


@dataclass(frozen=True, slots=True)
class Touch:
    """What one cell and one piece of one shard have in common.

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
            for cell, box in cells_of(grid, piece):
                found[cell].append(Touch(at, number, box))
    return [tuple(each) for each in found]


def cells_of(grid: Grid, piece: Box) -> Iterator[tuple[int, Box]]:
    """(cell number, common box) for every cell that `piece` touches, ascending."""
    if not piece.num_elements:
        return
    lattice = [
        _steps(start, size, step) for start, size, step in zip(piece.offsets, piece.sizes, grid.cell, strict=True)
    ]
    for place in itertools.product(*lattice):
        cell = 0
        for (position, _, _), count in zip(place, grid.counts, strict=True):
            cell = cell * count + position
        yield cell, Box(tuple(part[1] for part in place), tuple(part[2] for part in place))


def _steps(start: int, size: int, step: int) -> list[tuple[int, int, int]]:
    """(cell position, first element, number of elements) along one dimension."""
    stop = start + size
    steps = []
    for position in range(start // step, (stop - 1) // step + 1):
        first = max(start, position * step)
        steps.append((position, first, min(stop, (position + 1) * step) - first))
    return steps
