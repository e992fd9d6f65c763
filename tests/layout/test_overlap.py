"""What shards and cells have in common, against masks of every element."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cas_ckpt.layout.holdings import Shard, holdings, touches
from cas_ckpt.objects.spec import Box, Grid, Mesh, MeshPlacement, Spec, Split, grid_for


@st.composite
def grids_and_boxes(draw: st.DrawFn) -> tuple[Grid, list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
    grid = Grid(shape, tuple(draw(st.integers(1, size)) for size in shape), 8)
    boxes = []
    for _ in range(draw(st.integers(1, 3))):
        offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
        sizes = tuple(draw(st.integers(0, size - at)) for size, at in zip(shape, offsets, strict=True))
        boxes.append(Box(offsets, sizes))
    return grid, boxes


@settings(deadline=None)
@given(grids_and_boxes())
def test_every_cell_and_every_box_have_in_common_what_their_masks_have(drawn: tuple[Grid, list[Box]]) -> None:
    grid, boxes = drawn
    found = touches(grid, [Shard((box,), ((0,) * len(grid.shape),), (0,)) for box in boxes])
    assert len(found) == grid.num_cells
    for cell, common in enumerate(found):
        of_shard = {touch.shard: touch for touch in common}
        assert [touch.shard for touch in common] == sorted(of_shard)
        for at, box in enumerate(boxes):
            wanted = _mask(grid.shape, grid.box(cell)) & _mask(grid.shape, box)
            got = _mask(grid.shape, of_shard[at].box) if at in of_shard else np.zeros(grid.shape, bool)
            assert (wanted == got).all()
            assert at not in of_shard or of_shard[at].box.num_elements


def test_cells_come_in_ascending_order() -> None:
    grid = grid_for(Spec("float32", (3, 4096, 14336)))
    cells = [cell for cell, _ in grid.cells_in(Box((1, 500, 1000), (2, 2000, 9000)))]
    assert cells == sorted(set(cells))


def test_pieces_of_a_strided_shard_are_told_apart() -> None:
    mesh = Mesh(("dp", "tp"), (2, 2), (0, 1, 2, 3))
    shards = holdings((8,), [MeshPlacement(mesh, (Split(0, 2), Split(0)))])
    numbered = {(touch.shard, touch.piece) for found in touches(Grid((8,), (8,), 4), shards) for touch in found}
    assert numbered == {(at, piece) for at, shard in enumerate(shards) for piece in range(len(shard.pieces))}


def test_the_cost_is_that_of_the_answer() -> None:
    shards = holdings((53248, 16384), [MeshPlacement(Mesh(("dp",), (1024,), tuple(range(1024))), (Split(0),))])
    found = touches(grid_for(Spec("float32", (53248, 16384))), shards)
    assert sum(map(len, found)) < 2 * len(found) + len(shards) * 8


def _mask(shape: tuple[int, ...], box: Box) -> np.ndarray:
    mask = np.zeros(shape, bool)
    mask[box.slices] = True
    return mask
