"""Checksums of memory beside BLAKE3 and beside reading: rates of candidates, and commits with and without them.

    python -m benchmarks.checksums            # rates of one and two threads, as ratios to BLAKE3 in the same round
    python -m benchmarks.checksums commits    # a frozen commit, a commit of two replicas

Duty: docs/benchmarks/checksums.md. All ways take turns within a round, so that a busy neighbour slows every one of
them alike; processor time is measured beside the clock, for the machine is shared.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3

from cas_ckpt import CommitOptions, Repository, limits
from cas_ckpt.core.create import init_repository
from cas_ckpt.objects.spec import Box
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.parallel.peers import Peers
from cas_ckpt.training.capture.capture import capture_state
from cas_ckpt.training.capture.tensors import CopiedTensor, HostTensor
from cas_ckpt.transfer.hashing import Summed, checksums
from tests.thread_peers import run_ranks

NUM_BYTES = 256 << 20
ROUNDS = 9
Way = Callable[[np.ndarray], object]


def weighted(data: np.ndarray) -> object:
    """One plain and one weighted sum of 64-bit words; two words that change places may go unseen."""
    rows = data.view(np.uint64).reshape(-1, 4096)
    return np.add.reduce(rows, 1), np.einsum("ij,j->i", rows, np.arange(1, 4097, dtype=np.uint64))


def widened(data: np.ndarray) -> object:
    """Sums of 32-bit words in 64 bits."""
    return [np.add.reduce(part.view(np.uint32), dtype=np.uint64) for part in np.split(data, len(data) >> 20)]


def ours(data: np.ndarray) -> object:
    """Sums of rows and columns, as transfer/hashing.py takes them."""
    tensor = torch.from_numpy(data)
    return checksums([Summed(HostTensor(tensor), Box((0,), (len(data),)), 1)], num_threads=1)


def in_torch(data: np.ndarray) -> object:
    """The same by torch, as on a device."""
    tensor = torch.from_numpy(data)
    return checksums([Summed(CopiedTensor(tensor), Box((0,), (len(data),)), 1)], num_threads=1)


WAYS: dict[str, Way] = {
    "BLAKE3": lambda data: blake3(data.data).digest(),
    "reading: one sum of 64-bit words": lambda data: np.add.reduce(data.view(np.uint64)),
    "rows and columns, numpy (ours)": ours,
    "rows and columns, torch": in_torch,
    "plain and weighted sum, 64 bits": weighted,
    "plain sum, 32 bits widened": widened,
}


def rates() -> None:
    """Print each way's rate by the processor's time of one thread, and by the clock with one and two threads."""
    torch.set_num_threads(1)
    parts = [np.random.default_rng(seed).integers(0, 255, NUM_BYTES // 2, np.uint8) for seed in range(2)]
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in WAYS}
    for _ in range(ROUNDS):
        for name, way in WAYS.items():
            found[name].append((_busy_s(way, parts), _clock_s(way, parts, 1), _clock_s(way, parts, 2)))
    print("| way | GB/s of processor time | beside BLAKE3 | GB/s, 1 thread | GB/s, 2 threads |")
    print("| --- | --- | --- | --- | --- |")
    for name, times in found.items():
        busy, one, two = (NUM_BYTES / statistics.median(each) / 1e9 for each in zip(*times, strict=True))
        ratio = statistics.median(a[0] / b[0] for a, b in zip(found["BLAKE3"], times, strict=True))
        print(f"| {name} | {busy:.1f} | {ratio:.1f} | {one:.1f} | {two:.1f} |")


def _busy_s(way: Way, parts: list[np.ndarray]) -> float:
    start = time.process_time()
    for part in parts:
        way(part)
    return time.process_time() - start


def _clock_s(way: Way, parts: list[np.ndarray], num_threads: int) -> float:
    start = time.perf_counter()
    if num_threads == 1:
        for part in parts:
            way(part)
    else:
        threads = [threading.Thread(target=way, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return time.perf_counter() - start


def commits() -> None:
    """Print what a commit of unchanged state costs, 1 GB frozen and 256 MB on two ranks, by each check."""
    state = {f"w{at}": torch.randn(4096, 4096) for at in range(16)}
    with tempfile.TemporaryDirectory() as folder, Repository.init(Path(folder, "repo")) as repo:
        ways: dict[str, dict[str, object]] = {
            "not frozen (BLAKE3 of all)": {},
            "frozen, checksums": {"frozen": "**"},
            "frozen, version counters": {"frozen": "**", "options": CommitOptions(frozen_check="version")},
        }
        _print_commits("one process, 1.07 GB", ways, lambda options: repo.commit(state, **options))
    _ranks({f"w{at}": state[f"w{at}"] for at in range(4)})


def _ranks(state: dict[str, torch.Tensor]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        handle = init_repository(Path(folder, "repo"))
        copies = [{key: value.clone() for key, value in state.items()} for _ in range(2)]

        def commit(options: dict[str, object]) -> None:
            def work(peers: Peers) -> None:
                tree = capture_state(copies[peers.rank], rank=peers.rank, world_size=peers.size)
                with limits(num_threads=1):
                    commit_tree(handle, tree, CommitRequest(**options), peers=peers)  # type: ignore[arg-type]

            run_ranks(2, work, timeout_s=600)

        ways: dict[str, dict[str, object]] = {
            "replicas: a sample of 1 %": {"replica_check": "sample"},
            "replicas: checksums": {},
            "replicas: BLAKE3 of all": {"replica_audit": 1.0, "replica_check": "sample"},
        }
        _print_commits("two ranks, 268 MB each", ways, commit)


def _print_commits(
    what: str, ways: dict[str, dict[str, object]], commit: Callable[[dict[str, object]], object]
) -> None:
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for at in range(ROUNDS + 1):
        for name, options in ways.items():
            commit(options)  # what it trusts has to be there: a commit by another way may have dropped it
            start = (time.perf_counter(), time.process_time())
            commit(options)
            if at:
                times[name].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    print(f"\n| {what}, nothing changed | s | s of processor time | beside the first |\n| --- | --- | --- | --- |")
    first = next(iter(times.values()))
    for name, found in times.items():
        clock, busy = (statistics.median(each) for each in zip(*found, strict=True))
        ratio = statistics.median(a[1] / b[1] for a, b in zip(found, first, strict=True))
        print(f"| {name} | {clock:.3f} | {busy:.3f} | {ratio:.2f} |")


if __name__ == "__main__":
    commits() if "commits" in sys.argv else rates()
