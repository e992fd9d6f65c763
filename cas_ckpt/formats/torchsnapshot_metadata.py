"""The `.snapshot_metadata` of a folder of torchsnapshot: what it says is where.

    .snapshot_metadata      JSON (since 0.1.0; YAML before that): "<rank>/<path>" -> entry, of every rank
    0/..., replicated/..., sharded/..., batched/...
                            elements of tensors, or what torch.save writes, in whole files or in ranges of them

Containers, plain values and tensors of each rank have entries of their own; what is replicated has one under rank 0;
each rank has the shards of a divided tensor that it wrote.

Invariant: what the file claims is consistent in itself: paths that lead through containers, shards without holes and
overlap, names of files that stay in the folder. Must not know what is in the data files. Knows no torch.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any
from urllib.parse import unquote

from cas_ckpt.errors import InvalidInputError, UnsupportedValueError
from cas_ckpt.formats.dcp_metadata import Place, SavedChunk, check_cover
from cas_ckpt.formats.folders import InputFile
from cas_ckpt.formats.models import check_inside, is_plain_name
from cas_ckpt.memory import python_gc_paused
from cas_ckpt.objects.spec import DTYPE_BYTES, Box, Spec
from cas_ckpt.objects.state import Name

METADATA_NAME = ".snapshot_metadata"
MAX_METADATA_BYTES = 1 << 30
"""At some 300 bytes for a tensor: more than three million."""

MAX_RANKS = 1 << 20
MAX_DEPTH = 90
RAW, TORCH_SAVE = "buffer_protocol", "torch_save"

_CONTAINERS = {"dict": "dict", "OrderedDict": "odict", "list": "list"}
_MAX_NUMBER = (1 << 63) - 1
_MAX_DIMENSIONS = 64


@dataclass(frozen=True, slots=True)
class SavedValue:
    """A plain value, which stands in the metadata."""

    value: Any


@dataclass(frozen=True, slots=True)
class SavedObject:
    """A value that torch.save wrote to a file of its own."""

    place: Place


@dataclass(frozen=True, slots=True)
class SavedPieces:
    """A tensor, and the pieces that hold it exactly once.

    Attributes:
        serializer: `RAW`: elements in C order; `TORCH_SAVE`: each piece as torch.save writes it.
        whole_files: Names of the files that hold one piece and nothing else.
    """

    spec: Spec
    chunks: tuple[SavedChunk, ...]
    serializer: str
    whole_files: frozenset[str] = frozenset()


Leaf = SavedValue | SavedObject | SavedPieces


@dataclass(slots=True, eq=False)
class SavedNode:
    """What one rank has under one path.

    Attributes:
        kind: "dict", "odict", "list"; "" of a leaf.
        names: Of a dict, by component of the path: the key itself.
        is_shared: A leaf that is one for all ranks; or a container that holds one.
    """

    kind: str = ""
    names: dict[str, Name] = field(default_factory=dict)
    children: dict[str, SavedNode] = field(default_factory=dict)
    leaf: Leaf | None = None
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotMetadata:
    """Everything that a folder holds.

    Attributes:
        ranks: By rank: what is under each key of the app state.
    """

    ranks: tuple[SavedNode, ...]

    def leaves(self) -> Iterator[Leaf]:
        """All values and tensors, each once."""
        seen: set[int] = set()
        stack = [*self.ranks]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            if node.leaf is not None and id(node.leaf) not in seen:
                seen.add(id(node.leaf))
                yield node.leaf

    def places(self) -> Iterator[Place]:
        """Where all that is in data files is."""
        for leaf in self.leaves():
            if isinstance(leaf, SavedObject):
                yield leaf.place
            elif isinstance(leaf, SavedPieces):
                yield from (chunk.place for chunk in leaf.chunks)


def is_snapshot_folder(path: str | os.PathLike[str]) -> bool:
    """Whether torchsnapshot wrote a snapshot to this folder."""
    return (FilePath(path) / METADATA_NAME).is_file()


@python_gc_paused()
def read_snapshot_metadata(folder: FilePath, *, follow_links: bool = False) -> SnapshotMetadata:
    """The metadata of a folder, checked.

    Args:
        follow_links: The file may be a link that leads out of the folder.
    Raises:
        InvalidInputError: malformed, or claims that cannot be true; names the path. UnsupportedValueError: a form of
            tensors that is not known.
    """
    path = folder / METADATA_NAME
    if not follow_links:
        check_inside(path, folder)
    file = InputFile(path)
    if file.size > MAX_METADATA_BYTES:
        raise InvalidInputError(f"{path}: {file.size} bytes, of which at most {MAX_METADATA_BYTES} are read: too many")
    try:
        top = json.loads(bytes(file.read(0, file.size)))
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(
            f"{path}: no JSON, as torchsnapshot has written since 0.1.0 ({type(error).__name__}: {str(error)[:200]}): "
            "if it is of an older version, restore it there and take it again; else fetch it again"
        ) from error
    try:
        if isinstance(top, dict) and "repository" in top:
            raise InvalidInputError(f"{path}: a snapshot of cas_ckpt itself, in the repository {top['repository']!r}")
        return _metadata(_Fields(top))
    except _OddFormError as error:
        raise InvalidInputError(f"{path}: no metadata of torchsnapshot: {error}; fetch or write it again") from error


class _OddFormError(ValueError):
    """The file does not have the form of the format."""


@dataclass(frozen=True, slots=True)
class _Fields:
    """A mapping of JSON, whose values are checked when they are asked for."""

    content: Any

    def get(self, name: str, kind: type) -> Any:
        """The value under `name`, which is of this very type."""
        value = self.content.get(name) if isinstance(self.content, dict) else None
        if type(value) is not kind:
            raise _OddFormError(f"{name} is no {kind.__name__}")
        return value

    def numbers(self, name: str) -> tuple[int, ...]:
        """A list of sizes or offsets."""
        found = self.get(name, list)
        is_good = len(found) <= _MAX_DIMENSIONS and all(
            type(each) is int and 0 <= each <= _MAX_NUMBER for each in found
        )
        if not is_good:
            raise _OddFormError(f"{name} is no list of sizes")
        return tuple(found)


def _metadata(top: _Fields) -> SnapshotMetadata:
    size = top.get("world_size", int)
    if not 0 < size <= MAX_RANKS:
        raise _OddFormError(f"a snapshot of {size} ranks")
    ranks = tuple(SavedNode("dict") for _ in range(size))
    divided: dict[str, list[SavedNode]] = {}
    for path, content in top.get("manifest", dict).items():
        rank, _, inner = path.partition("/")
        if not rank.isascii() or not rank.isdigit() or len(rank) > 9 or int(rank) >= size or not inner:
            raise _OddFormError(f"{path[:200]!r} is no path of one of {size} ranks")
        entry = _Fields(content)
        node = _placed(ranks[int(rank)], path, inner.split("/"))
        kind = entry.get("type", str)
        if kind in _CONTAINERS:
            node.kind = _CONTAINERS[kind]
            node.names = {component(_key(name)): name for name in (entry.get("keys", list) if kind != "list" else ())}
            continue
        node.leaf = _leaf(kind, entry, path)
        is_divided = kind in ("ShardedTensor", "DTensor")
        if is_divided:
            divided.setdefault(inner, []).append(node)
        if is_divided or (size > 1 and entry.content.get("replicated") is True):
            _share(ranks[int(rank)], inner.split("/"))
    for path, nodes in divided.items():
        whole = _joined(path, [node.leaf for node in nodes if isinstance(node.leaf, SavedPieces)])
        for node in nodes:
            node.leaf = whole
    for number, rank_node in enumerate(ranks):
        for key, node in rank_node.children.items():
            _check_names(node, f"{number}/{key}")
            rank_node.names[key] = unquote(key)
    return SnapshotMetadata(ranks)


def component(name: object) -> str:
    """A key of a dict as a component of a path of torchsnapshot."""
    return str(name).replace("%", "%25").replace("/", "%2F")


def _key(name: Any) -> Name:
    if type(name) is not str and type(name) is not int:
        raise _OddFormError(f"a dict with a key of type {type(name).__name__}")
    return name


def _placed(root: SavedNode, path: str, parts: list[str]) -> SavedNode:
    """The node at a path, which must not be there in another entry."""
    if len(parts) > MAX_DEPTH:
        raise InvalidInputError(f"{path[:200]}: structure deeper than {MAX_DEPTH} levels: flatten it")
    node = root
    for part in parts:
        node = node.children.setdefault(part, SavedNode())
    if node.kind or node.leaf is not None:
        raise _OddFormError(f"{path[:200]!r} stands for two entries")
    return node


def _share(root: SavedNode, parts: list[str]) -> None:
    node = root
    for part in parts:
        node = node.children[part]
        node.is_shared = True


def _check_names(node: SavedNode, path: str) -> None:
    """Refuse children of what is no container, and those that their dict does not name."""
    if node.leaf is None and not node.kind:
        raise _OddFormError(f"{path[:200]!r} leads through something that has no entry")
    if node.leaf is not None and node.children:
        raise _OddFormError(f"{path[:200]!r} has a value, and others below")
    if node.kind == "list":
        # Of what is replicated other ranks' lists have no entries.
        if any(not part.isascii() or not part.isdigit() or len(part) > 9 for part in node.children):
            raise _OddFormError(f"{path[:200]!r} is a list, and has something without a number")
        node.names = {part: int(part) for part in node.children}
    for part, child in node.children.items():
        if part not in node.names:
            raise _OddFormError(f"{path[:200]!r} has no key {part[:200]!r}")
        _check_names(child, f"{path}/{part}")


# --- entries --------------------------------------------------------------------------------


def _leaf(kind: str, entry: _Fields, path: str) -> Leaf:
    if kind == "Tensor":
        spec = Spec(_dtype(entry, path), entry.numbers("shape"))
        return _pieces(spec, [(Box((0,) * len(spec.shape), spec.shape), entry)], path)
    if kind == "ChunkedTensor":
        spec = Spec(_dtype(entry, path), entry.numbers("shape"))
        return _pieces(spec, _shards(entry, "chunks"), path)
    if kind in ("ShardedTensor", "DTensor"):
        shards = _shards(entry, "shards")
        dtype = _dtype(shards[0][1], path) if shards else "float32"
        return _pieces(Spec(dtype, ()), shards, path, is_part=True)
    if kind == "object":
        if entry.get("serializer", str) != TORCH_SAVE:
            raise UnsupportedValueError(f"{path}: an object that was written by {entry.content['serializer'][:80]!r}")
        return SavedObject(Place(_location(entry, path), 0, -1, ()))
    return SavedValue(_value(kind, entry.get("serialized_value", str), path))


def _value(kind: str, text: str, path: str) -> Any:
    try:
        if kind == "str":
            return text
        if kind == "int":
            return int(text)
        if kind == "bool":
            return {"True": True, "False": False}[text]
        if kind == "bytes":
            return base64.b64decode(text, validate=True)
        if kind == "float":
            return struct.unpack("d", base64.b64decode(text, validate=True))[0]
    except (ValueError, KeyError, struct.error, binascii.Error) as error:
        raise InvalidInputError(f"{path}: {text[:80]!r} is no {kind}: write the snapshot again") from error
    raise UnsupportedValueError(f"{path}: an entry of the type {kind[:80]!r}, which is not known")


def _shards(entry: _Fields, name: str) -> list[tuple[Box, _Fields]]:
    found = []
    for content in entry.get(name, list):
        shard = _Fields(content)
        box = Box(shard.numbers("offsets"), shard.numbers("sizes"))
        tensor = _Fields(shard.get("tensor", dict))
        if len(box.offsets) != len(box.sizes) or tensor.numbers("shape") != box.sizes:
            raise _OddFormError(f"a shard at {box.offsets} of sizes {box.sizes} whose tensor has another shape")
        found.append((box, tensor))
    return found


def _pieces(spec: Spec, boxes: list[tuple[Box, _Fields]], path: str, *, is_part: bool = False) -> SavedPieces:
    """The pieces of a tensor, or of one rank's part of it; replicas of one piece count once."""
    if not spec.fits_array:
        raise InvalidInputError(f"{path}: {spec} has no elements, and sizes that no array can have")
    serializers = {entry.get("serializer", str) for _, entry in boxes} or {RAW}
    if len(serializers) > 1 or not serializers <= {RAW, TORCH_SAVE}:
        raise UnsupportedValueError(f"{path}: a tensor that was written by {', '.join(sorted(serializers))[:200]}")
    serializer = serializers.pop()
    chunks: dict[Box, SavedChunk] = {}
    whole_files = set()
    for box, entry in boxes:
        if _dtype(entry, path) != spec.dtype:
            raise _OddFormError(f"{path[:200]!r} has pieces of several dtypes")
        if not is_part and any(at + n > size for at, n, size in zip(box.offsets, box.sizes, spec.shape, strict=True)):
            raise InvalidInputError(f"{path}: a chunk at {box.offsets} of sizes {box.sizes} is not inside {spec.shape}")
        if not box.num_elements and len(boxes) > 1:
            continue
        num_bytes = box.num_elements * DTYPE_BYTES[spec.dtype] if serializer == RAW else -1
        place, is_range = _place(entry, path, num_bytes)
        if not is_range:
            whole_files.add(place.file)
        if box.num_elements or serializer == TORCH_SAVE:
            chunks[box] = SavedChunk(box, place)
    if not is_part:
        check_cover(spec.shape, [*chunks] if serializer == RAW or spec.num_bytes else [], key=path)
    return SavedPieces(spec, tuple(chunks.values()), serializer, frozenset(whole_files))


def _joined(path: str, parts: list[SavedPieces]) -> SavedPieces:
    """The whole tensor of which the ranks have these parts."""
    chunks = {chunk.box: chunk for part in parts for chunk in part.chunks}
    kinds = {(part.spec.dtype, part.serializer) for part in parts if part.chunks}
    depths = {len(box.offsets) for box in chunks}
    if len(kinds) != 1 or len(depths) != 1:
        raise InvalidInputError(f"{path}: the ranks' parts of it do not belong together, or are empty: write it again")
    ends = [[at + n for at, n in zip(box.offsets, box.sizes, strict=True)] for box in chunks]
    (dtype, serializer), shape = kinds.pop(), tuple(map(max, zip(*ends, strict=True)))
    check_cover(shape, [*chunks], key=path)
    whole_files = frozenset[str]().union(*(part.whole_files for part in parts))
    return SavedPieces(Spec(dtype, shape), tuple(chunks.values()), serializer, whole_files)


def _dtype(entry: _Fields, path: str) -> str:
    name: str = entry.get("dtype", str).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise UnsupportedValueError(f"{path}: the dtype {name[:80]!r} is not known")
    return name


def _place(entry: _Fields, path: str, num_bytes: int) -> tuple[Place, bool]:
    """Where a tensor is, and whether it is a range of a file; -1 as length: the whole file, however long."""
    name, given = _location(entry, path), entry.content.get("byte_range")
    if given is None:
        return Place(name, 0, num_bytes, ()), False
    start, stop = (*entry.numbers("byte_range"), -1, -1)[:2]
    if stop < start or (num_bytes >= 0 and stop - start != num_bytes):
        raise InvalidInputError(f"{path}: is said to be the bytes {start} to {stop} of {name}, and has {num_bytes}")
    return Place(name, start, stop - start, ()), True


def _location(entry: _Fields, path: str) -> str:
    name: str = entry.get("location", str)
    if not all(map(is_plain_name, name.split("/"))):
        raise InvalidInputError(f"{path}: is said to be in {name[:200]!r}: wanted the name of a file in the folder")
    return name
