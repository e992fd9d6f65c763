"""How much memory does a call hold beyond the state, and beyond its budget?

    python -m benchmarks.memory --write     everything, and docs/benchmarks/memory.md, two minutes or so
    python -m benchmarks.memory --quick     a quarter of the state; prints only

Each case runs in a process of its own, which calls every verb once with a tiny state before: what is imported is not
what the next call holds. The peak is VmHWM, reset before the call, less what was resident then; of `load`, less what it
returns. Linux only.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.meter import measured
from benchmarks.harness.page import heading
from cas_ckpt import CommitOptions, Repository, limits
from cas_ckpt.memory import DEFAULT_BYTES

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "docs" / "benchmarks" / "memory.md"
MB = 1000**2

VERBS = ("commit", "changed", "unchanged", "checkout", "load", "export", "push")

CASES: tuple[tuple[str, str, int, str, int | None, int], ...] = (
    ("1.07 GB in 4 tensors, raw", "large", 4, "raw", None, 16),
    ("1.07 GB in 4 tensors, planes", "large", 4, "planes", None, 16),
    ("1.07 GB in 4 tensors, planes, 72 MB", "large", 4, "planes", 72 * MB, 16),
    ("128 MB in 100,000 tensors", "small", 100_000, "auto", None, 0),
)
"""What it is called, tensors of which kind and how many, encoding, budget, threads."""


def make_state(kind: str, number: int, *, quick: bool) -> dict[str, torch.Tensor]:
    """Zeros."""
    if kind == "large":
        return {f"w{at}": torch.zeros(8192 // (4 if quick else 1), 8192) for at in range(number)}
    return {f"layers.{at}.weight": torch.zeros(320) for at in range(number // (4 if quick else 1))}


def randomize(state: dict[str, torch.Tensor], seed: int) -> None:
    """Bytes that no encoding makes shorter."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in state.values():
        tensor.view(torch.int32).random_(generator=generator)


def measure_case(folder: Path, case: list[Any], *, quick: bool) -> dict[str, int]:
    """Verb -> bytes, in this process."""
    _, kind, number, encoding, memory_bytes, num_threads = case
    state, tiny = make_state(kind, number, quick=quick), {"w": torch.zeros(1000)}
    total_bytes = sum(tensor.nbytes for tensor in state.values())
    peaks: dict[str, int] = {}

    def peak(verb: str, call: Callable[[], object], *, returned_bytes: int = 0) -> None:
        out: dict[str, Any] = {}
        with measured(out), limits(memory_bytes=memory_bytes, num_threads=num_threads):
            call()
        peaks[verb] = out["peak_bytes"] - returned_bytes

    with Repository.init(folder / "repo", group=None, encoding=encoding) as repo:
        repo.commit(tiny, branch="tiny", options=CommitOptions(create=True))
        repo.checkout("tiny", into=tiny)
        repo.load("tiny")
        repo.export("tiny", folder / "tiny.safetensors")
        Repository.init(folder / "other").close()
        repo.push(folder / "other", "tiny")
        randomize(state, 1)
        peak("commit", lambda: repo.commit(state, branch="main", options=CommitOptions(create=True)))
        randomize(state, 2)
        peak("changed", lambda: repo.commit(state))
        peak("unchanged", lambda: repo.commit(state))
        peak("checkout", lambda: repo.checkout("main~2", into=state))
        peak("load", lambda: repo.load("main"), returned_bytes=total_bytes)
        peak("export", lambda: repo.export("main", folder / "x.safetensors"))
        peak("push", lambda: repo.push(folder / "other", "main"))
    return peaks


def run_case(case: tuple[Any, ...], *, quick: bool, scratch: str | None) -> dict[str, int]:
    """The same in a process of its own."""
    folder = tempfile.mkdtemp(prefix="cas-ckpt-memory-", dir=scratch)
    try:
        command = [sys.executable, "-m", "benchmarks.memory", "--case", json.dumps(case), "--folder", folder]
        command += ["--quick"] * quick
        done = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
        return found
    finally:
        shutil.rmtree(folder)


def page(rows: list[tuple[str, int, dict[str, int]]], scratch: Path) -> str:
    """The report."""
    lines = [
        *heading("Memory beyond the state", "memory", scratch),
        "The most that is resident while a call runs (VmHWM), above what was before it, in MB; of `load`, less what it",
        "returns. Each row is a process, and calls follow one another there: buffers that the first commit leaves to",
        "the process are there already when the next begins.",
        "",
        f"| state | budget | {' | '.join(VERBS)} |",
        f"| --- | --- |{' --- |' * len(VERBS)}",
    ]
    for name, budget, peaks in rows:
        figures = " | ".join(f"{max(0, peaks[verb]) / MB:.0f}" for verb in VERBS)
        lines.append(f"| {name} | {budget // MB} | {figures} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the page")
    parser.add_argument("--quick", action="store_true", help="a quarter of the state")
    parser.add_argument("--scratch", help="where repositories go; default: the system's folder for temporary files")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.case:
        print(json.dumps(measure_case(Path(given.folder), json.loads(given.case), quick=given.quick)))
        return
    rows = []
    for case in CASES:
        found = run_case(case, quick=given.quick, scratch=given.scratch)
        rows.append((case[0], case[4] or DEFAULT_BYTES, found))
        print(rows[-1], flush=True)
    text = page(rows, Path(given.scratch or tempfile.gettempdir()))
    print(text)
    if given.write:
        REPORT.write_text(text)


if __name__ == "__main__":
    main()
