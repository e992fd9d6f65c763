"""Which keys of a state need a damaged object: down from the root, along tainted nodes alone.

Invariant: only nodes that lead to the damage are read, each once however many commits share it.
A node that cannot be read stands for all that is below it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from cas_ckpt.errors import CorruptionError, NotFoundError, StorageError, UnsupportedVersionError
from cas_ckpt.index.catalog import Index
from cas_ckpt.objects.digest import object_id
from cas_ckpt.objects.kinds import ObjectKind
from cas_ckpt.objects.state import CONTAINER_KINDS, Name, render_name
from cas_ckpt.objects.tree_node import ContainerEntry, PageEntry, TensorEntry, TreeNode, decode_tree
from cas_ckpt.storage.store import Store

ALL_BELOW = "**"
LAYOUT_KEY = "(layout)"
RECORD_KEY = "(commit)"
"""Of a forgotten commit, which has nothing else that could be lost."""

_Keys: TypeAlias = tuple[str, ...]
_MAX_DEPTH = 200
_MOST_KEYS = 10_000
"""Of one container; one with more is named as a whole."""


@dataclass(slots=True)
class KeyFinder:
    """Finds keys above damage.

    Attributes:
        tainted: Objects that are damaged or lead to damage -> whether they themselves are damaged.
    """

    store: Store
    index: Index
    tainted: Mapping[bytes, bool]
    _below: dict[tuple[bytes, str], _Keys] = field(default_factory=dict)

    def keys(self, root: bytes) -> _Keys:
        """Keys below the tree `root` that need something damaged; `**` is all of them."""
        return self._tree(root, ObjectKind.TREE, "", 0)

    def _tree(self, digest: bytes, kind: ObjectKind, until: str, depth: int) -> _Keys:
        """Keys relative to the tree node, or page of one, `digest`.

        Args:
            until: For a page, the name from which on another page holds the entries ("" at the end).
        """
        if digest not in self.tainted:
            return ()
        if (digest, until) not in self._below:
            node = None if self.tainted[digest] or depth > _MAX_DEPTH else self._read(digest, kind)
            whole = ALL_BELOW if node is None else ""
            self._below[digest, until] = (whole,) if node is None else self._entries(node, until, depth)
        return self._below[digest, until]

    def _read(self, digest: bytes, kind: ObjectKind) -> TreeNode | None:
        """The node, from any intact copy. Not through the handle, which would change the index on the way."""
        for place in self.index.locate([digest]).get(digest, ()):
            try:
                data = bytes(self.store.get_range(place.pack, place.offset + place.header_bytes, place.stored_bytes))
                if object_id(kind.label, data) == digest:
                    return decode_tree(data, page=kind == ObjectKind.TREE_PAGE)
            except (CorruptionError, NotFoundError, StorageError, UnsupportedVersionError):
                continue
        return None

    def _entries(self, node: TreeNode, until: str, depth: int) -> _Keys:
        if node.kind and node.kind not in CONTAINER_KINDS:
            return ("",)  # people see a composite tensor as one entry
        found: list[str] = []
        for entry in node.entries:
            if isinstance(entry, TensorEntry) and entry.node in self.tainted:
                found.append(render_name(entry.name))
            elif isinstance(entry, ContainerEntry):
                below = self._tree(entry.node, ObjectKind.TREE, "", depth + 1)
                found += [_joined(entry.name, key) for key in below]
        found += self._pages(node.pages, until, depth)
        return tuple(dict.fromkeys(found)) if len(found) <= _MOST_KEYS else (ALL_BELOW,)

    def _pages(self, pages: Sequence[PageEntry], until: str, depth: int) -> list[str]:
        found: list[str] = []
        ends = [*(render_name(page.first) for page in pages[1:]), until]
        for page, end in zip(pages, ends, strict=False):
            below = self._tree(page.node, ObjectKind.TREE_PAGE, end, depth + 1)
            span = f"[{render_name(page.first)}..{end})"
            found += [span if key == ALL_BELOW else key for key in below]
        return found


def _joined(name: Name, key: str) -> str:
    return f"{render_name(name)}/{key}" if key else render_name(name)
