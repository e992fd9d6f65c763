"""Turns: writers on one machine that would only collide wait for one another, for a while.

Optimistic writers of one ref spoil one another's work: of eight that upload and then swap, one
wins and seven upload again. Whoever takes a turn first has the ref to himself, mostly.

Invariant: economy only. Nothing is safe because of a turn: it is not waited for longer than
`wait_s`, so a process that is stopped while it has one delays others, and never holds them up;
and a filesystem without locks gives every turn at once.
"""

from __future__ import annotations

import fcntl
import os
import random
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol, runtime_checkable

from cas_ckpt import clock
from cas_ckpt.storage.descriptors import Descriptor
from cas_ckpt.storage.store import Store

WAIT_S = 1.0
"""How long a writer waits for its turn before it goes ahead without."""

_PAUSE_S = 0.001
"""Between two looks; drawn from half to one and a half of it, so that no two keep step."""

_NUM_LOCKS = 64
"""Names share so many lock files: whoever meets a stranger there only waits a little."""


@runtime_checkable
class TakesTurns(Protocol):
    """A store whose writers can wait for one another."""

    def in_turn(self, name: str) -> AbstractContextManager[None]:
        """Have the turn on `name` inside the block, if it comes within `WAIT_S`; without it otherwise."""
        ...


def in_turn(store: Store, name: str) -> AbstractContextManager[None]:
    """The turn on `name`, where `store` has turns; nothing elsewhere."""
    return store.in_turn(name) if isinstance(store, TakesTurns) else nullcontext()


@contextmanager
def file_turn(folder: Path, name: str) -> Iterator[None]:
    """The turn on `name` among all who use `folder`; the kernel ends that of a process that dies."""
    path = folder / f"turn-{zlib.crc32(name.encode()) % _NUM_LOCKS}"
    try:
        descriptor = Descriptor(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
    except OSError:  # a folder that is not there yet, or not ours: the write itself will tell
        yield
        return
    taken = _take(descriptor.fd)
    try:
        yield
    finally:
        if taken:
            # Explicit, because a forked child may hold a copy of the descriptor.
            fcntl.flock(descriptor.fd, fcntl.LOCK_UN)


def _take(fd: int) -> bool:
    end_s = clock.monotonic_s() + WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if clock.monotonic_s() > end_s:
                return False
        except OSError:  # no locks on this filesystem
            return False
        clock.pause(random.uniform(0.5, 1.5) * _PAUSE_S)
