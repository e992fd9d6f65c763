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

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TypeAlias

import numpy as np

from cas_ckpt.errors import NotFoundError
from cas_ckpt.memory import memory_budget
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.objects.pack import Location
from cas_ckpt.objects.spec import Box, Grid, raw_dtype
from cas_ckpt.progress import SILENT, Progress, phase
from cas_ckpt.storage.store import ReadsPastCache, Store
from cas_ckpt.transfer.arrivals import bytes_to_read, fill_as_they_arrive, stage_as_they_arrive
from cas_ckpt.transfer.chunk_reader import Relocate
from cas_ckpt.transfer.filling import ChunkFiller, NewArray, StoredChunk, cell_part
from cas_ckpt.transfer.hashing import Array
from cas_ckpt.transfer.past_cache import (
    WORTH_A_SECOND_READ,
    WORTH_KEEPING,
    fill_past_cache,
    not_in_memory,
    packs_in_memory,
    read_not_in_memory,
    verify_past_cache,
)
from cas_ckpt.transfer.restore_memory import threads_within
from cas_ckpt.transfer.sources import STAGED, StagedStore, staging
from cas_ckpt.transfer.workers import default_threads, run_all

WORTH_PROBING_BYTES = 64 * 1024 * 1024
"""From so much on it is looked at whether the page cache has what is read."""

LOOKAHEAD = 8
"""Chunks whose reading is announced to a local store ahead of time."""


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
    one_pass: bool = False,
) -> None:
    """Verify all chunks, then fill all their parts; or do both chunk by chunk.

    Args:
        chunks: In the order in which they are stored, see `core.chunks.place_chunks`.
        num_threads: That hash and copy at one time; how many requests run at one time, the store says.
        memory_bytes: Most memory that this takes beyond the targets; None: see memory.py.
        relocate: Asked when a pack was collected under the restore.
        on_verified: Called before the first target is touched.
        one_pass: The targets may be touched before all is verified: each byte is read once, and verified where it is
            put, or on its way there.
    Raises:
        CorruptionError, NotFoundError: named by tensor; raised before any target was touched. In one pass: chunks of
            which something may have been written are marked as `touched`.
    """
    memory_bytes = memory_budget(memory_bytes)
    num_threads = threads_within(memory_bytes, chunks, num_threads)
    if one_pass:
        on_verified()
        with phase(progress, "restoring", sum(chunk.wanted_bytes for chunk in chunks)):
            fill_once(
                store, chunks, num_threads=num_threads, memory_bytes=memory_bytes, progress=progress, relocate=relocate
            )
        return
    with sourced(store, chunks, relocate) as (source, relocate):
        verify_chunks(
            source, chunks, num_threads=num_threads, memory_bytes=memory_bytes, progress=progress, relocate=relocate,
            may_read_twice=True,
        )  # fmt: skip
        on_verified()
        with phase(progress, "restoring", sum(chunk.wanted_bytes for chunk in chunks)):
            if isinstance(store, ReadsPastCache) and (again := [chunk for chunk in chunks if chunk.past_cache]):
                fill_past_cache(
                    store, again, num_threads=num_threads, memory_bytes=memory_bytes, progress=progress,
                    relocate=relocate,
                )  # fmt: skip
                chunks = [chunk for chunk in chunks if not chunk.past_cache]
            if isinstance(source, StagedStore):
                again = [chunk for chunk in chunks if chunk.extents[0].pack != STAGED]
                fill_as_they_arrive(
                    store, again, num_threads=num_threads, memory_bytes=memory_bytes, progress=progress,
                    relocate=relocate,
                )  # fmt: skip
                chunks = [chunk for chunk in chunks if not chunk.filled]
            run_all(chunks, lambda: ChunkFiller(source, progress, relocate).fill, num_threads=num_threads)


def fill_once(
    store: Store, chunks: Sequence[StoredChunk], *, num_threads: int, memory_bytes: int, progress: Progress,
    relocate: Relocate | None,
) -> None:  # fmt: skip
    """Read and verify all chunks, and fill their parts at once: for targets that may be touched before all is verified.

    Args:
        chunks: Each once.
    """
    if not store.abilities.local:
        fill_as_they_arrive(
            store, chunks, num_threads=num_threads, memory_bytes=memory_bytes, progress=progress, relocate=relocate
        )
        return

    def through_cache(some: Sequence[StoredChunk]) -> None:
        announced = _announced(store, some)
        run_all(announced, lambda: ChunkFiller(store, progress, relocate).fill_once, num_threads=num_threads)

    if isinstance(store, ReadsPastCache) and (cold := not_in_memory(store, chunks)):
        past = partial(
            fill_past_cache, store, num_threads=num_threads, memory_bytes=memory_bytes, progress=progress,
            relocate=relocate,
        )  # fmt: skip
        read_not_in_memory(cold, past, through_cache, worth=WORTH_KEEPING)
        chunks = [chunk for chunk in chunks if not chunk.filled]
    through_cache(chunks)


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

    with staging(store, [(chunk.digest, chunk.num_bytes) for chunk in chunks], bytes_to_read(chunks)) as source:
        yield source, again


def verify_chunks(
    source: Restored,
    chunks: Sequence[StoredChunk],
    *,
    num_threads: int,
    memory_bytes: int,
    progress: Progress,
    relocate: Relocate | None = None,
    may_read_twice: bool = False,
    announced: bool = True,
) -> None:
    """Read and hash what is wanted of all chunks; each then has the `extents` that hold it.

    Arguments and errors as for `fetch_chunks`, `source` and `relocate` from `sourced`.

    Args:
        may_read_twice: Whoever fills the targets reads again what is `past_cache` after this.
        announced: What is read is announced to a local store ahead of time.
    """
    num_bytes = 0
    for chunk in chunks:
        num_bytes += chunk.num_bytes
    with phase(progress, "verifying", num_bytes):
        if isinstance(source, StagedStore):
            stage_as_they_arrive(
                source, chunks, num_threads=num_threads, memory_bytes=memory_bytes, progress=progress,
                relocate=relocate,
            )  # fmt: skip
            return

        def through_cache(some: Sequence[StoredChunk]) -> None:
            run_all(
                _announced(source, some) if announced else some,
                lambda: ChunkFiller(source, progress, relocate).verify, num_threads=num_threads,
            )  # fmt: skip

        if may_read_twice and isinstance(source, ReadsPastCache) and (cold := not_in_memory(source, chunks)):
            past = partial(
                verify_past_cache, source, num_threads=num_threads, memory_bytes=memory_bytes, progress=progress,
                relocate=relocate,
            )  # fmt: skip
            read_not_in_memory(cold, past, through_cache, worth=WORTH_A_SECOND_READ)
            chunks = [chunk for chunk in chunks if not chunk.extents]
        through_cache(chunks)


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
            filler.fill_once(chunk)
    else:
        fetch_chunks(
            store, list(chunks.values()), num_threads=default_threads(), memory_bytes=memory_bytes, progress=SILENT,
            relocate=relocate, one_pass=True,
        )  # fmt: skip
    return out
