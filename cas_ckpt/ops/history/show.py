"""show and ls: one commit, what names it, and the entries of its state.

Invariant: lists come from the index and read no node (index/entries.py); of `show`, the commit itself and who held its
state are read, and verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cas_ckpt.core.forgotten import forgotten_view
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import Brief, CommitInfo, commit_row, info_from_row, layout_of
from cas_ckpt.core.refs import Ref, RefKind
from cas_ckpt.core.revisions import Revision, resolve
from cas_ckpt.core.tree import ask, known_root
from cas_ckpt.errors import NotFoundError
from cas_ckpt.index import entries, history
from cas_ckpt.index.rows import CommitRow, ListedEntry
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.layouts import LayoutObject
from cas_ckpt.objects.nodes import decode_commit
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.spec import mesh_text
from cas_ckpt.objects.values import decode_value
from cas_ckpt.signing import SignatureInfo, Verdict, described


def list_commit(
    handle: RepositoryHandle, revision: Revision, *, keys: str | Sequence[str] | None = None
) -> list[ListedEntry]:
    """The entries of the commit `revision`; arguments and errors as for `list_entries`."""
    return list_entries(handle, known_root(handle, resolve(handle, revision)), keys=keys)


def list_one(handle: RepositoryHandle, revision: Revision, key: str) -> ListedEntry:
    """The entry `key` of the commit `revision`.

    Raises:
        NotFoundError: no such commit or key.
    """
    return ask(handle, entries.entry, known_root(handle, resolve(handle, revision)), key=key)


def list_entries(
    handle: RepositoryHandle, root: Digest, *, keys: str | Sequence[str] | None = None
) -> list[ListedEntry]:
    """The entries of the state `root`, those that match `keys`, in the order of the tree.

    Raises:
        NotFoundError: a pattern matches nothing. CorruptionError: the state, or the index, is damaged.
    """
    patterns = KeyPatterns(keys)
    found = ask(handle, entries.manifest, root, keys=patterns)
    patterns.require_used()
    return found


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


@dataclass(frozen=True, slots=True, repr=False)
class ShownCommit(Brief):
    """A commit and a summary of its state.

    Attributes:
        branches, tags, pins: Names of the refs that name this very commit.
        notes: Whole name of a ref (refs/tags/v1) -> message of the annotated tag, or reason of the pin.
        parts: The top-level names of the state.
        aliases: Groups of keys that are one tensor.
        world_size: Ranks that held the state when it was committed.
        mesh: The mesh that most divided tensors were over, as dp=4,tp=2; "" if there was none.
        provenance: Where and by what it was made, if that was kept.
        signatures: Whose keys the commit ("commit") and the tags that name it (refs/tags/v1) claim to be signed by,
            not verified: see `Repository.verify`.
        has_data: False for a forgotten commit whose data is gone: nothing is known of its state then.
    """

    commit: CommitInfo
    branches: tuple[str, ...]
    tags: tuple[str, ...]
    parts: tuple[Part, ...]
    aliases: tuple[tuple[str, ...], ...]
    world_size: int
    pins: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    provenance: Any = None
    has_data: bool = True
    mesh: str = ""
    remote_branches: tuple[str, ...] = ()
    signatures: Mapping[str, SignatureInfo] = field(default_factory=dict)


def show_commit(handle: RepositoryHandle, revision: Revision) -> ShownCommit:
    """The commit that `revision` names, read from its own verified objects.

    Raises:
        NotFoundError: no such commit. CorruptionError: an object of it is damaged.
    """
    digest = resolve(handle, revision)
    data = handle.read_node(ObjectKind.COMMIT, digest)
    row, made = commit_row(digest, data), decode_commit(data)
    provenance = made.provenance
    forgotten = digest in forgotten_view(handle)
    layout, parts = _state(handle, row, forgotten=forgotten)
    refs = [ref for ref in handle.refs.list() if ref.target == digest]
    names = {kind: tuple(ref.name for ref in refs if ref.kind is kind) for kind in RefKind}
    restored = handle.index.read(history.proven, [row.root])
    return ShownCommit(
        info_from_row(row, forgotten=forgotten, restored_us=restored.get(row.root)),
        names[RefKind.BRANCH],
        names[RefKind.TAG],
        parts,
        layout.aliases if layout else (),
        layout.world_size if layout else 0,
        names[RefKind.PIN],
        {f"{ref.kind.value}{ref.name}": ref.note for ref in refs if ref.note},
        None if provenance is None else decode_value(provenance, key="provenance"),
        layout is not None,
        mesh_text(layout.mesh) if layout else "",
        names[RefKind.REMOTE],
        _signatures(made.signature, refs),
    )


def _signatures(signature: bytes | None, refs: Iterable[Ref]) -> dict[str, SignatureInfo]:
    found = {"commit": described(signature)}
    found |= {f"{ref.kind.value}{ref.name}": described(ref.signature.blob) for ref in refs if ref.signature is not None}
    return {name: info for name, info in found.items() if info.verdict is not Verdict.UNSIGNED}


def _state(
    handle: RepositoryHandle, row: CommitRow, *, forgotten: bool
) -> tuple[LayoutObject | None, tuple[Part, ...]]:
    """Layout and parts of a commit; of a forgotten one whose data is gone, nothing."""
    try:
        layout = layout_of(handle, row)
        sums = ask(handle, entries.summary, Digest(row.root))
        return layout, tuple(Part(name, *each) for name, each in sums)
    except NotFoundError:
        if not forgotten:
            raise
        return None, ()
