"""Where the repository stands and what it weighs; retention, garbage collection, checks and repairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cas_ckpt.arguments import Keys, RepairKind, UsageBy, check_flags, check_limit, optional_flag, texts
from cas_ckpt.events import reported
from cas_ckpt.progress import Progress, shown
from cas_ckpt.repository.opened import Opened

if TYPE_CHECKING:
    from cas_ckpt.core.revisions import Revision
    from cas_ckpt.ops.fsck.repair import RebuildReport
    from cas_ckpt.ops.fsck.report import FsckReport, RepairReport
    from cas_ckpt.ops.gc.plan import GcReport
    from cas_ckpt.ops.history.usage import CommitUsage, MonthlyCost, RepositoryStats, RepositoryStatus, UsageRow
    from cas_ckpt.ops.retention.forget import ForgetReport, Freed
    from cas_ckpt.ops.retention.policy import Policy, Retention


class UpkeepVerbs(Opened):
    """Status, sizes, retention, garbage collection, checks and repairs."""

    def status(self) -> RepositoryStatus:
        """Where the repository stands: its names, who writes to it, whether a collection is under way.

        Cheap: refs and records are read, no history is followed.
        """
        from cas_ckpt.ops.history.usage import repository_status

        return repository_status(self._handle)

    @reported
    def stats(self) -> RepositoryStats:
        """The whole repository in numbers."""
        from cas_ckpt.ops.history.usage import repository_stats

        return repository_stats(self._handle)

    @reported
    def monthly_cost(
        self,
        *,
        commits_per_day: float = 48.0,
        restores_per_day: float = 1.0,
        looks_per_day: float = 100.0,
        collections_per_day: float = 1.0,
        keep_days: float | None = None,
    ) -> MonthlyCost:
        """What 30 days of this run cost in a bucket of S3 or Cloud Storage, from its own commits: requests and bytes.

        Args:
            commits_per_day: How often there is a commit.
            restores_per_day: How often a whole state is restored.
            looks_per_day: How often somebody asks `log`, `ls` and the like.
            collections_per_day: How often there is a collection.
            keep_days: For how long commits keep their data; None: for good.
        Raises:
            NotFoundError: there is no commit yet. InvalidInputError: a number of another kind.
        """
        from cas_ckpt.ops.history.usage import MonthRates, plan_month, run_facts

        rates = MonthRates(commits_per_day, restores_per_day, looks_per_day, collections_per_day, keep_days)
        return plan_month(run_facts(self._handle), rates)

    @reported
    def commit_stats(self, ref: Revision = "HEAD") -> CommitUsage:
        """Bytes that one commit holds, added, and has for itself alone."""
        from cas_ckpt.ops.history.usage import commit_stats

        return commit_stats(self._handle, ref)

    @reported
    def du(
        self, by: UsageBy = "commit", *, ref: Revision | None = None, keys: Keys = None, limit: int | None = None,
        with_remotes: bool = False,
    ) -> list[UsageRow]:  # fmt: skip
        """Total, new, unique and shared bytes by "commit", "branch", "tensor" or "dtype" (the largest first).

        Args:
            ref: By commit: those it leads to (default: all). By tensor or dtype: the commit they are of.
            keys: By tensor or dtype: only these.
            limit: By commit: at most so many, the youngest.
            with_remotes: By branch: what a remote-tracking branch (`origin/main`) leads to is shared with it, so that
                it is not unique to a branch that was pushed.
        """
        check_flags(with_remotes=with_remotes)
        from cas_ckpt.ops.history.usage import usage_rows

        return usage_rows(
            self._handle, by, revision=ref, keys=keys, limit=check_limit(limit), with_remotes=with_remotes
        )

    @reported
    def unique(self, name: str = "HEAD", *, with_remotes: bool = False) -> Freed:
        """Bytes that only this branch, tag or pin leads to; remote-tracking branches (`origin/main`) do not count.

        Args:
            with_remotes: They count: what goes if the ref is deleted and its log has expired.
        """
        check_flags(with_remotes=with_remotes)
        from cas_ckpt.ops.retention.forget import unique_to

        return unique_to(self._handle, name, with_remotes=with_remotes)

    @reported
    def freed(self, *refs: Revision) -> Freed:
        """Bytes that forgetting these commits would free at the next collection; nothing is changed.

        Those that a branch, tag or pin names would stay: they are listed in `kept`.
        """
        from cas_ckpt.ops.retention.forget import freed_by

        return freed_by(self._handle, refs)

    @reported
    def forget(
        self,
        policy: Policy | None = None,
        *,
        revisions: Revision | Sequence[Revision] = (),
        branches: str | Sequence[str] = (),
        dry_run: bool = False,
        gc: bool = False,
        verify_tier: bool = False,
        progress: Progress | bool = False,
    ) -> ForgetReport:
        """Forget commits: what no rule of `policy` keeps, or those that `revisions` name.

        A forgotten commit stays in the log; its data is deleted by the next garbage collection,
        unless another commit has it too. Heads of branches, tags and pins are never forgotten. In a
        distributed job call it on one rank.

        Args:
            policy: E.g. `Policy(keep_last=3, keep_daily=7, keep_best="loss:3")`.
            branches: Patterns: apply the rules to these branches alone.
            dry_run: Write nothing; the report says what would be forgotten, and why the rest is kept.
            gc: Collect garbage afterwards.
            verify_tier: Read and verify all that tiers hold, before the last copy here is given up. Else they are
                asked whether they have the commits, by refs and by the sizes of packs.
            progress: Of that collection.
        Raises:
            InvalidInputError: neither rules nor revisions, both, a revision that a ref names, or one that a tier is
            to have and has not.
            ConflictError: refs were made faster than they could be looked at: try again.
        """
        check_flags(dry_run=dry_run, gc=gc, verify_tier=verify_tier)
        from cas_ckpt.core.revisions import revision_texts
        from cas_ckpt.ops.retention.forget import forget

        return forget(
            self._handle, policy, revisions=revision_texts(revisions), branches=texts("branches", branches),
            dry_run=dry_run, gc=gc, verify_tier=verify_tier, progress=shown(progress),
        )  # fmt: skip

    @reported
    def apply_policy(
        self, *, branches: str | Sequence[str] = (), dry_run: bool = False, gc: bool = False,
        verify_tier: bool = False, progress: Progress | bool = False,
    ) -> ForgetReport:  # fmt: skip
        """Forget what the policy of the repository does not keep; arguments and errors as for `forget`.

        Raises:
            InvalidInputError: the repository has no policy.
        """
        check_flags(dry_run=dry_run, gc=gc, verify_tier=verify_tier)
        from cas_ckpt.ops.retention.forget import apply_policy

        return apply_policy(
            self._handle, branches=texts("branches", branches), dry_run=dry_run, gc=gc, verify_tier=verify_tier,
            progress=shown(progress),
        )  # fmt: skip

    def policy(self) -> Retention:
        """The rules that the repository carries, for all branches and by pattern; maybe none."""
        from cas_ckpt.ops.retention.policy import read_policy

        return read_policy(self._handle.store)

    def set_policy(self, policy: Policy, *, branch: str | None = None) -> Retention:
        """Let `policy` be the rules of all branches, or of those that match the pattern `branch`; all rules.

        Raises:
            InvalidInputError: a policy without rules.
        """
        from cas_ckpt.ops.retention.policy import set_policy

        return set_policy(self._handle, policy, branch=branch)

    def clear_policy(self, *, branch: str | None = None) -> Retention:
        """Take all rules away, or those for the pattern `branch`; what is left.

        Raises:
            NotFoundError: there are none to take away.
        """
        from cas_ckpt.ops.retention.policy import clear_policy

        return clear_policy(self._handle, branch=branch)

    @reported
    def gc(
        self,
        *,
        min_age_s: float = 3600.0,
        reflog_expire_s: float = 30 * 86400.0,
        max_unused: float = 0.05,
        max_repack_bytes: int | None = None,
        merge: bool | None = None,
        shard: str | None = None,
        dry_run: bool = False,
        progress: Progress | bool = False,
    ) -> GcReport:
        """Delete what no branch, tag or pin needs. Safe beside any number of writers and readers.

        Args:
            min_age_s: Packs that no published commit used yet are spared for so long: a commit may be under way.
            reflog_expire_s: For so long a deleted or moved branch can be brought back.
            max_unused: Share of the stored bytes that may stay wasted inside packs that hold needed bytes too.
            max_repack_bytes: At most so many bytes are copied out of such packs; None: no limit.
            merge: Copy small packs together where there are 64 of a kind, as commits leave them: each costs files or
                requests, and nothing of them is lost. None: on a local disk, not in a bucket.
            shard: Only the second seventh of the packs: "2/7"; others collect the rest, at the same time if they like.
            dry_run: Change nothing, tell what would be done.

        Several collections at once do no harm: one goes on, the others raise ConflictError. In a
        distributed job call it on one rank.

        Raises:
            CorruptionError: something that is needed is missing or damaged; nothing was deleted.
            ConflictError: another collection is at work. StorageError: the medium refused; the next
                collection goes on from there.
        """
        check_flags(dry_run=dry_run)
        optional_flag("merge", merge)
        from cas_ckpt.core.units import parse_shard
        from cas_ckpt.ops.gc.gc import collect_garbage
        from cas_ckpt.ops.gc.plan import MANY_SMALL, GcOptions

        own = None if shard is None else parse_shard(shard)
        many = None if merge is None else MANY_SMALL * merge
        options = GcOptions(min_age_s, reflog_expire_s, max_unused, max_repack_bytes, many_small=many, shard=own)
        return collect_garbage(self._handle, options, dry_run=dry_run, progress=shown(progress))

    @reported
    def repack(
        self, *, max_repack_bytes: int | None = None, shard: str | None = None, dry_run: bool = False,
        progress: Progress | bool = False,
    ) -> GcReport:  # fmt: skip
        """Collect, and rewrite every pack that is small, wastes anything or holds parts of chunks.

        Arguments and errors as for `gc`.
        """
        check_flags(dry_run=dry_run)
        from cas_ckpt.core.units import parse_shard
        from cas_ckpt.ops.gc.gc import collect_garbage
        from cas_ckpt.ops.gc.plan import REPACK

        own = None if shard is None else parse_shard(shard)
        options = replace(REPACK, max_repack_bytes=max_repack_bytes, shard=own)
        return collect_garbage(self._handle, options, dry_run=dry_run, progress=shown(progress))

    @reported
    def fsck(
        self,
        *,
        read_data: bool = False,
        subset: str | None = None,
        shard: str | None = None,
        max_duration_s: float | None = None,
        max_age_s: float | None = None,
        remote: bool = False,
        progress: Progress | bool = False,
    ) -> FsckReport:
        """Look for damage; each problem names the commits, refs and keys that it hits, and the command that repairs it.

        Args:
            read_data: Read and verify every byte, not only the structure.
            subset: Only this part of the data: "5%", "2/7" or "10G" (implies `read_data`).
            shard: Only the second seventh of the packs: "2/7" (implies `read_data`).
            max_duration_s: Begin no pack after so many seconds.
            max_age_s: Pass over packs that were read, and found intact, since then.
            remote: Ask remotes whether they still have the chunks that they promised and that are not here.
        """
        check_flags(read_data=read_data, remote=remote)
        from cas_ckpt.core.units import parse_shard
        from cas_ckpt.ops.fsck.check import check_open
        from cas_ckpt.ops.fsck.packs import DataOptions, parse_subset

        wanted = read_data or subset is not None or shard is not None
        part = None if subset is None else parse_subset(subset)
        own = None if shard is None else parse_shard(shard)
        data = DataOptions(part, max_duration_s, max_age_s, shard=own) if wanted else None
        return check_open(self._handle, data, remote=remote, progress=shown(progress))

    @reported
    def repair(
        self,
        *what: RepairKind,
        sources: str | Sequence[str] = (),
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
        check_flags(read_data=read_data, dry_run=dry_run)
        from cas_ckpt.ops.fsck.repair import repair_open
        from cas_ckpt.ops.fsck.report import RepairRequest

        moved = {} if refs is None else refs
        request = RepairRequest(what, texts("sources", sources), moved, read_data, dry_run)
        return repair_open(self._handle, request, progress=shown(progress))

    @reported
    def rebuild_index(self, *, progress: Progress | bool = False) -> RebuildReport:
        """Make the index anew from the packs; nothing else is touched, and nothing can be lost.

        For an index that is so damaged that `open` refuses it: `cas-ckpt index rebuild`.
        """
        from cas_ckpt.ops.fsck.repair import refill_index

        return refill_index(self._handle, progress=shown(progress))
