"""The regions that ranks held are what a look at every element and every rank finds."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings

from cas_ckpt.errors import InvalidInputError, TooLargeError
from cas_ckpt.layout.holdings import held_by
from cas_ckpt.memory import limits
from cas_ckpt.objects.layouts import Division, RankSet
from cas_ckpt.objects.spec import Box, BoxPlacement, Grid
from cas_ckpt.ops.history.shards import HeldRegion, held_regions, most_pieces
from tests.divided import mesh, over
from tests.objects.divisions import SHAPE, WORLD, divisions
from tests.searches import tries

GRID = Grid(SHAPE, (5, 3), 4)


def pieces_of(division: Division) -> list[tuple[int, Box]]:
    """(rank, box) of all that every rank holds, rank by rank."""
    found = {(rank, Box((0,) * len(SHAPE), SHAPE)) for rank in division.everywhere}
    for placement in division.placements:
        found |= {(rank, box) for rank in range(WORLD) for box, _ in held_by(rank, SHAPE, placement)}
    return sorted(found, key=lambda pair: (pair[1].offsets, pair[1].sizes, pair[0]))


def parts_in_cells(division: Division) -> dict[int, dict[int, set[Box]]]:
    """Cell -> rank -> what it holds of the cell, by looking at every cell for every rank."""
    found: dict[int, dict[int, set[Box]]] = defaultdict(lambda: defaultdict(set))
    for rank, piece in pieces_of(division):
        for cell in range(GRID.num_cells):
            common = GRID.box(cell).intersect(piece)
            if common is not None:
                found[cell][rank].add(common)
    return found


@given(divisions)
@settings(max_examples=tries(45, 150), deadline=None)
def test_every_rank_holds_what_its_placement_says_and_no_more(division: Division) -> None:
    regions = held_regions(SHAPE, GRID, division)
    held = sorted(
        ((rank, region.box) for region in regions for rank in region.ranks),
        key=lambda pair: (pair[1].offsets, pair[1].sizes, pair[0]),
    )
    assert list(dict.fromkeys(held)) == pieces_of(division)
    assert regions == sorted(regions, key=lambda region: (region.box.offsets, region.box.sizes, region.ranks.spans))


@given(divisions)
@settings(max_examples=tries(45, 150), deadline=None)
def test_who_shared_a_chunk_is_found_as_by_looking_at_every_chunk_and_rank(division: Division) -> None:
    cells = parts_in_cells(division)
    for region in held_regions(SHAPE, GRID, division):
        touched = [cell for cell in range(GRID.num_cells) if GRID.box(cell).intersect(region.box) is not None]
        assert region.num_chunks == len(touched)
        others = {
            rank
            for cell in touched
            for rank, parts in cells[cell].items()
            if parts - {GRID.box(cell).intersect(region.box)}
        }
        assert set(region.shared_with) == others - set(region.ranks)


def test_rows_over_ranks_share_the_chunks_at_their_borders() -> None:
    assert held_regions((10, 4), Grid((10, 4), (4, 4), 16), Division((over(mesh(3), "S(0)"),))) == [
        HeldRegion(Box((0, 0), (4, 4)), RankSet.of([0]), 1, RankSet()),
        HeldRegion(Box((4, 0), (4, 4)), RankSet.of([1]), 1, RankSet()),
        HeldRegion(Box((8, 0), (2, 4)), RankSet.of([2]), 1, RankSet()),
    ]
    two = held_regions((10, 4), Grid((10, 4), (4, 4), 16), Division((over(mesh(2, 2), "R", "S(0)"),)))
    assert [(str(region.ranks), region.num_chunks, str(region.shared_with)) for region in two] == [
        ("0,2", 2, "1,3"), ("1,3", 2, "0,2"),
    ]  # fmt: skip


def test_a_rank_with_the_whole_tensor_shares_those_chunks_alone_that_others_have_in_part() -> None:
    division = Division((over(mesh(2), "S(0)"),), (7,))
    regions = held_regions((12,), Grid((12,), (4,), 4), division)
    assert [(region.box.sizes, str(region.ranks), str(region.shared_with)) for region in regions] == [
        ((6,), "0", "1,7"), ((12,), "7", "0-1"), ((6,), "1", "0,7"),
    ]  # fmt: skip
    assert not any(region.shared_with for region in held_regions((12,), Grid((12,), (6,), 4), division))


def test_a_tensor_that_is_not_in_chunks_shares_none_and_an_empty_one_is_held_by_all_who_have_it() -> None:
    division = Division((over(mesh(4), "S(0)"),), (5,))
    assert {(region.num_chunks, len(region.shared_with)) for region in held_regions((8, 2), None, division)} == {(0, 0)}
    assert held_regions((0, 2), None, division) == [
        HeldRegion(Box((0, 0), (0, 2)), RankSet.of([0, 1, 2, 3, 5]), 0, RankSet())
    ]


def test_a_thousand_ranks_in_one_chunk_are_a_thousand_regions_and_few_spans() -> None:
    regions = held_regions((4096,), Grid((4096,), (4096,), 65536), Division((over(mesh(1024), "S(0)"),)))
    assert len(regions) == 1024
    assert {len(region.shared_with) for region in regions} == {1023}
    assert max(len(region.shared_with.spans) for region in regions) == 2


@pytest.mark.parametrize(
    "box", [Box((0, 0), (13, 1)), Box((12, 0), (1, 1)), Box((0,), (2,)), Box((0, 1 << 62), (1, 1))]
)
def test_a_box_outside_of_the_tensor_is_refused(box: Box) -> None:
    with pytest.raises(InvalidInputError, match="does not lie inside"):
        held_regions(SHAPE, GRID, Division((BoxPlacement(((box, (0,)),)),)))


def test_what_a_division_unfolds_into_is_counted_before_it_is_made() -> None:
    strided = Division((over(mesh(4), "SS(0,999999999)"),))
    with pytest.raises(TooLargeError):
        held_regions((1 << 40,), Grid((1 << 40,), (1 << 22,), 65536), strided)
    everything = held_regions((12,), Grid((12,), (12,), 4), strided)  # rank 0 has the first of one element each
    assert [(region.box, str(region.ranks)) for region in everything] == [(Box((0,), (12,)), "0")]
    with limits(max_entries=10), pytest.raises(TooLargeError):
        held_regions((1 << 40,), Grid((1 << 40,), (1 << 22,), 65536), Division((over(mesh(4), "S(0)"),)))


@given(divisions)
@settings(max_examples=tries(30, 100), deadline=None)
def test_no_division_has_more_pieces_than_were_counted(division: Division) -> None:
    assert len(held_regions(SHAPE, GRID, division)) <= most_pieces(SHAPE, division)
