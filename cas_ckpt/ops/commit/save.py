"""The save step of a commit: every cell of the state is hashed, and what is new is in durable packs.

`save_alone` is that of one process; that of several ranks, which have to agree on what they hold first, is
`save_on_ranks` in ranks.py. Alone nothing is described, compared, or sent: for a
state of many small tensors that would take half as long again (docs/decisions/006-ranks.md).

Invariant: what is saved here is visible to nobody before it is published; packs that no commit names are found again
by the next commit (deduplicated) or collected later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.protocol import Session
from cas_ckpt.core.refs import Generation
from cas_ckpt.errors import PeerError
from cas_ckpt.memory import check_memory, current_limits, memory_budget, python_gc_paused
from cas_ckpt.objects.codec import known_policy
from cas_ckpt.objects.layouts import LayoutObject
from cas_ckpt.objects.nodes import INLINE_BYTES, Node
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.spec import Box
from cas_ckpt.objects.state import Container, TensorItem, bytes_read_at_once, saved
from cas_ckpt.ops.commit.draft import Draft
from cas_ckpt.ops.commit.frozen import Frozen, FrozenMemory, Hashed
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.ops.commit.straddling_cells import StraddlingSaver
from cas_ckpt.parallel.workers import thread_count
from cas_ckpt.progress import Progress
from cas_ckpt.transfer.hashing import Summed, checksums
from cas_ckpt.transfer.pack_writer import NUM_WRITERS, ChunkSink, WrittenPack
from cas_ckpt.transfer.save import Buffers, Claims, TensorWork, named_in_place, save_tensors
from cas_ckpt.transfer.save_memory import SaveMemory, divide, held_bytes, least_bytes

BYTES_PER_THREAD = 96 * 1024 * 1024
"""Bytes of the state that give one thread more to hash them: fewer, and the threads wait for the interpreter's lock."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Result of the save step on one rank.

    Attributes:
        draft: The state of all ranks; on rank 0 every cell of it has its id.
        generation: gc generation that chunks were deduplicated against.
        packs: Durable packs that the index does not have: on rank 0 those of all ranks, on others their own.
        layout: Who held what; of rank 0.
        more_nodes: Nodes below the draft that other ranks have made; of rank 0.
        hashed: What this process has hashed of frozen tensors, for `FrozenMemory.remember`.
        shares_index: This rank's index is the one that rank 0 writes.
        begin_anew: A collection took packs that were written for this commit: rank 0 must not publish it.
        refusal: Why rank 0 must not publish it; raised on all ranks.
    """

    draft: Draft
    generation: Generation
    packs: Sequence[WrittenPack]
    layout: LayoutObject = field(default_factory=LayoutObject)
    more_nodes: Sequence[Node] = ()
    hashed: Hashed = field(default_factory=dict)
    shares_index: bool = True
    begin_anew: bool = False
    refusal: PeerError | None = None


@dataclass(frozen=True, slots=True)
class StateSize:
    """How large a state is on one rank.

    Attributes:
        num_bytes: Plain bytes of all tensors that have to be hashed, tied ones once.
        num_entries: Tensors and values.
        divided: Whether a tensor is divided over ranks.
        read_bytes: What a thread holds that reads its tensors, such as rows of a file; 0 of live memory.
    """

    num_bytes: int
    num_entries: int
    divided: bool
    read_bytes: int = 0


def measure(state: Container) -> StateSize:
    """How large `state` is."""
    num_bytes, num_entries, divided, read_bytes = 0, 0, False, 0
    tied = set()
    waiting = [state]
    while waiting:
        children = waiting.pop().children
        num_entries += len(children)
        for item in children.values():
            if isinstance(item, Container):
                waiting.append(item)
            elif isinstance(item, TensorItem):
                divided = divided or item.placement is not None
                more = item.spec.num_bytes
                if more > INLINE_BYTES:
                    read_bytes = max(read_bytes, bytes_read_at_once(item.source))
                    tie = None if item.identity is None else (item.identity[0], item.spec.dtype)
                    if tie is None or tie not in tied:
                        num_bytes += more
                        tied.add(tie)
    return StateSize(num_bytes, num_entries, divided, read_bytes)


def room_for(handle: RepositoryHandle, size: StateSize, *, num_threads: int, num_ranks: int = 1) -> SaveMemory:
    """Memory budget of the save step, and the number of threads that fit into it.

    Args:
        num_ranks: Ranks on this machine that commit together.
    """
    return divide(
        memory_budget(num_ranks=num_ranks), num_threads=num_threads,
        num_entries=size.num_entries, num_bytes=size.num_bytes, policy=known_policy(handle.config.encoding),
        abilities=handle.store.abilities, read_bytes=size.read_bytes,
    )  # fmt: skip


def held_bytes_of(handle: RepositoryHandle, size: StateSize) -> int:
    """Memory that the save step holds throughout, besides cells in progress."""
    return held_bytes(num_entries=size.num_entries, num_bytes=size.num_bytes, abilities=handle.store.abilities)


def check_room(handle: RepositoryHandle, size: StateSize) -> None:
    """Refuse a budget of memory in which this state cannot be saved.

    Raises:
        MemoryBudgetError: says how much is needed.
    """
    least = least_bytes(
        num_entries=size.num_entries, num_bytes=size.num_bytes, policy=known_policy(handle.config.encoding),
        abilities=handle.store.abilities, read_bytes=size.read_bytes,
    )  # fmt: skip
    check_memory(least, f"a commit of {size.num_entries} entries here")


class RegionSums:
    """Checksums of regions of one commit's tensors; each region is summed once, of tied tensors too."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._found: dict[tuple[int, Box], bytes] = {}

    def of(self, regions: Sequence[tuple[TensorWork, Box]]) -> list[bytes]:
        """The checksum of each region as it was when it was first asked for."""
        parts = {(id(work), box): Summed(work.source, box, work.item_bytes) for work, box in regions}
        todo = [place for place in parts if place not in self._found]
        found = checksums([parts[place] for place in todo], num_threads=self._num_threads)
        self._found.update(zip(todo, found, strict=True))
        return [self._found[id(work), box] for work, box in regions]


def save_alone(
    handle: RepositoryHandle,
    state: Container,
    request: CommitRequest,
    session: Session,
    *,
    memory: FrozenMemory | None,
    size: StateSize,
    progress: Progress,
) -> Saved:
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
    num_threads = 1
    paused: AbstractContextManager[object] = python_gc_paused()
    if current_limits().num_threads or size.num_bytes >= 2 * BYTES_PER_THREAD:
        # A large state takes seconds, in which other threads of the process may need Python's collector.
        num_threads = thread_count(most=size.num_bytes // BYTES_PER_THREAD)
        paused = nullcontext()
    room = room_for(handle, size, num_threads=num_threads)
    with paused:
        packs = save_chunks(handle, works, session, num_bytes=size.num_bytes, room=room, progress=progress)
    hashed = {} if memory is None or frozen is None else memory.check(frozen)
    layout = LayoutObject(aliases=draft.aliases(), orders=draft.orders, versions=draft.versions)
    return Saved(draft, generation, packs, layout, hashed=hashed)


def _saved(straddling: StraddlingSaver | None, work: TensorWork) -> None:
    """Let the source know that its whole cells are saved; one that has others hears of it when those are."""
    if straddling is None or not straddling.has_cells_of(work):
        saved(work.source)


def save_chunks(
    handle: RepositoryHandle,
    works: Iterable[TensorWork],
    session: Session,
    *,
    num_bytes: int,
    room: SaveMemory,
    progress: Progress,
    straddling: StraddlingSaver | None = None,
) -> list[WrittenPack]:
    """Hash every cell of `works`, then the straddling cells; the packs with what is new, durable.

    Args:
        num_bytes: What progress is measured against.
        room: What may be in memory for it.
    Raises:
        Whatever a source, the store or another rank raised; no pack is left open.
    """
    # Ranks share the medium, and what each has for cells that straddle them is planned beside so many packs.
    num_writers = room.num_writers if straddling is None else min(room.num_writers, NUM_WRITERS)
    sink = ChunkSink(handle.store, pack_bytes=handle.config.pack_bytes, on_pack=session.beat, num_writers=num_writers)
    claims, policy = Claims(handle.known_to_commit()), known_policy(handle.config.encoding)
    buffers = Buffers()
    progress.start("hashing", num_bytes)
    try:
        expect_new = not handle.holds_chunks()
        save_tensors(
            named_in_place(works, claims, progress, expect_new=expect_new), sink, claims=claims, policy=policy,
            num_threads=room.num_threads, buffers=buffers, expect_new=expect_new, progress=progress,
            on_saved=partial(_saved, straddling),
        )  # fmt: skip
        if straddling is not None:
            straddling.run(sink, claims, policy, buffers)
        return sink.finish()
    except BaseException:
        sink.abort()
        raise
    finally:
        buffers.keep()
        progress.finish()
