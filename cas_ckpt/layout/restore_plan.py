"""Which rank reads which chunk of a restore, and which ranks receive parts of it.

1. requests that no plan can fill are refused, by key and region, before anything is read
2. equal tensors become one template; its cells are intersected with its shards
3. the chunks of all templates are shared out among those who want them, then ranks with clearly more
   than the mean is relieved (layout/balance.py)
4. `ReadPlan.reads` and `receives`: what one rank does, made when it is asked for
5. `rank_totals` and `summarize`: the plan in numbers, rank by rank and of all ranks, and how long it takes

Invariant: pure, so every rank makes the same plan from the same placements without talking; every
chunk that anybody wants is read whole, once, by one rank, and every element of every shard is
delivered once (`ReadPlan.check` proves it). Each template is counted once with its multiplicity: the cost is that of
its touches, shares and holders (tens of thousands for a model of 405B on 1,024 ranks), never that of ranks times
tensors. Estimates say which bandwidths they assume. Knows nothing of chunk ids, packs or torch: how many extents chunks
have, the caller looks up.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import accumulate, combinations, pairwise

from cas_ckpt.errors import InternalError, MismatchError
from cas_ckpt.layout.balance import Demand, Share, assign, relieve
from cas_ckpt.layout.holdings import Shard, Touch, touches
from cas_ckpt.objects.layouts import runs_of
from cas_ckpt.objects.spec import Box, Delivery, Grid, Spec, grid_for


@dataclass(frozen=True, eq=False)
class Template:
    """Tensors that are planned alike: equal shape, item size and shards.

    What differs from tensor to tensor (who reads the chunk in a cell) follows from the tensor's ordinal in
    the template by arithmetic. A model of a thousand tensors has some ten templates. Knows nothing of keys.

    Attributes:
        grid: Their canonical grid.
        item_bytes: Of one element.
        shards: Who wants what of each.
        members: Numbers of the tensors, ascending.
        touches: By cell, what the shards have of it (layout/holdings.py).
        shares: By cell, (rank, how many of the members' chunks it reads); empty where no rank wants it.
    """

    grid: Grid
    item_bytes: int
    shards: tuple[Shard, ...]
    members: tuple[int, ...]
    touches: Sequence[tuple[Touch, ...]]
    shares: Sequence[tuple[Share, ...]]

    def cell_bytes(self, cell: int) -> int:
        """Bytes of the chunk in this cell."""
        return self.grid.cell_elements(cell) * self.item_bytes

    def reader(self, ordinal: int, cell: int) -> int:
        """The rank that reads this cell of member number `ordinal`."""
        readers, ends = self._runs[cell]
        return readers[bisect_right(ends, ordinal)]

    def read_by(self, rank: int) -> Iterator[tuple[int, int]]:
        """(ordinal, cell) of all chunks that `rank` reads, in no order."""
        for cell, first, count in self.runs_of.get(rank, ()):
            for ordinal in range(first, first + count):
                yield ordinal, cell

    def wanted_by(self, rank: int) -> list[tuple[int, Box]]:
        """(cell, box) of all that `rank` gets of each member, by (cell, shard, piece)."""
        parts = [part for shard in self.shards_of.get(rank, ()) for part in self._parts[shard]]
        parts.sort(key=lambda part: part[0])
        return parts

    def deliveries(self, cell: int) -> tuple[Delivery, ...]:
        """Deliveries of this cell to all ranks, by (rank, shard, piece)."""
        found = [Delivery(rank, touch.box) for touch in self.touches[cell] for rank in self.shards[touch.shard].ranks]
        found.sort(key=lambda each: each.rank)
        return tuple(found)

    # A rank reads a run of consecutive members: what is near in the order of the keys is mostly near in the packs. Were
    # they dealt out in turn, each rank would read across what the others read between its own.

    @cached_property
    def _runs(self) -> list[tuple[list[int], list[int]]]:
        """By cell: the readers, and the member before which each one's run ends."""
        return [
            ([rank for rank, _ in shares], list(accumulate(count for _, count in shares))) for shares in self.shares
        ]

    @cached_property
    def runs_of(self) -> dict[int, list[tuple[int, int, int]]]:
        """Rank -> (cell, first member, number of members) of what it reads."""
        found: dict[int, list[tuple[int, int, int]]] = {}
        for cell, shares in enumerate(self.shares):
            first = 0
            for rank, count in shares:
                found.setdefault(rank, []).append((cell, first, count))
                first += count
        return found

    @cached_property
    def shards_of(self) -> dict[int, list[int]]:
        """Rank -> numbers of the shards that it wants."""
        return _shards_by_rank(self.shards)

    @cached_property
    def _parts(self) -> list[list[tuple[int, Box]]]:
        """By shard: (cell, box)."""
        found: list[list[tuple[int, Box]]] = [[] for _ in self.shards]
        for cell, touched in enumerate(self.touches):
            for touch in touched:
                found[touch.shard].append((cell, touch.box))
        return found


def _shards_by_rank(shards: Iterable[Shard]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for at, shard in enumerate(shards):
        for rank in shard.ranks:
            found.setdefault(rank, []).append(at)
    return found


def check_request(key: str, stored: Spec, shards: Sequence[Shard], *, world_size: int) -> None:
    """Refuse shards that the stored tensor cannot fill.

    Raises:
        MismatchError: outside of the tensor, an element twice on one rank, or a rank outside the world.
    """
    pieces_of: dict[int, list[Box]] = {}
    for shard in shards:
        for piece in shard.pieces:
            if not _inside(piece, stored.box):
                ranks = ", ".join(map(str, shard.ranks[:4])) + (" ..." if len(shard.ranks) > 4 else "")
                raise MismatchError(
                    f"{key}: ranks {ranks} want the region {region(piece)}, which is not inside of the "
                    f"stored {stored}: restore into a tensor of that global shape"
                )
        for rank in shard.ranks:
            pieces_of.setdefault(rank, []).extend(shard.pieces)
    for rank, pieces in pieces_of.items():
        if not 0 <= rank < world_size:
            raise MismatchError(f"{key}: rank {rank} wants a part of it, but the world has {world_size} ranks")
        twice = _common(pieces, 0) if len(pieces) > 1 else None
        if twice is not None:
            raise MismatchError(
                f"{key}: rank {rank} wants the region {region(twice)} of {stored} more than once: "
                "give each element one place"
            )


def region(box: Box) -> str:
    """A box as people write it: [start:stop, ...]."""
    spans = zip(box.offsets, box.sizes, strict=True)
    return f"[{', '.join(f'{start}:{start + size}' for start, size in spans)}]"


def _inside(inner: Box, outer: Box) -> bool:
    if len(inner.offsets) != len(outer.offsets):
        return False
    for a, n, b, m in zip(inner.offsets, inner.sizes, outer.offsets, outer.sizes, strict=True):
        if a < b or a + n > b + m:
            return False
    return True


def _common(boxes: Sequence[Box], dim: int) -> Box | None:
    """Something that two of the boxes share, or None. Near linear for boxes that form a lattice."""
    if len(boxes) < 2:
        return None
    if dim == len(boxes[0].offsets):
        return boxes[0]
    groups: dict[tuple[int, int], list[Box]] = {}
    for box in boxes:
        groups.setdefault((box.offsets[dim], box.sizes[dim]), []).append(box)
    spans = sorted(groups)
    if all(start + size <= after for (start, size), (after, _) in pairwise(spans)):
        return next(filter(None, (_common(group, dim + 1) for group in groups.values())), None)
    return next(filter(None, _pairs(groups, spans)), None)


def _pairs(groups: dict[tuple[int, int], list[Box]], spans: Sequence[tuple[int, int]]) -> Iterable[Box | None]:
    """Common boxes of all pairs whose spans meet."""
    for at, (start, size) in enumerate(spans):
        yield from (a.intersect(b) for a, b in combinations(groups[start, size], 2))
        for other in spans[at + 1 :]:
            if other[0] >= start + size:
                break
            yield from (a.intersect(b) for a in groups[start, size] for b in groups[other])


READ_SLACK = 1.05
"""Ranks that want none of a chunk read it for others if else somebody read more than this times the mean.

That costs the network what moves, and spares the slowest reader; it happens where wants are lopsided
(one rank restores alone, a pipeline stage holds the embeddings), not where all want as much.
"""


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """A stored tensor and which ranks want what of it.

    Attributes:
        key: Names it in errors.
        spec: As it is stored.
        shards: What the ranks want. Tensors that are placed alike should share one tuple: they
            are then recognised at once, else by comparison.
    """

    key: str
    spec: Spec
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """A chunk that a rank reads, and what it does with it: deliveries by (rank, piece), perhaps to itself.

    Their boxes are global, each inside one piece of the receiver.
    """

    tensor: int
    cell: int
    deliveries: tuple[Delivery, ...]


@dataclass(frozen=True, slots=True)
class ChunkReceive:
    """A part of a chunk that a rank gets from its reader (perhaps itself)."""

    tensor: int
    cell: int
    reader: int
    box: Box


_KEPT_DELIVERIES = 256
"""Like tensors share the deliveries of a cell; with thousands of replicas not all can be kept."""


class ReadPlan:
    """Reads, sends and receives of every rank. Immutable and thread-safe.

    Attributes:
        requests: What was planned, by number.
        world_size: Number of ranks.
        templates: The plan itself.
    """

    def __init__(self, requests: Sequence[RestoreRequest], world_size: int, templates: Sequence[Template]) -> None:
        self.requests = tuple(requests)
        self.world_size = world_size
        self.templates = tuple(templates)
        places = {tensor: (each, at) for each in templates for at, tensor in enumerate(each.members)}
        self._places = [places[tensor] for tensor in range(len(self.requests))]

    def reads(self, rank: int) -> Iterator[ChunkRead]:
        """The chunks that `rank` reads, by (tensor, cell)."""
        cells_of: dict[int, list[int]] = {}
        for template in self.templates:
            for ordinal, cell in template.read_by(rank):
                cells_of.setdefault(template.members[ordinal], []).append(cell)
        deliveries = lru_cache(maxsize=_KEPT_DELIVERIES)(Template.deliveries)
        for tensor in sorted(cells_of):
            template, _ = self._places[tensor]
            for cell in sorted(cells_of[tensor]):
                yield ChunkRead(tensor, cell, deliveries(template, cell))

    def receives(self, rank: int) -> Iterator[ChunkReceive]:
        """Deliveries to `rank`, by (tensor, cell, piece)."""
        wants = {id(template): template.wanted_by(rank) for template in self.templates}
        for tensor, (template, ordinal) in enumerate(self._places):
            for cell, box in wants[id(template)]:
                yield ChunkReceive(tensor, cell, template.reader(ordinal, cell), box)

    def reader(self, tensor: int, cell: int) -> int:
        """The rank that reads this chunk."""
        template, ordinal = self._places[tensor]
        return template.reader(ordinal, cell)

    def check(self) -> None:
        """Prove that every element of every shard is delivered once and every wanted chunk read once.

        The proof goes by volume: boxes that lie in the piece and in different cells are disjoint, so if their
        elements add up to the piece's, they tile it. Linear in shards and touches.

        Raises:
            InternalError: it is not so.
        """
        members = sorted(tensor for template in self.templates for tensor in template.members)
        if members != list(range(len(self.requests))):
            raise InternalError(
                f"a restore plan of {len(self.requests)} tensors has {len(members)} of them in its templates"
            )
        for template in self.templates:
            _check_pieces(template)
            for cell, (found, shares) in enumerate(zip(template.touches, template.shares, strict=True)):
                wanted = len(template.members) if found else 0
                ranks = {rank for rank, count in shares if count > 0 and 0 <= rank < self.world_size}
                if sum(count for _, count in shares) != wanted or len(ranks) != len(shares):
                    raise InternalError(f"cell {cell} of {template.grid.shape}: {wanted} chunks, read by {shares}")


def _check_pieces(template: Template) -> None:
    delivered = [[0] * len(shard.pieces) for shard in template.shards]
    for cell, found in enumerate(template.touches):
        bounds = template.grid.box(cell)
        seen = {(touch.shard, touch.piece) for touch in found}
        if len(seen) != len(found):
            raise InternalError(f"cell {cell} of {template.grid.shape} is delivered twice to one piece")
        for touch in found:
            piece = template.shards[touch.shard].pieces[touch.piece]
            if not (_inside(touch.box, bounds) and _inside(touch.box, piece)):
                raise InternalError(f"{region(touch.box)} of {template.grid.shape} is not in cell {cell} and its piece")
            delivered[touch.shard][touch.piece] += touch.box.num_elements
    for shard, volumes in zip(template.shards, delivered, strict=True):
        for piece, volume in zip(shard.pieces, volumes, strict=True):
            if volume != piece.num_elements:
                raise InternalError(f"{region(piece)} of {template.grid.shape} gets {volume} elements")


def plan_restore_reads(requests: Sequence[RestoreRequest], world_size: int) -> ReadPlan:
    """Plan who reads and who gets what.

    Args:
        requests: Tensors that are stored in chunks; the same sequence on every rank.
        world_size: Number of ranks; those in the shards are below it.
    Raises:
        MismatchError: a shard lies outside of its tensor or wants an element twice; names key and region.
    """
    drafts: list[tuple[Template, list[int]]] = []  # whose readers are not known yet, and the cells that anybody wants
    demands: list[Demand] = []
    for members in _alike(requests):
        first = requests[members[0]]
        check_request(first.key, first.spec, first.shards, world_size=world_size)
        grid = grid_for(first.spec)
        touched = touches(grid, first.shards)
        template = Template(grid, first.spec.item_bytes, first.shards, tuple(members), touched, ())
        cells = [cell for cell, found in enumerate(touched) if found]
        drafts.append((template, cells))
        demands += _demands(template, cells)
    shares = iter(relieve(demands, assign(demands, world_size), world_size, slack=READ_SLACK))
    templates = []
    for template, cells in drafts:
        by_cell: list[tuple[Share, ...]] = [()] * template.grid.num_cells
        for cell in cells:
            by_cell[cell] = next(shares)
        templates.append(replace(template, shares=by_cell))
    return ReadPlan(requests, world_size, templates)


def _demands(template: Template, cells: Iterable[int]) -> Iterator[Demand]:
    ranks_of: dict[tuple[int, ...], tuple[int, ...]] = {}
    for cell in cells:
        shards = tuple(dict.fromkeys(touch.shard for touch in template.touches[cell]))
        if shards not in ranks_of:
            ranks = template.shards[shards[0]].ranks
            if len(shards) > 1:
                ranks = tuple(sorted({rank for at in shards for rank in template.shards[at].ranks}))
            ranks_of[shards] = ranks
        yield Demand(template.cell_bytes(cell), len(template.members), ranks_of[shards])


def _alike(requests: Sequence[RestoreRequest]) -> list[list[int]]:
    """Numbers of the tensors of equal shape, item size and shards, in order of first appearance."""
    names: dict[int, int] = {}
    by_value: dict[tuple[Shard, ...], int] = {}
    groups: dict[tuple[tuple[int, ...], int, int], list[int]] = {}
    for tensor, each in enumerate(requests):
        name = names.get(id(each.shards))
        if name is None:  # comparing thousands of boxes costs more than planning: once per object
            name = names[id(each.shards)] = by_value.setdefault(each.shards, len(by_value))
        groups.setdefault((each.spec.shape, each.spec.item_bytes, name), []).append(tensor)
    return list(groups.values())


# --- a plan in numbers ------------------------------------------------------------------------

STORAGE_BYTES_PER_S = 1e9
"""Assumed where nothing is said: what one rank reads and verifies."""

NETWORK_BYTES_PER_S = 3e9
"""Assumed where nothing is said: what one rank sends, and receives at the same time."""

NUMBER_BYTES = 4
"""Counted for each number that a rank has to know of a plan."""


@dataclass(frozen=True, slots=True)
class Spread:
    """One quantity over all ranks."""

    least: int
    mean: float
    most: int

    @property
    def balance(self) -> float:
        """Largest over mean; 1 if all are empty."""
        return self.most / self.mean if self.mean else 1.0


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """A restore plan in numbers.

    Attributes:
        num_tensors, num_templates: Tensors stored in chunks, and how many different plans they need.
        num_chunks, chunk_bytes: Chunks that some rank wants, each counted once, and their plain bytes.
        wanted_bytes: Plain bytes that all ranks together want; replicas count each.
        read_bytes, num_requests: What each rank reads from storage: plain bytes, and chunks.
        sent_bytes, received_bytes: What goes from rank to rank, not counting what a rank keeps.
        metadata_bytes: What each rank needs to know besides its chunks' ids, at `NUMBER_BYTES` a number.
        num_straddled: Chunks of which a rank wants a part only.
        extents_per_chunk: Mean over the chunks, or None if not looked up; a chunk of one extent is one request.
        storage_bandwidth, network_bandwidth: Bytes per second and rank that the estimates assume.
    """

    world_size: int
    num_tensors: int
    num_templates: int
    num_chunks: int
    chunk_bytes: int
    wanted_bytes: int
    read_bytes: Spread
    num_requests: Spread
    sent_bytes: Spread
    received_bytes: Spread
    metadata_bytes: Spread
    num_straddled: Spread
    extents_per_chunk: float | None
    storage_bandwidth: float
    network_bandwidth: float

    @property
    def read_amplification(self) -> float:
        """Bytes read over all ranks per byte of chunks that anybody wants."""
        return self.read_bytes.mean * self.world_size / self.chunk_bytes if self.chunk_bytes else 1.0

    @property
    def storage_s(self) -> float:
        """Seconds of the rank that reads most."""
        return self.read_bytes.most / self.storage_bandwidth

    @property
    def network_s(self) -> float:
        """Seconds of the rank that sends or receives most."""
        return max(self.sent_bytes.most, self.received_bytes.most) / self.network_bandwidth

    @property
    def estimated_s(self) -> float:
        """Both one after the other: an upper bound, as reading and sending overlap in part."""
        return self.storage_s + self.network_s


def summarize(plan: ReadPlan, totals: RankTotals | None = None) -> PlanSummary:
    """The plan in numbers, at the usual bandwidths.

    Args:
        totals: What each rank does, if that is counted already.
    """
    totals = rank_totals(plan) if totals is None else totals
    num_chunks = chunk_bytes = wanted_bytes = 0
    for template in plan.templates:
        members = len(template.members)
        wanted = [cell for cell, found in enumerate(template.touches) if found]
        num_chunks += members * len(wanted)
        chunk_bytes += members * sum(map(template.cell_bytes, wanted))
        of_each = sum(len(shard.ranks) * sum(piece.num_elements for piece in shard.pieces) for shard in template.shards)
        wanted_bytes += members * of_each * template.item_bytes
    return PlanSummary(
        world_size=plan.world_size,
        num_tensors=len(plan.requests),
        num_templates=len(plan.templates),
        num_chunks=num_chunks,
        chunk_bytes=chunk_bytes,
        wanted_bytes=wanted_bytes,
        **{each.name: _spread(getattr(totals, each.name)) for each in fields(RankTotals)},
        extents_per_chunk=None,
        storage_bandwidth=STORAGE_BYTES_PER_S,
        network_bandwidth=NETWORK_BYTES_PER_S,
    )


def _spread(values: Sequence[int]) -> Spread:
    return Spread(min(values), sum(values) / len(values), max(values)) if values else Spread(0, 0.0, 0)


@dataclass(frozen=True, slots=True)
class RankTotals:
    """One number for each rank.

    Attributes:
        read_bytes, num_requests: What it reads from storage: plain bytes, and chunks.
        sent_bytes, received_bytes: What goes to and comes from other ranks, not counting what it keeps.
        metadata_bytes: What it has to know besides the ids of its chunks, at `NUMBER_BYTES` a number.
        num_straddled: Chunks of which it wants a part, but not all.
    """

    read_bytes: list[int]
    num_requests: list[int]
    sent_bytes: list[int]
    received_bytes: list[int]
    metadata_bytes: list[int]
    num_straddled: list[int]

    def rows(self) -> list[tuple[int, ...]]:
        """The numbers of each rank, in the order of the ranks and of the attributes."""
        return list(zip(*(getattr(self, each.name) for each in fields(self)), strict=True))


def rank_totals(plan: ReadPlan) -> RankTotals:
    """Totals of each rank of `plan`."""
    totals = RankTotals(*([0] * plan.world_size for _ in fields(RankTotals)))
    for template in plan.templates:
        # The keys and dtypes of the tensors, their shape and cell, wherever a rank has a part in them.
        tensors = [plan.requests[tensor] for tensor in template.members]
        names = sum(len(each.key.encode("utf-8", "surrogatepass")) + len(each.spec.dtype) for each in tensors)
        for rank in _count(template, totals):
            totals.metadata_bytes[rank] += names + NUMBER_BYTES * 2 * len(template.grid.shape)
    return totals


def _count(template: Template, totals: RankTotals) -> Set[int]:
    """Add what each rank does for all tensors of a template; the ranks. What they have to know is without names."""
    # Not the template's own properties, which would stay: a thousand ranks in hundreds of templates are 40 MB.
    members, shards, shards_of = len(template.members), template.shards, _shards_by_rank(template.shards)
    run_numbers = [3 * len(runs_of(shard.ranks)) for shard in shards]
    wanted, partly, known = ([0] * len(shards) for _ in range(3))
    several: list[list[int]] = [[] for _ in shards]  # by shard: ranks with other shards, which may fill a cell together
    for rank, own in shards_of.items():
        for at in own if len(own) > 1 else ():
            several[at].append(rank)
    for cell, (found, shares) in enumerate(zip(template.touches, template.shares, strict=True)):
        cell_bytes, has, receivers = template.cell_bytes(cell), dict[int, int](), 0
        for touch in found:
            has[touch.shard] = has.get(touch.shard, 0) + touch.box.num_elements * template.item_bytes
            # Of its own parts a rank knows who reads them, of what it reads who gets it.
            known[touch.shard] += 1 + 2 * len(touch.box.sizes) + 2 * len(shares)
            receivers += 2 * len(touch.box.sizes) + run_numbers[touch.shard]
        for at, num_bytes in has.items():
            wanted[at] += num_bytes
            partly[at] += num_bytes < cell_bytes
        all_wanted = sum(num_bytes * len(shards[at].ranks) for at, num_bytes in has.items())
        for rank, count in shares:
            kept = sum(has.get(at, 0) for at in shards_of.get(rank, ()))
            totals.read_bytes[rank] += count * cell_bytes
            totals.num_requests[rank] += count
            totals.sent_bytes[rank] += count * (all_wanted - kept)
            totals.received_bytes[rank] -= count * kept
            totals.metadata_bytes[rank] += NUMBER_BYTES * (3 + receivers)
        for rank in {rank for at in has for rank in several[at]}:
            totals.num_straddled[rank] += members * (0 < sum(has.get(at, 0) for at in shards_of[rank]) < cell_bytes)
    for rank, own in shards_of.items():
        totals.received_bytes[rank] += members * sum(wanted[at] for at in own)
        totals.metadata_bytes[rank] += NUMBER_BYTES * sum(known[at] for at in own)
        totals.num_straddled[rank] += members * partly[own[0]] if len(own) == 1 else 0
    return shards_of.keys() | {rank for shares in template.shares for rank, _ in shares}
