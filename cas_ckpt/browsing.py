"""What can be asked of a repository without torch: history, names, entries, sizes.

Invariant: nothing is decided here; a method hands its arguments to a function of ops/, which
it imports when it is called, so that reading the log costs neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self, TypeAlias

from cas_ckpt.arguments import reads_arguments
from cas_ckpt.progress import Progress, shown
from cas_ckpt.refs import Head, RefKind
from cas_ckpt.repository import RepositoryHandle

if TYPE_CHECKING:
    from cas_ckpt.layout.target_layout import TargetLayout
    from cas_ckpt.ops.ls import ListedEntry
    from cas_ckpt.ops.moments import Moment
    from cas_ckpt.ops.plan_report import PlanReport
    from cas_ckpt.ops.rebuild import RebuildReport
    from cas_ckpt.ops.records import CommitInfo
    from cas_ckpt.ops.resolve import Revision
    from cas_ckpt.ops.show import ShownCommit
    from cas_ckpt.ops.status import RepositoryStatus
    from cas_ckpt.ops.usage import CommitUsage, RepositoryStats, UsageRow

Keys: TypeAlias = str | Sequence[str] | None
"""Patterns of keys: `*` and `?` inside a component, `**` across; a container stands for all below it."""


@reads_arguments
class Browsing:
    """The half of `Repository` that looks and names; see there."""

    _handle: RepositoryHandle

    def latest(self, branch: str | None = None) -> CommitInfo | None:
        """The latest commit of a branch, or None if there is none yet: what a run resumes from, if anything.

            if repo.latest():
                repo.checkout("main", into=state)

        Args:
            branch: The one that is checked out, else the default branch, if not given.
        Raises:
            InvalidInputError: there is no such branch, and the name is nearly that of another.
        """
        from cas_ckpt.ops.log import latest_of

        return latest_of(self._handle, branch)

    @property
    def url(self) -> str:
        """Where the repository is."""
        return self._handle.store.url

    @property
    def head(self) -> Head:
        """Where the live state came from, and where the next `commit` goes; the same on all ranks.

        `checkout` and `commit` move it; loading and reading do not, nor does checking out a part (`keys=`).
        """
        return self._handle.head

    @property
    def default_branch(self) -> str:
        """The branch that a fresh object is on."""
        return self._handle.config.default_branch

    def close(self) -> None:
        """Close the index and the store; the object is of no use afterwards. Idempotent."""
        self._handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Repository({self.url!r})"

    # --- history --------------------------------------------------------------------------

    def log(
        self,
        ref: Revision | Sequence[Revision] | None = None,
        *,
        limit: int | None = None,
        all_refs: bool = False,
        first_parent: bool = False,
        since: Moment | None = None,
        until: Moment | None = None,
        step: int | str | tuple[int | None, int | None] | None = None,
        where: str | Sequence[str] | None = None,
        author: str | None = None,
        keys: Keys = None,
    ) -> list[CommitInfo]:
        """The commits that `ref` (one revision or several) leads to, the youngest first.

        Args:
            ref: HEAD, if not given: the branch that was checked out, else the default branch.
            all_refs: Begin at every branch, tag and pin.
            first_parent: Follow only the first parent of merges.
            since, until: Only commits of that time, both ends included: ISO text (UTC unless it says
                another offset; a day alone is taken whole), how long ago ("2d", "3h"), seconds or a datetime.
            step: Only this step, or first and last: "1000:2000", (1000, None).
            where: Only commits whose metrics meet this comparison, e.g. "loss<2.1", or all of several.
            author: Only by authors whose name has this in it, or matches the pattern.
            keys: Only commits in which an entry that matches is not what it was in their first parent.
        Raises:
            InvalidInputError: a condition of another form. NotFoundError: no commit has such a metric.
        """
        from cas_ckpt.ops.log import log_commits
        from cas_ckpt.ops.resolve import revision_texts

        revisions = revision_texts(ref)
        wanted = None
        if where or any(given is not None for given in (since, until, step, author)):
            from cas_ckpt.ops.moments import commit_filter

            wanted = commit_filter(since=since, until=until, step=step, metrics=where or (), author=author)
        found = log_commits(
            self._handle, revisions, limit=limit, all_refs=all_refs, first_parent=first_parent, wanted=wanted, keys=keys
        )
        return list(found)

    def plan(
        self,
        ref: Revision,
        target: str | int | TargetLayout,
        *,
        shapes: Mapping[str, Sequence[str]] | None = None,
        storage_bandwidth: float | None = None,
        network_bandwidth: float | None = None,
    ) -> PlanReport:
        """How `ref` would be restored into ranks that need not exist: exact, checked, kept in the index.

        Args:
            target: A mesh such as "dp=96,tp=8" (the last dimension fastest), or a number of ranks
                that shard dimension 0. Not collective.
            shapes: Pattern of keys -> one placement per mesh dimension ("S(0)", "R", "SS(0,8)"),
                where the usual ones are not meant.
            storage_bandwidth, network_bandwidth: Bytes per second and rank, for the estimates; what
                layout/plan_summary.py assumes, if not given.
        Raises:
            MismatchError: the commit cannot fill the target; names key and region.
        """
        from cas_ckpt.layout.target_layout import TargetLayout, parse_layout
        from cas_ckpt.ops.plan import plan_checkout

        if isinstance(target, TargetLayout):
            layout = target
        else:
            layout = parse_layout(f"dp={target:d}" if isinstance(target, int) else target, shapes)
        return plan_checkout(
            self._handle, ref, layout, storage_bandwidth=storage_bandwidth, network_bandwidth=network_bandwidth
        )

    def plans(self, ref: Revision | None = None) -> list[PlanReport]:
        """The plans that the index keeps, for one revision or all."""
        from cas_ckpt.ops.plan import kept_plans

        return kept_plans(self._handle, ref)

    def resolve(self, ref: Revision) -> str:
        """The hexadecimal id of the commit that `ref` names.

        Raises:
            AmbiguousIdError: several ids begin like this.
        """
        from cas_ckpt.ops.resolve import resolve

        return resolve(self._handle, ref).hex()

    def branch(self, name: str, *, start: Revision = "HEAD", force: bool = False) -> str:
        """Make the branch `name` at the commit `start`; that commit's id.

        Raises:
            ConflictError: the name is taken (and `force` does not say to move the branch).
        """
        from cas_ckpt.ops.branch import create_branch

        return create_branch(self._handle, name, start=start, force=force).hex()

    def branches(self) -> dict[str, str]:
        """Name -> id of the head of every branch, by name."""
        from cas_ckpt.ops.names import named

        return named(self._handle, RefKind.BRANCH)

    def delete_branch(self, name: str) -> str:
        """Delete the branch; the id that it named. Its commits stay until they are collected.

        Raises:
            InvalidInputError: it is the default branch.
        """
        from cas_ckpt.ops.branch import delete_branch

        return delete_branch(self._handle, name).hex()

    def tag(self, name: str, ref: Revision = "HEAD", *, message: str = "", force: bool = False) -> str:
        """Let the tag `name` name the commit `ref`; that commit's id.

        Args:
            message: Kept with the tag, which is an annotated one then.
        Raises:
            ConflictError: the name is taken (and `force` does not say to move the tag).
        """
        from cas_ckpt.ops.tag import create_tag

        return create_tag(self._handle, name, ref, message=message, force=force).hex()

    def tags(self) -> dict[str, str]:
        """Name -> id of the commit of every tag, by name."""
        from cas_ckpt.ops.names import named

        return named(self._handle, RefKind.TAG)

    def delete_tag(self, name: str) -> str:
        """Delete the tag; the id that it named."""
        from cas_ckpt.ops.tag import delete_tag

        return delete_tag(self._handle, name).hex()

    # --- looking inside -------------------------------------------------------------------

    def show(self, ref: Revision = "HEAD") -> ShownCommit:
        """The commit, what names it, and a summary of its state."""
        from cas_ckpt.ops.show import show_commit

        return show_commit(self._handle, ref)

    def ls(self, ref: Revision = "HEAD", keys: Keys = None) -> list[ListedEntry]:
        """The entries of the commit: key, kind, dtype, shape, bytes."""
        from cas_ckpt.ops.ls import list_commit

        return list_commit(self._handle, ref, keys=keys)

    def entry(self, ref: Revision, key: str) -> ListedEntry:
        """What stands under one key; reads only the tree nodes that lead to it."""
        from cas_ckpt.ops.ls import list_one

        return list_one(self._handle, ref, key)

    def status(self) -> RepositoryStatus:
        """Where the repository stands: its names, who writes to it, whether a collection is under way.

        Cheap: refs and records are read, no history is followed.
        """
        from cas_ckpt.ops.status import repository_status

        return repository_status(self._handle)

    def stats(self) -> RepositoryStats:
        """The whole repository in numbers."""
        from cas_ckpt.ops.usage import repository_stats

        return repository_stats(self._handle)

    def commit_stats(self, ref: Revision = "HEAD") -> CommitUsage:
        """What one commit holds, added, and has for itself alone."""
        from cas_ckpt.ops.usage import commit_stats

        return commit_stats(self._handle, ref)

    def du(
        self, by: str = "commit", *, ref: Revision | None = None, keys: Keys = None, limit: int | None = None
    ) -> list[UsageRow]:
        """Total, new, unique and shared bytes by "commit", "branch" or "tensor".

        Args:
            ref: By commit: those it leads to (default: all). By tensor: the commit they are of.
            keys: By tensor: only these.
            limit: By commit: at most so many, the youngest.
        """
        from cas_ckpt.ops.usage import usage_rows

        return usage_rows(self._handle, by, revision=ref, keys=keys, limit=limit)

    def rebuild_index(self, *, progress: Progress | bool = False) -> RebuildReport:
        """Make the index anew from the packs; nothing else is touched, and nothing can be lost.

        For an index that is so damaged that `open` refuses it: `cas-ckpt index rebuild`.
        """
        from cas_ckpt.ops.rebuild import refill_index

        return refill_index(self._handle, progress=shown(progress))
