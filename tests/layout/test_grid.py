"""The canonical grid: what follows from shape and item size, frozen by literal cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.shapes import MODELS
from cas_ckpt.errors import InvalidInputError
from cas_ckpt.objects.digest import LEAF_BYTES
from cas_ckpt.objects.spec import CELL_BYTES, MAX_PIECES, MIN_PIECE_BYTES, MIN_RUN_BYTES, Grid, Spec, grid_for

# Never regenerate: another cell or leaf means that every id of every such tensor changes.
GOLDEN: tuple[tuple[int, tuple[int, ...], tuple[int, ...], int], ...] = (
    (4, (), (), 4),
    (4, (0,), (1,), 4),
    (2, (3, 0, 5), (1, 1, 1), 2),
    (4, (1,), (1,), 4),
    (4, (4096,), (4096,), 16384),
    (4, (10_000_000,), (1048576,), 131072),
    (12, (1_000_000,), (262144,), 98304),
    (4, (768, 768), (768, 384), 98304),
    (4, (3072, 768), (1024, 768), 98304),
    (4, (768, 3072), (768, 384), 98304),
    (4, (50304, 768), (1024, 768), 98304),
    (4, (1600, 1600), (1600, 400), 102400),
    (4, (4096, 4096), (2048, 512), 131072),
    (2, (4096, 4096), (4096, 512), 131072),
    (2, (1024, 4096), (1024, 512), 131072),
    (4, (4096, 14336), (512, 1792), 114688),
    (4, (14336, 4096), (256, 4096), 131072),
    (2, (128256, 8192), (256, 8192), 131072),
    (2, (16384, 53248), (256, 6656), 106496),
    (4, (8, 4096, 14336), (1, 512, 1792), 114688),
    (4, (8, 14336, 4096), (1, 256, 4096), 131072),
    (4, (16, 16384), (16, 8192), 131072),
    (4, (512, 512, 3, 3), (128, 512, 3, 3), 73728),
    (4, (2048, 2048, 3, 3), (32, 2048, 3, 3), 73728),
    (8, (1000, 70000), (32, 8750), 70000),
    (8, (1000, 140000), (16, 17500), 70000),
    (4, (70000, 65537), (8, 65537), 131072),
    (4, (2, 10_000_000), (1, 1048576), 131072),
    (1, (3, 131101), (3, 131101), 131072),
    (4, (64, 1000, 1000), (1, 1000, 500), 128000),
)


def spec_of(shape: tuple[int, ...], item_bytes: int) -> Spec:
    return Spec(f"np:|V{item_bytes}", shape)


def size_near(top: int) -> st.SearchStrategy[int]:
    powers = st.integers(0, top.bit_length() - 1).map(lambda exponent: 1 << exponent)
    return st.integers(1, top) | powers


items = st.sampled_from([1, 2, 4, 8, 16, 3, 12, 100, LEAF_BYTES])
large_shapes = st.one_of(
    st.tuples(size_near(1 << 33)),
    st.tuples(size_near(1 << 18), size_near(1 << 18)),
    st.tuples(size_near(256), size_near(1 << 15), size_near(1 << 15)),
    st.tuples(size_near(4096), size_near(4096), size_near(7), size_near(7)),
)


def is_cut_along_columns(grid: Grid, item_bytes: int) -> bool:
    return grid.cell[-1] < grid.shape[-1] and grid.shape[-1] * item_bytes <= CELL_BYTES and len(grid.shape) > 1


def row_of(grid: Grid, item_bytes: int) -> tuple[int, int]:
    """The dimension along which cells have rows, and the elements of one row of a full cell."""
    axis = next(d for d in range(len(grid.shape)) if math.prod(grid.shape[d + 1 :]) * item_bytes <= CELL_BYTES)
    if is_cut_along_columns(grid, item_bytes):
        axis = len(grid.shape) - 2
    return axis, math.prod(grid.cell[axis + 1 :])


@pytest.mark.parametrize(("item_bytes", "shape", "cell", "leaf_bytes"), GOLDEN)
def test_a_published_grid_never_changes(
    item_bytes: int, shape: tuple[int, ...], cell: tuple[int, ...], leaf_bytes: int
) -> None:
    assert grid_for(spec_of(shape, item_bytes)) == Grid(shape, cell, leaf_bytes)


@given(st.lists(st.integers(0, 40), max_size=4).map(tuple), st.sampled_from([1, 2, 4, 3, 1000, LEAF_BYTES]))
@example((32, 40, 40), LEAF_BYTES)
def test_cells_hold_every_element_exactly_once(shape: tuple[int, ...], item_bytes: int) -> None:
    grid = grid_for(spec_of(shape, item_bytes))
    if grid.num_cells > 4000:
        return
    seen = np.zeros(shape, np.int8)
    for index in range(grid.num_cells):
        seen[grid.box(index).slices] += 1
    assert (seen == 1).all()


@given(large_shapes, items)
def test_cells_and_leaves_keep_their_bounds(shape: tuple[int, ...], item_bytes: int) -> None:
    grid = grid_for(spec_of(shape, item_bytes))
    cell_bytes = math.prod(grid.cell) * item_bytes
    assert cell_bytes <= CELL_BYTES
    assert 0 < grid.leaf_bytes <= min(LEAF_BYTES, cell_bytes)
    assert grid.leaf_bytes % item_bytes == 0
    assert all(1 <= step <= size for step, size in zip(grid.cell, shape, strict=True))


@given(large_shapes, items)
def test_only_one_dimension_has_clipped_cells(shape: tuple[int, ...], item_bytes: int) -> None:
    grid = grid_for(spec_of(shape, item_bytes))
    assert sum(size % step != 0 for size, step in zip(shape, grid.cell, strict=True)) <= 1


@given(large_shapes, items)
def test_a_leaf_is_whole_rows_or_an_equal_share_of_one(shape: tuple[int, ...], item_bytes: int) -> None:
    grid = grid_for(spec_of(shape, item_bytes))
    _, row_items = row_of(grid, item_bytes)
    row_bytes = row_items * item_bytes
    if row_bytes <= LEAF_BYTES:
        assert grid.leaf_bytes % row_bytes == 0
        assert grid.leaf_bytes * 2 > min(LEAF_BYTES, math.prod(grid.cell) * item_bytes)
    else:
        shares = range(1, 4 * -(-row_bytes // LEAF_BYTES) + 1)
        equal = [n for n in shares if row_items % n == 0 and row_bytes // n <= LEAF_BYTES]
        full = LEAF_BYTES // item_bytes * item_bytes
        assert grid.leaf_bytes == (row_bytes // equal[0] if equal else full)


@given(large_shapes, items)
def test_a_cell_has_all_rows_or_fills_more_than_half_of_the_bound(shape: tuple[int, ...], item_bytes: int) -> None:
    grid = grid_for(spec_of(shape, item_bytes))
    axis, row_items = row_of(grid, item_bytes)
    rows = grid.cell[axis]
    if rows < shape[axis]:
        assert rows & (rows - 1) == 0
        assert 2 * rows * row_items * item_bytes > CELL_BYTES


def test_some_wide_matrices_are_cut_along_columns() -> None:
    matrices = [(shape, size) for size, shape, _, _ in GOLDEN if len(shape) > 1]
    assert sum(is_cut_along_columns(grid_for(spec_of(shape, size)), size) for shape, size in matrices) > 5


@given(large_shapes, items)
def test_columns_are_cut_only_in_wide_matrices_and_never_into_short_runs(
    shape: tuple[int, ...], item_bytes: int
) -> None:
    grid = grid_for(spec_of(shape, item_bytes))
    if not is_cut_along_columns(grid, item_bytes):
        return
    pieces, rest = divmod(shape[-1], grid.cell[-1])
    assert rest == 0
    assert shape[-1] >= shape[-2]
    assert pieces in (2, 4, MAX_PIECES)
    assert grid.cell[-1] * item_bytes >= MIN_RUN_BYTES
    assert grid.cell[-1] * shape[-2] * item_bytes >= MIN_PIECE_BYTES


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", [name for name in MODELS if name.startswith(("llama3", "mixtral"))])
def test_tensor_parallel_cuts_of_real_models_fall_on_cell_edges(model: str, dtype: str) -> None:
    by_columns = [w for w in MODELS[model] if len(w.shape) > 1 and w.tp_dim == len(w.shape) - 1]
    assert by_columns
    for weight in by_columns:
        grid = grid_for(Spec(dtype, weight.shape))
        assert weight.shape[-1] // 8 % grid.cell[-1] == 0, weight.name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_tall_matrices_are_cut_by_rows_alone(model: str, dtype: str) -> None:
    tall = [weight for weight in MODELS[model] if len(weight.shape) > 1 and weight.shape[-1] < weight.shape[-2]]
    assert tall
    for weight in tall:
        assert grid_for(Spec(dtype, weight.shape)).cell[-1] == weight.shape[-1], weight.name


@pytest.mark.parametrize(
    ("one", "other"),
    [("float32", "int32"), ("bfloat16", "float16"), ("float64", "complex64"), ("bool", "float8_e4m3fn")],
)
def test_the_grid_follows_from_shape_and_item_size_alone(one: str, other: str) -> None:
    for _, shape, _, _ in GOLDEN:
        assert grid_for(Spec(one, shape)) == grid_for(Spec(other, shape))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4096, 4096)])
def test_an_empty_tensor_has_no_cells(shape: tuple[int, ...]) -> None:
    assert grid_for(Spec("float32", shape)).num_cells == 0


def test_a_scalar_is_one_cell() -> None:
    grid = grid_for(Spec("float64", ()))
    assert (grid.num_cells, grid.leaf_bytes, grid.box(0).num_elements) == (1, 8, 1)


@pytest.mark.parametrize(
    ("dtype", "shape"), [("np:|V131073", (2,)), ("np:|V0", (2,)), ("float32", (-1, 4)), ("np:|S131073", (0,))]
)
def test_what_cannot_be_cut_is_refused(dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInputError):
        grid_for(Spec(dtype, shape))
