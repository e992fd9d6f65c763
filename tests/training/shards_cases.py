"""What single ranks do in test_shards_of_ranks.py: they commit, and hold what `shards` says against what they have."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from cas_ckpt import CommitOptions, PerRank, Repository, StateDict
from cas_ckpt.dcp import CasStorageWriter, close_groups
from cas_ckpt.ops.history.shards import ShardRow
from tests.training.training_cases import KINDS, train


def wrong(rows: list[ShardRow], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """What `rows` of this rank do not say right of these tensors, by key; collective.

    Elements are random, so that equal ones in any order are the same ones.
    """
    by_key: dict[str, list[ShardRow]] = {}
    for row in rows:
        by_key.setdefault(row.key, []).append(row)
    found = []
    for key, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found += [f"{key}: {text}" for text in faults(by_key.get(key, []), full, local)]
    return found


def faults(rows: list[ShardRow], full: torch.Tensor, local: torch.Tensor) -> list[str]:
    """What is wrong with the rows of one tensor."""
    found = []
    boxes = [tuple(map(slice, row.offsets, map(sum, zip(row.offsets, row.sizes, strict=True)))) for row in rows]
    elements = torch.cat([full[box].flatten() for box in boxes]) if boxes else full.new_empty(0)
    if not torch.equal(elements.sort().values, local.flatten().sort().values):
        found.append(f"other elements than this rank has: {[row.region for row in rows]}")
    if sum(row.num_bytes for row in rows) != local.numel() * local.element_size():
        found.append(f"{sum(row.num_bytes for row in rows)} bytes")
    others = [row for row in rows if row.replica is None or row.ranks[row.replica] != dist.get_rank()]
    return found + [f"replica {row.replica} of {row.ranks}" for row in others]


def all_shards(path: str) -> dict[str, Any]:
    """Everything in one launch; what was wrong, by case."""
    rank = dist.get_rank()
    warnings.simplefilter("ignore")  # of torch: FSDP1 is deprecated, and has no devices here
    found: dict[str, Any] = {}
    with Repository.open(path, timeout_s=60) as repo:
        for name, make in KINDS.items():
            model, optim = make()
            train(model, optim)
            info = repo.commit({"model": model, "optim": optim}, branch="main")
            names = {name.removeprefix("module."): param for name, param in model.named_parameters()}
            tensors = {f"model/{name}": param.detach() for name, param in names.items()}
            for param_name, param in names.items():
                tensors[f"optim/state/{param_name}/exp_avg"] = optim.state[param]["exp_avg"]
            found[name] = wrong(list(repo.shards(info.id, rank=rank)), tensors)
        found["pipeline"] = pipeline(repo, rank)
        found["boxes"] = boxes(repo, rank)
    found["dcp"] = saved_by_dcp(path, rank)
    return found


def pipeline(repo: Repository, rank: int) -> Any:
    """Two stages of two ranks, each over a mesh of its own; rank 0 has a tensor that nobody else has."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
    stage = rank // 2
    torch.manual_seed(stage)
    state: dict[str, Any] = {
        f"layer{stage}": {"w": divided(torch.rand(301, 40), mesh, Shard(0)), "norm": torch.rand(300)}
    }
    tensors = {f"layer{stage}/{name}": tensor for name, tensor in state[f"layer{stage}"].items()}
    state["loader"] = PerRank(StateDict(position=rank))
    if rank == 0:
        tensors["extra"] = state["extra"] = torch.rand(500)
    info = repo.commit(state, branch="stages", options=CommitOptions(orphan=True))
    rows = list(repo.shards(info.id))
    held = {row.key: str(row.ranks) for row in rows if row.key.endswith(("norm", "extra", "position"))}
    axes = [commit.id for commit in repo.log("stages", world_size=4, axes={"dp": 2})]
    return wrong(list(repo.shards(info.id, rank=rank)), tensors), held, axes == [info.id]


def divided(tensor: torch.Tensor, mesh: DeviceMesh, *placements: Any) -> DTensor:
    """`tensor`, which all ranks of the mesh have alike, divided without talking."""
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def boxes(repo: Repository, rank: int) -> list[str]:
    """The older ShardedTensor: FSDP1's sharded state dict."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(70, 55), torch.nn.Linear(55, 33))
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    sharded = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    FullyShardedDataParallel.set_state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT)
    state: dict[str, Any] = dict(sharded.state_dict())
    info = repo.commit({"m": state}, branch="boxes", options=CommitOptions(orphan=True))
    rows = list(repo.shards(info.id, rank=rank))
    found = []
    for name, full in whole.items():
        parts = [shard.tensor.flatten() for shard in state[name].local_shards()]
        local = torch.cat(parts) if parts else full.new_empty(0)
        found += [f"{name}: {text}" for text in faults([row for row in rows if row.key == f"m/{name}"], full, local)]
    return found


def saved_by_dcp(path: str, rank: int) -> Any:
    """dcp.save writes layouts too."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    state = {"m": {"w": divided(torch.rand(1300, 70), grid, Replicate(), Shard(1)), "plain": torch.rand(900)}}
    writer = CasStorageWriter(path, branch="dcp", orphan=True)
    dcp.save(state, storage_writer=writer)
    with Repository.open(path, group=None) as repo:
        tensors = {f"m/{name}": tensor for name, tensor in state["m"].items()}
        rows = list(repo.shards("dcp", rank=rank))
        found = wrong(rows, tensors), [commit.step for commit in repo.log("dcp", world_size=4, axes="tp=2")]
    close_groups()
    return found
