"""The save step of several ranks: one state of what all of them hold, every cell hashed and written once.

    1. agree: every rank describes what it has; the merged state and the plan follow, alike everywhere (agree.py)
    2. compare replicas, every byte, before all but one of them are dropped                      (`compare_replicas`)
    3. hash whole cells, then the cells that straddle ranks; packs are written by all ranks      (straddling_cells.py)
    4. every rank reports what it has done (`Contribution`); rank 0 completes the draft by it

Collective. Invariant: rank 0 publishes only what every rank's durable packs hold, and sees those packs itself.
What a rank reports was packed by another rank of the same job: ids are checked for being complete, never for being
true (the chunks prove themselves when they are read). Knows nothing of torch.

In step 2 every rank sums all that it holds of what others hold too (transfer/hashing.py), hashes the same random
stretches of it as they do, and sends one digest of both for each shard to the first of the ranks that have the shard:
every byte that two ranks hold is compared, unless only samples were asked for. What is compared follows from the plan
and a seed that all ranks share.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from operator import attrgetter
from typing import TypeAlias

import msgpack
import numpy as np
from blake3 import blake3

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.protocol import Session, read_gc_state
from cas_ckpt.core.publish import GenerationMoved
from cas_ckpt.errors import InternalError, PeerError, UnsupportedValueError
from cas_ckpt.layout.holdings import Shard, held_by, one_replica, range_boxes, touches, whole
from cas_ckpt.layout.save_plan import Held, SavePlan
from cas_ckpt.objects.digest import DIGEST_BYTES, LEAF_BYTES, Digest, ObjectKind
from cas_ckpt.objects.layouts import compose_layout
from cas_ckpt.objects.nodes import Node, decode_tree
from cas_ckpt.objects.pack import ExtentInfo, PackKind
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.spec import Box, Placement, as_raw
from cas_ckpt.objects.state import RANKS, ArraySource, Container, Flavor, Item, Name, Path, TensorItem, render_key, walk
from cas_ckpt.ops.commit.agree import Agreement, agree, missing_packs
from cas_ckpt.ops.commit.frozen import Frozen, FrozenMemory
from cas_ckpt.ops.commit.request import CommitFields, CommitRequest
from cas_ckpt.ops.commit.save import (
    Draft,
    DraftTensor,
    RegionSums,
    Saved,
    StateSize,
    held_bytes_of,
    room_for,
    save_chunks,
)
from cas_ckpt.ops.commit.straddling_cells import StraddlingSaver
from cas_ckpt.parallel.peers import Peers, named
from cas_ckpt.parallel.workers import default_threads, thread_count
from cas_ckpt.progress import Progress
from cas_ckpt.transfer.pack_writer import WrittenPack
from cas_ckpt.transfer.save import TensorWork

MOST_TOLD = 100
"""Regions that are named, at most, when replicas differ."""

TOLD_BYTES = 16
"""Sums that a rank sends about all that it holds of a shard."""

Checksums: TypeAlias = Callable[[Sequence[tuple[int, Box]]], Sequence[bytes]]
"""The checksum of each (tensor number, region) on this rank."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Replicas that differ.

    Attributes:
        tensor: Number of the tensor.
        text: A sentence that names key, ranks and region; empty after the first `MOST_TOLD` of a rank.
        ranks: Those that hold other bytes than the first one.
    """

    tensor: int
    text: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A region and all ranks that hold it; the first one compares. `at` tells those of one tensor apart."""

    tensor: int
    at: int
    pieces: tuple[Box, ...]
    ranks: tuple[int, ...]


def compare_replicas(
    held: Sequence[Held],
    sources: Sequence[ArraySource],
    peers: Peers,
    *,
    checksums: Checksums | None,
    share: float,
    seed: bytes,
) -> list[Divergence]:
    """Differences between replicas; the same answer on every rank.

    Args:
        held: All tensors, alike on every rank; `sources` are this rank's.
        checksums: Compares every byte by checksums; None: nothing but the sample is compared.
        share: Of the stretches of each shard how many are hashed and compared too (0..1); one at least, none for 0.
        seed: Equal on all ranks, other at every commit.
    """
    if peers.size == 1 or not (share or checksums):
        return []
    mine = [each for each in _comparisons(held) if peers.rank in each.ranks]
    regions = [(each.tensor, piece) for each in mine for piece in each.pieces]
    sums = iter(checksums(regions) if checksums else ())
    messages: list[list[bytes]] = [[] for _ in range(peers.size)]
    for each in mine:
        digest = blake3()
        for _ in each.pieces if checksums else ():
            digest.update(next(sums))
        item_bytes = held[each.tensor].spec.item_bytes
        for box in _stretches(each, share, item_bytes, seed) if share else ():
            array = np.ascontiguousarray(as_raw(sources[each.tensor].read(box), item_bytes))
            digest.update(array.reshape(-1).view(np.uint8).data)
        messages[each.ranks[0]].append(digest.digest(length=TOLD_BYTES))
    received = [memoryview(data) for data in peers.exchange([b"".join(digests) for digests in messages])]
    found = _compare(held, [each for each in mine if each.ranks[0] == peers.rank], received)
    rows = [astuple(each if at < MOST_TOLD else replace(each, text="")) for at, each in enumerate(found)]
    told = peers.gather_all(msgpack.packb(rows))
    return [Divergence(*row) for data in told for row in msgpack.unpackb(data, use_list=False)]


def one_replica_of(held: Held, placements: Sequence[Placement]) -> Held:
    """`held` as if one replica alone had it: the lowest rank that has the whole tensor, or that of its mesh.

    Where nobody has a replica (boxes that overlap by no rule), the lowest rank of each shard stands for it.
    """
    whole = _whole(held)
    if whole is not None:
        return replace(held, shards=(_by_one(held.shards[whole]),), disjoint=True)
    members = one_replica(placements)
    chosen = [replace(shard, ranks=tuple(sorted(members.intersection(shard.ranks)))[:1]) for shard in held.shards]
    chosen = [shard for shard in chosen if shard.ranks]
    covered = sum(piece.num_elements for shard in chosen for piece in shard.pieces)
    if covered == held.spec.box.num_elements:
        return replace(held, shards=tuple(chosen), disjoint=True)
    return replace(held, shards=tuple(map(_by_one, held.shards)))


def _by_one(shard: Shard) -> Shard:
    return replace(shard, ranks=shard.ranks[:1])


def _comparisons(held: Sequence[Held]) -> Iterator[_Comparison]:
    overlaps: dict[tuple[object, ...], list[tuple[tuple[Box, ...], tuple[int, ...]]]] = {}
    for number, tensor in enumerate(held):
        whole = None if tensor.disjoint else _whole(tensor)
        everything = () if whole is None else tensor.shards[whole].ranks
        for at, shard in enumerate(tensor.shards):
            ranks = shard.ranks if at == whole or not everything else tuple(sorted({*shard.ranks, *everything}))
            if len(ranks) > 1:
                yield _Comparison(number, at, shard.pieces, ranks)
        if not tensor.disjoint and len(tensor.shards) > 1:
            # By identity, as in save_plan.py: tensors that are divided alike share one tuple.
            like = (tensor.spec.shape, tensor.grid, id(tensor.shards))
            if like not in overlaps:
                overlaps[like] = list(_overlaps(tensor, whole))
            for at, (pieces, ranks) in enumerate(overlaps[like], start=len(tensor.shards)):
                yield _Comparison(number, at, pieces, ranks)


def _overlaps(held: Held, whole: int | None) -> Iterator[tuple[tuple[Box, ...], tuple[int, ...]]]:
    """Intersections of two shards, neither of which is the whole tensor, and the ranks of both."""
    pairs = {
        (one.shard, other.shard)
        for found in touches(held.grid, held.shards)
        for at, one in enumerate(found)
        for other in found[at + 1 :]
        if one.shard != other.shard and whole not in (one.shard, other.shard)
    }
    for one, other in sorted(pairs):
        first, second = held.shards[one], held.shards[other]
        common = [a.intersect(b) for a in first.pieces for b in second.pieces]
        pieces = tuple(box for box in common if box is not None)
        if pieces:
            yield pieces, tuple(sorted({*first.ranks, *second.ranks}))


def _whole(held: Held) -> int | None:
    """Number of the shard that is the whole tensor, if there is one."""
    return next((at for at, shard in enumerate(held.shards) if shard.pieces == (held.spec.box,)), None)


def _stretches(comparison: _Comparison, share: float, item_bytes: int, seed: bytes) -> Iterator[Box]:
    """The boxes of a random choice of stretches of up to a leaf's length, consecutive elements of a piece."""
    length = max(1, LEAF_BYTES // item_bytes)
    counts = [-(-piece.num_elements // length) for piece in comparison.pieces]
    total = sum(counts)
    # Not for secrets: it only has to differ from commit to commit.
    chance = random.Random(f"{seed.hex()}:{comparison.tensor}:{comparison.at}")
    chosen = sorted(chance.sample(range(total), min(total, max(1, round(total * share)))))
    before = 0
    for piece, count in zip(comparison.pieces, counts, strict=True):
        for at in chosen:
            if before <= at < before + count:
                start = (at - before) * length
                for box in range_boxes(piece.sizes, start, min(start + length, piece.num_elements)):
                    yield Box(tuple(a + b for a, b in zip(piece.offsets, box.offsets, strict=True)), box.sizes)
        before += count


def _compare(
    held: Sequence[Held], comparisons: Sequence[_Comparison], received: Sequence[memoryview]
) -> list[Divergence]:
    taken = [0] * len(received)
    found = []
    for each in comparisons:
        digests = {}
        for rank in each.ranks:
            digests[rank] = received[rank][taken[rank] : taken[rank] + TOLD_BYTES]
            taken[rank] += TOLD_BYTES
        others = [rank for rank in each.ranks if digests[rank] != digests[each.ranks[0]]]
        if others:
            region = each.pieces[0]
            found.append(
                Divergence(
                    each.tensor,
                    f"{held[each.tensor].key}: ranks {', '.join(map(str, others))} hold other bytes than rank "
                    f"{each.ranks[0]} in the region at {region.offsets} of sizes {region.sizes}",
                    tuple(others),
                )
            )
    return found


_LOGGER = logging.getLogger("cas_ckpt")


def save_on_ranks(
    handle: RepositoryHandle,
    state: Container,
    request: CommitRequest,
    fields: CommitFields,
    session: Session,
    *,
    peers: Peers,
    memory: FrozenMemory | None,
    size: StateSize,
    progress: Progress,
) -> Saved:
    """Save what all ranks have; collective.

    Args:
        state: What this rank has.
        memory: What this process declared frozen before; needed if `request` declares something frozen.
        size: What `measure` says of `state`.
    Raises:
        PeerError: another rank failed or disagrees. GenerationMoved: all ranks begin anew.
        FrozenChangedError, StorageError, ...: on this rank.
    """
    agreement = agree(handle, state, request, fields, peers, held_bytes=held_bytes_of(handle, size))
    if agreement.generation is None:
        raise GenerationMoved
    draft = Draft(agreement.merged.state, allow_pickle=request.allow_pickle)
    works = list(draft.works())
    num_threads = thread_count(most=default_threads() // agreement.num_neighbours)
    room = room_for(handle, size, num_threads=num_threads, num_ranks=agreement.num_neighbours)
    sums = RegionSums(num_threads)
    held = _compared(_held(draft, works, agreement, peers.size), works, agreement, request, peers, sums)
    plan = SavePlan(held, peers.size, budget_bytes=agreement.free_bytes)
    own = PerRankValues(state, agreement.merged.ranks_paths, peers.rank, allow_pickle=request.allow_pickle)
    whole_cells = plan.whole_cells(peers.rank)
    mine = [tuple(box for shard in each.shards if peers.rank in shard.ranks for box in shard.pieces) for each in held]
    frozen: Frozen | None = None
    if memory is not None and (patterns := KeyPatterns(request.frozen, request.frozen_keys)):
        own.mark(patterns)
        regions = {id(work): boxes for work, boxes in zip(works, mine, strict=True)}
        frozen = memory.prepare(
            draft, request, patterns, known=handle.known, regions=lambda work: regions[id(work)], checksums=sums.of,
        )  # fmt: skip
    for number, work in enumerate(works):
        cells = frozenset(whole_cells.get(number, ()))
        work.cells = cells if work.cells is None else cells & work.cells
    straddling = StraddlingSaver(works, plan, peers, progress, num_threads)
    packs = save_chunks(
        handle, [*works, *own.works], session, num_bytes=_own_bytes(held, peers.rank), room=room, progress=progress,
        straddling=straddling,
    )  # fmt: skip
    for (number, cell), digest in straddling.named.items():
        works[number].chunks[cell] = digest
    hashed = {} if memory is None or frozen is None else memory.check(frozen)
    named_here: dict[tuple[int, int], Digest] = {}
    for number, numbered in whole_cells.items():
        for cell in numbered:
            hashed_id = works[number].chunks[cell]
            if hashed_id is None:
                raise InternalError(f"cell {cell} of {works[number].spec} was never hashed")
            named_here[number, cell] = hashed_id
    contribution = Contribution(named_here | straddling.named, packs, own.nodes(), own.counts(), own.forms())
    saved = Saved(draft, agreement.generation, packs, hashed=hashed, shares_index=agreement.shares_index)
    packed = contribution.pack()
    if request.look is not None:
        request.look()
    reported = peers.gather(packed)
    if reported is None:
        return saved
    return _completed(handle, saved, works, agreement, [unpack_contribution(data) for data in reported])


def _held(draft: Draft, works: Sequence[TensorWork], agreement: Agreement, size: int) -> list[Held]:
    """Who holds what of every tensor that is kept in chunks, tied ones once, in the order of `works`."""
    first: dict[int, DraftTensor] = {}
    for tensor in draft.tensors:
        first.setdefault(id(tensor.work), tensor)
    held = []
    shared: dict[tuple[int, ...], tuple[Shard, ...]] = {}
    for work in works:
        key = first[id(work)].key
        shards = agreement.merged.shards.get(key)  # long values are in no rank's hands: all know them
        if shards is None:
            shards = shared.setdefault(work.spec.shape, whole(work.spec.shape, range(size)))
        held.append(Held(key, work.spec, work.grid, shards, key in agreement.merged.disjoint))
    return held


def _compared(
    held: list[Held],
    works: Sequence[TensorWork],
    agreement: Agreement,
    request: CommitRequest,
    peers: Peers,
    sums: RegionSums,
) -> list[Held]:
    """`held`, but of what differs between ranks one replica alone; or the error."""
    wants_sums = request.replica_check == "checksum"
    found = compare_replicas(
        held, [work.source for work in works], peers,
        checksums=(lambda regions: sums.of([(works[at], box) for at, box in regions])) if wants_sums else None,
        share=request.replica_audit, seed=agreement.seed,
    )  # fmt: skip
    tensors = dict.fromkeys(each.tensor for each in found)
    if found and request.on_divergence == "raise":
        raise PeerError(
            f"{found[0].text} ({len(found)} regions of {len(tensors)} tensors differ): find out why, wrap what "
            "each rank is to keep in PerRank (in dcp.save: put the rank into its key), "
            'or commit with on_divergence="warn"',
            found[0].ranks,
        )
    kept = {number: one_replica_of(held[number], agreement.merged.placements(held[number].key)) for number in tensors}
    for each in found if peers.rank == 0 else ():
        if each.text:
            ranks = named(sorted({rank for shard in kept[each.tensor].shards for rank in shard.ranks}))
            _LOGGER.warning("%s; the commit holds the whole tensor as %s had it", each.text, ranks)
    return [kept.get(number, each) for number, each in enumerate(held)]


def _own_bytes(held: Sequence[Held], rank: int) -> int:
    """Plain bytes of what a rank holds, as far as it may have to hash it."""
    return sum(
        piece.num_elements * tensor.spec.item_bytes // len(shard.ranks)
        for tensor in held
        for shard in tensor.shards
        if rank in shard.ranks
        for piece in shard.pieces
    )


# --- what each rank has done, brought together on rank 0 ---------------------------------------


def _completed(
    handle: RepositoryHandle,
    saved: Saved,
    works: Sequence[TensorWork],
    agreement: Agreement,
    contributions: Sequence[Contribution],
) -> Saved:
    """On rank 0: what all ranks have saved, or why it must not be published."""
    missing = missing_packs(handle, [each.packs for each in contributions])
    if missing is not None:
        state = read_gc_state(handle.store)  # asked after the packs: a collection says so before it deletes
        anew = not handle.is_current(state, saved.generation)
        return replace(saved, begin_anew=anew, refusal=None if anew else missing)
    for each in contributions:
        for (tensor, cell), digest in each.named.items():
            works[tensor].chunks[cell] = digest
    for at, path in enumerate(agreement.merged.ranks_paths):
        for each in contributions:
            saved.draft.add_entries(render_key(path), decode_tree(each.own[at][-1].data).entries)
    for each in contributions:
        saved.draft.count(each.own_counts)
    aliases = {*saved.draft.aliases(), *(group for each in contributions for group in each.own_forms[0])}
    orders, versions = dict(saved.draft.orders), dict(saved.draft.versions)
    for each in contributions:
        orders |= each.own_forms[1]
        versions |= each.own_forms[2]
    return replace(
        saved,
        packs=[pack for each in contributions for pack in each.packs],
        layout=compose_layout(
            agreement.merged.divisions,
            world_size=len(contributions),
            aliases=tuple(sorted(aliases)),
            orders=orders,
            versions=versions,
        ),
        more_nodes=[node for each in contributions for nodes in each.own for node in nodes[:-1]],
    )


_Forms: TypeAlias = tuple[tuple[tuple[str, ...], ...], dict[str, tuple[int, ...]], dict[str, Mapping[str, int]]]


@dataclass(slots=True)
class Contribution:
    """One rank's part of a common commit, as rank 0 needs it to finish it.

    Attributes:
        named: (tensor, cell) -> id of every chunk that this rank named.
        packs: Packs that it wrote, durable.
        own: For each container of per-rank values the nodes of this rank's child; the last one is
            a tree with that child alone.
        own_counts: What `Draft.counts` says of those children.
        own_forms: Groups of keys within those children that are one tensor; their `orders` and `versions`.
    """

    named: dict[tuple[int, int], Digest]
    packs: list[WrittenPack]
    own: list[list[Node]]
    own_counts: dict[str, int]
    own_forms: _Forms

    def pack(self) -> bytes:
        """As bytes."""
        places = np.array(list(self.named), np.uint64).tobytes()
        packs = [[pack.key, pack.kind, pack.size_bytes, list(map(_row, pack.entries))] for pack in self.packs]
        own = [[[node.kind, node.data, list(node.children), node.digest] for node in nodes] for nodes in self.own]
        ids = b"".join(self.named.values())
        packed: bytes = msgpack.packb(
            [places, ids, packs, own, self.own_counts, self.own_forms], unicode_errors="surrogatepass"
        )
        return packed


_row = attrgetter(*(each.name for each in fields(ExtentInfo)))
"""An entry as a row; `astuple`, which copies every value, takes ten times as long."""


def unpack_contribution(data: bytes) -> Contribution:
    """Inverse of `Contribution.pack`, on another rank of this job."""
    places, ids, packs, own, counts, (aliases, orders, versions) = msgpack.unpackb(data, unicode_errors="surrogatepass")
    pairs = np.frombuffer(places, np.uint64).reshape(-1, 2).tolist()
    digests = [Digest(ids[start : start + DIGEST_BYTES]) for start in range(0, len(ids), DIGEST_BYTES)]
    named = {(tensor, cell): digest for (tensor, cell), digest in zip(pairs, digests, strict=True)}
    written = []
    for key, pack_kind, size, rows in packs:
        entries = tuple(ExtentInfo(Digest(digest), ObjectKind(kind), *rest) for digest, kind, *rest in rows)
        written.append(WrittenPack(key, PackKind(pack_kind), size, entries))
    nodes = [
        [Node(ObjectKind(kind), Digest(digest), data, tuple(map(Digest, below))) for kind, data, below, digest in rows]
        for rows in own
    ]
    forms = tuple(map(tuple, aliases)), {key: tuple(order) for key, order in orders.items()}, versions
    return Contribution(named, written, nodes, counts, forms)


# --- values that every rank keeps for itself ---------------------------------------------------


class PerRankValues:
    """The per-rank values of one rank: its children of the "ranks" containers.

    Each rank makes the nodes of its own children, as a tree of one child; rank 0 puts the trees
    together. Invariant: a child's node is the one that it would have anywhere else in a state.

    Attributes:
        works: Tensors that this rank alone hashes.
    """

    def __init__(self, state: Container, paths: Sequence[Path], rank: int, *, allow_pickle: bool = False) -> None:
        self._drafts: list[Draft] = []
        self._prefixes = [render_key(path) for path in paths]
        self.works: list[TensorWork] = []
        for path, prefix in zip(paths, self._prefixes, strict=True):
            found = _at(state, path)
            children: dict[Name, Item] = {}
            if found is not None and rank in found.children:
                children[rank] = found.children[rank]
                _check_whole(children[rank], (*path, rank), rank)
            draft = Draft(Container(RANKS, children), allow_pickle=allow_pickle, prefix=f"{prefix}/")
            self.works.extend(draft.works())
            self._drafts.append(draft)

    def forms(self) -> _Forms:
        """Groups of whole keys that are one tensor, and `orders` and `versions` by whole keys."""
        drafts = list(zip(self._prefixes, self._drafts, strict=True))
        return (
            tuple(tuple(f"{prefix}/{key}" for key in group) for prefix, draft in drafts for group in draft.aliases()),
            {f"{prefix}/{key}": order for prefix, draft in drafts for key, order in draft.orders.items()},
            {f"{prefix}/{key}": dict(found) for prefix, draft in drafts for key, found in draft.versions.items()},
        )

    def mark(self, patterns: KeyPatterns) -> None:
        """Let `patterns` see the tensors here, so that none is reported to match nothing; all are stored each time."""
        for prefix, draft in zip(self._prefixes, self._drafts, strict=True):
            tensors = [tensor.key for tensor in draft.tensors if tensor.flavor != Flavor.VALUE]
            for key in (*tensors, *(key for key, _ in draft.inline_tensors())):
                patterns.matches(f"{prefix}/{key}")

    def nodes(self) -> list[list[Node]]:
        """For each path the nodes of this rank's child, last a tree of it alone; all works are hashed."""
        found = []
        for draft in self._drafts:
            nodes, root = draft.nodes()
            found.append(sorted(nodes, key=lambda node: node.digest == root))
        return found

    def counts(self) -> dict[str, int]:
        """The counts of all drafts, added up."""
        total: Counter[str] = Counter()
        for draft in self._drafts:
            total.update(draft.counts)
        return dict(total)


def _check_whole(item: Item, path: Path, rank: int) -> None:
    for at, tensor in walk(item, path):
        if isinstance(tensor, TensorItem) and tensor.placement is not None and tensor.spec.num_elements:
            held = held_by(rank, tensor.spec.shape, tensor.placement)
            if [box for box, _ in held] != [tensor.spec.box]:
                raise UnsupportedValueError(
                    f"{render_key(at)}: a tensor that is divided over ranks cannot be one rank's own: take it out of "
                    "PerRank, or give PerRank its local part"
                )


def _at(state: Container, path: Path) -> Container | None:
    item: Item | None = state
    for name in path:
        item = item.children.get(name) if isinstance(item, Container) else None
    if item is not None and not isinstance(item, Container):
        raise InternalError(f"{render_key(path)}: per-rank values that are no container")
    return item
