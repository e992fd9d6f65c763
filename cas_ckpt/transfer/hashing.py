"""From arrays to leaf digests, without copying what lies contiguous.

Invariant: digests are of a cell's elements in C order, whatever the strides of the array.
Knows nothing of stores or of what happens to the digests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from cas_ckpt.objects.digest import LEAF_BYTES, Digest, leaf_digests
from cas_ckpt.objects.spec import Box, Grid, raw_dtype
from cas_ckpt.objects.state import ArraySource

Array: TypeAlias = np.ndarray[Any, Any]


def cell_groups(grid: Grid, item_bytes: int) -> Iterator[range]:
    """Numbers of the cells that are best hashed together, in order.

    Cells beside each other along the last dimension share their rows: read as whole bands
    of rows, memory is walked in its own order. Everything else is hashed cell by cell.
    """
    columns = _columns(grid, item_bytes)
    for first in range(0, grid.num_cells, columns):
        yield range(first, first + columns)


def _columns(grid: Grid, item_bytes: int) -> int:
    """Cells along the last dimension, if their rows can be gathered band by band, else 1."""
    if not grid.shape or grid.cell[-1] >= grid.shape[-1]:
        return 1
    row_bytes = grid.cell[-1] * item_bytes
    even = grid.shape[-1] % grid.cell[-1] == 0 and grid.leaf_bytes % row_bytes == 0
    return grid.counts[-1] if even else 1


def group_box(grid: Grid, group: range) -> Box:
    """The box that covers all cells of a group."""
    first = grid.box(group.start)
    if len(group) == 1:
        return first
    return Box(first.offsets, (*first.sizes[:-1], grid.shape[-1]))


def as_raw(array: Array, item_bytes: int) -> Array:
    """`array` as raw items: same memory, dtype by width alone."""
    raw = raw_dtype(item_bytes)
    return array if array.dtype == raw else array.view(raw)


def flat_bytes(array: Array) -> memoryview:
    """The bytes of a C-contiguous array."""
    return array.reshape(-1).view(np.uint8).data


class CellHasher:
    """Hashes cells with scratch memory of its own; one per thread."""

    def __init__(self) -> None:
        self._scratch = np.empty(0, np.uint8)

    def group_digests(self, source: ArraySource, grid: Grid, group: range, item_bytes: int) -> list[list[Digest]]:
        """Leaf digests of every cell of `group`, in order."""
        array = as_raw(source.read(group_box(grid, group)), item_bytes)
        if len(group) > 1 and array.flags.c_contiguous:
            return self._band_digests(array, grid, len(group), item_bytes)
        width = grid.cell[-1] if len(group) > 1 else 0
        cells = [array[..., at * width : (at + 1) * width] for at in range(len(group))] if width else [array]
        return [self._cell_digests(cell, grid.leaf_bytes) for cell in cells]

    def _cell_digests(self, cell: Array, leaf_bytes: int) -> list[Digest]:
        if cell.flags.c_contiguous:
            return leaf_digests(flat_bytes(cell), leaf_bytes)
        return leaf_digests(gather(cell, self._space(cell.nbytes)), leaf_bytes)

    def _band_digests(self, array: Array, grid: Grid, columns: int, item_bytes: int) -> list[list[Digest]]:
        width = grid.cell[-1]
        rows = math.prod(array.shape[:-1])
        band_rows = grid.leaf_bytes // (width * item_bytes)
        # [row, column cell, element] -> [column cell, row, element]: a leaf of each cell at a time.
        split = array.reshape(rows, columns, width).transpose(1, 0, 2)
        space = self._space(columns * grid.leaf_bytes)
        bands = []
        for top in range(0, rows, band_rows):
            band = split[:, top : top + band_rows]
            leaf_bytes = band.shape[1] * width * item_bytes
            bands.append(leaf_digests(gather(band, space), leaf_bytes))
        return [list(column) for column in zip(*bands, strict=True)]

    def _space(self, num_bytes: int) -> Array:
        if len(self._scratch) < num_bytes:
            self._scratch = np.empty(max(num_bytes, 8 * LEAF_BYTES), np.uint8)
        return self._scratch[:num_bytes]


def gather(cell: Array, space: Array) -> memoryview:
    """The elements of `cell` in C order, copied to the front of `space` (bytes)."""
    target = space[: cell.nbytes].view(cell.dtype).reshape(cell.shape)
    np.copyto(target, cell)
    return space.data[: cell.nbytes]
