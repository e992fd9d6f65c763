"""How long does a check of a repository take?

    python -m benchmarks.fsck              docs/benchmarks/checking.md, some minutes
    python -m benchmarks.fsck --quick      little data and few commits, printed only

Structure: a repository of many commits of a model that is fine-tuned. Data: 1 GiB of raw chunks, read
with the page cache full and after the files were put out of it, beside BLAKE3 over the same leaves in
memory and a plain read of the same files, all by the same number of threads in the same process.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import machine
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.native import leaf_digests
from cas_ckpt.objects.digest import LEAF_BYTES
from cas_ckpt.objects.spec import Box, Spec
from cas_ckpt.objects.state import Container, TensorItem, ValueItem
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.ops.fsck.check import check_open
from cas_ckpt.ops.fsck.packs import DataOptions
from cas_ckpt.ops.fsck.report import FsckReport
from cas_ckpt.parallel.workers import default_threads

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "checking.md"

NUM_TENSORS, NUM_CHANGED = 300, 30
MOST_STRUCTURE_S, LEAST_SHARE = 5.0, 0.7
BLOCK_BYTES = 1 << 20


class _Memory:
    """An array as the source of a tensor."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def read(self, box: Box) -> np.ndarray[Any, Any]:
        return self._array[box.slices]


def _tensor(array: np.ndarray[Any, Any]) -> TensorItem:
    return TensorItem(Spec(array.dtype.name, array.shape), _Memory(array), "numpy")


def build_history(path: Path, num_commits: int) -> RepositoryHandle:
    """Commits of a model of many tensors, of which a tenth changes each time."""
    handle = init_repository(path)
    dice = np.random.default_rng(1)
    model = [dice.standard_normal((48, 48)).astype(np.float32) for _ in range(NUM_TENSORS)]
    for number in range(num_commits):
        for at in range(NUM_CHANGED):
            model[(number * NUM_CHANGED + at) % NUM_TENSORS] = dice.standard_normal((48, 48)).astype(np.float32)
        layers: dict[Any, Any] = {f"layers.{at:03}.weight": _tensor(array) for at, array in enumerate(model)}
        state = Container("dict", {"model": Container("dict", layers), "step": ValueItem(number)})
        commit_tree(handle, state, CommitRequest(step=number, metrics={"loss": 1.0 / (number + 1)}))
    return handle


def build_data(path: Path, num_bytes: int) -> tuple[RepositoryHandle, np.ndarray[Any, Any]]:
    """One commit of random numbers, stored raw; and the numbers."""
    handle = init_repository(path, encoding="raw", pack_bytes=128 << 20)
    rows = num_bytes // (4096 * 4)
    array = np.random.default_rng(2).standard_normal((rows, 4096), dtype=np.float32)
    commit_tree(handle, Container("dict", {"w": _tensor(array)}), CommitRequest())
    return handle, array


@dataclass(frozen=True, slots=True)
class Timed:
    """Wall and processor seconds of the best of some runs."""

    wall_s: float
    cpu_s: float


def best(work: Callable[[], object], *, before: Callable[[], object] = lambda: None, runs: int = 3) -> Timed:
    """The quickest of `runs`; `before` is not timed."""
    found = []
    for _ in range(runs):
        before()
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        found.append(Timed(time.perf_counter() - wall, time.process_time() - cpu))
    return min(found, key=lambda timed: timed.wall_s)


def evict(path: Path) -> None:
    """Put the packs out of the page cache."""
    for pack in path.glob("packs/*/*"):
        with pack.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_files(path: Path, threads: int) -> None:
    """Read all packs plainly, each by one of the threads."""

    def read(pack: Path) -> None:
        space = memoryview(bytearray(8 << 20))
        with pack.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while file.readinto(space):
                pass

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, sorted(path.glob("packs/*/*.data"))))


def hash_memory(array: np.ndarray[Any, Any], threads: int) -> None:
    """BLAKE3 of every leaf, from memory."""
    data = array.reshape(-1).view(np.uint8).data
    parts = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda part: leaf_digests(part, LEAF_BYTES), parts, chunksize=16))


def _checked(report: FsckReport) -> None:
    if not report.ok:
        raise SystemExit(f"the repository of the benchmark is damaged: {report.problems[0].what}")


def measure_structure(scratch: Path, num_commits: int) -> list[str]:
    """The rows of the table of structure."""
    handle = build_history(scratch / "history", num_commits)
    reports: list[FsckReport] = []
    timed = best(lambda: reports.append(check_open(handle)))
    for report in reports:
        _checked(report)
    handle.close()
    first = reports[0]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [
        f"| {first.num_commits:,} | {first.num_packs:,} | {first.num_entries:,} | {first.num_nodes:,} | "
        f"{timed.wall_s:.2f} | {timed.cpu_s:.2f} | {MOST_STRUCTURE_S:.0f} | {peak:,.0f} |"
    ]


def measure_data(scratch: Path, num_bytes: int) -> list[str]:
    """The rows of the table of data."""
    path, threads = scratch / "data", default_threads()
    handle, array = build_data(path, num_bytes)
    whole = DataOptions()

    def rate(timed: Timed) -> float:
        return num_bytes / timed.wall_s / 1e9

    rows = []
    for name, before in (("in the page cache", lambda: None), ("not in the page cache", lambda: evict(path))):
        hashed = best(lambda: hash_memory(array, threads))
        read = best(lambda: read_files(path, threads), before=before)
        checked = best(lambda: _checked(check_open(handle, whole)), before=before)
        hashing, reading, checking = rate(hashed), rate(read), rate(checked)
        rows.append(
            f"| {name} | {hashing:.2f} | {reading:.2f} | {checking:.2f} | {checking / min(hashing, reading):.0%} | "
            f"{LEAST_SHARE:.0%} | {hashed.cpu_s / checked.cpu_s:.0%} |"
        )
    handle.close()
    return rows


def page(structure: list[str], data: list[str], scratch: Path, load: float) -> str:
    """The page, as Markdown."""
    facts = "\n".join(f"| {name} | {value} |" for name, value in machine.describe(scratch).items())
    return f"""# Checking a repository: structure and data

Written by `python -m benchmarks.fsck`; how it is measured stands in benchmarks/fsck.py. The best of three runs each.
Load of the machine while it ran: {load:.1f} processes on {os.cpu_count()} cores.

## Structure

Every record, every pack's header, trailer and directory, every node by its id, and the index row by row.
A model of {NUM_TENSORS} tensors, of which {NUM_CHANGED} change from commit to commit.

| commits | packs | entries | nodes | seconds | CPU seconds | at most | peak memory MB |
| --- | --- | --- | --- | --- | --- | --- | --- |
{chr(10).join(structure)}

## Data

`fsck --read-data`, structure included, over raw chunks; {default_threads()} threads. GB/s. The bound is the lower of
hashing and reading. "By CPU" compares the processor seconds of hashing with those of the check, which other work
on the machine does not disturb.

| files | BLAKE3 of the leaves in memory | plain read | fsck --read-data | share of the bound | at least | by CPU |
| --- | --- | --- | --- | --- | --- | --- |
{chr(10).join(data)}

## Machine

| what | which |
| --- | --- |
{facts}
"""


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/cas-ckpt-fsck"))
    words = parser.parse_args()
    scratch: Path = words.scratch
    shutil.rmtree(scratch, ignore_errors=True)
    loads = [os.getloadavg()[0]]
    try:
        structure = measure_structure(scratch, 100 if words.quick else 1000)
        data = measure_data(scratch, (128 << 20) if words.quick else (1 << 30))
        loads.append(os.getloadavg()[0])
        text = page(structure, data, scratch, statistics.mean(loads))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(text)
    if not words.quick:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
