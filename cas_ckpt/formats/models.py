"""The files of a model: one weights file, or a Hugging Face folder; and where a state in them goes.

    folder/  model.safetensors                                  or, in this order of choice,
             model.safetensors.index.json + its shards,
             pytorch_model.bin, or pytorch_model.bin.index.json + its shards,
             adapter_model.safetensors, adapter_model.bin
             config.json, tokenizer files ...                   side files
             optimizer.pt, scheduler.pt, rng_state.pth ...      parts of a training state

Beside what DCP saved in a folder there may be side files and parts, too.

The tree of an import is "model/<tensor>" for the tensors, "metadata/<name>" for the header's texts, and
"files/<name>" for the side files, as bytes. A model that was imported and the same model committed live under "model"
are one state: the container is of the kind that `Module.state_dict()` gives.

Invariant: nothing outside the folder is ever named by a file in it: shard names are plain file
names, and links do not lead out of it, except into the blobs of the hub's cache or if the caller
says so. Must not know: torch, which reads its own files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cas_ckpt.arguments import ExportFormat
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.publish import branch_target
from cas_ckpt.core.records import LeftOut
from cas_ckpt.core.refs import Head, check_name
from cas_ckpt.core.revisions import Revision, resolve_named, revision_text
from cas_ckpt.errors import InvalidInputError, MemoryBudgetError, reworded
from cas_ckpt.formats.folders import InputFile
from cas_ckpt.objects.state import Container, Item, Name, ValueItem
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.storage.store import translated

SUFFIXES: dict[str, ExportFormat] = {
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".ckpt": "torch",
}
"""The format of a weights file by the end of its name."""

INDEX_SUFFIX = ".index.json"
_FOLDER_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
_SIDE_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken", ".md", ".py"})

_PARTS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), key)
    for pattern, key in (
        # Trainer of Hugging Face; one random state per rank
        (r"optimizer\.pt", "optim"),
        (r"scheduler\.pt", "scheduler"),
        (r"scaler\.pt", "scaler"),
        (r"training_args\.bin", "training_args"),
        (r"rng_state\.pth", "rng/0"),
        (r"rng_state_(\d+)\.pth", "rng/{}"),
        # Accelerate; what there is several of is numbered from the second on
        (r"optimizer(?:_(\d+))?\.bin", "optim_{}"),
        (r"scheduler(?:_(\d+))?\.bin", "scheduler_{}"),
        (r"sampler(?:_(\d+))?\.bin", "sampler_{}"),
        (r"dl_state_dict(?:_(\d+))?\.bin", "dataloader_{}"),
        (r"model_(\d+)\.safetensors", "model_{}"),
        (r"pytorch_model_(\d+)\.bin", "model_{}"),
        (r"random_states_(\d+)\.pkl", "rng/{}"),
        (r"custom_checkpoint_(\d+)\.pkl", "custom/{}"),
        # beside what DCP saved: Lightning (loops, schedulers, callbacks), and Megatron (what is equal on all ranks)
        (r"(meta|common)\.pt", "{}"),
    )
)
"""Key by name of the parts of a training state, as the frameworks lay them out in a folder."""

MAX_SIDE_BYTES = 256 * 1024 * 1024
"""Largest side file (a tokenizer has some 30 MB) and index file."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of an import.

    Attributes:
        weights: The weights files, in the order in which they are read.
        weight_map: File name by tensor name, if there is an index file.
        side_files: The other files of a folder; empty for a single file.
        is_folder: Whether a folder was given.
        parts: Files of a training state beside the model, by the key that each goes under ("optim", "rng/0").
        left_out: What else is in the folder, and why it is not taken.
    """

    format: ExportFormat
    weights: tuple[Path, ...]
    weight_map: Mapping[str, str] | None = None
    side_files: tuple[Path, ...] = field(default=())
    is_folder: bool = False
    parts: Mapping[str, Path] = field(default_factory=dict)
    left_out: tuple[LeftOut, ...] = ()


def find_model(path: str | os.PathLike[str], *, follow_links: bool = False) -> ModelFiles:
    """The files that importing `path` reads.

    Args:
        follow_links: Read what symbolic links in a folder lead to, wherever it is.
    Raises:
        InvalidInputError: not a model; says what was wanted. A link that leads out of the folder.
    """
    place = Path(path)
    if place.is_dir():
        return _checked(_find_in_folder(place), place, follow_links)
    if not os.path.lexists(place):
        raise InvalidInputError(f"{place}: No such file or folder")
    kind = SUFFIXES.get(place.suffix.lower())
    if kind is None:
        raise InvalidInputError(
            f"{place}: wanted a model folder or a file that ends in {', '.join(SUFFIXES)}: "
            "rename it if it is one of these formats"
        )
    return ModelFiles(kind, (place,))


def files_beside(folder: Path, saved: Collection[str], *, follow_links: bool = False) -> ModelFiles:
    """The files in a folder of DCP beside what DCP saved: those of frameworks (`meta.pt`, `common.pt`).

    Args:
        saved: Names of DCP's own files and folders.
    Raises:
        InvalidInputError: a link that leads out of the folder.
    """
    entries = {name: is_dir for name, is_dir in _listed(folder).items() if name not in saved}
    return _checked(_with_rest(ModelFiles("dcp", (), is_folder=True), folder, entries), folder, follow_links)


def _checked(files: ModelFiles, folder: Path, follow_links: bool) -> ModelFiles:
    if not follow_links:
        for file in (*files.weights, *files.side_files, *files.parts.values()):
            check_inside(file, folder)
    return files


def _find_in_folder(folder: Path) -> ModelFiles:
    entries = _listed(folder)
    chosen, files = _find_weights(folder, sorted(name for name, is_dir in entries.items() if not is_dir))
    return _with_rest(files, folder, entries, chosen)


def _listed(folder: Path) -> dict[str, bool]:
    """Name of what is in the folder -> whether it is a folder."""
    try:
        return {entry.name: entry.is_dir() for entry in os.scandir(folder)}
    except OSError as error:
        raise translated(error, "listing", str(folder)) from error


def _with_rest(files: ModelFiles, folder: Path, entries: Mapping[str, bool], chosen: str = "") -> ModelFiles:
    """`files` with what else is in the folder."""
    names = sorted(name for name, is_dir in entries.items() if not is_dir)
    side_files = tuple(folder / name for name in names if _is_side_file(name))
    parts = _find_parts(folder, names)
    taken = {chosen, *(path.name for path in (*files.weights, *side_files, *parts.values()))}
    rest = [name for name in sorted(entries) if name not in taken and not name.startswith(".")]
    left_out = tuple(LeftOut(name, _reason(name, chosen, is_dir=entries[name])) for name in rest)
    return replace(files, side_files=side_files, parts=parts, left_out=left_out)


def _find_weights(folder: Path, names: Sequence[str]) -> tuple[str, ModelFiles]:
    """The weights that are read, and the name of their file, or of the index of their files."""
    for weights in _FOLDER_WEIGHTS:
        kind = SUFFIXES[Path(weights).suffix]
        if weights in names:
            return weights, ModelFiles(kind, (folder / weights,), is_folder=True)
        index = weights + INDEX_SUFFIX
        if index in names:
            weight_map = _read_index(folder / index, suffix=Path(weights).suffix)
            shards = tuple(folder / shard for shard in sorted(set(weight_map.values())))
            return index, ModelFiles(kind, shards, weight_map, is_folder=True)
    wanted = ", ".join(f"{name}, {name}{INDEX_SUFFIX}" for name in _FOLDER_WEIGHTS)
    raise InvalidInputError(
        f"{folder}: not a model folder: wanted one of {wanted} in it; or give a weights file itself"
    )


def _find_parts(folder: Path, names: Sequence[str]) -> dict[str, Path]:
    """The first file, in the order of `_PARTS`, of each key."""
    parts: dict[str, Path] = {}
    for pattern, key in _PARTS:
        for name in names:
            match = pattern.fullmatch(name)
            if match is not None:
                number = match[1] if match.groups() else None
                parts.setdefault(key.format(number) if number else key.removesuffix("_{}"), folder / name)
    return parts


def _reason(name: str, weights: str, *, is_dir: bool) -> str:
    if is_dir:
        return "is a folder; import it by its own path if it is a checkpoint"
    if any(pattern.fullmatch(name) for pattern, _ in _PARTS):
        return "another file of the folder has the key that it would go under"
    if weights and (Path(name).suffix in SUFFIXES or name.endswith(INDEX_SUFFIX)):
        return f"not a known part of a checkpoint; the weights were read from {weights}"
    return "not a known part of a checkpoint"


def check_inside(file: Path, folder: Path) -> None:
    """Refuse a link that leads out of `folder`; those of the hub's cache lead to `../../blobs/` beside `snapshots`."""
    inside, target = Path(os.path.realpath(folder)), Path(os.path.realpath(file))
    is_cached = inside.parent.name == "snapshots" and target.parent == inside.parent.parent / "blobs"
    if not target.is_relative_to(inside) and not is_cached:
        raise InvalidInputError(
            f"{file}: is a symbolic link to {target}, outside the folder: copy that file into it, "
            "or pass ImportOptions(follow_links=True) if whoever made the folder may choose what is read"
        )


def _is_side_file(name: str) -> bool:
    return Path(name).suffix.lower() in _SIDE_SUFFIXES and not name.startswith(".") and not name.endswith(INDEX_SUFFIX)


def read_json_object(data: bytes) -> dict[str, Any]:
    """The object that a stranger's JSON holds.

    Raises:
        ValueError: says how it is malformed; of an object that has a name twice, too.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) != len(pairs):
            raise ValueError("a name is in it twice")
        return content

    try:
        content = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except RecursionError as error:
        raise ValueError("nests too deep") from error
    except ValueError as error:  # of the encoding too, and of numbers of thousands of digits
        raise ValueError(f"is not JSON: {str(error)[:200]}") from error
    if not isinstance(content, dict):
        raise ValueError("is not a JSON object")  # noqa: TRY004  # of the text, not of a type
    return content


def _read_index(path: Path, *, suffix: str) -> dict[str, str]:
    data = read_side_file(path)
    try:
        weight_map = read_json_object(data).get("weight_map")
    except ValueError as error:
        raise InvalidInputError(f"{path}: not an index of shards: it {error}; fetch or write it again") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidInputError(f"{path}: not an index of shards: it has no mapping 'weight_map' with tensors in it")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not is_plain_name(shard) or not shard.endswith(suffix):
            raise InvalidInputError(f"{path}: {tensor!r} is said to be in {shard!r}: wanted the name of a file here")
    return weight_map


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
        InvalidInputError: not a plain file, or too large for a side file.
    """
    file = InputFile(path)
    if file.size > MAX_SIDE_BYTES or not is_plain_name(path.name):
        raise InvalidInputError(
            f"{path}: {file.size} bytes (at most {MAX_SIDE_BYTES} are taken), or an odd name: move it out of the folder"
        )
    return bytes(file.read(0, file.size))


def placed(files: ModelFiles, names: Iterable[tuple[Path, Iterable[str]]]) -> dict[str, Path]:
    """The file of each tensor, where the index, if there is one, agrees.

    Args:
        names: Of the tensors in each file.
    Raises:
        InvalidInputError: a tensor is in two files, is missing, or is in another shard than the index says.
    """
    found: dict[str, Path] = {}
    for path, own in names:
        for name in own:
            if name in found:
                raise InvalidInputError(f"{path}: {name!r} is in {found[name].name} too: remove one of them")
            found[name] = path
    for tensor, shard in (files.weight_map or {}).items():
        place = found.get(tensor)
        if place is None or place.name != shard:
            where = files.weights[0].parent
            there = f"it is in {place.name}" if place else "it is not there"
            raise InvalidInputError(f"{where}: the index has {tensor!r} in {shard}, but {there}: fetch them again")
    return found


# --- the state in them ----------------------------------------------------------------------

MODEL, METADATA, FILES = "model", "metadata", "files"
"""Names at the top of an imported model."""


def request_on(handle: RepositoryHandle, request: CommitRequest, onto: Revision | None) -> CommitRequest:
    """`request` with what an imported state goes on from: what the caller says, never the live state.

    Args:
        onto: What it follows; if no branch is named, a branch. None: a new branch begins a history of its own.
    Raises:
        InvalidInputError: nothing says whether it is to follow the commits of the default branch.
    """
    if onto is not None:
        digest, named = resolve_named(handle, onto)
        if request.branch is None and named is None:
            text = revision_text(onto)
            raise InvalidInputError(f'{text!r} is not a branch: name the one that is to begin there (branch="NAME")')
        return replace(request, head=Head(named if request.branch in (None, named) else None, digest.hex()))
    branch = handle.default_branch if request.branch is None else check_name(request.branch)
    if request.branch is None and branch_target(handle, branch) is not None:
        raise InvalidInputError(
            f"branch {branch!r} has commits already, and nothing says that this file follows them: put it on top of "
            f'them (onto="{branch}"), or onto a new branch with a history of its own (branch="NAME")'
        )
    return replace(request, head=Head(branch), orphan=True)


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Make every complaint about the content say which file it came from."""
    try:
        yield
    except MemoryBudgetError:  # not about its content; says how much is needed
        raise
    except InvalidInputError as error:
        if str(path) in str(error):
            raise
        raise reworded(error, f"{path}: {error}") from error


def under_prefix(tree: Container, prefix: str) -> Container:
    """`tree` as the content of the key `prefix` ("base/model"); as it is if that is empty.

    Raises:
        InvalidInputError: a prefix with an empty name in it.
    """
    names = prefix.split("/") if prefix else []
    if not all(names):
        raise InvalidInputError(f"prefix {prefix!r} has an empty name: wanted names with / between, e.g. base/model")
    for name in reversed(names):
        tree = Container("dict", {name: tree})
    return tree


def side_items(files: ModelFiles) -> dict[Name, Item]:
    """The side files of a folder as bytes under "files"; nothing if there are none."""
    children: dict[Name, Item] = {path.name: ValueItem(read_side_file(path)) for path in files.side_files}
    return {FILES: Container("dict", children)} if children else {}
