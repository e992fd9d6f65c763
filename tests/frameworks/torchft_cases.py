"""Replicas of torchft on CPUs, one process each: they train together, and one that was killed heals from a repository.

Processes are forked from a server that has imported this module: see tests/processes.py.
"""

from __future__ import annotations

import json
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo

from cas_ckpt.integrations.torchft import CasTransport
from tests import processes

if __name__ not in processes.IMPORTED:
    processes.IMPORTED.append(__name__)

STEPS = 6


def training(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(step: int, replica: int) -> torch.Tensor:
    return torch.rand(8, 4, generator=torch.Generator().manual_seed(10 * step + replica))


def train(folder: str, lighthouse: str, replica: int, seed: int, kill_at: int | None = None) -> None:
    """Train to the end with the other replica, and write the weights; SIGKILL before the optimizer's step `kill_at`."""
    model, optimizer = training(seed)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(found: dict[str, Any]) -> None:
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    wait = timedelta(seconds=20)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=wait), load_state_dict=load, state_dict=state, min_replica_size=2, timeout=wait,
        quorum_timeout=timedelta(seconds=60), connect_timeout=wait, replica_id=f"replica-{replica}", rank=0,
        world_size=1, store_addr="localhost", store_port=store.port, lighthouse_addr=lighthouse, hostname="localhost",
        checkpoint_transport=CasTransport(Path(folder) / "healing"),
    )  # fmt: skip
    while manager.current_step() < STEPS:
        manager.start_quorum()
        step = manager.current_step()
        optimizer.zero_grad()
        model(batch(step, replica)).square().mean().backward()
        for param in model.parameters():
            assert param.grad is not None
            manager.allreduce(param.grad).wait()
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if manager.should_commit():
            optimizer.step()
    weights = {name: value.tolist() for name, value in model.state_dict().items()}
    (Path(folder) / f"weights-{replica}").write_text(json.dumps(weights))
    manager.shutdown(wait=False)
