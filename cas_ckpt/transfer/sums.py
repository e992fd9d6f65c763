"""Checksums of tensors at the speed of memory: has any byte of a region changed?

    1. A region is cut into stretches of at most 8 MiB, consecutive elements in C order.
    2. The bytes of a stretch are 64-bit words in rows of 2,039; the last row is filled up with zeros.
       Every row and every column is summed, modulo 2^64: additions only.
    3. BLAKE3 over the sums names the stretch, over the stretches' names the region.
       A stretch of up to 64 KiB is hashed as it is.

Invariant: a function of the elements in C order alone, whatever strides, device or subclass hold them. A change that
is confined to three words of a stretch is always found, whatever it is: docs/decisions/007-checksums.md has the
proof, and what is not certain. Never an id of anything: it decides only whether memory is what it was, or what
another rank has. Knows nothing of chunks, keys or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from blake3 import blake3

from cas_ckpt.objects.spec import Box
from cas_ckpt.objects.state import ArraySource
from cas_ckpt.transfer.hashing import as_raw, gather
from cas_ckpt.transfer.workers import run_all

Array: TypeAlias = np.ndarray[Any, Any]

WORD_BYTES = 8

ROW_WORDS = 2039
"""Words in a row. A prime: that it is odd lets no change that is alike in all words of a row vanish modulo 2^64, and
no usual row length of a tensor is a multiple of it."""

ROW_BYTES = ROW_WORDS * WORD_BYTES

STRETCH_BYTES = 8 << 20
"""Most bytes that are summed, and gathered where they do not lie together, at once."""

SMALL_BYTES = 64 << 10
"""Stretches of up to so many bytes are hashed as they are."""

SUM_BYTES = 16


@runtime_checkable
class SummingSource(Protocol):
    """A source that sums its elements where they are, such as on a GPU."""

    def sums(self, box: Box) -> Array | None:
        """The sums of all rows, then of all columns, of the words of `box`, as uint64; None: read the box."""
        ...


@dataclass(frozen=True, slots=True)
class Summed:
    """What is to be summed: a box of one source."""

    source: ArraySource
    box: Box
    item_bytes: int


def checksums(parts: Sequence[Summed], *, num_threads: int) -> list[bytes]:
    """The checksum (16 bytes) of every part, in order.

    Args:
        num_threads: How many of them share the stretches of all parts.
    """
    units = [(at, number, box) for at, part in enumerate(parts) for number, box in enumerate(_boxes(part))]
    names: list[dict[int, bytes]] = [{} for _ in parts]

    def make_worker() -> Any:
        summer = _Summer()

        def work(unit: tuple[int, int, Box]) -> None:
            at, number, box = unit
            names[at][number] = summer.name(parts[at], box)

        return work

    run_all(units, make_worker, num_threads=max(1, min(num_threads, len(units))))
    return [
        blake3(b"".join(name for _, name in sorted(found.items()))).digest(length=SUM_BYTES) for found in names
    ]


def _boxes(part: Summed) -> Iterator[Box]:
    if part.box.num_elements:
        yield from stretches(part.box, max(1, STRETCH_BYTES // part.item_bytes))


def stretches(box: Box, most: int) -> Iterator[Box]:
    """Boxes of at most `most` elements, each consecutive in the C order of `box`, that cover it in that order."""
    row = math.prod(box.sizes[1:])
    if box.num_elements <= most:
        yield box
    elif row > most:
        for at in range(box.sizes[0]):
            for inner in stretches(Box(box.offsets[1:], box.sizes[1:]), most):
                yield Box((box.offsets[0] + at, *inner.offsets), (1, *inner.sizes))
    else:
        step = most // row
        for first in range(0, box.sizes[0], step):
            size = min(step, box.sizes[0] - first)
            yield Box((box.offsets[0] + first, *box.offsets[1:]), (size, *box.sizes[1:]))


class _Summer:
    """Names stretches, with scratch memory of its own; one per thread."""

    def __init__(self) -> None:
        self._scratch = np.empty(0, np.uint8)

    def name(self, part: Summed, box: Box) -> bytes:
        num_bytes = box.num_elements * part.item_bytes
        if num_bytes > SMALL_BYTES and isinstance(part.source, SummingSource):
            found = part.source.sums(box)
            if found is not None:
                return blake3(found.view(np.uint8).data).digest()
        data = self._flat(as_raw(part.source.read(box), part.item_bytes))
        return blake3(data.data if num_bytes <= SMALL_BYTES else word_sums(data).view(np.uint8).data).digest()

    def _flat(self, array: Array) -> Array:
        """The bytes of `array` in C order, beginning at a whole word of memory."""
        if array.flags.c_contiguous and array.ctypes.data % WORD_BYTES == 0:
            return array.reshape(-1).view(np.uint8)
        if len(self._scratch) < array.nbytes:
            self._scratch = np.empty(max(array.nbytes, 1 << 20), np.uint8)
        gather(array, self._scratch)
        return self._scratch[: array.nbytes]


def word_sums(data: Array) -> Array:
    """The sums of all rows, then of all columns, of bytes that begin at a whole word of memory.

    The words are read in the machine's byte order: sums are compared between machines of one kind.
    """
    num_rows, rest = divmod(len(data), ROW_BYTES)
    sums = np.empty(num_rows + bool(rest) + ROW_WORDS, np.uint64)
    columns = sums[-ROW_WORDS:]
    columns[:] = 0
    whole = data[: num_rows * ROW_BYTES].view(np.uint64).reshape(num_rows, ROW_WORDS)
    for first in range(0, num_rows, _BLOCK_ROWS):
        # A block stays in the processor's cache between the two: memory is read once.
        block = whole[first : first + _BLOCK_ROWS]
        np.add.reduce(block, 1, out=sums[first : first + len(block)])
        columns += np.add.reduce(block, 0)
    if rest:
        last = np.zeros(ROW_BYTES, np.uint8)
        last[:rest] = data[num_rows * ROW_BYTES :]
        columns += last.view(np.uint64)
        sums[num_rows] = np.add.reduce(last.view(np.uint64))
    return sums


_BLOCK_ROWS = (1 << 20) // ROW_BYTES
