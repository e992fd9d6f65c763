"""The kinds of plain values: their codes on disk, stand-ins, and the registry of extensions.

Invariant: a code, once given, means the same forever (docs/format.md, "Plain values").
Knows no torch: other rooms register their types by name.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cas_ckpt.errors import InvalidInputError

MAX_VALUE_DEPTH = 100
"""Values inside one another, at most; far below Python's recursion limit."""


class ValueCode(enum.IntEnum):
    """Codes of msgpack extension items: what msgpack itself has no type for."""

    BIG_INT = 1
    WIDE_STR = 2
    COMPLEX = 3
    BYTEARRAY = 4
    TUPLE = 5
    SET = 6
    FROZENSET = 7
    PAIRS = 8
    ORDERED_DICT = 9
    COUNTER = 10
    DEFAULT_DICT = 11
    DEQUE = 12
    RANGE = 13
    SLICE = 14
    ELLIPSIS = 15
    EXTENSION = 16
    NUMPY_SCALAR = 17
    NUMPY_DTYPE = 18
    DATETIME = 19
    DATE = 20
    TIME = 21
    TIMEDELTA = 22
    TIMEZONE = 23
    ZONE_INFO = 24
    PATH = 25
    UUID = 26
    DECIMAL = 27
    FRACTION = 28
    ENUM = 29
    NAMESPACE = 30
    SIMPLE_NAMESPACE = 31
    PICKLE = 32
    NAMED_TUPLE = 33
    DATACLASS = 34


DEFAULT_FACTORIES: dict[str, type] = {
    factory.__name__: factory for factory in (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)
}
"""Factories of a defaultdict that have a name on disk."""


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value of an extension type that nobody registered here; encodes to the bytes it came from.

    Attributes:
        tag: Name of the extension type, e.g. "torch.dtype".
        payload: The value that stands for it, as `encode_value` wrote it.
    """

    tag: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class EnumValue:
    """An enum member whose class is not imported here (or lost the member); encodes as the member did."""

    module: str
    qualname: str
    value: Any

    def __hash__(self) -> int:
        # Members are hashable whatever their value is.
        return hash((self.module, self.qualname))


@dataclass(frozen=True, slots=True)
class ValueType:
    """How one extension type turns into a plain value and back."""

    tag: str
    python_type: type
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_by_type: dict[type, ValueType] = {}
_by_tag: dict[str, ValueType] = {}


def register_value_type(
    tag: str, python_type: type, *, encode: Callable[[Any], Any], decode: Callable[[Any], Any]
) -> None:
    """Teach this process the extension type `tag`: exact instances of `python_type`.

    Args:
        encode: Gives a plain value for an instance; equal instances give equal values.
        decode: Gives the instance back. Raises ValueError, TypeError, LookupError or
            AttributeError for a malformed value, UnsupportedValueError for one unknown here.

    Raises:
        InvalidInputError: the tag or the type is taken by another registration.
    """
    kind = ValueType(tag, python_type, encode, decode)
    for known in (_by_tag.get(tag), _by_type.get(python_type)):
        if known is not None and (known.tag, known.python_type) != (tag, python_type):
            raise InvalidInputError(
                f"value type {tag!r} for {python_type.__qualname__}: {known.tag!r} for "
                f"{known.python_type.__qualname__} is registered already; choose another tag"
            )
    _by_tag[tag] = _by_type[python_type] = kind


def type_of_instance(python_type: type) -> ValueType | None:
    """The registration for exact instances of `python_type`."""
    return _by_type.get(python_type)


def type_of_tag(tag: str) -> ValueType | None:
    """The registration of `tag`."""
    return _by_tag.get(tag)


def find_enum(module: str, qualname: str) -> type[enum.Enum] | None:
    """The enum class of that name, if its module is imported already.

    Never imports and never calls a module's `__getattr__`: stored names must not run code.
    """
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return found if isinstance(found, type) and issubclass(found, enum.Enum) else None
