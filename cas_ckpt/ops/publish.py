"""publish: the writer's half of the protocol that makes a commit safe (format.md, "Writing").

    w1  the caller has uploaded data packs, deduplicated against the index of generation g
    w2  read the ref (a new one: first create a placeholder of generation -1)
    w3  read gc/state, AFTER the ref
    w4  its generation is not g: stop, let the caller refresh the index and dedup again
    w5  upload the nodes, the commit object last, in one meta pack: everything is durable
    w6  swap the ref if it is unchanged: THE COMMIT. Refused: was it our own lost reply? Else
        again from w2, on top of the new head
    w7  tell the index

Invariant: a ref never names a commit of which a byte is not durable; whatever dies at
whatever step, the previous head stays and nothing needs repair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from cas_ckpt.config import read_gc_state
from cas_ckpt.errors import CkptError, ConflictError, InternalError, NotFoundError
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.objects.kinds import ObjectKind
from cas_ckpt.objects.node import Node
from cas_ckpt.ops.records import commit_of
from cas_ckpt.ops.tree import reachable
from cas_ckpt.refs import Move, Ref, RefKind
from cas_ckpt.repository import RepositoryHandle
from cas_ckpt.transfer.pack_writer import WrittenPack, write_nodes

MAX_ATTEMPTS = 100
"""Times that a commit is put on top of a new head before the conflict is reported."""

_OWN_REPLY_DEPTH = 1000


class AnyHead(Enum):
    """The type of `ANY_HEAD`."""

    ANY = "any"


ANY_HEAD = AnyHead.ANY
"""Says that a commit may go on top of whatever head it finds."""


class GenerationMoved(CkptError):
    """A garbage collection began since the caller looked: dedup again (w4). Never leaves ops/."""


def _nothing_to_publish(parents: tuple[Digest, ...]) -> Node:
    raise InternalError("a publication without a commit")


@dataclass(slots=True)
class Publication:
    """What is to be published, and what was written for it so far.

    Attributes:
        packs: Packs that are durable; grows.
        nodes: New nodes of the state; they go into the first meta pack with the commit.
        make_commit: Parents -> the commit's node.
        written_nodes: Nodes that stand in those packs; grows.
    """

    packs: list[WrittenPack]
    nodes: Sequence[Node] = ()
    make_commit: Callable[[tuple[Digest, ...]], Node] = _nothing_to_publish
    written_nodes: list[Node] = field(default_factory=list)


def publish_commit(
    handle: RepositoryHandle,
    publication: Publication,
    *,
    branch: str,
    generation: int,
    expected_head: Digest | None | AnyHead,
    other_parents: Sequence[Digest] = (),
) -> Digest:
    """Make the publication the head of `branch`; the id of the new commit.

    Args:
        generation: gc generation that the caller deduplicated against.
        expected_head: The head that the branch must have (None: none yet), or `ANY_HEAD`:
            whatever it is, go on top of it, again and again if need be.
        other_parents: Parents after the head (a merge).
    Raises:
        ConflictError: the branch moved. GenerationMoved: dedup again.
    """
    tried: Digest | None = None
    for _ in range(MAX_ATTEMPTS):
        ref = _ref_for_writing(handle, branch)
        if tried is not None and _follows(handle, ref.target, tried):
            return tried
        if read_gc_state(handle.store).generation != generation:
            raise GenerationMoved
        head = ref.target
        if not isinstance(expected_head, AnyHead) and head != expected_head:
            raise ConflictError(f"branch {branch!r} moved while this commit was made: look at it, then commit again")
        parents = tuple(dict.fromkeys((head, *other_parents) if head else other_parents))
        tried = _upload(handle, publication, parents)
        try:
            handle.refs.swap(ref, tried, generation=generation)
            return tried
        except ConflictError:
            continue
    raise ConflictError(f"branch {branch!r} moved {MAX_ATTEMPTS} times while this commit was made: try again")


def _ref_for_writing(handle: RepositoryHandle, branch: str) -> Ref:
    try:
        ref = handle.refs.get(RefKind.BRANCH, branch)
    except NotFoundError:
        _check_free(handle, RefKind.BRANCH, branch)
        try:
            return handle.refs.create_placeholder(RefKind.BRANCH, branch)
        except ConflictError:
            return handle.refs.get(RefKind.BRANCH, branch)
    if ref.target is None:
        _check_free(handle, RefKind.BRANCH, branch)
    return ref


def _check_free(handle: RepositoryHandle, kind: RefKind, name: str) -> None:
    """Refuse a name that a ref of the other kind has: a revision must mean one thing."""
    other = RefKind.TAG if kind is RefKind.BRANCH else RefKind.BRANCH
    try:
        taken = handle.refs.get(other, name).target is not None
    except NotFoundError:
        return
    if taken:
        what = "tag" if other is RefKind.TAG else "branch"
        raise ConflictError(f"{name!r} is a {what} already, and names are used once: choose another name")


def _follows(handle: RepositoryHandle, head: Digest | None, ours: Digest) -> bool:
    """Whether our swap was done after all, and others have already built on it."""
    for _ in range(_OWN_REPLY_DEPTH):
        if head is None or head == ours:
            return head == ours
        parents = commit_of(handle, head).parents
        head = Digest(parents[0]) if parents else None
    return False


def _upload(handle: RepositoryHandle, publication: Publication, parents: tuple[Digest, ...]) -> Digest:
    commit = publication.make_commit(parents)
    first_time = not publication.written_nodes
    nodes = [*publication.nodes, commit] if first_time else [commit]
    publication.packs.append(write_nodes(handle.store, nodes))
    publication.written_nodes.extend(nodes)
    return commit.digest


def publish_ref(
    handle: RepositoryHandle, kind: RefKind, name: str, target: Digest, *, move: Move, force: bool = False
) -> Ref:
    """Let a branch or tag name an old commit: the same steps, with "refuse" in place of "upload".

    Args:
        force: Move a ref that exists; else it must be new.
    Raises:
        ConflictError: it exists, or moved meanwhile. NotFoundError: the commit, or a pack that
            it needs, is not there any more.
    """
    for _ in range(MAX_ATTEMPTS):
        generation = handle.begin_writing()
        ref = _new_or_existing(handle, kind, name, force=force)
        if read_gc_state(handle.store).generation == generation:  # asked AFTER the ref was read
            _require_whole(handle, target, generation)
            return handle.refs.swap(ref, target, generation=generation, move=move)
    raise ConflictError(f"garbage collections began {MAX_ATTEMPTS} times while {name!r} was set: try again")


def _require_whole(handle: RepositoryHandle, target: Digest, generation: int) -> None:
    """Refuse a commit of which something was, or is about to be, collected."""
    commit = commit_of(handle, target)
    root = Digest(commit.root)
    handle.read_node(ObjectKind.TREE, root)
    if generation == 0:  # no garbage collection ever began
        return
    needed = [target, root, *reachable(handle, root)]
    if commit.layout is not None:
        needed.append(Digest(commit.layout))
    if not all(handle.known(needed)):
        raise NotFoundError(f"commit {short(target)} was given up to garbage collection: commit its state again")


def _new_or_existing(handle: RepositoryHandle, kind: RefKind, name: str, *, force: bool) -> Ref:
    try:
        ref = handle.refs.get(kind, name)
    except NotFoundError:
        _check_free(handle, kind, name)
        return handle.refs.create_placeholder(kind, name)
    if ref.target is not None and not force:
        what = "branch" if kind is RefKind.BRANCH else "tag"
        raise ConflictError(f"there is a {what} {name!r} already: choose another name, or move it with --force")
    if ref.target is None:
        _check_free(handle, kind, name)
    return ref
