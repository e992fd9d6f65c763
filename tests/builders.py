"""Small builders of real things: states without torch, repositories in memory or on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.publish import Destination, Publication, publish_commit
from cas_ckpt.core.records import CommitInfo
from cas_ckpt.core.tree import load_tree, stored_tensors
from cas_ckpt.objects.layouts import LayoutObject, layout_node
from cas_ckpt.objects.nodes import CommitObject, ContainerEntry, Entry, Node, tree_nodes
from cas_ckpt.objects.spec import Box, Spec, raw_dtype
from cas_ckpt.objects.state import Container, Item, TensorCopy, TensorItem, ValueItem
from cas_ckpt.ops.checkout.checkout import fetch_tensors
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.ops.refs import delete_branch


class ArrayMemory:
    """An array as source and as target."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def read(self, box: Box) -> np.ndarray[Any, Any]:
        return self.array[box.slices]

    def open(self, box: Box) -> np.ndarray[Any, Any]:
        return self.array[box.slices]

    def done(self, box: Box, array: np.ndarray[Any, Any]) -> None:
        """It was a view."""


def tensor(array: np.ndarray[Any, Any], *, flavor: str = "numpy", identity: Any = None) -> TensorItem:
    """`array` as a tensor to be committed."""
    return TensorItem(Spec(array.dtype.name, array.shape), ArrayMemory(array), flavor, identity)


def state(items: Mapping[Any, Any]) -> Container:
    """Nested dicts of arrays and plain values as a state."""
    return Container("dict", {name: _item(value) for name, value in items.items()})


def _item(value: Any) -> Item:
    if isinstance(value, np.ndarray):
        return tensor(value)
    if isinstance(value, dict):
        return state(value)
    return value if isinstance(value, (TensorItem, Container)) else ValueItem(value)


def numbers(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray[Any, Any]:
    """Random numbers that are the same every time."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def new_repository(path: Path, **settings: Any) -> RepositoryHandle:
    """A repository on disk."""
    return init_repository(path, **settings)


def commit(handle: RepositoryHandle, items: Mapping[Any, Any], **request: Any) -> CommitInfo:
    """Commit nested dicts of arrays and values."""
    return commit_tree(handle, state(items), CommitRequest(**request))


def doubling_nodes(depth: int, leaf: Entry) -> list[Node]:
    """The nodes of a tree in which every level names the next one twice, the root last."""
    nodes = tree_nodes("dict", None, [leaf])
    for _ in range(depth):
        below = nodes[-1].digest
        nodes += tree_nodes("dict", None, [ContainerEntry("a", below), ContainerEntry("b", below)])
    return nodes


def publish_nodes(handle: RepositoryHandle, tree: Sequence[Node], layout: Node | None = None) -> str:
    """Commit a state of invented nodes, the root last, on main; the commit's id."""
    layout = layout or layout_node(LayoutObject())
    nodes = list({node.digest: node for node in (*tree, layout)}.values())
    made = CommitObject(tree[-1].digest, (), "", "", 0, None, {}, None, layout.digest)
    generation = handle.begin_writing()
    published = publish_commit(handle, Publication(made, nodes, [], generation), Destination("main"))
    handle.add_written(published.packs, published.nodes, generation=generation)
    return published.commit.digest.hex()


def weights(seed: int) -> np.ndarray[Any, Any]:
    """One small tensor, another for each seed."""
    return numbers(64, 64, seed=seed)


def leave_garbage(handle: RepositoryHandle) -> CommitInfo:
    """A commit of `weights(1)` on main, and one of `weights(2)`, returned, that no ref leads to any more."""
    commit(handle, {"w": weights(1)})
    garbage = commit(handle, {"w": weights(2)}, branch="side")
    delete_branch(handle, "side", force=True)
    return garbage


def with_new_index(path: Path) -> RepositoryHandle:
    """The repository with an index of its own, which knows the store alone."""
    found = RepositoryHandle.open(path, index_url=":memory:")
    found.sync()
    return found


def stored_arrays(handle: RepositoryHandle, root: str) -> dict[str, np.ndarray[Any, Any]]:
    """Every tensor below a root, as raw items by key."""
    found, copies = {}, []
    for path, stored in stored_tensors(load_tree(handle, bytes.fromhex(root))):
        array = np.empty(stored.spec.shape, raw_dtype(stored.spec.item_bytes))
        found["/".join(map(str, path))] = array
        copies.append(TensorCopy(path, stored, ArrayMemory(array)))
    fetch_tensors(handle, copies)
    return found


def same_bytes(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Whether two arrays hold the same bytes in C order."""
    return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()
