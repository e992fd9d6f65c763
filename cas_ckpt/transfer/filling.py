"""Chunks that are wanted, and what fills the targets with them.

A target gets a part of a chunk: all of it, a run of its bytes, or a box. `ChunkFiller` brings one chunk to all parts
that want it, leaf by leaf.

Invariant: what fills a target was verified: see chunk_reader.py. Starts no threads.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from cas_ckpt.errors import CkptError, CorruptionError, NotFoundError, reworded
from cas_ckpt.native import Part, runs_of_boxes
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.objects.pack import ExtentInfo, Location
from cas_ckpt.objects.spec import Box, raw_dtype
from cas_ckpt.objects.state import ArrayTarget
from cas_ckpt.progress import Progress
from cas_ckpt.transfer.chunk_reader import ChunkReader, Relocate, VerifiedExtent, all_leaves, runs
from cas_ckpt.transfer.hashing import Array, as_raw
from cas_ckpt.transfer.sources import STAGED, Source, new_memory


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """The part of a chunk that one target receives.

    Attributes:
        key: The tensor, for messages.
        place: The box that is filled, in the target's own coordinates.
        cell, box: Sizes of the cell and what is wanted of it, relative to the cell; None, None: all of it.
    """

    key: str
    target: ArrayTarget
    item_bytes: int
    place: Box
    cell: tuple[int, ...] | None = None
    box: Box | None = None

    @property
    def num_bytes(self) -> int:
        """Of the cell."""
        return math.prod(self.cell or self.place.sizes) * self.item_bytes

    @property
    def wanted(self) -> tuple[tuple[int, ...], Box]:
        """Sizes of the cell, and what is wanted of it."""
        cell = self.cell or self.place.sizes
        return cell, self.box or Box((0,) * len(cell), cell)

    def open(self, start: int, stop: int, opened: dict[tuple[int, Box], Array]) -> Iterator[tuple[Box, Array, Part]]:
        """The memory of what is wanted of the bytes start .. stop of the chunk: whole elements.

        Args:
            opened: What was opened before, and is not in place.
        Returns:
            For each box of the target: the box, what `target.open` gave, and that as raw items of the cell.
        """
        if self.box is None and not start and stop == self.num_bytes:  # the most frequent case, at a third of the cost
            array = self._array(self.place, opened)
            yield self.place, array, as_raw(array, self.item_bytes)
            return
        cell, wanted = self.wanted
        for run in runs_of_boxes(cell, start // self.item_bytes, stop // self.item_bytes):
            if common := Box(*run).intersect(wanted):
                offsets = zip(self.place.offsets, common.offsets, wanted.offsets, strict=True)
                place = Box(tuple(own + there - first for own, there, first in offsets), common.sizes)
                array = self._array(place, opened)
                yield place, array, (as_raw(array, self.item_bytes), cell, common.offsets)

    def _array(self, place: Box, opened: dict[tuple[int, Box], Array]) -> Array:
        found = opened.pop((id(self), place), None) if opened else None
        return self.target.open(place) if found is None else found


@dataclass(slots=True)
class StoredChunk:
    """A chunk that is read, where it is stored, and what is wanted of it.

    Attributes:
        key: The tensor that errors name.
        num_bytes: Its plain bytes.
        parts: Where its bytes go to; none: others do with it what they want once it is verified.
        wanted_bytes: Of all parts together.
        by_leaves: Only the leaves that the parts touch are read and verified.
        places: Where its extents are stored.
        extents: Those that were verified.
        opened: Memory that a target gave, by part and box, and that could not be filled from where it was tried; None:
            no target of its parts was touched.
    """

    key: str
    digest: Digest
    num_bytes: int
    parts: list[ChunkPart] = field(default_factory=list)
    wanted_bytes: int = 0
    by_leaves: bool = False
    places: Sequence[Location] = ()
    extents: list[VerifiedExtent] = field(default_factory=list)
    opened: dict[tuple[int, Box], Array] | None = None

    def to_verify(self, info: ExtentInfo) -> Sequence[tuple[int, int]]:
        """Leaves of an extent that are verified, whoever fills the parts."""
        return leaves_of(self, info) if self.by_leaves else all_leaves(info)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How a list of chunks is read.

    Attributes:
        num_threads: That hash and copy at one time; how many requests run at one time, the store says.
        budget_bytes: Most memory that this takes beyond the targets.
        relocate: Asked when a pack was collected under the restore.
    """

    num_threads: int
    budget_bytes: int
    progress: Progress
    relocate: Relocate | None


@dataclass(frozen=True, slots=True)
class NewArray:
    """Memory that nobody has seen yet, as a target."""

    array: Array

    def open(self, box: Box) -> Array:
        """A part of it."""
        return self.array[box.slices]

    def done(self, box: Box, array: Array) -> None:
        """It is in place already."""


def new_array(sizes: tuple[int, ...], item_bytes: int) -> Array:
    """A C-contiguous array of raw items; what it holds is undefined."""
    num_bytes = math.prod(sizes) * item_bytes
    return new_memory(num_bytes).view(raw_dtype(item_bytes)).reshape(sizes)


def named(error: CkptError, key: str) -> CkptError:
    """The same kind of error, its message headed by the tensor, if that has a name."""
    return reworded(error, f"{key}: {error}" if key else str(error))


class ChunkFiller:
    """Verifies chunks and fills targets with them; many threads."""

    def __init__(self, store: Source, progress: Progress, relocate: Relocate | None) -> None:
        self.reader = ChunkReader(store, relocate)
        self._progress = progress
        self._relocate = relocate

    def verify(self, chunk: StoredChunk) -> None:
        """Read and hash what is wanted of the chunk."""
        try:
            chunk.extents = self.reader.verify(chunk.digest, chunk.places, chunk.num_bytes, chunk.to_verify)
        except CkptError as error:
            raise named(error, chunk.key) from error
        self._progress.advance(chunk.num_bytes)

    def fill_once(self, chunk: StoredChunk) -> None:
        """Read, verify and fill in one pass: for targets that may be touched before all is verified."""
        try:
            self.fill_intact(chunk, chunk.places)
        except CkptError as error:
            raise named(error, chunk.key) from error
        self._progress.advance(chunk.wanted_bytes)

    def fill(self, chunk: StoredChunk) -> None:
        """Fill all parts with the chunk, which is verified.

        What is in memory since then is the bytes that were verified; whatever is not any more is read and hashed
        again, elsewhere if the pack is gone.
        """
        try:
            for extent in chunk.extents:
                self.fill_from(chunk, extent, is_verified=True)
        except (CorruptionError, NotFoundError) as error:
            is_gone = isinstance(error, NotFoundError) or chunk.extents[0].pack == STAGED
            if self._relocate is None or not is_gone:
                raise named(error, chunk.key) from error
            try:
                self.fill_intact(chunk, self._relocate(chunk.digest, {extent.pack for extent in chunk.extents}))
            except CkptError as other:
                raise named(other, chunk.key) from other
        self._progress.advance(chunk.wanted_bytes)

    def fill_intact(self, chunk: StoredChunk, places: Sequence[Location]) -> None:
        """Fill all parts from extents at `places` in which what is wanted is intact; the chunk has them then."""
        chunk.extents = self.reader.intact(chunk.digest, places, chunk.num_bytes, partial(self.fill_from, chunk))

    def fill_from(self, chunk: StoredChunk, extent: VerifiedExtent, *, is_verified: bool = False) -> None:
        """Fill what all parts want of an extent; see `ChunkReader.place`."""
        info = extent.info
        if info.chunk_leaves > 1 and any(info.leaf_bytes % part.item_bytes for part in chunk.parts):
            raise CorruptionError(
                f"chunk {short(info.digest)}, in {extent.pack} at offset {info.offset}: leaves of {info.leaf_bytes} "
                "bytes, where elements would be cut: run repo.rebuild_index()"
            )
        with closing(_opened(chunk, info)) as batches:
            self.reader.place(extent, batches, partial(leaves_of, chunk), is_verified=is_verified)


def _opened(chunk: StoredChunk, info: ExtentInfo) -> Generator[list[Part], None, None]:
    """The memory of what all parts want of an extent, in batches; each is in place when the next one is asked for.

    Memory that may be no view of a target is so bounded, however many want the same bytes.
    """
    start = info.first_leaf * info.leaf_bytes
    left, opened = list(reversed(chunk.parts)), chunk.opened or {}
    chunk.opened = opened
    while True:
        batch: list[tuple[ChunkPart, Box, Array, Part]] = []
        num_bytes = 0
        while left and num_bytes < 2 * chunk.num_bytes:
            part = left.pop()
            for each in part.open(start, start + info.plain_bytes, opened):
                batch.append((part, *each))
                num_bytes += 0 if isinstance(part.target, NewArray) else each[1].nbytes
        try:
            yield [each[-1] for each in batch]
        except GeneratorExit:
            chunk.opened = {(id(part), place): array for part, place, array, _ in batch}
            raise
        for part, place, array, _ in batch:
            part.target.done(place, array)
        if not left:
            return


def cell_part(key: str, target: ArrayTarget, item_bytes: int, cell: Box, box: Box, place: Box) -> ChunkPart:
    """The part of the chunk in `cell` for a target: the elements of `box`, which is inside of it, at `place`.

    Args:
        cell, box: In the coordinates of the tensor.
        place: In those of the target.
    """
    return ChunkPart(key, target, item_bytes, place, cell.sizes, box.relative_to(cell))


def leaves_of(chunk: StoredChunk, info: ExtentInfo | Location) -> Sequence[tuple[int, int]]:
    """The leaves of an extent that the parts of the chunk touch, as (first, stop) runs, ascending.

    Of a chunk that is not read by leaves: all from the first to the last of them.
    """
    if not chunk.by_leaves and any(part.box is None for part in chunk.parts):
        return all_leaves(info)
    found: set[int] = set()
    begin, end = info.first_leaf, info.first_leaf + info.num_leaves
    for part in chunk.parts:
        cell, box = part.wanted
        if chunk.by_leaves:
            found.update(leaves_touched(cell, box, item_bytes=part.item_bytes, leaf_bytes=info.leaf_bytes))
        elif box.num_elements:
            last = [offset + size - 1 for offset, size in zip(box.offsets, box.sizes, strict=True)]
            found.update(_number(each, cell) * part.item_bytes // info.leaf_bytes for each in (box.offsets, last))
    if found and not chunk.by_leaves:
        return runs(range(max(min(found), begin), min(max(found) + 1, end)))
    return runs([leaf for leaf in sorted(found) if begin <= leaf < end])


def _number(element: Sequence[int], sizes: tuple[int, ...]) -> int:
    """The number of an element of a cell in C order."""
    number = 0
    for at, size in zip(element, sizes, strict=True):
        number = number * size + at
    return number


def leaves_touched(cell: tuple[int, ...], part: Box, *, item_bytes: int, leaf_bytes: int) -> list[int]:
    """Numbers of the leaves of a cell (sizes `cell`, C order) that share an element with `part`."""
    if not cell:
        return [0]
    strides = [math.prod(cell[axis + 1 :]) * item_bytes for axis in range(len(cell))]
    starts = np.zeros(1, np.int64)
    for axis in range(len(cell) - 1):
        steps = (part.offsets[axis] + np.arange(part.sizes[axis], dtype=np.int64)) * strides[axis]
        starts = (starts[:, None] + steps).reshape(-1)
    starts = starts + part.offsets[-1] * item_bytes
    first = starts // leaf_bytes
    last = (starts + part.sizes[-1] * item_bytes - 1) // leaf_bytes
    reach = int((last - first).max()) + 1
    touched = first[:, None] + np.arange(reach)
    # Not np.unique, whose first call imports numpy.ma: 10 ms of a first checkout.
    found: list[int] = np.flatnonzero(np.bincount(touched[touched <= last[:, None]])).tolist()
    return found
