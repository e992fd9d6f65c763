"""The one place that reads the time, so that tests can set it.

Nothing here decides about safety: the protocols need no clock.
"""

from __future__ import annotations

import time as _time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_source: Callable[[], float] = _time.time


def now_s() -> float:
    """Seconds since the epoch, as the process (or a test) sees them."""
    return _source()


monotonic_s = _time.monotonic
"""Seconds of a clock that never goes back, for rates and durations."""

pause = _time.sleep
"""Let others run for about so many seconds."""


@contextmanager
def fixed(source: Callable[[], float]) -> Iterator[None]:
    """Let `source` tell the time inside the block (tests only)."""
    global _source
    before, _source = _source, source
    try:
        yield
    finally:
        _source = before
