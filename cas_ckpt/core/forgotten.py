"""Forgotten commits: which ones keep no data any more, as sealed records that add up, and how history shows them.

Invariant: the set is the union of all records, so that several may be written at once, and a merged record may be
put beside those that it merges before they are deleted. The merged one stays only if all of them were still there
after it was written: who takes a commit out of them meanwhile finds either them or the merged one. A commit that a
ref names is kept all the same (`forgotten_view`, core/live.py). Whether the data of a forgotten commit is still there
is found out by reading it, not here.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from cas_ckpt import clock
from cas_ckpt.errors import ConflictError, CorruptionError, NotFoundError, TooLargeError
from cas_ckpt.objects.digest import DIGEST_BYTES, MOST_NAMED, Digest, seal, unseal
from cas_ckpt.storage.store import Store, few_keys

if TYPE_CHECKING:
    from cas_ckpt.core.handle import RepositoryHandle
    from cas_ckpt.core.host_cache import RepositoryCache
    from cas_ckpt.core.refs import Ref

_Record: TypeAlias = tuple[str, tuple[Digest, ...]]
"""The key of a record, and the commits that it names."""

VERSION = 1
PREFIX = "forgotten/"
RELEASED_PREFIX = "released/"

_NAME_BYTES = 16
_KEY = re.compile(rf"({PREFIX}|{RELEASED_PREFIX})[0-9a-f]{{{2 * _NAME_BYTES}}}")
_LOGGER = logging.getLogger("cas_ckpt")

MANY_RECORDS = 16
"""More than so many are merged into one when garbage is collected."""

MOST_IDS = 1_000_000
"""Commits in all records of one kind together, which are held in memory (some 100 MB)."""

MAX_LOOKS = 10
"""Times that commits are taken out of records, while others go on writing records with them."""


def read_forgotten(store: Store) -> frozenset[Digest]:
    """The ids of all forgotten commits, for callers that rely on the data of the others.

    Raises:
        CorruptionError: a record is damaged.
    """
    return frozenset(digest for _, ids in _records(store) for digest in ids)


def read_forgotten_leniently(store: Store) -> frozenset[Digest]:
    """The same for callers that only show them, or keep the others: damaged records are skipped, with a warning."""
    return frozenset(digest for _, ids in _readable_records(store) for digest in ids)


def write_released(store: Store, ids: Collection[Digest]) -> list[str]:
    """Record commits that are not to be taken for orphans; the keys of the records.

    These are commits that logs of refs are about to name no longer, and some that are stored before a ref names them.
    It gives up nothing by itself: what a ref leads to is kept all the same.
    """
    return _write(store, "released", RELEASED_PREFIX, ids, {})


def read_released(store: Store) -> frozenset[Digest]:
    """Commits that logs once named. A record that cannot be read is passed over: more counts as orphaned, no less."""
    found: set[Digest] = set()
    for key in _keys(store, RELEASED_PREFIX):
        with suppress(NotFoundError, CorruptionError):
            found.update(_decode("released", key, store.get(key)))
        _require_few(store, found)
    return frozenset(found)


def sweep_released(
    store: Store, *, known: Callable[[], Iterable[bytes]], led_to: Callable[[], Collection[bytes]]
) -> None:
    """Take commits out of the records of released ones that refs lead to now: a lost ref would else lose them, too.

    Records are merged once there are many, and those that are in no pack any more left out.

    Args:
        known: Tells the commits that are still there. led_to: Those that refs lead to. Asked after the records were
            read: a push that records some moves its ref afterwards.
    """
    keys = _keys(store, RELEASED_PREFIX)
    if not keys:
        return
    released = read_released(store)
    named = released.intersection(led_to())
    if len(keys) <= MANY_RECORDS and not named:
        return
    kept = (released - named).intersection(known())
    if kept:
        write_released(store, kept)
    for key in keys:
        store.delete(key)


def _records(store: Store) -> list[_Record]:
    """Every record.

    Raises:
        CorruptionError: one is damaged.
    """
    found, damaged = _look(store)
    if damaged:
        raise damaged[0]
    return found


def _readable_records(store: Store) -> list[_Record]:
    """Those that are intact; the log says which others there are."""
    found, damaged = _look(store)
    for error in damaged:
        _LOGGER.warning("%s. It is passed by: what it names counts as not forgotten, and is kept; run fsck", error)
    return found


def _look(store: Store) -> tuple[list[_Record], list[CorruptionError]]:
    """The records, and what damaged ones are: between two listings that agree, as merged ones vanish meanwhile."""
    while True:
        keys, damaged = _keys(store), list[CorruptionError]()
        try:
            found = list(_read(store, keys, damaged))
        except NotFoundError:
            continue
        if _keys(store) == keys:
            return found, damaged


def _read(store: Store, keys: Iterable[str], damaged: list[CorruptionError]) -> Iterator[_Record]:
    total = 0
    for key in keys:
        try:
            record = store.get(key)
            total += len(record) // DIGEST_BYTES
            _require_few(store, range(total))
            yield key, decode_forgotten(key, record)
        except CorruptionError as error:
            damaged.append(error)


def _require_few(store: Store, ids: Sized) -> None:
    """Raise TooLargeError for more commits than are held in memory: no real repository has so many."""
    if len(ids) > MOST_IDS:
        raise TooLargeError(
            f"{store.url} names more than {MOST_IDS} forgotten or released commits: no history has them"
        )


def _seen_forgotten(store: Store, cache: RepositoryCache | None) -> frozenset[Digest]:
    """`read_forgotten` for readers: one listing, and records, which never change, from the cache.

    While a collection merges records, of which there were many, a listing may miss some of them for a moment.
    """
    found: set[Digest] = set()
    for key in _keys(store):
        try:
            record = None if cache is None else cache.get(key)
            if record is None:
                record = store.get(key)
                if cache is not None:
                    cache.put(key, record)
            found.update(decode_forgotten(key, record))
            _require_few(store, found)
        except (NotFoundError, CorruptionError):  # merged meanwhile; or damaged, perhaps in the cache alone
            if cache is not None:
                cache.drop(key)
            return read_forgotten_leniently(store)
    return frozenset(found)


def _keys(store: Store, prefix: str = PREFIX) -> list[str]:
    """The keys of the records; others that a stranger put there are passed by, and the log says so."""
    found = few_keys(store, prefix)
    odd = [key for key in found if not is_record(key)]
    if odd:
        _LOGGER.warning("%s: passed by, as no record has such a name: delete it (%d keys like it)", odd[0], len(odd))
    return [key for key in found if is_record(key)]


def is_record(key: str) -> bool:
    """Whether `_write` gives such keys."""
    return _KEY.fullmatch(key) is not None


def write_forgotten(store: Store, ids: Iterable[Digest], *, author: str) -> list[str]:
    """Add these commits to the forgotten ones; the keys of the new records."""
    return _write(store, "forgotten", PREFIX, ids, {"time_us": int(clock.now_s() * 1e6), "author": author})


def _write(store: Store, kind: str, prefix: str, ids: Iterable[Digest], about: dict[str, Any]) -> list[str]:
    """Records of these commits, each as long as readers take; one where there are none."""
    ordered, keys = sorted(set(ids)), []
    for start in range(0, max(len(ordered), 1), MOST_NAMED):
        key = prefix + secrets.token_hex(_NAME_BYTES)
        store.put(key, seal(kind, VERSION, {**about, "commits": ordered[start : start + MOST_NAMED]}, key=key))
        keys.append(key)
    return keys


def remove_forgotten(store: Store, ids: Collection[Digest], *, author: str) -> frozenset[Digest]:
    """Take these commits out of the records; those that were in them.

    The others of a record are written anew before it is deleted, so whoever dies in between leaves too
    much forgotten, never too little.

    Raises:
        ConflictError: others write records with them all the time.
        CorruptionError: a record is damaged: it may name them, and a copy of it would bring that back.
    """
    wanted = frozenset(ids)
    if not wanted:
        return wanted
    found: set[Digest] = set()
    for _ in range(MAX_LOOKS):
        records = [(key, set(those)) for key, those in _records(store) if not wanted.isdisjoint(those)]
        if not records:
            return frozenset(found)
        all_of_them = set[Digest]().union(*(those for _, those in records))
        found |= all_of_them & wanted
        if all_of_them - wanted:
            write_forgotten(store, all_of_them - wanted, author=author)
        for key, _ in records:
            store.delete(key)
    raise ConflictError(f"records of forgotten commits were written anew {MAX_LOOKS} times meanwhile: try again")


def merge_forgotten(store: Store, *, known: Callable[[], Iterable[bytes]], author: str) -> int:
    """Put one record in the place of many that are intact; how many were merged.

    Args:
        known: Tells the commits that are still there, asked after the records were read; the others need
            not be remembered.
    """
    records = _readable_records(store)
    if len(records) <= MANY_RECORDS:
        return 0
    kept = set(known())
    merged = write_forgotten(store, (digest for _, ids in records for digest in ids if digest in kept), author=author)
    if not {key for key, _ in records} <= set(_keys(store)):  # another process remembers one of them, or merges as well
        for key in merged:
            store.delete(key)
        return 0
    for key, _ in records:
        store.delete(key)
    return len(records)


@lru_cache(maxsize=4 * MANY_RECORDS)
def decode_forgotten(key: str, record: bytes) -> tuple[Digest, ...]:
    """The commits that a record of forgotten ones names.

    Decoded once a process: records are not edited, and thousands of ids take milliseconds.

    Raises:
        CorruptionError: it is damaged.
    """
    return _decode("forgotten", key, record)


def _decode(kind: str, key: str, record: bytes) -> tuple[Digest, ...]:
    ids = unseal(kind, record, version=VERSION, key=key).get("commits")
    if not isinstance(ids, list) or any(not isinstance(one, bytes) or len(one) != DIGEST_BYTES for one in ids):
        raise CorruptionError(f"{key}: a record of {kind} commits that names no ids: restore it from a copy")
    return tuple(Digest(one) for one in ids)


def forgotten_view(handle: RepositoryHandle, refs: Sequence[Ref] | None = None) -> frozenset[Digest]:
    """The forgotten commits as those see them who look at history: what a ref names directly is not among them.

    Args:
        refs: All branches, tags and pins; None: read them now, if anything was forgotten.
    """
    if handle.store.abilities.local:
        forgotten = read_forgotten_leniently(handle.store)
    else:
        forgotten = _seen_forgotten(handle.store, handle.cache)
    if not forgotten:
        return forgotten
    refs = list(handle.refs.list()) if refs is None else refs
    return forgotten - {ref.target for ref in refs if ref.target is not None}
