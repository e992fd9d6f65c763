"""The canonical grid: how a tensor is cut into cells and leaves, and what shards have of them.

    `grid_for`   a pure function of the global shape and the item size. The same tensor has the same cells on
                 every rank, mesh, machine and version, so equal bytes have equal ids however they are placed;
                 a change of this rule is a change of the format. Why this rule: docs/decisions/001-grid.md,
                 with the simulation in benchmarks/grid.py.
    `touches`    which parts of which shards are in each cell. The boxes of one piece tile it exactly, one box
                 per cell that it touches. Cells are regular, so a piece touches a sub-lattice of them, found by
                 division along each dimension: the cost is that of the answer, never cells times shards.
    `leaf_map`   where the leaves of a straddling cell come from, of which several shards hold parts. Most leaves
                 are whole in one part; the others are put together from pieces, on the part that has most of them.

Invariant: pure. Knows nothing of bytes, or of ranks beyond the shards' own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.layout.holdings import Shard
from cas_ckpt.objects.digest import LEAF_BYTES
from cas_ckpt.objects.spec import Box, Grid, Spec

CELL_BYTES = 4 * 1024 * 1024
"""No cell is longer; a full cell of a large tensor has more than half of it."""

MIN_PIECE_BYTES = 512 * 1024
"""A matrix is not cut along its columns into pieces (all rows of a column range) shorter than this."""

MIN_RUN_BYTES = 1024
"""Columns are never cut into runs shorter than this."""

MAX_PIECES = 8
"""Column pieces of a matrix: the largest usual tensor-parallel degree."""

_MAX_LEAF_SEARCH = 4
"""A long row is cut into equal leaves of at least about LEAF_BYTES / 4, or not into equal ones."""


def grid_for(spec: Spec) -> Grid:
    """The canonical grid of every tensor with this global shape and item size.

    Cells are numbered in C order and hold their elements in C order. A 0-d tensor is one cell, an
    empty one has no cells. At most one dimension has clipped cells at its border.

    Raises:
        InvalidInputError: the shape has a negative size, or an item is empty or longer than a leaf.
    """
    return _grid(spec.shape, spec.item_bytes)


@lru_cache(maxsize=1 << 14)
def _grid(shape: tuple[int, ...], item_bytes: int) -> Grid:
    _check(shape, item_bytes)
    if not shape or 0 in shape:
        return Grid(shape, (1,) * len(shape), item_bytes)
    columns = shape[-1] // _column_pieces(shape, item_bytes)
    axis = _row_axis(shape, columns, item_bytes)
    tail = (*shape[axis + 1 : -1], columns) if axis < len(shape) - 1 else ()
    row_bytes = math.prod(tail) * item_bytes
    rows = min(_power_of_two_floor(CELL_BYTES // row_bytes), shape[axis])
    leaf_bytes = min(_leaf_bytes(row_bytes, item_bytes), rows * row_bytes)
    return Grid(shape, (*(1,) * axis, rows, *tail), leaf_bytes)


def _check(shape: tuple[int, ...], item_bytes: int) -> None:
    if any(size < 0 for size in shape):
        raise InvalidInputError(f"shape {shape} has a negative size; pass the global shape of the tensor")
    if not 0 < item_bytes <= LEAF_BYTES:
        raise InvalidInputError(
            f"items of {item_bytes} bytes cannot be cut into leaves; wanted 1 to {LEAF_BYTES}: store the array in parts"
        )


def _column_pieces(shape: tuple[int, ...], item_bytes: int) -> int:
    """Pieces that the last dimension is cut into: 1 for anything but large wide or square matrices."""
    if len(shape) < 2 or shape[-1] < shape[-2]:
        return 1
    row_bytes = shape[-1] * item_bytes
    if row_bytes > CELL_BYTES:
        return 1
    most = min(row_bytes // MIN_RUN_BYTES, shape[-2] * row_bytes // MIN_PIECE_BYTES, MAX_PIECES)
    return math.gcd(_power_of_two_floor(max(most, 1)), shape[-1])


def _row_axis(shape: tuple[int, ...], columns: int, item_bytes: int) -> int:
    """The dimension whose cells have several rows; those before it have 1, those after it are whole."""
    if columns < shape[-1]:
        return len(shape) - 2
    return next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) * item_bytes <= CELL_BYTES)


def _leaf_bytes(row_bytes: int, item_bytes: int) -> int:
    """As many rows as a power of two that fits, else an equal share of a row, else whatever fits."""
    if row_bytes <= LEAF_BYTES:
        return _power_of_two_floor(LEAF_BYTES // row_bytes) * row_bytes
    row_items = row_bytes // item_bytes
    fewest = -(-row_bytes // LEAF_BYTES)
    for shares in range(fewest, fewest * _MAX_LEAF_SEARCH + 1):
        if row_items % shares == 0:
            return row_bytes // shares
    return LEAF_BYTES // item_bytes * item_bytes


def _power_of_two_floor(number: int) -> int:
    return 1 << (number.bit_length() - 1)


# --- which parts of which shards are in each cell -------------------------------------------


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
            found = _pieces(sizes, start, stop, parts)
            largest = _largest_holders(found)
            whole = largest[0]
            if any(piece.part != whole for piece in found):
                pieces[leaf] = found
            if len(largest) > 1:
                equals[leaf] = largest
        owners.append(whole)
    return LeafMap(tuple(owners), pieces, equals)


def _pieces(sizes: tuple[int, ...], start: int, stop: int, parts: Sequence[Box]) -> tuple[LeafPiece, ...]:
    found = []
    for band in range_boxes(sizes, start, stop):
        for at, part in enumerate(parts):
            common = band.intersect(part)
            if common is not None:
                found.append(LeafPiece(at, common))
    return tuple(found)


def _largest_holders(pieces: Sequence[LeafPiece]) -> tuple[int, ...]:
    held: dict[int, int] = {}
    for piece in pieces:
        held[piece.part] = held.get(piece.part, 0) + piece.box.num_elements
    most = max(held.values())
    return tuple(sorted(part for part, count in held.items() if count == most))


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
