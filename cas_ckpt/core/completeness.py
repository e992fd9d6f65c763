"""Checks before a ref may name an old commit: all that it keeps must be there, and not be collected.

    1. the commit itself: every object of its state, condemned packs left out; but for chunks that a remote promised
    2. its history: kept by a ref of this generation, of which
       a. those are asked that are likely to have it near their heads; else
       b. it was found to be kept before, in this very state of a garbage collection that is idle; else
       c. all refs, and the whole graph; what none of them keeps is looked up object by object

The same is asked of commits that were forgotten and are wanted again after all (`unforget`).

Invariant: what passes here is kept by the ref from the moment of its swap. What other refs lead
to is theirs to keep and not looked at again. a and b cost the same in a long history as in a short one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import compress
from operator import not_

from cas_ckpt.core.forgotten import read_forgotten, remove_forgotten, write_forgotten
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import promised_commits, promisors, read_graph
from cas_ckpt.core.protocol import GcPhase, GcState, read_gc_state
from cas_ckpt.core.records import commit_of
from cas_ckpt.core.refs import Generation, Ref, RefKind, default_author
from cas_ckpt.core.tree import naming_forgotten, reachable
from cas_ckpt.errors import InvalidInputError, NotFoundError
from cas_ckpt.index import history, promises
from cas_ckpt.objects.digest import Digest, ObjectKind, short

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
    return handle.index.read(promises.promised, absent, roots)


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
