"""Plain values as bytes and back: exact, types included, the same bytes for the same value.

Invariant: `decode_value(encode_value(v, key=k))` equals `v` in type and value, bit for bit
(order of a plain dict excepted, which is not part of a value); nothing is pickled or unpickled
unless the caller says so. Decoding runs nothing that the bytes name: no import, no pickle unless it is
allowed, no enum class that is not imported already. docs/format.md, "Plain values". Knows no torch: see
`register_value_type` (structures.py).

A code for what msgpack has no type for, once given, means the same forever. Values of different types never give equal
bytes. Dispatch is by exact type: a subclass that is not known is refused, not flattened.
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
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgpack
import numpy as np

from cas_ckpt.arguments import Buffer, check_flags
from cas_ckpt.errors import CkptError, CorruptionError, UnsupportedValueError, UnsupportedVersionError
from cas_ckpt.objects.digest import (
    ATOMS,
    KEY_TYPES,
    all_atoms,
    pack_array,
    pack_atom,
    pack_canonical,
    pack_ext,
    pack_map,
    unpack_canonical,
)
from cas_ckpt.objects.structures import (
    DATACLASS,
    NAMED_TUPLE,
    EnumValue,
    Named,
    Opaque,
    fault_of,
    known_instance,
    register_value_type,
    structure_of,
    type_of_instance,
    type_of_tag,
)

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

_TIME_PARTS = ("hour", "minute", "second", "microsecond", "fold", "tzinfo")
_DATETIME_PARTS = ("year", "month", "day", *_TIME_PARTS)

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

    def parts(self, value: Any, names: Iterable[str]) -> bytes:
        """An array of the attributes of these names."""
        return self.array(getattr(value, name) for name in names)

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
            "give its owner state_dict() and load_state_dict(), or pass CommitOptions(allow_pickle=True) to commit, "
            "and allow_pickle=True to checkout"
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
    datetime.datetime: lambda e, v: pack_ext(ValueCode.DATETIME, e.parts(v, _DATETIME_PARTS)),
    datetime.date: lambda e, v: pack_ext(ValueCode.DATE, e.array([v.year, v.month, v.day])),
    datetime.time: lambda e, v: pack_ext(ValueCode.TIME, e.parts(v, _TIME_PARTS)),
    datetime.timedelta: lambda e, v: pack_ext(ValueCode.TIMEDELTA, e.array([v.days, v.seconds, v.microseconds])),
    datetime.timezone: lambda e, v: pack_ext(ValueCode.TIMEZONE, e.array(v.__getinitargs__())),  # a given name too
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


__all__ = ["MAX_VALUE_DEPTH", "EnumValue", "Opaque", "decode_value", "encode_value", "register_value_type"]


def encode_value(value: Any, *, key: str, allow_pickle: bool = False) -> bytes:
    """The canonical bytes of a plain value; equal values of equal types give equal bytes.

    Args:
        key: Where the value is in the state, for messages.
        allow_pickle: Pickle the parts that have no plain form, instead of refusing them.

    Raises:
        UnsupportedValueError: no plain form, nested too deep or containing itself; names key and type.
    """
    try:
        return Encoder(key, allow_pickle=allow_pickle).encode(value)
    except CkptError:
        raise
    except ValueError as error:  # msgpack counts bytes and items with 32 bits
        raise UnsupportedValueError(f"{key or '(root)'}: a value cannot be written: {error}") from error


def decode_value(data: Buffer, *, key: str = "", allow_pickle: bool = False) -> Any:
    """The value that `encode_value` wrote as `data`.

    An extension type that is not registered gives `Opaque` (`decode_value(opaque.payload)` shows
    what is inside), an enum whose class is not imported gives `EnumValue`; both encode to the
    same bytes again.

    Args:
        key: Where the value is in the state, for messages.
        allow_pickle: Load pickles, which can run any code.

    Raises:
        CorruptionError: `data` is not what any version writes.
        UnsupportedVersionError: it holds a kind of value that a newer version wrote.
        UnsupportedValueError: it holds a pickle and that is not allowed, or the pickle
            cannot be loaded here.
    """
    decoder = Decoder(key, allow_pickle=allow_pickle)
    value = decoder.lift(unpack_canonical(data))
    if decoder.extended and decoder.exact and Encoder(key, allow_pickle=False).encode(value) != data:
        raise decoder.corrupt("it is not in canonical form")
    return value


_MALFORMED = (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, OSError, SyntaxError, struct.error)
"""Exceptions of constructors for arguments that the encoder never writes."""


class Decoder:
    """Decodes one value.

    Attributes:
        key: Where the value is in the state, for messages.
        allow_pickle: Whether to unpickle, which runs code.
        extended: True once an extension item was met, which may have more than one spelling.
        exact: False once something was met that may encode differently here (a pickle, an
            extension type, a path of another system), so that bytes cannot be compared.
    """

    __slots__ = ("_depth", "allow_pickle", "exact", "extended", "key")

    def __init__(self, key: str, *, allow_pickle: bool) -> None:
        self.key = key or "(no key given)"
        self.allow_pickle = allow_pickle
        self.extended = False
        self.exact = True
        self._depth = 0

    def lift(self, native: Any) -> Any:
        """The value that the msgpack object `native` stands for.

        Raises:
            CorruptionError: malformed. UnsupportedVersionError: an unknown code.
            UnsupportedValueError: a pickle that is not allowed, or that cannot be loaded.
        """
        kind = type(native)
        if kind in ATOMS:
            return native
        if self._depth == MAX_VALUE_DEPTH:
            raise self.corrupt(f"it nests deeper than {MAX_VALUE_DEPTH} levels")
        self._depth += 1
        if kind is list:
            value: Any = native if all_atoms(native) else [self.lift(item) for item in native]
        elif kind is dict:
            value = {key: self.lift(item) for key, item in native.items()}
        else:
            value = self._extension_item(native)
        self._depth -= 1
        return value

    def _extension_item(self, native: msgpack.ExtType) -> Any:
        self.extended = True
        reader = _READERS.get(native.code)
        if reader is None:
            raise UnsupportedVersionError(
                f"{self.key}: value code {native.code} is not known to this version; upgrade cas_ckpt"
            )
        try:
            return reader(self, native.data)
        except CkptError:
            raise
        except _MALFORMED as error:
            raise self.corrupt(f"{ValueCode(native.code).name} is malformed ({error})") from error

    def array(self, payload: bytes) -> list[Any]:
        """The items of an array, still as msgpack gave them."""
        native = unpack_canonical(payload)
        if type(native) is not list:
            raise self.corrupt("an array was expected")
        return native

    def items(self, payload: bytes, count: int | None = None) -> list[Any]:
        """The values of an array, of `count` if that is given."""
        native = self.array(payload)
        if count is not None and len(native) != count:
            raise self.corrupt(f"an array of {count} was expected, found one of {len(native)}")
        return [self.lift(item) for item in native]

    def parts(self, payload: bytes, names: Sequence[str]) -> dict[str, Any]:
        """The values of an array by these names."""
        return dict(zip(names, self.items(payload, len(names)), strict=True))

    def mapping(self, payload: bytes) -> dict[Any, Any]:
        """A dict, as `encode` wrote it."""
        value = self.lift(unpack_canonical(payload))
        if type(value) is not dict:
            raise self.corrupt("a dict was expected")
        return value

    def corrupt(self, what: str) -> CorruptionError:
        """The error for bytes that no encoder wrote."""
        return CorruptionError(f"{self.key}: a stored value cannot be decoded: {what}; restore it from a copy")

    def unpickled(self, payload: bytes) -> Any:
        """The object of a pickle, if that is allowed; runs whatever the pickle says."""
        if not self.allow_pickle:
            raise UnsupportedValueError(
                f"{self.key}: the value was committed as a pickle, and loading a pickle can run any code. "
                "Pass allow_pickle=True if you trust whoever wrote it, or leave this key out"
            )
        check_flags(allow_pickle=self.allow_pickle)  # of whatever door: "no" and 1 are true, and this runs code
        self.exact = False
        try:
            return pickle.loads(payload)  # noqa: S301  # only behind allow_pickle
        except Exception as error:  # whatever the pickle raises
            raise UnsupportedValueError(f"{self.key}: the pickle cannot be loaded here: {error!r}") from error


def _read_pairs(decoder: Decoder, payload: bytes) -> dict[Any, Any]:
    flat = decoder.items(payload)
    value = dict(zip(flat[::2], flat[1::2], strict=True))
    if 2 * len(value) != len(flat):
        raise decoder.corrupt("two keys are equal")
    return value


def _read_default_dict(decoder: Decoder, payload: bytes) -> collections.defaultdict[Any, Any]:
    name, value = decoder.items(payload)
    if type(value) is not dict:
        raise decoder.corrupt("a dict was expected")
    return collections.defaultdict(None if name is None else DEFAULT_FACTORIES[name], value)


def _read_deque(decoder: Decoder, payload: bytes) -> collections.deque[Any]:
    maxlen, *items = decoder.items(payload)
    return collections.deque(items, maxlen)


def _read_extension(decoder: Decoder, payload: bytes) -> Any:
    tag, native = decoder.array(payload)
    if type(tag) is not str:
        raise decoder.corrupt("the tag of an extension type is not a string")
    kind, value = type_of_tag(tag), decoder.lift(native)
    if kind is None:
        return Opaque(tag, pack_canonical(native))
    decoder.exact = False
    return kind.decode(value)


def _read_numpy_scalar(decoder: Decoder, payload: bytes) -> Any:
    name, raw = decoder.items(payload)
    if name == "U" and type(raw) is str:
        return np.str_(raw)
    if name == "S" and type(raw) is bytes:
        return np.bytes_(raw)
    dtype = _numpy_dtype(decoder, name)
    if type(raw) is not bytes or len(raw) != dtype.itemsize:
        raise decoder.corrupt(f"a numpy scalar of {dtype.itemsize} bytes was expected")
    return np.frombuffer(raw, dtype)[0]


def _numpy_dtype(decoder: Decoder, name: str) -> np.dtype[Any]:
    if not NUMPY_DTYPE_NAME.fullmatch(name):
        raise decoder.corrupt(f"numpy dtype {name!r} has no plain form")
    return np.dtype(name)


def _read_zone_info(decoder: Decoder, payload: bytes) -> zoneinfo.ZoneInfo:
    (name,) = decoder.items(payload)
    try:
        return zoneinfo.ZoneInfo(name)
    except zoneinfo.ZoneInfoNotFoundError as error:
        raise UnsupportedValueError(
            f"{decoder.key}: time zone {name!r} is not known on this machine; install tzdata"
        ) from error


def _read_path(decoder: Decoder, payload: bytes) -> pathlib.PurePath:
    name, text = decoder.items(payload)
    kind = _PATHS[name]
    try:
        return kind(text)
    except NotImplementedError:  # a concrete path of another system: its pure twin
        decoder.exact = False
        return _PATHS[f"Pure{name}"](text)


def _with_attributes(namespace: Any, attributes: dict[Any, Any]) -> Any:
    vars(namespace).update(attributes)  # as keywords, a name such as "self" would be refused
    return namespace


def _read_enum(decoder: Decoder, payload: bytes) -> Any:
    module, qualname, value = decoder.items(payload)
    if type(module) is not str or type(qualname) is not str:
        raise decoder.corrupt("the name of an enum is not a string")
    found = find_enum(module, qualname)
    if found is None:
        return EnumValue(module, qualname, value)
    try:
        member = found(value)
    except (ValueError, TypeError, LookupError, AttributeError):
        return EnumValue(module, qualname, value)
    same = Encoder(decoder.key, allow_pickle=True).encode(member) == pack_ext(ValueCode.ENUM, payload)
    return member if same else EnumValue(module, qualname, value)


def _read_structure(decoder: Decoder, payload: bytes, kind: str) -> Any:
    name, *flat = decoder.items(payload)
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    if any(type(text) is not str for text in (name, *fields)) or 2 * len(fields) != len(flat):
        raise decoder.corrupt("the names of a structure are not strings, or two are equal")
    return known_instance(Named(kind, name, fields), key=decoder.key)


_PATHS: dict[str, type[pathlib.PurePath]] = {kind.__name__: kind for kind in PATH_TYPES}

_READERS: dict[int, Callable[[Decoder, bytes], Any]] = {
    ValueCode.BIG_INT: lambda d, p: int.from_bytes(p, "big", signed=True),
    ValueCode.WIDE_STR: lambda d, p: p.decode("utf-8", "surrogatepass"),
    ValueCode.COMPLEX: lambda d, p: complex(*struct.unpack(">dd", p)),
    ValueCode.BYTEARRAY: lambda d, p: bytearray(p),
    ValueCode.TUPLE: lambda d, p: tuple(d.items(p)),
    ValueCode.SET: lambda d, p: set(d.items(p)),
    ValueCode.FROZENSET: lambda d, p: frozenset(d.items(p)),
    ValueCode.PAIRS: _read_pairs,
    ValueCode.ORDERED_DICT: lambda d, p: collections.OrderedDict(_read_pairs(d, p)),
    ValueCode.COUNTER: lambda d, p: collections.Counter(d.mapping(p)),
    ValueCode.DEFAULT_DICT: _read_default_dict,
    ValueCode.DEQUE: _read_deque,
    ValueCode.RANGE: lambda d, p: range(*d.items(p, 3)),
    ValueCode.SLICE: lambda d, p: slice(*d.items(p, 3)),
    ValueCode.ELLIPSIS: lambda d, p: ...,
    ValueCode.EXTENSION: _read_extension,
    ValueCode.NUMPY_SCALAR: _read_numpy_scalar,
    ValueCode.NUMPY_DTYPE: lambda d, p: _numpy_dtype(d, p.decode()),
    ValueCode.DATETIME: lambda d, p: datetime.datetime(**d.parts(p, _DATETIME_PARTS)),
    ValueCode.DATE: lambda d, p: datetime.date(*d.items(p, 3)),
    ValueCode.TIME: lambda d, p: datetime.time(**d.parts(p, _TIME_PARTS)),
    ValueCode.TIMEDELTA: lambda d, p: datetime.timedelta(*d.items(p, 3)),
    ValueCode.TIMEZONE: lambda d, p: datetime.timezone(*d.items(p)),
    ValueCode.ZONE_INFO: _read_zone_info,
    ValueCode.PATH: _read_path,
    ValueCode.UUID: lambda d, p: uuid.UUID(bytes=p),
    ValueCode.DECIMAL: lambda d, p: decimal.Decimal(p.decode()),
    ValueCode.FRACTION: lambda d, p: fractions.Fraction(*d.items(p, 2)),
    ValueCode.ENUM: _read_enum,
    ValueCode.NAMESPACE: lambda d, p: _with_attributes(argparse.Namespace(), d.mapping(p)),
    ValueCode.SIMPLE_NAMESPACE: lambda d, p: _with_attributes(types.SimpleNamespace(), d.mapping(p)),
    ValueCode.PICKLE: Decoder.unpickled,
    ValueCode.NAMED_TUPLE: lambda d, p: _read_structure(d, p, NAMED_TUPLE),
    ValueCode.DATACLASS: lambda d, p: _read_structure(d, p, DATACLASS),
}
