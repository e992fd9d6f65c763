"""Chooses how a file or folder is imported. Torch is loaded only for files of torch.save."""

from __future__ import annotations

import os

from cas_ckpt.ops.commit import CommitRequest
from cas_ckpt.ops.importing import import_path
from cas_ckpt.ops.model_files import WeightsFormat, find_model
from cas_ckpt.ops.records import CommitInfo
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.repository import RepositoryHandle


def import_any(
    handle: RepositoryHandle, path: str | os.PathLike[str], request: CommitRequest, *, progress: Progress = SILENT
) -> CommitInfo:
    """Commit a .safetensors, .pt, .pth, .bin or .ckpt file, or a Hugging Face model folder.

    Raises:
        InvalidInputError: no such file, malformed, or a pickle that wants to run code; names
            the file, and the branch is as it was. ConflictError, StorageError: as for a commit.
    """
    if find_model(path).format is WeightsFormat.SAFETENSORS:
        return import_path(handle, path, request, progress=progress)
    from cas_ckpt.training.torch_file import import_torch

    return import_torch(handle, path, request, progress=progress)
