"""Walks two trees side by side, down only where their ids differ; then the chunk ids of tensors that differ.

`differing`:

1. take the pairs of containers of one level, each pair of ids once
2. read their tree nodes together; where they have pages, drop those that both have, and
   read the others, together for all pairs, level by level
3. names whose entries differ: containers go into the next level, the rest is the answer

`changed_chunks`: from tensor nodes, and those of their pages that differ, which chunks changed.

Invariant: a node that both trees have in the same place is never read, nor is a page of chunk ids that both
sides have in the same place where their cells are the same; every node that is read was verified against its
id (core/packs.py). Reads no chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from cas_ckpt.core.chunks import page_ids, tensor_nodes
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.tree import MAX_DEPTH
from cas_ckpt.errors import CkptError, CorruptionError, NotFoundError
from cas_ckpt.objects.digest import Digest, ObjectKind, short
from cas_ckpt.objects.limits import check_entries
from cas_ckpt.objects.nodes import (
    PAGE_CHUNKS,
    ContainerEntry,
    Entry,
    PageEntry,
    RawTree,
    TensorEntry,
    TensorNode,
    ValueEntry,
    decode_entry,
    name_order,
    open_tree,
)
from cas_ckpt.objects.spec import grid_for
from cas_ckpt.objects.state import CONTAINER_KINDS, Path, render_key
from cas_ckpt.ops.diff.answer import ChunkChange
from cas_ckpt.transfer.fetch import named


@dataclass(frozen=True, slots=True)
class ContainerHead:
    """What a container is, apart from what is in it.

    Attributes:
        attrs: Encoded plain value, or None.
    """

    kind: str
    attrs: bytes | None
    is_empty: bool

    @property
    def is_entry(self) -> bool:
        """Whether people see it as an entry: it is empty, or it is one tensor in parts."""
        return self.is_empty or self.kind not in CONTAINER_KINDS


Side: TypeAlias = TensorEntry | ValueEntry | ContainerHead | None
"""What is under a key in one of the two trees."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A key under which the two trees have something else."""

    path: Path
    before: Side
    after: Side


@dataclass(frozen=True, slots=True)
class _Containers:
    """Containers to be compared, or one and whatever else is in its place on the other side."""

    path: Path
    before: Entry | None
    after: Entry | None

    @property
    def nodes(self) -> tuple[Digest | None, Digest | None]:
        old, new = (entry.node if isinstance(entry, ContainerEntry) else None for entry in (self.before, self.after))
        return old, new


T = TypeVar("T")
R = TypeVar("R")

_Differing: TypeAlias = list[tuple[Entry | None, Entry | None]]
_Roots: TypeAlias = tuple[Digest | None, Digest | None]
_Fronts: TypeAlias = tuple[list[RawTree], list[RawTree]]
_Page: TypeAlias = tuple[RawTree, PageEntry]


def differing(handle: RepositoryHandle, before: Digest | None, after: Digest) -> list[Pair]:
    """Every key under which the states `before` and `after` differ, in the order of keys.

    Containers are there where their kind or attributes changed, and where they are entries of
    their own (`ContainerHead.is_entry`) on one side only.

    Raises:
        NotFoundError, CorruptionError: a node is missing or damaged; names its key.
    """
    if before == after:
        return []
    pairs: list[Pair] = []
    level = [_Containers((), None if before is None else ContainerEntry("", before), ContainerEntry("", after))]
    for _ in range(MAX_DEPTH):
        if not level:
            return sorted(pairs, key=lambda pair: [name_order(name) for name in pair.path])
        heads, entries = _compared(handle, {each.nodes: each.path for each in level})
        found = sum(len(entries[each.nodes]) for each in level)
        # Equal containers are one node: a few of them could stand for more entries than any memory holds.
        check_entries(found + len(pairs), "the differing parts of two trees stand", times=2)
        below = []
        for each in level:
            pairs += _pair_of_containers(each, heads)
            for old, new in entries[each.nodes]:
                name = old.name if old is not None else new.name if new is not None else ""
                if isinstance(old, ContainerEntry) or isinstance(new, ContainerEntry):
                    below.append(_Containers((*each.path, name), old, new))
                else:
                    pairs.append(Pair((*each.path, name), old, new))
        level = below
    raise CorruptionError(f"the tree of {short(after)} is deeper than {MAX_DEPTH} containers: restore it from a copy")


def _pair_of_containers(each: _Containers, heads: Mapping[Digest, ContainerHead]) -> Iterator[Pair]:
    old, new = (
        heads[entry.node] if isinstance(entry, ContainerEntry) else entry for entry in (each.before, each.after)
    )
    if isinstance(old, ContainerHead) and isinstance(new, ContainerHead):
        if (old.kind, old.attrs) != (new.kind, new.attrs):
            yield Pair(each.path, old, new)
        return
    old, new = (None if isinstance(side, ContainerHead) and not side.is_entry else side for side in (old, new))
    if old is not None or new is not None:
        yield Pair(each.path, old, new)


def _compared(
    handle: RepositoryHandle, wanted: Mapping[_Roots, Path]
) -> tuple[dict[Digest, ContainerHead], dict[_Roots, _Differing]]:
    """The head of every container, and for each pair of containers the entries that differ."""
    paths = {node: path for nodes, path in wanted.items() for node in nodes if node is not None}
    trees = {digest: open_tree(data) for digest, data in read_named(handle, ObjectKind.TREE, paths).items()}
    heads = {digest: ContainerHead(tree.kind, tree.attrs, not tree.rows) for digest, tree in trees.items()}
    fronts: dict[_Roots, _Fronts] = {
        (old, new): ([] if old is None else [trees[old]], [] if new is None else [trees[new]]) for old, new in wanted
    }
    while waiting := {nodes: _to_open(*front) for nodes, front in fronts.items() if any(map(_height, front))}:
        pages = {page.node: wanted[nodes] for nodes, opened in waiting.items() for side in opened for _, page in side}
        data = read_named(handle, ObjectKind.TREE_PAGE, pages)
        found = {digest: open_tree(page, page=True) for digest, page in data.items()}
        for nodes, (old, new) in waiting.items():
            fronts[nodes] = _opened(fronts[nodes], old, new, found)
    return heads, {nodes: _differing_entries(*front) for nodes, front in fronts.items()}


def _height(nodes: Sequence[RawTree]) -> int:
    return nodes[0].height if nodes else 0


def _to_open(before: Sequence[RawTree], after: Sequence[RawTree]) -> tuple[list[_Page], list[_Page]]:
    """The pages of each side to be read next, with the nodes that name them.

    Those of the higher side; of both if they are equally high, but for the pages that both have.
    """
    if _height(before) > _height(after):
        return _pages(before, frozenset()), []
    if _height(before) < _height(after):
        return [], _pages(after, frozenset())
    common = _named(before) & _named(after)
    return _pages(before, common), _pages(after, common)


def _named(nodes: Sequence[RawTree]) -> frozenset[bytes]:
    """What rows of pages end with: their ids."""
    return frozenset(row[-1] for node in nodes for row in node.rows if isinstance(row[-1], bytes))


def _pages(nodes: Sequence[RawTree], common: frozenset[bytes]) -> list[_Page]:
    found = []
    for node in nodes:
        for row in node.rows:
            if row[-1] in common:
                continue
            page = decode_entry(row)
            if not isinstance(page, PageEntry):
                raise CorruptionError("a tree node mixes entries and pages: restore an older commit")
            found.append((node, page))
    return found


def _opened(fronts: _Fronts, old: Sequence[_Page], new: Sequence[_Page], found: Mapping[Digest, RawTree]) -> _Fronts:
    """The fronts with the higher side (or both, if they are equally high) one level lower."""
    top = max(map(_height, fronts))
    before, after = (
        [_lower(found[page.node], above, page) for above, page in pages] if _height(front) == top else list(front)
        for front, pages in zip(fronts, (old, new), strict=True)
    )
    return before, after


def _lower(page: RawTree, above: RawTree, entry: PageEntry) -> RawTree:
    """`page`, if it is a page that `entry` of `above` may name."""
    first = decode_entry(page.rows[0])
    begins = first.first if isinstance(first, PageEntry) else first.name
    if page.height != above.height - 1 or begins != entry.first:
        raise CorruptionError("a page of a tree is in the wrong place: restore an older commit")
    return page


def _differing_entries(before: Sequence[RawTree], after: Sequence[RawTree]) -> _Differing:
    """Most rows of two pages are the same, and are never decoded."""
    old, new = _by_name(before), _by_name(after)
    found = [(_entry(row), _entry(new.get(name))) for name, row in old.items() if new.get(name) != row]
    return found + [(None, _entry(row)) for name, row in new.items() if name not in old]


def _by_name(nodes: Sequence[RawTree]) -> dict[Any, list[Any]]:
    try:
        rows = {row[0]: row for node in nodes for row in node.rows}
    except (TypeError, IndexError, KeyError) as error:
        raise CorruptionError(f"malformed tree node: {error!r}") from error
    if len(rows) != sum(len(node.rows) for node in nodes):
        raise CorruptionError("a tree names an entry twice: restore an older commit")
    return rows


def _entry(row: list[Any] | None) -> Entry | None:
    entry = None if row is None else decode_entry(row)
    if isinstance(entry, PageEntry):
        raise CorruptionError("a tree node mixes entries and pages: restore an older commit")
    return entry


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
    """A tensor that both sides have, and that is not the same."""

    path: Path
    before: TensorEntry
    after: TensorEntry


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
    unique = {(pair.before, pair.after): pair for pair in pairs}
    # Of those whose bytes are the same, only what they mean changed.
    found = {(old, new): _same_content(new) for old, new in unique if (old.node, old.inline) == (new.node, new.inline)}
    different = [pair for entries, pair in unique.items() if entries not in found]
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
        found.update(((each.pair.before, each.pair.after), _change(each, ids)) for each in batch)
    return [found[pair.before, pair.after] for pair in pairs]


def _same_content(tensor: TensorEntry) -> ChunkChange:
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
