"""Runs a restore over several ranks: each chunk is read by one rank, which sends to others what they want.

    1. every rank verifies the chunks that it reads
    2. all agree that all is verified                    (until here no target is touched, on any rank)
    3. what is not sent goes straight into the own targets; ranks that read through the same page cache
       (neighbours) are sent pointers to large parts, and copy them from there: one copy instead of four (into
       the socket, out of it, and at both ends). What left the cache meanwhile is read and verified again
    4. the rest in rounds: the reader copies into its own targets and into messages, the messages are
       exchanged, the receivers copy into theirs
    5. all agree that all is in place

Invariant: no target is touched on any rank before everything is verified on all. What is held in
memory does not grow with the state: one round of outgoing and one of incoming messages, and a cell
for each thread. Between the passes the page cache is the staging memory, or a temporary file, as in fetch.py.
Whether a box is pointed at or sent follows from what every rank knows, so both ends agree.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import CkptError, InternalError, NotFoundError, reworded
from cas_ckpt.memory import memory_budget
from cas_ckpt.objects import codec
from cas_ckpt.objects.digest import Digest, ObjectKind, pack_atom, unpack_canonical
from cas_ckpt.objects.pack import Location
from cas_ckpt.objects.spec import Box, Delivery, as_raw
from cas_ckpt.objects.state import ArrayTarget
from cas_ckpt.parallel.peers import Peers
from cas_ckpt.parallel.workers import run_all, thread_count
from cas_ckpt.progress import SILENT, Progress, phase
from cas_ckpt.storage.probe import NO_TOKEN, TOKEN_BYTES, cache_token
from cas_ckpt.storage.store import Store
from cas_ckpt.transfer.arrivals import Arrivals, placed
from cas_ckpt.transfer.chunk_reader import (
    ChunkFiller,
    ChunkPart,
    ChunkReader,
    NewArray,
    ReadOptions,
    Relocate,
    StoredChunk,
    VerifiedExtent,
    cell_part,
    named,
)
from cas_ckpt.transfer.fetch import Restored, nothing, round_bytes, sourced, threads_within, verify_chunks
from cas_ckpt.transfer.hashing import Array
from cas_ckpt.transfer.rounds import (
    Incoming,
    Stage,
    Streams,
    TargetTensor,
    cut_rounds,
    elements,
    num_bytes,
    quota_bytes,
)
from cas_ckpt.transfer.sources import STAGED, StagedStore

WORTH_READING = 4
"""A neighbour reads the whole chunk from the cache if it wants at least one part in this many."""

_PROBE_BYTES = 4096

BUDGET_BYTES = 64 * 1024 * 1024
"""A rank sends, and gets, no more than this in one round."""

_ROUND = struct.Struct("<QQ")
"""How many ranks send to one, and what it has room for in one round."""


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """Data that all ranks exchanged before the first target is touched.

    Attributes:
        quotas: By rank, see rounds.py.
        tokens: By rank, whose page cache it reads through; `NO_TOKEN` if it has none that holds its chunks.
        budget_bytes: What a rank sends, and gets, in one round: as much as the rank that has least room for it.
    """

    quotas: tuple[int, ...]
    tokens: tuple[bytes, ...]
    budget_bytes: int = BUDGET_BYTES

    @property
    def is_empty(self) -> bool:
        """Whether no two ranks share a cache."""
        shared = [token for token in self.tokens if token != NO_TOKEN]
        return len(set(shared)) == len(shared)

    def points(self, reader: int, receiver: int, *, cell: Box, box: Box) -> bool:
        """Whether `reader` sends `receiver` a pointer to the cell, instead of the box."""
        token = self.tokens[reader]
        if token == NO_TOKEN or token != self.tokens[receiver]:
            return False
        return box.num_elements * WORTH_READING >= cell.num_elements


def meet_neighbours(
    peers: Peers, store: Store, chunks: Sequence[StoredChunk], *, num_senders: int, budget_bytes: int
) -> Neighbourhood:
    """Send what the own quota follows from, and the own token, to all ranks, and get theirs; collective.

    Args:
        chunks: Those that this rank verified; unless they are still in memory, nobody is pointed at them.
        num_senders: Ranks that send to this one.
        budget_bytes: What there is room for here, in one round.
    """
    token = cache_token(store)
    if token != NO_TOKEN and not _in_memory(store, chunks):
        token = NO_TOKEN
    sent = peers.gather_all(_ROUND.pack(num_senders, budget_bytes) + token)
    numbers = [_ROUND.unpack_from(each) for each in sent]
    least = min(budget for _, budget in numbers)
    quotas = tuple(quota_bytes(senders, least) for senders, _ in numbers)
    return Neighbourhood(quotas, tuple(each[_ROUND.size : _ROUND.size + TOKEN_BYTES] for each in sent), least)


def _in_memory(store: Store, chunks: Sequence[StoredChunk]) -> bool:
    """Whether the first and the last chunk are still cached: the first is what is evicted first."""
    for chunk in [*chunks[:1], *chunks[-1:]]:
        info = chunk.extents[0].info
        if info.encoding == codec.RAW:
            probe = memoryview(bytearray(min(_PROBE_BYTES, info.stored_bytes)))
            offset = info.offset + info.header_bytes
            if not store.read_into(chunk.extents[0].pack, offset, probe, cached_only=True):
                return False
    return True


def pack_pointers(chunks: Sequence[StoredChunk]) -> bytes:
    """Where these chunks are stored, each as it was verified."""
    rows: list[list[Any]] = []
    for chunk in chunks:
        places: list[list[Any]] = []
        for extent in chunk.extents:
            info = extent.info
            leaves = [info.first_leaf, info.num_leaves, info.leaf_bytes]
            places.append([extent.pack, *leaves, info.offset, info.header_bytes, info.stored_bytes, info.encoding])
        rows.append([chunk.digest, chunk.num_bytes, places])
    return pack_atom(rows)


def unpack_pointers(data: bytes, *, keys: Sequence[str], reader: int) -> list[StoredChunk]:
    """The chunks that rank `reader` points at.

    Args:
        keys: Of the tensors that the plan has from it, one for each chunk.
    Raises:
        InternalError: more or fewer. CorruptionError: malformed.
    """
    rows = unpack_canonical(data) if data else []
    if len(rows) != len(keys):
        raise InternalError(f"rank {reader} points at {len(rows)} chunks where the plan has {len(keys)}")
    chunks = []
    for key, (digest, size, packed) in zip(keys, rows, strict=True):
        places = [Location._make([pack, ObjectKind.CHUNK, size, *rest, None]) for pack, *rest in packed]
        chunks.append(StoredChunk(key, Digest(digest), size, places=places))
    return chunks


PARTLY_WRITTEN = "the targets may be partly written: check out again"


@dataclass(frozen=True, slots=True)
class CellRead:
    """A cell whose chunk this rank reads, and who gets what of it (this rank too, perhaps)."""

    chunk: StoredChunk
    tensor: TargetTensor
    box: Box
    deliveries: Sequence[Delivery]


def verify_and_scatter(
    store: Store,
    chunks: Sequence[StoredChunk],
    reads: Sequence[CellRead],
    incoming: Sequence[Incoming],
    *,
    fill_rest: Callable[[], None],
    peers: Peers,
    progress: Progress,
    relocate: Relocate | None = None,
    budget_bytes: int = BUDGET_BYTES,
    on_verified: Callable[[], object] = nothing,
) -> None:
    """Verify all chunks on all ranks, then fill all targets; collective.

    Args:
        chunks: Those of `reads`, each once, as `core.tree.place_chunks` gives them.
        reads: In the order of the plan, the same for each receiver as its own `incoming`.
        fill_rest: Fills the targets that need no chunk; called once everything is verified.
        progress: Gets the bytes that this rank verifies and of those that it puts into its own targets.
        relocate: Asked when a pack was collected under the restore.
        on_verified: Called before the first target is touched, once all ranks have verified.
    Raises:
        CorruptionError, NotFoundError: named by tensor.
        PeerError: another rank failed; its message says whether targets may have been touched.
        The caller calls `peers.fail` for what it gets from here.
    """
    most_bytes = memory_budget()
    options = ReadOptions(threads_within(most_bytes // 2, chunks, thread_count()), most_bytes, progress, relocate)
    budget_bytes = round_bytes(most_bytes, len(chunks), most=budget_bytes)
    with sourced(store, chunks, options) as (source, options):
        # Ranks keep a disk busy together: what each of them announces only makes the others wait (decision 006).
        verify_chunks(source, chunks, options, announced=peers.size == 1)
        senders = {each.reader for each in incoming}
        around = meet_neighbours(peers, store, chunks, num_senders=len(senders), budget_bytes=budget_bytes)
        on_verified()  # every rank has come here: every byte that anybody will get is verified
        mover = _Mover(source, peers, around, options)
        try:
            mover.move(reads, incoming)
            fill_rest()
            peers.gather_all(b"")  # all targets of all ranks are filled
        except CkptError as error:
            raise partly_written(error) from error


def partly_written(error: CkptError) -> CkptError:
    """`error`, which was raised when targets may have been written into, as it says then."""
    text = str(error)
    return error if PARTLY_WRITTEN in text else reworded(error, f"{text}; {PARTLY_WRITTEN}")


@dataclass(frozen=True, slots=True)
class _Job:
    """The work on one chunk.

    Attributes:
        slots: Places in messages, each with the box whose elements go there.
        own: Boxes of this rank's own target.
    """

    read: CellRead
    slots: list[tuple[memoryview, Box]]
    own: list[Box]

    def parts(self) -> list[ChunkPart]:
        """Parts of the chunk for the messages and for the own target."""
        tensor, item_bytes = self.read.tensor, self.read.tensor.item_bytes
        places: list[tuple[Box, Box, ArrayTarget]] = [
            (box, box.relative_to(box), NewArray(elements(slot, box, item_bytes))) for slot, box in self.slots
        ]
        places += [(box, box, _target(tensor)) for box in self.own]
        return [cell_part(tensor.key, target, item_bytes, self.read.box, box, place) for box, place, target in places]


class _Mover:
    """The second pass on one rank."""

    def __init__(self, source: Restored, peers: Peers, around: Neighbourhood, options: ReadOptions) -> None:
        self._source = source
        self._peers = peers
        self._around = around
        self._options = options
        self._filler = _Filler(source, options)

    def move(self, reads: Sequence[CellRead], incoming: Sequence[Incoming]) -> None:
        """Fill this rank's targets, and bring to others what they want."""
        rank, points = self._peers.rank, self._around.points
        own: list[list[Box]] = []
        sends: list[list[Delivery]] = []
        pointed: list[list[StoredChunk]] = [[] for _ in range(self._peers.size)]
        own_bytes = 0
        for read in reads:
            own.append([each.box for each in read.deliveries if each.rank == rank])
            sends.append([])
            own_bytes += sum(num_bytes(read.tensor, box) for box in own[-1])
            for each in read.deliveries:
                if each.rank != rank and points(rank, each.rank, cell=read.box, box=each.box):
                    pointed[each.rank].append(read.chunk)
                elif each.rank != rank:
                    sends[-1].append(each)
        found: list[Incoming] = []
        received: list[Incoming] = []
        for part in incoming:
            is_pointed = points(part.reader, rank, cell=part.cell, box=part.box)
            (found if is_pointed else received).append(part)
        to_come = sum(num_bytes(part.tensor, part.box) for part in incoming)
        with phase(self._options.progress, "restoring", own_bytes + to_come):
            alone = [_Job(read, [], own[at]) for at, read in enumerate(reads) if own[at] and not sends[at]]
            jobs = [] if self._around.is_empty else self._follow_pointers(pointed, found)
            self._fill(sorted(alone, key=_by_place) + jobs)
            self._exchange_rounds(reads, own, sends, received)

    def _follow_pointers(self, pointed: Sequence[Sequence[StoredChunk]], found: Sequence[Incoming]) -> list[_Job]:
        """Send each rank pointers to its parts; what is to be done about `found`, which others point at."""
        received = self._peers.exchange([pack_pointers(chunks) if chunks else b"" for chunks in pointed])
        jobs = []
        for reader, message in enumerate(received):
            mine = [each for each in found if each.reader == reader]
            chunks = unpack_pointers(bytes(message), keys=[each.tensor.key for each in mine], reader=reader)
            for each, chunk in zip(mine, chunks, strict=True):
                jobs.append(_Job(CellRead(chunk, each.tensor, each.cell, ()), [], [each.box]))
        return jobs

    def _exchange_rounds(
        self,
        reads: Sequence[CellRead],
        own: Sequence[list[Box]],
        sends: Sequence[Sequence[Delivery]],
        incoming: Sequence[Incoming],
    ) -> None:
        sent = [(at, reads[at].tensor.item_bytes, each) for at, each in enumerate(sends) if each]
        rounds = cut_rounds(sent, quotas=self._around.quotas, budget_bytes=self._around.budget_bytes)
        numbers = self._peers.gather_all(len(rounds).to_bytes(8, "little"))
        rank = self._peers.rank
        streams = Streams(incoming, self._around.quotas[rank])
        stage = Stage(self._peers.size)
        unfilled = dict(enumerate(own))
        for number in range(max(int.from_bytes(each, "little") for each in numbers)):
            messages: Sequence[Buffer] = stage.nothing
            if number < len(rounds):
                messages, slots = stage.lay_out(rounds[number])
                # A chunk that is cut over two rounds fills the own target in the first.
                self._fill([_Job(reads[at], slots[at], unfilled.pop(at, [])) for at in slots])
            self._land(streams.take(rank, self._peers.exchange(messages)))
        streams.check_empty()

    def _fill(self, jobs: Sequence[_Job]) -> None:
        if isinstance(self._source, StagedStore):
            self._fill_remote(self._source.store, [job for job in jobs if not _is_staged(job.read.chunk)])
            jobs = [job for job in jobs if _is_staged(job.read.chunk)]
        run_all(jobs, lambda: self._filler.fill, num_threads=min(self._options.num_threads, len(jobs)))

    def _fill_remote(self, store: Store, jobs: Sequence[_Job]) -> None:
        """Read and verify once more what could not be staged, what is near one another together."""
        chunks: dict[Digest, StoredChunk] = {}
        for job in jobs:
            chunk = chunks.setdefault(job.read.chunk.digest, replace(job.read.chunk, parts=[], wanted_bytes=0))
            chunk.parts += job.parts()
            chunk.wanted_bytes += sum(num_bytes(job.read.tensor, box) for box in job.own)
        Arrivals(store, replace(self._options, progress=SILENT)).read(list(chunks.values()), placed)
        self._options.progress.advance(sum(num_bytes(job.read.tensor, box) for job in jobs for box in job.own))

    def _land(self, parts: Sequence[tuple[TargetTensor, Box, memoryview]]) -> None:
        def land(part: tuple[TargetTensor, Box, memoryview]) -> None:
            tensor, box, data = part
            _place(tensor, box, elements(data, box, tensor.item_bytes))
            self._options.progress.advance(len(data))

        run_all(parts, lambda: land, num_threads=min(self._options.num_threads, len(parts)))


def _is_staged(chunk: StoredChunk) -> bool:
    return bool(chunk.extents) and chunk.extents[0].pack == STAGED


def _by_place(job: _Job) -> tuple[str, int]:
    place = job.read.chunk.places[0]
    return place.pack, place.offset


def _place(tensor: TargetTensor, box: Box, found: Array) -> None:
    """Bring the elements of `box` into the own target."""
    target = _target(tensor)
    array = target.open(box)
    np.copyto(as_raw(array, tensor.item_bytes), found)
    target.done(box, array)


def _target(tensor: TargetTensor) -> ArrayTarget:
    if tensor.target is None:
        raise InternalError(f"{tensor.key}: the plan delivers to a rank that does not want it")
    return tensor.target


class _Filler:
    """Brings verified chunks into messages and own targets; many threads."""

    def __init__(self, source: Restored, options: ReadOptions) -> None:
        self._filler = ChunkFiller(source, options.progress, options.relocate)
        # Another rank says where its chunks are: what is found elsewhere, no rank has verified.
        self._pointed = ChunkReader(source)
        self._relocate = options.relocate

    def fill(self, job: _Job) -> None:
        """Bring one chunk to all places that want it."""
        chunk = job.read.chunk
        if not chunk.extents:  # another rank has verified it, and reported where it is
            try:
                chunk.extents = self._opened(job)
            except CkptError as error:
                raise named(error, job.read.tensor.key) from error
        tensor = job.read.tensor
        own_bytes = sum(num_bytes(tensor, box) for box in job.own)
        self._filler.fill(replace(chunk, key=tensor.key, parts=job.parts(), wanted_bytes=own_bytes))

    def _opened(self, job: _Job) -> list[VerifiedExtent]:
        """The extents that this job needs; each header is proven by the chunk's id.

        Where their pack was collected since it was reported, the chunk is verified wherever it is now.
        """
        chunk, item_bytes = job.read.chunk, job.read.tensor.item_bytes
        spans = [box.relative_to(job.read.box).span_in(job.read.box.sizes) for box in job.own]
        needed = [span for span in spans if span is not None]
        try:
            if len(needed) < len(spans):
                return self._pointed.intact(chunk.digest, chunk.places, chunk.num_bytes)
            return [
                self._pointed.open_extent(chunk.digest, place)
                for place in chunk.places
                if any(
                    place.first_leaf * place.leaf_bytes < stop * item_bytes
                    and start * item_bytes < (place.first_leaf + place.num_leaves) * place.leaf_bytes
                    for start, stop in needed
                )
            ]
        except NotFoundError:
            if self._relocate is None:
                raise
            places = self._relocate(chunk.digest, {place.pack for place in chunk.places})
            return self._filler.reader.verify(chunk.digest, places, chunk.num_bytes)
