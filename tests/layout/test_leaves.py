"""Leaves of straddling cells: every element from exactly one place, whoever owns the leaf."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cas_ckpt.layout.holdings import leaf_map, range_boxes
from cas_ckpt.objects.spec import Box

sizes_strategy = st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple)


@st.composite
def cut_cells(draw: st.DrawFn) -> tuple[tuple[int, ...], int, tuple[Box, ...]]:
    """A cell, the elements of a leaf, and parts that cover the cell."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple))
    edges = [sorted({0, size, *draw(st.lists(st.integers(1, size), max_size=2))}) for size in sizes]
    parts = [
        Box(tuple(start for start, _ in place), tuple(stop - start for start, stop in place))
        for place in itertools.product(*(itertools.pairwise(edge) for edge in edges))
    ]
    return sizes, draw(st.integers(1, 40)), tuple(draw(st.permutations(parts)))


@given(sizes_strategy, st.data())
def test_a_range_of_elements_is_boxes_in_its_own_order(sizes: tuple[int, ...], data: st.DataObject) -> None:
    total = math.prod(sizes)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    numbers = np.arange(total).reshape(sizes)
    found = [element for box in range_boxes(sizes, start, stop) for element in numbers[box.slices].reshape(-1).tolist()]
    assert found == list(range(start, stop))


@given(cut_cells())
def test_every_element_of_every_leaf_comes_from_one_part(case: tuple[tuple[int, ...], int, tuple[Box, ...]]) -> None:
    sizes, leaf_items, parts = case
    leaves = leaf_map(sizes, leaf_items, parts)
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    holder = np.full(sizes, -1)
    for at, part in enumerate(parts):
        holder[part.slices] = at
    assert len(leaves.owners) == -(-math.prod(sizes) // leaf_items)
    for leaf, owner in enumerate(leaves.owners):
        elements = range(leaf * leaf_items, min((leaf + 1) * leaf_items, math.prod(sizes)))
        held_by = [int(holder.reshape(-1)[element]) for element in elements]
        if leaf not in leaves.pieces:
            assert set(held_by) == {owner}
            continue
        assert held_by.count(owner) == max(held_by.count(part) for part in held_by)
        told = [
            (int(element), piece.part)
            for piece in leaves.pieces[leaf]
            for element in numbers[piece.box.slices].reshape(-1)
        ]
        assert sorted(told) == [(element, int(holder.reshape(-1)[element])) for element in elements]
