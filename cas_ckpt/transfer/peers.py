"""The ranks of one job, as commits and checkouts see them.

Every method but `close` is collective: all ranks call the same ones in the same order, from one
thread each. A rank that cannot go on calls `fail` instead of the next one; then every other rank
gets a `PeerError` that names it, at its next call at the latest. Nobody waits longer than the
timeout of the group.

    try:
        plans = peers.gather_all(plan)      # and whatever else the work needs
        ...
    except BaseException as error:
        peers.fail(error)                   # ends the work for the others; no effect on a PeerError
        raise

Invariant: a collective gives its answer on every rank or raises on every rank. Knows nothing of
tensors or torch; thread_peers.py has ranks that are threads, training/process_group.py the ones
of torch.distributed, blame.py the words that they share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cas_ckpt.buffer import Buffer
from cas_ckpt.transfer import blame


class Peers(Protocol):
    """A group of ranks. Messages are bytes of any length; every call verifies that all ranks make the same one.

    A message may be reused by its sender as soon as the call returns; what a call returns belongs
    to the caller. Work on one group must not overlap: while one thread commits, another one waits
    or uses a group of its own. Two calls at the same moment are refused (`InvalidInputError`);
    calls of two works that take turns are the caller's to prevent, with a lock around each work.

    Every collective raises:
        PeerError: A rank failed, left, did not come in time, or made another call.
        InvalidInputError: This very call is wrong; the others do not know yet, so call `fail`.
    """

    @property
    def rank(self) -> int:
        """The own rank, 0 to size - 1."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def begin(self) -> None:
        """A common work begins on this rank; after one that failed, connect the ranks anew where that is needed.

        Collective only where it connects. `ops.together` calls it, once for each work.
        """
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
        is the end of the common work that failed. A `PeerError` is known to the others, so
        it is not told again: a rank that raises one by its own decision must do so on all ranks.
        May wait, up to the timeout, until the others have heard.
        """
        ...

    def close(self) -> None:
        """Leave the group; not collective. Idempotent."""
        ...


class SoloPeers:
    """A world of one."""

    rank = 0
    size = 1

    def begin(self) -> None:
        """See `Peers.begin`."""

    def gather_all(self, message: Buffer) -> list[bytes]:
        """See `Peers.gather_all`."""
        return [bytes(message)]

    def gather(self, message: Buffer, *, root: int = 0) -> list[bytes] | None:
        """See `Peers.gather`."""
        blame.check_root(root, self.size)
        return [bytes(message)]

    def broadcast(self, message: Buffer | None, *, root: int = 0) -> bytes:
        """See `Peers.broadcast`."""
        return bytes(blame.check_broadcast(self.rank, root, self.size, message))

    def exchange(self, messages: Sequence[Buffer]) -> list[Buffer]:
        """See `Peers.exchange`."""
        blame.check_exchange(messages, self.size)
        return list(messages)

    def fail(self, error: BaseException) -> None:
        """See `Peers.fail`."""

    def close(self) -> None:
        """See `Peers.close`."""


SOLO: Peers = SoloPeers()
"""The world of one, for whoever asks for no other."""
