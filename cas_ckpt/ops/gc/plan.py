"""Options, plan and report of a garbage collection. Pure.

    dead      nothing in it is needed: deleted
    sparse    so much of it is waste that what is needed is copied elsewhere first
    small     one of many little packs: copied together into few
    young     may belong to a commit that is being made right now: spared

Invariant: a plan is economy alone. What is safe to delete is decided by the protocol (gc.py),
which checks every pack of the plan again after the fence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cas_ckpt.arguments import check_real, check_whole
from cas_ckpt.core.records import Brief
from cas_ckpt.core.units import PackShard
from cas_ckpt.index.garbage import PackLiveness
from cas_ckpt.objects.pack import PackKind
from cas_ckpt.storage.store import Leftovers

SMALL_SHARE = 8
"""A data pack under an eighth of the size at which packs are closed is small."""

MAX_SKEW_US = 24 * 3_600_000_000
"""A pack that was first seen further than this in the future was seen by a clock that means nothing."""

MANY_SMALL = 64
"""So many small packs of a kind are merged, where that costs no requests: on a local disk."""

SMALL_META_BYTES = 4 * 1024 * 1024
"""A meta pack under this is small; one commit writes one."""


@dataclass(frozen=True, slots=True)
class GcOptions:
    """Options of a collection.

    Attributes:
        min_age_s: Packs that no published commit ever used are spared while the index has known
            them for less than this: a commit that needs them may be about to be published. 0: none are.
        reflog_expire_s: Old targets in the logs of refs keep their commits for so long.
        max_unused: Share of all stored bytes that may stay wasted in packs that hold needed bytes too.
        max_repack_bytes: At most so many bytes are copied out of sparse and small packs; None: no limit.
        many_small: Small packs of one kind are merged when there are so many of them; 0: never; None: `MANY_SMALL` on
            a local disk, never in a bucket, where each request has its price (docs/decisions/016).
        shard: Only these packs go or are copied; others do the rest, at the same time if they like.
        whole_chunks: Also rewrite packs that hold parts of chunks, so that each chunk is in one extent.
    """

    min_age_s: float = 3600.0
    reflog_expire_s: float = 30 * 86400.0
    max_unused: float = 0.05
    max_repack_bytes: int | None = None
    many_small: int | None = None
    whole_chunks: bool = False
    shard: PackShard | None = None

    def __post_init__(self) -> None:
        for name in ("min_age_s", "reflog_expire_s", "max_unused"):
            check_real(name, getattr(self, name))
        if self.max_repack_bytes is not None:
            check_whole("max_repack_bytes", self.max_repack_bytes)


REPACK = GcOptions(max_unused=0.0, many_small=2, whole_chunks=True)
"""Leave no waste, no small packs and no chunks in parts."""


@dataclass(frozen=True, slots=True)
class PackChoice:
    """A pack that is to go: its bytes, and how many of them must be copied first."""

    name: str
    size_bytes: int
    copied_bytes: int = 0


@dataclass(frozen=True, slots=True)
class GcPlan:
    """The plan of a collection.

    Attributes:
        dead: Packs of which nothing is needed.
        copied: Packs whose needed part is copied first: sparse ones, then small ones.
        merged: Those of them that are only small.
        young: Packs that hold waste and are spared this time.
        wasted_bytes: Waste that stays, in packs that are kept.
        unmerged: Small packs of which there are many, and which stay as `merge` was not given.
    """

    dead: tuple[PackChoice, ...]
    copied: tuple[PackChoice, ...]
    merged: tuple[PackChoice, ...]
    young: tuple[PackChoice, ...]
    wasted_bytes: int
    unmerged: tuple[PackChoice, ...] = ()


def choose_packs(
    found: Sequence[PackLiveness],
    sizes: Mapping[str, int],
    *,
    options: GcOptions,
    now_us: int,
    writers_at_work: bool,
    pack_bytes: int,
    in_parts: Collection[str] = (),
    local: bool = True,
) -> GcPlan:
    """The packs that a collection should take.

    Args:
        found: Packs that hold dead or duplicate extents.
        sizes: Every pack of the store -> its size.
        writers_at_work: Some session is alive: unpublished packs are spared whatever their age.
        pack_bytes: Size at which data packs are closed.
        in_parts: Packs that hold parts of chunks and are to be rewritten for that.
        local: The store is a local disk.
    """
    if options.shard is not None:
        sizes = {name: sizes[name] for name in options.shard.of(sizes)}
    known = [pack for pack in found if pack.name in sizes]
    young = {pack.name for pack in known if _is_young(pack, options, now_us, writers_at_work)}
    dead = [pack for pack in known if pack.dead_entries == pack.num_entries and pack.name not in young]
    taken = young | {pack.name for pack in dead}
    rest = [pack for pack in known if pack.name not in taken]
    budget = _Budget(options.max_repack_bytes)
    staying = sum(sizes.values()) - sum(pack.size_bytes for pack in dead)
    copied = _sparse(rest, staying, options.max_unused, budget)
    taken |= {pack.name for pack in copied}
    waste = {pack.name: _waste(pack) for pack in rest}
    parts = sorted(name for name in in_parts if name in sizes and name not in taken)
    copied += _affordable(parts, sizes, waste, budget)
    taken |= {pack.name for pack in copied}
    many = MANY_SMALL if options.many_small is None else options.many_small
    small: list[PackChoice] = []
    for kind, limit in ((PackKind.DATA, pack_bytes // SMALL_SHARE), (PackKind.META, SMALL_META_BYTES)):
        end = f".{kind.suffix}"
        names = sorted(name for name in sizes.keys() - taken if name.endswith(end) and sizes[name] < limit)
        if many and len(names) >= max(many, 2):
            small += _affordable(names, sizes, waste, budget)
    merged, unmerged = (small, []) if local or options.many_small is not None else ([], small)
    copied += merged
    gone = {pack.name for pack in copied}
    return GcPlan(
        dead=tuple(PackChoice(pack.name, pack.size_bytes) for pack in dead),
        copied=tuple(copied),
        merged=tuple(merged),
        young=tuple(PackChoice(pack.name, pack.size_bytes) for pack in known if pack.name in young),
        wasted_bytes=sum(_waste(pack) for pack in known if pack.name in young)
        + sum(size for name, size in waste.items() if name not in gone),
        unmerged=tuple(unmerged),
    )


def _is_young(pack: PackLiveness, options: GcOptions, now_us: int, writers_at_work: bool) -> bool:
    if not pack.unpublished:
        return False
    if writers_at_work:
        return True
    age_us = now_us - pack.first_seen_us
    return -MAX_SKEW_US < age_us < int(options.min_age_s * 1e6) and options.min_age_s > 0


def _waste(pack: PackLiveness) -> int:
    return pack.dead_bytes + pack.duplicate_bytes


class _Budget:
    """Bytes that may still be copied."""

    def __init__(self, num_bytes: int | None) -> None:
        self._left = num_bytes

    def take(self, num_bytes: int) -> bool:
        """Whether `num_bytes` more may be copied; if so they count."""
        if self._left is None:
            return True
        if num_bytes > self._left:
            return False
        self._left -= num_bytes
        return True


def _sparse(packs: Iterable[PackLiveness], total_bytes: int, max_unused: float, budget: _Budget) -> list[PackChoice]:
    """The most wasteful packs, until what stays wasted is within the limit of what stays."""
    ordered = sorted(packs, key=lambda pack: (-_waste(pack) / max(pack.size_bytes, 1), pack.name))
    wasted = sum(map(_waste, ordered))
    chosen = []
    for pack in ordered:
        if wasted <= max_unused * total_bytes:
            break
        needed = max(pack.size_bytes - _waste(pack), 0)
        if budget.take(needed):
            chosen.append(PackChoice(pack.name, pack.size_bytes, needed))
            wasted -= _waste(pack)
            total_bytes -= _waste(pack)
    return chosen


def _affordable(
    names: Iterable[str], sizes: Mapping[str, int], waste: Mapping[str, int], budget: _Budget
) -> list[PackChoice]:
    """Those of `names` whose needed part may still be copied."""
    chosen = []
    for name in names:
        needed = max(sizes[name] - waste.get(name, 0), 0)
        if budget.take(needed):
            chosen.append(PackChoice(name, sizes[name], needed))
    return chosen


@dataclass(frozen=True, slots=True, repr=False)
class GcReport(Brief):
    """Result of a collection, or of its dry run. Bytes are those of whole packs.

    Attributes:
        generation: Generation of gc/state afterwards.
        took_over: Phase in which an earlier collection was left and finished by this one, or None.
        dead_objects, dead_bytes: Chunks and nodes that nothing needs, and what they take in packs.
        deleted_packs, deleted_bytes: Packs that were deleted; what was needed of them is in new ones.
        copied_packs, copied_bytes: How many of those held something needed, and what was written for it.
        merged_packs, merged_bytes: Of those that held something needed, the packs that were only small, and merged.
        rewritten_packs, rewritten_bytes: The others, which held waste.
        unmerged_packs, unmerged_bytes: Small packs that stay, in a bucket, as `merge` was not given.
        rescued_packs: Condemned packs that were needed after all.
        young_packs: Packs that were spared because a commit that needs them may be about to be published.
        wasted_bytes: Bytes that nothing needs and that stay for now.
        damaged: (pack, what is wrong): could not be copied, so it stays: cas-ckpt fsck says more.
        temporaries, temporary_bytes: Unfinished files that writers left when they died, and that were removed.
        full: There was no space for copies; only packs without anything needed were deleted.
        denied: Why packs could not be deleted, as in a bucket that only takes new objects; "": nothing was denied.
        not_at_tiers: (commit, why): was forgotten, and keeps its data here, as a tier that is to have it lacks it.
        denied_packs, denied_bytes: Those that are still there for it. Nothing relies on them any more; a later
            collection deletes them once it may.
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
    merged_packs: int = 0
    merged_bytes: int = 0
    rewritten_packs: int = 0
    rewritten_bytes: int = 0
    unmerged_packs: int = 0
    unmerged_bytes: int = 0
    rescued_packs: int = 0
    young_packs: int = 0
    wasted_bytes: int = 0
    temporaries: int = 0
    temporary_bytes: int = 0
    damaged: tuple[tuple[str, str], ...] = ()
    full: bool = False
    denied: str = ""
    denied_packs: int = 0
    denied_bytes: int = 0
    not_at_tiers: tuple[tuple[str, str], ...] = ()


def foreseen(report: GcReport, plan: GcPlan, leftovers: Leftovers) -> GcReport:
    """The report of a collection that would carry out `plan` and remove `leftovers`."""
    return replace(
        rewritten(report, plan, {pack.name for pack in plan.copied}),
        deleted_packs=len(plan.dead) + len(plan.copied),
        deleted_bytes=sum(pack.size_bytes for pack in (*plan.dead, *plan.copied)),
        copied_packs=len(plan.copied),
        copied_bytes=sum(pack.copied_bytes for pack in plan.copied),
        temporaries=leftovers.num_files,
        temporary_bytes=leftovers.num_bytes,
    )


def rewritten(report: GcReport, plan: GcPlan, deleted: Collection[str]) -> GcReport:
    """The report, with what packs that are deleted take of those whose needed part was copied first."""
    merged = {pack.name: pack.size_bytes for pack in plan.merged if pack.name in deleted}
    others = [pack.size_bytes for pack in plan.copied if pack.name in deleted and pack.name not in merged]
    return replace(
        report, merged_packs=len(merged), merged_bytes=sum(merged.values()),
        rewritten_packs=len(others), rewritten_bytes=sum(others),
    )  # fmt: skip
