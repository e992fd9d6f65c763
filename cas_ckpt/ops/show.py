"""show: one commit, what names it, and what its state consists of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cas_ckpt.errors import NotFoundError
from cas_ckpt.objects.commit import decode_layout
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.kinds import ObjectKind
from cas_ckpt.objects.state import parse_key, render_key
from cas_ckpt.ops.ls import ListedEntry, list_entries
from cas_ckpt.ops.names import every_ref
from cas_ckpt.ops.records import CommitInfo, commit_of, info_from_row
from cas_ckpt.ops.resolve import resolve
from cas_ckpt.refs import RefKind
from cas_ckpt.repository import RepositoryHandle


@dataclass(frozen=True, slots=True)
class Part:
    """One top-level name of a state and what is below it.

    Attributes:
        num_bytes: Plain bytes; tensors that are tied count each time they are named.
    """

    name: str
    num_entries: int
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ShownCommit:
    """A commit and a summary of its state.

    Attributes:
        branches, tags: Names of the refs that name this very commit.
        parts: The top-level names of the state.
        aliases: Groups of keys that are one tensor.
        world_size: Ranks that held the state when it was committed.
    """

    commit: CommitInfo
    branches: tuple[str, ...]
    tags: tuple[str, ...]
    parts: tuple[Part, ...]
    aliases: tuple[tuple[str, ...], ...]
    world_size: int


def show_commit(handle: RepositoryHandle, revision: str) -> ShownCommit:
    """The commit that `revision` names, read from its own verified objects.

    Raises:
        NotFoundError: no such commit. CorruptionError: an object of it is damaged.
    """
    digest = resolve(handle, revision)
    row = commit_of(handle, digest)
    if row.layout is None:
        raise NotFoundError(f"commit {digest.hex()} names no layout: restore it from a copy")
    layout = decode_layout(handle.read_node(ObjectKind.LAYOUT, Digest(row.layout)))
    refs = [ref for ref in every_ref(handle) if ref.target == digest]
    return ShownCommit(
        info_from_row(row),
        tuple(ref.name for ref in refs if ref.kind is RefKind.BRANCH),
        tuple(ref.name for ref in refs if ref.kind is RefKind.TAG),
        _parts(list_entries(handle, Digest(row.root))),
        layout.aliases,
        layout.world_size,
    )


def _parts(entries: Iterable[ListedEntry]) -> tuple[Part, ...]:
    sums: dict[str, list[int]] = {}
    for entry in entries:
        total = sums.setdefault(render_key(parse_key(entry.key)[:1]), [0, 0, 0])
        total[0] += 1
        total[1] += entry.dtype is not None
        total[2] += entry.num_bytes
    return tuple(Part(name, *total) for name, total in sums.items())
