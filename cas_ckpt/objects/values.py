"""Plain values as bytes and back: exact, types included, the same bytes for the same value.

Invariant: `decode_value(encode_value(v, key=k))` equals `v` in type and value, bit for bit
(order of a plain dict excepted, which is not part of a value); nothing is pickled or unpickled
unless the caller says so. Decoding runs nothing that the bytes name: no import, no pickle unless it is
allowed, no enum class that is not imported already. docs/format.md, "Plain values". Knows no torch: see
`register_value_type` (structures.py); how values are written is in values_encode.py.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import pathlib
import pickle
import struct
import types
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np

from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import CkptError, CorruptionError, UnsupportedValueError, UnsupportedVersionError
from cas_ckpt.objects.digest import ATOMS, all_atoms, pack_canonical, pack_ext, unpack_canonical
from cas_ckpt.objects.structures import (
    DATACLASS,
    NAMED_TUPLE,
    EnumValue,
    Named,
    Opaque,
    known_instance,
    register_value_type,
    type_of_tag,
)
from cas_ckpt.objects.values_encode import (
    DEFAULT_FACTORIES,
    MAX_VALUE_DEPTH,
    NUMPY_DTYPE_NAME,
    PATH_TYPES,
    Encoder,
    ValueCode,
    find_enum,
)

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


def _read_datetime(decoder: Decoder, payload: bytes) -> datetime.datetime:
    year, month, day, hour, minute, second, microsecond, fold, zone = decoder.items(payload)
    return datetime.datetime(year, month, day, hour, minute, second, microsecond, zone, fold=fold)


def _read_time(decoder: Decoder, payload: bytes) -> datetime.time:
    hour, minute, second, microsecond, fold, zone = decoder.items(payload)
    return datetime.time(hour, minute, second, microsecond, zone, fold=fold)


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
    ValueCode.DATETIME: _read_datetime,
    ValueCode.DATE: lambda d, p: datetime.date(*d.items(p, 3)),
    ValueCode.TIME: _read_time,
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
