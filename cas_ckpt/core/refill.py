"""All rows of an index made anew from the packs: by a rebuild, and for an index that an older version made.

    1. an index beside is filled: every pack's directory is read, and the nodes of meta packs
    2. it catches up with what came or went meanwhile, and its rows take the place of the others, in one step

Invariant: nothing in the store is touched, and at any moment others see the rows of before or those of after.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from cas_ckpt.core.packs import data_first, is_meta, pack_batches, read_in_parts, read_pack, record_batches, small_pack
from cas_ckpt.core.records import PART_BYTES
from cas_ckpt.errors import CorruptionError, NotFoundError
from cas_ckpt.index import meta
from cas_ckpt.index.database import IN_MEMORY
from cas_ckpt.index.index import Index
from cas_ckpt.index.replacing import CatchUp, Change, beside, may_replace, replace_rows
from cas_ckpt.index.rows import PackRecord
from cas_ckpt.objects.pack import PACK_PREFIX
from cas_ckpt.parallel.workers import map_all
from cas_ckpt.progress import SILENT, Progress, phase
from cas_ckpt.storage.store import Store

_LOGGER = logging.getLogger("cas_ckpt")


def filled(store: Store, index: Index, *, progress: Progress = SILENT) -> tuple[Index, list[tuple[str, str]]]:
    """An index that is behind, once it is filled; and damaged packs, which the log names.

    Where it may not be filled, it is closed, and one in memory takes its place.
    """
    index.is_behind = index.read(meta.read_meta, meta.BEHIND) is not None  # others fill it, too
    if not index.is_behind:
        return index, []
    _LOGGER.info("index %s: an older version made it; it is filled anew", index.place)
    if not may_replace(index):
        with index as before:
            if before.is_shared:
                _LOGGER.warning("%s; until then, all packs are read here", wants_maintainer(before))
            index = Index.open(IN_MEMORY, store_id=before.store_id) if before.is_shared else before.detached()
    damaged = refill(store, index, progress=progress)
    for key, why in damaged:
        _LOGGER.warning("%s is left out, and fsck says what that takes away: %s", key, why)
    return index, damaged


def wants_maintainer(index: Index) -> str:
    """That somebody else has to fill this index."""
    return f"index {index.place}: an older version made it, and the maintainer has to open the repository to fill it"


def refill(store: Store, index: Index, *, progress: Progress = SILENT) -> list[tuple[str, str]]:
    """Make the rows of `index` anew, which any number of processes may be using; returns damaged packs, and why.

    Raises:
        PermissionDeniedError: the index cannot be written. CorruptionError: it is damaged.
    """
    with beside(index) as made:
        damaged = add_all_packs(store, made, progress=progress)
        replace_rows(index, made, catching_up(store, damaged))
    index.is_behind = False
    return damaged


def catching_up(store: Store, damaged: list[tuple[str, str]]) -> CatchUp:
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
