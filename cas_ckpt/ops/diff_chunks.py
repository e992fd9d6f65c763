"""Which chunks of tensors changed, from tensor nodes and those of their pages that differ.

Invariant: a page that both sides have at the same place is not read where the cells of both
sides are the same. Reads no chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cas_ckpt.errors import CorruptionError
from cas_ckpt.layout.grid import grid_for
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.kinds import ObjectKind
from cas_ckpt.objects.spec import Grid
from cas_ckpt.objects.state import Path, render_key
from cas_ckpt.objects.tensor_node import PAGE_CHUNKS, TensorNode, decode_chunk_page, decode_tensor
from cas_ckpt.objects.tree_node import TensorEntry
from cas_ckpt.ops.diff_answer import ChunkChange
from cas_ckpt.ops.diff_walk import read_named
from cas_ckpt.ops.tree import page_of, whole_grid
from cas_ckpt.repository import RepositoryHandle

PAGES_AT_A_TIME = 512
"""Pages of chunk ids in memory at a time (some 10 MB), unless one tensor alone has more."""


@dataclass(frozen=True, slots=True)
class TensorPair:
    """A tensor that both sides have, and that is not the same."""

    path: Path
    before: TensorEntry
    after: TensorEntry


@dataclass(frozen=True, slots=True)
class _Cut:
    """How one side is cut into chunks.

    Attributes:
        chunks: Ids of its chunks, unless they stand in the pages of `node`.
    """

    grid: Grid
    chunks: tuple[Digest, ...]
    node: TensorNode | None = None

    @property
    def pages(self) -> tuple[Digest, ...]:
        return self.node.pages if self.node is not None else ()


@dataclass(frozen=True, slots=True)
class _Cuts:
    pair: TensorPair
    before: _Cut
    after: _Cut

    @property
    def is_aligned(self) -> bool:
        """Whether cells of equal numbers are the same elements on both sides."""
        return self.before.grid == self.after.grid

    def pages_to_read(self) -> list[Digest]:
        old, new = self.before.pages, self.after.pages
        if not self.is_aligned:
            return [*old, *new]
        return [page for a, b in zip(old, new, strict=True) if a != b for page in (a, b)]


def changed_chunks(handle: RepositoryHandle, pairs: Sequence[TensorPair]) -> list[ChunkChange]:
    """For each pair, which chunks changed; nodes are read together, each once.

    Raises:
        NotFoundError, CorruptionError: names the tensor.
    """
    unique = {(pair.before, pair.after): pair for pair in pairs}
    found = {entries: _same_content(pair.after) for entries, pair in unique.items() if _is_same(pair)}
    for batch in _batches(_cuts(handle, [pair for entries, pair in unique.items() if entries not in found])):
        wanted = {page: cuts.pair.path for cuts in batch for page in cuts.pages_to_read()}
        data = read_named(handle, ObjectKind.CHUNK_PAGE, wanted)
        ids = {digest: decode_chunk_page(page) for digest, page in data.items()}
        found.update(((cuts.pair.before, cuts.pair.after), _change(cuts, ids)) for cuts in batch)
    return [found[pair.before, pair.after] for pair in pairs]


def _is_same(pair: TensorPair) -> bool:
    """Whether the bytes are the same, so that only what they mean changed."""
    return (pair.before.node, pair.before.inline) == (pair.after.node, pair.after.inline)


def _same_content(tensor: TensorEntry) -> ChunkChange:
    if tensor.node is None:
        return ChunkChange(0, 0, 0)
    grid = grid_for(tensor.spec)
    return ChunkChange(0, grid.num_cells, 0, (), grid)


def _batches(every: Iterable[_Cuts]) -> Iterator[list[_Cuts]]:
    batch: list[_Cuts] = []
    num_pages = 0
    for cuts in every:
        batch.append(cuts)
        num_pages += len(cuts.pages_to_read())
        if num_pages >= PAGES_AT_A_TIME:
            yield batch
            batch, num_pages = [], 0
    if batch:
        yield batch


def _cuts(handle: RepositoryHandle, pairs: Sequence[TensorPair]) -> list[_Cuts]:
    paths = {
        entry.node: pair.path
        for pair in pairs
        for entry in (pair.before, pair.after)
        if entry.node is not None and not entry.single
    }
    nodes = {digest: decode_tensor(data) for digest, data in read_named(handle, ObjectKind.TENSOR, paths).items()}
    return [_Cuts(pair, _cut(pair.path, pair.before, nodes), _cut(pair.path, pair.after, nodes)) for pair in pairs]


def _cut(path: Path, tensor: TensorEntry, nodes: Mapping[Digest, TensorNode]) -> _Cut:
    if tensor.node is None:
        return _Cut(whole_grid(tensor.spec), ())
    if tensor.single:
        return _Cut(whole_grid(tensor.spec), (tensor.node,))
    node = nodes[tensor.node]
    if node.spec != tensor.spec:
        raise CorruptionError(
            f"{render_key(path)}: a tensor node of {node.spec} stands where {tensor.spec} should: "
            "restore it from a copy"
        )
    return _Cut(node.grid, node.chunks, node)


def _change(cuts: _Cuts, ids: Mapping[Digest, tuple[Digest, ...]]) -> ChunkChange:
    after = cuts.pair.after
    if after.node is None:
        return ChunkChange(0, 0, after.spec.shown_bytes)
    cells = _changed_cells(cuts, ids) if cuts.is_aligned else _new_cells(cuts, ids)
    grid = cuts.after.grid
    whole = len(cells) == grid.num_cells
    elements = after.spec.num_elements if whole else sum(map(grid.cell_elements, cells))
    num_bytes = elements * after.spec.item_bytes if after.spec.is_known else 0
    return ChunkChange(len(cells), grid.num_cells, num_bytes, tuple(_runs(cells)), grid)


def _changed_cells(cuts: _Cuts, ids: Mapping[Digest, tuple[Digest, ...]]) -> list[int]:
    """Cells whose ids differ."""
    old, new = cuts.before, cuts.after
    if not new.pages:
        # A side without chunks stands in its tree node: whatever the other holds is new.
        return [cell for cell, digest in enumerate(new.chunks) if old.chunks[cell : cell + 1] != (digest,)]
    found = []
    for number, (a, b) in enumerate(zip(old.pages, new.pages, strict=True)):
        if a != b:
            first = number * PAGE_CHUNKS
            pair = zip(_page(old, number, ids), _page(new, number, ids), strict=True)
            found += [cell for cell, (x, y) in enumerate(pair, first) if x != y]
    return found


def _new_cells(cuts: _Cuts, ids: Mapping[Digest, tuple[Digest, ...]]) -> list[int]:
    """Cells of the new side whose chunks the old side has nowhere."""
    known = set(_all_ids(cuts.before, ids))
    return [cell for cell, digest in enumerate(_all_ids(cuts.after, ids)) if digest not in known]


def _all_ids(cut: _Cut, ids: Mapping[Digest, tuple[Digest, ...]]) -> list[Digest]:
    paged = [digest for number in range(len(cut.pages)) for digest in _page(cut, number, ids)]
    return paged or list(cut.chunks)


def _page(cut: _Cut, number: int, ids: Mapping[Digest, tuple[Digest, ...]]) -> tuple[Digest, ...]:
    found = ids[cut.pages[number]]
    return found if cut.node is None else page_of(cut.node, number, found)


def _runs(cells: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as (first, count)."""
    first = 0
    for at, cell in enumerate(cells):
        if at + 1 == len(cells) or cells[at + 1] != cell + 1:
            yield cells[first], at + 1 - first
            first = at + 1
