"""Plain values as bytes and back: exact, types included, the same bytes for the same value.

Invariant: `decode_value(encode_value(v, key=k))` equals `v` in type and value, bit for bit
(order of a plain dict excepted, which is not part of a value); nothing is pickled or unpickled
unless the caller says so. docs/format.md, "Plain values". Knows no torch: see
`register_value_type`.
"""

from __future__ import annotations

from typing import Any

from cas_ckpt.buffer import Buffer
from cas_ckpt.errors import CkptError, UnsupportedValueError
from cas_ckpt.objects.values_decode import decode
from cas_ckpt.objects.values_encode import Encoder
from cas_ckpt.objects.values_kinds import MAX_VALUE_DEPTH, EnumValue, Opaque, register_value_type

__all__ = ["MAX_VALUE_DEPTH", "EnumValue", "Opaque", "decode_value", "encode_value", "register_value_type"]


def encode_value(value: Any, *, key: str, allow_pickle: bool = False) -> bytes:
    """The canonical bytes of a plain value; equal values of equal types give equal bytes.

    Args:
        key: Where the value stands in the state, for messages.
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
        key: Where the value stands in the state, for messages.
        allow_pickle: Load pickles, which can run any code.

    Raises:
        CorruptionError: `data` is not what any version writes.
        UnsupportedVersionError: it holds a kind of value that a newer version wrote.
        UnsupportedValueError: it holds a pickle and that is not allowed, or the pickle
            cannot be loaded here.
    """
    return decode(data, key=key, allow_pickle=allow_pickle)
