"""commit: a state becomes a commit on a branch, made by one process or by several ranks together.

    1. check the request; rank 0 settles where the commit goes and what it names        (request.py)
    2. save: hash every cell, stream what is new into data packs            (save.py; several ranks: ranks.py)
    3. rank 0: nodes, layout and commit; meta pack with the commit, then the swap of the ref  (core/publish.py)
    4. rank 0 adds the packs to the index; all ranks get the commit, or raise what rank 0 decided
Dying anywhere leaves the branch as it was; packs that no commit names are found again by the
next commit (deduplicated) or collected later.

A process that commits alone (`SOLO`) saves and publishes without describing, comparing or telling anything: for a state
of many small tensors that would take half as long again (docs/decisions/006-ranks.md).

Invariant: a rank that fails makes all ranks raise; the branch moves on rank 0 alone, after every rank's packs are
durable. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

from cas_ckpt import clock
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.protocol import Session
from cas_ckpt.core.publish import Destination, GenerationMoved, Publication, Published, publish_commit
from cas_ckpt.core.records import CommitInfo, commit_row, info_from_row
from cas_ckpt.core.refs import Head
from cas_ckpt.errors import ConflictError, PeerError
from cas_ckpt.memory import current_limits, python_gc_paused
from cas_ckpt.objects.digest import short
from cas_ckpt.objects.layouts import LayoutObject, layout_node
from cas_ckpt.objects.nodes import CommitObject
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.state import Container
from cas_ckpt.ops.commit.agree import (
    Made,
    Outcome,
    broadcast_outcome,
    made_message,
    read_outcome,
    refusal_message,
    simple_message,
)
from cas_ckpt.ops.commit.frozen import Frozen, FrozenMemory
from cas_ckpt.ops.commit.ranks import save_on_ranks
from cas_ckpt.ops.commit.request import (
    Ancestry,
    CommitFields,
    CommitRequest,
    checked_fields,
    settle_ancestry,
    settle_destination,
    with_declared_head,
)
from cas_ckpt.ops.commit.save import Draft, RegionSums, Saved, StateSize, check_room, measure, room_for, save_chunks
from cas_ckpt.parallel.peers import SOLO, Peers, collective_errors, report_instead
from cas_ckpt.parallel.workers import thread_count
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.signing import sign
from cas_ckpt.transfer.save import SaveMemory, TensorWork

MAX_GENERATIONS = 5
"""Times that a commit begins anew because a garbage collection began under it."""

BYTES_PER_THREAD = 96 * 1024 * 1024
"""Bytes of the state that give one thread more to hash them: fewer, and the threads wait for the interpreter's lock."""


def commit_tree(
    handle: RepositoryHandle,
    state: Container,
    request: CommitRequest,
    *,
    peers: Peers = SOLO,
    memory: FrozenMemory | None = None,
    progress: Progress = SILENT,
) -> CommitInfo:
    """Commit `state`; what the commit says of itself. Collective if there are several ranks.

    Args:
        state: What this rank has.
        peers: The ranks that commit together; all get the same answer.
        memory: What this process declared frozen before; needed across calls for `frozen=`.
    Raises:
        PeerError: another rank failed, or disagrees; says who and what.
        InvalidInputError, UnsupportedValueError, FrozenChangedError: before anything is written
            that could be seen. ConflictError: the branch moved. StorageError: the medium refused.
        MemoryBudgetError: the limit of memory is too little for this state; before anything is written.
    """
    with collective_errors(peers):
        return _commit(handle, state, request, peers, memory, progress)[0]


def commit_live(
    handle: RepositoryHandle, state: Container, request: CommitRequest, *, peers: Peers = SOLO,
    memory: FrozenMemory | None = None, progress: Progress = SILENT,
) -> CommitInfo:  # fmt: skip
    """`commit_tree` for the live state of this process: goes on from `handle.head`, and moves it on all ranks.

    The caller is inside of `collective_errors` if there are several ranks.
    """
    made, branch = _commit(handle, state, replace(request, head=handle.head), peers, memory, progress)
    handle.head = Head(branch, made.id)
    return made


def _commit(
    handle: RepositoryHandle, state: Container, request: CommitRequest, peers: Peers, memory: FrozenMemory | None,
    progress: Progress,
) -> Made:  # fmt: skip
    """The commit, and the branch that it went to."""
    fields = checked_fields(request)
    ancestry, destination = Ancestry(), None
    if peers.rank == 0:  # who publishes resolves: a branch may move between the looks of two ranks
        request = with_declared_head(handle, request, fields)
        ancestry = settle_ancestry(handle, request, fields)
        destination = settle_destination(handle, request, ancestry)
    if memory is None and (request.frozen is not None or request.frozen_keys):
        memory = FrozenMemory()
    size = measure(state)
    check_room(handle, size)
    for _ in range(MAX_GENERATIONS):
        try:
            with Session(handle.store) as session:
                if peers.size > 1 or size.divided:
                    saved = save_on_ranks(
                        handle, state, request, fields, session, peers=peers, memory=memory, size=size,
                        progress=progress,
                    )  # fmt: skip
                else:
                    saved = save_alone(handle, state, request, session, memory=memory, size=size, progress=progress)
                made = _publish(
                    handle, saved, fields, ancestry, destination, peers, request, keeps_draft=memory is not None
                )
        except BaseException as error:
            if peers.size > 1 or not isinstance(error, (ConflictError, GenerationMoved)):
                handle.forget_chunks()  # packs are durable that the index does not have: the next commit looks
            if isinstance(error, GenerationMoved):
                continue
            raise
        if peers.rank and saved.shares_index:
            handle.note_written(saved.packs, generation=saved.generation)
        elif peers.rank:
            handle.forget_chunks()  # an index of its own: the next commit reads the others' packs
        if memory is not None:
            memory.remember(saved.hashed, saved.draft)
        return made
    raise ConflictError(f"garbage collections began {MAX_GENERATIONS} times while this commit was made: try again")


def save_alone(
    handle: RepositoryHandle, state: Container, request: CommitRequest, session: Session, *,
    memory: FrozenMemory | None, size: StateSize, progress: Progress,
) -> Saved:  # fmt: skip
    """Save a state of which this process has everything.

    Args:
        memory: What this process declared frozen before; needed if `request` declares something frozen.
        size: What `measure` says of the state.
    Raises:
        InvalidInputError, UnsupportedValueError: something cannot be committed; names its key.
        FrozenChangedError: a frozen tensor is not what it was. StorageError: the medium refused.
    """
    generation = handle.begin_writing()
    draft = Draft(state, allow_pickle=request.allow_pickle)
    works: Iterable[TensorWork] = draft.works()
    frozen: Frozen | None = None
    if memory is not None and (request.frozen is not None or request.frozen_keys):
        works = list(works)
        frozen = memory.prepare(
            draft, request, KeyPatterns(request.frozen, request.frozen_keys), known=handle.known,
            regions=lambda work: (work.spec.box,), checksums=RegionSums(thread_count()).of,
        )  # fmt: skip
    room = SaveMemory(num_threads=1, num_writers=1)  # the least that there is, whatever the budget
    paused: AbstractContextManager[object] = python_gc_paused()
    if current_limits().num_threads or size.num_bytes >= 2 * BYTES_PER_THREAD:
        # A large state takes seconds, in which other threads of the process may need Python's collector.
        room = room_for(handle, size, num_threads=thread_count(most=size.num_bytes // BYTES_PER_THREAD))
        paused = nullcontext()
    with paused:
        packs = save_chunks(handle, works, session, num_bytes=size.num_bytes, room=room, progress=progress)
    hashed = {} if memory is None or frozen is None else memory.check(frozen)
    layout = LayoutObject(aliases=draft.aliases(), orders=draft.orders, versions=draft.versions)
    return Saved(draft, generation, packs, layout, hashed=hashed)


def _publish(
    handle: RepositoryHandle, saved: Saved, fields: CommitFields, ancestry: Ancestry, destination: Destination | None,
    peers: Peers, request: CommitRequest, *, keeps_draft: bool,
) -> Made:  # fmt: skip
    """Rank 0, which has a destination, publishes; every rank gets the commit, or raises what rank 0 decided.

    Args:
        keeps_draft: The caller needs the draft afterwards; otherwise its memory is given back.
    """

    def publish(destination: Destination) -> Published:
        if saved.begin_anew:
            raise GenerationMoved
        if saved.refusal is not None:
            raise saved.refusal
        with python_gc_paused():
            publication = _publication(saved, fields, ancestry, request)
            if not keeps_draft:
                saved.draft.release()
            return publish_commit(handle, publication, destination)

    if peers.size == 1 and destination is not None:  # nobody is to be told
        published = publish(destination)
        _add_to_index(handle, published, destination.branch, peers)
        return info_from_row(commit_row(published.commit.digest, published.commit.data)), destination.branch
    message = None
    if destination is not None:
        try:
            published = publish(destination)
        except GenerationMoved:
            message = simple_message(Outcome.BEGIN_ANEW)
        except PeerError as refusal:
            message = refusal_message(refusal)
        else:
            _add_to_index(handle, published, destination.branch, peers)
            message = made_message(published.commit.digest, published.commit.data, destination.branch)
    told = read_outcome(broadcast_outcome(peers, message))
    if isinstance(told, Outcome):
        raise GenerationMoved
    if isinstance(told, PeerError):
        raise told
    return told


def _publication(saved: Saved, fields: CommitFields, ancestry: Ancestry, request: CommitRequest) -> Publication:
    nodes, root = saved.draft.nodes()
    layout = layout_node(saved.layout)
    every = {}
    for node in (*saved.more_nodes, *nodes, layout):
        every[node.digest] = node
    commit = CommitObject(
        root, (), fields.message, fields.author, int(clock.now_s() * 1e6), fields.step, fields.metrics, fields.meta,
        layout.digest, saved.draft.counts, ancestry.lineage, ancestry.provenance,
    )  # fmt: skip
    signing = None if request.sign is None else partial(sign, request.sign)
    return Publication(
        commit, list(every.values()), saved.packs, saved.generation, ancestry.parents, signing, request.announce
    )


def _add_to_index(handle: RepositoryHandle, published: Published, branch: str, peers: Peers) -> None:
    """Add a commit that is made to the index; where that fails, report to the other ranks that it is made."""
    try:
        with python_gc_paused():
            handle.add_written(published.packs, published.nodes, generation=published.generation, ref=published.ref)
    except BaseException as error:
        report_instead(peers, ConflictError(
            f"commit {short(published.commit.digest)} is made and the branch {branch} names it, but rank 0 was stopped "
            f"right after ({error!r}): go on from there"
        ))  # fmt: skip
        raise
