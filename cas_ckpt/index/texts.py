"""Text that a database can hold: of people, what is kept as JSON, and plain values as people read them in SQL."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import msgpack

from cas_ckpt.errors import CkptError

_JSON = json.JSONDecoder()


def storable(text: str) -> str:
    """`text` without what no database takes (NUL, lone surrogates), each shown as U+FFFD."""
    if "\0" not in text and text.isascii():
        return text
    return text.replace("\0", "\ufffd").encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def json_of(values: Mapping[str, float]) -> str | None:
    """Numbers by name as JSON, those that are not finite as "nan", "inf" and "-inf", which it lacks; None: none."""
    if not values:
        return None
    plain = {name: value if math.isfinite(value) else repr(value) for name, value in values.items()}
    return json.dumps(plain, separators=(",", ":"))


def read_json(text: str | None) -> dict[str, Any]:
    """The mapping in `text`, as `json.loads` returns it, at half its cost for texts this short."""
    if not text:
        return {}
    values, end = _JSON.raw_decode(text)
    if end != len(text) or not isinstance(values, dict):
        raise ValueError(f"{text!r} is not a mapping")
    return values


_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def read_metrics(text: str | None) -> dict[str, float]:
    """The metrics that `json_of` made `text` of; `math.nan` itself, which equals itself inside of a mapping."""
    values = read_json(text)
    if text is not None and '":"' in text:
        values |= {name: _NOT_FINITE[value] for name, value in values.items() if isinstance(value, str)}
    return values


# --- plain values as people read them in SQL: text as it is, anything else as JSON --------------------
# The text follows from the bytes of the value alone, so nothing that is not in them is asked for: no class that may be
# imported, no time zone of this machine, no order of a set in memory. What is malformed, nested too deep or too long
# has no text: it is found by who reads the value, not here.


MOST_CHARS = 1 << 16
"""Of a text; a longer value has none."""

_MALFORMED = (ValueError, TypeError, ArithmeticError, LookupError, RecursionError, AttributeError)


def value_text(data: bytes) -> str | None:
    """A plain value as people read it: text as it is, else as JSON; None: bytes, or no value that has a text."""
    if data[:1] in _BYTES or len(data) > MOST_CHARS:
        return None
    try:
        value = _plain(_unpacked(data))
        return storable(value) if isinstance(value, str) else _json(value)
    except (*_MALFORMED, CkptError):
        return None


_BYTES = frozenset({b"\xc4", b"\xc5", b"\xc6"})
"""First bytes of msgpack's bytes."""


def json_text(data: bytes) -> str | None:
    """A plain value as JSON, and what JSON lacks as text, as `show --json` has it; None: it has no text."""
    try:
        return _json(_plain(_unpacked(data))) if len(data) <= MOST_CHARS else None
    except (*_MALFORMED, CkptError):
        return None


def _json(plain: Any) -> str | None:
    text = json.dumps(plain, ensure_ascii=False)
    return storable(text) if len(text) <= MOST_CHARS else None


def _unpacked(data: bytes) -> Any:
    return msgpack.unpackb(data, strict_map_key=False)


def _plain(native: Any) -> Any:
    """The value of JSON for one that msgpack gave."""
    if native is None or isinstance(native, (bool, int, str)):
        return native
    if isinstance(native, float):
        return native if math.isfinite(native) else repr(native)
    if isinstance(native, list):
        return [_plain(item) for item in native]
    if isinstance(native, dict):
        return {_key(key): _plain(item) for key, item in native.items()}
    if isinstance(native, msgpack.ExtType):
        reader = _readers().get(native.code)
        return _decoded(native) if reader is None else reader(native.data)
    return repr(native)


def _key(native: Any) -> str:
    key = _plain(native)
    return key if isinstance(key, str) else json.dumps(key, ensure_ascii=False)


def _items(data: bytes) -> list[Any]:
    return [_plain(item) for item in _unpacked(data)]


def _pairs(flat: Sequence[Any]) -> dict[str, Any]:
    return {_key(key): _plain(item) for key, item in zip(flat[::2], flat[1::2], strict=True)}


def _moment(data: bytes) -> str:
    *parts, _, zone = _unpacked(data)
    kind = datetime.datetime if len(parts) == 7 else datetime.time
    return f"{kind(*parts)}{'' if zone is None else f' {_plain(zone)}'}"


def _enum(data: bytes) -> str:
    _, name, value = _unpacked(data)
    return f"{name}({json.dumps(_plain(value), ensure_ascii=False)})"


@cache
def _readers() -> dict[int, Callable[[bytes], Any]]:
    from cas_ckpt.objects.values import ValueCode as Code  # brings numpy, which a log does not need

    return {
        Code.TUPLE: _items, Code.SET: _items, Code.FROZENSET: _items, Code.RANGE: _items, Code.SLICE: _items,
        Code.DEQUE: lambda data: _items(data)[1:],
        Code.PAIRS: lambda data: _pairs(_unpacked(data)),
        Code.ORDERED_DICT: lambda data: _pairs(_unpacked(data)),
        Code.COUNTER: lambda data: _plain(_unpacked(data)),
        Code.NAMESPACE: lambda data: _plain(_unpacked(data)),
        Code.SIMPLE_NAMESPACE: lambda data: _plain(_unpacked(data)),
        Code.DEFAULT_DICT: lambda data: _items(data)[1],
        Code.NAMED_TUPLE: lambda data: _pairs(_unpacked(data)[1:]),
        Code.DATACLASS: lambda data: _pairs(_unpacked(data)[1:]),
        Code.EXTENSION: lambda data: _pairs(_unpacked(data)),
        Code.PATH: lambda data: _items(data)[1], Code.ZONE_INFO: lambda data: _items(data)[0],
        Code.DATETIME: _moment, Code.TIME: _moment, Code.ENUM: _enum,
        Code.PICKLE: lambda data: f"<a pickle of {len(data)} bytes>",
    }  # fmt: skip


def _decoded(native: msgpack.ExtType) -> Any:
    """Of numbers, dates and the like: their value, or their `repr` if JSON has no such thing."""
    from cas_ckpt.objects.digest import pack_ext
    from cas_ckpt.objects.values import decode_value

    value = decode_value(pack_ext(native.code, native.data))
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, (bytes, bytearray)):
        return repr(value)
    return _plain(value if isinstance(value, (bool, int, float)) else storable(str(value)))
