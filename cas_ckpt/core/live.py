"""Live objects: the commits that refs keep, all that those commits need, and whether that is there.

    heads       targets of branches, tags and pins, and every commit that they lead to
    reflog      old targets that a ref's log remembers and that have not expired, and what they lead to
    orphans     commits that were published and that nothing leads to: a ref was lost (garbage collection alone)
    forgotten   keep their own commit object, so that history stays readable, and nothing else;
                unless a ref names them directly
    promised    commits that branches of a promisor led to: of what these need, chunks may be absent here and are not
                lost (index/garbage.py); elsewhere.py brings them

Before a ref may name an old commit (`require_complete`), all that it keeps must be there, and not be collected:

    1. the commit itself: every object of its state, condemned packs left out; but for chunks that a remote promised
    2. its history: kept by a ref of this generation, of which
       a. those are asked that are likely to have it near their heads; else
       b. it was found to be kept before, in this very state of a garbage collection that is idle; else
       c. all refs, and the whole graph; what none of them keeps is looked up object by object

The same is asked of commits that were forgotten and are wanted again after all (`unforget`). What passes is kept by the
ref from the moment of its swap. What other refs lead to is theirs to keep and not looked at again. a and b cost the
same in a long history as in a short one.

Before the last local copy of a commit goes (`forget` before it writes anything down, garbage collection before it takes
what was forgotten earlier), the tiers that are to have it are asked, each time (`not_at_tiers`):

    1. can it be reached, is it the repository that it was when it was first asked, and not this one
    2. do its refs lead to the commit, and has it not forgotten it
    3. is every object of the commit whole in packs that are listed there, with the sizes that they had
    4. if asked for: are the bytes intact, all of them read

A commit that a tier is to have (of a branch that it wants, or that it was seen to have) is passed only if
that tier was seen to have it.

Invariant: fails rather than leave something out: a head, or a commit that a head leads to, which the index cannot find
after a look at the store is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain, compress
from operator import not_
from typing import TypeAlias

from cas_ckpt.core.forgotten import (
    read_forgotten,
    read_forgotten_leniently,
    read_released,
    remove_forgotten,
    write_forgotten,
)
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.protocol import GcPhase, GcState, read_gc_state
from cas_ckpt.core.records import commit_of
from cas_ckpt.core.refs import Generation, Ref, RefKind, default_author
from cas_ckpt.core.settings import Remote, read_settings
from cas_ckpt.core.tree import naming_forgotten, reachable
from cas_ckpt.errors import (
    CkptError,
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    TransientStorageError,
    UnsupportedVersionError,
)
from cas_ckpt.index import garbage, history, remembered
from cas_ckpt.index.history import CommitLinks
from cas_ckpt.index.integrity import IntegrityView, UnusableParts
from cas_ckpt.objects.digest import Digest, ObjectKind, short
from cas_ckpt.objects.graph import CommitGraph
from cas_ckpt.objects.pack import PACK_PREFIX
from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.store import Store

Graph: TypeAlias = CommitGraph[CommitLinks]
Damaged: TypeAlias = Callable[[RepositoryHandle], Iterable[str]]

ASIDE_PREFIX = "damaged/"
"""Where repair moves what is damaged, under its former key."""

LOOKS = 5
"""Times that the index is brought up to date and read, when somebody changes it in between."""

NEAR = 64
"""How many commits behind the head of a likely ref are looked at, by first parents."""

MANY_OBJECTS = 1000
"""Of so many objects the index is asked for all chunks that there are, which commits will ask for, too."""


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
        # What orphans follow has to be there: what a commit that is not there followed would pass for garbage.
        for missing, child in graph.unknown_parents(graph.ancestors(orphans)).items():
            raise CorruptionError(
                f"commit {short(missing)}, a parent of {short(child)}, which no ref leads to any more, is in no intact "
                "pack, so it is not known what must stay: run repo.fsck(), and bring it back from a copy, or forget "
                "the commits that follow it"
            )
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


def packs_were_set_aside(store: Store) -> bool:
    """Whether a repair moved damaged packs away, whose commits may have been nowhere else."""
    return any(True for _ in store.list(ASIDE_PREFIX + PACK_PREFIX))


def orphan_name(digest: bytes) -> str:
    """The branch that is proposed for an orphan."""
    return f"orphan-{digest.hex()[:8]}"


# --- before a ref may name an old commit --------------------------------------------------------


def require_complete(
    handle: RepositoryHandle, target: Digest, generation: Generation, *, likely: Sequence[tuple[RefKind, str]] = ()
) -> None:
    """Refuse a commit of which something was, or is about to be, collected; and its history likewise.

    Args:
        generation: That of garbage collection, read after the ref that is to name `target`.
        likely: Refs that may have it near their heads: with one of these nothing else is looked at.
    Raises:
        NotFoundError: it is not complete; says whether it was forgotten.
    """
    commit = commit_of(handle, target)
    with naming_forgotten(handle, Digest(commit.root)):
        handle.read_node(ObjectKind.TREE, Digest(commit.root))
        if generation.number == 0 and not handle.elsewhere.remotes():
            return  # no garbage collection ever began, and all that is named came here
        _require_known(handle, target, _needed(handle, [target]))
    likely = [*likely, (RefKind.BRANCH, handle.default_branch)]
    if any(_keeps_near(handle, *ref, target, generation) for ref in likely):
        return
    behind = list(_history_of_its_own(handle, target, generation))
    if behind:
        forgotten = read_forgotten(handle.store)
        _require_known(handle, target, behind)
        _require_known(handle, target, _needed(handle, [digest for digest in behind if digest not in forgotten]))


def _needed(handle: RepositoryHandle, commits: Sequence[Digest]) -> list[Digest]:
    """All objects that these commits keep, each once."""
    rows = [commit_of(handle, digest) for digest in commits]
    layouts = {Digest(row.layout) for row in rows if row.layout is not None}
    roots = (Digest(row.root) for row in rows)
    return [*commits, *layouts, *reachable(handle, *roots, without=lambda absent: _promised(handle, absent))]


def _promised(handle: RepositoryHandle, absent: Sequence[Digest]) -> Collection[Digest]:
    """Those of what is not here that a remote promised."""
    remotes = promisors(handle.store)
    if not remotes:
        return ()
    refs = list(handle.refs.every())
    graph = read_graph(handle)
    gone = read_forgotten(handle.store) - {ref.target for ref in refs}
    roots = {graph.commits[commit].root for commit in promised_commits(graph, refs, remotes) - gone}
    return handle.index.read(garbage.promised, absent, roots)


def _require_known(handle: RepositoryHandle, commit: Digest, needed: list[Digest]) -> None:
    if handle.all_stored(needed) if len(needed) <= MANY_OBJECTS else all(handle.known(needed)):
        return
    lost = list(compress(needed, map(not_, handle.known(needed))))
    if set(_promised(handle, lost)) != set(lost):  # of promised chunks parts may be here, or condemned
        raise NotFoundError(
            f"the data of commit {short(commit)}, or of one that it follows, was removed by gc, as nothing kept it: "
            "choose another commit, or commit its state again"
        )


def _history_of_its_own(handle: RepositoryHandle, target: Digest, generation: Generation) -> Iterator[Digest]:
    """The ancestors of `target` that no ref keeps.

    A ref of an earlier generation keeps nothing for sure: the collection that is under way has not fenced it
    yet, and it may be deleted before it is. Logs keep nothing either: the fence takes old entries out.
    """
    state = read_gc_state(handle.store)  # before the refs
    record, found = handle.kept_history
    if state.phase == GcPhase.IDLE and state.record == record and target in found:
        return
    graph = read_graph(handle)
    heads = [ref.target for ref in handle.refs.list() if ref.target is not None and _is_fenced(ref, generation)]
    kept = graph.reached(heads)
    if state.phase == GcPhase.IDLE and state.generation == generation:
        # No pack goes before the next collection changes the state, and then the fence stops its writers.
        handle.kept_history = (state.record, kept)
    if target in kept:
        return
    for digest in sorted(graph.reached([target], without=kept) - {target}):
        if digest not in graph:
            raise NotFoundError(
                f"commit {short(digest)}, which {short(target)} follows, was given up to garbage collection: "
                "commit the state again"
            )
        yield Digest(digest)


def _is_fenced(ref: Ref, generation: Generation) -> bool:
    return ref.generation == generation or ref.generation.number > generation.number


def _keeps_near(handle: RepositoryHandle, kind: RefKind, name: str, target: Digest, generation: Generation) -> bool:
    """Whether this ref, read now, is of this generation and has `target` near its head."""
    try:
        ref = handle.refs.get(kind, name)
    except (NotFoundError, InvalidInputError):
        return False
    if ref.target is None or not _is_fenced(ref, generation):
        return False
    return target == ref.target or target in handle.index.read(history.read_line, ref.target, most=NEAR, until=target)


def unforget(handle: RepositoryHandle, ids: Collection[Digest], *, seen: GcState | None = None) -> None:
    """Let these commits be forgotten no more, but for those whose data is gone.

        u1  take them out of the records
        u2  look, AFTER that, whether a ref names them, and if none does, whether they are complete
        u3  forget those again that are not

    A collection judges by records that it reads after its fence. One that condemns packs after u1 keeps what such
    a commit needs, if a ref leads to it; what an earlier one took, or may take, u2 finds missing or condemned. What a
    ref names is kept by that ref: it could not be put there otherwise. A commit whose data is gone stays
    forgotten, for else collections would end at that hole.

    Args:
        seen: State of garbage collection that was read before they were forgotten; saves u2 and u3
            if no collection can have taken anything since.
    Raises:
        ConflictError: others write records about them faster than they can be taken out.
        PermissionDeniedError: records may not be deleted here.
    """
    author = default_author()
    wanted = remove_forgotten(handle.store, ids, author=author)
    if not wanted:
        return
    generation = handle.begin_writing()
    if seen is not None and seen.phase == GcPhase.IDLE and seen.generation == generation:
        return
    unnamed = wanted - {ref.target for ref in handle.refs.list()}
    lost = []
    for digest in unnamed:
        try:
            require_complete(handle, digest, generation)
        except NotFoundError:
            lost.append(digest)
    if lost:
        write_forgotten(handle.store, lost, author=author)


# --- what tiers are asked before the last copy here goes ----------------------------------------


def not_at_tiers(
    handle: RepositoryHandle, refs: Iterable[Ref], going: Collection[Digest], *, damaged: Damaged = lambda _: ()
) -> dict[Digest, str]:
    """Commits of `going` that a tier is to have, and has not -> why not, in words.

    Args:
        refs: At least all branches and remote-tracking branches.
        damaged: Ids of commits of a tier that are found damaged there by reading every byte, if that is asked for.
    """
    tiers = read_settings(handle.store).tiers if going else ()
    refs = list(refs) if tiers else []
    found: dict[Digest, str] = {}
    for tier in tiers:
        ours = [ref.target for ref in refs if ref.target is not None and _is_for(tier, ref)]
        asked = graph_behind(handle, ours).ancestors(ours).intersection(going)
        if asked:
            found |= _not_there(handle, tier, [Digest(one) for one in asked], damaged)
    return found


def _is_for(tier: Remote, ref: Ref) -> bool:
    """Whether the tier is to have what the ref leads to: a branch, or one that it had, and that may be gone here."""
    own = f"{tier.name}/" if ref.kind is RefKind.REMOTE else ""
    if ref.kind not in (RefKind.BRANCH, RefKind.REMOTE) or not ref.name.startswith(own):
        return False
    return not tier.push or any(fnmatchcase(ref.name.removeprefix(own), one) for one in tier.push)


def _not_there(
    handle: RepositoryHandle, tier: Remote, commits: Collection[Digest], damaged: Damaged
) -> dict[Digest, str]:
    try:
        place = tier.place(handle.store)
        with closing(RepositoryHandle.open(place, read_only=True, cache=handle.cache_place)) as other:
            one, two = handle.store, other.store
            same = one.url == two.url
            if isinstance(one, FileStore) and isinstance(two, FileStore):
                same = one.root.samefile(two.root)  # a link, or a mount, may have put it there
            if same:
                return dict.fromkeys(commits, f"{tier.name} is this repository itself")
            tier.require_same(other.config.store_id)
            return _lacking(other, tier.name, commits, damaged)
    except ConflictError as error:
        return dict.fromkeys(commits, str(error))
    except CkptError as error:
        return dict.fromkeys(commits, f"{tier.name} cannot be asked whether it still has it: {error}")


def _lacking(other: RepositoryHandle, name: str, commits: Collection[Digest], damaged: Damaged) -> dict[Digest, str]:
    other.sync()
    refs = list(other.refs.list())
    heads = [ref.target for ref in refs if ref.target is not None]
    graph = graph_with(other, heads)
    kept, forgotten = graph.reached(heads), read_forgotten(other.store).difference(heads)
    whole = whole_commits(other, graph, commits)
    hit = frozenset(damaged(other))
    found: dict[Digest, str] = {}
    for commit in commits:
        if commit in forgotten:
            found[commit] = f"forgotten at {name}, too"
        elif commit not in kept:
            found[commit] = f"no ref at {name} leads to it any more"
        elif commit not in whole:
            found[commit] = f"some of its data is gone at {name}"
        elif commit.hex() in hit:
            found[commit] = f"damaged at {name}: repo.fsck(read_data=True) there says what"
    return found


def whole_commits(handle: RepositoryHandle, graph: Graph, commits: Iterable[Digest]) -> set[Digest]:
    """Those of `commits` of which every object is whole in packs that the index knows."""
    integrity = IntegrityView(handle.index)
    wrong = integrity.above(integrity.incomplete(integrity.referred_only() | integrity.in_parts(), UnusableParts()))
    parts = {one: (one, graph.commits[one].root, graph.commits[one].layout) for one in commits if one in graph}
    numbers = integrity.numbers(part for each in parts.values() for part in each if part is not None)
    return {
        one for one, each in parts.items()
        if all(part in numbers and numbers[part] not in wrong for part in each if part is not None)
    }  # fmt: skip
