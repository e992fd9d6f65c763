"""What do verbs cost with 100,000 commits, 1,000 branches and 10 million chunks, and with a tenth of each?

    python -m benchmarks.long_verbs --write      a section of docs/benchmarks/long-history.md; builds what is missing
    python -m benchmarks.long_verbs --only log   prints only
    python -m benchmarks.long_verbs --curves [--write]   300 and 3,000 commits, 5,000 and 50,000 keys: another section

The repositories are those of benchmarks/long_build.py, below `--scratch`, and stay there: to build them takes some
minutes. Each verb has a fresh handle, the page cache is warm, wall seconds are the least of three runs (of one, where
it takes longer than two seconds). Lines of the command line are medians from process start, of up to nine, modules
compiled.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from benchmarks.harness.page import machine_and_load
from benchmarks.long_build import Shape, build
from benchmarks.long_history import PAGE, ROOT, SECTION
from cas_ckpt import limits
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.revisions import resolve
from cas_ckpt.objects.state import Container, ValueItem
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.ops.diff.diff import diff_commits
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.ops.history.find import find_commits, find_entries, find_request
from cas_ckpt.ops.history.lineage import holders_of, is_ancestor, lineage_of, merge_bases, nearest_to_commit
from cas_ckpt.ops.history.log import log_commits, show_commit
from cas_ckpt.ops.history.usage import repository_stats
from cas_ckpt.ops.refs import create_branch, reflog
from cas_ckpt.ops.retention.forget import forget_by_policy
from cas_ckpt.ops.retention.policy import Policy, Retention

SHAPES = (Shape(10_000, 100, 100), Shape(100_000, 1_000, 100))
LOOKING = GcOptions(min_age_s=0, max_unused=1.0, many_small=1 << 60)
RUNS, STARTS, LONG_S = 3, 9, 2.0
CURVES_SECTION = "## Ten times as long"

Verb: TypeAlias = Callable[[RepositoryHandle], object]


def _commit(handle: RepositoryHandle) -> None:
    with limits(num_threads=1):
        commit_tree(handle, Container("dict", {"step": ValueItem(0)}), CommitRequest(step=0))


def _branch(handle: RepositoryHandle, start: str) -> None:
    create_branch(handle, f"probe-{os.getpid()}-{time.monotonic_ns()}", start=start)


CURVE_COMMITS, CURVE_KEYS, CURVE_RUNS = (300, 3_000), (5_000, 50_000), 15
CURVES: dict[str, Verb] = {
    "log, 5 commits that changed a key": lambda handle: list(log_commits(handle, keys="step", limit=5)),
    "log --grep, 5 commits": lambda handle: list(log_commits(handle, grep=["."], limit=5)),
    "reflog, 5 moves": lambda handle: reflog(handle, "main", limit=5),
    "find --commits, 5 of main": lambda handle: find_commits(handle, find_request(keys="step", ref="main"), limit=5),
    "find, 5 rows": lambda handle: find_entries(handle, find_request(keys="step"), limit=5),
    "merge-base near the head": lambda handle: merge_bases(handle, ["main~2", "main"]),
    "merge-base --is-ancestor near the head": lambda handle: is_ancestor(handle, "main~2", "main"),
    "lineage": lambda handle: lineage_of(handle, "main"),
    "holders": lambda handle: holders_of(handle, "main", "w"),
    "nearest": lambda handle: nearest_to_commit(handle, "main"),
    "log --all, 5 commits": lambda handle: list(log_commits(handle, all_refs=True, limit=5)),
    "diff": lambda handle: diff_commits(handle, "main~1", "main"),
    "stats": repository_stats,
}
"""Questions about one thing, or with a limit."""

VERBS: dict[str, tuple[Verb, Verb]] = {
    "resolve main~5": (lambda _: None, lambda handle: resolve(handle, "main~5")),
    "log, 10 commits": (lambda _: None, lambda handle: list(log_commits(handle, limit=10))),
    "log, 10 commits of all refs": (lambda _: None, lambda handle: list(log_commits(handle, limit=10, all_refs=True))),
    "log, all of main": (lambda _: None, lambda handle: list(log_commits(handle))),
    "show": (lambda _: None, lambda handle: show_commit(handle, "main")),
    "all refs": (lambda _: None, lambda handle: list(handle.refs.list())),
    "commit of an unchanged state, the first of a handle": (lambda _: None, _commit),
    "commit of an unchanged state, again": (_commit, _commit),
    "branch at main, the first of a handle": (lambda _: None, lambda handle: _branch(handle, "main")),
    "branch far from any head, the first of a handle": (lambda _: None, lambda handle: _branch(handle, "main~4000")),
    "the same again": (lambda handle: _branch(handle, "main~4000"), lambda handle: _branch(handle, "main~5000")),
    "forget -n --keep-last 12": (
        lambda _: None,
        lambda handle: forget_by_policy(handle, Retention(Policy(keep_last=12)), dry_run=True),
    ),
    "gc -n that finds little": (lambda _: None, lambda handle: collect_garbage(handle, LOOKING, dry_run=True)),
}
"""Name -> what a handle does before, and what is measured."""

LINES = ("log -n 10", "log", "log --oneline", "branch", "--version")


def measure(path: Path, only: Sequence[str]) -> dict[str, float]:
    """Name -> milliseconds."""
    found = {}
    for name, (before, verb) in VERBS.items():
        if only and not any(each in name for each in only):
            continue
        taken: list[float] = []
        while len(taken) < RUNS and (not taken or taken[0] < LONG_S):
            handle = RepositoryHandle.open(path)
            before(handle)
            start = time.perf_counter()
            verb(handle)
            taken.append(time.perf_counter() - start)
            handle.close()
        found[name] = 1e3 * min(taken)
        print(path.name, name, round(found[name], 1), flush=True)
    return found


def curves(scratch: Path) -> list[str]:
    """Rows of a table: milliseconds in the shorter and in the longer history, and how many times as long."""
    short, long = (scratch / f"curve-{number}" for number in CURVE_COMMITS)
    few, many = (scratch / f"keys-{number}" for number in CURVE_KEYS)
    for path, number in zip((short, long), CURVE_COMMITS, strict=True):
        build(path, Shape(number, 10, 2))
    for path, number in zip((few, many), CURVE_KEYS, strict=True):
        if not path.exists():
            handle = init_repository(path)
            model = Container("dict", {f"layers.{at}.weight": ValueItem(at) for at in range(number)})
            with limits(num_threads=1):
                commit_tree(handle, Container("dict", {"model": model}), CommitRequest())
            handle.close()
    rows = [_curve(name, verb, short, long) for name, verb in CURVES.items()]
    return [*rows, _curve("show, 5,000 and 50,000 keys", lambda handle: show_commit(handle, "main"), few, many)]


def _curve(name: str, verb: Verb, *paths: Path) -> str:
    """The two in turns, the least of some runs, for what else runs makes them longer alone."""
    taken: tuple[list[float], ...] = ([], [])
    for _ in range(CURVE_RUNS):
        for path, times in zip(paths, taken, strict=True):
            handle = RepositoryHandle.open(path)
            start = time.perf_counter()
            verb(handle)
            times.append(1e3 * (time.perf_counter() - start))
            handle.close()
    less, more = map(min, taken)
    print(name, round(less, 1), round(more, 1), flush=True)
    return f"| {name} | {less:,.1f} | {more:,.1f} | {more / less:.1f} |"


def curves_section(rows: Sequence[str]) -> str:
    """The section of the page."""
    lines = [
        CURVES_SECTION, "",
        "Written by `python -m benchmarks.long_verbs --curves --write`: verbs that are asked about one thing, or for a",
        "few, in a history of 300 commits and in one of 3,000, or in a state of 5,000 keys and in one of 50,000.",
        f"Milliseconds with a fresh handle, both in turns, the least of {CURVE_RUNS} runs; the ratio says more.", "",
        *machine_and_load(PAGE.parent), "",
        "| verb | shorter | ten times as long | ratio |", "| --- | ---: | ---: | ---: |", *rows,
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def put(page: str, title: str, text: str) -> str:
    """The page with this section in place of the one that it has, else behind it."""
    before, _, rest = page.partition(title)
    _, mark, after = rest.partition("\n## ")
    return f"{before.rstrip()}\n\n{text}" + (mark + after if mark else "")


def started(path: Path, only: Sequence[str]) -> dict[str, float]:
    """Command line -> milliseconds from process start."""
    found = {}
    with tempfile.TemporaryDirectory() as compiled:
        plain = {name: each for name, each in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        env = plain | {"PYTHONPYCACHEPREFIX": compiled, "PYTHONPATH": str(ROOT)}
        for line in LINES:
            if only and line not in only:
                continue
            command = [sys.executable, "-m", "cas_ckpt", "-C", str(path), *line.split()]
            taken = []
            while len(taken) < 3 or (len(taken) <= STARTS and sum(taken) < LONG_S):
                start = time.perf_counter()
                subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=True)
                taken.append(time.perf_counter() - start)
            found[f"cas-ckpt {line}"] = 1e3 * statistics.median(taken[1:])
            print(path.name, line, round(found[f"cas-ckpt {line}"], 1), flush=True)
    return found


def section(found: Sequence[dict[str, float]]) -> str:
    """The section of the page."""
    columns = [f"{each.commits:,} / {each.branches:,} / {each.commits * each.chunks:,}" for each in SHAPES]
    lines = [
        SECTION, "",
        "Written by `python -m benchmarks.long_verbs --write`: repositories of benchmarks/long_build.py, 20 commits to",
        "a meta pack and a data pack. Milliseconds; a column is commits / branches / chunks. A fresh handle for each,",
        "the least of three runs, page cache warm; lines of the command line: medians from process start.", "",
        *machine_and_load(PAGE.parent), "",
        "| verb | " + " | ".join(columns) + " |",
        "| --- |" + " ---: |" * len(columns),
        *(f"| {name} | " + " | ".join(f"{each[name]:,.1f}" for each in found) + " |" for name in found[0]),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description="What verbs cost in very long histories.")
    parser.add_argument("--write", action="store_true", help="put the section into the page")
    parser.add_argument("--only", nargs="*", default=(), help="verbs whose names have one of these in them")
    parser.add_argument("--scratch", type=Path, default=ROOT / "bench-out" / "long-verbs")
    parser.add_argument("--curves", action="store_true", help="what grows ten times: that section alone")
    given = parser.parse_args()
    given.scratch.mkdir(parents=True, exist_ok=True)
    if given.curves:
        text = curves_section(curves(given.scratch))
        if given.write:
            PAGE.write_text(put(PAGE.read_text(), CURVES_SECTION, text))
        print(text)
        return
    found = []
    for shape in SHAPES:
        path = given.scratch / f"{shape.commits}"
        build(path, shape)
        found.append(measure(path, given.only) | started(path, given.only))
    text = section(found)
    if given.write:
        PAGE.write_text(put(PAGE.read_text(), SECTION, text))
    else:
        print(text)


if __name__ == "__main__":
    main()
