"""Brings chunks into memory: first every byte is verified, then every byte is copied into place.

    1. `fetch_chunks` verifies all chunks: whole, or only the leaves that are wanted of them
    2. `on_verified` is called; until here no target was touched
    3. every part of every target is filled: straight from the page cache where it is consecutive in its
       chunk and in memory, else by way of scratch memory of one chunk

Of a store on another computer each byte is read once. Its chunks are read in spans (read_plan.py), many at once;
what is verified is staged on the local disk (sources.py), and 3 reads it there. Targets that nobody has seen yet
(`unseen`) are filled at once, in one pass.

Collective checkouts (transfer/scatter.py) use the same two passes, and send between ranks.

Invariant: no target that somebody can see is touched before all that is wanted was read and verified. Between the
two passes the operating system's page cache is the staging memory, so the model is never
held twice; what fell out of it is verified again on its way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from cas_ckpt.errors import CkptError, CorruptionError, NotFoundError
from cas_ckpt.memory import memory_budget
from cas_ckpt.objects import codec
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.objects.pack import Location
from cas_ckpt.objects.spec import Box, Grid, raw_dtype
from cas_ckpt.progress import SILENT, Progress, phase
from cas_ckpt.storage.store import Store
from cas_ckpt.transfer.chunk_reader import Relocate, VerifiedExtent, cover, runs
from cas_ckpt.transfer.filling import ChunkFiller, NewArray, StoredChunk, cell_part, leaves_of, named
from cas_ckpt.transfer.hashing import Array
from cas_ckpt.transfer.read_plan import Span, Unit, Wanted, longest_bytes, opening_first, plan_units
from cas_ckpt.transfer.sources import STAGED, SpanMemory, StagedStore, limits_of, requests_at_once, staging
from cas_ckpt.transfer.workers import default_threads, run_all

LOOKAHEAD = 8
"""Chunks whose reading is announced to a local store ahead of time."""

LONGEST_EXTENT_BYTES = 64 * 1024 * 1024
"""Longer than any extent that is written: where the index says more, its header is read before memory is taken."""


def nothing() -> None:
    """Does nothing."""


Restored: TypeAlias = Store | StagedStore
"""What both passes of a restore read from."""


def fetch_chunks(
    store: Store,
    chunks: Sequence[StoredChunk],
    *,
    num_threads: int,
    progress: Progress,
    memory_bytes: int | None = None,
    relocate: Relocate | None = None,
    on_verified: Callable[[], object] = nothing,
    unseen: bool = False,
) -> None:
    """Verify all chunks, then fill all their parts.

    Args:
        chunks: In the order in which they are stored, see `core.chunks.place_chunks`.
        num_threads: That hash and copy at one time; how many requests run at one time, the store says.
        memory_bytes: Most memory that this takes beyond the targets; None: see memory.py.
        relocate: Asked when a pack was collected under the restore.
        on_verified: Called between the two.
        unseen: Nobody knows the targets yet. Over a network they are filled as chunks arrive, and are undefined when
            this raises.
    Raises:
        CorruptionError, NotFoundError: named by tensor; raised before any target was touched.
    """
    memory_bytes = memory_budget(memory_bytes)
    if unseen and not store.abilities.local:
        with phase(progress, "restoring", sum(chunk.num_bytes for chunk in chunks)):
            fill_as_they_arrive(
                store, chunks, num_threads=num_threads, memory_bytes=memory_bytes, progress=progress, relocate=relocate
            )
        on_verified()
        return
    with sourced(store, chunks, relocate) as (source, relocate):
        verify_chunks(
            source, chunks, num_threads=num_threads, memory_bytes=memory_bytes, progress=progress, relocate=relocate
        )
        on_verified()
        wanted_bytes = 0
        for chunk in chunks:
            wanted_bytes += chunk.wanted_bytes
        with phase(progress, "restoring", wanted_bytes):
            if isinstance(source, StagedStore):
                again = [chunk for chunk in chunks if chunk.extents[0].pack != STAGED]
                fill_as_they_arrive(
                    store, again, num_threads=num_threads, memory_bytes=memory_bytes, progress=progress,
                    relocate=relocate,
                )  # fmt: skip
                chunks = [chunk for chunk in chunks if not chunk.filled]
            run_all(chunks, lambda: ChunkFiller(source, progress, relocate).fill, num_threads=num_threads)


def sourced(
    store: Store, chunks: Sequence[StoredChunk], relocate: Relocate | None
) -> AbstractContextManager[tuple[Restored, Relocate | None]]:
    """What the two passes over `chunks` read from: a local store itself, else one that stages what is verified.

    Returns:
        It, and who is asked for what is not there any more.
    """
    return nullcontext((store, relocate)) if store.abilities.local else _staged(store, chunks, relocate)


@contextmanager
def _staged(
    store: Store, chunks: Sequence[StoredChunk], relocate: Relocate | None
) -> Iterator[tuple[StagedStore, Relocate]]:
    places = {chunk.digest: chunk.places for chunk in chunks}

    def again(digest: Digest, tried: Collection[str]) -> Sequence[Location]:
        if STAGED in tried:
            return places[digest]
        if relocate is None:
            raise NotFoundError(f"chunk {short(digest)}: none of its packs is there any more")
        return relocate(digest, tried)

    with staging(store, [(chunk.digest, chunk.num_bytes) for chunk in chunks], _bytes_to_read(chunks)) as source:
        yield source, again


def verify_chunks(
    source: Restored,
    chunks: Sequence[StoredChunk],
    *,
    num_threads: int,
    memory_bytes: int,
    progress: Progress,
    relocate: Relocate | None = None,
) -> None:
    """Read and hash what is wanted of all chunks; each then has the `extents` that hold it.

    Arguments and errors as for `fetch_chunks`, `source` and `relocate` from `sourced`.
    """
    num_bytes = 0
    for chunk in chunks:
        num_bytes += chunk.num_bytes
    with phase(progress, "verifying", num_bytes):
        if isinstance(source, StagedStore):
            arrivals = _Arrivals(source, num_threads, progress, relocate)
            _read_units(source.store, chunks, lambda: _SpanVerifier(arrivals), memory_bytes)
        else:
            announced = _announced(source, chunks)
            run_all(announced, lambda: ChunkFiller(source, progress, relocate).verify, num_threads=num_threads)


def _announced(store: Store, chunks: Sequence[StoredChunk]) -> Iterator[StoredChunk]:
    """The chunks in order, each announced to the store `LOOKAHEAD` chunks before its turn."""
    for at, chunk in enumerate(chunks):
        first = at + LOOKAHEAD if at else 0
        for ahead in chunks[first : at + LOOKAHEAD + 1]:
            if not ahead.by_leaves:
                place = ahead.places[0]
                store.prefetch(place.pack, place.offset, place.header_bytes + place.stored_bytes)
        yield chunk


# --- over a network: spans are read, what is in them is verified, and staged or put into place -----


@dataclass(frozen=True, slots=True)
class _Piece:
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
    arrivals = _Arrivals(StagedStore(store, (), None, 0), num_threads, progress, relocate)
    _read_units(store, chunks, lambda: _SpanFiller(arrivals), memory_bytes)


def _read_units(
    store: Store, chunks: Sequence[StoredChunk], make_reader: Callable[[], _SpanReader], memory_bytes: int
) -> None:
    read_bytes = memory_bytes // 2  # each reader has a span, and what of it is decoded or put in its place
    limits = limits_of(store, _bytes_to_read(chunks), memory_bytes=read_bytes)
    units = opening_first(plan_units(wanted_of(chunks), limits))
    at_once = requests_at_once(store, longest_bytes(units), memory_bytes=read_bytes)
    run_all(units, lambda: make_reader().take, num_threads=at_once)


def _bytes_to_read(chunks: Sequence[StoredChunk]) -> int:
    """About as many plain bytes are read of these chunks."""
    return sum(chunk.wanted_bytes if chunk.by_leaves else chunk.num_bytes for chunk in chunks)


def wanted_of(chunks: Sequence[StoredChunk]) -> Iterator[Wanted[_Piece]]:
    """Where what is wanted of each chunk is, as far as the index is right; a chunk of several extents in pieces."""
    for chunk in chunks:
        yield from _pieces(chunk)


def _pieces(chunk: StoredChunk) -> Iterator[Wanted[_Piece]]:
    places = _plausible(cover(chunk.places, chunk.num_bytes))
    if chunk.by_leaves:
        yield Wanted(_Piece(chunk), [span for place in places for span in _leaf_spans(chunk, place)])
    elif len(places) > 1:
        for place in places:
            yield Wanted(_Piece(chunk, place), [_span(place)])
    else:
        yield Wanted(_Piece(chunk), [_span(place) for place in places])


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
    payload = place.offset + place.header_bytes
    own = range(place.first_leaf, place.first_leaf + place.num_leaves)
    leaves = [leaf - place.first_leaf for leaf in leaves_of(chunk, place.leaf_bytes) if leaf in own]
    if not leaves:
        return [Span(place.pack, place.offset, payload)]
    if place.encoding != codec.RAW:
        return [Span(place.pack, place.offset, place.end)]
    found = [Span(place.pack, place.offset, payload)]
    for first, stop in runs(leaves):
        end = min(payload + stop * place.leaf_bytes, place.end)
        found.append(Span(place.pack, payload + first * place.leaf_bytes, end))
    return found


class _Arrivals:
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
    def opening(self, unit: Unit[_Piece]) -> Iterator[None]:
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


class _SpanReader:
    """Reads units and verifies what is in them; one per thread. What becomes of it, `keep_chunk` and others say."""

    def __init__(self, arrivals: _Arrivals) -> None:
        self.arrivals = arrivals
        self._memory = SpanMemory(arrivals.source)
        self.filler = ChunkFiller(self._memory, arrivals.progress, arrivals.relocate)

    def take(self, unit: Unit[_Piece]) -> None:
        """Read a unit and verify its chunks, each from elsewhere if it is damaged or gone here."""
        # Whose chunk it is that is damaged or gone, its own reading says.
        with suppress(CorruptionError, NotFoundError), self.arrivals.opening(unit):
            self._memory.load(unit.spans)
        with self.arrivals.computing:
            for piece in unit.items:
                chunk = piece.chunk
                try:
                    if self._take(chunk, piece.place):
                        self.arrivals.progress.advance(chunk.num_bytes)
                except CkptError as error:
                    raise named(error, chunk.key) from error

    def _take(self, chunk: StoredChunk, place: Location | None) -> bool:
        """Verify a piece; whether that makes its chunk whole."""
        if place is not None:
            return self._take_extent(chunk, place)
        if chunk.by_leaves:
            self.filler.read_leaves(chunk)
            self.keep_leaves(chunk, self.filler.scratch(chunk.num_bytes))
        else:
            self._take_chunk(chunk)
        return True

    def _take_chunk(self, chunk: StoredChunk) -> None:
        reader = self.filler.reader
        plain_of: dict[tuple[str, int], memoryview] = {}

        def keep(extent: VerifiedExtent) -> None:
            plain_of[extent.pack, extent.info.offset] = reader.plain(extent)

        chunk.extents = reader.intact(chunk.digest, chunk.places, chunk.num_bytes, keep)
        self.keep_chunk(chunk, [plain_of[extent.pack, extent.info.offset] for extent in chunk.extents])

    def _take_extent(self, chunk: StoredChunk, place: Location) -> bool:
        """Verify one of several extents of a chunk; whether the whole chunk is verified now."""
        reader = self.filler.reader
        try:
            extent = reader.open_expected(chunk.digest, place, chunk.num_bytes)
            is_kept = self.keep_extent(chunk, extent, reader.plain(extent))
        except (CorruptionError, NotFoundError):
            if not self.arrivals.give_up_extents(chunk):
                return False
            self._take_chunk(chunk)
            return True
        return self.arrivals.add_extent(chunk, extent, is_staged=is_kept)

    def keep_chunk(self, chunk: StoredChunk, plains: Sequence[memoryview]) -> None:
        """The plain bytes of all extents of the chunk, which are verified."""
        raise NotImplementedError

    def keep_extent(self, chunk: StoredChunk, extent: VerifiedExtent, plain: memoryview) -> bool:
        """Those of one of several extents; whether they were staged."""
        raise NotImplementedError

    def keep_leaves(self, chunk: StoredChunk, space: Array) -> None:
        """The wanted leaves of the chunk, each at its place."""
        raise NotImplementedError


class _SpanVerifier(_SpanReader):
    """Stages what is verified."""

    def keep_chunk(self, chunk: StoredChunk, plains: Sequence[memoryview]) -> None:
        """See `_SpanReader`."""
        if all(self.keep_extent(chunk, *each) for each in zip(chunk.extents, plains, strict=True)):
            chunk.extents = [self.arrivals.staged(chunk.extents[0])]

    def keep_extent(self, chunk: StoredChunk, extent: VerifiedExtent, plain: memoryview) -> bool:
        """See `_SpanReader`."""
        return self.arrivals.source.put(chunk.digest, extent.info.first_leaf * extent.info.leaf_bytes, plain)

    def keep_leaves(self, chunk: StoredChunk, space: Array) -> None:
        """See `_SpanReader`."""
        leaf_bytes = chunk.extents[0].info.leaf_bytes
        wanted = [(first * leaf_bytes, stop * leaf_bytes) for first, stop in runs(leaves_of(chunk, leaf_bytes))]
        if all(self.arrivals.source.put(chunk.digest, start, space.data[start:stop]) for start, stop in wanted):
            chunk.extents = [self.arrivals.staged(chunk.extents[0])]


class _SpanFiller(_SpanReader):
    """Fills the targets with what is verified; a chunk of several extents is filled by one after the other."""

    def _take_extent(self, chunk: StoredChunk, place: Location) -> bool:
        is_whole = super()._take_extent(chunk, place)
        chunk.filled = chunk.filled or is_whole
        return is_whole

    def keep_extent(self, chunk: StoredChunk, extent: VerifiedExtent, plain: memoryview) -> bool:
        """See `_SpanReader`."""
        start = extent.info.first_leaf * extent.info.leaf_bytes
        self.filler.fill_run(chunk, start, np.frombuffer(plain, np.uint8))
        return False

    def keep_chunk(self, chunk: StoredChunk, plains: Sequence[memoryview]) -> None:
        """See `_SpanReader`."""
        space = np.frombuffer(plains[0], np.uint8)
        if len(plains) > 1:
            space = self.filler.scratch(chunk.num_bytes)
            for extent, plain in zip(chunk.extents, plains, strict=True):
                start = extent.info.first_leaf * extent.info.leaf_bytes
                space[start : start + len(plain)] = np.frombuffer(plain, np.uint8)
        self.filler.fill_from(chunk, space)

    def keep_leaves(self, chunk: StoredChunk, space: Array) -> None:
        """See `_SpanReader`."""
        self.filler.fill_from(chunk, space)


# --- new arrays ---------------------------------------------------------------------------------


def read_region(
    store: Store,
    region: Box,
    *,
    grid: Grid,
    item_bytes: int,
    chunk_of: Callable[[int], Digest],
    located: Mapping[bytes, Sequence[Location]],
    memory_bytes: int | None = None,
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
    target = NewArray(out)
    chunks: dict[tuple[Digest, int], StoredChunk] = {}
    for number, common in grid.cells_in(region):
        cell, digest = grid.box(number), chunk_of(number)
        num_bytes = cell.num_elements * item_bytes
        chunk = chunks.get((digest, num_bytes))
        if chunk is None:
            places = located.get(digest, ())
            chunk = chunks[digest, num_bytes] = StoredChunk("", digest, num_bytes, by_leaves=True, places=places)
        chunk.parts.append(cell_part("", target, item_bytes, cell, common, common.relative_to(region)))
        chunk.wanted_bytes += common.num_elements * item_bytes
    if store.abilities.local:
        filler = ChunkFiller(store, SILENT, relocate)
        for chunk in chunks.values():
            filler.read_into(chunk)
    else:
        fetch_chunks(
            store, list(chunks.values()), num_threads=default_threads(), memory_bytes=memory_bytes, progress=SILENT,
            relocate=relocate, unseen=True,
        )  # fmt: skip
    return out
