"""Runs a save: hash every cell, hand what is new to the packs.

Invariant: what is written under an id is bytes that were hashed *as written*: a chunk that
looks new is copied first and the copy is hashed, so that a tensor that somebody changes
meanwhile can never put wrong bytes under an id. Memory is bounded by the threads, which each
write what they hashed, whatever the size of the model.

The bytes of cells that were copied are in buffers that outlive the commit (`Buffers`): memory that is new to a process
costs more than the copy into it. Cells whose leaves can be hashed where the tensors are, on a GPU for one, are named
without being read (`named_in_place`); what of them is not stored is copied and hashed on the host as any other, so
nothing is ever written under an id that another's digests made. Knows nothing of devices.

How many threads there are is planned (`divide`, pure). What a save takes, at most, besides the state:

    what it knows of the state   `ENTRY_BYTES` for each tensor and value, `CELL_BYTES` for each cell
    the database, and threads    `FIXED_BYTES`
    each pack being written      what the store says (`Abilities.writer_bytes`), and `in_flight_bytes` of the store once
    each thread                  scratch for a cell, or two copies of it while it is encoded; what its source reads at
                                 a time, unless that is memory of the state; a buffer: cells that are copied, and what
                                 they became when they were encoded

That is no more than the budget, unless the budget is less than `least_bytes`, which works.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, filterfalse, groupby
from operator import not_
from typing import TypeAlias

import numpy as np

from cas_ckpt import native
from cas_ckpt.memory import aligned
from cas_ckpt.objects import codec
from cas_ckpt.objects.digest import Digest, chunk_id
from cas_ckpt.objects.spec import Grid, Spec, as_raw
from cas_ckpt.objects.state import ArraySource, CellsToName, LeafHasher, is_of_one_moment, is_private, saved
from cas_ckpt.parallel.workers import run_all
from cas_ckpt.progress import Progress
from cas_ckpt.storage.store import Abilities
from cas_ckpt.transfer.hashing import Array
from cas_ckpt.transfer.pack_writer import NUM_WRITERS, ChunkSink, EncodedChunk

BATCH_BYTES = 4 * 1024 * 1024
"""Cells that are taken, asked about and written together: one large one, or many small ones."""

KEPT_BUFFERS = 12
"""Buffers of `BATCH_BYTES` that a process keeps for its next commit."""

_kept: deque[Array] = deque(maxlen=KEPT_BUFFERS)


class Buffers:
    """The buffers of one commit, made when first needed; those of the usual size outlive it. For all threads."""

    def __init__(self) -> None:
        self._free: list[Array] = []

    def take(self, num_bytes: int = BATCH_BYTES) -> Array:
        """A buffer of at least `num_bytes`."""
        if num_bytes > BATCH_BYTES:
            return np.empty(num_bytes, np.uint8)
        for free in (self._free, _kept):
            with suppress(IndexError):
                return free.pop()
        return np.empty(BATCH_BYTES, np.uint8)

    def give(self, buffer: Array) -> None:
        """Take `buffer` back; it must not be used any more."""
        if len(buffer) == BATCH_BYTES:
            self._free.append(buffer)

    def keep(self) -> None:
        """Leave some of what was given back to the next commit, drop the others."""
        _kept.extend(self._free)
        self._free.clear()


@dataclass(slots=True)
class TensorWork:
    """One tensor to be hashed, and where its chunk ids go.

    Attributes:
        cells: Numbers of the cells to hash, or None for all; others keep what `chunks` has.
        is_new: The chunks of `cells` are not stored, as far as is known: they are copied before they are hashed.
        chunks: One id per cell, in C order; filled by `save_tensors`.
        room: Bytes that a cell takes of a buffer; the next one begins aligned.
    """

    spec: Spec
    grid: Grid
    source: ArraySource
    cells: frozenset[int] | None = None
    is_new: bool = False
    chunks: list[Digest | None] = field(default_factory=list)
    item_bytes: int = field(init=False)
    room: int = field(init=False)

    def __post_init__(self) -> None:
        self.item_bytes = self.spec.item_bytes
        self.room = aligned(math.prod(self.grid.cell) * self.item_bytes)

    def cell_bytes(self, number: int) -> int:
        """Bytes of a cell."""
        return self.grid.cell_elements(number) * self.item_bytes


Unit: TypeAlias = tuple[TensorWork, int]
"""One cell of a tensor, by its number."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """One cell to be saved.

    Attributes:
        leaves: What was hashed of bytes that nobody changes any more.
    """

    work: TensorWork
    number: int
    leaves: bytes | None = None


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
        if self._all_stored(ids):
            return []
        return [at for at, digest in enumerate(ids) if digest in self._missing and digest not in self._claimed]

    def claim_all(self, digests: Sequence[Digest]) -> list[bool]:
        """True for those that the caller must write: not stored, and not claimed before; of equals the first."""
        if self._all_stored(digests):
            return [False] * len(digests)
        claimed = []
        with self._lock:
            for digest in digests:
                is_new = digest in self._missing and digest not in self._claimed
                if is_new:
                    self._claimed.add(digest)
                claimed.append(is_new)
        return claimed

    def _all_stored(self, ids: Sequence[Digest]) -> bool:
        """Ask about all ids that are not known to be missing; whether none is."""
        asked = list(filterfalse(self._missing.__contains__, ids))
        stored = self._known(asked) if asked else ()
        if all(stored):
            return len(asked) == len(ids)
        self._missing.update(compress(asked, map(not_, stored)))
        return False


def save_tensors(
    works: Iterable[TensorWork],
    sink: ChunkSink,
    *,
    claims: Claims,
    policy: codec.EncodingPolicy,
    num_threads: int,
    expect_new: bool,
    progress: Progress,
    buffers: Buffers,
    read_later: Callable[[TensorWork], bool],
) -> None:
    """Fill `chunks` of every work; whatever is not stored yet has been written to `sink`.

    Args:
        works: Taken one by one, by whichever thread is free: may be a generator.
        expect_new: Start by copying before hashing (right when most chunks are new).
        buffers: For copies.
        read_later: Whether a work is read after this, too; the sources of all others are told that they are saved as
            soon as none of their cells is read any more.
    Raises:
        Whatever a source, the store or a worker raised; the caller then aborts the sink.
    """
    left = _Left(read_later)
    make_worker = partial(_BatchSaver, sink, claims, buffers, policy, progress, expect_new, left)
    batches = _batches(left.counted(works))
    if num_threads > 1:
        run_all(batches, make_worker, num_threads=num_threads)
        return
    worker = make_worker()
    for batch in batches:
        worker(batch)


class _Left:
    """Counts, for all threads, the cells that have still to be saved of sources that are told when none is left."""

    def __init__(self, read_later: Callable[[TensorWork], bool]) -> None:
        self._read_later = read_later
        self._cells: dict[int, int] = {}
        self._lock = threading.Lock()

    def counted(self, works: Iterable[TensorWork]) -> Iterator[TensorWork]:
        """`works`, each counted as it is taken."""
        for work in works:
            if hasattr(work.source, "saved") and not self._read_later(work):
                number = work.grid.num_cells if work.cells is None else len(work.cells)
                if number:
                    with self._lock:
                        self._cells[id(work)] = number
                else:
                    saved(work.source)
            yield work

    def done(self, batch: list[Unit]) -> None:
        """These are saved."""
        finished = []
        with self._lock:
            for work, _ in batch:
                number = self._cells.get(id(work), 0)
                if number:
                    self._cells[id(work)] = number - 1
                if number == 1:
                    finished.append(work)
        for work in finished:
            saved(work.source)


def _batches(works: Iterable[TensorWork]) -> Iterator[list[Unit]]:
    """Units that follow one another, as many as fit `BATCH_BYTES` together; a larger one is a batch by itself.

    Those of works that are known to be new are not together with others.
    """
    batch: list[Unit] = []
    num_bytes = 0
    for work in works:
        if batch and batch[0][0].is_new != work.is_new:
            yield batch
            batch, num_bytes = [], 0
        work.chunks = work.chunks or [None] * work.grid.num_cells
        for number in range(work.grid.num_cells) if work.cells is None else sorted(work.cells):
            num_bytes += work.room
            if batch and num_bytes > BATCH_BYTES:
                yield batch
                batch, num_bytes = [], work.room
            batch.append((work, number))
    if batch:
        yield batch


class _BatchSaver:
    """Saves batches of cells, one thread's worth of them.

    Hashes in place while chunks turn out to be known, copies first while they turn out new:
    an unchanged state is hashed where it is, a new one is hashed once. What is stored is asked
    once a batch.
    """

    def __init__(
        self, sink: ChunkSink, claims: Claims, buffers: Buffers, policy: codec.EncodingPolicy,
        progress: Progress, expect_new: bool, left: _Left,
    ) -> None:  # fmt: skip
        self._left = left
        self._sink = sink
        self._claims = claims
        self._buffers = buffers
        self._policy = policy
        self._progress = progress
        self._expect_new = expect_new

    def __call__(self, batch: list[Unit]) -> None:
        """Name every chunk of the batch and write the new ones."""
        is_new = batch[0][0].is_new
        if is_new or self._expect_new:
            cells = [_Cell(work, number) for work, number in batch]
        else:
            cells = self._hash_in_place(batch)
        num_new = room = 0
        run: list[_Cell] = []  # those that fit one buffer together; a longer one is a run by itself
        for cell in cells:
            room += cell.work.room
            if run and room > BATCH_BYTES:
                num_new += self._copy_and_write(run)
                run, room = [], cell.work.room
            run.append(cell)
        if run:
            num_new += self._copy_and_write(run)
        if not is_new:
            self._expect_new = num_new * 2 > len(batch)
        self._left.done(batch)
        self._progress.advance(sum(work.cell_bytes(number) for work, number in batch))

    def _hash_in_place(self, batch: list[Unit]) -> list[_Cell]:
        """Name the chunks; those cells whose chunks are not stored.

        Of an unchanged state this is all that happens, with the interpreter's lock held but for the hashing itself: a
        microsecond here costs each thread one.
        """
        cells: list[tuple[TensorWork, int, bytes | None]] = []
        ids: list[Digest] = []
        for work, number in batch:
            stays = is_of_one_moment(work.source)  # asked before it is read
            array = as_raw(work.source.read(work.grid.box(number)), work.item_bytes)
            leaves = native.leaf_digests(array, work.grid.leaf_bytes)
            digest = work.chunks[number] = chunk_id(array.nbytes, leaves)
            ids.append(digest)
            cells.append((work, number, leaves if stays else None))
        return [_Cell(*cells[at]) for at in self._claims.unknown(ids)]

    def _copy_and_write(self, run: list[_Cell]) -> int:
        """Copy cells that fit one buffer, hash the copies, and write those that nobody has; how many those are.

        What does not change any more needs no copy, nor to be hashed again.
        """
        buffer: Array | None = None  # taken when the first of them needs it
        used = 0
        try:
            ids, copies = [], []
            for cell in run:
                work = cell.work
                stays = is_private(work.source)  # asked first: what is private now is so for good
                array = as_raw(work.source.read(work.grid.box(cell.number)), work.item_bytes)
                if stays and array.flags.c_contiguous:
                    data = array.reshape(-1).view(np.uint8).data
                    leaves = cell.leaves or native.leaf_digests(data, work.grid.leaf_bytes)
                else:
                    if buffer is None:
                        buffer = self._buffers.take(sum(each.work.room for each in run))
                    data = buffer[used : used + array.nbytes].data
                    used += work.room
                    leaves = native.leaf_digests(array, work.grid.leaf_bytes, data)
                digest = work.chunks[cell.number] = chunk_id(len(data), leaves)
                ids.append(digest)
                copies.append((work, data, leaves))
            chunks = []
            for digest, (work, data, leaves), is_new in zip(ids, copies, self._claims.claim_all(ids), strict=True):
                if is_new:
                    encoded = codec.encode_extent(data, policy=self._policy, item_bytes=work.item_bytes)
                    leaf_bytes = work.grid.leaf_bytes
                    chunks.append(
                        EncodedChunk(digest, len(data), leaf_bytes, leaves, encoded.encoding, encoded.payload)
                    )
            self._sink.put(*chunks)
        finally:
            if buffer is not None:
                self._buffers.give(buffer)
        return len(chunks)


# --- cells that are named where they are ------------------------------------------------------


NAMED_BYTES = 4 << 30
"""Tensors that are hashed together: so many that starting a launch and asking the index cost little beside it."""


def named_in_place(
    works: Iterable[TensorWork], claims: Claims, progress: Progress, *, expect_new: bool
) -> Iterator[TensorWork]:
    """All works; of those that can be hashed where they are only the cells that are not stored are left to save.

    These are marked `is_new`. Works of other sources come in their order, the others when enough are together.

    Args:
        expect_new: Nothing is stored: nothing is hashed for this, but what was hashed before is named all the same, for
            of such a tensor single cells may be all that can be read.
    """
    waiting: list[tuple[LeafHasher, TensorWork]] = []
    num_bytes = 0
    for work in works:
        offer = getattr(work.source, "leaf_hasher", None)
        hasher: LeafHasher | None = None if offer is None else offer()
        if hasher is None or (expect_new and not hasher.has_hashed):
            yield work
            continue
        waiting.append((hasher, work))
        num_bytes += work.spec.num_bytes
        if num_bytes >= NAMED_BYTES:
            yield from _named(waiting, claims, progress)
            waiting, num_bytes = [], 0
    yield from _named(waiting, claims, progress)


def _named(
    waiting: Sequence[tuple[LeafHasher, TensorWork]], claims: Claims, progress: Progress
) -> Iterator[TensorWork]:
    for _, found in groupby(sorted(waiting, key=lambda each: id(each[0])), key=lambda each: id(each[0])):
        pairs = list(found)
        works = [work for _, work in pairs]
        _name(pairs[0][0], works, claims, progress)
        yield from works


def _name(hasher: LeafHasher, works: Sequence[TensorWork], claims: Claims, progress: Progress) -> None:
    """Name the cells of `works` that are stored; leave to each work those that are not."""
    wanted = []
    for work in works:
        numbers = range(work.grid.num_cells) if work.cells is None else sorted(work.cells)
        wanted.append(CellsToName(work.source, work.grid, numbers, work.item_bytes))
    answer = hasher.cell_digests(wanted)
    if answer is None:
        return
    ids: list[Digest] = []
    cells: list[tuple[TensorWork, int, int]] = []
    for work, asked, digests in zip(works, wanted, answer, strict=True):
        work.chunks = work.chunks or [None] * work.grid.num_cells
        for number, joined in zip(asked.numbers, digests, strict=True):
            num_bytes = work.grid.cell_elements(number) * work.item_bytes
            digest = work.chunks[number] = chunk_id(num_bytes, joined)
            ids.append(digest)
            cells.append((work, number, num_bytes))
    missing: dict[int, set[int]] = {}
    num_bytes = sum(each for _, _, each in cells)
    for at in claims.unknown(ids):
        work, number, more = cells[at]
        missing.setdefault(id(work), set()).add(number)
        num_bytes -= more
    for work in works:
        work.cells, work.is_new = frozenset(missing.get(id(work), ())), True
    progress.advance(num_bytes)


# --- how many threads and packs the budget of memory allows -------------------------------------


FIXED_BYTES = 20 * 1024 * 1024
ENTRY_BYTES = 2_400
CELL_BYTES = 700
"""Measured (docs/benchmarks/memory.md): of a commit of 100,000 small tensors, and of one of many cells."""

_ENCODED_SHARE = {"raw": 0.0, "auto": 0.5, "zstd": 1.0, "planes": 1.0}
"""How long what is stored may be, of a cell: what AUTO does not halve stays as it is."""

_OF_PACKAGES_SHARE = 2.0
"""What a package's encoding made is decoded again before it is stored."""


@dataclass(frozen=True, slots=True)
class SaveMemory:
    """The memory budget of a save."""

    num_threads: int
    num_writers: int


def divide(
    budget_bytes: int, *, num_threads: int, num_entries: int, num_bytes: int, policy: codec.EncodingPolicy,
    abilities: Abilities, read_bytes: int = 0,
) -> SaveMemory:  # fmt: skip
    """The most threads that fit, and then a pack for each of them, or as many as fit; one of each if nothing does.

    Args:
        num_threads: Wanted.
        num_entries, num_bytes: Of the state.
        read_bytes: What a source holds, for each thread that reads it.
    """
    each = thread_bytes(policy, read_bytes)
    held = held_bytes(num_entries=num_entries, num_bytes=num_bytes, abilities=abilities, num_writers=1)
    threads = max(1, min(num_threads, (budget_bytes - held) // each))
    spare = max(0, budget_bytes - held - threads * each)
    return SaveMemory(threads, min(threads, 1 + spare // max(1, abilities.writer_bytes)))


def least_bytes(
    *, num_entries: int, num_bytes: int, policy: codec.EncodingPolicy, abilities: Abilities, read_bytes: int = 0
) -> int:
    """Least memory of a save. Arguments as for `divide`."""
    held = held_bytes(num_entries=num_entries, num_bytes=num_bytes, abilities=abilities, num_writers=1)
    return held + thread_bytes(policy, read_bytes)


def held_bytes(*, num_entries: int, num_bytes: int, abilities: Abilities, num_writers: int = NUM_WRITERS) -> int:
    """Memory that a save holds throughout, independent of cells in progress. Arguments as for `divide`."""
    known = num_entries * ENTRY_BYTES + num_bytes // BATCH_BYTES * CELL_BYTES
    return FIXED_BYTES + known + abilities.in_flight_bytes + num_writers * abilities.writer_bytes


def thread_bytes(policy: codec.EncodingPolicy, read_bytes: int) -> int:
    """Memory of each thread: scratch, a buffer, and what came of it."""
    scratch_bytes = BATCH_BYTES * (1 if policy == "raw" else 2)
    return scratch_bytes + int(BATCH_BYTES * (1 + _ENCODED_SHARE.get(policy, _OF_PACKAGES_SHARE))) + read_bytes
