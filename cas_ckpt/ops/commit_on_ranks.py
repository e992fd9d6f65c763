"""commit, by several ranks together: one commit of what all of them hold.

    1. agree: every rank describes what it has; the union and the plan follow, alike everywhere
    2. compare replicas, every byte, before all but one of them are dropped
    3. save whole cells (transfer/save.py), then straddled ones (straddled.py); packs by all ranks
    4. rank 0 gathers ids and packs, makes the nodes, publishes, and tells the others
Collective. Invariant: a rank that fails makes all ranks raise; the branch moves on rank 0 alone, after
every rank's packs are durable. Knows nothing of torch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from cas_ckpt.config import Generation, read_gc_state
from cas_ckpt.errors import ConflictError, InternalError, PeerError
from cas_ckpt.layout.holdings import Shard, whole
from cas_ckpt.layout.save_plan import Held, SavePlan
from cas_ckpt.objects.codec import EncodingPolicy
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.objects.spec import Box
from cas_ckpt.objects.state import Container, render_key
from cas_ckpt.objects.tree_node import decode_tree
from cas_ckpt.objects.values import encode_value
from cas_ckpt.ops.agreement import Agreement, agree
from cas_ckpt.ops.composition import publish_draft
from cas_ckpt.ops.contribution import Contribution, unpack_contribution
from cas_ckpt.ops.destination import Destination
from cas_ckpt.ops.draft import Draft, DraftTensor
from cas_ckpt.ops.frozen import Frozen, FrozenMemory, Hashed
from cas_ckpt.ops.layout_object import layout_of
from cas_ckpt.ops.one_store import missing_packs
from cas_ckpt.ops.own_values import OwnValues
from cas_ckpt.ops.patterns import KeyPatterns
from cas_ckpt.ops.publish import GenerationMoved, Publication
from cas_ckpt.ops.records import CommitInfo, info_from_row
from cas_ckpt.ops.replicas import compare_replicas, one_replica_of
from cas_ckpt.ops.request import CHECKSUM, CommitFields, CommitRequest
from cas_ckpt.ops.straddled import StraddledSaver
from cas_ckpt.ops.together import tell
from cas_ckpt.pack_index import commit_row
from cas_ckpt.progress import Progress
from cas_ckpt.repository import RepositoryHandle
from cas_ckpt.sessions import Session
from cas_ckpt.transfer.blame import named
from cas_ckpt.transfer.pack_writer import ChunkSink, WrittenPack
from cas_ckpt.transfer.peers import Peers
from cas_ckpt.transfer.save import Claims, TensorWork, save_tensors
from cas_ckpt.transfer.sums import Summed, checksums
from cas_ckpt.transfer.workers import default_threads, thread_count

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
                'each rank is to keep in PerRank (in dcp.save: put the rank into its key), '
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

    def _save(
        self, work: _Work, own: OwnValues, num_neighbours: int, session: Session
    ) -> tuple[Hashed, Contribution]:
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

    def _remember(
        self, agreement: Agreement, packs: Sequence[WrittenPack], hashed: Hashed, draft: Draft
    ) -> None:
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
