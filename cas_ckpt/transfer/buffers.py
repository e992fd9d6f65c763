"""Memory for what is hashed and written: a bounded number of buffers, used again and again.

Memory that is new to a process costs more than the copy into it, so buffers outlive the commit that made them.

Invariant: what is given out is nobody else's until it is given back. Knows nothing of tensors or of packs.
"""

from __future__ import annotations

import threading
from collections import deque

import numpy as np

from cas_ckpt.transfer.hashing import Array
from cas_ckpt.transfer.save_memory import BATCH_BYTES

KEPT_BUFFERS = 12
"""Buffers of `BATCH_BYTES` that a process keeps for its next commit."""

_kept: deque[Array] = deque(maxlen=KEPT_BUFFERS)


class Buffers:
    """The buffers of one commit, made when first needed; those of the usual size outlive it. For all threads.

    Args:
        count: In use at once, at least two: one may wait in the sink for another. See save_memory.py.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._in_use = 0
        self._changed = threading.Condition()

    def take(self, num_bytes: int = BATCH_BYTES, *, held: int | None = None) -> Array:
        """A buffer of at least `num_bytes`; waits while all are in use.

        Args:
            held: Buffers that the caller has and cannot give back before it has this one. It waits for those of others
                only, and for none that may wait in a sink for its next chunks; it may get more than there are.
        """
        with self._changed:
            while self._in_use >= self._count and (held is None or self._in_use > held + 1):
                self._changed.wait()
            self._in_use += 1
        if num_bytes > BATCH_BYTES:
            return np.empty(num_bytes, np.uint8)
        try:
            return _kept.pop()
        except IndexError:
            return np.empty(BATCH_BYTES, np.uint8)

    def give(self, buffer: Array) -> None:
        """Take `buffer` back; nobody may look at it any more."""
        if len(buffer) == BATCH_BYTES:
            _kept.append(buffer)
        with self._changed:
            self._in_use -= 1
            self._changed.notify()
