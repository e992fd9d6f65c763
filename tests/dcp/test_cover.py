"""What boxes leave uncovered, held against counting elements."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cas_ckpt.dcp.storage.reader import uncovered
from cas_ckpt.objects.spec import Box


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Box, list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))

    def part() -> Box:
        offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
        return Box(offsets, tuple(draw(st.integers(1, size - at)) for size, at in zip(shape, offsets, strict=True)))

    return Box((0,) * len(shape), shape), [part() for _ in range(draw(st.integers(0, 6)))]


def test_an_empty_box_and_a_single_element_are_covered_or_not() -> None:
    assert uncovered(Box((0, 0), (0, 3)), ()) is None
    assert uncovered(Box((), ()), ()) == Box((), ())
    assert uncovered(Box((), ()), [Box((), ())]) is None


@given(boxes())
@settings(max_examples=300)
def test_what_is_told_to_be_uncovered_is(case: tuple[Box, list[Box]]) -> None:
    whole, parts = case
    seen = np.zeros(whole.sizes, bool)
    for part in parts:
        seen[part.slices] = True
    rest = uncovered(whole, parts)
    assert (rest is None) == bool(seen.all())
    if rest is not None:
        assert rest.num_elements and not seen[rest.slices].any()
