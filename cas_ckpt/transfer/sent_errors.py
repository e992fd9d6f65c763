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
from cas_ckpt.errors import CkptError, InternalError

_MOST_CAUSES = 8
_MOST_TEXT = 100_000
_MOST_HELD = 1000
_MOST_HELD_TEXT = 10_000
"""Values of an attribute that is a tuple, and characters in one; what is longer stays where it is."""
_OF_CLASSES = frozenset(dir(BaseException)) | {"exit_code"}
_PLAIN = (type(None), bool, int, float, str, bytes)


def pack_error(error: BaseException) -> list[Any]:
    """`error` and what caused it: [its name, text, arguments, attributes, traceback, cause or None]."""
    return _packed(error, 0)


def _packed(error: BaseException, depth: int) -> list[Any]:
    given = error.args
    if isinstance(error, OSError) and error.errno is not None:
        given = (error.errno, error.strerror, error.filename)  # `args` leave out the name of the file
    arguments = [each if _is_plain(each) else str(each) for each in given]
    held = {name: value for name, value in vars(error).items() if _is_held(name, value)}
    cause = (
        error.__cause__ if error.__cause__ is not None else None if error.__suppress_context__ else error.__context__
    )
    below = None if cause is None or depth >= _MOST_CAUSES else _packed(cause, depth + 1)
    text = "".join(traceback.format_exception(error, chain=False))[-_MOST_TEXT:]
    return [_names(type(error)), str(error), arguments, held, text, below]


def _names(kind: type[BaseException]) -> list[str]:
    """The class's name, then those of the classes that it was made from."""
    return [each.__name__ for each in kind.__mro__ if issubclass(each, BaseException)]


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) and not (isinstance(value, int) and value.bit_length() > 63)


def unpack_error(packed: Any) -> BaseException:
    """The error that `pack_error` packed: of its class, or of the nearest class that is known here."""
    names, text, arguments, held, _, below = packed
    made = _made(names, text, arguments, held)
    if below is not None:
        made.__cause__ = unpack_error(below)
    return made


def _made(names: list[str], text: str, arguments: list[Any], held: Any) -> BaseException:
    for name in names:
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, CkptError):
            return _holding(kind(text), held)
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception:
            try:
                return kind(*arguments)
            except (TypeError, ValueError):
                return kind(text)
    return InternalError(f"{names[0]}: {text}")


def _holding(error: CkptError, held: Any) -> CkptError:
    """`error` with the attributes that came with it, as far as they can be those of an error."""
    for name, value in held.items() if isinstance(held, dict) else ():
        given = tuple(value) if isinstance(value, list) else value
        if _is_held(name, given):
            vars(error)[name] = given
    return error


def _is_held(name: Any, value: Any) -> bool:
    """Whether an attribute goes with its error: a plain value, or a tuple of some, of its own and not too long."""
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_") or name in _OF_CLASSES:
        return False
    values = value if isinstance(value, tuple) else (value,)
    if len(values) > _MOST_HELD or not all(map(_is_plain, values)):
        return False
    return sum(len(each) for each in values if isinstance(each, (str, bytes))) <= _MOST_HELD_TEXT


def packed_traceback(packed: Any) -> str:
    """Where the error was raised, and its causes, as Python prints them; the first cause first."""
    *_, text, below = packed
    earlier = "" if below is None else packed_traceback(below) + "\nwhich led to\n\n"
    return earlier + str(text)
