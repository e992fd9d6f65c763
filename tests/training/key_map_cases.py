"""What ranks do in test_key_maps.py: they check out into divided tensors by a key map."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from cas_ckpt import KeyMap, Repository
from cas_ckpt.errors import PeerError

RULES: list[dict[str, Any]] = [
    {"fuse": ["q", "k"], "to": "qk", "groups": 2},
    {"fuse": ["v", "w"], "to": "vw"},  # there are ranks that want the second one alone
    {"interleave": "woven", "shape": [9, 2, -1]},
    {"interleave": "unwoven", "shape": [9, -1, 2]},
    {"transpose": "turned"},
    {"split": "both", "to": ["gate", "up"]},
    {"cast": "cast|small", "to": "bfloat16"},
    {"rename": "named", "to": "renamed"},
]


def stored() -> dict[str, torch.Tensor]:
    """Tensors in one chunk, in several, and in the tree itself."""
    torch.manual_seed(1)
    sizes = {"q": (1200, 700), "k": (600, 700), "woven": (5400, 400), "unwoven": (5400, 400), "turned": (1300, 900),
             "both": (1400, 1000), "cast": (1100, 1001), "named": (900, 900), "small": (6, 3),
             "v": (800, 500), "w": (800, 500)}  # fmt: skip
    return {name: torch.randn(size) for name, size in sizes.items()}


def wanted() -> dict[str, torch.Tensor]:
    """What torch makes of `stored` by `RULES`."""
    have = stored()
    q, k = have["q"].chunk(2), have["k"].chunk(2)
    gate, up = have["both"].chunk(2)
    return {
        "qk": torch.cat([q[0], k[0], q[1], k[1]]), "vw": torch.cat([have["v"], have["w"]]),
        "woven": have["woven"].reshape(9, 2, 300, 400).transpose(1, 2).reshape(5400, 400),
        "unwoven": have["unwoven"].reshape(9, 300, 2, 400).transpose(1, 2).reshape(5400, 400),
        "turned": have["turned"].T, "gate": gate, "up": up, "cast": have["cast"].bfloat16(), "renamed": have["named"],
        "small": have["small"].bfloat16(),
    }  # fmt: skip


def into_shards(path: str) -> list[str]:
    """The names of tensors that are not what they should be on this rank; every way of dividing them."""
    wrong = []
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plane = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    with Repository.open(path, timeout_s=60) as repo:
        for at, placements in [
            (mesh, [Shard(0)]),
            (mesh, [Shard(1)]),
            (mesh, [Replicate()]),
            (plane, [Shard(0), Shard(1)]),
        ]:
            whole = wanted()
            target = {
                name: distribute_tensor(torch.zeros_like(each), at, placements, src_data_rank=None)
                for name, each in whole.items()
            }
            target["turned"] = torch.zeros_like(whole["turned"])  # on each rank, not divided
            versions = {name: each._version for name, each in target.items()}
            report = repo.checkout("main", into=target, key_map=KeyMap(RULES))
            wrong += list(report.unmapped)
            for name, each in target.items():
                expected = whole[name]
                if isinstance(each, DTensor):
                    expected = distribute_tensor(expected, at, placements, src_data_rank=None).to_local()
                    if expected.numel() and each._version == versions[name]:
                        wrong.append(f"{name}: its version did not move")
                    each = each.to_local()
                if not torch.equal(each, expected):
                    wrong.append(f"{name} as {placements}")
    return wrong


def with_maps_of_their_own(path: str) -> str:
    """What is said where ranks give different maps."""
    rules = [{"rename": "named", "to": f"of rank {dist.get_rank()}"}]
    with Repository.open(path, timeout_s=60) as repo:
        try:
            repo.checkout("main", into={}, key_map=KeyMap(rules))
        except PeerError as error:
            return str(error)
    return ""
