"""Brings chunks into memory: first every byte is verified, then every byte is copied into place.

    1. `fetch_chunks` verifies all chunks: whole, or only the leaves that are wanted of them
    2. `on_verified` is called; until here no target was touched
    3. every part of every target is filled: straight from the page cache where it is consecutive in its
       chunk and in memory, else by way of scratch memory of one chunk

`read_region` needs no such care: it fills new memory, which nobody sees before it is complete, in one pass.
Collective checkouts (transfer/scatter.py) use the same two passes, and send between ranks.

Invariant: no target is touched before all that is wanted was read and verified. Between the
two passes the operating system's page cache is the staging memory, so the model is never
held twice; what fell out of it is verified again on its way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cas_ckpt.errors import CkptError, NotFoundError
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.pack import Location
from cas_ckpt.objects.spec import Box, Grid, raw_dtype
from cas_ckpt.objects.state import ArrayTarget
from cas_ckpt.progress import SILENT, Progress, phase
from cas_ckpt.storage.store import Store
from cas_ckpt.transfer.chunk_reader import ChunkReader, Relocate, VerifiedExtent
from cas_ckpt.transfer.hashing import Array
from cas_ckpt.transfer.workers import run_all

LOOKAHEAD = 8
"""Chunks whose reading is announced to the store ahead of time."""


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
    """

    key: str
    digest: Digest
    num_bytes: int
    parts: list[ChunkPart] = field(default_factory=list)
    wanted_bytes: int = 0
    by_leaves: bool = False
    places: Sequence[Location] = ()
    extents: list[VerifiedExtent] = field(default_factory=list)


def nothing() -> None:
    """Does nothing."""


def named(error: CkptError, key: str) -> CkptError:
    """The same kind of error, its message headed by the tensor."""
    return type(error)(f"{key}: {error}")


def fetch_chunks(
    store: Store,
    chunks: Sequence[StoredChunk],
    *,
    num_threads: int,
    progress: Progress,
    relocate: Relocate | None = None,
    on_verified: Callable[[], object] = nothing,
) -> None:
    """Verify all chunks, then fill all their parts.

    Args:
        chunks: In the order in which they are stored, see `core.chunks.place_chunks`.
        relocate: Asked when a pack was collected under the restore.
        on_verified: Called between the two.
    Raises:
        CorruptionError, NotFoundError: named by tensor; raised before any target was touched.
    """
    verify_chunks(store, chunks, num_threads=num_threads, progress=progress, relocate=relocate)
    on_verified()
    wanted_bytes = 0
    for chunk in chunks:
        wanted_bytes += chunk.wanted_bytes
    with phase(progress, "restoring", wanted_bytes):
        run_all(chunks, lambda: ChunkFiller(store, progress, relocate).fill, num_threads=num_threads)


def verify_chunks(
    store: Store,
    chunks: Sequence[StoredChunk],
    *,
    num_threads: int,
    progress: Progress,
    relocate: Relocate | None = None,
) -> None:
    """Read and hash what is wanted of all chunks; each then has the `extents` that hold it.

    Arguments and errors as for `fetch_chunks`.
    """
    num_bytes = 0
    for chunk in chunks:
        num_bytes += chunk.num_bytes
    with phase(progress, "verifying", num_bytes):
        announced = _announced(store, chunks)
        run_all(announced, lambda: ChunkFiller(store, progress, relocate).verify, num_threads=num_threads)


def _announced(store: Store, chunks: Sequence[StoredChunk]) -> Iterator[StoredChunk]:
    """The chunks in order, each announced to the store `LOOKAHEAD` chunks before its turn."""
    for at, chunk in enumerate(chunks):
        first = at + LOOKAHEAD if at else 0
        for ahead in chunks[first : at + LOOKAHEAD + 1]:
            if not ahead.by_leaves:
                place = ahead.places[0]
                store.prefetch(place.pack, place.offset, place.header_bytes + place.stored_bytes)
        yield chunk


class ChunkFiller:
    """Verifies chunks and fills targets with them; has scratch memory of its own, one per thread."""

    def __init__(self, store: Store, progress: Progress, relocate: Relocate | None) -> None:
        self.reader = ChunkReader(store, relocate)
        self._progress = progress
        self._space = np.empty(0, np.uint8)

    def verify(self, chunk: StoredChunk) -> None:
        """Read and hash what is wanted of the chunk."""
        try:
            if chunk.by_leaves:
                self._read_leaves(chunk)
            else:
                chunk.extents = self.reader.verify(chunk.digest, chunk.places, chunk.num_bytes)
        except CkptError as error:
            raise named(error, chunk.key) from error
        self._progress.advance(chunk.num_bytes)

    def fill(self, chunk: StoredChunk) -> None:
        """Fill all parts with the chunk, which is verified."""
        # Several that want the same bytes, or bytes that left the cache, get them from scratch memory: read once.
        several = len(chunk.parts) > 1
        straight = not chunk.by_leaves and not (several and chunk.wanted_bytes > chunk.num_bytes)
        for part in chunk.parts:
            straight = straight and part.start is not None
        staged: Array | None = None
        key = chunk.key
        try:
            for part in chunk.parts:
                key = part.key
                array = part.target.open(part.place)
                raw = raw_dtype(part.item_bytes)
                target = array if array.dtype == raw else array.view(raw)
                if straight:
                    in_place = target.flags.c_contiguous
                    stretch = target.reshape(-1).view(np.uint8) if in_place else self.scratch(target.nbytes)
                    start = part.start or 0
                    straight = self.reader.refill(chunk.extents, stretch.data, start, cached_only=several)
                    if straight and not in_place:
                        np.copyto(target, stretch.view(raw).reshape(target.shape))
                if not straight:
                    staged = self._staged(chunk) if staged is None else staged
                    cell = staged.view(raw).reshape(part.cell or part.place.sizes)
                    np.copyto(target, cell if part.box is None else cell[part.box.slices])
                part.target.done(part.place, array)
                self._progress.advance(target.nbytes)
        except CkptError as error:
            raise named(error, key) from error

    def _staged(self, chunk: StoredChunk) -> Array:
        """The bytes of the chunk in scratch memory; those of the wanted leaves, if it is read by leaves."""
        space = self.scratch(chunk.num_bytes)
        if not chunk.by_leaves:
            self.reader.refill(chunk.extents, space.data)
            return space
        try:
            self.reader.read_leaves(chunk.extents, _leaves(chunk, chunk.extents[0].info.leaf_bytes), space.data)
        except NotFoundError:  # its pack was collected since it was verified: there may be a copy
            self._read_leaves(chunk)
        return space

    def _read_leaves(self, chunk: StoredChunk) -> None:
        """Read the wanted leaves of the chunk into scratch memory, from extents in which they are intact."""
        space = self.scratch(chunk.num_bytes).data

        def read(extent: VerifiedExtent) -> None:
            self.reader.read_leaves([extent], _leaves(chunk, extent.info.leaf_bytes), space)

        chunk.extents = self.reader.intact(chunk.digest, chunk.places, chunk.num_bytes, read)

    def scratch(self, num_bytes: int) -> Array:
        """So many bytes; what was in them before is gone."""
        if len(self._space) < num_bytes:
            self._space = np.empty(num_bytes, np.uint8)
        return self._space[:num_bytes]

    def read_into(self, chunk: StoredChunk) -> None:
        """Fill all parts with the chunk in one pass, only the leaves that they touch being read.

        What was touched when this raises is undefined: for targets that nobody has seen yet.
        """
        self._read_leaves(chunk)
        for part in chunk.parts:
            array = part.target.open(part.place)
            cell = self.scratch(chunk.num_bytes).view(array.dtype).reshape(part.cell or part.place.sizes)
            array[...] = cell if part.box is None else cell[part.box.slices]


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


def _leaves(chunk: StoredChunk, leaf_bytes: int) -> list[int]:
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
    return [int(leaf) for leaf in np.unique(touched[touched <= last[:, None]])]


@dataclass(frozen=True, slots=True)
class _NewArray:
    """Memory that nobody has seen yet, as a target."""

    array: Array

    def open(self, box: Box) -> Array:
        return self.array[box.slices]

    def done(self, box: Box, array: Array) -> None:
        """It is in place already."""


def read_region(
    store: Store,
    region: Box,
    *,
    grid: Grid,
    item_bytes: int,
    chunk_of: Callable[[int], Digest],
    located: Mapping[bytes, Sequence[Location]],
    relocate: Relocate | None = None,
) -> Array:
    """The elements of `region` as a new C-contiguous array of raw items; only the leaves that it touches are read.

    Args:
        chunk_of: Chunk id by cell number; called for the cells that `region` touches.
        relocate: Asked when a pack was collected meanwhile.
    Raises:
        CorruptionError: a leaf is damaged in every copy. NotFoundError: a chunk is nowhere.
    """
    out = np.empty(region.sizes, raw_dtype(item_bytes))
    target, filler = _NewArray(out), ChunkFiller(store, SILENT, relocate)
    for number, common in grid.cells_in(region):
        cell, digest = grid.box(number), chunk_of(number)
        part = cell_part("", target, item_bytes, cell, common, common.relative_to(region))
        num_bytes = cell.num_elements * item_bytes
        filler.read_into(StoredChunk("", digest, num_bytes, [part], by_leaves=True, places=located.get(digest, ())))
    return out
