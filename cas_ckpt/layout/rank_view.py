"""What one rank has to know of a restore plan, as bytes: the measure of a plan's metadata.

Invariant: enough to read, send and receive without any other part of the plan: per template the
tensors (key, dtype), the own pieces cell by cell with who reads them, and for each cell that this
rank reads, who gets what. Only the ids of the rank's own chunks are missing. Nothing is sent in this
form; ranks compute their plans. Knows nothing of storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cas_ckpt.layout.restore_plan import RestorePlan
from cas_ckpt.layout.template import Template
from cas_ckpt.objects.canonical import pack_canonical
from cas_ckpt.objects.spec import Box


def rank_view(plan: RestorePlan, rank: int) -> bytes:
    """The part of the plan that `rank` needs."""
    return pack_canonical([plan.world_size, rank, [_template(plan, each, rank) for each in plan.templates]])


def widest_ranks(plan: RestorePlan) -> list[int]:
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


def _template(plan: RestorePlan, template: Template, rank: int) -> list[Any]:
    wants = template.wanted_by(rank)
    reads = template.cells_read_by(rank)
    if not wants and not reads:
        return []
    tensors = [[plan.wanted[tensor].key, plan.wanted[tensor].spec.dtype] for tensor in template.members]
    return [
        list(template.grid.shape),
        list(template.grid.cell),
        tensors,
        [[cell, _flat(box), [number for share in template.shares[cell] for number in share]] for cell, box in wants],
        [[cell, first, count, _receivers(template, cell)] for cell, first, count in reads],
    ]


def _receivers(template: Template, cell: int) -> list[Any]:
    return [[_runs(template.shards[touch.shard].ranks), _flat(touch.box)] for touch in template.touches[cell]]


def _flat(box: Box) -> list[int]:
    return [*box.offsets, *box.sizes]


def _runs(ranks: Sequence[int]) -> list[int]:
    """Ascending ranks as start, count, step of each evenly spaced run."""
    found: list[int] = []
    for rank in ranks:
        if found and _extends(found[-3:], rank):
            found[-1] = rank - found[-3] if found[-2] == 1 else found[-1]
            found[-2] += 1
        else:
            found += [rank, 1, 1]
    return found


def _extends(run: Iterable[int], rank: int) -> bool:
    start, count, step = run
    return count == 1 or rank == start + count * step
