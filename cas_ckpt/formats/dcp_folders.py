"""Folders of torch.distributed.checkpoint: what it saved becomes the tree of a commit, and the other way round.

Import:

    1. read `.metadata`, as data; every claim is checked      (formats/dcp_metadata.py)
    2. see that all items are inside their files
    3. load the objects; nothing in them is run
    4. leave tensors where they are: a box is read from the saved chunks when it is hashed
    5. nest the items along the paths that the folder gives, else by flat key

The root is that of the commit of the nested state, except for what DCP does not save: kinds of mappings, integer keys
(they come as text), empty dicts, ties.

How a tensor is read: a saved chunk is a zip of torch.save somewhere in a file; its small pickle says how the
tensor is laid out in the zip's one storage. Boxes are read from there by offset; one that touches several chunks is
gathered. What cannot be read so (compressed streams, odd strides, other byte orders, old formats) is
decoded whole; each thread keeps the last one decoded.

Export, as torch.distributed.checkpoint itself would have written the state:

    1. load the tree; flatten it by torch's own rule: a tensor in dicts and lists is an item, any
       other value (a tuple, also one of tensors) is a pickled object
    2. plan: tensors cut into chunks of whole rows, chunks to files of limited length
    3. objects, then chunks, each as torch.save writes it; read and verified one at a time
    4. `.metadata`; then all names at once, it last                  (formats/folders.py)

Data files never take a name that is there: until the new `.metadata` has its name, a checkpoint that is replaced
(`force`) is whole.

Invariant: memory does not grow with tensors, whoever sharded them and how: it is a buffer per thread and one decoded
chunk, or one chunk of a tensor and the objects. Only bytes of an item's own place are ever read, and no code in them is
run.
"""

from __future__ import annotations

import gc
import math
import os
import pickle
import re
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import IO, Any, TypeAlias

import numpy as np
import torch
import zstandard
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
from cas_ckpt.formats.dcp_metadata import (
    DATA_SUFFIX,
    MAX_DECODED_BYTES,
    METADATA_NAME,
    FolderMetadata,
    Place,
    SavedChunk,
    SavedTensor,
    read_folder_metadata,
)
from cas_ckpt.formats.folders import FileSource, InputFile, OutputFiles, ReadScratch, most_read
from cas_ckpt.formats.models import check_inside
from cas_ckpt.formats.pickles import most_bytes, read_torch_pickle
from cas_ckpt.formats.safetensors import DEFAULT_SHARD_BYTES, ExportInfo, bands, least_export_bytes
from cas_ckpt.formats.torch_file import Saved, check_extent, is_our_byte_order, pickle_stream, save_torch, torch_members
from cas_ckpt.index.rows import CommitRow
from cas_ckpt.memory import check_memory
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.spec import Box, Spec, grid_for, raw_dtype
from cas_ckpt.objects.state import Container, Flavor, Item, Name, Path, StoredTensor, TensorItem, ValueItem, render_key
from cas_ckpt.objects.structures import Named
from cas_ckpt.objects.values import EnumValue, Opaque
from cas_ckpt.ops.checkout.checkout import arrays_in_turn, with_values
from cas_ckpt.progress import Progress, phase
from cas_ckpt.storage.store import translated
from cas_ckpt.storage.stored_zip import MAGIC, Member, Read
from cas_ckpt.training.capture.capture import MAX_DEPTH, capture_state, check_name
from cas_ckpt.training.capture.composites import COMPOSITE_KINDS
from cas_ckpt.training.capture.tensors import host_bits, spec_of, supported, torch_dtype
from cas_ckpt.training.restore.materialize import NewObjects, check_bytes
from cas_ckpt.training.torch_internals import DCP_VERSION, STORAGE_INFO, private

Array: TypeAlias = np.ndarray[Any, Any]

MAX_GAPS = 10_000
"""Places of lists that the folder says nothing about, at most."""


def folder_tree(
    folder: FilePath, *, allow_pickle: bool = False, follow_links: bool = False
) -> tuple[Container, frozenset[str]]:
    """The state that a folder holds, and the names in the folder of the files and folders that it is in.

    Its tensors are read when it is committed. Nobody may write there meanwhile.

    Needs a buffer per thread for tensors; a saved chunk that is compressed is decoded whole.
    Objects (tuples that hold tensors among them) are loaded whole.

    Args:
        follow_links: Read what symbolic links lead to outside of the folder.
    Raises:
        InvalidInputError: what is wrong with the folder, or the code that it wants to run.
        UnsupportedValueError: an entry that cannot be expressed, by its key.
    """
    metadata = read_folder_metadata(folder, follow_links=follow_links)
    files = DataFiles(folder, follow_links=follow_links)
    check_places(metadata, files)
    scratch = Scratch()
    objects = {}
    left = most_bytes(sum(place.length for place in metadata.objects.values()))  # of all that is decompressed
    for key, place in metadata.objects.items():
        what = f"{key} in {place.file}"
        data = item_bytes(files, place, left, what=what)
        left -= len(data) if place.transforms else 0
        objects[key] = Saved(data, what=what).content()
        check_extent(objects[key], place.length, what=what)
    leaves: dict[str, Item] = {}
    for name, item in capture_state(objects, allow_pickle=allow_pickle).children.items():
        leaves[str(name)] = item
    for key, tensor in metadata.tensors.items():
        leaves[key] = TensorItem(tensor.spec, ChunkedSource(tensor, files, scratch, key=key))
    tree = nested({metadata.paths.get(key, (key,)): item for key, item in leaves.items()}, count=len(leaves))
    saved = {place.file.partition("/")[0] for place in metadata.places()}
    return tree, frozenset(saved.union(path.name for path in folder.glob(f"*{DATA_SUFFIX}")))


# --- structure ------------------------------------------------------------------------------


def nested(leaves: Mapping[Path, Item], *, count: int) -> Container:
    """`leaves` in dicts and lists: a name of text is a key of a dict, a number a place in a list.

    Args:
        count: Leaves there should be: fewer means that two had one path.
    Raises:
        InvalidInputError: paths that cannot all be there.
    """
    if len(leaves) != count:
        raise InvalidInputError("two keys have one path: the checkpoint was saved wrong; save it again")
    root: dict[Name, Any] = {}
    for path, leaf in leaves.items():
        if len(path) > MAX_DEPTH:
            raise InvalidInputError(f"{render_key(path[:8])}: structure deeper than {MAX_DEPTH} levels: flatten it")
        place = root
        for depth, name in enumerate(path[:-1]):
            place = place.setdefault(check_name(name, path[:depth]), {})
            if type(place) is not dict:
                raise _conflict(path)
        if place.setdefault(check_name(path[-1], path[:-1]), leaf) is not leaf:
            raise _conflict(path)
    if any(type(name) is not str for name in root):
        raise InvalidInputError("the first name of a path is a number: save the checkpoint again")
    return Container("dict", {name: _item(child, (name,)) for name, child in root.items()})


def _item(place: Any, path: Path) -> Item:
    if type(place) is not dict:
        leaf: Item = place
        return leaf
    children = {name: _item(child, (*path, name)) for name, child in place.items()}
    kinds = {type(name) for name in children}
    if kinds == {int}:
        return _list(children, path)
    if kinds != {str}:
        raise _conflict(path)
    return Container("dict", children)


def _list(children: Mapping[Name, Item], path: Path) -> Item:
    """A list as capture has it. DCP leaves gaps where empty dicts were."""
    numbers = [name for name in children if type(name) is int]
    length = max(numbers) + 1
    if min(numbers) < 0 or length - len(numbers) > MAX_GAPS:
        raise InvalidInputError(f"{render_key(path)}: a list of {length} of which only {len(numbers)} places are saved")
    items = [children.get(number) or Container("dict", {}) for number in range(length)]
    values = [item.value for item in items if isinstance(item, ValueItem)]
    return ValueItem(values) if len(values) == length else Container("list", dict(enumerate(items)))


def _conflict(path: Path) -> InvalidInputError:
    return InvalidInputError(
        f"{render_key(path)}: another key has the same path or one above it: save the checkpoint again"
    )


# --- data files, and items read whole --------------------------------------------------------

_MAX_OPEN_FILES = 128
_ZSTD = ("stream.zstd", "1")
_PART_BYTES = 1 << 20


class DataFiles:
    """The data files of a folder; a limited number is open at a time. May be shared by threads."""

    def __init__(self, folder: FilePath, *, follow_links: bool = False) -> None:
        self.folder = folder
        self.follow_links = follow_links
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._open: OrderedDict[str, InputFile] = OrderedDict()

    def get(self, name: str) -> InputFile:
        """The file, open as long as the answer lives.

        Raises:
            InvalidInputError: it is not there, or no longer as long as it was; or it is a link that leads out of
                the folder, unless links are followed.
        """
        with self._lock:
            file = self._open.get(name)
            if file is None:
                file = self._open[name] = self._opened(name)
            self._open.move_to_end(name)
            if len(self._open) > _MAX_OPEN_FILES:
                self._open.popitem(last=False)
            return file

    def _opened(self, name: str) -> InputFile:
        if not self.follow_links:
            check_inside(self.folder / name, self.folder)
        file = InputFile(self.folder / name)
        if self._sizes.setdefault(name, file.size) != file.size:
            raise InvalidInputError(f"{file.path}: was changed meanwhile: import it again when nobody writes")
        return file


def check_places(metadata: FolderMetadata, files: DataFiles) -> None:
    """Refuse items that are not inside their files, or that share bytes.

    Raises:
        InvalidInputError: names the file.
    """
    by_file: dict[str, list[tuple[int, int]]] = {}
    for place in metadata.places():
        by_file.setdefault(place.file, []).append((place.offset, place.offset + place.length))
    for name, ranges in sorted(by_file.items()):
        size, end = files.get(name).size, 0
        for start, stop in sorted(ranges):
            if start < end:
                raise InvalidInputError(f"{name}: two items are said to share bytes from {start} on: write it again")
            if stop > size:
                raise InvalidInputError(f"{name}: an item ends at byte {stop} of {size}: truncated; fetch it again")
            end = stop


def item_bytes(files: DataFiles, place: Place, limit: int, *, what: str) -> bytearray:
    """The bytes that torch.save wrote at `place`; at most `limit`, if they have to be decompressed.

    Raises:
        UnsupportedValueError: a compression that is not known.
        InvalidInputError: too long, or malformed.
    """
    if place.length > MAX_DECODED_BYTES:
        raise InvalidInputError(f"{what}: {place.length} bytes to be decoded at once: too long to be an object")
    data = files.get(place.file).read(place.offset, place.length)
    for transform in place.transforms:
        if tuple(transform.partition("/")[::2]) != _ZSTD:
            raise UnsupportedValueError(f"{what}: written through {transform[:80]!r}, of which only zstd is known")
        most = min(limit, MAX_DECODED_BYTES)
        encoded, data = data, bytearray()
        try:
            with zstandard.ZstdDecompressor().stream_reader(encoded, read_across_frames=True) as decoded:
                while len(data) <= most and (part := decoded.read(_PART_BYTES)):
                    data += part
        except zstandard.ZstdError as error:
            raise InvalidInputError(f"{what}: no zstd stream can be read there: {error}; fetch it again") from error
        if len(data) > most:
            raise InvalidInputError(f"{what}: decompresses to more than {most} bytes: it should be less")
    if not data:
        raise InvalidInputError(f"{what}: nothing is there: fetch or write it again")
    return data


# --- tensors, box by box ---------------------------------------------------------------------

_MAX_PICKLE_BYTES = 1 << 20
"""Of a chunk that is read by offset."""
_MOST_FRAME_BYTES = 1 << 20
"""Bytes that torch.save puts around a tensor, at most."""


class Scratch:
    """Memory that each thread keeps between two reads of one import."""

    def __init__(self) -> None:
        self.bytes = ReadScratch()
        self._decoded = threading.local()

    def decoded(self, item: SavedArray) -> Array:
        """All elements of an item that cannot be read by offset."""
        kept: tuple[SavedArray, Array] | None = getattr(self._decoded, "kept", None)
        if kept is None or kept[0] is not item:
            self._decoded.kept = kept = None  # two of them need not be in memory at once
            kept = self._decoded.kept = (item, item.decode())
        return kept[1]


class ChunkedSource:
    """A tensor that is stored in saved chunks; an `ArraySource` of global boxes."""

    __slots__ = ("_axis", "_chunks", "_reach", "_scratch", "_starts", "spec")

    def __init__(self, tensor: SavedTensor, files: DataFiles, scratch: Scratch, *, key: str) -> None:
        self.spec, self._scratch = tensor.spec, scratch
        # Chunks are looked up along the axis that is cut most; none is longer than `reach` there.
        boxes = [chunk.box for chunk in tensor.chunks]
        axes = range(len(tensor.spec.shape))
        self._axis = axis = max(axes, key=lambda at: len({box.offsets[at] for box in boxes}), default=0)
        ordered = sorted(tensor.chunks, key=lambda chunk: chunk.box.offsets[axis]) if axes else tensor.chunks
        self._chunks = [SavedArray(chunk, tensor.spec.dtype, files, key=key) for chunk in ordered]
        self._starts = [chunk.box.offsets[axis] for chunk in ordered] if axes else []
        self._reach = max((box.sizes[axis] for box in boxes), default=0) if axes else 0

    @property
    def read_bytes(self) -> int:
        """Most memory that a thread holds: of the saved chunk that takes most, and of a box that touches several."""
        sizes = grid_for(self.spec).box(0).sizes
        joined = math.prod(sizes) * self.spec.item_bytes if len(self._chunks) > 1 else 0
        return joined + max((chunk.read_bytes(sizes) for chunk in self._chunks), default=0)

    def read(self, box: Box) -> Array:
        """The elements of `box`: a view where one chunk holds it."""
        raw = raw_dtype(self.spec.item_bytes)
        if not box.num_elements:
            return np.empty(box.sizes, raw)
        touched = list(self._touching(box))
        if len(touched) == 1:
            chunk, part = touched[0]
            return chunk.read(part.relative_to(chunk.box), self._scratch)
        array = np.empty(box.sizes, raw)
        for chunk, part in touched:
            array[part.relative_to(box).slices] = chunk.read(part.relative_to(chunk.box), self._scratch)
        return array

    def _touching(self, box: Box) -> Iterator[tuple[SavedArray, Box]]:
        if not self._starts:
            yield self._chunks[0], box
            return
        start, size = box.offsets[self._axis], box.sizes[self._axis]
        first = bisect_right(self._starts, start - self._reach)
        for chunk in self._chunks[first : bisect_left(self._starts, start + size)]:
            part = chunk.box.intersect(box)
            if part is not None:
                yield chunk, part


class SavedArray:
    """One saved chunk of a tensor. May be shared by threads."""

    __slots__ = ("_files", "_is_known", "_layout", "_place", "box", "spec", "what")

    def __init__(self, chunk: SavedChunk, dtype: str, files: DataFiles, *, key: str) -> None:
        self.box = chunk.box
        self.spec = Spec(dtype, chunk.box.sizes)
        self.what = f"{key} in {chunk.place.file}"
        self._place, self._files = chunk.place, files
        self._is_known = False
        self._layout: tuple[int, tuple[int, ...]] | None = None

    def read(self, box: Box, scratch: Scratch) -> Array:
        """The elements of `box`, in the chunk's own coordinates; valid until the thread reads again.

        Raises:
            InvalidInputError: not the tensor that the metadata describes.
        """
        layout = self._known_layout()
        if layout is None:
            return scratch.decoded(self)[box.slices]
        offset, order = layout
        spec = Spec(self.spec.dtype, tuple(self.spec.shape[axis] for axis in order))
        source = FileSource(self._files.get(self._place.file), offset, spec, scratch.bytes)
        permuted = Box(tuple(box.offsets[axis] for axis in order), tuple(box.sizes[axis] for axis in order))
        return source.read(permuted).transpose([order.index(axis) for axis in range(len(order))])

    def read_bytes(self, sizes: tuple[int, ...]) -> int:
        """Memory of a thread that reads boxes nowhere longer than `sizes`. Raises as `read`."""
        layout = self._known_layout()
        if layout is None:  # as it is in the file and, of what it was decoded to, another copy
            return 2 * max(self._place.length, self.spec.num_bytes + _MOST_FRAME_BYTES)
        shape = self.spec.shape
        parts = [(shape[axis], min(shape[axis], sizes[axis])) for axis in layout[1]]
        return most_read(tuple(whole for whole, _ in parts), tuple(part for _, part in parts), self.spec.item_bytes)

    def _known_layout(self) -> tuple[int, tuple[int, ...]] | None:
        if not self._is_known:  # threads may race: all find the same
            self._layout = self._find()
            self._is_known = True
        return self._layout

    def decode(self) -> Array:
        """All elements, by way of torch."""
        most = self.spec.num_bytes + _MOST_FRAME_BYTES
        tensor = Saved(item_bytes(self._files, self._place, most, what=self.what), what=self.what).content()
        if not isinstance(tensor, torch.Tensor):
            raise InvalidInputError(f"{self.what}: a {type(tensor).__name__} where a tensor should be: write it again")
        plain = supported(tensor, (self.what,)).detach()
        if plain.layout != torch.strided or plain.is_quantized:
            raise UnsupportedValueError(f"{self.what}: a sparse or quantized tensor: save its parts as plain tensors")
        self._check(spec_of(plain))
        return host_bits(plain.resolve_conj().resolve_neg())

    def _check(self, found: Spec) -> None:
        if found != self.spec:
            raise InvalidInputError(f"{self.what}: holds {found}, the metadata says {self.spec}: write it again")

    def _find(self) -> tuple[int, tuple[int, ...]] | None:
        """The offset of its first element in the file, and the order of axes in which it is laid out there in C order.

        None: it has to be decoded whole.
        """
        place = self._place
        if place.transforms:
            return None
        file = self._files.get(place.file)

        def read(at: int, size: int) -> bytearray:
            return file.read(place.offset + at, size)

        if bytes(read(0, min(place.length, len(MAGIC)))) != MAGIC:
            return None
        members = torch_members(read, place.length, what=self.what)
        found = _described(members, read, self.what)
        if found is None or not is_our_byte_order(members, read, what=self.what):
            return None
        tensor, key = found
        self._check(spec_of(tensor))
        start, size, _ = members.get(f"data/{key}", (0, 0, 0))
        first, stride = tensor.storage_offset(), tensor.stride()
        last = first + sum((length - 1) * step for length, step in zip(tensor.shape, stride, strict=True))
        if (last + 1) * self.spec.item_bytes > size:
            raise InvalidInputError(f"{self.what}: its storage is too short for {self.spec}: fetch or write it again")
        order = _dense_order(tuple(tensor.shape), stride)
        return None if order is None else (place.offset + start + int(first) * self.spec.item_bytes, order)


def _described(members: Mapping[str, Member], read: Read, what: str) -> tuple[torch.Tensor, str] | None:
    """A tensor as it lies in its storage, without the bytes, and the key of that; None: only torch can read it."""
    if members["data.pkl"].size > _MAX_PICKLE_BYTES:
        return None
    keys: list[str] = []

    def no_bytes(key: str, dtype: torch.dtype, count: int) -> torch.UntypedStorage:
        keys.append(key)
        return torch.UntypedStorage(count * dtype.itemsize, device="meta")  # type: ignore[no-untyped-call]

    try:
        stream = pickle_stream(members, read, what=what)
        found = read_torch_pickle(stream, no_bytes, file_bytes=stream.getbuffer().nbytes, what=what)
    except InvalidInputError:
        return None  # `decode` judges it
    is_plain = type(found) in (torch.Tensor, torch.nn.Parameter) and found.layout is torch.strided and len(keys) == 1
    return (found, keys[0]) if is_plain and not (found.is_quantized or found.is_conj() or found.is_neg()) else None


def _dense_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """The order of axes in which the elements follow one another, or None: there are gaps."""
    order = sorted(range(len(shape)), key=lambda axis: (shape[axis] != 1, -stride[axis], axis))
    step = 1
    for axis in reversed(order):
        if shape[axis] != 1 and stride[axis] != step:
            return None
        step *= shape[axis]
    return tuple(order)


# --- export: plan ------------------------------------------------------------------------------

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
    keys: str | Sequence[str] | None, force: bool, progress: Progress,
) -> ExportInfo:  # fmt: skip
    """Write the state of a commit to the folder `path`, for dcp.load and everything that builds on it.

    What dcp.save loses is lost here too: kinds of mappings, integer keys (they become text),
    empty dicts, ties.

    Args:
        max_shard_bytes: Tensor bytes of a file, about and at most; 5 GB by default.
        force: Take the place of a checkpoint that is there.
    Raises:
        UnsupportedValueError: an entry that DCP cannot hold, or two of one flat key; by its key.
        InvalidInputError: a bad limit. NotFoundError: a pattern matches nothing.
        ConflictError: a checkpoint is there already. CorruptionError, StorageError.
    Nothing is left at `path` then.
    """
    check_memory(least_export_bytes(2 * CHUNK_BYTES), "an export as a DCP folder")
    place = FilePath(path)
    content = _collect(handle, select(load_tree(handle, Digest(row.root)), KeyPatterns(keys)))
    files = _plan(content.tensors, DEFAULT_SHARD_BYTES if max_shard_bytes is None else max_shard_bytes)
    old, names = _names(place, len(files), force=force)
    metadata = Metadata({}, content.paths, {}, StorageMeta(save_id=row.digest.hex()), private(DCP_VERSION))
    total_bytes = sum(tensor.spec.num_bytes for tensor in content.tensors.values())
    with phase(progress, "writing", total_bytes), OutputFiles(place, [*names, METADATA_NAME], force=force) as output:
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
    for unnamed in old:
        with suppress(OSError):  # nothing names it any more: one that stays does no harm
            unnamed.unlink()
    return ExportInfo(tuple(str(place / name) for name in (*names, METADATA_NAME)), len(content.tensors), total_bytes)


# --- export: what becomes an item -------------------------------------------------------------------


def _collect(handle: RepositoryHandle, tree: Container) -> _Content:
    decoded = with_values(handle, tree)
    _check_tensors(decoded, ())
    content = _Content()
    for path, entry in flat_entries(decoded):
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
        return
    value = value.value if isinstance(value, ValueItem) else value
    if isinstance(value, (Opaque, EnumValue, Named)):
        raise UnsupportedValueError(f"{render_key(path)}: a value of a class that is not known here: import its module")
    if isinstance(value, (list, tuple, set, frozenset, Mapping)):
        for part in value.values() if isinstance(value, Mapping) else value:
            _check_object(part, path)


# --- export: what goes where ------------------------------------------------------------------------


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


# --- export: writing --------------------------------------------------------------------------------


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
