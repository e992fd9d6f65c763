"""What a medium really does, found by trying.

`probe_conditions`: does it honour conditional writes? Some "S3-compatible" ones ignore them. The verdict never
believes `abilities`; what was written for it is deleted again.

`cache_token`: do two processes read a store through one and the same page cache? Equal tokens mean that what one
process has just read is in the memory from which the other one's `read_into(cached_only=True)` would be answered.

Must not know: what the answers are used for, what is stored.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cas_ckpt.errors import ConflictError, StorageError
from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.store import Store

PROBE_PREFIX = "probe-"
"""How the key of a probe begins; it has one part, so that no folder is left where keys are paths."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a probe of conditional writes found.

    Attributes:
        exclusive_create: The second of two creates was refused and the first value stayed.
        checked_swap: A stale swap was refused, and a true one done.
        detail: What was seen, in words.
    """

    exclusive_create: bool
    checked_swap: bool
    detail: str

    @property
    def conditional(self) -> bool:
        """True if commits of several writers are safe here."""
        return self.exclusive_create and self.checked_swap


def probe_conditions(store: Store) -> Verdict:
    """Try two creates of one key, a stale swap and a true one; leaves nothing behind.

    Raises:
        StorageError: the store cannot be written at all.
    """
    key = PROBE_PREFIX + secrets.token_hex(16)
    mine, other, third = (secrets.token_bytes(16) for _ in range(3))
    store.put(key, mine)  # a store that cannot be written fails here, one that lacks conditions later
    store.delete(key)
    try:
        return _verdict(_creates_exclude(store, key, mine, other), _swaps_are_checked(store, key, mine, other, third))
    finally:
        store.delete(key)


def _creates_exclude(store: Store, key: str, first: bytes, second: bytes) -> bool:
    try:
        store.put_if_absent(key, first)
    except StorageError:
        return False
    return _refused(lambda: store.put_if_absent(key, second)) and store.get(key) == first


def _swaps_are_checked(store: Store, key: str, current: bytes, stale: bytes, new: bytes) -> bool:
    store.put(key, current)
    if not _refused(lambda: store.compare_and_swap(key, stale, new)):
        return False
    try:
        store.compare_and_swap(key, current, new)
    except (ConflictError, StorageError):
        return False
    return store.get(key) == new


def _refused(call: Callable[[], None]) -> bool:
    """True only for a refusal as such: an ability that is lacking, or a failure, proves nothing."""
    try:
        call()
    except ConflictError:
        return True
    except StorageError:
        return False
    return False


def _verdict(exclusive_create: bool, checked_swap: bool) -> Verdict:
    creates = "a second create is refused" if exclusive_create else "a second create is NOT refused"
    swaps = "a stale swap is refused" if checked_swap else "swaps are NOT checked"
    return Verdict(exclusive_create, checked_swap, f"{creates}; {swaps}")


# --- one page cache ----------------------------------------------------------------------------

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
