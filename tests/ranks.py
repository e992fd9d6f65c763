"""Real processes standing for ranks, with gloo between them: one launch, one function, one outcome per rank.

    # tests/somewhere/cases.py
    def saves(folder: str) -> int:          # runs in every process, after dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            die()                           # SIGKILL, as the kernel would
        return 7

    # tests/somewhere/test_it.py
    outcomes = run_processes(2, "tests.somewhere.cases:saves", str(tmp_path), timeout_s=60)
    assert results(outcomes[:1]) == [7]
    assert outcomes[1].exit_code == -signal.SIGKILL

The processes are forked from a server that has imported torch (tests/processes.py). Arguments and results are
pickled. A process that has returned stays until all are through, so that connections and the store do not go away
under the others; `hanging` names ranks that nobody waits for (see `hold`). Whatever is still alive after `timeout_s`
is killed and its outcome says so: a launch never hangs. What a process printed is in `Outcome.output`.
"""

from __future__ import annotations

import importlib
import os
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from tests.processes import PIPE, Forked

Store = Literal["file", "tcp"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one rank.

    Attributes:
        value: What the function returned, None if it did not.
        error: None, or `PeerError: rank 2 failed: ...`, `killed by SIGKILL`, `still running after 60 s`.
        trace: The traceback of the error that was raised, if one was.
        exit_code: That of the process, negative for a signal.
        output: What it wrote to stdout and stderr.
    """

    rank: int
    value: Any
    error: str | None
    trace: str
    exit_code: int
    output: str


def run_processes(
    size: int,
    function: str,
    *args: Any,
    timeout_s: float = 90.0,
    hanging: Collection[int] = (),
    store: Store = "file",
    default_backend: str | None = "gloo",
) -> list[Outcome]:
    """Call `module:function` with `args` in `size` processes; what became of each rank, by rank.

    Args:
        timeout_s: For the whole launch, imports included.
        hanging: Ranks that will not end by themselves: killed as soon as all others have ended.
        store: Where the ranks meet: a file (outlives every rank), or TCP with rank 0 as the host.
        default_backend: Of `init_process_group`; None leaves torch.distributed uninitialised.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = {"function": function, "args": args, "size": size, "store": store, "backend": default_backend}
        Path(folder, "job").write_bytes(pickle.dumps(job))
        launch = _Launch(Path(folder), size)
        try:
            launch.wait(set(range(size)) - set(hanging), timeout_s)
        finally:
            launch.stop()
        return [launch.outcome(rank, timeout_s) for rank in range(size)]


def results(outcomes: list[Outcome]) -> list[Any]:
    """What every rank returned; fails with all their tracebacks if one of them did not."""
    assert outcomes
    bad = [outcome for outcome in outcomes if outcome.error is not None]
    told = [f"rank {one.rank}: {one.error}\n{one.trace}\n{one.output[-4000:]}" for one in bad]
    assert not bad, "\n".join(told)
    return [outcome.value for outcome in outcomes]


def die() -> NoReturn:
    """End this process as the kernel's out-of-memory killer would."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("outlived SIGKILL")


def hold() -> NoReturn:
    """Hang for good, as a rank stuck in a driver would; name the rank in `hanging`."""
    threading.Event().wait()
    raise AssertionError("nobody sets this event")


class _Launch:
    """The processes of one launch, from the side of the test."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        self.answers = [b""] * size
        self.running = set(range(size))
        self.processes = [self._start(rank) for rank in range(size)]

    def _start(self, rank: int) -> Forked:
        with (self.folder / f"output-{rank}").open("wb") as output:
            return Forked(_main, self.folder, rank, stdin=PIPE, stdout=PIPE, stderr=output, text=False)

    def wait(self, awaited: set[int], timeout_s: float) -> None:
        """Collect answers until the awaited ranks have answered or ended, or the time is up."""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self.processes):
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while self.running & awaited and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    part = os.read(key.fd, 1 << 20)
                    self.answers[key.data] += part
                    if not part:
                        selector.unregister(key.fileobj)
                        self.running.discard(key.data)

    def stop(self) -> None:
        """Let those go that have answered, kill the others."""
        for rank, process in enumerate(self.processes):
            if rank in self.running:
                process.kill()
            process.close()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def outcome(self, rank: int, timeout_s: float) -> Outcome:
        exit_code = self.processes[rank].returncode
        assert exit_code is not None
        answer = (None, None, "")
        if rank in self.running:
            answer = (None, f"still running after {timeout_s:g} s, or named as hanging", "")
        elif self.answers[rank]:
            answer = pickle.loads(self.answers[rank])
        elif exit_code < 0:
            answer = (None, f"killed by {signal.Signals(-exit_code).name}", "")
        else:
            answer = (None, f"ended with exit code {exit_code}", "")
        output = (self.folder / f"output-{rank}").read_text(errors="replace")
        return Outcome(rank, *answer, exit_code, output)


# ---------------------------------------------------------------- inside a rank


def _main(folder: Path, rank: int) -> None:
    answer_to = os.dup(1)
    os.dup2(2, 1)  # what is printed goes to the output, not into the answer
    watch = threading.Thread(target=_end_with_the_test, daemon=True)
    watch.start()
    job = pickle.loads((folder / "job").read_bytes())
    try:
        _meet(job, folder, rank)
        module, _, name = job["function"].partition(":")
        answer = pickle.dumps((getattr(importlib.import_module(module), name)(*job["args"]), None, ""))
    except BaseException as error:  # noqa: BLE001 - told to the test
        answer = pickle.dumps((None, f"{type(error).__name__}: {error}", traceback.format_exc()))
    with os.fdopen(answer_to, "wb") as pipe:
        pipe.write(answer)
    watch.join()


def _end_with_the_test() -> None:
    """Stay until all are through, or until the test itself has died."""
    sys.stdin.read()
    sys.stdout.flush()
    os._exit(0)  # no destructors: they may wait for ranks that are dead


def _meet(job: dict[str, Any], folder: Path, rank: int) -> None:
    if job["backend"] is None:
        return
    import torch.distributed as dist

    store = dist.FileStore(str(folder / "store"), job["size"]) if job["store"] == "file" else _tcp_store(folder, rank)
    dist.init_process_group(job["backend"], store=store, rank=rank, world_size=job["size"])


def _tcp_store(folder: Path, rank: int) -> Any:
    """Rank 0 hosts it on a port that the system chooses, and tells the port through a file store."""
    import torch.distributed as dist

    ports = dist.FileStore(str(folder / "port"), -1)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ports.set("port", str(store.port))
        return store
    return dist.TCPStore("127.0.0.1", int(ports.get("port")), is_master=False)
