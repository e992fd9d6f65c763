"""Runs a restore over several ranks: each chunk is read by one rank, which sends to others what they want.

    1. every rank verifies the chunks that it reads
    2. all agree that all is verified                    (until here no target is touched, on any rank)
    3. what is sent to nobody goes straight into the own targets; ranks that read through the same page cache
       (neighbours) are sent pointers to large parts, and copy them from there: one copy instead of four (into
       the socket, out of it, and at both ends). What left the cache meanwhile is read and verified again
    4. the rest in rounds: the reader copies into its own targets and into messages, the messages are
       exchanged, the receivers copy into theirs
    5. all agree that all is in place

Invariant: no target is touched on any rank before everything is verified on all. What is held in
memory does not grow with the state: one round of outgoing and one of incoming messages, and a cell
for each thread. Between the passes the page cache is the staging memory, as in fetch.py. Whether a box is
pointed at or sent follows from what every rank knows, so both ends agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import CkptError, InternalError, NotFoundError, PeerError
from cas_ckpt.objects import codec
from cas_ckpt.objects.digest import Digest, ObjectKind, pack_atom, unpack_canonical
from cas_ckpt.objects.pack import Location
from cas_ckpt.objects.spec import Box
from cas_ckpt.objects.state import ArrayTarget
from cas_ckpt.progress import Progress, phase
from cas_ckpt.storage.probe import NO_TOKEN, TOKEN_BYTES, cache_token
from cas_ckpt.storage.store import Store
from cas_ckpt.transfer.chunk_reader import ChunkReader, Relocate, VerifiedExtent
from cas_ckpt.transfer.fetch import ChunkFiller, ChunkPart, StoredChunk, named, nothing, verify_chunks
from cas_ckpt.transfer.hashing import Array, as_raw
from cas_ckpt.transfer.peers import Peers
from cas_ckpt.transfer.rounds import (
    Incoming,
    Send,
    Stage,
    Streams,
    TargetTensor,
    cut_rounds,
    elements,
    num_bytes,
    quota_bytes,
)
from cas_ckpt.transfer.workers import run_all

WORTH_READING = 4
"""A neighbour reads the whole chunk from the cache if it wants at least one part in this many."""

_PROBE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Pointer:
    """A verified chunk."""

    digest: Digest
    num_bytes: int
    places: tuple[Location, ...]


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """What all ranks sent one another before the first target is touched.

    Attributes:
        quotas: By rank, see rounds.py.
        tokens: By rank, whose page cache it reads through; `NO_TOKEN` if it has none that holds its chunks.
    """

    quotas: tuple[int, ...]
    tokens: tuple[bytes, ...]

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


def meet_neighbours(peers: Peers, store: Store, chunks: Sequence[StoredChunk], *, quota: int) -> Neighbourhood:
    """Send the own quota and token to all ranks, and get theirs; collective.

    Args:
        chunks: Those that this rank verified; unless they are still in memory, nobody is pointed at them.
    """
    token = cache_token(store)
    if token != NO_TOKEN and not _in_memory(store, chunks):
        token = NO_TOKEN
    sent = peers.gather_all(quota.to_bytes(8, "little") + token)
    quotas = tuple(int.from_bytes(each[:8], "little") for each in sent)
    return Neighbourhood(quotas, tuple(each[8 : 8 + TOKEN_BYTES] for each in sent))


def _in_memory(store: Store, chunks: Sequence[StoredChunk]) -> bool:
    """Whether the first and the last chunk are still cached: the first is what is evicted first."""
    ends = [chunk.extents[0] for chunk in [*chunks[:1], *chunks[-1:]]]
    return all(_is_cached(store, extent) for extent in ends)


def _is_cached(store: Store, extent: VerifiedExtent) -> bool:
    if extent.info.encoding != codec.RAW:
        return True
    probe = memoryview(bytearray(min(_PROBE_BYTES, extent.info.stored_bytes)))
    return store.read_into(extent.pack, extent.info.offset + extent.info.header_bytes, probe, cached_only=True)


def pack_pointers(chunks: Sequence[StoredChunk]) -> bytes:
    """Where these chunks are stored, each as it was verified."""
    return pack_atom([[chunk.digest, chunk.num_bytes, [_row(extent) for extent in chunk.extents]] for chunk in chunks])


def _row(extent: VerifiedExtent) -> list[Any]:
    info = extent.info
    return [
        extent.pack, info.first_leaf, info.num_leaves, info.leaf_bytes, info.offset, info.header_bytes,
        info.stored_bytes, info.encoding,
    ]  # fmt: skip


def unpack_pointers(data: bytes, *, wanted: int, reader: int) -> list[Pointer]:
    """The pointers that rank `reader` sent, as many as the plan says.

    Raises:
        InternalError: more or fewer. CorruptionError: malformed.
    """
    rows = unpack_canonical(data) if data else []
    if len(rows) != wanted:
        raise InternalError(f"rank {reader} points at {len(rows)} chunks where the plan has {wanted}")
    return [
        Pointer(
            Digest(digest),
            num_bytes,
            tuple(Location._make([pack, ObjectKind.CHUNK, num_bytes, *rest, None]) for pack, *rest in places),
        )
        for digest, num_bytes, places in rows
    ]


BUDGET_BYTES = 64 * 1024 * 1024
"""A rank sends, and gets, no more than this in one round."""

PARTLY_WRITTEN = "the targets may be partly written: check out again"


class Delivery(Protocol):
    """A part of a chunk and the rank that gets it; layout/restore_plan.py plans with these."""

    @property
    def rank(self) -> int: ...
    @property
    def box(self) -> Box: ...


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
    num_threads: int,
    progress: Progress,
    relocate: Relocate | None = None,
    budget_bytes: int = BUDGET_BYTES,
    on_verified: Callable[[], object] = nothing,
) -> None:
    """Verify all chunks on all ranks, then fill all targets; collective.

    Args:
        chunks: Those of `reads`, each once, as `order_by_place` gives them.
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
    verify_chunks(store, chunks, num_threads=num_threads, progress=progress, relocate=relocate)
    quota = quota_bytes(len({each.reader for each in incoming}), budget_bytes)
    around = meet_neighbours(peers, store, chunks, quota=quota)
    on_verified()  # every rank has come here: every byte that anybody will get is verified
    mover = _Mover(store, peers, around, progress, num_threads, relocate)
    try:
        mover.move(reads, incoming, budget_bytes)
        fill_rest()
        peers.gather_all(b"")  # all targets of all ranks are filled
    except PeerError as error:
        raise PeerError(_partly_written(error), error.ranks) from error
    except CkptError as error:
        raise type(error)(_partly_written(error)) from error


def _partly_written(error: CkptError) -> str:
    text = str(error)
    return text if PARTLY_WRITTEN in text else f"{text}; {PARTLY_WRITTEN}"


def _numbers(peers: Peers, number: int) -> list[int]:
    """The number that each rank sends, by rank."""
    return [int.from_bytes(each, "little") for each in peers.gather_all(number.to_bytes(8, "little"))]


@dataclass(frozen=True, slots=True)
class _Job:
    """What is done with one chunk at one time.

    Attributes:
        slots: Places in messages, each with the box whose elements go there.
        own: Boxes of this rank's own target.
    """

    read: CellRead
    slots: list[tuple[memoryview, Box]]
    own: list[Box]


class _Mover:
    """The second pass on one rank."""

    def __init__(
        self, store: Store, peers: Peers, around: Neighbourhood, progress: Progress, num_threads: int,
        relocate: Relocate | None,
    ) -> None:  # fmt: skip
        self._peers = peers
        self._around = around
        self._progress = progress
        self._num_threads = num_threads
        # Kept from round to round: their scratch memory costs page faults when it is new.
        self._fillers = [_Filler(store, progress, relocate) for _ in range(num_threads)]

    def move(self, reads: Sequence[CellRead], incoming: Sequence[Incoming], budget_bytes: int) -> None:
        """Fill this rank's targets, and bring to others what they want."""
        own = [self._own_boxes(read) for read in reads]
        sends = [self._sends(read) for read in reads]
        own_bytes = sum(
            box.num_elements * read.tensor.item_bytes for read, boxes in zip(reads, own, strict=True) for box in boxes
        )
        to_come = sum(num_bytes(each.tensor, each.box) for each in incoming)
        with phase(self._progress, "restoring", own_bytes + to_come):
            alone = [_Job(read, [], own[at]) for at, read in enumerate(reads) if own[at] and not sends[at]]
            pointed = [] if self._around.is_empty else self._follow_pointers(reads, incoming)
            self._fill(sorted(alone, key=_by_place) + pointed)
            self._exchange_rounds(reads, own, sends, incoming, budget_bytes)

    def _own_boxes(self, read: CellRead) -> list[Box]:
        return [each.box for each in read.deliveries if each.rank == self._peers.rank]

    def _sends(self, read: CellRead) -> list[Send]:
        """What has to be sent: to others, unless a pointer to it is sent."""
        rank, around = self._peers.rank, self._around
        return [
            Send(each.rank, each.box)
            for each in read.deliveries
            if each.rank != rank and not around.points(rank, each.rank, cell=read.box, box=each.box)
        ]

    def _is_pointed(self, each: Incoming) -> bool:
        return self._around.points(each.reader, self._peers.rank, cell=each.cell, box=each.box)

    def _follow_pointers(self, reads: Sequence[CellRead], incoming: Sequence[Incoming]) -> list[_Job]:
        """Send the neighbours pointers to their parts; what is to be done about the own ones."""
        rank, around = self._peers.rank, self._around
        pointed: list[list[StoredChunk]] = [[] for _ in range(self._peers.size)]
        for read in reads:
            for delivery in read.deliveries:
                if delivery.rank != rank and around.points(rank, delivery.rank, cell=read.box, box=delivery.box):
                    pointed[delivery.rank].append(read.chunk)
        received = self._peers.exchange([pack_pointers(chunks) if chunks else b"" for chunks in pointed])
        parts = [each for each in incoming if self._is_pointed(each)]
        jobs = []
        for reader, message in enumerate(received):
            mine = [each for each in parts if each.reader == reader]
            pointers = unpack_pointers(bytes(message), wanted=len(mine), reader=reader)
            for each, pointer in zip(mine, pointers, strict=True):
                chunk = StoredChunk(each.tensor.key, pointer.digest, pointer.num_bytes, places=pointer.places)
                jobs.append(_Job(CellRead(chunk, each.tensor, each.cell, ()), [], [each.box]))
        return jobs

    def _exchange_rounds(
        self,
        reads: Sequence[CellRead],
        own: Sequence[list[Box]],
        sends: Sequence[Sequence[Send]],
        incoming: Sequence[Incoming],
        budget_bytes: int,
    ) -> None:
        sent = [(at, reads[at].tensor.item_bytes, each) for at, each in enumerate(sends) if each]
        rounds = cut_rounds(sent, quotas=self._around.quotas, budget_bytes=budget_bytes)
        num_rounds = max(_numbers(self._peers, len(rounds)))
        rank = self._peers.rank
        streams = Streams([each for each in incoming if not self._is_pointed(each)], self._around.quotas[rank])
        stage = Stage(self._peers.size)
        unfilled = dict(enumerate(own))
        for number in range(num_rounds):
            messages: Sequence[Buffer] = stage.nothing
            if number < len(rounds):
                messages, slots = stage.lay_out(rounds[number])
                # A chunk that is cut over two rounds fills the own target in the first.
                self._fill([_Job(reads[at], slots[at], unfilled.pop(at, [])) for at in slots])
            self._land(streams.take(rank, self._peers.exchange(messages)))
        streams.check_empty()

    def _fill(self, jobs: Sequence[_Job]) -> None:
        free = iter(self._fillers)
        run_all(jobs, lambda: next(free).fill, num_threads=min(self._num_threads, len(jobs)))

    def _land(self, parts: Sequence[tuple[TargetTensor, Box, memoryview]]) -> None:
        def land(part: tuple[TargetTensor, Box, memoryview]) -> None:
            tensor, box, data = part
            _place(tensor, box, elements(data, box, tensor.item_bytes))
            self._progress.advance(len(data))

        run_all(parts, lambda: land, num_threads=min(self._num_threads, len(parts)))


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
    """Brings verified chunks into messages and own targets; one per thread."""

    def __init__(self, store: Store, progress: Progress, relocate: Relocate | None) -> None:
        self._filler = ChunkFiller(store, progress, relocate)
        # Another rank says where its chunks are: what is found elsewhere, no rank has verified.
        self._pointed = ChunkReader(store)
        self._relocate = relocate
        self._progress = progress

    def fill(self, job: _Job) -> None:
        """Bring one chunk to all places that want it."""
        chunk = job.read.chunk
        if not chunk.extents:  # another rank has verified it, and reported where it is
            try:
                chunk.extents = self._opened_anywhere(job)
            except CkptError as error:
                raise named(error, job.read.tensor.key) from error
        if job.slots:
            self._distribute(job)
        else:
            parts = [_own_part(job.read, box) for box in job.own]
            wanted_bytes = sum(box.num_elements for box in job.own) * job.read.tensor.item_bytes
            self._filler.fill(replace(chunk, key=job.read.tensor.key, parts=parts, wanted_bytes=wanted_bytes))

    def _opened_anywhere(self, job: _Job) -> list[VerifiedExtent]:
        """As `_opened`; where the pack was collected since it was reported, from wherever the chunk is now."""
        try:
            return self._opened(job)
        except NotFoundError:
            if self._relocate is None:
                raise
            chunk = job.read.chunk
            places = self._relocate(chunk.digest, {place.pack for place in chunk.places})
            return self._filler.reader.verify(chunk.digest, places, chunk.num_bytes)

    def _opened(self, job: _Job) -> list[VerifiedExtent]:
        """The extents that this job needs; each header is proven by the chunk's id."""
        chunk, item_bytes = job.read.chunk, job.read.tensor.item_bytes
        spans = [box.relative_to(job.read.box).span_in(job.read.box.sizes) for box in job.own]
        needed = [span for span in spans if span is not None]
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

    def _distribute(self, job: _Job) -> None:
        """Read the chunk once and copy its parts into the messages and the own target."""
        read, item_bytes = job.read, job.read.tensor.item_bytes
        # Where a message has the whole cell, the chunk is read right there, and copied from there.
        whole = next((slot for slot, box in job.slots if box == read.box), None)
        space = self._filler.scratch(read.chunk.num_bytes).data if whole is None else whole
        try:
            self._filler.reader.refill(read.chunk.extents, space)
        except CkptError as error:
            raise named(error, read.tensor.key) from error
        cell = elements(space, read.box, item_bytes)
        for slot, box in job.slots:
            if slot is not whole:
                np.copyto(elements(slot, box, item_bytes), cell[box.relative_to(read.box).slices])
        for box in job.own:
            _place(read.tensor, box, cell[box.relative_to(read.box).slices])
            self._progress.advance(box.num_elements * item_bytes)


def _own_part(read: CellRead, box: Box) -> ChunkPart:
    """What this rank's target gets of the chunk, as a part of it."""
    within = box.relative_to(read.box)
    span = within.span_in(read.box.sizes)
    item_bytes = read.tensor.item_bytes
    start = None if span is None else span[0] * item_bytes
    return ChunkPart(read.tensor.key, _target(read.tensor), item_bytes, box, start, read.box.sizes, within)
