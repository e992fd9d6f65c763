"""fsck of one job's share: the packs of shard I of N, for I from 2 on.

    1. every pack of the share: header, trailer, directory, nodes     (structure.py)
    2. every byte of those that are chosen                            (data.py)

What a job does grows with its share alone: no ref is read, and no index is needed but for the log of readings. Shard 1
looks at the rest besides its own share: records, refs, the structure of all packs, the index, and what is in no pack.
Only a job that found damage looks at the structure of all packs too, to say whom that hits (check.py).

Invariant: together the N jobs find what one check of everything finds.
"""

from __future__ import annotations

from cas_ckpt.core.pack_shards import PackShard
from cas_ckpt.errors import CkptError
from cas_ckpt.index import integrity
from cas_ckpt.index.index import Index
from cas_ckpt.objects.pack import PACK_PREFIX, is_pack
from cas_ckpt.ops.fsck.data import DataOptions, read_data
from cas_ckpt.ops.fsck.report import Findings
from cas_ckpt.ops.fsck.structure import Structure, scan_all
from cas_ckpt.progress import Progress
from cas_ckpt.storage.store import Store, exists


def check_share(
    store: Store, index: Index | None, shard: PackShard, data: DataOptions, findings: Findings, *, progress: Progress
) -> Structure:
    """Check the packs of `shard`; what was found in them.

    Args:
        index: Has the log of readings; None: nothing is remembered.
    """
    share = Structure({key: size for key, size in store.list(PACK_PREFIX) if is_pack(key) and shard.has(key)})
    findings.count("num_packs", len(share.packs))
    scan_all(store, None, share, findings, progress)
    if index is not None:
        try:
            index.read(integrity.read_scrubs)
            share.index, share.is_own = index, True
        except CkptError as error:  # shard 1 says more of it
            findings.note(index.place, f"the log of readings cannot be used: {error}")
    read_data(store, share, share.packs, findings, data, progress=progress)
    share.drop([key for key in share.damaged if not exists(store, key)])  # collected meanwhile
    return share
