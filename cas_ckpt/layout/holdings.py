"""Which elements of a tensor each rank holds, from its placement alone; and of each cell and leaf of its grid.

    `holdings`, `held_by`   the shards of all ranks, or of one
    `touches`    which parts of which shards are in each cell (how tensors are cut: objects/spec.py). The boxes of one
                 piece tile it exactly, one box per cell that it touches. The cost is that of the answer, never cells
                 times shards.
    `leaf_map`   where the leaves of a straddling cell come from, of which several shards hold parts. Most leaves
                 are whole in one part; the others are put together from pieces, on the part that has most of them.

Invariant: pure, and the same on every rank; follows torch's DTensor element by element (tests
compare with it). Cost grows with the number of distinct shards, never with ranks times ranks. Knows nothing of bytes.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.native import runs_of_boxes
from cas_ckpt.objects.spec import Box, BoxPlacement, Grid, MeshPlacement, Placement

PLANNER_VERSION = 3
"""Raised when equal layouts would be planned or counted otherwise than before, so that kept plans are not taken."""

Interval = tuple[int, int]
"""(start, size) along one dimension."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Elements that the same ranks hold.

    Attributes:
        pieces: Boxes of the global tensor, disjoint, none empty, in the order of the local tensor
            (more than one for strided shards only).
        local: Offsets of every piece in the local tensor.
        ranks: World ranks that hold all of them, ascending: replicas of one another.
    """

    pieces: tuple[Box, ...]
    local: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]


def holdings(
    shape: Sequence[int], placements: Iterable[Placement], everywhere: Sequence[int] = ()
) -> tuple[Shard, ...]:
    """Every distinct shard of a tensor of this global shape, those of several placements together.

    Args:
        placements: Usually one; more where ranks describe one tensor over meshes of their own.
        everywhere: Ranks that have all of it besides; their shard comes first.

    Raises:
        InvalidInputError: a placement that does not fit its mesh or the shape.
    """
    found: dict[tuple[tuple[Box, ...], tuple[tuple[int, ...], ...]], set[int]] = {}
    for placement in placements:
        for pieces, local, ranks in _shards(tuple(shape), placement):
            if pieces:
                found.setdefault((pieces, local), set()).update(ranks)
    complete = whole(shape, everywhere) if everywhere else ()
    for shard in complete:  # one that is whole by its placement is one with it
        same = [key for key in found if key[0] == shard.pieces]
        united = set(shard.ranks).union(*(found.pop(key) for key in same))
        found = {(shard.pieces, shard.local): united, **found}
    return tuple(Shard(pieces, local, tuple(sorted(ranks))) for (pieces, local), ranks in found.items())


def whole(shape: Sequence[int], ranks: Iterable[int]) -> tuple[Shard, ...]:
    """The one shard of a tensor that each of `ranks` holds whole; none if it is empty."""
    box = Box((0,) * len(shape), tuple(shape))
    return (Shard((box,), (box.offsets,), tuple(sorted(ranks))),) if box.num_elements else ()


def one_replica(placements: Sequence[Placement]) -> frozenset[int]:
    """Ranks that hold one replica of a tensor between them, as far as a placement tells replicas apart.

    Of the first mesh: the ranks that agree with its lowest one in every dimension along which nothing is cut.
    Empty if there is none: boxes that follow no rule belong to no replica in particular.
    """
    if not placements or isinstance(placements[0], BoxPlacement):
        return frozenset()
    mesh, splits = placements[0].mesh, placements[0].splits
    places = dict(zip(mesh.ranks, itertools.product(*map(range, mesh.shape)), strict=True))
    lowest = places[min(places)]
    uncut = [dim for dim, split in enumerate(splits) if split.dim is None]
    return frozenset(rank for rank, place in places.items() if all(place[dim] == lowest[dim] for dim in uncut))


def held_by(rank: int, shape: Sequence[int], placement: Placement) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    """The pieces that one rank holds, each with its offsets in the rank's local tensor.

    The same pieces as in the rank's `holdings`, without looking at other ranks. Boxes of a
    `BoxPlacement` are local tensors of their own, so their local offsets are 0.

    Raises:
        InvalidInputError: a placement that does not fit its mesh or the shape.
    """
    if isinstance(placement, BoxPlacement):
        mine = dict.fromkeys(box for box, ranks in placement.boxes if rank in ranks and box.num_elements)
        return tuple((box, (0,) * len(shape)) for box in mine)
    mesh = placement.mesh
    if rank not in mesh.ranks:
        return ()
    place = tuple(map(int, np.unravel_index(mesh.ranks.index(rank), mesh.shape)))
    pieces, local = _Cutter(tuple(shape), placement).pieces(place)
    return tuple(zip(pieces, local, strict=True))


_Found = tuple[tuple[Box, ...], tuple[tuple[int, ...], ...], tuple[int, ...]]


def _shards(shape: tuple[int, ...], placement: Placement) -> Iterable[_Found]:
    if isinstance(placement, BoxPlacement):
        for box, ranks in placement.boxes:
            if box.num_elements:
                yield (box,), ((0,) * len(shape),), ranks
        return
    cutter = _Cutter(shape, placement)
    by_place: dict[tuple[int, ...], list[int]] = {}
    mesh = placement.mesh
    is_cut = [split.dim is not None for split in placement.splits]
    for rank, place in zip(mesh.ranks, itertools.product(*map(range, mesh.shape)), strict=True):
        by_place.setdefault(tuple(at if cut else 0 for at, cut in zip(place, is_cut, strict=True)), []).append(rank)
    for place, members in by_place.items():
        yield *cutter.pieces(place), tuple(members)


_Pieces = tuple[tuple[Box, ...], tuple[tuple[int, ...], ...]]


class _Cutter:
    """Cuts one shape for any place of a mesh; each dimension once for all places that agree on it."""

    __slots__ = ("_cuts", "_known", "_mesh_dims", "_shape")

    def __init__(self, shape: tuple[int, ...], placement: MeshPlacement) -> None:
        splits = placement.splits
        fits = all(split.dim is None or (0 <= split.dim < len(shape) and split.stride > 0) for split in splits)
        if len(splits) != len(placement.mesh.shape) or not fits:
            raise InvalidInputError(
                f"placements {', '.join(map(str, splits))} do not fit a tensor of shape {shape} on a mesh of shape "
                f"{placement.mesh.shape}: one is wanted for each mesh dimension, over a dimension that the tensor has"
            )
        cuts = list(zip(itertools.count(), splits, placement.mesh.shape, strict=False))
        self._shape = shape
        self._mesh_dims = [[at for at, split, _ in cuts if split.dim == dim] for dim in range(len(shape))]
        self._cuts = [
            [(split.stride, parts) for _, split, parts in cuts if split.dim == dim] for dim in range(len(shape))
        ]
        self._known: list[dict[tuple[int, ...], list[Interval]]] = [{} for _ in shape]

    def pieces(self, place: Sequence[int]) -> _Pieces:
        """Boxes and local offsets of what the rank at these coordinates holds."""
        placed: list[list[tuple[int, int, int]]] = []
        for dim, mesh_dims in enumerate(self._mesh_dims):
            placed.append([])
            offset = 0
            for start, size in self._intervals(dim, tuple(place[at] for at in mesh_dims)):
                placed[-1].append((start, size, offset))
                offset += size
        pieces, local = [], []
        for combination in itertools.product(*placed):
            pieces.append(Box(tuple(start for start, _, _ in combination), tuple(size for _, size, _ in combination)))
            local.append(tuple(offset for _, _, offset in combination))
        return tuple(pieces), tuple(local)

    def _intervals(self, dim: int, place: tuple[int, ...]) -> list[Interval]:
        """The part of one dimension that remains after each mesh dimension has cut it, in order."""
        found = self._known[dim].get(place)
        if found is None:
            if place:
                stride, parts = self._cuts[dim][len(place) - 1]
                found = _cut(self._intervals(dim, place[:-1]), stride, parts, place[-1])
            else:
                found = [(0, self._shape[dim])] if self._shape[dim] else []
            self._known[dim][place] = found
        return found


def _cut(intervals: list[Interval], stride: int, parts: int, at: int) -> list[Interval]:
    """Part number `at` of `parts`, taken from each of `stride` equal portions of what is there."""
    total = sum(size for _, size in intervals)
    found: list[Interval] = []
    for portion in range(min(stride, total)):  # further ones are empty
        start, stop = _chunk(0, total, stride, portion)
        found.extend(_window(intervals, *_chunk(start, stop, parts, at)))
    joined: list[Interval] = []
    for start, size in found:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((start, size))
    return joined


def _chunk(start: int, stop: int, count: int, at: int) -> tuple[int, int]:
    """(start, stop) of part number `at` of `count`, as torch.chunk cuts: the last ones may be short or empty."""
    step = -(-(stop - start) // count)
    return min(start + at * step, stop), min(start + (at + 1) * step, stop)


def _window(intervals: Sequence[Interval], first: int, last: int) -> Iterable[Interval]:
    """Positions `first` to `last` of the concatenated intervals."""
    offset = 0
    for start, size in intervals:
        begin, end = max(first - offset, 0), min(last - offset, size)
        if begin < end:
            yield start + begin, end - begin
        offset += size


# --- which parts of which shards are in each cell -------------------------------------------


@dataclass(frozen=True, slots=True)
class Touch:
    """The intersection of a cell with a piece of a shard.

    Attributes:
        shard: Position of the shard in the sequence that was asked about.
        piece: Position of the piece in the shard.
        box: The common box, in global coordinates; never empty.
    """

    shard: int
    piece: int
    box: Box


def touches(grid: Grid, shards: Sequence[Shard]) -> list[tuple[Touch, ...]]:
    """For every cell of `grid`, in order: what each shard has of it, by (shard, piece).

    Pieces must lie inside the tensor.
    """
    found: list[list[Touch]] = [[] for _ in range(grid.num_cells)]
    for at, shard in enumerate(shards):
        for number, piece in enumerate(shard.pieces):
            for cell, box in grid.cells_in(piece):
                found[cell].append(Touch(at, number, box))
    return [tuple(each) for each in found]


# --- which parts of a straddling cell its leaves come from -----------------------------------


@dataclass(frozen=True, slots=True)
class LeafPiece:
    """A box of a straddling leaf (relative to the cell), and the part that holds it."""

    part: int
    box: Box


@dataclass(frozen=True, slots=True)
class LeafMap:
    """Where the leaves of one cell come from.

    Attributes:
        owners: For each leaf the number of the part that hashes it.
        pieces: The boxes of each straddling leaf in the leaf's own order; leaves that are whole in their
            owner's part are not here.
        equals: The parts that have most of a leaf, where several have as much: any may own it.
    """

    owners: tuple[int, ...]
    pieces: dict[int, tuple[LeafPiece, ...]]
    equals: dict[int, tuple[int, ...]]

    def owners_in_turn(self, turn: int) -> tuple[int, ...]:
        """The owners, where equals share the leaves: in long stretches, that there be few extents; turned by `turn`."""
        if not self.equals:
            return self.owners
        owners = list(self.owners)
        for leaf, parts in self.equals.items():
            owners[leaf] = parts[(leaf * len(parts) // len(owners) + turn) % len(parts)]
        return tuple(owners)


@lru_cache(maxsize=4096)
def leaf_map(sizes: tuple[int, ...], leaf_items: int, parts: tuple[Box, ...]) -> LeafMap:
    """The leaves of a cell of `sizes` whose disjoint `parts` (relative to it) cover it.

    Args:
        leaf_items: Elements of a full leaf.
    """
    total = math.prod(sizes)
    spans = [part.span_in(sizes) for part in parts]
    owners: list[int] = []
    pieces: dict[int, tuple[LeafPiece, ...]] = {}
    equals: dict[int, tuple[int, ...]] = {}
    for leaf, start in enumerate(range(0, total, leaf_items)):
        stop = min(start + leaf_items, total)
        owner = next((at for at, span in enumerate(spans) if span and span[0] <= start and stop <= span[1]), None)
        if owner is None:
            found = tuple(
                LeafPiece(at, common)
                for band in range_boxes(sizes, start, stop)
                for at, part in enumerate(parts)
                if (common := band.intersect(part)) is not None
            )
            held = Counter[int]()
            for piece in found:
                held[piece.part] += piece.box.num_elements
            most = max(held.values())
            largest = tuple(sorted(part for part, count in held.items() if count == most))
            owner = largest[0]
            if any(piece.part != owner for piece in found):
                pieces[leaf] = found
            if len(largest) > 1:
                equals[leaf] = largest
        owners.append(owner)
    return LeafMap(tuple(owners), pieces, equals)


def range_boxes(sizes: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The elements `start` to `stop` (C order) of a box of `sizes` as boxes, in their order."""
    if start < stop:
        yield from itertools.starmap(Box, runs_of_boxes(sizes, start, stop))
