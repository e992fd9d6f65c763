"""Messages of one round between ranks: where their parts are written to, and what comes out of them.

Invariant: a message is the parts of rounds.py one after the other, without words; the receiver knows
from the plan what comes next from whom. Knows nothing of stores.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cas_ckpt.buffer import Buffer
from cas_ckpt.errors import InternalError
from cas_ckpt.objects.spec import Box, raw_dtype
from cas_ckpt.objects.state import ArrayTarget
from cas_ckpt.transfer.hashing import Array
from cas_ckpt.transfer.rounds import Part, Round, aligned, split


@dataclass(frozen=True, slots=True)
class Landing:
    """A tensor as this rank sees it; `target` is None where it wants nothing of it."""

    key: str
    item_bytes: int
    target: ArrayTarget | None


@dataclass(frozen=True, slots=True)
class Incoming:
    """A box that this rank gets from another one, and the cell that it is a part of."""

    reader: int
    landing: Landing
    box: Box
    cell: Box


def num_bytes(landing: Landing, box: Box) -> int:
    """Bytes of the elements of `box`."""
    return box.num_elements * landing.item_bytes


def elements(data: memoryview, box: Box, item_bytes: int) -> Array:
    """`data` as the elements of `box`, without a copy."""
    return np.frombuffer(data, np.uint8).view(raw_dtype(item_bytes)).reshape(box.sizes)


class Stage:
    """The memory of outgoing messages, used again in every round."""

    def __init__(self, size: int) -> None:
        self.nothing: list[Buffer] = [b""] * size
        self._space = np.empty(0, np.uint8)

    def lay_out(self, planned: Round) -> tuple[list[Buffer], dict[int, list[tuple[memoryview, Box]]]]:
        """The message to each rank, and by read where in them its boxes go.

        Ranks that get the same share one message: replicas cost no more memory than one of them.
        """
        alike: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for receiver, parts in planned.parts.items():
            alike.setdefault(tuple((part.read, id(part.box)) for part in parts), []).append(receiver)
        shared = [(receivers, planned.parts[receivers[0]]) for receivers in alike.values()]
        self._require(sum(aligned(parts[-1].stop) for _, parts in shared))
        messages = list(self.nothing)
        slots: dict[int, list[tuple[memoryview, Box]]] = {}
        start = 0
        for receivers, parts in shared:
            message = self._space.data[start : start + parts[-1].stop]
            start += aligned(parts[-1].stop)
            _note_slots(slots, parts, message)
            for receiver in receivers:
                messages[receiver] = message
        return messages, slots

    def _require(self, num_bytes: int) -> None:
        if len(self._space) < num_bytes:
            self._space = np.empty(num_bytes, np.uint8)


def _note_slots(
    slots: dict[int, list[tuple[memoryview, Box]]], parts: Iterable[Part], message: memoryview
) -> None:
    for part in parts:
        slots.setdefault(part.read, []).append((message[part.start : part.stop], part.box))


class Streams:
    """What this rank still has to get, by reader, in the order in which it comes."""

    def __init__(self, incoming: Iterable[Incoming], quota: int) -> None:
        self._quota = quota
        self._waiting: dict[int, deque[tuple[Landing, Box]]] = {}
        for each in incoming:
            for box in split(each.box, each.landing.item_bytes, quota):
                self._waiting.setdefault(each.reader, deque()).append((each.landing, box))

    def take(self, own_rank: int, messages: Sequence[Buffer]) -> list[tuple[Landing, Box, memoryview]]:
        """What these messages hold.

        Raises:
            InternalError: not what the plan says.
        """
        found: list[tuple[Landing, Box, memoryview]] = []
        for reader, message in enumerate(messages):
            if reader != own_rank and len(message):
                self._take(reader, memoryview(message).cast("B"), found)
        return found

    def _take(self, reader: int, message: memoryview, found: list[tuple[Landing, Box, memoryview]]) -> None:
        waiting = self._waiting.get(reader, deque())
        at = 0
        while at < len(message):
            landing, box = waiting.popleft() if waiting else (None, None)
            if landing is None or box is None or at + num_bytes(landing, box) > len(message):
                raise InternalError(f"rank {reader} sent {len(message)} bytes that do not follow the plan")
            stop = at + num_bytes(landing, box)
            found.append((landing, box, message[at:stop]))
            at = aligned(stop)

    def check_empty(self) -> None:
        """Raise InternalError if something was planned and did not come."""
        for reader, waiting in self._waiting.items():
            if waiting:
                raise InternalError(f"{waiting[0][0].key}: rank {reader} still owes {len(waiting)} parts")
