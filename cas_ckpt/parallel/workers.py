"""Threads that share a list of work (`run_all`), or do one piece again and again (`Background`); no error is lost.

Invariant: when `run_all` returns, every item was worked on; when any item raised, the first
error is raised here, the rest of the list is left, and no thread is still running.
Work that `Background` was asked for is begun after that, once for all who asked meanwhile; what it raised is kept until
it is taken. Its thread is a daemon: a process that ends without `close` does not wait for it.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Generic, TypeVar

from cas_ckpt import clock
from cas_ckpt.memory import current_limits, inheriting

S = TypeVar("S")
T = TypeVar("T")

MAX_THREADS = 16


def default_threads() -> int:
    """Threads for hashing and copying: one per core that this process may use, 16 at most."""
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0))))


def thread_count(*, most: int | None = None) -> int:
    """The threads that `cas_ckpt.limits` allows; where it says nothing `default_threads`, or fewer.

    Args:
        most: So many are of use here, unless more are requested; one is always.
    """
    number = current_limits().num_threads
    if number:
        return number
    return default_threads() if most is None else max(1, min(default_threads(), most))


def core_of_main_thread() -> int | None:
    """The core that this process's main thread, in general the one that trains, ran on last; None: not known."""
    try:
        return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[36])
    except (OSError, IndexError, ValueError):
        return None


def leave_core(core: int | None, *, pid: int) -> None:
    """Let this thread, and those that it starts, run on all cores but one of which process `pid` may, if there are any.

    The threads of a commit are more than the cores that training leaves over: some of them would begin on the core that
    trains, which is then interrupted and finds its caches emptied.
    """
    if core is None:
        return
    with suppress(OSError):  # the process is gone, or cores were taken from it meanwhile: it runs where it may
        others = os.sched_getaffinity(pid) - {core}
        if others:
            os.sched_setaffinity(0, others)


def start(thread: threading.Thread) -> None:
    """Start `thread`.

    Raises:
        MemoryError: the system gives no more threads, or no memory for a stack.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise MemoryError(f"no thread can be started: {error}") from error


def run_all(items: Iterable[T], make_worker: Callable[[], Callable[[T], None]], *, num_threads: int) -> None:
    """Every item goes through one of `num_threads` workers, each made in its own thread.

    No more threads are started than there are items: a single item is worked on by the caller. Items are taken one by
    one, by whichever thread is free, and none any more once one failed.

    Raises:
        Whatever a worker raised first (KeyboardInterrupt and simulated crashes too).
    """
    waiting = iter(items)
    first = list(islice(waiting, num_threads))
    shared = chain(first, waiting)
    turn = threading.Lock()
    errors: list[BaseException] = []

    def loop() -> None:
        try:
            worker = make_worker()
            while True:
                with turn:
                    if errors:
                        return
                    try:
                        item = next(shared)
                    except StopIteration:
                        return
                worker(item)
        except BaseException as error:  # noqa: BLE001 - carried to the caller, nothing is dropped
            errors.append(error)

    # The calling thread is one of the workers: signals such as Ctrl-C reach it.
    threads = []
    try:
        for number in range(1, len(first)):
            threads.append(threading.Thread(target=inheriting(loop), name=f"cas-ckpt-{number}", daemon=True))
            start(threads[-1])
        loop()
    except BaseException as error:  # noqa: BLE001 - a signal, or no thread to be had: the others stop first
        errors.append(error)
    for thread in threads:
        while thread.is_alive():
            try:
                thread.join()
            except BaseException as error:  # noqa: BLE001 - a second Ctrl-C: raised once all have stopped
                errors.append(error)
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # its traceback has this frame: all that the workers held would stay until a collection


def map_all(work: Callable[[S], T], items: Iterable[S], *, num_threads: int) -> list[T]:
    """Results of `work` for each item, in order; `num_threads` items at once.

    Raises:
        Whatever `work` raised first.
    """
    found: dict[int, T] = {}

    def one(numbered: tuple[int, S]) -> None:
        found[numbered[0]] = work(numbered[1])

    run_all(enumerate(items), lambda: one, num_threads=num_threads)
    return [found[number] for number in range(len(found))]


class _Call(Generic[T]):
    """A call that goes on in a thread of its own, called `name`."""

    def __init__(self, call: Callable[[], T], *, name: str) -> None:
        self._call = call
        self._results: list[T] = []
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=inheriting(self._run), name=name, daemon=True)
        start(self._thread)

    def _run(self) -> None:
        try:
            self._results.append(self._call())
        except BaseException as error:  # noqa: BLE001 - carried to the caller
            self._errors.append(error)

    def result(self) -> T:
        """The result of the call, or its exception."""
        self._thread.join()
        if self._errors:
            raise self._errors[0]
        return self._results[0]

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended, however it ends, for so long at most; whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


def one_ahead(work: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
    """Results of `work` for each item, in order; while one is used, a thread works on the next.

    Raises:
        Whatever `work` raised, when it is that item's turn.
    """
    begun: _Call[T] | None = None
    try:
        for item in items:
            found = [] if begun is None else [begun.result()]
            begun = _Call(partial(work, item), name="cas-ckpt-ahead")
            while found:
                yield found.pop()  # what was used is not kept
        if begun is not None:
            yield begun.result()
    finally:
        if begun is not None:
            begun.wait()


def ahead(items: Iterable[T]) -> Iterator[T]:
    """`items`, each made by a thread while the one before it is used.

    Raises:
        Whatever making one raised, when it is its turn.
    """
    waiting = iter(items)
    for made in one_ahead(lambda _: list(islice(waiting, 1)), repeat(None)):
        if not made:
            return
        yield made.pop()


class StillRunning(Exception):
    """A call has not returned in time; it goes on in its thread."""


def call_within(
    call: Callable[[], T], *, timeout_s: float, look_s: float, give_up: Callable[[], bool] = lambda: False
) -> T:
    """The result or exception of `call`, unless it takes too long; a later result is dropped.

    For calls into libraries that do not keep the limits that they are given.

    Args:
        give_up: Asked every `look_s` seconds whether to wait no longer.
    Raises:
        StillRunning: `timeout_s` have passed, or `give_up`.
    """
    begun = _Call(call, name="cas-ckpt-call")
    deadline_s = clock.monotonic_s() + timeout_s
    while not begun.wait(min(look_s, max(0.0, deadline_s - clock.monotonic_s()))):
        if give_up() or clock.monotonic_s() >= deadline_s:
            raise StillRunning
    return begun.result()


def before_threads_end(call: Callable[[], object]) -> None:
    """Call `call` when the interpreter ends, as long as threads and executors still take work.

    What `atexit` calls comes after executors were closed, such as those that send the parts of values to a bucket.
    """
    import concurrent.futures.thread  # noqa: F401  # its own end comes after those that register later

    register = getattr(threading, "_register_atexit", atexit.register)
    register(call)


# --- one thread that does a piece of work whenever it is woken -----------------------------------


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
                work = inheriting(self._loop)  # with the limits of who asked first
                start(threading.Thread(target=work, name="cas-ckpt-background", daemon=True))
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
