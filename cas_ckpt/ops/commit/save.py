"""The save step of a commit: the state is drafted, every cell of it is hashed, and what is new is in durable packs.

    1. how large the state is, and whether it can be saved in the memory that there is  (`measure`, `check_room`)
    2. what of it is stored inline, what has to be hashed, what is tied                 (`Draft.works`)
    3. whole cells are hashed, then those that straddle ranks; what is new is written   (`save_chunks`)
    4. the nodes of the state, from the ids that came of it                             (`Draft.nodes`)

By one process commit.py does it, by several ranks, which have to agree on what they hold first, ranks.py.

Invariant: the nodes that come out follow from keys, specs and bytes alone. What is saved here is visible to nobody
before it is published; packs that no commit names are found again by the next commit (deduplicated) or collected later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.protocol import Session
from cas_ckpt.core.refs import Generation
from cas_ckpt.errors import InternalError, InvalidInputError, PeerError
from cas_ckpt.memory import check_memory, memory_budget
from cas_ckpt.objects.codec import known_policy
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.layouts import LayoutObject
from cas_ckpt.objects.nodes import (
    INLINE_BYTES,
    ContainerEntry,
    Entry,
    Node,
    TensorEntry,
    ValueEntry,
    tensor_nodes,
    tree_nodes,
)
from cas_ckpt.objects.spec import Box, Spec, grid_for
from cas_ckpt.objects.state import (
    PLAIN_NAME,
    Container,
    EncodedValue,
    Flavor,
    Name,
    TensorItem,
    ValueItem,
    bytes_read_at_once,
    render_name,
    whole_bytes,
)
from cas_ckpt.objects.values import encode_value
from cas_ckpt.ops.commit.straddling_cells import StraddlingSaver
from cas_ckpt.progress import Progress
from cas_ckpt.transfer.hashing import Summed, checksums
from cas_ckpt.transfer.pack_writer import NUM_WRITERS, ChunkSink, WrittenPack
from cas_ckpt.transfer.save import (
    Buffers,
    Claims,
    SaveMemory,
    TensorWork,
    divide,
    held_bytes,
    least_bytes,
    named_in_place,
    save_tensors,
)

if TYPE_CHECKING:
    from cas_ckpt.ops.commit.frozen import Hashed

MAX_KEY_BYTES = 4096


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


@dataclass(slots=True)
class DraftTensor:
    """A tensor that is too large to be stored inline; tied tensors share one `work`."""

    name: Name
    key: str
    flavor: Flavor
    item: TensorItem
    work: TensorWork


@dataclass(slots=True)
class DraftContainer:
    """A container whose tree node is made once its tensors are hashed."""

    name: Name
    kind: str
    attrs: bytes | None
    entries: list[Entry | DraftTensor | DraftContainer] = field(default_factory=list)


class _BytesSource:
    """A long encoded value, as the elements of a uint8 tensor."""

    def __init__(self, data: bytes) -> None:
        self._array = np.frombuffer(data, np.uint8)

    def read(self, box: Box) -> np.ndarray[Any, Any]:
        return self._array[box.slices]


class Draft:
    """A whole state in the making. Complete once `works` has been gone through.

    Attributes:
        root: The state's outermost container.
        tensors: Every tensor that is kept in chunks; tied ones share a work.
        containers: All below the root, by key; parents before their children.
        orders: Key of each tensor that does not lie in memory in the order of its dimensions -> the order that it has.
        versions: Key of each module's state -> versions of the modules in it.
        counts: Entries, tensors, chunks (equal ones each time, tied ones once) and plain bytes of the state so far, by
            the names that they have in the stats of a commit.
    """

    def __init__(self, state: Container, *, allow_pickle: bool = False, prefix: str = "") -> None:
        """Nothing is read before `works` is gone through.

        Args:
            allow_pickle: Pickle values that cannot be expressed otherwise.
            prefix: What messages write before a key: where `state` is inside of the whole state.
        """
        self._state = state
        self._allow_pickle = allow_pickle
        self._prefix = prefix
        self._works: dict[Any, TensorWork] = {}
        self._ties: dict[Any, str] = {}
        self._aliases: dict[str, list[str]] = {}
        self.root = DraftContainer("", state.kind, None)
        self.tensors: list[DraftTensor] = []
        self.containers: dict[str, DraftContainer] = {}
        self.orders: dict[str, tuple[int, ...]] = {}
        self.versions: dict[str, Mapping[str, int]] = {}
        self.counts = {"total_bytes": 0, "num_entries": 0, "num_tensors": 0, "num_chunks": 0}

    def works(self) -> Iterator[TensorWork]:
        """Go through the state, once; each tensor that has to be hashed, tied ones once.

        A generator, so that threads can hash what was found while the rest is still looked at.

        Raises:
            InvalidInputError: a key that is too long. UnsupportedValueError: names the key.
        """
        counts = self.counts
        waiting = [(self._state, self.root, "")]
        while waiting:
            container, made, key = waiting.pop()
            if container.versions is not None:
                self.versions[key] = container.versions
            made.attrs = None if container.attrs is None else self._encoded(container.attrs, key)
            prefix = f"{key}/" if key else ""
            for name, item in container.children.items():
                at = prefix + (name if type(name) is str and PLAIN_NAME.match(name) else render_name(name))
                if type(item) is Container:
                    below = self.containers[at] = DraftContainer(name, item.kind, None)
                    made.entries.append(below)
                    waiting.append((item, below, at))
                    continue
                if len(at) > MAX_KEY_BYTES // 4 and len(at.encode("utf-8", "surrogatepass")) > MAX_KEY_BYTES:
                    raise InvalidInputError(f"key {at[:60]!r}... is longer than {MAX_KEY_BYTES} bytes: shorten it")
                counts["num_entries"] += 1
                tie: Any = len(self.tensors)
                if isinstance(item, TensorItem):
                    counts["num_tensors"] += 1
                    tensor, spec = item, item.spec
                    if item.order is not None:
                        self.orders[at] = item.order
                    num_bytes = spec.num_bytes
                    if item.identity is not None and num_bytes:
                        tie = (item.identity[0], spec.dtype)
                        first = self._ties.setdefault(tie, at)
                        if first is not at:
                            self._aliases.setdefault(first, [first]).append(at)
                    if num_bytes <= INLINE_BYTES:
                        counts["total_bytes"] += num_bytes
                        inline = whole_bytes(item.source, spec.box)
                        made.entries.append(TensorEntry(name, spec, item.flavor, None, inline))
                        continue
                elif isinstance(item, (ValueItem, EncodedValue)):
                    data = self._encoded(item.value if isinstance(item, ValueItem) else item, at)
                    num_bytes = len(data)
                    if num_bytes <= INLINE_BYTES:
                        counts["total_bytes"] += num_bytes
                        made.entries.append(ValueEntry(name, data))
                        continue
                    spec = Spec("uint8", (num_bytes,))
                    tensor = TensorItem(spec, _BytesSource(data), Flavor.VALUE)
                else:
                    raise InternalError(f"{at}: a {type(item).__name__} cannot be committed")
                work = self._works.get(tie)
                is_tied = work is not None
                if work is None:
                    try:
                        grid = grid_for(spec)
                    except InvalidInputError as error:
                        raise InvalidInputError(f"{at}: {error}") from error
                    work = self._works[tie] = TensorWork(spec, grid, tensor.source)
                    counts["total_bytes"] += num_bytes
                    counts["num_chunks"] += grid.num_cells
                self.tensors.append(DraftTensor(name, at, tensor.flavor, tensor, work))
                made.entries.append(self.tensors[-1])
                if not is_tied:
                    yield work

    def _encoded(self, value: Any, key: str) -> bytes:
        if isinstance(value, EncodedValue):
            return value.data
        return encode_value(value, key=self._prefix + key, allow_pickle=self._allow_pickle)

    def add_entries(self, key: str, entries: Sequence[Entry]) -> None:
        """Add what another rank has made in a container of this draft."""
        self.containers[key].entries.extend(entries)

    def count(self, more: Mapping[str, int]) -> None:
        """Add what another rank has counted."""
        for name, number in more.items():
            self.counts[name] += number

    def inline_tensors(self) -> Iterator[tuple[str, TensorEntry]]:
        """The tensors that are stored in the tree itself, with their keys; as far as `works` has come."""
        for key, container in (("", self.root), *self.containers.items()):
            prefix = f"{key}/" if key else ""
            for entry in container.entries:
                if isinstance(entry, TensorEntry) and entry.inline is not None:
                    yield prefix + render_name(entry.name), entry

    def aliases(self) -> tuple[tuple[str, ...], ...]:
        """Groups of keys that are one tensor in memory, each sorted, sorted."""
        return tuple(sorted(tuple(sorted(keys)) for keys in self._aliases.values()))

    def release(self) -> None:
        """Give its memory back, once its nodes are made: of a hundred thousand small tensors that is 50 MB."""
        self.tensors, self.containers = [], {}
        self.root.entries = []
        self._works, self._ties = {}, {}

    def nodes(self) -> tuple[list[Node], Digest]:
        """All nodes of the state, level by level from the lowest, each once, and the id of its root.

        Raises:
            InternalError: a cell of a tensor was never hashed.
        """
        made: dict[Digest, Node] = {}
        trees: dict[int, Digest] = {}
        for container in (*reversed(self.containers.values()), self.root):
            entries: list[Entry] = []
            for entry in container.entries:
                if isinstance(entry, DraftContainer):
                    entries.append(ContainerEntry(entry.name, trees[id(entry)]))
                elif isinstance(entry, DraftTensor):
                    work, spec = entry.work, entry.item.spec
                    chunks = list(filter(None, work.chunks))
                    if len(chunks) != work.grid.num_cells:
                        raise InternalError(f"{len(chunks)} of {work.grid.num_cells} cells of {spec} were hashed")
                    if len(chunks) == 1:
                        entries.append(TensorEntry(entry.name, spec, entry.flavor, chunks[0], None, single=True))
                        continue
                    nodes = tensor_nodes(spec, work.grid, chunks)
                    for node in nodes:
                        made[node.digest] = node
                    entries.append(TensorEntry(entry.name, spec, entry.flavor, nodes[-1].digest, None))
                else:
                    entries.append(entry)
            nodes = tree_nodes(container.kind, container.attrs, entries)
            for node in nodes:
                made[node.digest] = node
            trees[id(container)] = nodes[-1].digest
        # What one node refers to gets neighbouring numbers in the index so, as packs are read in their order. A later
        # version of that node refers to nearly all of it again: rows in `edges_by_child` that are on few pages.
        levels: dict[Digest, int] = {}
        for digest, node in made.items():  # children before parents
            levels[digest] = 1 + max([levels.get(child, 0) for child in node.children], default=0)
        return sorted(made.values(), key=lambda node: levels[node.digest]), trees[id(self.root)]


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
            read_later=(lambda _: False) if straddling is None else straddling.has_cells_of,
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
