"""repair: makes whole what fsck found, as far as intact copies reach.

    1. config, gc state, records     (ops/fsck/repair.py)     without these nothing can be opened
    2. packs, chunks                 (ops/fsck/repair_data.py)
    3. refs                          (ops/fsck/repair_refs.py)        their targets must be whole by now
    4. index                         (ops/fsck/rebuild.py)

Invariant: everything is additive until it is verified, nothing intact is ever removed, and whatever dies
on the way leaves a repository that is no worse and can be repaired again. Works on one that cannot be opened.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from cas_ckpt.core.config import CONFIG_KEY, POLICY_KEY, read_config
from cas_ckpt.core.forgotten import PREFIX as FORGOTTEN_PREFIX
from cas_ckpt.core.forgotten import decode_forgotten
from cas_ckpt.core.handle import RepositoryHandle, index_place
from cas_ckpt.core.protocol import (
    GC_STATE_KEY,
    IDLE,
    GcState,
    Generation,
    encode_gc_state,
    read_gc_state,
    require_current,
)
from cas_ckpt.errors import (
    CkptError,
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
)
from cas_ckpt.index.database import IN_MEMORY
from cas_ckpt.index.index import Index
from cas_ckpt.objects.canonical import MAGIC
from cas_ckpt.objects.pack import PACK_PREFIX
from cas_ckpt.ops.fsck.check import open_index
from cas_ckpt.ops.fsck.rebuild import add_all_packs, rebuild_index, refill_index
from cas_ckpt.ops.fsck.records import check_records, is_sealed, read_refs
from cas_ckpt.ops.fsck.repair_data import DataRepair, repair_data
from cas_ckpt.ops.fsck.repair_packs import open_source
from cas_ckpt.ops.fsck.repair_refs import repair_refs
from cas_ckpt.ops.fsck.report import Findings, RepairKind, RepairLog, RepairReport
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.storage.store import Store
from cas_ckpt.storage.url import open_store

# DOC of cas_ckpt.ops.fsck.repair:
# repair of config, gc state and other sealed records.
#
# **config** is put back as it stands in another copy of *this* repository: the other one has the same store
# id as our index says, or a pack of the same random name. Another repository's config would make this one
# pass for that one, and indexes and caches would be believed that are about other packs.
#
# **gc state** is made anew, idle, if it is damaged, lost or older than what refs and index have seen, and only
# when it is asked for by name, because it cannot be known whether a collection was at work:
#   - the new generation is far above that of every ref and of the index, so it is one that no writer has read:
#     each of them starts its deduplication again, and none relies on what it knew before;
#   - nothing is condemned any more. What a dead collector had condemned and not deleted is simply there again;
#   - a collector that is ALIVE can swap nothing any more, for its record is gone; but if it was deleting when
#     the record was damaged, it goes on deleting packs that writers now rely on. So no `cas-ckpt gc` may be
#     running anywhere: only people can know that. While the record is damaged none can start.
#
# Invariant: damaged bytes are replaced only if they still are what was read; intact ones never.
#

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


@dataclass(frozen=True, slots=True)
class RepairRequest:
    """What to repair, and with what.

    Attributes:
        kinds: Only these.
        sources: Paths or URLs of repositories to take intact copies from: copies of this one, or any others.
        refs: Ref -> revision that it is to name, where nothing else tells.
        read_data: Read all data, not only that of packs known to be damaged.
        dry_run: Say what would be done.
    """

    kinds: frozenset[RepairKind]
    sources: Sequence[str] = ()
    refs: Mapping[str, str] = field(default_factory=dict)
    read_data: bool = False
    dry_run: bool = False


def parse_kinds(words: Collection[str]) -> frozenset[RepairKind]:
    """What `words` ("index", "packs" ...) name.

    Raises:
        InvalidInputError: one of them is none.
    """
    known = {kind.value: kind for kind in RepairKind}
    for word in words:
        if word not in known:
            raise InvalidInputError(f"repair what? {word!r} is none of {', '.join(known)}")
    return frozenset(known[word] for word in words)


def repair_url(
    url: str | os.PathLike[str], request: RepairRequest, *, index_url: str | None = None, progress: Progress = SILENT
) -> RepairReport:
    """Repair the repository at `url`, also one that is too damaged to be opened.

    Raises:
        NoRepositoryError, PermissionDeniedError, ConflictError: see the parts.
    """
    return repair_store(open_store(url), request, index_url=index_url, progress=progress)


def repair_store(
    store: Store, request: RepairRequest, *, index_url: str | None = None, progress: Progress = SILENT
) -> RepairReport:
    """The same on an open store; nobody else in this process may have its index open if that is damaged."""
    if store.abilities.read_only and not request.dry_run:
        raise PermissionDeniedError(f"{store.url} cannot be written: repair where it can")
    log = RepairLog(request.dry_run)
    if RepairKind.CONFIG in request.kinds:
        repair_config(store, request.sources, index_url, log)
    with ExitStack() as stack:
        index = open_index(store, index_url, Findings(store))
        if index is not None:
            stack.callback(index.close)
        sources = [open_source(url) for url in request.sources]
        for source in sources:
            stack.callback(source.close)
        _repair(store, index, request, sources, log, progress)
    if RepairKind.INDEX in request.kinds:
        _repair_index(store, request, index_url, log, progress)
    return log.report()


def _repair(
    store: Store, index: Index | None, request: RepairRequest, sources: Sequence[RepositoryHandle], log: RepairLog,
    progress: Progress,
) -> None:  # fmt: skip
    if RepairKind.STATE in request.kinds:
        repair_state(store, _generation(index), log)
    if RepairKind.RECORDS in request.kinds:
        repair_records(store, sources, log)
    if request.kinds & {RepairKind.PACKS, RepairKind.CHUNKS}:
        records = check_records(store, Findings(store))
        if records.config is None:
            raise CorruptionError('the config is damaged: repair it first, with repo.repair("config", sources=[OTHER])')
        wanted = DataRepair(request.kinds, sources, request.read_data)
        repair_data(store, index, records.config, records, wanted, log, progress=progress)
    if RepairKind.REFS in request.kinds:
        with ExitStack() as stack:
            if index is None:
                index = stack.enter_context(_index_in_memory(store, progress))
            repair_refs(RepositoryHandle(store, read_config(store), index), sources, request.refs, log)


def _generation(index: Index | None) -> int:
    try:
        return 0 if index is None else index.generation
    except CkptError:
        return 0


def _index_in_memory(store: Store, progress: Progress) -> Index:
    index = Index.open(IN_MEMORY, store_id=read_config(store).store_id)
    add_all_packs(store, index, progress=progress)
    return index


def _repair_index(
    store: Store, request: RepairRequest, index_url: str | None, log: RepairLog, progress: Progress
) -> None:
    if not request.dry_run:
        report = rebuild_index(store.url, index_url=index_url, progress=progress)
        for pack, why in report.damaged:
            log.leave(RepairKind.INDEX, pack, f"it is left out: {why}; repair packs")
    log.did(RepairKind.INDEX, store.url, "the index is made anew from the packs")


def repair_open(handle: RepositoryHandle, request: RepairRequest, *, progress: Progress = SILENT) -> RepairReport:
    """Repair an open repository; its index is filled anew in place."""
    handle.require_writable()
    log = RepairLog(request.dry_run)
    with ExitStack() as stack:
        if RepairKind.CONFIG in request.kinds:
            repair_config(handle.store, request.sources, None, log)
        sources = [open_source(url) for url in request.sources]
        for source in sources:
            stack.callback(source.close)
        _repair(handle.store, handle.index, request, sources, log, progress)
        if RepairKind.INDEX in request.kinds:
            if not request.dry_run:
                refill_index(handle, progress=progress)
            log.did(RepairKind.INDEX, handle.index.place, "the index is made anew from the packs")
    handle.forget_chunks()
    return log.report()
