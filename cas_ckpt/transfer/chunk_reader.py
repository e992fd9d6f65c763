"""Reads stored chunks: verifies them, whole or by leaves, and fills memory with their bytes.

Invariant: no byte leaves this file that was not hashed since it was read, except from `refill`,
which copies what the same restore has just verified and which is still in memory. What was staged on the local disk
(sources.py) and came back damaged is read from the store again.
Knows nothing of tensors or of SQL.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cas_ckpt import native
from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import CkptError, CorruptionError, NotFoundError
from cas_ckpt.objects import codec
from cas_ckpt.objects.digest import DIGEST_BYTES, Digest, ObjectKind, short
from cas_ckpt.objects.pack import ExtentInfo, Location, decode_entry_header
from cas_ckpt.transfer.sources import STAGED, Source, reads_into_many

STEP_BYTES = 2 * 1024 * 1024
"""Bytes read and hashed at a time: few enough to be in the processor's cache still, and enough that the interpreter's
lock is seldom wanted (docs/decisions/005)."""

Relocate: TypeAlias = Callable[[Digest, Collection[str]], Sequence[Location]]
"""Where a chunk is stored now, given the packs it was looked for in: a collection may have copied it meanwhile."""


@dataclass(frozen=True, slots=True)
class VerifiedExtent:
    """An extent whose header was read and proven by the chunk's id; `digests`: of all leaves of the chunk, joined."""

    pack: str
    info: ExtentInfo
    digests: bytes


def drop(start: int, step: memoryview) -> None:
    """What is done with a step that was to be verified, and no more."""


class ChunkReader:
    """Reads chunks from a store, or from what has its bytes, with scratch memory of its own; one per thread.

    Args:
        relocate: Asked, once a chunk, when a pack is not there any more.
    """

    def __init__(self, store: Source, relocate: Relocate | None = None) -> None:
        self._store = store
        self._relocate = relocate
        self._read_many = reads_into_many(store)
        self._header = memoryview(b"")
        self._scratch = memoryview(b"")

    # --- which extents hold a chunk --------------------------------------------------------

    def open_extent(self, digest: Digest, place: Location) -> VerifiedExtent:
        """The extent at `place`, its header read and its leaf digests proven.

        Raises:
            CorruptionError: damaged, or of another chunk.
            NotFoundError: the pack is not there.
        """
        return self._opened(digest, place, self._store.get_range(place.pack, place.offset, place.header_bytes))

    def _opened(self, digest: Digest, place: Location, header: Buffer) -> VerifiedExtent:
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

    def stream(
        self,
        digest: Digest,
        place: Location,
        num_bytes: int,
        *,
        into: memoryview | None = None,
        take: Callable[[int, memoryview], object] = drop,
    ) -> VerifiedExtent:
        """Read a raw extent of a chunk of `num_bytes` from front to end, and verify it step by step.

        The header comes by the request that brings the first step.

        Args:
            place: One of which `is_plain` holds.
            into: As long as the extent: the steps are read right there, and verified there. None: into scratch memory.
            take: Called with each step once it is verified, and where in the extent it begins.
        Raises:
            CorruptionError, NotFoundError: `into`, and what `take` got, are undefined.
        """
        step = max(STEP_BYTES // place.leaf_bytes, 1) * place.leaf_bytes
        space = self._steps(min(step, place.stored_bytes)) if into is None else into
        if len(self._header) < place.header_bytes:
            self._header = memoryview(bytearray(place.header_bytes))
        header = self._header[: place.header_bytes]
        part = space[: min(step, place.stored_bytes)]
        self._read_many(place.pack, place.offset, [header, part])
        extent = self._opened(digest, place, header)
        _check_expected(extent, place, num_bytes)
        if not _is_as_told(extent.info, place):
            raise CorruptionError(
                f"{place.pack} at {place.offset}: an extent of other lengths than wanted: run repo.rebuild_index()"
            )
        payload, start = place.offset + place.header_bytes, 0
        while True:
            _check(extent, part, place.first_leaf + start // place.leaf_bytes)
            take(start, part)
            start += len(part)
            if start >= place.stored_bytes:
                return extent
            size = min(step, place.stored_bytes - start)
            part = space[:size] if into is None else space[start : start + size]
            self._store.read_into(place.pack, payload + start, part)

    def _steps(self, num_bytes: int) -> memoryview:
        if len(self._scratch) < num_bytes:
            self._scratch = memoryview(bytearray(num_bytes))
        return self._scratch[:num_bytes]

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

    def verify(self, digest: Digest, places: Sequence[Location], num_bytes: int) -> list[VerifiedExtent]:
        """Read and hash the whole chunk; the extents that hold it, all proven.

        Tries every stored copy of every part before it gives up. Nothing longer than `num_bytes` is ever allocated.

        Raises:
            CorruptionError: no copy is intact. NotFoundError: no copy is there.
        """
        return self.intact(digest, places, num_bytes, self._verify_extent)

    def _verify_extent(self, extent: VerifiedExtent) -> None:
        info = extent.info
        if info.encoding != codec.RAW:
            self.decoded(extent)
            return
        leaf = info.leaf_bytes
        step = max(STEP_BYTES // leaf, 1) * leaf
        scratch = self._steps(step)
        payload_offset = info.offset + info.header_bytes
        for start in range(0, info.stored_bytes, step):
            part = scratch[: min(step, info.stored_bytes - start)]
            self._store.read_into(extent.pack, payload_offset + start, part)
            _check(extent, part, info.first_leaf + start // leaf)

    # --- bytes of verified extents -----------------------------------------------------------

    def payload(self, extent: VerifiedExtent) -> bytes:
        """The extent as it is stored, read once and verified.

        Raises:
            CorruptionError: damaged.
        """
        info = extent.info
        payload = bytes(self._store.get_range(extent.pack, info.offset + info.header_bytes, info.stored_bytes))
        _decoded(extent, payload)
        return payload

    def plain(self, extent: VerifiedExtent) -> memoryview:
        """The plain bytes of the whole extent, verified where they are: for sources that have them in memory.

        Raises:
            CorruptionError: damaged.
        """
        info = extent.info
        payload = self._store.get_range(extent.pack, info.offset + info.header_bytes, info.stored_bytes)
        if info.encoding != codec.RAW:
            return _decoded(extent, payload)
        plain = memoryview(payload)
        _check(extent, plain, info.first_leaf)
        return plain

    def decoded(self, extent: VerifiedExtent) -> memoryview:
        """The plain bytes of the whole extent, read and verified."""
        info = extent.info
        if info.encoding != codec.RAW:
            offset = info.offset + info.header_bytes
            return _decoded(extent, self._store.get_range(extent.pack, offset, info.stored_bytes))
        plain = memoryview(bytearray(info.plain_bytes))
        self._read_raw(extent, plain)
        return plain

    def _read_raw(self, extent: VerifiedExtent, target: memoryview) -> None:
        """Fill `target` with a whole raw extent, verified there."""
        info = extent.info
        self._store.read_into(extent.pack, info.offset + info.header_bytes, target)
        _check(extent, target, info.first_leaf)

    def read(self, extents: Sequence[VerifiedExtent], target: memoryview) -> None:
        """Fill `target` with the chunk's plain bytes, reading and hashing them.

        Raises:
            CorruptionError: damaged; `target` is then undefined.
        """
        for extent in extents:
            info = extent.info
            start = info.first_leaf * info.leaf_bytes
            part = target[start : start + info.plain_bytes]
            if info.encoding == codec.RAW:
                self._read_raw(extent, part)
            else:
                part[:] = self.decoded(extent)

    def refill(
        self, extents: Sequence[VerifiedExtent], target: memoryview, start: int = 0, *, cached_only: bool = False
    ) -> bool:
        """Fill `target` with the plain bytes from `start` on of a chunk that `verify` has just accepted.

        Bytes that are still in memory are the bytes that were verified; whatever is not any
        more is read and hashed again, elsewhere if the pack is gone.

        Args:
            cached_only: Answer False, and leave `target` undefined, instead of reading and hashing (or decoding) again.
        Raises:
            CorruptionError: the medium gave other bytes than a moment ago.
        """
        stop = start + len(target)
        relocate = self._relocate
        while True:
            try:
                for extent in extents:
                    info = extent.info
                    begin, num_bytes = info.first_leaf * info.leaf_bytes, info.plain_bytes
                    first, last = max(start, begin), min(stop, begin + num_bytes)
                    if first >= last:
                        continue
                    part = target[first - start : last - start]
                    offset = info.offset + info.header_bytes + first - begin
                    raw = info.encoding == codec.RAW
                    if raw and self._store.read_into(extent.pack, offset, part, cached_only=True):
                        continue
                    if cached_only:
                        return False
                    if raw and len(part) == num_bytes:
                        self._read_raw(extent, part)
                    else:
                        part[:] = self.decoded(extent)[first - begin : last - begin]
                return True
            except (CorruptionError, NotFoundError) as error:
                is_gone = isinstance(error, NotFoundError) or (bool(extents) and extents[0].pack == STAGED)
                if relocate is None or not extents or not is_gone:
                    raise
                info = extents[0].info
                places, relocate = relocate(info.digest, {extent.pack for extent in extents}), None
                extents = self.verify(info.digest, places, info.num_bytes)

    def read_leaves(self, extents: Sequence[VerifiedExtent], leaves: Sequence[int], target: memoryview) -> None:
        """Fill the given leaves' places in `target` (as long as the chunk); others stay as they are.

        Args:
            leaves: Their numbers, ascending.
        Raises:
            CorruptionError: a leaf is damaged.
        """
        for extent in extents:
            info = extent.info
            begin, leaf_bytes = info.first_leaf * info.leaf_bytes, info.leaf_bytes
            own = [leaf for leaf in leaves if info.first_leaf <= leaf < info.first_leaf + info.num_leaves]
            if own and info.encoding != codec.RAW:
                target[begin : begin + info.plain_bytes] = self.decoded(extent)
                continue
            for first, stop in runs(own):
                start = first * leaf_bytes
                part = target[start : min(stop * leaf_bytes, info.num_bytes)]
                self._store.read_into(extent.pack, info.offset + info.header_bytes + start - begin, part)
                _check(extent, part, first)


def is_plain(place: Location, num_bytes: int) -> bool:
    """Whether the extent at `place`, of a chunk of `num_bytes`, is raw and as long as its leaves, as far as is told."""
    first, stop = place.first_leaf * place.leaf_bytes, (place.first_leaf + place.num_leaves) * place.leaf_bytes
    return place.encoding == codec.RAW and place.leaf_bytes > 0 and place.stored_bytes == min(stop, num_bytes) - first


def _is_as_told(info: ExtentInfo, place: Location) -> bool:
    return (info.encoding, info.leaf_bytes, info.header_bytes, info.stored_bytes) == (
        place.encoding, place.leaf_bytes, place.header_bytes, place.stored_bytes,
    )  # fmt: skip


def _check_expected(extent: VerifiedExtent, place: Location, num_bytes: int) -> None:
    """Raise CorruptionError unless the extent is of a chunk of `num_bytes`, and has the leaves that `place` has."""
    info = extent.info
    if info.num_bytes != num_bytes:
        raise CorruptionError(f"chunk {short(info.digest)} is {info.num_bytes} bytes, not {num_bytes}")
    if (info.first_leaf, info.num_leaves) != (place.first_leaf, place.num_leaves):
        raise CorruptionError(
            f"chunk {short(info.digest)}, in {extent.pack} at offset {info.offset}: leaves from "
            f"{info.first_leaf} on, {info.num_leaves} of them, where {place.num_leaves} from "
            f"{place.first_leaf} on were wanted: run repo.rebuild_index()"
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
    """The plain bytes that the payload of an extent stands for, verified."""
    plain = memoryview(codec.decode_extent(extent.info.encoding, payload, num_bytes=extent.info.plain_bytes))
    _check(extent, plain, extent.info.first_leaf)
    return plain


def _check(extent: VerifiedExtent, plain: memoryview, first: int) -> None:
    """Raise CorruptionError unless `plain` is whole leaves of the chunk, from number `first` on."""
    info = extent.info
    wanted = memoryview(extent.digests)[first * DIGEST_BYTES :]
    whole = min(len(plain), len(wanted) // DIGEST_BYTES * info.leaf_bytes)
    intact = native.read_leaves(plain, 0, 0, whole, info.leaf_bytes, wanted, ())
    if whole < len(plain) or intact * info.leaf_bytes < len(plain):
        raise CorruptionError(
            f"chunk {short(info.digest)}, leaf {first + intact}, in {extent.pack} at offset {info.offset}: "
            "the stored bytes do not have the hash that they were stored under: restore it from a copy"
        )
