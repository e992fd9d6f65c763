"""import of a folder of torchsnapshot: what its `Snapshot.take` saved becomes the tree of a commit.

    1. read `.snapshot_metadata`; every claim is checked      (formats/torchsnapshot_metadata.py)
    2. see that everything is inside its file, and that the files are as long as they should be
    3. load the objects, and the tensors that torch.save wrote; nothing in them is run
    4. leave all other tensors where they are: boxes are read when they are hashed
    5. what is one for all ranks goes under its path; what each rank had for itself is kept by rank, as `PerRank` is

Invariant: only bytes of an item's own place are read, and no code in them is run. Memory is a buffer per thread, and
what torch.save wrote (objects; complex and quantized tensors). Must not know commits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from cas_ckpt.errors import InvalidInputError, UnsupportedValueError
from cas_ckpt.formats.dcp_import import Array, ChunkedSource, DataFiles, Scratch, check_places
from cas_ckpt.formats.dcp_metadata import MAX_DECODED_BYTES, Place, SavedChunk
from cas_ckpt.formats.folders import FileSource, most_read
from cas_ckpt.formats.torch_file import Saved, check_extent
from cas_ckpt.formats.torchsnapshot_metadata import (
    RAW,
    SavedNode,
    SavedObject,
    SavedPieces,
    SavedValue,
    read_snapshot_metadata,
)
from cas_ckpt.objects.spec import Box, Spec
from cas_ckpt.objects.state import (
    ORDER,
    RANKS,
    WORLD_SIZE,
    ArraySource,
    Container,
    Item,
    Name,
    Path,
    TensorItem,
    ValueItem,
    render_key,
)
from cas_ckpt.training.capture.capture import capture_state, check_name


def snapshot_tree(
    folder: FilePath, *, allow_pickle: bool = False, follow_links: bool = False
) -> tuple[Container, frozenset[str]]:
    """The state that a folder holds, and the names in the folder of the files and folders that it is in.

    Its tensors are read when it is committed. Nobody may write there meanwhile.

    Raises:
        InvalidInputError: what is wrong with the folder, or the code that it wants to run.
        UnsupportedValueError: an entry that cannot be expressed, by its key.
    """
    metadata = read_snapshot_metadata(folder, follow_links=follow_links)
    files = DataFiles(folder, follow_links=follow_links)
    for leaf in metadata.leaves():
        for chunk in leaf.chunks if isinstance(leaf, SavedPieces) else ():
            _check_length(leaf, chunk, files)
    check_places((_whole(place, files) for place in metadata.places()), files)
    reading = _Reading(files, Scratch(), len(metadata.ranks), allow_pickle)
    tree = reading.item(dict(enumerate(metadata.ranks)), ())
    if not isinstance(tree, Container) or not tree.children:
        raise InvalidInputError(f"{folder}: a snapshot without content: take it again")
    return tree, frozenset(place.file.partition("/")[0] for place in metadata.places())


def _check_length(leaf: Any, chunk: SavedChunk, files: DataFiles) -> None:
    """Refuse a file of elements that is longer or shorter than they are: it was cut off, or is another one."""
    place = chunk.place
    if leaf.serializer == RAW and place.file in leaf.whole_files and files.get(place.file).size != place.length:
        raise InvalidInputError(
            f"{place.file}: has {files.get(place.file).size} bytes, the tensor {place.length}: truncated, or written "
            "wrong (torchsnapshot 0.1.0 lost the last bytes of bfloat16 tensors of odd length); take it again"
        )


def _whole(place: Place, files: DataFiles) -> Place:
    return Place(place.file, 0, files.get(place.file).size, ()) if place.length < 0 else place


@dataclass(frozen=True, slots=True)
class _Reading:
    """One walk over what all ranks have."""

    files: DataFiles
    scratch: Scratch
    world_size: int
    allow_pickle: bool

    def item(self, of_ranks: Mapping[int, SavedNode], path: Path) -> Item:
        """What is at `path`, which these ranks have: one for all, or each rank's own."""
        first = next(iter(of_ranks.values()))
        shared = [node for node in of_ranks.values() if node.is_shared]
        if self.world_size == 1 or (shared and shared[0].leaf is not None):
            return self._own(shared[0] if shared else first, path)
        if not shared and path:
            own: dict[Name, Item] = {rank: self._own(node, (*path, rank)) for rank, node in of_ranks.items()}
            return Container(RANKS, own, {WORLD_SIZE: self.world_size})
        below: dict[str, dict[int, SavedNode]] = {}
        for rank, node in of_ranks.items():
            for part, child in node.children.items():
                below.setdefault(part, {})[rank] = child
        names = {part: name for node in of_ranks.values() for part, name in node.names.items()}
        children = {}
        for part, name in names.items():
            if part in below:
                children[check_name(name, path)] = self.item(below[part], (*path, name))
        return _container(first.kind, children, path)

    def _own(self, node: SavedNode, path: Path) -> Item:
        """What is at and below one rank's node."""
        if isinstance(node.leaf, SavedValue):
            return ValueItem(node.leaf.value)
        if isinstance(node.leaf, SavedObject):
            return self._loaded(node.leaf.place, path)
        if node.leaf is not None:
            return self._tensor(node.leaf, path)
        children = {}
        for part, name in node.names.items():
            if part in node.children:
                children[check_name(name, path)] = self._own(node.children[part], (*path, name))
        return _container(node.kind, children, path)

    def _tensor(self, pieces: SavedPieces, path: Path) -> Item:
        spec, key = pieces.spec, render_key(path)
        if pieces.serializer != RAW:
            found = [(chunk.box, self._loaded(chunk.place, path)) for chunk in pieces.chunks]
            if len(found) == 1 and found[0][0].sizes == spec.shape:
                return found[0][1]
            parts = [
                _Piece(box, _source(item, Spec(spec.dtype, box.sizes), key), spec.item_bytes) for box, item in found
            ]
            return TensorItem(spec, ChunkedSource(spec, parts, self.scratch))
        raw = [self._elements(chunk, spec.dtype) for chunk in pieces.chunks]
        if len(raw) == 1 and raw[0].spec == spec:
            return TensorItem(spec, raw[0])
        boxes = (chunk.box for chunk in pieces.chunks)
        parts = [_Piece(box, source, spec.item_bytes) for box, source in zip(boxes, raw, strict=True)]
        return TensorItem(spec, ChunkedSource(spec, parts, self.scratch))

    def _elements(self, chunk: SavedChunk, dtype: str) -> FileSource:
        file = self.files.get(chunk.place.file)
        return FileSource(file, chunk.place.offset, Spec(dtype, chunk.box.sizes), self.scratch.bytes)

    def _loaded(self, place: Place, path: Path) -> Item:
        """What torch.save wrote there, as a commit has it."""
        place = _whole(place, self.files)
        what = f"{render_key(path)} in {place.file}"
        if place.length > MAX_DECODED_BYTES or not place.length:
            raise InvalidInputError(f"{what}: {place.length} bytes to be decoded at once: none, or too many")
        content = Saved(self.files.get(place.file).read(place.offset, place.length), what=what).content()
        check_extent(content, place.length, what=what)
        return capture_state({what: content}, allow_pickle=self.allow_pickle).children[what]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A chunk of a tensor, and what its elements are read from."""

    box: Box
    source: ArraySource
    item_bytes: int

    def read(self, box: Box, _scratch: Scratch) -> Array:
        """The elements of `box`, in the piece's own coordinates."""
        return self.source.read(box)

    def read_bytes(self, sizes: tuple[int, ...]) -> int:
        """Memory of a thread that reads boxes nowhere longer than `sizes`."""
        parts = tuple(map(min, self.box.sizes, sizes))
        return most_read(self.box.sizes, parts, self.item_bytes)


def _source(item: Item, spec: Spec, key: str) -> ArraySource:
    if not isinstance(item, TensorItem):
        raise UnsupportedValueError(f"{key}: a divided tensor that is quantized or sparse: save its parts as tensors")
    if item.spec != spec:
        raise InvalidInputError(f"{key}: a part of it holds {item.spec}, the metadata says {spec}: write it again")
    return item.source


def _container(kind: str, children: dict[Name, Item], path: Path) -> Item:
    """A container as capture has it: the state dict of an object is a dict, whatever it was; plain lists are values."""
    values = {name: child.value for name, child in children.items() if isinstance(child, ValueItem)}
    is_plain = len(values) == len(children)
    if kind == "list":
        if sorted(children) != list(range(len(children))):
            raise InvalidInputError(f"{render_key(path)}: a list of which some places are not saved: write it again")
        if is_plain:
            return ValueItem([values[number] for number in range(len(values))])
        return Container("list", {number: children[number] for number in range(len(children))})
    if kind == "odict" and len(path) > 1:
        return ValueItem(OrderedDict(values)) if is_plain else Container("odict", children, {ORDER: [*children]})
    return Container("dict", children)
