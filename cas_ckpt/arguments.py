"""Types of what several calls take, and checks of what would do harm, or end in an obscure error, if it were wrong.

Closed choices are the `Literal`s here (encodings: objects/codec.py), which signatures, checks and the command line use.
Flags are checked by the method of `Repository` that takes them, and `allow_pickle` also where a pickle is loaded;
numbers, paths, lists of texts and choices by the functions here where they are used; what has a grammar of its own
(revisions, times, states, policies, regions) where that is known.

Invariant: a check raises `InvalidInputError` or nothing, and never asks an object that it does not know for its text:
the `repr` of a tensor whose memory was freed ends the process.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Sequence, Set
from itertools import islice
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args

from cas_ckpt.errors import InvalidInputError, shown_value

if TYPE_CHECKING:
    from types import EllipsisType

    import numpy as np

# --- closed choices ---

ExportFormat: TypeAlias = Literal[
    "safetensors", "torch", "dcp", "trainer", "accelerate", "deepspeed", "lightning", "megatron", "torch_checkpointing"
]
"""What an export writes."""

UsageBy: TypeAlias = Literal["commit", "branch", "tensor", "dtype"]
"""What a row of `du` is of."""

RepairKind: TypeAlias = Literal["config", "state", "records", "packs", "chunks", "refs", "index"]
"""Kinds of repairs, in the order in which they have to be run."""

SnapshotKind: TypeAlias = Literal["copy", "lazy"]
"""When `commit_async` copies the state: at the call, or behind it."""

WorkerKind: TypeAlias = Literal["thread", "process"]
"""Where it makes the commit."""

OnConflict: TypeAlias = Literal["retry", "raise"]
OnDivergence: TypeAlias = Literal["raise", "warn"]
OnSaveError: TypeAlias = Literal["warn", "raise"]
FrozenCheck: TypeAlias = Literal["checksum", "version"]
ReplicaCheck: TypeAlias = Literal["checksum", "sample"]

# --- types ---

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Bulk bytes (`collections.abc.Buffer` is there from Python 3.12 on only)."""


class TorchDtype(Protocol):
    """A `torch.dtype`."""

    @property
    def is_floating_point(self) -> bool:
        """As torch has it."""
        ...


class TorchDevice(Protocol):
    """A `torch.device`."""

    @property
    def type(self) -> str:
        """As torch has it."""
        ...


class ProcessGroup(Protocol):
    """A `torch.distributed.ProcessGroup`."""

    def rank(self) -> int:
        """As torch has it."""
        ...

    def size(self) -> int:
        """As torch has it."""
        ...


Device: TypeAlias = str | int | TorchDevice
"""Where tensors go, e.g. "cuda"."""

DtypePattern: TypeAlias = "str | TorchDtype | np.dtype[Any] | type[np.generic]"
"""A dtype, or text: its name ("bfloat16", "bf16") or a pattern of names ("float8_*")."""

ShapePattern: TypeAlias = "str | Sequence[int | None | EllipsisType]"
"""Sizes; None stands for any size, ... for any number of dimensions."""

Keys: TypeAlias = str | Sequence[str] | None
"""Patterns of keys: `*` and `?` inside a component, `**` across; a container stands for all below it."""

# --- names for errors ---

MOST_COMPARED = 10_000
"""Names that a misspelt one is compared with: a fraction of a second."""

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


# --- checks ---

_INT64 = 1 << 63

MAX_STEP = _INT64 - 1
"""The largest step: what databases call a big integer."""


def _refused(name: str, given: object, wanted: str) -> InvalidInputError:
    return InvalidInputError(f"{name} is {shown_value(given)}: give {wanted}")


def check_flags(**given: Any) -> None:
    """Refuse what is neither True nor False, of Python or NumPy: any text is true, "no" among them.

    Raises:
        InvalidInputError: names the first one.
    """
    for name, flag in given.items():
        is_numpy = getattr(flag, "shape", None) == () and "bool" in str(getattr(flag, "dtype", ""))
        if not isinstance(flag, bool) and not is_numpy:
            raise _refused(name, flag, "True or False")


def optional_flag(name: str, given: Any) -> bool | None:
    """A flag that may be left open: None, or True or False of Python, for which `is False` is asked."""
    if given is None:
        return None
    check_flags(**{name: given})
    return bool(given)


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


def check_limit(given: Any) -> int | None:
    """`given` as the number of rows that an answer has at most; None: all of them.

    Raises:
        InvalidInputError: as for `check_whole`.
    """
    return None if given is None else check_whole("limit", given)


def checked_step(given: Any) -> int:
    """`given` as a step: an integer of Python or NumPy, or a tensor of one.

    Raises:
        InvalidInputError: something else, or out of range.
    """
    step = given if type(given) is int else whole_number(given)
    if step is None or not 0 <= step <= MAX_STEP:
        raise InvalidInputError(f"step {shown_value(given)} is not a whole number from 0 to {MAX_STEP}")
    return step


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


def check_choice(name: str, given: object, choices: Any) -> Any:
    """`given`, one of `choices`, a `typing.Literal`.

    Raises:
        InvalidInputError: says what there is.
    """
    wanted = get_args(choices)
    if not isinstance(given, str) or given not in wanted:
        raise _refused(name, given, " or ".join(map(repr, wanted)))
    return given


def one_text(name: str, given: Any) -> str:
    """`given`, one text.

    Raises:
        InvalidInputError: something else.
    """
    if not isinstance(given, str):
        raise _refused(name, given, "text")
    return given


def texts(name: str, given: Any) -> tuple[str, ...]:
    """One text or several, as several: a list, a tuple or a set of them.

    Raises:
        InvalidInputError: something else.
    """
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, (Sequence, Set)):
        raise _refused(name, given, "text or a list of texts")
    for each in given:
        if not isinstance(each, str):
            raise InvalidInputError(f"{name} holds {shown_value(each)}: give a list of texts")
    return tuple(given)


def check_path(given: Any) -> str:
    """The text of a path of a file system.

    Raises:
        InvalidInputError: no text and no `PathLike`; empty; a NUL, or a character that cannot be encoded.
    """
    text = os.fspath(given) if isinstance(given, PathLike) else given
    if not isinstance(text, str) or not text:
        raise _refused("path", given, "a path: text, or a pathlib.Path")
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"{shown_value(text)} cannot be a path: {error}") from error
    if "\0" in text:
        raise InvalidInputError(f"{shown_value(text)} cannot be a path: it holds a NUL")
    return text
