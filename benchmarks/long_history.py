"""What do verbs cost in a long history with many refs? 100, 1,000 and 10,000 commits; 10, 100 and 1,000 branches.

    python -m benchmarks.long_history            docs/benchmarks/long-history.md, half an hour
    python -m benchmarks.long_history --quick    short histories, printed only
    python -m benchmarks.long_history --build PATH 6000 500    one such repository, to look at

A commit changes 16 KiB of a state of half a megabyte, so that it writes one data pack and one meta pack. Each branch
begins somewhere in the history of main; as many as a tenth of the commits go to branches. Each history is collected
once before it is measured, for some verbs cost more after the first collection. Wall seconds, the least of some
runs, each with a fresh handle unless it says otherwise; the page cache is warm.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from benchmarks.harness.page import machine_and_load
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.revisions import resolve
from cas_ckpt.index import history
from cas_ckpt.objects.spec import Box, Spec
from cas_ckpt.objects.state import Container, TensorItem, ValueItem
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.ops.diff.diff import diff_commits
from cas_ckpt.ops.fsck.check import check_open
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.ops.history.log import log_commits, show_commit
from cas_ckpt.ops.history.usage import repository_stats, usage_rows
from cas_ckpt.ops.refs import create_branch
from cas_ckpt.ops.retention.forget import forget_by_policy
from cas_ckpt.ops.retention.policy import Policy, Retention

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks" / "long-history.md"
SECTION = "## 100,000 commits, 1,000 branches, 10 million chunks"
"""Written by benchmarks/long_verbs.py; stays as it is."""

COMMITS, REFS = (100, 1_000, 10_000), (10, 100, 1_000)
QUICK_COMMITS, QUICK_REFS = (50, 200), (5, 20)
NUM_CONSTANT, CONSTANT_BYTES, CHANGED_BYTES = 8, 64 * 1024, 16 * 1024
RUNS, IN_A_ROW, KEPT = 3, 20, 12
AT_ONCE = GcOptions(min_age_s=0, reflog_expire_s=0)

Verb: TypeAlias = Callable[[RepositoryHandle], object]
Figures: TypeAlias = dict[str, float]

_CONSTANT = [np.random.default_rng(n).integers(0, 255, CONSTANT_BYTES, np.uint8) for n in range(NUM_CONSTANT)]


class _Memory:
    """An array as the source of a tensor."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def read(self, box: Box) -> np.ndarray[Any, Any]:
        return self._array[box.slices]


# --- the histories -------------------------------------------------------------------------


def state(number: int) -> Container:
    """The state of commit `number`."""
    changed = np.random.default_rng(1000 + number).integers(0, 255, CHANGED_BYTES, np.uint8)
    items: dict[Any, Any] = {
        f"w{n}": TensorItem(Spec("uint8", array.shape), _Memory(array), "numpy")
        for n, array in enumerate([*_CONSTANT, changed])
    }
    return Container("dict", items | {"step": ValueItem(number)})


def add_commits(handle: RepositoryHandle, numbers: Sequence[int], *, branch: str = "main") -> None:
    """Commit these states to a branch."""
    for number in numbers:
        request = CommitRequest(branch=branch, step=number, metrics={"loss": 1 / (1 + number)})
        commit_tree(handle, state(number), request)


def add_branches(handle: RepositoryHandle, num_commits: int, numbers: range) -> None:
    """Branches with these numbers, begun all over main's history, the first of them with a commit of their own."""
    line = handle.index.read(history.read_line, resolve(handle, "main"), most=num_commits)
    for number in numbers:
        name = f"run-{number:04}"
        create_branch(handle, name, start=line[number * 7919 % len(line)].hex())
        if number < num_commits // 10:
            add_commits(handle, [num_commits + number], branch=name)


def build(path: Path, num_commits: int, num_branches: int) -> None:
    """One repository."""
    handle = init_repository(path)
    add_commits(handle, range(num_commits - min(num_branches, num_commits // 10)))
    add_branches(handle, num_commits, range(num_branches))
    handle.close()


def collect_once(path: Path) -> None:
    """Let there be a generation: a branch with one commit goes, and is collected."""
    handle = RepositoryHandle.open(path)
    add_commits(handle, [0])
    before, gone = resolve(handle, "main~1"), resolve(handle, "main")
    create_branch(handle, "main", start=before.hex(), force=True)
    collect_garbage(handle, replace(AT_ONCE, max_unused=1.0, many_small=1 << 60))  # else all packs were merged
    assert not handle.index.read(history.read_commit, gone)
    handle.close()


# --- the verbs -----------------------------------------------------------------------------


def _branches(start: str, names: Iterator[str], handle: RepositoryHandle) -> None:
    create_branch(handle, next(names), start=start)


def _forget(handle: RepositoryHandle, *, dry_run: bool = True) -> object:
    return forget_by_policy(handle, Retention(Policy(keep_last=KEPT)), dry_run=dry_run, measure=dry_run)


def verbs(num_commits: int) -> dict[str, Verb]:
    """Name -> what is measured."""
    names = (f"probe-{os.getpid()}-{time.monotonic_ns()}" for _ in iter(int, 1))
    middle = num_commits // 2
    return {
        "commit": lambda handle: add_commits(handle, range(10**6, 10**6 + 1)),
        "branch at main": partial(_branches, "main", names),
        "branch in the middle": partial(_branches, f"main~{middle}", names),
        "resolve main~N/2": lambda handle: resolve(handle, f"main~{middle}"),
        "log, 10 commits": lambda handle: list(log_commits(handle, limit=10)),
        "log, all": lambda handle: list(log_commits(handle)),
        "show": lambda handle: show_commit(handle, "main"),
        "diff": lambda handle: diff_commits(handle, "main~1", "main"),
        "stats": repository_stats,
        "du by branch": lambda handle: usage_rows(handle, "branch"),
        "forget -n": _forget,
        "fsck": check_open,
    }


IN_ONE_HANDLE = ("commit", "branch at main", "branch in the middle")
"""Done again and again with one handle: the first time, which looks at the packs, is not counted."""


def measure(path: Path, num_commits: int) -> Figures:
    """Name -> seconds; the repository is as before, but for some commits and branches."""
    found = {}
    for name, verb in verbs(num_commits).items():
        found[name] = _in_one_handle(path, verb) if name in IN_ONE_HANDLE else _fresh(path, verb)
    return found | collection(path)


def _in_one_handle(path: Path, verb: Verb) -> float:
    handle = RepositoryHandle.open(path)
    verb(handle)
    taken = sorted(_timed(handle, verb) for _ in range(IN_A_ROW))
    handle.close()
    return taken[len(taken) // 2]


def _fresh(path: Path, verb: Verb) -> float:
    taken = []
    for _ in range(RUNS):
        handle = RepositoryHandle.open(path)
        taken.append(_timed(handle, verb))
        handle.close()
    return min(taken)


def _timed(handle: RepositoryHandle, verb: Verb) -> float:
    start = time.perf_counter()
    verb(handle)
    return time.perf_counter() - start


def collection(path: Path) -> Figures:
    """gc, in a copy in which all but the last commits of each branch were forgotten."""
    copy = path.with_name(f"{path.name}-gc")
    shutil.copytree(path, copy)
    handle = RepositoryHandle.open(copy)
    _forget(handle, dry_run=False)
    start = time.perf_counter()
    report = collect_garbage(handle, AT_ONCE)
    seconds = time.perf_counter() - start
    handle.close()
    shutil.rmtree(copy)
    return {"gc": seconds, "packs deleted by it": report.deleted_packs, "MB copied by it": report.copied_bytes / 1e6}


# --- the page ------------------------------------------------------------------------------


def measure_all(scratch: Path, commits: Sequence[int], refs: Sequence[int]) -> dict[tuple[int, int], Figures]:
    """(commits, branches) -> figures."""
    found = {}
    for num_commits in commits:
        for num_refs in refs:
            path = scratch / f"{num_commits}-{num_refs}"
            build(path, num_commits, num_refs)
            collect_once(path)
            found[num_commits, num_refs] = measure(path, num_commits)
            print(num_commits, num_refs, {name: round(each, 4) for name, each in found[num_commits, num_refs].items()})
            shutil.rmtree(path)
    return found


def page(found: dict[tuple[int, int], Figures]) -> str:
    """The document."""
    names = list(next(iter(found.values())))
    cells = list(found)
    lines = [
        "# Long histories and many refs", "",
        "Written by `python -m benchmarks.long_history`, figures as they came. A commit changes 16 KiB of a state of",
        "half a megabyte and writes two packs; each branch begins somewhere in main's history. Milliseconds; a column",
        "is one repository: commits / branches. `commit` and `branch` are medians in one handle, the others the least",
        f"of {RUNS} runs with a fresh handle (no process start), page cache warm. gc keeps the last {KEPT} commits of",
        "each branch, and the commit objects of all. What each verb grows with: [costs.md](../costs.md).", "",
        *machine_and_load(PAGE.parent), "",
        "| verb | " + " | ".join(f"{commits:,} / {refs:,}" for commits, refs in cells) + " |",
        "| --- |" + " ---: |" * len(cells),
    ]  # fmt: skip
    for name in names:
        scale = 1 if "by it" in name else 1e3
        lines.append(f"| {name} | " + " | ".join(f"{found[cell][name] * scale:,.1f}" for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="What verbs cost in a long history with many refs.")
    parser.add_argument("--quick", action="store_true", help="short histories, printed only")
    parser.add_argument("--build", nargs=3, metavar=("PATH", "COMMITS", "BRANCHES"), help="build one, and stop")
    parser.add_argument("--scratch", type=Path, default=ROOT / "bench-out" / "long-history")
    given = parser.parse_args()
    if given.build:
        build(Path(given.build[0]), int(given.build[1]), int(given.build[2]))
        return
    shutil.rmtree(given.scratch, ignore_errors=True)
    given.scratch.mkdir(parents=True)
    sizes = (QUICK_COMMITS, QUICK_REFS) if given.quick else (COMMITS, REFS)
    text = page(measure_all(given.scratch, *sizes))
    shutil.rmtree(given.scratch, ignore_errors=True)
    if given.quick:
        print(text)
    else:
        _, mark, rest = PAGE.read_text().partition(SECTION)
        PAGE.write_text(f"{text}\n{mark}{rest}" if mark else text)


if __name__ == "__main__":
    main()
