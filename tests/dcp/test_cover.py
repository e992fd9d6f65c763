"""What boxes leave uncovered, held against counting elements."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cas_ckpt.objects.spec import Box
from cas_ckpt.training.dcp_cover import uncovered


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Box, list[Box]]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))

    def part() -> Box:
        offsets = tuple(draw(st.integers(0, size)) for size in shape)
        return Box(offsets, tuple(draw(st.integers(0, size - at)) for size, at in zip(shape, offsets, strict=True)))

    return Box((0,) * len(shape), shape), [part() for _ in range(draw(st.integers(0, 5)))]


@given(boxes())
def test_what_is_told_to_be_uncovered_is(case: tuple[Box, list[Box]]) -> None:
    whole, parts = case
    seen = np.zeros(whole.sizes, bool)
    for part in parts:
        seen[part.slices] = True
    rest = uncovered(whole, parts)
    assert (rest is None) == bool(seen.all())
    if rest is not None:
        assert rest.num_elements and not seen[rest.slices].any()
