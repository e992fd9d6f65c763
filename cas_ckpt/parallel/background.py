"""One thread that does a piece of work again whenever it is woken; no error of it is lost.

Invariant: work that was asked for is begun after it was asked for, once for all who asked meanwhile; what it raised is
kept until it is taken. The thread is a daemon: a process that ends without `close` does not wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from cas_ckpt.parallel.workers import start


class Background:
    """Does `work` in a thread of its own, which lives while there is something to do.

    Args:
        failed: Called with every error at once, in that thread.
    """

    def __init__(self, work: Callable[[], object], *, failed: Callable[[Exception], object]) -> None:
        self._work = work
        self._failed = failed
        self._changed = threading.Condition()
        self._asked = False
        self._running = False
        self._error: BaseException | None = None

    def wake(self) -> None:
        """Ask for the work to be done, from now on. Returns at once."""
        with self._changed:
            self._asked = True
            if not self._running:
                start(threading.Thread(target=self._loop, name="cas-ckpt-background", daemon=True))
                self._running = True  # not if there is no thread to be had; it waits for this lock before it looks

    def _loop(self) -> None:
        while True:
            with self._changed:
                if not self._asked:
                    self._running = False
                    self._changed.notify_all()
                    return
                self._asked = False
            error = self._attempt()
            with self._changed:
                self._error = error

    def _attempt(self) -> BaseException | None:
        """Do the work once; what it raised, or what `failed` raised when it was told of that."""
        try:
            try:
                self._work()
            except Exception as error:  # noqa: BLE001 - told, and kept
                self._failed(error)
                return error
        except BaseException as error:  # noqa: BLE001 - kept for the waiter
            return error
        return None

    @property
    def error(self) -> BaseException | None:
        """The exception of the last run; None if it succeeded."""
        with self._changed:
            return self._error

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was asked for is done; whether it is.

        Raises:
            Whatever the work raised the last time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._running, timeout_s):
                return False
            error, self._error = self._error, None
        if error is not None:
            raise error
        return True
