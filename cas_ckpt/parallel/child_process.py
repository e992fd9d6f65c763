"""A child process that works for this one: how it is started, given work, watched and ended; and its own side.

    1. `ChildProcess` starts Python anew, with the import path of this process and a function to call; nothing of the
       program that runs here is imported or run there, and no memory, socket or device is inherited
    2. `run` sends a piece of work, and answers what the child asks until it is done, in the caller's thread
    3. `serve`, in the child: the main thread reads what comes; each piece of work runs in a thread, which may ask the
       parent and tell it things (`Served`)
    4. `close` lets the child end, and ends it if it does not

They speak by `multiprocessing.connection` (pickle) over a pair of sockets that nobody else has.

How nothing is left behind: a thread starts the child and waits for it as long as it lives. The kernel ends the child
with that thread, that is with this process, however it ends (PR_SET_PDEATHSIG); the connection, which is closed then,
and the number of its parent tell the child too, and it ends at once, whatever it is doing. Ctrl-C and signals for the
process group do not reach it: whether to go on is decided here. It has no terminal, so that what it starts cannot ask
there and be stopped.

Invariant: after `run` raised `ChildEnded` the child makes no further effect. Knows nothing of what the work is.
"""

from __future__ import annotations

import builtins
import ctypes
import fcntl
import itertools
import logging
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import termios
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, NoReturn, TypeAlias

from cas_ckpt import errors
from cas_ckpt.errors import InternalError, StorageError
from cas_ckpt.uncopied import Uncopied

_LOGGER = logging.getLogger("cas_ckpt")

LOOK_S = 1.0
"""How often the state of a stopped child, and the parent of a child, are looked at."""

STOPPED_S = 60.0
"""How long a child may be stopped (SIGSTOP) before it is ended."""

START_S = 120.0
"""How long it may take to start."""

END_S = 10.0
"""How long it may take to end by itself, and then to be ended."""

NOT_FOR_CHILDREN = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)
"""Signals that people and schedulers send to whole groups: blocked while the child starts, which then ignores them."""

OOM_SCORE = "500"
"""Added to the share of memory, in thousandths, by which the kernel chooses whom to end; 0 is usual."""

_PR_SET_PDEATHSIG = 1
_MOST_CAUSES = 8
_STDERR_TAIL_BYTES = 2000
"""Characters of what a child wrote before it died that are shown."""

_START = (
    "import sys; sys.path[:] = {path!r}; from importlib import import_module; "
    "import_module({module!r}).{function}({descriptor}, {parent})"
)

Answer: TypeAlias = Callable[[str, Sequence[Any]], Any]
"""Answers a question of the child: its name and arguments; what it raises is raised there."""

Note: TypeAlias = Callable[[str, Sequence[Any]], object]
"""Is told something that wants no answer."""

Work: TypeAlias = "Callable[[Served, Any], Any]"
"""Does a piece of work in the child."""


class ChildEnded(Exception):
    """The child is gone, or was ended because it did not go on; says why.

    Attributes:
        had_begun: It may have done something of its last work.
    """

    had_begun = False


class Cancelled(Exception):
    """The parent does not want the work any more."""


# --- errors -----------------------------------------------------------------------------------


def packed_error(error: BaseException) -> list[tuple[bytes, str]]:
    """`error` and what caused it, each pickled and as Python prints it, so that the other process can raise it."""
    found: list[tuple[bytes, str]] = []
    each: BaseException | None = error
    while each is not None and len(found) < _MOST_CAUSES:
        found.append((_pickled(each), "".join(traceback.format_exception(each, chain=False))))
        each = each.__cause__ if each.__cause__ is not None or each.__suppress_context__ else each.__context__
    return found


def _pickled(error: BaseException) -> bytes:
    """An error of cas_ckpt or of Python as it is, another one as the nearest of these: no other module is imported."""
    kinds = [kind for kind in type(error).__mro__ if kind.__module__ in (errors.__name__, builtins.__name__)]
    nearest: Any = next(kind for kind in kinds if issubclass(kind, BaseException))
    try:
        data = pickle.dumps(error if type(error) is nearest else nearest(str(error)))
        if nearest is not Exception and type(pickle.loads(data)) is nearest:  # noqa: S301 - our own bytes
            return data
    except Exception:  # noqa: BLE001, S110 - whatever is wrong with it, its name and text can be told
        pass
    return pickle.dumps(InternalError(f"{type(error).__name__}: {error}"))


def unpacked_error(packed: list[tuple[bytes, str]]) -> BaseException:
    """The error that `packed_error` packed, with its causes."""
    made: list[BaseException] = [pickle.loads(data) for data, _ in packed]  # noqa: S301 - of our own process
    for error, cause in itertools.pairwise(made):
        error.__cause__ = cause
    return made[0]


# --- the parent's side ------------------------------------------------------------------------

_children: weakref.WeakSet[ChildProcess] = weakref.WeakSet()


def _program(entry: str, descriptor: int) -> str:
    """What the child runs: no `__main__` of anybody, and what it imports comes from where it comes from here."""
    module, _, function = entry.partition(":")
    path = [os.fspath(each) for each in sys.path]
    return _START.format(path=path, module=module, function=function, descriptor=descriptor, parent=os.getpid())


def _release(*opened: socket.socket | Connection | IO[bytes]) -> None:
    """Close what a child is known by: it ends then."""
    for each in opened:
        each.close()


def _after_fork() -> None:
    """In a fork of this process: it has no children, and must not keep their connections open."""
    for child in list(_children):
        child._abandon()


os.register_at_fork(after_in_child=_after_fork)


class _Keeper:
    """Starts the child and stays until it has ended, in a thread: the kernel ends the child with that thread.

    Attributes:
        ended: Set once the child has ended and its status is known.
        was_stopped: It was ended because it had been stopped for `STOPPED_S`.

    Args:
        hang_up: Called once it has ended: a fork of it, or of this process, may keep the connection open.
    Raises:
        StorageError: there is no thread to be had; `theirs` is closed.
    """

    def __init__(
        self, entry: str, theirs: socket.socket, stderr: int, hang_up: weakref.WeakMethod[Callable[[], None]]
    ) -> None:
        self.ended = threading.Event()
        self.was_stopped = False
        self._hang_up = hang_up
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
        self._watch(process)
        process.wait()
        self.ended.set()
        hang_up = self._hang_up()
        if hang_up is not None:
            hang_up()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Return once it has ended; nobody is to wait without end for one that stays stopped: that is ended.

        Seconds are counted, not measured: while this process was stopped itself, it looked at nothing.
        """
        stopped_s, what = 0.0, os.WEXITED | os.WSTOPPED | os.WNOWAIT
        try:
            while stopped_s < STOPPED_S:
                found = os.waitid(os.P_PID, process.pid, what | (os.WNOHANG if stopped_s else 0))
                if found is None:
                    stopped_s = 0.0  # it goes on
                elif found.si_code != os.CLD_STOPPED:
                    return
                else:
                    self.ended.wait(LOOK_S)
                    stopped_s += LOOK_S
        except ChildProcessError:
            return  # the program lets the kernel wait for its children
        self.was_stopped = True
        process.kill()


class ChildProcess(Uncopied):
    """A child that does one piece of work at a time. For one thread at a time, but for `take_back`, `close` and `pid`.

    Attributes:
        pid: Its process id.

    Args:
        entry: "module:function", called there with what `serve` needs.
    Raises:
        StorageError: no process can be started.
    """

    def __init__(self, entry: str) -> None:
        self._end, theirs = socket.socketpair()
        for end in (self._end, theirs):
            end.setblocking(True)  # whatever the program's timeout for its sockets is
        self._connection = Connection(os.dup(self._end.fileno()))
        self._sending = threading.Lock()
        self._stderr = open(os.memfd_create("cas-ckpt-stderr"), "rb", buffering=0)  # noqa: SIM115 - closed by `_release`
        self._is_ready = self._is_at_work = self._has_begun = False
        self._is_ours = True
        opened = (self._end, self._connection, self._stderr)
        try:
            self._keeper = _Keeper(entry, theirs, self._stderr.fileno(), weakref.WeakMethod(self._hang_up))
            self._process = self._keeper.process()
        except BaseException:
            _release(*opened)
            raise
        self.pid: int = self._process.pid
        _children.add(self)
        weakref.finalize(self, _release, *opened)

    def _abandon(self) -> None:
        """This is a fork: the child belongs to another process."""
        self._is_ours = False
        _release(self._end, self._connection, self._stderr)

    @property
    def alive(self) -> bool:
        """Whether it can be given work: it has not ended, and is a child of this very process."""
        return self._is_ours and not self._keeper.ended.is_set()

    def lend(self, name: int, descriptor: int, num_bytes: int) -> None:
        """Let the child map `num_bytes` of an open file, which it knows by the number `name` from now on.

        Raises:
            ChildEnded.
        """
        self._send("memory", name, num_bytes, file=descriptor)

    def take_back(self, name: int) -> None:
        """Let it forget what was lent as `name`; no work may use it."""
        self._send("forget", name)

    def run(self, work: Any, *, answer: Answer, note: Note) -> Any:
        """Run `work` in the child; its result.

        Args:
            answer, note: Called in this thread, while the work goes on. What `note` raises cancels the work, and is
                raised once that has ended.
        Raises:
            What the work raised; where it was raised there goes to the log (DEBUG). ChildEnded: the child died, or was
            stopped for `STOPPED_S` and was ended.
        """
        self._is_at_work, self._has_begun = True, False
        try:
            return self._work(work, answer, note)
        except ChildEnded as ended:
            ended.had_begun = self._has_begun
            raise
        finally:
            if self._is_at_work:
                self._kill()  # nobody waits any more for what it does

    def _work(self, work: Any, answer: Answer, note: Note) -> Any:
        self._send("work", work)
        unwanted: Exception | None = None
        while True:
            try:
                kind, *rest = self._connection.recv()
            except (EOFError, OSError):
                raise self._over() from None
            if kind == "begun":
                self._has_begun = True
            elif kind == "done":
                self._is_at_work = False
                if unwanted is not None:
                    _LOGGER.warning("the work of process %d was done before it heard of: %r", self.pid, unwanted)
                return rest[0]
            elif kind == "failed":
                self._is_at_work = False
                if unwanted is not None:
                    raise unwanted
                texts = "\nwhich led to\n\n".join(text for _, text in reversed(rest[0]))
                _LOGGER.debug("the worker process %d failed:\n%s", self.pid, texts)
                error = unpacked_error(rest[0])
                raise error from error.__cause__
            elif kind == "note":
                try:
                    note(*rest)
                except Exception as error:  # noqa: BLE001 - raised once the work has ended
                    if unwanted is None:
                        unwanted = error
                        self._send("cancel")
            elif kind == "question":
                number, name, arguments = rest
                try:
                    reply = answer(name, arguments)
                except BaseException as error:
                    self._send("answer", number, False, packed_error(error))
                    if not isinstance(error, Exception):
                        raise
                else:
                    self._send("answer", number, True, reply)

    def _send(self, *message: Any, file: int | None = None) -> None:
        if not self._is_ours:
            raise self._over()
        data = ForkingPickler.dumps(message)  # not with the lock: a destructor that runs meanwhile may send, too
        with self._sending:
            try:
                self._wait_until_ready()
                self._connection.send_bytes(data)
                if file is not None:
                    socket.send_fds(self._end, [b"\0"], [file])
            except OSError:
                pass
            else:
                return
        raise self._over()

    def _wait_until_ready(self) -> None:
        if self._is_ready:
            return
        if not self._connection.poll(START_S):
            self._kill()
            raise ChildEnded(f"process {self.pid} did not start within {START_S:.0f} s and was ended")
        try:
            self._is_ready = self._connection.recv() == ("ready",)
        except EOFError as error:
            raise OSError from error

    def _over(self) -> ChildEnded:
        """The connection has ended: how the child did, which is ended if it still runs."""
        if not self._is_ours:
            return ChildEnded("it belongs to the process that this one was forked from")
        if not self._keeper.ended.wait(END_S):
            self._kill()
            return ChildEnded(f"process {self.pid} closed its connection and was ended")
        if self._keeper.was_stopped:
            return ChildEnded(f"process {self.pid} was stopped (SIGSTOP) for {STOPPED_S:.0f} s and was ended")
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
        end = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, end - _STDERR_TAIL_BYTES))
        return self._stderr.read().decode("utf-8", "replace").strip()

    def _kill(self) -> bool:
        """End it at once, also where it is stopped; whether it has ended."""
        if not self._is_ours:
            return False
        self._process.kill()
        return self._keeper.ended.wait(END_S)

    def close(self) -> None:
        """Let it end; it is ended if it is at work, or does not within `END_S`. Idempotent; from any thread.

        Raises:
            ChildEnded: the kernel does not let it go (it waits for a medium that does not answer); it makes no
                further effect, and goes when that answers.
        """
        if not self._is_ours:
            return
        self._hang_up()
        if not self._keeper.ended.wait(END_S) and not self._kill():
            raise ChildEnded(f"process {self.pid} was killed and waits in the kernel for a medium that does not answer")

    def _hang_up(self) -> None:
        """Shut the connection down, which whoever sends or receives notices; what has come can still be received.

        It is closed with this object, when nobody uses it any more.
        """
        try:
            self._end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended


# --- the child's side -------------------------------------------------------------------------


class Served:
    """Interface of a piece of work to the parent. Thread-safe."""

    def __init__(self, connection: Connection, end: socket.socket) -> None:
        self._connection = connection
        self._end = end
        self._sending = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, SimpleQueue[tuple[bool, Any]]] = {}
        self._memory: dict[int, mmap.mmap | OSError] = {}
        self._cancelled = False

    def ask(self, name: str, *arguments: Any) -> Any:
        """Ask the parent; its answer.

        Raises:
            Whatever it raised.
        """
        number = next(self._numbers)
        queue = self._waiting[number] = SimpleQueue()
        self._send("question", number, name, arguments)
        is_answer, reply = queue.get()
        if not is_answer:
            raise unpacked_error(reply)
        return reply

    def tell(self, name: str, *arguments: Any) -> None:
        """Tell the parent something that wants no answer."""
        self._send("note", name, arguments)

    def _send(self, *message: Any) -> None:
        data = ForkingPickler.dumps(message)  # as in `ChildProcess._send`
        with self._sending:
            try:
                self._connection.send_bytes(data)
            except OSError:
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

    def _take(self, work: Work, kind: str, *rest: Any) -> None:
        """Something that came."""
        if kind == "work":
            self._cancelled = False
            try:
                threading.Thread(target=self._run, args=(work, *rest), name="cas-ckpt-work", daemon=True).start()
            except RuntimeError as error:
                self._send("failed", packed_error(MemoryError(f"no thread starts in the worker process: {error}")))
        elif kind == "answer":
            number, *reply = rest
            self._waiting.pop(number).put(tuple(reply))
        elif kind == "cancel":
            self._cancelled = True
        elif kind == "memory":
            name, num_bytes = rest
            _, [file], _, _ = socket.recv_fds(self._end, 1, 1)
            try:
                self._memory[name] = mmap.mmap(file, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
            except OSError as error:
                self._memory[name] = error  # for whoever wants it
            os.close(file)
        elif kind == "forget":
            del self._memory[rest[0]]

    def _run(self, work: Work, given: Any) -> None:
        """Do a piece of work, in a thread of its own."""
        self._send("begun")
        try:
            self._send("done", work(self, given))
        except BaseException as error:  # noqa: BLE001 - carried to the parent, nothing is dropped
            self._send("failed", packed_error(error))


def serve(descriptor: int, parent: int, work: Work) -> NoReturn:
    """Take work until the parent is gone; then this process ends.

    Args:
        descriptor: The socket to the parent. parent: Its process id.
    """
    with suppress(OSError, AttributeError):  # not Linux: the connection says that the parent has ended
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # gone already
        os._exit(0)
    # No terminal, neither for what is started here: it would stop who asks there, as we are in the background. The
    # session stays that of the parent: a niceness counts among the processes of one session only.
    with suppress(OSError), open("/dev/tty", "rb", buffering=0) as terminal:  # there may be none
        fcntl.ioctl(terminal, termios.TIOCNOTTY)
    # Where memory runs out, let the kernel take this process rather than its parent.
    with suppress(OSError):  # not Linux, or its parent is to be taken still earlier
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    for number in NOT_FOR_CHILDREN:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOT_FOR_CHILDREN)
    os.set_inheritable(descriptor, False)
    connection, end = Connection(descriptor), socket.socket(fileno=os.dup(descriptor))
    end.setblocking(True)
    served = Served(connection, end)
    served._send("ready")
    while os.getppid() == parent:
        try:
            message = connection.recv() if connection.poll(LOOK_S) else None
        except (EOFError, OSError):
            break
        if message is not None:
            served._take(work, *message)
    os._exit(0)
