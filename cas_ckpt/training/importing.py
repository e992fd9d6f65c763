"""Chooses how a file or folder is imported. Torch is loaded only for what torch wrote."""

from __future__ import annotations

import os
from pathlib import Path

from cas_ckpt.objects.state import Container
from cas_ckpt.ops.importing import import_path, model_tree, naming
from cas_ckpt.ops.model_files import WeightsFormat, find_model
from cas_ckpt.ops.records import CommitInfo
from cas_ckpt.ops.request import CommitRequest
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.repository import RepositoryHandle
from cas_ckpt.training.dcp_folder_metadata import is_dcp_folder


def import_any(
    handle: RepositoryHandle, path: str | os.PathLike[str], request: CommitRequest, *, follow_links: bool = False,
    progress: Progress = SILENT,
) -> CommitInfo:  # fmt: skip
    """Commit a .safetensors, .pt, .pth, .bin or .ckpt file, a Hugging Face model folder, or one of DCP.

    Args:
        follow_links: Read what symbolic links in a model folder lead to outside of it.

    Raises:
        InvalidInputError: no such file, malformed, or a pickle that wants to run code; names
            the file, and the branch is as it was. ConflictError, StorageError: as for a commit.
    """
    if is_dcp_folder(path):
        from cas_ckpt.training.dcp_folder_import import import_dcp

        return import_dcp(handle, path, request, progress=progress)
    if find_model(path, follow_links=follow_links).format is WeightsFormat.SAFETENSORS:
        return import_path(handle, path, request, follow_links=follow_links, progress=progress)
    from cas_ckpt.training.torch_file import import_torch

    return import_torch(handle, path, request, follow_links=follow_links, progress=progress)


def file_tree(path: str | os.PathLike[str]) -> Container:
    """The state that `import_any` would commit; its tensors are read when they are asked for.

    Raises:
        InvalidInputError: as for `import_any`.
    """
    with naming(path):
        if is_dcp_folder(path):
            from cas_ckpt.training.dcp_folder_import import folder_tree

            return folder_tree(Path(path))
        files = find_model(path)
        if files.format is WeightsFormat.SAFETENSORS:
            return model_tree(files)
        from cas_ckpt.training.torch_file import torch_tree

        return torch_tree(files)
