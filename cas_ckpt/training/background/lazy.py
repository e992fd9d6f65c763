"""`snapshot="lazy"`: what only optimizers change is staged after the call, while the next forward and backward run.

    1. At the call everything else is staged: buffers, loose tensors, arrays, small tensors.
    2. Parameters and optimizer state are watched (changes.py), and read from then on through tensors of our own, which
       keep the memory of the call whatever becomes of the live ones.
    3. One thread stages them, from the front; if not all fits, the commit saves them from the front meanwhile.
    4. From `hold_steps` to `let_steps` every step of every optimizer of this process waits until all is staged or
       saved. The hook for that is registered at the first use and stays: torch walks through its hooks without a lock,
       so taking one away while another thread steps would break that step.

Invariant: what is staged is what was there at the call; a change that torch counts breaks the snapshot with
StateChangedError, which the commit raises. Memory of the pool is written by nobody after the commit has ended. The hook
raises nothing of ours: a commit that fails is reported by the commit, and the step is made. (What is raised into the
waiting thread, such as KeyboardInterrupt, passes, and the step is not made.)
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cas_ckpt.objects.nodes import INLINE_BYTES
from cas_ckpt.objects.state import ArraySource
from cas_ckpt.parallel.workers import Background
from cas_ckpt.training.background.changes import TrainedMemory
from cas_ckpt.training.background.staged import Snapshot, StagedTensor
from cas_ckpt.training.capture.sharded import ShardElements
from cas_ckpt.training.capture.tensors import CopiedTensor, HostTensor

_LOGGER = logging.getLogger("cas_ckpt")

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


# ------------------------------------------------------------ steps of optimizers

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
