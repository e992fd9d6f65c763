"""Branches, tags and pins, who signed what; other repositories, and commits that travel to and from them."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from cas_ckpt.arguments import check_flags, check_limit, texts
from cas_ckpt.core.refs import RefKind
from cas_ckpt.events import reported
from cas_ckpt.progress import Progress, shown
from cas_ckpt.repository.opened import Opened, given_key

if TYPE_CHECKING:
    from cas_ckpt.core.revisions import Revision
    from cas_ckpt.core.settings import PushFailure
    from cas_ckpt.core.signatures import SignedBranches
    from cas_ckpt.ops.refs import PinInfo, RefMove, SignedBytes, VerifyReport
    from cas_ckpt.ops.sync.bundle import BundleInfo
    from cas_ckpt.ops.sync.remotes import RemoteInfo, Tracked
    from cas_ckpt.ops.sync.send import SyncReport
    from cas_ckpt.signing import KeyFile, Trusted


class NameVerbs(Opened):
    """Names of commits, and signatures; other repositories."""

    def branch(self, name: str, *, start: Revision = "HEAD", force: bool = False) -> str:
        """Make the branch `name` at the commit `start`; that commit's id.

        Args:
            force: Move a branch of that name that exists already.
        Raises:
            ConflictError: the name is taken (and `force` does not say to move the branch).
        """
        check_flags(force=force)
        from cas_ckpt.ops.refs import create_branch

        return create_branch(self._handle, name, start=start, force=force).hex()

    def branches(self) -> dict[str, str]:
        """Name -> id of the head of every branch, by name."""
        from cas_ckpt.ops.refs import named

        return named(self._handle, RefKind.BRANCH)

    def set_default_branch(self, name: str) -> str:
        """Let a branch that is there be the default branch; the id that it names.

        An object that has neither checked out nor committed anything is on it then.

        Others see it when they are opened, also on hosts that have the former one in their cache. The former default
        branch is a branch like others.

        Raises:
            NotFoundError: there is no such branch, or it has no commits. ConflictError: somebody else changed it at
            this moment.
        """
        from cas_ckpt.ops.refs import set_default_branch

        return set_default_branch(self._handle, name).hex()

    def delete_branch(self, name: str, *, force: bool = False) -> str:
        """Delete the branch; the id that it named. Its commits stay until they are collected.

        Args:
            force: Also if it alone leads to commits, or a tier does not have them yet; they are not pushed any more
                then.
        Raises:
            InvalidInputError: it is the default branch. ConflictError: it leads to what a tier does not have yet, or to
                commits that no other branch, tag, pin or branch of a remote leads to.
        """
        check_flags(force=force)
        from cas_ckpt.ops.refs import delete_branch

        return delete_branch(self._handle, name, force=force).hex()

    def rename_branch(self, old: str, new: str) -> str:
        """Give the branch another name; the id that it names. The default branch stays.

        Raises:
            ConflictError: the new name is taken.
        """
        from cas_ckpt.ops.refs import rename_ref

        return rename_ref(self._handle, RefKind.BRANCH, old, new).hex()

    def undelete_branch(self, name: str) -> str:
        """Bring the deleted branch back; the id that it names, as before.

        Raises:
            NotFoundError: there was none, or its commits were collected.
        """
        from cas_ckpt.ops.refs import undelete_ref

        return undelete_ref(self._handle, RefKind.BRANCH, name).hex()

    def tag(
        self, name: str, ref: Revision = "HEAD", *, message: str = "", force: bool = False, sign: KeyFile | None = None
    ) -> str:
        """Let the tag `name` name the commit `ref`; that commit's id.

        Args:
            message: Kept with the tag, which is an annotated one then.
            sign: The key that signs the tag: its name, the commit, the message, who and when. See `commit`.
        Raises:
            ConflictError: the name is taken (and `force` does not say to move the tag).
        """
        check_flags(force=force)
        from cas_ckpt.ops.refs import create_tag

        return create_tag(self._handle, name, ref, message=message, force=force, sign=given_key(sign)).hex()

    def tags(self) -> dict[str, str]:
        """Name -> id of the commit of every tag, by name."""
        from cas_ckpt.ops.refs import named

        return named(self._handle, RefKind.TAG)

    def tag_messages(self) -> dict[str, str]:
        """Name -> message of every annotated tag, by name."""
        from cas_ckpt.ops.refs import tag_messages

        return tag_messages(self._handle)

    def delete_tag(self, name: str) -> str:
        """Delete the tag; the id that it named.

        Raises:
            NotFoundError: there is none.
        """
        from cas_ckpt.ops.refs import delete_ref

        return delete_ref(self._handle, RefKind.TAG, name).hex()

    def rename_tag(self, old: str, new: str) -> str:
        """Give the tag another name; the id that it names.

        Raises:
            ConflictError: the new name is taken.
        """
        from cas_ckpt.ops.refs import rename_ref

        return rename_ref(self._handle, RefKind.TAG, old, new).hex()

    def undelete_tag(self, name: str) -> str:
        """Bring the deleted tag back, its message too; the id that it names, as before.

        Raises:
            NotFoundError: there was none, or its commit was collected.
        """
        from cas_ckpt.ops.refs import undelete_ref

        return undelete_ref(self._handle, RefKind.TAG, name).hex()

    def pin(self, ref: Revision = "HEAD", *, name: str | None = None, reason: str = "", force: bool = False) -> PinInfo:
        """Keep the commit, whatever is forgotten, until it is unpinned.

        Args:
            name: "pin-" and the first digits of the id, if not given. Pins have names of their own;
                as a revision, one is written refs/pins/NAME.
            force: Move a pin of that name that exists already.
        Raises:
            ConflictError: there is a pin of that name.
        """
        check_flags(force=force)
        from cas_ckpt.ops.refs import create_pin

        return create_pin(self._handle, ref, name=name, reason=reason, force=force)

    def pins(self) -> list[PinInfo]:
        """All pins, by name."""
        from cas_ckpt.ops.refs import list_pins

        return list_pins(self._handle)

    def unpin(self, name: str) -> str:
        """Take the pin away; the id that it named.

        Raises:
            NotFoundError: there is none.
        """
        from cas_ckpt.ops.refs import delete_pin

        return delete_pin(self._handle, name).hex()

    def undelete_pin(self, name: str) -> str:
        """Bring the pin back; the id that it names, as before.

        Raises:
            NotFoundError: there was none, or its commit was collected.
        """
        from cas_ckpt.ops.refs import undelete_ref

        return undelete_ref(self._handle, RefKind.PIN, name).hex()

    def reflog(self, ref: str | None = None, *, limit: int | None = None) -> list[RefMove]:
        """The moves of a branch, tag or pin, deleted ones too, the latest first.

        Args:
            ref: Its name; the branch that was checked out, else the default branch, if not given.
        Raises:
            NotFoundError: there never was such a ref.
        """
        from cas_ckpt.ops.refs import reflog

        return reflog(self._handle, ref, limit=check_limit(limit))

    def verify(
        self, ref: Revision = "HEAD", *, trust: Trusted, revoked: str | PathLike[str] | None = None,
        history: bool = False,
    ) -> VerifyReport:  # fmt: skip
        """Who signed the commit, and the tag that `ref` is; `ok` says whether somebody who is trusted did.

        It raises nothing for a signature that is not good.

        Args:
            trust: The path of an allowed_signers file as git uses it, or of a public key; a public key as text; a list
                of public keys or lines of such a file; or a `Trust`.
            revoked: A file of keys that count no more: public keys, one a line, or a KRL.
            history: Every commit that it leads to has to be signed as well.
        Raises:
            InvalidInputError: a line of `trust` that is not understood, or ssh-keygen is not installed. StorageError: a
            file cannot be read.
        """
        check_flags(history=history)
        from cas_ckpt.ops.refs import verify_revision
        from cas_ckpt.signing import as_trust

        trusted = as_trust(trust)
        if revoked is not None:
            trusted = trusted.without(revoked)
        return verify_revision(self._handle, ref, trusted, history=history)

    def signed_bytes(self, ref: Revision = "HEAD") -> SignedBytes:
        """The signature of the commit, or of the tag that `ref` is, and the bytes that it is of: for other programs.

        Raises:
            NotFoundError: it is not signed.
        """
        from cas_ckpt.ops.refs import signed_bytes

        return signed_bytes(self._handle, ref)

    def signers(self) -> SignedBranches:
        """The branches that take signed commits only, by pattern, and whose; maybe none."""
        from cas_ckpt.core.signatures import read_signers

        return read_signers(self._handle.store)

    def set_signers(self, branch: str, trust: Trusted) -> SignedBranches:
        """Let branches that match the pattern `branch` take commits only that somebody in `trust` signed; all rules.

        Commits that are there already stay as they are. It keeps those who use cas_ckpt from mistakes; against those
        who can write to the store otherwise, readers have `trust=`.

        Args:
            branch: `main`, `release/*`; `*` matches `/` too. Of several patterns the first that was set counts.
            trust: See `verify`.
        Raises:
            InvalidInputError: no pattern, or no key.
        """
        from cas_ckpt.core.signatures import set_signers
        from cas_ckpt.signing import as_trust

        return set_signers(self._handle, branch, as_trust(trust))

    def clear_signers(self, branch: str | None = None) -> SignedBranches:
        """Let the branches of the pattern `branch`, or all, take any commit again; what is left.

        Raises:
            NotFoundError: no such pattern is set.
        """
        from cas_ckpt.core.signatures import clear_signers

        return clear_signers(self._handle, branch)

    # ------------------------------------------------------------ other repositories

    @reported
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

    @reported
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

    @reported
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

    @reported
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

    @reported
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

    @reported
    def verify_bundle(self, path: str | PathLike[str], *, progress: Progress | bool = False) -> BundleInfo:
        """Read and hash every byte of a bundle, and see that it can be taken here.

        Raises:
            CorruptionError: it is damaged. NotFoundError: it needs commits that are not here.
        """
        from cas_ckpt.ops.sync.bundle import verify_bundle

        return verify_bundle(self._handle, path, progress=shown(progress))

    @reported
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
