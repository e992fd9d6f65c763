"""import of a DCP folder: what torch.distributed.checkpoint saved becomes the tree of a commit.

    1. read `.metadata`, as data; every claim is checked      (formats/dcp_metadata.py)
    2. see that all items are inside their files
    3. load the objects; nothing in them is run
    4. leave tensors where they are: a box is read from the saved chunks when it is hashed
    5. nest the items along the paths that the folder gives, else by flat key

The root is that of the commit of the nested state, except for what DCP does not save: kinds of
mappings, integer keys (they come as text), empty dicts, ties.

How a tensor is read: a saved chunk is a zip of torch.save somewhere in a file; its small pickle says how the
tensor is laid out in the zip's one storage. Boxes are read from there by offset; one that touches several chunks is
gathered. What cannot be read so (compressed streams, odd strides, other byte orders, old formats) is
decoded whole; each thread keeps the last one decoded.

Invariant: memory does not grow with tensors, whoever sharded them and how: it is a buffer per thread, and one decoded
chunk. Only bytes of an item's own place are ever read, and no code in them is run. Must not know commits.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
import zstandard

from cas_ckpt.errors import InvalidInputError, UnsupportedValueError
from cas_ckpt.formats.dcp_metadata import DATA_SUFFIX, MAX_DECODED_BYTES, Place, SavedChunk, read_folder_metadata
from cas_ckpt.formats.folders import FileSource, InputFile, ReadScratch, most_read
from cas_ckpt.formats.models import check_inside
from cas_ckpt.formats.pickles import most_bytes, read_torch_pickle, storable
from cas_ckpt.formats.torch_file import Saved, check_extent, is_our_byte_order, pickle_stream, torch_members
from cas_ckpt.objects.spec import Box, Spec, grid_for, raw_dtype
from cas_ckpt.objects.state import Container, Item, Name, Path, TensorItem, ValueItem, render_key
from cas_ckpt.storage.stored_zip import MAGIC, Member, Read
from cas_ckpt.training.capture.capture import MAX_DEPTH, capture_state, check_name
from cas_ckpt.training.capture.tensors import host_bits, spec_of, supported

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
    check_places(metadata.places(), files)
    scratch = Scratch()
    objects = {}
    left = most_bytes(sum(place.length for place in metadata.objects.values()))  # of all that is decompressed
    for key, place in metadata.objects.items():
        what = f"{key} in {place.file}"
        data = item_bytes(files, place, left, what=what)
        left -= len(data) if place.transforms else 0
        content = Saved(data, what=what).content()
        check_extent(content, place.length, what=what)
        objects[key] = storable(content)
    leaves: dict[str, Item] = {}
    for name, item in capture_state(objects, allow_pickle=allow_pickle).children.items():
        leaves[str(name)] = item
    for key, tensor in metadata.tensors.items():
        chunks = [SavedArray(chunk, tensor.spec.dtype, files, key=key) for chunk in tensor.chunks]
        leaves[key] = TensorItem(tensor.spec, ChunkedSource(tensor.spec, chunks, scratch))
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


def check_places(places: Iterable[Place], files: DataFiles) -> None:
    """Refuse items that are not inside their files, or that share bytes.

    Raises:
        InvalidInputError: names the file.
    """
    by_file: dict[str, list[tuple[int, int]]] = {}
    for place in places:
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
_FRAME_BYTES = 1 << 20
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


class Chunk(Protocol):
    """A saved chunk of a tensor, whose elements are read in its own coordinates."""

    @property
    def box(self) -> Box:
        """Where it is in the tensor."""
        ...

    def read(self, box: Box, scratch: Scratch, /) -> Array:
        """The elements of `box`; valid until the thread reads again."""
        ...

    def read_bytes(self, sizes: tuple[int, ...], /) -> int:
        """Memory of a thread that reads boxes nowhere longer than `sizes`."""
        ...


class ChunkedSource:
    """A tensor that is stored in saved chunks; an `ArraySource` of global boxes."""

    __slots__ = ("_axis", "_chunks", "_reach", "_scratch", "_starts", "spec")

    def __init__(self, spec: Spec, chunks: Sequence[Chunk], scratch: Scratch) -> None:
        """`chunks` hold each element of a tensor of `spec` once."""
        self.spec, self._scratch = spec, scratch
        # Chunks are looked up along the axis that is cut most; none is longer than `reach` there.
        boxes = [chunk.box for chunk in chunks]
        axes = range(len(spec.shape))
        self._axis = axis = max(axes, key=lambda at: len({box.offsets[at] for box in boxes}), default=0)
        self._chunks = sorted(chunks, key=lambda chunk: chunk.box.offsets[axis]) if axes else [*chunks]
        self._starts = [chunk.box.offsets[axis] for chunk in self._chunks] if axes else []
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

    def _touching(self, box: Box) -> Iterator[tuple[Chunk, Box]]:
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
            return 2 * max(self._place.length, self.spec.num_bytes + _FRAME_BYTES)
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
        most = self.spec.num_bytes + _FRAME_BYTES
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
