"""Runs a restore over several ranks: each chunk is read by one rank, which sends to others what they want.

    1. every rank verifies the chunks that it reads
    2. all agree that all is verified                    (until here no target is touched, on any rank)
    3. what is not sent goes straight into the own targets; ranks that read through the same page cache
       (neighbours) are sent pointers to large parts, and copy them from there: one copy instead of four (into
       the socket, out of it, and at both ends). What left the cache meanwhile is read and verified again
    4. the rest in rounds: the reader copies into its own targets and into messages, the messages are
       exchanged, the receivers copy into theirs
    5. all agree that all is in place

Between two ranks runs one stream of parts, in the order of the plan; a round carries as many whole parts of it as fit.
Both ends cut the boxes of the stream by the receiver's quota, so messages need no words about what is in them: a
message is the parts one after the other. In one round nobody sends more than the budget, and nobody gets more than its
quota from each of its senders, which is the budget divided by their number (but at least a leaf).

Invariant: no target is touched on any rank before everything is verified on all. What is held in
memory does not grow with the state: one round of outgoing and one of incoming messages, and a cell
for each thread. Between the passes the page cache is the staging memory, or a temporary file, as in fetch.py.
Whether a box is pointed at or sent follows from what every rank knows, so both ends agree.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import CkptError, InternalError, NotFoundError, reworded
from cas_ckpt.memory import ALIGN_BYTES, aligned, memory_budget
from cas_ckpt.objects import codec
from cas_ckpt.objects.digest import LEAF_BYTES, Digest, ObjectKind, pack_atom, unpack_canonical
from cas_ckpt.objects.pack import Location
from cas_ckpt.objects.spec import Box, Delivery, as_raw, raw_dtype
from cas_ckpt.objects.state import ArrayTarget
from cas_ckpt.parallel.peers import Peers
from cas_ckpt.parallel.workers import run_all, thread_count
from cas_ckpt.progress import SILENT, Progress, phase
from cas_ckpt.storage.probe import NO_TOKEN, TOKEN_BYTES, cache_token
from cas_ckpt.storage.store import Store
from cas_ckpt.transfer.arrivals import Arrivals, placed
from cas_ckpt.transfer.chunk_reader import (
    STAGED,
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
from cas_ckpt.transfer.hashing import Array, stretches
from cas_ckpt.transfer.sources import StagedStore

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
        quotas: By rank, `quota_bytes` of it.
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


# --- rounds, and the messages in them --------------------------------------------------------

_Sized: TypeAlias = tuple[int, Box, int]
"""Receiver, box, bytes."""


@dataclass(frozen=True, slots=True)
class Part:
    """A box in a message.

    Attributes:
        read: Number of the chunk among the reader's own.
        start: Where the box's elements, in C order, begin in the message (bytes).
        stop: Where they end.
    """

    read: int
    box: Box
    start: int
    stop: int


@dataclass(slots=True)
class Round:
    """Data that one rank sends at one time.

    Attributes:
        parts: Receiver -> parts of the message to it.
        lengths: Receiver -> where the next part of the message to it begins.
        total: Bytes of all messages.
    """

    parts: dict[int, list[Part]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    total: int = 0

    def has_room(self, parts: Sequence[_Sized], *, quotas: Sequence[int], budget_bytes: int) -> bool:
        """Whether `parts` fit the budget of the sender, and the quotas of those who get them."""
        if self.total + sum(aligned(num_bytes) for _, _, num_bytes in parts) > budget_bytes:
            return False
        more: dict[int, int] = {}
        for receiver, _, num_bytes in parts:
            more[receiver] = more.get(receiver, 0) + aligned(num_bytes)
        return all(self.lengths.get(rank, 0) + length <= quotas[rank] for rank, length in more.items())

    def add(self, read: int, receiver: int, box: Box, num_bytes: int) -> None:
        """Append a part of chunk number `read` to the message to `receiver`."""
        start = self.lengths.get(receiver, 0)
        self.parts.setdefault(receiver, []).append(Part(read, box, start, start + num_bytes))
        self.lengths[receiver] = start + aligned(num_bytes)
        self.total += aligned(num_bytes)


def quota_bytes(num_senders: int, budget_bytes: int) -> int:
    """Most bytes that each of its senders gives a rank in one round."""
    return max(budget_bytes // max(num_senders, 1), LEAF_BYTES) // ALIGN_BYTES * ALIGN_BYTES


def cut_rounds(
    reads: Iterable[tuple[int, int, Sequence[Delivery]]], *, quotas: Sequence[int], budget_bytes: int
) -> list[Round]:
    """The rounds in which a rank sends.

    A chunk whose parts would fit an empty round is not cut in two, so it is seldom read twice.

    Args:
        reads: (number of the chunk, its item size in bytes, who gets what of it), in the order of the plan.
        quotas: By rank, `quota_bytes` of the receiver.
        budget_bytes: At least every quota.
    """
    rounds = [Round()]
    for read, item_bytes, sends in reads:
        parts = _parts(sends, item_bytes, quotas)
        if not rounds[-1].has_room(parts, quotas=quotas, budget_bytes=budget_bytes):
            rounds.append(Round())
        for part in parts:
            if not rounds[-1].has_room([part], quotas=quotas, budget_bytes=budget_bytes):
                rounds.append(Round())
            rounds[-1].add(read, *part)
    return [each for each in rounds if each.parts]


def _parts(sends: Sequence[Delivery], item_bytes: int, quotas: Sequence[int]) -> list[_Sized]:
    # Receivers of one box share the object, and the objects that it is split into: messages are recognised by that.
    cut: dict[tuple[int, int], list[Box]] = {}
    found = []
    for send in sends:
        alike = (id(send.box), quotas[send.rank])
        boxes = cut.get(alike)
        if boxes is None:
            boxes = cut[alike] = list(stretches(send.box, quotas[send.rank] // item_bytes))
        found += [(send.rank, box, box.num_elements * item_bytes) for box in boxes]
    return found


@dataclass(frozen=True, slots=True)
class TargetTensor:
    """A tensor as this rank sees it; `target` is None where it wants nothing of it."""

    key: str
    item_bytes: int
    target: ArrayTarget | None


@dataclass(frozen=True, slots=True)
class Incoming:
    """A box that this rank gets from another one, and the cell that it is a part of."""

    reader: int
    tensor: TargetTensor
    box: Box
    cell: Box


def num_bytes(tensor: TargetTensor, box: Box) -> int:
    """Bytes of the elements of `box`."""
    return box.num_elements * tensor.item_bytes


def elements(data: memoryview, box: Box, item_bytes: int) -> Array:
    """`data` as the elements of `box`, without a copy."""
    return np.frombuffer(data, np.uint8).view(raw_dtype(item_bytes)).reshape(box.sizes)


class Stage:
    """The memory of outgoing messages, used again in every round."""

    def __init__(self, size: int) -> None:
        self.nothing: list[Buffer] = [b""] * size
        self._space = np.empty(0, np.uint8)

    def lay_out(self, planned: Round) -> tuple[list[Buffer], dict[int, list[tuple[memoryview, Box]]]]:
        """The message to each rank, and by read where in them its boxes go.

        Ranks that get the same share one message: replicas cost no more memory than one of them.
        """
        alike: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for receiver, parts in planned.parts.items():
            alike.setdefault(tuple((part.read, id(part.box)) for part in parts), []).append(receiver)
        shared = [(receivers, planned.parts[receivers[0]]) for receivers in alike.values()]
        room = sum(aligned(parts[-1].stop) for _, parts in shared)
        if len(self._space) < room:
            self._space = np.empty(room, np.uint8)
        messages = list(self.nothing)
        slots: dict[int, list[tuple[memoryview, Box]]] = {}
        start = 0
        for receivers, parts in shared:
            message = self._space.data[start : start + parts[-1].stop]
            start += aligned(parts[-1].stop)
            for part in parts:
                slots.setdefault(part.read, []).append((message[part.start : part.stop], part.box))
            for receiver in receivers:
                messages[receiver] = message
        return messages, slots


class Streams:
    """Data that this rank still has to receive, by reader, in the order of arrival."""

    def __init__(self, incoming: Iterable[Incoming], quota: int) -> None:
        self._quota = quota
        self._waiting: dict[int, deque[tuple[TargetTensor, Box]]] = {}
        for each in incoming:
            for box in stretches(each.box, quota // each.tensor.item_bytes):
                self._waiting.setdefault(each.reader, deque()).append((each.tensor, box))

    def take(self, own_rank: int, messages: Sequence[Buffer]) -> list[tuple[TargetTensor, Box, memoryview]]:
        """Decode these messages.

        Raises:
            InternalError: not what the plan says.
        """
        found: list[tuple[TargetTensor, Box, memoryview]] = []
        for reader, message in enumerate(messages):
            if reader == own_rank:
                continue
            view = memoryview(message).cast("B")
            waiting = self._waiting.get(reader, deque())
            at = 0
            while at < len(view):
                tensor, box = waiting.popleft() if waiting else (None, None)
                if tensor is None or box is None or at + num_bytes(tensor, box) > len(view):
                    raise InternalError(f"rank {reader} sent {len(view)} bytes that do not follow the plan")
                stop = at + num_bytes(tensor, box)
                found.append((tensor, box, view[at:stop]))
                at = aligned(stop)
        return found

    def check_empty(self) -> None:
        """Raise InternalError if something was planned and did not come."""
        for reader, waiting in self._waiting.items():
            if waiting:
                raise InternalError(f"{waiting[0][0].key}: rank {reader} still owes {len(waiting)} parts")


# --- the restore itself ------------------------------------------------------------------------

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
        self._filler = ChunkFiller(source, options.progress, options.relocate)
        # Another rank says where its chunks are: what is found elsewhere, no rank has verified.
        self._pointed = ChunkReader(source)

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
            jobs = sorted(alone, key=_by_place)
            if not self._around.is_empty:  # each rank is sent pointers to its parts, and others point at `found`
                messages = self._peers.exchange([pack_pointers(chunks) if chunks else b"" for chunks in pointed])
                for reader, message in enumerate(messages):
                    mine = [each for each in found if each.reader == reader]
                    chunks = unpack_pointers(bytes(message), keys=[each.tensor.key for each in mine], reader=reader)
                    for part, chunk in zip(mine, chunks, strict=True):
                        jobs.append(_Job(CellRead(chunk, part.tensor, part.cell, ()), [], [part.box]))
            self._fill(jobs)
            self._exchange_rounds(reads, own, sends, received)

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
            # What could not be staged is read and verified once more, what is near one another together.
            remote = [job for job in jobs if not _is_staged(job.read.chunk)]
            jobs = [job for job in jobs if _is_staged(job.read.chunk)]
            chunks: dict[Digest, StoredChunk] = {}
            for job in remote:
                chunk = chunks.setdefault(job.read.chunk.digest, replace(job.read.chunk, parts=[], wanted_bytes=0))
                chunk.parts += job.parts()
                chunk.wanted_bytes += sum(num_bytes(job.read.tensor, box) for box in job.own)
            Arrivals(self._source.store, replace(self._options, progress=SILENT)).read(list(chunks.values()), placed)
            self._options.progress.advance(sum(num_bytes(job.read.tensor, box) for job in remote for box in job.own))
        run_all(jobs, lambda: self._fill_one, num_threads=min(self._options.num_threads, len(jobs)))

    def _fill_one(self, job: _Job) -> None:
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
            if self._options.relocate is None:
                raise
            places = self._options.relocate(chunk.digest, {place.pack for place in chunk.places})
            return self._filler.reader.verify(chunk.digest, places, chunk.num_bytes)

    def _land(self, parts: Sequence[tuple[TargetTensor, Box, memoryview]]) -> None:
        def land(part: tuple[TargetTensor, Box, memoryview]) -> None:
            tensor, box, data = part
            target = _target(tensor)
            array = target.open(box)
            np.copyto(as_raw(array, tensor.item_bytes), elements(data, box, tensor.item_bytes))
            target.done(box, array)
            self._options.progress.advance(len(data))

        run_all(parts, lambda: land, num_threads=min(self._options.num_threads, len(parts)))


def _is_staged(chunk: StoredChunk) -> bool:
    return bool(chunk.extents) and chunk.extents[0].pack == STAGED


def _by_place(job: _Job) -> tuple[str, int]:
    place = job.read.chunk.places[0]
    return place.pack, place.offset


def _target(tensor: TargetTensor) -> ArrayTarget:
    if tensor.target is None:
        raise InternalError(f"{tensor.key}: the plan delivers to a rank that does not want it")
    return tensor.target
