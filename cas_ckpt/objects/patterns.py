"""Patterns over keys: what `keys=` and `frozen=` mean, wherever keys are listed or looked up.

For a key, call `KeyPatterns.matches`. To open no more containers than needed, call
`KeyPatterns.reaches` first, and `KeyPatterns.names_in` for the names in one container that are worth a look.

Invariant: one pattern means the same to whoever walks a tree in memory and to whoever asks the index for rows. What
`reaches` and `names_in` leave out matches nothing; what they let through may match nothing too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from cas_ckpt.arguments import Keys, did_you_mean, texts
from cas_ckpt.errors import NotFoundError
from cas_ckpt.objects.nodes import name_order
from cas_ckpt.objects.state import Name, Path, parse_key, render_key

_TOKEN = re.compile(r"\*\*/|\*\*|\*|\?|/|[^*?/]+")
_MEANING = {"**/": r"(?:.*[/.])?", "**": r".*", "*": r"[^/]*", "?": r"[^/]", "/": r"[/.]"}
_IN_A_NAME = {"**/": "*", "**": "*", "/": "?"}
"""The characters that they match, which exclude "/"."""

_WILD = re.compile(r"[*?]")
_BETWEEN_TEXTS = re.compile(r"[*/]+")
_DIGITS = re.compile(r"-?[0-9]*\Z")
_MOST_DEPTH = 64
"""Components of a pattern that are looked at to tell what is below a container; behind them anything may match."""


@lru_cache(maxsize=256)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The regular expression that keys matching `pattern` match as a whole."""
    parts = [_MEANING.get(token) or re.escape(token) for token in _TOKEN.findall(pattern)]
    return re.compile(f"{''.join(parts)}(?:[/.].*)?", re.DOTALL)


@lru_cache(maxsize=512)
def _compile_beginning(pattern: str, *, of_any: bool = True) -> re.Pattern[str]:
    """A regular expression that matches a container's key and "/" if and only if some key below can match `pattern`.

    Args:
        of_any: False: if, and only if, any key below it leads to one that could.
    """
    parts: list[str] = []
    depth = 0
    for piece in _TOKEN.findall(pattern):
        if piece in ("**", "**/") or depth == _MOST_DEPTH:
            parts.append(".*")  # whatever has been read, the rest of the pattern may follow below
            break
        parts.append(_MEANING.get(piece) or re.escape(piece))
        if piece == "/":
            parts.append("(?:|" if of_any else "(?:")  # the key may end here, or go on
            depth += 1
    else:
        parts.append("[/.].*")
    return re.compile("".join(parts) + ")" * depth, re.DOTALL)


Order: TypeAlias = tuple[int, int, bytes]
"""As `name_order` gives it."""

_FIRST: Order = (-1, 0, b"")
_FIRST_TEXT: Order = (1, 0, b"")


@dataclass(frozen=True, slots=True)
class Names:
    """Which names in one container are worth a look.

    Attributes:
        ranges: From the first order to before the second; None: any name.
        globs: Each, as keys are written, is what one of these says, where `*` is any text and `?` any one character;
            empty: any name.
        is_one: One name is asked for, which is there once at most.
    """

    ranges: tuple[tuple[Order, Order], ...] | None = None
    globs: tuple[str, ...] = ()
    is_one: bool = False

    @staticmethod
    def just(name: Name, text: str) -> Names:
        """One name, and as it is written in keys."""
        order = name_order(name)
        return Names(((order, _behind(order)),), (text,), is_one=True)


ANY_NAME = Names()


def _behind(order: Order) -> Order:
    """The separators after a name."""
    kind, number, text = order
    return (kind, number, text + b"\0") if kind else (kind, number + 1, text)


MOST_OTHERS = 1_000
"""Keys that matched nothing, which are kept to be named where a pattern looks like a slip of one."""


class KeyPatterns:
    """A set of glob patterns over keys, for `keys=` and `frozen=`; remembers which of them ever matched.

    `*` and `?` stay inside one component, `**` crosses them; a pattern that names a container
    names everything below it. A "/" of the pattern also matches the "." of a module's parameter
    names, so `model/base/**` names the parameters of the submodule `base` of `model`.

    Args:
        keys: Whole keys that match too; nobody minds if they are not there.
    """

    def __init__(self, patterns: Keys, keys: frozenset[str] = frozenset()) -> None:
        self._keys = keys
        self.patterns = () if patterns is None else texts("keys", patterns)
        self._compiled = list(map(compile_pattern, self.patterns))
        self._used = [False] * len(self.patterns)
        self._others: list[str] = []

    def __bool__(self) -> bool:
        return bool(self.patterns or self._keys)

    def matches(self, key: str) -> bool:
        """Whether any pattern matches `key`."""
        found = key in self._keys
        for at, pattern in enumerate(self._compiled):
            if pattern.fullmatch(key):
                self._used[at] = found = True
        if not found and len(self._others) < MOST_OTHERS:
            self._others.append(key)
        return found

    def selects(self, path: Path) -> bool:
        """Whether everything at and below `path` is meant; all is, without a pattern."""
        return not self or self.matches(render_key(path))

    @property
    def unused(self) -> list[str]:
        """Patterns that have matched nothing so far."""
        return [pattern for pattern, used in zip(self.patterns, self._used, strict=True) if not used]

    def require_used(self) -> None:
        """Raise NotFoundError if a pattern has matched nothing."""
        if self.unused:
            raise self.unmatched()

    def unmatched(self) -> NotFoundError:
        """The error of patterns that have matched nothing."""
        similar = did_you_mean(next(iter(self.unused), ""), self._others)
        return NotFoundError(f"no entry matches {', '.join(self.unused)}{similar}: repo.ls(ref) lists the keys")

    def reaches(self, container: str) -> bool:
        """Whether a pattern could match a key below the key `container`; "" is the root."""
        return not container or any(_compile_beginning(one).fullmatch(container + "/") for one in self.patterns)

    def reaches_all(self, container: str) -> bool:
        """Whether a pattern could match a key below every container that is below the key `container`."""
        return any(_compile_beginning(one, of_any=False).fullmatch(f"{container}/") for one in self.patterns)

    def covers(self, container: str) -> bool:
        """Whether all keys below the key `container` match, because it does; False of the root, which has no key."""
        return container != "" and any(pattern.fullmatch(container) for pattern in self._compiled)

    def names_in(self, container: str) -> Names:
        """Which names in the container under the key `container` could lead to a match."""
        start = f"{container}/" if container else ""
        ranges: list[tuple[Order, Order]] | None = []
        globs: set[str] = set()
        for pattern in self.patterns:
            if container and not _compile_beginning(pattern).fullmatch(start):
                continue
            globs.add(_glob_of_name(pattern, start))
            own = _ranges(_WILD.split(pattern, maxsplit=1)[0][len(start) :])
            if ranges is not None:
                ranges = None if own is None else ranges + own
        unique = () if "*" in globs else tuple(sorted(globs))
        return Names(None if ranges is None else tuple(sorted(set(ranges))), unique)


def _glob_of_name(pattern: str, start: str) -> str:
    """A glob for the name, if `start` and the name of a leaf match `pattern`."""
    if len(_WILD.split(pattern, maxsplit=1)[0]) >= len(start):
        # What comes before any wildcard stands character by character for `start`, the rest for the name.
        rest = pattern[len(start) :]
        return "".join(_IN_A_NAME.get(token, token) for token in _TOKEN.findall(rest)) + "*" * (rest[-1:] != "*")
    # No text has a "/" in it, so that each is in `start` as a whole, or in the name.
    missing = [text for text in _BETWEEN_TEXTS.split(pattern) if not _is_in(text, start)]
    return "*".join(["", *missing, ""]) if missing else "*"


def _is_in(text: str, start: str) -> bool:
    """Whether a part of a pattern, without `*` and "/", may stand for something in `start`."""
    return re.search(re.escape(text).replace(r"\?", "[^/]"), start) is not None if "?" in text else text in start


def _ranges(beginning: str) -> list[tuple[Order, Order]] | None:
    """The orders of names that a key can go on with if it goes on with `beginning`; None: any.

    A "." of the name may stand for a "/" behind the name itself, so that only what begins alike can be said.
    """
    name, slash, _ = beginning.partition("/")
    if not name or "~" in name:  # "~": names are written otherwise than they are ordered
        return None
    text = name.encode("utf-8", "surrogatepass")
    found: list[tuple[Order, Order]] = [((1, 0, text), (1, 0, text + b"\xff"))]
    if _DIGITS.match(name):
        (number,) = parse_key(name)
        whole = slash and isinstance(number, int)
        found.append((name_order(number), _behind(name_order(number))) if whole else (_FIRST, _FIRST_TEXT))
    return found
