"""ls: the entries of a commit, from its tree nodes alone.

Invariant: what people see as one thing is one row, although a sparse, quantized or
structured tensor is stored in parts. Values are not decoded: torch is not needed to list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cas_ckpt.collector import collector_paused
from cas_ckpt.errors import InternalError
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.state import CONTAINER_KINDS, Container, EncodedValue, Item, Path, StoredTensor, render_key, walk
from cas_ckpt.ops.entry import find_entry
from cas_ckpt.ops.patterns import KeyPatterns
from cas_ckpt.ops.records import commit_of
from cas_ckpt.ops.resolve import Revision, resolve
from cas_ckpt.ops.tree import load_tree, select
from cas_ckpt.repository import RepositoryHandle

KIND_OF_FLAVOR = {"torch": "tensor", "numpy": "array", "value": "value"}


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
    """What stands under `key` in the commit `revision`.

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
    with collector_paused():
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
        plain = item.flavor == "value"
        kind = KIND_OF_FLAVOR.get(item.flavor, item.flavor)
        return ListedEntry(key, kind, None if plain else spec.dtype, None if plain else spec.shape, spec.shown_bytes)
    if isinstance(item, EncodedValue):
        return ListedEntry(key, "value", None, None, len(item.data))
    if isinstance(item, Container):
        return _composite(key, item)
    raise InternalError(f"{key}: {type(item).__name__} is nothing that a loaded tree holds")


def _composite(key: str, container: Container) -> ListedEntry:
    parts = [part for _, part in walk(container) if isinstance(part, StoredTensor)]
    attrs = container.attrs if isinstance(container.attrs, dict) else {}
    shape = attrs.get("shape")
    values = container.children.get("values") or container.children.get("int_repr") or container.children.get("items")
    dtype = values.spec.dtype if isinstance(values, StoredTensor) else None
    if shape is None and isinstance(values, StoredTensor):
        shape = values.spec.shape
    return ListedEntry(
        key, container.kind, dtype, tuple(shape) if shape is not None else None, sum(p.spec.shown_bytes for p in parts)
    )
