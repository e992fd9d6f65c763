"""How near do commits and restores come to what the machine can do: its cores, its memory, its disk, its GPU?

    python -m benchmarks.cores --write      everything, and docs/benchmarks/cores.md; minutes
    python -m benchmarks.cores --quick      small states, two threads at most; prints only
    python -m benchmarks.cores --only cuda  one part of it; prints only

It runs on whatever is there: sizes follow the memory, threads the cores, and the last part needs CUDA. From a checkout
that is not installed, on a machine without a network that has torch (2.9 or newer) and a C compiler:

    python3 -m pip install --no-index --no-deps --target /tmp/site WHEELS    # blake3, zstandard, SQLAlchemy, alembic,
    export PYTHONPATH=/tmp/site                                              # Mako: of our dependencies what is missing
    python3 setup.py build_ext --inplace                                     # setuptools 77 or newer, nothing else
    python3 -m benchmarks.cores --write --disk /tmp

Everything that is compared takes turns in each round, and a ratio is the median of the rounds' own ratios; a first
round, in which memory is touched and modules are imported, is not counted. The state is a GPT with AdamW in host
memory, stored raw, in a store in memory (/dev/shm).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import sqlite3
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from blake3 import blake3

import cas_ckpt
from benchmarks import async_loops, cores_cuda
from benchmarks.harness import disk, limits
from benchmarks.harness.machine import available_memory, free_disk
from benchmarks.harness.meter import seconds_of
from benchmarks.harness.page import heading, reached, run, verdict
from benchmarks.harness.peers import DCPEightThreads
from benchmarks.harness.sizes import SIZES, Size
from benchmarks.harness.state import State, build
from benchmarks.restores import refill_seconds
from cas_ckpt import Repository
from cas_ckpt.native import STATE, leaf_digests
from cas_ckpt.objects.digest import LEAF_BYTES

ROOT = Path(__file__).parent.parent
GB = 10**9
COPIED_BYTES = 1 << 30

BLAKE3, MEMCPY, PREAD = "BLAKE3 over 4 MiB pieces", "memcpy", "pread of the packs into place"
DCP = "DCP, 8 threads"
LEAF, NATIVE = "one BLAKE3 call for each leaf of 128 KiB", "leaves of 4 MiB in one call (`leaf_digests`)"
UNCHANGED, FIRST = "unchanged commit", "first commit to memory"
READ_AND_HASHED = "pread into place, then BLAKE3"
CHECKOUT, ONE_PASS = "warm checkout, verified first", "warm checkout, one pass"

RATIOS: tuple[tuple[str, str, Mapping[int, float]], ...] = (
    (UNCHANGED, BLAKE3, {2: 0.90, 16: 0.70}),
    (LEAF, BLAKE3, {}),
    (NATIVE, BLAKE3, {}),
    (CHECKOUT, BLAKE3, {2: 0.55, 16: 0.35}),
    (ONE_PASS, BLAKE3, {2: 0.70, 16: 0.50}),
    (CHECKOUT, MEMCPY, {}),
    (ONE_PASS, MEMCPY, {}),
    (ONE_PASS, PREAD, {}),
    (ONE_PASS, READ_AND_HASHED, {}),
    (READ_AND_HASHED, BLAKE3, {}),
    (FIRST, DCP, {16: 1.3}),
)
"""(What, beside what, at least how much of its rate is wanted, by threads)."""

OF_DISK, STEPS_LOST = 0.90, 0.05
SMALL_COMMIT_S, SMALL_CHECKOUT_S = 0.5, 0.6


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, how large, how often, and where.

    Attributes:
        rounds: Whether each of them counts.
    """

    size: Size
    state: Callable[[], State]
    num_small: int
    threads: Sequence[int]
    rounds: Sequence[bool]
    loop_bytes: int
    loop_rounds: int
    cuda: cores_cuda.Sizes
    memory: Path
    disk: Path


Lines = Iterator[str]
Seconds = dict[tuple[str, int], list[float]]
"""Of each round, by what was done and by how many threads."""


# ------------------------------------------------------------ by threads


def by_threads(plan: Plan) -> Lines:
    """Every way with one thread, two, and so on; DCP once a round."""
    state = plan.state()
    views, size = state.views(), state.num_bytes
    with created(plan.memory / "warm") as repo:
        repo.commit(state.parts)
        ways = _ways(plan, state, repo, views)
        found: Seconds = {}
        for counts in plan.rounds:
            for threads in plan.threads:
                turns = ways | ({DCP: _saved_by_dcp(plan, state)} if threads == plan.threads[-1] else {})
                for name, way in turns.items():
                    seconds = way(threads)
                    if counts:
                        found.setdefault((name, 0 if name == DCP else threads), []).append(seconds)
    for threads in plan.threads:  # what any checkout does that maps no file: the kernel copies, BLAKE3 hashes
        both = zip(found[PREAD, threads], found[BLAKE3, threads], strict=True)
        found[READ_AND_HASHED, threads] = [read + hashed for read, hashed in both]
    columns = " | ".join(map(str, plan.threads))
    rule = " --- |" * len(plan.threads)
    yield f"{plan.size.text}; {size / GB:.2f} GB in {len(views)} tensors. GB/s, by threads (`num_threads`):"
    yield from ("", f"| GB/s | {columns} |", f"| --- |{rule}")
    for name in ways:
        rates = (size / statistics.median(found[name, threads]) / GB for threads in plan.threads)
        yield f"| {name} | {' | '.join(f'{rate:.1f}' for rate in rates)} |"
    yield f"| {DCP} |{' |' * (len(plan.threads) - 1)} {size / statistics.median(found[DCP, 0]) / GB:.1f} |"
    yield from ("", "Beside a limit with as many threads (DCP: always 8), 1.00 is its rate; in brackets: at least.", "")
    yield from (f"| what | beside | {columns} |", f"| --- | --- |{rule}")
    for name, other, wanted in RATIOS:
        cells = []
        for threads in plan.threads:
            share = ratio(found[other, 0 if other == DCP else threads], found[name, threads])
            cells.append(f"{share:.2f}" + (f" ({reached(share, wanted[threads])})" if threads in wanted else ""))
        yield f"| {name} | {other} | {' | '.join(cells)} |"


def _ways(plan: Plan, state: State, repo: Repository, views: list[memoryview]) -> dict[str, Callable[[int], float]]:
    """Seconds of each, by threads."""
    pieces = limits.pieces(views)
    packs = [path for path in disk.files(plan.memory / "warm") if path.suffix == ".data"]
    copied = np.ones(max(limits.PIECE_BYTES, min(COPIED_BYTES, state.num_bytes)), np.uint8)

    def hash_leaves(piece: memoryview) -> None:
        for start in range(0, len(piece), LEAF_BYTES):
            blake3(piece[start : start + LEAF_BYTES]).digest()

    def into_place(threads: int, atomic: bool) -> float:
        return _with_threads(threads, lambda: repo.checkout("main", into=state.parts, atomic=atomic))

    return {
        BLAKE3: lambda threads: limits.hash_seconds(views, threads),
        LEAF: lambda threads: limits.seconds_in_threads(hash_leaves, pieces, threads),
        NATIVE: lambda threads: limits.seconds_in_threads(lambda each: leaf_digests(each, LEAF_BYTES), pieces, threads),
        UNCHANGED: lambda threads: _with_threads(threads, lambda: repo.commit(state.parts)),
        CHECKOUT: lambda threads: into_place(threads, True),
        ONE_PASS: lambda threads: into_place(threads, False),
        MEMCPY: lambda threads: limits.copy_seconds(views, copied, threads),
        PREAD: lambda threads: refill_seconds(packs, views, threads),
        FIRST: lambda threads: first_commit(plan.memory / "first", state, threads),
    }


def _saved_by_dcp(plan: Plan, state: State) -> Callable[[int], float]:
    def save(_: int) -> float:
        with TemporaryDirectory(dir=plan.memory) as folder:
            peer = DCPEightThreads(Path(folder))
            return seconds_of(lambda: peer.save(state, 0))

    return save


def _with_threads(threads: int | None, call: Callable[[], object]) -> float:
    with cas_ckpt.limits(num_threads=threads):
        return seconds_of(call)


def first_commit(folder: Path, state: State, threads: int | None) -> float:
    """Seconds of a commit into a repository that is new, and gone afterwards."""
    with created(folder) as repo:
        seconds = _with_threads(threads, lambda: repo.commit(state.parts))
    shutil.rmtree(folder)
    return seconds


@contextmanager
def created(folder: Path) -> Iterator[Repository]:
    """A new repository that stores bytes as they are."""
    with Repository.init(folder, encoding="raw", group=None) as repo:
        yield repo


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """How our rate is to theirs: the median over rounds, from seconds."""
    return statistics.median(them / us for them, us in zip(theirs, ours, strict=True))


# ------------------------------------------------------------ one figure each


def to_disk(plan: Plan) -> Lines:
    """The first commit beside the faster of two ways to write as many bytes."""
    state = plan.state()
    ways: dict[str, Callable[[], float]] = {
        "O_DIRECT, then fsync": lambda: limits.direct_write_rate(plan.disk, state.num_bytes)["seconds"],
        "through the page cache, then fsync": lambda: limits.buffered_write_rate(plan.disk, state.num_bytes)["seconds"],
        "first commit": lambda: first_commit(plan.disk / "first", state, None),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for counts in plan.rounds:
        for name, way in ways.items():
            seconds = way()
            if counts:
                found[name].append(seconds)
    *raw, ours = found.values()
    share = ratio([min(each) for each in zip(*raw, strict=True)], ours)
    yield from ("| to the disk | GB/s | beside the faster of both | at least |", "| --- | --- | --- | --- |")
    for name, times in found.items():
        judged = f"{share:.2f} | {reached(share, OF_DISK)}" if times is ours else " | "
        yield f"| {name} | {state.num_bytes / statistics.median(times) / GB:.2f} | {judged} |"


def loops(plan: Plan) -> Lines:
    """Steps that a loop of one thread loses beside a commit by a thread (benchmarks/async_loops.py)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield from ("| loop beside a commit by a thread | steps lost | at most |", "| --- | --- | --- |")
    for name, loop in (("Python", async_loops.PythonLoop()), ("small operators of torch", async_loops.TorchLoop())):
        row = async_loops.measure(plan.memory, name, loop, "thread", plan.loop_bytes, plan.loop_rounds)
        lost = statistics.median(row.lost)
        yield f"| {name} | {lost:.3f} | {verdict(lost, STEPS_LOST)} |"
    torch.set_num_threads(threads)


def small(plan: Plan) -> Lines:
    """Many small tensors of the host, all of them changed between two commits; beside torch.save, and what Python and
    SQLite need for less than that."""
    tensors = [torch.randn(16 + number % 7 * 32) for number in range(plan.num_small)]
    state = {str(start): dict(enumerate(tensors[start : start + 1000])) for start in range(0, len(tensors), 1000)}
    file = plan.memory / "small.pt"
    with created(plan.memory / "small") as repo:
        ways: dict[str, Callable[[], object]] = {
            "commit, all changed": lambda: repo.commit(state),
            "commit, unchanged": lambda: repo.commit(state),
            "checkout": lambda: repo.checkout("main", into=state),
            "`torch.save`": lambda: torch.save(state, file),
            "`torch.load`": lambda: torch.load(file),
            "place, dtype, shape, strides and device of each asked, in Python": lambda: [
                (each.data_ptr(), each.dtype, each.shape, each.stride(), each.device) for each in tensors
            ],
            "a row of each put into SQLite, in memory": lambda: _rows_of(tensors),
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for counts in plan.rounds:
            torch._foreach_add_(tensors, 1)
            for name, way in ways.items():
                seconds = seconds_of(way)
                if counts:
                    found[name].append(seconds)
    file.unlink()
    wanted = {"commit, all changed": SMALL_COMMIT_S, "checkout": SMALL_CHECKOUT_S}
    yield from (f"| {plan.num_small:,} tensors of 64 to 832 bytes | s | at most |", "| --- | --- | --- |")
    for name, times in found.items():
        middle = statistics.median(times)
        limit = verdict(middle, wanted[name]) if name in wanted else ""
        yield f"| {name} | {middle:.2f} | {limit} |"


def _rows_of(tensors: Sequence[torch.Tensor]) -> None:
    """A table of names and values that are ordered by them, as entries of a state are in the index."""
    with closing(sqlite3.connect(":memory:")) as database, database:
        database.execute("CREATE TABLE t (node INTEGER, name TEXT, data BLOB, PRIMARY KEY (node, name)) WITHOUT ROWID")
        database.executemany(
            "INSERT INTO t VALUES (1, ?, ?)", ((str(number), bytes(32)) for number in range(len(tensors)))
        )


def cuda(plan: Plan) -> Lines:
    """See benchmarks/cores_cuda.py."""
    if not torch.cuda.is_available():
        yield "There is no CUDA device here."
        return
    yield from cores_cuda.measure(plan.cuda, plan.rounds, plan.memory)


PARTS: dict[str, tuple[str, Callable[[Plan], Lines]]] = {
    "threads": ("Threads", by_threads),
    "disk": ("The disk", to_disk),
    "loops": ("Beside a loop", loops),
    "small": ("Small tensors of the host", small),
    "cuda": ("CUDA", cuda),
}


# ------------------------------------------------------------ options and page


def own_options() -> argparse.ArgumentParser:
    """The options beside those of all small benchmarks."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--gb", type=float, help="size of the state; 8, or less where there is less memory, if not given"
    )
    parser.add_argument("--threads", default="1,2,4,8,16", help="of these, those that the machine has cores for")
    parser.add_argument("--rounds", type=int, default=3, help="that are counted")
    parser.add_argument("--disk", type=Path, default=ROOT / "bench-out", help="a folder of the disk")
    parser.add_argument("--only", choices=PARTS, help="this part alone")
    return parser


def gpt_of(num_bytes: float) -> Size:
    """A GPT with AdamW of about so many bytes."""
    width, vocab, context = 2048, 8192, 1024  # parameters of 4 bytes, and two moments of each
    layers = round((num_bytes / 12 / width - 2 * vocab - context) / (12 * width))
    return Size("cores", "gpt", "A GPT with AdamW", int(num_bytes), vocab, context, width, max(1, layers))


def plan_for(options: argparse.Namespace, *, quick: bool, memory: Path, disk: Path) -> Plan:
    """What these options ask for, on this machine."""
    cores = len(os.sched_getaffinity(0))
    threads = [each for each in map(int, options.threads.split(",")) if each <= min(cores, 2 if quick else cores)]
    if not threads:
        raise SystemExit(f"--threads {options.threads}: there are {cores} cores here")
    rounds = (False, *(True for _ in range(options.rounds)))

    def state_of(size: Size) -> Callable[[], State]:
        return cache(lambda: build(size, blank=False))

    if quick:
        size = SIZES["tiny"]
        return Plan(
            size, state_of(size), 2_000, threads, (True,), 16 << 20, 1, cores_cuda.Sizes(GB // 8, 500), memory, disk
        )
    most = min(available_memory() / 6, free_disk(memory) / 3)  # two copies lie in the store beside the state, and DCP's
    num_bytes = min(8 * GB, most) if options.gb is None else options.gb * GB
    sizes = cores_cuda.Sizes(int(num_bytes), 20_000)
    size = gpt_of(num_bytes)
    return Plan(size, state_of(size), 100_000, threads, rounds, 512 << 20, 11, sizes, memory, disk)


def page(plan: Plan, parts: Mapping[str, tuple[str, Callable[[Plan], Lines]]]) -> str:
    """The whole page; what is measured is printed at once."""
    load = ", ".join(f"{each:.2f}" for each in os.getloadavg())
    sections: list[str] = []
    for title, measure in parts.values():
        print(f"## {title}", file=sys.stderr, flush=True)
        sections += ["", f"## {title}", ""]
        for line in measure(plan):
            print(line, file=sys.stderr, flush=True)
            sections.append(line)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("blake3", "numpy"))
    return "\n".join([
        *heading("Beside what the machine can do", "cores", plan.disk)[:-1],
        f"Load when it began: {load}. Cores that it might use: {len(os.sched_getaffinity(0))}; {gpu}; "
        f"torch {torch.__version__}, {versions}; {STATE}.",
        "",
        f"Medians of rounds ({sum(plan.rounds)}; beside a loop {plan.loop_rounds}), in each of which all take turns.",
        "Beside some figures: what is wanted of them on two or sixteen cores, an H100 or H200, and whether it is met.",
        *sections, "",
    ])  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    own = own_options()
    options, others = own.parse_known_args(argv)
    if options.only is not None and "--write" in others:
        own.error("--only prints only: what is written is measured in full")

    def measured(memory: Path, quick: bool) -> str:
        parts = PARTS if options.only is None else {options.only: PARTS[options.only]}
        options.disk.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix="cores-", dir=options.disk) as disk_folder:
            return page(plan_for(options, quick=quick, memory=memory, disk=Path(disk_folder)), parts)

    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    return run(argv, __doc__, "cores", measured, scratch=shared, own=[own])


if __name__ == "__main__":
    raise SystemExit(main())
