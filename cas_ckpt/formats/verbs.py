"""Import and export of files of any format, and values as other programs read them.

The format is chosen here; what reads and writes torch's own files and DCP's folders is imported for them alone.

Where an import goes: a file that holds a state of its own (torch.save, DCP, torchsnapshot) keeps the names in it.
Everything else is named for what it is: "model", "optim", "scheduler", "scaler", "rng/<rank>", "sampler",
"dataloader", "custom/<number>", "metadata", "files". All of it goes under the prefix, if there is one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cas_ckpt.arguments import ExportFormat, check_choice, check_path
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import LEFT_OUT, ImportInfo, LeftOut, commit_of, import_info, layout_of
from cas_ckpt.core.revisions import Revision, resolve_trusted
from cas_ckpt.errors import InvalidInputError, UnsupportedValueError
from cas_ckpt.formats.dcp_metadata import is_dcp_folder
from cas_ckpt.formats.models import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    MODEL,
    PARTS,
    SUFFIXES,
    ModelFiles,
    files_beside,
    find_model,
    naming,
    read_adapter,
    read_side_file,
    renamed,
    side_items,
    under_prefix,
    without_wrappers,
)
from cas_ckpt.formats.safetensors import ExportInfo, export_safetensors, model_tree
from cas_ckpt.formats.torchsnapshot_metadata import is_snapshot_folder
from cas_ckpt.layout.key_map import KeyMap
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.state import Container, Item, Name
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.signing import Trust
from cas_ckpt.training.stateful import WRAPPERS
from cas_ckpt.training.verbs import mapped_tree

DEFAULT_ADAPTER = "default"
"""PEFT's name for an adapter without a name."""


def import_any(
    handle: RepositoryHandle, path: str | os.PathLike[str], request: CommitRequest, *, prefix: str = "",
    follow_links: bool = False, adapter: str = DEFAULT_ADAPTER, keep_names: bool = False, progress: Progress = SILENT,
) -> ImportInfo:  # fmt: skip
    """Commit a .safetensors, .pt, .pth, .bin or .ckpt file, or the folder of a model, a trainer, DCP or torchsnapshot.

    Needs one buffer per thread for tensors, whatever the size of the files. They must not change meanwhile:
    what was read is what is committed.

    Args:
        prefix: The key under which it goes, e.g. "base/model"; the top if empty.
        follow_links: Read what symbolic links in a folder lead to outside of it.
        adapter: What the live model calls the adapter that a folder of PEFT holds.
        keep_names: Name tensors as the files do, and not as a live object does (formats/models.py).

    Raises:
        InvalidInputError: no such file, malformed, or a pickle that wants to run code; names
            the file, and the branch is as it was. ConflictError, StorageError: as for a commit.
    """
    with naming(check_path(path)):
        read = read_state(
            path, follow_links=follow_links, allow_pickle=request.allow_pickle, adapter=adapter, keep_names=keep_names
        )
        request = replace(request, meta=_noting(request.meta, read.left_out))
        commit = commit_tree(handle, under_prefix(read.tree, prefix), request, progress=progress)
        return import_info(commit, read.left_out, read.renamed)


@dataclass(frozen=True, slots=True)
class ReadState:
    """The state in a file or folder, what a folder holds beside, and what was done to names."""

    tree: Container
    left_out: tuple[LeftOut, ...]
    renamed: tuple[str, ...]


def _noting(meta: Any, left_out: Sequence[LeftOut]) -> Any:
    """The metadata of a commit, with what an import left out: file -> why."""
    if not left_out:
        return meta
    given = {} if meta is None else meta if isinstance(meta, dict) else {"meta": meta}
    return {**given, LEFT_OUT: {each.name: each.reason for each in left_out}}


def read_state(
    path: str | os.PathLike[str], *, follow_links: bool = False, allow_pickle: bool = False,
    adapter: str = DEFAULT_ADAPTER, keep_names: bool = False,
) -> ReadState:  # fmt: skip
    """The state in the file or folder at `path`, and what the folder holds beside. Raises as `import_any`.

    Tensors are read when they are asked for.
    """
    if is_snapshot_folder(path):
        from cas_ckpt.formats.torchsnapshot_import import snapshot_tree

        folder = Path(path)
        tree, saved = snapshot_tree(folder, allow_pickle=allow_pickle, follow_links=follow_links)
        files = files_beside(folder, saved, follow_links=follow_links)
        beside = side_items(files)
    elif is_dcp_folder(path):
        from cas_ckpt.formats.dcp_import import folder_tree

        folder = Path(path)
        tree, saved = folder_tree(folder, allow_pickle=allow_pickle, follow_links=follow_links)
        files = files_beside(folder, saved, follow_links=follow_links)
        beside = side_items(files)
    else:
        files, beside = find_model(path, follow_links=follow_links), {}
        if not files.weights:
            tree = Container("dict", side_items(files))
        elif files.format == "safetensors":
            tree = model_tree(files)
        else:
            from cas_ckpt.formats.torch_file import torch_tree

            tree = torch_tree(files, allow_pickle=allow_pickle)
    parts, left_out = _parts(files.parts, allow_pickle=allow_pickle)
    told: list[str] = []
    if not keep_names:
        tree = without_wrappers(tree, WRAPPERS, told)
        parts = without_wrappers(Container("dict", parts), WRAPPERS, told).children
    tree = _with_adapter(tree, files, told, adapter=adapter, keep_names=keep_names)
    top = {key: key.partition("/")[0] for key in files.parts}
    clashing = [path for key, path in files.parts.items() if top[key] in tree.children]
    clashing += files.side_files if beside.keys() & tree.children.keys() else ()
    left_out += [LeftOut(path.name, "its key is one of the state that was saved beside it") for path in clashing]
    found = sorted((*files.left_out, *left_out), key=lambda each: each.name)
    children = {**parts, **beside, **tree.children}
    return ReadState(replace(tree, children=children), tuple(found), tuple(told))


def _with_adapter(tree: Container, files: ModelFiles, told: list[str], *, adapter: str, keep_names: bool) -> Container:
    """`tree` with the adapter in a folder of PEFT named as in the live model; what was done is added to `told`.

    Raises:
        InvalidInputError: another name than the usual one was given, and no adapter is there.
    """
    config = next((path for path in files.side_files if path.name == ADAPTER_CONFIG), None)
    model = tree.children.get(MODEL)
    is_adapter = bool(files.weights) and files.weights[0].name.startswith(ADAPTER_WEIGHTS)
    if config is None or keep_names or not is_adapter or not isinstance(model, Container):
        if adapter != DEFAULT_ADAPTER:
            wanted = f"a folder with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}.safetensors or .bin, names not kept"
            raise InvalidInputError(f"no adapter is here that could be called {adapter!r}: wanted {wanted}")
        return tree
    found = read_adapter(read_side_file(config), adapter)
    if isinstance(found, str):
        told.append(f"{MODEL}: names are those of PEFT's file, no live model has them: {found}")
        return tree
    names = {name: found.live_name(name) for name in model.children if isinstance(name, str)}
    count = sum(name != live for name, live in names.items())
    told.append(f"{MODEL}: {count} of {len(names)} names got the adapter's, {adapter!r}, as in a live PeftModel")
    return replace(tree, children={**tree.children, MODEL: renamed(model, names)})


def file_tree(path: str | os.PathLike[str]) -> Container:
    """The state that `import_any` would commit; its tensors are read when they are asked for.

    Raises:
        InvalidInputError: as for `import_any`.
    """
    with naming(check_path(path)):
        return read_state(path).tree


def _parts(paths: Mapping[str, Path], *, allow_pickle: bool) -> tuple[dict[Name, Item], list[LeftOut]]:
    """The parts of a training state beside a model, by the names at the top; and those that cannot be taken."""
    children: dict[Name, Item] = {}
    groups: dict[Name, dict[Name, Item]] = {}
    refused = []
    for key, path in paths.items():
        name, _, inner = key.partition("/")
        item: Item | LeftOut
        if path.suffix == ".safetensors":
            item = model_tree(ModelFiles("safetensors", (path,))).children[MODEL]
        else:
            from cas_ckpt.formats.torch_file import part_item

            item = part_item(path, allow_pickle=allow_pickle)
        if isinstance(item, LeftOut):
            refused.append(item)
        elif inner:
            groups.setdefault(name, {})[inner] = item
        else:
            children[name] = item
    return {**children, **{name: Container("dict", items) for name, items in groups.items()}}, refused


# --- export ---------------------------------------------------------------------------------


def export_any(
    handle: RepositoryHandle, revision: Revision, path: str | os.PathLike[str], *,
    format: str | None = None, max_shard_bytes: int | None = None, keys: str | Sequence[str] | None = None,  # noqa: A002
    adapter: str | None = None, force: bool = False, progress: Progress = SILENT,
    trust: Trust | None = None, key_map: KeyMap | None = None,
) -> ExportInfo:  # fmt: skip
    """Write a commit to `path`: see `export_safetensors`, `export_torch`, `export_dcp` and `export_trainer_folder`.

    Args:
        adapter: The adapter of a PeftModel that is to be written, as PEFT does; safetensors alone.
        key_map: What entries are called in the files, and in which shape and dtype they are there.
        format: "safetensors", "torch", "dcp", or a framework of which the folder is to be: "trainer", "accelerate",
            "deepspeed", "lightning" (of shards), "megatron", "torch_checkpointing"; None goes by the end of the name
            (a folder, and any other name, is safetensors).
    Raises:
        InvalidInputError: an unknown format. ConflictError: a file exists already (unless `force`).
        What these raise; nothing is left at `path` then.
    """
    path = check_path(path)
    chosen = SUFFIXES.get(Path(path).suffix.lower(), "safetensors")
    if format is not None:
        chosen = check_choice("format", format, ExportFormat)
    row = commit_of(handle, resolve_trusted(handle, revision, trust)[0])
    told = chosen != "torch"  # that is loaded, which tells
    mapped = None if key_map is None else mapped_tree(handle, Digest(row.root), key_map, keys, told=told)
    tree = None if mapped is None else mapped.tree
    if chosen == "safetensors":
        layout = layout_of(handle, row)
        return export_safetensors(
            handle, Digest(row.root), path, max_shard_bytes=max_shard_bytes, keys=keys, adapter=adapter, force=force,
            progress=progress, tree=tree, aliases=(mapped.layout(layout) if mapped else layout).aliases,
        )  # fmt: skip
    if adapter is not None:
        raise InvalidInputError(f"an adapter is written as safetensors, in a folder, not as {chosen}: give a folder")
    if chosen in PARTS:
        if key_map is not None:
            raise InvalidInputError(f"a folder of {chosen} has the names of its framework: leave key_map out")
        from cas_ckpt.formats.trainer_folders import export_trainer_folder

        return export_trainer_folder(
            handle, row, path, framework=chosen, max_shard_bytes=max_shard_bytes, keys=keys, force=force,
            progress=progress,
        )  # fmt: skip
    if chosen == "dcp":
        from cas_ckpt.formats.dcp_export import export_dcp

        return export_dcp(
            handle, row, path, max_shard_bytes=max_shard_bytes, keys=keys, force=force, progress=progress, tree=tree
        )
    if max_shard_bytes is not None:
        raise InvalidInputError("torch.save knows no shards: leave max_shard_bytes out, or use safetensors or dcp")
    from cas_ckpt.formats.torch_file import export_torch

    return export_torch(handle, row, path, keys=keys, force=force, progress=progress, key_map=key_map, tree=tree)


# --- one value: nested lists, .npy and .pt files --------------------------------------------


def as_lists(value: Any) -> Any:
    """A tensor as nested lists of numbers, dense and dequantized; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    strided = value.dequantize() if value.is_quantized else value
    return (strided if strided.layout == torch.strided else strided.to_dense()).tolist()


def write_value(value: Any, path: Path) -> None:
    """Write a tensor, array or value to a file whose name ends in .pt or .npy.

    Raises:
        UnsupportedValueError: numpy has no such dtype. InvalidInputError: another kind of file.
    """
    if path.suffix == ".pt":
        torch.save(value, path)
    elif path.suffix == ".npy":
        if not isinstance(value, (torch.Tensor, np.ndarray, np.generic, int, float, complex)):
            raise UnsupportedValueError(f"a {type(value).__name__} is not an array: write a .pt file instead")
        try:
            array = value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        except (TypeError, RuntimeError) as error:
            dtype = getattr(value, "dtype", "this")
            raise UnsupportedValueError(f"numpy cannot hold {dtype}: write a .pt file") from error
        np.save(path, array, allow_pickle=False)
    else:
        raise InvalidInputError(f"{path}: the name of an output file ends in .npy or .pt")
