"""Finds the files of a model: one weights file, or a Hugging Face folder.

    folder/  model.safetensors                                  or, in this order of choice,
             model.safetensors.index.json + its shards,
             pytorch_model.bin, or pytorch_model.bin.index.json + its shards
             config.json, tokenizer files ...                   side files

Invariant: nothing outside the folder is ever named by a file in it: shard names are plain file
names, and links do not lead out of it, except into the blobs of the hub's cache or if the caller
says so. Must not know: what is inside weights files, commits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.ops.input_file import InputFile
from cas_ckpt.storage.trouble import translated


class WeightsFormat(Enum):
    """How weights are written; DCP is the folder of torch.distributed.checkpoint."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"
    DCP = "dcp"


SUFFIXES: dict[str, WeightsFormat] = {
    ".safetensors": WeightsFormat.SAFETENSORS,
    ".pt": WeightsFormat.TORCH,
    ".pth": WeightsFormat.TORCH,
    ".bin": WeightsFormat.TORCH,
    ".ckpt": WeightsFormat.TORCH,
}
"""What a weights file is, by the end of its name."""

INDEX_SUFFIX = ".index.json"
_FOLDER_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_SIDE_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken", ".md", ".py"})

MAX_SIDE_BYTES = 256 * 1024 * 1024
"""Largest side file (a tokenizer has some 30 MB) and index file."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What is to be imported.

    Attributes:
        weights: The weights files, in the order in which they are read.
        weight_map: File name by tensor name, if an index file told it.
        side_files: The other files of a folder; empty for a single file.
        is_folder: Whether a folder was given.
    """

    format: WeightsFormat
    weights: tuple[Path, ...]
    weight_map: Mapping[str, str] | None = None
    side_files: tuple[Path, ...] = field(default=())
    is_folder: bool = False


def find_model(path: str | os.PathLike[str], *, follow_links: bool = False) -> ModelFiles:
    """The files that importing `path` reads.

    Args:
        follow_links: Read what symbolic links in a folder lead to, wherever it is.
    Raises:
        InvalidInputError: not a model; says what was wanted. A link that leads out of the folder.
    """
    place = Path(path)
    if place.is_dir():
        files = _find_in_folder(place)
        if not follow_links:
            for file in (*files.weights, *files.side_files):
                _check_inside(file, place)
        return files
    kind = SUFFIXES.get(place.suffix.lower())
    if kind is None:
        raise InvalidInputError(
            f"{place}: wanted a model folder or a file that ends in {', '.join(SUFFIXES)}: "
            "rename it if it is one of these formats"
        )
    return ModelFiles(kind, (place,))


def _find_in_folder(folder: Path) -> ModelFiles:
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if not entry.is_dir())
    except OSError as error:
        raise translated(error, "listing", str(folder)) from error
    side_files = tuple(folder / name for name in names if _is_side_file(name))
    for weights in _FOLDER_WEIGHTS:
        kind = SUFFIXES[Path(weights).suffix]
        if weights in names:
            return ModelFiles(kind, (folder / weights,), None, side_files, is_folder=True)
        if weights + INDEX_SUFFIX in names:
            weight_map = _read_index(folder / (weights + INDEX_SUFFIX), suffix=Path(weights).suffix)
            shards = tuple(folder / shard for shard in sorted(set(weight_map.values())))
            return ModelFiles(kind, shards, weight_map, side_files, is_folder=True)
    wanted = ", ".join(f"{name}, {name}{INDEX_SUFFIX}" for name in _FOLDER_WEIGHTS)
    raise InvalidInputError(f"{folder}: no model folder: wanted one of {wanted} in it; or give a weights file itself")


def _check_inside(file: Path, folder: Path) -> None:
    """Refuse a link that leads out of `folder`; those of the hub's cache lead to `../../blobs/` beside `snapshots`."""
    inside, target = Path(os.path.realpath(folder)), Path(os.path.realpath(file))
    is_cached = inside.parent.name == "snapshots" and target.parent == inside.parent.parent / "blobs"
    if not target.is_relative_to(inside) and not is_cached:
        raise InvalidInputError(
            f"{file}: is a symbolic link to {target}, outside the folder: copy that file into it, "
            "or pass follow_links=True if whoever made the folder may choose what is read"
        )


def _is_side_file(name: str) -> bool:
    return Path(name).suffix.lower() in _SIDE_SUFFIXES and not name.startswith(".") and not name.endswith(INDEX_SUFFIX)


def _read_index(path: Path, *, suffix: str) -> dict[str, str]:
    try:
        content = json.loads(read_side_file(path).decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError as error:
        raise InvalidInputError(f"{path}: nests too deep for an index: fetch or write it again") from error
    except ValueError as error:
        raise InvalidInputError(f"{path}: no JSON can be read there: {str(error)[:200]}; fetch it again") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidInputError(f"{path}: no index of shards: it has no mapping 'weight_map' with tensors in it")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not is_plain_name(shard) or not shard.endswith(suffix):
            raise InvalidInputError(f"{path}: {tensor!r} is said to be in {shard!r}: wanted the name of a file here")
    return weight_map


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a name stands in it twice")
    return content


def is_plain_name(name: str) -> bool:
    """Whether `name` is that of a file in a folder, and nothing more: no path, no trick."""
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        return False
    printable = all(byte >= 0x20 and byte != 0x7F for byte in encoded)
    return name not in ("", ".", "..") and len(encoded) <= 255 and printable and not set(name) & {"/", "\\"}


def read_side_file(path: Path) -> bytes:
    """All bytes of a small file.

    Raises:
        InvalidInputError: no plain file, or too large for a side file.
    """
    file = InputFile(path)
    if file.size > MAX_SIDE_BYTES or not is_plain_name(path.name):
        raise InvalidInputError(
            f"{path}: {file.size} bytes (at most {MAX_SIDE_BYTES} are taken), or an odd name: move it out of the folder"
        )
    return bytes(file.read(0, file.size))


def check_names(weight_map: Mapping[str, str] | None, found: Mapping[str, Path], where: Path) -> None:
    """See that the index and the shards agree on what is where.

    Args:
        found: The file that each tensor was found in.
    Raises:
        InvalidInputError: a tensor is missing, or in another shard than the index says.
    """
    for tensor, shard in (weight_map or {}).items():
        place = found.get(tensor)
        if place is None or place.name != shard:
            there = f"it is in {place.name}" if place else "it is not there"
            raise InvalidInputError(f"{where}: the index has {tensor!r} in {shard}, but {there}: fetch them again")
