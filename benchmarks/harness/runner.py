"""Run the plan: one process per operation, results appended as JSON lines the moment they are there.

The first line of a run names the machine; every other line is one operation: run, round, size, peer,
operation, and its figures - or `error` / `reason` / `skipped`. A failed operation ends its chain only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import machine
from benchmarks.harness.plan import Chain, Step, fits

_NOT_POSSIBLE = 3
_KEPT = "kept"


@dataclass(frozen=True, slots=True)
class Bench:
    """Where a run writes and how long one operation may take.

    Attributes:
        scratch: Folder for everything; emptied chain by chain.
        timeout_s: A worker that takes longer is killed and counts as failed.
    """

    scratch: Path
    run: str
    timeout_s: float = 600.0

    @property
    def results(self) -> Path:
        """The file of JSON lines."""
        return self.scratch / "results.jsonl"

    def clear(self) -> None:
        """Forget earlier runs: their results and whatever they kept."""
        self.results.unlink(missing_ok=True)
        shutil.rmtree(self.scratch / _KEPT, ignore_errors=True)

    def write(self, record: dict[str, Any]) -> None:
        """Append one line."""
        with self.results.open("a") as file:
            file.write(json.dumps({"run": self.run, **record}) + "\n")


def run_rounds(bench: Bench, rounds: Sequence[Sequence[Chain]]) -> int:
    """Run all rounds; returns how many operations failed."""
    bench.scratch.mkdir(parents=True, exist_ok=True)
    bench.write({"machine": machine.describe(bench.scratch), "rounds": len(rounds)})
    started = time.monotonic()
    failed = 0
    for number, chains in enumerate(rounds):
        for chain in chains:
            failed += _run_chain(bench, chain, number)
        print(f"-- round {number + 1} of {len(rounds)} done after {time.monotonic() - started:.0f} s", flush=True)
    return failed


def _run_chain(bench: Bench, chain: Chain, number: int) -> int:
    if not fits(chain, machine.available_memory(), machine.free_disk(bench.scratch)):
        place = {"round": number, "size": chain.size, "peer": chain.peer, "operation": chain.steps[0].operation}
        bench.write(place | {"skipped": "no room"})
        print(f"{chain.name}: skipped, no room", flush=True)
        return 0
    folder = _folder(bench, chain)
    try:
        return int(not all(_run_step(bench, chain, step, number, folder) for step in chain.steps))
    finally:
        if not chain.keep:
            shutil.rmtree(folder, ignore_errors=True)
            os.sync()


def _folder(bench: Bench, chain: Chain) -> Path:
    folder = bench.scratch / (_KEPT if chain.keep else "work") / chain.name.replace("/", "-")
    if not chain.keep:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _run_step(bench: Bench, chain: Chain, step: Step, number: int, folder: Path) -> bool:
    """Whether the chain can go on: True also when the peer just cannot do this one."""
    peer = chain.doer(step)
    figures = _work([step.operation, chain.size, peer, str(folder)], bench.timeout_s)
    bench.write({"round": number, "size": chain.size, "peer": peer, "operation": step.operation, **figures})
    print(f"{number + 1} {chain.size:13} {peer:20} {step.operation:14} {_outcome(figures)}", flush=True)
    return "error" not in figures


def _work(arguments: list[str], timeout_s: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.harness.worker", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {timeout_s:.0f} s"}
    if done.returncode not in (0, _NOT_POSSIBLE):
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1], "stderr": done.stderr[-2000:]}
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _outcome(figures: dict[str, Any]) -> str:
    for word in ("error", "reason"):
        if word in figures:
            return f"{word}: {figures[word]}"
    parts = [f"{figures['seconds']:8.3f} s"] if "seconds" in figures else []
    if "peak_bytes" in figures:
        parts.append(f"peak +{figures['peak_bytes'] / 1e6:.0f} MB")
    return "  ".join(parts)
