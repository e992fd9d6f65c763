"""Who has an index in a file open, by a lock for all who open it, and who may write it. Knows nothing of SQL."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cas_ckpt.errors import ConflictError
from cas_ckpt.held_signals import held_signals
from cas_ckpt.uncopied import Uncopied


class OpenLock(Uncopied):
    """Says that a database file is open: a shared lock beside it, until `close` or the end of the process.

    SQLite's log and shared memory are found by name: whoever removes them while a process has the database open, or
    is about to, leaves two processes with files that do not belong together. So files are removed only by
    `while_closed`. The kernel ends a lock with its process, so that none goes stale.
    """

    def __init__(self, path: Path, *, read_only: bool) -> None:
        self._fd: int | None = None
        try:
            with suppress(OSError):  # a medium that cannot be written: nothing is removed
                self._fd = _open_lock_file(path, os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT)
                fcntl.flock(self._fd, fcntl.LOCK_SH)
        except BaseException:  # a signal: this object is lost, and a traceback would keep the lock
            self.close()
            raise

    def close(self) -> None:
        """The file may be removed. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    __del__ = close


@contextmanager
def while_closed(path: Path) -> Iterator[None]:
    """A time in which no process has the database open or opens it; others wait to open it, and signals wait.

    Raises:
        ConflictError: a process has it open.
        OSError: the lock cannot be had for another reason.
    """
    with held_signals():
        fd = _open_lock_file(path, os.O_RDWR | os.O_CREAT)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConflictError(
                    f"index {path}: a process has it open; end that process, or name another place (no two "
                    "repositories share one file), then try again"
                ) from None
            yield
        finally:
            os.close(fd)


def may_write(path: Path) -> bool:
    """Whether this user may write the file; else SQLite opens it all the same, and makes files beside it."""
    return not os.path.exists(path) or os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _open_lock_file(path: Path, flags: int) -> int:
    name = path.with_name(path.name + ".lock")
    try:
        return os.open(name, flags | os.O_CLOEXEC, 0o666)
    except PermissionError:  # of somebody who does not let us write, which a lock does not need here
        return os.open(name, os.O_RDONLY | os.O_CLOEXEC)
