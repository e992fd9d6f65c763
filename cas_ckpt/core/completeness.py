"""Checks before a ref may name an old commit: all that it keeps must be there, and not be collected.

    1. the commit itself: every object of its state, condemned packs left out; but for chunks that a remote promised
    2. its history: kept by a ref of this generation, of which
       a. those are asked that are likely to have it near their heads; else
       b. it was found to be kept before, in this very state of a garbage collection that is idle; else
       c. all refs, and the whole graph; what none of them keeps is looked up object by object

The same is asked of commits that were forgotten and are wanted again after all (`unforget`).

Invariant: what passes here is kept by the ref from the moment of its swap. What other refs lead
to is theirs to keep and not looked at again. a and b cost the same in a long history as in a short one.

Before the last local copy of a commit goes (`forget` before it writes anything down, garbage collection before it takes
what was forgotten earlier), the tiers that are to have it are asked, each time:

    1. can it be reached, is it the repository that it was when it was first asked, and not this one
    2. do its refs lead to the commit, and has it not forgotten it
    3. is every object of the commit whole in packs that are listed there, with the sizes that they had
    4. if asked for: are the bytes intact, all of them read

A commit that a tier is to have (of a branch that it wants, or that it was seen to have) is passed only if
that tier was seen to have it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing
from fnmatch import fnmatchcase
from itertools import compress
from operator import not_
from typing import TypeAlias

from cas_ckpt.core.forgotten import read_forgotten, remove_forgotten, write_forgotten
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import Graph, graph_behind, graph_with, promised_commits, promisors, read_graph
from cas_ckpt.core.protocol import GcPhase, GcState, read_gc_state
from cas_ckpt.core.records import commit_of
from cas_ckpt.core.refs import Generation, Ref, RefKind, default_author
from cas_ckpt.core.settings import Remote, read_settings
from cas_ckpt.core.tree import naming_forgotten, reachable
from cas_ckpt.errors import CkptError, ConflictError, InvalidInputError, NotFoundError
from cas_ckpt.index import garbage, history
from cas_ckpt.index.integrity import IntegrityView, UnusableParts
from cas_ckpt.objects.digest import Digest, ObjectKind, short
from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.store import Store

NEAR = 64
"""How many commits behind the head of a likely ref are looked at, by first parents."""

MANY_OBJECTS = 1000
"""Of so many objects the index is asked for all chunks that there are, which commits will ask for, too."""


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
    lost = [digest for digest in unnamed if not _is_complete(handle, digest, generation)]
    if lost:
        write_forgotten(handle.store, lost, author=author)


def _is_complete(handle: RepositoryHandle, commit: Digest, generation: Generation) -> bool:
    try:
        require_complete(handle, commit, generation)
    except NotFoundError:
        return False
    return True


# --- what tiers are asked before the last copy here goes ----------------------------------------


Damaged: TypeAlias = Callable[[RepositoryHandle], Iterable[str]]


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
            if _is_same_place(handle.store, other.store):
                return dict.fromkeys(commits, f"{tier.name} is this repository itself")
            tier.require_same(other.config.store_id)
            return _lacking(other, tier.name, commits, damaged)
    except ConflictError as error:
        return dict.fromkeys(commits, str(error))
    except CkptError as error:
        return dict.fromkeys(commits, f"{tier.name} cannot be asked whether it still has it: {error}")


def _is_same_place(one: Store, other: Store) -> bool:
    if isinstance(one, FileStore) and isinstance(other, FileStore):
        return one.root.samefile(other.root)  # a link, or a mount, may have put it there
    return one.url == other.url


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
