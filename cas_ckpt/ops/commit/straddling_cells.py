"""Saves the cells that several ranks hold parts of, batch by batch.

    1. pieces of leaves that straddle ranks go to the rank that owns the leaf
    2. every rank hashes a copy of the leaves it owns
    3. the digests go to the cell's home, which names the chunk and asks whether it is known
    4. the home tells the owners; of a new chunk each writes its own leaves as extents

Ranks wait for one another once a batch: one message brings the pieces of a batch, the digests of the batch before it
and the verdicts on the one before that. So three batches are under way, and the disk writes while others are hashed.

Collective. Invariant: all ranks walk the cells of a batch in one order, so messages need no
addresses; what is written is the copy that was hashed. Memory is bounded by the batch and by the buffers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np

from cas_ckpt import native
from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import InternalError
from cas_ckpt.layout.holdings import range_boxes
from cas_ckpt.layout.save_plan import SavePlan, StraddlingCell
from cas_ckpt.memory import aligned
from cas_ckpt.objects import codec
from cas_ckpt.objects.digest import DIGEST_BYTES, Digest, chunk_id
from cas_ckpt.objects.spec import Box, as_raw, raw_dtype
from cas_ckpt.objects.state import saved
from cas_ckpt.parallel.peers import Peers
from cas_ckpt.parallel.workers import run_all
from cas_ckpt.progress import Progress
from cas_ckpt.transfer.hashing import Array
from cas_ckpt.transfer.pack_writer import ChunkSink, EncodedChunk
from cas_ckpt.transfer.save import Buffers, Claims, TensorWork

_KNOWN, _NEW = b"\0", b"\1"
_Job: TypeAlias = Callable[[], None]


@dataclass(slots=True)
class _Run:
    """Consecutive leaves of one cell that this rank owns, copied and hashed.

    Attributes:
        space: Bytes of all leaves of the cell that this rank owns, one after the other; the run's begin at `start`.
    """

    first: int
    count: int
    space: Array
    start: int
    num_bytes: int
    digests: bytes = b""

    @property
    def data(self) -> Array:
        return self.space[self.start : self.start + self.num_bytes]


@dataclass(slots=True)
class _Cell:
    """A straddling cell as this rank works on it."""

    plan: StraddlingCell
    work: TensorWork
    runs: list[_Run] = field(default_factory=list)
    leaves: bytes = b""
    buffer: int | None = None

    @property
    def num_bytes(self) -> int:
        return self.plan.box.num_elements * self.work.item_bytes

    def items(self, first: int, count: int) -> tuple[int, int]:
        """(start, stop) of the elements of a run of leaves in the cell."""
        leaf_items = self.work.grid.leaf_bytes // self.work.item_bytes
        return first * leaf_items, min((first + count) * leaf_items, self.plan.box.num_elements)


@dataclass(slots=True)
class _Batch:
    """Cells that are under way together, and the buffers with this rank's leaves of them."""

    cells: Sequence[_Cell] = ()
    buffers: list[Array] = field(default_factory=list)


class StraddlingSaver:
    """Runs the straddling cells of a save plan on one rank.

    Args:
        works: The tensors that were planned, in that order.
        plan: Which cells straddle shards, and who does what of it.
    """

    def __init__(
        self, works: Sequence[TensorWork], plan: SavePlan, peers: Peers, progress: Progress, num_threads: int
    ) -> None:
        self._works = works
        self._plan = plan
        self._peers = peers
        self._progress = progress
        self._num_threads = num_threads
        self.named: dict[tuple[int, int], Digest] = {}
        """(tensor, cell) -> chunk id, for the cells of which this rank is the home."""
        self._straddling = {id(work): work for at, work in enumerate(works) if plan.straddles(at)}

    def has_cells_of(self, work: TensorWork) -> bool:
        """Whether cells of this tensor straddle ranks, so that it is read until `run` has returned."""
        return id(work) in self._straddling

    def run(self, sink: ChunkSink, claims: Claims, policy: codec.EncodingPolicy, buffers: Buffers) -> None:
        """Save all batches. Collective; raises what went wrong here, or PeerError.

        Args:
            claims: Decides whether a chunk of which this rank is the home has to be written.
            buffers: For this rank's leaves, until they are written.
        """
        count = self._plan.num_batches
        named, hashed = _Batch(), _Batch()
        for number in range(count + 2 if count else 0):
            new = _Batch()
            if number < count:
                found = self._plan.straddling_cells(self._peers.rank, number)
                new.cells = [_Cell(each, self._works[each.tensor]) for each in found]
            # Verdicts come first: what the disk has to write it gets before more is hashed.
            messages = self._verdicts_out(named.cells, claims)
            for cell in hashed.cells:
                messages[cell.plan.home].extend(run.digests for run in cell.runs)
            self._add_pieces(new.cells, messages)
            received = [_Cursor(data) for data in self._peers.exchange([b"".join(parts) for parts in messages])]
            jobs = list(self._writes(named, received, sink, policy, buffers))
            self._name(hashed.cells, received)
            jobs += self._hashes(new, received, buffers)
            run_all(jobs, lambda: operator.call, num_threads=self._num_threads)
            named, hashed = hashed, new
        for work in self._straddling.values():
            saved(work.source)

    # --- 1: pieces ------------------------------------------------------------------------

    def _add_pieces(self, cells: Sequence[_Cell], messages: list[list[Buffer]]) -> None:
        for cell in cells:
            for leaf, pieces in cell.plan.pieces.items():
                owner = cell.plan.owner(leaf)
                for piece in pieces:
                    if cell.plan.ranks[piece.part] == self._peers.rank != owner:
                        messages[owner].append(_read(cell, piece.box).tobytes())

    def _assembled(self, cell: _Cell, leaf: int, received: Sequence[_Cursor], out: Array) -> None:
        """Put a straddling leaf together from own pieces and from what the others sent."""
        bands = list(_bands(cell, leaf, 1, out))
        for piece in cell.plan.pieces[leaf]:
            sender = cell.plan.ranks[piece.part]
            if sender == self._peers.rank:
                data = _read(cell, piece.box)
            else:
                num_bytes = piece.box.num_elements * cell.work.item_bytes
                data = np.frombuffer(received[sender].take(num_bytes), out.dtype).reshape(piece.box.sizes)
            band, view = next(each for each in bands if each[0].intersect(piece.box) is not None)
            view[piece.box.relative_to(band).slices] = data

    # --- 2: hashing -----------------------------------------------------------------------

    def _hashes(self, batch: _Batch, received: Sequence[_Cursor], buffers: Buffers) -> Iterator[_Job]:
        """Functions that copy and hash this rank's leaves."""
        at = 0
        for cell in batch.cells:
            runs = list(self._runs(cell))
            items = [cell.items(first, count) for first, count in runs]
            lengths = [(stop - start) * cell.work.item_bytes for start, stop in items]
            room = aligned(sum(lengths))
            if not room:
                continue
            if not batch.buffers or at + room > len(batch.buffers[-1]):
                batch.buffers.append(buffers.take(room))
                at = 0
            space, at = batch.buffers[-1][at : at + room], at + room
            cell.buffer, start = len(batch.buffers) - 1, 0
            for (first, count), num_bytes in zip(runs, lengths, strict=True):
                run = _Run(first, count, space, start, num_bytes)
                start += num_bytes
                cell.runs.append(run)
                if first in cell.plan.pieces:
                    self._assembled(cell, first, received, run.data.view(raw_dtype(cell.work.item_bytes)))
            yield from [partial(self._hash_run, cell, run) for run in cell.runs]

    def _runs(self, cell: _Cell) -> Iterator[tuple[int, int]]:
        """(first, count) of leaves of one part that this rank owns; straddling leaves come alone."""
        owners, straddled = cell.plan.owners, cell.plan.pieces
        first = None
        for leaf, owner in enumerate(owners):
            joins = first is not None and leaf not in straddled and leaf - 1 not in straddled
            if first is not None and not (joins and owner == owners[first]):
                yield first, leaf - first
                first = None
            if first is None and cell.plan.ranks[owner] == self._peers.rank:
                first = leaf
        if first is not None:
            yield first, len(owners) - first

    def _hash_run(self, cell: _Cell, run: _Run) -> None:
        if run.first not in cell.plan.pieces:
            for band, view in _bands(cell, run.first, run.count, run.data.view(raw_dtype(cell.work.item_bytes))):
                np.copyto(view, _read(cell, band))
        run.digests = native.leaf_digests(run.data, cell.work.grid.leaf_bytes)
        self._progress.advance(run.num_bytes)

    # --- 3: names -------------------------------------------------------------------------

    def _name(self, cells: Sequence[_Cell], received: Sequence[_Cursor]) -> None:
        for cell in cells:
            if cell.plan.home != self._peers.rank:
                continue
            by_leaf: dict[int, bytes] = {}
            for rank, leaves in cell.plan.leaves_by_rank().items():
                for leaf in leaves:
                    by_leaf[leaf] = bytes(received[rank].take(DIGEST_BYTES))
            cell.leaves = b"".join([by_leaf[leaf] for leaf in range(len(cell.plan.owners))])
            self.named[cell.plan.tensor, cell.plan.cell] = chunk_id(cell.num_bytes, cell.leaves)

    def _verdicts_out(self, cells: Sequence[_Cell], claims: Claims) -> list[list[Buffer]]:
        messages: list[list[Buffer]] = [[] for _ in range(self._peers.size)]
        own = [cell for cell in cells if cell.plan.home == self._peers.rank]
        claimed = claims.claim_all([self.named[cell.plan.tensor, cell.plan.cell] for cell in own])
        for cell, is_new in zip(own, claimed, strict=True):
            verdict = _NEW + cell.leaves if is_new else _KNOWN
            for rank in cell.plan.leaves_by_rank():
                messages[rank].append(verdict)
        return messages

    # --- 4: writing -----------------------------------------------------------------------

    def _writes(
        self, batch: _Batch, received: Sequence[_Cursor], sink: ChunkSink, policy: codec.EncodingPolicy,
        buffers: Buffers,
    ) -> Iterator[_Job]:  # fmt: skip
        """Functions that write new leaves and release all buffers."""

        def write(buffer: Array, runs: Sequence[tuple[_Cell, _Run, bytes]]) -> None:
            sink.put(*[self._encoded(*run, policy) for run in runs])
            buffers.give(buffer)

        found: list[list[tuple[_Cell, _Run, bytes]]] = [[] for _ in batch.buffers]
        for cell in batch.cells:
            if cell.buffer is None:
                continue  # it has a part, but owns no leaf
            verdict = received[cell.plan.home]
            if verdict.take(1) == _KNOWN:
                continue
            num_leaves = len(cell.plan.owners)
            leaves = bytes(verdict.take(num_leaves * DIGEST_BYTES))
            found[cell.buffer] += [(cell, run, leaves) for run in _joined(cell.runs)]
        yield from map(partial(partial, write), batch.buffers, found)

    def _encoded(self, cell: _Cell, run: _Run, leaves: bytes, policy: codec.EncodingPolicy) -> EncodedChunk:
        if leaves[run.first * DIGEST_BYTES : (run.first + run.count) * DIGEST_BYTES] != run.digests:
            raise InternalError(f"rank {cell.plan.home} named a chunk of {cell.work.spec} by leaves that were not sent")
        encoded = codec.encode_extent(run.data.data, policy=policy, item_bytes=cell.work.item_bytes)
        return EncodedChunk(
            chunk_id(cell.num_bytes, leaves), cell.num_bytes, cell.work.grid.leaf_bytes, leaves, encoded.encoding,
            encoded.payload, leaves=(run.first, run.count),
        )  # fmt: skip


class _Cursor:
    """Takes a message apart, from its start."""

    def __init__(self, data: Buffer) -> None:
        self._data = memoryview(data)
        self._at = 0

    def take(self, num_bytes: int) -> memoryview:
        part = self._data[self._at : self._at + num_bytes]
        if len(part) != num_bytes:
            raise InternalError(f"a rank sent {len(self._data)} bytes where more were expected")
        self._at += num_bytes
        return part


def _read(cell: _Cell, box: Box) -> Array:
    """Elements of a box that is relative to the cell, from this rank's memory."""
    offsets = tuple(a + b for a, b in zip(box.offsets, cell.plan.box.offsets, strict=True))
    return as_raw(cell.work.source.read(Box(offsets, box.sizes)), cell.work.item_bytes)


def _bands(cell: _Cell, first: int, count: int, data: Array) -> Iterator[tuple[Box, Array]]:
    """The boxes that a run of leaves is made of, each with its place in the run's data."""
    start, stop = cell.items(first, count)
    at = 0
    for box in range_boxes(cell.plan.box.sizes, start, stop):
        yield box, data[at : at + box.num_elements].reshape(box.sizes)
        at += box.num_elements


def _joined(runs: Sequence[_Run]) -> Iterator[_Run]:
    """Runs that follow one another as one, so that each is one extent."""
    waiting: list[_Run] = []
    for run in runs:
        if waiting and waiting[-1].first + waiting[-1].count != run.first:
            yield _join(waiting)
            waiting = []
        waiting.append(run)
    if waiting:
        yield _join(waiting)


def _join(runs: Sequence[_Run]) -> _Run:
    first, digests = runs[0], b"".join([run.digests for run in runs])
    num_bytes = sum(run.num_bytes for run in runs)  # they lie one behind the other
    return _Run(first.first, sum(run.count for run in runs), first.space, first.start, num_bytes, digests)
