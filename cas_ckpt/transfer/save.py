"""Runs a save: hash every cell, hand what is new to the packs.

Invariant: what is written under an id is bytes that were hashed *as written*: a chunk that
looks new is copied first and the copy is hashed, so that a tensor that somebody changes
meanwhile can never put wrong bytes under an id. Memory is bounded by the buffers here and
in pack_writer.py, whatever the size of the model.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from cas_ckpt.objects import codec
from cas_ckpt.objects.digest import Digest, chunk_id, leaf_digests
from cas_ckpt.objects.spec import Grid, Spec
from cas_ckpt.objects.state import ArraySource
from cas_ckpt.progress import Progress
from cas_ckpt.transfer.hashing import Array, CellHasher, as_raw, cell_groups, gather
from cas_ckpt.transfer.pack_writer import NUM_WRITERS, QUEUED_CHUNKS, ChunkSink, EncodedChunk
from cas_ckpt.transfer.workers import run_all

SPARE_BUFFERS = QUEUED_CHUNKS + NUM_WRITERS
"""Chunk buffers beyond one for each hashing thread: those that wait in the sink, and are being written."""


@dataclass(slots=True)
class TensorWork:
    """One tensor to be hashed, and where its chunk ids go.

    Attributes:
        cells: Numbers of the cells to hash, or None for all; others keep what `chunks` has.
        banded: `source` answers boxes over several cells beside one another.
        chunks: One id per cell, in C order; filled by `save_tensors`.
    """

    spec: Spec
    grid: Grid
    source: ArraySource
    cells: frozenset[int] | None = None
    banded: bool = True
    chunks: list[Digest | None] = field(default_factory=list)
    item_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.item_bytes = self.spec.item_bytes


class Claims:
    """Decides, for all threads, which chunks this commit has to write.

    Args:
        known: Says for ids whether a live copy is stored; asked with few ids at a time.
    """

    def __init__(self, known: Callable[[Sequence[Digest]], Sequence[bool]]) -> None:
        self._known = known
        self._claimed: set[Digest] = set()
        self._lock = threading.Lock()

    def unknown(self, ids: Sequence[Digest]) -> list[int]:
        """Positions of the ids that are neither stored nor claimed."""
        stored = self._known(ids)
        return [at for at, digest in enumerate(ids) if not stored[at] and digest not in self._claimed]

    def claim(self, digest: Digest) -> bool:
        """True for exactly one caller, who must write the chunk; False if it is stored."""
        return self.claim_all((digest,))[0]

    def claim_all(self, digests: Sequence[Digest]) -> list[bool]:
        """The same for many at once; the first of equals is the one that must be written."""
        stored = self._known(digests) if digests else ()
        claimed = []
        with self._lock:
            for digest, is_stored in zip(digests, stored, strict=True):
                is_new = not is_stored and digest not in self._claimed
                if is_new:
                    self._claimed.add(digest)
                claimed.append(is_new)
        return claimed


class _Buffers:
    """A bounded set of chunk buffers, made when first needed."""

    def __init__(self, count: int) -> None:
        self._free: queue.SimpleQueue[Array] = queue.SimpleQueue()
        self._unmade = threading.Semaphore(count)

    def take(self, num_bytes: int) -> Array:
        """A buffer of at least `num_bytes`; waits while all are in use."""
        buffer = self._any()
        return buffer if len(buffer) >= num_bytes else np.empty(num_bytes, np.uint8)

    def _any(self) -> Array:
        try:
            return self._free.get_nowait()
        except queue.Empty:
            if self._unmade.acquire(blocking=False):
                return np.empty(0, np.uint8)
            return self._free.get()

    def give(self, buffer: Array) -> None:
        self._free.put(buffer)


def save_tensors(
    works: Iterable[TensorWork],
    sink: ChunkSink,
    *,
    claims: Claims,
    policy: codec.EncodingPolicy,
    num_threads: int,
    expect_new: bool,
    progress: Progress,
) -> None:
    """Fill `chunks` of every work; whatever is not stored yet has been handed to `sink`.

    Args:
        works: Taken one by one, by whichever thread is free: may be a generator.
        expect_new: Start by copying before hashing (right when most chunks are new).
    Raises:
        Whatever a source, the store or a worker raised; the caller then aborts the sink.
    """
    buffers = _Buffers(num_threads + SPARE_BUFFERS)

    def make_worker() -> Callable[[tuple[TensorWork, range]], None]:
        saver = _GroupSaver(sink, claims, buffers, policy, progress, expect_new)
        return lambda unit: saver.save(*unit)

    run_all(_units(works), make_worker, num_threads=num_threads)


def _units(works: Iterable[TensorWork]) -> Iterator[tuple[TensorWork, range]]:
    for work in works:
        work.chunks = work.chunks or [None] * work.grid.num_cells
        if work.cells is None:
            yield from ((work, group) for group in cell_groups(work.grid, work.item_bytes))
        elif work.cells:
            yield from ((work, group) for group in _groups_within(work, work.cells))


def _groups_within(work: TensorWork, cells: frozenset[int]) -> Iterator[range]:
    """Whole groups where all their cells are wanted, single cells elsewhere."""
    for group in cell_groups(work.grid, work.item_bytes):
        wanted = [cell for cell in group if cell in cells]
        if work.banded and len(wanted) == len(group):
            yield group
        else:
            yield from (range(cell, cell + 1) for cell in wanted)


class _GroupSaver:
    """Saves groups of cells, one thread's worth of them.

    Hashes in place while chunks turn out to be known, copies first while they turn out new:
    an unchanged state is hashed where it lies, a new one is hashed once.
    """

    def __init__(
        self, sink: ChunkSink, claims: Claims, buffers: _Buffers, policy: codec.EncodingPolicy,
        progress: Progress, expect_new: bool,
    ) -> None:  # fmt: skip
        self._sink = sink
        self._claims = claims
        self._buffers = buffers
        self._policy = policy
        self._progress = progress
        self._expect_new = expect_new
        self._hasher = CellHasher()

    def save(self, work: TensorWork, group: range) -> None:
        """Name every chunk of the group and hand the new ones to the sink."""
        todo = list(group) if self._expect_new else self._hash_in_place(work, group)
        num_new = sum(self._copy_and_write(work, cell) for cell in todo)
        self._expect_new = num_new * 2 > len(group)
        elements = sum(work.grid.cell_elements(cell) for cell in group)
        self._progress.advance(elements * work.item_bytes)

    def _hash_in_place(self, work: TensorWork, group: range) -> list[int]:
        item_bytes = work.item_bytes
        digests = self._hasher.group_digests(work.source, work.grid, group, item_bytes)
        ids = []
        for cell, leaves in zip(group, digests, strict=True):
            num_bytes = work.grid.cell_elements(cell) * item_bytes
            ids.append(chunk_id(num_bytes, leaves))
            work.chunks[cell] = ids[-1]
        return [group[at] for at in self._claims.unknown(ids)]

    def _copy_and_write(self, work: TensorWork, cell: int) -> bool:
        """Copy, hash the copy, and write it if nobody has it; True if it was new."""
        buffer = self._buffers.take(work.grid.cell_elements(cell) * work.item_bytes)
        try:
            array = as_raw(work.source.read(work.grid.box(cell)), work.item_bytes)
            data = gather(array, buffer)
            leaves = leaf_digests(data, work.grid.leaf_bytes)
            digest = work.chunks[cell] = chunk_id(len(data), leaves)
            is_new = self._claims.claim(digest)
            if is_new:
                chunk = self._encode(work, digest, leaves, data, buffer)
        except BaseException:
            self._buffers.give(buffer)
            raise
        if not is_new:
            self._buffers.give(buffer)
            return False
        self._sink.put(chunk)
        return True

    def _encode(
        self, work: TensorWork, digest: Digest, leaves: list[Digest], data: memoryview, buffer: Array
    ) -> EncodedChunk:
        encoded = codec.encode_extent(data, policy=self._policy, item_bytes=work.item_bytes)
        return EncodedChunk(
            digest, len(data), work.grid.leaf_bytes, leaves, encoded.encoding, encoded.payload,
            release=lambda: self._buffers.give(buffer),
        )  # fmt: skip
