"""Direct connections between ranks: many messages of known lengths at once, within one deadline.

Every message goes straight from its sender to its receiver, over a gloo group of our own, so that what
does not arrive tells exactly who did not send. (Gloo's own collectives go in rings: there a dead rank
looks like a dead neighbour.)

Invariant: memory that gloo may still read or write is kept until the connections are closed.
Knows nothing of what the messages mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cas_ckpt import clock
from cas_ckpt.buffer import Buffer

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class LinkError(Exception):
    """Messages did not come or go within the deadline; the connections cannot be used any more.

    Attributes:
        suspects: Ranks at the other end of those messages.
        is_late: The deadline passed; otherwise a connection broke.
    """

    def __init__(self, suspects: set[int], *, is_late: bool) -> None:
        super().__init__(sorted(suspects), is_late)
        self.suspects = suspects
        self.is_late = is_late


@dataclass(frozen=True, slots=True)
class _Sent:
    """One message under way: the other rank, the work to wait for, and its memory."""

    peer: int
    work: Any
    memory: torch.Tensor


class Links:
    """Connections from this rank to all others."""

    def __init__(self, store: Store, rank: int, size: int, *, timeout_s: float) -> None:
        """Connect; all ranks do it at the same time.

        Raises:
            RuntimeError: Somebody did not come within the timeout.
        """
        self._group: Any = torch.distributed.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
        self._under_way: list[_Sent] = []

    def swap(self, outgoing: Mapping[int, Buffer], incoming: Mapping[int, int], *, deadline_s: float) -> dict[int, Any]:
        """Send messages and receive others; messages without bytes are not sent.

        Args:
            outgoing: What to send, by receiver.
            incoming: How many bytes will come, by sender.
            deadline_s: On `clock.monotonic_s`, for all of it.

        Returns:
            What came, as memoryviews, by sender.
        """
        memory = {peer: torch.empty(length, dtype=torch.uint8) for peer, length in incoming.items()}
        lost: set[int] = set()
        for peer, tensor in memory.items():
            self._start(self._group.recv, peer, tensor, lost)
        for peer, message in outgoing.items():
            self._start(self._group.send, peer, _over(message), lost)
        for sent in self._under_way:
            if lost and clock.monotonic_s() < deadline_s:
                break  # those who have not come yet are not late: it would be wrong to suspect them
            _wait(sent, deadline_s, lost)
        if lost:
            raise LinkError(lost, is_late=clock.monotonic_s() >= deadline_s)
        self._under_way.clear()
        return {peer: tensor.numpy().data for peer, tensor in memory.items()}

    def _start(self, start: Any, peer: int, memory: torch.Tensor, lost: set[int]) -> None:
        if not memory.numel():
            return
        try:
            self._under_way.append(_Sent(peer, start([memory], peer, 0), memory))
        except RuntimeError:
            lost.add(peer)

    def close(self) -> None:
        """Close the connections; what is under way on the other side fails there."""
        self._group = None
        self._under_way.clear()


def _wait(sent: _Sent, deadline_s: float, lost: set[int]) -> None:
    # Past the deadline the rest is only asked whether it is there: zero would mean no limit at all.
    left_s = max(deadline_s - clock.monotonic_s(), 0.001)
    try:
        sent.work.wait(timedelta(seconds=left_s))
    except RuntimeError:
        lost.add(sent.peer)


class _Memory:
    """Read-only memory for numpy to look at; torch warns about tensors over it, but gloo only reads."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        self.__array_interface__ = {"data": (address, False), "shape": (view.nbytes,), "typestr": "|u1", "version": 3}


def _over(message: Buffer) -> torch.Tensor:
    """A tensor over the bytes of `message`, without a copy where they are contiguous."""
    view = memoryview(message)
    if not view.c_contiguous:
        view = memoryview(bytes(view))
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.asarray(_Memory(view.cast("B"))))
