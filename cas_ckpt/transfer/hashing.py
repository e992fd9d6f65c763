"""Checksums: they answer at the speed of memory whether any byte of a region has changed.

    1. A region is cut into stretches of at most 8 MiB, consecutive elements in C order.
    2. The bytes of a stretch are 64-bit words in rows of 2,039; the last row is filled up with zeros.
       Every row and every column is summed, modulo 2^64: additions only.
    3. BLAKE3 over the sums names the stretch, over the stretches' names the region.
       A stretch of up to 64 KiB is hashed as it is.

Invariant: a checksum is a function of the elements in C order alone, whatever strides, device or subclass hold them. A
change that is confined to three words of a stretch always changes its checksum: docs/decisions/007-checksums.md has
the proof, and what is not certain. A checksum is never an id of anything: it decides only whether memory is what it
was, or what another rank has. Knows nothing of stores, chunks' places, keys or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from blake3 import blake3

from cas_ckpt import native
from cas_ckpt.objects.spec import Box, as_raw
from cas_ckpt.objects.state import ArraySource
from cas_ckpt.parallel.workers import run_all

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
    """A box of one source, to be summed."""

    source: ArraySource
    box: Box
    item_bytes: int


def checksums(parts: Sequence[Summed], *, num_threads: int) -> list[bytes]:
    """The checksum (16 bytes) of every part, in order.

    Args:
        num_threads: How many of them share the stretches of all parts.
    """
    units = [
        (at, number, box)
        for at, part in enumerate(parts)
        if part.box.num_elements
        for number, box in enumerate(stretches(part.box, max(1, STRETCH_BYTES // part.item_bytes)))
    ]
    names: list[dict[int, bytes]] = [{} for _ in parts]

    def work(unit: tuple[int, int, Box]) -> None:
        at, number, box = unit
        names[at][number] = _stretch_name(parts[at], box)

    run_all(units, lambda: work, num_threads=max(1, min(num_threads, len(units))))
    return [blake3(b"".join(name for _, name in sorted(found.items()))).digest(length=SUM_BYTES) for found in names]


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


def _stretch_name(part: Summed, box: Box) -> bytes:
    num_bytes = box.num_elements * part.item_bytes
    if num_bytes > SMALL_BYTES and isinstance(part.source, SummingSource):
        found = part.source.sums(box)
        if found is not None:
            return blake3(found.view(np.uint8).data).digest()
    array = as_raw(part.source.read(box), part.item_bytes)
    return blake3(array.tobytes() if num_bytes <= SMALL_BYTES else native.word_sums(array, ROW_WORDS)).digest()
