"""Which commits changed an entry, by tree nodes alone.

Invariant: two states have equal signatures if and only if the entries that match are the same:
keys, specs and content ids. A subtree that was looked at once is not entered again, so that work
follows what changes from commit to commit. No chunk is read.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence

from blake3 import blake3

from cas_ckpt.errors import NotFoundError
from cas_ckpt.index.rows import CommitRow
from cas_ckpt.objects.canonical import pack_canonical
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.kinds import ObjectKind
from cas_ckpt.objects.state import CONTAINER_KINDS, render_name
from cas_ckpt.objects.tree_node import ContainerEntry, Entry, TensorEntry, TreeNode, decode_tree
from cas_ckpt.ops.patterns import KeyPatterns
from cas_ckpt.ops.tree import check_entries, lower
from cas_ckpt.repository import RepositoryHandle

MOST_REMEMBERED = 100_000
"""Subtrees whose signature is kept: some 30 MB."""

_NOTHING = b""


class KeyHistory:
    """Tells whether commits changed what `patterns` name, one after another."""

    def __init__(
        self, handle: RepositoryHandle, patterns: str | Sequence[str], *, forgotten: Collection[Digest] = ()
    ) -> None:
        self._handle = handle
        self._forgotten = forgotten
        self._patterns = KeyPatterns(patterns)
        self._heads = [_literal_head(pattern) for pattern in self._patterns.patterns]
        self._num_entries = 0
        self._nodes: dict[Digest, tuple[TreeNode, list[Entry]]] = {}
        self._num_kept = 0
        self._signatures: OrderedDict[tuple[Digest, str], bytes] = OrderedDict()

    def changed(self, rows: Iterator[CommitRow]) -> Iterator[CommitRow]:
        """Those commits that differ from their first parent in an entry that matches, in order.

        A forgotten commit whose data is gone is left out; what follows it is compared with the
        nearest first parent that is still there.

        Raises:
            NotFoundError, CorruptionError: a node of a commit that was not forgotten.
        """
        for row in rows:
            own = self._signature_of(row)
            if own is not None and own != self._before(row):
                yield row

    def _before(self, row: CommitRow) -> bytes:
        parents = row.parents
        while parents:
            parent = self._handle.index.commit(parents[0])
            if parent is None:
                break
            found = self._signature_of(parent)
            if found is not None:
                return found
            parents = parent.parents
        return _NOTHING

    def _signature_of(self, row: CommitRow) -> bytes | None:
        """None: the commit was forgotten and its data is gone."""
        root = Digest(row.root)
        if row.digest not in self._forgotten:
            return self.signature(root)
        if not self._handle.index.known([root]):
            return None
        try:
            return self.signature(root)
        except NotFoundError:
            return None

    def signature(self, root: Digest) -> bytes:
        """A digest of the entries of the state `root` that match; empty if none does.

        Raises:
            NotFoundError, CorruptionError: a node is missing or damaged.
        """
        self._num_entries = 0
        return self._container(root, "")

    def _container(self, digest: Digest, key: str) -> bytes:
        known = self._signatures.get((digest, key))
        if known is not None:
            self._signatures.move_to_end((digest, key))
            return known
        found: list[bytes] = []
        node, entries = self._read(digest)
        self._num_entries += len(entries)
        check_entries(self._num_entries, "what matches in the tree of a commit stands")
        itself = node.kind not in CONTAINER_KINDS or not entries
        if itself and key and self._patterns.matches(key):
            found.append(_packed(key, "container", node.kind, node.attrs))
        for entry in entries:
            at = f"{key}/{render_name(entry.name)}" if key else render_name(entry.name)
            signature = self._entry(entry, at)
            if signature:
                found.append(signature)
        made = blake3(b"".join(found)).digest() if found else _NOTHING
        self._signatures[digest, key] = made
        if len(self._signatures) > MOST_REMEMBERED:
            self._signatures.popitem(last=False)
        return made

    def _read(self, digest: Digest) -> tuple[TreeNode, list[Entry]]:
        """A container and its entries; one that stands in many places is not read for each of them."""
        found = self._nodes.get(digest)
        if found is None:
            node = decode_tree(self._handle.read_node(ObjectKind.TREE, digest))
            found = (node, list(self._entries(node)))
            self._num_kept += len(found[1])
            if self._num_kept > MOST_REMEMBERED:
                self._nodes.clear()
                self._num_kept = len(found[1])
            self._nodes[digest] = found
        return found

    def _entry(self, entry: Entry, key: str) -> bytes:
        if isinstance(entry, ContainerEntry):
            return self._container(entry.node, key) if self._may_match_below(key) else _NOTHING
        if not self._patterns.matches(key):
            return _NOTHING
        if isinstance(entry, TensorEntry):
            spec = entry.spec
            return _packed(key, entry.flavor, spec.dtype, list(spec.shape), entry.node or entry.inline)
        return _packed(key, "value", entry.data)

    def _entries(self, node: TreeNode) -> Iterator[Entry]:
        """The entries of a container, those in pages included."""
        if not node.height:
            yield from node.entries
            return
        data = self._handle.read_nodes(ObjectKind.TREE_PAGE, [page.node for page in node.pages])
        for page in node.pages:
            yield from self._entries(lower(decode_tree(data[page.node], page=True), node, page))

    def _may_match_below(self, key: str) -> bool:
        start = key.replace(".", "/") + "/"
        return any(start.startswith(head) or head.startswith(start) for head in self._heads)


def _literal_head(pattern: str) -> str:
    """What every match of `pattern` begins with, with "/" for "." as the two are not told apart."""
    return re.split(r"[*?]", pattern, maxsplit=1)[0].replace(".", "/")


def _packed(*parts: object) -> bytes:
    """The parts as bytes of their own length; keys with lone surrogates too."""
    return blake3(
        pack_canonical([part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part for part in parts])
    ).digest()
