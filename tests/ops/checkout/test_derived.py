"""Targets of derived tensors are filled from boxes of stored ones, however these are cut and whatever is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cas_ckpt.objects.spec import Box, BoxPlacement
from cas_ckpt.objects.state import StoredTensor, TensorCopy, walk
from cas_ckpt.ops.checkout.derived import placed_boxes, without_derived
from tests.layout.key_maps import Array, Op, applied, histories
from tests.searches import tries


@dataclass
class Memory:
    """A target that counts how often each element was brought to it; it takes copies, as a device does."""

    array: Array
    times: Array

    def open(self, box: Box) -> Array:
        return np.full(box.sizes, -1, self.array.dtype)

    def done(self, box: Box, array: Array) -> None:
        self.array[box.slices] = array
        self.times[box.slices] += 1

    def rearranged(self, index: Any, order: Sequence[int]) -> Memory:
        return Memory(self.array[index].transpose(order), self.times[index].transpose(order))


def new(shape: Sequence[int]) -> Memory:
    return Memory(np.full(shape, -1, "int32"), np.zeros(shape, int))


def some_box(draw: st.DrawFn, outer: Sequence[int]) -> Box:
    starts = [draw(st.integers(0, size - 1)) for size in outer]
    return Box(tuple(starts), tuple(draw(st.integers(1, n - at)) for n, at in zip(outer, starts, strict=True)))


def fill(copy: TensorCopy, dim: int, cut: int) -> None:
    """Bring the box of the copy to its target, cut in two along `dim`, as cells cut it."""
    assert copy.box is not None and copy.stored.inline is not None
    whole = np.frombuffer(copy.stored.inline, "int32").reshape(copy.stored.spec.shape)
    cut = min(cut, copy.box.sizes[dim])
    for start, stop in ((0, cut), (cut, copy.box.sizes[dim])):
        if start < stop:
            offsets, sizes = [0, 0], list(copy.box.sizes)
            offsets[dim], sizes[dim] = start, stop - start
            place = Box(tuple(offsets), tuple(sizes))
            array = copy.target.open(place)
            array[...] = whole[copy.box.slices][place.slices]
            copy.target.done(place, array)


@settings(max_examples=tries(60, 1000), deadline=None)
@given(st.data(), histories())
def test_any_box_of_a_derived_tensor_is_filled_once(
    data: st.DataObject, history: tuple[dict[str, Array], list[Op], list[Op], dict[str, Array]]
) -> None:
    before, rules, _, wanted = history
    rules = [{"prefix": "t", "to": ""}, *rules, {"prefix": "", "to": "t"}]
    items = dict(walk(applied(rules, {f"t{key}": array for key, array in before.items()}).tree))
    for (name,), item in items.items():
        assert isinstance(item, StoredTensor) and isinstance(name, str)
        box = data.draw(st.composite(some_box)(item.spec.shape))
        target = new(box.sizes)
        copies = without_derived([TensorCopy((name,), item, target, box=box)])
        for copy in copies:
            fill(copy, data.draw(st.integers(0, 1)), data.draw(st.integers(0, 12)))
        assert (target.times == 1).all()
        assert np.array_equal(target.array, wanted[name.removeprefix("t")][box.slices])
        assert {copy.path for copy in copies} == {(name,)}
        placed = placed_boxes(copies, rank=0)
        assert len({copy.path for copy in placed}) == len(copies)


@pytest.mark.parametrize("cut", range(13))
def test_every_third_row_of_a_cell_goes_where_it_belongs_wherever_the_cell_begins(cut: int) -> None:
    rows = np.arange(24, dtype="int32").reshape(12, 2)
    item, target = applied([{"interleave": "x", "shape": [1, -1, 3]}], {"x": rows}).tree.children["x"], new((12, 2))
    assert isinstance(item, StoredTensor)
    for copy in without_derived([TensorCopy(("x",), item, target)]):
        fill(copy, 0, cut)
    assert (target.times == 1).all()
    assert np.array_equal(target.array, rows.reshape(4, 3, 2).transpose(1, 0, 2).reshape(12, 2))


def test_a_box_that_a_rank_wants_is_a_placement_in_the_coordinates_of_the_stored_tensor() -> None:
    item = applied([{"split": "x", "to": ["a", "b"]}], {"x": np.arange(8, dtype="int32").reshape(4, 2)}).tree
    target = new((2, 2))
    second = item.children["b"]
    assert isinstance(second, StoredTensor)
    (copy,) = placed_boxes(without_derived([TensorCopy(("b",), second, target)]), rank=3)
    box = Box((2, 0), (2, 2))
    assert (copy.box, copy.placement) == (None, BoxPlacement(((box, (3,)),)))
    copy.target.done(box, np.full((2, 2), 7, "int32"))
    assert (target.array == 7).all()
