"""live: which commits must stay, and what they keep.

    heads       targets of branches, tags and pins, and every commit that they lead to
    reflog      old targets that a ref's log remembers and that have not expired, and what they lead to
    orphans     commits that were published and that nothing leads to: a ref was lost (garbage collection alone)
    forgotten   keep their own commit object, so that history stays readable, and nothing else;
                unless a ref names them directly

Invariant: fails rather than leave something out: a head, or a commit that a head leads to, which
the index cannot find after a look at the store is an error. Pure but for reading.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cas_ckpt.core.forgotten import read_forgotten, read_released
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.refs import Ref
from cas_ckpt.core.revisions import Revision, resolve
from cas_ckpt.errors import CorruptionError, InvalidInputError, NotFoundError, TransientStorageError
from cas_ckpt.index import history, meta
from cas_ckpt.index.history import CommitLinks
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.storage.store import Store

# DOC of cas_ckpt.core.graph:
# merge-base: where the histories of some commits meet.
#
# Invariant: the answer is exact on any graph: every common ancestor from which no other common
# ancestor can be reached. A commit is its own ancestor, as in git.
#


def merge_bases(handle: RepositoryHandle, revisions: Sequence[Revision]) -> list[Digest]:
    """The best common ancestors of the first revision with the others together, by id.

    As in git, several others count as if they were merged: what is common to the first and any of them.

    Raises:
        InvalidInputError: fewer than two revisions. NotFoundError: one that is not there.
    """
    if len(revisions) < 2:
        raise InvalidInputError(f"a merge base of {len(revisions)} commits: give two revisions or more")
    first, *others = (resolve(handle, revision) for revision in revisions)
    links = links_of(handle, [first, *others])
    return best_common(links, first, others)


def is_ancestor(handle: RepositoryHandle, old: Revision, new: Revision) -> bool:
    """Whether `new` leads to `old`; a commit leads to itself."""
    first, last = resolve(handle, old), resolve(handle, new)
    return first in ancestors(links_of(handle, [last]), [last])


def best_common(links: Mapping[bytes, CommitLinks], first: bytes, others: Iterable[bytes]) -> list[Digest]:
    """The common ancestors of `first` and any of `others` that no other common ancestor leads to."""
    common = ancestors(links, [first]) & ancestors(links, others)
    # Whatever a common ancestor leads to is common too, so one step is enough to know the worse ones.
    worse = {parent for digest in common for parent in links[digest].parents}
    return [Digest(digest) for digest in sorted(common - worse)]


def ancestors(links: Mapping[bytes, CommitLinks], starts: Iterable[bytes]) -> set[bytes]:
    """`starts` and all that they lead to, as far as it is known."""
    found = {start for start in starts if start in links}
    todo = list(found)
    while todo:
        for parent in links[todo.pop()].parents:
            if parent not in found and parent in links:
                found.add(parent)
                todo.append(parent)
    return found


def links_of(handle: RepositoryHandle, starts: Sequence[bytes]) -> Mapping[bytes, CommitLinks]:
    """The commit graph, brought up to date if it lacks one of `starts` or something behind it.

    Raises:
        NotFoundError: one of `starts` is in no pack.
    """
    links = handle.index.read(history.read_links)
    reached = ancestors(links, starts)
    if not reached.issuperset(starts) or not all(parent in reached for one in reached for parent in links[one].parents):
        handle.sync()
        links = handle.index.read(history.read_links)
    for start in starts:
        if start not in links:
            raise NotFoundError(f"commit {start.hex()} is in no pack: run repo.fsck()")
    return links


# DOC of cas_ckpt.core.graph:
# Orphaned commits: those that were published, and that nothing leads to any more.
#
# A ref that is lost, or that was put back from an older copy, leaves commits that no ref, log of a ref, record of
# forgotten commits or of released ones leads to. So does a writer that dies before its swap: that one was
# never acknowledged, and is garbage. They are told apart by what only an acknowledged commit has:
#
#   - another commit follows it: a writer takes its parent from a ref; or
#   - the index remembers that a ref named it: it is told so after the swap alone; or
#   - it follows an orphan. It may have died before its swap all the same: which of the two, nobody can know.
#
# Invariant: a commit without any of these is not an orphan, so that writers that are killed again and again fill
# nothing. Pure.
#


def orphaned(
    links: Mapping[bytes, CommitLinks], known: Iterable[bytes], remembered: Collection[bytes],
    *, now: Mapping[bytes, CommitLinks] | None = None,
) -> frozenset[bytes]:  # fmt: skip
    """The orphaned commits of a graph.

    Args:
        known: What refs, logs and records name; what these lead to is no orphan.
        remembered: Commits that a ref named when the index last heard of it.
        now: The graph with all that `known` names. Give it where others commit meanwhile: `links` and `remembered`
            are read before `known`, so that what was published by then is named, and `now` after it.
    """
    unknown = links.keys() - ancestors(links if now is None else now, known)
    followed = {parent for digest in unknown for parent in links[digest].parents}
    proven = {digest for digest in unknown if digest in followed or digest in remembered}
    return frozenset(digest for digest in unknown if digest in proven or not proven.isdisjoint(links[digest].parents))


def tips(links: Mapping[bytes, CommitLinks], orphans: Collection[bytes]) -> list[bytes]:
    """The orphans that no other orphan follows: naming these keeps all of them."""
    followed = {parent for digest in orphans for parent in links[digest].parents}
    return sorted(digest for digest in orphans if digest not in followed)


def orphan_name(digest: bytes) -> str:
    """The branch that is proposed for an orphan."""
    return f"orphan-{digest.hex()[:8]}"


LOOKS = 5
"""Times that the index is brought up to date and read, when somebody changes it in between."""


@dataclass(frozen=True, slots=True)
class LiveSets:
    """What must stay.

    Attributes:
        commits: Commits whose own object stays, forgotten ones included.
        roots: Trees and layout nodes of those that keep their data.
        published: Every commit that a ref leads to or ever led to, as far as logs remember: what is
            neither live nor published may belong to a commit that is being made.
        forgotten: Commits of `commits` that keep no data.
    """

    commits: frozenset[bytes]
    roots: frozenset[bytes]
    published: frozenset[bytes]
    forgotten: frozenset[bytes]


def live_sets(
    handle: RepositoryHandle,
    *,
    refs: Sequence[Ref] | None = None,
    forgotten: Iterable[Digest] | None = None,
    expire_before_us: int = 0,
    keep_orphans: bool = False,
) -> LiveSets:
    """What the refs of the repository keep.

    Args:
        refs: As they were read, placeholders and deleted ones too; None: read them now.
        forgotten: Commits that were forgotten; None: read them now.
        expire_before_us: Entries of logs that are older keep nothing any more.
        keep_orphans: Keep orphaned commits too (core/graph.py); `refs` are all there are.
    Raises:
        CorruptionError: a ref leads to a commit that is in no intact pack.
    """
    refs = list(handle.refs.every()) if refs is None else refs
    gone = frozenset(read_forgotten(handle.store) if forgotten is None else forgotten)
    links = _links(handle, refs)
    heads = {ref.target: ref.name for ref in refs if ref.target is not None}
    commits = _ancestry(links, heads)
    named = logged(refs, expire_before_us) & links.keys()
    if keep_orphans:
        # `links` was read after the refs: commits that came between are kept, too.
        remembered_targets = {row.target for row in handle.index.read(meta.read_refs).values()}
        named |= orphaned(links, known_commits(handle.store, refs, gone), remembered_targets)
    remembered = ancestors(links, named) - commits
    keeping = {digest for digest in commits | remembered if digest not in gone or digest in heads}
    published = commits | remembered | ancestors(links, logged(refs, 0) & links.keys()) | (gone & links.keys())
    return LiveSets(
        commits=frozenset(commits | remembered),
        roots=frozenset(_named(links, keeping)),
        published=frozenset(published),
        forgotten=frozenset((commits | remembered) - keeping),
    )


def known_commits(store: Store, refs: Sequence[Ref], forgotten: Iterable[bytes]) -> set[bytes]:
    """Commits that refs, their logs, and records of forgotten and released commits name.

    Args:
        refs: All of them, placeholders and deleted ones too.
    """
    heads: set[bytes] = {ref.target for ref in refs if ref.target is not None}
    return heads | logged(refs, 0) | set(forgotten) | read_released(store)


def released_by_expiry(handle: RepositoryHandle, refs: Iterable[Ref], sets: LiveSets, before_us: int) -> set[Digest]:
    """Commits that only entries of logs name that are too old now: those are going to be taken out."""
    links = handle.index.read(history.read_links)
    refs = list(refs)
    named = (logged(refs, 0) - logged(refs, before_us)) & links.keys()
    return {Digest(digest) for digest in ancestors(links, named) - sets.commits}


def all_refs(handle: RepositoryHandle) -> list[Ref]:
    """Every ref, placeholders and deleted ones too: none that was there is missing, as deleted ones leave a record.

    Raises:
        CorruptionError: records of refs are lost; says which, and what brings them back.
    """
    # Before the listing, so that all of these were there then.
    known = handle.refs.announced() | handle.index.read(meta.read_refs).keys()
    refs = list(handle.refs.every())
    lost = sorted(known - {ref.key for ref in refs})
    if lost:
        raise CorruptionError(
            f"{lost[0]} is gone ({len(lost)} refs are), and nobody deleted it: what it named would be lost. Restore "
            'the file from a copy, or run repo.repair("refs")'
        )
    if not refs and handle.index.read(history.read_links) and not any(handle.refs.every()):
        raise CorruptionError(
            "there are commits, and no branch, tag or pin, nor any trace of one: refs/ is lost. Restore it from a "
            'copy, or name a commit: repo.repair("refs", refs={"main": COMMIT})'
        )
    return refs


def _links(handle: RepositoryHandle, refs: Iterable[Ref]) -> Mapping[bytes, CommitLinks]:
    """The commit graph, of one moment at which the index knew every intact pack that the store had.

    Raises:
        TransientStorageError: others change the index faster than it can be read.
    """
    links = handle.index.read(history.read_links)
    starts = [ref.target for ref in refs if ref.target is not None]
    if _is_whole(links, starts):
        return links
    for _ in range(LOOKS):
        handle.sync()
        links, packs = handle.index.read(history.read_links_and_packs)
        if handle.present_packs().keys() - handle.damaged.keys() <= packs:
            return links
    raise TransientStorageError(
        f"index {handle.index.place}: others change it while it is read; nothing was done, try again"
    )


def _is_whole(links: Mapping[bytes, CommitLinks], starts: Iterable[bytes]) -> bool:
    reached = ancestors(links, starts)
    return all(start in links for start in starts) and all(
        parent in reached for digest in reached for parent in links[digest].parents
    )


def _ancestry(links: Mapping[bytes, CommitLinks], heads: Mapping[Digest, str]) -> set[bytes]:
    """All that the heads lead to.

    Raises:
        CorruptionError: a commit on the way is not there.
    """
    for head, name in heads.items():
        if head not in links:
            raise _missing(head, f"which {name!r} names")
    reached = ancestors(links, heads)
    for digest in reached:
        for parent in links[digest].parents:
            if parent not in reached:
                raise _missing(parent, f"a parent of {short(digest)}")
    return reached


def _missing(digest: bytes, why: str) -> CorruptionError:
    return CorruptionError(
        f"commit {short(digest)}, {why}, is in no intact pack, so it is not known what must stay: "
        "run repo.fsck(), and restore the pack from a copy"
    )


def logged(refs: Iterable[Ref], since_us: int) -> set[bytes]:
    """Commits that logs of refs remember, since a time."""
    moves = (move for ref in refs for move in ref.log if move.time_us >= since_us)
    return {digest for move in moves for digest in (move.old, move.new) if digest is not None}


def _named(links: Mapping[bytes, CommitLinks], commits: Iterable[bytes]) -> Iterable[bytes]:
    for digest in commits:
        link = links[digest]
        yield link.root
        if link.layout is not None:
            yield link.layout
