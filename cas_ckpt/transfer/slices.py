"""Reads one region of one tensor: only the leaves that it touches are read and verified."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.spec import Box, Grid, raw_dtype
from cas_ckpt.storage.store import Store
from cas_ckpt.transfer.chunk_reader import ChunkReader, Place, Relocate, VerifiedExtent
from cas_ckpt.transfer.hashing import Array


def leaves_touched(cell: tuple[int, ...], part: Box, *, item_bytes: int, leaf_bytes: int) -> list[int]:
    """Numbers of the leaves of a cell (sizes `cell`, C order) that share an element with `part`."""
    if not cell:
        return [0]
    strides = [math.prod(cell[axis + 1 :]) * item_bytes for axis in range(len(cell))]
    starts = np.zeros(1, np.int64)
    for axis in range(len(cell) - 1):
        steps = (part.offsets[axis] + np.arange(part.sizes[axis], dtype=np.int64)) * strides[axis]
        starts = (starts[:, None] + steps).reshape(-1)
    starts = starts + part.offsets[-1] * item_bytes
    first = starts // leaf_bytes
    last = (starts + part.sizes[-1] * item_bytes - 1) // leaf_bytes
    reach = int((last - first).max()) + 1
    touched = first[:, None] + np.arange(reach)
    return [int(leaf) for leaf in np.unique(touched[touched <= last[:, None]])]


def read_region(
    store: Store,
    region: Box,
    *,
    grid: Grid,
    item_bytes: int,
    chunk_of: Callable[[int], Digest],
    located: Mapping[bytes, Sequence[Place]],
    relocate: Relocate | None = None,
) -> Array:
    """The elements of `region` as a new C-contiguous array of raw items.

    Args:
        chunk_of: Chunk id by cell number; called for the cells that `region` touches.
        relocate: Asked when a pack was collected meanwhile.
    Raises:
        CorruptionError: a leaf is damaged in every copy. NotFoundError: a chunk is nowhere.
    """
    out = np.empty(region.sizes, raw_dtype(item_bytes))
    reader = ChunkReader(store, relocate)
    for cell in grid.cells_touching(region):
        box = grid.box(cell)
        common = box.intersect(region) if box.sizes else box
        if common is None:
            continue
        digest = chunk_of(cell)
        part = common.relative_to(box)
        data = _cell_part(reader, digest, located.get(digest, ()), box, part, item_bytes)
        out[common.relative_to(region).slices] = data[part.slices]
    return out


def _cell_part(
    reader: ChunkReader,
    digest: Digest,
    places: Sequence[Place],
    box: Box,
    part: Box,
    item_bytes: int,
) -> Array:
    """An array of the whole cell in which the leaves that `part` touches are filled in."""
    num_bytes = box.num_elements * item_bytes
    space = np.empty(num_bytes, np.uint8)

    def check(extent: VerifiedExtent) -> None:
        leaves = leaves_touched(box.sizes, part, item_bytes=item_bytes, leaf_bytes=extent.info.leaf_bytes)
        reader.read_leaves([extent], leaves, space.data)

    reader.intact(digest, places, num_bytes, check)
    return space.view(raw_dtype(item_bytes)).reshape(box.sizes)
