"""`CasStorageReader`: torch.distributed.checkpoint loads from a repository.

How a load goes (DCP calls, on all ranks unless said otherwise):

1. `read_metadata`: the ref is resolved, the commit's tree loaded and told as `Metadata`.
2. `prepare_local_plan`: plans pass, with the commit that they were made for.
   `prepare_global_plan` on the coordinator: its own commit goes out to all, so that all ranks
   read one commit also when the branch moves meanwhile.
3. `read_data`: items are held against the destinations (dtype, memory, every element covered), values
   are decoded, then all boxes are verified, then copied into place.

Invariant: no destination is touched before all that this rank wants was read and verified.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.refs import UNKNOWN_HEAD, Head
from cas_ckpt.core.tree import tensor_chunks
from cas_ckpt.dcp.storage.catalog import Catalog, check_same
from cas_ckpt.dcp.storage.group import RepositoryPlace
from cas_ckpt.errors import CkptError, CorruptionError, InternalError, InvalidInputError, MismatchError, NotFoundError
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.objects.pack import Location
from cas_ckpt.objects.spec import Box, raw_dtype
from cas_ckpt.objects.state import ArrayTarget, StoredTensor
from cas_ckpt.training.capture.tensors import new_tensor, target_of, torch_dtype, wait_for_devices
from cas_ckpt.training.restore.draft import Written, overlap_faults
from cas_ckpt.training.restore.memory import ReadOnlyMemory, memory_of_tensor
from cas_ckpt.transfer.chunk_reader import ChunkReader, VerifiedExtent, leaves_touched
from cas_ckpt.transfer.fetch import named, nothing, order_by_place
from cas_ckpt.transfer.hashing import Array, as_raw, flat_bytes
from cas_ckpt.transfer.workers import run_all, thread_count

# DOC of cas_ckpt.dcp.storage.reader:
# Which part of a box no other box covers.
#
# DCP never asks this of a load: a destination that its plan covers in part keeps old values in
# the rest. Pure.
#


def uncovered(whole: Box, parts: Iterable[Box]) -> Box | None:
    """Some box of `whole` that none of `parts` touches; None if they cover it."""
    left = [whole] if whole.num_elements else []
    for part in parts:
        left = [rest for box in left for rest in box.without(part)]
        if not left:
            return None
    return left[0] if left else None


# DOC of cas_ckpt.dcp.storage.reader:
# Reads boxes of stored tensors into memory: what one rank of DCP asks for.
#
#     1. Cut every wanted box by the tensor's grid; group by chunk, so that each is read once.
#     2. Verify: whole chunks where most of a chunk is wanted, else only the leaves it touches.
#     3. Fill the targets.
#
# Invariant: no target is touched before everything was verified; memory is one chunk a thread.
#

WHOLE_SHARE = 0.5
"""From this share of a chunk's bytes on, all of it is read in one run."""


@dataclass(frozen=True, slots=True)
class BoxRead:
    """A box of a stored tensor and where it goes to.

    Attributes:
        box: In the stored tensor, elements; not empty.
        target: Memory of exactly that box; its own coordinates begin at 0.
    """

    key: str
    stored: StoredTensor
    box: Box
    target: ArrayTarget


@dataclass(frozen=True, slots=True)
class _Part:
    """What one box wants of one cell.

    Attributes:
        cell: Sizes of the cell. part: The wanted part of it. place: The same in the target.
    """

    read: BoxRead
    cell: tuple[int, ...]
    part: Box
    place: Box

    @property
    def is_whole(self) -> bool:
        """Whether the whole cell is wanted."""
        return self.part.sizes == self.cell


@dataclass(slots=True)
class _Chunk:
    """A chunk and all that is wanted of it."""

    digest: Digest
    num_bytes: int
    parts: list[_Part] = field(default_factory=list)
    places: Sequence[Location] = ()
    extents: list[VerifiedExtent] = field(default_factory=list)

    @property
    def key(self) -> str:
        """Of the first tensor that wants it, for messages."""
        return self.parts[0].read.key

    @property
    def is_whole(self) -> bool:
        """Whether all of it is read."""
        wanted = sum(part.part.num_elements * part.read.stored.spec.item_bytes for part in self.parts)
        return wanted >= WHOLE_SHARE * self.num_bytes

    def leaves(self, leaf_bytes: int) -> list[int]:
        """The leaves that are wanted, ascending."""
        found: set[int] = set()
        for part in self.parts:
            item_bytes = part.read.stored.spec.item_bytes
            found.update(leaves_touched(part.cell, part.part, item_bytes=item_bytes, leaf_bytes=leaf_bytes))
        return sorted(found)


def fetch_boxes(
    handle: RepositoryHandle,
    reads: Sequence[BoxRead],
    *,
    num_threads: int | None = None,
    on_verified: Callable[[], object] = nothing,
) -> None:
    """Fill the targets of all reads.

    Args:
        on_verified: Called when everything is verified, before the first target is touched.
    Raises:
        CorruptionError, NotFoundError: naming the tensor; no target was touched.
    """
    chunks = _plan(handle, [read for read in reads if read.stored.inline is None])
    threads = thread_count(num_threads)
    run_all(chunks, lambda: _verifier(handle), num_threads=threads)
    on_verified()
    run_all(chunks, lambda: _filler(handle), num_threads=threads)
    for read in reads:
        if read.stored.inline is not None:
            _fill_inline(read, read.stored.inline)


def _plan(handle: RepositoryHandle, reads: Sequence[BoxRead]) -> list[_Chunk]:
    chunks: dict[Digest, _Chunk] = {}
    for read, (grid, digests) in zip(reads, tensor_chunks(handle, [read.stored for read in reads]), strict=True):
        item_bytes = read.stored.spec.item_bytes
        for number in grid.cells_touching(read.box):
            cell = grid.box(number)
            common = cell.intersect(read.box) if cell.sizes else cell
            if common is None:
                raise InternalError(f"{read.key}: cell {number} does not touch {read.box}")
            num_bytes = cell.num_elements * item_bytes
            chunk = chunks.setdefault(digests[number], _Chunk(digests[number], num_bytes))
            if chunk.num_bytes != num_bytes:
                raise CorruptionError(
                    f"{read.key}: cell {number} has {num_bytes} bytes, its chunk {short(chunk.digest)} has "
                    f"{chunk.num_bytes} elsewhere ({chunk.key}): restore an older commit"
                )
            part = _Part(read, cell.sizes, common.relative_to(cell), common.relative_to(read.box))
            chunk.parts.append(part)
    return order_by_place(chunks.values(), handle.locate(list(chunks)))


def _verifier(handle: RepositoryHandle) -> Callable[[_Chunk], None]:
    reader, space = ChunkReader(handle.store, handle.relocate), _Space()

    def verify(chunk: _Chunk) -> None:
        try:
            if chunk.is_whole:
                chunk.extents = reader.verify(chunk.digest, chunk.places, chunk.num_bytes)
            else:
                chunk.extents = _verify_leaves(reader, chunk, space.of(chunk.num_bytes))
        except CkptError as error:
            raise named(error, chunk.key) from error

    return verify


def _verify_leaves(reader: ChunkReader, chunk: _Chunk, space: Array) -> list[VerifiedExtent]:
    """Extents whose wanted leaves are intact."""

    def check(extent: VerifiedExtent) -> None:
        reader.read_leaves([extent], chunk.leaves(extent.info.leaf_bytes), space.data)

    return reader.intact(chunk.digest, chunk.places, chunk.num_bytes, check)


def _filler(handle: RepositoryHandle) -> Callable[[_Chunk], None]:
    reader, space = ChunkReader(handle.store, handle.relocate), _Space()

    def fill(chunk: _Chunk) -> None:
        try:
            try:
                _fill(reader, chunk, space)
            except NotFoundError:  # its pack was collected since it was verified: there may be a copy
                chunk.places = handle.relocate(chunk.digest, {place.pack for place in chunk.places})
                chunk.extents = reader.verify(chunk.digest, chunk.places, chunk.num_bytes)
                _fill(reader, chunk, space)
        except CkptError as error:
            raise named(error, chunk.key) from error

    return fill


def _fill(reader: ChunkReader, chunk: _Chunk, space: _Space) -> None:
    if chunk.is_whole and len(chunk.parts) == 1 and chunk.parts[0].is_whole and _fill_directly(reader, chunk):
        return
    data = space.of(chunk.num_bytes)
    if chunk.is_whole:
        reader.refill(chunk.extents, data.data)
    else:
        reader.read_leaves(chunk.extents, chunk.leaves(chunk.extents[0].info.leaf_bytes), data.data)
    for part in chunk.parts:
        item_bytes = part.read.stored.spec.item_bytes
        cell = data.view(raw_dtype(item_bytes)).reshape(part.cell)
        place = part.read.target.open(part.place)
        np.copyto(as_raw(place, item_bytes), cell[part.part.slices])
        part.read.target.done(part.place, place)


def _fill_directly(reader: ChunkReader, chunk: _Chunk) -> bool:
    """Fill a contiguous target without a copy in between; False if it is none."""
    part = chunk.parts[0]
    place = part.read.target.open(part.place)
    raw = as_raw(place, part.read.stored.spec.item_bytes)
    if not raw.flags.c_contiguous:
        return False
    reader.refill(chunk.extents, flat_bytes(raw))
    part.read.target.done(part.place, place)
    return True


class _Space:
    """Scratch memory of one thread."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def of(self, num_bytes: int) -> Array:
        """So many bytes; what was in them before is gone."""
        if len(self._bytes) < num_bytes:
            self._bytes = np.empty(num_bytes, np.uint8)
        return self._bytes[:num_bytes]


def _fill_inline(read: BoxRead, data: bytes) -> None:
    spec = read.stored.spec
    whole = np.frombuffer(data, raw_dtype(spec.item_bytes)).reshape(spec.shape)
    place_box = Box((0,) * len(read.box.sizes), read.box.sizes)
    place = read.target.open(place_box)
    np.copyto(as_raw(place, spec.item_bytes), whole[read.box.slices])
    read.target.done(place_box, place)


class CasStorageReader(StorageReader):
    """Gives `dcp.load` what a commit holds, whoever made it, on any number of ranks.

        dcp.load(state, storage_reader=CasStorageReader("runs/ckpts", ref="main~2"))

    `checkpoint_id=` of dcp.load takes the place of `ref` in that load. Never casts silently: a destination
    of another dtype is an error unless `cast`.
    """

    def __init__(
        self,
        repository: Any,
        *,
        ref: str = "HEAD",
        cast: bool = False,
        flatten: bool = True,
        allow_pickle: bool = False,
        index_url: str | None = None,
        num_threads: int | None = None,
    ) -> None:
        """Nothing is opened yet.

        Args:
            repository: A path, a URL, or an open `Repository`, whose `head` then is what was loaded.
            ref: What to load: a branch, tag or id, `~N` and `^N` behind it.
            cast: Convert to the dtype of the destination.
            flatten: As that of the load planner: False names outermost entries only.
            allow_pickle: Unpickle values that were committed with allow_pickle.
            index_url: As for `Repository.open`.
        """
        super().__init__()
        self._place = RepositoryPlace(repository, index_url)
        self._ref = ref
        self._given: str | None = None
        self._cast = cast
        self._flatten = flatten
        self._allow_pickle = allow_pickle
        self._num_threads = num_threads
        self._catalog: Catalog | None = None
        self._rank = 0
        self._world_size = 1

    # --- what DCP calls -------------------------------------------------------------------

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it can be a revision."""
        return bool(str(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """DCP was given a `checkpoint_id` (or none): the revision of the load that follows, and of no other."""
        self._given = None if checkpoint_id is None else str(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """What DCP writes into its log."""
        return self._given or self._ref

    @property
    def commit(self) -> str | None:
        """Id of the commit that was loaded last, or None."""
        return None if self._catalog is None else self._catalog.commit

    def read_metadata(self) -> Metadata:
        """What the commit holds. (No `kwargs`: there is no metadata of single ranks to fall back to.)

        Raises:
            NotFoundError, CorruptionError.
        """
        ref = self.checkpoint_id
        try:
            with self._place.opened() as handle:
                self._catalog = self._read_catalog(handle, ref)
        except BaseException:
            self._given = None  # the next load may be given none, and means `ref` then
            raise
        return self._catalog.metadata(self._place.url)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The load begins: who asks is noted, the id that it was given is used up."""
        self._given = None
        self._rank = int(kwargs.get("rank", 0))

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """`plan`, with the commit that it was made for."""
        return replace(plan, storage_data=_Common(self.commit, 1))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans, all for the coordinator's commit."""
        return [replace(plan, storage_data=_Common(self.commit, len(plans))) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Bring everything that the plan wants into place.

        Raises:
            MismatchError: another dtype, another optimizer, destinations that overlap or are read-only, or
                elements of a destination that nothing covers.
            CorruptionError, NotFoundError: nothing was touched.
        """
        with self._place.opened() as handle:
            catalog = self._pinned(handle, plan)
            _check_optimizers(plan, planner, catalog)
            reads = [self._tensor_read(item, planner, catalog) for item in _of(plan, LoadItemType.TENSOR)]
            _check_cover(plan, planner)
            _check_memory(reads)
            values = self._values(handle, catalog, plan, planner)
            wait_for_devices({read.found.device for read in reads})
            wanted = [read.box_read for read in reads if read.box_read.box.num_elements]
            fetch_boxes(
                handle, wanted, num_threads=self._num_threads,
                on_verified=lambda: setattr(handle, "head", UNKNOWN_HEAD),
            )  # fmt: skip
            _hand_over(planner, reads, values)
            handle.head = Head(catalog.branch, catalog.commit)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    # --- one load -------------------------------------------------------------------------

    def _read_catalog(self, handle: RepositoryHandle, ref: str) -> Catalog:
        return Catalog(handle, ref, flatten=self._flatten, allow_pickle=self._allow_pickle)

    def _pinned(self, handle: RepositoryHandle, plan: LoadPlan) -> Catalog:
        """The catalog of the commit that all ranks read."""
        own = self._catalog
        if own is None:
            raise InvalidInputError("read_metadata was not called: DCP calls it for every load")
        common_id = own.commit
        if isinstance(plan.storage_data, _Common):
            self._world_size = plan.storage_data.world_size
            common_id = plan.storage_data.commit or own.commit
        if common_id == own.commit:
            return own
        common = self._read_catalog(handle, common_id)
        common.branch = own.branch
        for name in {item.storage_index.fqn for item in plan.items}:
            check_same(own, common, name)
        self._catalog = common
        return common

    def _values(
        self, handle: RepositoryHandle, catalog: Catalog, plan: LoadPlan, planner: LoadPlanner
    ) -> list[tuple[ReadItem, io.BytesIO]]:
        """What is not read as a tensor; values of other ranks are left out, so that the target keeps its own."""
        found = []
        state = planner.state_dict if isinstance(planner, DefaultLoadPlanner) else {}
        for item in _of(plan, LoadItemType.BYTE_IO):
            name = item.storage_index.fqn
            own = state.get(item.dest_index.fqn)
            stream = catalog.pickled(handle, name, rank=self._rank, world_size=self._world_size, own=own)
            if stream is not None:
                found.append((item, stream))
        return found

    def _tensor_read(self, item: ReadItem, planner: LoadPlanner, catalog: Catalog) -> _TensorRead:
        name = item.storage_index.fqn
        stored, key = catalog.tensor(name), catalog.key(name)
        if stored is None:
            raise MismatchError(f"{key}: the plan reads it as a tensor, the commit holds something else")
        box = Box(tuple(item.storage_offsets), tuple(item.lengths))
        found = planner.resolve_tensor(item).detach()
        if tuple(found.shape) != box.sizes:
            raise MismatchError(f"{key}: the destination is {tuple(found.shape)}, the plan reads {box.sizes}")
        dtype = torch_dtype(stored.spec.dtype)
        if found.dtype == dtype:
            return _TensorRead(item, found, None, BoxRead(key, stored, box, target_of(found)))
        if not self._cast:
            raise MismatchError(
                f"{key}: the destination is {found.dtype}, the commit holds {stored.spec}: "
                "give the destination that dtype, or CasStorageReader(cast=True)"
            )
        staged = new_tensor(box.sizes, dtype, torch.device("cpu"))
        return _TensorRead(item, found, staged, BoxRead(key, stored, box, target_of(staged)))


@dataclass(frozen=True, slots=True)
class _Common:
    """What the coordinator tells the ranks of a load."""

    commit: str | None
    world_size: int


@dataclass(frozen=True, slots=True)
class _TensorRead:
    """One item of a plan.

    Attributes:
        found: Where the planner wants it. staged: Memory of the stored dtype, if that is another.
    """

    item: ReadItem
    found: torch.Tensor
    staged: torch.Tensor | None
    box_read: BoxRead


def _of(plan: LoadPlan, kind: LoadItemType) -> Iterable[ReadItem]:
    return (item for item in plan.items if item.type == kind)


def _hand_over(
    planner: LoadPlanner, reads: Iterable[_TensorRead], values: Iterable[tuple[ReadItem, io.BytesIO]]
) -> None:
    for read in reads:
        if read.staged is not None:
            with torch.no_grad():
                read.found.copy_(read.staged)
        planner.commit_tensor(read.item, read.found)
    for item, stream in values:
        planner.load_bytes(item, stream)


def _check_optimizers(plan: LoadPlan, planner: LoadPlanner, catalog: Catalog) -> None:
    """See `StoredOptimizers.check`."""
    wanted = [item.storage_index.fqn for item in plan.items]
    if isinstance(planner, DefaultLoadPlanner):
        catalog.optimizers.check(planner.state_dict, wanted, partial=planner.allow_partial_load)
    else:
        catalog.optimizers.check({}, wanted, partial=True)


def _check_memory(reads: Iterable[_TensorRead]) -> None:
    """Destinations may be written, and share no memory unless they are one tensor, here and in the commit.

    Raises:
        MismatchError: names them.
    """
    read_only, written = ReadOnlyMemory(), []
    for read in reads:
        box_read, memories = read.box_read, memory_of_tensor(read.found)
        if read_only.holds(memories):
            raise MismatchError(f"{box_read.key}: the memory of the destination is mapped read-only: clone() it")
        written += [Written(memory, box_read.key, (box_read.stored, box_read.box)) for memory in memories]
    faults = overlap_faults(written)
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise MismatchError(f"{faults[0]}{more}; nothing was touched")


def _check_cover(plan: LoadPlan, planner: LoadPlanner) -> None:
    """Every element of every destination that the planner has is read by some item.

    Raises:
        MismatchError: names the destination and a region that would keep its old values.
    """
    parts: dict[MetadataIndex, list[Box]] = {}
    for item in _of(plan, LoadItemType.TENSOR):
        parts.setdefault(item.dest_index, []).append(Box(tuple(item.dest_offsets), tuple(item.lengths)))
    for index, whole in _destinations(plan, planner):
        rest = uncovered(whole, parts.get(index, ()))
        if rest is not None:
            origin = index.offset or (0,) * len(rest.offsets)
            at = [f"{a + b}:{a + b + size}" for a, b, size in zip(origin, rest.offsets, rest.sizes, strict=True)]
            raise MismatchError(
                f"{index.fqn}[{', '.join(at)}]: no stored part covers this region, it would keep its old values: "
                "load a commit that holds all of it"
            )


def _destinations(plan: LoadPlan, planner: LoadPlanner) -> Iterable[tuple[MetadataIndex, Box]]:
    """What is to be filled on this rank: index, and its box in its own coordinates."""
    planned = {item.dest_index.fqn for item in _of(plan, LoadItemType.TENSOR)}
    state = planner.state_dict if isinstance(planner, DefaultLoadPlanner) else {}
    for name in planned & state.keys():
        chunks: list[ChunkStorageMetadata] = _create_chunk_list(state[name])
        for chunk in chunks:
            sizes = tuple(chunk.sizes)
            yield MetadataIndex(name, chunk.offsets), Box((0,) * len(sizes), sizes)
