"""Errors as plain values, so that one process can raise what another one met.

Errors of cas_ckpt, and Python's own, come back as what they are, with their causes; of others their name and text come
as an `InternalError`. Invariant: nothing is imported or called by a name that came, but for the classes in errors.py
and the exceptions of builtins.
"""

from __future__ import annotations

import builtins
import traceback
from typing import Any

from cas_ckpt import errors
from cas_ckpt.errors import CkptError, InternalError, PeerError

_MOST_CAUSES = 8
_MOST_TEXT = 100_000
_PLAIN = (type(None), bool, int, float, str, bytes)


def pack_error(error: BaseException) -> list[Any]:
    """`error` and what caused it: [its name, text, arguments, attributes, traceback, cause or None]."""
    return _packed(error, 0)


def _packed(error: BaseException, depth: int) -> list[Any]:
    given = error.args
    if isinstance(error, OSError) and error.errno is not None:
        given = (error.errno, error.strerror, error.filename)  # `args` leave out the name of the file
    arguments = [each if _is_plain(each) else str(each) for each in given]
    ranks = list(error.ranks) if isinstance(error, PeerError) else None
    cause = (
        error.__cause__ if error.__cause__ is not None else None if error.__suppress_context__ else error.__context__
    )
    below = None if cause is None or depth >= _MOST_CAUSES else _packed(cause, depth + 1)
    text = "".join(traceback.format_exception(error, chain=False))[-_MOST_TEXT:]
    return [_names(type(error)), str(error), arguments, ranks, text, below]


def _names(kind: type[BaseException]) -> list[str]:
    """The class's name, then those of the classes that it was made from."""
    return [each.__name__ for each in kind.__mro__ if issubclass(each, BaseException)]


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) and not (isinstance(value, int) and value.bit_length() > 63)


def unpack_error(packed: Any) -> BaseException:
    """The error that `pack_error` packed: of its class, or of the nearest class that is known here."""
    names, text, arguments, ranks, _, below = packed
    made = _made(names, text, arguments, ranks)
    if below is not None:
        made.__cause__ = unpack_error(below)
    return made


def _made(names: list[str], text: str, arguments: list[Any], ranks: list[int] | None) -> BaseException:
    for name in names:
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, CkptError):
            return PeerError(text, tuple(ranks)) if ranks is not None else kind(text)
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception:
            try:
                return kind(*arguments)
            except (TypeError, ValueError):
                return kind(text)
    return InternalError(f"{names[0]}: {text}")


def packed_traceback(packed: Any) -> str:
    """Where the error was raised, and its causes, as Python prints them; the first cause first."""
    *_, text, below = packed
    earlier = "" if below is None else packed_traceback(below) + "\nwhich led to\n\n"
    return earlier + str(text)
