"""How long a query becomes when a database unfolds it, which it does without a look at the clock.

Both databases put the query of a WITH in the place of each of its names, and the expression of a column of an inner
query in the place of each of its names: of 30 levels that each name the former twice become a thousand million copies.

    1. the words are divided into queries, one inside another by parentheses, and these into columns
    2. of each is counted how long it becomes, and how long a column of it, with what it names; an upper bound

Must not know: tables, views and what columns mean.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from cas_ckpt.errors import InvalidInputError

MOST_WORDS = 1 << 20
"""Of a query that was unfolded; SQLite takes some seconds and a few hundred megabytes for so many."""

_MOST_LEVELS = 100
"""Queries in one another; SQLite itself takes fewer than 20."""

_RESERVED = frozenset({
    "select", "distinct", "all", "from", "where", "on", "using", "join", "group", "order", "having", "limit", "union",
    "except", "intersect", "case", "when", "then", "else", "and", "or", "not", "is", "null", "as", "in", "between",
    "exists", "values",
})  # fmt: skip
_BEFORE_TABLES = frozenset({"from", "join", "in", "table", "only", "lateral", ","})
_AFTER_COLUMNS = frozenset(
    {"from", "where", "group", "having", "order", "limit", "union", "except", "intersect", "window"}
)
_NAMES = frozenset({"name", "quoted", "string"})


class Word(NamedTuple):
    """A token: a `name`, `quoted`, a `string` or something else, and its text."""

    kind: str
    text: str


def refuse_unfolding(words: list[Word]) -> None:
    """Refuse a query of which a database would make so much that nothing could end it.

    Raises:
        InvalidInputError: it could become longer than `MOST_WORDS`, or is nested too deeply.
    """
    try:
        length = unfolded_length(words)
    except RecursionError as error:
        raise InvalidInputError("sql: the queries in one another are too many: ask in steps") from error
    if length > MOST_WORDS:
        raise InvalidInputError(
            "sql: the parts of the query name one another so often that it would unfold into more than "
            f"{MOST_WORDS} words: ask in steps, or GROUP BY between them"
        )


def unfolded_length(words: list[Word]) -> float:
    """Words that it could become."""
    read = _Words(words)
    return _Lengths(read).length(_parts(read))


class _Words:
    """The words, and what each of them may be."""

    def __init__(self, words: list[Word]) -> None:
        self.words = words
        self.names = list(map(_unquoted, words))
        self.reserved = [
            name if word.kind == "name" else word.text for word, name in zip(words, self.names, strict=True)
        ]
        self._columns = [0, *accumulate(map(self._may_be_column, range(len(words))))]

    def _may_be_column(self, at: int) -> bool:
        kind, after = self.words[at].kind, self.words[at + 1].text if at + 1 < len(self.words) else ""
        before = self.reserved[at - 1] if at else ""
        if kind == "string":
            return before == "."
        is_name = kind == "quoted" or (kind == "name" and self.names[at] not in _RESERVED)
        return is_name and after not in (".", "(") and before != "as"

    def num_columns(self, begin: int, end: int) -> int:
        """Words that may be names of columns."""
        return self._columns[end] - self._columns[begin]

    def num_in_column(self, begin: int, end: int) -> int:
        """The same of one column of an answer, which may end with a name of its own."""
        found = self.num_columns(begin, end)
        if end - begin > 1 and self.words[end - 1].kind in _NAMES:
            before = self.words[end - 2]
            follows = before.text == ")" or before.kind in _NAMES or before.text[0].isdigit()
            found -= follows and self.reserved[end - 2] not in _RESERVED
        return max(found, 1)

    def defined_before(self, at: int) -> int | None:
        """Where the name is whose query begins with the parenthesis at `at`: name AS (, or name (columns) AS (."""
        at -= 1
        while at > 0 and self.reserved[at] in ("materialized", "not"):
            at -= 1
        if at < 1 or self.reserved[at] != "as":
            return None
        at -= 1
        if self.words[at].text == ")":
            while at > 0 and self.words[at].text != "(":
                at -= 1
            at -= 1
        return at


@dataclass(eq=False, slots=True)
class _Part:
    """A query in parentheses, or all of it. Places are numbers of words.

    Attributes:
        inner: Queries directly inside of it that are no definitions of a WITH.
        defined: Those that are, by name.
        tables: Where it has names in the place of a table.
        columns: Where columns of its answer begin and end.
        is_open: A part of it, between words like UNION, is not grouped: who names its columns may get what they are.
    """

    begin: int
    end: int
    parent: _Part | None
    inner: list[_Part] = field(default_factory=list)
    defined: dict[str, _Part] = field(default_factory=dict)
    tables: list[int] = field(default_factory=list)
    columns: list[tuple[int, int]] = field(default_factory=list)
    is_open: bool = False


class _Reader:
    """Reads the words of one part that are not in parentheses."""

    def __init__(self, part: _Part) -> None:
        self.part = part
        self._begin = -1
        self._is_grouped = True

    def read(self, at: int, word: str, after: str) -> None:
        if self._begin >= 0 and (word == "," or word in _AFTER_COLUMNS):
            self.part.columns.append((self._begin, at))
            self._begin = at + 1 if word == "," else -1
        if word in ("select", "values"):
            self.part.is_open |= not self._is_grouped
            self._begin, self._is_grouped = at + 1, after == "distinct"
        self._is_grouped |= word == "group"

    def end(self, at: int) -> None:
        self.part.end = at
        self.part.is_open |= not self._is_grouped
        if self._begin >= 0:
            self.part.columns.append((self._begin, at))


def _parts(words: _Words) -> _Part:
    """All of it.

    Raises:
        RecursionError: too many levels.
    """
    whole = _Reader(_Part(0, len(words.words), None))
    levels: list[tuple[_Reader, bool]] = [(whole, True)]  # of each parenthesis the query, and whether it is its own
    num_levels, before = 0, ""  # before: the last word that does not open a parenthesis
    for at, word in enumerate(words.reserved):
        reader, is_own = levels[-1]
        after = words.reserved[at + 1] if at + 1 < len(words.reserved) else ""
        if word == "(" and words.words[at].kind == "":
            name_at = words.defined_before(at) if before in ("as", "materialized") else None
            is_query = name_at is not None or after in ("select", "values", "with", "table")
            if is_query:
                inner = _Reader(_Part(at + 1, len(words.words), reader.part))
                if name_at is None or words.names[name_at] in reader.part.defined:
                    reader.part.inner.append(inner.part)
                else:
                    reader.part.defined[words.names[name_at]] = inner.part
                    while reader.part.tables and reader.part.tables[-1] >= name_at:  # it follows a comma
                        reader.part.tables.pop()
                reader, num_levels = inner, num_levels + 1
                if num_levels > _MOST_LEVELS:
                    raise RecursionError
            levels.append((reader, is_query))
            continue
        if word == ")" and words.words[at].kind == "" and len(levels) > 1:
            levels.pop()
            if is_own:
                reader.end(at)
                num_levels -= 1
        elif is_own:
            reader.read(at, word, after)
        if words.words[at].kind in _NAMES and before in _BEFORE_TABLES:
            reader.part.tables.append(at)
        before = word
    for reader, is_own in reversed(levels):
        if is_own:
            reader.end(len(words.words))
    return whole.part


class _Lengths:
    def __init__(self, words: _Words) -> None:
        self._words = words
        self._lengths: dict[_Part, float] = {}
        self._columns: dict[_Part, float] = {}
        self._entered: set[_Part] = set()

    def length(self, part: _Part) -> float:
        """Words that `part` becomes."""
        found = self._lengths.get(part)
        if found is not None:
            return found
        if part in self._entered:  # they name one another in a circle, which no database takes
            return math.inf
        self._entered.add(part)
        named = list(self._named(part, part.begin, part.end))
        lengths = sum(map(self.length, named))
        each = max((self._columns[inner] for inner in named if inner in self._columns), default=1.0)
        columns = [
            self._words.num_in_column(begin, end) * each + sum(map(self.length, self._named(part, begin, end)))
            for begin, end in part.columns
        ]
        longest = max(columns, default=each)
        self._columns[part] = longest if part.is_open else 1.0
        own = self._words.num_columns(part.begin, part.end) - sum(
            self._words.num_columns(inner.begin, inner.end) for inner in part.defined.values()
        )
        found = part.end - part.begin + own * each + longest * self._num_aliases(part) + lengths
        self._lengths[part] = found
        return found

    def _num_aliases(self, part: _Part) -> int:
        """How often words behind the columns of `part` name them."""
        names = {self._words.names[end - 1] for _, end in part.columns if self._words.words[end - 1].kind in _NAMES}
        last = max((end for _, end in part.columns), default=part.end)
        return sum(name in names for name in self._words.names[last : part.end])

    def _named(self, part: _Part, begin: int, end: int) -> Iterator[_Part]:
        """The queries that words from `begin` to `end` of `part` lead to: inside of them, and named of a WITH."""
        first = bisect_left(part.inner, begin, key=lambda inner: inner.begin)
        for inner in part.inner[first:]:
            if inner.begin >= end:
                break
            yield inner
        for at in part.tables[bisect_left(part.tables, begin) : bisect_left(part.tables, end)]:
            holder: _Part | None = part
            while holder is not None:
                found = holder.defined.get(self._words.names[at])
                if found is not None and not found.begin <= at < found.end:  # else it names itself
                    yield found
                holder = holder.parent


def _unquoted(word: Word) -> str:
    """A name as databases compare it."""
    text = word.text
    if word.kind in ("quoted", "string") and text[0] in "\"'`[":
        end = "]" if text[0] == "[" else text[0]
        text = text[1 : -1 if len(text) > 1 and text.endswith(end) else None]
        text = text if end == "]" else text.replace(end * 2, end)
    return text.lower()
