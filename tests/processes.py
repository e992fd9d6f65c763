"""Real processes of tests, forked from a server that has imported torch and cas_ckpt: 20 ms to start one, not 3 s.

    with Forked(live, path, 3, stdout=PIPE) as process:     # live(path, 3), a function of some module, in a process
        assert process.stdout.readline() == "ready\n"
        process.kill()
    assert process.returncode == -signal.SIGKILL

A `Forked` is used as `subprocess.Popen` is. It shares nothing with the test: the server was started for itself and does
nothing but fork, so that a process is killed, stopped or left holding a lock like any other. What a program does at its
end is that of `run_program`; tests of what one imports or prints at its start use `subprocess`.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import PIPE
from types import TracebackType
from typing import IO, Any, Self

ROOT = Path(__file__).resolve().parent.parent
# One thread a process, and connections of gloo over the loopback.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
IMPORTED = [
    "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint.state_dict", "cas_ckpt.repository", "cas_ckpt.training.verbs",
    "cas_ckpt.training.process_group", "cas_ckpt.dcp", "tests.builders", "tests.quick_index",
]  # fmt: skip

_SERVER = multiprocessing.get_context("forkserver")
_STARTING = threading.Lock()


class Forked:
    """A process that calls `function(*args)`, both of which are pickled, and ends with what that gives.

    Args:
        stdin: `PIPE`, or None for nothing to read.
        stdout: `PIPE`, an open file, or None for where the test prints.
        stderr: Likewise.
        text: Whether pipes carry text.
    """

    def __init__(
        self,
        function: Callable[..., object],
        *args: Any,
        stdin: int | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        text: bool = True,
    ) -> None:
        ours: list[IO[Any] | None] = []
        theirs: list[Connection | None] = []
        for number, wanted in enumerate((stdin, stdout, stderr)):
            mine, other = _ends(wanted, to_process=number == 0, text=text)
            ours.append(mine)
            theirs.append(other)
        self.stdin, self.stdout, self.stderr = ours
        self._process = _SERVER.Process(target=_run, args=(theirs, function, args), daemon=True)
        with _STARTING:
            _start_server()
            self._process.start()
        for end in theirs:
            if end is not None:
                end.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs, negative for a signal."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0)
        return self.returncode

    def wait_for_stop(self) -> None:
        """Until it has been stopped by SIGSTOP."""
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert self.returncode is None
            time.sleep(0.01)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, text: Any = None) -> tuple[Any, Any]:
        """Write to its stdin, read its output to the end, and wait for it."""
        if self.stdin is not None:
            if text:
                self.stdin.write(text)
            self.stdin.close()
        found: dict[str, Any] = {}
        readers = [
            threading.Thread(target=lambda name, pipe: found.update({name: pipe.read()}), args=(name, pipe))
            for name, pipe in (("out", self.stdout), ("err", self.stderr))
            if pipe is not None and not pipe.closed
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        self.wait()
        self.close()
        return found.get("out"), found.get("err")

    def close(self) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.kill()
        self.close()
        self.wait()


def is_gone(pid: int) -> bool:
    """Whether the process has ended and was waited for, or is only waited for by somebody else."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _ends(wanted: int | IO[Any] | None, *, to_process: bool, text: bool) -> tuple[IO[Any] | None, Connection | None]:
    """This side's file and the other side's end of one of the three streams."""
    if wanted is None:
        return None, None
    if wanted != PIPE:
        return None, Connection(os.dup(wanted.fileno()), readable=False)  # type: ignore[union-attr]
    read, write = os.pipe()
    mine = os.fdopen(write if to_process else read, "wb" if to_process else "rb", buffering=0 if not text else -1)
    file: IO[Any] = io.TextIOWrapper(mine, write_through=True) if text else mine
    if to_process:
        return file, Connection(read, writable=False)
    return file, Connection(write, readable=False)


def _start_server() -> None:
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        _SERVER.set_forkserver_preload(IMPORTED)
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# ---------------------------------------------------------------- inside the process


def run_module(name: str, *arguments: str) -> None:
    """As `python -m name arguments` does."""
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def run_program(text: str, *arguments: str) -> None:
    """As `python -c text arguments` does, with all that an interpreter does at its end but destructors: 2 s."""
    sys.argv, code = ["-c", *arguments], 0
    try:
        exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:  # noqa: BLE001 - shown as Python would
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(ends: list[Connection | None], function: Callable[..., object], args: tuple[Any, ...]) -> None:
    from tests import quick_index

    for number, end in enumerate(ends):
        if end is not None:
            os.dup2(end.fileno(), number)
            end.close()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - until the process ends
    os.environ.update(ENVIRONMENT)
    quick_index.install()
    function(*args)
