"""The worker process: makes commits of states that another process staged, one after another; and what goes to it.

    1. `main` is called in a Python that was started for it: no module of the trainer's program is there, and no torch
    2. each job says which repository; it is opened once, and stays open between commits
    3. the tree is received: its tensors are in lent memory, or asked for; then the commit is `commit_live`, as it is
    4. what is asked of the trainer's process: bytes that are not staged, collectives of the ranks, and, before the ref
       is swapped, whether the commit is still wanted; it is told progress and lines of the log

A tree is sent as a list of (number of the parent, name, item), parents before their children, so that no depth is too
deep. What may hold anything of the user's is encoded. Sources are sent as

    LentSource   a few bytes
    Lent         staged: boxes whose elements are in lent memory, in C order
    Remote       not staged yet, or not at all: boxes are asked for

Invariant: whatever it is doing, it can be ended; a commit is there whole or not at all. What is received equals what
was sent, but for sources, and for identities, which are numbers: equal for tensors that are the same memory. What lent
memory holds is of the moment of the snapshot, and nobody writes it while the commit runs. It has no torch, no device
and no socket of the trainer's process, and ends with that.
"""

from __future__ import annotations

import logging
import logging.handlers
import math
import os
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import numpy as np

from cas_ckpt import clock
from cas_ckpt.arguments import Buffer
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.refs import Head
from cas_ckpt.errors import InternalError, UnsupportedValueError
from cas_ckpt.memory import Limits, holding
from cas_ckpt.objects.spec import Box, Spec, grid_for, raw_dtype
from cas_ckpt.objects.state import ArraySource, Container, EncodedValue, Item, TensorItem, ValueItem, render_key
from cas_ckpt.objects.values import decode_value, encode_value
from cas_ckpt.ops.commit.commit import commit_live
from cas_ckpt.ops.commit.frozen import FrozenMemory
from cas_ckpt.ops.commit.request import CommitFields, CommitRequest, checked_fields, decoded_lineage, working_folder
from cas_ckpt.parallel.child_process import Served, packed_error, serve
from cas_ckpt.parallel.peers import SOLO, Peers, collective_errors
from cas_ckpt.parallel.workers import leave_core
from cas_ckpt.transfer.hashing import Array
from cas_ckpt.transfer.staging import elements_of

Rows: TypeAlias = list[tuple[int, Any, Item]]

READ, SUMS, SAVED = "read", "sums", "saved"
"""What a worker asks of a source that is not staged."""

PEERS, LOOK, PUBLISH = "peers", "look", "publish"
"""What a worker asks beside what it asks of sources; the last: whether the commit of an id may be published."""

PROGRESS, LOG = "progress", "log"
"""What it tells."""

NICENESS = 10
"""How much the worker gives way to the training; see docs/performance.md."""

TELL_BYTES = 64 << 20
TELL_S = 0.2
"""How often bytes are reported: each message makes the trainer's interpreter run for a moment."""


@dataclass(frozen=True, slots=True)
class Job:
    """One commit that a worker is to make.

    Attributes:
        repository: Its URL, the place of its index, and of its cache.
        fields: Those of `request` that are the user's values, encoded.
        ranks: This rank and how many there are; None: one process alone.
        epoch: Another one than before if what was frozen may hold other bytes now, rightly.
        core: Where the main thread of the trainer's process ran last.
    """

    repository: tuple[str, str | None, str | None]
    head: Head
    request: CommitRequest
    fields: CommitFields
    rows: Rows
    ranks: tuple[int, int] | None
    epoch: int
    core: int | None
    limits: Limits
    log_level: int


# --- requests ---------------------------------------------------------------------------------


def sent_request(request: CommitRequest) -> tuple[CommitRequest, CommitFields]:
    """`request` without what stays here, and what of it was encoded.

    Raises:
        InvalidInputError: as for `checked_fields`.
    """
    plain = replace(
        request, head=None, look=None, announce=None, step=None, metrics={}, meta=None, parents=(), came_from=None,
        lineage=(), provenance=False, command=list(map(str, sys.argv if request.command is None else request.command)),
        folder=working_folder() if request.folder is None else request.folder,
    )  # fmt: skip
    return plain, checked_fields(request)


def received_request(request: CommitRequest, fields: CommitFields, **own: Any) -> CommitRequest:
    """The request that `sent_request` was given, with the fields `own`."""
    provenance = None if fields.provenance is None else decode_value(fields.provenance)
    return replace(
        request, **own, message=fields.message, author=fields.author, step=fields.step, metrics=fields.metrics,
        meta=None if fields.meta is None else decode_value(fields.meta), lineage=decoded_lineage(fields.lineage),
        provenance=False if provenance is None else provenance, parents=fields.parents, came_from=fields.came_from,
    )  # fmt: skip


# --- trees ------------------------------------------------------------------------------------


class Identities:
    """Numbers in place of what says that tensors are the same memory; the same number in the next tree."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._seen: dict[Hashable, int] = {}
        self._next = 0

    def number(self, identity: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        """(memory, version) as numbers."""
        if identity is None:
            return None
        memory, version = identity[0], identity[-1] if len(identity) > 1 else None
        number = self._numbers.get(memory)
        if number is None:
            number, self._next = self._next, self._next + 1
        self._seen[memory] = number
        self._numbers[memory] = number
        return number, version

    def end_tree(self) -> None:
        """Forget memory that was not in the tree."""
        self._numbers, self._seen = self._seen, {}


def sent_tree(
    tree: Container, *, identities: Identities, sent_source: Callable[[TensorItem], ArraySource], allow_pickle: bool
) -> Rows:
    """`tree` as rows.

    Args:
        sent_source: What is sent in the place of the source of a tensor.
    Raises:
        UnsupportedValueError: names the key.
    """
    rows: Rows = []
    waiting: list[tuple[Item, int, Any, tuple[Any, ...]]] = [(tree, -1, "", ())]

    def encoded(value: Any, path: tuple[Any, ...]) -> bytes:
        return encode_value(value, key=render_key(path), allow_pickle=allow_pickle)

    while waiting:
        item, parent, name, path = waiting.pop()
        if isinstance(item, Container):
            below = reversed(item.children.items())
            waiting.extend((child, len(rows), name, (*path, name)) for name, child in below)
            attrs = item.attrs
            if attrs is not None and not isinstance(attrs, EncodedValue):
                attrs = encoded(attrs, path)
            item = Container(item.kind, {}, attrs, None if item.versions is None else dict(item.versions))
        elif isinstance(item, TensorItem):
            item = replace(item, identity=identities.number(item.identity), source=sent_source(item))
        elif isinstance(item, ValueItem):
            item = EncodedValue(encoded(item.value, path))
        elif not isinstance(item, EncodedValue):
            raise InternalError(f"{render_key(path)}: a {type(item).__name__} cannot be committed")
        rows.append((parent, name, item))
    identities.end_tree()
    return rows


def received_tree(served: Served, rows: Rows) -> Container:
    """The tree that `sent_tree` was given, with sources of this process."""
    items: list[Item] = []
    for parent, name, item in rows:
        if isinstance(item, Container) and isinstance(item.attrs, bytes):
            try:
                item = replace(item, attrs=decode_value(item.attrs))
            except UnsupportedValueError:  # pickled: they are stored as they are
                item = replace(item, attrs=EncodedValue(item.attrs))
        elif isinstance(item, TensorItem):
            item.source = _received_source(served, item)
        items.append(item)
        if parent >= 0:
            cast(Container, items[parent]).children[name] = item
    return cast(Container, items[0])


# --- sources ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LentSource:
    """A tensor, or a rank's pieces of it: the elements of each box, raw and in C order."""

    pieces: tuple[tuple[Box, Array], ...]
    item_bytes: int

    @property
    def is_private(self) -> bool:
        """See `StagedSource`."""
        return True

    def read(self, box: Box) -> Array:
        """See `ArraySource`."""
        return elements_of(self.pieces, box, self.item_bytes)

    def saved(self) -> None:
        """See `StagedSource`."""


@dataclass(frozen=True, slots=True)
class Lent:
    """Boxes, and where each begins in lent memory."""

    memory: int
    boxes: tuple[tuple[Box, int], ...]


@dataclass(frozen=True, slots=True)
class Remote:
    """A source that stays in the trainer's process: its number, and whether it sums."""

    number: int
    is_summing: bool


class RemoteSource:
    """A tensor that the trainer's process copies a box of whenever one is read."""

    def __init__(self, served: Served, number: int, spec: Spec) -> None:
        self._served, self._number = served, number
        self._spec = spec
        self._dtype = raw_dtype(spec.item_bytes)

    @property
    def read_bytes(self) -> int:
        """See `FileBackedSource`: what the trainer's process holds for a thread of the worker."""
        return math.prod(grid_for(self._spec).cell) * self._spec.item_bytes

    @property
    def is_private(self) -> bool:
        """See `StagedSource`: what is copied here is a copy already, but of a moment when it may be live."""
        return False

    def read(self, box: Box) -> Array:
        """See `ArraySource`."""
        name = self._served.ask(READ, self._number, box, threading.get_ident())
        return np.frombuffer(self._served.memory(name), self._dtype, box.num_elements).reshape(box.sizes)

    def saved(self) -> None:
        """See `StagedSource`."""
        self._served.ask(SAVED, self._number)


class SummedSource(RemoteSource):
    """One that the trainer's process sums where it is, such as on a device."""

    def sums(self, box: Box) -> Array | None:
        """See `SummingSource`."""
        found: Array | None = self._served.ask(SUMS, self._number, box)
        return found


def _received_source(served: Served, item: TensorItem) -> ArraySource:
    sent: Any = item.source
    if isinstance(sent, Remote):
        return (SummedSource if sent.is_summing else RemoteSource)(served, sent.number, item.spec)
    if not isinstance(sent, Lent):
        return item.source
    memory, dtype = served.memory(sent.memory), raw_dtype(item.spec.item_bytes)
    pieces = [(box, np.frombuffer(memory, dtype, box.num_elements, begin)) for box, begin in sent.boxes]
    return LentSource(tuple((box, each.reshape(box.sizes)) for box, each in pieces), item.spec.item_bytes)


# --- the process ------------------------------------------------------------------------------


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
        root = logging.getLogger()
        if not root.handlers:
            root.addHandler(_ToParent(served))
            logging.captureWarnings(True)
        root.setLevel(job.log_level)
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
