"""Tensors that are planned alike: equal shape, item size and shards.

Invariant: a template holds what is true for all its tensors; what differs from tensor to tensor (who
reads the chunk in a cell) follows from the tensor's ordinal in the template by arithmetic. A model
of a thousand tensors has some ten templates. Knows nothing of keys.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import gcd

from cas_ckpt.layout.balance import Share
from cas_ckpt.layout.holdings import Shard
from cas_ckpt.layout.overlap import Touch
from cas_ckpt.objects.spec import Box, Grid

_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, eq=False)
class Template:
    """Tensors that are planned alike.

    Attributes:
        grid: Their canonical grid.
        item_bytes: Of one element.
        shards: Who wants what of each.
        members: Numbers of the tensors, ascending.
        touches: By cell, what the shards have of it (layout/overlap.py).
        shares: By cell, (rank, how many of the members' chunks it reads); empty where nobody wants it.
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
        readers, ends = self._turns[cell]
        return readers[bisect_right(ends, self._turn(ordinal, cell))]

    def read_by(self, rank: int) -> Iterator[tuple[int, int]]:
        """(ordinal, cell) of all chunks that `rank` reads, in no order."""
        for cell, first, count in self._reads.get(rank, ()):
            for turn in range(first, first + count):
                yield self._ordinal(turn, cell), cell

    def wanted_by(self, rank: int) -> list[tuple[int, Box]]:
        """(cell, box) of all that `rank` gets of each member, by (cell, shard, piece)."""
        parts = [part for shard in self._shards_of.get(rank, ()) for part in self._parts[shard]]
        parts.sort(key=lambda part: part[0])
        return parts

    def receivers(self, cell: int) -> list[tuple[int, Box]]:
        """(rank, box) of all that any rank gets of this cell, by (rank, shard, piece)."""
        found = [(rank, touch.box) for touch in self.touches[cell] for rank in self.shards[touch.shard].ranks]
        found.sort(key=lambda each: each[0])
        return found

    # Ranks take turns: were the first members all read by the first rank, it would read alone
    # while the others wait. A step near the golden section spreads the members of each over all.

    def _turn(self, ordinal: int, cell: int) -> int:
        return (ordinal + cell) * self._step % len(self.members)

    def _ordinal(self, turn: int, cell: int) -> int:
        return (turn * self._back - cell) % len(self.members)

    @cached_property
    def _step(self) -> int:
        count = len(self.members)
        middle = max(1, round(count * _GOLDEN))
        return next(step for step in range(middle, middle + count + 1) if gcd(step, count) == 1)

    @cached_property
    def _back(self) -> int:
        return pow(self._step, -1, len(self.members))

    @cached_property
    def _turns(self) -> list[tuple[list[int], list[int]]]:
        """By cell: the readers, and the turn at which each one's end."""
        return [
            ([rank for rank, _ in shares], list(accumulate(count for _, count in shares))) for shares in self.shares
        ]

    @cached_property
    def _reads(self) -> dict[int, list[tuple[int, int, int]]]:
        """Rank -> (cell, its first turn, number of turns)."""
        found: dict[int, list[tuple[int, int, int]]] = {}
        for cell, shares in enumerate(self.shares):
            first = 0
            for rank, count in shares:
                found.setdefault(rank, []).append((cell, first, count))
                first += count
        return found

    def cells_read_by(self, rank: int) -> Sequence[tuple[int, int, int]]:
        """(cell, first turn, number of turns) of what `rank` reads."""
        return self._reads.get(rank, ())

    @cached_property
    def _shards_of(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for at, shard in enumerate(self.shards):
            for rank in shard.ranks:
                found.setdefault(rank, []).append(at)
        return found

    @cached_property
    def _parts(self) -> list[list[tuple[int, Box]]]:
        """By shard: (cell, box)."""
        found: list[list[tuple[int, Box]]] = [[] for _ in self.shards]
        for cell, touches in enumerate(self.touches):
            for touch in touches:
                found[touch.shard].append((cell, touch.box))
        return found
