"""What leaves and gathering cost, against BLAKE3 over 4 MiB pieces: measured, and as two figures.

Duty: the speed model of benchmarks/grid.py and the measurement behind it.
"""

from __future__ import annotations

import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
from blake3 import blake3

LEAF_COST_BYTES = 64 * 1024 * (1 / 0.88 - 1)
"""Cost of one more leaf, in bytes hashed meanwhile: leaves of 64 KiB run at 0.88 of BLAKE3's own rate, 128 at 0.94."""

GATHER_COST = 1 / 0.745 - 1 / 0.88
"""Cost of gathering a byte, in bytes hashed meanwhile: gathered leaves of 64 KiB run at 0.745, 128 at 0.78."""

ROWS, ROW_BYTES, NUM_MATRICES, REPEATS = 2048, 8192, 16, 9
Work = Callable[[np.ndarray], None]


def contiguous(piece: int) -> Work:
    """Hash a matrix in memory order, `piece` bytes at a time."""

    def run(matrix: np.ndarray) -> None:
        view = matrix.data.cast("B")
        for start in range(0, len(view), piece):
            blake3(view[start : start + piece]).digest()

    return run


def banded(run_bytes: int, leaf: int) -> Work:
    """Copy bands of whole rows, column pieces apart, into a 512 KiB scratch and hash its leaves."""

    def run(matrix: np.ndarray) -> None:
        pieces, leaf_rows = ROW_BYTES // run_bytes, leaf // run_bytes
        rows = max(leaf_rows, (512 << 10) // ROW_BYTES)
        scratch = np.empty((pieces, rows, run_bytes), np.uint8)
        view = scratch.data.cast("B")
        for band in matrix.reshape(ROWS // rows, rows, pieces, run_bytes).transpose(0, 2, 1, 3):
            np.copyto(scratch, band)
            for start in range(0, len(view), leaf):
                blake3(view[start : start + leaf]).digest()

    return run


def measure() -> Iterator[str]:
    """Lines of a table: rate of each way with one and two threads, relative to 4 MiB pieces."""
    cases = {"pieces of 4 MiB": contiguous(4 << 20)}
    leaves = (64, 128, 256)
    cases |= {f"contiguous leaves of {k} KiB": contiguous(k << 10) for k in (32, *leaves)}
    cases |= {f"runs of {r} KiB, leaves of {k} KiB": banded(r << 10, k << 10) for r in (1, 2, 4) for k in leaves}
    matrices = [np.random.default_rng(i).integers(0, 255, (ROWS, ROW_BYTES), np.uint8) for i in range(NUM_MATRICES)]
    for num_threads in (1, 2):
        rates: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(REPEATS):  # turn about, so that a busy neighbour slows every case alike
            for name, work in cases.items():
                rates[name].append(_rate(work, matrices, num_threads))
        base = statistics.median(rates["pieces of 4 MiB"])
        yield f"{num_threads} thread(s), BLAKE3 over 4 MiB pieces: {base / 1e9:.1f} GB/s"
        yield from (f"  {name:36} {statistics.median(found) / base:.2f}" for name, found in rates.items())


def _rate(work: Work, matrices: list[np.ndarray], num_threads: int) -> float:
    """Bytes per second; the threads take matrices from one queue."""
    waiting: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()
    for item in (*matrices, *(None for _ in range(num_threads))):
        waiting.put(item)
    threads = [threading.Thread(target=_run_all, args=(work, waiting)) for _ in range(num_threads)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(matrix.nbytes for matrix in matrices) / (time.perf_counter() - start)


def _run_all(work: Work, waiting: queue.SimpleQueue[np.ndarray | None]) -> None:
    while (matrix := waiting.get()) is not None:
        work(matrix)
