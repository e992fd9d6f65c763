"""checkout over several ranks: every chunk is read by one of them, whoever wants it.

    1. wants: what all ranks want together; all must want the same tensors of one commit
    2. plan: which rank reads which chunk, who gets what of it (layout/restore_plan.py)
    3. chunk ids and places of the chunks that this rank reads
    4. verify, agree, copy and exchange (transfer/scatter.py)

Invariant: all ranks return, or all raise; whatever fails before everything is verified leaves
every target on every rank as it was. Collective: the ranks call it together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import numpy as np

from cas_ckpt.collector import collector_paused
from cas_ckpt.errors import CorruptionError, InternalError, NotFoundError
from cas_ckpt.layout.grid import grid_for
from cas_ckpt.layout.holdings import held_by
from cas_ckpt.layout.restore_plan import ChunkRead, RestorePlan, Wanted, plan_restore_reads
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.objects.spec import Box, raw_dtype
from cas_ckpt.objects.state import TensorCopy, render_key
from cas_ckpt.ops.checkout import fetch_tensors
from cas_ckpt.ops.chunk_ids import chunk_ids
from cas_ckpt.ops.together import together
from cas_ckpt.ops.wants import Want, agree_on_wants
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.repository import RepositoryHandle
from cas_ckpt.transfer.fetch import nothing, order_by_place
from cas_ckpt.transfer.messages import Incoming, Landing
from cas_ckpt.transfer.peers import Peers
from cas_ckpt.transfer.scatter import CellRead, SourceChunk, verify_and_scatter
from cas_ckpt.transfer.workers import thread_count


def fetch_on_ranks(
    handle: RepositoryHandle,
    copies: Sequence[TensorCopy],
    *,
    peers: Peers,
    num_threads: int | None = None,
    progress: Progress = SILENT,
    on_verified: Callable[[], object] = nothing,
) -> None:
    """Fill every target of every rank with its tensor, or with its part of it; collective.

    Args:
        copies: What this rank wants, each key once, of the commit that all ranks agreed on. Ranks may
            want different keys and different parts.
        progress: Told of the bytes that this rank verifies, and of those that come into its targets.
        on_verified: Called when everything is verified on all ranks, before the first target is touched.

    Raises:
        CorruptionError, NotFoundError: naming the tensor; no target was touched on any rank, unless
            the message says that they may be partly written.
        MismatchError: the ranks want different tensors under one key; on all ranks, nothing touched.
        PeerError: another rank raised, or is gone; says which, why, and whether targets may be partly written.
    """
    with together(peers):
        if peers.size == 1 and all(copy.placement is None for copy in copies):
            fetch_tensors(handle, copies, num_threads=num_threads, progress=progress, on_verified=on_verified)
            return
        chunks, cells, incoming = _plan(handle, copies, peers)
        verify_and_scatter(
            handle.store, chunks, cells, incoming,
            fill_rest=lambda: _fill_inline(copies, peers.rank),
            peers=peers, num_threads=thread_count(num_threads), progress=progress,
            relocate=handle.relocate, on_verified=on_verified,
        )  # fmt: skip


@collector_paused()
def _plan(
    handle: RepositoryHandle, copies: Sequence[TensorCopy], peers: Peers
) -> tuple[list[SourceChunk], list[CellRead], list[Incoming]]:
    """The chunks that this rank reads, by place; the cells that they are of; what it gets from others."""
    wants = agree_on_wants(copies, peers)
    plan = plan_restore_reads([Wanted(want.key, want.stored.spec, want.shards) for want in wants], peers.size)
    targets = {render_key(copy.path): copy.target for copy in copies}
    landings = [Landing(want.key, want.stored.spec.item_bytes, targets.get(want.key)) for want in wants]
    cells = _cell_reads(handle, wants, landings, list(plan.reads(peers.rank)))
    incoming = [
        Incoming(each.reader, landings[each.tensor], each.box, grid_for(wants[each.tensor].stored.spec).box(each.cell))
        for each in plan.receives(peers.rank)
        if each.reader != peers.rank
    ]
    _check_own(plan, wants, peers.rank, cells, incoming)
    return _located(handle, {cell.chunk.digest: cell.chunk for cell in cells}), cells, incoming


def _cell_reads(
    handle: RepositoryHandle, wants: Sequence[Want], landings: Sequence[Landing], reads: Sequence[ChunkRead]
) -> list[CellRead]:
    by_tensor = [(tensor, list(each)) for tensor, each in groupby(reads, key=lambda read: read.tensor)]
    ids = chunk_ids(handle, [(wants[tensor].stored, [read.cell for read in each]) for tensor, each in by_tensor])
    chunks: dict[Digest, SourceChunk] = {}
    found = []
    for (tensor, own), digests in zip(by_tensor, ids, strict=True):
        grid, landing = grid_for(wants[tensor].stored.spec), landings[tensor]
        for read, digest in zip(own, digests, strict=True):
            box = grid.box(read.cell)
            chunk = _chunk(chunks, landing.key, digest, box.num_elements * landing.item_bytes)
            found.append(CellRead(chunk, landing, box, read.deliveries))
    return found


def _chunk(chunks: dict[Digest, SourceChunk], key: str, digest: Digest, num_bytes: int) -> SourceChunk:
    """The chunk of this id; one for all cells that have it."""
    chunk = chunks.get(digest)
    if chunk is None:
        chunk = chunks[digest] = SourceChunk(key, digest, num_bytes)
    elif chunk.num_bytes != num_bytes:
        raise CorruptionError(
            f"{key}: a cell has {num_bytes} bytes, its chunk {short(digest)} has {chunk.num_bytes} "
            f"elsewhere ({chunk.key}): restore an older commit"
        )
    return chunk


def _located(handle: RepositoryHandle, chunks: Mapping[Digest, SourceChunk]) -> list[SourceChunk]:
    try:
        located = handle.locate(chunks)
    except NotFoundError:
        located = handle.index.locate(chunks)  # names the tensor instead of the object
    return order_by_place(chunks.values(), located)


def _check_own(
    plan: RestorePlan, wants: Sequence[Want], rank: int, cells: Sequence[CellRead], incoming: Sequence[Incoming]
) -> None:
    """Every byte that this rank wants comes from somewhere, or nothing is begun."""
    wanted = sum(
        piece.num_elements * want.stored.spec.item_bytes
        for want in wants
        for shard in want.shards
        if rank in shard.ranks
        for piece in shard.pieces
    )
    planned = sum(each.box.num_elements * each.landing.item_bytes for each in incoming)
    for cell in cells:
        own = sum(each.box.num_elements for each in cell.deliveries if each.rank == rank)
        planned += own * cell.landing.item_bytes
    if planned != wanted:
        raise InternalError(f"the plan brings {planned} bytes to rank {rank} of {plan.world_size}, not {wanted}")


def _fill_inline(copies: Sequence[TensorCopy], rank: int) -> None:
    """Fill the own parts of the tensors whose bytes stand in the tree."""
    for copy in copies:
        if copy.stored.inline is not None and copy.stored.node is None:
            spec = copy.stored.spec
            elements = np.frombuffer(copy.stored.inline, raw_dtype(spec.item_bytes)).reshape(spec.shape)
            for box in _own_pieces(copy, rank):
                array = copy.target.open(box)
                raw = array if array.dtype == elements.dtype else array.view(elements.dtype)
                raw[...] = elements[box.slices]
                copy.target.done(box, array)


def _own_pieces(copy: TensorCopy, rank: int) -> Sequence[Box]:
    if copy.placement is None:
        return [copy.stored.spec.box]
    return [box for box, _ in held_by(rank, copy.stored.spec.shape, copy.placement)]
