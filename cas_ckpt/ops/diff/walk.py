"""Where two states differ, from the index; then, from nodes, what is in the entries that differ.

    differing        the keys, with what is under them on both sides: no node is read (index/tree_diff.py)
    with_bytes       values and small tensors, which are inside of nodes
    changed_chunks   from tensor nodes, and those of their pages that differ, which chunks changed

Invariant: a node that both trees have in the same place is never read, nor is a page of chunk ids that both
sides have in the same place where their cells are the same; every node that is read was verified against its
id (core/packs.py). Reads no chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.tree import ask, page_ids, tensor_nodes
from cas_ckpt.errors import CkptError, CorruptionError, NotFoundError
from cas_ckpt.index import tree_diff
from cas_ckpt.index.db_errors import REBUILD
from cas_ckpt.index.manifests import kept_data
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.nodes import PAGE_CHUNKS, TensorEntry, TensorNode, ValueEntry, decode_entry, open_tree
from cas_ckpt.objects.spec import grid_for
from cas_ckpt.objects.state import Flavor, Path, StoredTensor, render_key
from cas_ckpt.ops.diff.answer import ChunkChange
from cas_ckpt.transfer.chunk_reader import named


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
