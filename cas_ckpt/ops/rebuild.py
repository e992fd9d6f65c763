"""rebuild: a new index from the packs alone.

    1. the config tells the store's id; without it there is no repository
    2. the old index is removed, in whatever state it is; one that another process has open is
       emptied in place instead, for its files cannot be taken away from under it
    3. every pack's directory is read, and the nodes of meta packs, and added
Invariant: nothing in the store is touched. Dying in the middle leaves a valid index that
knows fewer packs; the next command that misses one adds the rest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cas_ckpt.config import read_config
from cas_ckpt.errors import ConflictError, CorruptionError, NotFoundError
from cas_ckpt.index.catalog import Index
from cas_ckpt.index.rows import IndexStats, PackRecord
from cas_ckpt.objects.pack import PACK_PREFIX
from cas_ckpt.pack_index import read_pack
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.repository import RepositoryHandle, index_place
from cas_ckpt.storage.store import Store
from cas_ckpt.storage.url import open_store

PACKS_PER_TRANSACTION = 64


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """What a rebuild found.

    Attributes:
        stats: The new index in numbers.
        damaged: (pack, what is wrong) of packs that could not be read; the objects that stand
            in them alone are missing.
    """

    stats: IndexStats
    damaged: tuple[tuple[str, str], ...]


def rebuild_index(
    url: str | os.PathLike[str], *, index_url: str | None = None, progress: Progress = SILENT
) -> RebuildReport:
    """Drop the index of the repository at `url` and make it anew. Works without an open handle.

    Raises:
        NoRepositoryError, UnsupportedVersionError: nothing was touched.
        PermissionDeniedError, StorageError: the medium refused.
        ConflictError: the index is damaged and another process has it open.
    """
    store = open_store(url)
    config = read_config(store)
    place = index_url or index_place(store)
    with _empty_index(place, config.store_id) as index:
        damaged = add_all_packs(store, index, progress=progress)
        return RebuildReport(index.stats(), tuple(damaged))


def _empty_index(place: str | Path, store_id: str) -> Index:
    try:
        Index.discard(place)
        return Index.open(place, store_id=store_id)
    except ConflictError as held:
        try:
            index = Index.open(place, store_id=store_id)
        except CorruptionError:
            raise held from None
    index.reset(store_id)
    return index


def refill_index(handle: RepositoryHandle, *, progress: Progress = SILENT) -> RebuildReport:
    """The same for the index of an open repository, in place: other holders of it see it empty, then filled."""
    handle.index.reset(handle.config.store_id)
    handle.forget_chunks()
    damaged = add_all_packs(handle.store, handle.index, progress=progress)
    return RebuildReport(handle.index.stats(), tuple(damaged))


def add_all_packs(store: Store, index: Index, *, progress: Progress = SILENT) -> list[tuple[str, str]]:
    """Add every pack of `store` to `index`; the damaged ones and what is wrong with each."""
    packs = list(store.list(PACK_PREFIX))
    damaged: list[tuple[str, str]] = []
    progress.start("indexing", sum(size for _, size in packs))
    try:
        for batch in _batches(packs, PACKS_PER_TRANSACTION):
            index.add_packs(list(_readable(store, batch, damaged)))
            progress.advance(sum(size for _, size in batch))
    finally:
        progress.finish()
    return damaged


def _readable(
    store: Store, packs: Sequence[tuple[str, int]], damaged: list[tuple[str, str]]
) -> Iterator[PackRecord]:
    for key, _ in packs:
        try:
            yield read_pack(store, key)
        except NotFoundError:
            continue  # collected since the listing
        except CorruptionError as error:
            damaged.append((key, str(error)))


def _batches(packs: Sequence[tuple[str, int]], size: int) -> Iterator[Sequence[tuple[str, int]]]:
    for start in range(0, len(packs), size):
        yield packs[start : start + size]
