"""fetch, pull, clone: commits of another repository, or of a bundle, come here.

    fetch        its branches become remote-tracking branches here (`origin/main`); tags come along. Of a place that has
                 no name here one branch comes, which FETCH_HEAD names
    pull         fetch, then the branch here goes forward to the one there, or its own commits are made anew on top of
                 that one
    clone        a new repository with the settings of the other one; fetch; its default branch begins here
    take_bundle  the branches and tags of a bundle go forward, or begin, here

Invariant: nothing that a branch here names is lost: branches move forward, or are rebased. What comes in is verified on
its way, whatever the other side says (send.py). A rebase changes no state: each root stays what it was.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from cas_ckpt.arguments import did_you_mean, optional_flag
from cas_ckpt.core.config import Config
from cas_ckpt.core.create import change_default_branch, init_repository
from cas_ckpt.core.forgotten import forgotten_view
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.host_cache import AUTO
from cas_ckpt.core.live import graph_with, read_graph, require_complete
from cas_ckpt.core.publish import branch_target
from cas_ckpt.core.records import CONTINUED_FROM
from cas_ckpt.core.refs import Ref, RefKind
from cas_ckpt.core.revisions import current_branch, other_meaning, resolve
from cas_ckpt.core.settings import Remote, check_remote_name, read_settings, stored_url
from cas_ckpt.errors import ConflictError, InvalidInputError, NoRepositoryError, NotFoundError
from cas_ckpt.objects.digest import Digest, ObjectKind, short
from cas_ckpt.objects.nodes import LineageEdge, Node, commit_node, decode_commit
from cas_ckpt.ops.sync.bundle import opened_bundle, require_prerequisites, require_whole
from cas_ckpt.ops.sync.remotes import (
    FETCH_HEAD,
    ORIGIN,
    add_remote,
    check_promisor,
    is_wanted,
    opened,
    recognise,
    remote_named,
)
from cas_ckpt.ops.sync.send import Moved, MovedRef, RefUpdate, SendOptions, SyncReport, graph_of_both, hex_of, send
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.storage.url import open_store, without_secrets
from cas_ckpt.transfer.pack_writer import write_nodes

MOST_NAMED = 10
"""Branches that an error lists."""

_LOGGER = logging.getLogger("cas_ckpt")


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Options of a fetch.

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
    max_bandwidth: float | None = None
    progress: Progress = SILENT
    depth: int | None = None
    filter: Sequence[str] = ()
    commits: Sequence[str] = ()
    widen: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "tags", optional_flag("tags", self.tags))

    @property
    def options(self) -> SendOptions:
        """How to send."""
        return SendOptions(
            "fetch", self.dry_run, self.max_bandwidth, self.progress, depth=self.depth, keys=tuple(self.filter),
            again=self.widen,
        )  # fmt: skip


def fetch(handle: RepositoryHandle, request: FetchRequest) -> SyncReport:
    """Bring commits of a named remote here; its branches as they are now become remote-tracking branches.

    Raises:
        NotFoundError: no such remote, or no branch that matches. NoRepositoryError: there is none at its URL.
    """
    name, url, remote = remote_named(handle, request.remote)
    if name is None or remote is None:
        return _fetch_head(handle, url, request)
    if request.filter and not remote.promisor:
        raise InvalidInputError(
            f"remote {name!r} is not to keep what a filter leaves there: say so first "
            f"(repo.set_remote({name!r}, promisor=True)), or fetch without one"
        )
    request = replace(request, filter=request.filter or remote.filter, widen=bool(request.filter))
    with opened(url, read_only=True, cache=handle.cache_place, taker=handle) as other:
        recognise(handle, other, remote, dry_run=request.dry_run)
        return replace(_fetch(handle, other, name, request, request.branches or remote.fetch), url=other.store.url)


def _fetch_head(handle: RepositoryHandle, url: str, request: FetchRequest) -> SyncReport:
    """Bring one branch of a repository or bundle that has no name here; `FETCH_HEAD` names it then, as in git."""
    if request.filter or request.commits or request.prune or len(request.branches) > 1:
        raise InvalidInputError(
            f"{without_secrets(url)} has no name here: of it one branch comes, which FETCH_HEAD names then; for more, "
            'give it a name (repo.add_remote("NAME", URL))'
        )
    with opened(url, read_only=True, cache=handle.cache_place, taker=handle) as other:
        branch = next(iter(request.branches), other.default_branch)
        theirs = _branch_there(other, branch)
        updates = [RefUpdate(RefKind.REMOTE, FETCH_HEAD, theirs, force=True)]
        report = _send_with_tags(handle, other, updates, list(other.refs.list(RefKind.TAG)), [theirs], request)
        return replace(report, url=other.store.url)


def _branch_there(other: RepositoryHandle, branch: str) -> Digest:
    """The commit that a branch of the other side names. Raises NotFoundError if there is none."""
    found = branch_target(other, branch)
    if found is not None:
        return found
    similar = did_you_mean(branch, (ref.name for ref in other.refs.list(RefKind.BRANCH) if ref.target is not None))
    raise NotFoundError(f"there is no branch {branch!r} at {other.store.url}{similar}")


def _fetch(
    handle: RepositoryHandle, other: RepositoryHandle, name: str, request: FetchRequest, patterns: Sequence[str]
) -> SyncReport:
    theirs = list(other.refs.list(RefKind.BRANCH, RefKind.TAG))
    branches = [ref for ref in theirs if ref.kind is RefKind.BRANCH and is_wanted(ref.name, patterns)]
    if request.branches and not branches:
        raise NotFoundError(f"no branch of {other.store.url} is called {', '.join(request.branches)}")
    updates = [RefUpdate(RefKind.REMOTE, f"{name}/{ref.name}", ref.target, force=True) for ref in branches]
    wanted = dict.fromkeys(resolve(handle, revision) for revision in request.commits)
    updates += [RefUpdate(RefKind.PIN, f"{name}-{short(one)}", one, note=f"fetched from {name}") for one in wanted]
    if request.prune:
        there = {f"{name}/{ref.name}" for ref in theirs if ref.kind is RefKind.BRANCH}
        gone = [ref for ref in handle.refs.list(RefKind.REMOTE) if ref.name.startswith(f"{name}/")]
        updates += [RefUpdate(RefKind.REMOTE, ref.name, None) for ref in gone if ref.name not in there]
    heads = [ref.target for ref in branches if ref.target is not None]
    return _send_with_tags(handle, other, updates, theirs, heads, request)


def _send_with_tags(
    handle: RepositoryHandle, other: RepositoryHandle, updates: Sequence[RefUpdate], theirs: Sequence[Ref],
    heads: Sequence[Digest], request: FetchRequest,
) -> SyncReport:  # fmt: skip
    """Bring `updates`, and the tags that come along.

    A tag that names another commit here, or whose name is a branch's here, stays as it is, unless that is forced: it is
    rejected, as by git.
    """
    tags = [ref for ref in theirs if ref.kind is RefKind.TAG and ref.target is not None and request.tags is not False]
    if tags and request.tags is None:
        coming = graph_with(other, heads).reached(heads) | read_graph(handle).commits.keys()
        tags = [ref for ref in tags if ref.target in coming]
    own = {(ref.kind, ref.name): ref for ref in handle.refs.list(RefKind.TAG, RefKind.BRANCH) if ref.target is not None}
    taken, rejected = [], []
    for ref in tags:
        known = own.get((RefKind.TAG, ref.name))
        if known is not None and known.target == ref.target:
            continue
        is_free = request.force or (known is None and may_come(handle, other, ref))
        if is_free and (RefKind.BRANCH, ref.name) not in own:
            taken.append(RefUpdate.of(ref, force=request.force))
        else:
            here = None if known is None else known.target
            rejected.append(MovedRef(f"{ref.kind.value}{ref.name}", hex_of(here), hex_of(ref.target), Moved.REJECTED))
    report = send(other, handle, [*updates, *taken], request.options, near=handle)
    return replace(report, refs=(*report.refs, *rejected))


def may_come(handle: RepositoryHandle, other: RepositoryHandle, ref: Ref) -> bool:
    """Whether a new tag or branch of the other side means nothing else here, nor an id there; said if not."""
    meaning = other_meaning(handle, ref.name, other)
    if meaning is not None:
        way = "fetch with force=True takes it" if ref.kind is RefKind.TAG else "with remote=NAME it comes as NAME/..."
        _LOGGER.warning(
            "the %s %r of %s is not taken: it reads as %s (%s)", ref.kind.label, ref.name, other.store.url, meaning, way
        )
    return meaning is None


def pull(
    handle: RepositoryHandle, request: FetchRequest, *, branch: str | None = None, rebase: bool = False
) -> SyncReport:
    """Fetch, then let the branch here go forward to the one of the same name there.

    Args:
        branch: That of this repository, begun if it is not there; None: the one that is checked out.
        rebase: Where both sides have commits of their own, those of this side are made anew on top of theirs.
    Raises:
        ConflictError: both sides have commits that the other has not; what was fetched stays.
        NotFoundError: the other side has no such branch.
    """
    own = current_branch(handle) if branch is None else branch
    name, url, remote = remote_named(handle, request.remote)
    if remote is not None:
        request = replace(request, filter=request.filter or remote.filter)
    with opened(url, read_only=True, cache=handle.cache_place, taker=handle) as other:
        if remote is not None:
            recognise(handle, other, remote, dry_run=request.dry_run)
        theirs = _branch_there(other, own)
        there = other.store.url
        source = other
        report = SyncReport(there, dry_run=request.dry_run)
        if name is not None and remote is not None:
            report = _fetch(handle, other, name, request, request.branches or (*remote.fetch, own))
            source = other if request.dry_run else handle
        options = replace(request.options, action="pull")
        ours = branch_target(handle, own)
        how = _standing(handle, source, ours, theirs)
        if how in (Moved.NEW, Moved.FORWARD):
            came = send(source, handle, [RefUpdate(RefKind.BRANCH, own, theirs)], options, near=handle)
            return replace(report if name else came, url=there, refs=(*report.refs, *came.refs))
        moved = MovedRef(f"{RefKind.BRANCH.value}{own}", hex_of(ours), hex_of(ours), Moved.SAME)
        if how is Moved.REBASED and ours is not None:
            if not rebase:
                raise ConflictError(
                    f"branch {own!r} is at {short(ours)} here and at {short(theirs)} at {there}, and neither follows "
                    "the other: put the commits here on top of those there (repo.pull(rebase=True)), or push them "
                    f'under another name ("{own}:NAME")'
                )
            moved = replace(moved, new=None, how=how)
            if not request.dry_run:
                if not name:
                    head = RefUpdate(RefKind.REMOTE, FETCH_HEAD, theirs, force=True)
                    send(source, handle, [head], options, near=handle)
                moved = rebase_branch(handle, own, ours, theirs)
        return replace(report, url=there, refs=(*report.refs, moved))


def _standing(handle: RepositoryHandle, source: RepositoryHandle, ours: Digest | None, theirs: Digest) -> Moved:
    """The effect of a pull on the branch at `ours`; REBASED: each side has commits that the other has not."""
    if ours is None or ours == theirs:
        return Moved.NEW if ours is None else Moved.SAME
    if ours in graph_of_both(source, handle, [theirs]).reached([theirs]):
        return Moved.FORWARD
    return Moved.SAME if theirs in graph_with(handle, [ours]).reached([ours]) else Moved.REBASED


def rebase_branch(handle: RepositoryHandle, branch: str, ours: Digest, theirs: Digest) -> MovedRef:
    """Make the commits of `branch`, which is at `ours`, that `theirs` does not lead to anew on top of `theirs`.

    Both sides are in this repository. The former commits stay in the branch's log. The new ones have the same states,
    words and numbers, but no signatures, which are of the commits that were; the first names in its lineage what its
    state came from (`continued-from`), since that is no longer its parent.

    Raises:
        ConflictError: the branch moved meanwhile. NotFoundError: the data of one of the commits was forgotten.
        SignatureError: the branch takes signed commits only.
    """
    own = _own_commits(handle, ours, theirs)
    forgotten = forgotten_view(handle)
    without_data = next((digest for digest in own if digest in forgotten), None)
    if without_data is not None:
        raise NotFoundError(f"commit {short(without_data)} was forgotten: it cannot be made anew without its data")
    generation = handle.begin_writing()
    require_complete(handle, ours, generation)
    nodes = _made_anew(handle, own, theirs)
    ordered, hints = handle.hints.copies(nodes, [])
    packs = [write_nodes(handle.cached_store, ordered, hints=hints)]
    handle.add_written(packs, ordered, generation=generation)
    update = RefUpdate(RefKind.BRANCH, branch, nodes[-1].digest, force=True, expected=ours)
    send(handle, handle, [update], SendOptions("rebase"), near=handle)
    anew = {digest.hex(): node.digest.hex() for digest, node in zip(own, nodes, strict=True)}
    if handle.head.commit in anew:  # the live state is that of the new commit as well: the next one follows that
        handle.head = replace(handle.head, commit=anew[handle.head.commit])
    return MovedRef(update.key, ours.hex(), nodes[-1].digest.hex(), Moved.REBASED)


def _own_commits(handle: RepositoryHandle, ours: Digest, theirs: Digest) -> list[Digest]:
    """The commits to be made anew, the eldest first."""
    graph = graph_with(handle, [ours, theirs])
    there = graph.reached([theirs])
    found: list[Digest] = []
    at: bytes | None = ours
    while at is not None and at not in there:
        found.append(Digest(at))
        commit = graph.commits.get(at)
        at = commit.parents[0] if commit is not None and commit.parents else None
    return found[::-1]


def _made_anew(handle: RepositoryHandle, own: Sequence[Digest], onto: Digest) -> list[Node]:
    made: dict[Digest, Node] = {}
    parent = onto
    for digest in own:
        commit = decode_commit(handle.read_node(ObjectKind.COMMIT, digest))
        lineage = commit.lineage
        if not made and commit.parents:
            lineage = (*lineage, LineageEdge(CONTINUED_FROM, commit.parents[0]))
        others = [made[other].digest if other in made else other for other in commit.parents[1:]]
        parents = tuple(dict.fromkeys((parent, *others)))
        made[digest] = commit_node(replace(commit, parents=parents, lineage=lineage, signature=None))
        parent = made[digest].digest
    return list(made.values())


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
        require_whole(other)
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
    default = other.default_branch
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
            remotes = [replace(remote, repository="") for remote in read_settings(made.store).remotes]
            if remotes == [origin] and not any(made.refs.list(RefKind.BRANCH)):  # a clone of it that has not ended
                if made.default_branch != config.default_branch:
                    change_default_branch(made, config.default_branch)
                return made
            made.close()
        raise
    try:
        add_remote(made, origin)
    except BaseException:
        made.close()
        raise
    return made


def _fill(made: RepositoryHandle, other: RepositoryHandle, request: FetchRequest, branch: str) -> SyncReport:
    recognise(made, other, read_settings(made.store).remote(ORIGIN), dry_run=False)
    wanted = (*request.branches, branch) if request.branches else ()  # what begins here comes like the others
    report = _fetch(made, other, ORIGIN, replace(request, branches=()), wanted)
    start = branch_target(other, branch)
    if start is None:
        return replace(report, url=other.store.url)  # there is no commit yet
    update = RefUpdate(RefKind.BRANCH, branch, start)
    moved = send(other, made, [update], replace(request.options, action="clone"), near=made)
    return replace(report, url=other.store.url, refs=(*report.refs, *moved.refs))


def take_bundle(
    handle: RepositoryHandle, path: str | os.PathLike[str], *, remote: str | None = None, dry_run: bool = False,
    progress: Progress = SILENT,
) -> SyncReport:  # fmt: skip
    """Bring the commits of a bundle here; its branches move those of the same names forward, or begin them.

    Args:
        remote: Its branches become branches of this remote (`NAME/main`) instead; it need not be set.
    Raises:
        NotFoundError: it needs commits that are not here. ConflictError: a branch here has commits of its own, or a
            tag names another commit. CorruptionError: it is damaged, or was changed.
    """
    with opened_bundle(path) as (store, source):
        require_prerequisites(handle, store)
        updates = []
        own = {(ref.kind, ref.name) for ref in handle.refs.list(RefKind.BRANCH, RefKind.TAG)}
        for ref in source.refs.list(RefKind.BRANCH, RefKind.TAG, RefKind.PIN):
            if remote is not None and ref.kind is RefKind.BRANCH:
                name = f"{check_remote_name(remote)}/{ref.name}"
                updates.append(RefUpdate(RefKind.REMOTE, name, ref.target, force=True))
            elif ref.kind is RefKind.PIN or (ref.kind, ref.name) in own or may_come(handle, source, ref):
                updates.append(RefUpdate.of(ref))
        options = SendOptions("bundle", dry_run, progress=progress)
        return replace(send(source, handle, updates, options, near=handle), url=store.url)
