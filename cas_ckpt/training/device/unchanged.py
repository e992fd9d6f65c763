"""Cells on a device that need not be staged: cells whose chunks the last background commit has stored.

    1. Every cell of the tensors on devices is hashed there, at the call (trust.py).
    2. Cells whose chunk is one of those that the last commit of this kind stored are left out; the others are staged.
    3. The commit is told the digests of all of them. It asks the index once more: a chunk that was collected meanwhile
       makes it fail, for its bytes were not kept.

Invariant: what is left out was hashed at the call, by a hasher that is trusted; nothing is left out on account of
addresses or version counters. Knows no index.
"""

from __future__ import annotations

from collections.abc import Sequence

from cas_ckpt.objects.digest import Digest, chunk_id
from cas_ckpt.objects.nodes import INLINE_BYTES
from cas_ckpt.objects.spec import grid_for
from cas_ckpt.objects.state import CellsToName, LeafHasher
from cas_ckpt.training.background.staged import StagedTensor


def leave_out(tensors: Sequence[StagedTensor], stored: frozenset[Digest]) -> frozenset[Digest]:
    """Let the tensors that can be hashed on their device be staged but for the cells whose ids are in `stored`.

    Only whole tensors of one rank. Returns the ids of all cells of those tensors: what is stored once they are.
    """
    waiting: dict[int, list[StagedTensor]] = {}
    hashers: dict[int, LeafHasher] = {}
    for each in tensors:
        offer = getattr(each.live, "leaf_hasher", None)
        hasher = None if offer is None or each.num_bytes <= INLINE_BYTES else offer()
        if hasher is not None and each.boxes == (each.spec.box,):
            hashers[id(hasher)] = hasher
            waiting.setdefault(id(hasher), []).append(each)
    found: set[Digest] = set()
    for key, hasher in hashers.items():
        found.update(_leave_out(waiting[key], hasher, stored))
    return frozenset(found)


def _leave_out(tensors: Sequence[StagedTensor], hasher: LeafHasher, stored: frozenset[Digest]) -> list[Digest]:
    wanted = []
    for each in tensors:
        grid = grid_for(each.spec)
        wanted.append(CellsToName(each.live, grid, range(grid.num_cells), each.item_bytes))
    answer = hasher.cell_digests(wanted)
    ids: list[Digest] = []
    for each, asked, digests in zip(tensors, wanted, answer or (), strict=answer is not None):
        boxes = []
        for number, joined in enumerate(digests):
            digest = chunk_id(asked.grid.cell_elements(number) * each.item_bytes, joined)
            ids.append(digest)
            if digest not in stored:
                boxes.append(asked.grid.box(number))
        each.leave_out(tuple(boxes), tuple(digests))
    return ids
