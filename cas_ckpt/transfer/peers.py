"""The ranks of one job, as commits and checkouts see them.

Every method of `Peers` is collective: all ranks call the same ones in the same order, from one
thread each. A rank that cannot go on calls `fail` instead of the next one; from then on every
rank gets a `PeerError` that names it. Nobody waits longer than the timeout of the group.

Invariant: a collective gives its answer on every rank or raises on every rank. Knows nothing of
tensors or torch; training/process_group.py is the one over torch.distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cas_ckpt.buffer import Buffer


class Peers(Protocol):
    """A group of ranks. Messages are bytes; every call verifies that all ranks make the same one."""

    @property
    def rank(self) -> int:
        """The own rank, 0 to size - 1."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def gather_all(self, message: Buffer) -> list[bytes]:
        """The message of every rank, by rank."""
        ...

    def gather(self, message: Buffer, *, root: int = 0) -> list[bytes] | None:
        """The message of every rank on rank `root`, None on the others."""
        ...

    def broadcast(self, message: Buffer | None, *, root: int = 0) -> bytes:
        """The message of rank `root`; the others pass None."""
        ...

    def exchange(self, messages: Sequence[Buffer]) -> list[Buffer]:
        """One message to each rank, by rank (b"" for nothing); those that the ranks sent to this one.

        The own one passes through. Messages may be large: the caller bounds them.
        """
        ...

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank cannot go on, and why; never raises. The caller then raises `error`.

        The group is usable again afterwards: each rank's call here, or the `PeerError` it got,
        is the end of the common work that failed.
        """
        ...

    def close(self) -> None:
        """Leave the group; not collective. Idempotent."""
        ...


class SoloPeers:
    """A world of one."""

    rank = 0
    size = 1

    def gather_all(self, message: Buffer) -> list[bytes]:
        """See `Peers.gather_all`."""
        return [bytes(message)]

    def gather(self, message: Buffer, *, root: int = 0) -> list[bytes] | None:
        """See `Peers.gather`."""
        return [bytes(message)]

    def broadcast(self, message: Buffer | None, *, root: int = 0) -> bytes:
        """See `Peers.broadcast`."""
        return bytes(message or b"")

    def exchange(self, messages: Sequence[Buffer]) -> list[Buffer]:
        """See `Peers.exchange`."""
        return list(messages)

    def fail(self, error: BaseException) -> None:
        """See `Peers.fail`."""

    def close(self) -> None:
        """See `Peers.close`."""
