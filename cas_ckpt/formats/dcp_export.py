"""export as a DCP folder: what torch.distributed.checkpoint itself would have written of the state.

    1. load the tree; flatten it by torch's own rule: a tensor in dicts and lists is an item, any
       other value (a tuple, also one of tensors) is a pickled object
    2. plan: tensors cut into chunks of whole rows, chunks to files of limited length
    3. objects, then chunks, each as torch.save writes it; read and verified one at a time
    4. `.metadata`; then all names at once, it last                  (formats/folders.py)

Data files never take a name that is there: until the new `.metadata` has its name, a checkpoint
that is replaced (`force`) is whole.

Invariant: memory is one chunk of a tensor, and the objects. Must not know how it is read back.
"""

from __future__ import annotations

import gc
import os
import pickle
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import IO, Any

import numpy as np
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
from cas_ckpt.core.tree import load_tree, select
from cas_ckpt.dcp.names import flat_entries, is_plain_tensor, stored_object
from cas_ckpt.errors import InvalidInputError, UnsupportedValueError
from cas_ckpt.formats.dcp_metadata import DATA_SUFFIX, METADATA_NAME
from cas_ckpt.formats.folders import OutputFiles
from cas_ckpt.formats.pickles import Items, is_written
from cas_ckpt.formats.safetensors import (
    DEFAULT_SHARD_BYTES,
    NOTHING_BESIDE,
    Beside,
    ExportInfo,
    bands,
    check_side_files,
    least_export_bytes,
)
from cas_ckpt.formats.torch_file import save_torch
from cas_ckpt.index.rows import CommitRow
from cas_ckpt.memory import check_memory
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.spec import Box
from cas_ckpt.objects.state import Container, Flavor, Item, Path, StoredTensor, ValueItem, render_key
from cas_ckpt.objects.structures import Named
from cas_ckpt.objects.values import EnumValue, Opaque
from cas_ckpt.ops.checkout.checkout import arrays_in_turn, with_values
from cas_ckpt.progress import Progress, phase
from cas_ckpt.storage.store import translated
from cas_ckpt.training.capture.composites import COMPOSITE_KINDS
from cas_ckpt.training.capture.tensors import torch_dtype
from cas_ckpt.training.restore.materialize import NewObjects, check_bytes
from cas_ckpt.training.torch_internals import DCP_VERSION, STORAGE_INFO, private

CHUNK_BYTES = 64 * 1024 * 1024
"""A larger tensor is saved in chunks of whole rows, each of about so many bytes at most."""

MIN_CHUNK_BYTES = 64 * 1024
"""Chunks are not made smaller than this, however small the files are to be."""

_FRAME_BYTES = 2048
"""About what torch.save puts around a tensor."""

_SAVE_KEEPS = torch.__version__ < "2.10"
"""torch.save leaves a cycle that holds what was saved, until Python looks for cycles."""

_UNLOADABLE = re.compile(r"u?int[1-7]|q.*")
"""Dtypes that torch saves and does not load again."""

_DATA_NAME = re.compile(rf"__\d{{1,9}}_(\d{{1,9}}){re.escape(DATA_SUFFIX)}")


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Part number `number` of the tensor `key`."""

    key: str
    number: int
    box: Box


@dataclass(slots=True)
class _Content:
    """The entries of a commit by flat key, as DCP sorts them."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)


def export_dcp(
    handle: RepositoryHandle, row: CommitRow, path: str | os.PathLike[str], *, max_shard_bytes: int | None,
    keys: str | Sequence[str] | None, force: bool, progress: Progress, tree: Container | None = None,
    beside: Beside = NOTHING_BESIDE, flatten: bool = True,
) -> ExportInfo:  # fmt: skip
    """Write the state of a commit to the folder `path`, for dcp.load and everything that builds on it.

    What dcp.save loses is lost here too: kinds of mappings, integer keys (they become text),
    empty dicts, ties.

    Args:
        max_shard_bytes: Tensor bytes of a file, about and at most; 5 GB by default.
        force: Take the place of a checkpoint that is there.
        tree: The state under other names; as it is stored if None.
        beside: Entries that go into files of their own; its models are not written.
        flatten: False: each entry at the top is one tensor or one object, as planners that do not flatten have it.
    Raises:
        UnsupportedValueError: an entry that DCP cannot hold, or two of one flat key; by its key.
        InvalidInputError: a bad limit. NotFoundError: a pattern matches nothing.
        ConflictError: a checkpoint is there already. CorruptionError, StorageError.
    Nothing is left at `path` then.
    """
    check_memory(least_export_bytes(2 * CHUNK_BYTES), "an export as a DCP folder")
    place = FilePath(path)
    state = select(load_tree(handle, Digest(row.root)) if tree is None else tree, KeyPatterns(keys))
    children = {name: item for name, item in state.children.items() if name not in beside.entries}
    content = _collect(handle, replace(state, children=children), flatten=flatten)
    files = _plan(content.tensors, DEFAULT_SHARD_BYTES if max_shard_bytes is None else max_shard_bytes)
    old, names = _names(place, len(files), force=force)
    metadata = Metadata({}, content.paths, {}, StorageMeta(save_id=row.digest.hex()), private(DCP_VERSION))
    total_bytes = sum(tensor.spec.num_bytes for tensor in content.tensors.values())
    check_side_files(beside.writers, [*names, METADATA_NAME])
    every = [*names, METADATA_NAME, *beside.writers]  # by the last ones frameworks tell that a folder is whole
    with phase(progress, "writing", total_bytes), OutputFiles(place, every, force=force) as output:
        objects = content.objects  # all of them go to the first file
        for name, chunks in zip(names, files, strict=True):
            with output.open(name) as file:
                writer = _Writer(handle, file, name, metadata)
                for key, value in objects.items():
                    writer.write_object(key, value)
                wanted = ((content.paths[chunk.key], content.tensors[chunk.key], chunk.box) for chunk in chunks)
                arrays = arrays_in_turn(handle, wanted)
                for chunk, array in zip(chunks, arrays, strict=True):
                    progress.advance(writer.write_chunk(chunk, content.tensors[chunk.key], array))
            objects = {}
        with output.open(METADATA_NAME) as file:
            pickle.dump(metadata, file)  # what the format is; it is never unpickled here
        for name, write in beside.writers.items():
            with output.open(name) as file:
                write(file)
    for unnamed in old:
        with suppress(OSError):  # nothing names it any more: one that stays does no harm
            unnamed.unlink()
    return ExportInfo(tuple(str(place / name) for name in every), len(content.tensors), total_bytes)


# --- what becomes an item -------------------------------------------------------------------


def _collect(handle: RepositoryHandle, tree: Container, *, flatten: bool) -> _Content:
    decoded = with_values(handle, tree)
    _check_tensors(decoded, ())
    content = _Content()
    whole: list[tuple[Path, Any]] = [((str(name),), child) for name, child in decoded.children.items()]
    for path, entry in flat_entries(decoded) if flatten else whole:
        key = ".".join(map(str, path))
        if key in content.paths:
            raise UnsupportedValueError(f"{render_key(path)}: DCP calls it {key!r}, and another entry: leave one out")
        content.paths[key] = path
        if is_plain_tensor(entry):
            content.tensors[key] = entry
        else:
            _check_object(entry, path)
            content.objects[key] = entry
    return content


def _check_tensors(item: Item, path: Path) -> None:
    """Refuse tensors at and below `item` that DCP cannot hold."""
    if isinstance(item, StoredTensor) and item.flavor == Flavor.TORCH:
        dtype = item.spec.dtype
        if _UNLOADABLE.fullmatch(dtype):
            raise UnsupportedValueError(
                f"{render_key(path)}: torch saves {dtype} and does not load it again: convert it, or leave it out"
            )
        torch_dtype(dtype)
    elif isinstance(item, Container):
        if item.kind in COMPOSITE_KINDS:
            raise UnsupportedValueError(
                f"{render_key(path)}: a tensor of kind {item.kind} cannot go into a DCP folder: choose others by keys, "
                "or export as a torch file"
            )
        for name, child in item.children.items():
            _check_tensors(child, (*path, name))


def _check_object(value: Any, path: Path) -> None:
    """Refuse a value that others cannot load, all the way down, or whose objects do not fit into memory."""
    if isinstance(value, Container | StoredTensor):
        check_bytes(value, NewObjects())  # before anything is written
    value = value.value if isinstance(value, ValueItem) else value
    value = value.children if isinstance(value, Container) else value.items if isinstance(value, Items) else value
    if isinstance(value, Opaque) or (isinstance(value, EnumValue | Named) and not is_written(value)):
        raise UnsupportedValueError(f"{render_key(path)}: a value of a class that is not known here: import its module")
    if isinstance(value, (list, tuple, set, frozenset, Mapping)):
        for part in value.values() if isinstance(value, Mapping) else value:
            _check_object(part, path)


# --- what goes where ------------------------------------------------------------------------


def _plan(tensors: Mapping[str, StoredTensor], limit: int) -> list[list[_Chunk]]:
    """Chunks in order, a new file whenever the next one does not fit; at least one file."""
    if limit < 1:
        raise InvalidInputError(f"files of {limit} bytes hold nothing: give a positive number")
    step = min(max(limit, MIN_CHUNK_BYTES), CHUNK_BYTES)
    files: list[list[_Chunk]] = [[]]
    filled = 0
    for key, stored in tensors.items():
        spec = stored.spec
        boxes = [spec.box] if spec.num_bytes <= step else bands(spec, step_bytes=step)  # one of empty tensors too
        for number, box in enumerate(boxes):
            num_bytes = box.num_elements * spec.item_bytes + _FRAME_BYTES
            if filled and filled + num_bytes > limit:
                files.append([])
                filled = 0
            files[-1].append(_Chunk(key, number, box))
            filled += num_bytes
    return files


def _names(folder: FilePath, count: int, *, force: bool) -> tuple[list[FilePath], list[str]]:
    """The data files of a checkpoint that is there, and `count` names that none of them has."""
    try:
        there = os.listdir(folder) if force and folder.is_dir() else []
    except OSError as error:
        raise translated(error, "listing", str(folder)) from error
    found = [match for match in map(_DATA_NAME.fullmatch, sorted(there)) if match]
    first = 1 + max((int(match[1]) for match in found), default=-1)
    names = [f"__0_{number}{DATA_SUFFIX}" for number in range(first, first + count)]
    return [folder / match[0] for match in found], names


# --- writing --------------------------------------------------------------------------------


class _Writer:
    """Appends items to one data file and notes them in the metadata."""

    def __init__(self, handle: RepositoryHandle, file: IO[bytes], name: str, metadata: Metadata) -> None:
        self._handle, self._file, self._name, self._metadata = handle, file, name, metadata
        self._kept_bytes = 0

    def write_object(self, key: str, value: Any) -> None:
        """A plain object, pickled by torch.save."""
        self._metadata.state_dict_metadata[key] = BytesStorageMetadata()
        self._save(stored_object(self._handle, value, (key,)), MetadataIndex(key))

    def write_chunk(self, chunk: _Chunk, stored: StoredTensor, elements: np.ndarray[Any, Any]) -> int:
        """A part of a tensor, and its elements; its length in bytes."""
        spec, box = stored.spec, chunk.box
        entry = self._metadata.state_dict_metadata.get(chunk.key)
        if not isinstance(entry, TensorStorageMetadata):
            properties = TensorProperties(dtype=torch_dtype(spec.dtype))
            entry = TensorStorageMetadata(properties, torch.Size(spec.shape), [])
            self._metadata.state_dict_metadata[chunk.key] = entry
        entry.chunks.append(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)))
        array = elements.reshape(-1).view(np.uint8)
        tensor = torch.from_numpy(array).view(torch_dtype(spec.dtype)).reshape(box.sizes)
        self._save(tensor, MetadataIndex(chunk.key, box.offsets, chunk.number))
        self._kept_bytes += array.nbytes
        if _SAVE_KEEPS and self._kept_bytes >= CHUNK_BYTES:
            self._kept_bytes = 0
            gc.collect()
        return int(array.nbytes)

    def _save(self, value: Any, index: MetadataIndex) -> None:
        start = self._file.tell()
        save_torch(value, self._file, self._name)
        self._metadata.storage_data[index] = private(STORAGE_INFO)(self._name, start, self._file.tell() - start)
