"""Which part of a box no other box covers.

DCP never asks this of a load: a destination that its plan covers in part keeps old values in
the rest. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from cas_ckpt.objects.spec import Box


def uncovered(whole: Box, parts: Iterable[Box]) -> Box | None:
    """Some box of `whole` that none of `parts` touches; None if they cover it."""
    left = [whole] if whole.num_elements else []
    for part in parts:
        left = [rest for box in left for rest in _minus(box, part)]
        if not left:
            return None
    return left[0] if left else None


def _minus(box: Box, part: Box) -> list[Box]:
    """`box` without `part`, as disjoint boxes: what is before and behind it along each dimension."""
    common = box.intersect(part)
    if common is None:
        return [box]
    found: list[Box] = []
    offsets, sizes = list(box.offsets), list(box.sizes)
    for axis, (start, size) in enumerate(zip(common.offsets, common.sizes, strict=True)):
        stop = offsets[axis] + sizes[axis]
        for first, last in ((offsets[axis], start), (start + size, stop)):
            if first < last:
                at = (*offsets[:axis], first, *offsets[axis + 1 :])
                found.append(Box(at, (*sizes[:axis], last - first, *sizes[axis + 1 :])))
        offsets[axis], sizes[axis] = start, size
    return found
