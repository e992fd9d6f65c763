"""The other side of a child process (child_process.py): it takes work, one piece at a time, until its parent is gone.

    1. signals that are meant for the parent, or for both, are ignored; the kernel is asked to end this process with it
    2. the main thread reads what the parent sends: work, answers, memory that it lends
    3. each piece of work runs in a thread, which may ask the parent and tell it things (`Served`)
    4. the connection ends, or the parent is another one than at the start: this process ends at once, whatever it is
       doing; everything that it does must bear that

Invariant: it never outlives its parent by more than a second, and by none where the kernel has PR_SET_PDEATHSIG.
Knows nothing of what the work is.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias

from cas_ckpt.errors import InternalError
from cas_ckpt.transfer.child_process import NOT_FOR_CHILDREN
from cas_ckpt.transfer.messages import LOOK_S, Connection, Ended

_PR_SET_PDEATHSIG = 1

OOM_SCORE = "500"
"""Added to the share of memory, in thousandths, by which the kernel chooses whom to end; 0 is usual."""

Work: TypeAlias = "Callable[[Served, Any], Any]"
"""Does a piece of work; what it returns is a plain value."""


class Cancelled(Exception):
    """The parent does not want the work any more."""


class Served:
    """Interface of a piece of work to the parent. Thread-safe."""

    def __init__(self, connection: Connection, unpack_error: Callable[[Any], BaseException]) -> None:
        self._connection = connection
        self._unpack_error = unpack_error
        self._numbers = itertools.count()
        self._waiting: dict[int, SimpleQueue[tuple[bool, Any]]] = {}
        self._memory: dict[int, mmap.mmap | OSError] = {}
        self._cancelled = False

    def ask(self, name: str, *arguments: Any) -> Any:
        """Ask the parent; its answer is a plain value.

        Raises:
            Whatever it raised.
        """
        number = next(self._numbers)
        queue = self._waiting[number] = SimpleQueue()
        self._send(["question", number, name, arguments])
        is_answer, reply = queue.get()
        if not is_answer:
            raise self._unpack_error(reply)
        return reply

    def tell(self, name: str, *arguments: Any) -> None:
        """Tell the parent something that wants no answer."""
        self._send(["note", name, arguments])

    def _send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except Ended:
            os._exit(0)

    def memory(self, name: int) -> mmap.mmap:
        """Memory that the parent lent as `name`; read-only.

        Raises:
            MemoryError: this process may not map so much.
        """
        found = self._memory.get(name)
        if found is None:
            raise InternalError(f"memory {name} was not lent to this process")
        if isinstance(found, OSError):
            raise MemoryError(f"memory of the parent process cannot be mapped: {found}") from found  # noqa: TRY004
        return found

    def stop_if_cancelled(self) -> None:
        """Raise `Cancelled` if the parent does not want the work any more."""
        if self._cancelled:
            raise Cancelled

    def _begin(self, given: Any, work: Work, pack_error: Callable[[BaseException], Any]) -> None:
        """Do a piece of work, in a thread of its own."""
        self._cancelled = False
        self._send(["begun"])
        try:
            threading.Thread(
                target=_work, args=(self, given, work, pack_error), name="cas-ckpt-work", daemon=True
            ).start()
        except RuntimeError as error:
            self._send(["failed", pack_error(MemoryError(f"no thread can be started in the worker process: {error}"))])

    def _take(self, kind: str, rest: list[Any], files: tuple[int, ...]) -> None:
        """Something that came, other than work."""
        if kind == "answer":
            number, is_answer, reply = rest
            self._waiting.pop(number).put((is_answer, reply))
        elif kind == "cancel":
            self._cancelled = True
        elif kind == "memory":
            name, num_bytes = rest
            try:
                self._memory[name] = mmap.mmap(files[0], num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
            except OSError as error:
                self._memory[name] = error  # for whoever wants it
            os.close(files[0])
        elif kind == "forget":
            del self._memory[rest[0]]


def serve(
    descriptor: int, parent: int, work: Work, *, pack_error: Callable[[BaseException], Any],
    unpack_error: Callable[[Any], BaseException],
) -> None:  # fmt: skip
    """Take work until the parent is gone; then this process ends. Never returns.

    Args:
        descriptor: The socket to the parent. parent: Its process id.
        pack_error, unpack_error: From errors to plain values, and back.
    """
    _end_with(parent)
    _prefer_for_oom_kill()
    for number in NOT_FOR_CHILDREN:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOT_FOR_CHILDREN)
    os.set_inheritable(descriptor, False)
    connection = Connection(socket.socket(fileno=descriptor))
    served = Served(connection, unpack_error)
    try:
        connection.send(["ready"])
        while True:
            found = connection.receive(timeout_s=LOOK_S)
            if os.getppid() != parent:
                break
            if found is None:
                continue
            kind, *rest = found.message
            if kind == "work":
                served._begin(rest[0], work, pack_error)
            else:
                served._take(kind, rest, found.files)
    except Ended:
        pass
    os._exit(0)


def _work(served: Served, given: Any, work: Work, pack_error: Callable[[BaseException], Any]) -> None:
    try:
        reply = ["done", work(served, given)]
    except BaseException as error:  # noqa: BLE001 - carried to the parent, nothing is dropped
        reply = ["failed", pack_error(error)]
    served._send(reply)


def _prefer_for_oom_kill() -> None:
    """Where memory runs out, let the kernel take this process rather than its parent."""
    try:
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    except OSError:
        pass  # not Linux, or its parent is to be taken still earlier


def _end_with(parent: int) -> None:
    """Ask the kernel to end this process with its parent, which may be gone already."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    except (OSError, AttributeError):
        pass  # not Linux: the connection says it
    if os.getppid() != parent:
        os._exit(0)
