"""The text of a query that somebody wrote: its parameters, and that it is one statement."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.index.unfolding import Word, refuse_unfolding

MOST_CHARS = 100_000
"""A longer text is not a query that a person wrote."""


@dataclass(frozen=True, slots=True)
class Query:
    """A query as it was read.

    Attributes:
        pieces: Its text, cut at the parameters.
        parameters: Their names, in order; one less than there are pieces.
        num_tokens: Names, numbers, texts and signs in it.
    """

    pieces: tuple[str, ...]
    parameters: tuple[str, ...]
    num_tokens: int

    @property
    def names(self) -> frozenset[str]:
        """The names of the parameters."""
        return frozenset(self.parameters)

    def text(self, parameter: Callable[[str], str], piece: Callable[[str], str] = str) -> str:
        """Its text, with parameters and what is between them written in another way."""
        names = [parameter(name) for name in self.parameters]
        return "".join(part for pair in zip(map(piece, self.pieces), [*names, ""], strict=True) for part in pair)


_TOKENS: Final = r"""
    (?P<blank>\s+|--[^{line_ends}]*) | (?P<comment>/\*)
    | (?P<string>{strings}'(?:[^']|'')*'?) | (?P<quoted>"(?:[^"]|"")*"?{quoted})
    | ::|:= | :(?P<parameter>[A-Za-z_][A-Za-z0-9_]*)
    | (?P<name>[^\W\d][\w$]*) | \d[\w.]* | (?P<end>;) | (?P<dot>\.) | .
"""
_SQLITE_TOKENS = re.compile(
    _TOKENS.format(line_ends=r"\n", strings="", quoted=r"|`(?:[^`]|``)*`?|\[[^\]]*\]?"), re.VERBOSE | re.DOTALL
)
_POSTGRES_TOKENS = re.compile(
    _TOKENS.format(line_ends=r"\r\n", strings=r"[eE]'(?:[^'\\]|\\.|'')*'?|\$(?:[^\W\d]\w*)?\$|", quoted=""),
    re.VERBOSE | re.DOTALL,
)


class _Token(NamedTuple):
    kind: str
    start: int
    end: int


def _tokens(text: str, *, postgres: bool) -> Iterator[_Token]:
    """The parts of `text` that are not blank; `kind` is that of `_TOKENS`, empty for any other."""
    pattern, at = _POSTGRES_TOKENS if postgres else _SQLITE_TOKENS, 0
    while at < len(text):
        found = pattern.match(text, at)
        assert found is not None  # noqa: S101  # the last way takes any character
        kind, end = found.lastgroup or "", found.end()
        if kind == "comment":
            end = _end_of_comment(text, end, nested=postgres)
        elif found[0].startswith("$") and kind == "string":
            last = text.find(found[0], end)
            end = len(text) if last < 0 else last + len(found[0])
        if kind not in ("blank", "comment"):
            yield _Token(kind, at, end)
        at = end


def _end_of_comment(text: str, at: int, *, nested: bool) -> int:
    depth = 1
    while depth:
        end, inner = text.find("*/", at), text.find("/*", at)
        if end < 0:
            return len(text)
        if nested and 0 <= inner < end:
            depth, at = depth + 1, inner + 2
        else:
            depth, at = depth - 1, end + 2
    return at


def read_query(query: str, *, postgres: bool) -> Query:
    """The query in `query`: its parameters are `:name`, but not inside of quotes or comments.

    Raises:
        InvalidInputError: no statement or several, a NUL, text that is not Unicode, or too much of it.
    """
    if len(query) > MOST_CHARS:
        raise InvalidInputError(f"sql: a query of {len(query)} characters: there may be {MOST_CHARS}")
    try:
        query.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"sql: the query is not text: {error}") from error
    if "\0" in query:
        raise InvalidInputError("sql: there is a NUL in the query: give bytes that hold one as a parameter")
    tokens = list(_tokens(query, postgres=postgres))
    while tokens and tokens[-1].kind == "end":
        tokens.pop()
    if not tokens:
        raise InvalidInputError("sql: there is no query: give one, such as SELECT * FROM commits")
    if any(token.kind == "end" for token in tokens):
        raise InvalidInputError("sql: several statements: give one query at a time, without ; inside")
    refuse_unfolding([Word(token.kind, query[token.start : token.end]) for token in tokens])
    pieces, names, at = [], [], 0
    for token in tokens:
        if token.kind == "parameter":
            pieces.append(query[at : token.start])
            names.append(query[token.start + 1 : token.end])
            at = token.end
    return Query((*pieces, query[at : tokens[-1].end]), tuple(names), len(tokens))
