"""Who hashes and writes what of a state that several ranks hold.

    whole cells       are in one shard: one of the ranks that hold it hashes and writes the cell
    straddling cells  are in several: each part's rank hashes the leaves it owns (`grid.leaf_map`), the
                      cell's home puts the digests together, every owner writes its own leaves

Invariant: pure, and equal on every rank, from specs and placements alone. Every element of every
tensor is in exactly one leaf owner's part; what no rank holds is refused. Like tensors are planned
once; cells of one rank are made when asked for. Knows nothing of keys' meaning or of bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from cas_ckpt.errors import MismatchError
from cas_ckpt.layout.balance import Demand, Share, assign
from cas_ckpt.layout.holdings import LeafMap, LeafPiece, Shard, Touch, leaf_map, touches
from cas_ckpt.objects.spec import Box, Grid, Spec

BATCH_BYTES = 16 * 1024 * 1024
"""Bytes of straddling cells per rank in a batch, at most; three batches are under way at once."""

LEAST_BATCH_BYTES = 4 * 1024 * 1024
COPIES = 8
"""Peak memory of a batch as a multiple of its bytes: pieces that go out and come in, twice each while they are joined,
leaves of three batches, and what those of one became when they were encoded."""


_Part = tuple[Box, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor to be saved and who holds it.

    Attributes:
        shards: Distinct shards with the ranks that hold them; together they cover the tensor.
            Tensors that share the very same tuple (and shape and width) are planned once.
        disjoint: No two of the shards share an element, which need not be looked at then.
    """

    key: str
    spec: Spec
    grid: Grid
    shards: tuple[Shard, ...]
    disjoint: bool = False


@dataclass(frozen=True, slots=True)
class StraddlingCell:
    """A cell of which several parts are held apart.

    Attributes:
        parts: Disjoint boxes that cover the cell, global coordinates.
        ranks: For each part the rank that acts for all that hold it.
        home: The rank that puts the digests together.
        owners: For each leaf the number of the part that hashes and writes it.
        pieces: The pieces of each straddling leaf, see `LeafMap`.
    """

    tensor: int
    cell: int
    box: Box
    parts: tuple[Box, ...]
    ranks: tuple[int, ...]
    home: int
    owners: tuple[int, ...]
    pieces: Mapping[int, tuple[LeafPiece, ...]]

    def owner(self, leaf: int) -> int:
        """The rank that hashes and writes `leaf`."""
        return self.ranks[self.owners[leaf]]

    def leaves_by_rank(self) -> dict[int, list[int]]:
        """Rank -> leaves that it hashes and writes, ascending; by rank. Ranks without leaves are not there."""
        found: dict[int, list[int]] = {}
        for leaf, owner in enumerate(self.owners):
            found.setdefault(self.ranks[owner], []).append(leaf)
        return dict(sorted(found.items()))


class _Shape(NamedTuple):
    """A straddling cell, for all tensors of a template."""

    box: Box
    parts: tuple[Box, ...]
    leaves: LeafMap


class _Template:
    """Tensors of one shape, width and division: planned together.

    Attributes:
        tensors: Their numbers, ascending.
        whole: Cell -> ranks that hold all of it.
        straddling: Cell -> parts that cover it, disjoint: (box, ranks that hold it).
    """

    def __init__(self, held: Held) -> None:
        self.grid = held.grid
        self.item_bytes = held.spec.item_bytes
        self.shards = held.shards
        self.tensors: list[int] = []
        self.whole: dict[int, tuple[int, ...]] = {}
        self.straddling: dict[int, tuple[_Part, ...]] = {}
        self.shares: dict[int, tuple[Share, ...]] = {}
        self._shapes: dict[int, _Shape] = {}
        for cell, found in enumerate(touches(held.grid, held.shards)):
            box = held.grid.box(cell)
            ranks = {rank for touch in found if touch.box == box for rank in held.shards[touch.shard].ranks}
            if ranks:
                self.whole[cell] = tuple(sorted(ranks))
            else:
                self.straddling[cell] = _cover(held, box, found)

    @cached_property
    def costs(self) -> dict[int, int]:
        """Straddling cell -> bytes that the rank with most has of the straddling cells up to it."""
        most, found = 0.0, {}
        has: dict[int, float] = {}
        for cell, parts in self.straddling.items():
            for box, ranks in parts:
                share = box.num_elements * self.item_bytes / len(ranks)
                for rank in ranks:
                    has[rank] = has.get(rank, 0.0) + share
                    most = max(most, has[rank])
            found[cell] = math.ceil(most)
        return found

    @cached_property
    def cost(self) -> int:
        """Bytes that the rank with most has of all straddling cells of one tensor."""
        return max(self.costs.values(), default=0)

    @cached_property
    def straddling_by_rank(self) -> dict[int, list[int]]:
        """Rank -> straddling cells of which it holds a part, ascending."""
        found: dict[int, list[int]] = {}
        for cell, parts in self.straddling.items():
            for rank in {rank for _, ranks in parts for rank in ranks}:
                found.setdefault(rank, []).append(cell)
        return found

    def straddling_cell(self, ordinal: int, cell: int) -> StraddlingCell:
        """A straddling cell of the template's `ordinal`-th tensor."""
        shape = self.shape(cell)
        ranks = self.representatives(ordinal, cell)
        owners = shape.leaves.owners_in_turn(ordinal + cell)
        owned = Counter(owners)
        most = max(owned.values())
        equals = sorted(part for part, count in owned.items() if count == most)
        home = ranks[equals[(ordinal + cell) % len(equals)]]
        return StraddlingCell(
            self.tensors[ordinal], cell, shape.box, shape.parts, ranks, home, owners, shape.leaves.pieces
        )

    def shape(self, cell: int) -> _Shape:
        """The straddling cell, for each of the tensors."""
        if cell not in self._shapes:
            box = self.grid.box(cell)
            parts = tuple(part for part, _ in self.straddling[cell])
            within = tuple(part.relative_to(box) for part in parts)
            self._shapes[cell] = _Shape(
                box, parts, leaf_map(box.sizes, self.grid.leaf_bytes // self.item_bytes, within)
            )
        return self._shapes[cell]

    def representatives(self, ordinal: int, cell: int) -> tuple[int, ...]:
        """One of the replicas for each part; taken in turn, and the same number of each part."""
        parts = self.straddling[cell]
        turn = (ordinal + cell) % min([len(ranks) for _, ranks in parts])
        return tuple([ranks[turn] for _, ranks in parts])


def _cover(held: Held, box: Box, found: Sequence[Touch]) -> tuple[_Part, ...]:
    """Disjoint parts that cover the cell: shards of one placement come before those of another."""
    chosen: list[_Part] = []
    for touch in found:
        rest = [touch.box] if held.disjoint else touch.box.without(*(other for other, _ in chosen))
        chosen.extend((part, held.shards[touch.shard].ranks) for part in rest)
    if sum(part.num_elements for part, _ in chosen) != box.num_elements:
        raise MismatchError(
            f"{held.key}: the ranks do not hold all of {held.spec} between them: something is missing in the region "
            f"at {box.offsets} of sizes {box.sizes}; commit from every rank that has a part"
        )
    return tuple(chosen)


class SavePlan:
    """Who does what; see the module. `tensor` numbers are positions in what was planned."""

    def __init__(self, held: Sequence[Held], world_size: int, *, budget_bytes: int | None = None) -> None:
        """Plan the tensors of all ranks; `held` is kept.

        Args:
            budget_bytes: Most memory that a rank may have for a batch, the same on every rank; None: for `BATCH_BYTES`.
        Raises:
            MismatchError: no rank holds some region; names key and region.
        """
        self._held = held
        self._templates: dict[tuple[object, ...], _Template] = {}
        self._of: list[tuple[_Template, int]] = []
        for number, tensor in enumerate(held):
            # By identity: to hash the shards of a thousand ranks takes longer than to plan them.
            like = (tensor.spec.shape, tensor.spec.item_bytes, id(tensor.shards))
            template = self._templates.get(like)
            if template is None:
                template = self._templates[like] = _Template(tensor)
            self._of.append((template, len(template.tensors)))
            template.tensors.append(number)
        cells = [(each, cell, ranks) for each in self._templates.values() for cell, ranks in each.whole.items()]
        demands = [
            Demand(each.grid.cell_elements(cell) * each.item_bytes, len(each.tensors), ranks)
            for each, cell, ranks in cells
        ]
        for (each, cell, _), shares in zip(cells, assign(demands, world_size), strict=True):
            each.shares[cell] = shares
        most = BATCH_BYTES if budget_bytes is None else max(LEAST_BATCH_BYTES, budget_bytes // COPIES)
        self._batch_bytes = min(BATCH_BYTES, most)
        self.num_batches = 1 + self._before[-1] // self._batch_bytes if self._before[-1] else 0

    @cached_property
    def _before(self) -> list[int]:
        """Straddling bytes per rank before each tensor, and in the end."""
        totals = [0]
        for template, _ in self._of:
            totals.append(totals[-1] + template.cost)
        return totals

    def whole_cells(self, rank: int) -> dict[int, list[int]]:
        """Tensor -> cells that `rank` hashes and writes alone."""
        found: dict[int, list[int]] = {}
        for template in self._templates.values():
            for cell, shares in template.shares.items():
                first = 0
                for other, count in shares:
                    for tensor in template.tensors[first : first + count] if other == rank else ():
                        found.setdefault(tensor, []).append(cell)
                    first += count
        return found

    def straddles(self, tensor: int) -> bool:
        """Whether a cell of the tensor straddles ranks."""
        return bool(self._of[tensor][0].straddling)

    def straddling_cells(self, rank: int, batch: int) -> list[StraddlingCell]:
        """The straddling cells of one batch of which `rank` acts for a part, by (tensor, cell)."""
        found = []
        for number, (template, ordinal) in enumerate(self._of):
            before, after = self._before[number], self._before[number + 1]
            if before == after or not before // self._batch_bytes <= batch <= after // self._batch_bytes:
                continue
            for cell in template.straddling_by_rank.get(rank, ()):
                in_batch = (before + template.costs[cell]) // self._batch_bytes == batch
                if in_batch and rank in template.representatives(ordinal, cell):
                    found.append(template.straddling_cell(ordinal, cell))
        return found
