"""Signals that wait until a library has returned, because it would swallow what their handlers raise.

sqlite3 calls Python from within a query, and reports whatever is raised there as an error of the database: a Ctrl-C,
which Python notices at the first step of such a call, would be taken for a query that ran too long.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeAlias

_Handlers: TypeAlias = dict[signal.Signals, Any]


class HeldSignals:
    """The signals that came meanwhile."""

    def __init__(self) -> None:
        self._came: list[tuple[int, FrameType | None]] = []

    def __bool__(self) -> bool:
        return bool(self._came)

    def note(self, number: int, frame: FrameType | None) -> None:
        """A handler of signals that only remembers them."""
        self._came.append((number, frame))

    def call(self, handlers: _Handlers) -> None:
        """Call the handlers of those that came."""
        for number, frame in self._came:
            handlers[signal.Signals(number)](number, frame)


@contextmanager
def held_signals() -> Iterator[HeldSignals]:
    """Hold the signals that handlers in Python are there for; they are called at the end of the block.

    Yields:
        What is true as soon as one came: then leave the block soon.
    """
    held = HeldSignals()
    if threading.current_thread() is not threading.main_thread():  # signals never come there
        yield held
        return
    handlers: _Handlers = {
        number: handler for number in signal.Signals if callable(handler := signal.getsignal(number))
    }  # fmt: skip
    try:
        for number in handlers:
            signal.signal(number, held.note)
        yield held
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        held.call(handlers)
