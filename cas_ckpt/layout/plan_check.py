"""What is refused before a plan is made, and the proof of the plan that was made.

Invariant: the refusals name the key and the region, and come before anything is read. The proof
goes by volume: boxes that lie in the piece and in different cells are disjoint, so if their
elements add up to the piece's, they tile it. Linear in shards and touches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from cas_ckpt.errors import InternalError, MismatchError
from cas_ckpt.layout.holdings import Shard
from cas_ckpt.layout.template import Template
from cas_ckpt.objects.spec import Box, Spec


def check_wanted(key: str, stored: Spec, shards: Sequence[Shard], *, world_size: int) -> None:
    """Refuse shards that the stored tensor cannot fill.

    Raises:
        MismatchError: outside of the tensor, an element twice on one rank, or a rank outside the world.
    """
    pieces_of: dict[int, list[Box]] = {}
    for shard in shards:
        for piece in shard.pieces:
            if not _inside(piece, stored.box):
                raise MismatchError(
                    f"{key}: ranks {_few(shard.ranks)} want the region {region(piece)}, which is not inside of the "
                    f"stored {stored}: restore into a tensor of that global shape"
                )
        for rank in shard.ranks:
            pieces_of.setdefault(rank, []).extend(shard.pieces)
    for rank, pieces in pieces_of.items():
        if not 0 <= rank < world_size:
            raise MismatchError(f"{key}: rank {rank} wants a part of it, but the world has {world_size} ranks")
        twice = _common(pieces, 0) if len(pieces) > 1 else None
        if twice is not None:
            raise MismatchError(
                f"{key}: rank {rank} wants the region {region(twice)} of {stored} more than once: "
                "give each element one place"
            )


def region(box: Box) -> str:
    """A box as people write it: [start:stop, ...]."""
    spans = zip(box.offsets, box.sizes, strict=True)
    return f"[{', '.join(f'{start}:{start + size}' for start, size in spans)}]"


def check_cover(templates: Sequence[Template], *, num_tensors: int, world_size: int) -> None:
    """Prove that templates deliver every element of every shard once and read every wanted chunk once.

    Raises:
        InternalError: they do not.
    """
    members = sorted(tensor for template in templates for tensor in template.members)
    if members != list(range(num_tensors)):
        raise InternalError(f"a restore plan of {num_tensors} tensors has {len(members)} of them in its templates")
    for template in templates:
        _check_pieces(template)
        _check_readers(template, world_size)


def _check_pieces(template: Template) -> None:
    delivered = [[0] * len(shard.pieces) for shard in template.shards]
    for cell, found in enumerate(template.touches):
        bounds = template.grid.box(cell)
        seen = {(touch.shard, touch.piece) for touch in found}
        if len(seen) != len(found):
            raise InternalError(f"cell {cell} of {template.grid.shape} is delivered twice to one piece")
        for touch in found:
            piece = template.shards[touch.shard].pieces[touch.piece]
            if not (_inside(touch.box, bounds) and _inside(touch.box, piece)):
                raise InternalError(f"{region(touch.box)} of {template.grid.shape} is not in cell {cell} and its piece")
            delivered[touch.shard][touch.piece] += touch.box.num_elements
    for shard, volumes in zip(template.shards, delivered, strict=True):
        for piece, volume in zip(shard.pieces, volumes, strict=True):
            if volume != piece.num_elements:
                raise InternalError(f"{region(piece)} of {template.grid.shape} gets {volume} elements")


def _check_readers(template: Template, world_size: int) -> None:
    for cell, (found, shares) in enumerate(zip(template.touches, template.shares, strict=True)):
        wanted = len(template.members) if found else 0
        ranks = {rank for rank, count in shares if count > 0 and 0 <= rank < world_size}
        if sum(count for _, count in shares) != wanted or len(ranks) != len(shares):
            raise InternalError(f"cell {cell} of {template.grid.shape}: {wanted} chunks, read by {shares}")


def _inside(inner: Box, outer: Box) -> bool:
    return len(inner.offsets) == len(outer.offsets) and all(
        a >= b and a + n <= b + m
        for a, n, b, m in zip(inner.offsets, inner.sizes, outer.offsets, outer.sizes, strict=True)
    )


def _common(boxes: Sequence[Box], dim: int) -> Box | None:
    """Something that two of the boxes share, or None. Near linear for boxes that form a lattice."""
    if len(boxes) < 2:
        return None
    if dim == len(boxes[0].offsets):
        return boxes[0]
    groups: dict[tuple[int, int], list[Box]] = {}
    for box in boxes:
        groups.setdefault((box.offsets[dim], box.sizes[dim]), []).append(box)
    spans = sorted(groups)
    if all(start + size <= after for (start, size), (after, _) in pairwise(spans)):
        return next(_found(_common(group, dim + 1) for group in groups.values()), None)
    return next(_found(_pairs(groups, spans)), None)


def _pairs(groups: dict[tuple[int, int], list[Box]], spans: Sequence[tuple[int, int]]) -> Iterable[Box | None]:
    """Common boxes of all pairs whose spans meet."""
    for at, (start, size) in enumerate(spans):
        yield from _within(groups[start, size])
        for other in spans[at + 1 :]:
            if other[0] >= start + size:
                break
            yield from (a.intersect(b) for a in groups[start, size] for b in groups[other])


def _within(boxes: Sequence[Box]) -> Iterable[Box | None]:
    return (a.intersect(b) for at, a in enumerate(boxes) for b in boxes[at + 1 :])


def _found(boxes: Iterable[Box | None]) -> Iterator[Box]:
    return (box for box in boxes if box is not None)


def _few(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4]))
    return f"{shown} ..." if len(ranks) > 4 else shown
