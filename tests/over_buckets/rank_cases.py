"""What the processes of test_ranks_s3.py do; each function runs on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from cas_ckpt import Repository
from cas_ckpt.errors import CkptError
from cas_ckpt.storage import s3 as s3_module
from cas_ckpt.transfer import sources
from tests.ranks import die
from tests.servers import credentials

VICTIM = 2
PART_BYTES = 512 << 10
CUTS = {"rows": Shard(0), "columns": Shard(1)}


def whole_state() -> dict[str, torch.Tensor]:
    """The state as one process has it; ranks that divide it have parts of the same chunks."""
    chance = torch.Generator().manual_seed(1)
    shapes = {"rows": (2050, 1024), "columns": (1030, 510), "replica": (1024, 700)}
    shapes |= {f"small {number}": (80, 90) for number in range(40)}
    return {key: torch.randn(shape, generator=chance) for key, shape in shapes.items()}


def divided(state: Mapping[str, torch.Tensor], size: int) -> dict[str, torch.Tensor]:
    """The state over the first `size` ranks, each of which has a part of what can be cut, and all of the rest."""
    mesh = DeviceMesh("cpu", list(range(size)))
    if dist.get_rank() >= size:
        return {}
    return {
        key: distribute_tensor(tensor, mesh, [CUTS[key]]) if key in CUTS else tensor for key, tensor in state.items()
    }


def own_parts(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: getattr(tensor, "_local_tensor", tensor) for key, tensor in state.items()}


def restored(url: str, wanted: Mapping[str, torch.Tensor], **group: Any) -> bool:
    """Whether new memory for all that is wanted comes to hold it."""
    found = {key: torch.zeros_like(tensor) for key, tensor in wanted.items()}
    with Repository.open(url, cache=None, timeout_s=60, **group) as repo:
        repo.checkout("main", into=found)
    pairs = zip(own_parts(found).values(), own_parts(wanted).values(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def commits_and_restores(urls: Mapping[str, str]) -> dict[str, Any]:
    """A commit of all ranks, then restores into several divisions: each by a URL of its own, the commit by rank."""
    rank, state, found = dist.get_rank(), whole_state(), {}
    four, three = divided(state, 4), divided(state, 3)
    few = dist.new_group([0, 1, 2])
    with credentials():
        with Repository.open(urls[f"commit by {rank}"], cache=None, timeout_s=60) as repo:
            found["commit"] = repo.commit(four).id
        dist.barrier()
        found["four ranks"] = restored(urls["four ranks"], four)
        found["three ranks"] = rank == 3 or restored(urls["three ranks"], three, group=few)
        found["replicas"] = restored(urls["replicas"], state)
        sources.temporary_folders = list
        found["no folder to stage in"] = restored(urls["no folder to stage in"], four)
        dist.barrier()
    return found


def one_is_killed_while_it_uploads(url: str) -> tuple[str, tuple[int, ...]]:
    """What the other ranks raise, and whom it blames."""
    s3_module._MIN_PART_BYTES = PART_BYTES
    if dist.get_rank() == VICTIM:
        s3_module.S3Bucket.put_part = dies_at_the_second(s3_module.S3Bucket.put_part)
    with credentials(), Repository.open(url, cache=None, timeout_s=30) as repo:
        try:
            repo.commit(divided(whole_state(), 4))
        except CkptError as error:
            return f"{type(error).__name__}: {error}", getattr(error, "ranks", ())
    return "committed", ()


def dies_at_the_second(put_part: Any) -> Any:
    """Killed once a part is there."""

    def put(bucket: Any, name: str, upload: str, number: int, data: memoryview) -> str:
        if number > 1:
            die()
        tag: str = put_part(bucket, name, upload, number, data)
        return tag

    return put
