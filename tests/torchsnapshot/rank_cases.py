"""What ranks do with snapshots; each function runs on every rank."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from cas_ckpt import MismatchError, PeerError
from cas_ckpt.clock import monotonic_s
from cas_ckpt.torchsnapshot import RNGState, Snapshot, StateDict, close_repositories, taking
from cas_ckpt.torchsnapshot.failures import PendingSnapshotError
from cas_ckpt.torchsnapshot.manifest import PrimitiveEntry, ShardedTensorEntry, is_fully_replicated_entry
from cas_ckpt.torchsnapshot.taking import Taking
from tests.torchsnapshot.states import same, trained

WHOLE = torch.arange(5 * 6, dtype=torch.float32).reshape(5, 6)


def table(*placements: Any) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(WHOLE.clone(), mesh, placements or (Shard(0),))


def take(folder: str) -> None:
    """Snapshots of two ranks of what can be in a state, restored by the same ranks at once."""
    rank = dist.get_rank()
    _replicated_and_own(folder, rank)
    _divided(folder, rank)
    _globs(folder, rank)
    _fail(folder, rank)
    _overlap(folder, rank)
    _look_at_different_moments(folder, rank)
    _take_fsdp(folder)
    close_repositories()


def _replicated_and_own(folder: str, rank: int) -> None:
    state = trained(1)
    state["progress"] = StateDict(step=10 + rank, history=[rank] * (rank + 1), noise=torch.full((3,), float(rank)))
    state["rng"] = RNGState()
    torch.manual_seed(rank)
    path = os.path.join(folder, f"own-{rank}")  # that of rank 0 counts
    snapshot = Snapshot.take(path, state, replicated=["model/**", "optim/**", "sched/**"])
    assert snapshot.path.endswith("own-0")
    drawn = torch.rand(1)
    other = trained(2 + rank, steps=0)
    other["progress"], other["rng"] = StateDict(step=0, noise=torch.zeros(3)), RNGState()
    noise = other["progress"]["noise"]
    snapshot.restore(other)
    assert torch.equal(torch.rand(1), drawn)
    assert all(same(other[key], state[key]) for key in ("model", "optim", "sched", "progress"))
    assert other["progress"]["noise"] is noise
    manifest = snapshot.get_manifest()
    assert is_fully_replicated_entry(manifest["0/model/0.weight"]) and "1/model/0.weight" not in manifest
    step = manifest["1/progress/step"]
    assert isinstance(step, PrimitiveEntry) and (step.get_value(), step.replicated) == (11, False)
    assert is_fully_replicated_entry(manifest["0/optim/param_groups/0/lr"])
    assert [snapshot.read_object(f"{each}/progress/history") for each in (0, 1)] == [[0], [1, 1]]
    assert torch.equal(snapshot.read_object("1/model/0.weight"), state["model"][0].weight)
    assert snapshot.get_state_dict_for_key("progress")["step"] == 10 + rank
    with pytest.raises(RuntimeError):
        snapshot.read_object("2/progress/step")


def _look_at_different_moments(folder: str, rank: int) -> None:
    """One rank has looked into the path before it was taken again: all restore what rank 0 found."""
    path, state = os.path.join(folder, "again"), StateDict(table=table(), step=1)
    Snapshot.take(path, {"state": state}, replicated=["**"])
    snapshot = Snapshot(path)
    if rank == 1:
        assert snapshot.read_object("1/state/step") == 1
    dist.barrier()
    state["step"] = 2
    Snapshot.take(path, {"state": state}, replicated=["**"])
    state["step"] = 3
    snapshot.restore({"state": state})
    assert state["step"] == 2 == snapshot.read_object(f"{rank}/state/step")


def _divided(folder: str, rank: int) -> None:
    """Beside one another in one state dict: divided tensors, some with an empty part, and what each rank has."""
    state = StateDict(
        table=table(), copy=table(Replicate()), mine=rank,
        narrow=distribute_tensor(WHOLE[:1].clone(), table().device_mesh, [Shard(0)]),
        nested=[{"t": table(Shard(1)), "mine": torch.full((2,), float(rank))}],
    )  # fmt: skip
    snapshot = Snapshot.take(os.path.join(folder, "divided"), {"state": state})
    other = StateDict(
        table=table() * 0, copy=table(Replicate()) * 0, narrow=state["narrow"] * 0, mine=-1,
        nested=[{"t": table(Shard(1)) * 0, "mine": torch.zeros(2)}],
    )  # fmt: skip
    snapshot.restore({"state": other})
    assert torch.equal(other["table"].to_local(), state["table"].to_local())
    assert torch.equal(other["copy"].to_local(), WHOLE) and torch.equal(other["narrow"].full_tensor(), WHOLE[:1])
    assert other["mine"] == rank and torch.equal(other["nested"][0]["mine"], state["nested"][0]["mine"])
    assert torch.equal(other["nested"][0]["t"].to_local(), state["nested"][0]["t"].to_local())
    manifest = snapshot.get_manifest()
    parts = [manifest[f"{each}/state/table"] for each in (0, 1)]
    assert all(isinstance(each, ShardedTensorEntry) for each in parts)
    assert [shard.sizes for each in parts for shard in each.shards] == [[3, 6], [2, 6]]  # type: ignore[attr-defined]
    assert is_fully_replicated_entry(manifest["0/state/copy"])
    assert torch.equal(snapshot.read_object(f"{rank}/state/table"), WHOLE)
    out = table() * 0
    assert snapshot.read_object("0/state/nested/0/t", out) is out  # divided otherwise
    assert torch.equal(out.to_local(), state["table"].to_local())


def _globs(folder: str, rank: int) -> None:
    """Only what all ranks say is replicated, and have, is."""
    state = StateDict(both=torch.ones(2), one=torch.ones(2), **({"only": torch.ones(1)} if rank else {}))
    globs = [["state/both", "state/only", "state/o*"], ["state/both", "state/only"]][rank]
    ddp = DistributedDataParallel(torch.nn.Linear(2, 3))
    path = os.path.join(folder, "globs")
    snapshot = Snapshot.take(
        path, {"state": state, "ddp": ddp, **({"extra": StateDict(x=5)} if rank else {})}, None, globs
    )
    found = {path for path, entry in snapshot.get_manifest().items() if is_fully_replicated_entry(entry)}
    assert found == {"0/state/both", "0/ddp/module.weight", "0/ddp/module.bias"}
    assert snapshot.read_object("1/state/only").item() == 1 and snapshot.read_object("1/extra/x") == 5
    bare = torch.nn.Module()
    bare.module = torch.nn.Linear(2, 3)
    Snapshot(path).restore({"ddp": bare, **({"extra": StateDict(x=0)} if rank else {})})
    assert same(bare.module, ddp.module)


def restore(folder: str) -> list[str]:
    """The snapshots of two ranks, by another number of ranks; what the log said."""
    told = _Told()
    logging.getLogger("cas_ckpt").addHandler(told)
    rank = dist.get_rank()
    snapshot = Snapshot(os.path.join(folder, "own-0"))
    other = trained(2 + rank, steps=0)
    other["progress"], other["rng"] = StateDict(step=0), RNGState()
    before = torch.get_rng_state()
    snapshot.restore(other)
    assert torch.equal(torch.get_rng_state(), before) == (rank >= 2)
    taken = trained(1)
    assert all(same(other[key], taken[key]) for key in ("model", "optim", "sched"))
    assert other["progress"]["step"] == (10 + rank if rank < 2 else 0)

    state = StateDict(table=table() * 0, mine=-1, nested=[{"t": table() * 0, "mine": torch.zeros(2)}])
    Snapshot(os.path.join(folder, "divided")).restore({"state": state})
    assert torch.equal(state["table"].full_tensor(), WHOLE) and torch.equal(
        state["nested"][0]["t"].full_tensor(), WHOLE
    )
    assert state["mine"] == (rank if rank < 2 else -1)
    mine = state["nested"][0].get("mine")
    assert mine is None if rank >= 2 else mine.eq(rank).all()
    with pytest.raises(MismatchError if rank == 2 else PeerError, match="as many ranks"):
        Snapshot(os.path.join(folder, "one-model-each")).restore({"model": torch.nn.Linear(2, 2)})
    _restore_fsdp(folder)
    return told.texts


class _Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _fail(folder: str, rank: int) -> None:
    """What one rank fails of is an error of all, at once; the snapshot that was there stays, and the next one works."""
    path = os.path.join(folder, "fails")
    good = {"state": StateDict(t=torch.ones(4))}
    Snapshot.take(path, good, replicated=["**"])

    class Fails(StateDict):
        def state_dict(self) -> dict[str, Any]:
            if rank == 1:
                raise OSError("sorry")
            return super().state_dict()

    start_s = monotonic_s()
    with pytest.raises(OSError if rank == 1 else PeerError, match="sorry"):
        Snapshot.take(path, {"state": Fails(t=torch.zeros(4))}, replicated=["**"])
    with pytest.raises(TypeError if rank == 1 else PeerError, match="no state_dict"):
        Snapshot.take(path, {"state": 1 if rank == 1 else StateDict()})  # type: ignore[dict-item]
    apart = {"state": StateDict(t=torch.full((4,), float(rank)))}
    for verb in (Snapshot.take, lambda *args, **kwargs: Snapshot.async_take(*args, **kwargs).wait()):
        with pytest.raises(Exception, match="state/t.*differs"):
            verb(path, apart, replicated=["**"])  # type: ignore[operator]
    lenient = Snapshot.take(path, apart, replicated=["**"], storage_options={"on_divergence": "warn"})
    assert lenient.read_object("1/state/t").eq(0).all()
    Snapshot.take(path, good, replicated=["**"])
    with pytest.raises(Exception, match="state/1/f"):
        Snapshot.async_take(path, {"state": StateDict(t=torch.ones(1), f=(lambda: "sorry") if rank else 1)}).wait()
    before = (Taking.name, taking.NAMED_WITHIN_S)
    Taking.name, taking.NAMED_WITHIN_S = _unnamed, 0.5  # type: ignore[method-assign]
    with pytest.raises(PendingSnapshotError, match="rank 0 has not named" if rank else "sorry"):
        Snapshot.async_take(path, good, replicated=["**"]).wait()
    Taking.name, taking.NAMED_WITHIN_S = before  # type: ignore[method-assign]
    assert monotonic_s() - start_s < 30
    assert Snapshot(path).read_object("0/state/t").all()
    Snapshot.take(path, apart)
    assert Snapshot(path).read_object(f"{rank}/state/t").eq(rank).all()
    models = {"model": torch.nn.Linear(2, 2)}
    Snapshot.take(os.path.join(folder, "one-model-each"), models)


def _unnamed(*_: Any) -> None:
    raise OSError("sorry")


def _overlap(folder: str, rank: int) -> None:
    """Asynchronous snapshots to one path: each is of its own moment on all ranks, and the last one is there."""
    path = os.path.join(folder, "again")
    state = StateDict(t=torch.zeros(500_000))
    pending = []
    for number in range(3):
        state["t"].fill_(10 * number + rank)
        pending.append(Snapshot.async_take(path, {"state": state}))
        state["t"].fill_(-1)
    taken = [each.wait() for each in pending]
    for number, snapshot in list(enumerate(taken))[1:]:  # the first one is forgotten by now
        for other in range(dist.get_world_size()):
            assert snapshot.read_object(f"{other}/state/t").eq(10 * number + other).all()
    dist.barrier()
    assert Snapshot(path).read_object("1/state/t").eq(21).all()


def _take_fsdp(folder: str) -> None:
    """A model under fully_shard, trained, with its optimizer."""
    model, optim = _fsdp(1)
    model(torch.ones(4, 8)).sum().backward()
    optim.step()
    Snapshot.take(os.path.join(folder, "fsdp"), {"model": model, "optim": optim}, replicated=["**"])


def _restore_fsdp(folder: str) -> None:
    """In another number of ranks it goes on as one process does that never stopped."""
    plain = _model(1)
    adam = torch.optim.AdamW(plain.parameters(), lr=0.1)
    model, optim = _fsdp(2)
    Snapshot(os.path.join(folder, "fsdp")).restore({"model": model, "optim": optim})
    for number in range(2):
        plain(torch.ones(4, 8)).sum().backward()
        adam.step()
        adam.zero_grad()
        if number == 1:
            model(torch.ones(4, 8)).sum().backward()
            optim.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.full_tensor(), plain.state_dict()[name])


def _model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))


def _fsdp(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = fully_shard(_model(seed), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)
