"""The safetensors format, in and out.

In:  a header is read with suspicion, every claim of it held against the others; tensors are read by offset when the
     state is committed
Out: 1. load the tree; choose by keys; name every tensor
     2. plan: tensors to shards, every name free      (pure, nothing is written yet)
     3. write header and tensors of each shard, verified as they are read, a few rows at a time, in the order and with
        the header that the library writes
     4. side files and index, as Hugging Face has it; then all names at once  (formats/folders.py)
     The format has no ties. In a folder, tied tensors are written once, as `save_pretrained` does, and the header says
     which other names there were, as `save_model` of the library does; a single file has them under each name.

The parser is our own. The safetensors library gives tensors, not file offsets: it maps the file (see formats/folders.py
for why we do not), keeps the last of two tensors of one name, and cannot give numpy the dtypes that numpy lacks. The
format is small: a length (8 bytes, little endian), that much JSON, then the bytes of all tensors without a gap.

Invariant: of a header that is accepted, every byte of the file belongs to exactly one tensor or to the header. Must not
know torch.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path as FilePath
from typing import IO, Any

import numpy as np

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.tree import load_tree, naming_forgotten, select
from cas_ckpt.errors import InvalidInputError, UnsupportedValueError
from cas_ckpt.formats.folders import FileSource, InputFile, OutputFiles, ReadScratch
from cas_ckpt.formats.models import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    FILES,
    INDEX_SUFFIX,
    METADATA,
    MODEL,
    ModelFiles,
    is_plain_name,
    placed,
    read_adapter,
    read_json_object,
    read_side_file,
    side_items,
)
from cas_ckpt.memory import check_memory
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.nodes import MAX_DIMENSIONS
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.spec import Box, Spec, grid_for
from cas_ckpt.objects.state import (
    CONTAINER_KINDS,
    Container,
    Flavor,
    Item,
    Name,
    Path,
    StoredTensor,
    TensorItem,
    ValueItem,
    parse_key,
    render_key,
    walk,
)
from cas_ckpt.ops.checkout.checkout import arrays_in_turn, with_values
from cas_ckpt.progress import SILENT, Progress, phase
from cas_ckpt.transfer.fetch import least_bytes

MAX_HEADER_BYTES = 100_000_000
"""Limit of the format itself."""

MAX_NAME_BYTES = 4000
"""UTF-8 bytes of a tensor's name, so that it fits in a key."""

METADATA_NAME = "__metadata__"
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_MAX_ELEMENTS = 1 << 58

DTYPES: dict[str, str] = {
    "BOOL": "bool", "F4": "float4_e2m1fn_x2", "U8": "uint8", "I8": "int8",
    "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16",
    "I32": "int32", "U32": "uint32", "F32": "float32",
    "C64": "complex64", "F64": "float64", "I64": "int64", "U64": "uint64",
}  # fmt: skip
"""Our names by those of the format, in the order in which the library ranks them."""

NAMES: dict[str, str] = {ours: theirs for theirs, ours in DTYPES.items()}
_RANK = {ours: rank for rank, ours in enumerate(DTYPES.values())}
_PACKED = "F4"


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One tensor of a file: where in the file its bytes begin."""

    name: str
    spec: Spec
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file: its tensors by rising offset, and its text metadata (None: it has none)."""

    tensors: tuple[TensorSlot, ...]
    metadata: Mapping[str, str] | None


# --- the header, read -----------------------------------------------------------------------


def read_header(file: InputFile) -> Header:
    """The header of `file`, every claim of it checked against the others and the file's size.

    Raises:
        InvalidInputError: names the file and what is wrong with it.
    """
    try:
        return _read_header(file)
    except _MalformedError as error:
        raise InvalidInputError(
            f"{file.path}: not a valid safetensors file: {error}; fetch or write it again"
        ) from error


class _MalformedError(Exception):
    """A header is malformed; the message says how."""


def _read_header(file: InputFile) -> Header:
    if file.size < _LENGTH.size:
        raise _MalformedError(f"it has {file.size} bytes, fewer than the {_LENGTH.size} of the header's length")
    (length,) = _LENGTH.unpack(file.read(0, _LENGTH.size))
    if length > MAX_HEADER_BYTES or length > file.size - _LENGTH.size:
        raise _MalformedError(f"its header is said to be {length} bytes, of {file.size} (at most {MAX_HEADER_BYTES})")
    content = _parse(bytes(file.read(_LENGTH.size, length)))
    metadata = content.pop(METADATA_NAME, None)
    data_start = _LENGTH.size + length
    tensors = [_slot(name, claim) for name, claim in content.items()]
    _check_cover([(name, begin, end) for name, _, begin, end in tensors], file.size - data_start)
    ordered = sorted(tensors, key=lambda slot: (slot[2], slot[3]))
    slots = tuple(TensorSlot(name, spec, data_start + begin) for name, spec, begin, _ in ordered)
    return Header(slots, None if metadata is None else _checked_metadata(metadata))


def _parse(data: bytes) -> dict[str, Any]:
    if not data.startswith(b"{"):
        raise _MalformedError("its header does not begin with '{'")
    try:
        return read_json_object(data)
    except ValueError as error:
        raise _MalformedError(f"its header {error}") from error


def _slot(name: str, claim: Any) -> tuple[str, Spec, int, int]:
    _check_name(name, "the tensor name")
    if not isinstance(claim, dict) or claim.keys() != {"dtype", "shape", "data_offsets"}:
        raise _MalformedError(f"tensor {name!r} wants exactly dtype, shape and data_offsets")
    dtype, shape = claim["dtype"], _whole_numbers(claim["shape"], name, "shape")
    offsets = _whole_numbers(claim["data_offsets"], name, "data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _MalformedError(f"tensor {name!r} has the dtype {str(dtype)[:40]!r}, which this version does not know")
    if len(offsets) != 2 or len(shape) > MAX_DIMENSIONS:
        raise _MalformedError(f"tensor {name!r} has {len(offsets)} offsets and {len(shape)} dimensions")
    spec = _spec(name, dtype, shape)
    begin, end = offsets
    if end - begin != spec.num_bytes:
        raise _MalformedError(f"tensor {name!r} ({spec}) needs {spec.num_bytes} bytes, its offsets give {end - begin}")
    return name, spec, begin, end


def _whole_numbers(value: Any, name: str, what: str) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(number) is not int or not 0 <= number < 1 << 63 for number in value):
        raise _MalformedError(f"the {what} of tensor {name!r} is not a list of whole numbers below 2^63")
    return tuple(value)


def _spec(name: str, dtype: str, shape: tuple[int, ...]) -> Spec:
    count = 1
    for size in shape:
        count *= size or 1  # a size of 0 must not hide an overflow of the others
        if count > _MAX_ELEMENTS:
            raise _MalformedError(f"the shape of tensor {name!r} is too large for any memory")
    if dtype != _PACKED:
        return Spec(DTYPES[dtype], shape)
    if not shape or shape[-1] % 2:
        raise _MalformedError(f"tensor {name!r} ends inside a byte: 4-bit elements come in pairs")
    return Spec(DTYPES[dtype], (*shape[:-1], shape[-1] // 2))


def _check_name(text: str, what: str) -> None:
    """Refuse `text` that cannot be part of a key."""
    if _num_bytes(text, what) > MAX_NAME_BYTES or "\0" in text:
        raise _MalformedError(f"{what} {text[:40]!r}... is longer than {MAX_NAME_BYTES} bytes or holds NUL")


def _num_bytes(text: str, what: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise _MalformedError(f"{what} {text[:40]!r} is not Unicode text") from error


def _check_cover(ranges: list[tuple[str, int, int]], num_bytes: int) -> None:
    """Refuse ranges that do not follow one another without gap or overlap, or do not end where the file does."""
    at = 0
    for name, begin, end in sorted(ranges, key=lambda found: found[1:]):
        if begin != at:
            raise _MalformedError(f"tensor {name!r} begins at {begin}, wanted {at}: a gap or an overlap")
        at = end
    if at != num_bytes:
        raise _MalformedError(f"its tensors take {at} bytes, {num_bytes} are there: truncated, or more was added")


def _checked_metadata(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _MalformedError(f"its {METADATA_NAME} is not a mapping of text to text")
    for name, value in metadata.items():
        _check_name(name, "the metadata name")
        _num_bytes(value, f"the metadata {name[:40]!r}")
    return metadata


# --- the state in files ---------------------------------------------------------------------


def model_tree(files: ModelFiles) -> Container:
    """The state that safetensors files hold; their bytes are read when it is committed.

    Raises:
        InvalidInputError: a malformed file, or one tensor in two files.
    """
    opened = [(file, read_header(file)) for file in map(InputFile, files.weights)]
    children: dict[Name, Item] = {MODEL: Container("dict", _file_items(opened, files))}
    metadata = _merged_metadata([(file.path.name, header.metadata) for file, header in opened])
    if metadata is not None:
        children[METADATA] = Container("dict", {name: ValueItem(text) for name, text in metadata.items()})
    return Container("dict", {**children, **side_items(files)})


def _file_items(opened: Sequence[tuple[InputFile, Header]], files: ModelFiles) -> dict[Name, Item]:
    scratch = ReadScratch()
    items: dict[Name, TensorItem] = {}
    found = placed(files, ((file.path, [slot.name for slot in header.tensors]) for file, header in opened))
    for file, header in opened:
        for slot in header.tensors:
            items[slot.name] = TensorItem(slot.spec, FileSource(file, slot.offset, slot.spec, scratch))
        for name, kept in (header.metadata or {}).items():
            if found.get(kept) == file.path and name not in found and name != "format":
                # `save_model` of the library has dropped it, since it is the memory of the other one
                items[kept].identity = ((str(file.path), kept), None)
                items[name] = items[kept]
    return dict(items)


def _merged_metadata(texts_of: Sequence[tuple[str, Mapping[str, str] | None]]) -> Mapping[str, str] | None:
    """The texts of all headers; where shards disagree, each is kept as `name@shard`."""
    given = [(shard, metadata) for shard, metadata in texts_of if metadata is not None]
    if not given:
        return None
    merged: dict[str, str] = {}
    for name in sorted({name for _, texts in given for name in texts}):
        texts = {shard: texts[name] for shard, texts in given if name in texts}
        if len(set(texts.values())) == 1:
            merged[name] = next(iter(texts.values()))
        else:
            merged.update({f"{name}@{shard}": text for shard, text in texts.items()})
    return merged


# --- the header, written --------------------------------------------------------------------


def is_expressible(spec: Spec) -> bool:
    """Whether the format has the dtype (a single element of half a byte it has not)."""
    name = NAMES.get(spec.dtype)
    return name is not None and (name != _PACKED or bool(spec.shape))


def ranked(tensors: Sequence[tuple[str, Spec]]) -> list[tuple[str, Spec]]:
    """The order in which the library writes tensors: widest dtype first, then by name."""
    return sorted(tensors, key=lambda tensor: (-_RANK[tensor[1].dtype], tensor[0].encode()))


def encode_header(tensors: Sequence[tuple[str, Spec]], metadata: Mapping[str, str]) -> bytes:
    """Length and header of a file that holds `tensors` in this order; data follows at a multiple of 8."""
    content: dict[str, Any] = {METADATA_NAME: dict(metadata)} if metadata else {}
    at = 0
    for name, spec in tensors:
        content[name] = _claim(spec, at)
        at += spec.num_bytes
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


def _claim(spec: Spec, begin: int) -> dict[str, Any]:
    name = NAMES[spec.dtype]
    shape = [*spec.shape[:-1], spec.shape[-1] * 2] if name == _PACKED else list(spec.shape)
    return {"dtype": name, "shape": shape, "data_offsets": [begin, begin + spec.num_bytes]}


# --- export ---------------------------------------------------------------------------------

SUFFIX = ".safetensors"
DEFAULT_SHARD_BYTES = 5 * 1000**3
"""Tensor bytes of one shard, at most, as in Hugging Face's save_pretrained."""

STEP_BYTES = 16 * 1024 * 1024
"""About as much is read and written at a time."""


@dataclass(frozen=True, slots=True)
class ExportInfo:
    """The files of an export: paths in order, the number of tensors and the bytes in them."""

    files: tuple[str, ...]
    num_tensors: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    key: str
    stored: StoredTensor
    other_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Beside:
    """What goes into files of the folder beside those of the first model.

    Attributes:
        models: Files of safetensors, each with the entry at the top whose tensors it holds.
        writers: Other files, each with what writes it.
        entries: All that is in these files, by its name at the top.
    """

    models: Mapping[str, Name] = field(default_factory=dict)
    writers: Mapping[str, Callable[[IO[bytes]], object]] = field(default_factory=dict)
    entries: frozenset[Name] = frozenset()


NOTHING_BESIDE = Beside()


def export_safetensors(
    handle: RepositoryHandle, root: Digest, path: str | os.PathLike[str], *,
    max_shard_bytes: int | None = None, keys: str | Sequence[str] | None = None, adapter: str | None = None,
    force: bool = False, progress: Progress = SILENT, beside: Beside = NOTHING_BESIDE,
    tree: Container | None = None, aliases: Sequence[Sequence[str]] = (),
) -> ExportInfo:  # fmt: skip
    """Write the tensors of the state `root` to `path`, in bounded memory.

    A path that ends in ".safetensors" becomes one file; any other, a folder that holds
    model.safetensors, or shards with model.safetensors.index.json, and the side files that
    an import of a folder had put under "files". Tensors under "model" are called by the rest
    of their key, all others by the whole key.

    Args:
        max_shard_bytes: Tensor bytes per file, at most (one tensor is never divided). By
            default 5 GB in a folder, no limit for a file; shards of `x.safetensors` are
            called x-00001-of-00002.safetensors.
        keys: Patterns of the keys to take; None takes all, which must then be tensors.
        adapter: Write the folder of the adapter of a PeftModel that has this name, as PEFT does, and nothing else.
            Its adapter_config.json is that of the commit under "files", or is in the folder already.
        force: Replace files that exist.
        beside: Entries that go into further files of the folder.
        tree: The state under other names; as it is stored if None.
        aliases: Groups of keys that are one tensor.
    Raises:
        UnsupportedValueError: an entry that safetensors cannot hold, by its key.
        InvalidInputError: two tensors of one name, a bad limit. NotFoundError: a pattern matches nothing.
        ConflictError: a file exists already. CorruptionError, StorageError.
        MemoryBudgetError: the limit of memory is too little.
    Nothing is left at `path` then.
    """
    check_memory(least_export_bytes(STEP_BYTES), "an export")
    place = FilePath(path)
    is_file = place.suffix == SUFFIX
    folder, stem = (place.parent, place.stem) if is_file else (place, "model" if adapter is None else ADAPTER_WEIGHTS)
    tree = load_tree(handle, root) if tree is None else tree
    children = select(tree, KeyPatterns(keys)).children
    metadata = plain_leaves(handle, children.get(METADATA), str)
    side_files = None if is_file else plain_leaves(handle, children.get(FILES), bytes)
    plain: dict[Name, Any] = {METADATA: metadata, FILES: side_files}
    states = {name: item for name, item in children.items() if plain.get(name) is None and name not in beside.entries}
    name_of: Callable[[Path], str | None] = tensor_name
    limit = max_shard_bytes if max_shard_bytes is not None or is_file else DEFAULT_SHARD_BYTES
    if adapter is not None:
        if is_file or max_shard_bytes is not None:
            raise InvalidInputError("PEFT opens an adapter as a folder, not in shards: give a folder and no such limit")
        kept = plain_leaves(handle, tree.children.get(FILES), bytes) or {}
        side_files = {**{name: kept[name] for name in [ADAPTER_CONFIG] if name in kept}, **(side_files or {})}
        name_of, limit = _adapter_names(states, side_files.get(ADAPTER_CONFIG), folder, adapter).get, None
    tensors = _named_tensors(states, name_of)
    if is_file or adapter is not None:
        aliases = ()
    texts = {"format": "pt", **(metadata or {})}
    shards = _shard(_written_once(tensors, aliases, texts), limit)
    names = [f"{stem}-{number:05}-of-{len(shards):05}{SUFFIX}" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [stem + SUFFIX]
    index = {f"{stem}{SUFFIX}{INDEX_SUFFIX}": _index(names, shards)} if len(shards) > 1 else {}
    if beside.entries and not tensors:  # parts without their model were asked for
        names, shards = [], []
    for name, entry in beside.models.items():
        names.append(name)
        named = _named_tensors({entry: children[entry]}, lambda path: tensor_name((MODEL, *path[1:])))
        shards.append(_written_once(named, aliases, texts))
    check_side_files(side_files or (), [*index, *names, *beside.writers])
    writers: dict[str, Callable[[IO[bytes]], object]] = {
        name: partial(_write_shard, handle, shard, metadata=texts, progress=progress)
        for name, shard in zip(names, shards, strict=True)
    }
    writers |= beside.writers
    for name, data in {**(side_files or {}), **index}.items():  # who finds the index finds everything that it names
        writers[name] = partial(write_bytes, data)
    total_bytes = sum(_size(shard) for shard in shards)
    with (
        phase(progress, "writing", total_bytes), naming_forgotten(handle, root),
        OutputFiles(folder, [*writers], force=force) as output,
    ):  # fmt: skip
        for name, write in writers.items():
            with output.open(name) as file:
                write(file)
    return ExportInfo(tuple(str(folder / name) for name in writers), sum(map(len, shards)), total_bytes)


# --- what goes where ------------------------------------------------------------------------


def plain_leaves(handle: RepositoryHandle, item: Item | None, kind: type[Any]) -> dict[str, Any] | None:
    """The values of a container, if all of them are of `kind` and have names; else None."""
    if not isinstance(item, Container) or item.kind != "dict":
        return None
    children = with_values(handle, item).children
    found = {name: child.value for name, child in children.items() if isinstance(child, ValueItem)}
    whole = len(found) == len(children) and all(type(value) is kind for value in found.values())
    return {str(name): value for name, value in found.items()} if whole else None


def _adapter_names(
    states: Mapping[Name, Item], config: bytes | None, folder: FilePath, adapter: str
) -> dict[Path, str]:
    """The tensors of an adapter, and what they are called in its file.

    Raises:
        InvalidInputError: no configuration says what is the adapter's, or nothing is.
    """
    if config is None:
        if not (folder / ADAPTER_CONFIG).is_file():
            raise InvalidInputError(
                f"neither the commit ({FILES}/{ADAPTER_CONFIG}) nor {folder} has the {ADAPTER_CONFIG} of the adapter: "
                f"write it there first: model.peft_config[{adapter!r}].save_pretrained({str(folder)!r})"
            )
        config = read_side_file(folder / ADAPTER_CONFIG)
    known = read_adapter(config, adapter)
    if isinstance(known, str):
        raise InvalidInputError(f"the adapter cannot be written: {known}")
    states_by_path: dict[Path, list[str]] = {}
    for path, _ in walk(Container("dict", dict(states))):
        if path and isinstance(path[-1], str):
            states_by_path.setdefault(path[:-1], []).append(path[-1])
    found = {(*above, name): file for above, names in states_by_path.items()
             for name, file in known.file_names(names).items()}  # fmt: skip
    if not found:
        there = sorted({name for names in states_by_path.values() for name in known.names_in(names)})
        raise InvalidInputError(f"no tensor is of an adapter {adapter!r}: there are {', '.join(there) or 'none'}")
    return found


def _tensors(
    children: Mapping[Any, Item], above: Path, name_of: Callable[[Path], str | None]
) -> Iterator[tuple[Path, str, StoredTensor]]:
    """Path, name and tensor of all that has a name."""
    for each, item in children.items():
        path = (*above, each)
        if isinstance(item, Container) and item.kind in CONTAINER_KINDS:
            yield from _tensors(item.children, path, name_of)
        elif (name := name_of(path)) is None:
            continue
        elif isinstance(item, StoredTensor) and item.flavor != Flavor.VALUE and is_expressible(item.spec):
            yield path, name, item
        else:
            raise UnsupportedValueError(
                f"{render_key(path)}: {_what(item)} cannot be written as safetensors: "
                "choose tensors by keys (e.g. 'model'), or export as a torch file"
            )


def _what(item: Item) -> str:
    if isinstance(item, Container):
        return f"a tensor of kind {item.kind}"
    if isinstance(item, StoredTensor) and item.flavor != Flavor.VALUE:
        return f"a tensor of {item.spec}"
    return "a plain value"


def _named_tensors(children: Mapping[Any, Item], name_of: Callable[[Path], str | None]) -> list[_Tensor]:
    """All tensors, each under a name of its own."""
    found: dict[str, _Tensor] = {}
    for path, name, stored in _tensors(children, (), name_of):
        key = render_key(path)
        if name in found or name == METADATA_NAME:
            other = found[name].key if name in found else "the header's own entry"
            raise InvalidInputError(f"{key}: would be called {name!r} in the file, and so would {other}: leave one out")
        found[name] = _Tensor(name, key, stored)
    return list(found.values())


def check_side_files(names: Iterable[str], others: Collection[str]) -> None:
    """Refuse names of side files that are those of other files of the folder, or of files elsewhere.

    Raises:
        InvalidInputError: names the side file.
    """
    for name in names:
        if not is_plain_name(name) or name in others:
            raise InvalidInputError(f"{FILES}/{name}: no file of the folder may be called so: leave it out by keys")


_EMBEDDING = re.compile("embed|wte|shared")
"""In the name of a layer whose weight others are tied to, in the models of Hugging Face."""


def _written_once(
    tensors: Sequence[_Tensor], aliases: Sequence[Sequence[str]], texts: Mapping[str, str]
) -> list[_Tensor]:
    """`tensors`, of those that are tied one: that of an embedding, the outermost, the first.

    Args:
        texts: Of the header: a tensor that has the name of one of them is written by itself.
    """
    found = {tensor.key: tensor for tensor in tensors}
    for group in aliases:
        tied = [found.pop(key) for key in group if key in found]
        names = sorted((not _EMBEDDING.search(each.name), each.name.count("."), each.name) for each in tied)
        kept = names[0][-1] if names else ""
        others = tuple(name for _, _, name in names[1:] if texts.get(name, kept) == kept)
        found |= {
            each.key: replace(each, other_names=others) if each.name == kept else each
            for each in tied if each.name not in others
        }  # fmt: skip
    return [found[tensor.key] for tensor in tensors if tensor.key in found]


def tensor_name(path: Path) -> str:
    """The name in a file of the tensor at `path`."""
    rest = path[1:] if path[0] == MODEL and len(path) > 1 else path
    return str(rest[0]) if len(rest) == 1 else render_key(rest)


def _size(tensors: Sequence[_Tensor]) -> int:
    return sum(tensor.stored.spec.num_bytes for tensor in tensors)


def _shard(tensors: Sequence[_Tensor], limit: int | None) -> list[list[_Tensor]]:
    """Tensors in order, a new shard whenever the next one does not fit; at least one shard."""
    if limit is not None and limit < 1:
        raise InvalidInputError(f"shards of {limit} bytes hold nothing: give a positive number")
    shards: list[list[_Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        num_bytes = tensor.stored.spec.num_bytes
        if limit is not None and shards[-1] and filled + num_bytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += num_bytes
    return shards


def _index(names: Sequence[str], shards: Sequence[Sequence[_Tensor]]) -> bytes:
    weight_map = {tensor.name: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
    content = {"metadata": {"total_size": sum(map(_size, shards))}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


# --- writing --------------------------------------------------------------------------------


def write_bytes(data: bytes, file: IO[bytes]) -> None:
    """Write all of `data` to an open file."""
    file.write(data)


def _write_shard(
    handle: RepositoryHandle, tensors: Sequence[_Tensor], file: IO[bytes], *, metadata: Mapping[str, str],
    progress: Progress,
) -> None:  # fmt: skip
    stored = {tensor.name: tensor.stored for tensor in tensors}
    ties = {name: tensor.name for tensor in tensors for name in tensor.other_names}
    order = ranked([(name, tensor.spec) for name, tensor in stored.items()])
    file.write(encode_header(order, {**metadata, **ties}))
    keys = {tensor.name: parse_key(tensor.key) for tensor in tensors}
    wanted = ((keys[name], stored[name], box) for name, spec in order for box in bands(spec))
    for array in arrays_in_turn(handle, wanted):
        file.write(array.reshape(-1).view(np.uint8).data)
        progress.advance(array.nbytes)


def bands(spec: Spec, *, step_bytes: int = STEP_BYTES) -> Iterator[Box]:
    """Boxes that hold the elements of a tensor in C order, each one run of about `step_bytes`.

    Where they can, they end where cells of the canonical grid end, so that no cell is read twice.
    """
    if not spec.num_elements:
        return
    shape = spec.shape
    axis = next((at for at in range(len(shape)) if _row_bytes(spec, at) <= step_bytes), len(shape))
    if axis == len(shape):
        yield spec.box
        return
    step = max(1, step_bytes // _row_bytes(spec, axis))
    cell = grid_for(spec).cell[axis]
    step = step // cell * cell or step
    for outer in np.ndindex(*shape[:axis]):
        for start in range(0, shape[axis], step):
            size = min(step, shape[axis] - start)
            yield Box((*outer, start, *[0] * len(shape[axis + 1 :])), (*[1] * axis, size, *shape[axis + 1 :]))


def least_export_bytes(step_bytes: int) -> int:
    """Least memory of an export that writes so much at a time: this, and the memory of reading and verifying it."""
    return least_bytes(0, 0) + step_bytes


def _row_bytes(spec: Spec, axis: int) -> int:
    return math.prod(spec.shape[axis + 1 :]) * spec.item_bytes
