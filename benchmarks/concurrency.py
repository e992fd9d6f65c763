"""Many processes in one repository: how many commits a second, and what does a collection beside them cost?

    python -m benchmarks.concurrency            docs/benchmarks/concurrency.md, some minutes
    python -m benchmarks.concurrency --quick    short runs, printed only

Processes are real, the repository lies on disk, its index is one SQLite file that all share. Duty: the runs and the
page; what one process does is concurrency_worker.py.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.concurrency_worker import KEPT, NUM_TENSORS, TENSOR_BYTES
from benchmarks.harness import machine
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.revisions import resolve
from cas_ckpt.index import history

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks" / "concurrency.md"

COMMITTERS, WANTED_PER_S = 8, 100.0
BESIDE_GC, MOST_SLOWER = 4, 0.15
CHANGED_BYTES = 256 * 1024
"""What changes from commit to commit beside a collection, so that there is something to collect."""


@dataclass(frozen=True, slots=True)
class Run:
    """What the processes of one run did."""

    name: str
    per_s: float
    worst_s: float
    median_s: float
    lost: int
    packs: int
    collector: dict[str, Any] | None


def run(
    scratch: Path, name: str, branches: Sequence[str], *, seconds: float, changed: int, gc_interval_s: float = 0.0,
    index_url: str | None = None,
) -> Run:  # fmt: skip
    """Let a process for each of `branches` commit to it, and one more collect if there is an interval."""
    path = scratch / "repo"
    shutil.rmtree(path, ignore_errors=True)
    init_repository(path).close()
    index = [] if index_url is None else [index_url]
    works = [["commit", str(path), b, str(n), str(seconds), str(changed), *index] for n, b in enumerate(branches)]
    if gc_interval_s:
        works.append(["gc", str(path), str(gc_interval_s), str(seconds)])
    answers = _run_together(works)
    committers = answers[: len(branches)]
    took = [each for answer in committers for each in answer["took"]]
    made = sum(answer["count"] for answer in committers)
    per_s = made / max(answer["seconds"] for answer in committers)
    handle = RepositoryHandle.open(path, index_url=index_url)
    handle.sync()
    found = {row.digest for branch in set(branches) for row in history.log(handle.index, [resolve(handle, branch)])}
    packs = sum(1 for _ in handle.store.list("packs/"))
    handle.close()
    lost = made + len(branches) - len(found)  # each committed once before the clock began
    collector = answers[-1] if gc_interval_s else None
    return Run(name, per_s, max(took), statistics.median(took), lost, packs, collector)


def _run_together(works: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    command = [sys.executable, "-m", "benchmarks.concurrency_worker"]
    pipes["env"] = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen([*command, *work], **pipes) for work in works]
    for process in processes:
        if process.stdout.readline() != "ready\n":  # type: ignore[union-attr]
            raise SystemExit("a process did not begin; its error is above")
    for process in processes:
        process.stdin.write("go\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a process failed; its error is above")
    return [json.loads(output) for output in outputs]


def throughput(scratch: Path, *, seconds: float, rounds: int) -> list[list[Run]]:
    """Unchanged states, by eight processes: on one branch, and on a branch each; and by one process alone."""
    cases = {
        f"{COMMITTERS} processes, one branch": ["main"] * COMMITTERS,
        f"{COMMITTERS} processes, a branch each": [f"branch-{n}" for n in range(COMMITTERS)],
        "1 process": ["main"],
    }
    found: dict[str, list[Run]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, branches in cases.items():
            found[name].append(run(scratch, name, branches, seconds=seconds, changed=0))
            print(_row(found[name][-1]), flush=True)
    return list(found.values())


def beside_gc(scratch: Path, *, seconds: float, rounds: int, interval_s: float) -> list[tuple[Run, Run]]:
    """Pairs of runs of four committing processes: without a collecting one, and with one."""
    branches = [f"branch-{n}" for n in range(BESIDE_GC)]
    pairs = []
    for number in range(rounds):
        order = (0.0, interval_s) if number % 2 else (interval_s, 0.0)
        runs = {}
        for each in order:
            name = "gc" if each else "no gc"
            runs[each] = run(scratch, name, branches, seconds=seconds, changed=CHANGED_BYTES, gc_interval_s=each)
        pairs.append((runs[0.0], runs[interval_s]))
        for each in pairs[-1]:
            print(_row(each), each.collector and {k: v for k, v in each.collector.items() if k != "took"}, flush=True)
    return pairs


def _row(one: Run) -> str:
    times = f"{one.per_s:.1f} | {1e3 * one.median_s:.1f} | {1e3 * one.worst_s:.0f}"
    return f"| {one.name} | {times} | {one.lost} | {one.packs} |"


def page(runs: Sequence[Sequence[Run]], pairs: Sequence[tuple[Run, Run]], *, seconds: float, interval_s: float) -> str:
    best = statistics.median(each.per_s for each in runs[0])
    slower = statistics.median(1 - with_gc.per_s / without.per_s for without, with_gc in pairs)
    lost = sum(each.lost for group in (*runs, *pairs) for each in group)
    hosted = machine.describe(PAGE.parent)
    return _TEMPLATE.format(
        kib=TENSOR_BYTES // 1024,
        num_tensors=NUM_TENSORS,
        changed_kib=CHANGED_BYTES // 1024,
        kept=KEPT,
        committers=COMMITTERS,
        beside=BESIDE_GC,
        wanted=WANTED_PER_S,
        best=best,
        best_met=_verdict(best >= WANTED_PER_S),
        lost=lost,
        lost_met=_verdict(lost == 0),
        most=MOST_SLOWER,
        slower=slower,
        slower_met=_verdict(slower < MOST_SLOWER),
        machine=f"{hosted['processor']}, {hosted['memory']}, {hosted['kernel']}",
        today=datetime.date.today().isoformat(),
        load=os.getloadavg()[0],
        seconds=seconds,
        interval_s=interval_s,
        runs="\n".join(_row(each) for group in runs for each in group),
        pairs="\n".join(_row(each) for pair in pairs for each in pair),
        collections="\n".join(_collections(number, *pair) for number, pair in enumerate(pairs, 1)),
    )


def _collections(number: int, without: Run, with_gc: Run) -> str:
    told = with_gc.collector or {}
    return (
        f"| {number} | {1 - with_gc.per_s / without.per_s:.1%} | {told['count']} | {told['deleted']} | "
        f"{told['processor_s']:.1f} | {max(told['took']):.1f} |"
    )


def _verdict(met: bool) -> str:
    return "met" if met else "**not met**"


_TEMPLATE = """# Many processes in one repository

Written by `python -m benchmarks.concurrency`, figures as they came. Processes are real ones; all share a repository on
disk and its SQLite index. The state: {num_tensors} tensors of {kib} KiB, all hashed at every commit by one thread; what
is unchanged adds a meta pack with the commit object, a swap of the branch, and rows of the index. All is fsynced.
Lost: commits that were reported and are not in the history afterwards. `packs` beyond the commits are uploads whose
swap lost a race, and data packs.

Machine: {machine}. {today}. Load average (one minute) at the end {load:.1f}.

## Targets

| what | wanted | measured | verdict |
| --- | --- | --- | --- |
| commits of an unchanged state, {committers} processes, one branch | >= {wanted:.0f} /s | {best:.0f} /s | {best_met} |
| commits that were lost, all runs | 0 | {lost} | {lost_met} |
| commits beside a collecting process, slower by | < {most:.0%} | {slower:.1%} | {slower_met} |

## Commits of an unchanged state

Each run {seconds:.0f} s; the cases take turns. Those who commit to one branch of a local repository take turns, too
(storage/disk.py): without, each spoils the others' uploads, and eight processes came to 16 commits a second here.

| run | commits /s | median ms | longest ms | lost | packs |
| --- | --- | --- | --- | --- | --- |
{runs}

## Beside garbage collection

{beside} processes commit, each to a branch of its own, with {changed_kib} KiB changed each time. In every other run one
more process forgets all but the last {kept} commits of each branch and collects, every {interval_s:g} s. Slower:
median over the pairs of (1 - commits with / commits without).
A collection takes processor time of the two cores that the committing processes fill. No commit waits for it.

| run | commits /s | median ms | longest ms | lost | packs |
| --- | --- | --- | --- | --- | --- |
{pairs}

| pair | slower | collections | packs deleted | its processor s | longest round s, with the wait |
| --- | --- | --- | --- | --- | --- |
{collections}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Commits a second by many processes, with and without a collection.")
    parser.add_argument("--quick", action="store_true", help="short runs, printed only")
    parser.add_argument("--interval", type=float, default=10.0, help="seconds from one collection to the next")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of a run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scratch", type=Path, default=ROOT / "bench-out" / "concurrency")
    given = parser.parse_args()
    seconds, rounds = (4.0, 1) if given.quick else (given.seconds, given.rounds)
    given.scratch.mkdir(parents=True, exist_ok=True)
    throughputs = throughput(given.scratch, seconds=seconds, rounds=min(rounds, 3))
    pairs = beside_gc(given.scratch, seconds=seconds, rounds=rounds, interval_s=given.interval)
    shutil.rmtree(given.scratch, ignore_errors=True)
    text = page(throughputs, pairs, seconds=seconds, interval_s=given.interval)
    if given.quick:
        print(text)
    else:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
