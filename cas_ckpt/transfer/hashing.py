"""From arrays to leaf digests and to checksums, without copying what is contiguous.

Leaf digests (`CellHasher`) name chunks: BLAKE3 over a cell's elements in C order, whatever the strides of the array.

Checksums (`checksums`) answer at the speed of memory whether any byte of a region has changed:

    1. A region is cut into stretches of at most 8 MiB, consecutive elements in C order.
    2. The bytes of a stretch are 64-bit words in rows of 2,039; the last row is filled up with zeros.
       Every row and every column is summed, modulo 2^64: additions only.
    3. BLAKE3 over the sums names the stretch, over the stretches' names the region.
       A stretch of up to 64 KiB is hashed as it is.

Invariant: both are functions of the elements in C order alone, whatever strides, device or subclass hold them. A
change that is confined to three words of a stretch always changes its checksum: docs/decisions/007-checksums.md has
the proof, and what is not certain. A checksum is never an id of anything: it decides only whether memory is what it
was, or what another rank has. Knows nothing of stores, chunks' places, keys or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from blake3 import blake3

from cas_ckpt.objects.digest import LEAF_BYTES, Digest, digests_of, leaf_digests
from cas_ckpt.objects.spec import Box, Grid, raw_dtype
from cas_ckpt.objects.state import ArraySource
from cas_ckpt.transfer.workers import run_all

Array: TypeAlias = np.ndarray[Any, Any]

WORD_BYTES = 8

ROW_WORDS = 2039
"""Words in a row. A prime: that it is odd lets no change that is alike in all words of a row vanish modulo 2^64, and
no usual row length of a tensor is a multiple of it."""

ROW_BYTES = ROW_WORDS * WORD_BYTES

STRETCH_BYTES = 8 << 20
"""Most bytes that are summed, and gathered where they do not lie together, at once."""

SMALL_BYTES = 64 << 10
"""Stretches of up to so many bytes are hashed as they are."""

SUM_BYTES = 16

CACHE_LINE_BYTES = 64
"""What a processor brings from memory at a time, on most of them."""

_BLOCK_ROWS = (1 << 20) // ROW_BYTES
"""Rows that are summed at a time: a block stays in the processor's cache between its two sums."""


def cell_groups(grid: Grid, item_bytes: int) -> Iterator[range]:
    """Numbers of the cells that are best hashed together, in order.

    Cells beside each other along the last dimension share their rows: read as whole bands
    of rows, memory is walked in its own order, if the rows of a cell fill its leaves evenly.
    Everything else is hashed cell by cell.
    """
    columns = 1
    if grid.shape and grid.cell[-1] < grid.shape[-1]:
        even = grid.shape[-1] % grid.cell[-1] == 0 and grid.leaf_bytes % (grid.cell[-1] * item_bytes) == 0
        columns = grid.counts[-1] if even else 1
    for first in range(0, grid.num_cells, columns):
        yield range(first, first + columns)


def most_read_at_once(grid: Grid, item_bytes: int) -> int:
    """Bytes of the largest box that is read of a source: of the cells that are hashed together."""
    return len(next(cell_groups(grid, item_bytes), ())) * math.prod(grid.cell) * item_bytes


def as_raw(array: Array, item_bytes: int) -> Array:
    """`array` as raw items: same memory, dtype by width alone."""
    raw = raw_dtype(item_bytes)
    return array if array.dtype == raw else array.view(raw)


class CellHasher:
    """Hashes cells with scratch memory of its own; one per thread."""

    def __init__(self) -> None:
        self._scratch = np.empty(0, np.uint8)

    def group_digests(self, source: ArraySource, grid: Grid, group: range, item_bytes: int) -> list[list[Digest]]:
        """Leaf digests of every cell of `group`, in order."""
        box = grid.box(group.start)
        if len(group) == 1:
            array = as_raw(source.read(box), item_bytes)
            return [self._cell_digests(array, grid.leaf_bytes)]
        box = Box(box.offsets, (*box.sizes[:-1], grid.shape[-1]))
        array = as_raw(source.read(box), item_bytes)
        if array.flags.c_contiguous:
            return self._band_digests(array, grid, len(group), item_bytes)
        width = grid.cell[-1]
        cells = [array[..., at * width : (at + 1) * width] for at in range(len(group))]
        return [self._cell_digests(cell, grid.leaf_bytes) for cell in cells]

    def _cell_digests(self, cell: Array, leaf_bytes: int) -> list[Digest]:
        if cell.flags.c_contiguous:
            return leaf_digests(cell.reshape(-1).view(np.uint8).data, leaf_bytes)
        return leaf_digests(gather(cell, self._space(cell.nbytes)), leaf_bytes)

    def _band_digests(self, array: Array, grid: Grid, columns: int, item_bytes: int) -> list[list[Digest]]:
        width = grid.cell[-1]
        rows = array.reshape(-1, columns, width)
        band_rows = grid.leaf_bytes // (width * item_bytes)
        whole = len(rows) // band_rows * band_rows
        found = self._bands(rows[:whole], band_rows) if whole else []
        if whole < len(rows):
            found += self._bands(rows[whole:], len(rows) - whole)
        return list(map(list, zip(*found, strict=True)))

    def _bands(self, rows: Array, band_rows: int) -> list[list[Digest]]:
        """For each band of so many rows of [row, column cell, element] the digests of its leaves, one a column cell."""
        bands = rows.reshape(-1, band_rows, *rows.shape[1:]).transpose(0, 2, 1, 3)
        lines = rows.reshape(len(bands), -1).view(np.uint8)[:, ::CACHE_LINE_BYTES]
        space = self._space(bands[0].nbytes)
        gathered = space.view(rows.dtype).reshape(bands.shape[1:])
        leaves = [leaf.data for leaf in space.reshape(len(gathered), -1)]
        found = []
        for band, starts in zip(bands, lines, strict=True):
            # Brings the band into the cache, many lines at a time: a copy of short runs waits for memory at each.
            np.bitwise_or.reduce(starts)
            np.copyto(gathered, band)
            found.append(digests_of(leaves))
        return found

    def _space(self, num_bytes: int) -> Array:
        if len(self._scratch) < num_bytes:
            self._scratch = np.empty(max(num_bytes, 8 * LEAF_BYTES), np.uint8)
        return self._scratch[:num_bytes]


def gather(cell: Array, space: Array) -> memoryview:
    """The elements of `cell` in C order, copied to the front of `space` (bytes)."""
    target = space[: cell.nbytes].view(cell.dtype).reshape(cell.shape)
    np.copyto(target, cell)
    return space.data[: cell.nbytes]


@runtime_checkable
class SummingSource(Protocol):
    """A source that sums its elements where they are, such as on a GPU."""

    def sums(self, box: Box) -> Array | None:
        """The sums of all rows, then of all columns, of the words of `box`, as uint64; None: read the box."""
        ...


@dataclass(frozen=True, slots=True)
class Summed:
    """What is to be summed: a box of one source."""

    source: ArraySource
    box: Box
    item_bytes: int


def checksums(parts: Sequence[Summed], *, num_threads: int) -> list[bytes]:
    """The checksum (16 bytes) of every part, in order.

    Args:
        num_threads: How many of them share the stretches of all parts.
    """
    units = [
        (at, number, box)
        for at, part in enumerate(parts)
        if part.box.num_elements
        for number, box in enumerate(stretches(part.box, max(1, STRETCH_BYTES // part.item_bytes)))
    ]
    names: list[dict[int, bytes]] = [{} for _ in parts]

    def make_worker() -> Any:
        summer = _Summer()

        def work(unit: tuple[int, int, Box]) -> None:
            at, number, box = unit
            names[at][number] = summer.name(parts[at], box)

        return work

    run_all(units, make_worker, num_threads=max(1, min(num_threads, len(units))))
    return [blake3(b"".join(name for _, name in sorted(found.items()))).digest(length=SUM_BYTES) for found in names]


def stretches(box: Box, most: int) -> Iterator[Box]:
    """Boxes of at most `most` elements, each consecutive in the C order of `box`, that cover it in that order."""
    row = math.prod(box.sizes[1:])
    if box.num_elements <= most:
        yield box
    elif row > most:
        for at in range(box.sizes[0]):
            for inner in stretches(Box(box.offsets[1:], box.sizes[1:]), most):
                yield Box((box.offsets[0] + at, *inner.offsets), (1, *inner.sizes))
    else:
        step = most // row
        for first in range(0, box.sizes[0], step):
            size = min(step, box.sizes[0] - first)
            yield Box((box.offsets[0] + first, *box.offsets[1:]), (size, *box.sizes[1:]))


class _Summer:
    """Names stretches, with scratch memory of its own; one per thread."""

    def __init__(self) -> None:
        self._scratch = np.empty(0, np.uint8)

    def name(self, part: Summed, box: Box) -> bytes:
        num_bytes = box.num_elements * part.item_bytes
        if num_bytes > SMALL_BYTES and isinstance(part.source, SummingSource):
            found = part.source.sums(box)
            if found is not None:
                return blake3(found.view(np.uint8).data).digest()
        data = self._flat(as_raw(part.source.read(box), part.item_bytes))
        return blake3(data.data if num_bytes <= SMALL_BYTES else word_sums(data).view(np.uint8).data).digest()

    def _flat(self, array: Array) -> Array:
        """The bytes of `array` in C order, beginning at a whole word of memory."""
        if array.flags.c_contiguous and array.ctypes.data % WORD_BYTES == 0:
            return array.reshape(-1).view(np.uint8)
        if len(self._scratch) < array.nbytes:
            self._scratch = np.empty(max(array.nbytes, 1 << 20), np.uint8)
        gather(array, self._scratch)
        return self._scratch[: array.nbytes]


def word_sums(data: Array) -> Array:
    """The sums of all rows, then of all columns, of bytes that begin at a whole word of memory.

    The words are read in the machine's byte order: sums are compared between machines of one kind.
    """
    num_rows, rest = divmod(len(data), ROW_BYTES)
    sums = np.empty(num_rows + bool(rest) + ROW_WORDS, np.uint64)
    columns = sums[-ROW_WORDS:]
    columns[:] = 0
    whole = data[: num_rows * ROW_BYTES].view(np.uint64).reshape(num_rows, ROW_WORDS)
    for first in range(0, num_rows, _BLOCK_ROWS):
        block = whole[first : first + _BLOCK_ROWS]
        np.add.reduce(block, 1, out=sums[first : first + len(block)])
        columns += np.add.reduce(block, 0)
    if rest:
        last = np.zeros(ROW_BYTES, np.uint8)
        last[:rest] = data[num_rows * ROW_BYTES :]
        columns += last.view(np.uint64)
        sums[num_rows] = np.add.reduce(last.view(np.uint64))
    return sums
