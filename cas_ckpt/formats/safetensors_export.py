"""export: the tensors of a commit as safetensors, in shards with an index, as Hugging Face has it.

    1. load the tree; choose by keys; name every tensor
    2. plan: tensors to shards, every name free      (pure, nothing is written yet)
    3. write header and tensors of each shard, verified as they are read, a few rows at a time
    4. side files and index; then all names at once  (formats/folders.py)

Tied tensors are written once per name: the format has no ties. Torch is not needed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import IO, Any

import numpy as np

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.tree import load_tree, naming_forgotten, select
from cas_ckpt.errors import InvalidInputError, UnsupportedValueError
from cas_ckpt.formats.folders import OutputFiles
from cas_ckpt.formats.models import FILES, INDEX_SUFFIX, METADATA, MODEL, is_plain_name, read_side_file
from cas_ckpt.formats.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_adapter
from cas_ckpt.formats.safetensors import METADATA_NAME, encode_header, is_expressible, ranked
from cas_ckpt.memory import check_memory
from cas_ckpt.objects.digest import Digest
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
    ValueItem,
    parse_key,
    render_key,
    walk,
)
from cas_ckpt.ops.checkout.checkout import arrays_in_turn, with_values
from cas_ckpt.progress import SILENT, Progress, phase
from cas_ckpt.transfer.fetch import least_bytes

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


def export_safetensors(
    handle: RepositoryHandle, root: Digest, path: str | os.PathLike[str], *,
    max_shard_bytes: int | None = None, keys: str | Sequence[str] | None = None, adapter: str | None = None,
    force: bool = False, progress: Progress = SILENT,
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
    tree = load_tree(handle, root)
    children = select(tree, KeyPatterns(keys)).children
    metadata = _plain_leaves(handle, children.get(METADATA), str)
    side_files = None if is_file else _plain_leaves(handle, children.get(FILES), bytes)
    plain: dict[Name, Any] = {METADATA: metadata, FILES: side_files}
    states = {name: item for name, item in children.items() if plain.get(name) is None}
    name_of: Callable[[Path], str | None] = tensor_name
    limit = max_shard_bytes if max_shard_bytes is not None or is_file else DEFAULT_SHARD_BYTES
    if adapter is not None:
        if is_file or max_shard_bytes is not None:
            raise InvalidInputError("PEFT opens an adapter as a folder, not in shards: give a folder and no such limit")
        kept = _plain_leaves(handle, tree.children.get(FILES), bytes) or {}
        side_files = {**{name: kept[name] for name in [ADAPTER_CONFIG] if name in kept}, **(side_files or {})}
        name_of, limit = _adapter_names(states, side_files.get(ADAPTER_CONFIG), folder, adapter).get, None
    tensors = _named_tensors(states, name_of)
    shards = _shard(tensors, limit)
    names = [f"{stem}-{number:05}-of-{len(shards):05}{SUFFIX}" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [stem + SUFFIX]
    index = {f"{stem}{SUFFIX}{INDEX_SUFFIX}": _index(names, shards)} if len(shards) > 1 else {}
    for name in side_files or ():
        if not is_plain_name(name) or name in index or name in names:
            raise InvalidInputError(f"{FILES}/{name}: no file of the folder may be called so: leave it out by keys")
    extra = {**(side_files or {}), **index}  # who finds the index finds everything that it names
    total_bytes = sum(_size(shard) for shard in shards)
    with (
        phase(progress, "writing", total_bytes), naming_forgotten(handle, root),
        OutputFiles(folder, [*names, *extra], force=force) as output,
    ):  # fmt: skip
        for name, shard in zip(names, shards, strict=True):
            with output.open(name) as file:
                _write_shard(handle, shard, file, metadata or {}, progress)
        for name, data in extra.items():
            with output.open(name) as file:
                file.write(data)
    return ExportInfo(tuple(str(folder / name) for name in (*names, *extra)), len(tensors), total_bytes)


# --- what goes where ------------------------------------------------------------------------


def _plain_leaves(handle: RepositoryHandle, item: Item | None, kind: type[Any]) -> dict[str, Any] | None:
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


def _write_shard(
    handle: RepositoryHandle, tensors: Sequence[_Tensor], file: IO[bytes], metadata: Mapping[str, str],
    progress: Progress,
) -> None:  # fmt: skip
    stored = {tensor.name: tensor.stored for tensor in tensors}
    order = ranked([(name, tensor.spec) for name, tensor in stored.items()])
    file.write(encode_header(order, {"format": "pt", **metadata}))
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
