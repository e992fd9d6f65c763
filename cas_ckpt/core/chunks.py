"""The chunk table: from the cells of tensors to the ids of their chunks, and to where these are stored.

    1. `tensor_nodes`: how each tensor is cut, and its chunk ids or the ids of their pages
    2. `chunk_ids`: the ids of some cells of each, or of all; only the pages that hold them are read
    3. `place_chunks`: the chunks with their places, in the order in which they are stored

Invariant: a node is of the spec that its entry has, and a page has as many ids as it has cells, so
that no id is ever taken for that of another cell. Nodes of many tensors are read together, each once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import CorruptionError, InternalError, NotFoundError
from cas_ckpt.index import contents
from cas_ckpt.objects.digest import LEAF_BYTES, Digest, ObjectKind
from cas_ckpt.objects.nodes import PAGE_CHUNKS, TensorEntry, TensorNode, decode_chunk_page, decode_tensor
from cas_ckpt.objects.spec import Grid, grid_for
from cas_ckpt.objects.state import StoredTensor
from cas_ckpt.transfer.chunk_reader import StoredChunk


@lru_cache(maxsize=4096)
def whole_grid(shape: tuple[int, ...]) -> Grid:
    """The grid of a tensor that is one cell (the chunk's own header says how long its leaves are)."""
    return Grid(shape, tuple([size or 1 for size in shape]), LEAF_BYTES)


def tensor_nodes(handle: RepositoryHandle, tensors: Sequence[StoredTensor | TensorEntry]) -> list[TensorNode]:
    """How each tensor is cut into chunks; without chunks for those whose bytes are in their tree node.

    Raises:
        NotFoundError, CorruptionError.
    """
    wanted = dict.fromkeys([tensor.node for tensor in tensors if tensor.node is not None and not tensor.single])
    data = handle.read_nodes(ObjectKind.TENSOR, list(wanted)) if wanted else {}
    nodes = {digest: decode_tensor(node) for digest, node in data.items()}
    found = []
    for tensor in tensors:
        spec = tensor.spec
        if tensor.node is None:
            node = TensorNode(spec, whole_grid(spec.shape), (), ())
        elif tensor.single:
            node = TensorNode(spec, whole_grid(spec.shape), (tensor.node,), ())
        else:
            node = nodes[tensor.node]
            if node.spec != spec:
                raise CorruptionError(
                    f"a tensor node of {node.spec} is stored where one of {spec} should be: restore it from a copy"
                )
        found.append(node)
    return found


def chunk_ids(
    handle: RepositoryHandle, wanted: Sequence[tuple[TensorNode, Collection[int] | None]]
) -> list[Sequence[Digest]]:
    """The ids of the chunks in some cells of each tensor, in the order of the cells; None: in all of them.

    Raises:
        NotFoundError, CorruptionError.
    """
    paged: list[tuple[TensorNode, Iterable[int]]] = []
    for node, cells in wanted:
        if node.pages:
            numbers = range(len(node.pages)) if cells is None else dict.fromkeys(cell // PAGE_CHUNKS for cell in cells)
            paged.append((node, numbers))
    ids_of = page_ids(handle, paged) if paged else {}
    found: list[Sequence[Digest]] = []
    for node, cells in wanted:
        if not node.pages:
            found.append(node.chunks if cells is None else [node.chunks[cell] for cell in cells])
        elif cells is None:
            found.append([digest for page in node.pages for digest in ids_of[page]])
        else:
            found.append([ids_of[node.pages[cell // PAGE_CHUNKS]][cell % PAGE_CHUNKS] for cell in cells])
    return found


def page_ids(
    handle: RepositoryHandle, wanted: Sequence[tuple[TensorNode, Iterable[int]]]
) -> dict[Digest, tuple[Digest, ...]]:
    """The chunk ids in some pages (by number) of some tensors, by the id of the page.

    Raises:
        NotFoundError, CorruptionError: also for a page that is too short or too long, so that ids would shift.
    """
    pages = [(node, number, node.pages[number]) for node, numbers in wanted for number in numbers]
    data = handle.read_nodes(ObjectKind.CHUNK_PAGE, list(dict.fromkeys(page for _, _, page in pages)))
    found = {page: decode_chunk_page(each) for page, each in data.items()}
    for node, number, page in pages:
        expected = min(PAGE_CHUNKS, node.grid.num_cells - number * PAGE_CHUNKS)
        if len(found[page]) != expected:
            raise CorruptionError(
                f"page {number} of a tensor {node.spec} holds {len(found[page])} chunk ids, not {expected}"
            )
    return found


def planned_chunk_ids(
    handle: RepositoryHandle, wanted: Sequence[tuple[StoredTensor, Sequence[int]]]
) -> list[Sequence[Digest]]:
    """As `chunk_ids`, the cells being those of the canonical grid: what plans are made of that read no node.

    Raises:
        NotFoundError, CorruptionError: also for a tensor that was stored on another grid, whose cells
            hold other elements than the plan says.
    """
    nodes = tensor_nodes(handle, [tensor for tensor, _ in wanted])
    for node, (tensor, _) in zip(nodes, wanted, strict=True):
        grid = grid_for(node.spec)
        if tensor.node is None:
            raise InternalError("a tensor whose bytes are in its tree node has no chunks")
        if tensor.single and grid.num_cells != 1:
            raise CorruptionError(f"one chunk is named for {node.spec}, which needs more: restore it from a copy")
        if not tensor.single and node.grid != grid:
            raise CorruptionError(
                f"a tensor node of {node.spec} in cells of {node.grid.cell} is stored where cells of "
                f"{grid.cell} should be: restore it from a copy"
            )
    return chunk_ids(handle, [(node, cells) for node, (_, cells) in zip(nodes, wanted, strict=True)])


def place_chunks(handle: RepositoryHandle, chunks: Iterable[StoredChunk]) -> list[StoredChunk]:
    """The chunks with their places, in the order in which they are stored in the packs.

    Raises:
        NotFoundError: a chunk is stored nowhere; names the tensor. CorruptionError.
    """
    placed = list(chunks)
    digests = [chunk.digest for chunk in placed]
    lost: NotFoundError | None = None
    try:
        located = handle.locate(digests)
    except NotFoundError as error:
        lost, located = error, handle.index.read(contents.locate, digests)
    for chunk in placed:
        chunk.places = located.get(chunk.digest, ())
        if not chunk.places:
            why = f"chunk {chunk.digest.hex()} is in no pack" if lost is None else lost.args[0]
            raise NotFoundError(f"{chunk.key}: {why}") from lost
    placed.sort(key=lambda chunk: (chunk.places[0].pack, chunk.places[0].offset))
    return placed
