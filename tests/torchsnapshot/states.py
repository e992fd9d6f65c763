"""App states that tests take snapshots of: a model that was trained a little, and what belongs to it."""

from __future__ import annotations

from typing import Any

import torch

from cas_ckpt.torchsnapshot import StateDict


def trained(seed: int, *, steps: int = 2, progress: int = 0) -> dict[str, Any]:
    """A model, its optimizer and scheduler, and a counter."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    sched = torch.optim.lr_scheduler.StepLR(optim, 2)
    for _ in range(steps):
        model(torch.randn(5, 3)).sum().backward()
        optim.step()
        sched.step()
        optim.zero_grad()
    return {"model": model, "optim": optim, "sched": sched, "progress": StateDict(step=progress)}


def same(one: Any, other: Any) -> bool:
    """Whether two states, or parts of them, are equal, bit by bit."""
    if hasattr(one, "state_dict") and hasattr(other, "state_dict"):
        return same(one.state_dict(), other.state_dict())
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
