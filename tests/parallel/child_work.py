"""What the child processes of test_child_process.py do, in their own process; and parents that are killed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from cas_ckpt.errors import ConflictError
from cas_ckpt.parallel.child_process import ChildProcess, Served, serve

ENTRY = "tests.parallel.child_work:main"


def main(descriptor: int, parent: int) -> None:
    serve(descriptor, parent, work)


def work(served: Served, given: list[Any]) -> Any:
    name, *arguments = given
    return globals()[f"do_{name}"](served, *arguments)


def do_ask(served: Served, *arguments: Any) -> Any:
    return served.ask("question", *arguments)


def do_sum(served: Served, name: int) -> int:
    return int(np.frombuffer(served.memory(name), np.uint8).sum())


def do_fail(served: Served) -> None:
    try:
        raise OSError(28, "No space left on device", "/somewhere")
    except OSError as error:
        raise ConflictError("somebody was faster") from error


def do_count(served: Served, seconds: float) -> int:
    """Report until cancelled, or for so long."""
    end_s, number = time.monotonic() + seconds, 0
    while time.monotonic() < end_s:
        served.stop_if_cancelled()
        served.tell("counted", number)
        number += 1
        time.sleep(0.01)
    return number


def do_say(served: Served, text: str) -> None:
    """Write to standard error, and die."""
    os.write(2, text.encode())
    os._exit(3)


def do_die_beside_a_fork(served: Served) -> None:
    """Die while a fork has whatever is open here."""
    fork = os.fork()
    if fork == 0:
        time.sleep(60)
        os._exit(0)
    served.tell("forked", fork)
    os._exit(3)


def do_open_terminal(served: Served) -> str:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError as error:
        return str(error.strerror)
    return "has one"


def do_log_while_it_is_sent(served: Served) -> Any:
    return _Telling(served)


class _Telling:
    """Tells something while it is pickled, as a destructor may that the collection of garbage calls."""

    def __init__(self, served: Served) -> None:
        self._served = served

    def __reduce__(self) -> Any:
        self._served.tell("logged")
        return int, (5,)


def do_exhaust(served: Served) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, resource.RLIM_INFINITY))
    np.ones(8 << 30, np.uint8)


def do_return_a_lambda(served: Served) -> Any:
    return lambda: 0


def do_imported(served: Served) -> list[str]:
    return sorted(sys.modules)


def do_fds(served: Served) -> list[str]:
    found = []
    for each in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing
            found.append(os.readlink(f"/proc/self/fd/{each}"))
    return found


def parent_of_one(*, stopped: bool = False, forked: bool = False) -> None:
    """Start a child that works for long, say its number, and work for long."""
    import signal

    child = ChildProcess(ENTRY)
    if forked and os.fork() == 0:  # it keeps whatever is open, and outlives its parent
        time.sleep(20)
        os._exit(0)

    def counted(name: str, arguments: Sequence[Any]) -> None:
        if arguments[0] == 3:
            if stopped:
                os.kill(child.pid, signal.SIGSTOP)
            print(child.pid, flush=True)

    child.run(["count", 100], answer=lambda *_: None, note=counted)
