"""read: one region of one tensor; only the leaves that it touches are read and verified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cas_ckpt.errors import CorruptionError, InvalidInputError
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.kinds import ObjectKind
from cas_ckpt.objects.spec import Box, Grid, Spec, raw_dtype
from cas_ckpt.objects.state import StoredTensor
from cas_ckpt.objects.tensor_node import PAGE_CHUNKS, decode_chunk_page, decode_tensor
from cas_ckpt.ops.tree import page_of, whole_grid
from cas_ckpt.repository import RepositoryHandle
from cas_ckpt.transfer.slices import read_region


def region_box(spec: Spec, region: Sequence[tuple[int, int]] | None, *, key: str) -> Box:
    """The box that `region`, (offset, size) per dimension in elements, means in a tensor.

    Dimensions that are left out at the end are taken whole; None is the whole tensor.

    Raises:
        InvalidInputError: too many dimensions, or a part outside the tensor.
    """
    given = list(region or ())
    if len(given) > len(spec.shape):
        raise InvalidInputError(
            f"{key}: a region of {len(given)} dimensions in a tensor {spec}: give at most {len(spec.shape)}"
        )
    pairs = given + [(0, size) for size in spec.shape[len(given) :]]
    for axis, ((offset, size), whole) in enumerate(zip(pairs, spec.shape, strict=True)):
        if offset < 0 or size < 0 or offset + size > whole:
            raise InvalidInputError(
                f"{key}: dimension {axis} is {whole} long, so [{offset}, {offset + size}) is not inside it"
            )
    return Box(tuple(offset for offset, _ in pairs), tuple(size for _, size in pairs))


def read_array(handle: RepositoryHandle, tensor: StoredTensor, box: Box) -> np.ndarray[Any, Any]:
    """The elements of `box` as a new array of raw items.

    Raises:
        CorruptionError, NotFoundError.
    """
    item_bytes = tensor.spec.item_bytes
    if tensor.inline is not None:
        whole = np.frombuffer(tensor.inline, raw_dtype(item_bytes)).reshape(tensor.spec.shape)
        return np.array(whole[box.slices])
    if tensor.node is None or not box.num_elements:
        return np.empty(box.sizes, raw_dtype(item_bytes))
    grid, chunks = _chunks_touched(handle, tensor, tensor.node, box)
    return read_region(
        handle.store,
        box,
        grid=grid,
        item_bytes=item_bytes,
        chunk_of=chunks.__getitem__,
        located=handle.locate(list(chunks.values())),
        relocate=handle.relocate,
    )


def _chunks_touched(
    handle: RepositoryHandle, tensor: StoredTensor, node: Digest, box: Box
) -> tuple[Grid, dict[int, Digest]]:
    """The grid, and cell number -> chunk id for the cells that `box` touches; reads only their pages."""
    if tensor.single:
        return whole_grid(tensor.spec), {0: node}
    decoded = decode_tensor(handle.read_node(ObjectKind.TENSOR, node))
    if decoded.spec != tensor.spec:
        raise CorruptionError(
            f"a tensor node of {decoded.spec} stands where {tensor.spec} should: "
            "restore it from a copy"
        )
    cells = list(decoded.grid.cells_touching(box))
    if not decoded.pages:
        return decoded.grid, {cell: decoded.chunks[cell] for cell in cells}
    wanted = sorted({cell // PAGE_CHUNKS for cell in cells})
    data = handle.read_nodes(ObjectKind.CHUNK_PAGE, [decoded.pages[number] for number in wanted])
    pages = {
        number: page_of(decoded, number, decode_chunk_page(data[decoded.pages[number]])) for number in wanted
    }
    return decoded.grid, {cell: pages[cell // PAGE_CHUNKS][cell % PAGE_CHUNKS] for cell in cells}
