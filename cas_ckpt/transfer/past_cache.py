"""Reads what is not in memory past the page cache: in large aligned blocks, two on their way at a time.

To fill the page cache costs memory and, where memory is new to a virtual machine, more time than the disk takes
(docs/decisions/013). What is read this way is verified in the block that it came in, and put into place from there.

    1. `not_in_memory` says which chunks are worth it: many bytes of packs that the page cache does not hold
    2. `read_not_in_memory` reads through the page cache as long as that is fast enough, the rest past it
    3. `fill_past_cache` is one pass: read, verify, fill
    4. `verify_past_cache` only verifies: whoever fills later reads, and verifies, once more (`StoredChunk.past_cache`)

Invariant: as in arrivals.py, whose readers these are. Nothing here may change what is read, only how. Must not know:
tensors, ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby

from cas_ckpt import clock
from cas_ckpt.errors import CorruptionError, NotFoundError
from cas_ckpt.memory import available_bytes
from cas_ckpt.progress import Progress
from cas_ckpt.storage.store import ReadsPastCache, Store, too_short
from cas_ckpt.transfer.arrivals import Arrivals, Piece, SpanFiller, SpanReader, bytes_to_read, wanted_of
from cas_ckpt.transfer.chunk_reader import Relocate, VerifiedExtent
from cas_ckpt.transfer.filling import StoredChunk
from cas_ckpt.transfer.read_plan import ReadLimits, Span, Unit, plan_units
from cas_ckpt.transfer.sources import SpanMemory, StagedStore, new_memory
from cas_ckpt.transfer.workers import run_all

WORTH_BYTES = 256 * 1024 * 1024
"""Less than that is read through the page cache, where it is found again."""

IN_FLIGHT = 2
"""Reads on their way at one time: one keeps a disk idle between two, four made this one slower (docs/decisions/013)."""

BLOCK_BYTES, _LEAST_BLOCK_BYTES = 8 * 1024 * 1024, 1024 * 1024
GAP_BYTES = 256 * 1024

TRIED_BYTES = 64 * 1024 * 1024
"""So much is read past the page cache twice before the other way is looked at; the second time is measured."""

SLICE_BYTES = 128 * 1024 * 1024
"""After so much that was read through the page cache it is looked at whether that is still fast enough.

What it costs above that may add up to as much as it may take longer for two slices: where it is taken for keeping
alone, one slice that takes 1.3 times as long is enough; where it spares a second read, a slow moment is not.
"""

WORTH_KEEPING = 1.1
"""Through the page cache may take so many times as long as past it: what is in it is found again."""

WORTH_A_SECOND_READ = 1.9
"""The same where what is past the page cache is read, and verified, twice."""

PROBES = 8
"""Places of each pack where it is looked at whether the page cache has it."""


def packs_in_memory(store: Store, chunks: Sequence[StoredChunk]) -> set[str]:
    """The packs of which the page cache seems to have all that is wanted: a few places of each are looked at."""
    found: set[str] = set()
    probe = memoryview(bytearray(1))
    for pack, group in groupby(chunks, key=lambda chunk: chunk.places[0].pack):
        places = [chunk.places[0] for chunk in group]
        step = max(1, len(places) // PROBES)
        with suppress(CorruptionError, NotFoundError):  # who reads it says what is wrong
            if all(store.read_into(pack, place.end - 1, probe, cached_only=True) for place in places[::step]):
                found.add(pack)
    return found


def not_in_memory(store: ReadsPastCache, chunks: Sequence[StoredChunk]) -> list[StoredChunk]:
    """The chunks that are better read past the page cache, if at all; in their order."""
    if bytes_to_read(chunks) < WORTH_BYTES:
        return []
    there = packs_in_memory(store, chunks)
    found = [chunk for chunk in chunks if chunk.places[0].pack not in there]
    return found if bytes_to_read(found) >= WORTH_BYTES else []


def fill_past_cache(
    store: ReadsPastCache, chunks: Sequence[StoredChunk], *, num_threads: int, memory_bytes: int, progress: Progress,
    relocate: Relocate | None,
) -> None:  # fmt: skip
    """As `fetch.fill_once`, past the page cache."""
    arrivals = _Blocks(store, num_threads, progress, relocate)
    _read_blocks(chunks, lambda: SpanFiller(arrivals), num_threads, memory_bytes)


def verify_past_cache(
    store: ReadsPastCache, chunks: Sequence[StoredChunk], *, num_threads: int, memory_bytes: int, progress: Progress,
    relocate: Relocate | None,
) -> None:  # fmt: skip
    """Verify the chunks, which then are `past_cache`: no later pass may believe that they are in memory."""
    arrivals = _Blocks(store, num_threads, progress, relocate)
    for chunk in chunks:
        chunk.past_cache = True
    _read_blocks(chunks, lambda: _SpanChecker(arrivals), num_threads, memory_bytes)


def read_not_in_memory(
    chunks: Sequence[StoredChunk],
    past_cache: Callable[[Sequence[StoredChunk]], object],
    through_cache: Callable[[Sequence[StoredChunk]], object],
    *,
    worth: float,
) -> None:
    """Read the chunks through the page cache as long as that is fast enough, and the rest past it.

    One look is not enough: memory that was free for a moment only is filled at the rate of the disk, and once it is
    used up, each page is first fetched from the host; and the disk may be somebody else's for a moment. So what is lost
    by it is added up.

    Args:
        past_cache, through_cache: Read, and verify, some chunks the one way or the other.
        worth: Through the page cache may take so many times as long.
    """
    some, rest = _cut(chunks, TRIED_BYTES)
    past_cache(some)  # buffers are new memory, which takes longer than the reads
    some, rest = _cut(rest, TRIED_BYTES)
    past_s = _seconds_a_byte(past_cache, some)
    lost_s = 0.0
    while rest and available_bytes() >= 2 * bytes_to_read(rest):  # else pages would drive out one another
        some, rest = _cut(rest, SLICE_BYTES)
        lost_s = max(0.0, lost_s + _seconds_a_byte(through_cache, some) - worth * past_s)
        if lost_s >= 2 * (worth - 1) * past_s:
            break
    if rest:
        past_cache(rest)


def _cut(chunks: Sequence[StoredChunk], num_bytes: int) -> tuple[Sequence[StoredChunk], Sequence[StoredChunk]]:
    for at, chunk in enumerate(chunks):
        num_bytes -= chunk.num_bytes
        if num_bytes < 0:
            return chunks[: at + 1], chunks[at + 1 :]
    return chunks, ()


def _seconds_a_byte(read: Callable[[Sequence[StoredChunk]], object], chunks: Sequence[StoredChunk]) -> float:
    begun_s = clock.monotonic_s()
    read(chunks)
    return (clock.monotonic_s() - begun_s) / max(bytes_to_read(chunks), 1)


def _read_blocks(
    chunks: Sequence[StoredChunk], make_reader: Callable[[], SpanReader], num_threads: int, memory_bytes: int
) -> None:
    at_once = min(IN_FLIGHT + num_threads, max(1, memory_bytes // (2 * _LEAST_BLOCK_BYTES)))
    # Each thread has a block, and as much again for what of it is decoded.
    block_bytes = max(_LEAST_BLOCK_BYTES, min(BLOCK_BYTES, memory_bytes // (2 * at_once)))
    units = plan_units(wanted_of(chunks), ReadLimits(GAP_BYTES, block_bytes))
    run_all(units, lambda: make_reader().take, num_threads=at_once)


class _Blocks(Arrivals):
    """What the threads share that read one list of units of a store on this computer."""

    def __init__(self, store: ReadsPastCache, num_threads: int, progress: Progress, relocate: Relocate | None) -> None:
        super().__init__(StagedStore(store, (), None, 0), num_threads, progress, relocate)
        self._store = store
        self._in_flight = threading.Semaphore(IN_FLIGHT)

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


class _SpanChecker(SpanReader):
    """Verifies what arrives, and keeps nothing of it."""

    def keep(self, chunk: StoredChunk, extent: VerifiedExtent) -> bool:
        """See `SpanReader`."""
        self.filler.reader.place(extent, ((),), chunk.to_verify)
        return False
