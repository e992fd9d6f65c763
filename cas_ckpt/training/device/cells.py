"""Where the cells of a tensor are in the memory of a device, as the tables that kernels.py reads.

    1. Cells of equal size are found together; their addresses follow from the strides, by NumPy.
    2. Cells that are contiguous, or rows with an equal distance, are hashed where they are.
    3. All others (transposed memory, addresses that are no multiple of a word) are copied into scratch memory of the
       device first, by torch, so many at a time.

Invariant: a cell's row describes exactly its elements in C order. Pure arithmetic: reads nothing, launches nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from cas_ckpt.errors import InternalError
from cas_ckpt.objects.spec import Box, Grid

Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

WORD_BYTES = 4
BLOCK_BYTES = 64
"""A block of BLAKE3: always inside one row of a cell."""

CHUNK_BYTES = 1024
"""A chunk of BLAKE3."""

VECTOR_BYTES = 16
"""Bytes that one thread loads at once, if everything is aligned to it."""


@dataclass(frozen=True, slots=True)
class DevicePart:
    """Elements of a tensor that are in memory of a device.

    Attributes:
        memory: The elements as raw items, with any strides.
        box: What of the tensor they are, in its coordinates.
        offsets: Of the box's first element in `memory`.
    """

    memory: torch.Tensor
    box: Box
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CellRequest:
    """Cells whose leaves are to be hashed: `numbers` of `grid`, each inside of one of `parts`."""

    parts: tuple[DevicePart, ...]
    grid: Grid
    numbers: Sequence[int]
    item_bytes: int


@dataclass(frozen=True, slots=True)
class Shape:
    """Parameters of one launch.

    Attributes:
        chunks_per_leaf: Chunks of BLAKE3 in the longest leaf.
        whole: All chunks are full, all addresses multiples of `VECTOR_BYTES`.
        rows: Cells are rows apart from one another.
    """

    chunks_per_leaf: int
    whole: bool
    rows: bool


@dataclass(frozen=True, slots=True)
class CellGroup:
    """Cells of one size in one memory.

    Attributes:
        memory: Where the cells are; of tensors that are one cell each, which have addresses: that of the first.
        places: (request, position in its `numbers`) of each cell.
        corners: Of the cells in `memory`, elements.
        addresses: Of their first bytes; None: they have to be gathered.
        row_bytes, row_step_bytes: See `Shape.rows`.
    """

    shape: Shape
    memory: torch.Tensor
    sizes: tuple[int, ...]
    places: list[tuple[int, int]]
    corners: Numbers
    addresses: Numbers | None
    num_bytes: int
    leaf_bytes: int
    row_bytes: int
    row_step_bytes: int

    @property
    def num_leaves(self) -> int:
        """Leaves of each cell; a cell without bytes has an empty one."""
        return max(1, -(-self.num_bytes // self.leaf_bytes))


def groups_of(requests: Sequence[CellRequest]) -> Iterator[CellGroup]:
    """All cells of all requests, together if of one size in one memory, or of one size and tensors of their own."""
    alone: dict[tuple[int, int, bool], list[tuple[int, int]]] = {}
    for number, request in enumerate(requests):
        address = _address_of_one_cell(request)
        if address is None:
            yield from _groups(number, request)
        else:
            num_bytes = request.parts[0].memory.numel() * request.item_bytes
            form = (num_bytes, request.grid.leaf_bytes, address % VECTOR_BYTES == 0)
            alone.setdefault(form, []).append((number, address))
    for (num_bytes, leaf_bytes, is_aligned), found in alone.items():
        places, corners = [(number, 0) for number, _ in found], np.zeros((len(found), 0), np.int64)
        addresses = np.array([address for _, address in found], np.int64)
        chunks, full = _chunks(num_bytes, leaf_bytes)
        shape, memory = _shape(chunks, whole=full and is_aligned, rows=False), requests[found[0][0]].parts[0].memory
        yield CellGroup(shape, memory, (), places, corners, addresses, num_bytes, leaf_bytes, num_bytes, 0)


def _address_of_one_cell(request: CellRequest) -> int | None:
    """Of a tensor in one piece that is one cell and can be hashed where it is; None: look closer.

    Of thousands of small tensors each costs what is done here, without the arrays of NumPy that `_groups` makes.
    """
    grid = request.grid
    if len(request.parts) != 1 or [*request.numbers[:2]] != [0] or grid.cell != grid.shape:
        return None
    memory = request.parts[0].memory  # which is all of the tensor if it has its shape
    if memory.shape != grid.shape or not memory.numel() or not memory.is_contiguous() or grid.leaf_bytes % WORD_BYTES:
        return None
    address = memory.data_ptr()
    return None if address % WORD_BYTES else address


def _chunks(num_bytes: int, leaf_bytes: int) -> tuple[int, bool]:
    """Chunks of BLAKE3 in the longest leaf of so many bytes, and whether all chunks of all leaves are full."""
    chunks = max(1, -(-min(leaf_bytes, num_bytes) // CHUNK_BYTES))
    return chunks, bool(num_bytes) and num_bytes % leaf_bytes == 0 and leaf_bytes % CHUNK_BYTES == 0


def _groups(number: int, request: CellRequest) -> Iterator[CellGroup]:
    grid = request.grid
    cells = np.asarray(request.numbers, np.int64)
    if not len(cells):
        return
    position = _positions(cells, grid)
    cell = np.array(grid.cell, np.int64)
    corners = position * cell
    sizes = np.minimum(cell, np.array(grid.shape, np.int64) - corners)
    left = np.ones(len(cells), bool)
    for part in request.parts:
        first, extent = np.array(part.box.offsets, np.int64), np.array(part.box.sizes, np.int64)
        inside = left & (corners >= first).all(1) & (corners + sizes <= first + extent).all(1)
        left &= ~inside
        local = corners - first + np.array(part.offsets, np.int64)
        for size in np.unique(sizes[inside], axis=0) if inside.any() else ():
            chosen = np.flatnonzero(inside & (sizes == size).all(1))
            places = [(number, int(at)) for at in chosen]
            yield _group(request, part.memory, tuple(map(int, size)), places, local[chosen])
    if left.any():
        raise InternalError(f"cell {int(cells[left][0])} of {grid.shape} is not in the memory that was named for it")


def _positions(cells: Numbers, grid: Grid) -> Numbers:
    """Where the cells are along each dimension; an empty tensor may be asked for one empty cell."""
    if not grid.shape:
        return np.zeros((len(cells), 0), np.int64)
    return np.stack(np.unravel_index(cells, np.maximum(grid.counts, 1)), 1).astype(np.int64)


def _group(
    request: CellRequest, memory: torch.Tensor, sizes: tuple[int, ...], places: list[tuple[int, int]], corners: Numbers
) -> CellGroup:
    item_bytes, leaf_bytes = request.item_bytes, request.grid.leaf_bytes
    num_bytes = math.prod(sizes) * item_bytes
    chunks, full = _chunks(num_bytes, leaf_bytes)
    found = _rows(sizes, memory.stride(), item_bytes)
    if found is not None:
        row_bytes, step_bytes = found
        is_one = row_bytes >= num_bytes
        strides = np.array(memory.stride(), np.int64) * item_bytes
        addresses = memory.data_ptr() + corners @ strides
        unit = _alignment(addresses, 0 if is_one else step_bytes)
        many_leaves = num_bytes > leaf_bytes
        fits = is_one or _blocks_are_in_rows(row_bytes, leaf_bytes)
        if fits and unit >= WORD_BYTES and not (many_leaves and leaf_bytes % WORD_BYTES):
            shape = _shape(chunks, whole=full and unit >= VECTOR_BYTES, rows=not is_one)
            step = 0 if is_one else step_bytes
            return CellGroup(shape, memory, sizes, places, corners, addresses, num_bytes, leaf_bytes, row_bytes, step)
    shape = _shape(chunks, whole=full, rows=False)
    return CellGroup(shape, memory, sizes, places, corners, None, num_bytes, leaf_bytes, max(num_bytes, 1), 0)


def _shape(chunks: int, *, whole: bool, rows: bool) -> Shape:
    if whole:
        return Shape(chunks, True, rows)
    # Leaves of about one length share a launch: those that are shorter leave lanes without work.
    return Shape(next((few for few in (1, 4, 16) if chunks <= few), 1 << (chunks - 1).bit_length()), False, True)


def _rows(sizes: Sequence[int], strides: Sequence[int], item_bytes: int) -> tuple[int, int] | None:
    """Bytes of the rows that a box consists of, and from one to the next; None if it is no rows with one distance."""
    merged: list[tuple[int, int]] = []  # (size, stride) from the innermost outwards
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, stride))
    if not merged:
        return item_bytes, 0
    (size, stride), *outer = merged
    if stride != 1 or len(outer) > 1:
        return None
    return max(size, 1) * item_bytes, outer[0][1] * item_bytes if outer else 0


def _blocks_are_in_rows(row_bytes: int, leaf_bytes: int) -> bool:
    """Whether no block of a leaf reaches from one row into the next."""
    return (row_bytes % BLOCK_BYTES == 0 and leaf_bytes % BLOCK_BYTES == 0) or row_bytes % leaf_bytes == 0


def _alignment(addresses: Numbers, step_bytes: int) -> int:
    """The largest power of two, up to `VECTOR_BYTES`, of which all rows begin at a multiple."""
    bits = int(np.bitwise_or.reduce(addresses)) | step_bytes | VECTOR_BYTES
    return bits & -bits
