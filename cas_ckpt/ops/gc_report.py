"""What a garbage collection tells: what it did, or would do."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from cas_ckpt.ops.gc_plan import GcPlan
from cas_ckpt.ops.records import Brief
from cas_ckpt.ops.repack import Copies
from cas_ckpt.storage.store import Leftovers


@dataclass(frozen=True, slots=True, repr=False)
class GcReport(Brief):
    """What a collection did, or (`dry_run`) would do. Bytes are those of whole packs.

    Attributes:
        generation: Generation of gc/state afterwards.
        took_over: Phase in which an earlier collection was left and finished by this one, or None.
        dead_objects, dead_bytes: Chunks and nodes that nothing needs, and what they take in packs.
        deleted_packs, deleted_bytes: Packs that were deleted.
        copied_packs, copied_bytes: How many of those held something needed, and what was written for it.
        rescued_packs: Condemned packs that were needed after all.
        young_packs: Packs that were spared because somebody may be about to publish what needs them.
        wasted_bytes: Bytes that nothing needs and that stay for now.
        damaged: (pack, what is wrong): could not be copied, so it stays: cas-ckpt fsck tells more.
        temporaries, temporary_bytes: Unfinished files that writers left when they died, and that were removed.
        full: There was no space for copies; only packs without anything needed were deleted.
    """

    generation: int
    dry_run: bool = False
    took_over: str | None = None
    dead_objects: int = 0
    dead_bytes: int = 0
    deleted_packs: int = 0
    deleted_bytes: int = 0
    copied_packs: int = 0
    copied_bytes: int = 0
    rescued_packs: int = 0
    young_packs: int = 0
    wasted_bytes: int = 0
    temporaries: int = 0
    temporary_bytes: int = 0
    damaged: tuple[tuple[str, str], ...] = ()
    full: bool = False


def foreseen(report: GcReport, plan: GcPlan) -> GcReport:
    """The report of a collection that would carry out `plan`."""
    return replace(
        report,
        deleted_packs=len(plan.dead) + len(plan.copied),
        deleted_bytes=sum(pack.size_bytes for pack in (*plan.dead, *plan.copied)),
        copied_packs=len(plan.copied),
        copied_bytes=sum(pack.copied_bytes for pack in plan.copied),
    )


@dataclass(slots=True)
class Tally:
    """What happened so far."""

    took_over: str | None = None
    deleted_packs: int = 0
    deleted_bytes: int = 0
    rescued_packs: int = 0
    copies: Copies = field(default_factory=Copies)
    leftovers: Leftovers = field(default_factory=Leftovers)
    full: bool = False

    def told(self, report: GcReport, generation: int) -> GcReport:
        """`report`, with all of it."""
        return replace(
            with_leftovers(report, self.leftovers),
            generation=generation,
            deleted_packs=self.deleted_packs,
            deleted_bytes=self.deleted_bytes,
            copied_packs=len(self.copies.packs),
            copied_bytes=self.copies.num_bytes,
            rescued_packs=self.rescued_packs,
            damaged=tuple(sorted(self.copies.damaged.items())),
            full=self.full,
        )


def with_leftovers(report: GcReport, found: Leftovers) -> GcReport:
    """`report`, with what killed commits left in tmp/."""
    return replace(report, temporaries=found.num_files, temporary_bytes=found.num_bytes)
