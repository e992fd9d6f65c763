"""repair: makes whole what fsck found, as far as intact copies reach.

    1. config, gc state, records     (repair_records.py)     without these nothing can be opened
    2. packs, chunks                 (repair_data.py)
    3. refs                          (repair_refs.py)        their targets must be whole by now
    4. index                         (rebuild.py)

Invariant: everything is additive until it is verified, nothing intact is ever removed, and whatever dies
on the way leaves a repository that is no worse and can be repaired again. Works on one that cannot be opened.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from cas_ckpt.config import read_config
from cas_ckpt.errors import CkptError, CorruptionError, InvalidInputError, PermissionDeniedError
from cas_ckpt.index.catalog import Index
from cas_ckpt.index.database import IN_MEMORY
from cas_ckpt.ops.fsck import open_index
from cas_ckpt.ops.fsck_records import check_records
from cas_ckpt.ops.fsck_report import Findings, RepairKind
from cas_ckpt.ops.rebuild import add_all_packs, rebuild_index, refill_index
from cas_ckpt.ops.repair_data import DataRepair, repair_data
from cas_ckpt.ops.repair_objects import open_source
from cas_ckpt.ops.repair_records import repair_config, repair_records, repair_state
from cas_ckpt.ops.repair_refs import repair_refs
from cas_ckpt.ops.repair_report import RepairLog, RepairReport
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.repository import RepositoryHandle
from cas_ckpt.storage.store import Store
from cas_ckpt.storage.url import open_store


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
    url: str | os.PathLike[str],
    request: RepairRequest,
    *,
    index_url: str | None = None,
    progress: Progress = SILENT,
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
