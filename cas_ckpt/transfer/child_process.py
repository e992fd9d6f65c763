"""A child process that works for this one: how it is started, given work, watched and ended. (Its own side: serving.py)

    1. `ChildProcess` starts Python anew, with the import path of this process and a function to call; nothing of the
       program that runs here is imported or run there, and no memory, socket or device is inherited
    2. `run` sends a piece of work, and answers what the child asks until it is done, in the caller's thread
    3. `close` lets it end, and ends it if it does not

How nothing is left behind: a thread starts the child and waits for it as long as it lives. The kernel ends the child
with that thread, that is with this process, however it ends (PR_SET_PDEATHSIG); the connection, which is closed then,
and the number of its parent tell the child too. Ctrl-C and signals for the process group do not reach it: whether to
go on is decided here.

Invariant: after `run` raised `ChildEnded` the child makes no further effect. Knows nothing of what the work is.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Protocol, TypeAlias

from cas_ckpt import clock
from cas_ckpt.errors import StorageError
from cas_ckpt.transfer.messages import LOOK_S, Connection, Ended
from cas_ckpt.uncopied import Uncopied

_LOGGER = logging.getLogger("cas_ckpt")

STOPPED_S = 60.0
"""How long a child may be stopped (SIGSTOP, a debugger) in the middle of its work before it is ended."""

START_S = 120.0
"""How long it may take to start."""

END_S = 10.0
"""How long it may take to end by itself, and then to be ended."""

NOT_FOR_CHILDREN = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)
"""Signals that people and schedulers send to whole groups: blocked while the child starts, which then ignores them."""

_STDERR_TAIL_BYTES = 2000
"""Characters of what a child wrote before it died that are shown."""

_START = (
    "import sys; sys.path[:] = {path!r}; from importlib import import_module; "
    "import_module({module!r}).{function}({descriptor}, {parent})"
)

Answer: TypeAlias = Callable[[str, list[Any]], Any]
"""Answers a question of the child: its name and arguments, all plain values; what it raises the child is told."""

Note: TypeAlias = Callable[[str, list[Any]], object]
"""Is told something that wants no answer."""


class ChildEnded(Exception):
    """The child is gone, or was ended because it did not go on; says why.

    Attributes:
        had_begun: It may have done something of its last work.
    """

    def __init__(self, message: str, *, had_begun: bool = False) -> None:
        super().__init__(message)
        self.had_begun = had_begun


class WorkFailed(Exception):
    """The work raised in the child: what of, as it packed it."""

    def __init__(self, packed: Any) -> None:
        super().__init__(packed)
        self.packed = packed


class PackError(Protocol):
    """Makes a plain value of an error that was raised while a question was answered."""

    def __call__(self, error: BaseException, /) -> Any:
        """The plain value."""
        ...


_children: weakref.WeakSet[ChildProcess] = weakref.WeakSet()


def _program(entry: str, descriptor: int) -> str:
    """What the child runs: no `__main__` of anybody, and what it imports comes from where it comes from here."""
    module, _, function = entry.partition(":")
    path = [os.fspath(each) for each in sys.path]
    return _START.format(path=path, module=module, function=function, descriptor=descriptor, parent=os.getpid())


def _release(connection: Connection, stderr: IO[bytes]) -> None:
    """Close what a child is known by: it ends then."""
    connection.close()
    stderr.close()


def _after_fork() -> None:
    """In a fork of this process: it has no children, and must not keep their connections open."""
    for child in list(_children):
        child._abandon()


os.register_at_fork(after_in_child=_after_fork)


class _Keeper:
    """Starts the child and stays until it has ended, in a thread: the kernel ends the child with that thread.

    Attributes:
        ended: Set once the child has ended and its status is known.

    Raises:
        StorageError: there is no thread to be had; `theirs` is closed.
    """

    def __init__(self, entry: str, theirs: socket.socket, stderr: int) -> None:
        self.ended = threading.Event()
        self._begun = threading.Event()
        self._refusal: Exception | None = None
        self._process: subprocess.Popen[bytes] | None = None
        keeper = threading.Thread(target=self._keep, args=(entry, theirs, stderr), name="cas-ckpt-keeper", daemon=True)
        try:
            keeper.start()
        except RuntimeError as error:
            theirs.close()
            raise StorageError(f"no worker process can be started: {error}") from error

    def process(self) -> subprocess.Popen[bytes]:
        """The child, once it is started.

        Raises:
            StorageError: it cannot be.
        """
        self._begun.wait()
        if self._process is None:
            raise StorageError(f"no worker process can be started: {self._refusal}") from self._refusal
        return self._process

    def _keep(self, entry: str, theirs: socket.socket, stderr: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_CHILDREN)  # inherited until the child ignores them
        try:
            with theirs:
                process = subprocess.Popen(  # noqa: S603  # our own interpreter and words, no shell
                    [sys.executable, "-P", "-c", _program(entry, theirs.fileno())], stdin=subprocess.DEVNULL,
                    stdout=stderr, stderr=stderr, pass_fds=[theirs.fileno()], process_group=0,
                )  # fmt: skip
        except Exception as error:  # noqa: BLE001 - raised by `process`
            self._refusal = error
            self._begun.set()
            return
        self._process = process
        self._begun.set()
        process.wait()
        self.ended.set()


class ChildProcess(Uncopied):
    """A child that does one piece of work at a time. For one thread at a time, but for `close` and `pid`.

    Attributes:
        pid: Its process id.

    Args:
        entry: "module:function", called there with what `serving.serve` needs.
    Raises:
        StorageError: no process can be started.
    """

    def __init__(self, entry: str) -> None:
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours)
        self._stderr = open(os.memfd_create("cas-ckpt-stderr"), "rb", buffering=0)  # noqa: SIM115 - closed by `close`
        self._is_ready = self._is_at_work = self._has_begun = False
        self._is_ours = True
        try:
            keeper = _Keeper(entry, theirs, self._stderr.fileno())
            self._process = keeper.process()
        except BaseException:
            self._connection.close()
            self._stderr.close()
            raise
        self._ended = keeper.ended
        self.pid: int = self._process.pid
        _children.add(self)
        weakref.finalize(self, _release, self._connection, self._stderr)

    def _abandon(self) -> None:
        """This is a fork: the child belongs to another process."""
        self._is_ours = False
        self._connection.close()
        self._stderr.close()

    @property
    def alive(self) -> bool:
        """Whether it can be given work: it has not ended, and is a child of this very process."""
        return self._is_ours and not self._ended.is_set()

    def lend(self, name: int, descriptor: int, num_bytes: int) -> None:
        """Let the child map `num_bytes` of an open file, which it knows by the number `name` from now on.

        Raises:
            ChildEnded.
        """
        self._send(["memory", name, num_bytes], files=[descriptor])

    def take_back(self, name: int) -> None:
        """Let it forget what was lent as `name`; no work may use it."""
        self._send(["forget", name])

    def run(self, work: Any, *, answer: Answer, note: Note, pack_error: PackError) -> Any:
        """Run `work` in the child; its result.

        Args:
            answer, note: Called in this thread, while the work goes on. What `note` raises cancels the work, and is
                raised once that has ended.
            pack_error: What the child is told of an error of `answer`.
        Raises:
            WorkFailed: the work raised. ChildEnded: the child died, or was stopped for `STOPPED_S` and was ended.
        """
        self._is_at_work, self._has_begun = True, False
        try:
            return self._work(work, answer, note, pack_error)
        except ChildEnded as ended:
            ended.had_begun = self._has_begun
            raise
        finally:
            if self._is_at_work:
                self._kill()  # nobody waits any more for what it does

    def _work(self, work: Any, answer: Answer, note: Note, pack_error: PackError) -> Any:
        self._send(["work", work])
        unwanted: Exception | None = None
        while True:
            kind, *rest = self._receive()
            if kind == "begun":
                self._has_begun = True
            if kind in ("done", "failed"):
                self._is_at_work = False
            if kind == "done":
                if unwanted is not None:
                    _LOGGER.warning("the work of process %d was done before it heard of: %r", self.pid, unwanted)
                return rest[0]
            if kind == "failed":
                raise WorkFailed(rest[0]) if unwanted is None else unwanted
            if kind == "note":
                try:
                    note(rest[0], rest[1])
                except Exception as error:  # noqa: BLE001 - raised once the work has ended
                    if unwanted is None:
                        unwanted = error
                        self._send(["cancel"])
            elif kind == "question":
                number, name, arguments = rest
                try:
                    reply = ["answer", number, True, answer(name, arguments)]
                except BaseException as error:
                    self._send(["answer", number, False, pack_error(error)])
                    if not isinstance(error, Exception):
                        raise
                else:
                    self._send(reply)

    def _send(self, message: Any, *, files: Sequence[int] = ()) -> None:
        watch = _Watch(self)
        try:
            self._connection.send(message, files=files, waiting=watch.look)
        except Ended:
            raise self._over() from None

    def _receive(self) -> Any:
        watch = _Watch(self)
        try:
            while True:
                found = self._connection.receive(timeout_s=LOOK_S)
                if found is not None:
                    if found.message[0] == "ready":
                        self._is_ready = True
                        continue
                    return found.message
                watch.look()
        except Ended:
            raise self._over() from None

    def _over(self) -> ChildEnded:
        """The connection has ended: how the child did, which is ended if it still runs."""
        if not self._is_ours:
            return ChildEnded("it belongs to the process that this one was forked from")
        if not self._ended.wait(END_S):
            self._kill()
            return ChildEnded(f"process {self.pid} closed its connection and was ended")
        stderr = self._stderr_tail()
        return ChildEnded(f"process {self.pid} {self._how()}{f'; it wrote: {stderr}' if stderr else ''}")

    def _how(self) -> str:
        code = self._process.returncode
        if code >= 0:
            return f"ended with status {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = " (the kernel does that when memory runs out; see dmesg)" if -code == signal.SIGKILL else ""
        return f"was ended by {name}{hint}"

    def _stderr_tail(self) -> str:
        if self._stderr.closed:
            return ""
        end = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, end - _STDERR_TAIL_BYTES))
        return self._stderr.read().decode("utf-8", "replace").strip()

    def _kill(self) -> bool:
        """End it at once, also where it is stopped; whether it has ended."""
        if not self._is_ours:
            return False
        self._process.kill()
        return self._ended.wait(END_S)

    def close(self) -> None:
        """Let it end; it is ended if it is at work, or does not within `END_S`. Idempotent; from any thread.

        Raises:
            ChildEnded: the kernel does not let it go (it waits for a medium that does not answer); it makes no
                further effect, and goes when that answers.
        """
        if not self._is_ours:
            return
        self._connection.close()
        gone = self._ended.wait(END_S) or self._kill()
        self._stderr.close()
        if not gone:
            raise ChildEnded(f"process {self.pid} was killed and waits in the kernel for a medium that does not answer")

    def state(self) -> str:
        """The kernel's letter for what it does: "R" runs, "S" and "D" wait, "T" and "t" are stopped; "": not known."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""


class _Watch:
    """Sees to it that nobody waits without end for a child that does not go on."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child
        self._since_s = clock.monotonic_s()
        self._stopped_s = 0.0

    def look(self) -> None:
        """Called about every second in which nothing came.

        Raises:
            ChildEnded: it has been stopped for too long, or does not start; it was ended.
        """
        child = self._child
        if not child.alive:
            raise Ended
        # Seconds are counted, not measured: while this process was stopped itself, it looked at nothing.
        self._stopped_s = self._stopped_s + LOOK_S if child.state() in ("T", "t") else 0.0
        if self._stopped_s >= STOPPED_S:
            child._kill()
            raise ChildEnded(
                f"process {child.pid} was stopped (SIGSTOP, or a debugger) for {STOPPED_S:.0f} s and was ended"
            )
        if not child._is_ready and clock.monotonic_s() - self._since_s > START_S:
            child._kill()
            raise ChildEnded(f"process {child.pid} did not start within {START_S:.0f} s and was ended")
