"""Signals that wait while something is half done that whatever their handlers raise would leave so.

Python calls a handler wherever it is, also between the call that took a lock and the statement that would give it back
(a `with` whose object is written in Python has such a place before and one behind its block), and within libraries
that swallow what the handler raises: sqlite3 reports it as an error of the database. Such a part is put into
`held_signals()`: what comes meanwhile is noted, and its handlers are called at the end, when all is whole. A handler
may then call cas_ckpt itself, and meets no such lock of its own thread. (Locks that guard a few lines in memory are
RLocks for that reason, and commits refuse to be called inside of commits: repository/opened.py.)

Invariant: no signal is lost, and a handler that somebody sets meanwhile stays. Parts are short. In
other threads than the main one, where handlers are never called, nothing is done.
"""

from __future__ import annotations

import signal
import threading
from _signal import getsignal  # type: ignore[import-not-found]  # without the enums, which cost 100 us for all signals
from _thread import RLock
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self


class Turn(RLock):  # type: ignore[misc]  # which is final for type checkers alone
    """A lock that is held for long: what a signal's handler raises does not leave it held.

    Since Python 3.14 a handler may run between the `__enter__` of a lock written in C and its block. A thread that has
    it may not take it once more.
    """

    def __enter__(self) -> bool:  # type: ignore[override]
        try:
            return super().__enter__()
        except BaseException:
            with suppress(RuntimeError):  # it was not taken yet
                self.release()
            raise

    @property
    def is_mine(self) -> bool:
        """Whether this thread has it."""
        try:
            threading.Condition(self).notify(0)  # which nobody may but who has the lock
        except RuntimeError:
            return False
        return True


_NUMBERS = tuple(sorted(map(int, signal.valid_signals())))


class held_signals:  # noqa: N801 - reads as a function where it is used
    """Holds the signals that handlers in Python are there for, inside of a `with` block."""

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._came: list[tuple[int, FrameType | None]] = []

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append((number, frame))

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            try:
                for number in _NUMBERS:
                    handler = getsignal(number)
                    if callable(handler):
                        self._handlers[number] = handler
                        signal.signal(number, self._note)
            except BaseException as error:  # of one that was not held yet
                self.__exit__(type(error), error, error.__traceback__)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._let()
        finally:
            self._call()

    def _let(self) -> None:
        try:
            for number, handler in self._handlers.items():
                if getsignal(number) == self._note:
                    signal.signal(number, handler)
        except BaseException:  # of one that came again: the others come again, too
            self._let()
            raise

    def _call(self) -> None:
        """Call the handlers of those that came: all of them, whatever one raises."""
        while self._came:
            number, frame = self._came.pop(0)
            try:
                self._handlers[number](number, frame)
            finally:
                self._call()
