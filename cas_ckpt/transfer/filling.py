"""Chunks that are wanted, and what fills the targets with them.

A target gets a part of a chunk: all of it, a run of its bytes, or a box. `ChunkFiller` brings one chunk to all parts
that want it, with scratch memory of its own.

Invariant: what fills a target was verified: see chunk_reader.py. Starts no threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from cas_ckpt.errors import CkptError, CorruptionError, NotFoundError, reworded
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.pack import Location
from cas_ckpt.objects.spec import Box, raw_dtype
from cas_ckpt.objects.state import ArrayTarget
from cas_ckpt.progress import Progress
from cas_ckpt.transfer.chunk_reader import STEP_BYTES, ChunkReader, Relocate, VerifiedExtent, cover, drop, is_plain
from cas_ckpt.transfer.hashing import Array, as_raw
from cas_ckpt.transfer.sources import STAGED, Source, new_memory


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """What one target gets of one chunk.

    Attributes:
        key: The tensor, for messages.
        place: The box that is filled, in the target's own coordinates.
        start: Where its elements begin in the chunk, bytes; None: they are not consecutive there.
        cell, box: Sizes of the cell and what is wanted of it, relative to the cell; None, None: all of it.
    """

    key: str
    target: ArrayTarget
    item_bytes: int
    place: Box
    start: int | None = 0
    cell: tuple[int, ...] | None = None
    box: Box | None = None


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
        touched: Something was written into the targets of its parts.
        filled: All parts have their bytes already.
        past_cache: It was verified, but by a read that left nothing in the page cache.
    """

    key: str
    digest: Digest
    num_bytes: int
    parts: list[ChunkPart] = field(default_factory=list)
    wanted_bytes: int = 0
    by_leaves: bool = False
    places: Sequence[Location] = ()
    extents: list[VerifiedExtent] = field(default_factory=list)
    touched: bool = False
    filled: bool = False
    past_cache: bool = False


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
    """Verifies chunks and fills targets with them; has scratch memory of its own, one per thread."""

    def __init__(self, store: Source, progress: Progress, relocate: Relocate | None) -> None:
        self.reader = ChunkReader(store, relocate)
        self._progress = progress
        self._space = np.empty(0, np.uint8)

    def verify(self, chunk: StoredChunk) -> None:
        """Read and hash what is wanted of the chunk."""
        try:
            if chunk.by_leaves:
                self.read_leaves(chunk)
            else:
                chunk.extents = self._streamed(chunk) or self.reader.verify(chunk.digest, chunk.places, chunk.num_bytes)
        except CkptError as error:
            raise named(error, chunk.key) from error
        self._progress.advance(chunk.num_bytes)

    def _streamed(self, chunk: StoredChunk, target: Array | None = None) -> list[VerifiedExtent]:
        """The extents of the chunk, read once from front to end and verified; none: it is to be read by other means.

        Args:
            target: Filled on the way, in C order; undefined if there are none.
        """
        places = cover(chunk.places, chunk.num_bytes)
        if not all(is_plain(place, chunk.num_bytes) for place in places):
            return []
        chunk.touched = chunk.touched or target is not None
        space = None if target is None or not target.flags.c_contiguous else target.reshape(-1).view(np.uint8).data
        found = []
        for place in places:
            into, take, begin = None, drop, place.first_leaf * place.leaf_bytes
            if space is not None:
                into = space[begin : begin + place.stored_bytes]
            elif target is not None:
                take = partial(_put, target, begin)
            try:
                found.append(self.reader.stream(chunk.digest, place, chunk.num_bytes, into=into, take=take))
            except (CorruptionError, NotFoundError):  # who reads it by other means says what is wrong, and where
                return []
        return found

    def fill_once(self, chunk: StoredChunk) -> None:
        """Read, verify and fill in one pass: for targets that may be touched before all is verified."""
        try:
            if not self._streamed_into(chunk):
                self.read_leaves(chunk)
                self.fill_from(chunk, self.scratch(chunk.num_bytes))
        except CkptError as error:
            raise named(error, chunk.key) from error
        self._progress.advance(chunk.wanted_bytes)

    def _streamed_into(self, chunk: StoredChunk) -> bool:
        """Read the chunk straight into its target, if it has one that wants all of it; whether that was done."""
        if len(chunk.parts) != 1 or chunk.by_leaves or chunk.wanted_bytes != chunk.num_bytes:
            return False
        (part,) = chunk.parts
        array = part.target.open(part.place)
        if not (extents := self._streamed(chunk, as_raw(array, part.item_bytes))):
            return False
        chunk.extents = extents
        part.target.done(part.place, array)
        chunk.filled = True
        return True

    def fill(self, chunk: StoredChunk) -> None:
        """Fill all parts with the chunk, which is verified."""
        chunk.touched = True
        # Several that want the same bytes, or bytes that left the cache, get them from scratch memory: read once.
        several = len(chunk.parts) > 1
        straight = not chunk.by_leaves and not (several and chunk.wanted_bytes > chunk.num_bytes)
        for part in chunk.parts:
            straight = straight and part.start is not None
        space: Array | None = None
        key = chunk.key
        try:
            for part in chunk.parts:
                key = part.key
                array = part.target.open(part.place)
                raw = raw_dtype(part.item_bytes)
                target = array if array.dtype == raw else array.view(raw)
                if straight:
                    straight = self._refill(chunk, target, part.start or 0, cached_only=several)
                if not straight:
                    space = self._whole(chunk) if space is None else space
                    np.copyto(target, _elements(part, space, raw))
                part.target.done(part.place, array)
                self._progress.advance(target.nbytes)
        except CkptError as error:
            raise named(error, key) from error

    def _refill(self, chunk: StoredChunk, target: Array, start: int, *, cached_only: bool) -> bool:
        """Fill `target` with the bytes from `start` on of the chunk, which is verified; see `ChunkReader.refill`.

        False, `target` being undefined: not all is in memory, and it is better brought there as a whole.
        """
        if target.flags.c_contiguous:
            stretch = target.reshape(-1).view(np.uint8)
            return self.reader.refill(chunk.extents, stretch.data, start, cached_only=cached_only)
        for rows in row_blocks(target, STEP_BYTES):
            space = self.scratch(rows.nbytes)
            if not self.reader.refill(chunk.extents, space.data, start, cached_only=True):
                return False
            np.copyto(rows, space.view(rows.dtype).reshape(rows.shape))
            start += rows.nbytes
        return True

    def _whole(self, chunk: StoredChunk) -> Array:
        """The bytes of the chunk in scratch memory; those of the wanted leaves, if it is read by leaves."""
        space = self.scratch(chunk.num_bytes)
        if not chunk.by_leaves:
            self.reader.refill(chunk.extents, space.data)
            return space
        try:
            self.reader.read_leaves(chunk.extents, leaves_of(chunk, chunk.extents[0].info.leaf_bytes), space.data)
        except (CorruptionError, NotFoundError) as error:
            if isinstance(error, CorruptionError) and chunk.extents[0].pack != STAGED:
                raise
            self.read_leaves(chunk)  # its pack was collected since it was verified, or the local disk lost it
        return space

    def read_leaves(self, chunk: StoredChunk) -> None:
        """Read the wanted leaves of the chunk into scratch memory, from extents in which they are intact."""
        space = self.scratch(chunk.num_bytes).data

        def read(extent: VerifiedExtent) -> None:
            self.reader.read_leaves([extent], leaves_of(chunk, extent.info.leaf_bytes), space)

        chunk.extents = self.reader.intact(chunk.digest, chunk.places, chunk.num_bytes, read)

    def scratch(self, num_bytes: int) -> Array:
        """So many bytes; what was in them before is gone."""
        if len(self._space) < num_bytes:
            self._space = new_memory(num_bytes)
        return self._space[:num_bytes]

    def fill_from(self, chunk: StoredChunk, space: Array) -> None:
        """Fill all parts with the chunk, whose bytes (those of the wanted leaves at least) are in `space`."""
        chunk.touched = True
        for part in chunk.parts:
            array, raw = part.target.open(part.place), raw_dtype(part.item_bytes)
            np.copyto(array if array.dtype == raw else array.view(raw), _elements(part, space, raw))
            part.target.done(part.place, array)
        chunk.filled = True

    def fill_run(self, chunk: StoredChunk, start: int, plain: Array) -> None:
        """Fill what all parts want of the bytes from `start` on of the chunk: whole leaves, so whole elements."""
        chunk.touched = True
        for part in chunk.parts:
            raw, cell = raw_dtype(part.item_bytes), part.cell or part.place.sizes
            wanted = part.box or Box((0,) * len(cell), cell)
            found = plain.view(raw)
            for box in boxes_of_run(cell, start // part.item_bytes, start // part.item_bytes + len(found)):
                data, found = found[: box.num_elements], found[box.num_elements :]
                common = box.intersect(wanted)
                if common is None:
                    continue
                offsets = zip(part.place.offsets, common.offsets, wanted.offsets, strict=True)
                place = Box(tuple(own + there - first for own, there, first in offsets), common.sizes)
                array = part.target.open(place)
                target = array if array.dtype == raw else array.view(raw)
                np.copyto(target, data.reshape(box.sizes)[common.relative_to(box).slices])
                part.target.done(place, array)


def _put(target: Array, begin: int, start: int, step: memoryview) -> None:
    """Bring consecutive bytes of a cell to their places in `target`, which has the cell's sizes.

    Args:
        begin, start: Their sum is where they begin in the cell.
    """
    found = np.frombuffer(step, target.dtype)
    first = (begin + start) // target.itemsize
    for box in boxes_of_run(target.shape, first, first + len(found)):
        np.copyto(target[box.slices], found[: box.num_elements].reshape(box.sizes))
        found = found[box.num_elements :]


def row_blocks(array: Array, num_bytes: int) -> Iterator[Array]:
    """Views of consecutive rows of `array`, each of about so many bytes, that together are all of it in C order."""
    while array.ndim > 1 and len(array) == 1:
        array = array[0]
    if not array.ndim:
        yield array
        return
    step = max(1, num_bytes * len(array) // array.nbytes)
    for first in range(0, len(array), step):
        yield array[first : first + step]


def boxes_of_run(sizes: tuple[int, ...], first: int, stop: int) -> Iterator[Box]:
    """Boxes that are each consecutive in the C order of a cell, and together its elements from `first` up to `stop`."""
    if len(sizes) < 2:
        yield Box((first,) * len(sizes), (stop - first,) * len(sizes))
        return
    row = math.prod(sizes[1:])
    while first < stop:
        at, begin = divmod(first, row)
        num_rows = (stop - first) // row
        if begin or not num_rows:
            end = min(row, begin + stop - first)
            for inner in boxes_of_run(sizes[1:], begin, end):
                yield Box((at, *inner.offsets), (1, *inner.sizes))
            first += end - begin
        else:
            yield Box((at, *[0] * len(sizes[1:])), (num_rows, *sizes[1:]))
            first += num_rows * row


def _elements(part: ChunkPart, space: Array, raw: np.dtype[Any]) -> Array:
    """What a part gets of the chunk whose bytes are in `space`."""
    cell = space.view(raw).reshape(part.cell or part.place.sizes)
    return cell if part.box is None else cell[part.box.slices]


def cell_part(key: str, target: ArrayTarget, item_bytes: int, cell: Box, box: Box, place: Box) -> ChunkPart:
    """What a target gets of the chunk in `cell`: the elements of `box`, which is inside of it, at `place`.

    Args:
        cell, box: In the coordinates of the tensor.
        place: In those of the target.
    """
    within = box.relative_to(cell)
    span = within.span_in(cell.sizes)
    start = None if span is None else span[0] * item_bytes
    return ChunkPart(key, target, item_bytes, place, start, cell.sizes, within)


def leaves_of(chunk: StoredChunk, leaf_bytes: int) -> list[int]:
    """The leaves that the parts of the chunk touch, ascending."""
    found: set[int] = set()
    for part in chunk.parts:
        cell, box = (part.cell, part.box) if part.cell and part.box else (part.place.sizes, None)
        box = box or Box((0,) * len(cell), cell)
        found.update(leaves_touched(cell, box, item_bytes=part.item_bytes, leaf_bytes=leaf_bytes))
    return sorted(found)


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
