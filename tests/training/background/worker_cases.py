"""What happens in processes of their own in test_worker_processes.py."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from cas_ckpt import CommitOptions, Repository
from cas_ckpt.ops.commit import worker
from tests.ops.commit.worker_entries import MODULE


def train_until_killed(path: Path) -> None:
    """Commit a state of which every tensor has the number of the step, and say so."""
    repo = Repository.open(path)
    state = {"a": torch.zeros(400_000), "b": torch.zeros(400_000)}
    step = 0
    while True:
        step += 1
        for tensor in state.values():
            tensor.fill_(step)
        repo.commit_async(state, step=step, worker="process")
        background = repo._background  # the caller wants to know whom it must not find afterwards
        assert background is not None and background._worker is not None
        print(background._worker.pid, flush=True)


def train_until_killed_by_the_worker(path: Path, number: int) -> None:
    """Commit a state of which every tensor has `number`; the worker kills this process after so many effects."""
    worker.ENTRY = f"{MODULE}:kill_trainer_after_{number}"
    repo = Repository.open(path)
    state = {"a": torch.full((40_000,), number), "b": torch.full((30_000,), number)}
    pending = repo.commit_async(state, step=number, worker="process")
    for tensor in state.values():
        tensor.zero_()
    background = repo._background
    assert background is not None and background._worker is not None
    print(background._worker.pid, flush=True)
    pending.result()


def wait_in_drain(path: Path) -> None:
    """Be interrupted, with all of the process group, while a commit is made; and wait for it."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    repo = Repository.open(path)
    state = {str(number): torch.randn(1 << 20) for number in range(8)}
    repo.commit_async(state, step=0, worker="process").result()
    for tensor in state.values():
        tensor.add_(1)
    pending = repo.commit_async(state, step=1, worker="process")
    try:
        print("drains", flush=True)
        time.sleep(30)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    print("drained", repo.drain(), flush=True)
    pending.result()
    repo.close()


def commits_of_ranks(folder: str) -> list[str]:
    """The roots of the same state: whole, divided, and divided with too little room to stage it."""
    weights = torch.arange(600_000, dtype=torch.float32).reshape(1000, 600)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    divided = distribute_tensor(weights, mesh, [Shard(0)])
    repo = Repository.open(folder)
    roots = [repo.commit({"w": weights}).root]
    for staging_bytes in (None, 0):
        pending = repo.commit_async(
            {"w": divided}, worker="process", options=CommitOptions(staging_bytes=staging_bytes)
        )
        with torch.no_grad():
            divided.to_local().add_(1)
        roots.append(pending.result().root)
        with torch.no_grad():
            divided.to_local().sub_(1)
    repo.close()
    return roots


def commits_whose_worker_dies_right_after(folder: str) -> list[tuple[str, str | None, list[str]]]:
    """Of each rank once: the commit, `head`, and the history, as this rank sees them."""
    found = []
    entry, rank = worker.ENTRY, dist.get_rank()
    repo = Repository.open(folder)
    for unlucky in range(dist.get_world_size()):
        with repo:
            if rank == unlucky:
                worker.ENTRY = "tests.ops.commit.worker_entries:die_once_published"
            made = repo.commit_async({"w": torch.full((1000,), unlucky)}, worker="process").result(60)
            worker.ENTRY = entry
            head = repo.head.commit
            repo.commit({"w": torch.full((1000,), 7 + unlucky)})
            found.append((made.id, head, [each.id for each in repo.log()]))
        repo = Repository.open(folder)
        repo.checkout("main", into={"w": torch.zeros(1000, dtype=torch.int64)})
    repo.close()
    return found
