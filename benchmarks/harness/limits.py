"""The machine's own limits, measured in the same round as what is compared with them.

Nothing here knows cas_ckpt: BLAKE3, memory copies and plain file writes and reads as fast as a short
loop gets them, with two threads, or as many as are asked for, where threads help.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from benchmarks.harness import disk

THREADS = 2
PIECE_BYTES = 4 << 20
LIMIT_BYTES = 1 << 30
_WRITE_BYTES = 16 << 20


def pieces(buffers: Iterable[memoryview]) -> list[memoryview]:
    """`buffers` cut into contiguous pieces of 4 MiB (the last of each may be shorter)."""
    return [view[start : start + PIECE_BYTES] for view in buffers for start in range(0, len(view), PIECE_BYTES)]


def seconds_in_threads(work: Callable[[Any], object], items: Sequence[Any], threads: int) -> float:
    """Seconds of `work` on each of `items`, which are dealt to `threads`."""

    def run(own: Sequence[Any]) -> None:
        for item in own:
            work(item)

    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        list(pool.map(run, (items[index::threads] for index in range(threads))))
        return time.perf_counter() - start


def hash_seconds(buffers: Iterable[memoryview], threads: int = THREADS) -> float:
    """Seconds of BLAKE3 over all of `buffers` in 4 MiB pieces, spread over `threads`."""
    return seconds_in_threads(lambda piece: blake3(piece).digest(), pieces(buffers), threads)


def copy_seconds(buffers: Iterable[memoryview], target: np.ndarray, threads: int = THREADS) -> float:
    """Seconds of memcpy of all of `buffers` in 4 MiB pieces into `target`, over and over; several pieces long."""
    places = len(target) // PIECE_BYTES

    def copy(numbered: tuple[int, memoryview]) -> None:
        start = numbered[0] % places * PIECE_BYTES
        np.copyto(target[start : start + len(numbered[1])], np.frombuffer(numbered[1], np.uint8))

    return seconds_in_threads(copy, list(enumerate(pieces(buffers))), threads)


def _random(num_bytes: int) -> memoryview:
    return memoryview(np.random.default_rng(1).integers(0, 256, num_bytes, dtype=np.uint8))


def _rate(num_bytes: int, seconds: float) -> dict[str, Any]:
    return {"seconds": seconds, "bytes": num_bytes, "rate": num_bytes / seconds}


def hash_rate(folder: Path, num_bytes: int = LIMIT_BYTES) -> dict[str, Any]:
    """BLAKE3, two threads, over random memory."""
    return _rate(num_bytes, hash_seconds([_random(num_bytes)]))


def copy_rate(folder: Path, num_bytes: int = LIMIT_BYTES) -> dict[str, Any]:
    """memcpy into memory that is resident already, two threads."""
    return _rate(num_bytes, copy_seconds([_random(num_bytes)], np.ones(num_bytes, np.uint8)))


def direct_write_rate(folder: Path, num_bytes: int = LIMIT_BYTES) -> dict[str, Any]:
    """O_DIRECT writes of 16 MiB, in large pages, from one thread, then fsync of file and folder."""
    return _write_rate(folder, num_bytes, os.O_DIRECT)


def buffered_write_rate(folder: Path, num_bytes: int = LIMIT_BYTES) -> dict[str, Any]:
    """Ordinary writes of 16 MiB from one thread, then fsync of file and folder."""
    return _write_rate(folder, num_bytes, 0)


def _write_rate(folder: Path, num_bytes: int, flags: int) -> dict[str, Any]:
    with mmap.mmap(-1, _WRITE_BYTES) as block:
        block.madvise(mmap.MADV_HUGEPAGE)  # one piece for the disk where 4 KiB are 512
        block.write(_random(_WRITE_BYTES))
        count = max(1, num_bytes // _WRITE_BYTES)
        start = time.perf_counter()
        _write(folder / "limit.bin", block, count, flags)
        return _rate(count * _WRITE_BYTES, time.perf_counter() - start)


def _write(path: Path, block: mmap.mmap, count: int, flags: int) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | flags)
    try:
        for _ in range(count):
            os.write(descriptor, block)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def cold_read_rate(folder: Path, num_bytes: int = LIMIT_BYTES) -> dict[str, Any]:
    """A file that is not in the page cache read into one buffer, by ordinary reads of 8 MiB."""
    _write_rate(folder, num_bytes, 0)
    left = disk.evict(folder)
    length = disk.length_bytes(folder)
    start = time.perf_counter()
    disk.warm(folder)
    return _rate(length, time.perf_counter() - start) | {"resident_before": left}


_LIMITS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "blake3": hash_rate,
    "memcpy": copy_rate,
    "write_direct": direct_write_rate,
    "write_buffered": buffered_write_rate,
    "read_cold": cold_read_rate,
}


def all_rates(folder: Path) -> dict[str, float]:
    """Every limit in bytes per second."""
    return {name: measure(folder)["rate"] for name, measure in _LIMITS.items()}
