"""Live objects: the commits that refs keep, and all that those commits need.

    heads       targets of branches, tags and pins, and every commit that they lead to
    reflog      old targets that a ref's log remembers and that have not expired, and what they lead to
    orphans     commits that were published and that nothing leads to: a ref was lost (garbage collection alone)
    forgotten   keep their own commit object, so that history stays readable, and nothing else;
                unless a ref names them directly
    promised    commits that branches of a promisor led to: of what these need, chunks may be absent here and are not
                lost (index/garbage.py); elsewhere.py brings them

Invariant: fails rather than leave something out: a head, or a commit that a head leads to, which
the index cannot find after a look at the store is an error. Only reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import TypeAlias

from cas_ckpt.core.forgotten import read_forgotten_leniently, read_released
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.refs import Ref, RefKind
from cas_ckpt.core.settings import Remote, read_settings
from cas_ckpt.errors import CorruptionError, NotFoundError, TransientStorageError, UnsupportedVersionError
from cas_ckpt.index import history, remembered
from cas_ckpt.index.history import CommitLinks
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.objects.graph import CommitGraph
from cas_ckpt.objects.pack import PACK_PREFIX
from cas_ckpt.storage.store import Store

Graph: TypeAlias = CommitGraph[CommitLinks]

ASIDE_PREFIX = "damaged/"
"""Where repair moves what is damaged, under its former key."""

LOOKS = 5
"""Times that the index is brought up to date and read, when somebody changes it in between."""


def read_graph(handle: RepositoryHandle) -> Graph:
    """The commit graph as the index has it now."""
    return CommitGraph(handle.index.read(history.read_links))


def graph_with(handle: RepositoryHandle, starts: Sequence[bytes]) -> Graph:
    """The commit graph, brought up to date if it lacks one of `starts` or something behind it.

    Raises:
        NotFoundError: one of `starts` is in no intact pack.
    """
    graph = graph_behind(handle, starts)
    for start in starts:
        if start not in graph:
            raise NotFoundError(f"commit {start.hex()} is in no pack: run repo.fsck()")
    return graph


@dataclass(frozen=True, slots=True)
class LiveSets:
    """Live objects, which must stay.

    Attributes:
        commits: Commits whose own object stays, forgotten ones included.
        roots: Trees and layout nodes of those that keep their data.
        published: Every commit that a ref leads to or ever led to, as far as logs remember: what is
            neither live nor published may belong to a commit that is being made.
        forgotten: Commits of `commits` that keep no data.
        promised: Roots of states that remotes promise, as far as they are needed.
    """

    commits: frozenset[bytes]
    roots: frozenset[bytes]
    published: frozenset[bytes]
    forgotten: frozenset[bytes]
    promised: frozenset[bytes] = frozenset()


def live_sets(
    handle: RepositoryHandle,
    *,
    refs: Sequence[Ref] | None = None,
    forgotten: Iterable[Digest] | None = None,
    expire_before_us: int = 0,
    keep_orphans: bool = False,
) -> LiveSets:
    """The commits that the refs of the repository keep.

    Args:
        refs: As they were read, placeholders and deleted ones too; None: read them now.
        forgotten: Commits that were forgotten; None: read them now.
        expire_before_us: Entries of logs that are older keep nothing any more.
        keep_orphans: Keep orphaned commits too (CommitGraph.orphans); `refs` are all there are.
    Raises:
        CorruptionError: a ref, or an orphan, leads to a commit that is in no intact pack.
    """
    refs = list(handle.refs.every()) if refs is None else refs
    gone = frozenset(read_forgotten_leniently(handle.store) if forgotten is None else forgotten)
    graph = graph_behind(handle, [ref.target for ref in refs if ref.target is not None])
    heads = {ref.target: ref.name for ref in refs if ref.target is not None}
    commits = _all_behind(graph, heads)
    named = logged(refs, expire_before_us)
    if keep_orphans:
        # The graph was read after the refs: commits that came between are kept, too.
        remembered_targets = {row.target for row in handle.index.read(remembered.read_refs).values()}
        known = known_commits(handle.store, refs, gone)
        lost = bool(graph.unknown_parents(graph.commits)) and packs_were_set_aside(handle.store)
        orphans = graph.orphans(known, remembered_targets, packs_lost=lost)
        _require_whole_lines(graph, orphans)
        named |= orphans
    named_before = graph.ancestors(named) - commits
    keeping = {digest for digest in commits | named_before if digest not in gone or digest in heads}
    links = [graph.commits[digest] for digest in keeping]
    published = commits | named_before | graph.ancestors(logged(refs, 0)) | (gone & graph.commits.keys())
    promised = promised_commits(graph, refs, promisors(handle.store), expire_before_us) & keeping
    return LiveSets(
        commits=frozenset(commits | named_before),
        roots=frozenset(node for link in links for node in (link.root, link.layout) if node is not None),
        published=frozenset(published),
        forgotten=frozenset((commits | named_before) - keeping),
        promised=frozenset(graph.commits[digest].root for digest in promised),
    )


def promisors(store: Store) -> list[Remote]:
    """Remotes that promise something to the repository in `store`; none if its settings cannot be read."""
    if not store.abilities.local:
        return []
    try:
        return [remote for remote in read_settings(store).remotes if remote.promisor]
    except (CorruptionError, UnsupportedVersionError):
        return []


def promised_commits(graph: Graph, refs: Iterable[Ref], remotes: Iterable[Remote], since_us: int = 0) -> set[bytes]:
    """Commits that these remotes promise to keep: their branches led to them when they were last asked, or before.

    Nothing but the remote-tracking branches here, and their logs, says so. It is what this repository was told; whether
    it still holds, only the promisor knows.

    Args:
        refs: At least all remote-tracking branches, deleted ones too.
        since_us: Older entries of logs promise nothing.
    """
    names = tuple(f"{remote.name}/" for remote in remotes)
    own = [ref for ref in refs if ref.kind is RefKind.REMOTE and ref.name.startswith(names)] if names else []
    return graph.ancestors({ref.target for ref in own if ref.target is not None} | logged(own, since_us))


def unpushed_commits(graph: Graph, refs: Iterable[Ref], tiers: Iterable[Remote]) -> set[bytes]:
    """Commits of branches which one of `tiers` did not have when it was last asked.

    Args:
        refs: At least all branches and remote-tracking branches.
    """
    refs = [ref for ref in refs if ref.target is not None]
    found: set[bytes] = set()
    for tier in tiers:
        branches = (ref for ref in refs if ref.kind is RefKind.BRANCH)
        ours = [ref.target for ref in branches if not tier.push or any(fnmatchcase(ref.name, one) for one in tier.push)]
        there = [ref for ref in refs if ref.kind is RefKind.REMOTE and ref.name.startswith(f"{tier.name}/")]
        theirs = [ref.target for ref in there]
        found |= graph.ancestors(ours) - graph.reached(theirs)  # type: ignore[arg-type]
    return found


def unpushed_by_tier(handle: RepositoryHandle, refs: Iterable[Ref] | None = None) -> dict[str, set[bytes]]:
    """Tier -> commits of branches that it did not have when it was last asked; tiers that have all, too.

    Args:
        refs: At least all branches and remote-tracking branches; None: they are read, if there are tiers.
    """
    tiers = read_settings(handle.store).tiers
    if not tiers:
        return {}
    refs = list(handle.refs.list(RefKind.BRANCH, RefKind.REMOTE) if refs is None else refs)
    graph = graph_behind(handle, [ref.target for ref in refs if ref.kind is RefKind.BRANCH and ref.target is not None])
    return {tier.name: unpushed_commits(graph, refs, [tier]) for tier in tiers}


def known_commits(store: Store, refs: Sequence[Ref], forgotten: Iterable[bytes]) -> set[bytes]:
    """Commits that refs, their logs, and records of forgotten and released commits name.

    Args:
        refs: All of them, placeholders and deleted ones too.
    """
    heads: set[bytes] = {ref.target for ref in refs if ref.target is not None}
    return heads | logged(refs, 0) | set(forgotten) | read_released(store)


def logged(refs: Iterable[Ref], since_us: int) -> set[bytes]:
    """Commits that logs of refs remember, since a time."""
    moves = (move for ref in refs for move in ref.log if move.time_us >= since_us)
    return {digest for move in moves for digest in (move.old, move.new) if digest is not None}


def released_by_expiry(handle: RepositoryHandle, refs: Sequence[Ref], sets: LiveSets, before_us: int) -> set[Digest]:
    """Commits that only entries of logs name that are too old now: those are going to be taken out."""
    starts = logged(refs, 0) - logged(refs, before_us)
    graph = read_graph(handle)
    if not graph.reached(starts) <= graph.commits.keys():  # collected long ago, or written since the packs were listed
        handle.sync()
        graph = read_graph(handle)
    return {Digest(digest) for digest in graph.ancestors(starts) - sets.commits}


def all_refs(handle: RepositoryHandle) -> list[Ref]:
    """Every ref, placeholders and deleted ones too: none that was there is missing, as deleted ones leave a record.

    Raises:
        CorruptionError: records of refs are lost; says which, and what brings them back.
    """
    # Before the listing, so that all of these were there then.
    known = handle.refs.announced() | handle.index.read(remembered.read_refs).keys()
    refs = list(handle.refs.every())
    lost = sorted(known - {ref.key for ref in refs})
    if lost:
        raise CorruptionError(
            f"{lost[0]} is gone ({len(lost)} refs are), and was not deleted: what it named would be lost. Restore "
            'the file from a copy, or run repo.repair("refs")'
        )
    if not refs and read_graph(handle).commits and not any(handle.refs.every()):
        raise CorruptionError(
            "there are commits, and no branch, tag or pin, nor any trace of one: refs/ is lost. Restore it from a "
            'copy, or name a commit: repo.repair("refs", refs={"main": COMMIT})'
        )
    return refs


def graph_behind(handle: RepositoryHandle, starts: Sequence[bytes]) -> Graph:
    """The commit graph with all behind `starts`, or of a moment at which the index knew every intact pack of the store.

    Raises:
        TransientStorageError: others change the index faster than it can be read.
    """
    graph = read_graph(handle)
    if graph.reached(starts) <= graph.commits.keys():
        return graph
    for _ in range(LOOKS):
        handle.sync()
        links, packs = handle.index.read(history.read_links_and_packs)
        if handle.present_packs().keys() - handle.damaged.keys() <= packs:
            return CommitGraph(links)
    raise TransientStorageError(
        f"index {handle.index.place}: others change it while it is read; nothing was done, try again"
    )


def _all_behind(graph: Graph, heads: Mapping[Digest, str]) -> set[bytes]:
    """All that the heads lead to.

    Args:
        heads: Head -> the ref that names it.
    Raises:
        CorruptionError: a commit on the way is not there.
    """
    found = graph.reached(heads)
    missing = next((digest for digest in chain(heads, found) if digest not in graph), None)
    if missing is None:
        return found
    name = heads.get(Digest(missing))
    child = graph.unknown_parents(found & graph.commits.keys()).get(missing, b"")
    raise CorruptionError(
        f"commit {short(missing)}, {f'which {name!r} names' if name else f'a parent of {short(child)}'}, is in no "
        "intact pack, so it is not known what must stay: run repo.fsck(), and restore the pack from a copy"
    )


def _require_whole_lines(graph: Graph, orphans: Iterable[bytes]) -> None:
    """Refuse orphans that follow a commit which is not there: what that one followed would pass for garbage.

    Raises:
        CorruptionError: as said.
    """
    for missing, child in graph.unknown_parents(graph.ancestors(orphans)).items():
        raise CorruptionError(
            f"commit {short(missing)}, a parent of {short(child)}, which no ref leads to any more, is in no intact "
            "pack, so it is not known what must stay: run repo.fsck(), and bring it back from a copy, or forget the "
            "commits that follow it"
        )


def packs_were_set_aside(store: Store) -> bool:
    """Whether a repair moved damaged packs away, whose commits may have been nowhere else."""
    return any(True for _ in store.list(ASIDE_PREFIX + PACK_PREFIX))


def orphan_name(digest: bytes) -> str:
    """The branch that is proposed for an orphan."""
    return f"orphan-{digest.hex()[:8]}"
