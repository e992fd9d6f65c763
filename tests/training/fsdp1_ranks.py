"""FSDP1 on two real gloo processes: what each rank finds wrong.

Its sharded state dicts gather and cut with real collectives, which a fake world has not.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def both_forms() -> dict[str, list[str]]:
    """What each form of a sharded state dict gets wrong on this rank."""
    warnings.simplefilter("ignore")  # of torch: FSDP1 is deprecated, and has no devices here
    rank = dist.get_rank()
    return {"ShardedTensor": faults(rank, {}), "DTensor": faults(rank, {"device_mesh": init_device_mesh("cpu", (2,))})}


def faults(rank: int, options: Mapping[str, Any]) -> list[str]:
    """What of a sharded FSDP1 model is not captured, or not restored, element by element."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    from cas_ckpt.training.capture.capture import capture_state
    from cas_ckpt.training.restore.restore import plan_restore
    from tests.training.roundtrip import commit
    from tests.training.shards import fetch_held, reads_as

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    sharded = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True, **options)
    FullyShardedDataParallel.set_state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT)
    sharded(torch.ones(2, 6)).sum().backward()
    items: Any = capture_state({"m": sharded.state_dict()}).children["m"]
    wrong = [f"captured {name}" for name, item in items.children.items() if not reads_as(item, whole[name], rank)]
    wrong += [f"unplaced {name}" for name, item in items.children.items() if item.placement is None]
    wanted = {name: torch.rand_like(value) for name, value in whole.items()}
    plan = plan_restore({"m": sharded}, commit({"m": wanted}))
    fetch_held(plan.copies, rank)
    plan.finish()
    FullyShardedDataParallel.set_state_dict_type(sharded, StateDictType.FULL_STATE_DICT)
    full = sharded.state_dict()
    return wrong + [f"restored {name}" for name in wanted if not torch.equal(full[name], wanted[name])]
