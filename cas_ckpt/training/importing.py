"""Chooses how a file or folder is imported. Torch is loaded only for what torch wrote.

Where it goes: a file that holds a state of its own (torch.save, DCP) keeps the names in it. Everything else is named
for what it is: "model", "optim", "scheduler", "scaler", "rng/<rank>", "sampler", "dataloader", "custom/<number>",
"metadata", "files". All of it goes under the prefix, if there is one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cas_ckpt.objects.state import Container, Item, Name
from cas_ckpt.ops.commit import commit_tree
from cas_ckpt.ops.importing import MODEL, model_tree, naming, under_prefix
from cas_ckpt.ops.model_files import ModelFiles, WeightsFormat, find_model
from cas_ckpt.ops.records import ImportInfo, LeftOut, import_info
from cas_ckpt.ops.request import CommitRequest
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.repository import RepositoryHandle
from cas_ckpt.training.dcp_folder_metadata import is_dcp_folder


@dataclass(frozen=True, slots=True)
class FileState:
    """The state in a file or folder; its tensors are read when they are asked for.

    Attributes:
        left_out: What the folder holds beside.
    """

    tree: Container
    left_out: tuple[LeftOut, ...] = ()


def import_any(
    handle: RepositoryHandle, path: str | os.PathLike[str], request: CommitRequest, *, prefix: str = "",
    follow_links: bool = False, progress: Progress = SILENT,
) -> ImportInfo:  # fmt: skip
    """Commit a .safetensors, .pt, .pth, .bin or .ckpt file, or the folder of a model, of a trainer or of DCP.

    Needs one buffer per thread for tensors, whatever the size of the files. They must not change meanwhile:
    what was read is what is committed.

    Args:
        prefix: The key under which it goes, e.g. "base/model"; the top if empty.
        follow_links: Read what symbolic links in a folder lead to outside of it.

    Raises:
        InvalidInputError: no such file, malformed, or a pickle that wants to run code; names
            the file, and the branch is as it was. ConflictError, StorageError: as for a commit.
    """
    with naming(path):
        state = read_state(path, follow_links=follow_links, allow_pickle=request.allow_pickle)
        commit = commit_tree(handle, under_prefix(state.tree, prefix), request, progress=progress)
        return import_info(commit, state.left_out)


def read_state(
    path: str | os.PathLike[str], *, follow_links: bool = False, allow_pickle: bool = False
) -> FileState:  # fmt: skip
    """The state in the file or folder at `path`, and what is left out of it. Raises as `import_any`."""
    if is_dcp_folder(path):
        from cas_ckpt.training.dcp_folder_import import folder_tree

        return FileState(folder_tree(Path(path), allow_pickle=allow_pickle, follow_links=follow_links))
    files = find_model(path, follow_links=follow_links)
    tree = _weights_tree(files, allow_pickle=allow_pickle)
    parts, refused = _parts(files.parts, allow_pickle=allow_pickle)
    left_out = sorted((*files.left_out, *refused), key=lambda each: each.name)
    return FileState(replace(tree, children={**tree.children, **parts}), tuple(left_out))


def file_tree(path: str | os.PathLike[str]) -> Container:
    """The state that `import_any` would commit; its tensors are read when they are asked for.

    Raises:
        InvalidInputError: as for `import_any`.
    """
    with naming(path):
        return read_state(path).tree


def _weights_tree(files: ModelFiles, *, allow_pickle: bool) -> Container:
    if files.format is WeightsFormat.SAFETENSORS:
        return model_tree(files)
    from cas_ckpt.training.torch_file import torch_tree

    return torch_tree(files, allow_pickle=allow_pickle)


def _parts(paths: Mapping[str, Path], *, allow_pickle: bool) -> tuple[dict[Name, Item], list[LeftOut]]:
    """The parts of a training state beside a model, by the names at the top; and those that cannot be taken."""
    children: dict[Name, Item] = {}
    groups: dict[Name, dict[Name, Item]] = {}
    refused = []
    for key, path in paths.items():
        name, _, inner = key.partition("/")
        item = _part(path, allow_pickle=allow_pickle)
        if isinstance(item, LeftOut):
            refused.append(item)
        elif inner:
            groups.setdefault(name, {})[inner] = item
        else:
            children[name] = item
    return {**children, **{name: Container("dict", items) for name, items in groups.items()}}, refused


def _part(path: Path, *, allow_pickle: bool) -> Item | LeftOut:
    if path.suffix == ".safetensors":
        return model_tree(ModelFiles(WeightsFormat.SAFETENSORS, (path,))).children[MODEL]
    from cas_ckpt.training.torch_file import part_item

    return part_item(path, allow_pickle=allow_pickle)
