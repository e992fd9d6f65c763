"""Calls of `commit_async`, and their commits in the background.

    1. `admit`: wait for the turn of the call; a failure that nobody has heard of is raised here.
    2. Capture the state and settle the request: nothing of them is looked at later that the caller may change.
    3. Submit the commit; it waits until it `may_begin`.
    4. Stage: at the call (`snapshot="copy"`), or behind it. What cannot be staged is saved meanwhile.
    5. The thread of the queue makes the commit of the staged tree, by whatever `worker` says; then the memory is free.

`snapshot="lazy"`: what only optimizers change is staged after the call, while the next forward and backward run.

    1. At the call everything else is staged: buffers, loose tensors, arrays, small tensors.
    2. Parameters and optimizer state are watched (changes.py), and read from then on through tensors of our own, which
       keep the memory of the call whatever becomes of the live ones.
    3. One thread stages them, from the front; if not all fits, the commit saves them from the front meanwhile.
    4. From `hold_steps` to `let_steps` every step of every optimizer of this process waits until all is staged or
       saved. The hook for that is registered at the first use and stays: torch walks through its hooks without a lock,
       so taking one away while another thread steps would break that step.

A change that torch counts meanwhile breaks the snapshot with StateChangedError, which the commit raises. The hook
raises nothing of ours: a commit that fails is reported by the commit, and the step is made. (What is raised into the
waiting thread, such as KeyboardInterrupt, passes, and the step is not made.)

Invariant: what is staged is what was there at the call; whatever the call raises, the other ranks hear of it: what is
submitted for a call that failed fails there, inside of `collective_errors`. Memory of the pool is written by nobody
after its commit has ended. Knows nothing of stores or chunks.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cas_ckpt.arguments import texts
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import CommitInfo
from cas_ckpt.held_signals import Turn
from cas_ckpt.memory import available_bytes, inheriting, python_gc_paused
from cas_ckpt.objects.digest import Digest, chunk_id
from cas_ckpt.objects.nodes import INLINE_BYTES
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.spec import Box, grid_for
from cas_ckpt.objects.state import ArraySource, CellsToName, LeafHasher, TensorItem
from cas_ckpt.objects.values import decode_value
from cas_ckpt.ops.commit.commit import commit_live
from cas_ckpt.ops.commit.frozen import FrozenMemory
from cas_ckpt.ops.commit.request import CommitRequest, checked_fields, decoded_lineage, working_folder
from cas_ckpt.ops.commit.worker import CommitWorker
from cas_ckpt.parallel.peers import SOLO, Peers, collective_errors
from cas_ckpt.parallel.workers import Background, core_of_main_thread, leave_core, thread_count
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.training.background.changes import TrainedMemory
from cas_ckpt.training.background.pending import CommitQueue, PendingCommit
from cas_ckpt.training.background.staged import IsKnown, Snapshot, StagedTensor
from cas_ckpt.training.capture.sharded import ShardElements
from cas_ckpt.training.capture.tensors import CopiedTensor, HostTensor
from cas_ckpt.training.device.copies import pin, unpin
from cas_ckpt.training.verbs import captured
from cas_ckpt.transfer.staging import Arena, StagingPool

_LOGGER = logging.getLogger("cas_ckpt")

# --- snapshot="lazy" ---------------------------------------------------------------------------

PORTION_BYTES = 32 << 20
"""Bytes staged at a time: after each, changes, cancellation and failure are checked."""


def stage_later(
    state: Mapping[str, Any], snapshot: Snapshot, *, fits: bool, may_begin: Callable[[], object], num_threads: int
) -> bool:
    """Stage what has to be staged now, and the rest behind the caller; False: there is no such rest, or no room for it.

    Args:
        state: Of which `snapshot` was made just now.
        fits: There is room for all of it.
        may_begin: Called when the commit may begin; the commit waits for that.
        num_threads: They copy what is staged now.
    """
    later = _watched(snapshot, TrainedMemory(state))
    now = [each for each in snapshot.tensors if each.watched is None]
    large = [each for each in now if each.num_bytes > INLINE_BYTES]
    room = sum(arena.left_bytes for arena in snapshot.arenas)
    if not later or sum(each.room for each in large) > room:
        snapshot.stop_watching()
        return False
    snapshot.stage_small()
    snapshot.stage(large, num_threads=num_threads)
    stager = _Stager(snapshot, later, fits, may_begin)
    snapshot.before_release(stager.end)
    stager.begin()
    return True


class _Stager:
    """The thread that stages the rest of one snapshot, and what waits for it."""

    def __init__(
        self, snapshot: Snapshot, later: Sequence[StagedTensor], fits: bool, may_begin: Callable[[], object]
    ) -> None:
        self._snapshot, self._later, self._fits, self._may_begin = snapshot, later, fits, may_begin
        self._over, self._may_copy = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._has_begun = self._has_ended = False

    def begin(self) -> None:
        """Go on in a thread; from now on no optimizer steps before all is staged."""
        hold_steps(self.wait)
        if not self._fits:
            self._may_begin()
        try:
            Background(self._run, failed=self._snapshot.abort).wake()
        finally:  # also if Ctrl-C comes while the thread starts, which would wait for ever
            # Not before: else the caller would wait for the interpreter's lock until a copy releases it.
            self._may_copy.set()

    def wait(self) -> None:
        """For the hook: return when the live state may change."""
        self._snapshot.wait_settled()

    def end(self) -> None:
        """The commit has ended: wait until nothing is copied any more, which is soon.

        The thread may not be there, if the call was interrupted or no thread could be had: nobody copies then, and one
        that comes later does not begin.
        """
        let_steps(self.wait)
        with self._lock:
            self._has_ended, has_begun = True, self._has_begun
        if has_begun:
            self._over.wait()

    def _run(self) -> None:
        snapshot = self._snapshot
        self._may_copy.wait()
        with self._lock:
            if self._has_ended:
                return
            self._has_begun = True
        try:
            if self._fits:
                for portion in _portions(self._later):
                    if snapshot.error is not None or snapshot.settled:
                        return
                    snapshot.stage(portion, num_threads=1)
                snapshot.settle()
            else:
                snapshot.stage_from_back(num_threads=1)
        except BaseException as error:  # noqa: BLE001 - the commit raises it
            snapshot.abort(error)
        finally:
            self._over.set()
            self._may_begin()


def _portions(tensors: Sequence[StagedTensor]) -> Iterator[list[StagedTensor]]:
    portion: list[StagedTensor] = []
    num_bytes = 0
    for each in tensors:
        portion.append(each)
        num_bytes += each.num_bytes
        if num_bytes >= PORTION_BYTES:
            yield portion
            portion, num_bytes = [], 0
    if portion:
        yield portion


def _watched(snapshot: Snapshot, memory: TrainedMemory) -> list[StagedTensor]:
    """The tensors of `snapshot` that only optimizers change, each watched from now on."""
    found, watch = [], snapshot.watch
    for each in snapshot.tensors:
        live = each.live
        if live is None or each.num_bytes <= INLINE_BYTES:
            continue
        if type(live) is HostTensor:  # nearly all
            counting = memory.counting(live.tensor)
            if counting:
                kept = live.tensor.detach()
                each.defer(HostTensor(kept), watch.add(each.key, (kept,), counting))
                found.append(each)
            continue
        tensors = _tensors_of(live)
        counted = [memory.counting(tensor) for tensor in tensors]
        if tensors and all(counted):
            source, kept_parts = _kept(live)
            each.defer(source, watch.add(each.key, kept_parts, [tensor for some in counted for tensor in some]))
            found.append(each)
    watch.begin()
    return found


def _tensors_of(source: ArraySource) -> list[torch.Tensor]:
    """The strided tensors that `source` reads; none: it reads something else."""
    if isinstance(source, (HostTensor, CopiedTensor)):
        return [source.tensor]
    return [local.tensor for local in source.locals] if isinstance(source, ShardElements) else []


def _kept(source: Any) -> tuple[ArraySource, list[torch.Tensor]]:
    """`source` over tensors of our own, and these: `tensor.data = other` changes the live one's memory, not theirs."""
    if isinstance(source, ShardElements):
        kept = [replace(local, tensor=local.tensor.detach()) for local in source.locals]
        return replace(source, locals=tuple(kept)), [local.tensor for local in kept]
    tensor = source.tensor.detach()
    return replace(source, tensor=tensor), [tensor]


# --- steps of optimizers -----------------------------------------------------------------------

Wait: TypeAlias = Callable[[], None]
"""Returns when an optimizer may change its parameters and its state; called in the thread that steps."""

_held: dict[Wait, None] = {}
_registering = threading.Lock()
_is_registered = False


def hold_steps(wait: Wait) -> None:
    """Have `wait` called before every step, until `let_steps`. From any thread."""
    global _is_registered
    _held[wait] = None
    with _registering:
        if not _is_registered:
            register_optimizer_step_pre_hook(_before_step)
            _is_registered = True


def let_steps(wait: Wait) -> None:
    """Have `wait` called no more. From any thread, idempotent."""
    _held.pop(wait, None)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if _held:
        for wait in list(_held):
            try:
                wait()
            except Exception:
                _LOGGER.exception("waiting for a commit before a step of an optimizer failed: the step is made")


def _forget() -> None:
    """In a forked child: the threads that would end the waiting are not there, and its memory is its own."""
    global _registering
    _held.clear()
    _registering = threading.Lock()


os.register_at_fork(after_in_child=_forget)


# --- the calls ---------------------------------------------------------------------------------

VERB = "commit_async"


class InFlight(Protocol):
    """Work of others on the repository in the background that a commit waits for: a save of `dcp.async_save`."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended, however; whether it has. At once where to wait would be for oneself."""
        ...


class BackgroundCommits:
    """The commits in the background of one open repository. Threads may share it.

    Args:
        turn: A context in which no other commit or checkout of the repository runs.
    """

    def __init__(self, handle: RepositoryHandle, turn: Callable[[], AbstractContextManager[object]]) -> None:
        self._handle, self._turn = handle, turn
        self._pool: StagingPool | None = None
        self._worker: CommitWorker | None = None
        self.calls = Turn()  # of two threads that call at once, one stages after the other
        self._call = threading.local()  # `is_submitted`: the other ranks will hear of this call by its commit
        self._declared: dict[PendingCommit, KeyPatterns] = {}
        self._former: list[StagingPool] = []  # closed, but for what a commit still reads
        self.stored: frozenset[Digest] = frozenset()  # of tensors on devices, by the last commit, if it was made
        self.queue = CommitQueue()

    @contextmanager
    def calling(self, peers: Peers) -> Iterator[None]:
        """A call of `commit_async`: what is raised inside is told to the other ranks, as the end of this commit."""
        self._call.is_submitted = False
        try:
            yield
        except BaseException as error:
            if not self._call.is_submitted and peers.size > 1:
                pending = PendingCommit("a commit that could not begin")
                pending.told = True
                self.queue.submit(pending, _failing(error, peers))
            raise

    def commit(
        self, state: Mapping[str, Any], request: CommitRequest, *, peers: Peers = SOLO, num_neighbours: int = 1,
        memory: FrozenMemory | None = None, progress: Progress = SILENT,
        on_made: Callable[[], object] | None = None, after: Sequence[InFlight] = (),
    ) -> PendingCommit:  # fmt: skip
        """Begin a commit of `state` as it is now; see `Repository.commit_async`.

        Args:
            num_neighbours: Ranks on this machine, which share what is available.
            on_made: Called in the background once it is made.
            after: What has to end before the commit begins.
        """
        request = settled(request)
        self.queue.refuse_worker()
        self._handle.require_writable()
        with self.calls:
            worker = None
            if request.worker == "process":
                worker = self._worker = self._worker or CommitWorker(self._handle)
                worker.start()  # it gets ready while the state is staged
            self.queue.admit(request.max_in_flight)
            with python_gc_paused():  # all along: each end of a pause is a search through what was made
                tree, request = captured(state, request, peers)
                is_known, declared = None, self._declared_by_pending()
                if worker is None and memory is not None:  # another process cannot look at what is not staged
                    memory = memory.now(declared)
                    is_known = _known(request, memory)
                snapshot = Snapshot(tree, rank=peers.rank, allow_pickle=request.allow_pickle, is_known=is_known)
                pending = PendingCommit(_described(request))
                pending.watch(snapshot, self.queue.is_worker)
                job = _Commit(self, snapshot, request, peers, memory, pending.counted(progress), on_made, worker, after)
                try:
                    self._declared[pending] = KeyPatterns(request.frozen, request.frozen_keys)
                    self.queue.submit(pending, inheriting(job.run))
                    self._call.is_submitted = True
                    if job.reads_cells_alone and (request.snapshot, request.worker) == ("copy", "thread"):
                        job.named = leave_out(snapshot.tensors, self.stored)
                    self._stage(state, snapshot, request, job, pending, num_neighbours)
                except BaseException as error:
                    self._declared.pop(pending, None)  # it is not made, and may never be said to have ended
                    job.fail_with(error)
                    pending.told = True
                    self._call.is_submitted = pending.done() or pending in self.queue.pending()
                    raise
        return pending

    def _stage(
        self, state: Mapping[str, Any], snapshot: Snapshot, request: CommitRequest, job: _Commit,
        pending: PendingCommit, num_neighbours: int,
    ) -> None:  # fmt: skip
        """Copy the state; the commit begins after that, or beside it where the state is larger than the budget."""
        pool, num_threads = self._pool_for(request), thread_count()
        fits = snapshot.take_room(pool, self._budget(pool, snapshot, request, num_neighbours))
        if not fits and len(self.queue.pending()) > 1:  # it has to wait for those before it anyway
            self.queue.wait_turn(pending)
            snapshot.give_room()
            fits = snapshot.take_room(pool, self._budget(pool, snapshot, request, num_neighbours))
        if request.snapshot == "lazy" and stage_later(
            state, snapshot, fits=fits, may_begin=job.may_begin.set, num_threads=num_threads
        ):
            return
        if fits:
            snapshot.stage_all(num_threads=num_threads)
            job.may_begin.set()
        else:
            snapshot.stage_small()
            job.may_begin.set()
            snapshot.stage_from_back(num_threads=num_threads)

    def _declared_by_pending(self) -> list[KeyPatterns]:
        """Declarations of frozen tensors of each commit in flight."""
        self._declared = {each: patterns for each, patterns in self._declared.items() if not each.done()}
        return list(self._declared.values())

    def _budget(self, pool: StagingPool, snapshot: Snapshot, request: CommitRequest, num_neighbours: int) -> int:
        """Bytes of `pool` that may be used."""
        if request.staging_bytes is not None:
            return request.staging_bytes - sum(each.held_bytes for each in self._former)
        budget = pool.held_bytes
        if snapshot.room > pool.free_bytes:  # to ask takes a millisecond
            budget += available_bytes() // (2 * num_neighbours)
        return budget

    def _pool_for(self, request: CommitRequest) -> StagingPool:
        """Memory to stage in; such as another process can map if the commit is made by one."""
        worker = self._worker if request.worker == "process" else None
        if self._pool is not None and self._pool.shared != (worker is not None):
            self._pool.close()  # what a commit still reads is unmapped when it is given back
            self._former = [each for each in (*self._former, self._pool) if each.held_bytes]
            self._pool = None
        if self._pool is None:
            self._pool = StagingPool(shared=worker is not None, prepare=pin, dismiss=self._dismiss)
        return self._pool

    def _dismiss(self, arena: Arena) -> None:
        """The arena is about to be unmapped, or mapped elsewhere."""
        unpin(arena)
        if self._worker is not None:
            self._worker.forget(arena)

    def make(self, job: _Commit) -> CommitInfo:
        """Make the commit, in this thread or in the worker process."""
        check = job.snapshot.check
        rest: dict[str, Any] = {"memory": job.memory, "progress": job.progress, "peers": job.peers}
        with self._turn(), collective_errors(job.peers):
            if job.worker is not None:
                arenas = job.snapshot.arenas
                return job.worker.commit(job.snapshot.tree, job.request, arenas=arenas, check=check, **rest)
            # The last look: on every rank when all is saved, and before the swap.
            looked_at = replace(job.request, look=check, announce=lambda _: check())
            return commit_live(self._handle, job.snapshot.tree, looked_at, **rest)

    def finish(self) -> None:
        """Wait for what is pending while an error is on its way; nothing is raised of it."""
        if self.queue.pid == os.getpid() and not self.queue.is_worker():
            self.queue.drain()

    def close(self) -> None:
        """End the worker process, and give back the memory; nothing is pending any more."""
        if self._worker is not None:
            self._worker.close()
        if self._pool is not None:
            self._pool.close()


@dataclass
class _Commit:
    """One commit in the background.

    Attributes:
        may_begin: Set when what it reads is staged, or may be read where it is.
        named: Ids of the cells of its tensors on devices.
    """

    commits: BackgroundCommits
    snapshot: Snapshot
    request: CommitRequest
    peers: Peers
    memory: FrozenMemory | None
    progress: Progress
    on_made: Callable[[], object] | None
    worker: CommitWorker | None
    after: Sequence[InFlight]
    may_begin: threading.Event = field(default_factory=threading.Event)
    named: frozenset[Digest] = frozenset()

    @property
    def reads_cells_alone(self) -> bool:
        """Whether the commit looks at nothing but at cells whose chunks are not stored."""
        return self.peers.size == 1 and self.request.frozen is None and not self.request.frozen_keys

    def fail_with(self, error: BaseException) -> None:
        """The call raises `error`: the commit is not made, and the other ranks hear why."""
        self.snapshot.abort(error)
        self.may_begin.set()

    def run(self) -> CommitInfo:
        """Make it, in the thread of the queue, which ends with the commits that it was started for."""
        try:
            self.may_begin.wait()
            leave_core(core_of_main_thread(), pid=os.getpid())
            for each in self.after:
                each.wait()
            self.after = ()
            stored, self.commits.stored = self.named, frozenset()
            if self.snapshot.error is not None:
                with collective_errors(self.peers):
                    raise self.snapshot.error
            made = self.commits.make(self)
            self.commits.stored = stored
            if self.on_made is not None:
                self.on_made()
            return made
        finally:
            self.snapshot.release()


def _failing(error: BaseException, peers: Peers) -> Callable[[], CommitInfo]:
    def run() -> CommitInfo:
        with collective_errors(peers):
            raise error

    return run


def settled(request: CommitRequest) -> CommitRequest:
    """`request` with values of its own in place of what the caller may change.

    Raises:
        InvalidInputError: says which field cannot be stored.
    """
    fields = checked_fields(request)
    return replace(
        request, verb=VERB, message=fields.message, author=fields.author, step=fields.step, metrics=fields.metrics,
        meta=None if fields.meta is None else decode_value(fields.meta),
        provenance=False if fields.provenance is None else decode_value(fields.provenance),
        parents=fields.parents, lineage=decoded_lineage(fields.lineage), other_parents=tuple(request.other_parents),
        command=tuple(sys.argv), folder=working_folder(),
        frozen=None if request.frozen is None else texts("frozen", request.frozen),
    )  # fmt: skip


def _known(request: CommitRequest, memory: FrozenMemory) -> IsKnown | None:
    """Says which tensors are declared frozen and were hashed before; None: none is."""
    patterns = KeyPatterns(request.frozen, request.frozen_keys)
    if not patterns:
        return None

    def is_known(key: str, item: TensorItem, boxes: tuple[Box, ...]) -> bool:
        return patterns.matches(key) and memory.is_unchanged(key, item, boxes, check=request.frozen_check)

    return is_known


def _described(request: CommitRequest) -> str:
    step = "" if request.step is None else f" of step {request.step}"
    place = f", called at {request.called_at}" if request.called_at else ""
    return f"the commit{step}{place}"


# --- what the last commit has stored ----------------------------------------------------------
# Every cell of the tensors on devices is hashed there, at the call (training/device/hasher.py); nothing is left out on
# account of addresses or version counters. The commit has the digests of all cells and asks the index once more: a
# chunk that was collected meanwhile makes it fail, for its bytes were not kept.


def leave_out(tensors: Sequence[StagedTensor], stored: frozenset[Digest]) -> frozenset[Digest]:
    """Let the tensors that can be hashed on their device be staged but for the cells whose ids are in `stored`.

    Only whole tensors of one rank. Returns the ids of all cells of those tensors: what is stored once they are.
    """
    waiting: dict[int, list[StagedTensor]] = {}
    hashers: dict[int, LeafHasher] = {}
    for each in tensors:
        offer = getattr(each.live, "leaf_hasher", None)
        hasher = None if offer is None or each.num_bytes <= INLINE_BYTES else offer()
        if hasher is not None and each.boxes == (each.spec.box,):
            hashers[id(hasher)] = hasher
            waiting.setdefault(id(hasher), []).append(each)
    found: set[Digest] = set()
    for key, hasher in hashers.items():
        found.update(_leave_out(waiting[key], hasher, stored))
    return frozenset(found)


def _leave_out(tensors: Sequence[StagedTensor], hasher: LeafHasher, stored: frozenset[Digest]) -> list[Digest]:
    wanted = []
    for each in tensors:
        grid = grid_for(each.spec)
        wanted.append(CellsToName(each.live, grid, range(grid.num_cells), each.item_bytes))
    answer = hasher.cell_digests(wanted)
    ids: list[Digest] = []
    for each, asked, digests in zip(tensors, wanted, answer or (), strict=answer is not None):
        boxes = []
        for number, joined in enumerate(digests):
            digest = chunk_id(asked.grid.cell_elements(number) * each.item_bytes, joined)
            ids.append(digest)
            if digest not in stored:
                boxes.append(asked.grid.box(number))
        each.leave_out(tuple(boxes), tuple(digests))
    return ids
