"""Reads boxes of stored tensors into memory: what one rank of DCP asks for.

    1. Cut every wanted box by the tensor's grid; group by chunk, so that each is read once.
    2. Verify: whole chunks where most of a chunk is wanted, else only the leaves it touches.
    3. Fill the targets.

Invariant: no target is touched before everything was verified; memory is one chunk a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cas_ckpt.errors import CkptError, CorruptionError, InternalError, NotFoundError
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.objects.spec import Box, raw_dtype
from cas_ckpt.objects.state import ArrayTarget, StoredTensor
from cas_ckpt.ops.tree import tensor_chunks
from cas_ckpt.repository import RepositoryHandle
from cas_ckpt.transfer.chunk_reader import ChunkReader, Place, VerifiedExtent
from cas_ckpt.transfer.fetch import named, nothing, order_by_place
from cas_ckpt.transfer.hashing import Array, as_raw, flat_bytes
from cas_ckpt.transfer.slices import leaves_touched
from cas_ckpt.transfer.workers import run_all, thread_count

WHOLE_SHARE = 0.5
"""From this share of a chunk's bytes on, all of it is read in one run."""


@dataclass(frozen=True, slots=True)
class BoxRead:
    """A box of a stored tensor and where it goes to.

    Attributes:
        box: In the stored tensor, elements; not empty.
        target: Memory of exactly that box; its own coordinates begin at 0.
    """

    key: str
    stored: StoredTensor
    box: Box
    target: ArrayTarget


@dataclass(frozen=True, slots=True)
class _Part:
    """What one box wants of one cell.

    Attributes:
        cell: Sizes of the cell. part: The wanted part of it. place: The same in the target.
    """

    read: BoxRead
    cell: tuple[int, ...]
    part: Box
    place: Box

    @property
    def is_whole(self) -> bool:
        """Whether the whole cell is wanted."""
        return self.part.sizes == self.cell


@dataclass(slots=True)
class _Chunk:
    """A chunk and all that is wanted of it."""

    digest: Digest
    num_bytes: int
    parts: list[_Part] = field(default_factory=list)
    places: Sequence[Place] = ()
    extents: list[VerifiedExtent] = field(default_factory=list)

    @property
    def key(self) -> str:
        """Of the first tensor that wants it, for messages."""
        return self.parts[0].read.key

    @property
    def is_whole(self) -> bool:
        """Whether all of it is read."""
        wanted = sum(part.part.num_elements * part.read.stored.spec.item_bytes for part in self.parts)
        return wanted >= WHOLE_SHARE * self.num_bytes

    def leaves(self, leaf_bytes: int) -> list[int]:
        """The leaves that are wanted, ascending."""
        found: set[int] = set()
        for part in self.parts:
            item_bytes = part.read.stored.spec.item_bytes
            found.update(leaves_touched(part.cell, part.part, item_bytes=item_bytes, leaf_bytes=leaf_bytes))
        return sorted(found)


def fetch_boxes(
    handle: RepositoryHandle,
    reads: Sequence[BoxRead],
    *,
    num_threads: int | None = None,
    on_verified: Callable[[], object] = nothing,
) -> None:
    """Fill the targets of all reads.

    Args:
        on_verified: Called when everything is verified, before the first target is touched.
    Raises:
        CorruptionError, NotFoundError: naming the tensor; no target was touched.
    """
    chunks = _plan(handle, [read for read in reads if read.stored.inline is None])
    threads = thread_count(num_threads)
    run_all(chunks, lambda: _verifier(handle), num_threads=threads)
    on_verified()
    run_all(chunks, lambda: _filler(handle), num_threads=threads)
    for read in reads:
        if read.stored.inline is not None:
            _fill_inline(read, read.stored.inline)


def _plan(handle: RepositoryHandle, reads: Sequence[BoxRead]) -> list[_Chunk]:
    chunks: dict[Digest, _Chunk] = {}
    for read, (grid, digests) in zip(reads, tensor_chunks(handle, [read.stored for read in reads]), strict=True):
        item_bytes = read.stored.spec.item_bytes
        for number in grid.cells_touching(read.box):
            cell = grid.box(number)
            common = cell.intersect(read.box) if cell.sizes else cell
            if common is None:
                raise InternalError(f"{read.key}: cell {number} does not touch {read.box}")
            num_bytes = cell.num_elements * item_bytes
            chunk = chunks.setdefault(digests[number], _Chunk(digests[number], num_bytes))
            if chunk.num_bytes != num_bytes:
                raise CorruptionError(
                    f"{read.key}: cell {number} has {num_bytes} bytes, its chunk {short(chunk.digest)} has "
                    f"{chunk.num_bytes} elsewhere ({chunk.key}): restore an older commit"
                )
            part = _Part(read, cell.sizes, common.relative_to(cell), common.relative_to(read.box))
            chunk.parts.append(part)
    return order_by_place(chunks.values(), handle.locate(list(chunks)))


def _verifier(handle: RepositoryHandle) -> Callable[[_Chunk], None]:
    reader, space = ChunkReader(handle.store, handle.relocate), _Space()

    def verify(chunk: _Chunk) -> None:
        try:
            if chunk.is_whole:
                chunk.extents = reader.verify(chunk.digest, chunk.places, chunk.num_bytes)
            else:
                chunk.extents = _verify_leaves(reader, chunk, space.of(chunk.num_bytes))
        except CkptError as error:
            raise named(error, chunk.key) from error

    return verify


def _verify_leaves(reader: ChunkReader, chunk: _Chunk, space: Array) -> list[VerifiedExtent]:
    """Extents whose wanted leaves are intact."""

    def check(extent: VerifiedExtent) -> None:
        reader.read_leaves([extent], chunk.leaves(extent.info.leaf_bytes), space.data)

    return reader.intact(chunk.digest, chunk.places, chunk.num_bytes, check)


def _filler(handle: RepositoryHandle) -> Callable[[_Chunk], None]:
    reader, space = ChunkReader(handle.store, handle.relocate), _Space()

    def fill(chunk: _Chunk) -> None:
        try:
            try:
                _fill(reader, chunk, space)
            except NotFoundError:  # its pack was collected since it was verified: there may be a copy
                chunk.places = handle.relocate(chunk.digest, chunk.places)
                chunk.extents = reader.verify(chunk.digest, chunk.places, chunk.num_bytes)
                _fill(reader, chunk, space)
        except CkptError as error:
            raise named(error, chunk.key) from error

    return fill


def _fill(reader: ChunkReader, chunk: _Chunk, space: _Space) -> None:
    if chunk.is_whole and len(chunk.parts) == 1 and chunk.parts[0].is_whole and _fill_directly(reader, chunk):
        return
    data = space.of(chunk.num_bytes)
    if chunk.is_whole:
        reader.refill(chunk.extents, data.data)
    else:
        reader.read_leaves(chunk.extents, chunk.leaves(chunk.extents[0].info.leaf_bytes), data.data)
    for part in chunk.parts:
        item_bytes = part.read.stored.spec.item_bytes
        cell = data.view(raw_dtype(item_bytes)).reshape(part.cell)
        place = part.read.target.open(part.place)
        np.copyto(as_raw(place, item_bytes), cell[part.part.slices])
        part.read.target.done(part.place, place)


def _fill_directly(reader: ChunkReader, chunk: _Chunk) -> bool:
    """Fill a contiguous target without a copy in between; False if it is none."""
    part = chunk.parts[0]
    place = part.read.target.open(part.place)
    raw = as_raw(place, part.read.stored.spec.item_bytes)
    if not raw.flags.c_contiguous:
        return False
    reader.refill(chunk.extents, flat_bytes(raw))
    part.read.target.done(part.place, place)
    return True


class _Space:
    """Scratch memory of one thread."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def of(self, num_bytes: int) -> Array:
        """So many bytes; what was in them before is gone."""
        if len(self._bytes) < num_bytes:
            self._bytes = np.empty(num_bytes, np.uint8)
        return self._bytes[:num_bytes]


def _fill_inline(read: BoxRead, data: bytes) -> None:
    spec = read.stored.spec
    whole = np.frombuffer(data, raw_dtype(spec.item_bytes)).reshape(spec.shape)
    place_box = Box((0,) * len(read.box.sizes), read.box.sizes)
    place = read.target.open(place_box)
    np.copyto(as_raw(place, spec.item_bytes), whole[read.box.slices])
    read.target.done(place_box, place)
