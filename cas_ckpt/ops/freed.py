"""freed: how many stored bytes nothing would need any more if some commits were forgotten.

Invariant: only asked, never changed. It is the difference of what is dead afterwards and what is
dead already, as garbage collection would see both; the size of packs does not enter.
"""

from __future__ import annotations

from collections.abc import Collection

from cas_ckpt import clock
from cas_ckpt.forgotten import read_forgotten
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.gc_plan import GcOptions
from cas_ckpt.ops.live import LiveSets, live_sets
from cas_ckpt.repository import RepositoryHandle


def stored_bytes_freed(handle: RepositoryHandle, commits: Collection[Digest]) -> int:
    """Bytes, encoded as they lie in packs, that die with these commits.

    Raises:
        CorruptionError: a ref leads to a commit that is in no intact pack.
    """
    if not commits:
        return 0
    expire_s = clock.now_s() - GcOptions().reflog_expire_s
    forgotten = read_forgotten(handle.store)
    now, then = (
        live_sets(handle, forgotten=gone, expire_before_us=int(expire_s * 1e6))
        for gone in (forgotten, forgotten.union(commits))
    )
    return _dead_bytes(handle, then) - _dead_bytes(handle, now)


def _dead_bytes(handle: RepositoryHandle, live: LiveSets) -> int:
    with handle.index.liveness(commits=live.commits, roots=live.roots, published=live.published) as living:
        return living.summary().stored_bytes
