"""Chunks that are read in spans: as a span arrives its chunks are verified, then staged, or put into place at once.

    1. `wanted_of` says where what is wanted of each chunk is; read_plan.py joins what is near into units
    2. several threads read units, as many at once as are of use to the store
    3. as many as may compute verify what arrived, each chunk from elsewhere if it is damaged or gone there
    4. `stage_as_they_arrive` keeps what is verified (sources.py); `fill_as_they_arrive` fills the targets with it

Invariant: no byte is read twice unless it is damaged, gone, or could not be staged. What fills a target was verified
where it was read. Must not know: tensors, ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from cas_ckpt.errors import CkptError, CorruptionError, NotFoundError
from cas_ckpt.objects import codec
from cas_ckpt.objects.pack import Location
from cas_ckpt.progress import Progress
from cas_ckpt.storage.store import Store
from cas_ckpt.transfer.chunk_reader import Relocate, VerifiedExtent, cover
from cas_ckpt.transfer.filling import ChunkFiller, StoredChunk, leaves_of, named
from cas_ckpt.transfer.read_plan import Span, Unit, Wanted, longest_bytes, opening_first, plan_units
from cas_ckpt.transfer.sources import STAGED, SpanMemory, StagedStore, limits_of, requests_at_once
from cas_ckpt.transfer.workers import run_all

LONGEST_EXTENT_BYTES = 64 * 1024 * 1024
"""Longer than any extent that is written: where the index says more, its header is read before memory is taken."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk that is wanted; `place`: one of the several extents that hold it, which may arrive in any order."""

    chunk: StoredChunk
    place: Location | None = None


def fill_as_they_arrive(
    store: Store, chunks: Sequence[StoredChunk], *, num_threads: int, memory_bytes: int, progress: Progress,
    relocate: Relocate | None,
) -> None:  # fmt: skip
    """Read and verify all chunks, and fill their parts at once: for targets that nobody knows, or may be touched.

    Args:
        chunks: Each once.
    """
    arrivals = Arrivals(StagedStore(store, (), None, 0), num_threads, progress, relocate)
    _read_units(store, chunks, lambda: SpanFiller(arrivals), memory_bytes)


def stage_as_they_arrive(
    source: StagedStore, chunks: Sequence[StoredChunk], *, num_threads: int, memory_bytes: int, progress: Progress,
    relocate: Relocate | None,
) -> None:  # fmt: skip
    """Read and verify all chunks, and stage them as far as there is room; each then has the `extents` that hold it."""
    arrivals = Arrivals(source, num_threads, progress, relocate)
    _read_units(source.store, chunks, lambda: _SpanVerifier(arrivals), memory_bytes)


def _read_units(
    store: Store, chunks: Sequence[StoredChunk], make_reader: Callable[[], SpanReader], memory_bytes: int
) -> None:
    read_bytes = memory_bytes // 2  # each reader has a span, and what of it is decoded or put in its place
    limits = limits_of(store, bytes_to_read(chunks), memory_bytes=read_bytes)
    units = opening_first(plan_units(wanted_of(chunks), limits))
    at_once = requests_at_once(store, longest_bytes(units), memory_bytes=read_bytes)
    run_all(units, lambda: make_reader().take, num_threads=at_once)


def bytes_to_read(chunks: Sequence[StoredChunk]) -> int:
    """About as many plain bytes are read of these chunks."""
    return sum(chunk.wanted_bytes if chunk.by_leaves else chunk.num_bytes for chunk in chunks)


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


class Arrivals:
    """What the threads share that read one list of units."""

    def __init__(self, source: StagedStore, num_threads: int, progress: Progress, relocate: Relocate | None) -> None:
        self.source = source
        self.progress = progress
        self.relocate = relocate
        self.computing = threading.Semaphore(num_threads)
        self._lock = threading.Lock()
        self._opened: dict[str, threading.Event] = {}
        self._extents: dict[bytes, list[tuple[VerifiedExtent, bool]] | None] = {}

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
            chunk.extents = [self.staged(extent)]
        return True

    def give_up_extents(self, chunk: StoredChunk) -> bool:
        """One of several extents is damaged: the chunk is read from others; False if somebody does that already."""
        with self._lock:
            is_first = self._extents.get(chunk.digest, []) is not None
            self._extents[chunk.digest] = None
            return is_first

    def staged(self, extent: VerifiedExtent) -> VerifiedExtent:
        """The chunk where it is staged, given one of its extents."""
        return VerifiedExtent(STAGED, self.source.extent(extent.info), extent.digests)


class SpanReader:
    """Reads units and verifies what is in them; one per thread. What becomes of it, `keep_chunk` and others say."""

    def __init__(self, arrivals: Arrivals) -> None:
        self.arrivals = arrivals
        self._memory = arrivals.new_memory()
        self.filler = ChunkFiller(self._memory, arrivals.progress, arrivals.relocate)

    def take(self, unit: Unit[Piece]) -> None:
        """Read a unit and verify its chunks, each from elsewhere if it is damaged or gone here."""
        # Whose chunk it is that is damaged or gone, its own reading says.
        with suppress(CorruptionError, NotFoundError), self.arrivals.opening(unit):
            self._memory.load(unit.spans)
        with self.arrivals.computing:
            for piece in unit.items:
                chunk = piece.chunk
                try:
                    if self._take(chunk, piece.place):
                        self.arrivals.progress.advance(self.done_bytes(chunk))
                except CkptError as error:
                    raise named(error, chunk.key) from error

    def _take(self, chunk: StoredChunk, place: Location | None) -> bool:
        """Verify a piece; whether that makes its chunk whole."""
        reader, arrivals = self.filler.reader, self.arrivals
        if place is not None:
            try:
                extent = reader.open_expected(chunk.digest, place, chunk.num_bytes)
                return arrivals.add_extent(chunk, extent, is_staged=self.keep(chunk, extent))
            except (CorruptionError, NotFoundError):
                if not arrivals.give_up_extents(chunk):
                    return False
        staged: dict[tuple[str, int], bool] = {}

        def keep(extent: VerifiedExtent) -> None:
            staged[extent.pack, extent.info.offset] = self.keep(chunk, extent)

        chunk.extents = reader.intact(chunk.digest, chunk.places, chunk.num_bytes, keep)
        if all(staged[extent.pack, extent.info.offset] for extent in chunk.extents):
            chunk.extents = [arrivals.staged(chunk.extents[0])]
        return True

    def done_bytes(self, chunk: StoredChunk) -> int:
        """As much the phase is told once the chunk is whole: who only verifies counts what is in the repository."""
        return chunk.num_bytes

    def keep(self, chunk: StoredChunk, extent: VerifiedExtent) -> bool:
        """Verify what is wanted of an extent, and keep it; whether it was staged."""
        raise NotImplementedError


class _SpanVerifier(SpanReader):
    """Stages what is verified."""

    def keep(self, chunk: StoredChunk, extent: VerifiedExtent) -> bool:
        """See `SpanReader`."""
        found = self.filler.reader.plain(extent, chunk.to_verify)
        return all(self.arrivals.source.put(chunk.digest, start, plain) for start, plain in found)


class SpanFiller(SpanReader):
    """Fills the targets with what is verified; a chunk of several extents is filled by one after the other."""

    def done_bytes(self, chunk: StoredChunk) -> int:
        """See `SpanReader`: who fills counts what the targets get."""
        return chunk.wanted_bytes

    def _take(self, chunk: StoredChunk, place: Location | None) -> bool:
        is_whole = super()._take(chunk, place)
        chunk.filled = chunk.filled or is_whole
        return is_whole

    def keep(self, chunk: StoredChunk, extent: VerifiedExtent) -> bool:
        """See `SpanReader`."""
        self.filler.fill_from(chunk, extent)
        return False
