"""commit: a state becomes a commit on a branch.

    1. check the request; see that index and store agree (begin_writing)
    2. draft: what stands inline, what has to be hashed, what is frozen
    3. hash every cell, stream what is new into data packs      (transfer/save.py)
    4. nodes: tensor nodes, tree nodes, layout; drop those that are stored already
    5. publish: meta pack with the commit, then the swap of the ref   (core/publish.py)
    6. index rows
Dying anywhere leaves the branch as it was; packs that nothing names are found again by the
next commit (deduplicated) or collected later.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgpack

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.packs import commit_row
from cas_ckpt.core.protocol import Generation, Session, read_gc_state
from cas_ckpt.core.publish import Destination, GenerationMoved, Publication
from cas_ckpt.core.records import CommitInfo, info_from_row
from cas_ckpt.core.refs import Head, check_name
from cas_ckpt.core.tree import KeyPatterns
from cas_ckpt.errors import CkptError, ConflictError, InternalError, PeerError
from cas_ckpt.layout.holdings import Shard, whole
from cas_ckpt.layout.save_plan import Held, SavePlan
from cas_ckpt.objects.codec import EncodingPolicy
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.objects.nodes import LayoutObject, decode_tree
from cas_ckpt.objects.spec import Box
from cas_ckpt.objects.state import Container, TensorItem, render_key, walk
from cas_ckpt.objects.values import encode_value
from cas_ckpt.ops.commit.agree import Agreement, agree, missing_packs
from cas_ckpt.ops.commit.draft import (
    Contribution,
    Draft,
    DraftTensor,
    layout_of,
    publish_draft,
    tensor_bytes,
    unpack_contribution,
)
from cas_ckpt.ops.commit.frozen import Frozen, FrozenMemory, Hashed
from cas_ckpt.ops.commit.merge_states import OwnValues
from cas_ckpt.ops.commit.replicas import compare_replicas, one_replica_of
from cas_ckpt.ops.commit.request import (
    CHECKSUM,
    CommitFields,
    CommitRequest,
    checked_fields,
    settle_ancestry,
    settle_destination,
)
from cas_ckpt.ops.commit.straddling_cells import StraddledSaver
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.transfer.hashing import Summed, checksums
from cas_ckpt.transfer.pack_writer import ChunkSink, WrittenPack
from cas_ckpt.transfer.peers import SOLO, Peers, collective_errors, named, tell
from cas_ckpt.transfer.save import Claims, TensorWork, save_tensors
from cas_ckpt.transfer.workers import default_threads, thread_count

# DOC of cas_ckpt.ops.commit.attempt:
# commit, by several ranks together: one commit of what all of them hold.
#
#     1. agree: every rank describes what it has; the union and the plan follow, alike everywhere
#     2. compare replicas, every byte, before all but one of them are dropped
#     3. save whole cells (transfer/save.py), then straddled ones (ops/commit/straddling_cells.py); packs by all ranks
#     4. rank 0 gathers ids and packs, makes the nodes, publishes, and tells the others
# Collective. Invariant: a rank that fails makes all ranks raise; the branch moves on rank 0 alone, after
# every rank's packs are durable. Knows nothing of torch.
#

_LOGGER = logging.getLogger("cas_ckpt")

_AGAIN = b"again"
_REFUSED = b"refused"
"""What rank 0 sends instead of the commit: begin anew; or why it is not published, and whom to blame."""


@dataclass(frozen=True, slots=True)
class _Work:
    """What the ranks save together, planned: the same on all ranks but for the sources.

    Attributes:
        works: Every tensor that is kept in chunks, tied ones once; `held` beside it.
    """

    draft: Draft
    works: Sequence[TensorWork]
    held: Sequence[Held]
    plan: SavePlan


class RanksAttempt:
    """One try at a common commit against one gc generation."""

    def __init__(
        self, handle: RepositoryHandle, request: CommitRequest, fields: CommitFields, memory: FrozenMemory,
        peers: Peers, progress: Progress,
    ) -> None:  # fmt: skip
        self._handle = handle
        self._request = request
        self._fields = fields
        self._memory = memory
        self._peers = peers
        self._progress = progress
        self._sums: dict[tuple[int, Box], bytes] = {}

    def run(self, state: Container, destination: Destination | None) -> tuple[CommitInfo, str]:
        """The commit and the branch that it went to, the same on every rank.

        Args:
            destination: Rank 0's; None on the others.
        Raises:
            PeerError: another rank failed or disagrees. GenerationMoved: all ranks begin anew.
        """
        agreement = agree(
            self._handle, state, self._request, self._fields, self._peers, encode_value=self._encode_value
        )
        if agreement.generation is None:
            self._handle.forget_chunks()
            raise GenerationMoved
        work = self._planned(agreement)
        own = OwnValues(state, agreement.union.ranks_paths, self._peers.rank, self._encode_value)
        try:
            with Session(self._handle.store) as session:
                hashed, contribution = self._save(work, own, agreement.num_neighbours, session)
                told = self._peers.gather(contribution.pack())
                data = None if told is None else self._publish(work, agreement, told, destination)
                data = self._peers.broadcast(data)
            if data == _AGAIN:
                raise GenerationMoved
            if data.startswith(_REFUSED):
                raise PeerError(*_refusal(data))
        except BaseException:
            self._handle.forget_chunks()  # the packs are durable, or not: the next commit looks
            raise
        self._remember(agreement, contribution.packs, hashed, work.draft)
        digest, commit, branch = msgpack.unpackb(data)
        return info_from_row(commit_row(digest, commit)), branch

    def _encode_value(self, value: Any, key: str) -> bytes:
        return encode_value(value, key=key, allow_pickle=self._request.allow_pickle)

    def _planned(self, agreement: Agreement) -> _Work:
        draft = Draft(agreement.union.state, encode_value=self._encode_value)
        works = list(draft.works())
        first: dict[int, DraftTensor] = {}
        for tensor in draft.tensors:
            first.setdefault(id(tensor.work), tensor)
        held = []
        shared: dict[tuple[int, ...], tuple[Shard, ...]] = {}
        for work in works:
            key = first[id(work)].key
            shards = agreement.union.shards.get(key)  # long values are in no rank's hands: all know them
            if shards is None:
                everybody = whole(work.spec.shape, range(self._peers.size))
                shards = shared.setdefault(work.spec.shape, everybody)
            held.append(Held(key, work.spec, work.grid, shards, key in agreement.union.disjoint))
        held = self._compared(held, works, agreement)
        return _Work(draft, works, held, SavePlan(held, self._peers.size))

    def _compared(self, held: list[Held], works: Sequence[TensorWork], agreement: Agreement) -> list[Held]:
        """`held`, but of what differs between ranks one replica alone is there; or the error."""

        def checksums(regions: Sequence[tuple[int, Box]]) -> list[bytes]:
            return self._checksums(works, regions, agreement.num_neighbours)

        found = compare_replicas(
            held, [work.source for work in works], self._peers,
            checksums=checksums if self._request.replica_check == CHECKSUM else None,
            share=self._request.replica_audit, seed=agreement.seed,
        )  # fmt: skip
        tensors = dict.fromkeys(each.tensor for each in found)
        if found and self._request.on_divergence == "raise":
            raise PeerError(
                f"{found[0].text} ({len(found)} regions of {len(tensors)} tensors differ): find out why, wrap what "
                "each rank is to keep in PerRank (in dcp.save: put the rank into its key), "
                'or commit with on_divergence="warn"',
                found[0].ranks,
            )
        for number in tensors:
            held[number] = one_replica_of(held[number], agreement.union.placements.get(held[number].key, ()))
        for each in found if self._peers.rank == 0 else ():
            if each.text:
                kept = named(sorted({rank for shard in held[each.tensor].shards for rank in shard.ranks}))
                _LOGGER.warning("%s; the commit holds the whole tensor as %s had it", each.text, kept)
        return held

    def _checksums(
        self, works: Sequence[TensorWork], regions: Sequence[tuple[int, Box]], num_neighbours: int
    ) -> list[bytes]:
        """The checksums of regions of these tensors; each region is summed once in a commit."""
        todo = [each for each in dict.fromkeys(regions) if each not in self._sums]
        parts = [Summed(works[number].source, box, works[number].item_bytes) for number, box in todo]
        found = checksums(parts, num_threads=self._num_threads(num_neighbours))
        self._sums.update(zip(todo, found, strict=True))
        return [self._sums[each] for each in regions]

    def _num_threads(self, num_neighbours: int) -> int:
        return thread_count(self._request.num_threads, most=default_threads() // num_neighbours)

    # --- saving -----------------------------------------------------------------------------

    def _save(self, work: _Work, own: OwnValues, num_neighbours: int, session: Session) -> tuple[Hashed, Contribution]:
        handle = self._handle
        whole_cells = work.plan.whole_cells(self._peers.rank)
        frozen = self._choose_cells(work, own, whole_cells, num_neighbours)
        sink = ChunkSink(handle.store, pack_bytes=handle.config.pack_bytes, on_pack=session.beat)
        claims, policy = Claims(handle.known), EncodingPolicy(handle.config.encoding)
        threads = self._num_threads(num_neighbours)
        self._progress.start("hashing", _own_bytes(work.held, self._peers.rank))
        try:
            save_tensors(
                [*work.works, *own.works], sink, claims=claims, policy=policy, num_threads=threads,
                expect_new=not handle.holds_chunks(), progress=self._progress,
            )  # fmt: skip
            straddled = StraddledSaver(work.works, self._peers, sink, claims, policy, self._progress, threads)
            straddled.run(work.plan)
            packs = sink.finish()
        except BaseException:
            sink.abort()
            raise
        finally:
            self._progress.finish()
        for (number, cell), digest in straddled.named.items():
            work.works[number].chunks[cell] = digest
        hashed = self._memory.check(frozen)
        own_ids = {
            (number, cell): _named(work.works[number], cell) for number, cells in whole_cells.items() for cell in cells
        }
        return hashed, Contribution(own_ids | straddled.named, packs, own.nodes(), own.totals(), own.aliases)

    def _choose_cells(
        self, work: _Work, own: OwnValues, whole_cells: Mapping[int, Sequence[int]], num_neighbours: int
    ) -> Frozen:
        """Give every work the cells that this rank hashes alone, but for what is frozen and the same as before."""
        patterns = KeyPatterns(self._request.frozen, self._request.frozen_keys)
        frozen = Frozen()
        if patterns:
            own.mark(patterns)
            numbers = {id(each): number for number, each in enumerate(work.works)}

            def regions(tensor: DraftTensor) -> tuple[Box, ...]:
                return _regions_of(work.held[numbers[id(tensor.work)]].shards, self._peers.rank)

            def checksums(wanted: Sequence[tuple[DraftTensor, Box]]) -> list[bytes]:
                numbered = [(numbers[id(tensor.work)], box) for tensor, box in wanted]
                return self._checksums(work.works, numbered, num_neighbours)

            frozen = self._memory.prepare(
                work.draft, self._request, patterns, known=self._handle.known, regions=regions, checksums=checksums
            )
        for number, each in enumerate(work.works):
            mine = frozenset(whole_cells.get(number, ()))
            each.cells = mine if each.cells is None else mine & each.cells
            each.banded = len(_regions_of(work.held[number].shards, self._peers.rank)) <= 1
        return frozen

    # --- publishing, on rank 0 --------------------------------------------------------------

    def _publish(
        self, work: _Work, agreement: Agreement, told: Sequence[bytes], destination: Destination | None,
    ) -> bytes:  # fmt: skip
        if destination is None:
            raise InternalError("the rank that publishes knows no branch")
        branch = destination.branch
        contributions = [unpack_contribution(data) for data in told]
        missing = missing_packs(self._handle, contributions)
        if missing is not None and not self._is_current(agreement):
            return _AGAIN  # a collection took them: what it took is written again
        if missing is not None:
            refusal: bytes = msgpack.packb([str(missing), missing.ranks])
            return _REFUSED + refusal
        for each in contributions:
            for (tensor, cell), digest in each.named.items():
                work.works[tensor].chunks[cell] = digest
        _add_own(work.draft, agreement, contributions)
        packs = [pack for each in contributions for pack in each.packs]
        publication = Publication(packs, generation=agreement.generation or Generation())
        more_nodes = [node for each in contributions for nodes in each.own for node in nodes[:-1]]
        aliases = tuple(sorted({*work.draft.aliases, *(group for each in contributions for group in each.own_aliases)}))
        layout = layout_of(agreement.union.placements, aliases, self._peers.size)
        try:
            digest = publish_draft(
                self._handle, work.draft, publication, self._request, self._fields, layout, destination,
                more_nodes=more_nodes,
            )  # fmt: skip
        except GenerationMoved:
            return _AGAIN
        try:
            publication.tell(self._handle)
            data = next(node.data for node in publication.written_nodes if node.digest == digest)
            packed: bytes = msgpack.packb([digest, data, branch])
        except BaseException as error:
            tell(self._peers, ConflictError(
                f"commit {short(digest)} is made and the branch {branch} names it, but rank 0 was stopped right after "
                f"({error!r}): go on from there"
            ))  # fmt: skip
            raise
        return packed

    def _is_current(self, agreement: Agreement) -> bool:
        state = read_gc_state(self._handle.store)  # asked after the packs: a collection says so before it deletes
        return self._handle.is_current(state, agreement.generation or Generation())

    def _remember(self, agreement: Agreement, packs: Sequence[WrittenPack], hashed: Hashed, draft: Draft) -> None:
        if self._peers.rank and agreement.shares_index:
            self._handle.note_written(packs, generation=agreement.generation or Generation())
        elif self._peers.rank:
            self._handle.forget_chunks()  # an index of its own: the next commit reads the others' packs
        self._memory.remember(hashed, draft)


def _refusal(data: bytes) -> tuple[str, tuple[int, ...]]:
    text, ranks = msgpack.unpackb(data[len(_REFUSED) :])
    return text, tuple(ranks)


def _named(work: TensorWork, cell: int) -> Digest:
    digest = work.chunks[cell]
    if digest is None:
        raise InternalError(f"cell {cell} of {work.spec} was never hashed")
    return digest


def _own_bytes(held: Sequence[Held], rank: int) -> int:
    """Plain bytes of what a rank holds, as far as it may have to hash it."""
    return sum(
        piece.num_elements * tensor.spec.item_bytes // len(shard.ranks)
        for tensor in held
        for shard in tensor.shards
        if rank in shard.ranks
        for piece in shard.pieces
    )


def _regions_of(shards: Sequence[Shard], rank: int) -> tuple[Box, ...]:
    return tuple(piece for shard in shards if rank in shard.ranks for piece in shard.pieces)


def _add_own(draft: Draft, agreement: Agreement, contributions: Sequence[Contribution]) -> None:
    """Bring every rank's own values into the containers that were kept free for them."""
    for at, path in enumerate(agreement.union.ranks_paths):
        container = draft.containers[render_key(path)]
        for each in contributions:
            container.entries.extend(decode_tree(each.own[at][-1].data).entries)
    for each in contributions:
        num_bytes, entries, tensors, chunks = each.own_totals
        draft.add_elsewhere(num_bytes=num_bytes, num_entries=entries, num_tensors=tensors, num_chunks=chunks)


BYTES_PER_THREAD = 96 * 1024 * 1024
"""Bytes of the state that give one thread more to hash them: fewer, and the threads wait for the interpreter's lock."""

MAX_GENERATIONS = 5
"""Times that a commit begins anew because a garbage collection began under it."""


def commit_tree(
    handle: RepositoryHandle,
    state: Container,
    request: CommitRequest,
    *,
    peers: Peers = SOLO,
    memory: FrozenMemory | None = None,
    progress: Progress = SILENT,
) -> CommitInfo:
    """Commit `state`; what the commit says of itself. Collective if there are several ranks.

    Args:
        state: What this rank has.
        peers: The ranks that commit together; all get the same answer.
        memory: What this process declared frozen before; needed across calls for `frozen=`.
    Raises:
        PeerError: another rank failed, or disagrees; says who and what.
        InvalidInputError, UnsupportedValueError, FrozenChangedError: before anything is written
            that could be seen. ConflictError: the branch moved. StorageError: the medium refused.
    """
    with collective_errors(peers):
        return _commit(handle, state, request, peers, memory or FrozenMemory(), progress)[0]


def commit_live(
    handle: RepositoryHandle, state: Container, request: CommitRequest, *, peers: Peers = SOLO,
    memory: FrozenMemory | None = None, progress: Progress = SILENT,
) -> CommitInfo:  # fmt: skip
    """`commit_tree` for the live state of this process: goes on from `handle.head`, and moves it on all ranks."""
    request = replace(request, head=handle.head)
    with collective_errors(peers):
        made, branch = _commit(handle, state, request, peers, memory or FrozenMemory(), progress)
    handle.head = Head(branch, made.id)
    return made


def _commit(
    handle: RepositoryHandle, state: Container, request: CommitRequest, peers: Peers, memory: FrozenMemory,
    progress: Progress,
) -> tuple[CommitInfo, str]:  # fmt: skip
    if request.branch is not None:
        check_name(request.branch)
    checked = checked_fields(request)
    destination: Destination | None = None
    if peers.rank == 0:  # who publishes resolves: a branch may move between the looks of two ranks
        checked = replace(checked, ancestry=settle_ancestry(handle, request, checked))
        destination = settle_destination(handle, request, checked.ancestry)
    divided = peers.size > 1 or any(isinstance(item, TensorItem) and item.placement for _, item in walk(state))
    for _ in range(MAX_GENERATIONS):
        try:
            if divided:
                return RanksAttempt(handle, request, checked, memory, peers, progress).run(state, destination)
            if destination is None:
                raise InternalError("a process that commits alone is no rank 0")
            return _Attempt(handle, request, checked, memory, progress).run(state, destination), destination.branch
        except GenerationMoved:
            continue
    raise ConflictError(f"garbage collections began {MAX_GENERATIONS} times while this commit was made: try again")


class _Attempt:
    """One try at a commit against one gc generation."""

    def __init__(
        self,
        handle: RepositoryHandle,
        request: CommitRequest,
        fields: CommitFields,
        memory: FrozenMemory,
        progress: Progress,
    ) -> None:
        self._handle = handle
        self._request = request
        self._fields = fields
        self._memory = memory
        self._progress = progress

    def run(self, state: Container, destination: Destination) -> CommitInfo:
        generation = self._handle.begin_writing()
        allow_pickle = self._request.allow_pickle
        draft = Draft(state, encode_value=lambda value, key: encode_value(value, key=key, allow_pickle=allow_pickle))
        works: Iterable[TensorWork] = draft.works()
        patterns = KeyPatterns(self._request.frozen, self._request.frozen_keys)
        frozen = Frozen()
        if patterns:
            works = list(works)
            frozen = self._memory.prepare(
                draft, self._request, patterns, known=self._handle.known,
                regions=lambda tensor: (tensor.item.spec.box,), checksums=self._checksums,
            )  # fmt: skip
        with Session(self._handle.store) as session:
            publication = Publication(self._save(works, state, session), generation=generation)
            return self._publish(draft, publication, frozen, destination)

    def _checksums(self, regions: Sequence[tuple[DraftTensor, Box]]) -> list[bytes]:
        parts = [Summed(each.item.source, box, each.item.spec.item_bytes) for each, box in regions]
        return checksums(parts, num_threads=thread_count(self._request.num_threads))

    def _publish(self, draft: Draft, publication: Publication, frozen: Frozen, destination: Destination) -> CommitInfo:
        try:
            hashed = self._memory.check(frozen)
        except CkptError:
            publication.tell(self._handle)  # the next commit need not write them again
            raise
        digest = publish_draft(
            self._handle, draft, publication, self._request, self._fields, LayoutObject(aliases=draft.aliases),
            destination,
        )  # fmt: skip
        publication.tell(self._handle)
        self._memory.remember(hashed, draft)
        data = next(node.data for node in publication.written_nodes if node.digest == digest)
        return info_from_row(commit_row(digest, data))

    def _save(self, works: Iterable[TensorWork], state: Container, session: Session) -> list[WrittenPack]:
        handle, request = self._handle, self._request
        sink = ChunkSink(handle.store, pack_bytes=handle.config.pack_bytes, on_pack=session.beat)
        num_bytes = tensor_bytes(state)
        self._progress.start("hashing", num_bytes)
        try:
            save_tensors(
                works,
                sink,
                claims=Claims(handle.known),
                policy=EncodingPolicy(handle.config.encoding),
                num_threads=thread_count(request.num_threads, most=num_bytes // BYTES_PER_THREAD),
                expect_new=not handle.holds_chunks(),
                progress=self._progress,
            )
            return sink.finish()
        except BaseException:
            sink.abort()
            handle.forget_chunks()  # packs that were finished before: the next commit finds them
            raise
        finally:
            self._progress.finish()
