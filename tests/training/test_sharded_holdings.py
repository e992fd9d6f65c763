"""Holdings follow torch element by element: its split methods, its offsets, its DTensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from cas_ckpt.layout.holdings import held_by
from cas_ckpt.objects.spec import Mesh, MeshPlacement, Split
from tests.searches import tries
from tests.training.fake_world import fake_world
from tests.training.shards import CUTS_STRIDES

pytestmark = CUTS_STRIDES

Shape = tuple[int, ...]


def torch_placement(split: Split) -> Shard | Replicate | _StridedShard:
    if split.dim is None:
        return Replicate()
    return Shard(split.dim) if split.stride == 1 else _StridedShard(split.dim, split_factor=split.stride)


def numbered(shape: Shape) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


def by_torch(shape: Shape, splits: tuple[Split, ...], mesh_shape: Shape, place: Shape) -> torch.Tensor:
    """The local tensor at a place of the mesh, cut by torch's own placements."""
    local = numbered(shape)
    for split, parts, at in zip(splits, mesh_shape, place, strict=True):
        placement = torch_placement(split)
        if not isinstance(placement, Replicate):
            local = placement._split_tensor(local, parts, with_padding=False)[0][at]
    return local


def by_holdings(shape: Shape, placement: MeshPlacement, rank: int, like: torch.Tensor) -> torch.Tensor:
    """The local tensor put together from its pieces; -1 where no piece lies."""
    local = torch.full_like(like, -1)
    for box, offsets in held_by(rank, shape, placement):
        inside = tuple(slice(at, at + size) for at, size in zip(offsets, box.sizes, strict=True))
        assert local[inside].shape == box.sizes
        local[(*inside, ...)] = numbered(shape)[box.slices]
    return local


def agree(shape: Shape, mesh_shape: Shape, splits: tuple[Split, ...]) -> None:
    """At every place: content, local shape and first offset are those of torch."""
    size = math.prod(mesh_shape)
    placement = MeshPlacement(Mesh(("",) * len(mesh_shape), mesh_shape, tuple(range(size))), splits)
    for rank, place in enumerate(itertools.product(*map(range, mesh_shape))):
        wanted = by_torch(shape, splits, mesh_shape, place)
        assert torch.equal(by_holdings(shape, placement, rank, wanted), wanted), (shape, mesh_shape, splits, rank)
        told, offset = _compute_local_shape_and_global_offset(
            shape, mesh_shape, list(place), [torch_placement(split) for split in splits]
        )
        assert told == tuple(wanted.shape)
        held = held_by(rank, shape, placement)
        assert bool(held) == bool(wanted.numel())
        if held:
            assert held[0][0].offsets == offset


def small_cases() -> Iterator[tuple[Shape, Shape, tuple[Split, ...]]]:
    """Every length up to 11 over one and two mesh dimensions, with every stride up to 3."""
    for length, parts, stride in itertools.product(range(12), range(1, 5), range(1, 5)):
        yield (length,), (parts,), (Split(0, stride),)
    for length, a, b in itertools.product(range(11), (2, 3), (1, 2, 3)):
        for first, second in itertools.product((1, 2, 3), repeat=2):
            yield (length,), (a, b), (Split(0, first), Split(0, second))


def test_every_small_division_of_one_dimension_is_that_of_torch() -> None:
    for case in small_cases():
        agree(*case)


@st.composite
def divisions(draw: st.DrawFn) -> tuple[Shape, Shape, tuple[Split, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.sampled_from([None, *range(len(shape))])
    return shape, mesh_shape, tuple(Split(draw(dims), draw(st.integers(1, 3))) for _ in mesh_shape)


@given(divisions())
@settings(max_examples=tries(45, 150), deadline=None)
def test_any_division_is_that_of_torch(case: tuple[Shape, Shape, tuple[Split, ...]]) -> None:
    shape, mesh_shape, splits = case
    agree(shape, mesh_shape, splits)


@pytest.mark.parametrize(
    ("shape", "splits"),
    [
        ((7, 3), (Split(0), Split(1))),
        ((5, 3), (Split(0), Split(0))),
        ((9, 2), (Split(0, 2), Split(0))),
        ((1, 3), (Split(1), Split())),
        ((4,), (Split(), Split(0))),
        ((), (Split(), Split())),
        ((0, 3), (Split(0), Split(1))),
    ],
    ids=str,
)
def test_dtensors_themselves_hold_what_holdings_say(shape: Shape, splits: tuple[Split, ...]) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    placement = MeshPlacement(Mesh(("", ""), (3, 2), tuple(range(6))), splits)
    for rank in range(6):
        with fake_world(rank, 6):
            mesh = init_device_mesh("cpu", (3, 2))
            whole = numbered(shape)
            tensor: DTensor = distribute_tensor(whole, mesh, list(map(torch_placement, splits)), src_data_rank=None)
            local = tensor.to_local()
            assert torch.equal(by_holdings(shape, placement, rank, local), local)
