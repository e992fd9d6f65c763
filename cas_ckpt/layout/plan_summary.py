"""A restore plan in numbers: who reads, sends and receives how much, and how long that takes.

Invariant: counted from the templates, each once with its multiplicity, so a summary costs about
what the plan cost. Estimates say which bandwidths they assume. Knows nothing of packs: how many
extents chunks have, the caller looks up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
        """Most over mean; 1 if nobody has anything."""
        return self.most / self.mean if self.mean else 1.0


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """A restore plan in numbers.

    Attributes:
        num_tensors, num_templates: Tensors stored in chunks, and how many different plans they need.
        num_chunks, chunk_bytes: Chunks that anybody wants, each counted once, and their plain bytes.
        wanted_bytes: Plain bytes that all ranks together want; replicas count each.
        read_bytes, num_requests: What each rank reads from storage: plain bytes, and chunks.
        sent_bytes, received_bytes: What goes from rank to rank, not counting what a rank keeps.
        metadata_bytes: What the rank with the most needs to know besides its chunks' ids (`rank_view`).
        extents_per_chunk: Mean over the chunks, or None when nobody looked; a chunk of one extent is one request.
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
    metadata_bytes: int
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


def summarize(
    plan: ReadPlan,
    *,
    storage_bandwidth: float = STORAGE_BYTES_PER_S,
    network_bandwidth: float = NETWORK_BYTES_PER_S,
    extents_per_chunk: float | None = None,
) -> PlanSummary:
    """The plan in numbers.

    Args:
        storage_bandwidth, network_bandwidth: Bytes per second of one rank; more than 0.
        extents_per_chunk: Mean number of extents, if known.
    """
    ledger = _Ledger(plan.world_size)
    for template in plan.templates:
        ledger.add(template)
    return PlanSummary(
        world_size=plan.world_size,
        num_tensors=len(plan.requests),
        num_templates=len(plan.templates),
        num_chunks=ledger.num_chunks,
        chunk_bytes=ledger.chunk_bytes,
        wanted_bytes=ledger.wanted_bytes,
        read_bytes=_spread(ledger.read),
        num_requests=_spread(ledger.requests),
        sent_bytes=_spread(ledger.sent),
        received_bytes=_spread(ledger.received),
        metadata_bytes=max((len(rank_view(plan, rank)) for rank in widest_ranks(plan)), default=0),
        extents_per_chunk=extents_per_chunk,
        storage_bandwidth=storage_bandwidth,
        network_bandwidth=network_bandwidth,
    )


class _Ledger:
    """Sums by rank."""

    def __init__(self, world_size: int) -> None:
        self.read, self.requests, self.sent, self.received = (np.zeros(world_size, np.int64) for _ in range(4))
        self.num_chunks = self.chunk_bytes = self.wanted_bytes = 0
        self._own = np.zeros(world_size, np.int64)

    def add(self, template: Template) -> None:
        """Count one template, all members."""
        ranks = [np.array(shard.ranks, np.int64) for shard in template.shards]
        for cell, found in enumerate(template.touches):
            if found:
                parts = [(ranks[touch.shard], touch.box.num_elements * template.item_bytes) for touch in found]
                self._add_cell(template, cell, parts)

    def _add_cell(self, template: Template, cell: int, parts: Sequence[tuple[Array, int]]) -> None:
        members, num_bytes = len(template.members), template.cell_bytes(cell)
        for ranks, part_bytes in parts:
            self._own[ranks] += part_bytes
            self.received[ranks] += members * part_bytes
        wanted = sum(len(ranks) * part_bytes for ranks, part_bytes in parts)
        shares = np.array(template.shares[cell], np.int64)
        readers, counts = shares[:, 0], shares[:, 1]
        kept = counts * self._own[readers]
        self.received[readers] -= kept
        self.sent[readers] += counts * wanted - kept
        self.read[readers] += counts * num_bytes
        self.requests[readers] += counts
        for ranks, _ in parts:
            self._own[ranks] = 0
        self.num_chunks += members
        self.chunk_bytes += members * num_bytes
        self.wanted_bytes += members * wanted


def _spread(values: Array) -> Spread:
    return Spread(int(values.min()), float(values.mean()), int(values.max())) if len(values) else Spread(0, 0.0, 0)


# --- what one rank has to know of a plan ------------------------------------------------------


def rank_view(plan: ReadPlan, rank: int) -> bytes:
    """The part of the plan that `rank` needs, as bytes: the measure of a plan's metadata.

    Enough to read, send and receive without any other part of the plan: per template the tensors (key, dtype),
    the own pieces cell by cell with who reads them, and for each cell that this rank reads, who gets what.
    Only the ids of the rank's own chunks are missing. Nothing is sent in this form; ranks compute their plans.
    """
    return pack_canonical([plan.world_size, rank, [_template(plan, each, rank) for each in plan.templates]])


def widest_ranks(plan: ReadPlan) -> list[int]:
    """The rank whose view is the longest, as far as its number of items tells; none in an empty world."""
    items = [0] * plan.world_size
    for template in plan.templates:
        for found, shares in zip(template.touches, template.shares, strict=True):
            for rank, _ in shares:
                items[rank] += len(found)
            for touch in found:
                for rank in template.shards[touch.shard].ranks:
                    items[rank] += len(shares)
    return [items.index(max(items))] if items else []


def _template(plan: ReadPlan, template: Template, rank: int) -> list[Any]:
    wants = template.wanted_by(rank)
    reads = template.turns_of.get(rank, ())
    if not wants and not reads:
        return []
    tensors = [[plan.requests[tensor].key, plan.requests[tensor].spec.dtype] for tensor in template.members]
    receivers = [
        [[_runs(template.shards[touch.shard].ranks), _flat(touch.box)] for touch in template.touches[cell]]
        for cell, _, _ in reads
    ]
    return [
        list(template.grid.shape),
        list(template.grid.cell),
        tensors,
        [[cell, _flat(box), [number for share in template.shares[cell] for number in share]] for cell, box in wants],
        [[*read, each] for read, each in zip(reads, receivers, strict=True)],
    ]


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
