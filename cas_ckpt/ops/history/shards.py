"""shards: which ranks held which region of each entry of a commit, and which of them shared chunks.

    1. the layout of the commit says how each key was held: its rows in the index, or its node where there are none
    2. regions follow from that, the shape, and how the tensor is cut into chunks: no node is read
    3. rows come entry by entry, in the order of the tree; entries that are alike are looked at once

Invariant: nothing is guessed: a layout that does not say who held an entry is an error that names it. What is in memory
is the list of entries, and the regions of entries that differ; a million rows go by.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import layout_of
from cas_ckpt.core.revisions import Revision, resolve
from cas_ckpt.core.tree import ask, known_commit
from cas_ckpt.errors import CorruptionError, InvalidInputError, NotFoundError
from cas_ckpt.index import entries, manifests
from cas_ckpt.index.entries import StoredLeaf
from cas_ckpt.index.rows import CommitRow, storable
from cas_ckpt.layout.holdings import holdings
from cas_ckpt.memory import check_entries
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.objects.layouts import Division, Holders, RankSet, holders_of, is_nameable
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.spec import Box, BoxPlacement, Grid

_MOST_KNOWN = 1 << 18
"""Regions of entries that differ which are kept in memory at a time."""


class ShardRow(NamedTuple):
    """A region of an entry, and the ranks that held it when it was committed. (A tuple: there may be millions.)

    Attributes:
        ranks: Those that held just this region, ascending: replicas of one another.
        offsets, sizes: The region, in elements; of a plain value in bytes, as it is encoded.
        num_bytes: Plain bytes of the region.
        num_chunks: Chunks that have a part of it; 0 for what is stored inline.
        shared_with: Ranks that held another part of one of these chunks.
        replica: Where rows of one rank were asked for, its place among `ranks`, from 0 on; else None.
    """

    key: str
    ranks: RankSet
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    num_bytes: int
    num_chunks: int
    shared_with: RankSet
    replica: int | None = None

    @property
    def region(self) -> str:
        """The region as NumPy writes it, e.g. 0:10,64:128; "..." of a tensor without dimensions."""
        parts = (f"{start}:{start + size}" for start, size in zip(self.offsets, self.sizes, strict=True))
        return ",".join(parts) or "..."


def shards_of(
    handle: RepositoryHandle, revision: Revision, *, keys: str | Sequence[str] | None = None, rank: int | None = None
) -> Iterator[ShardRow]:
    """Which ranks held which region of the entries of a commit; by entry, in the order of its tree, then by region.

    Args:
        keys: Only entries that match.
        rank: Only what this rank held.
    Raises:
        NotFoundError: no such commit, or a pattern matches nothing. InvalidInputError: the commit is not by so many
            ranks. While rows come: NotFoundError, if the layout does not say who held an entry; CorruptionError, if it
            does not fit it; TooLargeError, if that unfolds into more than this call may make.
    """
    row = known_commit(handle, resolve(handle, revision))
    holders = _holders(handle, row)
    if rank is not None and not 0 <= rank < holders.world_size:
        raise InvalidInputError(
            f"rank {rank}: commit {short(row.digest)} is by {holders.world_size} ranks: give one from 0 to "
            f"{holders.world_size - 1}"
        )
    patterns = KeyPatterns(keys)
    leaves = ask(handle, entries.stored_leaves, Digest(row.root), keys=patterns)
    patterns.require_used()
    return _Shards(holders, rank).rows(leaves)


def _holders(handle: RepositoryHandle, row: CommitRow) -> Holders:
    found = None if row.layout is None else handle.index.read(manifests.read_holders, row.layout)
    return found or holders_of(layout_of(handle, row))  # of one that could not be read when it came


_Held: TypeAlias = list[tuple[RankSet, tuple[int, ...], tuple[int, ...], int, int, RankSet, int | None]]
"""Rows without their key."""


class _Shards:
    """Makes rows of entries; regions of entries that are alike are made once."""

    def __init__(self, holders: Holders, rank: int | None) -> None:
        self._holders = holders
        self._rank = rank
        self._everyone = RankSet(((0, holders.world_size),))
        self._divisions: dict[int, Division] = {}
        self._known: dict[tuple[object, ...], _Held] = {}
        self._num_known = 0

    def rows(self, leaves: Iterable[StoredLeaf]) -> Iterator[ShardRow]:
        new = tuple.__new__
        for leaf in leaves:
            for held in self._held(leaf):
                yield new(ShardRow, (leaf.key, *held))

    def _held(self, leaf: StoredLeaf) -> _Held:
        if leaf.owner is None and self._holders.world_size > 1 and not is_nameable(leaf.key):
            raise _unknown(leaf.key)  # that no layout names it does not mean that every rank had it
        keys = self._holders.keys
        number = keys.get(leaf.key, keys.get(storable(leaf.key)))  # rows have keys as a database can hold them
        like = (leaf.spec, leaf.cell, number, leaf.owner)
        found = self._known.get(like)
        if found is None:
            found = self._look(leaf, number)
            self._num_known += len(found)
            if self._num_known > _MOST_KNOWN:
                self._known.clear()
                self._num_known = len(found)
            self._known[like] = found
        return found

    def _look(self, leaf: StoredLeaf, number: int | None) -> _Held:
        rank, spec = self._rank, leaf.spec
        item_bytes = spec.item_bytes if spec.is_known else 0
        return [
            (
                each.ranks, each.box.offsets, each.box.sizes, each.box.num_elements * item_bytes, each.num_chunks,
                each.shared_with, None if rank is None else each.ranks.index(rank),
            )
            for each in self._regions(leaf, number)
            if rank is None or rank in each.ranks
        ]  # fmt: skip

    def _regions(self, leaf: StoredLeaf, number: int | None) -> list[HeldRegion]:
        shape = leaf.spec.shape
        grid = None if leaf.cell is None else Grid(shape, leaf.cell, 1)
        try:
            if number is None:
                return [whole_region(shape, grid, self._owners(leaf))]
            return held_regions(shape, grid, self._division(leaf.key, number))
        except InvalidInputError as error:
            raise CorruptionError(
                f"{leaf.key}: the layout of this commit does not fit it ({error}): restore it from a copy"
            ) from error

    def _owners(self, leaf: StoredLeaf) -> RankSet:
        """Who has a key that the layout does not name: every rank, or the one whose own it is."""
        world_size = self._holders.world_size
        if leaf.owner is None or world_size == 1:
            return self._everyone
        if not 0 <= leaf.owner < world_size:
            raise CorruptionError(f"{leaf.key}: a value of rank {leaf.owner} in a commit by {world_size} ranks")
        return RankSet.of([leaf.owner])

    def _division(self, key: str, number: int) -> Division:
        found = self._divisions.get(number)
        if found is None:
            check_entries(self._holders.num_listed(number), f"{key}: what its layout says stands")
            found = self._holders.division(number)
            if found is None:
                raise _unknown(key)
            self._divisions[number] = found
        return found


def _unknown(key: str) -> NotFoundError:
    return NotFoundError(
        f"{key}: the layout of this commit does not say which ranks held it: an older or a newer cas_ckpt wrote it, or "
        "no layout can have this key (half of a surrogate pair). Ask for other keys"
    )


# --- regions that ranks held ------------------------------------------------------------------
#
# Pure. The cost is that of the distinct shards and of the chunks that they touch, never ranks times ranks: ranks are
# sets of spans, and what a chunk has of ranks is put together once for all shards that touch it. What a division
# unfolds into is counted before it is made.


@dataclass(frozen=True, slots=True)
class HeldRegion:
    """A region, and the ranks that held it.

    Attributes:
        ranks: Those that held just this region: replicas of one another.
        num_chunks: Chunks that have elements of it.
        shared_with: Ranks that held another part of one of these chunks.
    """

    box: Box
    ranks: RankSet
    num_chunks: int
    shared_with: RankSet


def held_regions(shape: Sequence[int], grid: Grid | None, division: Division) -> list[HeldRegion]:
    """Regions of a tensor that ranks held, ordered by offsets, sizes and ranks; an empty tensor is one region.

    Args:
        grid: How the tensor is cut into chunks; None if it is not: it is stored with its entry.
    Raises:
        InvalidInputError: the division does not fit the shape.
        TooLargeError: it has more pieces than this call may make.
    """
    check_entries(most_pieces(shape, division), "the ways in which ranks held one tensor stand")
    for placement in division.placements:
        for box, _ in placement.boxes if isinstance(placement, BoxPlacement) else ():
            fits = len(box.offsets) == len(shape) and all(
                start + size <= whole for start, size, whole in zip(box.offsets, box.sizes, shape, strict=True)
            )
            if not fits:
                raise InvalidInputError(
                    f"a box at {box.offsets} of sizes {box.sizes} does not lie inside of {tuple(shape)}"
                )
    shards = holdings(shape, division.placements, division.everywhere)
    if math.prod(shape) == 0:
        every = list(division.everywhere)
        for placement in division.placements:
            if isinstance(placement, BoxPlacement):
                every += [rank for _, holders in placement.boxes for rank in holders]
            else:
                every += placement.mesh.ranks
        return [whole_region(shape, None, RankSet.of(every))]
    ranks = [RankSet.of(shard.ranks) for shard in shards]
    pieces = [(at, piece) for at, shard in enumerate(shards) for piece in shard.pieces]
    counts = [0 if grid is None else num_cells(grid, piece) for _, piece in pieces]
    if grid is None or len(pieces) == 1:
        shared = [RankSet()] * len(pieces)
    else:
        check_entries(sum(counts), "the chunks that ranks held one tensor in stand")
        shared = _shared(grid, pieces, ranks)
    found = [
        HeldRegion(piece, ranks[at], count, others)
        for (at, piece), count, others in zip(pieces, counts, shared, strict=True)
    ]
    return sorted(found, key=lambda region: (region.box.offsets, region.box.sizes, region.ranks.spans))


def whole_region(shape: Sequence[int], grid: Grid | None, ranks: RankSet) -> HeldRegion:
    """All of a tensor, held by `ranks`; arguments as for `held_regions`."""
    box = Box((0,) * len(shape), tuple(shape))
    return HeldRegion(box, ranks, 0 if grid is None else num_cells(grid, box), RankSet())


def most_pieces(shape: Sequence[int], division: Division) -> int:
    """The pieces of a tensor of this shape are at most so many; found without cutting anything."""
    total = 1 if division.everywhere else 0
    for placement in division.placements:
        if isinstance(placement, BoxPlacement):
            total += len(placement.boxes)
            continue
        pieces = 1
        for size, split in zip(placement.mesh.shape, placement.splits, strict=False):
            if split.dim is not None and split.dim < len(shape):
                pieces *= size * max(min(split.stride, shape[split.dim]), 1)
        total += pieces
    return total


def num_cells(grid: Grid, box: Box) -> int:
    """How many cells have elements of `box`."""
    if not box.num_elements:
        return 0
    bounds = zip(box.offsets, box.sizes, grid.cell, strict=True)
    return math.prod((start + size - 1) // step - start // step + 1 for start, size, step in bounds)


def _shared(grid: Grid, pieces: Sequence[tuple[int, Box]], ranks: Sequence[RankSet]) -> list[RankSet]:
    """For each piece (number of its shard, box) the ranks that hold another part of a cell that it touches."""
    holders: dict[int, dict[Box, set[int]]] = defaultdict(dict)
    for at, piece in pieces:
        for cell, part in grid.cells_in(piece):
            holders[cell].setdefault(part, set()).add(at)
    united: dict[frozenset[int], RankSet] = {}

    def ranks_of(shards: Iterable[int]) -> RankSet:
        key = frozenset(shards)
        if key not in united:
            united[key] = RankSet.union([ranks[at] for at in key])
        return united[key]

    everyone: dict[int, RankSet] = {}
    found = []
    for at, piece in pieces:
        others: set[RankSet] = set()
        for cell, part in grid.cells_in(piece):
            parts = holders[cell]
            if len(parts) == 1:
                continue
            if len(parts[part]) > 1:  # who holds the same part of this cell does not count
                others.add(ranks_of(each for box, holding in parts.items() if box != part for each in holding))
                continue
            if cell not in everyone:
                everyone[cell] = ranks_of(each for holding in parts.values() for each in holding)
            others.add(everyone[cell])
        found.append(RankSet.union(others).without(ranks[at]) if others else RankSet())
    return found
