"""Rows of manifests for packs that an older version took into the index: read from the packs, some at a time.

    1. the migration of the index notes which packs have nodes without such rows (`t_pending`)
    2. questions about manifests call `complete_index` first; where nothing is pending that is one look
    3. packs are read in batches, and the rows of a batch come in one transaction with the note that they are there

Invariant: interrupted anywhere, what is done stays done and the next call goes on; two processes that do it at once do
some work twice and nothing wrong. A pack that is damaged, or gone, is left to `sync` and fsck, and stays noted.
"""

from __future__ import annotations

import logging
from functools import partial

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.packs import pack_batches, read_pack
from cas_ckpt.errors import CorruptionError, NotFoundError
from cas_ckpt.index import pending
from cas_ckpt.index.rows import PackRecord
from cas_ckpt.progress import Progress, phase
from cas_ckpt.transfer.workers import map_all

_LOGGER = logging.getLogger("cas_ckpt")


def complete_index(handle: RepositoryHandle, *, progress: Progress | None = None) -> None:
    """See to it that the index has the rows of all nodes in packs that it knows.

    Cost: one look; the first time after an upgrade, reading of all nodes.

    Args:
        progress: Gets bytes of packs; None: that of the handle.
    Raises:
        PermissionDeniedError, StorageError: the index cannot be written. UnsupportedVersionError: a later version wrote
            a node.
    """
    if not handle.index.read(pending.is_pending):
        return
    if handle.index.read_only:
        handle.detach_index()
    packs = handle.index.read(pending.pending_packs)
    _LOGGER.info("index %s: an older version made it; what %d packs say is added", handle.index.place, len(packs))
    with phase(progress or handle.progress, "upgrading the index", sum(packs.values())):
        for batch in pack_batches(packs.items()):
            read = map_all(partial(_read, handle), [key for key, _ in batch], num_threads=handle.num_requests)
            records = [record for record in read if record is not None]
            handle.index.write(pending.complete, records)
            (progress or handle.progress).advance(sum(size for _, size in batch))


def _read(handle: RepositoryHandle, key: str) -> PackRecord | None:
    if key in handle.damaged:
        return None
    try:
        return read_pack(handle.store, key)
    except NotFoundError:
        return None  # collected: the next `sync` forgets it
    except CorruptionError as error:
        _LOGGER.warning("%s: what its nodes say is not in the index: %s", key, error)
        handle.damaged[key] = str(error)
        return None
