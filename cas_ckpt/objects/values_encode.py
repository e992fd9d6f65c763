"""Plain Python values to canonical bytes, and the codes of what msgpack has no type for.

Invariant: a code, once given, means the same forever (docs/format.md, "Plain values"); equal values of
equal types give equal bytes, values of different types never do.
Dispatch is by exact type: a subclass that is not known is refused, not flattened.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import fractions
import pathlib
import pickle
import re
import struct
import sys
import types
import uuid
import zoneinfo
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from cas_ckpt.errors import UnsupportedValueError
from cas_ckpt.objects.digest import ATOMS, KEY_TYPES, all_atoms, pack_array, pack_atom, pack_ext, pack_map
from cas_ckpt.objects.structures import NAMED_TUPLE, EnumValue, Named, Opaque, fault_of, structure_of, type_of_instance

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

PICKLE_PROTOCOL = 4
NUMPY_DTYPE_NAME = re.compile(r"[<>|](b1|[iu][1248]|f[248]|c8|c16|[Mm]8(\[\d*(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)")
"""Numpy dtypes with a name on disk: no padding, the same on every machine."""

_EXT_HEADS = frozenset({0xC7, 0xC8, 0xC9, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8})


class Encoder:
    """Encodes one value.

    Attributes:
        key: Where the value is in the state, for messages.
        allow_pickle: Whether to pickle what has no form of its own.
    """

    __slots__ = ("_depth", "allow_pickle", "key")

    def __init__(self, key: str, *, allow_pickle: bool) -> None:
        self.key = key
        self.allow_pickle = allow_pickle
        self._depth = 0

    def encode(self, value: Any) -> bytes:
        """The canonical bytes of `value`, which is one level below the one being encoded."""
        kind = type(value)
        if kind in ATOMS:
            try:
                return pack_atom(value)
            except OverflowError:
                return pack_ext(ValueCode.BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
            except UnicodeEncodeError:
                return pack_ext(ValueCode.WIDE_STR, value.encode("utf-8", "surrogatepass"))
        if self._depth == MAX_VALUE_DEPTH:
            raise self._refusal(f"a value nests deeper than {MAX_VALUE_DEPTH} levels, or contains itself", kind)
        self._depth += 1
        encoded = _WRITERS.get(kind, _write_rare)(self, value)
        self._depth -= 1
        return encoded

    def array(self, items: Iterable[Any]) -> bytes:
        """An array of values."""
        return pack_array([self.encode(item) for item in items])

    def sorted_array(self, items: Iterable[Any]) -> bytes:
        """An array of values, in the order of their bytes."""
        return pack_array(sorted(self.encode(item) for item in items))

    def pairs(self, mapping: dict[Any, Any]) -> list[tuple[bytes, bytes]]:
        """Encoded keys and values."""
        return [(self.encode(key), self.encode(value)) for key, value in mapping.items()]

    def pickled(self, value: Any) -> bytes:
        """The value as a tagged pickle, if that is allowed."""
        if not self.allow_pickle:
            raise self._refusal(fault_of(value), type(value))
        try:
            return pack_ext(ValueCode.PICKLE, pickle.dumps(value, protocol=PICKLE_PROTOCOL))
        except Exception as error:  # whatever the object's own __reduce__ raises
            raise self._refusal(f"a value cannot be pickled ({error})", type(value)) from error

    def _refusal(self, what: str, kind: type) -> UnsupportedValueError:
        return UnsupportedValueError(
            f"{self.key or '(root)'}: {what}: {kind.__module__}.{kind.__qualname__}. Turn it into plain values, "
            "give its owner state_dict() and load_state_dict(), or pass allow_pickle=True to commit and checkout"
        )


def _write_list(encoder: Encoder, value: list[Any]) -> bytes:
    if all_atoms(value):
        try:
            return pack_atom(value)
        except (OverflowError, UnicodeEncodeError):
            pass  # one item needs an extension: item by item
    return encoder.array(value)


def _write_dict(encoder: Encoder, value: dict[Any, Any]) -> bytes:
    pairs = encoder.pairs(value)
    if KEY_TYPES.issuperset(map(type, value)) and not any(key[0] in _EXT_HEADS for key, _ in pairs):
        return pack_map(pairs)
    return pack_ext(ValueCode.PAIRS, _flat(sorted(pairs)))


def _flat(pairs: list[tuple[bytes, bytes]]) -> bytes:
    return pack_array([part for pair in pairs for part in pair])


def _write_default_dict(encoder: Encoder, value: collections.defaultdict[Any, Any]) -> bytes:
    factory = value.default_factory
    name = factory.__name__ if isinstance(factory, type) else None
    if factory is not None and (name is None or DEFAULT_FACTORIES.get(name) is not factory):
        return encoder.pickled(value)
    return pack_ext(ValueCode.DEFAULT_DICT, encoder.array([name, dict(value)]))


def _write_datetime(encoder: Encoder, value: datetime.datetime) -> bytes:
    parts = [value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond]
    return pack_ext(ValueCode.DATETIME, encoder.array([*parts, value.fold, value.tzinfo]))


def _write_time(encoder: Encoder, value: datetime.time) -> bytes:
    parts = [value.hour, value.minute, value.second, value.microsecond, value.fold, value.tzinfo]
    return pack_ext(ValueCode.TIME, encoder.array(parts))


def _write_timezone(encoder: Encoder, value: datetime.timezone) -> bytes:
    offset, *name = value.__getinitargs__()  # type: ignore[attr-defined]  # the only way to tell a given name
    return pack_ext(ValueCode.TIMEZONE, encoder.array([offset, *name]))


def _write_zone_info(encoder: Encoder, value: zoneinfo.ZoneInfo) -> bytes:
    name: str | None = value.key  # None for a zone that was read from a file
    return encoder.pickled(value) if name is None else pack_ext(ValueCode.ZONE_INFO, encoder.array([name]))


def _write_numpy_scalar(encoder: Encoder, value: Any) -> bytes:
    if type(value) is np.str_:
        return pack_ext(ValueCode.NUMPY_SCALAR, encoder.array(["U", str(value)]))
    if type(value) is np.bytes_:
        return pack_ext(ValueCode.NUMPY_SCALAR, encoder.array(["S", bytes(value)]))
    little = value.dtype.newbyteorder("<")
    if not NUMPY_DTYPE_NAME.fullmatch(little.str):
        return encoder.pickled(value)
    return pack_ext(ValueCode.NUMPY_SCALAR, encoder.array([little.str, np.asarray(value, little).tobytes()]))


def _write_structure(encoder: Encoder, value: Named) -> bytes:
    code = ValueCode.NAMED_TUPLE if value.kind == NAMED_TUPLE else ValueCode.DATACLASS
    parts = [part for field in value.fields.items() for part in field]
    return pack_ext(code, encoder.array([value.name, *parts]))


def _write_rare(encoder: Encoder, value: Any) -> bytes:
    kind = type_of_instance(type(value))
    if kind is not None:
        return pack_ext(ValueCode.EXTENSION, encoder.array([kind.tag, kind.encode(value)]))
    if isinstance(value, enum.Enum):
        python_type = type(value)
        if find_enum(python_type.__module__, python_type.__qualname__) is not python_type:
            return encoder.pickled(value)  # defined inside a function: nobody would find the class again
        parts = [python_type.__module__, python_type.__qualname__, value.value]
        return pack_ext(ValueCode.ENUM, encoder.array(parts))
    if isinstance(value, np.generic):
        return _write_numpy_scalar(encoder, value)
    if isinstance(value, np.dtype):
        # Byte order "=" and "<" are one dtype on every machine that torch runs on.
        if not NUMPY_DTYPE_NAME.fullmatch(value.str) or value.metadata is not None:
            return encoder.pickled(value)
        return pack_ext(ValueCode.NUMPY_DTYPE, value.str.encode())
    found = structure_of(value)
    return encoder.pickled(value) if found is None else _write_structure(encoder, found)


def find_enum(module: str, qualname: str) -> type[enum.Enum] | None:
    """The enum class of that name, if its module is imported already.

    Never imports and never calls a module's `__getattr__`: stored names must not run code.
    """
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return found if isinstance(found, type) and issubclass(found, enum.Enum) else None


PATH_TYPES = (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)

_WRITERS: dict[type, Callable[[Encoder, Any], bytes]] = {
    list: _write_list,
    dict: _write_dict,
    tuple: lambda e, v: pack_ext(ValueCode.TUPLE, e.array(v)),
    complex: lambda e, v: pack_ext(ValueCode.COMPLEX, struct.pack(">dd", v.real, v.imag)),
    bytearray: lambda e, v: pack_ext(ValueCode.BYTEARRAY, bytes(v)),
    set: lambda e, v: pack_ext(ValueCode.SET, e.sorted_array(v)),
    frozenset: lambda e, v: pack_ext(ValueCode.FROZENSET, e.sorted_array(v)),
    collections.OrderedDict: lambda e, v: pack_ext(ValueCode.ORDERED_DICT, _flat(e.pairs(v))),
    collections.Counter: lambda e, v: pack_ext(ValueCode.COUNTER, e.encode(dict(v))),
    collections.defaultdict: _write_default_dict,
    collections.deque: lambda e, v: pack_ext(ValueCode.DEQUE, e.array([v.maxlen, *v])),
    range: lambda e, v: pack_ext(ValueCode.RANGE, e.array([v.start, v.stop, v.step])),
    slice: lambda e, v: pack_ext(ValueCode.SLICE, e.array([v.start, v.stop, v.step])),
    type(...): lambda e, v: pack_ext(ValueCode.ELLIPSIS, b""),
    datetime.datetime: _write_datetime,
    datetime.date: lambda e, v: pack_ext(ValueCode.DATE, e.array([v.year, v.month, v.day])),
    datetime.time: _write_time,
    datetime.timedelta: lambda e, v: pack_ext(ValueCode.TIMEDELTA, e.array([v.days, v.seconds, v.microseconds])),
    datetime.timezone: _write_timezone,
    zoneinfo.ZoneInfo: _write_zone_info,
    **{kind: (lambda e, v: pack_ext(ValueCode.PATH, e.array([type(v).__name__, str(v)]))) for kind in PATH_TYPES},
    uuid.UUID: lambda e, v: pack_ext(ValueCode.UUID, v.bytes),
    decimal.Decimal: lambda e, v: pack_ext(ValueCode.DECIMAL, str(v).encode()),
    fractions.Fraction: lambda e, v: pack_ext(ValueCode.FRACTION, e.array([v.numerator, v.denominator])),
    argparse.Namespace: lambda e, v: pack_ext(ValueCode.NAMESPACE, e.encode(vars(v))),
    types.SimpleNamespace: lambda e, v: pack_ext(ValueCode.SIMPLE_NAMESPACE, e.encode(vars(v))),
    EnumValue: lambda e, v: pack_ext(ValueCode.ENUM, e.array([v.module, v.qualname, v.value])),
    Named: _write_structure,
    Opaque: lambda e, v: pack_ext(ValueCode.EXTENSION, pack_array([pack_atom(v.tag), v.payload])),
}
