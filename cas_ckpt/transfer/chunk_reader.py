"""Reads stored chunks: verifies them, whole or by leaves, and fills memory with their bytes.

Invariant: no byte leaves this file that was not hashed since it was read, unless the same restore has just verified
it and it is still in memory. What was staged on the local disk (sources.py) and came back damaged is read from the
store again.

A target gets a part of a chunk: all of it, a run of its bytes, or a box. `ChunkFiller` brings one chunk to all parts
that want it, leaf by leaf. Starts no threads, and knows nothing of tensors or of SQL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from types import EllipsisType
from typing import Protocol, TypeAlias

import numpy as np

from cas_ckpt import native
from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import CkptError, CorruptionError, NotFoundError, reworded
from cas_ckpt.memory import new_buffer
from cas_ckpt.native import Part, runs_of_boxes
from cas_ckpt.objects import codec
from cas_ckpt.objects.digest import DIGEST_BYTES, Digest, ObjectKind, short
from cas_ckpt.objects.pack import ExtentInfo, Location, decode_entry_header
from cas_ckpt.objects.spec import Box, as_raw, raw_dtype
from cas_ckpt.objects.state import ArrayTarget
from cas_ckpt.progress import Progress
from cas_ckpt.storage.store import ReadsLeaves
from cas_ckpt.transfer.hashing import Array

STAGED = "staged"
"""The name of the temporary file where the name of a pack is wanted; no pack has it."""

_MAPPED_BYTES = 1024 * 1024

Relocate: TypeAlias = Callable[[Digest, Collection[str]], Sequence[Location]]
"""Where a chunk is stored now, given the packs it was looked for in: a collection may have copied it meanwhile."""

Leaves: TypeAlias = Callable[[ExtentInfo], Sequence[tuple[int, int]]]
"""Which leaves of an extent are wanted: (first, stop) runs of their numbers in the chunk, ascending."""


def new_memory(num_bytes: int) -> Array:
    """So many bytes, undefined; long ones are mapped, so that the system gets them back as soon as they are dropped.

    What a thread had from the allocator stays with the process for a while after the thread: measured, three times the
    buffers.
    """
    if num_bytes < _MAPPED_BYTES:
        return np.empty(num_bytes, np.uint8)
    return np.frombuffer(new_buffer(num_bytes), np.uint8)


class ReadLeavesOf(Protocol):
    """Signature of the result of `leaf_reader`; as `native.read_leaves` of what is stored under `key`."""

    def __call__(
        self, key: str, offset: int, first: int, size: int, leaf_bytes: int, digests: Buffer | None,
        parts: Sequence[Part], cached_only: bool = False,
    ) -> int: ...  # fmt: skip


class Source(Protocol):
    """A source of chunks: a store, or a substitute. See `Store` for both methods."""

    def get_range(self, key: str, offset: int, length: int) -> Buffer: ...

    def read_into(self, key: str, offset: int, target: memoryview, *, cached_only: bool = False) -> bool: ...


def leaf_reader(source: Source) -> ReadLeavesOf:
    """How leaves of `source` are read, verified and put into place: in one walk where it can, else by way of memory."""
    if isinstance(source, ReadsLeaves):
        return source.read_leaves

    def read_leaves(
        key: str, offset: int, first: int, size: int, leaf_bytes: int, digests: Buffer | None, parts: Sequence[Part],
        cached_only: bool = False,
    ) -> int:  # fmt: skip
        space = new_memory(size).data
        if not source.read_into(key, offset, space, cached_only=cached_only):
            return 0
        return native.read_leaves(space, 0, first, size, leaf_bytes, digests, parts)

    return read_leaves


@dataclass(frozen=True, slots=True)
class VerifiedExtent:
    """An extent whose header was read and proven by the chunk's id; `digests`: of all leaves of the chunk, joined."""

    pack: str
    info: ExtentInfo
    digests: bytes


def all_leaves(extent: ExtentInfo | Location) -> Sequence[tuple[int, int]]:
    """Those of the extent, as (first, stop) runs."""
    return [(extent.first_leaf, extent.first_leaf + extent.num_leaves)]


class ChunkReader:
    """Reads chunks from a store, or from what has its bytes; many threads.

    Args:
        relocate: Asked, once a chunk, when a pack is not there any more.
    """

    def __init__(self, store: Source, relocate: Relocate | None = None) -> None:
        self._store = store
        self._relocate = relocate
        self._read_leaves = leaf_reader(store)

    # --- which extents hold a chunk --------------------------------------------------------

    def open_extent(self, digest: Digest, place: Location) -> VerifiedExtent:
        """The extent at `place`, its header read and its leaf digests proven.

        Raises:
            CorruptionError: damaged, or of another chunk.
            NotFoundError: the pack is not there.
        """
        header = self._store.get_range(place.pack, place.offset, place.header_bytes)
        info, digests = decode_entry_header(header, offset=place.offset)
        if info.digest != digest or info.kind != ObjectKind.CHUNK:
            raise CorruptionError(
                f"{place.pack} at {place.offset}: wanted {short(digest)}, found {short(info.digest)}: "
                "run repo.rebuild_index()"
            )
        if info.encoding == codec.RAW and info.stored_bytes != info.plain_bytes:
            raise CorruptionError(
                f"{place.pack} at {place.offset}: {info.stored_bytes} raw bytes of chunk {short(digest)} where "
                f"{info.plain_bytes} should be: restore the pack from a copy"
            )
        return VerifiedExtent(place.pack, info, digests)

    def open_expected(self, digest: Digest, place: Location, num_bytes: int) -> VerifiedExtent:
        """The same, of a chunk of `num_bytes`, with the leaves that `place` has."""
        extent = self.open_extent(digest, place)
        _check_expected(extent, place, num_bytes)
        return extent

    def intact(
        self,
        digest: Digest,
        places: Sequence[Location],
        num_bytes: int,
        check: Callable[[VerifiedExtent], object] | None = None,
    ) -> list[VerifiedExtent]:
        """Extents that passed `check` and together hold every leaf of the chunk of `num_bytes`.

        Whole copies come first, then the longest parts; what is damaged or gone is passed over
        as long as others hold the same leaves.

        Args:
            check: Reads what is wanted of an extent; None: to have looked at the headers is enough.
        Raises:
            CorruptionError, NotFoundError: what was wrong first; no intact extents cover the chunk.
        """
        relocate = self._relocate
        while True:
            failure: CkptError | None = None
            found: list[VerifiedExtent] = []
            reached = 0
            for place in _in_turn(places):
                if not _continues(place, reached):
                    continue
                try:
                    extent = self.open_expected(digest, place, num_bytes)
                    if check is not None:
                        check(extent)
                except (CorruptionError, NotFoundError) as error:
                    failure = failure or error
                    continue
                found.append(extent)
                reached = extent.info.first_leaf + extent.info.num_leaves
                if reached >= extent.info.chunk_leaves:
                    return found
            if failure is None and places:
                failure = CorruptionError(
                    f"chunk {short(digest)}: its stored parts do not cover it: restore it from a copy"
                )
            failure = failure or NotFoundError(
                f"chunk {short(digest)} is in no pack: repo.fsck() says which commits need it"
            )
            if relocate is None:
                raise failure
            tried = {place.pack for place in places}
            try:
                places, relocate = relocate(digest, tried), None
            except CkptError as error:
                if isinstance(failure, NotFoundError):
                    raise
                raise CorruptionError(f"{failure}; and {error.args[0]}") from failure
            if isinstance(failure, CorruptionError) and tried.issuperset(place.pack for place in places):
                raise failure

    def verify(
        self, digest: Digest, places: Sequence[Location], num_bytes: int, leaves: Leaves = all_leaves
    ) -> list[VerifiedExtent]:
        """Read and hash the chunk, or some of its leaves; the extents that hold it, all proven.

        Tries every stored copy of every part before it gives up. Nothing longer than `num_bytes` is ever allocated.

        Raises:
            CorruptionError: no copy is intact. NotFoundError: no copy is there.
        """
        return self.intact(digest, places, num_bytes, lambda extent: self.place(extent, ((),), leaves))

    # --- bytes of verified extents -----------------------------------------------------------

    def payload(self, extent: VerifiedExtent) -> Buffer:
        """The extent as it is stored, read once and verified; a view of what the source has in memory.

        Raises:
            CorruptionError: damaged.
        """
        payload = self._payload(extent)
        _check(extent, _decoded(extent, payload), *all_leaves(extent.info)[0])
        return payload

    def plain(self, extent: VerifiedExtent, leaves: Leaves = all_leaves) -> list[tuple[int, memoryview]]:
        """Plain bytes of wanted leaves, verified where they are, and where in the chunk they begin.

        For sources that have them in memory.

        Raises:
            CorruptionError: damaged.
        """
        info, found = extent.info, []
        plain = None if info.encoding == codec.RAW else _decoded(extent, self._payload(extent))
        for first, stop in leaves(info):
            offset = (first - info.first_leaf) * info.leaf_bytes
            length = min(stop * info.leaf_bytes, info.num_bytes) - first * info.leaf_bytes
            part = self._payload(extent, offset, length) if plain is None else plain[offset : offset + length]
            _check(extent, part, first, stop)
            found.append((first * info.leaf_bytes, memoryview(part)))
        return found

    def _payload(self, extent: VerifiedExtent, offset: int = 0, length: int | None = None) -> Buffer:
        info = extent.info
        length = info.stored_bytes if length is None else length
        return self._store.get_range(extent.pack, info.offset + info.header_bytes + offset, length)

    def read(self, extents: Sequence[VerifiedExtent], target: memoryview) -> None:
        """Fill `target` with the chunk's plain bytes, reading and hashing them.

        Raises:
            CorruptionError: damaged; `target` is then undefined.
        """
        for extent in extents:
            self.place(extent, [[np.frombuffer(target, np.uint8)]])

    def place(
        self, extent: VerifiedExtent, batches: Iterable[Sequence[Part]], leaves: Leaves = all_leaves, *,
        is_verified: bool = False,
    ) -> None:  # fmt: skip
        """Read wanted leaves, verify each, and bring it to all parts of the chunk that want it.

        Args:
            batches: Parts that are filled together, one batch after the other; one without parts: verify only.
            is_verified: All leaves were verified a moment ago: what is still in memory since then is not hashed again.
                Batches after the first get what it got in the same way.
        Raises:
            CorruptionError: damaged. NotFoundError: the pack is not there any more.
        """
        info, wanted = extent.info, leaves(extent.info)
        if not wanted:
            return
        read: _Read = partial(self._read_leaves, extent.pack)
        origin = info.offset + info.header_bytes
        if info.encoding != codec.RAW:
            read, origin = partial(native.read_leaves, _decoded(extent, self._payload(extent))), 0
            batches, is_verified = chain([()], batches), False  # verified first: nothing damaged comes anywhere
        for parts in batches:
            for first, stop in wanted:
                at = first
                if is_verified:
                    at += _walk(extent, read, origin, first, stop, parts, is_verified=True)
                if at < stop:
                    at += _walk(extent, read, origin, at, stop, parts)
                if at < stop:
                    raise _damaged(extent, at)
            is_verified = True


_Read: TypeAlias = Callable[..., int]
"""`native.read_leaves` of bytes that are known."""


def _walk(
    extent: VerifiedExtent, read: _Read, origin: int, first: int, stop: int, parts: Sequence[Part], *,
    is_verified: bool = False,
) -> int:  # fmt: skip
    """How many of the leaves first .. stop are intact (or in memory still), and in place.

    Args:
        origin: Where the plain bytes of the extent begin, for `read`.
    """
    info = extent.info
    # A chunk of one leaf may be of tensors with items of any length, whatever leaves the first of them has.
    leaf_bytes = min(info.leaf_bytes, info.num_bytes)
    start, end = first * leaf_bytes, min(stop * leaf_bytes, info.num_bytes)
    digests = None if is_verified else memoryview(extent.digests)[first * DIGEST_BYTES : stop * DIGEST_BYTES]
    offset = origin + start - info.first_leaf * leaf_bytes
    return read(offset, start, end - start, leaf_bytes, digests, parts, is_verified)


def _check_expected(extent: VerifiedExtent, place: Location, num_bytes: int) -> None:
    """Raise CorruptionError unless the extent is of a chunk of `num_bytes`, with the leaves and the length of `place`.

    No id proves how long the payload is, and so much memory is taken for it.
    """
    info = extent.info
    if info.num_bytes != num_bytes:
        raise CorruptionError(f"chunk {short(info.digest)} is {info.num_bytes} bytes, not {num_bytes}")
    if (info.first_leaf, info.num_leaves) != (place.first_leaf, place.num_leaves):
        raise CorruptionError(
            f"chunk {short(info.digest)}, in {extent.pack} at offset {info.offset}: leaves from "
            f"{info.first_leaf} on, {info.num_leaves} of them, where {place.num_leaves} from "
            f"{place.first_leaf} on were wanted: run repo.rebuild_index()"
        )
    if (info.stored_bytes, info.encoding) != (place.stored_bytes, place.encoding):
        raise CorruptionError(
            f"chunk {short(info.digest)}, in {extent.pack} at offset {info.offset}: {info.stored_bytes} stored bytes, "
            f"where the directory of the pack has {place.stored_bytes}: restore the pack from a copy"
        )


def cover(places: Sequence[Location], num_bytes: int) -> list[Location]:
    """The places that `ChunkReader.intact` reads of a chunk of `num_bytes` if all are intact; empty: they lack some."""
    found: list[Location] = []
    reached = 0
    for place in _in_turn(places):
        if _continues(place, reached):
            found.append(place)
            reached = place.first_leaf + place.num_leaves
            if place.leaf_bytes and reached * place.leaf_bytes >= num_bytes:
                return found
    return []


def _in_turn(places: Sequence[Location]) -> Sequence[Location]:
    """Each part after what it continues, the longest first: a whole copy before its parts."""
    return sorted(places, key=_whole_first) if len(places) > 1 else places


def _continues(place: Location, reached: int) -> bool:
    """Whether the extent at `place` has the leaf `reached`."""
    return place.first_leaf <= reached < place.first_leaf + place.num_leaves


def _whole_first(place: Location) -> tuple[int, int, str, int]:
    return place.first_leaf, -place.num_leaves, place.pack, place.offset


def runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as (first, stop) runs."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs


def _decoded(extent: VerifiedExtent, payload: Buffer) -> memoryview:
    """The plain bytes that the payload of an extent stands for, not verified."""
    return memoryview(codec.decode_extent(extent.info.encoding, payload, num_bytes=extent.info.plain_bytes))


def _check(extent: VerifiedExtent, plain: Buffer, first: int, stop: int) -> None:
    """Raise CorruptionError unless `plain` is these leaves of the chunk."""
    at = first + num_intact(extent, plain, first, stop)
    if at < stop:
        raise _damaged(extent, at)


def num_intact(extent: VerifiedExtent, plain: Buffer, first: int, stop: int) -> int:
    """How many of the leaves first .. stop of the chunk are what `plain`, which should be these, begins with."""
    origin = (extent.info.first_leaf - first) * extent.info.leaf_bytes
    return _walk(extent, partial(native.read_leaves, plain), origin, first, stop, ())


def _damaged(extent: VerifiedExtent, leaf: int) -> CorruptionError:
    info = extent.info
    return CorruptionError(
        f"chunk {short(info.digest)}, leaf {leaf}, in {extent.pack} at offset {info.offset}: "
        "the stored bytes do not have the hash that they were stored under: restore it from a copy"
    )


# --- chunks that are wanted, and what fills the targets with them --------------------------------


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


def bytes_to_read(chunks: Sequence[StoredChunk]) -> int:
    """About as many plain bytes are read of these chunks."""
    return sum(chunk.wanted_bytes if chunk.by_leaves else chunk.num_bytes for chunk in chunks)


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

    def rearranged(self, index: tuple[slice | EllipsisType, ...], order: Sequence[int]) -> NewArray:
        return NewArray(self.array[index].transpose(tuple(order)))


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
