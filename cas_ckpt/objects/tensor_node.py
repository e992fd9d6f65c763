"""Tensor nodes: spec, grid and chunk ids, paged so that one changed chunk rewrites one page.

Invariant: a decoded node names exactly one chunk for each cell of a grid that fits its shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cas_ckpt.errors import CorruptionError
from cas_ckpt.objects.digest import DIGEST_BYTES, LEAF_BYTES, Digest
from cas_ckpt.objects.kinds import ObjectKind
from cas_ckpt.objects.node import Node, make_node, open_node
from cas_ckpt.objects.spec import Grid, Spec

PAGE_CHUNKS = 256
"""Chunk ids in one page of a tensor node."""

MAX_DIMENSIONS = 64

MAX_CELL_BYTES = 64 * 1024 * 1024
"""No version writes longer cells, so a reader never allocates more for one, whatever a node claims."""

_MAX_SIZE = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class TensorNode:
    """Spec, grid and chunk ids of a tensor with more than one cell.

    Attributes:
        chunks: Ids in C order of the cells, when they fit one page, else empty.
        pages: Ids of the pages of 256 chunk ids otherwise.
    """

    spec: Spec
    grid: Grid
    chunks: tuple[Digest, ...]
    pages: tuple[Digest, ...]


def tensor_nodes(spec: Spec, grid: Grid, chunks: Sequence[Digest]) -> list[Node]:
    """The nodes of a tensor: its pages of chunk ids, if it needs any, then the tensor node."""
    pages = []
    if len(chunks) > PAGE_CHUNKS:
        parts = [chunks[at : at + PAGE_CHUNKS] for at in range(0, len(chunks), PAGE_CHUNKS)]
        pages = [make_node(ObjectKind.CHUNK_PAGE, b"".join(part), part) for part in parts]
    ids = [page.digest for page in pages] or list(chunks)
    payload = {
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "cell": list(grid.cell),
        "leaf": grid.leaf_bytes,
        "pages" if pages else "chunks": b"".join(ids),
    }
    return [*pages, make_node(ObjectKind.TENSOR, payload, ids)]


def decode_tensor(data: bytes) -> TensorNode:
    """The tensor node in `data`.

    Raises:
        CorruptionError: malformed, or a grid that does not fit the shape.
    """
    payload = open_node(ObjectKind.TENSOR, data)
    try:
        spec = Spec(payload["dtype"], checked_shape(payload["shape"]))
        grid = _checked_grid(spec, Grid(spec.shape, checked_shape(payload["cell"]), payload["leaf"]))
        ids = "pages" if grid.num_cells > PAGE_CHUNKS else "chunks"
        if payload.keys() != {"dtype", "shape", "cell", "leaf", ids}:
            raise CorruptionError(f"a tensor node of {spec} has other fields than it should")
        chunks = _digests(payload.get("chunks", b""))
        pages = _digests(payload.get("pages", b""))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptionError(f"malformed tensor node: {error!r}") from error
    expected = grid.num_cells
    if expected < 2 or len(chunks or pages) != (expected if chunks else -(-expected // PAGE_CHUNKS)):
        raise CorruptionError(f"tensor node of {spec} should name {expected} chunks and does not")
    return TensorNode(spec, grid, chunks, pages)


def decode_chunk_page(data: bytes) -> tuple[Digest, ...]:
    """The chunk ids of one page, in order."""
    ids = _digests(open_node(ObjectKind.CHUNK_PAGE, data))
    if not 0 < len(ids) <= PAGE_CHUNKS:
        raise CorruptionError(f"a page of {len(ids)} chunk ids, not of 1 to {PAGE_CHUNKS}")
    return ids


def _digests(joined: Any) -> tuple[Digest, ...]:
    if not isinstance(joined, bytes) or len(joined) % DIGEST_BYTES:
        raise CorruptionError("a list of ids is not a whole number of ids")
    return tuple(Digest(joined[at : at + DIGEST_BYTES]) for at in range(0, len(joined), DIGEST_BYTES))


def checked_shape(value: Any) -> tuple[int, ...]:
    """`value` as a shape. Raises CorruptionError if it is none."""
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        raise CorruptionError("a shape is not a short list of integers")
    if any(type(size) is not int or not 0 <= size <= _MAX_SIZE for size in value):
        raise CorruptionError("a shape holds something other than sizes")
    return tuple(value)


def _checked_grid(spec: Spec, grid: Grid) -> Grid:
    item_bytes = spec.item_bytes if spec.is_known else 1  # whoever reads the data of a later dtype refuses it
    fits = len(grid.cell) == len(spec.shape) and all(1 <= a <= b for a, b in zip(grid.cell, spec.shape, strict=True))
    if not fits or math.prod(grid.cell) * item_bytes > MAX_CELL_BYTES:
        raise CorruptionError(f"the grid {grid.cell} does not fit {spec}")
    leaf = grid.leaf_bytes
    if type(leaf) is not int or not 0 < leaf <= LEAF_BYTES or leaf % item_bytes:
        raise CorruptionError(f"{leaf!r} is no leaf size for {spec}")
    return grid
