"""What does a training loop feel of `commit_async(snapshot="lazy")`?

    python -m benchmarks.lazy_commit --write     everything, and docs/benchmarks/lazy-commit.md; a minute or so
    python -m benchmarks.lazy_commit --quick     fewer rounds; prints only

A training loop of one thread with one core left over. How much longer its next steps take, the hook's wait among them,
when a lazy commit of its own model and optimizer was begun before them; the pause of the call is not counted: see
benchmarks/async_commit.py. Once while it is staged alone, the commit waiting for its turn, and once up to the end of
the commit, which hashes and writes beside the loop.
"""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness.page import forget_all_but_one, heading, run, verdict
from cas_ckpt import Repository, limits
from cas_ckpt.training.background.commits import hold_steps, let_steps

WANTED_LONGER = 0.02
"""Most that the steps around it may be longer."""


class Training:
    """Layers with AdamW."""

    def __init__(self, num_layers: int, width: int, num_rows: int) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(width, width) for _ in range(num_layers)]
        self.model = torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(width))
        self.optim = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.data = torch.randn(num_rows, width)
        self.state = {"model": self.model, "optim": self.optim}

    def step(self) -> float:
        """Seconds that it took."""
        start = time.perf_counter()
        self.model(self.data).square().mean().backward()
        self.optim.step()
        self.optim.zero_grad()
        return time.perf_counter() - start

    def tensors(self) -> list[torch.Tensor]:
        kept = [value for values in self.optim.state.values() for value in values.values()]
        return [*self.model.parameters(), *self.model.buffers(), *kept]


def measure_steps(
    folder: Path, rounds: int, num_steps: int
) -> tuple[list[float], list[float], list[float], list[float], int]:
    """Of each round: how much longer the steps up to the end of staging were, and up to the end of the commit.

    And the seconds of a step alone, how much longer a step was beside a bare thread that copied the same bytes, and
    the bytes of the state.
    """
    training = Training(24, 1024, 192)
    for _ in range(3):
        training.step()
    first, all_of_them, alone_s, bare = list[float](), list[float](), list[float](), list[float]()
    views = [tensor.detach().numpy() for tensor in training.tensors()]
    copies = [view.copy() for view in views]
    with Repository.init(folder / "steps", group=None) as repo:
        for number in range(rounds + 1):
            before = [training.step() for _ in range(num_steps)]
            with repo._turn():  # the commit waits for it when all is staged
                with limits(num_threads=1):
                    pending = repo.commit_async(training.state, step=2 * number, snapshot="lazy")
                beside_staging = training.step()
            pending.result()
            with limits(num_threads=1):
                pending = repo.commit_async(training.state, step=2 * number + 1, snapshot="lazy")
            beside = [training.step() for _ in range(num_steps)]
            pending.result()
            after = [training.step() for _ in range(num_steps)]
            copier = threading.Thread(target=lambda: [np.copyto(*pair) for pair in zip(copies, views, strict=True)])
            copier.start()
            beside_bare = training.step()
            copier.join()
            alone = [*before, *after]
            if number:
                first.append(beside_staging / statistics.median(alone) - 1)
                all_of_them.append(sum(beside) / (sum(alone) / 2) - 1)
                bare.append(beside_bare / statistics.median(alone) - 1)
                alone_s.append(statistics.median(alone))
            forget_all_but_one(repo)
    return first, all_of_them, alone_s, bare, sum(tensor.nbytes for tensor in training.tensors())


def measure_hook(num_steps: int = 20_000) -> tuple[float, float]:
    """Seconds of a step of one small parameter before the hook was ever registered, and after, when nothing waits."""
    param = torch.nn.Parameter(torch.zeros(1))
    param.grad = torch.zeros(1)
    optim = torch.optim.SGD([param], lr=0.0)

    def steps_s() -> float:
        start = time.perf_counter()
        for _ in range(num_steps):
            optim.step()
        return (time.perf_counter() - start) / num_steps

    steps_s()
    before = min(steps_s() for _ in range(3))
    hold_steps(steps_s)  # type: ignore[arg-type]
    let_steps(steps_s)  # type: ignore[arg-type]
    return before, min(steps_s() for _ in range(3))


def page(steps: Any, hook: tuple[float, float], scratch: Path) -> str:
    first, all_of_them, alone_s, bare, loop_bytes = steps
    middle = statistics.median
    longer = middle(first)
    found = verdict(longer, WANTED_LONGER)
    return "\n".join([
        *heading("Lazy snapshots", "lazy_commit", scratch),
        "## Steps around it",
        "",
        f"24 layers with AdamW, {loop_bytes / 1e6:.0f} MB, one thread, one core left over, "
        f"`num_threads=1`; a step alone takes {middle(alone_s):.3f} s; medians of {len(first)} rounds, "
        "and the least and the most.",
        "",
        "| | longer | least, most | wanted |",
        "| --- | --- | --- | --- |",
        f"| a step while the state is staged, the commit after it | {longer:.1%} | {spread(first)} | {found} |",
        f"| a step beside a bare thread that copies the same bytes | {middle(bare):.1%} | {spread(bare)} | |",
        f"| three steps, the commit made beside them | {middle(all_of_them):.1%} | {spread(all_of_them)} | |",
        "",
        f"The hook, when nothing waits: {(hook[1] - hook[0]) * 1e9:.0f} ns of each step of an optimizer.",
        "",
        "The pause of the call: [async-commit.md](async-commit.md). What bounds them, and how to choose:",
        "[performance.md](../performance.md#the-pause-of-a-commit).",
        "",
    ])  # fmt: skip


def spread(values: list[float]) -> str:
    return f"{min(values):.1%}, {max(values):.1%}"


def measured(scratch: Path, quick: bool) -> str:
    hook = measure_hook()
    torch.set_num_threads(1)
    return page(measure_steps(scratch, 3 if quick else 9, 3), hook, scratch)


if __name__ == "__main__":
    raise SystemExit(run(None, __doc__, "lazy-commit", measured))
