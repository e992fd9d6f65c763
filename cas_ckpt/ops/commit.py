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

import math
import os
import pwd
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cas_ckpt import clock
from cas_ckpt.errors import CkptError, ConflictError, InvalidInputError, NotFoundError
from cas_ckpt.objects.codec import EncodingPolicy
from cas_ckpt.objects.commit import CommitObject, LayoutObject, commit_node, layout_node
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.node import Node
from cas_ckpt.objects.state import Container, TensorItem, walk
from cas_ckpt.objects.values import encode_value
from cas_ckpt.ops.checkout import default_threads
from cas_ckpt.ops.draft import Draft, DraftTensor, draft_nodes
from cas_ckpt.ops.frozen import DEFAULT_AUDIT, FrozenMemory
from cas_ckpt.ops.patterns import KeyPatterns
from cas_ckpt.ops.publish import ANY_HEAD, AnyHead, GenerationMoved, Publication, publish_commit
from cas_ckpt.ops.records import CommitInfo, info_from_row
from cas_ckpt.pack_index import commit_row
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.refs import RefKind, check_name
from cas_ckpt.repository import RepositoryHandle
from cas_ckpt.transfer.pack_writer import ChunkSink, WrittenPack
from cas_ckpt.transfer.save import TensorWork, save_tensors

MAX_MESSAGE_BYTES = 64 * 1024
MAX_STEP = 2**63 - 1
"""The largest step: what databases call a big integer."""

MAX_GENERATIONS = 5
"""Times that a commit begins anew because a garbage collection began under it."""


@dataclass(frozen=True, slots=True)
class CommitRequest:
    """What a commit is to say and how it is to be made.

    Attributes:
        branch: Name of the branch; None is the default branch.
        step: Training step. metrics: finite numbers by name.
        meta: A plain value of the user's.
        on_conflict: "retry" goes on top of whatever head is there; "raise" reports that the
            branch moved since the call began.
        frozen: Patterns of keys that do not change in this process.
        frozen_audit: Share of the frozen chunks hashed all the same, 0..1.
        allow_pickle: Pickle values that cannot be expressed otherwise.
        other_parents: Commits that this one joins, after the branch's head.
    """

    branch: str | None = None
    message: str = ""
    author: str | None = None
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    meta: Any = None
    on_conflict: str = "retry"
    frozen: str | Sequence[str] | None = None
    frozen_audit: float = DEFAULT_AUDIT
    allow_pickle: bool = False
    other_parents: Sequence[Digest] = ()
    num_threads: int | None = None


def commit_tree(
    handle: RepositoryHandle,
    state: Container,
    request: CommitRequest,
    *,
    memory: FrozenMemory | None = None,
    progress: Progress = SILENT,
) -> CommitInfo:
    """Commit `state`; what the commit says of itself.

    Args:
        memory: What this process declared frozen before; needed across calls for `frozen=`.
    Raises:
        InvalidInputError, UnsupportedValueError, FrozenChangedError: before anything is written
            that could be seen. ConflictError: the branch moved. StorageError: the medium refused.
    """
    branch = check_name(handle.config.default_branch if request.branch is None else request.branch)
    checked = _checked_fields(request)
    head = ANY_HEAD if request.on_conflict == "retry" else _head(handle, branch)
    for _ in range(MAX_GENERATIONS):
        attempt = _Attempt(handle, request, checked, memory or FrozenMemory(), progress)
        try:
            return attempt.run(state, branch, head)
        except GenerationMoved:
            continue
    raise ConflictError(f"garbage collections began {MAX_GENERATIONS} times while this commit was made: try again")


def _head(handle: RepositoryHandle, branch: str) -> Digest | None:
    try:
        return handle.refs.get(RefKind.BRANCH, branch).target
    except NotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class _Fields:
    message: str
    author: str
    metrics: dict[str, float]
    meta: bytes | None


def _checked_fields(request: CommitRequest) -> _Fields:
    if request.on_conflict not in ("retry", "raise"):
        raise InvalidInputError(f"on_conflict is 'retry' or 'raise', not {request.on_conflict!r}")
    author = request.author if request.author is not None else default_author()
    for name, text in (("message", request.message), ("author", author)):
        _check_text(name, text)
    if request.step is not None and (type(request.step) is not int or not 0 <= request.step <= MAX_STEP):
        raise InvalidInputError(f"step {request.step!r} is not a whole number from 0 to {MAX_STEP}")
    meta = None if request.meta is None else encode_value(request.meta, key="meta")
    return _Fields(request.message, author, {k: _metric(k, v) for k, v in request.metrics.items()}, meta)


def _check_text(name: str, text: str) -> None:
    if not isinstance(text, str):
        raise InvalidInputError(f"the {name} is a {type(text).__name__}, not text")
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"the {name} cannot be written as UTF-8: {error}") from error
    if num_bytes > MAX_MESSAGE_BYTES:
        raise InvalidInputError(f"the {name} is longer than {MAX_MESSAGE_BYTES} bytes: put long text into meta=")


def _metric(name: str, value: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(f"metric {name!r} is no number that a float can be: {error}") from error
    _check_text("name of a metric", name)
    if isinstance(value, (bool, str)) or not math.isfinite(number):
        raise InvalidInputError(
            f"metric {name!r} is {value!r}: wanted a finite number (leave a NaN out, or put it into meta=)"
        )
    return number


def default_author() -> str:
    """Who commits when nobody says: user@host."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


class _Attempt:
    """One try at a commit against one gc generation."""

    def __init__(
        self,
        handle: RepositoryHandle,
        request: CommitRequest,
        fields: _Fields,
        memory: FrozenMemory,
        progress: Progress,
    ) -> None:
        self._handle = handle
        self._request = request
        self._fields = fields
        self._memory = memory
        self._progress = progress

    def run(self, state: Container, branch: str, head: Digest | None | AnyHead) -> CommitInfo:
        generation = self._handle.begin_writing()
        allow_pickle = self._request.allow_pickle
        draft = Draft(state, encode_value=lambda value, key: encode_value(value, key=key, allow_pickle=allow_pickle))
        works: Iterable[TensorWork] = draft.works()
        patterns = KeyPatterns(self._request.frozen)
        frozen: list[DraftTensor] = []
        if patterns:
            works = list(works)
            frozen = self._memory.prepare(
                draft, patterns, audit=self._request.frozen_audit, known=self._handle.known
            )
        packs = self._save(works, state)
        publication = Publication(packs)
        try:
            self._memory.check(frozen)
            self._plan_nodes(draft, publication)
            digest = publish_commit(
                self._handle, publication, branch=branch, generation=generation, expected_head=head,
                other_parents=self._request.other_parents,
            )  # fmt: skip
        except CkptError:
            # The packs are durable: the next commit need not write them again.
            self._handle.add_written(publication.packs, publication.written_nodes)
            raise
        except BaseException:
            self._handle.forget_chunks()  # interrupted: the next commit looks for those packs
            raise
        self._handle.add_written(publication.packs, publication.written_nodes)
        self._memory.remember(frozen)
        data = next(node.data for node in publication.written_nodes if node.digest == digest)
        return info_from_row(commit_row(digest, data))

    def _save(self, works: Iterable[TensorWork], state: Container) -> list[WrittenPack]:
        handle, request = self._handle, self._request
        sink = ChunkSink(handle.store, pack_bytes=handle.config.pack_bytes)
        if self._progress is not SILENT:
            self._progress.start("hashing", _tensor_bytes(state))
        try:
            save_tensors(
                works,
                sink,
                known=handle.known,
                policy=EncodingPolicy(handle.config.encoding),
                num_threads=request.num_threads or default_threads(),
                expect_new=handle.index.num_chunks() == 0,
                progress=self._progress,
            )
            return sink.finish()
        except BaseException:
            sink.abort()
            handle.forget_chunks()  # packs that were finished before: the next commit finds them
            raise
        finally:
            self._progress.finish()

    def _plan_nodes(self, draft: Draft, publication: Publication) -> None:
        nodes, root = draft_nodes(draft)
        layout = layout_node(LayoutObject(aliases=draft.aliases))
        nodes.append(layout)
        stored = self._handle.known([node.digest for node in nodes])
        publication.nodes = [node for node, there in zip(nodes, stored, strict=True) if not there]
        stats = _stats(draft, publication.nodes, publication.packs)
        fields, request = self._fields, self._request
        time_us = int(clock.now_s() * 1e6)

        def make_commit(parents: tuple[Digest, ...]) -> Node:
            commit = CommitObject(
                root, parents, fields.message, fields.author, time_us, request.step, fields.metrics, fields.meta,
                layout.digest, stats,
            )  # fmt: skip
            return commit_node(commit)

        publication.make_commit = make_commit


def _tensor_bytes(state: Container) -> int:
    """Plain bytes of all tensors, tied ones each time: what progress is measured against."""
    return sum(item.spec.num_bytes for _, item in walk(state) if isinstance(item, TensorItem))


def _stats(draft: Draft, nodes: Sequence[Node], packs: Sequence[WrittenPack]) -> dict[str, int]:
    entries = [entry for pack in packs for entry in pack.entries]
    node_bytes = sum(len(node.data) for node in nodes)
    return {
        "total_bytes": draft.total_bytes,
        "new_bytes": sum(entry.num_bytes for entry in entries) + node_bytes,
        "stored_bytes": sum(pack.size_bytes for pack in packs) + node_bytes,
        "num_entries": draft.num_entries,
        "num_tensors": draft.num_tensors,
        "num_chunks": sum(work.grid.num_cells for work in draft.all_works),
        "num_new_chunks": len(entries),
    }
