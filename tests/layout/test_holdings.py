"""Which elements each rank holds: shards tile the tensor, pieces tile the local tensor."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.layout.holdings import Shard, held_by, holdings, whole
from cas_ckpt.objects.spec import Box, BoxPlacement, Mesh, MeshPlacement, Split, parse_split
from tests.searches import tries


def mesh_of(*shape: int, first: int = 0) -> Mesh:
    return Mesh(("",) * len(shape), shape, tuple(range(first, first + math.prod(shape))))


@st.composite
def divided(draw: st.DrawFn) -> tuple[tuple[int, ...], MeshPlacement]:
    """A shape and a placement over a mesh whose ranks stand in any order."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    ranks = tuple(draw(st.permutations(range(math.prod(mesh_shape)))))
    dims = st.sampled_from([None, *range(len(shape))])
    splits = tuple(Split(draw(dims), draw(st.integers(1, 4))) for _ in mesh_shape)
    return shape, MeshPlacement(Mesh(("",) * len(mesh_shape), mesh_shape, ranks), splits)


def local_shape(shard: Shard) -> tuple[int, ...]:
    ends = [[at + n for at, n in zip(o, b.sizes, strict=True)] for o, b in zip(shard.local, shard.pieces, strict=True)]
    return tuple(map(max, zip(*ends, strict=True)))


def filled_once(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """Whether the boxes cover every element of `shape` exactly once."""
    count = np.zeros(shape, int)
    for box in boxes:
        assert box.num_elements
        count[box.slices] += 1
    return bool((count == 1).all())


@given(divided())
@settings(max_examples=tries(80, 300), deadline=None)
def test_every_element_is_in_exactly_one_distinct_shard(case: tuple[tuple[int, ...], MeshPlacement]) -> None:
    shape, placement = case
    shards = holdings(shape, [placement])
    assert filled_once(shape, [piece for shard in shards for piece in shard.pieces])


@given(divided())
@settings(max_examples=tries(80, 300), deadline=None)
def test_the_pieces_of_a_shard_fill_its_local_tensor_in_order(case: tuple[tuple[int, ...], MeshPlacement]) -> None:
    shape, placement = case
    for shard in holdings(shape, [placement]):
        inside = [Box(at, piece.sizes) for at, piece in zip(shard.local, shard.pieces, strict=True)]
        assert filled_once(local_shape(shard), inside)
        assert list(shard.local) == sorted(shard.local)
        assert list(shard.pieces) == sorted(shard.pieces, key=lambda piece: piece.offsets)


@given(divided())
@settings(max_examples=tries(80, 300), deadline=None)
def test_replicas_are_named_and_a_rank_holds_one_shard_at_most(case: tuple[tuple[int, ...], MeshPlacement]) -> None:
    shape, placement = case
    shards = holdings(shape, [placement])
    copies = math.prod(n for n, split in zip(placement.mesh.shape, placement.splits, strict=True) if split.dim is None)
    assert all(len(shard.ranks) == copies and list(shard.ranks) == sorted(shard.ranks) for shard in shards)
    holders = list(itertools.chain.from_iterable(shard.ranks for shard in shards))
    assert len(holders) == len(set(holders))
    assert set(holders) <= set(placement.mesh.ranks)


@given(divided())
@settings(max_examples=tries(80, 300), deadline=None)
def test_what_one_rank_holds_is_found_without_looking_at_the_others(
    case: tuple[tuple[int, ...], MeshPlacement],
) -> None:
    shape, placement = case
    by_rank = {rank: shard for shard in holdings(shape, [placement]) for rank in shard.ranks}
    for rank in (*placement.mesh.ranks, 1000):
        shard = by_rank.get(rank)
        wanted = () if shard is None else tuple(zip(shard.pieces, shard.local, strict=True))
        assert held_by(rank, shape, placement) == wanted


def test_consecutive_parts_are_as_torch_chunk_cuts_them_and_the_last_may_be_empty() -> None:
    shards = holdings((5, 2), [MeshPlacement(mesh_of(4), (Split(0),))])
    assert [(s.pieces[0].offsets[0], s.pieces[0].sizes[0], s.ranks) for s in shards] == [
        (0, 2, (0,)),
        (2, 2, (1,)),
        (4, 1, (2,)),
    ]


def test_a_strided_shard_holds_a_part_of_every_portion() -> None:
    shards = holdings((9,), [MeshPlacement(mesh_of(4), (Split(0, 2),))])
    elements = [[e for box in s.pieces for e in range(box.offsets[0], box.offsets[0] + box.sizes[0])] for s in shards]
    assert elements == [[0, 1, 5], [2, 3, 6], [4, 7], [8]]  # the example in torch's own source
    assert shards[0].local == ((0,), (2,))


def test_strided_then_plain_over_one_dimension_is_one_piece_again() -> None:
    placement = MeshPlacement(mesh_of(2, 2), (Split(0, 2), Split(0)))
    shards = {shard.ranks: shard.pieces for shard in holdings((8, 8), [placement])}
    rows = {ranks: [(box.offsets[0], box.sizes[0]) for box in pieces] for ranks, pieces in shards.items()}
    assert rows == {(0,): [(0, 2)], (1,): [(4, 2)], (2,): [(2, 2)], (3,): [(6, 2)]}


def test_adjacent_portions_are_one_piece() -> None:
    (shard,) = holdings((8,), [MeshPlacement(mesh_of(1), (Split(0, 4),))])
    assert shard.pieces == (Box((0,), (8,)),)


def test_one_tensor_described_over_several_meshes_unites_equal_shards() -> None:
    first = MeshPlacement(mesh_of(2), (Split(0),))
    second = MeshPlacement(mesh_of(2, first=2), (Split(0),))
    assert [shard.ranks for shard in holdings((4,), [first, second])] == [(0, 2), (1, 3)]


def test_boxes_are_taken_as_they_are_and_united_over_ranks() -> None:
    a, b, none = Box((0, 0), (2, 4)), Box((2, 0), (1, 4)), Box((3, 0), (0, 4))
    mine = BoxPlacement(((a, (0,)), (b, (0,)), (none, (0,))))
    yours = BoxPlacement(((a, (1,)),))
    shards = holdings((3, 4), [mine, yours])
    assert shards == (Shard((a,), ((0, 0),), (0, 1)), Shard((b,), ((0, 0),), (0,)))
    assert held_by(0, (3, 4), mine) == ((a, (0, 0)), (b, (0, 0)))
    assert held_by(1, (3, 4), mine) == ()


def test_scalars_are_one_element_and_empty_tensors_none() -> None:
    everywhere = MeshPlacement(mesh_of(2, 2), (Split(), Split()))
    assert holdings((), [everywhere]) == (Shard((Box((), ()),), ((),), (0, 1, 2, 3)),)
    assert holdings((3, 0), [everywhere]) == ()
    assert whole((), [1, 0]) == (Shard((Box((), ()),), ((),), (0, 1)),)
    assert whole((0,), [0]) == ()


def test_a_thousand_ranks_cost_what_their_distinct_shards_cost() -> None:
    shards = holdings((8192, 64), [MeshPlacement(mesh_of(16, 64), (Split(), Split(0)))])
    assert len(shards) == 64
    assert all(len(shard.ranks) == 16 for shard in shards)


@pytest.mark.parametrize("splits", [(Split(2),), (Split(-1),), (Split(0, 0),), (), (Split(), Split(0))], ids=str)
def test_a_placement_that_does_not_fit_is_refused(splits: tuple[Split, ...]) -> None:
    placement = MeshPlacement(mesh_of(2), splits)
    with pytest.raises(InvalidInputError, match=r"do not fit a tensor of shape \(4, 4\)"):
        holdings((4, 4), [placement])
    with pytest.raises(InvalidInputError, match="do not fit"):
        held_by(0, (4, 4), placement)


@pytest.mark.parametrize("split", [Split(), Split(3), Split(0, 8)], ids=str)
def test_a_split_is_read_as_it_was_written(split: Split) -> None:
    assert parse_split(str(split)) == split


def test_a_mesh_whose_ranks_do_not_fit_is_refused() -> None:
    for names, shape, ranks in [(("a",), (2,), (0, 0)), ((), (2,), (0, 1)), (("a",), (3,), (0, 1))]:
        with pytest.raises(InvalidInputError, match="does not fit"):
            Mesh(names, shape, ranks)
