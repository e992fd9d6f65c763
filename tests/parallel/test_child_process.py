"""A child process works, fails, dies, is stopped and is left alone; it is never left behind."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cas_ckpt.errors import ConflictError, InternalError, InvalidInputError, StorageError
from cas_ckpt.parallel import child_process
from cas_ckpt.parallel.child_process import ChildEnded, ChildProcess
from tests.no_threads import no_thread_can_be_started
from tests.parallel.child_work import ENTRY, do_open_terminal, parent_of_one
from tests.processes import PIPE, Forked, is_gone

PR_SET_CHILD_SUBREAPER = 36
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def child() -> Iterator[ChildProcess]:
    made = ChildProcess(ENTRY)
    yield made
    made.close()
    assert is_gone(made.pid)


def run(child: ChildProcess, *work: Any, answer: Any = None, note: Any = None) -> Any:
    return child.run(list(work), answer=answer or (lambda *_: None), note=note or (lambda *_: None))


def wait_until_gone(pid: int) -> None:
    deadline_s = time.monotonic() + 30
    while not is_gone(pid):
        assert time.monotonic() < deadline_s, f"process {pid} was left behind"
        time.sleep(0.02)


def test_work_asks_and_is_answered_and_memory_is_shared(child: ChildProcess) -> None:
    assert run(child, "ask", 1, "a\udc80", b"\0", [2, None], answer=lambda name, given: [name, given]) == [
        "question", (1, "a\udc80", b"\0", [2, None])
    ]  # fmt: skip
    long = "x" * 20_000_000  # longer than any buffer of the kernel, both ways
    assert run(child, "ask", long, answer=lambda name, given: given[0]) == long
    descriptor = os.memfd_create("lent")
    os.pwrite(descriptor, b"\1\2\3" + bytes(4093), 0)
    child.lend(7, descriptor, 4096)
    os.pwrite(descriptor, b"\4", 0)
    os.close(descriptor)
    assert run(child, "sum", 7) == 9
    child.take_back(7)
    with pytest.raises(InternalError, match="was not lent"):
        run(child, "sum", 7)
    assert run(child, "ask", 1, answer=lambda *_: 2) == 2


def test_errors_come_back_as_what_they_are_with_their_causes(
    child: ChildProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "cas_ckpt")
    with pytest.raises(ConflictError, match="somebody was faster") as caught:
        run(child, "fail")
    cause = caught.value.__cause__
    assert isinstance(cause, OSError) and (cause.errno, cause.filename) == (28, "/somewhere")
    assert "in do_fail" in caplog.text, "where it was raised"

    def refuse(name: str, arguments: Sequence[Any]) -> Any:
        raise InvalidInputError("ask for something else")

    with pytest.raises(InvalidInputError, match="something else"):  # through the child, and back
        run(child, "ask", 1, answer=refuse)


def test_what_cannot_be_sent_back_is_an_error_of_the_work(child: ChildProcess) -> None:
    with pytest.raises(AttributeError, match="pickle"):
        run(child, "return_a_lambda")
    with pytest.raises(TypeError, match="pickle"):
        run(child, "ask", 1, answer=lambda *_: threading.Lock())
    assert not child.alive, "it would have waited for its answer"


def test_memory_that_runs_out_is_an_error_of_the_work(child: ChildProcess) -> None:
    with pytest.raises(MemoryError):
        run(child, "exhaust")
    assert run(child, "ask", 1, answer=lambda *_: 2) == 2


def test_a_child_that_dies_says_how_and_what_it_wrote() -> None:
    killed, exited = ChildProcess(ENTRY), ChildProcess(ENTRY)
    with pytest.raises(ChildEnded, match="SIGKILL"):
        run(killed, "count", 100, note=lambda *_: os.kill(killed.pid, signal.SIGKILL))
    with pytest.raises(ChildEnded, match="status 3; it wrote: a last word"):
        run(exited, "say", "a last word")
    for child in (killed, exited):
        assert not child.alive
        assert not Path(f"/proc/{child.pid}").exists(), "it was not waited for"
        with pytest.raises(ChildEnded):
            run(child, "ask", 1)
        child.close()


@pytest.mark.parametrize("sent_bytes", [0, 20_000_000])
def test_a_child_that_dies_is_noticed_while_a_fork_has_its_end_of_the_connection(sent_bytes: int) -> None:
    child, was_let_go = ChildProcess(ENTRY), threading.Event()
    forks: list[int] = []

    def let_go() -> None:
        was_let_go.set()
        os.kill(forks[0], signal.SIGKILL)

    timer = threading.Timer(5, let_go)  # rather than for ever

    def forked(name: str, arguments: Sequence[Any]) -> None:
        forks.append(arguments[0])
        timer.start()
        if sent_bytes:
            child._send("cancel", bytes(sent_bytes))  # more than the kernel keeps, and nobody reads

    with pytest.raises(ChildEnded, match="status 3"):
        run(child, "die_beside_a_fork", note=forked)
    assert not was_let_go.is_set(), "it waited for the fork"
    timer.cancel()
    let_go()


def test_a_timeout_for_the_sockets_of_the_program_does_not_concern_the_child() -> None:
    socket.setdefaulttimeout(5.0)
    try:
        with closing(ChildProcess(ENTRY)) as child:
            descriptor = os.memfd_create("lent")
            os.truncate(descriptor, 4096)
            child.lend(7, descriptor, 4096)
            os.close(descriptor)
            assert run(child, "sum", 7) == 0
            long = "x" * 20_000_000
            assert run(child, "ask", long, answer=lambda name, given: given[0]) == long
    finally:
        socket.setdefaulttimeout(None)


@pytest.mark.slow
def test_a_child_has_no_terminal() -> None:
    """Of which it, and what it starts, would be a group in the background: stopped by what it asks there."""
    with Forked(_parent_with_a_terminal, stdout=PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.read() == f"has one, {os.strerror(errno.ENXIO)}\n"


def _parent_with_a_terminal() -> None:
    os.setsid()
    terminal = os.openpty()
    os.open(os.ttyname(terminal[1]), os.O_RDWR)  # the first that the leader of a session opens is its own
    child = ChildProcess(ENTRY)
    print(do_open_terminal(None), run(child, "open_terminal"), sep=", ")  # type: ignore[arg-type]
    child.close()


def test_what_is_told_while_something_is_pickled_does_not_wait_for_it(child: ChildProcess) -> None:
    told: list[str] = []
    timer = threading.Timer(5, os.kill, (child.pid, signal.SIGKILL))  # rather than for ever
    timer.start()
    assert run(child, "log_while_it_is_sent", note=lambda name, given: told.append(name)) == 5
    assert told == ["logged"]
    timer.cancel()


def test_a_child_that_cannot_start_is_an_error_in_time() -> None:
    child = ChildProcess("tests.parallel.nothing_there:main")
    with pytest.raises(ChildEnded, match="No module named 'tests.parallel.nothing_there'"):
        run(child, "ask", 1)
    child.close()


def test_a_stopped_child_is_waited_for_and_goes_on(child: ChildProcess) -> None:
    def stop_for_a_while(name: str, arguments: Sequence[Any]) -> None:
        if arguments[0] == 3:
            os.kill(child.pid, signal.SIGSTOP)
            threading.Timer(0.5, os.kill, (child.pid, signal.SIGCONT)).start()

    assert run(child, "count", 0.3, note=stop_for_a_while) > 3


def test_a_child_that_stays_stopped_is_ended_and_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "STOPPED_S", 1.0)
    child = ChildProcess(ENTRY)
    with pytest.raises(ChildEnded, match="was stopped"):
        run(child, "count", 100, note=lambda *_: os.kill(child.pid, signal.SIGSTOP))
    assert is_gone(child.pid)
    child.close()


def test_a_child_that_is_stopped_while_much_is_sent_to_it_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "STOPPED_S", 1.0)
    child = ChildProcess(ENTRY)
    run(child, "ask", 1)
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(ChildEnded, match="was stopped"):
        run(child, "ask", "x" * 20_000_000)
    child.close()


def test_signals_that_are_meant_for_the_trainer_do_not_end_the_work(child: ChildProcess) -> None:
    def signal_it(name: str, arguments: Sequence[Any]) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(child.pid, number)

    run(child, "ask", 1)
    assert Path(f"/proc/{child.pid}/oom_score_adj").read_text() == "500\n", "the kernel takes it before the trainer"
    assert os.getpgid(child.pid) != os.getpgid(0), "Ctrl-C is for the group of the trainer"
    assert os.getsid(child.pid) == os.getsid(0), "its niceness counts beside the trainer's only in one session"
    assert run(child, "count", 0.2, note=signal_it) > 1


def test_what_a_note_raises_cancels_the_work_and_is_raised(child: ChildProcess) -> None:
    def refuse(name: str, arguments: Sequence[Any]) -> None:
        raise ValueError("no more")

    begun_s = time.monotonic()
    with pytest.raises(ValueError, match="no more"):
        run(child, "count", 100, note=refuse)
    assert time.monotonic() - begun_s < 50
    assert run(child, "ask", 1, answer=lambda *_: 2) == 2


def test_where_no_process_can_be_started_an_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for executable in ("/nowhere/python", None):
        monkeypatch.setattr(sys, "executable", executable)
        with pytest.raises(StorageError, match="no worker process can be started"):
            ChildProcess(ENTRY)


def test_an_interrupt_of_whoever_waits_ends_the_child(child: ChildProcess) -> None:
    def interrupt(name: str, arguments: Sequence[Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(child, "count", 100, note=interrupt)
    assert not child.alive


def test_it_outlives_the_thread_that_made_it() -> None:
    made: list[ChildProcess] = []
    thread = threading.Thread(target=lambda: made.append(ChildProcess(ENTRY)))
    thread.start()
    thread.join()
    assert run(made[0], "ask", 1, answer=lambda *_: 2) == 2
    made[0].close()


def test_a_child_that_nobody_has_any_more_ends() -> None:
    pid = ChildProcess(ENTRY).pid
    wait_until_gone(pid)


def test_a_child_ends_with_close_in_the_middle_of_its_work() -> None:
    child = ChildProcess(ENTRY)
    with pytest.raises(ChildEnded):
        run(child, "count", 100, note=lambda *_: child.close())
    assert is_gone(child.pid)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["at work", "stopped", "a fork has what is open"])
def test_a_child_ends_with_a_parent_that_is_killed(how: str) -> None:
    given = {"stopped": how == "stopped", "forked": how.startswith("a fork")}
    with Forked(_parent, given, stdout=PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    wait_until_gone(pid)


@pytest.mark.slow
def test_a_stopped_child_is_not_left_to_whoever_takes_in_the_children_of_its_parent() -> None:
    """Where that is in one session with it, the kernel lets it go on stopped: nothing but its own request ends it."""
    _take_in_grandchildren(True)
    try:
        with Forked(_parent, {"stopped": True}, stdout=PIPE) as parent:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            parent.kill()
        wait_until_gone(pid)
        os.waitpid(pid, 0)
    finally:
        _take_in_grandchildren(False)


def _take_in_grandchildren(is_wanted: bool) -> None:
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(is_wanted), 0, 0, 0) == 0


def _parent(given: dict[str, bool]) -> None:
    parent_of_one(**given)


def test_a_fork_of_the_parent_leaves_the_child_alone(child: ChildProcess) -> None:
    fork = os.fork()
    if fork == 0:
        try:
            run(child, "ask", 1)
        except ChildEnded:
            child.close()
            os._exit(0 if not child.alive else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 0
    assert run(child, "ask", 1, answer=lambda *_: 2) == 2


@pytest.mark.slow
def test_the_program_of_the_parent_is_not_run_again(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch, os\n"
        "print('begun')\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from cas_ckpt.parallel.child_process import ChildProcess\n"
        "held = os.open('/dev/zero', os.O_RDONLY); os.set_inheritable(held, True)\n"
        "child = ChildProcess('tests.parallel.child_work:main')\n"
        "ask = dict(answer=print, note=print)\n"
        "print(any(name.startswith('torch') for name in child.run(['imported'], **ask)))\n"
        "print('/dev/zero' in child.run(['fds'], **ask))\n"
        "print(child.pid)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    begun, has_torch, has_file, pid = done.stdout.split()
    assert (begun, has_torch, has_file) == ("begun", "False", "False")
    wait_until_gone(int(pid))  # the parent ended without a word


def test_a_keeper_that_no_thread_can_be_started_for_is_an_error_and_leaves_nothing_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    refused = pytest.raises(StorageError, match="no worker process can be started: can't start")
    with no_thread_can_be_started("cas-ckpt-keeper"), refused:
        ChildProcess("tests.parallel.child_work:main")
    assert set(os.listdir("/proc/self/fd")) <= before
