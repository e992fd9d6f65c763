"""Reads stored chunks: verifies them, whole or by leaves, and fills memory with their bytes.

Invariant: no byte leaves this file that was not hashed since it was read, unless the same restore has just verified
it and it is still in memory. What was staged on the local disk (sources.py) and came back damaged is read from the
store again.
Knows nothing of tensors or of SQL.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TypeAlias

import numpy as np

from cas_ckpt import native
from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import CkptError, CorruptionError, NotFoundError
from cas_ckpt.native import Part
from cas_ckpt.objects import codec
from cas_ckpt.objects.digest import DIGEST_BYTES, Digest, ObjectKind, short
from cas_ckpt.objects.pack import ExtentInfo, Location, decode_entry_header
from cas_ckpt.transfer.sources import Source, leaf_reader

Relocate: TypeAlias = Callable[[Digest, Collection[str]], Sequence[Location]]
"""Where a chunk is stored now, given the packs it was looked for in: a collection may have copied it meanwhile."""

Leaves: TypeAlias = Callable[[ExtentInfo], Sequence[tuple[int, int]]]
"""Which leaves of an extent are wanted: (first, stop) runs of their numbers in the chunk, ascending."""


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
