"""Brings chunks into memory: first every byte is verified, then every byte is copied into place.

    1. `fetch_chunks` verifies all chunks: whole, or only the leaves that are wanted of them
    2. `on_verified` is called; until here no target was touched
    3. every part of every target is filled: straight from the page cache where it is consecutive in its
       chunk and in memory, else by way of scratch memory of one chunk

Of a store on another computer each byte is read once. Its chunks are read in spans (sources.py), many at once;
what is verified is staged on the local disk (sources.py), and 3 reads it there. Targets that nobody has seen yet
(`unseen`) are filled at once, in one pass.

Collective checkouts (transfer/scatter.py) use the same two passes, and send between ranks.

Invariant: no target that somebody can see is touched before all that is wanted was read and verified. Between the
two passes the operating system's page cache is the staging memory, so the model is never
held twice; what fell out of it is verified again on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TypeAlias, cast

import numpy as np

from cas_ckpt import clock
from cas_ckpt.errors import CorruptionError, NotFoundError
from cas_ckpt.memory import available_bytes, memory_budget
from cas_ckpt.objects import codec
from cas_ckpt.objects.digest import LEAF_BYTES, Digest, short
from cas_ckpt.objects.pack import Location
from cas_ckpt.objects.spec import Box, Grid, raw_dtype
from cas_ckpt.parallel.workers import run_all, thread_count
from cas_ckpt.progress import SILENT, Progress, phase
from cas_ckpt.storage.store import ReadsPastCache, Store
from cas_ckpt.transfer.arrivals import Arrivals, Blocks, checked, placed
from cas_ckpt.transfer.chunk_reader import (
    STAGED,
    ChunkFiller,
    NewArray,
    ReadOptions,
    Relocate,
    StoredChunk,
    bytes_to_read,
    cell_part,
)
from cas_ckpt.transfer.hashing import Array
from cas_ckpt.transfer.sources import StagedStore, staging

WORTH_PROBING_BYTES = 64 * 1024 * 1024
"""From so much on it is looked at whether the page cache has what is read."""

WORTH_BYTES = 256 * 1024 * 1024
"""Less than that is read through the page cache, where it is found again."""

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

LOOKAHEAD = 8
"""Chunks whose reading is announced to a local store ahead of time."""


def nothing() -> None:
    """Does nothing."""


Restored: TypeAlias = Store | StagedStore
"""Source of both passes of a restore."""


def fetch_chunks(
    store: Store,
    chunks: Sequence[StoredChunk],
    *,
    progress: Progress,
    relocate: Relocate | None = None,
    on_verified: Callable[[], object] = nothing,
    one_pass: bool = False,
) -> None:
    """Verify all chunks, then fill all their parts; or do both chunk by chunk.

    Args:
        chunks: In the order in which they are stored, see `core.tree.place_chunks`.
        relocate: Asked when a pack was collected under the restore.
        on_verified: Called before the first target is touched.
        one_pass: The targets may be touched before all is verified: each byte is read once, and verified where it is
            put, or on its way there.
    Raises:
        CorruptionError, NotFoundError: named by tensor; raised before any target was touched. In one pass: chunks of
            which something may have been written have `opened`.
    """
    budget_bytes = memory_budget()
    options = ReadOptions(threads_within(budget_bytes, chunks, thread_count()), budget_bytes, progress, relocate)
    restored_bytes = sum(chunk.wanted_bytes for chunk in chunks)
    if one_pass:
        on_verified()
        with phase(progress, "restoring", restored_bytes):
            _fill_once(store, chunks, options)
        return
    with sourced(store, chunks, options) as (source, options):
        past_cache = verify_chunks(source, chunks, options, may_read_twice=True)
        on_verified()
        with phase(progress, "restoring", restored_bytes):
            again = {id(chunk) for chunk in past_cache}
            if isinstance(source, StagedStore):
                unstaged = [chunk for chunk in chunks if chunk.extents[0].pack != STAGED]
                again.update(map(id, unstaged))
                Arrivals(store, options).read(unstaged, placed)
            elif isinstance(store, ReadsPastCache) and past_cache:
                Blocks(store, options).read(past_cache, placed)
            _through_cache(source, [chunk for chunk in chunks if id(chunk) not in again], options, ChunkFiller.fill)


def _fill_once(store: Store, chunks: Sequence[StoredChunk], options: ReadOptions) -> None:
    """Read and verify all chunks, and fill their parts at once: for targets that may be touched before all is verified.

    Args:
        chunks: Each once.
    """
    if not store.abilities.local:
        Arrivals(store, options).read(chunks, placed)
        return

    def past_cache(some: Sequence[StoredChunk]) -> None:
        Blocks(cast(ReadsPastCache, store), options).read(some, placed)

    def through_cache(some: Sequence[StoredChunk]) -> None:
        _through_cache(store, _announced(store, some), options, ChunkFiller.fill_once)

    both_ways(store, chunks, past_cache, through_cache, worth=WORTH_KEEPING)


def _through_cache(
    source: Restored, chunks: Iterable[StoredChunk], options: ReadOptions,
    work: Callable[[ChunkFiller, StoredChunk], None],
) -> None:  # fmt: skip
    """Let each of several threads do this with chunk after chunk."""
    run_all(
        chunks, lambda: partial(work, ChunkFiller(source, options.progress, options.relocate)),
        num_threads=options.num_threads,
    )  # fmt: skip


@contextmanager
def sourced(
    store: Store, chunks: Sequence[StoredChunk], options: ReadOptions
) -> Iterator[tuple[Restored, ReadOptions]]:
    """What the two passes over `chunks` read from: a local store itself, else one that stages what is verified.

    Returns:
        It, and the options with who is asked for what is not there any more.
    """
    if store.abilities.local:
        yield store, options
        return
    places = {chunk.digest: chunk.places for chunk in chunks}

    def again(digest: Digest, tried: Collection[str]) -> Sequence[Location]:
        if STAGED in tried:
            return places[digest]
        if options.relocate is None:
            raise NotFoundError(f"chunk {short(digest)}: none of its packs is there any more")
        return options.relocate(digest, tried)

    with staging(store, [(chunk.digest, chunk.num_bytes) for chunk in chunks], bytes_to_read(chunks)) as source:
        yield source, replace(options, relocate=again)


def verify_chunks(
    source: Restored, chunks: Sequence[StoredChunk], options: ReadOptions, *, may_read_twice: bool = False,
    announced: bool = True,
) -> list[StoredChunk]:  # fmt: skip
    """Read and hash what is wanted of all chunks; each then has the `extents` that hold it.

    Errors as for `fetch_chunks`; `source` and `options` from `sourced`.

    Args:
        may_read_twice: Whoever fills the targets reads again what was read past the page cache.
        announced: What is read is announced to a local store ahead of time.
    Returns:
        Those that were read past the page cache.
    """
    found: list[StoredChunk] = []

    def past_cache(some: Sequence[StoredChunk]) -> None:
        found.extend(some)
        Blocks(cast(ReadsPastCache, source), options).read(some, checked)

    def through_cache(some: Sequence[StoredChunk]) -> None:
        _through_cache(
            source, _announced(cast(Store, source), some) if announced else some, options, ChunkFiller.verify
        )

    with phase(options.progress, "verifying", sum(chunk.num_bytes for chunk in chunks)):
        if isinstance(source, StagedStore):
            arrivals = Arrivals(source, options)
            arrivals.read(chunks, arrivals.staged)
        elif may_read_twice:
            both_ways(source, chunks, past_cache, through_cache, worth=WORTH_A_SECOND_READ)
        else:
            through_cache(chunks)
    return found


def _announced(store: Store, chunks: Sequence[StoredChunk]) -> Iterator[StoredChunk]:
    """The chunks in order, each announced to the store `LOOKAHEAD` chunks before its turn, unless it is in memory."""
    there = packs_in_memory(store, chunks) if bytes_to_read(chunks) >= WORTH_PROBING_BYTES else ()
    if all(chunk.places[0].pack in there for chunk in chunks):
        yield from chunks
        return
    for at, chunk in enumerate(chunks):
        first = at + LOOKAHEAD if at else 0
        for ahead in chunks[first : at + LOOKAHEAD + 1]:
            place = ahead.places[0]
            if not ahead.by_leaves and place.pack not in there:
                store.prefetch(place.pack, place.offset, place.header_bytes + place.stored_bytes)
        yield chunk


# --- through the page cache, or past it ---------------------------------------------------------


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


def both_ways(
    store: Store, chunks: Sequence[StoredChunk], past_cache: Callable[[Sequence[StoredChunk]], object],
    through_cache: Callable[[Sequence[StoredChunk]], object], *, worth: float,
) -> None:  # fmt: skip
    """Read all chunks: those that are not in memory as `read_not_in_memory` does, and others through the page cache."""
    if isinstance(store, ReadsPastCache) and bytes_to_read(chunks) >= WORTH_BYTES:
        there = packs_in_memory(store, chunks)
        cold = [chunk for chunk in chunks if chunk.places[0].pack not in there]
        if bytes_to_read(cold) >= WORTH_BYTES:
            read_not_in_memory(cold, past_cache, through_cache, worth=worth)
            chunks = [chunk for chunk in chunks if chunk.places[0].pack in there]
    through_cache(chunks)


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


# --- new arrays ---------------------------------------------------------------------------------


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
            filler.fill_once(chunk)
    else:
        fetch_chunks(store, list(chunks.values()), progress=SILENT, relocate=relocate, one_pass=True)
    return out


# --- memory --------------------------------------------------------------------------------------
# What a restore takes, at most, besides the targets:
#
#     what it knows of the state   `ENTRY_BYTES` for each tensor, `CHUNK_BYTES` for each chunk
#     the database, and threads    `FIXED_BYTES`
#     each thread                  of an encoded chunk: the payload, what it is decoded to, a plane, and where it waits
#     over a network               spans that are read at one time: half of the budget (`Arrivals.plan`)
#     among ranks                  a round of messages that go out and one that comes in, and copies of both
#
# What comes out takes no more than the budget, unless that is less than `least_bytes`, which works.

FIXED_BYTES = 20 * 1024 * 1024
ENTRY_BYTES = 1_000
CHUNK_BYTES = 700
"""Measured (docs/benchmarks/memory.md): of a checkout of 100,000 small tensors, of a chunk each."""

ENCODED_COPIES, PLAIN_COPIES = 4, 2
LONGEST_BYTES = 4 * 1024 * 1024
"""Chunks are cut to about this (objects/spec.py)."""

ROUND_COPIES = 4


def threads_within(budget_bytes: int, chunks: Sequence[StoredChunk], num_threads: int) -> int:
    """So many threads, or as many of them as fit, with these chunks; one always."""
    left = budget_bytes - FIXED_BYTES - len(chunks) * (ENTRY_BYTES + CHUNK_BYTES)
    longest = 1
    for chunk in chunks:
        is_plain = all(place.encoding == codec.RAW for place in chunk.places)
        longest = max(longest, chunk.num_bytes * (PLAIN_COPIES if is_plain else ENCODED_COPIES))
    return max(1, min(num_threads, left // longest))


def round_bytes(budget_bytes: int, num_chunks: int, *, most: int) -> int:
    """What a rank sends, and gets, in one round: `most`, or what fits."""
    left = budget_bytes - FIXED_BYTES - num_chunks * (ENTRY_BYTES + CHUNK_BYTES)
    return max(LEAF_BYTES, min(most, left // (2 * ROUND_COPIES)))


def least_bytes(num_entries: int, num_chunks: int) -> int:
    """Least memory of a restore."""
    return FIXED_BYTES + num_entries * ENTRY_BYTES + num_chunks * CHUNK_BYTES + 2 * ENCODED_COPIES * LONGEST_BYTES
