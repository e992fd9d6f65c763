"""What single ranks do in test_training_processes.py: each public function is one rank of a real gloo job."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from cas_ckpt import CommitOptions, PerRank, Repository, RNGState, StateDict
from cas_ckpt.errors import CkptError, PeerError
from tests.ranks import die

Made = tuple[nn.Module, torch.optim.Optimizer]
NAMES = {1: ("shard",), 2: ("replicate", "shard")}


def plain(seed: int = 0) -> Made:
    """A model and an optimizer, the same on every rank. No size divides by four."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(302, 515), nn.LayerNorm(515), nn.Linear(515, 302, bias=False))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def fsdp(*shape: int, seed: int = 0) -> Made:
    """FSDP2 over a mesh of this shape; two dimensions are hybrid sharding."""
    model, _ = plain(seed)
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=NAMES[len(shape)]))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def fsdp_tp(seed: int = 0) -> Made:
    """Tensor parallel over two, FSDP2 over two: strided shards."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(302, 516), nn.ReLU(), nn.Linear(516, 302, bias=False))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def ddp(seed: int = 0) -> Made:
    """Whole replicas, wrapped."""
    model, _ = plain(seed)
    wrapped = DistributedDataParallel(model)
    return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-2)


def train(model: nn.Module, optim: torch.optim.Optimizer, steps: int = 2) -> None:
    """The same steps on every rank."""
    for step in range(steps):
        batch = torch.rand(16, 302, generator=torch.Generator().manual_seed(step))
        model(batch).square().mean().backward()
        optim.step()
        optim.zero_grad()


def gathered(state: Any) -> Any:
    """The same state with every DTensor made whole."""
    if hasattr(state, "full_tensor"):
        return state.full_tensor()
    if isinstance(state, dict):
        return {name: gathered(value) for name, value in state.items()}
    return [gathered(value) for value in state] if isinstance(state, list) else state


def whole(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """Model and optimizer as one process would hold them, by torch's own helpers."""
    return {"model": gathered(get_model_state_dict(model)), "optim": gathered(get_optimizer_state_dict(model, optim))}


def same(a: Any, b: Any) -> bool:
    """Whether two nested states are equal, tensors bit by bit."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


KINDS: dict[str, Callable[..., Made]] = {
    "fsdp over four": lambda seed=0: fsdp(4, seed=seed),
    "hybrid": lambda seed=0: fsdp(2, 2, seed=seed),
    "fsdp and tensor parallel": fsdp_tp,
    "ddp": ddp,
}


def every_division(path: str) -> dict[str, Any]:
    """Commit each kind of division, compare it with the whole state, and restore it into a fresh model."""
    found: dict[str, Any] = {}
    with Repository.open(path, timeout_s=60) as repo, Repository.open(path, group=None) as alone:
        for name, make in KINDS.items():
            made = make()
            train(*made)
            info = repo.commit({"model": made[0], "optim": made[1]}, branch="main")
            wanted = whole(*made)
            root = (
                alone.commit(wanted, branch="alone", options=CommitOptions(orphan=True)).root
                if dist.get_rank() == 0
                else None
            )
            fresh = make(seed=7)
            tensors = [param.data_ptr() for param in fresh[0].parameters() if not hasattr(param, "to_local")]
            repo.checkout(info.id, into={"model": fresh[0], "optim": fresh[1]})
            assert tensors == [param.data_ptr() for param in fresh[0].parameters() if not hasattr(param, "to_local")]
            found[name] = {"id": info.id, "root": info.root, "alone": root, "restored": same(whole(*fresh), wanted)}
        found["across"] = across(repo, found["fsdp over four"]["id"])
    return found


def across(repo: Repository, commit: str) -> bool:
    """What FSDP over four committed is restored into replicas and into hybrid shards."""
    wanted = None
    for make in (lambda: fsdp(4, seed=3), lambda: ddp(seed=3), lambda: fsdp(2, 2, seed=3)):
        model, optim = make()
        repo.checkout(commit, into={"model": model, "optim": optim})
        got = whole(model, optim)
        if wanted is not None and not same(got, wanted):
            return False
        wanted = got
    return True


def own_values(path: str) -> dict[str, Any]:
    """Random states and loader positions are each rank's own; other world sizes leave them alone."""
    rank = dist.get_rank()
    with Repository.open(path, timeout_s=60) as repo:
        random.seed(rank)
        loader = PerRank(StateDict(position=rank * 100))
        info = repo.commit(
            {"rng": RNGState(), "loader": loader, "step": 5}, branch="own", options=CommitOptions(orphan=True)
        )
        wanted = random.random()
        random.seed(99)
        loader.value["position"] = -1
        report = repo.checkout(info.id, into={"rng": RNGState(), "loader": loader, "step": 0})
        restored = (random.random() == wanted, loader.value["position"] == rank * 100, report.per_rank_skipped)
    with Repository.open(path, group=None) as alone:
        loader.value["position"] = -1
        report = alone.checkout(info.id, into={"rng": RNGState(), "loader": loader, "step": 0})
        return {"restored": restored, "skipped": sorted(report.per_rank_skipped), "left": loader.value["position"]}


def stages(path: str) -> dict[str, Any]:
    """Every rank holds a stage of a pipeline under keys of its own."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.ModuleDict({f"layer{rank}": nn.Linear(300, 31)})
    optim = torch.optim.AdamW(model.parameters())
    model[f"layer{rank}"](torch.rand(2, 300)).sum().backward()
    optim.step()
    with Repository.open(path, timeout_s=60) as repo:
        info = repo.commit({"model": model, "optim": optim}, branch="stages", options=CommitOptions(orphan=True))
        wanted = {name: value.clone() for name, value in model.state_dict().items()}
        for param in model.parameters():
            param.data.zero_()
        repo.checkout(info.id, into={"model": model, "optim": optim})
        keys = sorted(repo.load(info.id)["model"])
    return {"restored": same(dict(model.state_dict()), wanted), "keys": keys}


def half_of_the_job(path: str) -> dict[str, Any]:
    """Two groups of two ranks each commit a model of their own, at the same time."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = rank // 2
    model, _ = plain(seed=half)
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "shard"))
    fully_shard(model, mesh=halves["shard"])
    wanted = gathered(get_model_state_dict(model))
    with Repository.open(path, group=groups[half], timeout_s=60) as repo:
        info = repo.commit({"model": model}, branch=f"half-{half}", options=CommitOptions(orphan=True))
        for param in model.parameters():
            param.data.zero_()
        repo.checkout(info.id, into={"model": model})
    restored = same(gathered(get_model_state_dict(model)), wanted)
    with Repository.open(path, group=None) as alone:
        root = alone.commit({"model": wanted}, branch=f"alone-{rank}", options=CommitOptions(orphan=True)).root
    return {"root": info.root, "alone": root, "restored": restored}


def all_cases(path: str) -> dict[str, Any]:
    """Everything in one launch."""
    cases = {"divisions": every_division, "own": own_values, "stages": stages, "half": half_of_the_job}
    return {name: case(path) for name, case in cases.items()}


class DiesWhenAsked:
    """A Stateful whose rank is killed while its state is asked for."""

    def state_dict(self) -> dict[str, Any]:
        die()

    def load_state_dict(self, state: Any) -> None:
        """Killed as well."""
        die()


def a_rank_is_killed(path: str, victim: int, when: str) -> str:
    """One rank is killed with SIGKILL in the middle of a commit or checkout; what the others get."""
    model, optim = fsdp(dist.get_world_size())
    train(model, optim)
    state: dict[str, Any] = {"model": model, "optim": optim}
    repo = Repository.open(path, timeout_s=10)
    repo.commit(state | {"extra": StateDict()})
    if dist.get_rank() == victim:
        _prepare_death(repo, state, when)
    state.setdefault("extra", StateDict())
    try:
        if when.startswith("checkout"):
            repo.checkout("main", into=state)
        else:
            repo.commit(state, message="never")
    except PeerError as error:
        return f"{error.ranks}: {error}"
    except CkptError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def _prepare_death(repo: Repository, state: dict[str, Any], when: str) -> None:
    store = repo._handle.store
    if when == "commit, while describing":
        state["extra"] = DiesWhenAsked()
    elif when == "commit, while writing":
        state["new"] = torch.rand(4_000_000)
        store.open_writer = lambda key: die()  # type: ignore[method-assign]
    elif when == "commit, at the swap":
        store.compare_and_swap = lambda *args: die()  # type: ignore[method-assign]
    elif when == "checkout, while verifying":
        store.read_leaves = lambda *args, **options: die()  # type: ignore[method-assign]
    else:
        state["extra"] = DiesWhenAsked()
