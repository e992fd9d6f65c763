"""The files of a model: one weights file, or a Hugging Face folder; and where a state in them goes.

    folder/  model.safetensors                                  or, in this order of choice,
             model.safetensors.index.json + its shards,
             pytorch_model.bin, or pytorch_model.bin.index.json + its shards,
             adapter_model.safetensors, adapter_model.bin
             config.json, tokenizer files ...                   side files
             optimizer.pt, scheduler.pt, rng_state.pth ...      parts of a training state
             latest                                             of DeepSpeed: names the folder that its files are in

Beside what DCP saved in a folder there may be side files and parts, too.

Names of tensors are not always those that the same tensors have in a live object:

    wrappers    torch.compile, DistributedDataParallel and Fabric put a name before those of the module in them. A
                commit of a live module leaves it out (training/stateful.py), so an import does, too.
    adapters    PEFT leaves the adapter's name out of its files: `q_proj.lora_A.weight` there is
                `q_proj.lora_A.default.weight` in a live PeftModel. An import puts it in, an export takes it out.

What PEFT writes was read from, and compared with, version 0.21.2 (`get_peft_model_state_dict` and
`set_peft_model_state_dict`): it goes by the modules of the live model, here it goes by `adapter_config.json`.

The tree of an import is "model/<tensor>" for the tensors, "metadata/<name>" for the header's texts, and
"files/<name>" for the side files, as bytes. A model that was imported and the same model committed live under "model"
are one state: the container is of the kind that `Module.state_dict()` gives.

Invariant: nothing outside the folder is ever named by a file in it: shard names are plain file names, and links do not
lead out of it, except into the blobs of the hub's cache or if the caller says so. Different names of tensors stay
different; a name that may be right as it is stays as it is. Must not know: torch, which reads its own files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

from cas_ckpt.arguments import ExportFormat
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.publish import branch_target
from cas_ckpt.core.records import LeftOut
from cas_ckpt.core.refs import Head, check_name
from cas_ckpt.core.revisions import Revision, resolve_named, revision_text
from cas_ckpt.errors import InvalidInputError, MemoryBudgetError, reworded
from cas_ckpt.formats.folders import InputFile
from cas_ckpt.objects.state import (
    CONTAINER_KINDS,
    ORDER,
    Container,
    Item,
    Name,
    Path,
    TensorItem,
    ValueItem,
    render_key,
)
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

LATEST = "latest"
"""The file of DeepSpeed that names the folder that its other files are in."""

PLAIN_PICKLE = "metadata.pkl"
"""A file of torch_checkpointing that is a pickle of plain values."""

SHARDING = "sharding"
"""What is in it."""

DEEPSPEED: tuple[tuple[str, str], ...] = (  # by rank of data and of model parallelism
    ("mp_rank_{}_model_states.pt", "model_states/mp_{}"),
    ("zero_pp_rank_{}_mp_rank_{}_model_states.pt", "model_states/dp_{}_mp_{}"),
    ("layer_{}-model_states.pt", "model_states/layer_{}"),
    ("layer_{}-model_{}-model_states.pt", "model_states/layer_{}_mp_{}"),
    ("layer_{}_expert_{}_mp_rank_{}_model_states.pt", "model_states/layer_{}_expert_{}_mp_{}"),
    ("zero_pp_rank_{}_mp_rank_{}_optim_states.pt", "optim_states/dp_{}_mp_{}"),
    ("bf16_zero_pp_rank_{}_mp_rank_{}_optim_states.pt", "optim_states/bf16_dp_{}_mp_{}"),
    ("expp_rank_{}_mp_rank_{}_optim_states.pt", "optim_states/expert_{}_mp_{}"),
)

PARTS: dict[str, tuple[tuple[str, str], ...]] = {
    "trainer": (  # of Hugging Face; one random state per rank
        ("optimizer.pt", "optim"),
        ("scheduler.pt", "scheduler"),
        ("scaler.pt", "scaler"),
        ("training_args.bin", "training_args"),
        ("rng_state.pth", "rng/0"),
        ("rng_state_{}.pth", "rng/{}"),
        *DEEPSPEED,
    ),
    "accelerate": (  # what there is several of is numbered from the second on
        ("optimizer.bin", "optim"),
        ("optimizer_{}.bin", "optim_{}"),
        ("scheduler.bin", "scheduler"),
        ("scheduler_{}.bin", "scheduler_{}"),
        ("scaler.pt", "scaler"),
        ("sampler.bin", "sampler"),
        ("sampler_{}.bin", "sampler_{}"),
        ("dl_state_dict.bin", "dataloader"),
        ("dl_state_dict_{}.bin", "dataloader_{}"),
        ("model_{}.safetensors", "model_{}"),
        ("pytorch_model_{}.bin", "model_{}"),
        ("random_states_{}.pkl", "rng/{}"),
        ("custom_checkpoint_{}.pkl", "custom/{}"),
        *DEEPSPEED,
    ),
    "deepspeed": DEEPSPEED,
    "torch_checkpointing": ((PLAIN_PICKLE, SHARDING), ("{name}_{}.pt", "{name}/{}")),  # by rank
    "lightning": (("meta.pt", "meta"),),  # beside what DCP saved
    "megatron": (("common.pt", "common"),),  # likewise
}
"""Framework -> (file, key) of the parts of a training state, as it lays them out in a folder.

`{}` is one number, `{name}` any name.
"""


def numbered(template: str) -> re.Pattern[str]:
    """A pattern that has the name and the numbers of a template of `PARTS` as its groups."""
    # Items that are called so would be taken for what an import puts there itself.
    any_name = rf"(?!(?:{FILES}|{SHARDING})[_/][0-9]+(?:\.pt)?$)(.+)"
    return re.compile(re.escape(template).replace(r"\{name\}", any_name).replace(r"\{\}", "([0-9]+)"))


def filled(template: str, found: re.Match[str]) -> str:
    """A template of `PARTS` with the name and the numbers that the other one of its row has."""
    return template.replace("{name}", "{}").format(*found.groups())


def _rows(*, is_marked: bool) -> list[tuple[re.Pattern[str], str]]:
    """The rows for a folder; those of torch_checkpointing, which fit any name, where its mark is."""
    ours = [rows for framework, rows in PARTS.items() if framework != "torch_checkpointing"]
    rows = [PARTS["torch_checkpointing"]] if is_marked else ours
    return [(numbered(file), key) for each in rows for file, key in each]


MAX_SIDE_BYTES = 256 * 1024 * 1024
"""Largest side file (a tokenizer has some 30 MB) and index file."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of an import.

    Attributes:
        weights: The weights files, in the order in which they are read; none where the parts hold all tensors.
        weight_map: File name by tensor name, if there is an index file.
        side_files: The other files of a folder; empty for a single file.
        is_folder: Whether a folder was given.
        parts: Files of a training state beside the model, by the key that each goes under ("optim", "rng/0").
        left_out: What else is in the folder, and why it is not taken.
    """

    format: ExportFormat
    weights: tuple[FilePath, ...]
    weight_map: Mapping[str, str] | None = None
    side_files: tuple[FilePath, ...] = field(default=())
    is_folder: bool = False
    parts: Mapping[str, FilePath] = field(default_factory=dict)
    left_out: tuple[LeftOut, ...] = ()


def find_model(path: str | os.PathLike[str], *, follow_links: bool = False) -> ModelFiles:
    """The files that importing `path` reads.

    Args:
        follow_links: Read what symbolic links in a folder lead to, wherever it is.
    Raises:
        InvalidInputError: not a model; says what was wanted. A link that leads out of the folder.
    """
    place = FilePath(path)
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


def files_beside(folder: FilePath, saved: Collection[str], *, follow_links: bool = False) -> ModelFiles:
    """The files in a folder of DCP beside what DCP saved: those of frameworks (`meta.pt`, `common.pt`).

    Args:
        saved: Names of DCP's own files and folders.
    Raises:
        InvalidInputError: a link that leads out of the folder.
    """
    entries = {name: is_dir for name, is_dir in _listed(folder).items() if name not in saved}
    return _checked(_with_rest(ModelFiles("dcp", (), is_folder=True), folder, entries), folder, follow_links)


def _checked(files: ModelFiles, folder: FilePath, follow_links: bool) -> ModelFiles:
    if not follow_links:
        for file in (*files.weights, *files.side_files, *files.parts.values()):
            check_inside(file, folder)
    return files


def _find_in_folder(folder: FilePath) -> ModelFiles:
    entries = _listed(folder)
    chosen, files = _find_weights(folder, sorted(name for name, is_dir in entries.items() if not is_dir))
    found = _with_rest(files, folder, entries, chosen)
    if not chosen and not any(key == SHARDING or key.startswith("model_states/") for key in found.parts):
        wanted = ", ".join(f"{name}, {name}{INDEX_SUFFIX}" for name in _FOLDER_WEIGHTS)
        raise InvalidInputError(
            f"{folder}: not a model folder: wanted one of {wanted} in it; or give a weights file itself"
        )
    return found


def _listed(folder: FilePath) -> dict[str, bool]:
    """Name of what is in the folder -> whether it is a folder; of that which `latest` names, what is in it."""
    try:
        entries = {entry.name: entry.is_dir() for entry in os.scandir(folder)}
        tag = latest_tag(read_side_file(folder / LATEST)) if entries.get(LATEST) is False else ""
        if entries.get(tag):
            del entries[tag]
            entries |= {f"{tag}/{entry.name}": entry.is_dir() for entry in os.scandir(folder / tag)}
    except OSError as error:
        raise translated(error, "listing", str(folder)) from error
    return entries


def latest_tag(data: bytes) -> str:
    """The folder that the file `latest` of DeepSpeed names; empty: it names none."""
    tag = data.decode(errors="replace").strip()
    return tag if is_plain_name(tag) else ""


def _with_rest(files: ModelFiles, folder: FilePath, entries: Mapping[str, bool], chosen: str = "") -> ModelFiles:
    """`files` with what else is in the folder."""
    names = sorted(name for name, is_dir in entries.items() if not is_dir)
    side_files = tuple(folder / name for name in names if _is_side_file(name))
    rows = _rows(is_marked=PLAIN_PICKLE in names and not files.weights and files.format != "dcp")
    parts = _find_parts(folder, names, rows)
    found = (*files.weights, *side_files, *parts.values())
    taken = {chosen, *(path.relative_to(folder).as_posix() for path in found)}
    rest = [name for name in sorted(entries) if name not in taken and not name.rpartition("/")[2].startswith(".")]
    left_out = tuple(LeftOut(name, _reason(name, chosen, rows, is_dir=entries[name])) for name in rest)
    return replace(files, side_files=side_files, parts=parts, left_out=left_out)


def _find_weights(folder: FilePath, names: Sequence[str]) -> tuple[str, ModelFiles]:
    """The weights that are read, and the name of their file, or of the index of their files; empty: there are none."""
    for weights in _FOLDER_WEIGHTS:
        kind = SUFFIXES[FilePath(weights).suffix]
        if weights in names:
            return weights, ModelFiles(kind, (folder / weights,), is_folder=True)
        index = weights + INDEX_SUFFIX
        if index in names:
            weight_map = _read_index(folder / index, suffix=FilePath(weights).suffix)
            shards = tuple(folder / shard for shard in sorted(set(weight_map.values())))
            return index, ModelFiles(kind, shards, weight_map, is_folder=True)
    return "", ModelFiles("torch", (), is_folder=True)


def _find_parts(
    folder: FilePath, names: Sequence[str], rows: Sequence[tuple[re.Pattern[str], str]]
) -> dict[str, FilePath]:
    """The first file, in the order of the rows, of each key."""
    parts: dict[str, FilePath] = {}
    for pattern, key in rows:
        for name in names:
            match = pattern.fullmatch(name.rpartition("/")[2])
            if match is not None:
                parts.setdefault(filled(key, match), folder / name)
    return parts


def _reason(name: str, weights: str, rows: Sequence[tuple[re.Pattern[str], str]], *, is_dir: bool) -> str:
    if is_dir:
        return "is a folder; import it by its own path if it is a checkpoint"
    if any(pattern.fullmatch(name.rpartition("/")[2]) for pattern, _ in rows):
        return "another file of the folder has the key that it would go under"
    if weights and (FilePath(name).suffix in SUFFIXES or name.endswith(INDEX_SUFFIX)):
        return f"not a known part of a checkpoint; the weights were read from {weights}"
    return "not a known part of a checkpoint"


def check_inside(file: FilePath, folder: FilePath) -> None:
    """Refuse a link that leads out of `folder`; those of the hub's cache lead to `../../blobs/` beside `snapshots`."""
    inside, target = FilePath(os.path.realpath(folder)), FilePath(os.path.realpath(file))
    is_cached = inside.parent.name == "snapshots" and target.parent == inside.parent.parent / "blobs"
    if not target.is_relative_to(inside) and not is_cached:
        raise InvalidInputError(
            f"{file}: is a symbolic link to {target}, outside the folder: copy that file into it, "
            "or pass ImportOptions(follow_links=True) if whoever made the folder may choose what is read"
        )


def _is_side_file(name: str) -> bool:
    suffix = FilePath(name).suffix.lower()
    if "/" in name or name.startswith(".") or name.endswith(INDEX_SUFFIX):
        return False
    return suffix in _SIDE_SUFFIXES or name == LATEST


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


def _read_index(path: FilePath, *, suffix: str) -> dict[str, str]:
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


def read_side_file(path: FilePath) -> bytes:
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


def placed(files: ModelFiles, names: Iterable[tuple[FilePath, Iterable[str]]]) -> dict[str, FilePath]:
    """The file of each tensor, where the index, if there is one, agrees.

    Args:
        names: Of the tensors in each file.
    Raises:
        InvalidInputError: a tensor is in two files, is missing, or is in another shard than the index says.
    """
    found: dict[str, FilePath] = {}
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


# --- wrappers -------------------------------------------------------------------------------

_MODULE = "module"
"""The one name of a wrapper that modules of users have, too: taken off where it is before all that is in a mapping."""


def without_wrappers(container: Container, wrappers: Set[str], told: list[str], path: Path = ()) -> Container:
    """`container` with the state of each module in it named as if no wrapper were around the module.

    A wrapper's name counts where it stands alone: no other name follows what is before it.

    Args:
        wrappers: The names.
        told: Gets a sentence for each state of which names are changed.
        path: Where the container is.
    """
    children = dict(container.children)
    for name, child in container.children.items():
        if isinstance(child, Container) and child.kind in CONTAINER_KINDS:
            children[name] = without_wrappers(child, wrappers, told, (*path, name))
    if any(children[name] is not child for name, child in container.children.items()):
        container = replace(container, children=children)
    names = [name for name in children if isinstance(name, str)]
    if len(names) < len(children) or not _is_module_state(container):
        return container
    followers = _followers(names)
    short = {name: _without(name, wrappers, followers) for name in names}
    longer = [name for name in names if short[name] != name]
    if not longer:
        return container
    gone = " and ".join(sorted({f"{part}." for name in longer for part in name.split(".") if part in wrappers}))
    count = f"{len(longer)} {'names' if len(longer) > 1 else 'name'}"
    told.append(f"{render_key(path) or 'the state'}: {gone} of a wrapper is left out of {count}")
    versions = container.versions
    if versions is not None:
        versions = {_without(f"{name}.", wrappers, followers).rstrip("."): each for name, each in versions.items()}
    return replace(renamed(container, short), versions=versions)


def _is_module_state(container: Container) -> bool:
    """Whether it may be what a module's `state_dict()` gave: tensors, and no containers beside them."""
    items = container.children.values()
    parts = [item for item in items if isinstance(item, Container)]
    return (
        container.kind in ("dict", "odict")
        and all(part.kind not in CONTAINER_KINDS for part in parts)
        and (bool(parts) or any(isinstance(item, TensorItem) for item in items))
    )


def _followers(names: Iterable[str]) -> dict[str, str | None]:
    """Beginning of a name, up to a dot -> the part that follows it; None: several do."""
    followers: dict[str, str | None] = {}
    for name in names:
        before = ""
        for part in name.split("."):
            if followers.setdefault(before, part) != part:
                followers[before] = None
            before += f"{part}."
    return followers


def _without(name: str, wrappers: Set[str], followers: Mapping[str, str | None]) -> str:
    kept: list[str] = []
    before = ""
    *parts, last = name.split(".")
    for part in parts:
        if part not in wrappers or followers.get(before) != part or (part == _MODULE and kept):
            kept.append(part)
        before += f"{part}."
    return ".".join([*kept, last])


def renamed(container: Container, names: Mapping[str, str]) -> Container:
    """`container` with other names for what is in it; all others stay.

    Raises:
        InvalidInputError: two would have one name.
    """
    new: Mapping[Any, str] = names
    children: dict[Name, Item] = {}
    for name, child in container.children.items():
        if children.setdefault(new.get(name, name), child) is not child:
            raise InvalidInputError(f"{name!r} and another name in the file stand for {new[name]!r}: keep the names")
    attrs = container.attrs
    if container.kind == "odict" and attrs:
        attrs = {ORDER: [new.get(name, name) for name in attrs[ORDER]]}
    return replace(container, children=children, attrs=attrs)


# --- adapters of PEFT -----------------------------------------------------------------------

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model"
"""The file of the weights, without its suffix."""

_PREFIXES = {
    "ADALORA": "lora_", "BOFT": "boft_", "C3A": "c3a_", "DELORA": "delora_", "FOURIERFT": "fourierft_",
    "GRALORA": "gralora_", "HRA": "hra_", "IA3": "ia3_", "LN_TUNING": "ln_tuning_", "LOHA": "hada_", "LOKR": "lokr_",
    "LORA": "lora_", "MISS": "miss_", "OFT": "oft_", "ROAD": "road_", "TRAINABLE_TOKENS": "trainable_tokens_",
    "WAVEFT": "waveft_",
}  # fmt: skip
"""The prefix of the names of an adapter's own parameters by `peft_type`; other types have rules of their own."""

_TOKENS = "trainable_tokens_"
_MAGNITUDE = "lora_magnitude_vector"
_SAVED = "modules_to_save"
_BASES = ("base_layer", "original_module")
_EMBEDDINGS = frozenset({"embed_tokens", "lm_head"})
"""Layers that PEFT writes whole where they are adapted."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of PEFT, as its configuration describes it.

    Attributes:
        name: Its name in the live model.
        prefixes: What the names of its own parameters begin with.
        modules_to_save: Ends of the names of the modules that it has a copy of.
        bias: Which biases of the model are its, too: "none", "all" or "..._only".
        embeddings: Layers of embeddings that are written whole.
    """

    name: str
    prefixes: tuple[str, ...]
    modules_to_save: tuple[str, ...]
    bias: str
    embeddings: frozenset[str]

    def live_name(self, name: str) -> str:
        """The name in the live model of a tensor of its file."""
        parts = name.split(".")
        at = self._own(parts)
        if at is not None:
            rest = parts[at + 1 :] or (["weight"] if parts[at] == _MAGNITUDE else [])
            return ".".join([*parts[: at + 1], self.name, *rest])
        if self._is_inside(parts):
            return name
        first = 3 if parts[:2] == ["base_model", "model"] else 1
        for end in range(first, len(parts)):
            if self.modules_to_save and ".".join(parts[:end]).endswith(self.modules_to_save):
                return ".".join([*parts[:end], _SAVED, self.name, *parts[end:]])
        return name

    def file_names(self, names: Collection[str]) -> dict[str, str]:
        """Name of a tensor in a module's state -> name in the adapter's file, of those that are the adapter's."""
        found, layers = {}, set()
        for name in names:
            parts = name.split(".")
            at = self._own(parts)
            if at is not None and parts[at + 1 : at + 2] == [self.name]:
                rest = [] if parts[at] == _MAGNITUDE else parts[at + 2 :]
                layers.add(".".join(parts[:at]))
                found[name] = ".".join([*parts[: at + 1], *rest])
            elif at is None and _SAVED in parts:
                at = parts.index(_SAVED)
                if parts[at + 1 : at + 2] == [self.name]:
                    layers.add(".".join(parts[:at]))
                    found[name] = ".".join([*parts[:at], *parts[at + 2 :]])
        bases = {layer for name in names if not name.endswith(".bias") for layer in _adapted_layers(name)}
        # A live model has the layer that was adapted beside the adapter. Where it has not (a bias may be written with
        # the adapter), it is what an import made: all of it was in the file.
        is_alone = not layers <= bases
        for name in names if found else ():
            parts = name.split(".")
            others = self._own(parts) is not None or _SAVED in parts
            if name not in found and not others and (is_alone or self._is_written(parts)):
                found[name] = name
        return found

    def names_in(self, names: Iterable[str]) -> set[str]:
        """Names of adapters of this type in a module's state."""
        found: set[str] = set()
        for name in names:
            parts = name.split(".")
            at = self._own(parts)
            found.update(parts[at + 1 : at + 2] if at is not None else ())
        return found - {"weight", "bias"}

    def _own(self, parts: Sequence[str]) -> int | None:
        """The place of the name of a parameter of the adapter; None: it is no such parameter."""
        return next((at for at in reversed(range(len(parts))) if parts[at].startswith(self.prefixes)), None)

    def _is_inside(self, parts: Sequence[str]) -> bool:
        return _SAVED in parts or not set(parts).isdisjoint(_BASES)

    def _is_written(self, parts: Sequence[str]) -> bool:
        """Whether a tensor of the model itself is written with the adapter."""
        if parts[-1] == "bias" and self.bias != "none":
            return parts[-2:-1] == ["base_layer"] or not self.bias.endswith("_only")
        return parts[-2:-1] == ["base_layer"] and not self.embeddings.isdisjoint(parts[-3:-2])


def _adapted_layers(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:at]) for at, part in enumerate(parts) if part in _BASES]


def read_adapter(config: bytes, name: str) -> Adapter | str:
    """The adapter called `name` that an `adapter_config.json` describes; or why its names cannot be told.

    Raises:
        InvalidInputError: no adapter can be called so.
    """
    if not name or not set(name).isdisjoint("./"):
        raise InvalidInputError(f"{name!r} is no name of an adapter: wanted one without . and /, e.g. default")
    try:
        found = read_json_object(config)
    except ValueError as error:
        return f"{ADAPTER_CONFIG} {error}"
    kind = str(found.get("peft_type"))[:40]
    if kind not in _PREFIXES:
        return f"how PEFT names what is of the type {kind} is not known"
    targets, tokens = found.get("target_modules"), found.get("trainable_token_indices")
    whole = frozenset(_texts(targets)) & _EMBEDDINGS if tokens is None and kind != "TRAINABLE_TOKENS" else frozenset()
    bias = found.get("bias")
    return Adapter(
        name, (_PREFIXES[kind], _TOKENS), _texts(found.get(_SAVED)), bias if isinstance(bias, str) else "none", whole
    )


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(each for each in value if isinstance(each, str) and each) if isinstance(value, list) else ()
