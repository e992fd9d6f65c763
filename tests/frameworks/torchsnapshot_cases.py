"""What ranks do with torchsnapshot itself."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torchsnapshot
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec

from tests import processes
from tests.torchsnapshot.states import trained

if __name__ not in processes.IMPORTED:
    processes.IMPORTED.append(__name__)


def take(folder: str) -> None:
    """A snapshot of two ranks: replicated, each rank's own, and a tensor that is divided."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{each}/cpu" for each in range(size)])  # type: ignore[no-untyped-call]
    table = sharded_tensor.empty(spec, 7, 3)
    for shard in table.local_shards():
        torch.nn.init.constant_(shard.tensor, float(rank + 1))
    state = {**trained(1), "progress": torchsnapshot.StateDict(step=10 + rank, history=[rank] * (rank + 1))}
    state |= {"table": torchsnapshot.StateDict(t=table), "rng": torchsnapshot.RNGState()}
    torchsnapshot.Snapshot.take(folder, state, replicated=["model/**", "optim/**", "sched/**"])
    torch.save(torch.get_rng_state(), Path(folder).parent / f"rng-{rank}.pt")
