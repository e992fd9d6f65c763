"""What does the interpreter's lock cost a commit and a restore? The same code with it and without, in turns.

    python -m benchmarks.free_threaded PYTHON PYTHON --write     writes docs/benchmarks/free-threaded.md; half a minute

Each PYTHON is an interpreter that has NumPy, blake3, msgpack, zstandard, SQLAlchemy and alembic, and needs no torch:
plain arrays are committed and restored through ops/ and transfer/. One of the two should be a free-threaded build.
The store is in memory (/dev/shm); both processes stay, and take rounds in turns.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.page import heading, run

ROOT = Path(__file__).parents[1]
WAYS = {
    "leaves": "hashing alone, leaves of 128 KiB",
    "commit": "commit, unchanged",
    "checkout": "checkout, verified before",
    "one pass": "checkout in one pass",
}


@dataclass(frozen=True)
class Found:
    """An interpreter and its rounds."""

    name: str
    rounds: Sequence[dict[str, float]]

    def median(self, name: str) -> float:
        return statistics.median(each[name] for each in self.rounds)

    def share(self, name: str) -> str:
        """Of the rate of BLAKE3 in the same round: the median, and all."""
        shares = [each["pieces"] / each[name] for each in self.rounds]
        return f"{statistics.median(shares):.2f} ({min(shares):.2f}-{max(shares):.2f})"


class Interpreter:
    """A process of one interpreter."""

    def __init__(self, python: str, folder: Path, num_bytes: int) -> None:
        folder.mkdir()
        self._python = python
        command = [python, "-m", "benchmarks.free_threaded_worker", str(folder), str(num_bytes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        what = self._read()
        self.name = f"Python {what['version']}, {'with' if what['has_lock'] else 'without'} the lock"
        self.rounds: list[dict[str, float]] = []

    def measure(self) -> None:
        """One round more."""
        assert self._process.stdin is not None
        print("round", file=self._process.stdin, flush=True)
        self.rounds.append(self._read())

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._python} ended: status {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def page(found: Sequence[Found], scratch: Path) -> str:
    size = found[0].median("num_bytes")
    lines = [
        *heading("With the interpreter's lock and without", "free_threaded PYTHON PYTHON", scratch),
        f"A state of {size / 1e9:.2f} GB in matrices of 8 MiB, two threads, files in memory; the two interpreters take",
        f"{len(found[0].rounds)} rounds in turns. Medians, and the range in brackets.",
        "",
        f"| share of BLAKE3's rate | {' | '.join(each.name for each in found)} |",
        f"| --- |{' --- |' * len(found)}",
        "| BLAKE3, pieces of 4 MiB, GB/s | "
        + " | ".join(f"{size / each.median('pieces') / 1e9:.1f}" for each in found)
        + " |",
    ]
    for name, text in WAYS.items():
        lines.append(f"| {text} | {' | '.join(each.share(name) for each in found)} |")
    few = found[0].median("few_bytes")
    lines += [
        "",
        f"A loop of Python beside a thread of its process that commits {few / 1e6:.0f} MB, unchanged, by one thread:",
        "",
        f"| | {' | '.join(each.name for each in found)} |",
        f"| --- |{' --- |' * len(found)}",
    ]
    rows = {
        "few alone": ("the commit alone, ms", 1e3),
        "few beside": ("the commit beside the loop, ms", 1e3),
        "steps alone": ("steps of the loop, alone, 1/s", 1),
        "steps beside": ("steps of the loop, beside the commit, 1/s", 1),
    }
    for name, (text, factor) in rows.items():
        lines.append(f"| {text} | {' | '.join(f'{each.median(name) * factor:.0f}' for each in found)} |")
    about = "../performance.md#python-without-the-interpreters-lock"
    return "\n".join([*lines, "", f"What it shows: [performance.md]({about}).", ""])


def measured(pythons: Sequence[str], scratch: Path, quick: bool) -> str:
    interpreters: list[Interpreter] = []
    try:
        for number, python in enumerate(pythons):
            interpreters.append(Interpreter(python, scratch / str(number), (64 if quick else 384) << 20))
        for _ in range(3 if quick else 7):
            for each in interpreters:
                each.measure()
    finally:
        for each in interpreters:
            each.close()
    return page([Found(each.name, each.rounds) for each in interpreters], scratch)


if __name__ == "__main__":
    given = list(itertools.takewhile(lambda each: not each.startswith("-"), sys.argv[1:]))
    if not given:
        raise SystemExit(__doc__)
    options = sys.argv[1 + len(given) :]
    raise SystemExit(run(options, __doc__, "free-threaded", lambda *way: measured(given, *way), scratch="/dev/shm"))
