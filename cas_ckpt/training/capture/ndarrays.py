"""NumPy arrays as items of a state, and new arrays for stored ones.

Invariant: dtype, byte order and bits pass unchanged; nothing that holds Python objects is
taken for bytes. Must not know torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

from cas_ckpt.errors import CkptError, CorruptionError, UnsupportedValueError
from cas_ckpt.objects.spec import NUMPY_PREFIX, Box, Spec, dtype_bytes, raw_dtype
from cas_ckpt.objects.state import Container, TensorItem
from cas_ckpt.training.capture.tensors import Array

_TORCH_LIKE = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
_NAMES: dict[str, str] = {np.dtype(name).newbyteorder("<").str: name for name in _TORCH_LIKE}

_PLAIN_KINDS = frozenset("biufcSUmM")


@dataclass(frozen=True, slots=True)
class ArrayView:
    """An array as source and as target: raw views of its own memory."""

    bits: Array

    def read(self, box: Box) -> Array:
        """See `ArraySource`."""
        return self.bits[box.slices]

    def open(self, box: Box) -> Array:
        """See `ArrayTarget`."""
        return self.bits[box.slices]

    def done(self, box: Box, array: Array) -> None:
        """See `ArrayTarget`: the bytes are in place already."""


def is_array(value: Any) -> bool:
    """Whether `value` is an array that is stored by its elements."""
    return type(value) is np.ndarray or type(value) is np.memmap


def holds_objects(array: Array) -> bool:
    """Whether the array's elements are Python objects."""
    return bool(array.dtype.hasobject)


def view_of(array: Array) -> ArrayView:
    """The array's memory as raw items."""
    plain = array if type(array) is np.ndarray else array.view(np.ndarray)
    return ArrayView(plain.view(raw_dtype(array.itemsize)))


def array_item(array: Array, *, key: str) -> TensorItem | Container:
    """An array as an item; an array with fields as a container "structured".

    Raises:
        UnsupportedValueError: object arrays and dtypes that have no name on disk.
    """
    descr = None if array.dtype.names is None else _descr(array.dtype, key)
    # The version in the identity is None: numpy counts none, an array is never known to be unchanged.
    region = region_of_array(array)
    item = TensorItem(elements_spec(array, key=key), view_of(array), "numpy", region and (region, None))
    return item if descr is None else Container("structured", {"items": item}, {"descr": descr})


def elements_spec(array: Array, *, key: str) -> Spec:
    """The spec of the array's elements; with fields, each is so many bytes."""
    if array.dtype.names is not None:
        return Spec(f"{NUMPY_PREFIX}|V{array.itemsize}", array.shape)
    return Spec(dtype_name(array.dtype, key=key), array.shape)


def region_of_array(array: Array) -> tuple[Any, ...] | None:
    """What memory the array is, equal for the same elements; None if there are none."""
    if not array.size:
        return None
    return ("numpy", array.__array_interface__["data"][0], array.shape, array.strides, array.dtype.str)


def dtype_name(dtype: np.dtype[Any], *, key: str) -> str:
    """The name of a dtype without fields, e.g. "float32" or "np:<M8[ns]"."""
    known = _NAMES.get(dtype.str)
    if known is not None and dtype == known:
        return known
    void = dtype.kind == "V" and dtype.type is np.void
    if dtype.hasobject or not dtype.itemsize or not (void or dtype.kind in _PLAIN_KINDS):
        raise UnsupportedValueError(
            f"{key}: a numpy array of dtype {dtype} has no bytes to store: convert it to a numeric or string dtype"
        )
    return NUMPY_PREFIX + dtype.str


def _descr(dtype: np.dtype[Any], key: str) -> Any:
    """A plain value from which numpy makes `dtype` again."""
    if dtype.hasobject or not dtype.itemsize:
        raise UnsupportedValueError(
            f"{key}: a structured array of {dtype} has no bytes to store: drop its object fields"
        )
    try:
        descr = npy_format.dtype_to_descr(dtype)
        if npy_format.descr_to_dtype(descr) == dtype:
            return descr
    except (ValueError, TypeError):
        pass  # numpy has no description of it: refused below, like one that does not give the same dtype again
    raise UnsupportedValueError(
        f"{key}: numpy cannot describe the dtype {dtype}: copy the fields into arrays of their own"
    )


def new_array(spec: Spec, *, key: str) -> Array:
    """An array for a stored tensor of flavor "numpy", its elements undefined."""
    try:
        dtype_bytes(spec.dtype)
        return np.empty(spec.shape, np.dtype(spec.dtype.removeprefix(NUMPY_PREFIX)))
    except (CkptError, TypeError) as error:
        raise CorruptionError(f"{key}: no numpy array can hold {spec}: {error}") from error


def structured(items: Array, attrs: Any, *, key: str) -> Array:
    """The array with fields of a container "structured"; shares memory with `items`."""
    try:
        return items.view(npy_format.descr_to_dtype(attrs["descr"]))
    except (TypeError, ValueError, LookupError) as error:
        raise CorruptionError(f"{key}: the fields of a structured array cannot be read: {error}") from error


def same_fields(array: Array, attrs: Any) -> bool:
    """Whether `array` has the dtype that a container "structured" records."""
    try:
        return bool(npy_format.descr_to_dtype(attrs["descr"]) == array.dtype)
    except (TypeError, ValueError, LookupError):
        return False
