"""The worker process: makes commits of states that another process staged, one after another.

    1. `main` is called in a Python that was started for it: no module of the trainer's program is there, and no torch
    2. each job says which repository; it is opened once, and stays open between commits
    3. the tree is received: its tensors are in lent memory, or asked for; then the commit is `commit_live`, as it is
    4. what is asked of the trainer's process: bytes that are not staged, collectives of the ranks, and, before the ref
       is swapped, whether the commit is still wanted; it is told progress and lines of the log

Invariant: whatever it is doing, it can be ended; a commit is there whole or not at all. Knows nothing of torch.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import threading
from collections.abc import Sequence
from typing import Any, cast

from cas_ckpt import clock
from cas_ckpt.arguments import Buffer
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.memory import holding
from cas_ckpt.ops.commit.commit import commit_live
from cas_ckpt.ops.commit.frozen import FrozenMemory
from cas_ckpt.ops.commit.process.packing import Job, received_request, received_tree
from cas_ckpt.parallel.child_process import Served, packed_error, serve
from cas_ckpt.parallel.peers import SOLO, Peers, collective_errors
from cas_ckpt.parallel.workers import leave_core

PEERS, LOOK, PUBLISH = "peers", "look", "publish"
"""What a worker asks beside what it asks of sources; the last: whether the commit of an id may be published."""

PROGRESS, LOG = "progress", "log"
"""What it tells."""

NICENESS = 10
"""How much the worker gives way to the training; see docs/performance.md."""

TELL_BYTES = 64 << 20
TELL_S = 0.2
"""How often bytes are reported: each message makes the trainer's interpreter run for a moment."""


def main(descriptor: int, parent: int) -> None:
    """Take commits from the process `parent` until it is gone. Never returns."""
    os.nice(max(0, NICENESS - os.nice(0)))
    serve(descriptor, parent, Commits())


class Commits:
    """Makes one commit at a time, all of one repository."""

    def __init__(self) -> None:
        self._handle: RepositoryHandle | None = None
        self._memory = FrozenMemory()
        self._epoch = -1

    def __call__(self, served: Served, job: Job) -> str | None:
        """The branch that the commit went to. Once it is made, nothing here reads or writes."""
        leave_core(job.core, pid=os.getppid())
        _log_to(served, job.log_level)
        if self._handle is None:
            url, index_place, cache = job.repository
            self._handle = RepositoryHandle.open(url, index_url=index_place, cache=cache)
        handle = self._handle
        if job.epoch != self._epoch:  # what was frozen may hold other bytes now, rightly
            self._memory, self._epoch = FrozenMemory(), job.epoch
        handle.head = job.head
        request = received_request(
            job.request, job.fields, look=lambda: served.ask(LOOK),
            announce=lambda made: served.ask(PUBLISH, made.digest, made.data),
        )  # fmt: skip
        peers = SOLO if job.ranks is None else cast(Peers, RemotePeers(served, *job.ranks))
        memory = self._memory if request.frozen is not None or request.frozen_keys or self._memory.num_changes else None
        with holding(job.limits), collective_errors(peers):
            commit_live(
                handle, received_tree(served, job.rows), request, peers=peers, memory=memory,
                progress=RemoteProgress(served),
            )  # fmt: skip
        return handle.head.branch


class RemotePeers:
    """The other ranks, reached through the connections of the trainer's process. See `Peers`."""

    def __init__(self, served: Served, rank: int, size: int) -> None:
        self._served = served
        self.rank, self.size = rank, size

    def begin(self) -> None:
        """The trainer's process has begun the common work."""

    def _ask(self, method: str, message: Any) -> Any:
        return self._served.ask(PEERS, method, message)

    def gather_all(self, message: Buffer) -> list[bytes]:
        """See `Peers.gather_all`."""
        found: list[bytes] = self._ask("gather_all", bytes(message))
        return found

    def gather(self, message: Buffer) -> list[bytes] | None:
        """See `Peers.gather`."""
        found: list[bytes] | None = self._ask("gather", bytes(message))
        return found

    def broadcast(self, message: Buffer | None) -> bytes:
        """See `Peers.broadcast`."""
        found: bytes = self._ask("broadcast", None if message is None else bytes(message))
        return found

    def exchange(self, messages: Sequence[Buffer]) -> list[Buffer]:
        """See `Peers.exchange`."""
        found: list[Buffer] = self._ask("exchange", list(map(bytes, messages)))
        return found

    def fail(self, error: BaseException) -> None:
        """See `Peers.fail`."""
        self._ask("fail", packed_error(error))

    def close(self) -> None:
        """It is not for the worker to leave."""


class RemoteProgress:
    """A `Progress` that the trainer's process shows; ends the work once nobody wants it any more."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._lock = threading.Lock()
        self._untold, self._told_s = 0, clock.monotonic_s()

    def start(self, phase: str, total_bytes: int | None) -> None:
        """See `Progress`."""
        self._served.stop_if_cancelled()
        self._served.tell(PROGRESS, "start", phase, total_bytes)

    def advance(self, num_bytes: int) -> None:
        """See `Progress`."""
        self._served.stop_if_cancelled()
        with self._lock:
            self._untold += num_bytes
            now_s = clock.monotonic_s()
            if self._untold < TELL_BYTES and now_s - self._told_s < TELL_S:
                return
            told, self._untold, self._told_s = self._untold, 0, now_s
        self._served.tell(PROGRESS, "advance", told)

    def finish(self) -> None:
        """See `Progress`."""
        if self._untold:
            told, self._untold = self._untold, 0
            self._served.tell(PROGRESS, "advance", told)
        self._served.tell(PROGRESS, "finish")


class _ToParent(logging.handlers.QueueHandler):
    """Sends lines of the log to the trainer's process."""

    def __init__(self, served: Served) -> None:
        super().__init__(cast(Any, served))

    def enqueue(self, record: logging.LogRecord) -> None:
        """Send one line, its traceback in it."""
        record.pathname = "(worker process)"
        cast(Served, self.queue).tell(LOG, record)


def _log_to(served: Served, level: int) -> None:
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(_ToParent(served))
        logging.captureWarnings(True)
    root.setLevel(level)
