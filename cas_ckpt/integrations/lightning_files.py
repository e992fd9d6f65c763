"""The small files at Lightning's paths: each names a commit, or a branch whose newest commit counts.

Invariant: a file is there whole, or as it was before; a damaged one is an error, never another commit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.cloud_io import get_filesystem

from cas_ckpt import CommitInfo, InvalidInputError
from cas_ckpt.formats.folders import OutputFiles

MOST_BYTES = 4096
"""A file that names a commit is shorter."""


def absolute(path: str | os.PathLike[str]) -> str:
    """The path from the top; a URL as it is."""
    return str(path) if "://" in str(path) else os.path.abspath(path)


def read_file(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """What a file says that names a commit; None: there is none, or it is another kind of file."""
    files, data = get_filesystem(path), b""
    if files.isfile(str(path)):
        with files.open(str(path), "rb") as file:
            data = file.read(MOST_BYTES)
    if not data.startswith(b'{"cas_ckpt": '):
        return None
    try:
        found: dict[str, Any] = json.loads(data)
        if not isinstance(found.get("commit", found.get("branch")), str):
            raise TypeError("it names neither a commit nor a branch")
    except (ValueError, TypeError) as error:
        raise InvalidInputError(f"{path} is to name a commit, and is damaged ({error}): remove it") from error
    return found


def write_file(path: str, said: Mapping[str, Any]) -> None:
    """Write such a file; on this machine it is there whole, and durable, or as it was before."""
    (folder, name), data = os.path.split(path), json.dumps(said).encode()
    if "://" in path:
        get_filesystem(path).pipe_file(path, data)
        return
    with OutputFiles(Path(folder), [name], force=True) as output, output.open(name) as file:
        file.write(data)  # a link is replaced, not what it leads to


def file_of(commit: CommitInfo) -> str | None:
    """The path that a commit was made for; None: it is no checkpoint of Lightning."""
    said = commit.meta.get("lightning") if isinstance(commit.meta, dict) else None
    return said["file"] if said else None
