"""One entry of a commit by its key, reading only the tree nodes that lead to it."""

from __future__ import annotations

from bisect import bisect_right

from cas_ckpt.errors import CorruptionError, NotFoundError
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.kinds import ObjectKind
from cas_ckpt.objects.state import EncodedValue, Item, Name, StoredTensor, parse_key, render_key
from cas_ckpt.objects.tree_node import ContainerEntry, Entry, TensorEntry, decode_tree, name_order
from cas_ckpt.ops.given_up import naming_forgotten
from cas_ckpt.ops.tree import load_tree, lower
from cas_ckpt.repository import RepositoryHandle


def find_entry(handle: RepositoryHandle, root: Digest, key: str) -> Item:
    """The item under `key` of the state `root`; a container comes with all that is below it.

    Raises:
        NotFoundError: there is none; names the longest part of the key that is there.
        CorruptionError: a node on the way is damaged.
    """
    found = _entry_at(handle, root, key)
    if found is None or isinstance(found, ContainerEntry):
        return load_tree(handle, root if found is None else found.node)
    return _item(found)


def find_object(handle: RepositoryHandle, root: Digest, key: str) -> Digest | None:
    """The id of the tensor, long value or container under `key`; None if it is so small that it has none.

    Raises:
        NotFoundError, CorruptionError: as for `find_entry`.
    """
    found = _entry_at(handle, root, key)
    if found is None:
        return root
    return found.node if isinstance(found, (ContainerEntry, TensorEntry)) else None


def _entry_at(handle: RepositoryHandle, root: Digest, key: str) -> Entry | None:
    """The entry under `key`; None for the root itself."""
    path = parse_key(key)
    container, entry = root, None
    for depth, name in enumerate(path):
        with naming_forgotten(handle, root):
            entry = _child(handle, container, name)
        if isinstance(entry, ContainerEntry):
            container = entry.node
        elif entry is None or depth + 1 < len(path):
            there = render_key(path[: depth if entry is None else depth + 1]) or "the root"
            raise NotFoundError(f"there is no entry {key!r} ({there} is there): repo.ls(ref) lists the keys")
    return entry


def _item(entry: Entry) -> Item:
    if isinstance(entry, TensorEntry):
        return StoredTensor(entry.spec, entry.flavor, entry.node, entry.inline, entry.single)
    if isinstance(entry, ContainerEntry):
        raise CorruptionError(f"{entry.name!r}: a container stands where an entry should: restore it from a copy")
    return EncodedValue(entry.data)


def _child(handle: RepositoryHandle, container: Digest, name: Name) -> Entry | None:
    """The entry called `name` in one container, by way of the pages that may hold it."""
    node = decode_tree(handle.read_node(ObjectKind.TREE, container))
    order = name_order(name)
    while node.height:
        at = bisect_right(node.pages, order, key=lambda page: name_order(page.first)) - 1
        if at < 0:
            return None
        data = handle.read_node(ObjectKind.TREE_PAGE, node.pages[at].node)
        node = lower(decode_tree(data, page=True), node, node.pages[at])
    return next((entry for entry in node.entries if entry.name == name), None)
