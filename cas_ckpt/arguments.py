"""Checks and converts the arguments of `Repository` methods by their declared types, before anything is done.

`bool`, `int`, `float`, `str`, lists and mappings of text, and paths are read here; what has a grammar of its own
(revisions, times, states, policies, regions) where that is known.

Invariant: whatever a caller passes, reading it raises `InvalidInputError` or nothing, and never asks an object that it
does not know for its text: the `repr` of a tensor whose memory was freed ends the process.
Must not know: what the arguments mean.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import nullcontext
from itertools import islice
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar, get_args

from cas_ckpt.errors import InvalidInputError, out_of_memory, shown_value

Reader: TypeAlias = Callable[[str, Any], Any]
"""From an argument's name and what was given to what the verb gets."""

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Bulk bytes (`collections.abc.Buffer` is there from Python 3.12 on only)."""

T = TypeVar("T")

MOST_COMPARED = 10_000
"""Names that a misspelt one is compared with: a fraction of a second."""
_INT64 = 1 << 63


_MOST_NAMES = 20


def some_of(names: Iterable[str]) -> str:
    """Names for an error that lists what there is: the first ones and how many more, or "none"."""
    every = list(names)
    more = len(every) - _MOST_NAMES
    return ", ".join([*every[:_MOST_NAMES], *([f"... {more} more"] if more > 0 else [])]) or "none"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a sentence that says that there is no `name`: the most similar of `names`, or nothing."""
    import difflib  # needed by those who mistype alone

    similar = difflib.get_close_matches(name, islice(names, MOST_COMPARED), 1)
    return f" (did you mean {similar[0]!r}?)" if similar else ""


def _refused(name: str, given: object, wanted: str) -> InvalidInputError:
    return InvalidInputError(f"{name} is {shown_value(given)}: give {wanted}")


def check_flag(name: str, given: Any) -> bool:
    """`given`, True or False of Python or NumPy.

    Raises:
        InvalidInputError: something else: any text is true, "no" among them.
    """
    if isinstance(given, bool):
        return given
    if getattr(given, "shape", None) == () and "bool" in str(getattr(given, "dtype", "")):
        return bool(given)  # of NumPy
    raise _refused(name, given, "True or False")


def whole_number(given: Any) -> int | None:
    """`given`, an integer of Python or NumPy, or a tensor of one; None if it is something else, a flag among them."""
    try:
        is_flag = isinstance(given, bool) or "bool" in str(getattr(given, "dtype", ""))
        return None if is_flag else operator.index(given)
    except (TypeError, ValueError, RuntimeError):
        return None


def check_whole(name: str, given: Any, *, least: int = 0) -> int:
    """`given`, an integer of Python or NumPy, or a tensor of one.

    Raises:
        InvalidInputError: something else, less than `least`, or more than 64 bits.
    """
    number = given if type(given) is int else whole_number(given)
    if number is None:
        raise _refused(name, given, "a whole number")
    if number < least:
        raise _refused(name, given, f"a whole number from {least} on")
    if number >= _INT64:
        raise _refused(name, given, "a whole number of 64 bits")
    return number


def _whole(name: str, given: Any) -> int:
    return check_whole(name, given, least=0 if name == "limit" else -_INT64)


def check_real(name: str, given: Any) -> float:
    """`given`, a finite number of Python, NumPy or torch.

    Raises:
        InvalidInputError: something else.
    """
    is_text = isinstance(given, (bool, str, bytes, bytearray))
    try:
        number = math.nan if is_text or getattr(given, "shape", ()) != () else float(given)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise _refused(name, given, "a finite number")
    return given if isinstance(given, (int, float)) else number


def _text(name: str, given: Any) -> str:
    if not isinstance(given, str):
        raise _refused(name, given, "text")
    return given


def _texts(name: str, given: Any) -> list[str]:
    if isinstance(given, str) or not isinstance(given, (Sequence, Set)):
        raise _refused(name, given, "a list of texts")
    for each in given:
        if not isinstance(each, str):
            raise InvalidInputError(f"{name} holds {shown_value(each)}: give a list of texts")
    return list(given)


def _text_or_texts(name: str, given: Any) -> str | list[str]:
    if not isinstance(given, (str, Sequence, Set)):
        raise _refused(name, given, "text or a list of texts")
    return given if isinstance(given, str) else _texts(name, given)


def _texts_by_text(name: str, given: Any) -> dict[str, str]:
    if not isinstance(given, Mapping) or not all(isinstance(each, str) for each in (*given, *given.values())):
        raise _refused(name, given, "a dict from text to text")
    return dict(given)


def _lists_by_text(name: str, given: Any) -> dict[str, list[str]]:
    if not isinstance(given, Mapping) or not all(isinstance(each, str) for each in given):
        raise _refused(name, given, "a dict from text to lists of texts")
    return {key: _texts(f"{name}[{key!r:.80}]", value) for key, value in given.items()}


def _list(name: str, given: Any) -> list[Any]:
    if isinstance(given, (str, bytes)) or not isinstance(given, (Sequence, Set)):
        raise _refused(name, given, "a list")
    return list(given)


def _path(name: str, given: Any) -> str:
    text = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(text, str) or not text:
        raise _refused(name, given, "a path: text, or a pathlib.Path")
    check_path(text)
    return text


def check_path(text: str) -> None:
    """Refuse what no path of a file system can be.

    Raises:
        InvalidInputError: a NUL, or a character that cannot be encoded.
    """
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"{shown_value(text)} cannot be a path: {error}") from error
    if "\0" in text:
        raise InvalidInputError(f"{shown_value(text)} cannot be a path: it holds a NUL")


_READERS: Mapping[str, Reader] = MappingProxyType({
    "bool": check_flag, "int": _whole, "float": check_real, "str": _text, "Sequence[str]": _texts,
    "str | Sequence[str]": _text_or_texts, "Keys": _text_or_texts, "Mapping[str, str]": _texts_by_text,
    "Mapping[str, Sequence[str]]": _lists_by_text, "Sequence[Revision]": _list,
    "Sequence[str | int | TargetLayout]": _list, "str | PathLike[str]": _path,
    **dict.fromkeys(("Encoding", "ExportFormat", "UsageBy", "Repair"), _text),
})  # fmt: skip
"""By what a signature declares; with `| None` behind it None is left as it is."""

_MAY_BE_NONE = ("Keys",)


def reads_arguments(cls: type[T]) -> type[T]:
    """Let the public methods of `cls` get their arguments read as their signatures declare them.

    A class whose methods are common work of several ranks has `_common_work(verb)`: the contexts in which the
    arguments are read and the method runs, so that a refusal reaches the other ranks as the end of that work. A lock is
    the outer one itself: behind its block no signal comes between it and its end.
    """
    for name, member in list(vars(cls).items()):
        if inspect.isfunction(member) and not name.startswith("_"):
            setattr(cls, name, _reading(member))
        elif isinstance(member, classmethod) and not name.startswith("_"):
            setattr(cls, name, classmethod(_reading(member.__func__)))
    for name, member in inspect.getmembers(cls, inspect.isfunction):
        inspect.unwrap(member).__qualname__ = f"{cls.__name__}.{name}"  # what Python's TypeErrors say: not our bases
    return cls


def _reading(method: Callable[..., T]) -> Callable[..., T]:
    """`method` behind one function that reads its arguments: there is one on the way of every call."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    declared = {each.name: str(each.annotation) for each in parameters}
    plain = {name: text.removesuffix(" | None") for name, text in declared.items()}
    readers = {name: _READERS[text] for name, text in plain.items() if text in _READERS}
    may_be_none = {name for name, text in plain.items() if text != declared[name] or text in _MAY_BE_NONE}
    if not readers:
        return method
    in_order = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    by_name = {each.name for each in parameters if each.kind is not each.POSITIONAL_ONLY}
    rest = next((each.name for each in parameters if each.kind is each.VAR_POSITIONAL), "")

    @functools.wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> T:
        make = None if isinstance(self, type) else getattr(self, "_common_work", None)
        try:
            outer, inner = (nullcontext(), nullcontext()) if make is None else make(method.__name__)
            with outer, inner:
                read: list[Any] = []
                for name, given in zip((*in_order, *[rest] * (len(args) - len(in_order))), args, strict=False):
                    as_is = name not in readers or (given is None and name in may_be_none)
                    read.append(given if as_is else readers[name](name, given))
                for name, given in kwargs.items():
                    if name in readers and name in by_name and not (given is None and name in may_be_none):
                        kwargs[name] = readers[name](name, given)
                return method(self, *read, **kwargs)
        except MemoryError as error:
            raise out_of_memory(error) from error

    return call


def check_choice(name: str, given: object, choices: Any) -> None:
    """Refuse what is none of `choices`, a `typing.Literal`.

    Raises:
        InvalidInputError: says what there is.
    """
    wanted = get_args(choices)
    if not isinstance(given, str) or given not in wanted:
        raise InvalidInputError(f"{name} is {shown_value(given)}: give {' or '.join(map(repr, wanted))}")


MAX_STEP = 2**63 - 1
"""The largest step: what databases call a big integer."""


def checked_step(given: Any) -> int:
    """`given` as a step: an integer of Python or NumPy, or a tensor of one.

    Raises:
        InvalidInputError: something else, or out of range.
    """
    step = given if type(given) is int else whole_number(given)
    if step is None or not 0 <= step <= MAX_STEP:
        raise InvalidInputError(f"step {shown_value(given)} is not a whole number from 0 to {MAX_STEP}")
    return step
