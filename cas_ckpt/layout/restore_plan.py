"""Which rank reads which chunk, and who gets what of it.

Invariant: pure, so every rank makes the same plan from the same placements without talking; every
chunk that anybody wants is read whole, once, by one rank, and every element of every shard is
delivered once. Equal tensors are planned once (layout/template.py); what one rank does is made
when it is asked for. Knows nothing of chunk ids, packs or torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from cas_ckpt.layout.balance import Demand, Share, assign, relieve
from cas_ckpt.layout.grid import grid_for
from cas_ckpt.layout.holdings import Shard
from cas_ckpt.layout.overlap import Touch, touches
from cas_ckpt.layout.plan_check import check_cover, check_wanted
from cas_ckpt.layout.template import Template
from cas_ckpt.objects.spec import Box, Grid, Spec

READ_SLACK = 1.05
"""Ranks that want none of a chunk read it for others if else somebody read more than this times the mean.

That costs the network what moves, and spares the slowest reader; it happens where wants are lopsided
(one rank restores alone, a pipeline stage holds the embeddings), not where all want as much.
"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A stored tensor and who wants what of it.

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
class Delivery:
    """A part of a chunk and who gets it; the box is global, inside one piece of the receiver."""

    rank: int
    box: Box


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """A chunk that a rank reads, and what it does with it: deliveries by (rank, piece), perhaps to itself."""

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


class RestorePlan:
    """What every rank reads, sends and receives. Immutable; may be asked from several threads.

    Attributes:
        wanted: What was planned, by number.
        world_size: Number of ranks.
        templates: The plan itself.
    """

    def __init__(self, wanted: Sequence[Wanted], world_size: int, templates: Sequence[Template]) -> None:
        self.wanted = tuple(wanted)
        self.world_size = world_size
        self.templates = tuple(templates)
        places = {tensor: (each, at) for each in templates for at, tensor in enumerate(each.members)}
        self._places = [places[tensor] for tensor in range(len(self.wanted))]

    def reads(self, rank: int) -> Iterator[ChunkRead]:
        """The chunks that `rank` reads, by (tensor, cell)."""
        cells_of: dict[int, list[int]] = {}
        for template in self.templates:
            for ordinal, cell in template.read_by(rank):
                cells_of.setdefault(template.members[ordinal], []).append(cell)
        deliveries = lru_cache(maxsize=_KEPT_DELIVERIES)(_deliveries)
        for tensor in sorted(cells_of):
            template, _ = self._places[tensor]
            for cell in sorted(cells_of[tensor]):
                yield ChunkRead(tensor, cell, deliveries(template, cell))

    def receives(self, rank: int) -> Iterator[ChunkReceive]:
        """What `rank` gets, by (tensor, cell, piece)."""
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

        Raises:
            InternalError: it is not so.
        """
        check_cover(self.templates, num_tensors=len(self.wanted), world_size=self.world_size)


def plan_restore_reads(wanted: Sequence[Wanted], world_size: int) -> RestorePlan:
    """Plan who reads and who gets what.

    Args:
        wanted: Tensors that are stored in chunks; the same sequence on every rank.
        world_size: Number of ranks; those in the shards are below it.
    Raises:
        MismatchError: a shard lies outside of its tensor or wants an element twice; names key and region.
    """
    drafts = [_draft(wanted, members) for members in _alike(wanted)]
    for draft in drafts:
        first = wanted[draft.members[0]]
        check_wanted(first.key, first.spec, first.shards, world_size=world_size)
        draft.touch()
    return RestorePlan(wanted, world_size, _assigned(drafts, world_size))


def _alike(wanted: Sequence[Wanted]) -> list[list[int]]:
    """Numbers of the tensors of equal shape, item size and shards, in order of first appearance."""
    names: dict[int, int] = {}
    by_value: dict[tuple[Shard, ...], int] = {}
    groups: dict[tuple[tuple[int, ...], int, int], list[int]] = {}
    for tensor, each in enumerate(wanted):
        name = names.get(id(each.shards))
        if name is None:  # comparing thousands of boxes costs more than planning: once per object
            name = names[id(each.shards)] = by_value.setdefault(each.shards, len(by_value))
        groups.setdefault((each.spec.shape, each.spec.item_bytes, name), []).append(tensor)
    return list(groups.values())


@dataclass(slots=True)
class _Draft:
    """A template whose readers are not known yet; `cells` are those that anybody wants."""

    spec: Spec
    grid: Grid
    shards: tuple[Shard, ...]
    members: tuple[int, ...]
    touches: list[tuple[Touch, ...]] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)

    def touch(self) -> None:
        self.touches = touches(self.grid, self.shards)
        self.cells = [cell for cell, found in enumerate(self.touches) if found]

    def demands(self) -> Iterator[Demand]:
        ranks_of = lru_cache(maxsize=None)(self._ranks_of)
        for cell in self.cells:
            num_bytes = self.grid.cell_elements(cell) * self.spec.item_bytes
            ranks = ranks_of(tuple(dict.fromkeys(touch.shard for touch in self.touches[cell])))
            yield Demand(num_bytes, len(self.members), ranks)

    def _ranks_of(self, shards: tuple[int, ...]) -> tuple[int, ...]:
        if len(shards) == 1:
            return self.shards[shards[0]].ranks
        return tuple(sorted({rank for at in shards for rank in self.shards[at].ranks}))

    def finished(self, shares: Iterator[tuple[Share, ...]]) -> Template:
        by_cell: list[tuple[Share, ...]] = [()] * self.grid.num_cells
        for cell in self.cells:
            by_cell[cell] = next(shares)
        return Template(self.grid, self.spec.item_bytes, self.shards, self.members, self.touches, by_cell)


def _draft(wanted: Sequence[Wanted], members: list[int]) -> _Draft:
    first = wanted[members[0]]
    return _Draft(first.spec, grid_for(first.spec), first.shards, tuple(members))


def _assigned(drafts: Sequence[_Draft], world_size: int) -> list[Template]:
    demands = [demand for draft in drafts for demand in draft.demands()]
    shares = relieve(demands, assign(demands, world_size), world_size, slack=READ_SLACK)
    remaining = iter(shares)
    return [draft.finished(remaining) for draft in drafts]


def _deliveries(template: Template, cell: int) -> tuple[Delivery, ...]:
    return tuple(Delivery(rank, box) for rank, box in template.receivers(cell))
