"""From the raw bytes of a tensor to numbers: float64, or complex128.

Invariant: widening is exact, but for integers of 64 bits beyond 2^53 and numpy's long doubles;
every dtype either has a rule here or is told to have none. Knows no torch, which is why bfloat16
and the kinds of float8 are widened by their bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from cas_ckpt.objects.spec import NUMPY_PREFIX

Raw: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
"""Elements as their bytes, one after the other."""

Numbers: TypeAlias = np.ndarray[Any, Any]
"""One float64 or complex128 for each element."""

Widen: TypeAlias = Callable[[Raw], Numbers]

_PLAIN = {
    "bool": "?", "uint8": "u1", "int8": "i1", "uint16": "<u2", "int16": "<i2", "uint32": "<u4", "int32": "<i4",
    "uint64": "<u8", "int64": "<i8", "float16": "<f2", "float32": "<f4", "float64": "<f8",
    "complex64": "<c8", "complex128": "<c16",
    # Quantized tensors: their integers, so that differences count steps.
    "qint8": "i1", "quint8": "u1", "qint32": "<i4",
}  # fmt: skip

_LONG_INTEGERS = {"int64": "<i8", "uint64": "<u8", "np:<i8": "<i8", "np:<u8": "<u8"}


def widening(dtype: str) -> Widen | None:
    """How raw elements of `dtype` become numbers; None if they are none (or nobody has taught us)."""
    if dtype in _PLAIN:
        return _by_numpy(np.dtype(_PLAIN[dtype]))
    if dtype == "bfloat16":
        return _from_bfloat16
    if dtype == "complex32":
        return _from_complex32
    if dtype in _FLOAT8:
        return _by_table(dtype)
    if dtype.startswith(NUMPY_PREFIX):
        found = np.dtype(dtype[len(NUMPY_PREFIX) :])
        return _by_numpy(found) if found.kind in "biufc" else None
    return None


def long_integers(dtype: str) -> np.dtype[Any] | None:
    """The numpy dtype of integers that float64 cannot hold exactly, else None."""
    return np.dtype(_LONG_INTEGERS[dtype]) if dtype in _LONG_INTEGERS else None


def _by_numpy(dtype: np.dtype[Any]) -> Widen:
    wide = np.complex128 if dtype.kind == "c" else np.float64
    return lambda raw: raw.view(dtype).astype(wide)


def _from_bfloat16(raw: Raw) -> Numbers:
    return (raw.view("<u2").astype("<u4") << 16).view("<f4").astype(np.float64)


def _from_complex32(raw: Raw) -> Numbers:
    return raw.view("<f2").astype(np.float64).view(np.complex128)


def _by_table(dtype: str) -> Widen:
    table = _float8_table(dtype)
    return lambda raw: table[raw]


_FLOAT8 = {
    # bits of the mantissa, bias of the exponent, codes that are NaN
    "float8_e4m3fn": (3, 7, (0x7F, 0xFF)),
    "float8_e4m3fnuz": (3, 8, (0x80,)),
    "float8_e5m2": (2, 15, (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF)),
    "float8_e5m2fnuz": (2, 16, (0x80,)),
    "float8_e8m0fnu": (0, 127, (0xFF,)),
}


@lru_cache(maxsize=8)
def _float8_table(dtype: str) -> Numbers:
    """The number that each of the 256 codes means (IEEE P3109's predecessors: OCP FP8 and MX, Graphcore's fnuz)."""
    mantissa_bits, bias, nans = _FLOAT8[dtype]
    codes = np.arange(256)
    if dtype == "float8_e8m0fnu":  # a power of two: no sign, no mantissa, no zero
        table = np.ldexp(1.0, codes - bias)
    else:
        sign = np.where(codes & 0x80, -1.0, 1.0)
        exponent = (codes & 0x7F) >> mantissa_bits
        mantissa = codes & ((1 << mantissa_bits) - 1)
        hidden = np.where(exponent > 0, 1 << mantissa_bits, 0)
        table = sign * np.ldexp((hidden + mantissa).astype(np.float64), np.maximum(exponent, 1) - bias - mantissa_bits)
    table[list(nans)] = np.nan
    if dtype == "float8_e5m2":
        table[[0x7C, 0xFC]] = (np.inf, -np.inf)
    return table
