"""Where two states differ, from the index; then, from nodes, what is in the entries that differ.

    differing        the keys, with what is under them on both sides: no node is read (index/tree_diff.py)
    with_bytes       values and small tensors, which are inside of nodes
    changed_chunks   from tensor nodes, and those of their pages that differ, which chunks changed

Invariant: a node that both trees have in the same place is never read, nor is a page of chunk ids that both
sides have in the same place where their cells are the same; every node that is read was verified against its
id (core/packs.py). Reads no chunk.

Numbers of a change: how many elements differ, and by how much, streamed cell by cell.

    1. tensors in groups, so that their nodes are read together: the ids of all their chunks
    2. of each, the changed cells (all of them, where the cells of the two sides are not the same)
       in stretches; some stretches at a time: locate the chunks of both sides
    3. threads: read and verify a cell of both sides, widen it block by block, add up in float64
    4. the sums of the stretches, in the order of cells: the answer is the same whatever the threads did

Invariant: memory is bounded by threads times cells and by the ids of one group, whatever the
tensors hold; no byte is counted that was not verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, TypeAlias, TypeVar

import numpy as np

from cas_ckpt.core.chunks import chunk_ids, page_ids, tensor_nodes
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.tree import ask
from cas_ckpt.errors import CkptError, CorruptionError, NotFoundError
from cas_ckpt.index import tree_diff
from cas_ckpt.index.db_errors import REBUILD
from cas_ckpt.index.manifests import kept_data
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.nodes import PAGE_CHUNKS, TensorEntry, TensorNode, ValueEntry, decode_entry, open_tree
from cas_ckpt.objects.pack import Location
from cas_ckpt.objects.spec import Box, Grid, grid_for
from cas_ckpt.objects.state import Flavor, Path, StoredTensor, render_key
from cas_ckpt.ops.checkout.checkout import inline_array
from cas_ckpt.ops.diff.answer import ChunkChange
from cas_ckpt.ops.diff.numbers import NumberSums, Raw, TensorNumbers, are_numbers, measure
from cas_ckpt.parallel.workers import run_all, thread_count
from cas_ckpt.progress import SILENT, Progress, phase
from cas_ckpt.storage.store import Store
from cas_ckpt.transfer.chunk_reader import named
from cas_ckpt.transfer.fetch import read_region


@dataclass(frozen=True, slots=True)
class ContainerHead:
    """What a container is, apart from what is in it.

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
"""What is under a key in one of the two trees."""


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
    """What `read` reads of all items together; if that fails, each is read alone, to name the key of the faulty one.

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
    found = {what: _same_content(pair.after) for what, pair in unique.items() if pair.same_bytes}
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


def _same_content(tensor: StoredTensor) -> ChunkChange:
    if tensor.node is None:
        return ChunkChange(0, 0, 0)
    grid = grid_for(tensor.spec)
    return ChunkChange(0, grid.num_cells, 0, (), grid)


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


# --- Numbers of a change: how many elements differ, and by how much, streamed cell by cell ---


CHUNKS_AT_A_TIME = 16 * 1024
"""Tensors whose ids are in memory together have about so many chunks, unless one alone has more."""

CELLS_PER_STRETCH = 16
MOST_REQUESTS = 8
"""So many cells of both sides are read over a network and compared at one time: each takes some 20 MB."""

STRETCHES_AT_A_TIME = 64
"""Bounds the places in packs that are held in memory, and the sums."""


@dataclass(frozen=True, slots=True)
class _Side:
    """One side of a tensor: where each of its cells is."""

    tensor: StoredTensor
    grid: Grid
    chunks: Sequence[Digest]

    def needed(self, box: Box) -> list[Digest]:
        """The chunks that `box` touches."""
        return [self.chunks[cell] for cell, _ in self.grid.cells_in(box)] if self.chunks else []

    def read(self, store: Store, box: Box, located: Mapping[bytes, Sequence[Location]]) -> Raw:
        """The bytes of the elements of `box`, verified."""
        item_bytes = self.tensor.spec.item_bytes
        if self.tensor.inline is not None:
            found = np.ascontiguousarray(inline_array(self.tensor)[box.slices])
        else:
            found = read_region(
                store, box, grid=self.grid, item_bytes=item_bytes, chunk_of=self.chunks.__getitem__, located=located
            )
        return found.reshape(-1).view(np.uint8)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Some cells of one tensor that are compared in one go.

    Attributes:
        number: Which of the tensors it is.
        cells: Numbers of cells in the grid of `after`.
    """

    number: int
    key: str
    before: _Side
    after: _Side
    cells: tuple[int, ...]

    @property
    def boxes(self) -> Iterator[Box]:
        return map(self.after.grid.box, self.cells)

    def needed(self) -> set[Digest]:
        """The chunks of both sides."""
        return {digest for box in self.boxes for side in (self.before, self.after) for digest in side.needed(box)}


def tensor_numbers(
    handle: RepositoryHandle, tensors: Sequence[tuple[TensorPair, ChunkChange]], *, progress: Progress = SILENT
) -> list[TensorNumbers]:
    """The numbers of each of these tensors; the two sides of each have equal shapes.

    Raises:
        CorruptionError, NotFoundError: a chunk is damaged or gone; names the tensor.
    """
    sums = [NumberSums() for _ in tensors]
    stretches = _stretches(handle, tensors)
    num_bytes = sum(
        2 * change.num_bytes
        if _compares_changed_cells(pair, change)
        else pair.before.spec.num_bytes + pair.after.spec.num_bytes
        for pair, change in tensors
    )
    with phase(progress, "comparing", num_bytes):
        while batch := list(islice(stretches, STRETCHES_AT_A_TIME)):
            found: dict[int, NumberSums] = {}
            located = together_or_named(
                lambda needed: handle.locate(set().union(*needed)),
                [stretch.needed() for stretch in batch],
                [stretch.key for stretch in batch],
            )
            measurer = partial(_measurer, handle.store, located, found, progress)
            at_once = max(thread_count(), min(handle.num_requests, MOST_REQUESTS))
            run_all(enumerate(batch), measurer, num_threads=min(at_once, len(batch)))
            for at, stretch in enumerate(batch):
                sums[stretch.number].add(found[at])
    specs = [(pair.before.spec, pair.after.spec) for pair, _ in tensors]
    return [
        total.numbers(new.num_elements, are_numbers=are_numbers(old.dtype, new.dtype))
        for (old, new), total in zip(specs, sums, strict=True)
    ]


def _compares_changed_cells(pair: TensorPair, change: ChunkChange) -> bool:
    """Whether the cells of both sides are the same, so that unchanged ones need not be read."""
    return pair.before.spec == pair.after.spec and change.num_chunks > 0


def _stretches(handle: RepositoryHandle, tensors: Sequence[tuple[TensorPair, ChunkChange]]) -> Iterator[_Stretch]:
    numbered = list(enumerate(tensors))
    while numbered:
        size = _group_size([change for _, (_, change) in numbered])
        group, numbered = numbered[:size], numbered[size:]
        entries = [entry for _, (pair, _) in group for entry in (pair.before, pair.after)]
        nodes = tensor_nodes(handle, entries)
        ids = chunk_ids(handle, [(node, None) for node in nodes])
        cuts = [_Side(entry, node.grid, each) for entry, node, each in zip(entries, nodes, ids, strict=True)]
        for (number, (pair, change)), before, after in zip(group, cuts[::2], cuts[1::2], strict=True):
            aligned = _compares_changed_cells(pair, change) and before.grid == after.grid
            cells = change.cells() if aligned else iter(range(after.grid.num_cells))
            while part := tuple(islice(cells, CELLS_PER_STRETCH)):
                yield _Stretch(number, render_key(pair.path), before, after, part)


def _group_size(changes: Sequence[ChunkChange]) -> int:
    """How many tensors make up `CHUNKS_AT_A_TIME`, one at least."""
    num_chunks = 0
    for at, change in enumerate(changes):
        num_chunks += change.num_chunks
        if num_chunks > CHUNKS_AT_A_TIME:
            return max(at, 1)
    return len(changes)


def _measurer(
    store: Store, located: Mapping[bytes, Sequence[Location]], found: dict[int, NumberSums], progress: Progress
) -> Callable[[tuple[int, _Stretch]], None]:
    def run(item: tuple[int, _Stretch]) -> None:
        at, stretch = item
        sums = NumberSums()
        sides = stretch.before, stretch.after
        specs = [side.tensor.spec for side in sides]
        for box in stretch.boxes:
            try:
                old, new = (side.read(store, box, located) for side in sides)
            except CkptError as error:
                raise named(error, stretch.key) from error
            sums.add(measure(old, new, (specs[0].dtype, specs[1].dtype), (specs[0].item_bytes, specs[1].item_bytes)))
            progress.advance(len(old) + len(new))
        found[at] = sums

    return run
