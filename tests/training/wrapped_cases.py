"""What each of two processes does in tests of DDP, FSDP1 and FSDP2: see `tests.ranks`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from cas_ckpt.objects.spec import raw_dtype
from cas_ckpt.objects.state import (
    Container,
    Item,
    Path,
    StoredTensor,
    TensorCopy,
    TensorItem,
    ValueItem,
    render_key,
    walk,
)
from cas_ckpt.training.capture.capture import capture_state
from cas_ckpt.training.restore.restore import plan_restore
from tests.training.roundtrip import commit

State = dict[str, Any]


def net(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 5))


def with_ddp(model: torch.nn.Sequential) -> torch.nn.Module:
    return DistributedDataParallel(model)


def with_fsdp1(model: torch.nn.Sequential, *, use_orig_params: bool) -> torch.nn.Module:
    options: dict[str, Any] = {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
    model[2] = FullyShardedDataParallel(model[2], **options)
    return FullyShardedDataParallel(model, **options)


def with_fsdp2(model: torch.nn.Sequential) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return model


WRAPPERS: dict[str, Callable[[torch.nn.Sequential], torch.nn.Module]] = {
    "DDP": with_ddp,
    "FSDP1": lambda model: with_fsdp1(model, use_orig_params=True),
    "FSDP1, flat": lambda model: with_fsdp1(model, use_orig_params=False),
    "FSDP2": with_fsdp2,
}


def made(seed: int, wrap: Callable[[torch.nn.Sequential], torch.nn.Module] | None, *, steps: int) -> State:
    model: torch.nn.Module = net(seed)
    model = wrap(model) if wrap is not None else model  # type: ignore[arg-type]
    state: State = {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1 + seed)}
    for _ in range(steps):
        train(state)
    return state


def train(state: State) -> None:
    state["optim"].zero_grad()
    state["model"](torch.ones(2, 4)).pow(2).sum().backward()
    state["optim"].step()


def fetch(copies: Sequence[TensorCopy]) -> None:
    """Fill what this rank has of each target."""
    for copy in copies:
        target: Any = copy.target
        whole = np.frombuffer(copy.stored.inline or b"", raw_dtype(copy.stored.spec.item_bytes))
        boxes = [piece.box for piece in target.pieces] if copy.placement else [copy.stored.spec.box]
        for box in boxes:
            array = target.open(box)
            np.copyto(array.view(whole.dtype), whole.reshape(copy.stored.spec.shape)[box.slices])
            target.done(box, array)


def united(state: State) -> dict[Path, Any]:
    """What all ranks hold together, by path; what is held twice must be equal."""
    mine = {
        path: told(item)
        for path, item in walk(capture_state(state, rank=dist.get_rank(), world_size=dist.get_world_size()))
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found: dict[Path, Any] = {}
    for path in {path for each in everyone for path in each}:
        parts = [each[path] for each in everyone if path in each]
        assert all(part[0] == parts[0][0] for part in parts), path
        found[path] = parts[0][0] if parts[0][1] is None else (parts[0][0], assembled(parts))
    return found


def told(item: Item) -> tuple[Any, Any]:
    """What must be equal on all ranks, and the pieces of a tensor."""
    if not isinstance(item, TensorItem):
        return (item, None)
    source: Any = item.source
    boxes = [piece.box for piece in source.pieces] if item.placement else [item.spec.box]
    raw = raw_dtype(item.spec.item_bytes)
    return item.spec, [(box, np.array(source.read(box)).view(raw)) for box in boxes]


def assembled(parts: Sequence[Any]) -> bytes:
    spec = parts[0][0]
    whole, count = np.zeros(spec.shape, raw_dtype(spec.item_bytes)), np.zeros(spec.shape, int)
    for _, pieces in parts:
        for box, array in pieces:
            assert not count[box.slices].any() or np.array_equal(whole[box.slices], array)
            whole[box.slices] = array
            count[box.slices] += 1
    assert count.all()
    return whole.tobytes()


def unsharded(tree: Container) -> dict[Path, Any]:
    def plain(item: Item) -> Any:
        return (item.spec, item.inline) if isinstance(item, StoredTensor) else item

    return {path: plain(item) for path, item in walk(tree)}


def restores_under_every_wrapper() -> list[str]:
    """Restore what one process committed under each wrapper; what both hold then must be that again."""
    warnings.simplefilter("ignore")
    source = made(0, None, steps=2)
    tree = commit(source)
    wanted = unsharded(tree)
    failures = []
    for name, wrap in WRAPPERS.items():
        for steps in (0, 1):
            state = made(1, wrap, steps=steps)
            if steps:
                state["model"](torch.ones(2, 4))  # leaves the parameters of FSDP2 gathered
            before = tensors_of(state)
            plan = plan_restore(state, tree, rank=dist.get_rank(), world_size=dist.get_world_size())
            fetch(plan.copies)
            plan.finish()
            found = united(state)
            label = f"{name} after {steps} steps"
            if found != wanted:
                odd = [path for path in found.keys() | wanted.keys() if found.get(path) != wanted.get(path)]
                failures.append(f"{label}: {sorted(map(render_key, odd))}")
            same = [a is b for a, b in zip(before, tensors_of(state), strict=bool(steps))]
            if name in ("DDP", "FSDP2") and not all(same):
                failures.append(f"{label}: tensor objects were replaced")
            if name == "FSDP2" and {type(each).__name__ for each in tensors_of(state) if each.ndim} != {"DTensor"}:
                failures.append(f"{label}: state that is not divided")
            train(state)
            if united(state).keys() != wanted.keys():
                failures.append(f"{label}: training does not go on")
    return failures


def tensors_of(state: State) -> list[torch.Tensor]:
    return [value for each in state["optim"].state.values() for value in each.values()]


def commits_without_effect() -> list[str]:
    """Capture optimizers without state: they have none afterwards."""
    warnings.simplefilter("ignore")
    failures = []
    for name, wrap in WRAPPERS.items():
        state = made(1, wrap, steps=0)
        with torch.no_grad():
            state["model"](torch.ones(2, 4))  # leaves the parameters of FSDP2 gathered
        optimizer_first = dict(reversed(state.items()))
        tree = capture_state(optimizer_first, rank=dist.get_rank(), world_size=dist.get_world_size())
        grads = any(param.grad is not None for param in state["model"].parameters())
        if state["optim"].state or grads:
            failures.append(f"{name}: the optimizer got a state")
        optim: Any = tree.children["optim"]
        params = optim.children["param_groups"].children[0].children["params"]
        if params != ValueItem(["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]):
            failures.append(f"{name}: {params}")
    return failures


def everything() -> list[str]:
    return [*commits_without_effect(), *restores_under_every_wrapper()]
