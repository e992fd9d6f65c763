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
from dataclasses import dataclass, field, replace
from enum import Enum

from cas_ckpt.core.completeness import require_complete, unforget
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import graph_with
from cas_ckpt.core.protocol import Generation, read_gc_state, require_current
from cas_ckpt.core.records import commit_of
from cas_ckpt.core.refs import Move, Ref, RefKind, ref_key
from cas_ckpt.errors import CkptError, ConflictError, CorruptionError, InternalError, NotFoundError, StorageError
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.objects.nodes import Node
from cas_ckpt.storage.disk import in_turn
from cas_ckpt.transfer.pack_writer import WrittenPack, write_nodes

# DOC of cas_ckpt.core.publish:
# Where a commit goes and what it follows: the rules of HEAD.
#
#     1. `settle_destination`, before anything is hashed: which branch, what the state came from, and whether
#        the branch may be begun. Whoever publishes settles (rank 0), the others are told the branch.
#     2. `Destination.parents`, in core/publish.py, for every head that the branch is found at.
#
# Invariant: the commit that a state came from is a parent of its commit, or stands in its lineage. A
# history begins only where nothing came before, or where somebody says that it does.
#

CONTINUED_FROM = "continued-from"
"""Kind of the lineage that names what a state came from when others committed to its branch meanwhile."""

Precedes = Callable[[Digest, Digest], bool]
"""Whether the second commit leads to the first."""


_RIVALS = {RefKind.BRANCH: RefKind.TAG, RefKind.TAG: RefKind.BRANCH}
"""Kinds that share their names. Pins have names of their own, as no revision means a pin."""


class AnyHead(Enum):
    """The type of `ANY_HEAD`."""

    ANY = "any"


ANY_HEAD = AnyHead.ANY
"""Says that a commit may go on top of whatever head it finds."""


@dataclass(frozen=True, slots=True)
class Destination:
    """The branch that a commit goes to, and what is known of its state.

    Attributes:
        expected: The head that the branch must have (None: none yet), or `ANY_HEAD`.
        origin: The commit that the state came from; None: not known, the commit follows the branch.
        attached: The state came from this very branch: where others have committed to it since, the
            commit goes on top of theirs, and its lineage names `origin`.
        declared: The caller names `origin` as a further parent, or in the lineage.
        may_begin: The branch may be begun if it has no commit.
    """

    branch: str
    expected: Digest | None | AnyHead = ANY_HEAD
    origin: Digest | None = None
    attached: bool = False
    declared: bool = False
    may_begin: bool = True

    def parents(
        self, head: Digest | None, others: Sequence[Digest], precedes: Precedes
    ) -> tuple[tuple[Digest, ...], Digest | None]:
        """Parents of the commit if `head` is the branch's, and what its lineage has to name besides.

        Args:
            head: What the branch names; None: nothing.
            others: Parents that the caller gave.
        Raises:
            ConflictError: the branch is not where it must be, or leads to what the state does not come from.
        """
        if not isinstance(self.expected, AnyHead) and head != self.expected:
            raise ConflictError(
                f"branch {self.branch!r} moved: it is at {_shown(head)}, this commit was to follow "
                f"{_shown(self.expected)}: look at it, then check it out or commit again"
            )
        if head is None and not self.may_begin:
            raise ConflictError(f"branch {self.branch!r} was deleted while this commit was made: commit again")
        if self.origin is None or head == self.origin:
            return _joined(head, others), None
        if head is None:
            return _joined(self.origin, others), None
        if self.declared:
            return _joined(head, others), None
        if self.attached:
            return _joined(head, others), self.origin
        if precedes(head, self.origin):
            return _joined(self.origin, others), None
        raise ConflictError(
            f"branch {self.branch!r} is at {short(head)}, but this state came from {short(self.origin)}, which does "
            f'not follow it: commit to a new branch (branch="NAME"), move this one back first '
            f'(repo.branch("{self.branch}", start="{short(self.origin)}", force=True)), or say that this commit joins '
            f'both (parents=["{short(self.origin)}"])'
        )


def branch_target(handle: RepositoryHandle, branch: str) -> Digest | None:
    """The commit that the branch names; None if it names none, or is not there."""
    try:
        return handle.refs.get(RefKind.BRANCH, branch).target
    except NotFoundError:
        return None


def check_free(handle: RepositoryHandle, kind: RefKind, name: str) -> None:
    """Refuse a name that a branch has for a tag, and the other way: a revision must mean one thing."""
    other = _RIVALS.get(kind)
    if other is None:
        return
    try:
        taken = handle.refs.get(other, name).target is not None
    except NotFoundError:
        return
    if taken:
        raise ConflictError(f"{name!r} is a {other.label} already, and names are used once: choose another name")


def precedence(handle: RepositoryHandle) -> Precedes:
    """Answers from the commit graph, brought up to date where it lacks something."""

    def precedes(old: Digest, new: Digest) -> bool:
        return old in graph_with(handle, [new]).ancestors([new])

    return precedes


def _joined(first: Digest | None, others: Sequence[Digest]) -> tuple[Digest, ...]:
    return tuple(dict.fromkeys((first, *others) if first else others))


def _shown(head: Digest | AnyHead | None) -> str:
    return short(head) if isinstance(head, bytes) else "no commit"


MAX_ATTEMPTS = 100
"""Times that a commit is put on top of a new head before the conflict is reported."""

_OWN_REPLY_DEPTH = 1000


class GenerationMoved(CkptError):
    """A garbage collection began since the caller looked: dedup again (w4). Never leaves ops/."""


def _nothing_to_publish(parents: tuple[Digest, ...], origin: Digest | None) -> Node:
    raise InternalError("a publication without a commit")


@dataclass(slots=True)
class Publication:
    """What is to be published, and what was written for it so far.

    Attributes:
        packs: Packs that are durable and that the index was not told of yet; grows.
        nodes: New nodes of the state that are not written yet; they go into the next meta pack with the commit.
        make_commit: Parents, and the commit that the lineage has to name besides (or None) -> the commit's node.
        written_nodes: Nodes that stand in packs that were written for it; grows.
        told: Packs that the index was told of; grows.
        generation: gc generation under which the packs were written.
        ref: The ref that names the commit, once it does.
    """

    packs: list[WrittenPack]
    nodes: Sequence[Node] = ()
    make_commit: Callable[[tuple[Digest, ...], Digest | None], Node] = _nothing_to_publish
    written_nodes: list[Node] = field(default_factory=list)
    told: list[WrittenPack] = field(default_factory=list)
    generation: Generation = field(default_factory=Generation)
    ref: Ref | None = None

    def tell(self, handle: RepositoryHandle) -> None:
        """Tell the index of what was written since it was last told."""
        packs, self.packs = self.packs, []
        self.told += packs
        handle.add_written(packs, self.written_nodes, generation=self.generation, ref=self.ref)


def publish_commit(
    handle: RepositoryHandle,
    publication: Publication,
    destination: Destination,
    *,
    generation: Generation,
    other_parents: Sequence[Digest] = (),
) -> Digest:
    """Make the publication the head of its branch; the id of the new commit.

    Args:
        destination: The branch, and what its head may be: where any will do, the commit goes on top of it,
            again and again if need be.
        generation: gc generation that the caller deduplicated against.
        other_parents: Parents after the first (a merge).
    Raises:
        ConflictError: the branch moved. GenerationMoved: dedup again.
        NotFoundError: a parent that is not the branch's head was collected.
    """
    branch = destination.branch
    with in_turn(handle.store, branch):  # else those who commit to one branch mostly spoil one another's uploads
        return _publish(handle, publication, destination, generation, other_parents)


def _publish(
    handle: RepositoryHandle, publication: Publication, destination: Destination, generation: Generation,
    other_parents: Sequence[Digest],
) -> Digest:  # fmt: skip
    branch = destination.branch
    tried: Digest | None = None
    for _ in range(MAX_ATTEMPTS):
        ref = _ref_for_writing(handle, branch)
        if tried is not None and _follows(handle, ref.target, tried):
            return tried
        state = read_gc_state(handle.store)
        require_current(state, ref.generation, key=ref.key)
        if not handle.is_current(state, generation):
            raise GenerationMoved
        parents, origin = destination.parents(ref.target, other_parents, precedence(handle))
        for parent in parents:  # kept by our ref from its swap on, so nothing of them may be on its way out
            if parent != ref.target:
                require_complete(handle, parent, generation)
        tried = _upload(handle, publication, parents, origin)
        try:
            publication.ref = handle.refs.swap(ref, tried, generation=generation)
            return tried
        except ConflictError:
            continue
        except StorageError:
            if _follows(handle, handle.refs.get(RefKind.BRANCH, branch).target, tried):
                return tried  # the swap was done, its reply was lost, and somebody has built on it already
            raise
    raise ConflictError(f"branch {branch!r} moved {MAX_ATTEMPTS} times while this commit was made: try again")


def _ref_for_writing(handle: RepositoryHandle, branch: str) -> Ref:
    try:
        ref = handle.refs.get(RefKind.BRANCH, branch)
    except NotFoundError:
        check_free(handle, RefKind.BRANCH, branch)
        _require_new(handle, ref_key(RefKind.BRANCH, branch))
        try:
            return handle.refs.create_placeholder(RefKind.BRANCH, branch)
        except ConflictError:
            return handle.refs.get(RefKind.BRANCH, branch)
    if ref.target is None:
        check_free(handle, RefKind.BRANCH, branch)
    return ref


def _require_new(handle: RepositoryHandle, key: str) -> None:
    """Refuse to begin a ref again whose record was lost: history would begin anew, and the old one be collected."""
    if not handle.refs.was_announced(key):
        return
    try:
        handle.store.head(key)  # once more: somebody may have begun it a moment ago
    except NotFoundError as error:
        raise CorruptionError(
            f'{key} is gone, and nobody deleted it: restore the file from a copy, or run repo.repair("refs")'
        ) from error


def _follows(handle: RepositoryHandle, head: Digest | None, ours: Digest) -> bool:
    """Whether our swap was done after all, and others have already built on it."""
    for _ in range(_OWN_REPLY_DEPTH):
        if head is None or head == ours:
            return head == ours
        parents = commit_of(handle, head).parents
        head = Digest(parents[0]) if parents else None
    return False


def _upload(
    handle: RepositoryHandle, publication: Publication, parents: tuple[Digest, ...], origin: Digest | None
) -> Digest:
    commit = publication.make_commit(parents, origin)
    nodes = [*publication.nodes, commit]
    publication.packs.append(write_nodes(handle.store, nodes))
    publication.written_nodes.extend(nodes)
    publication.nodes = ()
    return commit.digest


def publish_ref(
    handle: RepositoryHandle,
    kind: RefKind,
    name: str,
    target: Digest,
    *,
    move: Move,
    force: bool = False,
    note: str | None = None,
    likely: Sequence[tuple[RefKind, str]] = (),
    lost: bool = False,
) -> Ref:
    """Let a branch, tag or pin name an old commit: the same steps, with "refuse" in place of "upload".

    A branch takes a commit back that was forgotten, for it goes on from there: before the swap, as nobody
    can build on it by then; and after it, as `forget` looks at the refs again when it has written. One of
    the two sees the other. Tags and pins keep their commit by naming it, and do not move on.

    Args:
        move: Entry for the ref's log; what the ref named before is filled in here.
        force: Move a ref that exists; else it must be new.
        note: Message of an annotated tag, reason of a pin; None leaves what there is.
        likely: Refs that may have the commit near their heads, which is then all that is asked of its history.
        lost: It may have been there before, and its record been lost: this is its repair.
    Raises:
        ConflictError: it exists, or moved meanwhile. NotFoundError: the commit, or something that
            it or its history needs, is not there any more.
    """
    seen: Ref | None = None
    for _ in range(MAX_ATTEMPTS):
        generation = handle.begin_writing()
        ref = _new_or_existing(handle, kind, name, force=force, lost=lost)
        if seen is not None and ref.target != seen.target:
            raise ConflictError(f"{kind.label} {name!r} moved while it was set: look at it, then try again")
        seen = ref
        state = read_gc_state(handle.store)  # asked AFTER the ref was read
        require_current(state, ref.generation, key=ref.key)
        if handle.is_current(state, generation):
            require_complete(handle, target, generation, likely=likely)
            move = replace(move, old=ref.target)
            if kind is RefKind.BRANCH:
                unforget(handle, [target])
            try:
                named = handle.refs.swap(ref, target, generation=generation, move=move, note=note)
                handle.note_refs([named])
            except ConflictError:
                continue  # a garbage collection fenced the ref, or somebody moved it: the next look tells
            if kind is RefKind.BRANCH:
                unforget(handle, [target])
            return named
    raise ConflictError(f"garbage collections began {MAX_ATTEMPTS} times while {name!r} was set: try again")


def _new_or_existing(handle: RepositoryHandle, kind: RefKind, name: str, *, force: bool, lost: bool) -> Ref:
    try:
        ref = handle.refs.get(kind, name)
    except NotFoundError:
        if not lost:
            _require_new(handle, ref_key(kind, name))
        check_free(handle, kind, name)
        return handle.refs.create_placeholder(kind, name)
    if ref.target is not None and not force:
        raise ConflictError(
            f"there is a {kind.label} {name!r} already: choose another name, or move it with force=True"
        )
    if ref.target is None:
        check_free(handle, kind, name)
    return ref
