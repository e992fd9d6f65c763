"""A restore plan in numbers: how much all ranks together do, the least, mean and most of them, and how long that takes.

Invariant: follows from the plan and what each rank does in it (layout/plan_ranks.py). Estimates say which bandwidths
they assume. Knows nothing of packs: how many extents chunks have, the caller looks up.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from cas_ckpt.layout.plan_ranks import RankTotals, rank_totals
from cas_ckpt.layout.restore_plan import ReadPlan

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


def summarize(
    plan: ReadPlan,
    totals: RankTotals | None = None,
    *,
    storage_bandwidth: float = STORAGE_BYTES_PER_S,
    network_bandwidth: float = NETWORK_BYTES_PER_S,
    extents_per_chunk: float | None = None,
) -> PlanSummary:
    """The plan in numbers.

    Args:
        totals: What each rank does, if that is counted already.
        storage_bandwidth, network_bandwidth: Bytes per second of one rank; more than 0.
        extents_per_chunk: Mean number of extents, if known.
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
        extents_per_chunk=extents_per_chunk,
        storage_bandwidth=storage_bandwidth,
        network_bandwidth=network_bandwidth,
    )


def _spread(values: Array) -> Spread:
    return Spread(int(values.min()), int(values.sum()) / len(values), int(values.max())) if len(values) else NOTHING
