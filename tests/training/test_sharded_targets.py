"""A commit is restored into DTensors and ShardedTensors in place, each rank what it holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor import Shard as OldShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata, ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from cas_ckpt import Repository
from cas_ckpt.errors import MismatchError, UnsupportedValueError
from cas_ckpt.layout.holdings import held_by
from cas_ckpt.objects.spec import Spec
from cas_ckpt.training.capture.tensors import TORCH_DTYPES
from cas_ckpt.training.restore.restore import RestorePlan, plan_restore
from tests.training.fake_world import fake_world
from tests.training.roundtrip import commit
from tests.training.shards import CUTS_STRIDES, fetch_held

RANK = 3


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    """Rank 3 of 8; the process group is gone after every test."""
    with fake_world(RANK, 8):
        yield


def divide(whole: torch.Tensor, shape: tuple[int, ...], *placements: Any) -> DTensor:
    return distribute_tensor(whole.clone(), init_device_mesh("cpu", shape), list(placements), src_data_rank=None)


def checkout(committed: dict[str, Any], into: dict[str, Any], **options: Any) -> RestorePlan:
    plan = plan_restore(into, commit(committed), **options)
    fetch_held(plan.copies, RANK)
    plan.finish()
    return plan


def test_a_tied_dtensor_that_the_commit_leaves_out_is_filled_under_its_other_key() -> None:
    target = divide(torch.zeros(16, 4), (8,), Shard(0))
    plan = checkout({"embed": torch.ones(16, 4)}, {"embed": target, "head": target.detach()})
    assert plan.missing == ()
    assert target.to_local().sum() == 8
    with pytest.raises(MismatchError, match="head"):
        checkout({"embed": torch.ones(16, 4)}, {"embed": target, "head": divide(torch.zeros(16, 4), (8,), Shard(0))})


@pytest.mark.parametrize(("ranks", "cut"), [([3], Replicate()), ([1, 3], Replicate()), ([1, 3], Shard(0))])
def test_a_process_that_is_alone_in_its_repository_fills_all_that_it_holds(ranks: list[int], cut: Any) -> None:
    mesh = DeviceMesh("cpu", ranks, _init_backend=False)
    stored = {name: torch.arange(1.0, size + 1) for name, size in (("inline", 8), ("in chunks", 200_000))}
    held = {name: whole.chunk(2)[1] if cut.is_shard() else whole for name, whole in stored.items()}
    target = {
        name: DTensor.from_local(
            torch.zeros_like(held[name]), mesh, [cut], run_check=False, shape=whole.shape, stride=(1,)
        )
        for name, whole in stored.items()
    }
    with Repository.init(f"memory://alone-in-a-job-{len(ranks)}-{cut.is_shard()}", group=None) as repo:
        repo.commit(stored)
        repo.checkout(into=target)
    assert all(torch.equal(target[name].to_local(), part) for name, part in held.items())


LAYOUTS = [
    ((8,), (Shard(0),)),
    ((8,), (Shard(1),)),
    ((8,), (Replicate(),)),
    ((2, 4), (Shard(0), Shard(1))),
    pytest.param((4, 2), (_StridedShard(0, split_factor=2), Shard(0)), marks=CUTS_STRIDES),
    pytest.param((2, 4), (_StridedShard(0, split_factor=3), Replicate()), marks=CUTS_STRIDES),
    ((2, 2, 2), (Shard(0), Shard(0), Shard(0))),
]


@pytest.mark.parametrize(("mesh", "placements"), LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "complex64", "bool", "float8_e4m3fn"])
def test_the_same_dtensor_holds_its_part_of_the_commit(mesh: Any, placements: Any, dtype: str) -> None:
    torch.manual_seed(0)
    whole = torch.randint(0, 2, (9, 10)).to(TORCH_DTYPES[dtype])
    target = divide(torch.zeros(9, 10).to(whole.dtype), mesh, *placements)
    state = {"x": target}
    local = target._local_tensor
    plan = checkout({"x": whole}, state)
    wanted = divide(whole, mesh, *placements).to_local()
    assert state["x"] is target and target._local_tensor is local
    assert torch.equal(local.view(torch.uint8), wanted.view(torch.uint8))
    assert [(copy.path, copy.stored.spec) for copy in plan.copies] == [(("x",), Spec(dtype, (9, 10)))]


def test_counters_of_the_dtensor_and_of_its_local_tensor_move() -> None:
    parameter = torch.nn.Parameter(divide(torch.zeros(8), (8,), Shard(0)))
    given = parameter.detach()  # as state_dict() gives it
    before = (parameter._version, given._local_tensor._version)
    checkout({"x": torch.ones(8)}, {"x": given})
    assert parameter._version > before[0]
    assert given._local_tensor._version > before[1]
    assert torch.equal(parameter.to_local(), torch.ones(1))


def test_local_tensors_of_any_strides_are_filled_where_they_are() -> None:
    base = torch.zeros(6, 4)
    target = DTensor.from_local(base.t()[:2, ::2], init_device_mesh("cpu", (8,)), [Shard(0)], run_check=False)
    whole = torch.arange(48.0).reshape(16, 3)
    checkout({"x": whole}, {"x": target})
    assert torch.equal(base[::2, :2].t(), whole[6:8])
    assert not base[1::2].any() and not base[:, 2:].any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_local_tensors_on_a_device_are_filled_too() -> None:
    whole, mesh = torch.rand(9, 5).bfloat16(), init_device_mesh("cuda", (4, 2))
    placements = [_StridedShard(0, split_factor=2), Replicate()]
    target = distribute_tensor(torch.zeros_like(whole).cuda(), mesh, placements, src_data_rank=None)
    local = target.to_local()
    checkout({"x": whole}, {"x": target})
    wanted = distribute_tensor(whole.cuda(), mesh, placements, src_data_rank=None).to_local()
    assert local.is_cuda and torch.equal(local, wanted)


def test_empty_shards_and_scalars_are_targets_like_any_other() -> None:
    state = {"empty": divide(torch.zeros(2, 3), (8,), Shard(0)), "one": divide(torch.zeros(()), (8,), Replicate())}
    plan = checkout({"empty": torch.ones(2, 3), "one": torch.tensor(7.0)}, state)
    assert len(plan.copies) == 2
    assert state["empty"].to_local().shape == (0, 3)
    assert state["one"].to_local() == 7.0


def test_a_rank_outside_the_mesh_names_the_copy_and_gets_nothing() -> None:
    from torch.distributed.device_mesh import DeviceMesh

    target = distribute_tensor(torch.zeros(4), DeviceMesh("cpu", torch.tensor([0, 1])), [Shard(0)], src_data_rank=None)
    (copy,) = checkout({"x": torch.ones(4)}, {"x": target}).copies
    assert copy.placement is not None
    assert held_by(RANK, (4,), copy.placement) == ()


@pytest.mark.parametrize("rows", [8, 2])
def test_tied_dtensors_are_filled_once_also_where_the_shard_is_empty(rows: int) -> None:
    target = divide(torch.zeros(rows, 2), (8,), Shard(0))
    plan = checkout({"a": (whole := torch.ones(rows, 2)), "b": whole}, {"a": target, "b": target.detach()})
    assert [copy.path for copy in plan.copies] == [("a",)]


def test_ties_that_the_commit_does_not_have_are_refused() -> None:
    target = divide(torch.zeros(8, 2), (8,), Shard(0))
    with pytest.raises(MismatchError, match="a and b are one tensor in the target"):
        checkout({"a": torch.ones(8, 2), "b": torch.zeros(8, 2)}, {"a": target, "b": target.detach()})


def test_global_shape_and_dtype_must_agree_whatever_the_local_shape() -> None:
    target = divide(torch.zeros(8, 2), (8,), Shard(0))
    with pytest.raises(MismatchError, match=r"x: the target is float32\[8, 2\], the commit holds float32\[1, 2\]"):
        checkout({"x": torch.zeros(1, 2)}, {"x": target})
    with pytest.raises(MismatchError, match="no dtype is cast"):
        checkout({"x": torch.zeros(8, 2, dtype=torch.bfloat16)}, {"x": target})
    with pytest.raises(MismatchError, match="the commit holds a plain value"):
        checkout({"x": 3}, {"x": target})


def test_a_local_tensor_that_overlaps_itself_is_refused() -> None:
    local = torch.zeros(1, 4).expand(2, 4)
    target = DTensor.from_local(local, init_device_mesh("cpu", (8,)), [Shard(0)], run_check=False)
    target._local_tensor = local
    with pytest.raises(MismatchError, match="x: elements of the local tensor share memory"):
        checkout({"x": torch.ones(16, 4)}, {"x": target})


def test_a_partial_target_is_refused_by_key() -> None:
    target = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (8,)), [Partial()])
    with pytest.raises(UnsupportedValueError, match="^x: .*redistribute"):
        checkout({"x": torch.ones(3)}, {"x": target})


def test_modules_and_optimizers_of_dtensors_keep_their_tensors() -> None:
    def trained(seed: int) -> tuple[torch.nn.Linear, torch.optim.AdamW]:
        torch.manual_seed(seed)
        whole, module = torch.rand(8, 4), torch.nn.Linear(4, 8, bias=False)
        module.weight = torch.nn.Parameter(divide(whole, (8,), Shard(0)))
        optimizer = torch.optim.AdamW(module.parameters())
        module.weight.grad = divide(torch.rand(8, 4), (8,), Shard(0))
        optimizer.step()
        return module, optimizer

    module, optimizer = trained(1)
    wanted = {"weight": torch.rand(8, 4), "exp_avg": torch.rand(8, 4), "exp_avg_sq": torch.rand(8, 4)}
    moments = optimizer.state[module.weight]
    held = {"weight": module.weight, "exp_avg": moments["exp_avg"], "exp_avg_sq": moments["exp_avg_sq"]}
    checkout({"model": {"weight": wanted["weight"]}}, {"model": module})
    new_moments = {"step": torch.tensor(5.0), "exp_avg": wanted["exp_avg"], "exp_avg_sq": wanted["exp_avg_sq"]}
    checkout({"optim": optimizer.state_dict() | {"state": {0: new_moments}}}, {"optim": optimizer})
    moments = optimizer.state[module.weight]
    assert moments["step"] == 5
    for name, now in {"weight": module.weight, **moments}.items():
        if name != "step":
            assert now is held[name]
            assert torch.equal(now.to_local(), wanted[name][RANK : RANK + 1])


def test_shards_of_a_sharded_tensor_are_filled_where_they_are() -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    parts = {(0, 0): torch.zeros(2, 4), (4, 2): torch.zeros(2, 2)}
    mine = [OldShard(part, ShardMetadata(list(at), list(part.shape), f"rank:{RANK}/cpu")) for at, part in parts.items()]
    others = [ShardMetadata([2, 0], [2, 4], "rank:0/cpu"), ShardMetadata([4, 0], [2, 2], "rank:5/cpu")]
    about = ShardedTensorMetadata([*(s.metadata for s in mine), *others], whole.shape, TensorProperties(torch.float32))
    target = ShardedTensor._init_from_local_shards_and_global_metadata(mine, about)
    state = {"x": target}
    checkout({"x": whole}, state)
    assert state["x"] is target
    assert torch.equal(parts[0, 0], whole[:2]) and torch.equal(parts[4, 2], whole[4:, 2:])
    assert all(part._version for part in parts.values())
