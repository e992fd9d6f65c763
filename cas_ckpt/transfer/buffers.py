"""Memory for what is hashed and written: a few buffers, used again and again.

Memory that is new to a process costs more than the copy into it, so buffers outlive the commit that made them.

Invariant: what is given out is nobody else's until it is given back. Knows nothing of tensors or of packs.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress

import numpy as np

from cas_ckpt.transfer.hashing import Array
from cas_ckpt.transfer.save_memory import BATCH_BYTES

KEPT_BUFFERS = 12
"""Buffers of `BATCH_BYTES` that a process keeps for its next commit."""

_kept: deque[Array] = deque(maxlen=KEPT_BUFFERS)


class Buffers:
    """The buffers of one commit, made when first needed; those of the usual size outlive it. For all threads."""

    def __init__(self) -> None:
        self._free: list[Array] = []

    def take(self, num_bytes: int = BATCH_BYTES) -> Array:
        """A buffer of at least `num_bytes`."""
        if num_bytes > BATCH_BYTES:
            return np.empty(num_bytes, np.uint8)
        for free in (self._free, _kept):
            with suppress(IndexError):
                return free.pop()
        return np.empty(BATCH_BYTES, np.uint8)

    def give(self, buffer: Array) -> None:
        """Take `buffer` back; it must not be used any more."""
        if len(buffer) == BATCH_BYTES:
            self._free.append(buffer)

    def keep(self) -> None:
        """Leave some of what was given back to the next commit, drop the others."""
        _kept.extend(self._free)
        self._free.clear()
