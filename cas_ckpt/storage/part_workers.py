"""The threads and buffers of an object store for the parts of values: the only threads that storage/ starts.

Invariant: what is in flight is bounded for the whole store, however many values are read and written at once.
Must not know: what a part is of, or where it goes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

T = TypeVar("T")


class PartWorkers:
    """The threads of a store for parts of values, and the buffers of its writers.

    At most `num` parts are in flight. Nothing that a thread does waits for another part, so none waits for ever.
    """

    def __init__(self, num: int, part_bytes: int) -> None:
        self._num = num
        self._part_bytes = part_bytes
        self.reset()

    def reset(self) -> None:
        """Forget everything: in a child process the threads are not there, and locks may be held for ever."""
        self._lock = threading.RLock()
        self._free: list[bytearray] = []
        self._writers = 0
        self._slots = threading.BoundedSemaphore(self._num)
        self._pool: ThreadPoolExecutor | None = None

    def run(self, work: Callable[[], T]) -> Future[T]:
        """Have `work` done by a thread; waits while as many parts are in flight as may be."""
        self._slots.acquire()
        try:
            with self._lock:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(self._num, thread_name_prefix="cas-ckpt-parts")
                pool = self._pool
            future = pool.submit(work)
        except BaseException:
            self._slots.release()
            raise
        future.add_done_callback(lambda _: self._slots.release())
        return future

    def writer_opened(self) -> None:
        """A writer will take buffers; `writer_closed` must follow."""
        with self._lock:
            self._writers += 1

    def writer_closed(self) -> None:
        """After the last one no memory is kept."""
        with self._lock:
            self._writers -= 1
            if self._writers <= 0:
                self._free.clear()

    def buffer(self) -> bytearray:
        """Memory for a part."""
        with self._lock:
            return self._free.pop() if self._free else bytearray(self._part_bytes)

    def give_back(self, buffer: bytearray) -> None:
        """Let another writer have it."""
        with self._lock:
            if self._writers > 0 and len(self._free) < self._num:
                self._free.append(buffer)

    def close(self) -> None:
        """Let the threads end once they have done what they were given."""
        with self._lock:
            pool, self._pool = self._pool, None
            self._free.clear()
        if pool is not None:
            pool.shutdown(wait=True)


class Parts(Generic[T]):
    """The parts of one value that were given to the threads. One thread at a time calls it."""

    def __init__(self, workers: PartWorkers) -> None:
        self._workers = workers
        self._futures: list[Future[T]] = []
        self._num_checked = 0

    def __len__(self) -> int:
        return len(self._futures)

    def run(self, work: Callable[[], T], *, done: Callable[[], None] = lambda: None) -> None:
        """Have the next part done; waits while as many are in flight as may be. `done` is called after it."""
        future = self._workers.run(work)
        future.add_done_callback(lambda _: done())
        self._futures.append(future)

    def check(self) -> None:
        """Raise what a part that is through raised."""
        while self._num_checked < len(self._futures) and self._futures[self._num_checked].done():
            self._futures[self._num_checked].result()
            self._num_checked += 1

    def results(self) -> list[T]:
        """Wait for all of them; what they answered, in their order.

        Raises:
            Exception: what the first of those that failed raised.
        """
        wait(self._futures)
        return [future.result() for future in self._futures]

    def stop(self) -> None:
        """Wait until none of them runs any more; those that have not begun never do."""
        for future in self._futures:
            future.cancel()
        wait(self._futures)
