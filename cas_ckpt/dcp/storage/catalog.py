"""What a commit holds, in the words of DCP: `Metadata` by flat name.

Every tensor is described as one chunk that covers it: a load then plans one read for each shard that
it wants, and how the tensor is really cut is looked up when it is read. Everything else
(values, numpy arrays, tuples, sparse and quantized tensors) is described as bytes.

Invariant: nothing is unpickled here or by DCP but what was pickled a moment ago from decoded values.
"""

from __future__ import annotations

import io
import logging
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import commit_of
from cas_ckpt.core.revisions import Revision, resolve_named
from cas_ckpt.core.tree import load_tree, naming_forgotten
from cas_ckpt.dcp.storage.names import flat_items
from cas_ckpt.dcp.storage.optimizers import Entries, StoredOptimizers
from cas_ckpt.dcp.storage.writer import StoredEntry
from cas_ckpt.errors import CorruptionError, NotFoundError
from cas_ckpt.index.rows import CommitRow
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.state import RANKS, Container, Path, StoredTensor, ValueItem, render_key
from cas_ckpt.ops.checkout.checkout import fetch_tensors, with_values
from cas_ckpt.training.capture.tensors import torch_dtype
from cas_ckpt.training.per_rank import world_size_of
from cas_ckpt.training.restore.materialize import NewObjects

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
        digest, self.branch = resolve_named(handle, ref)
        row: CommitRow = commit_of(handle, digest)

        stored = load_tree(handle, Digest(row.root))
        with naming_forgotten(handle, Digest(row.root)):
            tree = with_values(handle, stored, allow_pickle=allow_pickle)
        self.commit = row.digest.hex()
        self.items: dict[str, tuple[Path, Any]] = flat_items(tree, flatten=flatten)
        self.optimizers = StoredOptimizers(self.items)

    def entry(self, name: str) -> tuple[Path, Any] | None:
        """What a target calls `name`: its path, and the item; None if there is no such thing."""
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
                about[name] = _tensor_metadata(item)
                places[MetadataIndex(name, (0,) * len(item.spec.shape))] = entry
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
            item = item.children[rank]
        stream = io.BytesIO()
        torch.save(_with_streams(stored_object(handle, item, path), own), stream)
        stream.seek(0)
        return stream


def is_plain_tensor(item: Any) -> bool:
    """Whether `item` is described to DCP as a tensor."""
    return isinstance(item, StoredTensor) and item.flavor == "torch"


def _tensor_metadata(stored: StoredTensor) -> TensorStorageMetadata:
    shape = stored.spec.shape
    whole = ChunkStorageMetadata(torch.Size((0,) * len(shape)), torch.Size(shape))
    return TensorStorageMetadata(TensorProperties(dtype=torch_dtype(stored.spec.dtype)), torch.Size(shape), [whole])


def _with_streams(value: Any, own: Any) -> Any:
    """`value` with the bytes as streams where the target has a BytesIO, also inside of its lists and tuples."""
    if isinstance(own, io.BytesIO) and isinstance(value, bytes):
        return io.BytesIO(value)
    if type(value) in (list, tuple) and type(own) is type(value) and len(own) == len(value):
        return type(value)(_with_streams(each, mine) for each, mine in zip(value, own, strict=True))
    return value


def stored_object(handle: RepositoryHandle, item: Any, path: Path) -> Any:
    """What is at `path`, new: of an item, of a list of items, or a part of a longer value."""
    if isinstance(item, ValueItem):
        return item.value
    if isinstance(item, list):  # one without tensors and mappings, which is one value to DCP
        return [stored_object(handle, each, (*path, number)) for number, each in enumerate(item)]
    if not isinstance(item, Container | StoredTensor):
        return item  # part of a longer value
    return NewObjects().filled(item, path, partial(fetch_tensors, handle))


def check_same(catalog: Catalog, other: Catalog, name: str) -> None:
    """Raise CorruptionError unless both commits hold the same kind of thing under `name`."""
    mine, theirs = catalog.tensor(name), other.tensor(name)
    if other.entry(name) is None or (mine and mine.spec) != (theirs and theirs.spec):
        raise CorruptionError(
            f"{name}: the branch moved while the ranks looked at it, and the commits {catalog.commit} and "
            f"{other.commit} differ in this entry: give CasStorageReader the id of a commit as ref"
        )
