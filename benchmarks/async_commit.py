"""What does a training loop feel of a commit in the background?

    python -m benchmarks.async_commit --write     everything, and docs/benchmarks/async-commit.md; a minute or so
    python -m benchmarks.async_commit --quick     a smaller state and fewer rounds; prints only

The pause: how long `commit_async` takes until it returns, beside a plain copy of the same state into memory that was
touched before, `dst.copy_(src)` tensor by tensor, with as many threads as torch has. All ways take turns within a
round; between them every tensor changes, and the pending commit is waited for, outside of what is measured.

What a training loop feels afterwards: benchmarks/async_loops.py, and benchmarks/lazy_commit.py.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.page import forget_all_but_one, heading, run, verdict
from benchmarks.harness.sizes import SIZES, Size
from benchmarks.harness.state import build, flatten
from benchmarks.harness.state import step as change
from cas_ckpt import Repository

WAYS: Mapping[str, Mapping[str, Any]] = {
    "copy, thread": {},
    "copy, process": {"worker": "process"},
    "lazy, thread": {"snapshot": "lazy"},
}
"""What is measured: arguments of `commit_async`, by a name."""

GPT_2G = Size(
    "gpt-2g", "gpt", "GPT of 0.68 GB fp32 weights + AdamW, 2.03 GB in all", 2030 * 10**6, width=1024, layers=8
)
"""The GPT of 1.08 GB of the other benchmarks, with half of its blocks."""

WANTED_PAUSE = {"copy": 1.3, "lazy": 0.05}
"""Most that the pause may be of a plain copy, by `snapshot`."""


@dataclass(slots=True)
class Pauses:
    """Seconds, one for each round; of `commit` those of one commit."""

    copy: list[float] = field(default_factory=list)
    ways: dict[str, list[float]] = field(default_factory=dict)
    staged: dict[str, list[float]] = field(default_factory=dict)
    ends: dict[str, list[float]] = field(default_factory=dict)
    commit: float = 0.0
    num_bytes: int = 0
    num_tensors: int = 0


def measure_pauses(folder: Path, size: Size, rounds: int) -> Pauses:
    """The pause of every way, and the copy beside it. The first round, in which memory is touched, is not counted."""
    state, found = build(size, blank=False), Pauses()
    tensors = [leaf for _, leaf in flatten(state.plain()) if isinstance(leaf, torch.Tensor)]
    copies = [tensor.clone() for tensor in tensors]
    found.num_bytes, found.num_tensors = sum(tensor.nbytes for tensor in tensors), len(tensors)
    workers = {str(each.get("worker")) for each in WAYS.values()}  # ways of one worker share warm memory
    repos = {worker: Repository.init(folder / worker, group=None) for worker in workers}
    for number in range(rounds + 1):
        turns = [*WAYS, "copy"]
        for name in turns[number % len(turns) :] + turns[: number % len(turns)]:
            change(state, number)
            start = time.perf_counter()
            if name == "copy":
                for copy, tensor in zip(copies, tensors, strict=True):
                    copy.copy_(tensor)
                found.copy.append(time.perf_counter() - start)
            else:
                repo = repos[str(WAYS[name].get("worker"))]
                pending = repo.commit_async(state.parts, step=number, **WAYS[name])
                found.ways.setdefault(name, []).append(time.perf_counter() - start)
                pending.wait_staged()
                found.staged.setdefault(name, []).append(time.perf_counter() - start)
                pending.result()
                found.ends.setdefault(name, []).append(time.perf_counter() - start)
        forget_all_but_one(*repos.values())
    change(state, rounds)
    start = time.perf_counter()
    repos["None"].commit(state.parts)
    found.commit = time.perf_counter() - start
    for repo in repos.values():
        repo.close()
    for times in (found.copy, *found.ways.values(), *found.staged.values(), *found.ends.values()):
        del times[0]
    return found


def page(pauses: Pauses, scratch: Path) -> str:
    copy_s = statistics.median(pauses.copy)
    lines = [
        *heading("Commits in the background", "async_commit", scratch),
        "## The pause",
        "",
        f"A GPT with AdamW, as objects, {pauses.num_bytes / 1e9:.2f} GB in {pauses.num_tensors} tensors, everything "
        f"changed; medians of {len(pauses.copy)} rounds, all ways in",
        f"turns; {torch.get_num_threads()} threads copy. `staged`, `done`: seconds from the call until the state may "
        "change, and until the commit is durable,",
        "while nothing else runs. `commit` was measured once.",
        "",
        "| | pause, s | of the plain copy | wanted | staged, s | done, s |",
        "| --- | --- | --- | --- | --- | --- |",
        f"| plain copy into warm memory | {copy_s:.4f} | 1.00 | | | |",
        f"| `commit` | {pauses.commit:.3f} | {pauses.commit / copy_s:.2f} | | | {pauses.commit:.2f} |",
    ]
    for name, times in pauses.ways.items():
        ratio = statistics.median([ours / plain for ours, plain in zip(times, pauses.copy, strict=True)])
        wanted = WANTED_PAUSE[WAYS[name].get("snapshot", "copy")]
        ends = f"{statistics.median(pauses.staged[name]):.3f} | {statistics.median(pauses.ends[name]):.2f}"
        pause = f"{statistics.median(times):.4f} | {ratio:.3f} | {verdict(ratio, wanted)}"
        lines.append(f"| `commit_async`: {name} | {pause} | {ends} |")
    lines += [
        "",
        "Steps around a lazy commit: [lazy-commit.md](lazy-commit.md). What a training loop feels afterwards:",
        "[async-loops.md](async-loops.md). What bounds them, and how to choose:",
        "[performance.md](../performance.md#the-pause-of-a-commit).",
        "",
    ]
    return "\n".join(lines)


def measured(scratch: Path, quick: bool) -> str:
    size, rounds = (SIZES["gpt-1g-total"], 3) if quick else (GPT_2G, 4)
    return page(measure_pauses(scratch, size, rounds), scratch)


if __name__ == "__main__":
    raise SystemExit(run(None, __doc__, "async-commit", measured))
