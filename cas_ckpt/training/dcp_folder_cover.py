"""Do the saved chunks of a tensor hold each element exactly once?

    1. the ends of all chunks cut every axis, so that a grid of regions results
    2. each chunk paints its regions; one that is painted already is an overlap
    3. a region that stays blank is a hole

Linear in chunks and regions, whatever axes are cut. Invariant: nothing is read. Knows boxes only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.objects.spec import Box

MAX_REGIONS = 1 << 24
"""Regions of one tensor, at most. A tensor cut along any axes over all ranks has one per chunk."""


def check_cover(shape: tuple[int, ...], boxes: Sequence[Box], *, key: str) -> None:
    """See that `boxes`, all inside `shape` and with elements, cover it without overlap.

    Raises:
        InvalidInputError: a hole or an overlap; names `key` and one region.
    """
    if not math.prod(shape) or list(boxes) == [Box((0,) * len(shape), shape)]:
        return
    cuts = [_cuts(boxes, axis, size) for axis, size in enumerate(shape)]
    counts = tuple(len(axis) - 1 for axis in cuts)
    if math.prod(counts) > MAX_REGIONS:
        raise InvalidInputError(
            f"{key}: {len(boxes)} chunks cut it into {math.prod(counts)} regions: too irregular; load it with torch "
            "and save it again"
        )
    position = [{cut: number for number, cut in enumerate(axis)} for axis in cuts]
    painted = np.zeros(counts, np.bool_)
    for box in boxes:
        ends = zip(position, box.offsets, box.sizes, strict=True)
        part = painted[tuple(slice(at[offset], at[offset + size]) for at, offset, size in ends)]
        if part.any():
            start = [at[offset] for at, offset in zip(position, box.offsets, strict=True)]
            first = np.unravel_index(int(part.argmax()), part.shape)
            region = _region(cuts, [a + int(b) for a, b in zip(start, first, strict=True)])
            raise InvalidInputError(f"{key}: two saved chunks hold {region}: write the checkpoint again")
        part[...] = True
    if not painted.all():
        region = _region(cuts, [int(at) for at in np.unravel_index(int(painted.argmin()), counts)])
        raise InvalidInputError(
            f"{key}: no saved chunk holds {region} of shape {list(shape)}: a rank's part is missing; write it again"
        )


def _cuts(boxes: Sequence[Box], axis: int, size: int) -> list[int]:
    starts = {box.offsets[axis] for box in boxes}
    return sorted(starts | {box.offsets[axis] + box.sizes[axis] for box in boxes} | {0, size})


def _region(cuts: Sequence[Sequence[int]], at: Sequence[int]) -> str:
    ranges = [f"{axis[number]}:{axis[number + 1]}" for axis, number in zip(cuts, at, strict=True)]
    return f"[{', '.join(ranges)}]"
