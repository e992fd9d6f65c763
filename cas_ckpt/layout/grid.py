"""The canonical grid: how a tensor is cut into chunks and leaves.

Duty: `grid_for`, a pure function of the global shape and the item size. Invariant: the same tensor
has the same cells on every rank, mesh, machine and version, so equal bytes have equal ids however
they are placed; a change of this rule is a change of the format. Knows nothing of ranks, meshes or
bytes. Why this rule: docs/decisions/001-grid.md, with the simulation in benchmarks/grid.py.
"""

from __future__ import annotations

import math
from functools import lru_cache

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.objects.digest import LEAF_BYTES
from cas_ckpt.objects.spec import Grid, Spec

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
