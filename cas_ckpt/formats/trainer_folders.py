"""Writes a commit as the folder of a checkpoint that a framework resumes from by itself.

It is the way back of an import: which file each part of a state is in, `PARTS` of formats/models.py says for both.
Models become safetensors, and what has no file of its own where a framework saves by DCP is saved as DCP does; every
other part is read whole and written by torch.save, one after the other.

Invariant: nothing is left out in silence: a key that has no file there is an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import layout_of
from cas_ckpt.core.tree import load_tree, naming_forgotten, select
from cas_ckpt.dcp.names import is_plain_tensor
from cas_ckpt.errors import InvalidInputError, UnsupportedValueError
from cas_ckpt.formats.models import (
    DEEPSPEED,
    FILES,
    LATEST,
    METADATA,
    MODEL,
    PARTS,
    SHARDING,
    SUFFIXES,
    filled,
    is_plain_name,
    latest_tag,
    numbered,
)
from cas_ckpt.formats.safetensors import (
    SUFFIX,
    Beside,
    ExportInfo,
    check_side_files,
    export_safetensors,
    plain_leaves,
    write_bytes,
)
from cas_ckpt.formats.torch_file import save_part
from cas_ckpt.index.rows import CommitRow
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.state import Container, Name, render_key
from cas_ckpt.objects.state import Path as KeyPath
from cas_ckpt.ops.checkout.checkout import fetch_tensors, with_values
from cas_ckpt.ops.history.find import list_entries
from cas_ckpt.progress import Progress
from cas_ckpt.training.restore.materialize import materialize

BESIDE_DCP = frozenset({"lightning", "megatron"})
"""Frameworks that save by DCP, and have files beside it."""

GROUPS = frozenset(key.partition("/")[0] for rows in PARTS.values() for _, key in rows if "/" in key)
"""What has a file for each of its entries: "rng", by rank."""

_BACKENDS_FILE = "metadata.json"
_BACKENDS = (
    b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1, '
    b'"common_backend": "torch", "common_backend_version": 1}'
)
"""The file that tells Megatron how to load a folder, which it writes last, and what it writes."""

_ANY = "{name}"
"""Among `GROUPS`: any entry, in a folder of torch_checkpointing."""


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
    if Path(path).suffix in SUFFIXES.keys() - {".ckpt"}:  # Lightning's folders end so, too
        raise InvalidInputError(f"{path}: a checkpoint of {framework} is a folder: give a name without an ending")
    root = Digest(row.root)
    tree = select(load_tree(handle, root), KeyPatterns(keys))
    side_files = plain_leaves(handle, tree.children.get(FILES), bytes) or {}
    if not side_files and FILES in tree.children:
        raise UnsupportedValueError(f"{FILES}: holds other things than files of the folder: leave it out by keys")
    parts = _files(tree, framework, latest_tag(side_files.get(LATEST, b"")))

    @lru_cache(maxsize=1)  # values of each rank are there at once, and nothing beside what is being written
    def entry(name: Name, inner: Name | None) -> Any:
        item = tree.children[name]
        if isinstance(item, Container) and inner is not None:
            item = replace(item, children={inner: item.children[inner]})
        part = replace(tree, children={name: item})
        with naming_forgotten(handle, root):
            fetch = partial(fetch_tensors, handle, progress=progress, unseen=True)
            return materialize(with_values(handle, part), fetch, layout=layout_of(handle, row))[name]

    def write(part: KeyPath, file: IO[bytes]) -> None:
        item = tree.children[part[0]]
        is_dict = isinstance(item, Container) and item.kind == "dict"
        value = entry(part[0], part[1] if is_dict and len(part) > 1 else None)
        save_part(value[part[1]] if len(part) > 1 else value, file, parts[part])

    models = {file: part[0] for part, file in parts.items() if file.endswith(SUFFIX)}
    writers = {file: partial(write, part) for part, file in parts.items() if file not in models}
    entries = frozenset(part[0] for part in parts)
    if framework in BESIDE_DCP:
        from cas_ckpt.formats.dcp_export import export_dcp

        check_side_files(side_files, writers)
        entries |= {FILES} if side_files else set()
        if framework == "megatron":
            _check_megatron(tree, entries)
            side_files[_BACKENDS_FILE] = side_files.pop(_BACKENDS_FILE, _BACKENDS)  # the last one
        writers |= {name: partial(write_bytes, data) for name, data in side_files.items()}
        info = export_dcp(
            handle, row, path, max_shard_bytes=max_shard_bytes, keys=keys, force=force, progress=progress,
            beside=Beside(writers=writers, entries=entries), flatten=framework != "megatron",
        )  # fmt: skip
    else:
        info = export_safetensors(
            handle, root, path, max_shard_bytes=max_shard_bytes, keys=keys, force=force, progress=progress,
            beside=Beside(models, writers, entries), aliases=layout_of(handle, row).aliases,
        )  # fmt: skip
    sizes = [entry.num_bytes for entry in list_entries(handle, root, keys=keys) if entry.shape is not None]
    return replace(info, num_tensors=len(sizes), total_bytes=sum(sizes))


def _files(tree: Container, framework: str, tag: str) -> dict[KeyPath, str]:
    """The file of each part that has one of its own.

    Args:
        tag: The folder of DeepSpeed's files.
    Raises:
        UnsupportedValueError: a part has none, or that of another part.
    """
    found: dict[KeyPath, str] = {}
    taken: set[str] = set()
    for part in _parts(tree, framework):
        file = _file(framework, part, tag, one_rank=_ranks(tree) == 1)
        if file is None and framework in BESIDE_DCP:
            continue
        if file is None:
            raise UnsupportedValueError(
                f"{render_key(part)}: a folder of {framework} has no file for it: leave it out by keys, or export "
                "the commit in another format"
            )
        if file in taken:
            raise UnsupportedValueError(
                f"{render_key(part)}: another entry goes into {file}, too: leave one out by keys"
            )
        found[part] = file
        taken.add(file)
    return found


def _parts(tree: Container, framework: str) -> Iterator[KeyPath]:
    """The paths of what has a file of its own, beside the first model and the side files."""
    is_any = any(key.startswith(_ANY) for _, key in PARTS[framework])
    for name, item in tree.children.items():
        if (name in GROUPS or is_any) and isinstance(item, Container) and name not in (FILES, SHARDING):
            yield from ((name, inner) for inner in item.children)
        elif name != FILES and (is_any or name not in (MODEL, METADATA)):
            yield (name,)


def _check_megatron(tree: Container, beside: Set[Name]) -> None:
    """Refuse what Megatron would find neither as a ShardedTensor nor as a ShardedObject, and a commit without common.

    Args:
        beside: Entries that have files of their own.
    """
    if "common" not in beside:
        raise UnsupportedValueError(
            "common: Megatron loads no folder without it, and the commit, or what is chosen by keys, has none: export "
            "a commit of a CasStrategy, or of an import of Megatron's own folder"
        )
    for name, item in tree.children.items():
        if name not in beside and not is_plain_tensor(item) and "/shard_" not in str(name):
            raise UnsupportedValueError(
                f"{render_key((name,))}: neither a tensor nor an object of Megatron: leave it out by keys"
            )


def _ranks(tree: Container) -> int:
    item = tree.children.get("rng")
    return len(item.children) if isinstance(item, Container) else 0


def _file(framework: str, part: KeyPath, tag: str, *, one_rank: bool) -> str | None:
    """The file of a part, or None; of several that may hold it the first one. That of one rank has no number.

    Args:
        tag: The folder of DeepSpeed's files.
    """
    key = "/".join(map(str, part))
    for file, template in PARTS[framework]:
        found = numbered(template).fullmatch(key)
        if found is not None and (one_rank or "/" not in template or "{}" in template):
            folder, name = f"{tag}/" if tag and (file, template) in DEEPSPEED else "", filled(file, found)
            return folder + name if is_plain_name(name) else None
    return None
