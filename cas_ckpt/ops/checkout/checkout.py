"""checkout: brings the bytes of stored tensors into targets, in one process or shared by several ranks.

`fetch_tensors`, in one process:

1. plan: the chunks of every tensor, and what every target gets of them
2. locate the chunks in the index                       (1, 2: core/tree.py)
3. verify every byte                                    (no target is touched before this is done)
4. copy every byte into place                           (3, 4: transfer/fetch.py)

`fetch_on_ranks`, collective: every chunk is read by one rank.

1. restore requests: each rank describes its copies (key, spec, id, placement); a description travels once
   for all ranks that have it; every rank merges them, and so finds the same list
2. plan: which rank reads which chunk, who gets what of it (layout/restore_plan.py)
3. chunk ids and places of the chunks that this rank reads
4. verify, agree, copy and exchange (transfer/scatter.py)

Invariant: all ranks return, or all raise; whatever fails before everything is verified leaves every target
on every rank as it was. Equal descriptions give equal requests on every rank; ranks that want different
things under one key are found before anything is read. What a rank wants follows from its own description
alone, so a placement need not name the boxes of other ranks.

`read_array`: one region of one tensor; only the leaves that it touches are read and verified.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from types import EllipsisType
from typing import Any, TypeAlias

import numpy as np

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.host_cache import CachedReads
from cas_ckpt.core.tree import chunk_ids, decode_values, place_chunks, planned_chunk_ids, stored_tensors, tensor_nodes
from cas_ckpt.errors import (
    CkptError,
    CorruptionError,
    InternalError,
    InvalidInputError,
    MismatchError,
    UnsupportedValueError,
)
from cas_ckpt.layout.holdings import Shard, held_by, holdings, whole
from cas_ckpt.layout.restore_plan import ChunkRead, ReadPlan, RestoreRequest, plan_restore_reads
from cas_ckpt.memory import check_memory, limits, memory_budget, python_gc_paused
from cas_ckpt.objects.digest import Digest, leaf_digest, pack_atom, short, unpack_canonical
from cas_ckpt.objects.nodes import TensorEntry, checked_shape
from cas_ckpt.objects.spec import Box, Placement, Spec, grid_for, pack_placement, raw_dtype, unpack_placement
from cas_ckpt.objects.state import Container, DerivedTensor, Flavor, Path, StoredTensor, TensorCopy, render_key
from cas_ckpt.ops.checkout.derived import placed_boxes, without_derived
from cas_ckpt.parallel.peers import Peers, distinct_messages, named, ranks_by
from cas_ckpt.parallel.workers import one_ahead
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.transfer.chunk_reader import ChunkPart, NewArray, StoredChunk, cell_part, new_array
from cas_ckpt.transfer.fetch import LONGEST_BYTES, fetch_chunks, least_bytes, nothing, read_region
from cas_ckpt.transfer.scatter import CellRead, Incoming, TargetTensor, verify_and_scatter

Index: TypeAlias = int | slice | EllipsisType
"""Index of one dimension of a region, as in NumPy: an integer, a slice, or `...`."""

Region: TypeAlias = Index | tuple[Index, ...]
"""A region of a tensor, written as NumPy's basic index: np.s_[5:9, 100:164]."""


@dataclass(frozen=True, slots=True)
class Part:
    """The selection of a region: a box of the tensor, and the shape in which it is given back.

    Attributes:
        shape: The sizes of the box, without the dimensions that an integer chose.
    """

    box: Box
    shape: tuple[int, ...]


def part_of(spec: Spec, region: Region | None, *, key: str) -> Part:
    """The part of a tensor that `region` selects, with NumPy's meaning.

    Integers choose one element and drop the dimension, negative numbers count from the end, slices end
    where the tensor ends, `...` and dimensions that are left out are taken whole. None is the whole tensor.

    Raises:
        InvalidInputError: too many dimensions, an integer outside the tensor, a step, or another kind of index.
    """
    if region is None:
        return Part(spec.box, spec.shape)
    given = _expanded(region if isinstance(region, tuple) else (region,), spec, key)
    starts, sizes, kept = [], [], []
    for axis, (index, length) in enumerate(zip(given, spec.shape, strict=True)):
        start, size = _range(index, length, f"{key}: dimension {axis}")
        starts.append(start)
        sizes.append(size)
        if isinstance(index, slice):
            kept.append(size)
    return Part(Box(tuple(starts), tuple(sizes)), tuple(kept))


def _expanded(indices: tuple[object, ...], spec: Spec, key: str) -> list[int | slice]:
    """One integer or slice for each dimension."""
    found: list[int | slice] = []
    rest = len(spec.shape) - sum(index is not Ellipsis for index in indices)
    if sum(index is Ellipsis for index in indices) > 1:
        raise InvalidInputError(f"{key}: a region has at most one '...'")
    if rest < 0:
        raise InvalidInputError(
            f"{key}: the region has {len(indices)} parts, the tensor {len(spec.shape)} dimensions ({spec})"
        )
    if pairs := _pairs(indices) if any(isinstance(each, (tuple, list)) for each in indices) else []:
        indices = (pairs,)
    for index in indices:
        if index is Ellipsis:
            found += [slice(None)] * rest
        elif isinstance(index, slice):
            found.append(index)
        else:
            found.append(_integer(index, key))
    return found + [slice(None)] * (len(spec.shape) - len(found))


def _integer(index: object, key: str) -> int:
    """`index` as an integer.

    Raises:
        InvalidInputError: it is not one; the message spells out what a pair of (offset, size) should be.
    """
    if pairs := _pairs(index):
        spelled = ", ".join(f"{start}:{start + size}" for start, size in pairs)
        raise InvalidInputError(
            f"{key}: a region is an index as in NumPy, not pairs of (offset, size): write np.s_[{spelled}]"
        )
    try:
        if isinstance(index, (bool, np.bool_)):
            raise TypeError
        return operator.index(index)  # type: ignore[arg-type]
    except TypeError as error:
        raise InvalidInputError(
            f"{key}: a region has integers, slices and '...', as in np.s_[0:10, 5], not {type(index).__name__}"
        ) from error


def _pairs(index: object) -> list[tuple[int, int]]:
    """`index` as pairs of integers, if it is one or several; such were regions once, and a habit elsewhere."""
    given = index if isinstance(index, (tuple, list)) else ()
    pairs = [given] if len(given) == 2 and all(type(each) is int for each in given) else given
    if all(isinstance(pair, (tuple, list)) and len(pair) == 2 and {*map(type, pair)} == {int} for pair in pairs):
        return [(pair[0], pair[1]) for pair in pairs]
    return []


def _range(index: int | slice, whole: int, where: str) -> tuple[int, int]:
    """(start, size) of what `index` selects of a dimension of `whole` elements."""
    if isinstance(index, int):
        if not -whole <= index < whole:
            raise InvalidInputError(f"{where} is {whole} long: {index} is outside of it")
        return index % whole, 1
    try:
        start, stop, step = index.indices(whole)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"{where}: {index} is not a slice of integers") from error
    if step != 1:
        raise InvalidInputError(f"{where}: a step of {step}: read {start}:{stop} and take every {step}th of the result")
    return start, max(stop - start, 0)


def inline_array(tensor: StoredTensor | TensorEntry) -> np.ndarray[Any, Any]:
    """The elements of a tensor whose bytes are in its tree node, as raw items that may not be written.

    Raises:
        InternalError: its bytes are elsewhere.
    """
    if tensor.inline is None:
        raise InternalError("a tensor that is neither stored nor inline")
    return np.frombuffer(tensor.inline, raw_dtype(tensor.spec.item_bytes)).reshape(tensor.spec.shape)


def read_array(handle: RepositoryHandle, tensor: StoredTensor | TensorEntry, box: Box) -> np.ndarray[Any, Any]:
    """The elements of `box` as a new array of raw items.

    Raises:
        CorruptionError, NotFoundError. UnsupportedValueError: no array can have this shape.
    """
    item_bytes = tensor.spec.item_bytes
    if not tensor.spec.fits_array:
        raise UnsupportedValueError(f"{tensor.spec} has no elements, and sizes that no array can have")
    if tensor.inline is not None:
        return np.array(inline_array(tensor)[box.slices])
    if tensor.node is None or not box.num_elements:
        return np.empty(box.sizes, raw_dtype(item_bytes))
    (node,) = tensor_nodes(handle, [tensor])
    cells = [cell for cell, _ in node.grid.cells_in(box)]
    (ids,) = chunk_ids(handle, [(node, cells)])
    ask = partial(
        read_region, region=box, grid=node.grid, item_bytes=item_bytes,
        chunk_of=dict(zip(cells, ids, strict=True)).__getitem__, located=handle.locate(ids), relocate=handle.relocate,
    )  # fmt: skip
    store = handle.reads_of(box.num_elements * item_bytes)
    try:
        return ask(store)
    except CorruptionError:
        if not isinstance(store, CachedReads) or not store.distrust():
            raise
    return ask(handle.store)  # what this host had kept was wrong


BATCH_BYTES = 48 * 1024 * 1024
"""About as much is read together by who uses one array after the other; two such batches are in memory."""

_SHOWN_KEYS = 10
"""Keys that a message lists."""

WHOLE_SHARE = 0.5
"""From this share of a chunk's bytes on, all of it is read in one run; below, only the leaves that are wanted."""


def fetch_tensors(
    handle: RepositoryHandle,
    copies: Sequence[TensorCopy],
    *,
    progress: Progress = SILENT,
    on_verified: Callable[[], object] = nothing,
    unseen: bool = False,
    atomic: bool = True,
) -> int:
    """Fill every target with its tensor, or with the box of it that is wanted; how many plain bytes were read for it.

    Args:
        on_verified: Called before the first target is touched: when everything is verified, unless in one pass.
        unseen: The targets are new memory: they may be touched before, and are undefined when this raises.
        atomic: False: all is verified, but in one pass; some targets may be overwritten when damage is found.
    Raises:
        CorruptionError, NotFoundError: naming the tensor; no target was touched, unless it has keys as `overwritten`.
    """
    copies = without_derived(copies)
    chunks = _planned_chunks(handle, copies)
    store = handle.reads_of(sum(chunk.num_bytes for chunk in chunks)) if unseen else handle.store
    while True:
        try:
            with nullcontext() if unseen else _naming_overwritten(chunks):
                fetch_chunks(
                    store, chunks, progress=progress, relocate=handle.relocate, on_verified=on_verified,
                    one_pass=unseen or not atomic,
                )  # fmt: skip
            break
        except CorruptionError:
            if not isinstance(store, CachedReads) or not store.distrust():
                raise
        store, chunks = handle.store, _planned_chunks(handle, copies)  # what this host had kept was wrong
    _fill_inline(copies)
    return sum(chunk.wanted_bytes if chunk.by_leaves else chunk.num_bytes for chunk in chunks)


@contextmanager
def _naming_overwritten(chunks: Sequence[StoredChunk]) -> Iterator[None]:
    """Errors of the block say into which tensors something was written."""
    try:
        yield
    except BaseException as error:
        keys = sorted({part.key for chunk in chunks if chunk.opened is not None for part in chunk.parts})
        if keys:
            more = f" and {len(keys) - _SHOWN_KEYS} more" if len(keys) > _SHOWN_KEYS else ""
            text = f"overwritten by then, at least in part: {', '.join(keys[:_SHOWN_KEYS])}{more}; check out again"
            if isinstance(error, CkptError):
                error.args = (f"{error}; {text}", *error.args[1:])
            else:  # of memory, of a device, an interrupt
                error.add_note(text)
            vars(error)["overwritten"] = tuple(keys)
        raise


def check_restore(copies: Sequence[TensorCopy]) -> None:
    """Refuse a limit of memory with which these targets cannot be filled.

    Raises:
        MemoryBudgetError: says how much is needed.
    """
    stored = [copy.stored.spec.num_bytes for copy in copies if copy.stored.node is not None]
    least = least_bytes(len(copies), len(stored) + sum(stored) // LONGEST_BYTES)
    check_memory(least, f"a restore of {len(copies)} tensors")


def _planned_chunks(handle: RepositoryHandle, copies: Sequence[TensorCopy]) -> list[StoredChunk]:
    """The chunks of all that are stored in chunks, each once, with what every target gets of them."""
    stored = [copy for copy in copies if copy.stored.node is not None]
    nodes = tensor_nodes(handle, [copy.stored for copy in stored])
    boxes_of = [
        None if copy.box is None else dict(node.grid.cells_in(copy.box))
        for copy, node in zip(stored, nodes, strict=True)
    ]
    ids = chunk_ids(handle, list(zip(nodes, boxes_of, strict=True)))
    chunks: dict[Digest, StoredChunk] = {}
    for copy, node, boxes, digests in zip(stored, nodes, boxes_of, ids, strict=True):
        key, item_bytes, grid = render_key(copy.path), copy.stored.spec.item_bytes, node.grid
        for cell, digest in enumerate(digests) if boxes is None else zip(boxes, digests, strict=True):
            box = grid.box(cell)
            num_bytes = box.num_elements * item_bytes
            chunk = _chunk(chunks, key, digest, num_bytes)
            if copy.box is None or boxes is None:
                chunk.parts.append(ChunkPart(key, copy.target, item_bytes, box))
                chunk.wanted_bytes += num_bytes
            else:
                common = boxes[cell]
                part = cell_part(key, copy.target, item_bytes, box, common, common.relative_to(copy.box))
                chunk.parts.append(part)
                chunk.wanted_bytes += common.num_elements * item_bytes
    for chunk in chunks.values():
        chunk.by_leaves = chunk.wanted_bytes < WHOLE_SHARE * chunk.num_bytes
    return place_chunks(handle, chunks.values())


def _chunk(chunks: dict[Digest, StoredChunk], key: str, digest: Digest, num_bytes: int) -> StoredChunk:
    """The chunk of this id; one for all cells that have it."""
    chunk = chunks.get(digest)
    if chunk is None:
        chunk = chunks[digest] = StoredChunk(key, digest, num_bytes)
    elif chunk.num_bytes != num_bytes:
        raise CorruptionError(
            f"{key}: a cell has {num_bytes} bytes, its chunk {short(digest)} has {chunk.num_bytes} "
            f"elsewhere ({chunk.key}): restore an older commit"
        )
    return chunk


def _fill_inline(copies: Sequence[TensorCopy], rank: int = 0) -> None:
    """Fill the targets whose bytes are in tree nodes; those that are divided with the part of `rank`."""
    for copy in copies:
        stored, placement = copy.stored, copy.placement
        if stored.node is not None:
            continue
        fill, data = getattr(copy.target, "fill", None), stored.inline
        if fill is not None and data is not None and copy.box is None and placement is None and fill(data):
            continue
        elements, spec = inline_array(stored), stored.spec
        held = [(copy.box or spec.box, ())] if placement is None else held_by(rank, spec.shape, placement)
        for box, _ in held:
            place = box if copy.box is None else box.relative_to(copy.box)
            array = copy.target.open(place)
            target = array if array.dtype == elements.dtype else array.view(elements.dtype)
            target[...] = elements if box.sizes == elements.shape else elements[box.slices]
            copy.target.done(place, array)


def with_values(handle: RepositoryHandle, tree: Container, *, allow_pickle: bool = False) -> Container:
    """`tree` with every value read, verified and decoded; tensors stay as they are.

    Raises:
        CorruptionError, NotFoundError, UnsupportedValueError: naming the entry.
    """
    found: dict[str, np.ndarray[Any, Any]] = {}
    if not handle.store.abilities.local:  # all of them together
        stored = [(path, item, item.spec.box) for path, item in stored_tensors(tree) if item.flavor == Flavor.VALUE]
        found = dict(zip((render_key(path) for path, _, _ in stored), read_arrays(handle, stored), strict=True))

    def read_value(key: str, stored: StoredTensor) -> bytes:
        array = found.pop(key, None)
        return (read_array(handle, stored, stored.spec.box) if array is None else array).tobytes()

    return decode_values(tree, read_value=read_value, allow_pickle=allow_pickle)


Wished: TypeAlias = tuple[Path, StoredTensor, Box]
"""Where a tensor is in the state, the tensor, and what is wanted of it."""


def read_arrays(handle: RepositoryHandle, wanted: Sequence[Wished]) -> list[np.ndarray[Any, Any]]:
    """The elements of all these boxes as new arrays of raw items.

    Raises:
        CorruptionError, NotFoundError: naming the tensor.
    """
    found = [new_array(box.sizes, stored.spec.item_bytes) for _, stored, box in wanted]
    copies = [
        TensorCopy(path, stored, NewArray(array), box=box)
        for (path, stored, box), array in zip(wanted, found, strict=True)
    ]
    fetch_tensors(handle, copies, unseen=True)
    return found


def arrays_in_turn(handle: RepositoryHandle, wanted: Iterable[Wished]) -> Iterator[np.ndarray[Any, Any]]:
    """The elements of each box, as a new C-contiguous array of raw items, in bounded memory, the arrays among it.

    Over a network many are read at once, and the next while one is used.

    Raises:
        CorruptionError, NotFoundError: naming the tensor, at the latest when it is its turn.
    """
    if handle.store.abilities.local:
        for each in wanted:
            if isinstance(each[1], DerivedTensor):
                yield from read_arrays(handle, [each])
            else:
                yield read_array(handle, *each[1:])
        return
    most = memory_budget()

    def read(batch: Sequence[Wished]) -> list[np.ndarray[Any, Any]]:
        with limits(memory_bytes=most // 2):
            return read_arrays(handle, batch)

    for arrays in one_ahead(read, _batches(wanted, min(BATCH_BYTES, most // 4))):
        arrays.reverse()
        while arrays:  # each is forgotten once it was used
            yield arrays.pop()


def _batches(wanted: Iterable[Wished], batch_bytes: int) -> Iterator[list[Wished]]:
    """Some at a time, of at most `batch_bytes` together, or one that is longer."""
    batch: list[Wished] = []
    left_bytes = batch_bytes
    for each in wanted:
        num_bytes = each[2].num_elements * each[1].spec.item_bytes
        if batch and num_bytes > left_bytes:
            yield batch
            batch, left_bytes = [], batch_bytes
        batch.append(each)
        left_bytes -= num_bytes
    if batch:
        yield batch


def fetch_on_ranks(
    handle: RepositoryHandle,
    copies: Sequence[TensorCopy],
    *,
    peers: Peers,
    progress: Progress = SILENT,
    on_planned: Callable[[ReadPlan, Sequence[StoredTensor]], object] | None = None,
    on_verified: Callable[[], object] = nothing,
    atomic: bool = True,
) -> int:
    """Fill every target of every rank with its tensor, or with its part of it; how many plain bytes this rank read.

    Collective: the caller is inside of `collective_errors` if there are several ranks.

    Args:
        copies: What this rank wants, each key once, of the commit that all ranks agreed on. Ranks may
            want different keys and different parts.
        progress: Gets the bytes that this rank verifies, and of those that come into its targets.
        on_planned: Called with the plan of all ranks, and the tensors that its requests are for, once it is made. A
            process that is alone, and divides nothing, makes none.
        on_verified: Called when everything is verified on all ranks, before the first target is touched.
        atomic: As for `fetch_tensors`; of several ranks, which have to agree before they send, all is verified first.

    Raises:
        CorruptionError, NotFoundError: naming the tensor; no target was touched on any rank, unless
            the message says that they may be partly written.
        MismatchError: the ranks want different tensors under one key; on all ranks, nothing touched.
        PeerError: another rank raised, or is gone; says which, why, and whether targets may be partly written.
    """
    if peers.size == 1 and all(copy.placement is None for copy in copies):
        return fetch_tensors(handle, copies, progress=progress, on_verified=on_verified, atomic=atomic)
    copies = placed_boxes(without_derived(copies), peers.rank)
    chunks, cells, incoming = _plan_shared(handle, copies, peers, on_planned)
    verify_and_scatter(
        handle.store, chunks, cells, incoming,
        fill_rest=lambda: _fill_inline(copies, peers.rank),
        peers=peers, progress=progress, relocate=handle.relocate, on_verified=on_verified,
    )  # fmt: skip
    return sum(chunk.num_bytes for chunk in chunks)


@python_gc_paused()
def _plan_shared(
    handle: RepositoryHandle,
    copies: Sequence[TensorCopy],
    peers: Peers,
    on_planned: Callable[[ReadPlan, Sequence[StoredTensor]], object] | None,
) -> tuple[list[StoredChunk], list[CellRead], list[Incoming]]:
    """The chunks that this rank reads, by place; the cells that they are of; what it gets from others."""
    own = describe(copies)
    digests = peers.gather_all(leaf_digest(own))
    messages = distinct_messages(digests, own, peers)
    requests, stored = merge_requests([(messages[one], ranks) for one, ranks in ranks_by(digests).items()])
    plan = plan_restore_reads(requests, peers.size)
    if on_planned is not None:
        on_planned(plan, stored)
    targets = {render_key(copy.path): copy.target for copy in copies}
    tensors = [TargetTensor(each.key, each.spec.item_bytes, targets.get(each.key)) for each in requests]
    cells = _cell_reads(handle, stored, tensors, list(plan.reads(peers.rank)))
    incoming = [
        Incoming(each.reader, tensors[each.tensor], each.box, grid_for(requests[each.tensor].spec).box(each.cell))
        for each in plan.receives(peers.rank)
        if each.reader != peers.rank
    ]
    _check_own(plan, peers.rank, cells, incoming)
    return place_chunks(handle, {cell.chunk.digest: cell.chunk for cell in cells}.values()), cells, incoming


def _cell_reads(
    handle: RepositoryHandle,
    stored: Sequence[StoredTensor],
    tensors: Sequence[TargetTensor],
    reads: Sequence[ChunkRead],
) -> list[CellRead]:
    by_tensor = [(number, list(each)) for number, each in groupby(reads, key=lambda read: read.tensor)]
    ids = planned_chunk_ids(handle, [(stored[number], [read.cell for read in each]) for number, each in by_tensor])
    chunks: dict[Digest, StoredChunk] = {}
    found = []
    for (number, own), digests in zip(by_tensor, ids, strict=True):
        grid, tensor = grid_for(stored[number].spec), tensors[number]
        for read, digest in zip(own, digests, strict=True):
            box = grid.box(read.cell)
            chunk = _chunk(chunks, tensor.key, digest, box.num_elements * tensor.item_bytes)
            found.append(CellRead(chunk, tensor, box, read.deliveries))
    return found


def _check_own(plan: ReadPlan, rank: int, cells: Sequence[CellRead], incoming: Sequence[Incoming]) -> None:
    """Every byte that this rank wants comes from somewhere, or nothing is begun."""
    wanted = sum(
        piece.num_elements * request.spec.item_bytes
        for request in plan.requests
        for shard in request.shards
        if rank in shard.ranks
        for piece in shard.pieces
    )
    planned = sum(each.box.num_elements * each.tensor.item_bytes for each in incoming)
    for cell in cells:
        own = sum(each.box.num_elements for each in cell.deliveries if each.rank == rank)
        planned += own * cell.tensor.item_bytes
    if planned != wanted:
        raise InternalError(f"the plan brings {planned} bytes to rank {rank} of {plan.world_size}, not {wanted}")


# --- restore requests: what the ranks want together -----------------------------------------

_INLINE, _SINGLE, _NODE = range(3)
"""Kind of the id in a row: of the bytes themselves, of the only chunk, of the tensor node."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A tensor as one description has it: spec, what the id is of, id; and how its target is divided."""

    key: str
    stored: tuple[Spec, int, Digest]
    placement: Placement | None


def describe(copies: Sequence[TensorCopy]) -> bytes:
    """Encode what this rank wants, independent of the order of `copies`."""
    names: dict[Placement, int] = {}
    name_of: dict[int, int] = {}
    rows = []
    for copy in copies:
        placement = copy.placement
        # Hashing a placement looks at every rank of its mesh: once per object, not per tensor.
        name = None if placement is None else name_of.get(id(placement))
        if placement is not None and name is None:
            name = name_of[id(placement)] = names.setdefault(placement, len(names))
        stored, spec = copy.stored, copy.stored.spec
        if stored.node is not None:
            kind, digest = (_SINGLE if stored.single else _NODE), stored.node
        elif stored.inline is not None:
            kind, digest = _INLINE, leaf_digest(stored.inline)
        else:
            raise InternalError("a tensor that is neither stored nor inline")
        rows.append([render_key(copy.path), spec.dtype, list(spec.shape), kind, digest, name])
    rows.sort(key=lambda row: str(row[0]))
    # Numbered again in the order of the keys, so that the order of `copies` shows nowhere.
    order = {name: at for at, name in enumerate(dict.fromkeys(row[-1] for row in rows if row[-1] is not None))}
    for row in rows:
        row[-1] = order.get(row[-1])
    placements = sorted(names, key=lambda placement: order[names[placement]])
    return pack_atom([list(map(pack_placement, placements)), rows])


def merge_requests(
    descriptions: Sequence[tuple[bytes, Sequence[int]]],
) -> tuple[list[RestoreRequest], list[StoredTensor]]:
    """The requests of all ranks by key, and the tensors that they are for; the same on every rank.

    Only of tensors that are stored in chunks: every rank has the others already.

    Args:
        descriptions: Each with the ranks that sent it.
    Raises:
        MismatchError: two of them differ in the spec or the id of one key.
        CorruptionError: one of them cannot be read.
    """
    rows_of: dict[str, list[tuple[_Row, int]]] = {}
    for number, (data, ranks) in enumerate(descriptions):
        for row in _read(data, ranks):
            rows_of.setdefault(row.key, []).append((row, number))
    rank_sets = [frozenset(ranks) for _, ranks in descriptions]
    shards: dict[tuple[Any, ...], tuple[Shard, ...]] = {}
    requests, tensors = [], []
    for key in sorted(rows_of):
        rows = rows_of[key]
        spec, kind, digest = rows[0][0].stored
        if any(row.stored != (spec, kind, digest) for row, _ in rows[1:]):
            ranks_of: dict[str, set[int]] = {}
            for row, number in rows:
                wanted, _, stored_as = row.stored
                ranks_of.setdefault(f"{wanted} stored as {short(stored_as)}", set()).update(rank_sets[number])
            parts = "; ".join(f"{named(sorted(ranks))}: {what}" for what, ranks in ranks_of.items())
            raise MismatchError(
                f"{key}: the ranks want different tensors under this key ({parts}): check out the same commit on all"
            )
        if kind == _INLINE:
            continue
        # One tuple for all that are wanted alike: plans recognise them by it. Rows of one description share
        # their placements, so these can be told apart by identity.
        alike = (spec.shape, *[(id(row.placement), number) for row, number in rows])
        if alike not in shards:
            shards[alike] = _shards(spec.shape, [(row.placement, rank_sets[number]) for row, number in rows])
        tensors.append(StoredTensor(spec, Flavor.TORCH, digest, None, single=kind == _SINGLE))
        requests.append(RestoreRequest(key, spec, shards[alike]))
    return requests, tensors


def _shards(shape: tuple[int, ...], placed: Iterable[tuple[Placement | None, frozenset[int]]]) -> tuple[Shard, ...]:
    ranks_of: dict[tuple[Box, ...], set[int]] = {}
    for placement, ranks in placed:
        for shard in whole(shape, ranks) if placement is None else holdings(shape, [placement]):
            mine = ranks.intersection(shard.ranks)
            if mine:
                ranks_of.setdefault(shard.pieces, set()).update(mine)
    # Where an element is in a rank's own memory, its target knows.
    nowhere = (0,) * len(shape)
    return tuple(Shard(pieces, (nowhere,) * len(pieces), tuple(sorted(ranks))) for pieces, ranks in ranks_of.items())


def _read(data: bytes, ranks: Sequence[int]) -> list[_Row]:
    """The rows of a description, ascending by key."""
    try:
        packed, rows = unpack_canonical(data)
        placements = [unpack_placement(each) for each in packed]
        specs: dict[tuple[Any, ...], Spec] = {}  # one for all tensors that are alike
        found = []
        for key, dtype, shape, kind, digest, name in rows:
            if type(key) is not str or kind not in (_INLINE, _SINGLE, _NODE) or type(digest) is not bytes:
                raise CorruptionError("a row of another form")
            spec = specs.get((dtype, *shape))
            if spec is None:
                spec = specs[dtype, *shape] = Spec(dtype, checked_shape(shape))
                spec.item_bytes  # noqa: B018 - raises for what is not a dtype
            found.append(_Row(key, (spec, kind, Digest(digest)), None if name is None else placements[name]))
    except (CkptError, TypeError, ValueError, KeyError, IndexError) as error:
        raise CorruptionError(
            f"what {named(list(ranks))} wants cannot be read ({error!r}): run the same version of cas_ckpt on all ranks"
        ) from error
    for before, after in pairwise(found):
        if before.key >= after.key:
            raise InvalidInputError(f"{after.key}: {named(list(ranks))} wants it twice: give each key one target")
    return found
