"""fetch, pull, clone: commits of another repository come here.

    fetch  its branches become remote-tracking branches here (`origin/main`); tags come along
    pull   fetch, then the branch here goes forward to the one there
    clone  a new repository with the settings of the other one; fetch; its default branch begins here

Invariant: nothing that a branch here names is lost: branches move forward only. What comes in is verified on its way,
whatever the other side says (send.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from cas_ckpt.arguments import did_you_mean
from cas_ckpt.core.config import Config
from cas_ckpt.core.create import change_default_branch, init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.host_cache import AUTO
from cas_ckpt.core.live import graph_with, read_graph
from cas_ckpt.core.publish import branch_target
from cas_ckpt.core.refs import Ref, RefKind
from cas_ckpt.core.revisions import current_branch, other_meaning, resolve
from cas_ckpt.core.settings import Remote, read_settings, stored_url
from cas_ckpt.errors import ConflictError, InvalidInputError, NoRepositoryError, NotFoundError
from cas_ckpt.objects.digest import short
from cas_ckpt.ops.sync.remotes import ORIGIN, add_remote, check_promisor, is_wanted, opened, remote_named
from cas_ckpt.ops.sync.send import RefUpdate, SendOptions, SyncReport, send
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.storage.bucket_url import without_secrets
from cas_ckpt.storage.url import open_store

MOST_NAMED = 10
"""Branches that an error lists."""

_LOGGER = logging.getLogger("cas_ckpt")


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """What to fetch.

    Attributes:
        remote: A name; for `pull` a URL or a path too; None: origin.
        branches: Patterns of its branches; empty: what its settings say, else all.
        tags: True: all tags; False: none; None: those of commits that come, or are here.
        prune: Remote-tracking branches go whose branches are not there any more.
        depth: Only so many commits of each branch come with their data; None: all.
        filter: Patterns of keys whose chunks come, the others being promised by the remote; empty: what its settings
            say, else all.
        widen: They come also of commits that are here already.
        force: Tags come also where they name another commit here, or their names would be taken for something else.
        commits: Revisions of this repository whose data is to come back, if it was forgotten here; a pin keeps it.
    """

    remote: str | os.PathLike[str] | None = None
    branches: Sequence[str] = ()
    tags: bool | None = None
    prune: bool = False
    dry_run: bool = False
    num_threads: int | None = None
    max_bandwidth: float | None = None
    progress: Progress = SILENT
    depth: int | None = None
    filter: Sequence[str] = ()
    commits: Sequence[str] = ()
    widen: bool = False
    memory_bytes: int | None = None
    force: bool = False

    @property
    def options(self) -> SendOptions:
        """How to send."""
        return SendOptions(
            "fetch", self.dry_run, self.num_threads, self.max_bandwidth, self.progress, depth=self.depth,
            keys=tuple(self.filter), again=self.widen, memory_bytes=self.memory_bytes,
        )  # fmt: skip


def fetch(handle: RepositoryHandle, request: FetchRequest) -> SyncReport:
    """Bring commits of a named remote here; its branches as they are now become remote-tracking branches.

    Raises:
        NotFoundError: no such remote, or no branch that matches. NoRepositoryError: there is none at its URL.
    """
    name, url, remote = remote_named(handle, request.remote)
    if name is None or remote is None:
        raise InvalidInputError(
            f"{without_secrets(url)} has no name here, under which its branches could be remembered: add a remote"
        )
    if request.filter and not remote.promisor:
        raise InvalidInputError(
            f"remote {name!r} is not to keep what a filter leaves there: say so first "
            f"(repo.set_remote({name!r}, promisor=True)), or fetch without one"
        )
    request = replace(request, filter=request.filter or remote.filter, widen=bool(request.filter))
    with opened(url, read_only=True, cache=handle.cache_place) as other:
        return replace(_fetch(handle, other, name, request, request.branches or remote.fetch), url=other.store.url)


def _fetch(
    handle: RepositoryHandle, other: RepositoryHandle, name: str, request: FetchRequest, patterns: Sequence[str]
) -> SyncReport:
    theirs = list(other.refs.list(RefKind.BRANCH, RefKind.TAG))
    branches = [ref for ref in theirs if ref.kind is RefKind.BRANCH and is_wanted(ref.name, patterns)]
    if request.branches and not branches:
        raise NotFoundError(f"no branch of {other.store.url} is called {', '.join(request.branches)}")
    updates = [RefUpdate(RefKind.REMOTE, f"{name}/{ref.name}", ref.target, force=True) for ref in branches]
    updates += _tags(handle, other, theirs, branches, request)
    for digest in dict.fromkeys(resolve(handle, revision) for revision in request.commits):
        updates.append(RefUpdate(RefKind.PIN, f"{name}-{short(digest)}", digest, note=f"fetched from {name}"))
    if request.prune:
        there = {f"{name}/{ref.name}" for ref in theirs if ref.kind is RefKind.BRANCH}
        gone = [ref for ref in handle.refs.list(RefKind.REMOTE) if ref.name.startswith(f"{name}/")]
        updates += [RefUpdate(RefKind.REMOTE, ref.name, None) for ref in gone if ref.name not in there]
    return send(other, handle, updates, request.options, near=handle)


def _tags(
    handle: RepositoryHandle, other: RepositoryHandle, theirs: Sequence[Ref], branches: Sequence[Ref],
    request: FetchRequest,
) -> list[RefUpdate]:  # fmt: skip
    """Tags that come along; one that names another commit here stays as it is here, unless that is forced."""
    wanted = request.tags
    tags = [ref for ref in theirs if ref.kind is RefKind.TAG]
    if wanted is False or not tags:
        return []
    if wanted is None:
        heads = [ref.target for ref in branches if ref.target is not None]
        coming = graph_with(other, heads).reached(heads) | read_graph(handle).commits.keys()
        tags = [ref for ref in tags if ref.target in coming]
    own = {ref.name for ref in handle.refs.list(RefKind.TAG, RefKind.BRANCH)}
    if request.force:
        own = {ref.name for ref in handle.refs.list(RefKind.BRANCH)}
    return [
        RefUpdate(ref.kind, ref.name, ref.target, request.force, note=ref.note, signature=ref.signature)
        for ref in tags if ref.name not in own and (request.force or may_come(handle, other, ref))
    ]  # fmt: skip


def may_come(handle: RepositoryHandle, other: RepositoryHandle, ref: Ref) -> bool:
    """Whether a new tag or branch of the other side means nothing else here, nor an id there; said if not."""
    meaning = other_meaning(handle, ref.name, other)
    if meaning is not None:
        _LOGGER.warning(
            "the %s %r of %s is not taken: it reads as %s (fetch with force=True takes it)",
            ref.kind.label, ref.name, other.store.url, meaning,
        )  # fmt: skip
    return meaning is None


def pull(handle: RepositoryHandle, request: FetchRequest, *, branch: str | None = None) -> SyncReport:
    """Fetch, then let the branch here go forward to the one of the same name there.

    Args:
        branch: That of this repository, begun if it is not there; None: the one that is checked out.
    Raises:
        ConflictError: both sides have commits that the other has not; what was fetched stays.
        NotFoundError: the other side has no such branch.
    """
    own = current_branch(handle) if branch is None else branch
    name, url, remote = remote_named(handle, request.remote)
    if remote is not None:
        request = replace(request, filter=request.filter or remote.filter)
    with opened(url, read_only=True, cache=handle.cache_place) as other:
        theirs = other.refs.get(RefKind.BRANCH, own).target
        if theirs is None:
            raise NotFoundError(f"there is no branch {own!r} at {other.store.url}")
        there = other.store.url
        if name is None or remote is None:
            report = SyncReport(there, dry_run=request.dry_run)
            source = other
        else:
            report = _fetch(handle, other, name, request, request.branches or (*remote.fetch, own))
            source = other if request.dry_run else handle
        update = RefUpdate(RefKind.BRANCH, own, theirs)
        _require_forward(handle, source, update, there)
        moved = send(source, handle, [update], replace(request.options, action="pull"), near=handle)
    return replace(report if name is not None else moved, url=there, refs=(*report.refs, *moved.refs))


def _require_forward(handle: RepositoryHandle, source: RepositoryHandle, update: RefUpdate, url: str) -> None:
    try:
        ours = handle.refs.get(RefKind.BRANCH, update.name).target
    except NotFoundError:
        return
    theirs = update.target
    if ours is None or theirs is None or ours in graph_with(source, [theirs]).reached([theirs]):
        return
    if theirs in read_graph(handle).reached([ours]):
        raise ConflictError(
            f"branch {update.name!r} has commits that {url} has not: there is nothing to pull, push them (repo.push)"
        )
    raise ConflictError(
        f"branch {update.name!r} is at {short(ours)} here and at {short(theirs)} at {url}, and neither follows the "
        f'other: push ours under another name ("{update.name}:NAME"), then let the branch follow the other side: '
        f'repo.branch("{update.name}", start="{short(theirs)}", force=True)'
    )


def clone(
    url: str | os.PathLike[str], target: str | os.PathLike[str], request: FetchRequest, *, branch: str | None = None,
    cache: str | os.PathLike[str] | None = AUTO,
) -> tuple[RepositoryHandle, SyncReport]:  # fmt: skip
    """A new repository at `target` with the commits of the one at `url`, whose remote `origin` that one is.

    A clone that was broken off is gone on with.

    Args:
        branch: The branch that begins here, the default branch here; None: the default branch there, or if that has
            no commits the only one there.
        cache: As for `RepositoryHandle.open`, of both.
    Raises:
        ConflictError: something else is at `target`. NotFoundError: there is no such branch, or none that is wanted.
        InvalidInputError: the default branch there has no commits, and there are several others.
    """
    place = stored_url(url)
    if request.filter:
        with closing(open_store(target)) as store:
            check_promisor(store, True)
    with opened(place, read_only=True, cache=cache) as other:
        begins = _branch_that_begins(other, request, branch)  # before anything is made
        origin = Remote(ORIGIN, place, promisor=bool(request.filter), filter=tuple(request.filter))
        made = _begun(target, origin, replace(other.config, default_branch=begins), cache)
        try:
            return made, _fill(made, other, request, begins)
        except BaseException:
            made.close()
            raise


def _branch_that_begins(other: RepositoryHandle, request: FetchRequest, given: str | None) -> str:
    """The branch that a clone begins with: `given`, else the default branch there, else the one that there is.

    Raises:
        NotFoundError: there is no such branch, or none that is wanted. InvalidInputError: several may be meant.
    """
    there = [ref.name for ref in other.refs.list(RefKind.BRANCH)]
    if given is not None and given not in there:
        raise NotFoundError(f"there is no branch {given!r} at {other.store.url}{did_you_mean(given, there)}")
    wanted = [name for name in there if is_wanted(name, request.branches)]
    if request.branches and not wanted:
        raise NotFoundError(f"no branch at {other.store.url} matches {', '.join(map(repr, request.branches))}")
    default = other.config.default_branch
    if given is not None or default in there or not wanted:
        return given or default
    if len(wanted) > 1:
        raise InvalidInputError(
            f"the default branch {default!r} of {other.store.url} has no commits: say which branch begins here "
            f"(branch=, -b), of {', '.join(map(repr, wanted[:MOST_NAMED]))}"
        )
    return wanted[0]


def _begun(
    target: str | os.PathLike[str], origin: Remote, config: Config, cache: str | os.PathLike[str] | None
) -> RepositoryHandle:
    try:
        made = init_repository(
            target, default_branch=config.default_branch, encoding=config.encoding, pack_bytes=config.pack_bytes,
            cache=cache,
        )  # fmt: skip
    except ConflictError:
        try:
            made = RepositoryHandle.open(target, cache=cache)
        except NoRepositoryError:
            pass  # something else is there: what init said is raised
        else:
            if _is_half_a_clone(made, origin):
                if made.config.default_branch != config.default_branch:
                    change_default_branch(made, config.default_branch)
                return made
            made.close()
        raise
    try:
        add_remote(made, ORIGIN, origin.url, promisor=origin.promisor, keys=origin.filter)
    except BaseException:
        made.close()
        raise
    return made


def _is_half_a_clone(made: RepositoryHandle, origin: Remote) -> bool:
    """Whether nothing was done there but a clone of `origin` that has not ended."""
    remotes = read_settings(made.store).remotes
    return remotes == (origin,) and not any(made.refs.list(RefKind.BRANCH))


def _fill(made: RepositoryHandle, other: RepositoryHandle, request: FetchRequest, branch: str) -> SyncReport:
    wanted = (*request.branches, branch) if request.branches else ()  # what begins here comes like the others
    report = _fetch(made, other, ORIGIN, replace(request, branches=()), wanted)
    start = branch_target(other, branch)
    if start is None:
        return replace(report, url=other.store.url)  # there is no commit yet
    update = RefUpdate(RefKind.BRANCH, branch, start)
    moved = send(other, made, [update], replace(request.options, action="clone"), near=made)
    return replace(report, url=other.store.url, refs=(*report.refs, *moved.refs))
