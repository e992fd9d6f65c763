"""checkout: brings the bytes of stored tensors into targets.

    1. plan: every tensor's chunks, and for every chunk the cells that want it
    2. locate the chunks in the index
    3. verify every byte                     (no target is touched before this is done)
    4. copy every byte into place
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cas_ckpt.errors import CorruptionError, InternalError, NotFoundError
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.objects.spec import raw_dtype
from cas_ckpt.objects.state import ArrayTarget, StoredTensor, TensorCopy, render_key
from cas_ckpt.ops.tree import tensor_chunks
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.repository import RepositoryHandle
from cas_ckpt.transfer.fetch import CellCopy, ChunkFetch, fetch_chunks, nothing, order_by_place
from cas_ckpt.transfer.workers import thread_count


def fetch_tensors(
    handle: RepositoryHandle,
    copies: Sequence[TensorCopy],
    *,
    num_threads: int | None = None,
    progress: Progress = SILENT,
    on_verified: Callable[[], object] = nothing,
) -> None:
    """Fill every target with its tensor.

    Args:
        on_verified: Called when everything is verified, before the first target is touched.
    Raises:
        CorruptionError, NotFoundError: naming the tensor; no target was touched.
    """
    inline = [copy for copy in copies if copy.stored.node is None]
    stored = [copy for copy in copies if copy.stored.node is not None]
    fetches = _plan(handle, stored)
    fetch_chunks(
        handle.store, fetches, num_threads=thread_count(num_threads), progress=progress,
        relocate=handle.relocate, on_verified=on_verified,
    )  # fmt: skip
    for copy in inline:
        _fill_inline(copy.stored, copy.target)


def _plan(
    handle: RepositoryHandle, copies: Sequence[TensorCopy]
) -> list[ChunkFetch]:
    chunks = tensor_chunks(handle, [copy.stored for copy in copies])
    fetches: dict[Digest, ChunkFetch] = {}
    for wanted, (grid, digests) in zip(copies, chunks, strict=True):
        key, item_bytes = render_key(wanted.path), wanted.stored.spec.item_bytes
        for cell, digest in enumerate(digests):
            box = grid.box(cell)
            fetch = fetches.get(digest)
            num_bytes = box.num_elements * item_bytes
            if fetch is None:
                fetch = fetches[digest] = ChunkFetch(digest, num_bytes)
            elif fetch.num_bytes != num_bytes:
                raise CorruptionError(
                    f"{key}: cell {cell} has {num_bytes} bytes, its chunk {short(digest)} has {fetch.num_bytes} "
                    f"elsewhere ({fetch.copies[0].key}): restore an older commit"
                )
            fetch.copies.append(CellCopy(key, wanted.target, box, item_bytes))
    try:
        located = handle.locate(fetches)
    except NotFoundError:
        located = handle.index.locate(fetches)  # names the tensor instead of the object
    return order_by_place(fetches.values(), located)


def _fill_inline(tensor: StoredTensor, target: ArrayTarget) -> None:
    if tensor.inline is None:
        raise InternalError("a tensor that is neither stored nor inline")
    spec = tensor.spec
    array = target.open(spec.box)
    raw = raw_dtype(spec.item_bytes)
    view = array if array.dtype == raw else array.view(raw)
    view[...] = np.frombuffer(tensor.inline, raw).reshape(spec.shape)
    target.done(spec.box, array)
