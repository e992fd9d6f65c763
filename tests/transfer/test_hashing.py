"""Hashing: however an array lies in memory, its cells have the ids of their C-order bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cas_ckpt import native
from cas_ckpt.objects.digest import leaf_digest
from cas_ckpt.objects.spec import Grid, Spec, grid_for
from tests.builders import numbers
from tests.searches import tries


def plain_digests(array: np.ndarray[Any, Any], grid: Grid) -> list[list[bytes]]:
    """The definition, spelled out."""
    cells = []
    for cell in range(grid.num_cells):
        data = np.ascontiguousarray(array[grid.box(cell).slices]).tobytes()
        cells.append([leaf_digest(data[at : at + grid.leaf_bytes]) for at in range(0, len(data), grid.leaf_bytes)])
    return cells


def hashed(array: np.ndarray[Any, Any], grid: Grid) -> list[list[bytes]]:
    """What `native` makes of each cell; that leaves are copied on the way changes nothing."""
    found: list[list[bytes]] = []
    for number in range(grid.num_cells):
        cell = array[grid.box(number).slices]
        joined = native.leaf_digests(cell, grid.leaf_bytes)
        copy = bytearray(cell.nbytes)
        assert native.leaf_digests(cell, grid.leaf_bytes, copy) == joined
        assert copy == cell.tobytes()
        found.append([joined[at : at + 32] for at in range(0, len(joined), 32)])
    return found


@pytest.mark.parametrize("shape", [(300,), (1024, 1024), (512, 4096), (700, 2048), (3, 512, 1024), (2, 3, 5), ()])
@pytest.mark.parametrize("dtype", ["float32", "int8", "complex128"])
def test_the_hasher_gives_the_digests_of_the_definition(shape: tuple[int, ...], dtype: str) -> None:
    array = numbers(*shape, dtype=dtype) if shape else np.array(3, dtype)
    grid = grid_for(Spec(dtype, shape))
    assert hashed(array, grid) == plain_digests(array, grid)


@pytest.mark.parametrize("view", ["transposed", "strided", "reversed", "fortran", "broadcast"])
def test_views_have_the_digests_of_their_elements(view: str) -> None:
    base = numbers(1024, 2048)
    array = {
        "transposed": base.T,
        "strided": base[::2, ::3],
        "reversed": base[::-1],
        "fortran": np.asfortranarray(base),
        "broadcast": np.broadcast_to(base[:1], (700, 2048)),
    }[view]
    grid = grid_for(Spec("float32", array.shape))
    assert hashed(array, grid) == plain_digests(array, grid)


@settings(max_examples=tries(20, 60))
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.data())
def test_any_grid_of_any_small_shape_is_hashed_by_the_definition(shape: list[int], data: st.DataObject) -> None:
    cell = tuple(data.draw(st.integers(1, size)) for size in shape)
    leaf_bytes = 4 * data.draw(st.integers(1, 12))
    array = numbers(*shape)
    grid = Grid(tuple(shape), cell, leaf_bytes)
    assert hashed(array, grid) == plain_digests(array, grid)
