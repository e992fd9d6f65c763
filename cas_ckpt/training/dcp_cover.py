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
        left = [rest for box in left for rest in box.without(part)]
        if not left:
            return None
    return left[0] if left else None
