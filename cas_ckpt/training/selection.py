"""Chooses keys of a state by glob patterns.

A pattern is matched component by component: `*`, `?` and `[...]` stay inside one component,
`**` stands for any number of them. A pattern that matches a container covers all below it.
Must not know torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from cas_ckpt.errors import InvalidInputError, NotFoundError
from cas_ckpt.objects.state import Container, Item, Name, Path, render_key

PLAIN_KINDS = frozenset({"dict", "odict", "list", "tuple"})
"""Kinds of containers that people see as containers; the others are one tensor or array each."""


class Selection:
    """The keys that one or several patterns cover; all keys when there is no pattern."""

    def __init__(self, patterns: str | Sequence[str] | None = None) -> None:
        self.patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns) if patterns is not None else None
        if self.patterns is not None and not all(self.patterns):
            raise InvalidInputError(f"keys {patterns!r}: an empty pattern matches nothing; use '**' for everything")
        self._match = None if self.patterns is None else _compiled(self.patterns).fullmatch

    def covers(self, path: Path) -> bool:
        """Whether everything at and below `path` is selected."""
        return self._match is None or self._match(render_key(path)) is not None

    def prune(self, tree: Container) -> Container:
        """`tree` with nothing but the selected entries and the containers that lead to them.

        Raises:
            NotFoundError: the patterns match no key.
        """
        if self.covers(()):
            return tree
        pruned = self._prune(tree, ())
        if pruned is None:
            raise NotFoundError(f"no key of the commit matches {', '.join(self.patterns or ())}: see `cas-ckpt ls`")
        return pruned

    def _prune(self, container: Container, path: Path) -> Container | None:
        kept: dict[Name, Item] = {}
        for name, child in container.children.items():
            found = self._kept(child, (*path, name))
            if found is not None:
                kept[name] = found
        return Container(container.kind, kept, container.attrs) if kept else None

    def _kept(self, item: Item, path: Path) -> Item | None:
        if self.covers(path):
            return item
        below = isinstance(item, Container) and item.kind in PLAIN_KINDS
        return self._prune(item, path) if below and isinstance(item, Container) else None


def _compiled(patterns: Sequence[str]) -> re.Pattern[str]:
    try:
        return re.compile("|".join(map(_regex, patterns)), re.DOTALL)
    except re.error as error:
        raise InvalidInputError(f"keys {', '.join(patterns)!r}: not a glob pattern: {error}") from error


def _regex(pattern: str) -> str:
    """A regular expression for the keys that a pattern matches, and all keys below them."""
    regex, slash = "", ""
    for part in pattern.rstrip("/").split("/"):
        if part == "**":
            regex += f"(?:{slash}[^/]+)*" if slash else "(?:[^/]+/)*"
            continue
        regex += slash + _TOKEN.sub(_token_regex, part)
        slash = "/"
    return f"(?:{regex})(?:/.*)?" if slash else "(?s:.*)"


_TOKEN = re.compile(r"\*+|\?|\[!?\]?[^\]/]*\]|.", re.DOTALL)


def _token_regex(token: re.Match[str]) -> str:
    text = token.group()
    if text[0] == "*":
        return "[^/]*"
    if text == "?":
        return "[^/]"
    if text[0] == "[" and len(text) > 2 and text != "[!]":
        inside = text[1:-1].replace("\\", "\\\\").replace("[", "\\[")
        return f"[^/{inside[1:]}]" if inside[0] == "!" else f"[{inside}]"
    return re.escape(text)
