"""Patterns over keys: what `keys=` and `frozen=` mean, wherever keys are listed or looked up.

Invariant: one pattern means the same to whoever walks a tree in memory and to whoever asks the index for rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

_TOKEN = re.compile(r"\*\*/|\*\*|\*|\?|/|[^*?/]+")
_MEANING = {"**/": r"(?:.*[/.])?", "**": r".*", "*": r"[^/]*", "?": r"[^/]", "/": r"[/.]"}


@lru_cache(maxsize=256)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The regular expression that keys matching `pattern` match as a whole."""
    parts = [_MEANING.get(token) or re.escape(token) for token in _TOKEN.findall(pattern)]
    return re.compile(f"{''.join(parts)}(?:[/.].*)?", re.DOTALL)


class KeyPatterns:
    """A set of glob patterns over keys, for `keys=` and `frozen=`; remembers which of them ever matched.

    `*` and `?` stay inside one component, `**` crosses them; a pattern that names a container
    names everything below it. A "/" of the pattern also matches the "." of a module's parameter
    names, so `model/base/**` names the parameters of the submodule `base` of `model`.

    Args:
        keys: Whole keys that match too; nobody minds if they are not there.
    """

    def __init__(self, patterns: str | Sequence[str] | None, keys: frozenset[str] = frozenset()) -> None:
        self._keys = keys
        self.patterns = [patterns] if isinstance(patterns, str) else list(patterns or ())
        self._compiled = list(map(compile_pattern, self.patterns))
        self._used = [False] * len(self.patterns)

    def __bool__(self) -> bool:
        return bool(self.patterns or self._keys)

    def matches(self, key: str) -> bool:
        """Whether any pattern matches `key`."""
        found = key in self._keys
        for at, pattern in enumerate(self._compiled):
            if pattern.fullmatch(key):
                self._used[at] = found = True
        return found

    @property
    def unused(self) -> list[str]:
        """Patterns that have matched nothing so far."""
        return [pattern for pattern, used in zip(self.patterns, self._used, strict=True) if not used]
