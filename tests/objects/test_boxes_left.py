"""What boxes leave uncovered, held against counting elements."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cas_ckpt.objects.spec import Box
from tests.searches import tries


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Box, list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))

    def part() -> Box:
        offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
        return Box(offsets, tuple(draw(st.integers(1, size - at)) for size, at in zip(shape, offsets, strict=True)))

    return Box((0,) * len(shape), shape), [part() for _ in range(draw(st.integers(0, 6)))]


def test_an_empty_box_and_a_single_element_are_covered_or_not() -> None:
    assert Box((0, 0), (0, 3)).without() == []
    assert Box((), ()).without() == [Box((), ())]
    assert Box((), ()).without(Box((), ())) == []


@given(boxes())
@settings(max_examples=tries(80, 300))
def test_what_boxes_leave_is_every_other_element_once(case: tuple[Box, list[Box]]) -> None:
    whole, parts = case
    left = np.ones(whole.sizes, int)
    for part in parts:
        left[part.slices] = 0
    for rest in whole.without(*parts):
        assert rest.num_elements
        left[rest.slices] -= 1
    assert not left.any()
