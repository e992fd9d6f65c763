"""Copies of states for dcp.async_save, each in memory of its own until nobody looks at it any more.

    1. `stage_state` looks for the storages of the state's tensors, and takes one arena for all of them.
    2. torch's own stager copies the structure; the storages it copies go into the arena. What it finds besides (tensors
       inside of objects) gets new memory.
    3. When the last tensor over an arena is gone, the next call takes it back, warm.

Invariant: memory that a save, a planner or a failed save's error still refers to is never written again. So two copies
that overlap in time keep their own values, however long DCP holds them. Must not know repositories.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, TypeAlias

import torch

from cas_ckpt.held_signals import held_signals
from cas_ckpt.memory import aligned
from cas_ckpt.training.capture.tensors import locals_of
from cas_ckpt.training.device.copies import pin, unpin
from cas_ckpt.training.torch_internals import stager_class
from cas_ckpt.transfer.staging import GRANULE_BYTES, Arena, StagingPool

Storages: TypeAlias = dict[tuple[torch.device, int], torch.UntypedStorage]
"""By device and address."""


class _Arenas:
    """The arenas of all such copies of this process."""

    def __init__(self) -> None:
        # What is staged is the caller's, who may fork and read it there.
        self._pool = StagingPool(kept_by_children=True, prepare=pin, dismiss=unpin)
        self._lock = threading.RLock()
        self._taken_bytes = 0
        # Finalizers run wherever memory happens to be freed, also inside of the pool: they only note what is over.
        self._over: deque[Arena] = deque()

    def rooms(self, storages: Storages) -> Storages:
        """Memory for each of them, by the same keys; undefined bytes."""
        wanted = sum(aligned(storage.nbytes()) for storage in storages.values())
        if not wanted:
            return {}
        with held_signals(), self._lock:
            while self._over:
                arena = self._over.popleft()
                self._taken_bytes -= arena.num_bytes
                self._pool.give(arena)
            # As much as it takes: all of the state is copied. What is warm and free beyond that is unmapped.
            needed = -(-wanted // GRANULE_BYTES) * GRANULE_BYTES
            budget = max(self._taken_bytes + needed, self._pool.held_bytes)
            taken = self._pool.take(wanted, budget_bytes=budget)
            if taken is None:
                return {}
            self._taken_bytes += taken.num_bytes
            left = list(range(len(storages)))
            return {key: self._lent(taken, storage.nbytes(), left) for key, storage in storages.items()}

    def _lent(self, arena: Arena, num_bytes: int, left: list[int]) -> torch.UntypedStorage:
        """A storage in `arena`, which is over when all of `left` are gone."""
        _, memory = arena.room(num_bytes)
        weakref.finalize(memory, partial(self._gone, arena, left)).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()

    def _gone(self, arena: Arena, left: list[int]) -> None:
        if left.pop() == 0:  # one step, which no other thread's comes between: the last one gets the 0
            self._over.append(arena)


_arenas = _Arenas()


def stage_state(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of `state` on the host: the same structure, other memory; what shared a storage shares one.

    Raises:
        UnsupportedVersionError: this version of torch has no stager.
    """
    storages: Storages = {}
    for tensor in _tensors_in(state):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            storages[storage.device, storage.data_ptr()] = storage
    rooms = _arenas.rooms(storages)

    def room_for(storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
        room = rooms.get((storage.device, storage.data_ptr()))
        return room if room is not None and room.nbytes() == storage.nbytes() else None

    copier = stager_class()(room_for)
    try:
        staged: dict[str, Any] = copier.stage(state)
    finally:
        copier.close()
    return staged


def _tensors_in(value: Any, inside: frozenset[int] = frozenset()) -> Iterator[torch.Tensor]:
    """Strided tensors with memory, in dicts, lists and tuples; of divided ones the local parts."""
    if isinstance(value, torch.Tensor):
        yield from locals_of(value)
    elif isinstance(value, (dict, list, tuple)) and id(value) not in inside:
        for child in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(child, inside | {id(value)})
