"""repair of config, gc state and other sealed records.

**config** is put back as it stands in another copy of *this* repository: the other one has the same store
id as our index says, or a pack of the same random name. Another repository's config would make this one
pass for that one, and indexes and caches would be believed that are about other packs.

**gc state** is made anew, idle, if it is damaged, lost or older than what refs and index have seen, and only
when it is asked for by name, because it cannot be known whether a collection was at work:
  - the new generation is far above that of every ref and of the index, so it is one that no writer has read:
    each of them starts its deduplication again, and none relies on what it knew before;
  - nothing is condemned any more. What a dead collector had condemned and not deleted is simply there again;
  - a collector that is ALIVE can swap nothing any more, for its record is gone; but if it was deleting when
    the record was damaged, it goes on deleting packs that writers now rely on. So no `cas-ckpt gc` may be
    running anywhere: only people can know that. While the record is damaged none can start.

Invariant: damaged bytes are replaced only if they still are what was read; intact ones never.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cas_ckpt.config import (
    CONFIG_KEY,
    GC_STATE_KEY,
    IDLE,
    POLICY_KEY,
    GcState,
    Generation,
    encode_gc_state,
    read_config,
    read_gc_state,
    require_current,
)
from cas_ckpt.errors import CkptError, ConflictError, CorruptionError, NotFoundError
from cas_ckpt.forgotten import PREFIX as FORGOTTEN_PREFIX
from cas_ckpt.forgotten import decode_forgotten
from cas_ckpt.index.catalog import Index
from cas_ckpt.objects.pack import PACK_PREFIX
from cas_ckpt.objects.record import MAGIC
from cas_ckpt.ops.fsck_records import is_sealed, read_refs
from cas_ckpt.ops.fsck_report import Findings, RepairKind
from cas_ckpt.ops.repair_report import RepairLog
from cas_ckpt.repository import RepositoryHandle, index_place
from cas_ckpt.storage.store import Store
from cas_ckpt.storage.url import open_store

GENERATION_MARGIN = 1000
"""Collections that nobody of those who are asked may have heard of."""


def read_stored(store: Store, key: str) -> bytes | None:
    """The bytes under `key`, whatever they are; None if there are none."""
    try:
        return store.get(key)
    except NotFoundError:
        return None


def replace_damaged(store: Store, key: str, damaged: bytes | None, record: bytes) -> None:
    """Put `record` where `damaged` (None: nothing) still stands.

    Raises:
        ConflictError: somebody else wrote there meanwhile.
    """
    if damaged is None:
        store.put_if_absent(key, record)
    else:
        store.compare_and_swap(key, damaged, record)


# --- config -------------------------------------------------------------------------------


def repair_config(store: Store, sources: Sequence[str], index_url: str | None, log: RepairLog) -> None:
    """Put back a damaged or lost config from another copy of this repository."""
    try:
        read_config(store)
        return
    except (CorruptionError, NotFoundError) as error:
        damaged, why = read_stored(store, CONFIG_KEY), str(error)
    for url in sources:
        other = open_store(url)
        try:
            config = read_config(other)
        except CkptError as error:
            log.leave(RepairKind.CONFIG, CONFIG_KEY, f"{url} does not help: {error}")
            continue
        if not _is_same(store, other, config.store_id, index_url):
            log.leave(RepairKind.CONFIG, CONFIG_KEY, f"{url} is another repository, not a copy of this one")
            continue
        if not log.dry_run:
            replace_damaged(store, CONFIG_KEY, damaged, other.get(CONFIG_KEY))
        log.did(RepairKind.CONFIG, CONFIG_KEY, f"as in {url}")
        return
    log.leave(RepairKind.CONFIG, CONFIG_KEY, f"{why}; give a copy of this very repository (--from)")


def _is_same(store: Store, other: Store, store_id: str, index_url: str | None) -> bool:
    try:
        with Index.open(index_url or index_place(store), store_id=store_id, read_only=True) as index:
            if index.store_id:
                return index.matches
    except CkptError:
        pass  # no index that could tell
    return not {key for key, _ in store.list(PACK_PREFIX)}.isdisjoint(key for key, _ in other.list(PACK_PREFIX))


# --- gc state -----------------------------------------------------------------------------


def repair_state(store: Store, index_generation: int, log: RepairLog) -> None:
    """Make gc state anew if it is damaged, lost or older than a ref or the index: see above when that is safe.

    Args:
        index_generation: Number of the generation that the index has seen.
    Raises:
        ConflictError: somebody else wrote it meanwhile.
    """
    refs, _ = read_refs(store, Findings(store))
    damaged = read_stored(store, GC_STATE_KEY)  # after the refs: so it has to know all of their generations
    try:
        state = read_gc_state(store)
        if state.record == damaged and state.generation.number >= index_generation:
            for ref in refs:
                require_current(state, ref.generation, key=ref.key)
            return
    except CorruptionError:
        pass  # damaged, lost or too old: that is what is made anew below
    highest = max((ref.generation.number for ref in refs), default=0)
    new = Generation(max(highest, index_generation, 0) + GENERATION_MARGIN - 1).next()
    if not log.dry_run:
        replace_damaged(store, GC_STATE_KEY, damaged, encode_gc_state(GcState(new, IDLE)))
    log.did(RepairKind.STATE, GC_STATE_KEY, f"idle, at generation {new.number}; no cas-ckpt gc may have been running")


# --- forgotten commits, policy ------------------------------------------------------------


def repair_records(store: Store, sources: Sequence[RepositoryHandle], log: RepairLog) -> None:
    """Put back damaged records of forgotten commits, and the policy, from another copy of this repository."""
    for key, is_intact in _records(store):
        record = read_stored(store, key)
        if record is None or is_intact(key, record):
            continue
        found = next(filter(None, (_intact_copy(source.store, key, is_intact) for source in sources)), None)
        if found is None:
            log.leave(RepairKind.RECORDS, key, _advice(key))
            continue
        if not log.dry_run:
            try:
                replace_damaged(store, key, record, found)
            except ConflictError:
                continue  # mended by somebody else
        log.did(RepairKind.RECORDS, key, "as in another copy")


def _advice(key: str) -> str:
    if key.startswith(FORGOTTEN_PREFIX):
        return "no other copy has it: forget the same commits again (cas-ckpt forget), then delete this file"
    return "no other copy has it: write it again, or delete this file"


def _records(store: Store) -> list[tuple[str, Callable[[str, bytes], bool]]]:
    found: list[tuple[str, Callable[[str, bytes], bool]]] = []
    found += [(key, _is_forgotten) for key, _ in store.list(FORGOTTEN_PREFIX)]
    for key, _ in store.list(""):
        if "/" not in key and key != CONFIG_KEY and _looks_sealed(store, key):
            found.append((key, _is_record))
    return found


def _looks_sealed(store: Store, key: str) -> bool:
    return key == POLICY_KEY or (read_stored(store, key) or b"").startswith(MAGIC)


def _is_forgotten(key: str, record: bytes) -> bool:
    try:
        decode_forgotten(key, record)
    except CorruptionError:
        return False
    return True


def _is_record(key: str, record: bytes) -> bool:
    return is_sealed(key, record)


def _intact_copy(store: Store, key: str, is_intact: Callable[[str, bytes], bool]) -> bytes | None:
    record = read_stored(store, key)
    return record if record is not None and is_intact(key, record) else None
