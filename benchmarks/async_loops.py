"""What does a training loop lose while a commit runs beside it, made by a thread or by a process?

    python -m benchmarks.async_loops --write     prints, and writes docs/benchmarks/async-loops.md; two minutes
    python -m benchmarks.async_loops             prints only

A loop of one thread runs alone for a while, then beside a commit in the background whose state is staged already; both
on all cores of the machine, of which the loop needs one. Two loops: one that is Python and nothing else, and one of
small layers of torch. The commit is that of a state of which everything has changed, with `num_threads` as it is by
itself; its store is in memory (/dev/shm), so that no disk is waited for. Beside that, each loop runs next to a process
that does nothing but copy memory, at the worker's niceness. The cores of a virtual machine change their pace from
second to second, alone or not: so there are many rounds, and of each it is noted for how long the loop's thread did not
run at all, which is what the commit took from it: a core, or the interpreter's lock.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.harness.page import forget_all_but_one, heading, run
from cas_ckpt import Repository
from cas_ckpt.ops.commit.worker_process import NICENESS

WANTED = 0.05
"""Share of its steps that a loop may lose beside a worker process; of a thread it is reported."""


class PythonLoop:
    """Python and nothing else, such as a tokenizer or an environment."""

    def step(self) -> None:
        counts: dict[int, int] = {}
        for number in range(20_000):
            counts[number % 97] = counts.get(number % 97, 0) + number


class TorchLoop:
    """Small layers, so that a step is many short operators."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(12)))
        self.optim = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.data = torch.randn(32, 128)

    def step(self) -> None:
        self.model(self.data).square().mean().backward()
        self.optim.step()
        self.optim.zero_grad()


@dataclass(frozen=True)
class Row:
    """One way beside one loop: a figure for each round."""

    loop: str
    worker: str
    lost: Sequence[float]
    not_running: Sequence[float]
    rates: Sequence[float]


def rate(
    loop: PythonLoop | TorchLoop, is_over: Callable[[], bool] | None, *, least_s: float = 0.5
) -> tuple[float, float]:
    """Steps a second until `is_over`, for `least_s` where nothing else runs; share of that time without a core."""
    start, ran, steps = time.perf_counter(), time.thread_time(), 0
    while True:
        loop.step()
        steps += 1
        taken = time.perf_counter() - start
        if is_over() if is_over is not None else taken >= least_s:
            return steps / taken, max(0.0, 1 - (time.thread_time() - ran) / taken)


def measure(folder: Path, name: str, loop: PythonLoop | TorchLoop, worker: str, num_bytes: int, rounds: int) -> Row:
    state = {str(number): torch.randn(1 << 20) for number in range(num_bytes >> 22)}
    size = sum(tensor.nbytes for tensor in state.values())
    lost, not_running, rates = [], [], []
    with Repository.init(folder / f"{name}-{worker}", group=None) as repo:
        for number in range(rounds + 1):
            for tensor in state.values():
                tensor.add_(1e-3)
            alone, _ = rate(loop, None)
            pending = repo.commit_async(state, worker=worker)
            start = time.perf_counter()
            beside, waited = rate(loop, pending.done)
            taken = time.perf_counter() - start
            pending.result()
            if number:
                lost.append(1 - beside / alone)
                not_running.append(waited)
                rates.append(size / taken)
            forget_all_but_one(repo)
    return Row(name, worker, lost, not_running, rates)


def measure_beside_copies(name: str, loop: PythonLoop | TorchLoop, rounds: int) -> Row:
    """The loop beside a process of the worker's niceness that only copies memory: what two programs share anyway."""
    program = (
        f"import os, numpy as np; os.nice({NICENESS}); a = np.ones(32 << 20, np.uint8); b = a.copy()\n"
        "print(flush=True)\nwhile True: np.copyto(a, b); np.copyto(b, a)"
    )
    lost, not_running = [], []
    for _ in range(rounds):
        alone, _ = rate(loop, None)
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            beside, waited = rate(loop, None)
            lost.append(1 - beside / alone)
            not_running.append(waited)
            other.kill()
    return Row(name, "(a process that copies memory)", lost, not_running, [])


def page(rows: Sequence[Row], scratch: Path) -> str:
    lines = [
        *heading("Training loops beside a commit", "async_loops", scratch),
        "A loop of one thread, alone and beside a commit whose state is staged already and has changed everywhere; the",
        "store is in memory. Medians, and all rounds in brackets. Not running: for this share of the time the loop",
        "had no core, or waited for the interpreter's lock; the other steps are lost while it runs.",
        "",
        "| loop | `worker` | steps lost | wanted | not running | the commit goes on at, GB/s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lost = statistics.median(row.lost)
        every = ", ".join(f"{each:.0%}" for each in row.lost)
        wanted = ("met" if lost <= WANTED else "missed") if row.worker == "process" else ""
        verdict = f"{WANTED:.0%} {wanted}" if wanted else ""
        waited = f"{statistics.median(row.not_running):.1%}"
        speed = f"{statistics.median(row.rates) / 1e9:.2f}" if row.rates else ""
        lines.append(f"| {row.loop} | {row.worker} | {lost:.1%} ({every}) | {verdict} | {waited} | {speed} |")
    lines += ["", "What bounds them, and how to choose: [performance.md](../performance.md#a-worker-process).", ""]
    return "\n".join(lines)


def measured(scratch: Path, quick: bool) -> str:
    torch.set_num_threads(1)
    loops = {"Python": PythonLoop(), "torch, small layers": TorchLoop()}
    most = 3 if quick else 11
    rows = []
    for name, loop in loops.items():
        for _ in range(30):
            loop.step()
        for worker in ("thread", "process"):
            is_slow = name == "Python" and worker == "thread"  # a commit takes many seconds
            num_bytes, rounds = (64 << 20, 3) if is_slow else (512 << 20, most)
            rows.append(measure(scratch, name, loop, worker, num_bytes, rounds))
        rows.append(measure_beside_copies(name, loop, most))
    return page(rows, scratch)


if __name__ == "__main__":
    raise SystemExit(
        run(None, __doc__, "async-loops", measured, scratch="/dev/shm" if Path("/dev/shm").is_dir() else None)
    )
