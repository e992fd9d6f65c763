"""Probes of what a medium really supports.

`probe_conditions`: does it honour conditional writes? Some "S3-compatible" ones ignore them. The verdict never
believes `abilities`; what was written for it is deleted again.

`probe_listing`: does it list names in order? S3 Express does not.

`cache_token`: do two processes read a store through one and the same page cache? Equal tokens mean that what one
process has just read is in the memory from which the other one's `read_into(cached_only=True)` would be answered.

Must not know: what the answers are used for, what is stored.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cas_ckpt.errors import ConflictError, StorageError
from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.store import Store, few_keys

PROBE_PREFIX = "probe-"
"""How the key of a probe begins; it has one part, so that no folder is left where keys are paths."""

_NAME_BYTES = 16
_PROBE = re.compile(rf"{PROBE_PREFIX}[0-9a-f]{{{2 * _NAME_BYTES}}}")


def is_probe(key: str) -> bool:
    """Whether a probe has such a key: one that was killed leaves it."""
    return _PROBE.fullmatch(key) is not None


def sweep_probes(store: Store) -> None:
    """Delete leftovers of killed probes; no probe may be running, as none does once there is a repository."""
    for key in filter(is_probe, few_keys(store, PROBE_PREFIX)):
        store.delete(key)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a probe of conditional writes.

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
    key = PROBE_PREFIX + secrets.token_hex(_NAME_BYTES)
    mine, other, third = (secrets.token_bytes(16) for _ in range(3))
    store.put(key, mine)  # a store that cannot be written fails here, one that lacks conditions later
    store.delete(key)
    try:
        creates = (
            _error_of(lambda: store.put_if_absent(key, mine)) is None
            and isinstance(_error_of(lambda: store.put_if_absent(key, other)), ConflictError)
            and store.get(key) == mine
        )
        store.put(key, mine)
        swaps = (
            isinstance(_error_of(lambda: store.compare_and_swap(key, other, third)), ConflictError)
            and _error_of(lambda: store.compare_and_swap(key, mine, third)) is None
            and store.get(key) == third
        )
    finally:
        store.delete(key)
    second = "a second create is refused" if creates else "a second create is NOT refused"
    stale = "a stale swap is refused" if swaps else "swaps are NOT checked"
    return Verdict(creates, swaps, f"{second}; {stale}")


def probe_listing(store: Store) -> None:
    """Check that a listing of a flat folder, as that of packs is, comes in order; leaves nothing behind.

    Raises:
        StorageError: it does not, or the store cannot be written.
    """
    stem = PROBE_PREFIX + secrets.token_hex(_NAME_BYTES)
    keys = [f"{stem}-{end}" for end in "f0a"]
    try:
        for key in keys:
            store.put(key, b"")
        found = [key for key, _ in store.list(stem)]
    finally:
        for key in keys:
            store.delete(key)
    if found != sorted(keys):
        raise StorageError(f"{store.url}: its listings are not whole, or not in order of names: use another store")


def _error_of(call: Callable[[], None]) -> ConflictError | StorageError | None:
    """The error of the call: a rejection, or a failure (an ability that is lacking), which proves nothing."""
    try:
        call()
    except (ConflictError, StorageError) as error:
        return error
    return None


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
