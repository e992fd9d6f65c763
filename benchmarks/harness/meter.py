"""What one operation costs: wall and CPU seconds, peak memory above the state, bytes moved.

Linux only (/proc). The peak is VmHWM, reset right before the operation, minus the resident size then;
pages of memory-mapped files count, as the kernel counts them.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def _status_kb(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise KeyError(field)


def io_counters() -> dict[str, int]:
    """The kernel's counters of this process (rchar, wchar, read_bytes, write_bytes)."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def _settle_memory() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def measured(out: dict[str, Any]) -> Iterator[None]:
    """Fill `out` with what the body cost; nothing is filled in when it raises."""
    _settle_memory()
    Path("/proc/self/clear_refs").write_text("5")
    resident_kb, before, cpu = _status_kb("VmRSS"), io_counters(), os.times()
    start = time.perf_counter()
    yield
    out["seconds"] = time.perf_counter() - start
    out["cpu_s"] = sum(os.times()[:4]) - sum(cpu[:4])
    out["peak_bytes"] = max(0, _status_kb("VmHWM") - resident_kb) * 1024
    after = io_counters()
    out |= {name: after[name] - before[name] for name in ("rchar", "wchar", "read_bytes", "write_bytes")}


def seconds_of(operation: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    start = time.perf_counter()
    operation()
    return time.perf_counter() - start
