"""A restore plan in numbers: rank by rank, and least, mean and most of all ranks; and how long it takes.

Invariant: counted from the templates by whole arrays, each template once with its multiplicity: the cost is that of the
touches and shares of all templates (tens of thousands for a model of 405B on 1,024 ranks), never that of ranks times
tensors. The length of `rank_view` is added up for all ranks at once, each item of it measured once, and is exact.
Estimates say which bandwidths they assume. Knows nothing of packs: how many extents chunks have, the caller looks up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from cas_ckpt.layout.restore_plan import ReadPlan, Template
from cas_ckpt.objects.digest import pack_canonical
from cas_ckpt.objects.spec import Box

if TYPE_CHECKING:
    Array: TypeAlias = np.ndarray[Any, Any]

STORAGE_BYTES_PER_S = 1e9
"""Assumed where nothing is said: what one rank reads and verifies."""

NETWORK_BYTES_PER_S = 3e9
"""Assumed where nothing is said: what one rank sends, and receives at the same time."""


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
        metadata_bytes: What each rank needs to know besides its chunks' ids (`rank_view`).
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
        metadata_bytes: What it has to know besides the ids of its chunks: the length of its `rank_view`.
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
        self.box_lengths = _lengths_of_lists([_flat(touch.box) for touch in found])
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
        self.run_lengths = _lengths_of_lists([_runs(ranks) for ranks in held])
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
            metadata_bytes=self._view_lengths(),
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

    def _view_lengths(self) -> Array:
        """For each rank, the length of its `rank_view`."""
        num_cells, templates = len(self.cell_bytes), self._plan.templates
        num_shares = np.bincount(self.share_cell, minlength=num_cells)
        share_lengths = _number_lengths(self.share_rank) + _number_lengths(self.share_count)
        shares_of_cell = _list_lengths(2 * num_shares) + _sums(self.share_cell, share_lengths, num_cells)
        cell_numbers = _number_lengths(_places(self.cell_template))
        wants = 1 + cell_numbers[self.touch_cell] + self.box_lengths + shares_of_cell[self.touch_cell]
        wants_of_shard = _sums(self.touch_shard, wants, self.num_shards)
        num_wants = np.bincount(self.touch_shard, minlength=self.num_shards)
        touch_lengths = 1 + self.run_lengths[self.touch_shard] + self.box_lengths
        num_touches = np.bincount(self.touch_cell, minlength=num_cells)
        receivers = _list_lengths(num_touches) + _sums(self.touch_cell, touch_lengths, num_cells)
        before = np.cumsum(self.share_count) - self.share_count
        turn = before - before[np.searchsorted(self.share_cell, self.share_cell)]  # from the first share of the cell
        reads = 1 + cell_numbers[self.share_cell] + _number_lengths(turn) + _number_lengths(self.share_count)
        reads += receivers[self.share_cell]
        # A template is [] for a rank that has no part in it.
        seats = np.unique(np.concatenate([self.held_seat, self.share_seat]))
        holder, reader = np.searchsorted(seats, self.held_seat), np.searchsorted(seats, self.share_seat)
        constant = _array(len(pack_canonical(_constant(self._plan, each))) for each in templates)
        template, rank = np.divmod(seats, max(self._size, 1))
        lengths = constant[template] - 1  # heads of lists of 3 and of 5 are alike
        for at, of_each, counts in (
            (holder, wants_of_shard[self.held_shard], num_wants[self.held_shard]),
            (reader, reads, np.ones(len(reads), np.int64)),
        ):
            lengths += _sums(at, of_each, len(seats)) + _list_lengths(_sums(at, counts, len(seats)))
        outside = 1 + _list_lengths(_array([len(templates)])) + len(templates) + _number_lengths(_array([self._size]))
        return outside + _number_lengths(np.arange(self._size)) + _sums(rank, lengths, self._size)


def _array(numbers: Iterable[int]) -> Array:
    return np.fromiter(numbers, np.int64)


def _owners(counts: Array) -> Array:
    """For each of `counts[0] + counts[1] + ...` things, the number of the one that it belongs to."""
    return np.repeat(np.arange(len(counts)), counts)


def _places(owners: Array) -> Array:
    """For each thing, how many things of the same owner are before it; `owners` ascend."""
    found: Array = np.arange(len(owners)) - np.searchsorted(owners, owners)
    return found


def _sums(at: Array, values: Array, size: int) -> Array:
    """The sum of the `values` at each place below `size`; exact, as `np.bincount` with weights is not."""
    found = np.zeros(size, np.int64)
    np.add.at(found, at, values)
    return found


def _number_lengths(numbers: Array) -> Array:
    """Bytes of each number (from 0 on) in canonical msgpack."""
    found: Array = _NUMBER_LENGTHS[np.searchsorted(_NUMBER_BOUNDS, numbers, side="right")]
    return found


_NUMBER_BOUNDS = np.array([1 << 7, 1 << 8, 1 << 16, 1 << 32], np.int64)
_NUMBER_LENGTHS = np.array([1, 2, 3, 5, 9], np.int64)


def _list_lengths(counts: Array) -> Array:
    """Bytes of the head of a list of so many items."""
    found: Array = _LIST_LENGTHS[np.searchsorted(_LIST_BOUNDS, counts, side="right")]
    return found


_LIST_BOUNDS = np.array([1 << 4, 1 << 16], np.int64)
_LIST_LENGTHS = np.array([1, 3, 5], np.int64)


def _lengths_of_lists(lists: Sequence[Sequence[int]]) -> Array:
    """Bytes of each list of numbers."""
    counts = _array(map(len, lists))
    return _list_lengths(counts) + _sums(
        _owners(counts), _number_lengths(_array(chain.from_iterable(lists))), len(lists)
    )


# --- what one rank has to know of a plan ------------------------------------------------------


def rank_view(plan: ReadPlan, rank: int) -> bytes:
    """The part of the plan that `rank` needs, as bytes: the measure of a plan's metadata.

    Enough to read, send and receive without any other part of the plan: per template the tensors (key, dtype),
    the own pieces cell by cell with who reads them, and for each cell that this rank reads, who gets what.
    Only the ids of the rank's own chunks are missing. Nothing is sent in this form; ranks compute their plans.
    `rank_totals` has its length for all ranks.
    """
    return pack_canonical([plan.world_size, rank, [_template(plan, each, rank) for each in plan.templates]])


def _template(plan: ReadPlan, template: Template, rank: int) -> list[Any]:
    wants = template.wanted_by(rank)
    reads = template.runs_of.get(rank, ())
    if not wants and not reads:
        return []
    receivers = [
        [[_runs(template.shards[touch.shard].ranks), _flat(touch.box)] for touch in template.touches[cell]]
        for cell, _, _ in reads
    ]
    return [
        *_constant(plan, template),
        [[cell, _flat(box), [number for share in template.shares[cell] for number in share]] for cell, box in wants],
        [[*read, each] for read, each in zip(reads, receivers, strict=True)],
    ]


def _constant(plan: ReadPlan, template: Template) -> list[Any]:
    """Metadata that every rank of this template needs."""
    tensors = [[_packable(plan.requests[tensor].key), plan.requests[tensor].spec.dtype] for tensor in template.members]
    return [list(template.grid.shape), list(template.grid.cell), tensors]


def _packable(key: str) -> str | bytes:
    """The key; as bytes, as nodes hold it, if it is not valid Unicode."""
    try:
        key.encode()
    except UnicodeEncodeError:
        return key.encode("utf-8", "surrogatepass")
    return key


def _flat(box: Box) -> list[int]:
    return [*box.offsets, *box.sizes]


def _runs(ranks: Sequence[int]) -> list[int]:
    """Ascending ranks as start, count, step of each evenly spaced run."""
    found: list[int] = []
    for rank in ranks:
        if found and (found[-2] == 1 or rank == found[-3] + found[-2] * found[-1]):
            found[-1] = rank - found[-3] if found[-2] == 1 else found[-1]
            found[-2] += 1
        else:
            found += [rank, 1, 1]
    return found
