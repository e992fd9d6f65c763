"""Writes a commit as the folder of a checkpoint that Trainer of Hugging Face or Accelerate resumes from by itself.

It is the way back of an import: which file each part of a state is in, `PARTS` of formats/models.py says for both.
Models become safetensors; every other part is read whole and written by torch.save, one after the other.

Invariant: nothing is left out in silence: a key that has no file there is an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import layout_of
from cas_ckpt.core.tree import load_tree, naming_forgotten, select
from cas_ckpt.errors import InvalidInputError, UnsupportedValueError
from cas_ckpt.formats.models import FILES, METADATA, MODEL, PARTS, SUFFIXES, numbered
from cas_ckpt.formats.safetensors import SUFFIX, Beside, ExportInfo, export_safetensors
from cas_ckpt.formats.torch_file import save_torch
from cas_ckpt.index.rows import CommitRow
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.state import Container, Name, render_key
from cas_ckpt.objects.state import Path as KeyPath
from cas_ckpt.ops.checkout.checkout import fetch_tensors, with_values
from cas_ckpt.ops.history.find import list_entries
from cas_ckpt.progress import Progress
from cas_ckpt.training.restore.materialize import materialize

GROUPS = frozenset(key.partition("/")[0] for rows in PARTS.values() for _, key in rows if "/" in key)
"""What has a file for each of its entries: "rng", by rank."""


def export_trainer_folder(
    handle: RepositoryHandle, row: CommitRow, path: str | os.PathLike[str], *, framework: str,
    max_shard_bytes: int | None, keys: str | Sequence[str] | None, force: bool, progress: Progress,
) -> ExportInfo:  # fmt: skip
    """Write a commit to the folder `path` with the files of `framework`, a key of `PARTS`.

    The largest part beside the models, as a rule the state of the optimizer, is in memory meanwhile.

    Raises:
        InvalidInputError: `path` has the name of a file.
        UnsupportedValueError: a key that is in no file of such a folder. What `export_safetensors` raises. Nothing is
            left at `path` then.
    """
    if Path(path).suffix in SUFFIXES:
        raise InvalidInputError(f"{path}: a checkpoint of {framework} is a folder: give a name without an ending")
    root = Digest(row.root)
    tree = select(load_tree(handle, root), KeyPatterns(keys))
    parts: dict[KeyPath, str] = {}
    for part in _parts(tree):
        file = _file(framework, part, one_rank=_ranks(tree) == 1)
        if file is None:
            raise UnsupportedValueError(
                f"{render_key(part)}: a folder of {framework} has no file for it: leave it out by keys, or export "
                "the commit in another format"
            )
        if file in parts.values():
            raise UnsupportedValueError(
                f"{render_key(part)}: another entry goes into {file}, too: leave one out by keys"
            )
        parts[part] = file

    @lru_cache(maxsize=1)  # the random states of all ranks at once, and nothing beside what is being written
    def entry(name: Name) -> Any:
        part = replace(tree, children={name: tree.children[name]})
        with naming_forgotten(handle, root):
            fetch = partial(fetch_tensors, handle, progress=progress, unseen=True)
            return materialize(with_values(handle, part), fetch, layout=layout_of(handle, row))[name]

    def write(part: KeyPath, file: IO[bytes]) -> None:
        value = entry(part[0])
        save_torch(value[part[1]] if len(part) > 1 else value, file, parts[part])

    models = {file: part[0] for part, file in parts.items() if file.endswith(SUFFIX)}
    writers = {file: partial(write, part) for part, file in parts.items() if file not in models}
    info = export_safetensors(
        handle, root, path, max_shard_bytes=max_shard_bytes, keys=keys, force=force, progress=progress,
        beside=Beside(models, writers, frozenset(part[0] for part in parts)),
    )  # fmt: skip
    sizes = [entry.num_bytes for entry in list_entries(handle, root, keys=keys) if entry.shape is not None]
    return replace(info, num_tensors=len(sizes), total_bytes=sum(sizes))


def _parts(tree: Container) -> Iterator[KeyPath]:
    """The paths of what has a file of its own, beside the first model and the side files."""
    for name, item in tree.children.items():
        if name in GROUPS and isinstance(item, Container):
            yield from ((name, inner) for inner in item.children)
        elif name not in (MODEL, METADATA, FILES):
            yield (name,)


def _ranks(tree: Container) -> int:
    item = tree.children.get("rng")
    return len(item.children) if isinstance(item, Container) else 0


def _file(framework: str, part: KeyPath, *, one_rank: bool) -> str | None:
    """The file of a part, or None; of several that may hold it the first one. That of one rank has no number."""
    key = "/".join(map(str, part))
    for file, template in PARTS[framework]:
        found = numbered(template).fullmatch(key)
        if found is not None and (one_rank or "/" not in template or "{}" in template):
            return file.format(*found.groups())
    return None
