"""The simulation that chose the grid counts what it claims: compared with owners element by element."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.grid import RULES, Cells, Score, cells_of, score
from benchmarks.shapes import MODELS, Mesh, Weight, cuts

positions = st.sets(st.integers(1, 11), max_size=4).map(lambda found: tuple(sorted(found)))


def owners(shape: tuple[int, int], row_cuts: tuple[int, ...], column_cuts: tuple[int, ...]) -> np.ndarray:
    rows = np.searchsorted(row_cuts, np.arange(shape[0]), "right")
    columns = np.searchsorted(column_cuts, np.arange(shape[1]), "right")
    return rows[:, None] * 100 + columns[None, :]


def count(cells: Cells, row_cuts: tuple[int, ...], column_cuts: tuple[int, ...]) -> Score:
    owner = owners(cells.shape, row_cuts, column_cuts)
    straddled = held = num_cells = extents = 0
    for top in range(0, cells.shape[0], cells.rows):
        for left in range(0, cells.shape[1], cells.columns):
            cell = owner[top : top + cells.rows, left : left + cells.columns].ravel()
            num_cells, extents = num_cells + 1, extents + len(set(cell))
            for leaf in (cell[at : at + cells.leaf] for at in range(0, cell.size, cells.leaf)):
                held += leaf.size * len(set(leaf))
                straddled += leaf.size * (len(set(leaf)) > 1)
    return Score(straddled, held, num_cells, extents)


@st.composite
def cell_cuts(draw: st.DrawFn) -> Cells:
    """Cells whose leaves are whole rows or equal shares of a row, as in every rule."""
    rows, columns, share = draw(st.integers(1, 12)), draw(st.integers(1, 12)), draw(st.integers(1, 4))
    leaf = columns * draw(st.integers(1, rows)) if share == 1 or columns % share else columns // share
    width = columns * draw(st.integers(1, 12 // columns))
    return Cells((12, width), rows, columns, leaf)


@given(cell_cuts(), positions, positions)
def test_scores_agree_with_counting_elements(cells: Cells, rows: tuple[int, ...], columns: tuple[int, ...]) -> None:
    inside = tuple(cut for cut in columns if cut < cells.shape[1])
    assert score(cells, rows, inside) == count(cells, rows, inside)


def test_cuts_follow_the_uneven_chunks_of_dtensor() -> None:
    assert cuts(Weight("w", (10, 4)), Mesh(fsdp=4)) == ((3, 6, 9), ())
    assert cuts(Weight("w", (10, 8), tp_dim=1), Mesh(fsdp=2, tp=4)) == ((5,), (2, 4, 6))
    assert cuts(Weight("w", (10, 8), tp_dim=0), Mesh(fsdp=2, tp=3)) == ((2, 4, 6, 8, 9), ())


def test_experts_go_to_expert_ranks_whole() -> None:
    assert cuts(Weight("w", (2, 8, 4), expert="stacked"), Mesh(ep=2)) == ((1,), (), ())
    assert cuts(Weight("w", (2, 8, 4), expert="stacked"), Mesh(ep=2, fsdp=2)) == ((1,), (4,), ())
    assert cuts(Weight("w", (8, 4), expert="single"), Mesh(ep=2)) == ((), ())
    assert cuts(Weight("w", (8, 4)), Mesh(ep=2)) == ((4,), ())


def test_the_rule_named_in_the_tables_is_the_one_in_the_product() -> None:
    chosen, simulated = RULES[-1], next(rule for rule in RULES if rule.name == "wide or square, runs >= 1 KiB")
    for weight in (weight for weights in MODELS.values() for weight in weights):
        for item_bytes in (2, 4):
            assert cells_of(chosen, weight.shape, item_bytes) == cells_of(simulated, weight.shape, item_bytes)
