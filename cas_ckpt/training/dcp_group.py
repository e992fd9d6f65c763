"""The ranks that save together through DCP, and whose turn it is.

Invariant: all writers over one process group of torch share one `GroupPeers`, because making
one is collective and writers are often made anew for every save. Over one such group, and
through one writer, one save runs at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist

from cas_ckpt.errors import ConflictError
from cas_ckpt.training.process_group import GroupPeers

_BUSY = (
    "another save through this writer, or over this process group, is not finished: wait for its future first "
    "(DCP's own collectives cannot tell two saves apart)"
)


class Alive(Protocol):
    """A thread that others started."""

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        ...


class Turn:
    """Who saves now. A save plans first, then writes; both in one thread.

    A save whose planning failed elsewhere is never told to us. So a thread that planned loses
    its turn when it ends, plans again, or is the main thread (which cannot be inside a save
    while another one begins, but for a moment).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._planner: Alive | None = None
        self._writer: Alive | None = None

    def plan(self) -> None:
        """Note that this thread begins a save.

        Raises:
            ConflictError: another thread is at it.
        """
        own = threading.current_thread()
        with self._lock:
            other = self._planner
            waits = other not in (None, own, threading.main_thread()) and other is not None and other.is_alive()
            if self._writer is not None or waits:
                raise ConflictError(_BUSY)
            self._planner = own

    def leave(self) -> None:
        """Note that this thread's save is over, however it ended."""
        with self._lock:
            if self._planner is threading.current_thread():
                self._planner = None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """The part of a save that talks to the other ranks.

        Raises:
            ConflictError: another thread is at it.
        """
        with self._lock:
            if self._writer is not None:
                raise ConflictError(_BUSY)
            self._writer = threading.current_thread()
        try:
            yield
        finally:
            with self._lock:
                self._writer = None


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """Our connections over a process group of torch, and the turn of those who use it."""

    peers: GroupPeers
    turn: Turn = field(default_factory=Turn)


_groups: dict[tuple[Any, float], SharedGroup] = {}
_making = threading.Lock()


def world_size(process_group: Any) -> int:
    """Ranks of `process_group`, or of the default group; 1 without torch.distributed."""
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size(process_group)


def members_of(process_group: Any) -> tuple[int, ...] | None:
    """World ranks of the group's ranks, in order; None where they are the same numbers."""
    if process_group is None or world_size(process_group) == 1:
        return None
    ranks = tuple(dist.get_process_group_ranks(process_group))
    return None if ranks == tuple(range(len(ranks))) else ranks


def shared_group(process_group: Any, timeout_s: float) -> SharedGroup:
    """Our group over `process_group` (None: the default one); made by the first call, which is collective.

    Args:
        timeout_s: How long a rank waits for the others.
    """
    parent = process_group if process_group is not None else dist.group.WORLD
    with _making:
        _forget_destroyed()
        found = _groups.get((parent, timeout_s))
        if found is None:
            found = _groups[parent, timeout_s] = SharedGroup(GroupPeers(process_group, timeout_s=timeout_s))
        return found


def _forget_destroyed() -> None:
    """Drop groups of a torch.distributed that was shut down since."""
    alive = set(dist.distributed_c10d._world.pg_map)
    for key in [key for key in _groups if key[0] not in alive]:
        _groups.pop(key).peers.close()


def close_groups() -> None:
    """Leave all our groups; before `destroy_process_group`. Not collective, idempotent."""
    with _making:
        while _groups:
            _groups.popitem()[1].peers.close()
