"""Progress on standard error: a bar on a terminal, a line every few seconds elsewhere.

Invariant: threads may report at the same time; showing never fails the work.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from cas_ckpt import clock
from cas_ckpt.cli.output import human_bytes

if TYPE_CHECKING:
    import rich.progress

SECONDS_PER_LINE = 5.0
"""How often a plain line is written."""


class LineProgress:
    """One plain line every few seconds, and one at the end of a phase that had any."""

    def __init__(self, write: Callable[[str], object] | None = None) -> None:
        self._write = write or _to_stderr
        self._lock = threading.Lock()
        self._begin("", None)

    def _begin(self, phase: str, total_bytes: int | None) -> None:
        self._phase = phase
        self._total = total_bytes
        self._done = 0
        self._started = self._shown = clock.monotonic_s()
        self._lines = 0

    def start(self, phase: str, total_bytes: int | None) -> None:
        """See `Progress`."""
        with self._lock:
            self._begin(phase, total_bytes)

    def advance(self, num_bytes: int) -> None:
        """See `Progress`."""
        with self._lock:
            self._done += num_bytes
            if clock.monotonic_s() - self._shown >= SECONDS_PER_LINE:
                self._show()

    def finish(self) -> None:
        """See `Progress`."""
        with self._lock:
            if self._lines:
                self._show()

    def _show(self) -> None:
        self._shown = clock.monotonic_s()
        self._lines += 1
        self._write(describe(self._phase, self._done, self._total, self._shown - self._started))


def describe(phase: str, done: int, total: int | None, seconds: float) -> str:
    """One line: what, how much of how much, how fast, how long still."""
    rate = done / seconds if seconds > 0 else 0.0
    parts = [f"{human_bytes(done)} of {human_bytes(total)}" if total is not None else human_bytes(done)]
    if total:
        parts[0] += f" ({min(100, done * 100 // total)} %)"
    if rate:
        parts.append(f"{human_bytes(int(rate))}/s")
        if total is not None and total > done:
            parts.append(f"{(total - done) / rate:.0f} s left")
    return f"{phase}: {', '.join(parts)}"


def _to_stderr(line: str) -> None:
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        pass  # nobody reads it: the work goes on


class BarProgress:
    """A bar with bytes, rate and time left. rich is imported when the first phase begins."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None

    def start(self, phase: str, total_bytes: int | None) -> None:
        """See `Progress`."""
        with self._lock:
            self._bar = _new_bar()
            self._bar.start()
            self._task = self._bar.add_task(phase, total=total_bytes)

    def advance(self, num_bytes: int) -> None:
        """See `Progress`."""
        bar, task = self._bar, self._task
        if bar is not None and task is not None:
            bar.advance(task, num_bytes)

    def finish(self) -> None:
        """See `Progress`."""
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
            self._bar = self._task = None


def _new_bar() -> rich.progress.Progress:
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
