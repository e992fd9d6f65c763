"""Forgotten commits: which ones keep no data any more, as sealed records that only add up.

Invariant: the set is the union of all records, so that several may be written at once, and a
merged record may be put beside those that it merges before they are deleted. A commit that a
ref names is kept all the same: that is decided in ops/, not here.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from cas_ckpt import clock
from cas_ckpt.errors import CorruptionError, NotFoundError
from cas_ckpt.objects.digest import DIGEST_BYTES, Digest
from cas_ckpt.objects.record import seal, unseal
from cas_ckpt.storage.store import Store

VERSION = 1
PREFIX = "forgotten/"

MANY_RECORDS = 16
"""More than so many are merged into one when garbage is collected."""


def read_forgotten(store: Store) -> frozenset[Digest]:
    """The ids of all forgotten commits.

    Raises:
        CorruptionError: a record is damaged: nothing may be collected until it is restored.
    """
    return frozenset(digest for _, ids in _records(store) for digest in ids)


def _records(store: Store) -> list[tuple[str, list[Digest]]]:
    """Every record, between two listings that agree: merged ones vanish, and a listing is not of one moment."""
    while True:
        keys = _keys(store)
        try:
            found = [(key, _decode(key, store.get(key))) for key in keys]
        except NotFoundError:
            continue
        if _keys(store) == keys:
            return found


def _keys(store: Store) -> list[str]:
    return [key for key, _ in store.list(PREFIX)]


def write_forgotten(store: Store, ids: Iterable[Digest], *, author: str) -> str:
    """Add these commits to the forgotten ones; the key of the new record."""
    key = PREFIX + secrets.token_hex(16)
    payload = {
        "time_us": int(clock.now_s() * 1e6),
        "author": author,
        "commits": sorted(set(ids)),
    }
    store.put(key, seal("forgotten", VERSION, payload))
    return key


def merge_forgotten(store: Store, *, known: Iterable[bytes], author: str) -> int:
    """Put one record in the place of many; how many were merged.

    Args:
        known: Commits that are still there; the others need not be remembered.
    """
    records = _records(store)
    if len(records) <= MANY_RECORDS:
        return 0
    kept = set(known)
    write_forgotten(store, (digest for _, ids in records for digest in ids if digest in kept), author=author)
    for key, _ in records:
        store.delete(key)
    return len(records)


def _decode(key: str, record: bytes) -> list[Digest]:
    ids = unseal("forgotten", record, version=VERSION, key=key).get("commits")
    if not isinstance(ids, list) or any(not isinstance(one, bytes) or len(one) != DIGEST_BYTES for one in ids):
        raise CorruptionError(f"{key}: a record of forgotten commits that names no ids: restore it from a copy")
    return [Digest(one) for one in ids]
