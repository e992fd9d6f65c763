"""What does a training loop feel of a commit in the background?

    python -m benchmarks.async_commit --write     everything, and docs/benchmarks/async-commit.md; a minute or so
    python -m benchmarks.async_commit --quick     a smaller state and fewer rounds; prints only

The pause: how long `commit_async` takes until it returns, beside a plain copy of the same state into memory that was
touched before, `dst.copy_(src)` tensor by tensor, with as many threads as torch has. All ways take turns within a
round; between them every tensor changes, and the pending commit is waited for, outside of what is measured.

What a training loop feels afterwards: benchmarks/async_loops.py.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.machine import describe
from cas_ckpt import Repository

REPORT = Path(__file__).parent.parent / "docs" / "benchmarks" / "async-commit.md"

WAYS: Mapping[str, Mapping[str, Any]] = {
    "copy, thread": {},
    "copy, process": {"worker": "process"},
    "lazy, thread": {"snapshot": "lazy"},
}
"""What is measured: arguments of `commit_async`, by a name."""

WANTED_PAUSE = {"copy": 1.3, "lazy": 0.05}
"""Most that the pause may be of a plain copy, by `snapshot`."""


def gpt(num_bytes: int) -> dict[str, Any]:
    """A GPT's blocks and AdamW, whose weights and two moments come to about so many bytes together."""
    width = 768
    blocks = max(1, num_bytes // (3 * 12 * width * width * 4))
    layers = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    model = torch.nn.ModuleList(
        torch.nn.Sequential(*(torch.nn.Linear(*sizes) for sizes in layers), torch.nn.LayerNorm(width))
        for _ in range(blocks)
    )
    optim = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        moments = {name: torch.rand_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optim.state[parameter] = {"step": torch.tensor(1.0), **moments}
    return {"model": model, "optim": optim}


def tensors_of(state: Mapping[str, Any]) -> list[torch.Tensor]:
    """Weights and moments, in the order of the state."""
    moments = [each for kept in state["optim"].state.values() for each in kept.values()]
    return [parameter.detach() for parameter in state["model"].parameters()] + moments


@dataclass(slots=True)
class Pauses:
    """Seconds, one for each round."""

    copy: list[float] = field(default_factory=list)
    ways: dict[str, list[float]] = field(default_factory=dict)
    ends: dict[str, list[float]] = field(default_factory=dict)
    commit: list[float] = field(default_factory=list)


def measure_pauses(folder: Path, num_bytes: int, rounds: int) -> tuple[Pauses, int]:
    """The pause of every way, and the copy beside it; and the bytes of the state. The first round is not counted."""
    state, found = gpt(num_bytes), Pauses()
    tensors = tensors_of(state)
    copies = [tensor.clone() for tensor in tensors]
    repos = {name: Repository.init(folder / f"pause-{at}", group=None) for at, name in enumerate(WAYS)}
    plain = Repository.init(folder / "pause-plain", group=None)
    for number in range(rounds + 1):
        turns = [*WAYS, "copy", "commit"]
        for name in turns[number % len(turns) :] + turns[: number % len(turns)]:
            for tensor in tensors:
                tensor.add_(1e-3)
            start = time.perf_counter()
            if name == "copy":
                for copy, tensor in zip(copies, tensors, strict=True):
                    copy.copy_(tensor)
                found.copy.append(time.perf_counter() - start)
            elif name == "commit":
                plain.commit(state, step=number)
                found.commit.append(time.perf_counter() - start)
            else:
                pending = repos[name].commit_async(state, step=number, **WAYS[name])
                found.ways.setdefault(name, []).append(time.perf_counter() - start)
                pending.result()
                found.ends.setdefault(name, []).append(time.perf_counter() - start)
        forget_all_but_one(plain, *repos.values())
    for repo in (plain, *repos.values()):
        repo.close()
    for times in (found.copy, found.commit, *found.ways.values(), *found.ends.values()):
        del times[0]
    return found, sum(tensor.nbytes for tensor in tensors)


def forget_all_but_one(*repos: Repository) -> None:
    """Let the disk not fill up with what was measured."""
    from cas_ckpt import Policy

    for repo in repos:
        repo.forget(Policy(keep_last=1), gc=True)
        repo.gc(min_age_s=0)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def page(pauses: Pauses, num_bytes: int, scratch: Path) -> str:
    machine = describe(scratch)
    copy_s = median(pauses.copy)
    lines = [
        "# Commits in the background",
        "",
        "Written by `python -m benchmarks.async_commit --write`, figures as they came.",
        f"Machine: {machine['processor']}, {machine['memory']}, Python {machine['python']}, {machine['disk']}; "
        f"commit {machine['commit']}.",
        f"Load when it ended (1, 5, 15 minutes): {', '.join(f'{load:.2f}' for load in os.getloadavg())}.",
        "",
        "## The pause",
        "",
        f"A GPT with AdamW, {num_bytes / 1e9:.2f} GB, everything changed; medians of {len(pauses.copy)} rounds, all "
        "ways in turns.",
        "`until done`: from the call until the commit is durable, while nothing else runs.",
        "",
        "| | pause, s | of the plain copy | wanted | until done, s |",
        "| --- | --- | --- | --- | --- |",
        f"| plain copy into warm memory | {copy_s:.3f} | 1.00 | | |",
        f"| `commit` | {median(pauses.commit):.3f} | {median(pauses.commit) / copy_s:.2f} | | |",
    ]
    for name, times in pauses.ways.items():
        ratio = median([ours / plain for ours, plain in zip(times, pauses.copy, strict=True)])
        wanted = WANTED_PAUSE[WAYS[name].get("snapshot", "copy")]
        verdict = f"{wanted:.2f} {'met' if ratio <= wanted else 'missed'}"
        end_s = median(pauses.ends[name])
        lines.append(f"| `commit_async`: {name} | {median(times):.3f} | {ratio:.2f} | {verdict} | {end_s:.2f} |")
    lines += [
        "",
        "What a training loop feels afterwards: [async-loops.md](async-loops.md). What bounds them, and how to choose:",
        "[performance.md](../performance.md#the-pause-of-a-commit).",
        "",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; write the page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args(argv)
    scratch = Path(tempfile.mkdtemp(prefix="cas-ckpt-async-", dir=options.scratch))
    num_bytes, rounds = (300 << 20, 4) if options.quick else (700 << 20, 5)
    try:
        pauses, total = measure_pauses(scratch, num_bytes, rounds)
        made = page(pauses, total, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(made)
    if options.write:
        REPORT.write_text(made)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
