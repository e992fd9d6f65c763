"""A restore plan in numbers: rank by rank, and least, mean and most of all ranks; and how long it takes.

Invariant: counted from the templates by whole arrays, each template once with its multiplicity: the cost is that of the
touches and shares of all templates (tens of thousands for a model of 405B on 1,024 ranks), never that of ranks times
tensors.
Estimates say which bandwidths they assume. Knows nothing of packs: how many extents chunks have, the caller looks up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from cas_ckpt.layout.restore_plan import ReadPlan, Template
from cas_ckpt.objects.rank_runs import runs_of

if TYPE_CHECKING:
    Array: TypeAlias = np.ndarray[Any, Any]

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


NOTHING = Spread(0, 0.0, 0)


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


def _spread(values: Array) -> Spread:
    return Spread(int(values.min()), int(values.sum()) / len(values), int(values.max())) if len(values) else NOTHING


@dataclass(frozen=True, slots=True, eq=False)
class RankTotals:
    """One number for each rank, as int64.

    Attributes:
        read_bytes, num_requests: What it reads from storage: plain bytes, and chunks.
        sent_bytes, received_bytes: What goes to and comes from other ranks, not counting what it keeps.
        metadata_bytes: What it has to know besides the ids of its chunks, at `NUMBER_BYTES` a number.
        num_straddled: Chunks of which it wants a part, but not all.
    """

    read_bytes: Array
    num_requests: Array
    sent_bytes: Array
    received_bytes: Array
    metadata_bytes: Array
    num_straddled: Array

    def rows(self) -> list[tuple[int, ...]]:
        """The numbers of each rank, in the order of the ranks and of the attributes."""
        return list(zip(*(getattr(self, each.name).tolist() for each in fields(self)), strict=True))


def rank_totals(plan: ReadPlan) -> RankTotals:
    """Totals of each rank of `plan`."""
    return _Counted(plan).totals()


class _Counted:
    """All templates as arrays: a row for each touch, for each share, and for each shard of each rank.

    Cells and shards are numbered through all templates. A seat is a rank in a template: template * world size + rank.
    """

    def __init__(self, plan: ReadPlan) -> None:
        self._plan, templates = plan, plan.templates
        self._size = plan.world_size
        num_cells = np.array([len(each.touches) for each in templates], np.int64)
        num_shards = np.array([len(each.shards) for each in templates], np.int64)
        self.cell_template, self.shard_template = _owners(num_cells), _owners(num_shards)
        self.cell_bytes = _array(each.cell_bytes(cell) for each in templates for cell in range(len(each.touches)))
        self.num_shards = int(num_shards.sum())
        self.members = _array(len(each.members) for each in templates)
        # Touches, by cell.
        touched = [of_cell for each in templates for of_cell in each.touches]
        found = [touch for of_cell in touched for touch in of_cell]
        self.touch_cell = _owners(_array(map(len, touched)))
        template = self.cell_template[self.touch_cell]
        self.touch_shard = _array(touch.shard for touch in found) + (np.cumsum(num_shards) - num_shards)[template]
        item_bytes = _array(each.item_bytes for each in templates)
        self.touch_bytes = _array(prod(touch.box.sizes) for touch in found) * item_bytes[template]
        self.box_numbers = _array(2 * len(touch.box.sizes) for touch in found)
        # Shares, by cell and rank.
        shares = [of_cell for each in templates for of_cell in each.shares]
        self.share_cell = _owners(_array(map(len, shares)))
        self.share_rank = _array(rank for of_cell in shares for rank, _ in of_cell)
        self.share_count = _array(count for of_cell in shares for _, count in of_cell)
        self.share_seat = self.cell_template[self.share_cell] * self._size + self.share_rank
        # Who has which shard, by seat.
        held = [shard.ranks for each in templates for shard in each.shards]
        shard = _owners(_array(map(len, held)))
        seat = self.shard_template[shard] * self._size + _array(chain.from_iterable(held))
        order = np.argsort(seat, kind="stable")
        self.held_seat, self.held_shard = seat[order], shard[order]
        self.held_rank = self.held_seat % self._size if self._size else self.held_seat
        self.run_numbers = _array(3 * len(runs_of(ranks)) for ranks in held)
        # What a shard has of a cell, all its pieces together; a rank may have several shards, of disjoint elements.
        self.pairs, inverse = np.unique(self.touch_cell * self.num_shards + self.touch_shard, return_inverse=True)
        self.pair_bytes = _sums(inverse, self.touch_bytes, len(self.pairs))

    def totals(self) -> RankTotals:
        """The sums by rank."""
        size, num_cells = self._size, len(self.cell_bytes)
        wanted_of_shard = _sums(self.touch_shard, self.touch_bytes, self.num_shards) * self.members[self.shard_template]
        num_holders = np.bincount(self.held_shard, minlength=self.num_shards)
        wanted_of_cell = _sums(self.touch_cell, self.touch_bytes * num_holders[self.touch_shard], num_cells)
        kept = self.share_count * self._own_bytes()
        sent = self.share_count * wanted_of_cell[self.share_cell] - kept
        received = _sums(self.held_rank, wanted_of_shard[self.held_shard], size) - _sums(self.share_rank, kept, size)
        return RankTotals(
            read_bytes=_sums(self.share_rank, self.share_count * self.cell_bytes[self.share_cell], size),
            num_requests=_sums(self.share_rank, self.share_count, size),
            sent_bytes=_sums(self.share_rank, sent, size),
            received_bytes=received,
            metadata_bytes=self._metadata_bytes(),
            num_straddled=self._straddled(),
        )

    def _own_bytes(self) -> Array:
        """For each share, what its reader itself wants of that cell."""
        first = np.searchsorted(self.held_seat, self.share_seat, side="left")
        counts = np.searchsorted(self.held_seat, self.share_seat, side="right") - first
        share = _owners(counts)
        at = np.arange(len(share)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
        wanted = self.share_cell[share] * self.num_shards + self.held_shard[at]
        place = np.minimum(np.searchsorted(self.pairs, wanted), len(self.pairs) - 1)
        return _sums(share, np.where(self.pairs[place] == wanted, self.pair_bytes[place], 0), len(counts))

    def _straddled(self) -> Array:
        """For each rank, the chunks of which it wants a part only."""
        cell, shard = np.divmod(self.pairs, max(self.num_shards, 1))
        partly = (self.pair_bytes < self.cell_bytes[cell]) * self.members[self.cell_template[cell]]
        by_shard = _sums(shard, partly, self.num_shards)
        _, seat, counts = np.unique(self.held_seat, return_inverse=True, return_counts=True)
        alone = counts[seat] == 1
        found = _sums(self.held_rank[alone], by_shard[self.held_shard[alone]], self._size)
        for several in np.flatnonzero(counts > 1):  # shards of one rank may fill a cell together: no usual layout
            own = np.isin(shard, self.held_shard[seat == several])
            have = _sums(cell[own], self.pair_bytes[own], len(self.cell_bytes))
            straddled = np.flatnonzero((have > 0) & (have < self.cell_bytes))
            rank = self.held_rank[seat == several][0]
            found[rank] += self.members[self.cell_template[straddled]].sum()
        return found

    def _metadata_bytes(self) -> Array:
        """For each rank: its own parts and who reads them, what it reads and who gets that; the keys of all of it."""
        wants = 1 + self.box_numbers + 2 * np.bincount(self.share_cell, minlength=len(self.cell_bytes))[self.touch_cell]
        wants_of_shard = _sums(self.touch_shard, wants, self.num_shards)
        receivers = _sums(self.touch_cell, self.box_numbers + self.run_numbers[self.touch_shard], len(self.cell_bytes))
        numbers = _sums(self.held_rank, wants_of_shard[self.held_shard], self._size)
        numbers += _sums(self.share_rank, 3 + receivers[self.share_cell], self._size)
        names = _array(_names_bytes(self._plan, each) for each in self._plan.templates)
        template, rank = np.divmod(np.unique(np.concatenate([self.held_seat, self.share_seat])), max(self._size, 1))
        return NUMBER_BYTES * numbers + _sums(rank, names[template], self._size)


def _names_bytes(plan: ReadPlan, template: Template) -> int:
    """Bytes of the keys and dtypes of its tensors, their shape and cell."""
    tensors = [plan.requests[tensor] for tensor in template.members]
    names = sum(len(each.key.encode("utf-8", "surrogatepass")) + len(each.spec.dtype) for each in tensors)
    return names + NUMBER_BYTES * 2 * len(template.grid.shape)


def _array(numbers: Iterable[int]) -> Array:
    return np.fromiter(numbers, np.int64)


def _owners(counts: Array) -> Array:
    """For each of `counts[0] + counts[1] + ...` things, the number of the one that it belongs to."""
    return np.repeat(np.arange(len(counts)), counts)


def _sums(at: Array, values: Array, size: int) -> Array:
    """The sum of the `values` at each place below `size`; exact, as `np.bincount` with weights is not."""
    found = np.zeros(size, np.int64)
    np.add.at(found, at, values)
    return found
