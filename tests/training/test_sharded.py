"""DTensors and ShardedTensors as items: what they say of all ranks, and the bits of this one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from cas_ckpt.errors import InternalError, UnsupportedValueError
from cas_ckpt.layout.holdings import held_by, holdings
from cas_ckpt.objects.spec import Box, Mesh, MeshPlacement, Spec, Split
from cas_ckpt.training.capture import sharded
from cas_ckpt.training.capture.capture import capture_state
from cas_ckpt.training.capture.tensors import TORCH_DTYPES, host_bits
from tests.training.fake_world import fake_world
from tests.training.shards import CUTS_STRIDES, captured, divide, mesh_of, placement_of, reads_as, some

RANK = 2


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    """Rank 2 of 8; the process group is gone after every test."""
    with fake_world(RANK, 8):
        yield


DTYPES = ("bool", "uint8", "int8", "int16", "uint16", "int32", "uint64", "int64", "float16", "bfloat16", "float32")
MORE_DTYPES = ("float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")


@pytest.mark.parametrize("name", [*DTYPES, *MORE_DTYPES])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_is_read_bit_by_bit_through_global_boxes(name: str) -> None:
    dtype = TORCH_DTYPES[name]
    local = some(dtype, 2, 5)
    tensor = DTensor.from_local(local, mesh_of(8), [Shard(0)])
    item = captured(tensor)
    assert item.spec == Spec(name, (16, 5))
    assert item.source.read(Box((4, 0), (2, 5))).tobytes() == host_bits(local).tobytes()
    assert item.source.read(Box((5, 1), (1, 3))).tobytes() == host_bits(local[1:2, 1:4].contiguous()).tobytes()


@pytest.mark.parametrize(
    "placements",
    [
        (Replicate(), Replicate(), Replicate()),
        (Shard(0), Shard(1), Replicate()),
        (Shard(0), Shard(0), Shard(0)),
        (Shard(-1), Replicate(), Shard(-2)),
        pytest.param((_StridedShard(0, split_factor=2), Shard(0), Shard(1)), marks=CUTS_STRIDES),
        pytest.param((Replicate(), _StridedShard(0, split_factor=3), Shard(1)), marks=CUTS_STRIDES),
        pytest.param((_StridedShard(0, split_factor=4), Shard(0), Shard(0)), marks=CUTS_STRIDES),
    ],
    ids=str,
)
def test_a_dtensor_reads_as_the_tensor_it_was_cut_from(placements: tuple[Any, ...]) -> None:
    whole = some(torch.bfloat16, 7, 5)
    tensor = divide(whole, mesh_of(2, 2, 2), *placements)
    item = captured(tensor)
    assert item.placement is not None
    assert item.spec == Spec("bfloat16", (7, 5))
    assert reads_as(item, whole, RANK)
    held = sum(box.num_elements for box, _ in held_by(RANK, (7, 5), item.placement))
    assert held == tensor.to_local().numel()


def test_splits_are_told_by_mesh_dimension_with_dims_from_the_front() -> None:
    tensor = divide(torch.ones(4, 6), mesh_of(2, 2, 2, names=("pp", "dp", "tp")), Replicate(), Shard(-1), Shard(0))
    mesh = Mesh(("pp", "dp", "tp"), (2, 2, 2), tuple(range(8)))
    assert placement_of(tensor) == MeshPlacement(mesh, (Split(), Split(1), Split(0)))


def test_dims_that_torch_left_negative_count_from_the_back() -> None:
    tensor = divide(torch.ones(4, 16), mesh_of(8), Shard(1))
    tensor._spec.placements = (Shard(-1),)
    assert placement_of(tensor).splits == (Split(1),)


def test_strided_shards_keep_their_factor_and_a_factor_of_one_is_plain() -> None:
    tensor = divide(torch.ones(8, 2), mesh_of(4, 2), _StridedShard(0, split_factor=2), Shard(0))
    assert placement_of(tensor).splits == (Split(0, 2), Split(0))
    plain = divide(torch.ones(8, 2), mesh_of(4, 2), _StridedShard(0, split_factor=1), Replicate())
    assert placement_of(plain).splits == (Split(0), Split())


def test_ranks_of_sliced_and_flattened_meshes_are_those_of_the_world() -> None:
    mesh = mesh_of(2, 2, 2, names=("pp", "dp", "tp"))
    assert placement_of(divide(torch.ones(4), mesh["dp"], Shard(0))).mesh == Mesh(("dp",), (2,), (0, 2))
    both = placement_of(divide(torch.ones(4, 4), mesh["pp", "dp"], Shard(0), Shard(1)))
    assert both.mesh == Mesh(("pp", "dp"), (2, 2), (0, 2, 4, 6))
    flat = mesh["pp", "dp"]._flatten("all")
    assert placement_of(divide(torch.ones(4), flat, Shard(0))).mesh == Mesh(("all",), (4,), (0, 2, 4, 6))


def test_a_mesh_in_any_order_of_ranks_gives_each_rank_its_place() -> None:
    whole = some(torch.float32, 8)
    tensor = divide(whole, DeviceMesh("cpu", torch.tensor([7, 2, 0, 5])), Shard(0))
    item = captured(tensor)
    assert item.placement == MeshPlacement(Mesh(("",), (4,), (7, 2, 0, 5)), (Split(0),))
    assert item.source.read(Box((2,), (2,))).tobytes() == host_bits(whole[2:4]).tobytes()


def test_a_rank_outside_the_mesh_describes_the_whole_and_holds_nothing() -> None:
    tensor = divide(torch.ones(4, 6, dtype=torch.bfloat16), DeviceMesh("cpu", torch.tensor([4, 1])), Shard(0))
    item = captured(tensor)
    assert item.spec == Spec("bfloat16", (4, 6))
    assert item.placement == MeshPlacement(Mesh(("",), (2,), (4, 1)), (Split(0),))
    with pytest.raises(InternalError, match="does not lie inside one piece"):
        item.source.read(Box((0, 0), (2, 6)))


def test_uneven_and_empty_local_shards_are_what_torch_makes_of_them() -> None:
    assert reads_as(
        captured(divide(whole := some(torch.int32, 9, 2), mesh_of(4, 2), Shard(0), Replicate())), whole, RANK
    )
    empty = divide(torch.ones(2, 3), mesh_of(8), Shard(0))
    assert empty.to_local().shape == (0, 3)
    assert [shard.ranks for shard in holdings((2, 3), [placement_of(empty)])] == [(0,), (1,)]
    assert captured(empty).source.read(Box((0, 0), (0, 3))).shape == (0, 3)


def test_a_scalar_is_whole_everywhere() -> None:
    item = captured(divide(torch.tensor(3.5), mesh_of(8), Replicate()))
    assert item.spec == Spec("float32", ())
    assert item.source.read(Box((), ())).view("f4") == 3.5


def test_an_empty_tensor_has_a_placement_and_nothing_to_read() -> None:
    item = captured(divide(torch.ones(0, 3), mesh_of(8), Shard(0)))
    assert item.spec == Spec("float32", (0, 3))
    assert item.source.read(item.spec.box).shape == (0, 3)


@CUTS_STRIDES
def test_a_box_that_spans_two_pieces_of_a_strided_shard_is_an_error_not_a_guess() -> None:
    item = captured(divide(some(torch.int16, 16), mesh_of(4, 2), _StridedShard(0, split_factor=2), Replicate()))
    assert item.source.read(Box((2,), (2,))).shape == (2,)
    with pytest.raises(InternalError, match="does not lie inside one piece"):
        item.source.read(Box((2,), (9,)))


def test_local_tensors_may_be_views_of_any_strides_and_are_not_copied() -> None:
    base = some(torch.float32, 6, 8)
    local = base.t()[1:5, ::2]
    item = captured(DTensor.from_local(local, mesh_of(8), [Shard(0)], run_check=False))
    read = item.source.read(Box((8, 0), (4, 3)))
    assert read.tobytes() == host_bits(local.contiguous()).tobytes()
    assert np.shares_memory(read, base.numpy())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_local_tensors_on_a_device_are_read_through_copies() -> None:
    whole = some(torch.bfloat16, 9, 5)
    mesh = init_device_mesh("cuda", (4, 2))
    tensor = divide(whole.cuda(), mesh, _StridedShard(0, split_factor=2), Replicate())
    assert tensor.to_local().is_cuda
    assert reads_as(captured(tensor), whole, RANK)


def test_conjugated_dtensors_are_read_as_their_values() -> None:
    local = some(torch.float32, 2, 6).view(torch.complex64)
    item = captured(DTensor.from_local(local, mesh_of(8), [Shard(0)]).conj())
    assert item.source.read(Box((4, 0), (2, 3))).tobytes() == host_bits(local.conj().resolve_conj()).tobytes()


def test_gradients_and_parameters_make_no_difference() -> None:
    whole = some(torch.int32, 8, 2).float()
    parameter = torch.nn.Parameter(divide(whole, mesh_of(8), Shard(0)))
    assert reads_as(captured(parameter), whole, RANK)
    assert reads_as(captured(parameter * 1), whole, RANK)


def test_a_partial_dtensor_is_refused_by_key() -> None:
    tensor = DTensor.from_local(torch.ones(3), mesh_of(8), [Partial()])
    with pytest.raises(UnsupportedValueError, match=r"^a/x: .*placement P.*redistribute"):
        capture_state({"a": {"x": tensor}})


@pytest.mark.parametrize("rows", [16, 18])
def test_strided_shards_are_refused_where_an_older_torch_cuts_them_in_another_way(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded, "_CUTS_STRIDES", False)
    strided = divide(torch.ones(rows), mesh_of(4, 2), _StridedShard(0, split_factor=2), Shard(0))
    if rows % 8 == 0:
        assert captured(strided).placement is not None
    else:
        with pytest.raises(UnsupportedValueError, match=r"^x: torch before 2\.10 .*a multiple of 8"):
            captured(strided)


def test_a_placement_that_is_not_known_is_refused_by_key() -> None:
    class Ragged(Shard):
        """Cuts in some way of its own."""

    tensor = divide(torch.ones(8), mesh_of(8), Shard(0))
    tensor._spec.placements = (Ragged(0),)
    with pytest.raises(UnsupportedValueError, match="^x: .*only Shard, Replicate and _StridedShard"):
        captured(tensor)


@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_a_local_tensor_that_is_not_what_its_placement_says_is_refused(num_rows: int) -> None:
    shape, stride = torch.Size((16, 4)), (4, 1)
    tensor = DTensor.from_local(torch.ones(num_rows, 4), mesh_of(8), [Shard(0)], shape=shape, stride=stride)
    with pytest.raises(UnsupportedValueError, match=r"^x: .*has the shape \(\d, 4\).*\(2, 4\)"):
        captured(tensor)


def test_a_local_tensor_where_there_should_be_none_is_refused() -> None:
    tensor = DTensor.from_local(torch.ones(1, 4), mesh_of(8), [Shard(0)], shape=torch.Size((2, 4)), stride=(4, 1))
    with pytest.raises(UnsupportedValueError, match="^x: .*it is empty"):
        captured(tensor)


@pytest.mark.parametrize("local", [torch.ones(2, 2, device="meta"), torch.eye(2).to_sparse()], ids=["meta", "sparse"])
def test_local_tensors_that_cannot_be_read_are_refused_by_key(local: torch.Tensor) -> None:
    tensor = DTensor(local, divide(torch.ones(16, 2), mesh_of(8), Shard(0))._spec, requires_grad=False)
    with pytest.raises(UnsupportedValueError, match="^x: "):
        captured(tensor)


def test_tensors_that_still_arrive_are_waited_for() -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    local = some(torch.float32, 2, 3)
    plain = captured(AsyncCollectiveTensor(local))
    assert plain.placement is None
    assert np.shares_memory(plain.source.read(plain.spec.box), local.numpy())
    inside = captured(DTensor.from_local(AsyncCollectiveTensor(local), mesh_of(8), [Shard(0)]))
    assert inside.source.read(Box((4, 0), (2, 3))).tobytes() == host_bits(local).tobytes()


def test_a_class_that_only_has_the_name_is_a_tensor_like_any_other() -> None:
    class DTensor(torch.Tensor):
        pass

    assert captured(torch.ones(2).as_subclass(DTensor)).placement is None


def test_tensors_divided_alike_share_one_placement_object() -> None:
    mesh = mesh_of(8)
    a, b = divide(torch.ones(8), mesh, Shard(0)), divide(torch.ones(16, 2), mesh, Shard(0))
    assert placement_of(a) is placement_of(b)


def test_tied_dtensors_are_one_and_different_ones_are_two_even_where_the_shard_is_empty() -> None:
    for rows in (8, 2):
        tensor, other = (divide(torch.ones(rows, 2), mesh_of(8), Shard(0)) for _ in range(2))
        identities = [captured(each).identity for each in (tensor, torch.nn.Parameter(tensor), tensor.detach(), other)]
        regions = [identity[0] for identity in identities if identity is not None]
        assert regions[0] == regions[1] == regions[2]
        assert regions[0] != regions[3]
        assert hash(regions[0]) == hash(regions[1])


def test_the_same_memory_under_another_placement_is_another_tensor() -> None:
    local, mesh = torch.ones(4, 4), mesh_of(8)
    rows, columns = (DTensor.from_local(local, mesh, [Shard(dim)]) for dim in (0, 1))
    a, b = captured(rows).identity, captured(columns).identity
    assert a is not None and b is not None and a[0] != b[0]
    cube = mesh_of(2, 2, 2)
    first = DTensor.from_local(local, cube, [Shard(0), Replicate(), Replicate()])
    second = DTensor.from_local(local, cube, [Replicate(), Shard(0), Replicate()])
    a, b = captured(first).identity, captured(second).identity
    assert first.shape == second.shape
    assert a is not None and b is not None and a[0] != b[0]


def test_a_change_through_the_dtensor_or_its_local_tensor_moves_the_identity() -> None:
    parameter = torch.nn.Parameter(divide(torch.ones(8, 2), mesh_of(8), Shard(0)))
    seen = [captured(parameter.detach()).identity]
    assert captured(parameter.detach()).identity == seen[0]
    with torch.no_grad():
        parameter.add_(1)
    seen.append(captured(parameter.detach()).identity)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    seen.append(captured(parameter.detach()).identity)
    tensor = parameter.detach()
    tensor.to_local().add_(1)
    seen.append(captured(tensor).identity)
    assert len(set(seen)) == 4
    assert all(identity is not None and identity[-1] is not None for identity in seen)


def test_memory_that_torch_does_not_count_is_never_known_to_be_unchanged() -> None:
    with torch.inference_mode():
        tensor = divide(torch.ones(8), mesh_of(8), Shard(0))
    identity = captured(tensor).identity
    assert identity is not None and identity[-1] is None


def test_cas_ckpt_itself_never_imports_dtensors_or_sharded_tensors() -> None:
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "from cas_ckpt.training.capture.capture import capture_state\n"
        "import cas_ckpt.training.restore\n"
        "capture_state({'x': torch.ones(2), 'm': torch.nn.Linear(2, 2)})\n"
        "print([n for n in set(sys.modules) - before if n.startswith('torch.distributed')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_after_the_end_of_its_world_a_dtensor_is_where_its_mesh_says() -> None:
    whole = some(torch.float32, 8, 3)
    inside = divide(whole, mesh_of(2, 4), Replicate(), Shard(0))
    outside = divide(whole, DeviceMesh("cpu", torch.tensor([4, 1])), Shard(0))
    dist.destroy_process_group()
    assert captured(inside).source.read(Box((4, 0), (2, 3))).tobytes() == host_bits(whole[4:6]).tobytes()
    with pytest.raises(InternalError, match="does not lie inside one piece"):
        captured(outside).source.read(Box((0, 0), (4, 3)))
    dist.init_process_group("fake", rank=0, world_size=1)  # for the fixture to destroy


def test_no_process_group_is_left_behind() -> None:
    dist.destroy_process_group()
    with fake_world(1, 2):
        assert dist.get_rank() == 1
    assert not dist.is_initialized()
    dist.init_process_group("fake", rank=0, world_size=1)  # for the fixture to destroy
