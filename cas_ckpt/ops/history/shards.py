"""shards: which ranks held which region of each entry of a commit, and which of them shared chunks.

    1. the layout of the commit says how each key was held: its rows in the index, or its node where there are none
    2. regions follow from that, the shape, and how the tensor is cut into chunks (layout/regions.py): no node is read
    3. rows come entry by entry, in the order of the tree; entries that are alike are looked at once

Invariant: nothing is guessed: a layout that does not say who held an entry is an error that names it. What is in memory
is the list of entries, and the regions of entries that differ; a million rows go by.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from cas_ckpt.core.backfill import complete_index
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import layout_of
from cas_ckpt.core.revisions import Revision, resolve
from cas_ckpt.core.states import ask, known_commit
from cas_ckpt.errors import CorruptionError, InvalidInputError, NotFoundError
from cas_ckpt.index import entries, layouts
from cas_ckpt.index.entries import StoredLeaf
from cas_ckpt.index.rows import CommitRow
from cas_ckpt.index.texts import storable
from cas_ckpt.layout.regions import HeldRegion, held_regions, whole_region
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.objects.layouts import Division, Holders, holders_of, is_nameable
from cas_ckpt.objects.limits import check_entries
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.rank_runs import RankSet
from cas_ckpt.objects.spec import Grid

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
    complete_index(handle)
    found = None if row.layout is None else handle.index.read(layouts.read_holders, row.layout)
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
