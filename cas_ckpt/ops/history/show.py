"""show and ls: one commit, what names it, and the entries of its state, from its tree nodes alone.

Invariant: what people see as one thing is one row, although a sparse, quantized or structured tensor is stored in
parts. Values are not decoded: torch is not needed to list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cas_ckpt.core.forgotten import forgotten_view
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import Brief, CommitInfo, commit_of, commit_row, info_from_row
from cas_ckpt.core.refs import RefKind
from cas_ckpt.core.revisions import Revision, resolve
from cas_ckpt.core.tree import find_entry, load_tree, python_gc_paused, select, stored_tensors
from cas_ckpt.errors import InternalError, NotFoundError
from cas_ckpt.index import restores
from cas_ckpt.index.rows import CommitRow
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.layouts import LayoutObject, decode_layout
from cas_ckpt.objects.nodes import decode_commit
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.state import (
    CONTAINER_KINDS,
    Container,
    EncodedValue,
    Flavor,
    Item,
    Path,
    StoredTensor,
    parse_key,
    render_key,
)
from cas_ckpt.objects.values import decode_value

KIND_OF_FLAVOR = {Flavor.TORCH: "tensor", Flavor.NUMPY: "array", Flavor.VALUE: "value"}


@dataclass(frozen=True, slots=True)
class ListedEntry:
    """One entry of a state.

    Attributes:
        kind: "tensor", "array", "value", or the kind of a composite tensor ("sparse_coo",
            "quantized", "structured" ...) or of an empty container ("dict", "list" ...).
        dtype, shape: Of a tensor or array, else None.
        num_bytes: Plain bytes (of a value: as it is encoded).
    """

    key: str
    kind: str
    dtype: str | None
    shape: tuple[int, ...] | None
    num_bytes: int


def list_commit(
    handle: RepositoryHandle, revision: Revision, *, keys: str | Sequence[str] | None = None
) -> list[ListedEntry]:
    """The entries of the commit `revision`; arguments and errors as for `list_entries`."""
    return list_entries(handle, Digest(commit_of(handle, resolve(handle, revision)).root), keys=keys)


def list_one(handle: RepositoryHandle, revision: Revision, key: str) -> ListedEntry:
    """What is under `key` in the commit `revision`.

    Raises:
        NotFoundError: no such commit or key.
    """
    return _listed(key, find_entry(handle, Digest(commit_of(handle, resolve(handle, revision)).root), key))


def list_entries(
    handle: RepositoryHandle, root: Digest, *, keys: str | Sequence[str] | None = None
) -> list[ListedEntry]:
    """The entries of the state `root`, those that match `keys`, in the order of the tree.

    Raises:
        NotFoundError: a pattern matches nothing. CorruptionError: a node is damaged.
    """
    with python_gc_paused():
        tree = select(load_tree(handle, root), KeyPatterns(keys))
        rows: list[ListedEntry] = []
        _list_container(tree, (), rows)
        return rows


def _list_container(container: Container, path: Path, rows: list[ListedEntry]) -> None:
    for name, child in container.children.items():
        at = (*path, name)
        if isinstance(child, Container) and child.children and child.kind in CONTAINER_KINDS:
            _list_container(child, at, rows)
        else:
            rows.append(_listed(render_key(at), child))


def _listed(key: str, item: Item) -> ListedEntry:
    if isinstance(item, StoredTensor):
        spec = item.spec
        plain = item.flavor == Flavor.VALUE
        kind = KIND_OF_FLAVOR[item.flavor]
        return ListedEntry(key, kind, None if plain else spec.dtype, None if plain else spec.shape, spec.shown_bytes)
    if isinstance(item, EncodedValue):
        return ListedEntry(key, "value", None, None, len(item.data))
    if isinstance(item, Container):
        return _composite(key, item)
    raise InternalError(f"{key}: {type(item).__name__} is nothing that a loaded tree holds")


def _composite(key: str, container: Container) -> ListedEntry:
    num_bytes = sum(part.spec.shown_bytes for _, part in stored_tensors(container))
    attrs = container.attrs if isinstance(container.attrs, dict) else {}
    shape = attrs.get("shape")
    values = container.children.get("values") or container.children.get("int_repr") or container.children.get("items")
    dtype = values.spec.dtype if isinstance(values, StoredTensor) else None
    if shape is None and isinstance(values, StoredTensor):
        shape = values.spec.shape
    return ListedEntry(key, container.kind, dtype, tuple(shape) if shape is not None else None, num_bytes)


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
        provenance: Where and by what it was made, if that was kept.
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


def show_commit(handle: RepositoryHandle, revision: Revision) -> ShownCommit:
    """The commit that `revision` names, read from its own verified objects.

    Raises:
        NotFoundError: no such commit. CorruptionError: an object of it is damaged.
    """
    digest = resolve(handle, revision)
    data = handle.read_node(ObjectKind.COMMIT, digest)
    row, provenance = commit_row(digest, data), decode_commit(data).provenance
    forgotten = digest in forgotten_view(handle)
    layout, parts = _state(handle, row, forgotten=forgotten)
    refs = [ref for ref in handle.refs.list() if ref.target == digest]
    names = {kind: tuple(ref.name for ref in refs if ref.kind is kind) for kind in RefKind}
    restored = handle.index.read(restores.proven, [row.root])
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
    )


def _state(
    handle: RepositoryHandle, row: CommitRow, *, forgotten: bool
) -> tuple[LayoutObject | None, tuple[Part, ...]]:
    """Layout and parts of a commit; of a forgotten one whose data is gone, nothing."""
    if row.layout is None:
        raise NotFoundError(f"commit {row.digest.hex()} names no layout: restore it from a copy")
    try:
        layout = decode_layout(handle.read_node(ObjectKind.LAYOUT, Digest(row.layout)))
        return layout, _parts(list_entries(handle, Digest(row.root)))
    except NotFoundError:
        if not forgotten:
            raise
        return None, ()


def _parts(entries: Iterable[ListedEntry]) -> tuple[Part, ...]:
    sums: dict[str, list[int]] = {}
    for entry in entries:
        total = sums.setdefault(render_key(parse_key(entry.key)[:1]), [0, 0, 0])
        total[0] += 1
        total[1] += entry.dtype is not None
        total[2] += entry.num_bytes
    return tuple(Part(name, *total) for name, total in sums.items())
