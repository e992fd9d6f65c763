"""`Ranks`: this process and those that it commits and checks out with."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from typing import Any

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import InvalidInputError, shown_value
from cas_ckpt.parallel.peers import SOLO, Call, Peers, collective_errors, compare_calls

AUTO = "auto"
"""All ranks of torch.distributed where that is initialised, else this process alone."""

TIMEOUT_S = 300.0


class Ranks:
    """This process and those that it commits and checks out with."""

    def __init__(self, group: Any, timeout_s: float) -> None:
        if not timeout_s > 0:
            raise InvalidInputError(f"timeout_s is {timeout_s!r}: give the seconds that a rank waits for the others")
        # A ProcessGroup is known by the name of its class: torch is not imported for it.
        is_group = hasattr(group, "gather_all") or any(each.__name__ == "ProcessGroup" for each in type(group).__mro__)
        if not (group is None or (isinstance(group, str) and group == AUTO) or is_group):
            raise InvalidInputError(f"group is {shown_value(group)}: give {AUTO!r}, None, a ProcessGroup or Peers")
        self.group = group
        self._timeout_s = timeout_s
        self._own: Peers | None = None
        self._own_background: Peers | None = None
        self.num_neighbours = 1  # ranks on this machine, as far as `background` has asked
        self._closed = False

    @property
    def peers(self) -> Peers:
        """The ranks; making the group, the first time, is collective."""
        if self._closed:
            raise InvalidInputError("this repository was closed: open it again")
        if self.group is None:
            return SOLO
        if hasattr(self.group, "gather_all"):
            found: Peers = self.group
            return found
        if self._own is None:
            distributed = sys.modules.get("torch.distributed")
            is_named = isinstance(self.group, str)
            if distributed is None or (is_named and not (distributed.is_available() and distributed.is_initialized())):
                return SOLO  # for now: it may still be initialised
            if is_named and distributed.get_world_size() == 1:
                return SOLO
            from cas_ckpt.training.process_group import GroupPeers

            self._own = GroupPeers(None if is_named else self.group, timeout_s=self._timeout_s)
        return self._own

    @property
    def background(self) -> Peers:
        """The same ranks over connections of their own, for commits in the background; collective the first time.

        `Peers` that were given are these, too: then no other work of theirs may run meanwhile.
        """
        peers = self.peers
        if self._own is None:
            return peers
        if self._own_background is None:
            from cas_ckpt.training.process_group import GroupPeers

            named = None if isinstance(self.group, str) else self.group
            made = GroupPeers(named, timeout_s=self._timeout_s)
            try:
                hosts = made.gather_all(socket.gethostname().encode())
            except BaseException:
                made.close()
                raise
            self._own_background, self.num_neighbours = made, hosts.count(hosts[made.rank])
        return self._own_background

    def open_in_turn(
        self, call: Call, first: Callable[[], RepositoryHandle], others: Callable[[], RepositoryHandle]
    ) -> RepositoryHandle:
        """Open by `first` on rank 0 and then by `others` on the other ranks. Collective.

        Args:
            call: What this is done for; all ranks must say the same.

        A rank that cannot makes all ranks raise before any of them goes on; what was opened is closed.
        """
        peers = self.peers
        made: RepositoryHandle | None = None
        try:
            with collective_errors(peers):
                compare_calls(peers, call)
                if peers.rank == 0:
                    made = first()
                peers.broadcast(b"" if peers.rank == 0 else None)
                made = made or others()
                peers.gather_all(b"")
        except BaseException:
            if made is not None:
                made.close()
            raise
        return made

    def close(self) -> None:
        """Leave the group that was made here; no work together is begun any more. Idempotent."""
        self._closed = True
        for own in (self._own_background, self._own):
            if own is not None:
                own.close()
        self._own = self._own_background = None
