"""The ids of some cells' chunks: only the pages that hold them are read.

Invariant: an id is given only for a cell of the canonical grid; a tensor that was stored on
another grid is refused, as a plan of its cells would name the wrong elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.tree import page_of
from cas_ckpt.errors import CorruptionError, InternalError
from cas_ckpt.layout.grid import grid_for
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.nodes import PAGE_CHUNKS, TensorNode, decode_chunk_page, decode_tensor
from cas_ckpt.objects.state import StoredTensor


def chunk_ids(handle: RepositoryHandle, wanted: Sequence[tuple[StoredTensor, Sequence[int]]]) -> list[list[Digest]]:
    """For each tensor and some of its cells, the ids of their chunks; all nodes are read together.

    Raises:
        NotFoundError, CorruptionError.
    """
    nodes = _tensor_nodes(handle, [tensor for tensor, _ in wanted])
    needed = dict.fromkeys(
        nodes[tensor.node].pages[cell // PAGE_CHUNKS]
        for tensor, cells in wanted
        if tensor.node in nodes and nodes[tensor.node].pages
        for cell in cells
    )
    pages = handle.read_nodes(ObjectKind.CHUNK_PAGE, list(needed)) if needed else {}
    ids_of = {digest: decode_chunk_page(data) for digest, data in pages.items()}
    return [_ids(tensor, cells, nodes, ids_of) for tensor, cells in wanted]


def _tensor_nodes(handle: RepositoryHandle, tensors: Sequence[StoredTensor]) -> dict[Digest | None, TensorNode]:
    """The nodes of all tensors that have one, by id; checked to be of these tensors."""
    many = [tensor for tensor in tensors if not tensor.single and tensor.node is not None]
    digests = dict.fromkeys(tensor.node for tensor in many if tensor.node is not None)
    data = handle.read_nodes(ObjectKind.TENSOR, list(digests)) if digests else {}
    nodes: dict[Digest | None, TensorNode] = {digest: decode_tensor(node) for digest, node in data.items()}
    for tensor in many:
        node, spec = nodes[tensor.node], tensor.spec
        if node.spec != spec or node.grid != grid_for(spec):
            raise CorruptionError(
                f"a tensor node of {node.spec} in cells of {node.grid.cell} stands where {spec} in cells of "
                f"{grid_for(spec).cell} should: restore it from a copy"
            )
    return nodes


def _ids(
    tensor: StoredTensor,
    cells: Sequence[int],
    nodes: Mapping[Digest | None, TensorNode],
    ids_of: Mapping[Digest, tuple[Digest, ...]],
) -> list[Digest]:
    if tensor.node is None:
        raise InternalError("a tensor that stands inline has no chunks")
    if tensor.single:
        if grid_for(tensor.spec).num_cells != 1:
            raise CorruptionError(f"one chunk is named for {tensor.spec}, which needs more: restore it from a copy")
        return [tensor.node for _ in cells]
    node = nodes[tensor.node]
    if node.chunks:
        return [node.chunks[cell] for cell in cells]
    found = []
    for cell in cells:
        number, at = divmod(cell, PAGE_CHUNKS)
        found.append(page_of(node, number, ids_of[node.pages[number]])[at])
    return found
