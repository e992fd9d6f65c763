"""Turns: writers on one machine that would only collide wait for one another, for a while.

Optimistic writers of one ref spoil one another's work: of eight that upload and then swap, one
wins and seven upload again. Whoever takes a turn first has the ref to himself, mostly.

Whoever waits goes on to wait as long as the turn changes hands: to go ahead without it on a busy
machine would make it busier. Invariant: economy only. Nothing is safe because of a turn: if one
process has it for `STUCK_S`, the others go ahead, so a process that is stopped while it has the
turn delays others, and never holds them up. A filesystem without locks gives every turn at once.
"""

from __future__ import annotations

import fcntl
import os
import random
import secrets
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol, runtime_checkable

from cas_ckpt import clock
from cas_ckpt.storage.descriptors import Descriptor
from cas_ckpt.storage.durable import LOCK_NAME
from cas_ckpt.storage.store import Store

STUCK_S = 2.0
"""How long a writer waits for one that has the turn before it goes ahead without."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.005
"""Between two looks; drawn from half to one and a half of it, so that no two keep step."""

_HOLDER_BYTES = 16

_NUM_LOCKS = 64
"""Names share so many lock files: whoever meets a stranger there only waits a little."""


@runtime_checkable
class TakesTurns(Protocol):
    """A store whose writers can wait for one another."""

    def in_turn(self, name: str) -> AbstractContextManager[None]:
        """Have the turn on `name` inside the block; without it, if whoever has it seems to be stuck."""
        ...


def in_turn(store: Store, name: str) -> AbstractContextManager[None]:
    """The turn on `name`, where `store` has turns; nothing elsewhere."""
    return store.in_turn(name) if isinstance(store, TakesTurns) else nullcontext()


@contextmanager
def file_turn(folder: Path, name: str) -> Iterator[None]:
    """The turn on `name` among all who use `folder`; the kernel ends that of a process that dies."""
    path = folder / f"{LOCK_NAME}-{zlib.crc32(name.encode()) % _NUM_LOCKS}"
    try:
        descriptor = Descriptor(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
    except OSError:  # a folder that is not there yet, or not ours: the write itself will tell
        yield
        return
    try:
        taken = _take(descriptor.fd)
    except OSError:  # no locks on this filesystem, or no space for a few bytes
        taken = False
    try:
        yield
    finally:
        if taken:
            # Explicit, because a forked child may hold a copy of the descriptor.
            fcntl.flock(descriptor.fd, fcntl.LOCK_UN)


def _take(fd: int) -> bool:
    """Wait for the lock, and tell those who come later that it changed hands; False if it was not to be had."""
    holder, pause_s = b"", _FIRST_PAUSE_S
    end_s = clock.monotonic_s() + STUCK_S
    while not _locked(fd):
        now = os.pread(fd, _HOLDER_BYTES, 0)
        if now != holder:
            holder, end_s = now, clock.monotonic_s() + STUCK_S
        if clock.monotonic_s() > end_s:
            return False
        clock.pause(random.uniform(0.5, 1.5) * pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    os.pwrite(fd, secrets.token_bytes(_HOLDER_BYTES), 0)
    return True


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
