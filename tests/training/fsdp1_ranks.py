"""FSDP1 on two real gloo processes: `python -m tests.training.fsdp1_ranks` prints what each rank found wrong.

Its sharded state dicts gather and cut with real collectives, which a fake world has not.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

NUM_RANKS = 2


def work(rank: int, port: int, answers: Any) -> None:
    warnings.simplefilter("ignore")  # of torch: FSDP1 is deprecated, and has no devices here
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, NUM_RANKS, is_master=rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=60))
    from torch.distributed.device_mesh import init_device_mesh

    found = {"ShardedTensor": faults(rank, {}), "DTensor": faults(rank, {"device_mesh": init_device_mesh("cpu", (2,))})}
    answers.put((rank, found))
    dist.destroy_process_group()
    os._exit(0)  # no destructors: torch's threads are sometimes still there and abort the process


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


def main() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    ranks = [context.Process(target=work, args=(rank, port, answers)) for rank in range(NUM_RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(200)
        if process.exitcode != 0:
            for other in ranks:
                other.kill()
            sys.exit(f"a rank ended with {process.exitcode}")
    print(json.dumps(dict(sorted(answers.get() for _ in ranks))))


if __name__ == "__main__":
    main()
