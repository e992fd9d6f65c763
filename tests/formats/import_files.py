"""Builders of files to import: honest ones by the safetensors library, others byte by byte."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import CommitInfo
from cas_ckpt.core.refs import RefKind
from cas_ckpt.errors import InvalidInputError, NotFoundError
from cas_ckpt.formats.verbs import import_any
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.nodes import ContainerEntry, decode_tree
from cas_ckpt.ops.commit.request import CommitRequest
from tests.builders import numbers


def claim(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    """What a header says of one tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


Text = bytes | str | Mapping[str, Any]


def raw_file(path: Path, header: Text, data: bytes = b"", *, length: int | None = None) -> Path:
    """A safetensors file with this header, whatever it is, and this data."""
    text = json.dumps(header) if isinstance(header, Mapping) else header
    head = text.encode() if isinstance(text, str) else text
    path.write_bytes(struct.pack("<Q", len(head) if length is None else length) + head + data)
    return path


def honest_file(path: Path, **tensors: Any) -> Path:
    """A file of the safetensors library."""
    save_file(tensors or {"w": numbers(300, 40), "b": numbers(7)}, path, metadata={"format": "pt"})
    return path


def sharded_folder(folder: Path) -> Path:
    """A model folder of two shards, a config and a tokenizer."""
    folder.mkdir()
    honest_file(folder / "model-00001-of-00002.safetensors", a=numbers(600, 64), b=numbers(3))
    honest_file(folder / "model-00002-of-00002.safetensors", c=numbers(50, 50, seed=1))
    (folder / "config.json").write_text('{"hidden_size": 64}')
    (folder / "tokenizer.model").write_bytes(bytes(range(256)) * 20)
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    write_index(folder, {"a": one, "b": one, "c": two})
    return folder


def write_index(folder: Path, weight_map: Any, name: str = "model.safetensors.index.json") -> None:
    """An index file that says this."""
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def import_file(handle: RepositoryHandle, path: Path, branch: str = "main") -> CommitInfo:
    """Import as the face does."""
    return import_any(handle, path, CommitRequest(branch=branch, message=f"import {path.name}"))


def try_import(handle: RepositoryHandle, path: Path) -> CommitInfo | str:
    """The commit, or the message of the one kind of error that may be raised."""
    try:
        return import_file(handle, path)
    except InvalidInputError as error:
        return str(error)


def assert_refused(handle: RepositoryHandle, path: Path, reason: str = ".") -> None:
    """The import raises one typed error that names the file, and no branch is made by it."""
    with pytest.raises(InvalidInputError) as raised:
        import_file(handle, path, branch="refused")
    assert path.name in str(raised.value)
    # The folder of a test is called after the test, and would match anything.
    assert re.search(reason, str(raised.value).replace(str(path.parent), ""))
    with pytest.raises(NotFoundError):
        handle.refs.get(RefKind.BRANCH, "refused")


def container_id(handle: RepositoryHandle, root: str, name: str) -> Digest:
    """The id of the container `name` at the top of a state."""
    entries = decode_tree(handle.read_node(ObjectKind.TREE, Digest(bytes.fromhex(root)))).entries
    return next(entry.node for entry in entries if isinstance(entry, ContainerEntry) and entry.name == name)
