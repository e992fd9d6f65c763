"""Where the repository stands, what its commits weigh, and what that costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cas_ckpt.arguments import reads_arguments
from cas_ckpt.repository.given import Keys, UsageBy
from cas_ckpt.repository.opened import Opened

if TYPE_CHECKING:
    from cas_ckpt.core.revisions import Revision
    from cas_ckpt.ops.history.usage import CommitUsage, MonthlyCost, RepositoryStats, RepositoryStatus, UsageRow
    from cas_ckpt.ops.retention.forget import Freed


@reads_arguments
class UsageVerbs(Opened):
    """Where the repository stands, what its commits weigh, and what that costs."""

    def status(self) -> RepositoryStatus:
        """Where the repository stands: its names, who writes to it, whether a collection is under way.

        Cheap: refs and records are read, no history is followed.
        """
        from cas_ckpt.ops.history.usage import repository_status

        return repository_status(self._handle)

    def stats(self) -> RepositoryStats:
        """The whole repository in numbers."""
        from cas_ckpt.ops.history.usage import repository_stats

        return repository_stats(self._handle)

    def monthly_cost(
        self,
        *,
        commits_per_day: float = 48.0,
        restores_per_day: float = 1.0,
        looks_per_day: float = 100.0,
        collections_per_day: float = 1.0,
        keep_days: float | None = None,
    ) -> MonthlyCost:
        """What a month of this run costs in a bucket: requests and bytes, from its own commits.

        Args:
            commits_per_day, restores_per_day, looks_per_day, collections_per_day: How often what is done.
            keep_days: For how long commits keep their data; None: for good.
        Raises:
            NotFoundError: there is no commit yet. InvalidInputError: a number of another kind.
        """
        from cas_ckpt.ops.history.usage import MonthRates, plan_month, run_facts

        rates = MonthRates(commits_per_day, restores_per_day, looks_per_day, collections_per_day, keep_days)
        return plan_month(run_facts(self._handle), rates)

    def commit_stats(self, ref: Revision = "HEAD") -> CommitUsage:
        """Bytes that one commit holds, added, and has for itself alone."""
        from cas_ckpt.ops.history.usage import commit_stats

        return commit_stats(self._handle, ref)

    def du(
        self, by: UsageBy = "commit", *, ref: Revision | None = None, keys: Keys = None, limit: int | None = None,
        with_remotes: bool = False,
    ) -> list[UsageRow]:  # fmt: skip
        """Total, new, unique and shared bytes by "commit", "branch", "tensor" or "dtype".

        Args:
            ref: By commit: those it leads to (default: all). By tensor or dtype: the commit they are of.
            keys: By tensor or dtype: only these.
            limit: By commit: at most so many, the youngest.
            with_remotes: By branch: what a remote-tracking branch leads to is shared with it.
        """
        from cas_ckpt.ops.history.usage import usage_rows

        return usage_rows(self._handle, by, revision=ref, keys=keys, limit=limit, with_remotes=with_remotes)

    def unique(self, name: str = "HEAD", *, with_remotes: bool = False) -> Freed:
        """Bytes that only this branch, tag or pin leads to; remote-tracking branches (`origin/main`) do not count.

        Args:
            with_remotes: They count: what goes if the ref is deleted and its log has expired.
        """
        from cas_ckpt.ops.retention.forget import unique_to

        return unique_to(self._handle, name, with_remotes=with_remotes)

    def freed(self, *refs: Revision) -> Freed:
        """Bytes that forgetting these commits would free at the next collection; nothing is changed.

        Those that a branch, tag or pin names would stay: they are listed in `kept`.
        """
        from cas_ckpt.ops.retention.forget import freed_by

        return freed_by(self._handle, refs)
