"""Other repositories: their names here, and commits that travel to and from them."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from cas_ckpt.arguments import check_flags, texts
from cas_ckpt.core.refs import RefKind
from cas_ckpt.errors import translates_memory_errors
from cas_ckpt.progress import Progress, shown
from cas_ckpt.repository.opened import Opened

if TYPE_CHECKING:
    from cas_ckpt.core.revisions import Revision
    from cas_ckpt.core.settings import PushFailure
    from cas_ckpt.ops.sync.bundle import BundleInfo
    from cas_ckpt.ops.sync.remotes import RemoteInfo, Tracked
    from cas_ckpt.ops.sync.send import SyncReport


class RemoteVerbs(Opened):
    """Other repositories: their names here, and commits that travel to and from them."""

    @translates_memory_errors
    def push(
        self,
        remote: str | PathLike[str] | None = None,
        refs: str | Sequence[str] = (),
        *,
        delete: str | Sequence[str] = (),
        all_branches: bool = False,
        tags: bool = False,
        force: bool = False,
        force_with_lease: bool | str = False,
        shard: str | None = None,
        dry_run: bool = False,
        max_bandwidth: float | None = None,
        progress: Progress | bool = False,
    ) -> SyncReport:
        """Send commits to another repository: what it lacks of them, then its refs move.

        What goes is verified and stays as it is stored; each ref moves by one swap.

        Args:
            remote: A remote's name, a URL or a path; `origin`, if not given.
            refs: Branches and tags, or `REVISION:BRANCH`, `:BRANCH` (delete), with a `+` before it to force; if nothing
                is given, what the remote's settings say, else the branch that is checked out.
            delete: Refs of the other repository that are to go, whatever they alone lead to, as with git; there
                `undelete_branch` brings one back until its log expires. Its default branch stays.
            all_branches, tags: All branches, all tags.
            force: Also where a ref would not move forward.
            force_with_lease: The same, but only where it is where it was when it was last asked (True), or at this
                commit.
            shard: Only copy the chunks of one of several jobs, "2/7": the second of seven, which may run at the same
                time; no ref moves. A push without it, when all have ended, finds what they copied, and moves the refs.
            dry_run: Change nothing; the report says what would be done.
            max_bandwidth: Bytes a second at most.
        Raises:
            ConflictError: a ref would not move forward, or moved meanwhile.
            SignatureError: a branch there takes signed commits only; nothing was copied.
        """
        check_flags(all_branches=all_branches, tags=tags, force=force, dry_run=dry_run)
        from cas_ckpt.core.units import parse_shard
        from cas_ckpt.ops.sync.push import PushRequest, push

        request = PushRequest(
            remote, texts("refs", refs), texts("delete", delete), all_branches, tags, force, force_with_lease, dry_run,
            max_bandwidth, shown(progress), None if shard is None else parse_shard(shard),
        )  # fmt: skip
        return push(self._handle, request)

    @translates_memory_errors
    def fetch(
        self,
        remote: str | PathLike[str] | None = None,
        branches: str | Sequence[str] = (),
        *,
        commits: str | Sequence[str] = (),
        filter: str | Sequence[str] = (),  # noqa: A002 - as git calls it
        tags: bool | None = None,
        prune: bool = False,
        force: bool = False,
        dry_run: bool = False,
        max_bandwidth: float | None = None,
        progress: Progress | bool = False,
    ) -> SyncReport:
        """Bring the commits of a remote here; its branch `main` is `origin/main` here.

        A tag that names another commit here is `rejected` in the report, as by git.

        Args:
            remote: Its name; `origin`, if not given. Of a URL, a path or a bundle that has no name here, one branch
                comes, which the revision `FETCH_HEAD` names from then on.
            branches: Patterns of its branches; if none is given, what its settings say, else all. Without a name: the
                one branch; its default branch, if not given.
            commits: Revisions whose data was forgotten here, and comes back; a pin keeps each until it is unpinned.
            filter: Patterns of keys ("model/**") whose chunks come, also of commits that are here already; if none is
                given, what its settings say, and only of commits that come. Of a promisor.
            tags: All (True), none (False), or those of commits that are here then.
            prune: Take away `origin/NAME` where there is no such branch any more.
            force: Tags come also where they name another commit here, or where their names would be taken for a
                branch of a remote, or an id.
            dry_run: Change nothing; the report says what would be done.
            max_bandwidth: Bytes a second at most.
        Raises:
            NotFoundError: there is no such remote, or no branch that matches.
        """
        check_flags(prune=prune, force=force, dry_run=dry_run)
        from cas_ckpt.ops.sync.fetch import FetchRequest, fetch

        request = FetchRequest(
            remote, texts("branches", branches), tags, prune, dry_run, max_bandwidth, shown(progress),
            commits=texts("commits", commits), filter=texts("filter", filter), force=force,
        )  # fmt: skip
        return fetch(self._handle, request)

    @translates_memory_errors
    def pull(
        self,
        remote: str | PathLike[str] | None = None,
        branch: str | None = None,
        *,
        rebase: bool = False,
        tags: bool | None = None,
        dry_run: bool = False,
        max_bandwidth: float | None = None,
        progress: Progress | bool = False,
    ) -> SyncReport:
        """Fetch, then let a branch here go forward to where it is there. No live state changes: check it out.

        A branch that is ahead of the one there is up to date.

        Args:
            remote: A remote's name, a URL, a path, or a bundle; `origin`, if not given.
            branch: Which; the one that is checked out, else the default branch, if not given.
            rebase: Where both sides have commits of their own, make those here anew on top of theirs: the same states,
                messages, steps, metrics and times, without signatures. The first names what it came from (lineage
                `continued-from`); the former ones stay in the branch's log.
            tags: All (True), none (False), or those of commits that are here then.
            dry_run: Change nothing; the report says what would be done.
            max_bandwidth: Bytes a second at most.
        Raises:
            ConflictError: each side has commits that the other has not; says what helps.
            SignatureError: the branch here takes signed commits only; what was fetched stays.
            NotFoundError: there is no such remote, or no such branch there.
        """
        check_flags(rebase=rebase, dry_run=dry_run)
        from cas_ckpt.ops.sync.fetch import FetchRequest, pull

        request = FetchRequest(remote, (), tags, False, dry_run, max_bandwidth, shown(progress))
        return pull(self._handle, request, branch=branch, rebase=rebase)

    @translates_memory_errors
    def create_bundle(
        self, path: str | PathLike[str], refs: str | Sequence[str] = (), *, since: Revision | Sequence[Revision] = (),
        force: bool = False, progress: Progress | bool = False,
    ) -> BundleInfo:  # fmt: skip
        """Write one file that carries commits, for where no network goes.

        Args:
            refs: Branches and tags, or `REVISION:BRANCH`; the branch that is checked out, if nothing is given.
            since: Revisions that the receiver has: their contents are left out.
            force: Replace a file that is there.
        Raises:
            ConflictError: the file is there. InvalidInputError: nothing would be in it.
        """
        check_flags(force=force)
        from cas_ckpt.core.revisions import revision_texts
        from cas_ckpt.ops.sync.push import create_bundle

        known, told = revision_texts(since), shown(progress)
        return create_bundle(self._handle, path, texts("refs", refs), since=known, force=force, progress=told)

    @translates_memory_errors
    def unbundle(
        self, path: str | PathLike[str], *, remote: str | None = None, dry_run: bool = False,
        progress: Progress | bool = False,
    ) -> SyncReport:  # fmt: skip
        """Bring the commits of a bundle here; branches move forward, or begin, tags come along.

        Args:
            remote: Its branches become branches of this remote here (`NAME/main`) instead.
            dry_run: Change nothing; the report says what would be done.
        Raises:
            NotFoundError: it continues from commits that are not here. ConflictError: a branch here has commits of its
                own. CorruptionError: the file is damaged. SignatureError: a branch here takes signed commits only.
        """
        check_flags(dry_run=dry_run)
        from cas_ckpt.ops.sync.fetch import take_bundle

        return take_bundle(self._handle, path, remote=remote, dry_run=dry_run, progress=shown(progress))

    @translates_memory_errors
    def verify_bundle(self, path: str | PathLike[str], *, progress: Progress | bool = False) -> BundleInfo:
        """Read and hash every byte of a bundle, and see that it can be taken here.

        Raises:
            CorruptionError: it is damaged. NotFoundError: it needs commits that are not here.
        """
        from cas_ckpt.ops.sync.bundle import verify_bundle

        return verify_bundle(self._handle, path, progress=shown(progress))

    @translates_memory_errors
    def push_pending(
        self, remote: str, *, max_bandwidth: float | None = None, progress: Progress | bool = False
    ) -> list[SyncReport]:
        """Push every branch of which a remote lacks something, and mark the remote as a tier.

        Each branch is pushed by itself: one that cannot move forward there holds up no other.

        Args:
            remote: Its name. Which branches: those that match its `push` patterns, else all.
            max_bandwidth: Bytes a second at most.
        Raises:
            ConflictError: a branch there went another way; the others were pushed.
        """
        from cas_ckpt.ops.sync.push import push_pending

        return push_pending(self._handle, remote, max_bandwidth=max_bandwidth, progress=shown(progress))

    def unpushed(self) -> dict[str, list[str]]:
        """Tier -> ids of commits of branches that it did not have when it was last asked; they cannot be forgotten."""
        if not self._handle.store.abilities.local:  # every log would take a request more; `status` says how many
            return {}
        from cas_ckpt.core.live import unpushed_by_tier  # brings SQLAlchemy, which a plain log does without

        return {name: sorted(one.hex() for one in found) for name, found in unpushed_by_tier(self._handle).items()}

    def push_failures(self) -> dict[str, PushFailure]:
        """Tier that lacks commits -> when and why the last push of these failed, if it did.

        It failed in whichever process; `time_s` are seconds since 1970, `reason` is what the error said, without
        passwords and keys. Tiers where the last push did not fail are left out.
        """
        from cas_ckpt.core.settings import read_push_failures

        local = self._handle.store.abilities.local
        failures = read_push_failures(self._handle.store) if local else {}
        waiting = self.unpushed() if failures else {}
        return {name: failure for name, failure in failures.items() if waiting.get(name)}

    def remotes(self) -> list[RemoteInfo]:
        """The other repositories that have names here, by name."""
        from cas_ckpt.ops.sync.remotes import list_remotes

        return list_remotes(self._handle)

    def remote_branches(self) -> dict[str, str]:
        """Name (`origin/main`) -> id of the commit that a branch of a remote named when it was last asked."""
        from cas_ckpt.ops.refs import named

        return named(self._handle, RefKind.REMOTE)

    def tracked_branches(self) -> dict[str, Tracked]:
        """Branch -> how many commits it and the branch of the same name of `origin`, or of the only remote, lack.

        As they were when last asked: `remote_branch`, and how many commits the branch is `ahead` and `behind`.
        """
        from cas_ckpt.ops.sync.remotes import tracked_branches

        return tracked_branches(self._handle)

    def ls_remote(self, remote: str | PathLike[str] | None = None) -> dict[str, str]:
        """Whole name of each branch and tag of another repository or bundle -> the commit that it names now there.

        Args:
            remote: A remote's name, a URL, a path or a bundle; `origin`, if not given.
        Raises:
            NotFoundError: there is no such remote.
        """
        from cas_ckpt.ops.sync.remotes import list_remote

        return list_remote(self._handle, remote)

    def add_remote(
        self, name: str, url: str | PathLike[str], *, fetch: str | Sequence[str] = (),
        push: str | Sequence[str] = (), tier: bool = False, promisor: bool = False,
        filter: str | Sequence[str] = (),  # noqa: A002 - as git calls it
    ) -> None:  # fmt: skip
        """Let `name` mean the repository at `url`, which need not be there yet.

        Args:
            name: Letters, digits, `.`, `_` and `-`.
            url: A path or URL without passwords or keys: those come from the environment of each user.
            fetch: Patterns of its branches that `fetch` brings; all, if none is given.
            push: Patterns of branches that `push` sends; the one that is checked out, if none is given.
            tier: It is to have every commit of these branches: what it lacks cannot be forgotten here.
            promisor: It keeps what its branches lead to: chunks of that may be missing here, and are brought when they
                are read. Only in a repository on a local disk.
            filter: Patterns of keys ("model/**") whose chunks `fetch` brings; all, if none is given. Of a promisor.
        Raises:
            ConflictError: there is a remote of that name. InvalidInputError: the URL carries a secret; a filter of
                what is no promisor.
        """
        from cas_ckpt.core.settings import Remote, stored_url
        from cas_ckpt.ops.sync.remotes import add_remote

        made = Remote(
            name, stored_url(url), texts("fetch", fetch), texts("push", push), tier, promisor,
            texts("filter", filter),
        )  # fmt: skip
        add_remote(self._handle, made)

    def set_remote(
        self, name: str, *, url: str | PathLike[str] | None = None, fetch: str | Sequence[str] | None = None,
        push: str | Sequence[str] | None = None, tier: bool | None = None, promisor: bool | None = None,
        filter: str | Sequence[str] | None = None,  # noqa: A002 - as git calls it
    ) -> None:  # fmt: skip
        """Change what is given of a remote, as for `add_remote`. Another filter counts for what comes from now on.

        Args:
            url: Where it is; even the same one says that another repository than before may be there. Else a remote
                whose repository has another id than when it was first asked is refused by `push`, `fetch` and `pull`.
            fetch, push, tier, promisor, filter: See `add_remote`; None: as before.
        Raises:
            NotFoundError: there is no such remote.
        """
        from cas_ckpt.core.settings import stored_url
        from cas_ckpt.ops.sync.remotes import set_remote

        given: dict[str, Any] = {"url": None if url is None else stored_url(url), "tier": tier, "promisor": promisor}
        patterns = {"fetch": fetch, "push": push, "filter": filter}
        given |= {field: None if one is None else texts(field, one) for field, one in patterns.items()}
        set_remote(self._handle, name, **{field: value for field, value in given.items() if value is not None})

    def remove_remote(self, name: str) -> None:
        """Take the remote away, and its branches here; the other repository is not touched.

        Raises:
            NotFoundError: there is no such remote.
            ConflictError: it promised chunks that are not here, and that commits need.
        """
        from cas_ckpt.ops.sync.remotes import remove_remote

        remove_remote(self._handle, name)

    def rename_remote(self, old: str, new: str) -> None:
        """Give a remote, and its branches here, another name.

        Raises:
            NotFoundError: there is no `old`.
            ConflictError: there is one of that name.
        """
        from cas_ckpt.ops.sync.remotes import rename_remote

        rename_remote(self._handle, old, new)
