"""Where targets lie in memory: which of them overlap, and which may not be written.

    1. Targets are sorted by address; only runs of overlapping address ranges are looked into.
    2. Dense targets overlap if their ranges do. Strided ones of one period do not if their places in the period are
       apart, as the columns of a matrix are.
    3. Whatever is left is decided exactly, pair by pair, by `numpy.shares_memory`.

Invariant: no memory is read or written; two targets that share a byte are always found. Must not
know keys or commits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch

Array: TypeAlias = np.ndarray[Any, Any]
Region: TypeAlias = tuple[Any, ...]
Pair: TypeAlias = tuple[int, int]

MAX_PAIRS = 1 << 18
"""Pairs that are decided one by one, at most; of more than these each counts as overlapping."""

_MAX_WORK = 1 << 16
"""Steps that `numpy.shares_memory` may take for one pair; a harder one counts as overlapping."""

_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True, slots=True)
class Layout:
    """How the elements of a tensor lie, apart from where: one object for all tensors that are alike.

    Attributes:
        steps: Bytes from one element to the next in each dimension; may be negative.
        reading: What else says how bytes are to be read: dtype, conjugation.
        before: Bytes from the lowest address to the element with index 0 in every dimension.
        extent: Bytes from the lowest address to behind the highest.
        dims: (step, size) of as few dimensions as possible, all steps positive, the longest first.
    """

    shape: tuple[int, ...]
    steps: tuple[int, ...]
    item_bytes: int
    reading: tuple[Any, ...]
    before: int
    extent: int
    dims: tuple[tuple[int, int], ...]

    @property
    def is_dense(self) -> bool:
        """Whether every byte of the extent belongs to an element."""
        return not self.dims or (len(self.dims) == 1 and self.dims[0][0] == self.item_bytes)

    @property
    def order(self) -> tuple[Any, ...]:
        """Equal where the same elements are read in the same way and order."""
        steps = tuple(step for step, size in zip(self.steps, self.shape, strict=True) if size > 1)
        return self.shape, steps, self.item_bytes, self.reading


@dataclass(slots=True, unsafe_hash=True)  # not frozen, as TensorItem, but never changed
class Memory:
    """The memory of one tensor or array that has elements.

    Attributes:
        space: What the addresses count in: "cpu", or a device.
        low, high: The lowest address, and the one behind the highest.
    """

    space: str
    low: int
    high: int
    layout: Layout

    @property
    def geometry(self) -> tuple[Any, ...]:
        """Equal for those that consist of the same elements in whatever order."""
        return self.low, self.layout.item_bytes, self.layout.dims

    def is_same(self, other: Memory) -> bool:
        """Whether both are the same elements, read in the same way and order."""
        first, other_first = self.low + self.layout.before, other.low + other.layout.before
        return (self.space, first, self.layout.order) == (other.space, other_first, other.layout.order)


@lru_cache(maxsize=4096)
def _layout(shape: tuple[int, ...], steps: tuple[int, ...], item_bytes: int, reading: tuple[Any, ...]) -> Layout:
    found: list[tuple[int, int]] = []
    pairs = [(step, size) for step, size in zip(steps, shape, strict=True) if size > 1]
    for step, size in sorted((abs(step), size) for step, size in pairs):
        if found and found[-1][0] * found[-1][1] == step:
            found[-1] = (found[-1][0], found[-1][1] * size)
        else:
            found.append((step, size))
    before = -sum(step * (size - 1) for step, size in pairs if step < 0)
    extent = sum(step * (size - 1) for step, size in found) + item_bytes
    return Layout(shape, steps, item_bytes, reading, before, extent, tuple(reversed(found)))


@lru_cache(maxsize=4096)
def _layout_of_tensor(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, is_conj: bool, is_neg: bool
) -> Layout:
    item = dtype.itemsize
    reading = (str(dtype).removeprefix("torch."), is_conj, is_neg)
    return _layout(tuple(shape), tuple(step * item for step in stride), item, reading)


def memory_of_tensor(tensor: torch.Tensor) -> tuple[Memory, ...]:
    """The memory of a strided tensor; nothing for one without elements."""
    address = tensor.data_ptr() if tensor.numel() else 0
    if not address:
        return ()
    layout = _layout_of_tensor(tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return (Memory("cpu" if tensor.is_cpu else str(tensor.device), address, address + layout.extent, layout),)


def memory_of_region(region: Region) -> Memory:
    """The same for a tensor of the host that is this region (capture/tensors.py), not empty, without asking torch."""
    _, address, offset, shape, stride, dtype, is_conj, is_neg = region
    layout = _layout_of_tensor(shape, stride, dtype, is_conj, is_neg)
    low = address + offset * dtype.itemsize
    return Memory("cpu", low, low + layout.extent, layout)


def memory_of_array(array: Array) -> tuple[Memory, ...]:
    """The memory of an array; nothing for one without elements."""
    if not array.size:
        return ()
    layout = _layout(array.shape, array.strides, array.itemsize, _reading_of_array(array.dtype))
    low = array.__array_interface__["data"][0] - layout.before
    return (Memory("cpu", low, low + layout.extent, layout),)


@lru_cache(maxsize=256)
def _reading_of_array(dtype: np.dtype[Any]) -> tuple[Any, ...]:
    return dtype.name if dtype.isnative else dtype.str, False, False


def overlapping(memories: Sequence[Memory]) -> Iterator[Pair]:
    """Positions of two of `memories` that share bytes; each that overlaps any is in some pair."""
    order = sorted(range(len(memories)), key=lambda at: (memories[at].space, memories[at].low))
    start = 0
    while start < len(order):
        end, reach, space = start + 1, memories[order[start]].high, memories[order[start]].space
        while end < len(order) and memories[order[end]].space == space and memories[order[end]].low < reach:
            reach = max(reach, memories[order[end]].high)
            end += 1
        if end - start > 1:
            yield from _in_cluster(memories, order[start:end])
        start = end


def _in_cluster(memories: Sequence[Memory], cluster: Sequence[int]) -> Iterator[Pair]:
    """Pairs among those whose address ranges hang together; `cluster` is sorted by address."""
    firsts: dict[Any, int] = {}
    for at in cluster:
        first = firsts.setdefault(memories[at].geometry, at)
        if first != at:
            yield first, at
    yield from _dense_pairs(memories, [at for at in firsts.values() if memories[at].layout.is_dense])
    for number, (one, other) in enumerate(undecided(memories, list(firsts.values()))):
        if number >= MAX_PAIRS or _share(memories[one], memories[other]):
            yield one, other
            if number >= MAX_PAIRS:
                return


def _dense_pairs(memories: Sequence[Memory], dense: Sequence[int]) -> Iterator[Pair]:
    widest = -1
    for at in dense:
        if widest >= 0 and memories[at].low < memories[widest].high:
            yield widest, at
        if widest < 0 or memories[at].high > memories[widest].high:
            widest = at


def undecided(memories: Sequence[Memory], distinct: Sequence[int]) -> Iterator[Pair]:
    """Pairs with at least one strided one whose ranges overlap, and whose places in their period do.

    Args:
        distinct: Positions of those to be looked at, sorted by address.
    """
    layouts = [memories[at].layout for at in distinct]
    outer = [(0, 1) if layout.is_dense else layout.dims[0] for layout in layouts]
    if not any(step for step, _ in outer):
        return
    lows, steps = np.array([memories[at].low for at in distinct]), np.array([step for step, _ in outer])
    widths = np.array([layout.extent - step * (n - 1) for layout, (step, n) in zip(layouts, outer, strict=True)])
    for number, at in enumerate(distinct):
        near = slice(number + 1, int(np.searchsorted(lows, memories[at].high)))
        step, same = steps[number], steps[near] == steps[number]
        if step:  # of one period: what is apart modulo that never overlaps
            shift = (lows[near] - lows[number]) % step
            same &= (shift >= widths[number]) & (step - shift >= widths[near])
        yield from ((at, distinct[number + 1 + int(other)]) for other in np.flatnonzero(~same))


def _share(one: Memory, other: Memory) -> bool:
    try:
        return bool(np.shares_memory(_array(one), _array(other), max_work=_MAX_WORK))  # type: ignore[arg-type]  # its stub knows only two values
    except np.exceptions.TooHardError:
        return True


def _array(memory: Memory) -> Array:
    """An array over the bytes at these addresses; it is never read, so that they may be those of a device.

    Of bytes, and not of items `|V4`: with these NumPy 2.1.0 crashes on Python 3.12 and newer.
    """
    interface = {
        "data": (memory.low, True),
        "shape": (*(size for _, size in memory.layout.dims), memory.layout.item_bytes),
        "strides": (*(step for step, _ in memory.layout.dims), 1),
        "typestr": "|u1",
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


class ReadOnlyMemory:
    """The parts of this process's memory that the operating system does not let it write, as they are now.

    Known on Linux only; elsewhere nothing counts as read-only.
    """

    def __init__(self) -> None:
        try:
            lines = _MAPS.read_text("ascii", "replace").splitlines()
        except OSError:
            lines = []
        ranges = []
        for line in lines:
            place, rights, *_ = line.split(maxsplit=2)
            if "w" not in rights:
                start, _, end = place.partition("-")
                ranges.append((int(start, 16), int(end, 16)))
        ranges.sort()
        self._starts, self._ends = map(list, zip(*ranges, strict=True)) if ranges else ([], [])

    def holds(self, memories: Iterable[Memory]) -> bool:
        """Whether a byte of `memories` cannot be written."""
        for memory in memories:
            at = bisect_left(self._starts, memory.high) - 1
            if memory.space == "cpu" and at >= 0 and self._ends[at] > memory.low:
                return True
        return False
