"""import: the tree of a safetensors file, or of a folder of them, and what every import shares.

    1. find the files; read every header, checked against its file
    2. a tree: "model/<tensor>" for the tensors, "metadata/<name>" for the header's texts,
       "files/<name>" for the other files of a folder, as bytes
    3. it is committed like any state: every cell is read from the file when it is hashed

A model that was imported and the same model committed live under "model" are one state: the
container is of the kind that `Module.state_dict()` gives. Torch is not needed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.objects.state import Container, Item, Name, TensorItem, ValueItem
from cas_ckpt.ops.destination import branch_target
from cas_ckpt.ops.input_file import FileSource, InputFile, ReadScratch
from cas_ckpt.ops.model_files import ModelFiles, check_names, read_side_file
from cas_ckpt.ops.request import CommitRequest
from cas_ckpt.ops.resolve import Revision, resolve_named, revision_text
from cas_ckpt.ops.safetensors_file import Header, read_header
from cas_ckpt.refs import Head
from cas_ckpt.repository import RepositoryHandle

MODEL, METADATA, FILES = "model", "metadata", "files"
"""Names at the top of an imported model."""


def request_on(handle: RepositoryHandle, request: CommitRequest, onto: Revision | None) -> CommitRequest:
    """`request` with what an imported state goes on from: what the caller says, never the live state.

    Args:
        onto: What it follows; if no branch is named, a branch. None: a new branch begins a history of its own.
    Raises:
        InvalidInputError: nothing says whether it is to follow the commits of the default branch.
    """
    if onto is not None:
        digest, named = resolve_named(handle, onto)
        if request.branch is None and named is None:
            text = revision_text(onto)
            raise InvalidInputError(f'{text!r} is no branch: name the one that is to begin there (branch="NAME")')
        return replace(request, head=Head(named if request.branch in (None, named) else None, digest.hex()))
    branch = request.branch or handle.config.default_branch
    if request.branch is None and branch_target(handle, branch) is not None:
        raise InvalidInputError(
            f"branch {branch!r} has commits already, and nothing says that this file follows them: put it on top of "
            f'them (onto="{branch}"), or onto a new branch with a history of its own (branch="NAME")'
        )
    return replace(request, head=Head(branch), orphan=True)


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Make every complaint about the content say which file it came from."""
    try:
        yield
    except InvalidInputError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error


def model_tree(files: ModelFiles) -> Container:
    """The state that safetensors files hold; their bytes are read when it is committed.

    Raises:
        InvalidInputError: a malformed file, or one tensor in two files.
    """
    opened = [InputFile(path) for path in files.weights]
    headers = [read_header(file) for file in opened]
    children: dict[Name, Item] = {MODEL: Container("dict", _tensors(opened, headers, files))}
    metadata = _merged_metadata(files.weights, headers)
    if metadata is not None:
        children[METADATA] = Container("dict", {name: ValueItem(text) for name, text in metadata.items()})
    return Container("dict", {**children, **side_items(files)})


def under_prefix(tree: Container, prefix: str) -> Container:
    """`tree` as the content of the key `prefix` ("base/model"); as it is if that is empty.

    Raises:
        InvalidInputError: a prefix with an empty name in it.
    """
    names = prefix.split("/") if prefix else []
    if not all(names):
        raise InvalidInputError(f"prefix {prefix!r} has an empty name: wanted names with / between, e.g. base/model")
    for name in reversed(names):
        tree = Container("dict", {name: tree})
    return tree


def side_items(files: ModelFiles) -> dict[Name, Item]:
    """The side files of a folder as bytes under "files"; nothing if there are none."""
    children: dict[Name, Item] = {path.name: ValueItem(read_side_file(path)) for path in files.side_files}
    return {FILES: Container("dict", children)} if children else {}


def _tensors(opened: Sequence[InputFile], headers: Sequence[Header], files: ModelFiles) -> dict[Name, Item]:
    scratch = ReadScratch()
    items: dict[Name, Item] = {}
    found: dict[str, Path] = {}
    for file, header in zip(opened, headers, strict=True):
        for slot in header.tensors:
            if slot.name in found:
                raise InvalidInputError(f"{file.path}: {slot.name!r} is in {found[slot.name].name} too: remove one")
            found[slot.name] = file.path
            items[slot.name] = TensorItem(slot.spec, FileSource(file, slot.offset, slot.spec, scratch))
    check_names(files.weight_map, found, files.weights[0].parent if files.weights else Path())
    return items


def _merged_metadata(paths: Sequence[Path], headers: Sequence[Header]) -> Mapping[str, str] | None:
    """The texts of all headers; where shards disagree, each is kept as `name@shard`."""
    pairs = zip(paths, headers, strict=True)
    given = [(path.name, header.metadata) for path, header in pairs if header.metadata is not None]
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
