"""What verbs answer, made by walking the nodes of every commit: the model for answers of the index."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cas_ckpt import Repository
from cas_ckpt.core.records import CommitInfo
from cas_ckpt.core.tree import paged_entries, reachable
from cas_ckpt.errors import NotFoundError
from cas_ckpt.index.rows import ListedEntry
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.nodes import ContainerEntry, TensorEntry, ValueEntry, decode_tree
from cas_ckpt.objects.state import CONTAINER_KINDS, KIND_OF_FLAVOR, Flavor, render_name
from cas_ckpt.objects.values import decode_value


class Leaf(NamedTuple):
    """A tensor or value as a node lists it, or a container that people see as one entry.

    Attributes:
        content: Equal if and only if it is the same.
    """

    key: str
    shown: ListedEntry
    content: Any
    object_id: Digest | None


@dataclass
class Tree:
    """A container as its nodes say."""

    key: str
    digest: Digest
    kind: str
    attrs: bytes | None
    inside: list[Tree | Leaf] = field(default_factory=list)

    @property
    def is_entry(self) -> bool:
        """Whether people see one entry."""
        return not self.inside or self.kind not in CONTAINER_KINDS

    def leaves(self) -> Iterator[Leaf]:
        """What is stored, parts of tensors too."""
        for one in self.inside:
            if isinstance(one, Tree):
                yield from one.leaves()
            else:
                yield one

    def trees(self) -> Iterator[Tree]:
        """This and all containers in it."""
        yield self
        for one in self.inside:
            if isinstance(one, Tree):
                yield from one.trees()

    def entries(self) -> Iterator[Leaf]:
        """What people see."""
        for one in self.inside:
            if isinstance(one, Leaf):
                yield one
            elif one.is_entry:
                yield Leaf(one.key, one.shown(), one.digest, one.digest)
            else:
                yield from one.entries()

    def shown(self) -> ListedEntry:
        """This container as one entry."""
        size = sum(leaf.shown.num_bytes for leaf in self.leaves() if leaf.content[0] != "value")
        if self.kind in CONTAINER_KINDS:
            return ListedEntry(self.key, self.kind, None, None, size)
        by_name = {one.key.removeprefix(f"{self.key}/"): one for one in self.inside}
        items = next((by_name[name] for name in ("values", "int_repr", "items") if name in by_name), None)
        dtype = shape = None
        if isinstance(items, Leaf):
            dtype, shape = items.shown.dtype, items.shown.shape
        attrs = None if self.attrs is None else decode_value(self.attrs)
        own = attrs.get("shape") if isinstance(attrs, dict) else None
        return ListedEntry(self.key, self.kind, dtype, shape if own is None else tuple(own), size)


class Walked:
    """Every commit of a repository, by its nodes."""

    def __init__(self, repo: Repository) -> None:
        self.handle = repo._handle
        self._trees: dict[tuple[Digest, str], Tree] = {}
        self._reach: dict[str, frozenset[Digest]] = {}

    def tree(self, root: str | Digest, key: str = "") -> Tree:
        """The state, or container, of this id."""
        digest = Digest(bytes.fromhex(root)) if isinstance(root, str) else root
        if (digest, key) not in self._trees:
            node = decode_tree(self.handle.read_node(ObjectKind.TREE, digest))
            entries = paged_entries(self.handle, {digest: node})[digest][1] if node.height else node.entries
            made = Tree(key, digest, node.kind, node.attrs)
            for entry in entries:
                at = f"{key}/{render_name(entry.name)}" if key else render_name(entry.name)
                made.inside.append(self.tree(entry.node, at) if isinstance(entry, ContainerEntry) else _leaf(at, entry))
            self._trees[digest, key] = made
        return self._trees[digest, key]

    def below(self, root: str) -> frozenset[Digest]:
        """Ids of all that the state consists of."""
        if root not in self._reach:
            self._reach[root] = frozenset(reachable(self.handle, Digest(bytes.fromhex(root))))
        return self._reach[root]

    def has_data(self, commit: CommitInfo) -> bool:
        """Whether all of its state is in packs."""
        try:
            self.below(commit.root)
        except NotFoundError:
            return False
        return True

    def sizes(self, digests: Collection[Digest]) -> dict[Digest, tuple[bool, int, int]]:
        """Is it a chunk, its plain bytes, its bytes in packs."""
        places = self.handle.locate(list(digests))
        return {
            digest: (
                found[0].kind == ObjectKind.CHUNK, found[0].num_bytes,
                sum(one.stored_bytes + one.header_bytes for one in found),
            )
            for digest, found in places.items()
        }  # fmt: skip


def _leaf(key: str, entry: TensorEntry | ValueEntry | Any) -> Leaf:
    if isinstance(entry, ValueEntry):
        return Leaf(key, ListedEntry(key, "value", None, None, len(entry.data)), ("value", entry.data), None)
    is_value = entry.flavor == Flavor.VALUE
    dtype, shape = (None, None) if is_value else (entry.spec.dtype, entry.spec.shape)
    shown = ListedEntry(key, KIND_OF_FLAVOR[entry.flavor], dtype, shape, entry.spec.shown_bytes)
    return Leaf(key, shown, ("tensor", entry.flavor, entry.spec, entry.node or entry.inline, entry.single), entry.node)
