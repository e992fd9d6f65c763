"""What differs between two commits, as values, and where two states differ: from the index, then from nodes.

    Diff             the answer: entries that differ, fields of the commits that differ, and sums
    differing        the keys, with what is under them on both sides: no node is read (index/tree_diff.py)
    with_bytes       values and small tensors, which are inside of nodes
    changed_chunks   from tensor nodes, and those of their pages that differ, which chunks changed

Invariant: `Diff.entries` is in the order of keys, each key once. A node that both trees have in the same place is never
read, nor is a page of chunk ids that both sides have in the same place where their cells are the same; every node that
is read was verified against its id (core/packs.py). Reads no chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeAlias, TypeVar

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import Brief, CommitInfo
from cas_ckpt.core.tree import ask, page_ids, tensor_nodes
from cas_ckpt.errors import CkptError, CorruptionError, NotFoundError
from cas_ckpt.index import tree_diff
from cas_ckpt.index.db_errors import REBUILD
from cas_ckpt.index.manifests import kept_data
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.nodes import PAGE_CHUNKS, TensorEntry, TensorNode, ValueEntry, decode_entry, open_tree
from cas_ckpt.objects.spec import Box, Grid, grid_for
from cas_ckpt.objects.state import Flavor, Path, StoredTensor, parse_key, render_key
from cas_ckpt.transfer.chunk_reader import named


class Change(StrEnum):
    """The kinds of changes of an entry. MOVED: the same content has another key now."""

    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"
    MOVED = "moved"


@dataclass(frozen=True, slots=True)
class EntrySide:
    """An entry as one of the two commits has it.

    Attributes:
        kind: "tensor", "array", "value", or the kind of a container ("dict", "list", "sparse_coo" ...).
        dtype, shape: Of a tensor or array, else None.
        num_bytes: Plain bytes (of a value: as it is encoded; of a container: 0).
        text: A value, or the attributes of a container, as Python shows them, cut where they are
            long; None if it was not asked for, or is too long to be read for this.
    """

    kind: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    num_bytes: int = 0
    text: str | None = None

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor or an array."""
        return self.dtype is not None


@dataclass(frozen=True, slots=True)
class ChunkChange:
    """Which chunks of a tensor are not what they were.

    Where the cells are the same on both sides, a chunk changed if its cell has another id now;
    where they are not (the shape changed), if the tensor did not have this chunk anywhere.
    A tensor whose bytes are in its tree node has no chunks; its bytes count all the same.

    Attributes:
        num_changed, num_chunks: Chunks of the tensor as it is now that changed, and all of them.
        num_bytes: Plain bytes of the changed ones.
        runs: The cells of the changed ones as (first, count), ascending.
        grid: The cut that the cells are numbered in; None if there are no chunks.
    """

    num_changed: int
    num_chunks: int
    num_bytes: int
    runs: tuple[tuple[int, int], ...] = ()
    grid: Grid | None = None

    def cells(self) -> Iterator[int]:
        """Numbers of the changed cells, ascending."""
        for first, count in self.runs:
            yield from range(first, first + count)

    def regions(self) -> Iterator[Box]:
        """The changed cells as boxes of the tensor, in elements."""
        if self.grid is not None:
            yield from map(self.grid.box, self.cells())


@dataclass(frozen=True, slots=True)
class TensorNumbers:
    """By how much a tensor changed.

    Elements outside the changed chunks are the same on both sides: their difference is 0, so
    what is said of differences is true of the whole tensor. What needs the elements themselves
    (`relative_norm`, `cosine`, NaN and infinity) is said of the changed chunks only, which are the
    whole tensor where `compared_elements` equals `num_elements`. Pairs of which one is NaN or
    infinite are counted, and left out of everything else.

    Attributes:
        num_elements: Elements of the tensor.
        compared_elements: Those in its changed chunks.
        changed_elements: Those whose bits differ (of another dtype: whose numbers differ).
        max_delta, mean_delta: Of |after - before|; the mean is over the whole tensor.
        delta_norm: The L2 norm of after - before.
        relative_norm: `delta_norm` over the L2 norm of before in the changed chunks.
        cosine: Of the angle between before and after in the changed chunks.
        nan_before, nan_after, inf_before, inf_after: Elements in the changed chunks.
            None of any of these: the dtype holds no numbers, or (the last two) a norm is 0 or
            beyond float64.
    """

    num_elements: int
    compared_elements: int
    changed_elements: int
    max_delta: float | None = None
    mean_delta: float | None = None
    delta_norm: float | None = None
    relative_norm: float | None = None
    cosine: float | None = None
    nan_before: int | None = None
    nan_after: int | None = None
    inf_before: int | None = None
    inf_after: int | None = None

    @property
    def changed_share(self) -> float:
        """Changed elements of all, 0..1."""
        return self.changed_elements / self.num_elements if self.num_elements else 0.0


@dataclass(frozen=True, slots=True, repr=False)
class EntryDiff(Brief):
    """One entry that is not what it was.

    Attributes:
        key: Its key (of a moved one: the new key).
        before, after: The two sides; None where there is none.
        differs: What is different: of "kind", "dtype", "shape", "data", "value", "attrs". Empty
            unless `change` is CHANGED.
        moved_from: The old key of a moved entry.
        chunks: Of tensors that are on both sides and changed.
        numbers: The same, if they were asked for and the shapes are equal.
    """

    key: str
    change: Change
    before: EntrySide | None
    after: EntrySide | None
    differs: tuple[str, ...] = ()
    moved_from: str | None = None
    chunks: ChunkChange | None = None
    numbers: TensorNumbers | None = None


@dataclass(frozen=True, slots=True)
class FieldChange:
    """A field of the commits that differs: "step", "message", "author", "meta", "metrics/loss" ...

    Attributes:
        before, after: None: that commit has none.
    """

    name: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class DiffSums:
    """Entries and bytes added up; tensors that are tied count each time they are named.

    Attributes:
        added_bytes, removed_bytes: Plain bytes of the entries added and removed.
        changed_bytes: Plain bytes of what changed in the changed ones: chunks of tensors, whole values.
        changed_chunks, num_chunks: Chunks that changed in changed tensors, and all that those tensors have.
    """

    added: int = 0
    removed: int = 0
    changed: int = 0
    moved: int = 0
    added_bytes: int = 0
    removed_bytes: int = 0
    changed_bytes: int = 0
    changed_chunks: int = 0
    num_chunks: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class Diff(Brief):
    """All that differs between two commits.

    Attributes:
        before: The commit that was compared with; None: `after` is the first of its history, and all of it is new.
        after: The commit that was looked at.
        fields: What the commits themselves say otherwise (apart from time and ids).
        entries: The entries that differ, by key.
    """

    before: CommitInfo | None
    after: CommitInfo
    fields: tuple[FieldChange, ...]
    entries: tuple[EntryDiff, ...]

    @property
    def added(self) -> tuple[EntryDiff, ...]:
        """Entries that only `after` has."""
        return self._with(Change.ADDED)

    @property
    def removed(self) -> tuple[EntryDiff, ...]:
        """Entries that only `before` has."""
        return self._with(Change.REMOVED)

    @property
    def changed(self) -> tuple[EntryDiff, ...]:
        """Entries that both have, and that differ."""
        return self._with(Change.CHANGED)

    @property
    def moved(self) -> tuple[EntryDiff, ...]:
        """Tensors of equal content that have another key now."""
        return self._with(Change.MOVED)

    def _with(self, change: Change) -> tuple[EntryDiff, ...]:
        return tuple(entry for entry in self.entries if entry.change is change)

    @property
    def sums(self) -> DiffSums:
        """All of it in numbers."""
        return add_up(self.entries)

    @property
    def by_name(self) -> dict[str, DiffSums]:
        """The same for each top-level name of the states."""
        groups: dict[str, list[EntryDiff]] = {}
        for entry in self.entries:
            groups.setdefault(render_key(parse_key(entry.key)[:1]), []).append(entry)
        return {name: add_up(entries) for name, entries in groups.items()}


def add_up(entries: Iterable[EntryDiff]) -> DiffSums:
    """The sums of some entries."""
    counts = dict.fromkeys(DiffSums.__slots__, 0)
    for entry in entries:
        counts[entry.change.value] += 1
        if entry.change is Change.ADDED and entry.after is not None:
            counts["added_bytes"] += entry.after.num_bytes
        elif entry.change is Change.REMOVED and entry.before is not None:
            counts["removed_bytes"] += entry.before.num_bytes
        elif entry.chunks is not None:
            counts["changed_bytes"] += entry.chunks.num_bytes
            counts["changed_chunks"] += entry.chunks.num_changed
            counts["num_chunks"] += entry.chunks.num_chunks
        elif entry.change is Change.CHANGED and entry.after is not None:
            counts["changed_bytes"] += entry.after.num_bytes
    return DiffSums(**counts)


def changed_fields(before: CommitInfo | None, after: CommitInfo) -> tuple[FieldChange, ...]:
    """The fields of two commits that differ; nothing where there is only one."""
    if before is None:
        return ()
    found = [
        FieldChange(name, getattr(before, name), getattr(after, name)) for name in ("step", "message", "author", "meta")
    ]
    names = dict.fromkeys((*before.metrics, *after.metrics))
    found += [FieldChange(f"metrics/{name}", before.metrics.get(name), after.metrics.get(name)) for name in names]
    # By what is shown of them: metadata may hold arrays, which do not compare to one answer.
    return tuple(field for field in found if repr(field.before) != repr(field.after))


# --- where two states differ ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ContainerHead:
    """Kind and attributes of a container.

    Attributes:
        attrs: Equal for equal attributes; None: it has none.
        node: Id of its tree node.
    """

    kind: str
    attrs: bytes | None
    node: Digest


@dataclass(frozen=True, slots=True)
class StoredSide:
    """A tensor or value.

    Attributes:
        tensor: How it is stored; None: a short value. Bytes inside of a node are there only once they were read.
        num_bytes: Plain bytes.
        content: Equal for equal bytes of one length: the id of its tensor or chunk, or what the index keeps.
        place: Where bytes inside of a node are: kind and id of the node, place in it; None: they are not.
        data: The bytes of a short value, once they were read.
    """

    tensor: StoredTensor | None
    num_bytes: int
    content: bytes
    place: tuple[ObjectKind, Digest, int] | None = None
    data: bytes | None = None

    @property
    def is_value(self) -> bool:
        """Whether it is a plain value; those of more than a kilobyte are stored as tensors are."""
        return self.tensor is None or self.tensor.flavor == Flavor.VALUE


Side: TypeAlias = StoredSide | ContainerHead | None
"""The entry under a key in one of the two trees; None: there is none."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A key under which the two trees have something else."""

    path: Path
    before: Side
    after: Side


T = TypeVar("T")
R = TypeVar("R")


def differing(handle: RepositoryHandle, before: Digest | None, after: Digest) -> list[Pair]:
    """Every key under which the states `before` and `after` differ, in the order of keys; no node is read.

    Containers are there where their kind or attributes changed, and where they are entries of
    their own (empty, or a tensor in parts) on one side only.

    Raises:
        NotFoundError, CorruptionError: a node is in no pack, or in none that is intact.
    """
    roots = (after,) if before is None else (before, after)
    found = ask(handle, tree_diff.differences, *roots)
    return [Pair(path, _side(old), _side(new)) for path, old, new in found]


def _side(side: tree_diff.Leaf | tree_diff.Head | None) -> Side:
    if side is None:
        return None
    if isinstance(side, tree_diff.Head):
        return ContainerHead(side.kind, side.attrs, side.node)
    content = (side.kept or b"") if side.child is None else side.child
    place = None if side.child is not None else (side.node_kind, side.node, side.position)
    tensor = None if side.spec is None else StoredTensor(side.spec, side.flavor, side.child, None, side.single)
    return StoredSide(tensor, side.num_bytes, content, place)


def with_bytes(handle: RepositoryHandle, pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs with those bytes that are inside of nodes; nodes are read together, each once.

    Raises:
        NotFoundError, CorruptionError: names the key; also if a node holds something else than the index says.
    """
    places = {
        (side.place, pair.path)
        for pair in pairs
        for side in (pair.before, pair.after)
        if isinstance(side, StoredSide) and side.place is not None
    }
    rows: dict[Digest, list[list[Any]]] = {}
    for kind in (ObjectKind.TREE, ObjectKind.TREE_PAGE):
        wanted = {place[1]: path for place, path in places if place[0] == kind}
        data = read_named(handle, kind, wanted)
        rows.update((digest, open_tree(node, page=kind == ObjectKind.TREE_PAGE).rows) for digest, node in data.items())
    return [Pair(pair.path, *(_filled(side, pair.path, rows) for side in (pair.before, pair.after))) for pair in pairs]


def _filled(side: Side, path: Path, rows: Mapping[Digest, list[list[Any]]]) -> Side:
    if not isinstance(side, StoredSide) or side.place is None:
        return side
    _, node, position = side.place
    entry = decode_entry(rows[node][position]) if position < len(rows[node]) else None
    data = entry.data if isinstance(entry, ValueEntry) else entry.inline if isinstance(entry, TensorEntry) else None
    if data is None or kept_data(data) != side.content:
        raise CorruptionError(f"{render_key(path)}: its node holds something else than the index says; {REBUILD}")
    if side.tensor is None:
        return replace(side, data=data)
    return replace(side, tensor=replace(side.tensor, inline=data))


def read_named(handle: RepositoryHandle, kind: ObjectKind, paths: Mapping[Digest, Path]) -> dict[Digest, bytes]:
    """The bytes of many nodes, verified; an error names the key that its node belongs to.

    Raises:
        NotFoundError, CorruptionError.
    """
    keys = [render_key(path) or "the state" for path in paths.values()]
    return together_or_named(lambda digests: handle.read_nodes(kind, digests), list(paths), keys) if paths else {}


def together_or_named(read: Callable[[list[T]], R], items: list[T], keys: Sequence[str]) -> R:
    """The result of `read` for all items; if that fails, each is read alone, to name the key of the faulty one.

    Raises:
        NotFoundError, CorruptionError: headed by the key.
    """
    try:
        return read(items)
    except (CorruptionError, NotFoundError):
        for item, key in zip(items, keys, strict=True):
            try:
                read([item])
            except CkptError as error:
                raise named(error, key) from error
        raise


# --- which chunks of tensors changed --------------------------------------------------------

PAGES_AT_A_TIME = 512
"""Pages of chunk ids in memory at a time (some 10 MB), unless one tensor alone has more."""


@dataclass(frozen=True, slots=True)
class TensorPair:
    """A tensor that both sides have, and that is not the same.

    Attributes:
        same_bytes: Only what they mean changed.
    """

    path: Path
    before: StoredTensor
    after: StoredTensor
    same_bytes: bool

    @property
    def what(self) -> tuple[StoredTensor, StoredTensor, bool]:
        """Pairs that have this in common have the same chunks changed."""
        return self.before, self.after, self.same_bytes


@dataclass(frozen=True, slots=True)
class _Nodes:
    """How both sides of a tensor are cut into chunks."""

    pair: TensorPair
    before: TensorNode
    after: TensorNode

    @property
    def is_aligned(self) -> bool:
        """Whether cells of equal numbers are the same elements on both sides."""
        return self.before.grid == self.after.grid

    def pages_to_read(self) -> list[tuple[TensorNode, list[int]]]:
        """Of each side, the numbers of the pages that the other side does not have in the same place."""
        old, new = self.before.pages, self.after.pages
        if not self.is_aligned:
            return [(self.before, list(range(len(old)))), (self.after, list(range(len(new))))]
        numbers = [number for number, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
        return [(self.before, numbers), (self.after, numbers)]


def changed_chunks(handle: RepositoryHandle, pairs: Sequence[TensorPair]) -> list[ChunkChange]:
    """For each pair, which chunks changed; nodes are read together, each once.

    Raises:
        NotFoundError, CorruptionError: names the tensor.
    """
    unique = {pair.what: pair for pair in pairs}
    found = {}
    for what, pair in unique.items():
        if pair.same_bytes:
            grid = None if pair.after.node is None else grid_for(pair.after.spec)
            found[what] = ChunkChange(0, 0 if grid is None else grid.num_cells, 0, (), grid)
    different = [pair for what, pair in unique.items() if what not in found]
    keys = [render_key(pair.path) for pair in different]
    sides = together_or_named(
        lambda pairs: tensor_nodes(handle, [entry for pair in pairs for entry in (pair.before, pair.after)]),
        different,
        keys,
    )
    every = [_Nodes(pair, *nodes) for pair, *nodes in zip(different, sides[::2], sides[1::2], strict=True)]
    for batch in _batches(every):
        ids = together_or_named(
            lambda nodes: page_ids(handle, [pages for each in nodes for pages in each.pages_to_read()]),
            batch,
            [render_key(each.pair.path) for each in batch],
        )
        found.update((each.pair.what, _change(each, ids)) for each in batch)
    return [found[pair.what] for pair in pairs]


def _batches(every: Iterable[_Nodes]) -> Iterator[list[_Nodes]]:
    batch: list[_Nodes] = []
    num_pages = 0
    for each in every:
        batch.append(each)
        num_pages += sum(len(numbers) for _, numbers in each.pages_to_read())
        if num_pages >= PAGES_AT_A_TIME:
            yield batch
            batch, num_pages = [], 0
    if batch:
        yield batch


def _change(nodes: _Nodes, ids: Mapping[Digest, tuple[Digest, ...]]) -> ChunkChange:
    after = nodes.pair.after
    if after.node is None:
        return ChunkChange(0, 0, after.spec.shown_bytes)
    cells = _changed_cells(nodes, ids) if nodes.is_aligned else _new_cells(nodes, ids)
    grid = nodes.after.grid
    whole = len(cells) == grid.num_cells
    elements = after.spec.num_elements if whole else sum(map(grid.cell_elements, cells))
    num_bytes = elements * after.spec.item_bytes if after.spec.is_known else 0
    return ChunkChange(len(cells), grid.num_cells, num_bytes, tuple(_runs(cells)), grid)


def _changed_cells(nodes: _Nodes, ids: Mapping[Digest, tuple[Digest, ...]]) -> list[int]:
    """Cells whose ids differ."""
    old, new = nodes.before, nodes.after
    if not new.pages:
        # A side without chunks is in its tree node: whatever the other holds is new.
        return [cell for cell, digest in enumerate(new.chunks) if old.chunks[cell : cell + 1] != (digest,)]
    found = []
    for number, (a, b) in enumerate(zip(old.pages, new.pages, strict=True)):
        if a != b:
            pairs = enumerate(zip(ids[a], ids[b], strict=True), number * PAGE_CHUNKS)
            found += [cell for cell, (x, y) in pairs if x != y]
    return found


def _new_cells(nodes: _Nodes, ids: Mapping[Digest, tuple[Digest, ...]]) -> list[int]:
    """Cells of the new side whose chunks the old side has nowhere."""
    old, new = (
        [digest for page in node.pages for digest in ids[page]] or node.chunks for node in (nodes.before, nodes.after)
    )
    known = set(old)
    return [cell for cell, digest in enumerate(new) if digest not in known]


def _runs(cells: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as (first, count)."""
    first = 0
    for at, cell in enumerate(cells):
        if at + 1 == len(cells) or cells[at + 1] != cell + 1:
            yield cells[first], at + 1 - first
            first = at + 1
