"""Runs a save: hash every cell, hand what is new to the packs.

Invariant: what is written under an id is bytes that were hashed *as written*: a chunk that
looks new is copied first and the copy is hashed, so that a tensor that somebody changes
meanwhile can never put wrong bytes under an id. Memory is bounded by the buffers here and
in pack_writer.py, whatever the size of the model.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from cas_ckpt.objects import codec
from cas_ckpt.objects.digest import Digest, chunk_id, leaf_digests
from cas_ckpt.objects.spec import Grid, Spec
from cas_ckpt.objects.state import ArraySource
from cas_ckpt.progress import Progress
from cas_ckpt.transfer.hashing import Array, CellHasher, as_raw, cell_groups, gather
from cas_ckpt.transfer.pack_writer import NUM_WRITERS, QUEUED_BATCHES, ChunkSink, EncodedChunk
from cas_ckpt.transfer.workers import run_all

BATCH_BYTES = 4 * 1024 * 1024
"""Cells that are taken, asked about and written together: one large one, or many small ones."""

SPARE_BUFFERS = QUEUED_BATCHES + NUM_WRITERS + 1
"""Buffers beyond one for each hashing thread: those that wait in the sink, and are being written."""

KEPT_BUFFERS = 12
"""Buffers of `BATCH_BYTES` that a process keeps for its next commit: new memory costs more than the copy into it."""

ALIGNED_BYTES = 64
"""Where cells begin in a buffer: at multiples of the largest item, and of a line of the processor's cache."""


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

    @property
    def room(self) -> int:
        """Bytes that a cell takes of a buffer; the next one begins aligned."""
        return -(-math.prod(self.grid.cell) * self.item_bytes // ALIGNED_BYTES) * ALIGNED_BYTES

    def num_bytes(self, cell: int) -> int:
        """Bytes of one cell."""
        return self.grid.cell_elements(cell) * self.item_bytes


class Claims:
    """Decides, for all threads, which chunks this commit has to write.

    Args:
        known: Says for ids whether a live copy is stored; asked once about each id that has none.
    """

    def __init__(self, known: Callable[[Sequence[Digest]], Sequence[bool]]) -> None:
        self._known = known
        self._missing: set[Digest] = set()
        self._claimed: set[Digest] = set()
        self._lock = threading.Lock()

    def unknown(self, ids: Sequence[Digest]) -> list[int]:
        """Positions of the ids that are neither stored nor claimed."""
        missing = self._without_copy(ids)
        return [at for at, digest in enumerate(ids) if digest in missing and digest not in self._claimed]

    def claim(self, digest: Digest) -> bool:
        """True for exactly one caller, who must write the chunk; False if it is stored."""
        return self.claim_all((digest,))[0]

    def claim_all(self, digests: Sequence[Digest]) -> list[bool]:
        """The same for many at once; the first of equals is the one that must be written."""
        missing = self._without_copy(digests)
        claimed = []
        with self._lock:
            for digest in digests:
                is_new = digest in missing and digest not in self._claimed
                if is_new:
                    self._claimed.add(digest)
                claimed.append(is_new)
        return claimed

    def _without_copy(self, ids: Sequence[Digest]) -> set[Digest]:
        """Ids without a stored copy, among them all of `ids` that have none."""
        asked = [digest for digest in ids if digest not in self._missing]
        if asked:
            stored = self._known(asked)
            self._missing.update(digest for digest, there in zip(asked, stored, strict=True) if not there)
        return self._missing


_kept: deque[Array] = deque(maxlen=KEPT_BUFFERS)


class _Buffers:
    """A bounded set of buffers, made when first needed; those of the usual size outlive the commit."""

    def __init__(self, count: int) -> None:
        self._free = threading.Semaphore(count)

    def take(self, num_bytes: int) -> Array:
        """A buffer of at least `num_bytes`; waits while all are in use."""
        self._free.acquire()
        if num_bytes > BATCH_BYTES:
            return np.empty(num_bytes, np.uint8)
        try:
            return _kept.pop()
        except IndexError:
            return np.empty(BATCH_BYTES, np.uint8)

    def give(self, buffer: Array) -> None:
        """Take `buffer` back; nobody may look at it any more."""
        if len(buffer) == BATCH_BYTES:
            _kept.append(buffer)
        self._free.release()


Unit: TypeAlias = tuple[TensorWork, range]
"""Cells of one tensor that are best hashed together."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """One cell to be copied: where its bytes come from and how many they are."""

    work: TensorWork
    number: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Copy:
    """A cell's bytes in a buffer, hashed there."""

    cell: _Cell
    data: memoryview
    leaves: list[Digest]
    digest: Digest


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

    def make_worker() -> Callable[[list[Unit]], None]:
        return _BatchSaver(sink, claims, buffers, policy, progress, expect_new).save

    run_all(_batches(_units(works)), make_worker, num_threads=num_threads)


def _units(works: Iterable[TensorWork]) -> Iterator[Unit]:
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


def _batches(units: Iterable[Unit]) -> Iterator[list[Unit]]:
    """Units that follow one another, as many as fit `BATCH_BYTES` together; a larger one stands alone."""
    batch: list[Unit] = []
    num_bytes = 0
    for work, group in units:
        num_bytes += len(group) * work.room
        if batch and num_bytes > BATCH_BYTES:
            yield batch
            batch, num_bytes = [], len(group) * work.room
        batch.append((work, group))
    if batch:
        yield batch


def _runs(cells: Iterable[_Cell]) -> Iterator[list[_Cell]]:
    """Cells that follow one another, as many as fit one buffer together; a longer one stands alone."""
    run: list[_Cell] = []
    num_bytes = 0
    for cell in cells:
        num_bytes += cell.work.room
        if run and num_bytes > BATCH_BYTES:
            yield run
            run, num_bytes = [], cell.work.room
        run.append(cell)
    if run:
        yield run


class _BatchSaver:
    """Saves batches of cells, one thread's worth of them.

    Hashes in place while chunks turn out to be known, copies first while they turn out new:
    an unchanged state is hashed where it lies, a new one is hashed once. What is stored is asked
    once a batch.
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

    def save(self, batch: list[Unit]) -> None:
        """Name every chunk of the batch and hand the new ones to the sink."""
        cells = [_Cell(work, number, work.num_bytes(number)) for work, group in batch for number in group]
        todo = cells if self._expect_new else self._hash_in_place(batch, cells)
        num_new = sum(self._copy_and_write(run) for run in _runs(todo))
        self._expect_new = num_new * 2 > len(cells)
        self._progress.advance(sum(cell.num_bytes for cell in cells))

    def _hash_in_place(self, batch: list[Unit], cells: list[_Cell]) -> list[_Cell]:
        """Name the chunks; those cells whose chunks are not stored."""
        leaves = [
            digests
            for work, group in batch
            for digests in self._hasher.group_digests(work.source, work.grid, group, work.item_bytes)
        ]
        ids = [chunk_id(cell.num_bytes, digests) for cell, digests in zip(cells, leaves, strict=True)]
        for cell, digest in zip(cells, ids, strict=True):
            cell.work.chunks[cell.number] = digest
        return [cells[at] for at in self._claims.unknown(ids)]

    def _copy_and_write(self, run: list[_Cell]) -> int:
        """Copy cells that fit one buffer, hash the copies, and write those that nobody has; how many those are."""
        buffer = self._buffers.take(sum(cell.work.room for cell in run))
        try:
            copies = self._copied(run, buffer)
            claimed = self._claims.claim_all([copy.digest for copy in copies])
            chunks = [self._encode(copy) for copy, is_new in zip(copies, claimed, strict=True) if is_new]
        except BaseException:
            self._buffers.give(buffer)
            raise
        self._sink.put_all(chunks, release=lambda: self._buffers.give(buffer))
        return len(chunks)

    def _copied(self, run: list[_Cell], buffer: Array) -> list[_Copy]:
        copies = []
        at = 0
        for cell in run:
            work = cell.work
            array = as_raw(work.source.read(work.grid.box(cell.number)), work.item_bytes)
            data = gather(array, buffer[at:])
            leaves = leaf_digests(data, work.grid.leaf_bytes)
            digest = work.chunks[cell.number] = chunk_id(len(data), leaves)
            copies.append(_Copy(cell, data, leaves, digest))
            at += work.room
        return copies

    def _encode(self, copy: _Copy) -> EncodedChunk:
        work = copy.cell.work
        encoded = codec.encode_extent(copy.data, policy=self._policy, item_bytes=work.item_bytes)
        return EncodedChunk(
            copy.digest, len(copy.data), work.grid.leaf_bytes, copy.leaves, encoded.encoding, encoded.payload
        )
