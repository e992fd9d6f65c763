"""Copies extents of chunks from the packs of one store into new packs of another, as they are stored.

    1. `plan_copies`: which extents become one new pack together; pure
    2. `copy_extents`: threads read runs of them and verify each; whose turn it is appends them to the new pack, so that
       many read while one writes, and what is in memory is one run for each thread

Invariant: nothing is appended that was not read, decoded and hashed on the way, and nothing is encoded anew; a pack is
under its key whole and durable, or not at all, and its name is new, whatever it was copied from. Knows nothing of
commits or of SQL.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from cas_ckpt import clock
from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import CorruptionError, NotFoundError
from cas_ckpt.memory import memory_budget
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.objects.nodes import MAX_CELL_BYTES
from cas_ckpt.objects.pack import FULL_ENTRIES, Location, PackKind, coalesced
from cas_ckpt.parallel.workers import run_all
from cas_ckpt.progress import Progress
from cas_ckpt.storage.store import Store
from cas_ckpt.transfer.chunk_reader import ChunkReader, Relocate, VerifiedExtent, cover
from cas_ckpt.transfer.pack_writer import EncodedChunk, PackWriter, WrittenPack
from cas_ckpt.transfer.sources import Span, SpanMemory

SPAN_BYTES = 8 * 1024 * 1024
"""Read by one request; a thread has so much in memory, or one extent if that is longer."""

GAP_BYTES = 256 * 1024
"""Bytes between two extents that are read and dropped rather than asked for around."""

OWN_PACK_SHARE = 4
"""Of a pack of which a quarter of a full pack is wanted, a new one is made; the rest shares packs."""

MAX_COPY_THREADS = 12

FIXED_BYTES = 20 * 1024 * 1024
"""Memory of copying besides: the database, what is known of the extents, and threads."""

DECODED_BYTES = 4 * 1024 * 1024

Wanted: TypeAlias = tuple[Digest, Location]
"""An extent of a chunk, and where it is stored."""


@dataclass(frozen=True, slots=True)
class CopyUnit:
    """Extents that become one new pack, in the order in which they are stored.

    Attributes:
        num_bytes: Their headers and payloads.
    """

    extents: tuple[Wanted, ...]
    num_bytes: int


def plan_copies(extents: Iterable[Wanted], *, pack_bytes: int) -> list[CopyUnit]:
    """The new packs in which these extents are to be.

    What a pack holds stays together: of one of which much is wanted (a quarter of a full pack, or more) a pack of its
    own is made, with the same extents in the same order, so that what was read by one request still is.

    Args:
        pack_bytes: Length of a full pack.
    """
    by_pack: dict[str, list[Wanted]] = {}
    for extent in extents:
        by_pack.setdefault(extent[1].pack, []).append(extent)
    units: list[CopyUnit] = []
    rest: list[Wanted] = []
    for _, own in sorted(by_pack.items()):
        own.sort(key=lambda extent: extent[1].offset)
        if sum(map(_stored_bytes, own)) * OWN_PACK_SHARE >= pack_bytes:
            units += _cut(own, pack_bytes)
        else:
            rest += own
    return units + list(_cut(rest, pack_bytes))


def _cut(extents: Sequence[Wanted], pack_bytes: int) -> Iterator[CopyUnit]:
    """Packs of `pack_bytes`; a rest of less than a quarter of that joins the last one."""
    part: list[Wanted] = []
    num_bytes, left = 0, sum(map(_stored_bytes, extents))
    for extent in extents:
        part.append(extent)
        num_bytes += _stored_bytes(extent)
        full = num_bytes >= pack_bytes and (left - num_bytes) * OWN_PACK_SHARE >= pack_bytes
        if full or len(part) >= FULL_ENTRIES:
            yield CopyUnit(tuple(part), num_bytes)
            left -= num_bytes
            part, num_bytes = [], 0
    if part:
        yield CopyUnit(tuple(part), num_bytes)


def _stored_bytes(extent: Wanted) -> int:
    return extent[1].header_bytes + extent[1].stored_bytes


class Throttle:
    """Holds threads back so that all of them together move no more than so many bytes a second; None: never."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at_s = clock.monotonic_s()

    def take(self, num_bytes: int) -> None:
        """Wait until `num_bytes` more may move."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            now_s = clock.monotonic_s()
            wait_s = max(0.0, self._free_at_s - now_s)
            self._free_at_s = max(self._free_at_s, now_s) + num_bytes / self._bytes_per_s
        if wait_s:
            clock.pause(wait_s)


@dataclass(frozen=True, slots=True)
class _Span:
    """Extents of one pack that are read together.

    Attributes:
        unit, turn: The number of the new pack, and of the span within it. last: It ends the pack.
    """

    unit: int
    turn: int
    last: bool
    pack: str
    extents: Sequence[Wanted]

    @property
    def start(self) -> int:
        return self.extents[0][1].offset

    @property
    def num_bytes(self) -> int:
        return max(place.end for _, place in self.extents) - self.start


def _spans(units: Sequence[CopyUnit]) -> Iterator[_Span]:
    for number, unit in enumerate(units):
        stored = ((place.pack, place, (digest, place)) for digest, place in unit.extents)
        groups = list(coalesced(stored, gap_bytes=GAP_BYTES, span_bytes=SPAN_BYTES))
        for turn, group in enumerate(groups):
            extents = [extent for _, _, extent in group]
            yield _Span(number, turn, turn + 1 == len(groups), group[0][0], extents)


def copy_extents(
    source: Store,
    target: Store,
    units: Sequence[CopyUnit],
    *,
    relocate: Relocate,
    num_threads: int,
    progress: Progress,
    throttle: Throttle,
    on_pack: Callable[[], object],
) -> list[WrittenPack]:
    """A new pack in `target` for each unit, durable.

    Args:
        relocate: Where a chunk is stored besides the packs that it was looked for in: for one that is damaged, or that
            a collection has moved.
        on_pack: Called, from any thread, whenever a pack has become durable.
    Raises:
        CorruptionError: an extent has no intact copy. NotFoundError: it is not there any more.
        StorageError: a store refused; then no pack that was still open is left.
    """
    packs = _OpenPacks(target, len(units), on_pack)

    def elsewhere(digest: Digest, tried: Collection[str]) -> Sequence[Location]:
        places = relocate(digest, tried)
        for place in places:
            _check_sizes(digest, place)
        return places

    def make_worker() -> Callable[[_Span], None]:
        memory = SpanMemory(source)
        reader = ChunkReader(memory)

        def work(span: _Span) -> None:
            try:
                for digest, place in span.extents:
                    _check_sizes(digest, place)
                throttle.take(span.num_bytes)
                with suppress(CorruptionError, NotFoundError):  # whose extent it is, its own reading says
                    memory.load([Span(span.pack, span.start, span.start + span.num_bytes)])
                found = (_intact_extent(reader, digest, place, elsewhere) for digest, place in span.extents)
                packs.append(span, list(chain.from_iterable(found)))
                progress.advance(sum(map(_stored_bytes, span.extents)))
            except BaseException:
                packs.give_up()
                raise

        return work

    left = memory_budget() - FIXED_BYTES - target.abilities.in_flight_bytes
    most = min(MAX_COPY_THREADS, left // thread_bytes(target))
    try:
        run_all(_spans(units), make_worker, num_threads=max(1, min(num_threads, most)))
    except BaseException:
        packs.abort()
        raise
    return packs.written


def thread_bytes(target: Store) -> int:
    """Memory of a thread that copies into `target`: a span, a decoded chunk, and a pack that is written."""
    return SPAN_BYTES + DECODED_BYTES + target.abilities.writer_bytes


def least_bytes(target: Store) -> int:
    """Least memory for copying into `target`."""
    return FIXED_BYTES + target.abilities.in_flight_bytes + thread_bytes(target)


class _OpenPacks:
    """The packs that are being written; spans come from many threads, and are appended in their order.

    Spans are handed out in order, so some thread always has the span whose turn it is, and none waits for ever.
    """

    def __init__(self, target: Store, number: int, on_pack: Callable[[], object]) -> None:
        self._target = target
        self._on_pack = on_pack
        self._writers: list[PackWriter | None] = [None] * number
        self._turns = [0] * number
        self._changed = threading.Condition()
        self._given_up = False
        self.written: list[WrittenPack] = []

    def append(self, span: _Span, chunks: Sequence[EncodedChunk]) -> None:
        """Append the chunks of `span` when it is its turn; the last span makes the pack durable."""
        with self._changed:
            self._changed.wait_for(lambda: self._given_up or self._turns[span.unit] == span.turn)
            if self._given_up:
                return
        writer = self._writers[span.unit]
        if writer is None:
            writer = self._writers[span.unit] = PackWriter(self._target.open_writer, PackKind.DATA)
        for chunk in chunks:
            writer.add_chunk(chunk)
        if span.last:
            pack = writer.finish()
            self._writers[span.unit] = None
            self._on_pack()
        with self._changed:
            if span.last:
                self.written.append(pack)
            self._turns[span.unit] += 1
            self._changed.notify_all()

    def give_up(self) -> None:
        """Somebody failed: nobody is to wait for a turn any more."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def abort(self) -> None:
        """Leave no unfinished pack; nobody is writing any more."""
        for writer in self._writers:
            if writer is not None:
                writer.abort()


def _check_sizes(digest: Digest, place: Location) -> None:
    """Refuse, before memory is taken, sizes that no writer writes."""
    if place.num_bytes > MAX_CELL_BYTES or place.stored_bytes > place.num_bytes + SPAN_BYTES:
        raise CorruptionError(
            f"chunk {short(digest)} in {place.pack} at offset {place.offset} claims {place.num_bytes} bytes, and "
            f"{place.stored_bytes} as stored: more than a chunk may have; run repo.fsck() there"
        )


def intact_chunks(
    reader: ChunkReader, digest: Digest, places: Sequence[Location], num_bytes: int
) -> list[EncodedChunk]:
    """The extents that hold a chunk, verified, each with its payload as it is stored; see `ChunkReader.intact`."""
    payloads: dict[tuple[str, int], Buffer] = {}  # also of those that the reader tried before it began anew elsewhere

    def keep(extent: VerifiedExtent) -> None:
        payloads[extent.pack, extent.info.offset] = reader.payload(extent)

    extents = reader.intact(digest, places, num_bytes, keep)
    return [_as_stored(extent, payloads[extent.pack, extent.info.offset]) for extent in extents]


def _intact_extent(reader: ChunkReader, digest: Digest, place: Location, relocate: Relocate) -> list[EncodedChunk]:
    """The extent at `place`, maybe a part of its chunk; the whole chunk from elsewhere if that is damaged or gone."""
    try:
        extent = reader.open_expected(digest, place, place.num_bytes)
        return [_as_stored(extent, reader.payload(extent))]
    except (CorruptionError, NotFoundError):
        return intact_chunks(reader, digest, relocate(digest, {place.pack}), place.num_bytes)


def _as_stored(extent: VerifiedExtent, payload: Buffer) -> EncodedChunk:
    info = extent.info
    return EncodedChunk(
        info.digest, info.num_bytes, info.leaf_bytes, extent.digests, info.encoding, payload,
        (info.first_leaf, info.num_leaves),
    )  # fmt: skip


def whole_places(places: Sequence[Location]) -> list[Location]:
    """The fewest of these extents of a chunk that hold all of it: one, but for a chunk that ranks wrote in parts.

    Raises:
        CorruptionError: some of it is in none of them.
    """
    found = cover(places, places[0].num_bytes)
    if not found:
        packs = ", ".join(sorted({place.pack for place in places}))
        raise CorruptionError(
            f"a chunk was stored in parts, and those in {packs} do not cover it: repo.fsck() says which commits need "
            "it; restore the packs that are gone from a copy"
        )
    return found
