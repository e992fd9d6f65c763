"""Training loops that do the same whenever they are begun with the same seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cas_ckpt import StateDict


class Net(torch.nn.Module):
    """Layers that are staged later, buffers that a forward changes, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(60, 270)
        self.norm = torch.nn.BatchNorm1d(270)  # buffers that are too large to be stored in the tree
        self.second = torch.nn.Linear(270, 60)
        self.third = torch.nn.Linear(270, 60)
        self.third.weight = self.second.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        return self.second(x) + self.third(x)


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=False),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True, amsgrad=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "Adam with a rate that is a tensor": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.1)),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3),
}


class Training:
    """A training loop that does the same whenever it is begun with the same seed."""

    def __init__(self, kind: str = "AdamW foreach", seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        self.optim = KINDS[kind](self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optim, 2)
        self.loose = torch.arange(3000.0)
        self.progress = StateDict(step=0, seen=[1, {"a": 2}])
        self.state = {
            "model": self.model, "optim": self.optim, "schedule": self.schedule, "loose": self.loose,
            "progress": self.progress,
        }  # fmt: skip
        self.step()

    def forward_and_backward(self) -> torch.Tensor:
        self.optim.zero_grad()
        loss = self.model(torch.randn(8, 60)).square().mean()
        loss.backward()
        return loss

    def step(self) -> None:
        self.optim.step(self.forward_and_backward)  # type: ignore[arg-type]
        self.schedule.step()
        self.progress["step"] += 1
        self.progress["seen"][1]["a"] += 1
        self.loose.mul_(1.5)
