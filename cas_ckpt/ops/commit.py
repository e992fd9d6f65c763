"""commit: a state becomes a commit on a branch.

    1. check the request; see that index and store agree (begin_writing)
    2. draft: what stands inline, what has to be hashed, what is frozen
    3. hash every cell, stream what is new into data packs      (transfer/save.py)
    4. nodes: tensor nodes, tree nodes, layout; drop those that are stored already
    5. publish: meta pack with the commit, then the swap of the ref   (ops/publish.py)
    6. index rows
Dying anywhere leaves the branch as it was; packs that nothing names are found again by the
next commit (deduplicated) or collected later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from cas_ckpt.errors import CkptError, ConflictError, InternalError
from cas_ckpt.objects.codec import EncodingPolicy
from cas_ckpt.objects.commit import LayoutObject
from cas_ckpt.objects.spec import Box
from cas_ckpt.objects.state import Container, TensorItem, walk
from cas_ckpt.objects.values import encode_value
from cas_ckpt.ops.ancestry import settle_ancestry, settle_destination
from cas_ckpt.ops.commit_on_ranks import RanksAttempt
from cas_ckpt.ops.composition import publish_draft, tensor_bytes
from cas_ckpt.ops.destination import Destination
from cas_ckpt.ops.draft import Draft, DraftTensor
from cas_ckpt.ops.frozen import Frozen, FrozenMemory
from cas_ckpt.ops.patterns import KeyPatterns
from cas_ckpt.ops.publish import GenerationMoved, Publication
from cas_ckpt.ops.records import CommitInfo, info_from_row
from cas_ckpt.ops.request import CommitFields, CommitRequest, checked_fields
from cas_ckpt.ops.together import together
from cas_ckpt.pack_index import commit_row
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.refs import Head, check_name
from cas_ckpt.repository import RepositoryHandle
from cas_ckpt.sessions import Session
from cas_ckpt.transfer.pack_writer import ChunkSink, WrittenPack
from cas_ckpt.transfer.peers import SOLO, Peers
from cas_ckpt.transfer.save import Claims, TensorWork, save_tensors
from cas_ckpt.transfer.sums import Summed, checksums
from cas_ckpt.transfer.workers import thread_count

BYTES_PER_THREAD = 96 * 1024 * 1024
"""Bytes of the state that give one thread more to hash them: fewer, and the threads wait for the interpreter's lock."""

MAX_GENERATIONS = 5
"""Times that a commit begins anew because a garbage collection began under it."""


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
    """
    with together(peers):
        return _commit(handle, state, request, peers, memory or FrozenMemory(), progress)[0]


def commit_live(
    handle: RepositoryHandle, state: Container, request: CommitRequest, *, peers: Peers = SOLO,
    memory: FrozenMemory | None = None, progress: Progress = SILENT,
) -> CommitInfo:  # fmt: skip
    """`commit_tree` for the live state of this process: goes on from `handle.head`, and moves it on all ranks."""
    request = replace(request, head=handle.head)
    with together(peers):
        made, branch = _commit(handle, state, request, peers, memory or FrozenMemory(), progress)
    handle.head = Head(branch, made.id)
    return made


def _commit(
    handle: RepositoryHandle, state: Container, request: CommitRequest, peers: Peers, memory: FrozenMemory,
    progress: Progress,
) -> tuple[CommitInfo, str]:  # fmt: skip
    if request.branch is not None:
        check_name(request.branch)
    checked = checked_fields(request)
    destination: Destination | None = None
    if peers.rank == 0:  # who publishes resolves: a branch may move between the looks of two ranks
        checked = replace(checked, ancestry=settle_ancestry(handle, request, checked))
        destination = settle_destination(handle, request, checked.ancestry)
    divided = peers.size > 1 or any(isinstance(item, TensorItem) and item.placement for _, item in walk(state))
    for _ in range(MAX_GENERATIONS):
        try:
            if divided:
                return RanksAttempt(handle, request, checked, memory, peers, progress).run(state, destination)
            if destination is None:
                raise InternalError("a process that commits alone is no rank 0")
            return _Attempt(handle, request, checked, memory, progress).run(state, destination), destination.branch
        except GenerationMoved:
            continue
    raise ConflictError(f"garbage collections began {MAX_GENERATIONS} times while this commit was made: try again")


class _Attempt:
    """One try at a commit against one gc generation."""

    def __init__(
        self,
        handle: RepositoryHandle,
        request: CommitRequest,
        fields: CommitFields,
        memory: FrozenMemory,
        progress: Progress,
    ) -> None:
        self._handle = handle
        self._request = request
        self._fields = fields
        self._memory = memory
        self._progress = progress

    def run(self, state: Container, destination: Destination) -> CommitInfo:
        generation = self._handle.begin_writing()
        allow_pickle = self._request.allow_pickle
        draft = Draft(state, encode_value=lambda value, key: encode_value(value, key=key, allow_pickle=allow_pickle))
        works: Iterable[TensorWork] = draft.works()
        patterns = KeyPatterns(self._request.frozen, self._request.frozen_keys)
        frozen = Frozen()
        if patterns:
            works = list(works)
            frozen = self._memory.prepare(
                draft, self._request, patterns, known=self._handle.known,
                regions=lambda tensor: (tensor.item.spec.box,), checksums=self._checksums,
            )  # fmt: skip
        with Session(self._handle.store) as session:
            publication = Publication(self._save(works, state, session), generation=generation)
            return self._publish(draft, publication, frozen, destination)

    def _checksums(self, regions: Sequence[tuple[DraftTensor, Box]]) -> list[bytes]:
        parts = [Summed(each.item.source, box, each.item.spec.item_bytes) for each, box in regions]
        return checksums(parts, num_threads=thread_count(self._request.num_threads))

    def _publish(
        self, draft: Draft, publication: Publication, frozen: Frozen, destination: Destination
    ) -> CommitInfo:
        try:
            hashed = self._memory.check(frozen)
        except CkptError:
            publication.tell(self._handle)  # the next commit need not write them again
            raise
        digest = publish_draft(
            self._handle, draft, publication, self._request, self._fields, LayoutObject(aliases=draft.aliases),
            destination,
        )  # fmt: skip
        publication.tell(self._handle)
        self._memory.remember(hashed, draft)
        data = next(node.data for node in publication.written_nodes if node.digest == digest)
        return info_from_row(commit_row(digest, data))

    def _save(self, works: Iterable[TensorWork], state: Container, session: Session) -> list[WrittenPack]:
        handle, request = self._handle, self._request
        sink = ChunkSink(handle.store, pack_bytes=handle.config.pack_bytes, on_pack=session.beat)
        num_bytes = tensor_bytes(state)
        self._progress.start("hashing", num_bytes)
        try:
            save_tensors(
                works,
                sink,
                claims=Claims(handle.known),
                policy=EncodingPolicy(handle.config.encoding),
                num_threads=thread_count(request.num_threads, most=num_bytes // BYTES_PER_THREAD),
                expect_new=not handle.holds_chunks(),
                progress=self._progress,
            )
            return sink.finish()
        except BaseException:
            sink.abort()
            handle.forget_chunks()  # packs that were finished before: the next commit finds them
            raise
        finally:
            self._progress.finish()
