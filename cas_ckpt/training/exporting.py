"""Chooses how a commit is exported. Torch is loaded only for what torch writes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.exporting import ExportInfo, export_safetensors
from cas_ckpt.ops.model_files import SUFFIXES, WeightsFormat
from cas_ckpt.ops.records import commit_of
from cas_ckpt.ops.resolve import Revision, resolve
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.repository import RepositoryHandle


def export_any(
    handle: RepositoryHandle, revision: Revision, path: str | os.PathLike[str], *,
    format: str | None = None, max_shard_bytes: int | None = None, keys: str | Sequence[str] | None = None,  # noqa: A002
    force: bool = False, progress: Progress = SILENT,
) -> ExportInfo:  # fmt: skip
    """Write a commit to `path`: see `export_safetensors`, `export_torch` and `export_dcp`.

    Args:
        format: "safetensors", "torch" or "dcp"; None goes by the end of the name (a folder, and
            any other name, is safetensors).
    Raises:
        InvalidInputError: an unknown format. ConflictError: a file exists already (unless `force`).
        What the three raise; nothing is left at `path` then.
    """
    chosen = _format(format, Path(path))
    row = commit_of(handle, resolve(handle, revision))
    if chosen is WeightsFormat.SAFETENSORS:
        return export_safetensors(
            handle, Digest(row.root), path, max_shard_bytes=max_shard_bytes, keys=keys, force=force, progress=progress
        )
    if chosen is WeightsFormat.DCP:
        from cas_ckpt.training.dcp_folder_export import export_dcp

        return export_dcp(
            handle, row.digest.hex(), path, max_shard_bytes=max_shard_bytes, keys=keys, force=force, progress=progress
        )
    if max_shard_bytes is not None:
        raise InvalidInputError("torch.save knows no shards: leave max_shard_bytes out, or use safetensors or dcp")
    from cas_ckpt.training.torch_file import export_torch

    return export_torch(handle, row.digest.hex(), path, keys=keys, force=force, progress=progress)


def _format(name: str | None, path: Path) -> WeightsFormat:
    if name is None:
        return SUFFIXES.get(path.suffix.lower(), WeightsFormat.SAFETENSORS)
    try:
        return WeightsFormat(name)
    except ValueError as error:
        wanted = ", ".join(known.value for known in WeightsFormat)
        raise InvalidInputError(f"there is no export format {name!r}: choose one of {wanted}") from error
