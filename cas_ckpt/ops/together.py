"""What holds when several ranks do one thing together.

Invariant: an error on one rank is told to the others exactly once, whoever catches it first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cas_ckpt.errors import PeerError
from cas_ckpt.transfer.peers import Peers

_TOLD = "_cas_ckpt_told_peers"


@contextmanager
def together(peers: Peers) -> Iterator[None]:
    """Common work: whatever is raised inside makes every other rank raise `PeerError` too. May be nested."""
    try:
        yield
    except PeerError:
        raise  # the others know, or are to blame
    except BaseException as error:
        if not getattr(error, _TOLD, False):
            setattr(error, _TOLD, True)
            peers.fail(error)
        raise
