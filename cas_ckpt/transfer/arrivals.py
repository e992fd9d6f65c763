"""Chunks that are read in spans: as a span arrives its chunks are verified, then staged, or put into place at once.

    1. `wanted_of` says where what is wanted of each chunk is; sources.py joins what is near into units
    2. several threads read units (`Arrivals`): over a network as many at once as are of use to the store; of a local
       disk what is not in memory, past the page cache, in large aligned blocks, two on their way at a time (`Blocks`)
    3. as many as may compute verify what arrived, each chunk from elsewhere if it is damaged or gone there
    4. what becomes of it the caller says: `staged`, `placed` or `checked`

To fill the page cache costs memory and, where memory is new to a virtual machine, more time than the disk takes
(docs/decisions/013): `both_ways` of fetch.py reads through it as long as that is fast enough, and the rest past it.

Invariant: over a network no byte is read twice unless it is damaged, gone, or could not be staged. What fills a target
was verified where it was read. Must not know: tensors, ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeAlias

from cas_ckpt.errors import CkptError, CorruptionError, NotFoundError
from cas_ckpt.objects import codec
from cas_ckpt.objects.pack import Location
from cas_ckpt.parallel.workers import run_all
from cas_ckpt.storage.store import ReadsPastCache, Store, too_short
from cas_ckpt.transfer.chunk_reader import (
    STAGED,
    ChunkFiller,
    ReadOptions,
    StoredChunk,
    VerifiedExtent,
    bytes_to_read,
    cover,
    leaves_of,
    named,
    new_memory,
)
from cas_ckpt.transfer.sources import (
    ReadLimits,
    Span,
    SpanMemory,
    StagedStore,
    Unit,
    Wanted,
    limits_of,
    longest_bytes,
    opening_first,
    plan_units,
    requests_at_once,
)

LONGEST_EXTENT_BYTES = 64 * 1024 * 1024
"""Longer than any extent that is written: where the index says more, its header is read before memory is taken."""

IN_FLIGHT = 2
"""Reads on their way at one time: one keeps a disk idle between two, four made this one slower (docs/decisions/013)."""

BLOCK_BYTES, _LEAST_BLOCK_BYTES = 8 * 1024 * 1024, 1024 * 1024
_BLOCK_GAP_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk that is wanted; `place`: one of the several extents that hold it, which may arrive in any order."""

    chunk: StoredChunk
    place: Location | None = None


def wanted_of(chunks: Sequence[StoredChunk]) -> Iterator[Wanted[Piece]]:
    """Where what is wanted of each chunk is, as far as the index is right; a chunk of several extents in pieces."""
    for chunk in chunks:
        yield from _pieces(chunk)


def _pieces(chunk: StoredChunk) -> Iterator[Wanted[Piece]]:
    places = _plausible(cover(chunk.places, chunk.num_bytes))
    if chunk.by_leaves:
        yield Wanted(Piece(chunk), [span for place in places for span in _leaf_spans(chunk, place)])
    elif len(places) > 1:
        for place in places:
            yield Wanted(Piece(chunk, place), [_span(place)])
    else:
        yield Wanted(Piece(chunk), [_span(place) for place in places])


def chunk_spans(places: Sequence[Location], num_bytes: int) -> list[Span]:
    """Where a whole chunk of `num_bytes` is read, of those places."""
    return [_span(place) for place in _plausible(cover(places, num_bytes))]


def _span(place: Location) -> Span:
    return Span(place.pack, place.offset, place.end)


def _plausible(places: list[Location]) -> list[Location]:
    """The places, unless one is longer than any extent."""
    return [] if any(place.end - place.offset > LONGEST_EXTENT_BYTES for place in places) else places


def _leaf_spans(chunk: StoredChunk, place: Location) -> list[Span]:
    """The header of an extent, and the leaves that are wanted of it."""
    payload, leaves = place.offset + place.header_bytes, leaves_of(chunk, place)
    if leaves and place.encoding != codec.RAW:
        return [Span(place.pack, place.offset, place.end)]
    found = [Span(place.pack, place.offset, payload)]
    for first, stop in leaves:
        start, end = ((leaf - place.first_leaf) * place.leaf_bytes for leaf in (first, stop))
        found.append(Span(place.pack, payload + start, min(payload + end, place.end)))
    return found


Keep: TypeAlias = Callable[[ChunkFiller, StoredChunk, VerifiedExtent], bool]
"""Verifies what is wanted of an extent, and says whether it was staged: `checked`, `placed`, `Arrivals.staged`."""


def checked(filler: ChunkFiller, chunk: StoredChunk, extent: VerifiedExtent) -> bool:
    """Verifies what arrives, and keeps nothing of it."""
    filler.reader.place(extent, ((),), chunk.to_verify)
    return False


def placed(filler: ChunkFiller, chunk: StoredChunk, extent: VerifiedExtent) -> bool:
    """Fills the targets; with a chunk of several extents by one after the other."""
    filler.fill_from(chunk, extent)
    return False


class Arrivals:
    """State shared by threads that read one list of units, many at once over a network.

    Args:
        source: A store, or one that stages what is verified.
    """

    def __init__(self, source: Store | StagedStore, options: ReadOptions) -> None:
        self.source = source if isinstance(source, StagedStore) else StagedStore(source, (), None, 0)
        self.options = options
        self.computing = threading.Semaphore(options.num_threads)
        self._lock = threading.Lock()
        self._opened: dict[str, threading.Event] = {}
        self._extents: dict[bytes, list[tuple[VerifiedExtent, bool]] | None] = {}

    def read(self, chunks: Sequence[StoredChunk], keep: Keep) -> None:
        """Read and verify all chunks (each is there once), and do with them what `keep` does.

        The phase is told what the targets get of each chunk, or, where nothing is put into place, what is in it.
        """
        units, at_once = self.plan(chunks)
        counted: Callable[[StoredChunk], int] = attrgetter("wanted_bytes" if keep is placed else "num_bytes")
        run_all(units, lambda: SpanReader(self, keep, counted).take, num_threads=at_once)

    def plan(self, chunks: Sequence[StoredChunk]) -> tuple[list[Unit[Piece]], int]:
        """The units in which these are read, and how many at once."""
        store, read_bytes = self.source.store, self.options.budget_bytes // 2  # the rest: what of it is decoded
        limits = limits_of(store, bytes_to_read(chunks), most_bytes=read_bytes)
        units = opening_first(plan_units(wanted_of(chunks), limits))
        return units, requests_at_once(store, longest_bytes(units), most_bytes=read_bytes)

    @contextmanager
    def opening(self, unit: Unit[Piece]) -> Iterator[None]:
        """The first request to a pack runs alone, those to other packs beside it.

        A gateway or a cache before object storage fetches or hashes an object when it is first asked for, and does it
        16 times for 16 requests at once (rclone: a third of the rate, docs/decisions/011).
        """
        pack = unit.spans[0].pack if unit.spans else ""
        with self._lock:
            opened = self._opened.get(pack)
            if opened is None:
                self._opened[pack] = mine = threading.Event()
        if opened is not None:
            opened.wait()
            yield
            return
        try:
            yield
        finally:
            mine.set()

    def new_memory(self) -> SpanMemory:
        """Where one reader has the spans of its units."""
        return SpanMemory(self.source)

    def add_extent(self, chunk: StoredChunk, extent: VerifiedExtent, *, is_staged: bool) -> bool:
        """One of several extents of a chunk is verified; whether all are now, and the chunk has its `extents`."""
        with self._lock:
            found = self._extents.setdefault(chunk.digest, [])
            if found is None:
                return False
            found.append((extent, is_staged))
            if len(found) < len(cover(chunk.places, chunk.num_bytes)):
                return False
            self._extents[chunk.digest] = None
        chunk.extents = [extent for extent, _ in found]
        if all(is_staged for _, is_staged in found):
            chunk.extents = [self.where_staged(extent)]
        return True

    def give_up_extents(self, chunk: StoredChunk) -> bool:
        """One of several extents is damaged: the chunk is read from others; False if somebody does that already."""
        with self._lock:
            is_first = self._extents.get(chunk.digest, []) is not None
            self._extents[chunk.digest] = None
            return is_first

    def staged(self, filler: ChunkFiller, chunk: StoredChunk, extent: VerifiedExtent) -> bool:
        """Stages what arrives, as far as there is room; the chunk then has the `extents` that hold it."""
        found = filler.reader.plain(extent, chunk.to_verify)
        return all(self.source.put(chunk.digest, start, plain) for start, plain in found)

    def where_staged(self, extent: VerifiedExtent) -> VerifiedExtent:
        """The chunk where it is staged, given one of its extents."""
        return VerifiedExtent(STAGED, self.source.extent(extent.info), extent.digests)


class SpanReader:
    """Reads units and verifies what is in them; one per thread."""

    def __init__(self, arrivals: Arrivals, keep: Keep, counted: Callable[[StoredChunk], int]) -> None:
        self._arrivals = arrivals
        self._memory = arrivals.new_memory()
        self._filler = ChunkFiller(self._memory, arrivals.options.progress, arrivals.options.relocate)
        self._keep = keep
        self._counted = counted

    def take(self, unit: Unit[Piece]) -> None:
        """Read a unit and verify its chunks, each from elsewhere if it is damaged or gone here."""
        # Whose chunk it is that is damaged or gone, its own reading says.
        with suppress(CorruptionError, NotFoundError), self._arrivals.opening(unit):
            self._memory.load(unit.spans)
        with self._arrivals.computing:
            for piece in unit.items:
                chunk = piece.chunk
                try:
                    if self._take(chunk, piece.place):
                        self._arrivals.options.progress.advance(self._counted(chunk))
                except CkptError as error:
                    raise named(error, chunk.key) from error

    def _take(self, chunk: StoredChunk, place: Location | None) -> bool:
        """Verify a piece; whether that makes its chunk whole."""
        reader, arrivals = self._filler.reader, self._arrivals
        if place is not None:
            try:
                extent = reader.open_expected(chunk.digest, place, chunk.num_bytes)
                return arrivals.add_extent(chunk, extent, is_staged=self._keep(self._filler, chunk, extent))
            except (CorruptionError, NotFoundError):
                if not arrivals.give_up_extents(chunk):
                    return False
        staged: dict[tuple[str, int], bool] = {}

        def keep(extent: VerifiedExtent) -> None:
            staged[extent.pack, extent.info.offset] = self._keep(self._filler, chunk, extent)

        chunk.extents = reader.intact(chunk.digest, chunk.places, chunk.num_bytes, keep)
        if all(staged[extent.pack, extent.info.offset] for extent in chunk.extents):
            chunk.extents = [arrivals.where_staged(chunk.extents[0])]
        return True


# --- past the page cache --------------------------------------------------------------------------


class Blocks(Arrivals):
    """State shared by threads that read one list of units of a local store past the page cache.

    What only was verified so, no later pass may believe to be in memory.
    """

    def __init__(self, store: ReadsPastCache, options: ReadOptions) -> None:
        super().__init__(store, options)
        self._store = store
        self._in_flight = threading.Semaphore(IN_FLIGHT)

    def plan(self, chunks: Sequence[StoredChunk]) -> tuple[list[Unit[Piece]], int]:
        """See `Arrivals`: each thread has a block, and as much again for what of it is decoded."""
        budget_bytes = self.options.budget_bytes
        at_once = min(IN_FLIGHT + self.options.num_threads, max(1, budget_bytes // (2 * _LEAST_BLOCK_BYTES)))
        block_bytes = max(_LEAST_BLOCK_BYTES, min(BLOCK_BYTES, budget_bytes // (2 * at_once)))
        return plan_units(wanted_of(chunks), ReadLimits(_BLOCK_GAP_BYTES, block_bytes)), at_once

    @contextmanager
    def opening(self, unit: Unit[Piece]) -> Iterator[None]:
        """See `Arrivals`: so many are on their way at a time."""
        with self._in_flight:
            yield

    def new_memory(self) -> SpanMemory:
        """See `Arrivals`."""
        return _AlignedMemory(self._store)


class _AlignedMemory(SpanMemory):
    """A source of which some spans are in memory, which were read past the page cache, with what is around them."""

    def __init__(self, store: ReadsPastCache) -> None:
        super().__init__(store)
        self._direct = store

    def load(self, spans: Sequence[Span]) -> None:
        """See `SpanMemory`."""
        self._loaded = []
        block = self._direct.block_bytes
        around = [(span.offset - span.offset % block, -(-span.end // block) * block) for span in spans]
        num_bytes = sum(end - begin for begin, end in around)
        if len(self._space) < num_bytes:
            self._space = new_memory(max(num_bytes, _LEAST_BLOCK_BYTES))  # long ones are mapped, so aligned
        start, loaded = 0, []
        for span, (begin, end) in zip(spans, around, strict=True):
            view = self._space.data[start : start + end - begin]
            got = self._direct.read_past_cache(span.pack, begin, view)
            if got is None:  # this file system does not
                super().load(spans)
                return
            if begin + got < span.end:
                raise too_short(span.pack, span.offset, span.end - span.offset, begin + got)
            loaded.append((span, view[span.offset - begin : span.end - begin].toreadonly()))
            start += len(view)
        self._loaded = loaded
