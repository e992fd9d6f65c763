"""The entries of a stored state that a restore is asked for.

The patterns are those of ops/patterns.py. Unlike `ops.tree.select`, what is left keeps its
kind and its numbers, because it is matched with a live state. Must not know torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from cas_ckpt.errors import NotFoundError
from cas_ckpt.objects.state import CONTAINER_KINDS, Container, Item, Name, Path, render_key, walk
from cas_ckpt.objects.structures import STRUCTURE_KINDS, part_of_fields
from cas_ckpt.ops.patterns import KeyPatterns


class Selection:
    """The keys that one or several patterns cover; all keys when there is no pattern."""

    def __init__(self, patterns: str | Sequence[str] | None = None) -> None:
        self._patterns = KeyPatterns(patterns)

    def covers(self, path: Path) -> bool:
        """Whether everything at and below `path` is selected."""
        return not self._patterns or self._patterns.matches(render_key(path))

    def prune(self, tree: Container) -> Container:
        """`tree` with nothing but the selected entries and the containers that lead to them.

        Raises:
            NotFoundError: a pattern matches no key.
        """
        if not self._patterns:
            return tree
        pruned = self._kept(tree, ())
        if self._patterns.unused or not isinstance(pruned, Container):
            raise NotFoundError(
                f"no entry matches {', '.join(self._patterns.unused)}: repo.ls(ref) lists the keys"
            )
        return pruned

    def _kept(self, item: Item, path: Path) -> Item | None:
        if self.covers(path):
            for below, _ in walk(item, path):
                self.covers(below)  # so that a pattern which only matches in there counts as used
            return item
        if not isinstance(item, Container) or item.kind not in CONTAINER_KINDS:
            return None
        kept: dict[Name, Item] = {}
        for name, child in item.children.items():
            found = self._kept(child, (*path, name))
            if found is not None:
                kept[name] = found
        attrs = part_of_fields(item.attrs, kept) if item.kind in STRUCTURE_KINDS else item.attrs
        return Container(item.kind, kept, attrs) if kept else None
