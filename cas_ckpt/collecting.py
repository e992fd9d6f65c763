"""What gives space back: garbage collection and repacking.

Invariant: as in browsing.py, nothing is decided here; imports are made when a method is called.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cas_ckpt.arguments import reads_arguments
from cas_ckpt.progress import Progress, shown
from cas_ckpt.repository import RepositoryHandle

if TYPE_CHECKING:
    from cas_ckpt.ops.gc_report import GcReport


@reads_arguments
class Collecting:
    """The part of `Repository` that deletes what nothing needs; see there."""

    _handle: RepositoryHandle

    def gc(
        self,
        *,
        min_age_s: float = 3600.0,
        reflog_expire_s: float = 30 * 86400.0,
        max_unused: float = 0.05,
        max_repack_bytes: int | None = None,
        dry_run: bool = False,
        progress: Progress | bool = False,
    ) -> GcReport:
        """Delete what no branch, tag or pin needs. Safe beside any number of writers and readers.

        Args:
            min_age_s: Packs that no published commit used yet are spared for so long: a commit may be under way.
            reflog_expire_s: For so long a deleted or moved branch can be brought back.
            max_unused: Share of the stored bytes that may stay wasted inside packs that hold needed bytes too.
            max_repack_bytes: At most so many bytes are copied out of such packs; None: no limit.
            dry_run: Change nothing, tell what would be done.

        Several collections at once do no harm: one goes on, the others raise ConflictError. In a
        distributed job call it on one rank.

        Raises:
            CorruptionError: something that is needed is missing or damaged; nothing was deleted.
            ConflictError: another collection is at work. StorageError: the medium refused; the next
                collection goes on from there.
        """
        from cas_ckpt.ops.gc import collect_garbage
        from cas_ckpt.ops.gc_plan import GcOptions

        options = GcOptions(min_age_s, reflog_expire_s, max_unused, max_repack_bytes)
        return collect_garbage(self._handle, options, dry_run=dry_run, progress=shown(progress))

    def repack(
        self, *, max_repack_bytes: int | None = None, dry_run: bool = False, progress: Progress | bool = False
    ) -> GcReport:
        """Collect, and rewrite every pack that is small, wastes anything or holds parts of chunks.

        Arguments and errors as for `gc`.
        """
        from cas_ckpt.ops.gc import collect_garbage
        from cas_ckpt.ops.gc_plan import REPACK

        options = replace(REPACK, max_repack_bytes=max_repack_bytes)
        return collect_garbage(self._handle, options, dry_run=dry_run, progress=shown(progress))
