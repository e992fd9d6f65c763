"""A commit in the making: what of a state stands inline, what has to be hashed, what ties.

Invariant: the nodes that come out follow from keys, specs and bytes alone. Pure apart from
reading small tensors: it neither hashes chunks nor writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, TypeAlias

import msgpack
import numpy as np

from cas_ckpt import clock
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.publish import (
    CONTINUED_FROM,
    MAX_ATTEMPTS,
    Destination,
    GenerationMoved,
    Publication,
    publish_commit,
)
from cas_ckpt.errors import CkptError, ConflictError, InternalError, InvalidInputError
from cas_ckpt.layout.grid import grid_for
from cas_ckpt.objects.digest import DIGEST_BYTES, Digest, ObjectKind
from cas_ckpt.objects.nodes import (
    INLINE_BYTES,
    CommitObject,
    ContainerEntry,
    Entry,
    LayoutObject,
    LineageEdge,
    Node,
    TensorEntry,
    ValueEntry,
    commit_node,
    layout_node,
    tensor_nodes,
    tree_nodes,
)
from cas_ckpt.objects.pack import ExtentInfo, PackKind
from cas_ckpt.objects.spec import Box, BoxPlacement, Grid, Mesh, MeshPlacement, Placement, Spec
from cas_ckpt.objects.state import Container, EncodedValue, Item, Name, TensorItem, ValueItem, render_name, walk
from cas_ckpt.ops.commit.request import CommitFields, CommitRequest
from cas_ckpt.transfer.pack_writer import WrittenPack
from cas_ckpt.transfer.save import TensorWork

ValueEncoder: TypeAlias = Callable[[Any, str], bytes]

MAX_KEY_BYTES = 4096

VALUE_FLAVOR = "value"
"""Flavor of the tensor of bytes that a long value is stored as."""


@dataclass(slots=True)
class DraftTensor:
    """A tensor that is too large to stand inline; tied tensors share one `work`."""

    name: Name
    key: str
    flavor: str
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
        containers: All below the root, by key.
        num_entries, num_tensors: Entries so far, and how many of them are tensors.
        inline_bytes: Plain bytes of what stands in tree nodes.
    """

    def __init__(self, state: Container, *, encode_value: ValueEncoder) -> None:
        """Nothing is read before `works` is gone through.

        Args:
            encode_value: (value, key) -> its bytes; raises UnsupportedValueError naming the key.
        """
        self._state = state
        self._encode_value = encode_value
        self._works: dict[Any, TensorWork] = {}
        self._ties: dict[Any, list[str]] = {}
        self.root = DraftContainer("", state.kind, None)
        self.tensors: list[DraftTensor] = []
        self.containers: dict[str, DraftContainer] = {}
        self.num_entries = 0
        self.num_tensors = 0
        self.inline_bytes = 0
        self.num_chunks_elsewhere = 0

    def works(self) -> Iterator[TensorWork]:
        """Go through the state, once; each tensor that has to be hashed, tied ones once.

        A generator, so that threads can hash what was found while the rest is still looked at.

        Raises:
            InvalidInputError: a key that is too long. UnsupportedValueError: names the key.
        """
        waiting = [(self._state, self.root, "")]
        while waiting:
            container, made, key = waiting.pop()
            made.attrs = None if container.attrs is None else self._encoded(container.attrs, key)
            prefix = f"{key}/" if key else ""
            for name, item in container.children.items():
                at = prefix + render_name(name)
                if isinstance(item, Container):
                    below = DraftContainer(name, item.kind, None)
                    made.entries.append(below)
                    self.containers[at] = below
                    waiting.append((item, below, at))
                    continue
                entry, is_new = self._entry(item, name, at)
                made.entries.append(entry)
                if is_new and isinstance(entry, DraftTensor):
                    yield entry.work

    @property
    def all_works(self) -> list[TensorWork]:
        """Every tensor that has to be hashed, as far as `works` has come."""
        return list(self._works.values())

    def add_elsewhere(self, *, num_bytes: int, num_entries: int, num_tensors: int, num_chunks: int) -> None:
        """Count entries that other ranks made below this draft."""
        self.inline_bytes += num_bytes
        self.num_entries += num_entries
        self.num_tensors += num_tensors
        self.num_chunks_elsewhere += num_chunks

    def inline_tensors(self) -> Iterator[tuple[str, TensorEntry]]:
        """The tensors that stand in the tree itself, with their keys; as far as `works` has come."""
        waiting = [(self.root, "")]
        while waiting:
            container, prefix = waiting.pop()
            for entry in container.entries:
                key = prefix + render_name(entry.name)
                if isinstance(entry, DraftContainer):
                    waiting.append((entry, f"{key}/"))
                elif isinstance(entry, TensorEntry) and entry.inline is not None:
                    yield key, entry

    @property
    def num_chunks(self) -> int:
        """Chunks of the whole state, equal ones counted each time, tied ones once."""
        return self.num_chunks_elsewhere + sum(work.grid.num_cells for work in self._works.values())

    @property
    def aliases(self) -> tuple[tuple[str, ...], ...]:
        """Groups of keys that are one tensor in memory, each sorted, sorted."""
        return tuple(sorted(tuple(sorted(keys)) for keys in self._ties.values() if len(keys) > 1))

    @property
    def total_bytes(self) -> int:
        """Plain bytes of all tensors (each tied group once) and inline values."""
        return self.inline_bytes + sum(work.spec.num_bytes for work in self._works.values())

    def _entry(self, item: Item, name: Name, key: str) -> tuple[Entry | DraftTensor, bool]:
        """The entry of a tensor or value, and whether a tensor has to be hashed for it."""
        if len(key) > MAX_KEY_BYTES // 4 and len(key.encode("utf-8", "surrogatepass")) > MAX_KEY_BYTES:
            raise InvalidInputError(f"key {key[:60]!r}... is longer than {MAX_KEY_BYTES} bytes: shorten it")
        self.num_entries += 1
        if isinstance(item, TensorItem):
            return self._tensor(item, name, key)
        if isinstance(item, ValueItem):
            return self._value(item.value, name, key)
        if isinstance(item, EncodedValue):
            return self._value(item, name, key)
        raise InternalError(f"{key}: a {type(item).__name__} cannot be committed")

    def _tensor(self, item: TensorItem, name: Name, key: str) -> tuple[Entry | DraftTensor, bool]:
        self.num_tensors += 1
        spec = item.spec
        num_bytes = spec.num_bytes
        tie = None
        if item.identity is not None and num_bytes:
            tie = (item.identity[0], spec.dtype)
            self._ties.setdefault(tie, []).append(key)
        if num_bytes > INLINE_BYTES:
            return self._pending(item, name, key, tie)
        inline = item.source.read(spec.box).tobytes()
        self.inline_bytes += num_bytes
        return TensorEntry(name, spec, item.flavor, None, inline), False

    def _encoded(self, value: Any, key: str) -> bytes:
        return value.data if isinstance(value, EncodedValue) else self._encode_value(value, key)

    def _value(self, value: Any, name: Name, key: str) -> tuple[Entry | DraftTensor, bool]:
        data = self._encoded(value, key)
        if len(data) <= INLINE_BYTES:
            self.inline_bytes += len(data)
            return ValueEntry(name, data), False
        return self._pending(TensorItem(Spec("uint8", (len(data),)), _BytesSource(data), VALUE_FLAVOR), name, key, None)

    def _pending(self, item: TensorItem, name: Name, key: str, tie: Any) -> tuple[DraftTensor, bool]:
        same = tie if tie is not None else len(self.tensors)
        work = self._works.get(same)
        is_new = work is None
        if work is None:
            work = self._works[same] = TensorWork(item.spec, _grid(item.spec, key), item.source)
        self.tensors.append(DraftTensor(name, key, item.flavor, item, work))
        return self.tensors[-1], is_new


def _grid(spec: Spec, key: str) -> Grid:
    try:
        return grid_for(spec)
    except InvalidInputError as error:
        raise InvalidInputError(f"{key}: {error}") from error


def draft_nodes(draft: Draft) -> tuple[list[Node], Digest]:
    """All nodes of the state, children before parents, and the id of its root.

    Every work of the draft must be hashed. Raises InternalError if one is not.
    """
    made: dict[Digest, Node] = {}
    root = _container_node(draft.root, made)
    return list(made.values()), root


def _container_node(container: DraftContainer, made: dict[Digest, Node]) -> Digest:
    entries: list[Entry] = []
    for entry in container.entries:
        if isinstance(entry, DraftContainer):
            entries.append(ContainerEntry(entry.name, _container_node(entry, made)))
        elif isinstance(entry, DraftTensor):
            entries.append(_tensor_entry(entry, made))
        else:
            entries.append(entry)
    nodes = tree_nodes(container.kind, container.attrs, entries)
    made.update((node.digest, node) for node in nodes)
    return nodes[-1].digest


def _tensor_entry(tensor: DraftTensor, made: dict[Digest, Node]) -> TensorEntry:
    chunks = chunk_ids(tensor.work)
    spec = tensor.item.spec
    if len(chunks) == 1:
        return TensorEntry(tensor.name, spec, tensor.flavor, chunks[0], None, single=True)
    nodes = tensor_nodes(spec, tensor.work.grid, chunks)
    made.update((node.digest, node) for node in nodes)
    return TensorEntry(tensor.name, spec, tensor.flavor, nodes[-1].digest, None)


def chunk_ids(work: TensorWork) -> list[Digest]:
    """The chunk ids of a hashed tensor.

    Raises:
        InternalError: a cell was never hashed.
    """
    ids = [digest for digest in work.chunks if digest is not None]
    if len(ids) != work.grid.num_cells:
        raise InternalError(f"{len(ids)} of {work.grid.num_cells} cells of {work.spec} were hashed")
    return ids


# DOC of cas_ckpt.ops.commit.draft:
# From a hashed draft to a published commit: nodes, layout, stats and the commit object.
#
# Invariant: the root follows from the draft alone; everything else stands beside it.
#


def publish_draft(
    handle: RepositoryHandle,
    draft: Draft,
    publication: Publication,
    request: CommitRequest,
    fields: CommitFields,
    layout: LayoutObject,
    destination: Destination,
    *,
    more_nodes: Sequence[Node] = (),
) -> Digest:
    """Make nodes and commit of a hashed draft, and publish them; the id of the commit.

    A garbage collection that begins meanwhile costs a look at the index, not the hashing: the ids
    are known, and what they name is usually still there.

    Args:
        publication: With the packs of the chunks, and the gc generation that these were deduplicated against.
        destination, more_nodes: As for `publish_commit` and `plan_nodes`.
    Raises:
        GenerationMoved: chunks of the state were condemned: save them again. ConflictError.
    """
    for _ in range(MAX_ATTEMPTS):
        referred = plan_nodes(handle, draft, publication, request, fields, layout, more_nodes)
        try:
            return publish_commit(
                handle, publication, destination, generation=publication.generation,
                other_parents=fields.ancestry.parents,
            )  # fmt: skip
        except GenerationMoved:
            # Told before the store is looked at again: what was collected since then drops out in that look.
            publication.tell(handle)
            publication.generation = handle.begin_writing()
            if not all(handle.known(referred)):
                raise
        except CkptError:
            # The packs are durable: the next commit need not write them again.
            publication.tell(handle)
            raise
        except BaseException:
            handle.forget_chunks()  # interrupted: the next commit looks for those packs
            raise
    raise ConflictError(f"garbage collections began {MAX_ATTEMPTS} times while this commit was made: try again")


def plan_nodes(
    handle: RepositoryHandle,
    draft: Draft,
    publication: Publication,
    request: CommitRequest,
    fields: CommitFields,
    layout: LayoutObject,
    more_nodes: Sequence[Node] = (),
) -> list[Digest]:
    """Give `publication` its nodes and its commit; what those nodes refer to that is none of them: all chunks.

    Args:
        draft: Complete: every work of it is hashed.
        more_nodes: Nodes below the draft that were made elsewhere, with their children.
    """
    nodes, root = draft_nodes(draft)
    layout_object = layout_node(layout)
    made = {node.digest: node for node in (*more_nodes, *nodes, layout_object)}
    nodes = list(made.values())
    stored = handle.known([node.digest for node in nodes])
    publication.nodes = [node for node, there in zip(nodes, stored, strict=True) if not there]
    written = [node for node in publication.written_nodes if node.kind != ObjectKind.COMMIT]
    stats = _stats(draft, [*written, *publication.nodes], [*publication.told, *publication.packs])
    time_us = int(clock.now_s() * 1e6)

    def make_commit(parents: tuple[Digest, ...], origin: Digest | None) -> Node:
        lineage = fields.ancestry.lineage
        if origin is not None:
            lineage = (*lineage, LineageEdge(CONTINUED_FROM, origin))
        commit = CommitObject(
            root, parents, fields.message, fields.author, time_us, fields.step, fields.metrics, fields.meta,
            layout_object.digest, stats, lineage, fields.ancestry.provenance,
        )  # fmt: skip
        return commit_node(commit)

    publication.make_commit = make_commit
    return list({child for node in nodes for child in node.children} - made.keys())


def tensor_bytes(state: Container) -> int:
    """Plain bytes of all tensors that are hashed, tied ones once: what progress is measured against."""
    tensors = [item for _, item in walk(state) if isinstance(item, TensorItem) and item.spec.num_bytes > INLINE_BYTES]
    tied = {(item.identity[0], item.spec.dtype): item.spec.num_bytes for item in tensors if item.identity is not None}
    return sum(tied.values()) + sum(item.spec.num_bytes for item in tensors if item.identity is None)


def _stats(draft: Draft, nodes: Sequence[Node], packs: Sequence[WrittenPack]) -> dict[str, int]:
    entries = [entry for pack in packs for entry in pack.entries if entry.kind == ObjectKind.CHUNK]
    node_bytes = sum(len(node.data) for node in nodes)
    return {
        "total_bytes": draft.total_bytes,
        "new_bytes": sum(entry.plain_bytes for entry in entries) + node_bytes,
        "stored_bytes": sum(pack.size_bytes for pack in packs if pack.kind == PackKind.DATA) + node_bytes,
        "num_entries": draft.num_entries,
        "num_tensors": draft.num_tensors,
        "num_chunks": draft.num_chunks,
        "num_new_chunks": len({entry.digest for entry in entries}),
    }


# DOC of cas_ckpt.ops.commit.draft:
# What each rank has done for a common commit, as rank 0 needs it to finish it.
#
# Invariant: what is unpacked is what another rank of the same job packed; ids are checked for being
# complete, never for being true (the chunks prove themselves when they are read).
#


@dataclass(slots=True)
class Contribution:
    """One rank's part.

    Attributes:
        named: (tensor, cell) -> id of every chunk that this rank named.
        packs: Packs that it wrote, durable.
        own: For each container of per-rank values the nodes of this rank's child; the last one is
            a tree with that child alone.
        own_totals: (bytes, entries, tensors, chunks) of those children.
        own_aliases: Keys within those children that are one tensor.
    """

    named: dict[tuple[int, int], Digest] = field(default_factory=dict)
    packs: list[WrittenPack] = field(default_factory=list)
    own: list[list[Node]] = field(default_factory=list)
    own_totals: tuple[int, int, int, int] = (0, 0, 0, 0)
    own_aliases: tuple[tuple[str, ...], ...] = ()

    def pack(self) -> bytes:
        """As bytes."""
        places = np.array(list(self.named), np.uint64).tobytes()
        packs = [[pack.key, int(pack.kind), pack.size_bytes, [_row(e) for e in pack.entries]] for pack in self.packs]
        own = [[[int(node.kind), node.data, list(node.children), node.digest] for node in nodes] for nodes in self.own]
        ids = b"".join(self.named.values())
        packed: bytes = msgpack.packb(
            [places, ids, packs, own, list(self.own_totals), self.own_aliases], unicode_errors="surrogatepass"
        )
        return packed


def unpack_contribution(data: bytes) -> Contribution:
    """What `Contribution.pack` packed, on another rank of this job."""
    places, ids, packs, own, totals, aliases = msgpack.unpackb(data, unicode_errors="surrogatepass")
    pairs = np.frombuffer(places, np.uint64).reshape(-1, 2).tolist()
    digests = [Digest(ids[start : start + DIGEST_BYTES]) for start in range(0, len(ids), DIGEST_BYTES)]
    named = {(tensor, cell): digest for (tensor, cell), digest in zip(pairs, digests, strict=True)}
    written = [
        WrittenPack(key, PackKind(kind), size, tuple(_entry(row) for row in rows)) for key, kind, size, rows in packs
    ]
    nodes = [[_node(row) for row in rows] for rows in own]
    return Contribution(named, written, nodes, tuple(totals), tuple(map(tuple, aliases)))


def _row(entry: ExtentInfo) -> list[Any]:
    return [int(value) if isinstance(value, int) else value for value in astuple(entry)]


def _entry(row: Sequence[Any]) -> ExtentInfo:
    digest, kind, *rest = row
    return ExtentInfo(Digest(digest), ObjectKind(kind), *rest)


def _node(row: Sequence[Any]) -> Node:
    kind, data, children, digest = row
    return Node(ObjectKind(kind), Digest(digest), data, tuple(Digest(child) for child in children))


# DOC of cas_ckpt.ops.commit.draft:
# The layout node of a commit: who held what.
#
# Invariant: it stands beside the tree, so it never enters the root.
#


def layout_of(
    placements: Mapping[str, Sequence[Placement]], aliases: tuple[tuple[str, ...], ...], world_size: int
) -> LayoutObject:
    """The layout of a state.

    The most common mesh is the commit's; a tensor over another one names that in front ("@dp=2,tp=4").
    Tensors that every holder has whole are left out.
    """
    meshes = Counter(
        placement.mesh for found in placements.values() for placement in found if isinstance(placement, MeshPlacement)
    )
    common = min(meshes, key=lambda mesh: (-meshes[mesh], mesh.shape, mesh.ranks)) if meshes else None
    named = () if common is None else tuple(zip(common.names, common.shape, strict=True))
    texts = {key: _texts(found[0], common) for key, found in placements.items() if found}
    return LayoutObject(world_size, named, texts, aliases)


def _texts(placement: Placement, common: Mesh | None) -> list[str]:
    if isinstance(placement, BoxPlacement):
        return ["boxes"]
    splits = [str(split) for split in placement.splits]
    if placement.mesh == common:
        return splits
    mesh = placement.mesh
    return ["@" + ",".join(f"{name}={size}" for name, size in zip(mesh.names, mesh.shape, strict=True)), *splits]
