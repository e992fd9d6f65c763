"""read: one region of one tensor; only the leaves that it touches are read and verified."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import partial
from types import EllipsisType
from typing import Any, TypeAlias

import numpy as np

from cas_ckpt.core.chunks import chunk_ids, tensor_nodes
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.host_cache import CachedReads
from cas_ckpt.errors import CorruptionError, InternalError, InvalidInputError, UnsupportedValueError
from cas_ckpt.objects.nodes import TensorEntry
from cas_ckpt.objects.spec import Box, Spec, raw_dtype
from cas_ckpt.objects.state import StoredTensor
from cas_ckpt.transfer.fetch import read_region

Index: TypeAlias = int | slice | EllipsisType
"""Index of one dimension of a region, as in NumPy: an integer, a slice, or `...`."""

Region: TypeAlias = Index | tuple[Index, ...]
"""A region of a tensor, written as NumPy's basic index: np.s_[5:9, 100:164]."""


@dataclass(frozen=True, slots=True)
class Part:
    """The selection of a region: a box of the tensor, and the shape in which it is given back.

    Attributes:
        shape: The sizes of the box, without the dimensions that an integer chose.
    """

    box: Box
    shape: tuple[int, ...]


def part_of(spec: Spec, region: Region | None, *, key: str) -> Part:
    """The part of a tensor that `region` selects, with NumPy's meaning.

    Integers choose one element and drop the dimension, negative numbers count from the end, slices end
    where the tensor ends, `...` and dimensions that are left out are taken whole. None is the whole tensor.

    Raises:
        InvalidInputError: too many dimensions, an integer outside the tensor, a step, or another kind of index.
    """
    if region is None:
        return Part(spec.box, spec.shape)
    given = _expanded(region if isinstance(region, tuple) else (region,), spec, key)
    starts, sizes, kept = [], [], []
    for axis, (index, whole) in enumerate(zip(given, spec.shape, strict=True)):
        start, size = _range(index, whole, f"{key}: dimension {axis}")
        starts.append(start)
        sizes.append(size)
        if isinstance(index, slice):
            kept.append(size)
    return Part(Box(tuple(starts), tuple(sizes)), tuple(kept))


def _expanded(indices: tuple[object, ...], spec: Spec, key: str) -> list[int | slice]:
    """One integer or slice for each dimension."""
    found: list[int | slice] = []
    rest = len(spec.shape) - sum(index is not Ellipsis for index in indices)
    if sum(index is Ellipsis for index in indices) > 1:
        raise InvalidInputError(f"{key}: a region has at most one '...'")
    if rest < 0:
        raise InvalidInputError(
            f"{key}: the region has {len(indices)} parts, the tensor {len(spec.shape)} dimensions ({spec})"
        )
    if pairs := _pairs(indices) if any(isinstance(each, (tuple, list)) for each in indices) else []:
        indices = (pairs,)
    for index in indices:
        if index is Ellipsis:
            found += [slice(None)] * rest
        elif isinstance(index, slice):
            found.append(index)
        else:
            found.append(_integer(index, key))
    return found + [slice(None)] * (len(spec.shape) - len(found))


def _integer(index: object, key: str) -> int:
    """`index` as an integer.

    Raises:
        InvalidInputError: it is not one; the message spells out what a pair of (offset, size) should be.
    """
    if pairs := _pairs(index):
        spelled = ", ".join(f"{start}:{start + size}" for start, size in pairs)
        raise InvalidInputError(
            f"{key}: a region is an index as in NumPy, not pairs of (offset, size): write np.s_[{spelled}]"
        )
    try:
        if isinstance(index, (bool, np.bool_)):
            raise TypeError
        return operator.index(index)  # type: ignore[arg-type]
    except TypeError as error:
        raise InvalidInputError(
            f"{key}: a region has integers, slices and '...', as in np.s_[0:10, 5], not {type(index).__name__}"
        ) from error


def _pairs(index: object) -> list[tuple[int, int]]:
    """`index` as pairs of integers, if it is one or several; such were regions once, and a habit elsewhere."""
    given = index if isinstance(index, (tuple, list)) else ()
    pairs = [given] if len(given) == 2 and all(type(each) is int for each in given) else given
    if all(isinstance(pair, (tuple, list)) and len(pair) == 2 and {*map(type, pair)} == {int} for pair in pairs):
        return [(pair[0], pair[1]) for pair in pairs]
    return []


def _range(index: int | slice, whole: int, where: str) -> tuple[int, int]:
    """(start, size) of what `index` selects of a dimension of `whole` elements."""
    if isinstance(index, int):
        if not -whole <= index < whole:
            raise InvalidInputError(f"{where} is {whole} long: {index} is outside of it")
        return index % whole, 1
    try:
        start, stop, step = index.indices(whole)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"{where}: {index} is not a slice of integers") from error
    if step != 1:
        raise InvalidInputError(f"{where}: a step of {step}: read {start}:{stop} and take every {step}th of the result")
    return start, max(stop - start, 0)


def inline_array(tensor: StoredTensor | TensorEntry) -> np.ndarray[Any, Any]:
    """The elements of a tensor whose bytes are in its tree node, as raw items that may not be written.

    Raises:
        InternalError: its bytes are elsewhere.
    """
    if tensor.inline is None:
        raise InternalError("a tensor that is neither stored nor inline")
    return np.frombuffer(tensor.inline, raw_dtype(tensor.spec.item_bytes)).reshape(tensor.spec.shape)


def read_array(handle: RepositoryHandle, tensor: StoredTensor | TensorEntry, box: Box) -> np.ndarray[Any, Any]:
    """The elements of `box` as a new array of raw items.

    Raises:
        CorruptionError, NotFoundError. UnsupportedValueError: no array can have this shape.
    """
    item_bytes = tensor.spec.item_bytes
    if not tensor.spec.fits_array:
        raise UnsupportedValueError(f"{tensor.spec} has no elements, and sizes that no array can have")
    if tensor.inline is not None:
        return np.array(inline_array(tensor)[box.slices])
    if tensor.node is None or not box.num_elements:
        return np.empty(box.sizes, raw_dtype(item_bytes))
    (node,) = tensor_nodes(handle, [tensor])
    cells = [cell for cell, _ in node.grid.cells_in(box)]
    (ids,) = chunk_ids(handle, [(node, cells)])
    ask = partial(
        read_region, region=box, grid=node.grid, item_bytes=item_bytes,
        chunk_of=dict(zip(cells, ids, strict=True)).__getitem__, located=handle.locate(ids), relocate=handle.relocate,
    )  # fmt: skip
    store = handle.reads_of(box.num_elements * item_bytes)
    try:
        return ask(store)
    except CorruptionError:
        if not isinstance(store, CachedReads) or not store.distrust():
            raise
    return ask(handle.store)  # what this host had kept was wrong
