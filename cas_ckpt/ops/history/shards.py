"""shards: which ranks held which region of each entry of a commit, and which of them shared chunks.

    1. the layout of the commit says how each key was held: its rows in the index, or its node where they are missing
    2. regions follow from that, the shape, and how the tensor is cut into chunks (layout/regions.py)
    3. rows come entry by entry, in the order of the tree; entries that are alike are looked at once

Invariant: nothing is guessed: a layout that does not say who held an entry is an error that names it. What is in memory
is the list of entries, and the regions of entries that differ; a million rows go by.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from cas_ckpt.core.backfill import complete_index
from cas_ckpt.core.chunks import tensor_nodes
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import commit_of
from cas_ckpt.core.revisions import Revision, resolve
from cas_ckpt.core.tree import load_tree, select
from cas_ckpt.errors import CorruptionError, InvalidInputError, NotFoundError
from cas_ckpt.index import layouts
from cas_ckpt.index.rows import CommitRow
from cas_ckpt.layout.regions import HeldRegion, held_regions
from cas_ckpt.objects.digest import Digest, ObjectKind, short
from cas_ckpt.objects.layouts import Division, Holders, decode_layout, holders_of
from cas_ckpt.objects.limits import check_entries
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.rank_runs import RankSet
from cas_ckpt.objects.spec import Grid, Spec
from cas_ckpt.objects.state import RANKS, Container, EncodedValue, Path, StoredTensor, render_key

_MOST_KNOWN = 1 << 18
"""Regions of entries that differ which are kept in memory at a time."""


@dataclass(frozen=True, slots=True)
class ShardRow:
    """A region of an entry, and the ranks that held it when it was committed.

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


class _Entry(NamedTuple):
    """An entry as it is stored; a value is an array of its encoded bytes.

    Attributes:
        cell: Sizes of a full cell; None: it is not in chunks.
        owner: The rank whose own it is; None: it is not one rank's own.
    """

    key: str
    spec: Spec
    cell: tuple[int, ...] | None
    owner: int | None


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
    row = commit_of(handle, resolve(handle, revision))
    holders = _holders(handle, row)
    if rank is not None and not 0 <= rank < holders.world_size:
        raise InvalidInputError(
            f"rank {rank}: commit {short(row.digest)} is by {holders.world_size} ranks: give one from 0 to "
            f"{holders.world_size - 1}"
        )
    entries = _entries(handle, Digest(row.root), KeyPatterns(keys))
    return _Shards(holders, rank).rows(entries)


def _holders(handle: RepositoryHandle, row: CommitRow) -> Holders:
    if row.layout is None:
        raise NotFoundError(f"commit {short(row.digest)} names no layout: restore it from a copy")
    complete_index(handle)
    found = handle.index.read(layouts.read_holders, row.layout)
    return found or holders_of(decode_layout(handle.read_node(ObjectKind.LAYOUT, Digest(row.layout))))


_Leaf: TypeAlias = tuple[Path, StoredTensor | EncodedValue, int | None]
"""Path, what is stored there, and the rank whose own it is."""


def _entries(handle: RepositoryHandle, root: Digest, patterns: KeyPatterns) -> list[_Entry]:
    found: list[_Leaf] = []
    _walk(select(load_tree(handle, root), patterns), (), None, found)
    tensors = [item for _, item, _ in found if isinstance(item, StoredTensor)]
    nodes = iter(tensor_nodes(handle, tensors))
    entries = []
    for path, item, owner in found:
        if isinstance(item, EncodedValue):
            entries.append(_Entry(render_key(path), Spec("uint8", (len(item.data),)), None, owner))
        else:
            cell = next(nodes).grid.cell
            entries.append(_Entry(render_key(path), item.spec, None if item.node is None else cell, owner))
    return entries


def _walk(container: Container, path: Path, owner: int | None, found: list[_Leaf]) -> None:
    for name, child in container.children.items():
        of_rank = name if owner is None and container.kind == RANKS and isinstance(name, int) else owner
        if isinstance(child, Container):
            _walk(child, (*path, name), of_rank, found)
        elif isinstance(child, (StoredTensor, EncodedValue)):
            found.append(((*path, name), child, of_rank))


_Held: TypeAlias = list[tuple[HeldRegion, int | None]]
"""Regions, and which replica that of the rank is which was asked for."""


class _Shards:
    """Makes rows of entries; regions of entries that are alike are made once."""

    def __init__(self, holders: Holders, rank: int | None) -> None:
        self._holders = holders
        self._rank = rank
        self._divisions: dict[int, Division] = {}
        self._known: dict[tuple[object, ...], _Held] = {}
        self._num_known = 0

    def rows(self, entries: Iterable[_Entry]) -> Iterator[ShardRow]:
        for entry in entries:
            item_bytes = entry.spec.item_bytes if entry.spec.is_known else 0
            for region, replica in self._held(entry):
                box = region.box
                yield ShardRow(
                    entry.key, region.ranks, box.offsets, box.sizes, box.num_elements * item_bytes, region.num_chunks,
                    region.shared_with, replica,
                )  # fmt: skip

    def _held(self, entry: _Entry) -> _Held:
        cut = self._holders.keys.get(entry.key)
        like = (entry.spec.shape, entry.cell, cut, entry.owner)
        found = self._known.get(like)
        if found is None:
            found = self._look(entry, cut)
            self._num_known += len(found)
            if self._num_known > _MOST_KNOWN:
                self._known.clear()
                self._num_known = len(found)
            self._known[like] = found
        return found

    def _look(self, entry: _Entry, cut: int | None) -> _Held:
        shape = entry.spec.shape
        grid = None if entry.cell is None else Grid(shape, entry.cell, 1)
        division = self._owned(entry, entry.owner) if cut is None else self._division(entry.key, cut)
        try:
            regions = held_regions(shape, grid, division)
        except InvalidInputError as error:
            raise CorruptionError(
                f"{entry.key}: the layout of this commit does not fit it ({error}): restore it from a copy"
            ) from error
        rank = self._rank
        if rank is None:
            return [(region, None) for region in regions]
        return [(region, region.ranks.index(rank)) for region in regions if rank in region.ranks]

    def _owned(self, entry: _Entry, owner: int | None) -> Division:
        """A key that the layout does not name is whole on every rank, or its name says whose own it is."""
        world_size = self._holders.world_size
        if owner is None or world_size == 1:
            return Division((), tuple(range(world_size)))
        if not 0 <= owner < world_size:
            raise CorruptionError(f"{entry.key}: a value of rank {owner} in a commit by {world_size} ranks")
        return Division((), (owner,))

    def _division(self, key: str, cut: int) -> Division:
        found = self._divisions.get(cut)
        if found is None:
            check_entries(self._holders.num_listed(cut), f"{key}: what its layout says stands")
            division = self._holders.division(cut)
            if division is None:
                raise NotFoundError(
                    f"{key}: the layout of this commit does not say which ranks held it: an older or a newer cas_ckpt "
                    "wrote it. Ask for other keys"
                )
            found = self._divisions[cut] = division
        return found
