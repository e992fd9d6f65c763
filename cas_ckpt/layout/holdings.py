"""Which elements of a tensor each rank holds, from its placement alone.

Invariant: pure, and the same on every rank; follows torch's DTensor element by element (tests
compare with it). Cost grows with the number of distinct shards, never with ranks times ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cas_ckpt.objects.placement import BoxPlacement, Placement, Split
from cas_ckpt.objects.spec import Box

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


def holdings(shape: Sequence[int], placements: Iterable[Placement]) -> tuple[Shard, ...]:
    """Every distinct shard of a tensor of this global shape, those of several placements together.

    Args:
        placements: Usually one; more where ranks describe one tensor over meshes of their own.
    """
    found: dict[tuple[tuple[Box, ...], tuple[tuple[int, ...], ...]], set[int]] = {}
    for placement in placements:
        for pieces, local, ranks in _shards(tuple(shape), placement):
            if pieces:
                found.setdefault((pieces, local), set()).update(ranks)
    return tuple(Shard(pieces, local, tuple(sorted(ranks))) for (pieces, local), ranks in found.items())


def whole(shape: Sequence[int], ranks: Iterable[int]) -> tuple[Shard, ...]:
    """The one shard of a tensor that each of `ranks` holds whole; none if it is empty."""
    box = Box((0,) * len(shape), tuple(shape))
    return (Shard((box,), (box.offsets,), tuple(sorted(ranks))),) if box.num_elements else ()


def held_by(rank: int, shape: Sequence[int], placement: Placement) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    """The pieces that one rank holds, each with its offsets in the rank's local tensor.

    The same pieces as in the rank's `holdings`, without looking at other ranks. Boxes of a
    `BoxPlacement` are local tensors of their own, so their local offsets are 0.
    """
    if isinstance(placement, BoxPlacement):
        mine = dict.fromkeys(box for box, ranks in placement.boxes if rank in ranks and box.num_elements)
        return tuple((box, (0,) * len(shape)) for box in mine)
    mesh = placement.mesh
    if rank not in mesh.ranks:
        return ()
    place = _unravel(mesh.ranks.index(rank), mesh.shape)
    cuts = tuple(zip(placement.splits, mesh.shape, strict=True))
    return tuple(zip(*_pieces(tuple(shape), cuts, place), strict=True))


def _unravel(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The coordinates of place number `index`, places counted in C order."""
    place = []
    for size in reversed(shape):
        index, at = divmod(index, size)
        place.append(at)
    return tuple(reversed(place))


_Found = tuple[tuple[Box, ...], tuple[tuple[int, ...], ...], tuple[int, ...]]


def _shards(shape: tuple[int, ...], placement: Placement) -> Iterable[_Found]:
    if isinstance(placement, BoxPlacement):
        for box, ranks in placement.boxes:
            if box.num_elements:
                yield (box,), ((0,) * len(shape),), ranks
        return
    by_place: dict[tuple[int, ...], list[int]] = {}
    cut = [at for at, split in enumerate(placement.splits) if split.dim is not None]
    for rank, place in zip(placement.mesh.ranks, itertools.product(*map(range, placement.mesh.shape)), strict=True):
        by_place.setdefault(tuple(place[at] for at in cut), []).append(rank)
    cuts = [(placement.splits[at], placement.mesh.shape[at]) for at in cut]
    for coordinates, members in by_place.items():
        pieces, local = _pieces(shape, cuts, coordinates)
        yield pieces, local, tuple(members)


def _pieces(
    shape: tuple[int, ...], cuts: Sequence[tuple[Split, int]], place: Sequence[int]
) -> tuple[tuple[Box, ...], tuple[tuple[int, ...], ...]]:
    intervals: list[list[Interval]] = [[(0, size)] if size else [] for size in shape]
    for (split, parts), at in zip(cuts, place, strict=True):
        if split.dim is not None:
            intervals[split.dim] = _cut(intervals[split.dim], split.stride, parts, at)
    placed = [_with_local(dimension) for dimension in intervals]
    pieces, local = [], []
    for combination in itertools.product(*placed):
        pieces.append(Box(tuple(start for start, _, _ in combination), tuple(size for _, size, _ in combination)))
        local.append(tuple(offset for _, _, offset in combination))
    return tuple(pieces), tuple(local)


def _with_local(intervals: Sequence[Interval]) -> list[tuple[int, int, int]]:
    placed, offset = [], 0
    for start, size in intervals:
        placed.append((start, size, offset))
        offset += size
    return placed


def _cut(intervals: list[Interval], stride: int, parts: int, at: int) -> list[Interval]:
    """Part number `at` of `parts`, taken from each of `stride` equal portions of what is there."""
    total = sum(size for _, size in intervals)
    found: list[Interval] = []
    for portion in range(stride):
        start, stop = _chunk(0, total, stride, portion)
        found.extend(_window(intervals, *_chunk(start, stop, parts, at)))
    return _joined(found)


def _chunk(start: int, stop: int, count: int, at: int) -> tuple[int, int]:
    """(start, stop) of part number `at` of `count`, as torch.chunk cuts: the last ones may be short or empty."""
    step = -(-(stop - start) // count)
    return min(start + at * step, stop), min(start + (at + 1) * step, stop)


def _window(intervals: Sequence[Interval], first: int, last: int) -> Iterable[Interval]:
    """What stands at positions `first` to `last` of the intervals laid end to end."""
    offset = 0
    for start, size in intervals:
        begin, end = max(first - offset, 0), min(last - offset, size)
        if begin < end:
            yield start + begin, end - begin
        offset += size


def _joined(intervals: Sequence[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for start, size in intervals:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((start, size))
    return joined
