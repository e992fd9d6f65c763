"""Checking and repair of a repository, without torch.

Invariant: nothing is decided here; a method hands its arguments to a function of ops/, which it
imports when it is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cas_ckpt.arguments import reads_arguments
from cas_ckpt.progress import Progress, shown
from cas_ckpt.repository import RepositoryHandle

if TYPE_CHECKING:
    from cas_ckpt.ops.fsck_report import FsckReport
    from cas_ckpt.ops.repair_report import RepairReport


@reads_arguments
class Checking:
    """The part of `Repository` that looks for damage and repairs it; see there."""

    _handle: RepositoryHandle

    def fsck(
        self,
        *,
        read_data: bool = False,
        subset: str | None = None,
        max_duration_s: float | None = None,
        max_age_s: float | None = None,
        num_threads: int | None = None,
        progress: Progress | bool = False,
    ) -> FsckReport:
        """Look for damage; each problem names the commits, refs and keys that it hits, and the command that repairs it.

        Args:
            read_data: Read and verify every byte, not only the structure.
            subset: Only this part of the data: "5%", "2/7" or "10G" (implies `read_data`).
            max_duration_s: Begin no pack after so many seconds.
            max_age_s: Pass over packs that were read, and found intact, since then.
        """
        from cas_ckpt.ops.fsck import FsckOptions, check_open
        from cas_ckpt.ops.fsck_data import DataOptions, parse_subset

        wanted = read_data or subset is not None
        part = None if subset is None else parse_subset(subset)
        data = DataOptions(part, max_duration_s, max_age_s, num_threads) if wanted else None
        return check_open(self._handle, FsckOptions(data), progress=shown(progress))

    def repair(
        self,
        *what: str,
        sources: Sequence[str] = (),
        refs: Mapping[str, str] | None = None,
        read_data: bool = False,
        dry_run: bool = False,
        progress: Progress | bool = False,
    ) -> RepairReport:
        """Repair what `fsck` found; everything is written and verified before anything is moved aside.

        Args:
            what: "packs", "chunks", "refs", "records", "index"; "config" and "state" (see docs/fsck.md first).
            sources: Paths or URLs of other repositories: what is lost here is taken from there, by id.
            refs: Ref ("main", "refs/tags/v1") -> revision that it is to name, where nothing else tells.
            read_data: Read all data, not only packs that the last reading found damaged.
            dry_run: Say what would be done.
        Raises:
            ConflictError: a garbage collection is at work.
        """
        from cas_ckpt.ops.repair import RepairRequest, parse_kinds, repair_open

        request = RepairRequest(parse_kinds(what), tuple(sources), dict(refs or {}), read_data, dry_run)
        return repair_open(self._handle, request, progress=shown(progress))
