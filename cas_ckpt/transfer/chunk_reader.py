"""Reads stored chunks: verifies them, fills memory with them, or reads some leaves.

Invariant: no byte leaves this file that was not hashed since it was read, except from
`refill`, which copies what the same restore has just verified and which is still in memory.
Knows nothing of tensors or of SQL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from cas_ckpt.errors import CkptError, CorruptionError, NotFoundError
from cas_ckpt.objects import codec
from cas_ckpt.objects.digest import Digest, ObjectKind, leaf_digest, leaf_digests, short
from cas_ckpt.objects.pack import ExtentInfo, Location, decode_entry_header
from cas_ckpt.objects.spec import Box, Grid, raw_dtype
from cas_ckpt.storage.store import Store
from cas_ckpt.transfer.hashing import Array

STEP_BYTES = 512 * 1024
"""Bytes read and hashed at a time: they stay in the second-level cache."""


@dataclass(frozen=True, slots=True)
class VerifiedExtent:
    """An extent whose header was read and proven by the chunk's id."""

    pack: str
    info: ExtentInfo
    digests: tuple[Digest, ...]

    @property
    def payload_offset(self) -> int:
        """Where the payload begins in the pack."""
        return self.info.offset + self.info.header_bytes

    @property
    def start(self) -> int:
        """Where the extent begins in the chunk's plain bytes."""
        return self.info.first_leaf * self.info.leaf_bytes

    @property
    def own_digests(self) -> tuple[Digest, ...]:
        """Digests of the leaves in this extent."""
        return self.digests[self.info.first_leaf : self.info.first_leaf + self.info.num_leaves]


Relocate: TypeAlias = Callable[[Digest, Collection[str]], Sequence[Location]]
"""Where a chunk is stored now, given the packs it was looked for in: a collection may have copied it meanwhile."""


class ChunkReader:
    """Reads chunks from a store, with scratch memory of its own; one per thread.

    Args:
        relocate: Asked, once a chunk, when a pack is not there any more.
    """

    def __init__(self, store: Store, relocate: Relocate | None = None) -> None:
        self._store = store
        self._relocate = relocate
        self._scratch = memoryview(bytearray(STEP_BYTES))

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
        return VerifiedExtent(place.pack, info, tuple(digests))

    def open(self, digest: Digest, places: Sequence[Location], num_bytes: int) -> list[VerifiedExtent]:
        """As `intact`, the headers alone looked at."""
        return self.intact(digest, places, num_bytes, lambda extent: None)

    def intact(
        self, digest: Digest, places: Sequence[Location], num_bytes: int, check: Callable[[VerifiedExtent], None]
    ) -> list[VerifiedExtent]:
        """Extents that passed `check` and together hold every leaf of the chunk of `num_bytes`.

        Whole copies come first, then the longest parts; what is damaged or gone is passed over
        as long as others hold the same leaves.

        Raises:
            CorruptionError, NotFoundError: what was wrong first; no intact extents cover the chunk.
        """
        try:
            return self._intact(digest, places, num_bytes, check)
        except NotFoundError:
            if self._relocate is None:
                raise
            return self._intact(digest, self._relocate(digest, {place.pack for place in places}), num_bytes, check)

    def _intact(
        self, digest: Digest, places: Sequence[Location], num_bytes: int, check: Callable[[VerifiedExtent], None]
    ) -> list[VerifiedExtent]:
        failure: CkptError | None = None
        found: list[VerifiedExtent] = []
        reached = 0
        for place in sorted(places, key=_whole_first):
            if place.first_leaf > reached or place.first_leaf + place.num_leaves <= reached:
                continue
            try:
                extent = self.open_extent(digest, place)
                _check_told(extent, place, num_bytes)
                check(extent)
            except (CorruptionError, NotFoundError) as error:
                failure = failure or error
                continue
            found.append(extent)
            reached = extent.info.first_leaf + extent.info.num_leaves
            if reached >= extent.info.chunk_leaves:
                return found
        raise failure or _incomplete(digest, places)

    def verify(self, digest: Digest, places: Sequence[Location], num_bytes: int) -> list[VerifiedExtent]:
        """Read and hash the whole chunk; the extents that hold it, all proven.

        Tries every stored copy of every part before it gives up. Nothing longer than `num_bytes` is ever allocated.

        Raises:
            CorruptionError: no copy is intact. NotFoundError: no copy is there.
        """
        return self.intact(digest, places, num_bytes, self._verify_extent)

    def _verify_extent(self, extent: VerifiedExtent) -> None:
        if extent.info.encoding != codec.RAW:
            self._decoded(extent)
            return
        leaf = extent.info.leaf_bytes
        step = max(STEP_BYTES // leaf, 1) * leaf
        scratch = self._scratch if step <= len(self._scratch) else memoryview(bytearray(step))
        digests = extent.own_digests
        for start in range(0, extent.info.stored_bytes, step):
            part = scratch[: min(step, extent.info.stored_bytes - start)]
            self._store.read_into(extent.pack, extent.payload_offset + start, part)
            _check_leaves(extent, leaf_digests(part, leaf), digests, start // leaf)

    def _decoded(self, extent: VerifiedExtent) -> memoryview:
        """Plain bytes of the whole extent, decoded and verified."""
        payload = self._store.get_range(extent.pack, extent.payload_offset, extent.info.stored_bytes)
        plain = memoryview(codec.decode_extent(extent.info.encoding, payload, num_bytes=extent.info.plain_bytes))
        _check_leaves(extent, leaf_digests(plain, extent.info.leaf_bytes), extent.own_digests, 0)
        return plain

    def read(self, extents: Sequence[VerifiedExtent], target: memoryview) -> None:
        """Fill `target` with the chunk's plain bytes, reading and hashing them.

        Raises:
            CorruptionError: damaged; `target` is then undefined.
        """
        for extent in extents:
            part = target[extent.start : extent.start + extent.info.plain_bytes]
            if extent.info.encoding != codec.RAW:
                part[:] = self._decoded(extent)
                continue
            self._store.read_into(extent.pack, extent.payload_offset, part)
            _check_leaves(extent, leaf_digests(part, extent.info.leaf_bytes), extent.own_digests, 0)

    def refill(self, extents: Sequence[VerifiedExtent], target: memoryview) -> None:
        """Fill `target` with a chunk that `verify` has just accepted.

        Bytes that are still in memory are the bytes that were verified; whatever is not any
        more is read and hashed again, elsewhere if the pack is gone.

        Raises:
            CorruptionError: the medium gave other bytes than a moment ago.
        """
        try:
            self._refill(extents, target)
        except NotFoundError as error:
            self._refill(self._found_again(extents, error), target)

    def _found_again(self, extents: Sequence[VerifiedExtent], error: NotFoundError) -> list[VerifiedExtent]:
        """The chunk of `extents` where it stands now, read and hashed; `error` if nobody knows."""
        if self._relocate is None or not extents:
            raise error
        info = extents[0].info
        places = self._relocate(info.digest, {extent.pack for extent in extents})
        return self.verify(info.digest, places, info.num_bytes)

    def _refill(self, extents: Sequence[VerifiedExtent], target: memoryview) -> None:
        for extent in extents:
            part = target[extent.start : extent.start + extent.info.plain_bytes]
            raw = extent.info.encoding == codec.RAW
            if not raw or not self._store.read_into(extent.pack, extent.payload_offset, part, cached_only=True):
                self.read([extent], target)

    def payload(self, extent: VerifiedExtent) -> bytes:
        """The extent as it is stored, read once and verified.

        Raises:
            CorruptionError: damaged.
        """
        info = extent.info
        payload = bytes(self._store.get_range(extent.pack, extent.payload_offset, info.stored_bytes))
        plain = memoryview(payload)
        if info.encoding != codec.RAW:
            plain = memoryview(codec.decode_extent(info.encoding, payload, num_bytes=info.plain_bytes))
        _check_leaves(extent, leaf_digests(plain, info.leaf_bytes), extent.own_digests, 0)
        return payload

    def refill_range(self, extents: Sequence[VerifiedExtent], start: int, target: memoryview) -> None:
        """Fill `target` with the plain bytes from `start` on of a chunk that was verified; else as `refill`."""
        try:
            self._refill_range(extents, start, target)
        except NotFoundError as error:
            self._refill_range(self._found_again(extents, error), start, target)

    def _refill_range(self, extents: Sequence[VerifiedExtent], start: int, target: memoryview) -> None:
        stop = start + len(target)
        for extent in extents:
            first, last = max(start, extent.start), min(stop, extent.start + extent.info.plain_bytes)
            if first >= last:
                continue
            part = target[first - start : last - start]
            offset = extent.payload_offset + first - extent.start
            raw = extent.info.encoding == codec.RAW
            if not raw or not self._store.read_into(extent.pack, offset, part, cached_only=True):
                part[:] = self._verified(extent)[first - extent.start : last - extent.start]

    def _verified(self, extent: VerifiedExtent) -> memoryview:
        """Plain bytes of the whole extent, read and hashed."""
        if extent.info.encoding != codec.RAW:
            return self._decoded(extent)
        plain = memoryview(bytearray(extent.info.plain_bytes))
        self._store.read_into(extent.pack, extent.payload_offset, plain)
        _check_leaves(extent, leaf_digests(plain, extent.info.leaf_bytes), extent.own_digests, 0)
        return plain

    def read_leaves(self, extents: Sequence[VerifiedExtent], leaves: Sequence[int], target: memoryview) -> None:
        """Fill the given leaves' places in `target` (as long as the chunk); others stay as they are.

        Raises:
            CorruptionError: a leaf is damaged.
        """
        for extent in extents:
            info = extent.info
            own = [leaf for leaf in leaves if info.first_leaf <= leaf < info.first_leaf + info.num_leaves]
            if not own:
                continue
            if info.encoding != codec.RAW:
                target[extent.start : extent.start + info.plain_bytes] = self._decoded(extent)
                continue
            for first, count in _runs(own):
                self._read_run(extent, first, count, target)

    def _read_run(self, extent: VerifiedExtent, first: int, count: int, target: memoryview) -> None:
        leaf = extent.info.leaf_bytes
        part = target[first * leaf : min((first + count) * leaf, extent.info.num_bytes)]
        self._store.read_into(extent.pack, extent.payload_offset + first * leaf - extent.start, part)
        for at in range(count):
            if leaf_digest(part[at * leaf : (at + 1) * leaf]) != extent.digests[first + at]:
                raise _damaged(extent, first + at)


def _runs(leaves: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending leaf numbers as (first, count) runs."""
    runs: list[tuple[int, int]] = []
    for leaf in leaves:
        if runs and sum(runs[-1]) == leaf:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((leaf, 1))
    return runs


def _whole_first(place: Location) -> tuple[int, int, str, int]:
    """Each part behind what it continues, the longest first: a whole copy before its parts."""
    return place.first_leaf, -place.num_leaves, place.pack, place.offset


def _check_told(extent: VerifiedExtent, place: Location, num_bytes: int) -> None:
    """The extent is what the index, or another rank, said of it."""
    info = extent.info
    if info.num_bytes != num_bytes:
        raise CorruptionError(f"chunk {short(info.digest)} is {info.num_bytes} bytes, not {num_bytes}")
    if (info.first_leaf, info.num_leaves) != (place.first_leaf, place.num_leaves):
        raise CorruptionError(
            f"chunk {short(info.digest)}, in {extent.pack} at offset {info.offset}: leaves from {info.first_leaf} on, "
            f"{info.num_leaves} of them, where {place.num_leaves} from {place.first_leaf} on were wanted: "
            "run repo.rebuild_index()"
        )


def _incomplete(digest: Digest, places: Sequence[Location]) -> CkptError:
    if not places:
        return NotFoundError(f"chunk {short(digest)} is in no pack: repo.fsck() says which commits need it")
    return CorruptionError(f"chunk {short(digest)}: its stored parts do not cover it: restore it from a copy")


def _check_leaves(extent: VerifiedExtent, found: Sequence[Digest], wanted: Sequence[Digest], first: int) -> None:
    if list(found) == list(wanted[first : first + len(found)]):
        return
    for at, digest in enumerate(found):
        if first + at >= len(wanted) or digest != wanted[first + at]:
            raise _damaged(extent, extent.info.first_leaf + first + at)


def _damaged(extent: VerifiedExtent, leaf: int) -> CorruptionError:
    return CorruptionError(
        f"chunk {short(extent.info.digest)}, leaf {leaf}, in {extent.pack} at offset {extent.info.offset}: "
        "the stored bytes do not have the hash that they were stored under: restore it from a copy"
    )


# DOC of cas_ckpt.transfer.chunk_reader:
# Reads one region of one tensor: only the leaves that it touches are read and verified.


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
    """The elements of `region` as a new C-contiguous array of raw items.

    Args:
        chunk_of: Chunk id by cell number; called for the cells that `region` touches.
        relocate: Asked when a pack was collected meanwhile.
    Raises:
        CorruptionError: a leaf is damaged in every copy. NotFoundError: a chunk is nowhere.
    """
    out = np.empty(region.sizes, raw_dtype(item_bytes))
    reader = ChunkReader(store, relocate)
    for cell in grid.cells_touching(region):
        box = grid.box(cell)
        common = box.intersect(region) if box.sizes else box
        if common is None:
            continue
        digest = chunk_of(cell)
        part = common.relative_to(box)
        data = _cell_part(reader, digest, located.get(digest, ()), box, part, item_bytes)
        out[common.relative_to(region).slices] = data[part.slices]
    return out


def _cell_part(
    reader: ChunkReader, digest: Digest, places: Sequence[Location], box: Box, part: Box, item_bytes: int
) -> Array:
    """An array of the whole cell in which the leaves that `part` touches are filled in."""
    num_bytes = box.num_elements * item_bytes
    space = np.empty(num_bytes, np.uint8)

    def check(extent: VerifiedExtent) -> None:
        leaves = leaves_touched(box.sizes, part, item_bytes=item_bytes, leaf_bytes=extent.info.leaf_bytes)
        reader.read_leaves([extent], leaves, space.data)

    reader.intact(digest, places, num_bytes, check)
    return space.view(raw_dtype(item_bytes)).reshape(box.sizes)
