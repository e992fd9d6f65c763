"""Progress of long work: the contract, silence (the default), lines and a bar.

Lines and bars are shown only where somebody asked for them: `progress=True`, or the command line.

Invariant: threads may report at the same time; showing never fails the work.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from cas_ckpt import clock
from cas_ckpt.errors import InvalidInputError, shown_value

if TYPE_CHECKING:
    import rich.progress

_LOGGER = logging.getLogger("cas_ckpt")

SECONDS_PER_LINE = 5.0
"""How often a plain line is written."""

_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


class Progress(Protocol):
    """Receives what a long operation did. May be called from several threads."""

    def start(self, phase: str, total_bytes: int | None) -> None:
        """A phase begins; `total_bytes` is what it will go through, if that is known."""
        ...

    def advance(self, num_bytes: int) -> None:
        """`num_bytes` more of the phase are done."""
        ...

    def finish(self) -> None:
        """The phase is over, or was broken off."""
        ...


class Silent:
    """A Progress that shows nothing."""

    def start(self, *args: object, **kwargs: object) -> None:
        """Nothing."""

    advance = finish = start


SILENT = Silent()


@contextmanager
def phase(progress: Progress, name: str, total_bytes: int | None) -> Iterator[None]:
    """One phase of `progress`, which is over also where the work inside raises."""
    progress.start(name, total_bytes)
    try:
        yield
    finally:
        progress.finish()


def shown(wanted: Any) -> Progress:
    """The Progress that `progress=` of a verb asks for.

    Args:
        wanted: True: a bar where standard error is a terminal, else lines in the log `cas_ckpt`. False or None:
            silence. Else a Progress of the caller's.
    Raises:
        InvalidInputError: something else.
    """
    if wanted is True:
        return BarProgress() if sys.stderr is not None and sys.stderr.isatty() else LineProgress(_to_log, brief=True)
    if wanted is None or wanted is False:
        return SILENT
    methods = [getattr(wanted, name, None) for name in ("start", "advance", "finish")]
    if isinstance(wanted, type) or not all(map(callable, methods)):
        raise InvalidInputError(
            f"progress is {shown_value(wanted)}: give True, False, or an object with start(phase, total_bytes), "
            "advance(num_bytes) and finish()"
        )
    asked_for: Progress = wanted
    return asked_for


class LineProgress:
    """One plain line every few seconds, and one at the end of a phase."""

    def __init__(self, write: Callable[[str], object] | None = None, *, brief: bool = False) -> None:
        """Write lines by `write`, else to standard error; with `brief` also the end of a phase that had no other."""
        self._write = write or _to_stderr
        self._brief = brief
        self._lock = threading.Lock()
        self._begin("", None)

    def _begin(self, phase: str, total_bytes: int | None) -> None:
        self._phase = phase
        self._total = total_bytes
        self._done = 0
        self._started = self._shown = clock.monotonic_s()
        self._lines = 0

    def start(self, phase: str, total_bytes: int | None) -> None:
        with self._lock:
            self._begin(phase, total_bytes)

    def advance(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            if clock.monotonic_s() - self._shown >= SECONDS_PER_LINE:
                self._show()

    def finish(self) -> None:
        with self._lock:
            if self._lines or (self._brief and (self._done or self._total)):
                self._show(over=True)

    def _show(self, *, over: bool = False) -> None:
        self._shown = clock.monotonic_s()
        self._lines += 1
        self._write(describe(self._phase, self._done, self._total, self._shown - self._started, over=over))


def describe(phase: str, done: int, total: int | None, seconds: float, *, over: bool = False) -> str:
    """One line: what, how much of how much, how fast, and how long still or, if it is over, how long it took."""
    rate = done / seconds if seconds > 0 else 0.0
    parts = [f"{human_bytes(done)} of {human_bytes(total)}" if total is not None else human_bytes(done)]
    if total:
        parts[0] += f" ({min(100, done * 100 // total)} %)"
    if rate:
        parts.append(f"{human_bytes(int(rate))}/s")
    if over:
        parts.append(f"took {seconds:.0f} s" if seconds >= 10 else f"took {seconds:.1f} s")
    elif rate and total is not None and total > done:
        parts.append(f"{(total - done) / rate:.0f} s left")
    return f"{phase}: {', '.join(parts)}"


def _to_stderr(line: str) -> None:
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        pass  # nobody reads it, or it is closed: the work goes on


def _to_log(line: str) -> None:
    """To the log; to standard error where no log takes it, for it was asked for."""
    if _LOGGER.isEnabledFor(logging.INFO) and _LOGGER.hasHandlers():
        _LOGGER.info("%s", line)
    else:
        _to_stderr(line)


class BarProgress:
    """A bar with bytes, rate and time left on the terminal, beside those of other work under way.

    A terminal shows one live display, however many phases are under way: it begins with the first and ends with the
    last of them. A terminal that is gone (EIO) ends the display, not the work.
    """

    _lock = threading.RLock()
    _display: rich.progress.Progress | None = None

    def __init__(self) -> None:
        self._task: rich.progress.TaskID | None = None

    def start(self, phase: str, total_bytes: int | None) -> None:
        with BarProgress._lock:
            self.finish()
            display = BarProgress._display
            if display is None:
                display = BarProgress._display = _new_display()
                with suppress(OSError, ValueError):
                    display.start()
            with suppress(OSError, ValueError):  # it draws, too, once the task is there
                display.add_task(phase, total=total_bytes)
            self._task = display.task_ids[-1]

    def advance(self, num_bytes: int) -> None:
        display, task = BarProgress._display, self._task
        if display is not None and task is not None:
            with suppress(KeyError):  # its phase is over by now
                display.advance(task, num_bytes)

    def finish(self) -> None:
        with BarProgress._lock:
            display, task = BarProgress._display, self._task
            self._task = None
            if display is None or task is None or task not in display.task_ids:
                return
            if len(display.task_ids) == 1:
                BarProgress._display = None
                with suppress(OSError, ValueError):
                    display.stop()
            else:
                display.remove_task(task)


def _new_display() -> rich.progress.Progress:
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


def human_bytes(count: int) -> str:
    """`count` in a unit that leaves at most four digits (1 KB = 1000 B)."""
    size = float(count)
    for unit in _UNITS:
        if abs(size) < 999.5 or unit == _UNITS[-1]:
            digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
            return f"{count} B" if unit == "B" else f"{size:.{digits}f} {unit}"
        size /= 1000
    return f"{count} B"
