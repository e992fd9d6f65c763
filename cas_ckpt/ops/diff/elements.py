"""Numbers of a change: how many elements differ, and by how much, streamed cell by cell.

    1. tensors in groups, so that their nodes are read together: the ids of all their chunks
    2. of each, the changed cells (all of them, where the cells of the two sides are not the same)
       in stretches; some stretches at a time: locate the chunks of both sides
    3. threads: read and verify a cell of both sides, widen it block by block, add up in float64
    4. the sums of the stretches, in the order of cells: the answer is the same whatever the threads did

Invariant: memory is bounded by threads times cells and by the ids of one group, whatever the
tensors hold; no byte is counted that was not verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np

from cas_ckpt.core.chunks import chunk_ids, tensor_nodes
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import CkptError
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.pack import Location
from cas_ckpt.objects.spec import Box, Grid
from cas_ckpt.objects.state import StoredTensor, render_key
from cas_ckpt.ops.checkout.checkout import inline_array
from cas_ckpt.ops.diff.answer import ChunkChange
from cas_ckpt.ops.diff.numbers import NumberSums, Raw, TensorNumbers, are_numbers, measure
from cas_ckpt.ops.diff.walk import TensorPair, together_or_named
from cas_ckpt.parallel.workers import run_all, thread_count
from cas_ckpt.progress import SILENT, Progress, phase
from cas_ckpt.storage.store import Store
from cas_ckpt.transfer.chunk_reader import named
from cas_ckpt.transfer.fetch import read_region

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
