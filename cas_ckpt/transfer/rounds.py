"""Cuts what a rank sends to others into rounds of bounded size.

Between two ranks runs one stream of parts, in the order of the plan; a round carries as many whole
parts of it as fit. Both ends cut the boxes of the stream by the receiver's quota, so messages need
no words about what is in them.

A message is the parts one after the other; the receiver knows from the plan what comes next from whom.

Invariant: the rounds are pure. In one round nobody sends more than the budget, and nobody gets more than its quota
from each of its senders, which is the budget divided by their number (but at least a leaf). Knows nothing of stores.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import InternalError
from cas_ckpt.memory import ALIGN_BYTES, aligned
from cas_ckpt.objects.digest import LEAF_BYTES
from cas_ckpt.objects.spec import Box, Delivery, raw_dtype
from cas_ckpt.objects.state import ArrayTarget
from cas_ckpt.transfer.hashing import Array, stretches

_Sized = tuple[int, Box, int]
"""Receiver, box, bytes."""


@dataclass(frozen=True, slots=True)
class Part:
    """A box in a message.

    Attributes:
        read: Number of the chunk among the reader's own.
        start: Where the box's elements, in C order, begin in the message (bytes).
        stop: Where they end.
    """

    read: int
    box: Box
    start: int
    stop: int


@dataclass(slots=True)
class Round:
    """Data that one rank sends at one time.

    Attributes:
        parts: Receiver -> parts of the message to it.
        lengths: Receiver -> where the next part of the message to it begins.
        total: Bytes of all messages.
    """

    parts: dict[int, list[Part]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    total: int = 0

    def has_room(self, parts: Sequence[_Sized], *, quotas: Sequence[int], budget_bytes: int) -> bool:
        """Whether `parts` fit the budget of the sender, and the quotas of those who get them."""
        if self.total + sum(aligned(num_bytes) for _, _, num_bytes in parts) > budget_bytes:
            return False
        more: dict[int, int] = {}
        for receiver, _, num_bytes in parts:
            more[receiver] = more.get(receiver, 0) + aligned(num_bytes)
        return all(self.lengths.get(rank, 0) + length <= quotas[rank] for rank, length in more.items())

    def add(self, read: int, receiver: int, box: Box, num_bytes: int) -> None:
        """Append a part of chunk number `read` to the message to `receiver`."""
        start = self.lengths.get(receiver, 0)
        self.parts.setdefault(receiver, []).append(Part(read, box, start, start + num_bytes))
        self.lengths[receiver] = start + aligned(num_bytes)
        self.total += aligned(num_bytes)


def quota_bytes(num_senders: int, budget_bytes: int) -> int:
    """Most bytes that each of its senders gives a rank in one round."""
    return max(budget_bytes // max(num_senders, 1), LEAF_BYTES) // ALIGN_BYTES * ALIGN_BYTES


def cut_rounds(
    reads: Iterable[tuple[int, int, Sequence[Delivery]]], *, quotas: Sequence[int], budget_bytes: int
) -> list[Round]:
    """The rounds in which a rank sends.

    A chunk whose parts would fit an empty round is not cut in two, so it is seldom read twice.

    Args:
        reads: (number of the chunk, its item size in bytes, who gets what of it), in the order of the plan.
        quotas: By rank, `quota_bytes` of the receiver.
        budget_bytes: At least every quota.
    """
    rounds = [Round()]
    for read, item_bytes, sends in reads:
        parts = _parts(sends, item_bytes, quotas)
        if not rounds[-1].has_room(parts, quotas=quotas, budget_bytes=budget_bytes):
            rounds.append(Round())
        for part in parts:
            if not rounds[-1].has_room([part], quotas=quotas, budget_bytes=budget_bytes):
                rounds.append(Round())
            rounds[-1].add(read, *part)
    return [each for each in rounds if each.parts]


def _parts(sends: Sequence[Delivery], item_bytes: int, quotas: Sequence[int]) -> list[_Sized]:
    # Receivers of one box share the object, and the objects that it is split into: messages are recognised by that.
    cut: dict[tuple[int, int], list[Box]] = {}
    found = []
    for send in sends:
        alike = (id(send.box), quotas[send.rank])
        boxes = cut.get(alike)
        if boxes is None:
            boxes = cut[alike] = list(stretches(send.box, quotas[send.rank] // item_bytes))
        found += [(send.rank, box, box.num_elements * item_bytes) for box in boxes]
    return found


# --- the messages of one round: where their parts are written to, and what comes out of them ---


@dataclass(frozen=True, slots=True)
class TargetTensor:
    """A tensor as this rank sees it; `target` is None where it wants nothing of it."""

    key: str
    item_bytes: int
    target: ArrayTarget | None


@dataclass(frozen=True, slots=True)
class Incoming:
    """A box that this rank gets from another one, and the cell that it is a part of."""

    reader: int
    tensor: TargetTensor
    box: Box
    cell: Box


def num_bytes(tensor: TargetTensor, box: Box) -> int:
    """Bytes of the elements of `box`."""
    return box.num_elements * tensor.item_bytes


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
        room = sum(aligned(parts[-1].stop) for _, parts in shared)
        if len(self._space) < room:
            self._space = np.empty(room, np.uint8)
        messages = list(self.nothing)
        slots: dict[int, list[tuple[memoryview, Box]]] = {}
        start = 0
        for receivers, parts in shared:
            message = self._space.data[start : start + parts[-1].stop]
            start += aligned(parts[-1].stop)
            for part in parts:
                slots.setdefault(part.read, []).append((message[part.start : part.stop], part.box))
            for receiver in receivers:
                messages[receiver] = message
        return messages, slots


class Streams:
    """Data that this rank still has to receive, by reader, in the order of arrival."""

    def __init__(self, incoming: Iterable[Incoming], quota: int) -> None:
        self._quota = quota
        self._waiting: dict[int, deque[tuple[TargetTensor, Box]]] = {}
        for each in incoming:
            for box in stretches(each.box, quota // each.tensor.item_bytes):
                self._waiting.setdefault(each.reader, deque()).append((each.tensor, box))

    def take(self, own_rank: int, messages: Sequence[Buffer]) -> list[tuple[TargetTensor, Box, memoryview]]:
        """Decode these messages.

        Raises:
            InternalError: not what the plan says.
        """
        found: list[tuple[TargetTensor, Box, memoryview]] = []
        for reader, message in enumerate(messages):
            if reader == own_rank:
                continue
            view = memoryview(message).cast("B")
            waiting = self._waiting.get(reader, deque())
            at = 0
            while at < len(view):
                tensor, box = waiting.popleft() if waiting else (None, None)
                if tensor is None or box is None or at + num_bytes(tensor, box) > len(view):
                    raise InternalError(f"rank {reader} sent {len(view)} bytes that do not follow the plan")
                stop = at + num_bytes(tensor, box)
                found.append((tensor, box, view[at:stop]))
                at = aligned(stop)
        return found

    def check_empty(self) -> None:
        """Raise InternalError if something was planned and did not come."""
        for reader, waiting in self._waiting.items():
            if waiting:
                raise InternalError(f"{waiting[0][0].key}: rank {reader} still owes {len(waiting)} parts")
