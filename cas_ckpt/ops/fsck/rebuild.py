"""rebuild: a new index from the packs.

    1. the config gives the store's id; without it there is no repository
    2. a new index is made beside the old one: every pack's directory is read, and the nodes of meta packs
    3. it catches up with what came or went meanwhile, and takes the place of the old one, in one step
Invariant: nothing in the store is touched, and at any moment others see the old index or the new one. Dying in the
middle leaves the old one. What the old one remembers and packs do not say (refs, scrubs, plans) is kept.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cas_ckpt.core.config import read_config
from cas_ckpt.core.handle import RepositoryHandle, usual_index_place
from cas_ckpt.core.packs import data_first, is_meta, pack_batches, read_in_parts, read_pack, record_batches, small_pack
from cas_ckpt.core.records import PART_BYTES
from cas_ckpt.core.shared_index import note_folder
from cas_ckpt.errors import CorruptionError, NotFoundError, UnsupportedVersionError
from cas_ckpt.index import usage
from cas_ckpt.index.database import IN_MEMORY
from cas_ckpt.index.index import Index
from cas_ckpt.index.replacing import CatchUp, Change, beside, index_beside, replace_file, replace_rows
from cas_ckpt.index.rows import IndexStats, PackRecord
from cas_ckpt.objects.pack import PACK_PREFIX
from cas_ckpt.progress import SILENT, Progress, phase
from cas_ckpt.storage.store import Store
from cas_ckpt.storage.url import open_store
from cas_ckpt.transfer.workers import map_all


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """Result of a rebuild.

    Attributes:
        stats: The new index in numbers.
        damaged: (pack, what is wrong) of packs that could not be read; objects that only
            these hold are missing.
    """

    stats: IndexStats
    damaged: tuple[tuple[str, str], ...]


def rebuild_index(
    url: str | os.PathLike[str], *, index_url: str | None = None, progress: Progress = SILENT
) -> RebuildReport:
    """Make the index of the repository at `url` anew, whatever state it is in. Works without an open handle.

    Raises:
        NoRepositoryError, UnsupportedVersionError: nothing was touched.
        PermissionDeniedError, StorageError: the medium refused.
        ConflictError: the index is damaged and another process has it open, or what is there is not an index of ours.
    """
    store = open_store(url)
    store_id = read_config(store).store_id
    place = index_url or usual_index_place(store, store_id)
    report = rebuild_at(store, store_id, place, progress=progress)
    if "://" in place:
        with Index.open(place, store_id=store_id) as index:
            note_folder(index, store, take=True)
    return report


def rebuild_at(store: Store, store_id: str, place: str, *, progress: Progress = SILENT) -> RebuildReport:
    """The same for an open store, and the index at `place`."""
    with index_beside(place, store_id=store_id) as made:
        damaged = add_all_packs(store, made, progress=progress)
        catch_up = _catching_up(store, damaged)
        try:
            return RebuildReport(_replace(place, made, catch_up), tuple(damaged))
        except (CorruptionError, UnsupportedVersionError) as error:
            unusable = error
        if "://" not in place and place != IN_MEMORY:
            own = place == usual_index_place(store, store_id, read_only=True)
            replace_file(Path(place), made, catch_up, only_sqlite=not own)
        elif isinstance(unusable, CorruptionError):
            Index.discard(place, store_id=store_id)  # of a shared database: our own tables alone
            _replace(place, made, catch_up)
        else:
            raise unusable
    with Index.open(place, store_id=store_id) as index:
        return RebuildReport(index.read(usage.read_stats), tuple(damaged))


def _replace(place: str, made: Index, catch_up: CatchUp) -> IndexStats:
    with Index.open(place, store_id=made.store_id) as index:
        if not index.matches:
            raise CorruptionError(f"index {index.place}: it is the index of another repository")
        replace_rows(index, made, catch_up)
        return index.read(usage.read_stats)


def refill_index(handle: RepositoryHandle, *, progress: Progress = SILENT) -> RebuildReport:
    """The same for the index of an open repository, which this and other processes may go on using meanwhile.

    Raises:
        PermissionDeniedError: the repository was opened read-only, or its index cannot be written.
        CorruptionError: it is damaged: close the repository, then `rebuild_index` replaces the file.
    """
    handle.require_writable()
    if handle.index.in_memory and handle.index_place not in (None, IN_MEMORY):  # it is a stand-in in memory
        report = rebuild_at(handle.store, handle.config.store_id, str(handle.index_place), progress=progress)
        handle.index = Index.open(str(handle.index_place), store_id=handle.config.store_id)
        handle.forget_chunks()
        return report
    with beside(handle.index) as made:
        damaged = add_all_packs(handle.store, made, progress=progress)
        replace_rows(handle.index, made, _catching_up(handle.store, damaged))
    handle.forget_chunks()
    return RebuildReport(handle.index.read(usage.read_stats), tuple(damaged))


def _catching_up(store: Store, damaged: list[tuple[str, str]]) -> CatchUp:
    """Packs that were added or deleted since an index was filled; damaged packs are added to `damaged`."""

    def look(known: Mapping[str, int]) -> Change:
        stored = dict(store.list(PACK_PREFIX))
        passed_over = {key for key, _ in damaged}
        new = [(key, size) for key, size in stored.items() if known.get(key) != size and key not in passed_over]
        gone = [key for key, size in known.items() if stored.get(key) != size]
        return Change(list(_readable(store, new, damaged)), gone)

    return look


def add_all_packs(store: Store, index: Index, *, progress: Progress = SILENT) -> list[tuple[str, str]]:
    """Add every pack of `store` to `index`; the damaged ones and what is wrong with each."""
    packs = list(store.list(PACK_PREFIX))
    damaged: list[tuple[str, str]] = []
    with phase(progress, "indexing", sum(size for _, size in packs)):
        for batch in record_batches(_readable(store, data_first(packs), damaged)):
            index.add_packs(batch)
            progress.advance(sum(record.size_bytes for record in batch))
    return damaged


def _readable(store: Store, packs: Sequence[tuple[str, int]], damaged: list[tuple[str, str]]) -> Iterator[PackRecord]:
    """Records of the packs, in order, read from the packs alone."""
    at_once = store.abilities.parallel
    for batch in pack_batches(packs) if at_once > 1 else ([each] for each in packs):
        found = map_all(partial(_read_one, store), batch, num_threads=at_once)
        for (key, _), record in zip(batch, found, strict=True):
            if isinstance(record, PackRecord):
                yield record
            elif isinstance(record, CorruptionError):
                damaged.append((key, str(record)))


def _read_one(store: Store, listed: tuple[str, int]) -> PackRecord | NotFoundError | CorruptionError:
    """The rows of a pack, or why there are none; one that is not found was collected since the listing."""
    try:
        key, size = listed
        if is_meta(key) and size > PART_BYTES:
            return read_in_parts(store, key)
        return read_pack(small_pack(store, key, size), key)
    except (NotFoundError, CorruptionError) as error:
        return error
