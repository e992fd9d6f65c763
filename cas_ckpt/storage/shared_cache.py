"""Tells whether two processes read a store through one and the same page cache.

Invariant: equal tokens mean that what one process has just read is in the memory from which the
other one's `read_into(cached_only=True)` would be answered. Knows nothing of what is stored.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.store import Store

TOKEN_BYTES = 16

NO_TOKEN = bytes(TOKEN_BYTES)
"""Equal to nothing, not even to itself: this store's bytes are cached nowhere that others could look."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def cache_token(store: Store) -> bytes:
    """The same for all stores of one folder on one running kernel; `NO_TOKEN` where that cannot be told."""
    if not isinstance(store, FileStore):
        return NO_TOKEN
    try:
        boot = _BOOT_ID.read_bytes()
        status = os.stat(store.root)
    except OSError:
        return NO_TOKEN
    # The folder itself, not its path: containers may see it elsewhere, or another one under this path.
    return hashlib.sha256(b"%s %d %d" % (boot, status.st_dev, status.st_ino)).digest()[:TOKEN_BYTES]
