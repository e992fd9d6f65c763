"""What the processes of test_ranks.py do; each function runs on every rank and returns what it saw."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from cas_ckpt import Repository
from cas_ckpt.dcp import CasSavePlanner, CasStorageReader, CasStorageWriter, close_groups
from cas_ckpt.errors import PeerError
from cas_ckpt.training.per_rank import PerRank
from tests.dcp.states import same


def full_state() -> dict[str, Any]:
    """The state that every rank has a part of."""
    return {
        "model": {
            "rows": torch.arange(1300 * 7.0).reshape(1300, 7),
            "columns": torch.arange(9 * 700.0).reshape(9, 700),
            "both": torch.arange(640 * 1000, dtype=torch.int32).reshape(640, 1000),
            "few": torch.arange(3.0),
            "norm": torch.ones(600),
        },
        "optim": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.arange(1300 * 7.0).reshape(1300, 7)}},
                  "param_groups": [{"lr": 0.1, "params": [0]}]},
        "epoch": 4,
        "plain": torch.arange(5000.0),
    }  # fmt: skip


def divided(state: dict[str, Any], mesh: Any, zero: bool = False) -> dict[str, Any]:
    """The same with its tensors over a mesh: sharded, replicated, unevenly, and plain."""
    wide, high = [Replicate()] * (mesh.ndim - 1), [Shard(0)] * (mesh.ndim - 1)

    def over(tensor: torch.Tensor, *placements: Any) -> DTensor:
        return distribute_tensor(torch.zeros_like(tensor) if zero else tensor, mesh, placements)

    model, moment = state["model"], state["optim"]["state"][0]
    step = torch.zeros_like(moment["step"]) if zero else moment["step"].clone()
    plain = torch.zeros_like(state["plain"]) if zero else state["plain"].clone()
    return {
        "model": {
            "rows": over(model["rows"], *wide, Shard(0)),
            "columns": over(model["columns"], *wide, Shard(1)),
            "both": over(model["both"], *high, Shard(mesh.ndim - 1)),
            "few": over(model["few"], *wide, Shard(0)),
            "norm": over(model["norm"], *wide, Replicate()),
        },
        "optim": {"state": {0: {"step": step, "exp_avg": over(moment["exp_avg"], *wide, Shard(0))}},
                  "param_groups": [{"lr": 9.0 if zero else 0.1, "params": [0]}]},
        "epoch": 0 if zero else 4,
        "plain": plain,
    }  # fmt: skip


def gathered(state: Any) -> Any:
    """The whole tensors again."""
    if isinstance(state, DTensor):
        return state.full_tensor()
    if isinstance(state, dict):
        return {name: gathered(value) for name, value in state.items()}
    return [gathered(part) for part in state] if isinstance(state, list) else state


def saves_and_loads(folder: str) -> dict[str, Any]:
    """Many saves and loads on four ranks; what this rank saw of each."""
    place, seen = str(Path(folder) / "repo"), {}
    line = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state = divided(full_state(), line)
    for case in (
        roots, every_planner, loads_over_other_meshes, without_collectives, alone_among_many, part_of_the_ranks,
        in_the_background, fully_sharded, each_its_own, diverged, one_rank_fails, disagreeing, cached_plans,
    ):  # fmt: skip
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            seen[case.__name__] = case(place, state, line, grid)
        dist.barrier()
    close_groups()
    return seen


def root_of(writer: CasStorageWriter) -> str | None:
    return writer.commit.root if writer.commit else None


def roots(place: str, state: dict[str, Any], line: Any, grid: Any) -> list[str | None]:
    """The root and the id that each rank knows, over two meshes."""
    found = []
    for mesh in (line, grid):
        writer = CasStorageWriter(place, message="together", step=1)
        metadata = dcp.save(divided(full_state(), mesh), storage_writer=writer)
        assert writer.commit is not None and metadata.storage_meta.save_id == writer.commit.id
        assert {entry.commit for entry in metadata.storage_data.values()} == {writer.commit.id}
        found.append(root_of(writer))
    return found


def every_planner(place: str, state: dict[str, Any], line: Any, grid: Any) -> list[str | None]:
    found = []
    writer = CasStorageWriter(place)
    for planner in (CasSavePlanner(), Resolves(), DefaultSavePlanner(dedup_save_to_lowest_rank=True)):
        dcp.save(state, storage_writer=writer, planner=planner)
        found.append(root_of(writer))
    return found


class Resolves(DefaultSavePlanner):
    """A planner of one's own: its plan alone says who writes what."""

    def resolve_data(self, write_item: Any) -> Any:
        return super().resolve_data(write_item)


def loads_over_other_meshes(place: str, state: dict[str, Any], line: Any, grid: Any) -> list[bool]:
    found = []
    for mesh in (line, grid):
        target = divided(full_state(), mesh, zero=True)
        dcp.load(target, storage_reader=CasStorageReader(place, ref="HEAD~1"))
        found.append(same(gathered(target), full_state()))
    with Repository.open(place) as repo:
        found.append(same(repo.load("HEAD"), full_state()))
    return found


def without_collectives(place: str, state: dict[str, Any], line: Any, grid: Any) -> tuple[str | None, bool]:
    writer = CasStorageWriter(place)
    dcp.save(state, storage_writer=writer, use_collectives=False)
    target = divided(full_state(), grid, zero=True)
    dcp.load(target, storage_reader=CasStorageReader(place))
    return root_of(writer), same(gathered(target), full_state())


def alone_among_many(place: str, state: dict[str, Any], line: Any, grid: Any) -> str | None:
    """Each rank for itself, on a branch of its own; a shard alone is refused."""
    rank = dist.get_rank()
    writer = CasStorageWriter(place, branch=f"rank-{rank}", orphan=True, no_dist=True)
    dcp.save({"rank": rank}, storage_writer=writer, no_dist=True)
    own = error_of(lambda: dcp.save({"w": state["model"]["rows"]}, storage_writer=writer, no_dist=True))
    with Repository.open(place) as repo:
        assert repo.load(f"rank-{rank}") == {"rank": rank}
    return own


def part_of_the_ranks(place: str, state: dict[str, Any], line: Any, grid: Any) -> Any:
    """Ranks 2 and 3 save over a group of their own, whose ranks have other numbers there."""
    group = dist.new_group([2, 3])
    if dist.get_rank() < 2:
        return None
    writer = CasStorageWriter(place, branch="part", orphan=True, process_group=group)
    mesh = grid["tp"]
    shard = distribute_tensor(torch.arange(3000.0), mesh, [Shard(0)])
    dcp.save({"w": shard}, storage_writer=writer, process_group=group)
    with Repository.open(place) as repo:
        return same(repo.load("part"), {"w": torch.arange(3000.0)})


def in_the_background(place: str, state: dict[str, Any], line: Any, grid: Any) -> list[Any]:
    """The training goes on over the default group while a thread saves."""
    group = dist.new_group(backend="gloo")
    own = divided(full_state(), line)
    writer = CasStorageWriter(place, branch="background", orphan=True, process_group=group)
    future: Any = dcp.async_save(own, storage_writer=writer, process_group=group)
    own["plain"].zero_()
    total = torch.ones(1000)
    for _ in range(20):
        dist.all_reduce(total)
    metadata = future.result()
    assert metadata.storage_meta.save_id == (writer.commit.id if writer.commit else None)
    return [root_of(writer), total[0].item() == 4.0**20]


def tiny_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.Linear(50, 7))


def fully_sharded(place: str, state: dict[str, Any], line: Any, grid: Any) -> list[bool]:
    """FSDP2 with torch's own helpers, the way that training loops do it; and back into other shards."""
    models, optimizers = [], []
    for seed, mesh in ((1, line), (2, grid)):
        model = fully_shard(tiny_model(seed), mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
        model(torch.ones(3, 30)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        models.append(model)
        optimizers.append(optimizer)
    own = dict(zip(("model", "optim"), get_state_dict(models[0], optimizers[0]), strict=True))
    dcp.save(own, storage_writer=CasStorageWriter(place, branch="fsdp", orphan=True))
    other = dict(zip(("model", "optim"), get_state_dict(models[1], optimizers[1]), strict=True))
    dcp.load(other, storage_reader=CasStorageReader(place, ref="fsdp"))
    with Repository.open(place) as repo:
        stored = repo.load("fsdp")
    return [same(gathered(other), gathered(own)), same(stored, gathered(own))]


def each_its_own(place: str, state: dict[str, Any], line: Any, grid: Any) -> list[bool]:
    """Values kept per rank: each rank gets its own, and a world of another size none."""
    rank = dist.get_rank()
    own = {"deep": {"loader": PerRank({"at": rank}), "epoch": 2}}
    dcp.save(own, storage_writer=CasStorageWriter(place, branch="own", orphan=True))
    target: dict[str, Any] = {"deep": {"loader": None, "epoch": 0}}
    dcp.load(target, storage_reader=CasStorageReader(place, ref="own"))
    alone: dict[str, Any] = {"deep": {"loader": "untouched", "epoch": 0}}
    dcp.load(alone, storage_reader=CasStorageReader(place, ref="own"), no_dist=True)
    return [
        same(target, {"deep": {"loader": {"at": rank}, "epoch": 2}}),
        same(alone, {"deep": {"loader": "untouched", "epoch": 2}}),
    ]


def diverged(place: str, state: dict[str, Any], line: Any, grid: Any) -> list[Any]:
    rank = dist.get_rank()
    tensor = {"w": torch.full((5000,), float(rank == 1))}
    value = {"seed": rank}
    strict = CasStorageWriter(place, branch="diverged", orphan=True, replica_audit=1.0)
    found: list[Any] = [error_of(lambda: dcp.save(tensor, storage_writer=strict))]
    found.append(error_of(lambda: dcp.save(value, storage_writer=strict)))
    with Repository.open(place) as repo:
        found.append([ref.name for ref in repo._handle.refs.list(branch_kind())])
    writer = CasStorageWriter(place, branch="warned", orphan=True, on_divergence="warn")
    dcp.save(value, storage_writer=writer)
    with Repository.open(place) as repo:
        found.append(repo.load("warned"))
    return found


def branch_kind() -> Any:
    from cas_ckpt.core.refs import RefKind

    return RefKind.BRANCH


def one_rank_fails(place: str, state: dict[str, Any], line: Any, grid: Any) -> tuple[str | None, str | None]:
    """Rank 2 has something that cannot be stored: nobody hangs, the branch stays, the next save works."""
    bad = {"w": torch.ones(10), "f": object() if dist.get_rank() == 2 else 0}
    with Repository.open(place) as repo:
        before = repo.resolve("HEAD")
    writer = CasStorageWriter(place, timeout_s=60)
    told = error_of(lambda: dcp.save(bad, storage_writer=writer))
    with Repository.open(place) as repo:
        assert repo.resolve("HEAD") == before
    dcp.save(state, storage_writer=writer)
    return told, root_of(writer)


def disagreeing(place: str, state: dict[str, Any], line: Any, grid: Any) -> str | None:
    writer = CasStorageWriter(place, message=f"rank {dist.get_rank()}")
    return error_of(lambda: dcp.save(state, storage_writer=writer))


def cached_plans(place: str, state: dict[str, Any], line: Any, grid: Any) -> list[Any]:
    """Two dtypes under one cached plan; then one more, with another writer."""
    found: list[Any] = []
    for dtype in (torch.float32, torch.bfloat16, torch.bfloat16):
        tensor = distribute_tensor(torch.arange(4000.0).to(dtype), line, [Shard(0)])
        writer = CasStorageWriter(place, branch="cached", orphan=True)
        planner = DefaultSavePlanner(enable_plan_caching=True)
        metadata = dcp.save({"w": tensor}, storage_writer=writer, planner=planner)
        with Repository.open(place) as repo:
            whole = repo.read("cached", "w")
            found.append(same(whole, torch.arange(4000.0).to(dtype)))
            found.append(metadata.storage_meta.save_id == repo.resolve("cached"))
        dist.barrier()
    return found


def error_of(work: Any) -> str | None:
    """What DCP raised, in words."""
    try:
        work()
    except CheckpointException as error:
        return str(error)
    return None


# --- one rank that comes late ---------------------------------------------------------------

VICTIM = 1


def small_state() -> dict[str, Any]:
    return {"w": torch.arange(3000.0), "b": torch.ones(7), "epoch": 3}


class Meets(DefaultSavePlanner):
    """What one rank does when its data is asked for."""

    on_resolve: Callable[[], None] | None = None

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == VICTIM and self.on_resolve is not None:
            self.on_resolve()
        return super().resolve_data(write_item)


class SaysThatItGaveUp(CasStorageWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except PeerError:
            _store().set(f"gave up/{dist.get_rank()}", "")
            raise


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def a_rank_comes_late(place: str) -> tuple[str | None, str]:
    """One rank comes to a save when all others have given up on it; the next save needs nothing from anybody."""
    others = [rank for rank in range(dist.get_world_size()) if rank != VICTIM]

    def wait_for_the_others() -> None:
        planner.on_resolve = None
        _store().wait([f"gave up/{rank}" for rank in others])

    planner = Meets()
    planner.on_resolve = wait_for_the_others
    CasStorageWriter(place, timeout_s=4)  # connects
    late = SaysThatItGaveUp(place, timeout_s=4)
    told = error_of(lambda: dcp.save(small_state(), storage_writer=late, planner=planner))
    writer = CasStorageWriter(place, timeout_s=4)
    dcp.save(small_state(), storage_writer=writer)
    return told, writer.commit.root if writer.commit else ""
