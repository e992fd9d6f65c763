"""`CasStorageReader`: torch.distributed.checkpoint loads from a repository.

How a load goes (DCP calls, on all ranks unless said otherwise):

1. `read_metadata`: the ref is resolved, the commit's tree loaded and described as `Metadata` (`Catalog`).
2. `prepare_local_plan`: plans pass, with the commit that they were made for.
   `prepare_global_plan` on the coordinator: its own commit goes out to all, so that all ranks
   read one commit also when the branch moves meanwhile.
3. `read_data`: items are held against the destinations (dtype, memory, every element covered), values
   are decoded, then all boxes are verified, then copied into place.

Every tensor is described as one chunk that covers it: a load then plans one read for each shard that it wants, and
how the tensor is really cut is looked up when it is read. Everything else (values, numpy arrays, tuples, sparse and
quantized tensors) is described as bytes.

Invariant: no destination is touched before all that this rank wants was read and verified. Nothing is unpickled here
or by DCP but what was pickled a moment ago from decoded values.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from os import PathLike
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.host_cache import AUTO
from cas_ckpt.core.records import commit_of, layout_of
from cas_ckpt.core.refs import UNKNOWN_HEAD, Head
from cas_ckpt.core.revisions import Revision, resolve_trusted
from cas_ckpt.core.tree import load_tree, naming_forgotten
from cas_ckpt.dcp.group import RepositoryPlace
from cas_ckpt.dcp.names import Entries, StoredOptimizers, flat_items, is_plain_tensor, module_states, stored_object
from cas_ckpt.dcp.writer import StoredEntry
from cas_ckpt.errors import (
    CorruptionError,
    InvalidInputError,
    MismatchError,
    NotFoundError,
    out_of_memory,
    translates_memory_errors,
)
from cas_ckpt.layout.restore_plan import region
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.layouts import LayoutObject
from cas_ckpt.objects.spec import Box
from cas_ckpt.objects.state import (
    RANKS,
    Container,
    Path,
    StoredTensor,
    TensorCopy,
    ValueItem,
    parse_key,
    render_key,
    world_size_of,
)
from cas_ckpt.ops.checkout.checkout import fetch_tensors, with_values
from cas_ckpt.training.capture.tensors import CastTarget, elements_of, torch_dtype, wait_for_devices
from cas_ckpt.training.restore.draft import ReadOnlyMemory, memory_of_tensor, overlap_faults
from cas_ckpt.training.stateful import set_versions
from cas_ckpt.training.torch_internals import CHUNK_LIST, private, save

_LOGGER = logging.getLogger("cas_ckpt")


class Catalog:
    """The entries of one commit by flat name.

    Attributes:
        commit: Its id. branch: The branch that named it, if one did.
        items: Flat name -> (path in DCP's form, item or plain value).
    """

    def __init__(self, handle: RepositoryHandle, ref: Revision, *, flatten: bool, allow_pickle: bool) -> None:
        """Loads the tree of `ref`.

        Raises:
            NotFoundError: no such commit. CorruptionError: a damaged node. MismatchError: two
                entries of one name.
        """
        digest, self.branch = resolve_trusted(handle, ref)
        row = commit_of(handle, digest)
        stored = load_tree(handle, Digest(row.root))
        with naming_forgotten(handle, Digest(row.root)):
            tree = with_values(handle, stored, allow_pickle=allow_pickle)
        self.commit, self._row = row.digest.hex(), row
        self.items: dict[str, tuple[Path, Any]] = flat_items(tree, flatten=flatten)
        self.optimizers = StoredOptimizers(self.items, tree if flatten else Container("dict", {}))
        self._layout: LayoutObject | None = None

    def layout(self, handle: RepositoryHandle) -> LayoutObject:
        """The layout of the commit (ties, versions, who held what); read when it is asked for.

        Raises:
            CorruptionError, NotFoundError.
        """
        if self._layout is None:
            with naming_forgotten(handle, Digest(self._row.root)):
                self._layout = layout_of(handle, self._row)
        return self._layout

    def entry(self, name: str) -> tuple[Path, Any] | None:
        """Path and item of the entry that a target calls `name`; None if there is none."""
        found = self.items.get(name)
        real = self.optimizers.alias(name) if found is None else None
        return found if real is None else self.items.get(real)

    def tensor(self, name: str) -> StoredTensor | None:
        """The tensor of that name; None if it is something else."""
        found = self.entry(name)
        return found[1] if found is not None and is_plain_tensor(found[1]) else None

    def key(self, name: str) -> str:
        """The name of an entry in messages."""
        found = self.entry(name)
        return name if found is None else render_key(found[0])

    def metadata(self, checkpoint_id: str) -> Metadata:
        """All entries, for a planner of DCP."""
        about: dict[str, Any] = {}
        places: dict[MetadataIndex, StoredEntry] = {}
        for name, (path, item) in self.items.items():
            entry = StoredEntry(self.commit, render_key(path))
            if is_plain_tensor(item):
                shape, dtype = torch.Size(item.spec.shape), torch_dtype(item.spec.dtype)
                whole = ChunkStorageMetadata(torch.Size((0,) * len(shape)), shape)
                about[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), shape, [whole])
                places[MetadataIndex(name, whole.offsets)] = entry
            else:
                about[name] = BytesStorageMetadata()
                places[MetadataIndex(name)] = entry
        return Metadata(
            Entries(about, self.optimizers.alias),
            planner_data={name: path for name, (path, _) in self.items.items()},
            storage_data=places,
            storage_meta=StorageMeta(checkpoint_id=checkpoint_id, save_id=self.commit),
        )

    def pickled(
        self, handle: RepositoryHandle, name: str, *, rank: int, world_size: int, own: Any = None
    ) -> io.BytesIO | None:
        """An entry that is described as bytes, as torch.save writes it: what planners expect.

        Of a value kept per rank, this rank's own; None if the commit was made by another number of ranks.

        Args:
            own: What the target has there. Where that is a BytesIO, bytes are given back as one; where it is the
                list of an optimizer's parameters, they are called as the target calls them.
        Raises:
            CorruptionError, NotFoundError.
        """
        found = self.entry(name)
        if found is None:
            raise NotFoundError(f"the commit {self.commit} has no entry {name!r}: plan the load anew")
        path, item = found
        params = self.optimizers.params(name, own)
        item = item if params is None else ValueItem(params)
        if isinstance(item, Container) and item.kind == RANKS:
            made_by = world_size_of(item, path)
            if made_by != world_size or rank not in item.children:
                _LOGGER.warning(
                    "%s is left as it is: it is kept per rank, the commit was made by %d ranks and is loaded by %d",
                    render_key(path), made_by, world_size,
                )  # fmt: skip
                return None
            item, path = item.children[rank], (*path, rank)
        stream = io.BytesIO()
        save(_with_streams(stored_object(handle, item, path, partial(self.layout, handle)), own), stream)
        stream.seek(0)
        return stream


def _with_streams(value: Any, own: Any) -> Any:
    """`value` with the bytes as streams where the target has a BytesIO, also inside of its lists and tuples."""
    if isinstance(own, io.BytesIO) and isinstance(value, bytes):
        return io.BytesIO(value)
    if type(value) in (list, tuple) and type(own) is type(value) and len(own) == len(value):
        return type(value)(_with_streams(each, mine) for each, mine in zip(value, own, strict=True))
    return value


class _Unreadable(Metadata):
    """The metadata of a commit that cannot be read: every field raises why."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def _field(self) -> NoReturn:
        raise self.error


for _each in fields(Metadata):
    setattr(_Unreadable, _each.name, property(_Unreadable._field))


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
        cache: str | PathLike[str] | None = AUTO,
    ) -> None:
        """Nothing is opened yet.

        Args:
            repository: A path, a URL, or an open `Repository`, whose `head` then is what was loaded.
            ref: What to load: a branch, tag or id, `~N` and `^N` behind it.
            cast: Convert to the dtype of the destination.
            flatten: As that of the load planner: False names outermost entries only.
            allow_pickle: Unpickle values that were committed with allow_pickle.
            index_url, cache: As for `Repository.open`.
        """
        super().__init__()
        self._place = RepositoryPlace(repository, index_url, cache)
        self._ref = ref
        self._revision_of: Callable[[str | PathLike[str]], str] = str  # of a checkpoint_id; see `CheckpointPaths`
        self._given: str | None = None
        self._cast = cast
        self._flatten = flatten
        self._allow_pickle = allow_pickle
        self._catalog: Catalog | None = None
        self._rank = 0
        self._world_size = 1

    # --- what DCP calls -------------------------------------------------------------------

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it can be a revision."""
        return bool(str(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """DCP was given a `checkpoint_id`: the revision of this load, or of the next one if this never reads."""
        self._given = None if checkpoint_id is None else self._revision_of(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """The revision that is loaded; DCP writes it into its log."""
        return self._given or self._ref

    @property
    def commit(self) -> str | None:
        """Id of the commit that was loaded last, or None."""
        return None if self._catalog is None else self._catalog.commit

    def read_metadata(self) -> Metadata:
        """Metadata of all entries. (No `kwargs`: there is no metadata of single ranks to fall back to.)

        Where that cannot be read, its attributes raise why, and so does `set_up_storage_reader`: DCP drops what this
        raises, and fails for want of metadata.
        """
        revision, self._given = self.checkpoint_id, None  # the next load may be given none, and means `ref` then
        try:
            with self._place.opened() as handle:
                self._catalog = self._read_catalog(handle, revision)
        except Exception as error:  # noqa: BLE001 - raised by whoever looks at the metadata
            return _Unreadable(out_of_memory(error) if isinstance(error, MemoryError) else error)
        return self._catalog.metadata(self._place.url)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The load begins: who asks is noted.

        Raises:
            NotFoundError, CorruptionError: of `read_metadata`.
        """
        if isinstance(metadata, _Unreadable):
            raise metadata.error
        self._rank = int(kwargs.get("rank", 0))

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """`plan`, with the commit that it was made for."""
        return replace(plan, storage_data=_Common(self.commit, 1))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans, all for the coordinator's commit."""
        return [replace(plan, storage_data=_Common(self.commit, len(plans))) for plan in plans]

    @translates_memory_errors
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Bring everything that the plan wants into place.

        Raises:
            MismatchError: another dtype, another optimizer, destinations that overlap or are read-only, or
                elements of a destination that nothing covers.
            CorruptionError, NotFoundError: nothing was touched.
        """
        with self._place.opened() as handle:
            catalog = self._pinned(handle, plan)
            stock = planner if isinstance(planner, DefaultLoadPlanner) else None
            target = {} if stock is None else stock.state_dict
            wanted = [item.storage_index.fqn for item in plan.items]
            catalog.optimizers.check(target, wanted, partial=stock is None or stock.allow_partial_load)
            reads = [self._tensor_read(item, planner, catalog) for item in _of(plan, LoadItemType.TENSOR)]
            _check_cover(plan, target)
            _check_memory(reads)
            values = self._values(handle, catalog, plan, target)
            given = {} if stock is None else stock.original_state_dict
            modules = {_start(path): state for path, state in module_states(given)}
            versions = catalog.layout(handle).versions if modules else {}
            wait_for_devices({read.found.device for read in reads})
            copies = [read.copy for read in reads if read.box.num_elements]
            fetch_tensors(handle, copies, on_verified=lambda: setattr(handle, "head", UNKNOWN_HEAD))
            for read in reads:
                planner.commit_tensor(read.item, read.found)
            for item, stream in values:
                planner.load_bytes(item, stream)
            filled = [*(read.item for read in reads), *(item for item, _ in values)] if versions else []
            _tell_versions(modules, versions, {item.dest_index.fqn for item in filled})
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
            mine, theirs = own.tensor(name), common.tensor(name)
            if common.entry(name) is None or (mine and mine.spec) != (theirs and theirs.spec):
                raise CorruptionError(
                    f"{name}: the branch moved while the ranks looked at it, and the commits {own.commit} and "
                    f"{common.commit} differ in this entry: give CasStorageReader the id of a commit as ref"
                )
        self._catalog = common
        return common

    def _values(
        self, handle: RepositoryHandle, catalog: Catalog, plan: LoadPlan, target: Mapping[str, Any]
    ) -> list[tuple[ReadItem, io.BytesIO]]:
        """Entries that are not read as tensors; without values of other ranks, so that the target keeps its own."""
        found = []
        for item in _of(plan, LoadItemType.BYTE_IO):
            name, own = item.storage_index.fqn, target.get(item.dest_index.fqn)
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
        if found.dtype != dtype and not self._cast:
            raise MismatchError(
                f"{key}: the destination is {found.dtype}, the commit holds {stored.spec}: "
                "give the destination that dtype, or CasStorageReader(cast=True)"
            )
        target = elements_of(found) if found.dtype == dtype else CastTarget(found, dtype)
        return _TensorRead(item, key, box, found, TensorCopy(parse_key(key), stored, target, box=box))


@dataclass(frozen=True, slots=True)
class _Common:
    """The message of the coordinator to the ranks of a load."""

    commit: str | None
    world_size: int


@dataclass(frozen=True, slots=True)
class _TensorRead:
    """One item of a plan.

    Attributes:
        found: Where the planner wants it.
    """

    item: ReadItem
    key: str
    box: Box
    found: torch.Tensor
    copy: TensorCopy


def _start(path: Path) -> str:
    """The prefix of DCP's names of all entries below `path`."""
    return "".join(f"{name}." for name in path)


def _tell_versions(
    modules: Mapping[str, Any], versions: Mapping[str, Mapping[str, int]], filled: Collection[str]
) -> None:
    """Say in the states of `modules`, which their modules are about to load, which versions these are from.

    Args:
        modules: By the start of DCP's names.
        versions: Of the commit, by key.
        filled: DCP's names of what was loaded: the rest of a state keeps its versions.
    """
    for key, found in versions.items():
        start = _start(parse_key(key))
        state = modules.get(start, {})
        loaded = [name for name in state if f"{start}{name}" in filled]
        if loaded:
            set_versions(state, found, loaded)


def _of(plan: LoadPlan, kind: LoadItemType) -> Iterable[ReadItem]:
    return (item for item in plan.items if item.type == kind)


def _check_memory(reads: Iterable[_TensorRead]) -> None:
    """Destinations may be written, and share no memory unless they are one tensor, here and in the commit.

    Raises:
        MismatchError: names them.
    """
    read_only, written = ReadOnlyMemory(), []
    for read in reads:
        memories = memory_of_tensor(read.found, read.key)
        if read_only.holds(memories):
            raise MismatchError(f"{read.key}: the memory of the destination is mapped read-only: clone() it")
        for memory in memories:
            memory.content = (read.copy.stored, read.box)
        written += memories
    faults = overlap_faults(written)
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise MismatchError(f"{faults[0]}{more}; nothing was touched")


def _check_cover(plan: LoadPlan, target: Mapping[str, Any]) -> None:
    """Every element of every destination in `target` is read by some item.

    Raises:
        MismatchError: names the destination and a region that would keep its old values.
    """
    parts: dict[MetadataIndex, list[Box]] = {}
    for item in _of(plan, LoadItemType.TENSOR):
        parts.setdefault(item.dest_index, []).append(Box(tuple(item.dest_offsets), tuple(item.lengths)))
    for name in {index.fqn for index in parts} & target.keys():
        chunks: list[ChunkStorageMetadata] = private(CHUNK_LIST)(target[name])
        for chunk in chunks:  # what this rank has of it, each in its own coordinates
            whole = Box((0,) * len(chunk.sizes), tuple(chunk.sizes))
            rest = whole.without(*parts.get(MetadataIndex(name, chunk.offsets), ()))
            if rest:  # of which DCP never asks
                corner = tuple(map(sum, zip(chunk.offsets, rest[0].offsets, strict=True)))
                raise MismatchError(
                    f"{name}{region(Box(corner, rest[0].sizes))}: no stored part covers this region, it "
                    "would keep its old values: load a commit that holds all of it"
                )
