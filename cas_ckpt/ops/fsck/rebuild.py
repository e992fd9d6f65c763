"""rebuild: a new index from the packs.

    1. the config gives the store's id; without it there is no repository
    2. a new index is made beside the old one: every pack's directory is read, and the nodes of meta packs
    3. it catches up with what came or went meanwhile, and takes the place of the old one, in one step
Invariant: nothing in the store is touched, and at any moment others see the old index or the new one. Dying in the
middle leaves the old one. What the old one remembers and packs do not say (refs, scrubs, plans) is kept.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cas_ckpt.core.config import read_config
from cas_ckpt.core.handle import RepositoryHandle, usual_index_place
from cas_ckpt.core.refill import add_all_packs, catching_up, refill
from cas_ckpt.core.shared_index import note_folder
from cas_ckpt.errors import CorruptionError, UnsupportedVersionError
from cas_ckpt.index import usage
from cas_ckpt.index.database import IN_MEMORY
from cas_ckpt.index.index import Index
from cas_ckpt.index.replacing import CatchUp, index_beside, replace_file, replace_rows
from cas_ckpt.index.rows import IndexStats
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.storage.store import Store
from cas_ckpt.storage.url import open_store


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
        catch_up = catching_up(store, damaged)
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
    damaged = refill(handle.store, handle.index, progress=progress)
    handle.forget_chunks()
    return RebuildReport(handle.index.read(usage.read_stats), tuple(damaged))
