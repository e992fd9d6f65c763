"""Files of torch.save, in and out.

In:  1. of a zip, where its members are: nothing compressed, nothing that claims bytes of others
     2. its pickle is read (pickles.py); tensors are views of the file, which is mapped
     3. what came out is measured: references that unfold into more than any memory are refused
     4. captured like live state; tensors that lie in the file are read by offset when they are
        hashed, so that memory does not grow with the file
Out: the state is loaded (verified) and given to torch.save.

Invariant: nothing in a file is run. Must not know safetensors.
"""

from __future__ import annotations

import io
import mmap
import os
import sys
import zlib
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import torch

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import LeftOut
from cas_ckpt.core.tree import select, stored_tensors
from cas_ckpt.errors import InvalidInputError, UnsupportedValueError
from cas_ckpt.formats import pickles
from cas_ckpt.formats.folders import FileSource, InputFile, OutputFiles, ReadScratch
from cas_ckpt.formats.models import MODEL, PLAIN_PICKLE, ModelFiles, placed, read_side_file, side_items
from cas_ckpt.formats.pickles import Storage, Stream, most_bytes, read_torch_pickle
from cas_ckpt.formats.safetensors import ExportInfo
from cas_ckpt.index.rows import CommitRow
from cas_ckpt.layout.key_map import KeyMap
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.state import Container, Flavor, Item, TensorItem, with_tensors
from cas_ckpt.objects.structures import Named
from cas_ckpt.ops.history.find import list_entries
from cas_ckpt.progress import Progress
from cas_ckpt.storage.store import translated
from cas_ckpt.storage.stored_zip import MAGIC, Member, Read, stored_members
from cas_ckpt.training.capture.capture import MAX_DEPTH, capture_state
from cas_ckpt.training.capture.composites import compressed_indices
from cas_ckpt.training.capture.tensors import HostTensor
from cas_ckpt.training.stateful import module_versions, set_versions
from cas_ckpt.training.torch_internals import save, sparse_parts
from cas_ckpt.training.verbs import load_state

VALUE = "value"
"""The key of the content of a file that is not a mapping."""

MAX_ENTRIES = 20_000_000
"""Entries of a file, counted as often as they are referred to."""

SMALL_BYTES = 4096
"""Smaller tensors are read where they are: they are on a page that reading the pickle touches."""

_PICKLE = "data.pkl"
"""Member of a zip of torch.save, in whose folder the others are."""

_MAGIC_NUMBER, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
"""The first two pickles of a file of torch before 1.6."""


def torch_tree(files: ModelFiles, *, allow_pickle: bool = False) -> Container:
    """The state that the files hold; tensors are read when they are asked for.

    A file that holds a mapping is that state, anything else goes under "value"; the tensors of a
    folder go under "model", its other files under "files". Memory does not grow with the file,
    except for files of torch before 1.6, and tensors that are not contiguous. The file must not be cut short meanwhile.

    Raises:
        InvalidInputError: malformed, or a pickle that wants to run code.
        UnsupportedValueError: an entry that cannot be expressed.
    """
    opened = [_Opened(file) for file in files.weights]
    content = {MODEL: _merged(files, opened)} if files.is_folder else opened[0].content
    tree = _tree(content if isinstance(content, Mapping) else {VALUE: content}, opened, allow_pickle=allow_pickle)
    return replace(tree, children={**tree.children, **side_items(files)})


def part_item(path: Path, *, allow_pickle: bool = False) -> Item | LeftOut:
    """The content of a file of torch.save beside a model, or why it cannot be taken.

    Raises:
        InvalidInputError: the file is damaged, or made to harm.
    """
    try:
        if path.name == PLAIN_PICKLE:
            data = read_side_file(path)
            content = pickles.read_pickle(data, allowed=(), what=str(path))
            check_extent(content, len(data), what=str(path))
            return capture_state({VALUE: content}).children[VALUE]
        opened = _Opened(path)
        return _tree({VALUE: opened.content}, [opened], allow_pickle=allow_pickle).children[VALUE]
    except UnsupportedValueError as error:
        return LeftOut(path.name, f"holds what no commit can hold: {error}")


def export_torch(
    handle: RepositoryHandle, row: CommitRow, path: str | os.PathLike[str], *, keys: str | Sequence[str] | None,
    force: bool, progress: Progress, key_map: KeyMap | None = None, tree: Container | None = None,
) -> ExportInfo:  # fmt: skip
    """Write the state of a commit to the file `path` with torch.save.

    The whole state is in memory meanwhile. Ties are kept.

    Args:
        key_map, tree: Other names, and the state by them; as it is stored if None.
    Raises:
        ConflictError: the file exists already. NotFoundError, CorruptionError, StorageError;
            nothing is left at `path` then.
    """
    place = Path(path)
    if tree is None:
        entries = list_entries(handle, Digest(row.root), keys=keys)
        tensors = [entry.num_bytes for entry in entries if entry.shape is not None]
    else:
        stored = stored_tensors(select(tree, KeyPatterns(keys)))
        tensors = [each.spec.num_bytes for _, each in stored if each.flavor != Flavor.VALUE]
    with OutputFiles(place.parent, [place.name], force=force) as output:
        state = load_state(handle, row.digest.hex(), keys=keys, progress=progress, key_map=key_map)
        with output.open(place.name) as file:
            save_torch(state, file, str(place))
    return ExportInfo((str(place),), len(tensors), sum(tensors))


def save_part(value: Any, file: IO[bytes], name: str) -> None:
    """Write what `part_item` reads to an open file called `name`. Raises as `save_torch`."""
    if name == PLAIN_PICKLE:
        file.write(pickles.plain_pickle(value))
    else:
        save_torch(value, file, name)


def save_torch(state: Any, file: IO[bytes], name: str) -> None:
    """torch.save to an open file; what the disk refuses is a StorageError that names it."""
    try:
        save(state, file, pickle_module=pickles)
    except OSError as error:
        raise translated(error, "writing", name) from error


# --- reading --------------------------------------------------------------------------------


class _Opened:
    """A file of torch.save and what it holds; its tensors are views of the file, which is mapped."""

    def __init__(self, path: Path) -> None:
        self.file = InputFile(path)
        if not self.file.size:
            raise InvalidInputError(f"{path}: is empty: fetch or write it again")
        # Pages that are written to are this process's own.
        mapped = mmap.mmap(self.file.fd, self.file.size, access=mmap.ACCESS_COPY)
        self.saved = Saved(mapped, what=str(path))
        self.content = self.saved.content()
        check_extent(self.content, self.file.size, what=str(path))


class Saved:
    """The bytes that torch.save wrote, in memory or mapped.

    Attributes:
        bytes: All of it.
        is_as_it_is: Tensors are views of `bytes`, unchanged.
    """

    def __init__(self, data: mmap.mmap | bytearray, *, what: str) -> None:
        """Look at it.

        Raises:
            InvalidInputError: nothing that torch writes.
        """
        self._data, self.what = data, what
        self.bytes = torch.frombuffer(data, dtype=torch.uint8).untyped_storage()
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._buffers: dict[str, tuple[int, memoryview]] = {}
        self._left = len(data)
        is_zip = data[: len(MAGIC)] == MAGIC
        self._members = torch_members(self._read, len(data), what=what) if is_zip else {}
        self.is_as_it_is = is_zip and is_our_byte_order(self._members, self._read, what=what)

    def _read(self, offset: int, length: int) -> bytes | bytearray:
        return self._data[offset : offset + length]

    def content(self) -> Any:
        """The value that was saved.

        Raises:
            InvalidInputError: malformed. UnsupportedValueError: it names what no state needs.
        """
        if not self._members:
            return self._old_content()
        return self._load(pickle_stream(self._members, self._read, what=self.what), self._in_zip)

    def _load(self, stream: Stream, storage: Storage) -> Any:
        return read_torch_pickle(stream, storage, file_bytes=len(self._data), what=self.what)

    def _in_zip(self, key: str, dtype: torch.dtype, count: int) -> torch.UntypedStorage:
        if key not in self._storages:
            start, size, _ = self._members[f"data/{key}"]
            if count * dtype.itemsize > size:
                raise ValueError(f"storage {key} has {size} bytes, fewer than {count} elements take")
            self._storages[key] = self.bytes[start : start + count * dtype.itemsize]
            if not self.is_as_it_is:
                self._storages[key].byteswap(dtype)  # type: ignore[no-untyped-call]
        return self._storages[key]

    def _old_content(self) -> Any:
        """Of torch before 1.6: pickles of a magic number, protocol, system, content and keys of the storages, these."""
        stream = self._data if isinstance(self._data, mmap.mmap) else io.BytesIO(self._data)
        found = [self._load(stream, self._in_memory) for _ in range(2)]
        if any(type(each) is not int for each in found) or found != [_MAGIC_NUMBER, _PROTOCOL]:
            raise self._no_torch("no zip, and no file of torch before 1.6")
        _, content, keys = (self._load(stream, self._in_memory) for _ in range(3))
        is_known = type(keys) is list and all(type(key) is str for key in keys)
        if not is_known or sorted(self._buffers) != sorted(keys):
            raise self._no_torch("it has other storages than its tensors need")
        for count, buffer in map(self._buffers.__getitem__, keys):
            found_count, data = int.from_bytes(stream.read(8), "little"), stream.read(buffer.nbytes)
            if found_count != count or len(data) != buffer.nbytes:
                raise self._no_torch("a storage of another length than its pickle says")
            buffer[:] = data
        return content

    def _in_memory(self, key: str, dtype: torch.dtype, count: int) -> torch.UntypedStorage:
        """A storage that is filled later; no tensor can make it longer."""
        if key not in self._storages:
            num_bytes = count * dtype.itemsize
            self._left -= num_bytes
            if self._left < 0:
                raise ValueError("storages of more bytes than the file has")
            buffer = bytearray(num_bytes + 1)
            self._buffers[key] = count, memoryview(buffer)[:num_bytes]
            self._storages[key] = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()[:num_bytes]
        return self._storages[key]

    def _no_torch(self, reason: str) -> InvalidInputError:
        return InvalidInputError(f"{self.what}: nothing that torch.save writes: {reason}; fetch or write it again")


def _tree(state: Mapping[str, Any], opened: Sequence[_Opened], *, allow_pickle: bool) -> Container:
    """`state`, which is made of what the files hold, as a tree."""
    return read_by_offset(capture_state(state, allow_pickle=allow_pickle), opened)


def _merged(files: ModelFiles, opened: Sequence[_Opened]) -> dict[str, Any]:
    """The tensors of all shards, checked against the index, with the versions of their modules."""
    model: dict[str, Any] = {}
    versions: dict[str, int] | None = None
    for part in opened:
        content = part.content
        if not isinstance(content, Mapping):
            what = type(content).__name__
            raise InvalidInputError(f"{part.file.path}: holds a {what}, wanted a mapping of names to tensors")
        model |= content
        told = module_versions(content)
        if told is not None:
            versions = {**(versions or {}), **told}
    placed(files, ((part.file.path, part.content) for part in opened))
    if versions is not None:
        model = OrderedDict(model)
        set_versions(model, versions, model)
    return model


# --- tensors read by offset ------------------------------------------------------------------
# Pages of a mapping that were touched count as memory of the process until it ends or the system needs them. So a
# tensor in a mapped file is read with pread into one buffer per thread.


def read_by_offset(tree: Container, opened: Sequence[_Opened]) -> Container:
    """`tree` with the source of every tensor that is a view of one of the files replaced."""
    mapped, scratch = [each for each in opened if each.saved.is_as_it_is], ReadScratch()
    return with_tensors(tree, lambda item, _: _read_from_file(item, mapped, scratch))


def _read_from_file(item: TensorItem, mapped: Sequence[_Opened], scratch: ReadScratch) -> TensorItem:
    num_bytes = item.spec.num_bytes
    if not isinstance(item.source, HostTensor) or num_bytes < SMALL_BYTES or not item.source.tensor.is_contiguous():
        return item
    address = item.source.tensor.data_ptr()
    for each in mapped:
        offset = address - each.saved.bytes.data_ptr()
        if 0 <= offset <= each.file.size - num_bytes:
            return replace(item, source=_KeepingSource(each.file, offset, item.spec, scratch, item.source))
    return item


@dataclass(frozen=True, slots=True)
class _KeepingSource(FileSource):
    """A file source that keeps the tensor alive: what ties tensors refers to its storage."""

    kept: HostTensor


# --- checking -------------------------------------------------------------------------------


def torch_members(read: Read, num_bytes: int, *, what: str) -> dict[str, Member]:
    """The members of a zip of torch.save, without the name of the folder that all are in.

    Raises:
        InvalidInputError: no such zip.
    """
    try:
        members = stored_members(read, num_bytes)
    except ValueError as error:
        raise InvalidInputError(f"{what}: nothing that torch.save writes: {error}; fetch or write it again") from error
    pickles = [name for name in members if name.endswith(f"/{_PICKLE}")]
    if len(pickles) != 1:
        raise InvalidInputError(f"{what}: {len(pickles)} pickles in it, wanted one: not a file of torch.save")
    folder = pickles[0].removesuffix(_PICKLE)
    return {name.removeprefix(folder): member for name, member in members.items()}


def pickle_stream(members: Mapping[str, Member], read: Read, *, what: str) -> io.BytesIO:
    """The pickle in a zip of torch.save.

    Raises:
        InvalidInputError: it was changed.
    """
    start, size, crc = members[_PICKLE]
    data = read(start, size)
    if zlib.crc32(data) != crc:
        raise InvalidInputError(f"{what}: its pickle is damaged: fetch or write it again")
    return io.BytesIO(data)


def is_our_byte_order(members: Mapping[str, Member], read: Read, *, what: str) -> bool:
    """Whether the storages in a zip of torch.save hold what this machine's memory would.

    Raises:
        InvalidInputError: an order that nobody knows.
    """
    start, size, _ = members.get("byteorder", (0, 0, 0))
    order = bytes(read(start, min(size, 16))).decode("ascii", "replace") or sys.byteorder
    if order not in ("little", "big"):
        raise InvalidInputError(f"{what}: an order of bytes that nobody knows: fetch or write it again")
    return order == sys.byteorder


def check_extent(content: Any, file_bytes: int, *, what: str) -> None:
    """Refuse content of which following every reference does not end, or not before memory does.

    Raises:
        InvalidInputError: it does not.
    """
    try:
        num_entries, num_bytes = _extent(content, 0, {})
    except RecursionError as error:
        raise InvalidInputError(f"{what}: its content nests too deep to follow") from error
    if num_entries > MAX_ENTRIES or num_bytes > most_bytes(file_bytes):
        raise InvalidInputError(
            f"{what}: {file_bytes} bytes unfold into {num_entries:.3e} entries and {num_bytes:.3e} bytes: "
            "a bomb, or state that should be saved without such repetition"
        )


def _extent(value: Any, depth: int, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Entries, and bytes of tensors, arrays and texts, at and below `value`.

    What is referred to twice is visited once, counted twice. Attributes of instances have no say in it.

    Args:
        known: By id, of what was visited before.
    """
    if isinstance(value, torch.Tensor):
        return 1, sum(part.numel() * part.itemsize for part in _parts(value))
    if isinstance(value, (str, bytes, bytearray)):
        return 1, len(value)
    if isinstance(value, np.ndarray):
        return 1, value.nbytes
    if isinstance(value, (Named, Namespace, SimpleNamespace)):
        return _extent(value.fields if isinstance(value, Named) else vars(value), depth, known)
    if not isinstance(value, (dict, list, tuple, set, frozenset)):
        return 1, 0
    if depth > MAX_DEPTH:
        raise RecursionError("deeper than any state")
    if id(value) not in known:
        parts, keys = (dict.values(value), dict.keys(value)) if isinstance(value, dict) else (value, ())
        pairs = [_extent(part, depth + 1, known) for part in parts]
        key_bytes = sum(_extent(key, depth + 1, known)[1] for key in keys)
        known[id(value)] = (1 + sum(entries for entries, _ in pairs), key_bytes + sum(size for _, size in pairs))
    return known[id(value)]


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The plain tensors that it is made of."""
    if tensor.layout == torch.strided:
        return (tensor,)
    if tensor.layout == torch.sparse_coo:
        return sparse_parts(tensor)
    return *compressed_indices(tensor), tensor.values()
