"""publish: the writer's half of the protocol that makes a commit safe (format.md, "Writing").

    w1  the caller has uploaded data packs, deduplicated against the index of generation g
    w2  read the ref (a new one: first create a placeholder of generation -1)
    w3  read gc/state, AFTER the ref
    w4  its generation is not g: bring the index up to date and see whether the chunks are still stored;
        if not, stop: the caller saves them again
    w5  upload the nodes, the commit object last, in one meta pack: everything is durable
    w6  swap the ref if it is unchanged: THE COMMIT. Refused: was it our own lost reply? Else
        again from w2, on top of the new head
    w7  the caller adds the packs to the index

A commit's parents follow from the head that the branch is found at, by the rules of HEAD (`Destination.parents`):
the commit that a state came from is a parent of its commit, or is named in its lineage; a history begins only where
nothing came before, or where the caller says that it does.

Invariant: a ref never names a commit of which a byte is not durable; whatever dies at
whatever step, the previous head stays and nothing needs repair.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import compress
from operator import not_

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import graph_with, require_complete, unforget
from cas_ckpt.core.packs import pack_name
from cas_ckpt.core.protocol import read_gc_state, require_current
from cas_ckpt.core.records import CONTINUED_FROM, commit_of
from cas_ckpt.core.ref_store import name_key
from cas_ckpt.core.refs import (
    PLACEHOLDER_GENERATION,
    Generation,
    Move,
    Ref,
    RefKind,
    TagSignature,
    check_new_name,
    default_author,
    new_move,
    ref_key,
)
from cas_ckpt.core.revisions import other_meaning
from cas_ckpt.core.signatures import check_move, require_signed, required_signers
from cas_ckpt.errors import CkptError, ConflictError, CorruptionError, NotFoundError, StorageError
from cas_ckpt.objects.digest import Digest, ObjectKind, short
from cas_ckpt.objects.nodes import CommitObject, LineageEdge, Node, commit_node, decode_commit
from cas_ckpt.objects.pack import Hints, PackKind, encode_hints
from cas_ckpt.storage.disk import in_turn
from cas_ckpt.storage.store import exists
from cas_ckpt.transfer.pack_writer import WrittenPack, pack_key, write_nodes

MAX_ATTEMPTS = 100
"""Times that a commit is put on top of a new head, or under a new gc generation, before the conflict is reported."""

_LOGGER = logging.getLogger("cas_ckpt")

_OWN_REPLY_DEPTH = 1000

_RIVALS = {RefKind.BRANCH: RefKind.TAG, RefKind.TAG: RefKind.BRANCH}
"""Kinds that share their names. Pins have names of their own, as no revision means a pin."""


class AnyHead(Enum):
    """The type of `ANY_HEAD`."""

    ANY = "any"


ANY_HEAD = AnyHead.ANY
"""Says that a commit may go on top of whatever head it finds."""


class GenerationMoved(CkptError):
    """A garbage collection took chunks since the caller looked: save them again (w4). Never leaves ops/."""


@dataclass(frozen=True, slots=True)
class Destination:
    """The branch that a commit goes to, and what is known of its state.

    Attributes:
        expected: The head that the branch must have (None: none yet), or `ANY_HEAD`.
        origin: The commit that the state came from; None: not known, the commit follows the branch.
        attached: The state came from this very branch: where others have committed on top of that since, the
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
        self, handle: RepositoryHandle, head: Digest | None, others: Sequence[Digest] = ()
    ) -> tuple[tuple[Digest, ...], Digest | None]:
        """Parents of the commit if `head` is the branch's, and what its lineage has to name besides.

        Args:
            handle: Where the commit graph is, which is brought up to date if it lacks something.
            head: What the branch names; None: nothing.
            others: Parents that the caller gave.
        Raises:
            ConflictError: the branch is not where it must be, or leads to what the state does not come from.
        """
        if not isinstance(self.expected, AnyHead) and head != self.expected:
            raise ConflictError(
                f"branch {self.branch!r} moved: it is at {shown_head(head)}, this commit was to follow "
                f"{shown_head(self.expected)}: look at it, then check it out or commit again"
            )
        if head is None and not self.may_begin:
            raise ConflictError(f"branch {self.branch!r} was deleted while this commit was made: commit again")
        origin, first = self.origin, head
        left_behind = None
        if origin is not None and head is None:
            first = origin
        elif origin is not None and head is not None and head != origin and not self.declared:
            if self.attached and origin in graph_with(handle, [head]).ancestors([head]):
                left_behind = origin
            elif head in graph_with(handle, [origin]).ancestors([origin]):
                first = origin
            else:
                raise ConflictError(
                    f"branch {self.branch!r} is at {short(head)}, but this state came from {short(origin)}, which "
                    f'does not follow it: commit to a new branch (branch="NAME"), move this one back first '
                    f'(repo.branch("{self.branch}", start="{short(origin)}", force=True)), or say that this commit '
                    f'joins both (parents=["{short(origin)}"])'
                )
        return tuple(dict.fromkeys((first, *others) if first else others)), left_behind


@dataclass(frozen=True, slots=True)
class Publication:
    """A state whose chunks are saved, and what its commit says.

    Attributes:
        commit: The commit but for what is known only when it is published: its parents, and what it cost. `stats`
            counts the state alone.
        nodes: Every node of the state, and the layout's.
        packs: Packs of its new chunks, durable; the index does not have them yet.
        generation: gc generation that the chunks were deduplicated against.
        other_parents: Parents after the head of the branch (a merge).
        sign: Makes the signature of the commit's bytes, once for each attempt; None: it is not signed.
        announce: Called with the commit, right before its ref is swapped, in each attempt.
    """

    commit: CommitObject
    nodes: Sequence[Node]
    packs: Sequence[WrittenPack]
    generation: Generation
    other_parents: Sequence[Digest] = ()
    sign: Callable[[bytes], bytes] | None = None
    announce: Callable[[Node], object] | None = None


@dataclass(frozen=True, slots=True)
class Published:
    """A commit that its branch names, and what `RepositoryHandle.add_written` has to be given.

    Attributes:
        packs, nodes: Everything written for it that the index does not have, and the nodes in it.
        ref: The ref as it was swapped; None if another commit is on top of it already.
    """

    commit: Node
    packs: list[WrittenPack]
    nodes: list[Node]
    generation: Generation
    ref: Ref | None


def publish_commit(handle: RepositoryHandle, publication: Publication, destination: Destination) -> Published:
    """Make the publication the head of its branch, by the steps above; the caller adds it to the index (w7).

    Where any head will do, the commit goes on top of the one that is there, again and again if need be. A garbage
    collection that begins meanwhile costs a look at the index, not the hashing: the ids are known, and what they name
    is usually still stored.

    Raises:
        SignatureError: the branch takes signed commits only. ConflictError: it moved.
        GenerationMoved: chunks of the state were condemned, save them again.
        NotFoundError: a parent that is not the branch's head was collected.
    """
    new = _new_nodes(handle, publication.nodes)
    work = _Publishing(handle, publication, destination, publication.generation, new, list(publication.packs))
    try:
        # In turn: else those who commit to one branch mostly spoil one another's uploads.
        with in_turn(handle.store, destination.branch):
            for _ in range(MAX_ATTEMPTS):
                published = work.attempt()
                if published is not None:
                    work.warn(published)
                    return published
        raise ConflictError(
            f"branch {destination.branch!r} moved {MAX_ATTEMPTS} times while this commit was made: try again"
        )
    except CkptError:
        if work.packs:  # they are durable: the next commit need not write them again
            handle.add_written(work.packs, work.written, generation=work.generation)
        raise


@dataclass(slots=True)
class _Publishing:
    """State of one `publish_commit` over its attempts.

    Attributes:
        generation: That under which all that is not written was seen to be stored.
        new: Nodes of the publication that are not stored yet.
        packs: Durable, and not in the index yet. added: Those that were added to it since.
        written: Nodes in both.
        made: The commit of the last attempt that got as far as the swap of the ref.
    """

    handle: RepositoryHandle
    publication: Publication
    destination: Destination
    generation: Generation
    new: list[Node]
    packs: list[WrittenPack]
    added: list[WrittenPack] = field(default_factory=list)
    written: list[Node] = field(default_factory=list)
    made: Node | None = None

    def attempt(self) -> Published | None:
        """w2 to w6 once; None: something moved meanwhile."""
        handle, branch = self.handle, self.destination.branch
        ref = ref_for_writing(handle, RefKind.BRANCH, branch)
        if self.made is not None and _follows(handle, ref.target, self.made.digest):
            return self._published(self.made, None)
        if not _is_current(handle, ref, self.generation):
            self._catch_up()
            return None
        commit = self._on_top_of(ref)
        made = commit_node(commit)
        if self.publication.sign is not None:
            made = commit_node(replace(commit, signature=self.publication.sign(made.data)))
        signers = required_signers(handle, ref, branch) if ref.asks_signers else None
        if signers is not None:
            require_signed(signers, branch, made.digest, made.data)
        hints = None
        if not handle.store.abilities.local:
            own = {node.digest for node in (*self.written, *self.new)}
            hints = handle.hints.hints(
                commit.parents, [*self.added, *self.packs], seen=(ref.target, ref.pack),
                shared=[node.digest for node in reversed(self.publication.nodes) if node.digest not in own],
            )  # fmt: skip
        page = b"" if hints is None else encode_hints(hints)
        self.packs.append(write_nodes(handle.cached_store, [*self.new, made], hints=page))
        self.written += [*self.new, made]
        self.new, self.made = [], made
        return self._swap(ref, made, hints, signed_only=None if signers is None else True)

    def _catch_up(self) -> None:
        """w4: see whether all that is not written is still stored, under the generation that is now.

        Raises:
            GenerationMoved: it is not.
        """
        # Added before the store is looked at again: what was collected since drops out in that look.
        self.handle.add_written(self.packs, self.written, generation=self.generation)
        self.packs, self.added = [], self.added + self.packs
        self.generation = self.handle.begin_writing()
        nodes = self.publication.nodes
        chunks = {child for node in nodes for child in node.children}
        if not all(self.handle.known(list(chunks.difference(node.digest for node in nodes)))):
            raise GenerationMoved
        self.new = _new_nodes(self.handle, nodes)

    def _on_top_of(self, ref: Ref) -> CommitObject:
        """The commit, not signed yet, if `ref` is where its branch is."""
        given = self.publication.commit
        parents, left_behind = self.destination.parents(self.handle, ref.target, self.publication.other_parents)
        for parent in parents:  # kept by our ref from its swap on, so nothing of them may be on its way out
            if parent != ref.target:
                require_complete(self.handle, parent, self.generation)
            elif _is_lost(self.handle, parent, ref.pack):  # training goes on: the next commit is as good as any
                _LOGGER.warning(
                    "commit %s, the head of branch %r, is in no pack of %s: this commit goes on top of it, and the "
                    "history behind it cannot be read; repo.fsck() says what would bring it "
                    "back",
                    short(parent), self.destination.branch, self.handle.store.url,
                )  # fmt: skip
        behind = () if left_behind is None else (LineageEdge(CONTINUED_FROM, left_behind),)
        stats = given.stats | _cost([*self.added, *self.packs], [*self.written, *self.new])
        return replace(given, parents=parents, lineage=(*given.lineage, *behind), stats=stats)

    def _swap(self, ref: Ref, made: Node, hints: Hints | None, *, signed_only: bool | None) -> Published | None:
        """w6: THE COMMIT; None: another process moved the ref."""
        handle, at = self.handle, self.packs[-1].key
        if self.publication.announce is not None:
            self.publication.announce(made)
        swapped = _swapped(
            handle, ref, made.digest, generation=self.generation, signed_only=signed_only,
            pack=None if hints is None else pack_name(at),
        )  # fmt: skip
        if swapped is None:
            return None
        if swapped is ref:
            return self._published(made, None)
        if hints is not None:
            handle.hints.note(made.digest, made.data, at, hints)
        return self._published(made, swapped)

    def warn(self, published: Published) -> None:
        """Say that the commit is on top of what its state did not come from: its lineage does."""
        made = decode_commit(published.commit.data)
        for edge in made.lineage:
            if edge.kind == CONTINUED_FROM and edge.target == self.destination.origin:
                _LOGGER.warning(
                    "commit %s is on top of %s, which somebody else put on branch %r, and its state came from %s: if "
                    "another machine trains on this branch, give each its own (branch=), or let commits fail then "
                    '(on_conflict="raise")',
                    short(published.commit.digest), short(made.parents[0]), self.destination.branch, short(edge.target),
                )  # fmt: skip

    def _published(self, made: Node, ref: Ref | None) -> Published:
        return Published(made, self.packs, self.written, self.generation, ref)


def _is_current(handle: RepositoryHandle, ref: Ref, generation: Generation) -> bool:
    """w3: whether `generation`, under which all was seen to be stored, is that of now; asked AFTER `ref` was read."""
    state = read_gc_state(handle.store)
    require_current(state, ref.generation, key=ref.key)
    return handle.is_current(state, generation)


def _swapped(
    handle: RepositoryHandle, ref: Ref, target: Digest, *, generation: Generation, signed_only: bool | None,
    pack: bytes | None, move: Move | None = None, note: str | None = None, signature: TagSignature | None = None,
) -> Ref | None:  # fmt: skip
    """w6: the ref as it is now, `ref` itself if a commit is on top of `target` already; None: another one moved it."""
    try:
        return handle.refs.swap(
            ref, target, generation=generation, move=move, note=note, signature=signature, signed_only=signed_only,
            pack=pack,
        )  # fmt: skip
    except ConflictError:
        return None  # fenced by a garbage collection, or moved by another process: the next look says
    except StorageError:
        now = handle.refs.find(ref.kind, ref.name)
        if now is None or now.target == ref.target or not _follows(handle, now.target, target):
            raise  # nor does what it was before say that it moved
        return ref  # the swap was done, its reply was lost, and a commit is on top of it already


def _let_name(
    handle: RepositoryHandle, ref: Ref, target: Digest, *, generation: Generation, move: Move | None,
    note: str | None, signature: TagSignature | None, is_new: bool = False,
) -> Ref | None:  # fmt: skip
    """w6 of a commit that is stored, whole: as `_swapped`.

    A branch takes a commit back that was forgotten, for it goes on from there: before the swap, as nothing can build on
    it by then; and after it, as `forget` looks at the refs again when it has written. One of the two sees the other.
    Tags and pins keep their commit by naming it, and do not move on.

    Args:
        is_new: See `publish_copied`.
    """
    is_branch = ref.kind is RefKind.BRANCH
    signed_only = check_move(handle, ref, ref.name, target) if is_branch else None
    if is_branch and not is_new:
        unforget(handle, [target])
    named = _swapped(
        handle, ref, target, generation=generation, move=move, note=note, signature=signature, signed_only=signed_only,
        pack=handle.hints.pack_of(target),
    )  # fmt: skip
    if named is not None and named is not ref:
        handle.note_refs([named])
        if is_branch and not is_new:
            unforget(handle, [target])
    return named


def _is_lost(handle: RepositoryHandle, head: Digest, pack: bytes | None) -> bool:
    """Whether a head is nowhere in the store; not said where remotes may have it. `pack`: its ref's hint."""
    if all(handle.known([head])) or handle.elsewhere.remotes():
        return False
    if pack is not None and exists(handle.store, pack_key(pack, PackKind.META)):  # of another writer
        return False
    try:
        return not handle.locate([head], here=True)
    except (NotFoundError, CorruptionError):
        return True


def _new_nodes(handle: RepositoryHandle, nodes: Sequence[Node]) -> list[Node]:
    """Those that are not stored yet."""
    stored = handle.known([node.digest for node in nodes])
    return list(compress(nodes, map(not_, stored)))


def _cost(packs: Sequence[WrittenPack], nodes: Sequence[Node]) -> dict[str, int]:
    """The stats of a commit that say what was written for it, in whatever attempt."""
    new_bytes = stored_bytes = 0
    chunks: set[Digest] = set()
    for node in nodes:
        if node.kind != ObjectKind.COMMIT:
            new_bytes += len(node.data)
            stored_bytes += len(node.data)
    for pack in packs:
        if pack.kind == PackKind.DATA:
            stored_bytes += pack.size_bytes
            for entry in pack.entries:
                new_bytes += entry.plain_bytes
                chunks.add(entry.digest)
    return {"new_bytes": new_bytes, "stored_bytes": stored_bytes, "num_new_chunks": len(chunks)}


def ref_for_writing(handle: RepositoryHandle, kind: RefKind, name: str, *, unless: str = "") -> Ref:
    """The ref, or a new placeholder (w2).

    A ref whose record was lost is not begun again: history would begin anew, and the old one be collected.

    Args:
        unless: Refuse a new one whose name has another meaning, as for `check_meaning`; empty: have it all the same.
    """
    ref = handle.refs.find(kind, name)
    if ref is None:
        if kind is not RefKind.REMOTE:
            check_new_name(name)
        check_free(handle, kind, name)
        if unless:
            check_meaning(handle, kind, name, unless=unless)
        key = ref_key(kind, name)
        # The store is asked once more: another process may have begun it a moment ago.
        if handle.refs.was_announced(key) and not exists(handle.store, key):
            raise CorruptionError(
                f'{key} is gone, and was not deleted: restore the file from a copy, or run repo.repair("refs")'
            )
        try:
            return handle.refs.create_placeholder(kind, name)
        except ConflictError:
            return handle.refs.get(kind, name)
    if ref.target is None:
        check_free(handle, kind, name)
    return ref


def _lost_ref(handle: RepositoryHandle, kind: RefKind, name: str, target: Digest, generation: Generation) -> Ref:
    """The ref, or what says that it was lost (w2 of a repair), once `target` is seen to be whole.

    No placeholder is made, which would pass for the ref if its target never came: what says that the ref was made
    stays alone until then, and ends every collection at the fence that does not find the ref.
    """
    known = handle.refs.find(kind, name)
    if known is not None:
        return known
    check_free(handle, kind, name)
    require_complete(handle, target, generation)
    lost = Ref(kind, name, None, PLACEHOLDER_GENERATION, (), record=None)
    handle.refs.announce([lost.key])
    return lost


def was_published(handle: RepositoryHandle, branch: str, ours: Digest) -> bool:
    """Whether the branch names the commit `ours`, or one that was built on it: after an unknown outcome of the swap."""
    return _follows(handle, branch_target(handle, branch), ours)


def _follows(handle: RepositoryHandle, head: Digest | None, ours: Digest) -> bool:
    """Whether our swap was done after all, and others have already built on it."""
    for _ in range(_OWN_REPLY_DEPTH):
        if head is None or head == ours:
            return head == ours
        parents = commit_of(handle, head).parents
        head = Digest(parents[0]) if parents else None
    return False


def branch_target(handle: RepositoryHandle, branch: str) -> Digest | None:
    """The commit that the branch names; None if it names none, or does not exist."""
    ref = handle.refs.find(RefKind.BRANCH, branch)
    return None if ref is None else ref.target


def check_free(handle: RepositoryHandle, kind: RefKind, name: str) -> None:
    """Refuse a name that a branch has for a tag, and the other way: a revision must mean one thing."""
    other = _RIVALS.get(kind)
    taken = None if other is None else handle.refs.find(other, name)
    if taken is not None and taken.target is not None:
        raise ConflictError(f"{name!r} is a {taken.kind.label} already, and names are used once: choose another name")


def check_meaning(
    handle: RepositoryHandle, kind: RefKind, name: str, *others: RepositoryHandle, unless: str = ""
) -> None:
    """Refuse a new branch or tag whose name would be taken for something else.

    Args:
        others: Repositories whose commits may come to this one.
        unless: What the caller can say to have it all the same; empty: nothing.
    Raises:
        ConflictError: for a branch of a remote, or the first digits of an id.
    """
    meaning = other_meaning(handle, name, *others) if kind in _RIVALS else None
    if meaning is not None:
        anyway = f", or have it all the same with {unless}" if unless else ""
        raise ConflictError(f"{name!r} reads as {meaning}: choose another name{anyway}")


def shown_head(head: Digest | AnyHead | None) -> str:
    """The head of a branch, as messages name it."""
    return short(head) if isinstance(head, bytes) else "no commit"


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
    signature: TagSignature | None = None,
) -> Ref:
    """Let a branch, tag or pin name an old commit: the same steps, with "refuse" in place of "upload".

    Args:
        move: Entry for the ref's log; what the ref named before is filled in here.
        force: Move a ref that exists; else it must be new.
        note: Message of an annotated tag, reason of a pin; None leaves what there is.
        likely: Refs that may have the commit near their heads, which is then all that is asked of its history.
        lost: See `publish_lost_ref`.
        signature: Of the tag with that note.
    Raises:
        SignatureError: the branch takes signed commits only.
        ConflictError: it exists, or moved meanwhile. NotFoundError: the commit, or something that
            it or its history needs, is not there any more.
    """
    seen: Ref | None = None
    for _ in range(MAX_ATTEMPTS):
        generation = handle.begin_writing()
        unless = "" if force else "force=True"
        ref = (
            _lost_ref(handle, kind, name, target, generation) if lost
            else ref_for_writing(handle, kind, name, unless=unless)
        )  # fmt: skip
        if ref.target is not None and not force:
            raise ConflictError(
                f"there is a {kind.label} {name!r} already: choose another name, or move it with force=True"
            )
        if seen is not None and ref.target != seen.target:
            raise ConflictError(f"{kind.label} {name!r} moved while it was set: look at it, then try again")
        seen = ref
        if _is_current(handle, ref, generation):
            require_complete(handle, target, generation, likely=likely)
            named = _let_name(
                handle, ref, target, generation=generation, move=replace(move, old=ref.target), note=note,
                signature=signature,
            )  # fmt: skip
            if named is not None:
                return named
    raise ConflictError(f"garbage collections began {MAX_ATTEMPTS} times while {name!r} was set: try again")


def publish_lost_ref(
    handle: RepositoryHandle, kind: RefKind, name: str, target: Digest, *, move: Move, note: str | None = None,
    signature: TagSignature | None = None,
) -> Ref:  # fmt: skip
    """The same for a ref that may have been there before, and whose record was lost: its repair.

    Raises:
        NotFoundError, ConflictError, SignatureError: as above; the ref is as lost as it was.
    """
    key = ref_key(kind, name)
    was_known = exists(handle.store, name_key(key))
    try:
        return publish_ref(handle, kind, name, target, move=move, note=note, signature=signature, lost=True)
    except NotFoundError:
        if not was_known and not exists(handle.store, key):  # else collections would wait for a ref that never was
            handle.store.delete(name_key(key))
        raise


def publish_copied(
    handle: RepositoryHandle,
    kind: RefKind,
    name: str,
    target: Digest,
    *,
    generation: Generation,
    admit: Callable[[Digest | None], Move | None],
    is_new: bool = False,
    note: str | None = None,
    signature: TagSignature | None = None,
) -> Ref:
    """Let a ref name a commit that was copied here whole under `generation`: w2 to w6, all that it needs being stored.

    Args:
        generation: That under which all that the commit needs was seen, or written (`begin_writing`).
        admit: Asked what may be done to a ref that names this commit (None: nothing): the entry for its log; None: it
            needs none. Raises if it may not be moved.
        is_new: No ref here named it, or led to it, before: it cannot be forgotten.
        note: Message of an annotated tag; None leaves what there is.
        signature: Of the tag with that note.
    Raises:
        SignatureError: the branch takes signed commits only.
        GenerationMoved: packs were condemned since: see what is missing now, and copy it.
        ConflictError: a branch and a tag would have one name. Whatever `admit` raises.
    """
    for _ in range(MAX_ATTEMPTS):
        ref = ref_for_writing(handle, kind, name)
        if not _is_current(handle, ref, generation):
            raise GenerationMoved
        if ref.target == target and note in (None, ref.note) and signature in (None, ref.signature):
            return ref
        named = _let_name(
            handle, ref, target, generation=generation, move=admit(ref.target), note=note, signature=signature,
            is_new=is_new,
        )  # fmt: skip
        if named is not None:
            return named
    raise ConflictError(f"{kind.label} {name!r} was changed {MAX_ATTEMPTS} times by others: try again")


def take_away(handle: RepositoryHandle, ref: Ref, action: str) -> None:
    """Let `ref` name nothing any more, if it still names what it named when it was read.

    Raises:
        ConflictError: it moved.
    """
    move = new_move(ref.target, None, action, default_author())
    for _ in range(MAX_ATTEMPTS):
        try:
            handle.refs.swap(ref, None, generation=PLACEHOLDER_GENERATION, move=move)
            return
        except ConflictError:
            again = handle.refs.get(ref.kind, ref.name)
            if again.target != ref.target:
                raise
            ref = again  # a collection raised its generation: it names the same commit
    raise ConflictError(f"{ref.kind.label} {ref.name!r} was changed {MAX_ATTEMPTS} times by others: try again")
