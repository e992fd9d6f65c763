"""The `.metadata` of a folder of torch.distributed.checkpoint: what it says is where.

    .metadata          a pickle of Metadata: tensors and their chunks, plain objects, and for
                       each of them file, offset and length; perhaps the nested path of each key
    __R_N.distcp       the items themselves, each as torch.save writes it, one after another

Invariant: nothing in the pickle is run, and what it claims is consistent in itself: shapes,
chunks inside them, no holes, no overlap, file names that stay in the folder. Must not know
what is in the data files. Knows no torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from cas_ckpt.errors import InvalidInputError, UnsupportedValueError
from cas_ckpt.formats.folders import InputFile
from cas_ckpt.formats.models import check_inside, is_plain_name
from cas_ckpt.formats.pickles import Made, read_pickle
from cas_ckpt.memory import python_gc_paused
from cas_ckpt.objects.spec import DTYPE_BYTES, Box, Spec
from cas_ckpt.objects.state import Path
from cas_ckpt.storage.store import translated

METADATA_NAME = ".metadata"
DATA_SUFFIX = ".distcp"

MAX_REGIONS = 1 << 24
"""Regions of one tensor, at most. A tensor cut along any axes over all ranks has one per chunk."""

MAX_METADATA_BYTES = 256 * 1024 * 1024
"""At some 70 bytes for a chunk: more than a million of chunks."""

MAX_DECODED_BYTES = 4 << 30
"""An item that has to be decoded whole is at most so long."""

_MAX_DIMENSIONS = 64
_MAX_NUMBER = (1 << 63) - 1
_HOMES = ("torch.distributed.checkpoint", "torch.distributed._shard.checkpoint")
_CLASSES = (
    "metadata.Metadata", "metadata.TensorStorageMetadata", "metadata.BytesStorageMetadata", "metadata.TensorProperties",
    "metadata.ChunkStorageMetadata", "metadata.MetadataIndex", "metadata.StorageMeta", "metadata._MEM_FORMAT_ENCODING",
    "filesystem._StorageInfo",
)  # fmt: skip
_PLAN_CLASSES = (
    *(
        f"torch.distributed.checkpoint.planner.{name}"
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")
    ),
    f"{_HOMES[0]}.filesystem._StoragePrefix",
    "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan",
)
"""Of how the ranks wrote it, which Megatron keeps there (`all_local_plans`); nobody here asks for it."""

_LAYOUT = "torch.serialization._get_layout"
_PATHS = tuple(f"{home}.{kind}Path" for home in ("pathlib", "pathlib._local") for kind in ("Posix", "PurePosix"))
ALLOWED_NAMES = frozenset(
    [f"{home}.{name}" for home in _HOMES for name in _CLASSES]
    + [f"torch.{name}" for name in (*DTYPE_BYTES, "Size", "contiguous_format", "preserve_format", "channels_last")]
    + [_LAYOUT, *_PLAN_CLASSES, *_PATHS, "pathlib.WindowsPath", "pathlib.PureWindowsPath", "collections.OrderedDict"]
)
"""All that a `.metadata` may name. Nothing of it is imported."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of an item: bytes of a data file, and what was done to them ("stream.zstd/1")."""

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SavedChunk:
    """A region of a tensor and where it is stored."""

    box: Box
    place: Place


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor and the chunks, all with elements, that hold it exactly once."""

    spec: Spec
    chunks: tuple[SavedChunk, ...]


@dataclass(frozen=True, slots=True)
class FolderMetadata:
    """The items of a folder by flat key.

    Attributes:
        paths: The nested path of each key, as far as the folder says.
    """

    tensors: Mapping[str, SavedTensor]
    objects: Mapping[str, Place]
    paths: Mapping[str, Path]

    def places(self) -> Iterable[Place]:
        """Of all items."""
        yield from self.objects.values()
        for tensor in self.tensors.values():
            yield from (chunk.place for chunk in tensor.chunks)


def is_dcp_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a save of torch.distributed.checkpoint went to this folder (perhaps not to its end)."""
    folder = FilePath(path)
    if not folder.is_dir():
        return False
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise translated(error, "listing", str(folder)) from error
    return METADATA_NAME in names or any(name.endswith(DATA_SUFFIX) for name in names)


@python_gc_paused()
def read_folder_metadata(folder: FilePath, *, follow_links: bool = False) -> FolderMetadata:
    """The metadata of a folder, checked.

    Args:
        follow_links: `.metadata` may be a link that leads out of the folder.
    Raises:
        InvalidInputError: no `.metadata`, one elsewhere, one that wants to run code, or claims that cannot be
            true; names the key. UnsupportedValueError: a tensor that is not strided.
    """
    path = folder / METADATA_NAME
    if not os.path.lexists(path):
        raise InvalidInputError(
            f"{folder}: has data files but no {METADATA_NAME}: the save did not finish, or ran without collectives; "
            "save it again with them"
        )
    if not follow_links:
        check_inside(path, folder)
    file = InputFile(path)
    if file.size > MAX_METADATA_BYTES:
        raise InvalidInputError(f"{path}: {file.size} bytes, of which at most {MAX_METADATA_BYTES} are read: too many")
    top = read_pickle(bytes(file.read(0, file.size)), allowed=ALLOWED_NAMES, what=str(path))
    try:
        return _folder_metadata(_fields(top, "metadata.Metadata"))
    except _OddShapeError as error:
        raise InvalidInputError(f"{path}: no metadata of torch.distributed.checkpoint: {error}") from error


class _OddShapeError(ValueError):
    """The pickle does not have the form of the format."""


def _folder_metadata(top: Mapping[str, Any]) -> FolderMetadata:
    places = _places(top.get("storage_data"))
    tensors: dict[str, SavedTensor] = {}
    objects: dict[str, Place] = {}
    for key, entry in _mapping(top.get("state_dict_metadata"), "state_dict_metadata").items():
        if type(key) is not str:
            raise _OddShapeError("a key that is not text")
        if isinstance(entry, Made) and _is_a(entry, "metadata.BytesStorageMetadata"):
            objects[key] = _place_of(places, key, None)
        else:
            tensors[key] = _tensor(key, _fields(entry, "metadata.TensorStorageMetadata"), places)
    return FolderMetadata(tensors, objects, _key_paths(top.get("planner_data")))


def _tensor(key: str, fields: Mapping[str, Any], places: Mapping[Any, Place]) -> SavedTensor:
    spec = Spec(_dtype(key, fields.get("properties")), _size(fields.get("size")))
    if not spec.fits_array:
        raise InvalidInputError(f"{key}: a shape {list(spec.shape)} that no memory holds")
    chunks: dict[Box, SavedChunk] = {}
    for made in _sequence(fields.get("chunks")):
        chunk = _fields(made, "metadata.ChunkStorageMetadata")
        box = Box(_size(chunk.get("offsets")), _size(chunk.get("sizes")))
        fits = len(box.offsets) == len(box.sizes) == len(spec.shape)
        if not fits or any(at + n > size for at, n, size in zip(box.offsets, box.sizes, spec.shape, strict=True)):
            raise InvalidInputError(
                f"{key}: a chunk at {list(box.offsets)} of sizes {list(box.sizes)} is not inside the shape "
                f"{list(spec.shape)}"
            )
        if not box.num_elements or box in chunks:  # replicas may be listed once per rank; they have one place
            continue
        place, num_bytes = _place_of(places, key, box.offsets), box.num_elements * spec.item_bytes
        if num_bytes > (MAX_DECODED_BYTES if place.transforms else place.length):
            raise InvalidInputError(
                f"{key}: the chunk at {list(box.offsets)} has {num_bytes} bytes, but only {place.length} in "
                f"{place.file}"
            )
        chunks[box] = SavedChunk(box, place)
    check_cover(spec.shape, list(chunks), key=key)
    return SavedTensor(spec, tuple(chunks.values()))


def _dtype(key: str, properties: Any) -> str:
    state = properties.state if isinstance(properties, Made) else None
    if isinstance(state, dict):
        dtype, layout = state.get("dtype"), state.get("layout")
    else:
        dtype, layout = (*_sequence(state), None, None)[:2]
    name = dtype.name.removeprefix("torch.") if isinstance(dtype, type) and issubclass(dtype, Made) else ""
    if name not in DTYPE_BYTES:
        raise _OddShapeError(f"{key[:200]}: a tensor without dtype")
    if name.startswith("q") or (isinstance(layout, Made) and layout.args != ("torch.strided",)):
        raise UnsupportedValueError(f"{key}: a sparse or quantized tensor: save its parts as plain tensors")
    return name


def _places(storage_data: Any) -> dict[tuple[str, tuple[int, ...] | None], Place]:
    places: dict[tuple[str, tuple[int, ...] | None], Place] = {}
    for index, info in _mapping(storage_data, "storage_data").items():
        where = _fields(index, "metadata.MetadataIndex")
        key, offset = where.get("fqn"), where.get("offset")
        if type(key) is not str:
            raise _OddShapeError("an index without key")
        places[key, None if offset is None else _size(offset)] = _place(key, _fields(info, "filesystem._StorageInfo"))
    return places


def _place(key: str, fields: Mapping[str, Any]) -> Place:
    name, transforms = fields.get("relative_path"), fields.get("transform_descriptors")
    # Names of data files may have folders in them, but lead nowhere else.
    if type(name) is not str or not _stays_inside(name):
        given = repr(name[:200]) if type(name) is str else "something without a name"
        raise InvalidInputError(f"{key}: is said to be in {given}: wanted the name of a file in the folder")
    steps = () if transforms is None else _sequence(transforms)
    if any(type(step) is not str for step in steps):
        raise _OddShapeError(f"{key[:200]}: a transform that is not text")
    return Place(name, _number(fields.get("offset")), _number(fields.get("length")), tuple(steps))


@lru_cache(maxsize=65536)
def _stays_inside(name: str) -> bool:
    return all(is_plain_name(part) for part in name.split("/"))


def _place_of(places: Mapping[Any, Place], key: str, offset: tuple[int, ...] | None) -> Place:
    place = places.get((key, offset))
    if place is None:
        what = "the value" if offset is None else f"the chunk at {list(offset)}"
        raise InvalidInputError(f"{key}: {what} is in no file: its write was lost; save the checkpoint again")
    return place


def _key_paths(planner_data: Any) -> dict[str, Path]:
    if planner_data is None:
        return {}
    paths: dict[str, Path] = {}
    for key, path in _mapping(planner_data, "planner_data").items():
        names = tuple(_sequence(path))
        if type(key) is not str or not names or any(type(name) is not str and type(name) is not int for name in names):
            raise _OddShapeError("a path in planner_data that is not a row of names")
        paths[key] = names
    return paths


# --- do the chunks hold each element exactly once? ------------------------------------------


def check_cover(shape: tuple[int, ...], boxes: Sequence[Box], *, key: str) -> None:
    """Refuse `boxes`, all inside `shape` and with elements, that do not cover it, or that overlap.

    Linear in chunks and regions, whatever axes are cut: the ends of all chunks cut every axis, so that a grid of
    regions results; each chunk paints its regions. One that is painted already is an overlap, one that stays
    blank is a hole.

    Raises:
        InvalidInputError: a hole or an overlap; names `key` and one region.
    """
    if not math.prod(shape) or list(boxes) == [Box((0,) * len(shape), shape)]:
        return
    cuts = [_cuts(boxes, axis, size) for axis, size in enumerate(shape)]
    counts = tuple(len(axis) - 1 for axis in cuts)
    if math.prod(counts) > MAX_REGIONS:
        raise InvalidInputError(
            f"{key}: {len(boxes)} chunks cut it into {math.prod(counts)} regions: too irregular; load it with torch "
            "and save it again"
        )
    position = [{cut: number for number, cut in enumerate(axis)} for axis in cuts]
    painted = np.zeros(counts, np.bool_)
    for box in boxes:
        ends = zip(position, box.offsets, box.sizes, strict=True)
        part = painted[tuple(slice(at[offset], at[offset + size]) for at, offset, size in ends)]
        if part.any():
            start = [at[offset] for at, offset in zip(position, box.offsets, strict=True)]
            first = np.unravel_index(int(part.argmax()), part.shape)
            region = _region(cuts, [a + int(b) for a, b in zip(start, first, strict=True)])
            raise InvalidInputError(f"{key}: two saved chunks hold {region}: write the checkpoint again")
        part[...] = True
    if not painted.all():
        region = _region(cuts, [int(at) for at in np.unravel_index(int(painted.argmin()), counts)])
        raise InvalidInputError(
            f"{key}: no saved chunk holds {region} of shape {list(shape)}: a rank's part is missing; write it again"
        )


def _cuts(boxes: Sequence[Box], axis: int, size: int) -> list[int]:
    starts = {box.offsets[axis] for box in boxes}
    return sorted(starts | {box.offsets[axis] + box.sizes[axis] for box in boxes} | {0, size})


def _region(cuts: Sequence[Sequence[int]], at: Sequence[int]) -> str:
    ranges = [f"{axis[number]}:{axis[number + 1]}" for axis, number in zip(cuts, at, strict=True)]
    return f"[{', '.join(ranges)}]"


# --- the vocabulary -------------------------------------------------------------------------


def _is_a(made: Made, name: str) -> bool:
    return made.name in (f"{_HOMES[0]}.{name}", f"{_HOMES[1]}.{name}")


def _fields(made: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(made, Made) or not _is_a(made, name) or not isinstance(made.state, dict):
        raise _OddShapeError(f"wanted a {name.split('.')[-1]}, found something else")
    return made.state


def _mapping(value: Any, name: str) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise _OddShapeError(f"{name} is not a dict")
    return value


def _sequence(value: Any) -> tuple[Any, ...]:
    if type(value) is not tuple and type(value) is not list:
        raise _OddShapeError("wanted a list or tuple, found something else")
    return tuple(value)


def _size(value: Any) -> tuple[int, ...]:
    rows = value.args if isinstance(value, Made) and value.name == "torch.Size" else (value,)
    numbers = _sequence(rows[0] if rows else ())
    if len(numbers) > _MAX_DIMENSIONS:
        raise _OddShapeError(f"{len(numbers)} dimensions")
    return tuple(_number(number) for number in numbers)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_NUMBER:
        raise _OddShapeError("wanted a size, found something else")
    return value
