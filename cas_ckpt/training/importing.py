"""Chooses how a file or folder is imported. Torch is loaded only for what torch wrote."""

from __future__ import annotations

import os

from cas_ckpt.ops.importing import import_path
from cas_ckpt.ops.model_files import WeightsFormat, find_model
from cas_ckpt.ops.records import CommitInfo
from cas_ckpt.ops.request import CommitRequest
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.repository import RepositoryHandle
from cas_ckpt.training.dcp_folder_metadata import is_dcp_folder


def import_any(
    handle: RepositoryHandle, path: str | os.PathLike[str], request: CommitRequest, *, progress: Progress = SILENT
) -> CommitInfo:
    """Commit a .safetensors, .pt, .pth, .bin or .ckpt file, a Hugging Face model folder, or one of DCP.

    Raises:
        InvalidInputError: no such file, malformed, or a pickle that wants to run code; names
            the file, and the branch is as it was. ConflictError, StorageError: as for a commit.
    """
    if is_dcp_folder(path):
        from cas_ckpt.training.dcp_folder_import import import_dcp

        return import_dcp(handle, path, request, progress=progress)
    if find_model(path).format is WeightsFormat.SAFETENSORS:
        return import_path(handle, path, request, progress=progress)
    from cas_ckpt.training.torch_file import import_torch

    return import_torch(handle, path, request, progress=progress)
