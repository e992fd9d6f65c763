"""freed: how many stored bytes nothing would need any more if some commits were forgotten.

Invariant: only asked, never changed. It is the difference of what is dead afterwards and what is
dead already, as garbage collection would see both; the size of packs does not enter.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cas_ckpt import clock
from cas_ckpt.forgotten import read_forgotten
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.gc_plan import GcOptions
from cas_ckpt.ops.live import live_sets
from cas_ckpt.refs import Ref
from cas_ckpt.repository import RepositoryHandle


def stored_bytes_freed(
    handle: RepositoryHandle, commits: Collection[Digest], *, refs: Sequence[Ref] | None = None
) -> int:
    """Bytes, encoded as they lie in packs, that die with these commits.

    Args:
        refs: As they were read, placeholders and deleted ones too; None: read them now.

    Raises:
        CorruptionError: a ref leads to a commit that is in no intact pack.
    """
    if not commits:
        return 0
    expire_s = clock.now_s() - GcOptions().reflog_expire_s
    forgotten = read_forgotten(handle.store)
    refs = list(handle.refs.every()) if refs is None else refs
    now, then = (
        live_sets(handle, refs=refs, forgotten=gone, expire_before_us=int(expire_s * 1e6))
        for gone in (forgotten, forgotten.union(commits))
    )
    return handle.index.freed((now.commits, now.roots), (then.commits, then.roots)).stored_bytes
