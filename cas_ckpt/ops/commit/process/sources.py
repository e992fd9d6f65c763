"""The tensors of a commit as its worker process sees them: in memory that was lent to it, or asked for.

What the trainer's process sends of a source (`pack_source` in worker.py):

    ["lent", memory, [[offsets, sizes, begin], ...]]     staged: boxes whose elements are in lent memory, in C order
    ["held", [[offsets, sizes, bytes], ...]]             the same for a few bytes
    ["asked", number, whether it sums]                   not staged yet, or not at all: boxes are asked for

Invariant: what lent memory holds is of the moment of the snapshot, and nobody writes it while the commit runs.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from cas_ckpt.objects.spec import Box, Spec, grid_for, raw_dtype
from cas_ckpt.objects.state import ArraySource
from cas_ckpt.transfer.serving import Served
from cas_ckpt.transfer.staging import elements_of

Array: TypeAlias = np.ndarray[Any, Any]

READ, SUMS, SAVED = "read", "sums", "saved"
"""What a worker asks of a source that is not staged."""


@dataclass(frozen=True, slots=True)
class LentSource:
    """A tensor, or a rank's pieces of it: the elements of each box, raw and in C order."""

    pieces: tuple[tuple[Box, Array], ...]
    item_bytes: int

    @property
    def is_private(self) -> bool:
        """See `StagedSource`."""
        return True

    def read(self, box: Box) -> Array:
        """See `ArraySource`."""
        return elements_of(self.pieces, box, self.item_bytes)

    def saved(self) -> None:
        """See `StagedSource`."""


class RemoteSource:
    """A tensor that the trainer's process copies a box of whenever one is read."""

    def __init__(self, served: Served, number: int, spec: Spec) -> None:
        self._served, self._number = served, number
        self._spec = spec
        self._dtype = raw_dtype(spec.item_bytes)

    @property
    def read_bytes(self) -> int:
        """See `FileBackedSource`: what the trainer's process holds for a thread of the worker."""
        return math.prod(grid_for(self._spec).cell) * self._spec.item_bytes

    @property
    def is_private(self) -> bool:
        """See `StagedSource`: what is copied here is a copy already, but of a moment when it may be live."""
        return False

    def read(self, box: Box) -> Array:
        """See `ArraySource`."""
        asked = self._number, list(box.offsets), list(box.sizes), threading.get_ident()
        name = self._served.ask(READ, *asked)
        return np.frombuffer(self._served.memory(name), self._dtype, box.num_elements).reshape(box.sizes)

    def saved(self) -> None:
        """See `StagedSource`."""
        self._served.ask(SAVED, self._number)


class SummedSource(RemoteSource):
    """One that the trainer's process sums where it is, such as on a device."""

    def sums(self, box: Box) -> Array | None:
        """See `SummingSource`."""
        found = self._served.ask(SUMS, self._number, list(box.offsets), list(box.sizes))
        return None if found is None else np.frombuffer(found, np.uint64)


def make_source(served: Served, spec: Spec, packed: Any) -> ArraySource:
    """The source of a tensor of `spec`."""
    kind, *rest = packed
    item_bytes, dtype = spec.item_bytes, raw_dtype(spec.item_bytes)
    if kind == "asked":
        number, is_summing = rest
        return (SummedSource if is_summing else RemoteSource)(served, number, spec)
    pieces = []
    memory = served.memory(rest[0]) if kind == "lent" else None
    for offsets, sizes, place in rest[-1]:
        box = Box(tuple(offsets), tuple(sizes))
        if memory is None:
            elements: Array = np.frombuffer(place, dtype)
        else:
            elements = np.frombuffer(memory, dtype, box.num_elements, place)
        pieces.append((box, elements.reshape(box.sizes)))
    return LentSource(tuple(pieces), item_bytes)
