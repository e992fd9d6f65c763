"""What holds when several ranks do one thing together.

Invariant: an error on one rank is told to the others exactly once, whoever catches it first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from cas_ckpt.errors import PeerError
from cas_ckpt.transfer.peers import Peers


@dataclass(slots=True)
class _Work:
    """Common work that is under way in this thread."""

    peers: Peers
    told: bool = False


_UNDER_WAY: ContextVar[tuple[_Work, ...]] = ContextVar("common work", default=())


@contextmanager
def together(peers: Peers) -> Iterator[None]:
    """Common work: whatever is raised inside makes every other rank raise `PeerError` too. May be nested.

    A `PeerError` is not told on: whoever raises one himself does so on all ranks.
    """
    if any(work.peers is peers for work in _UNDER_WAY.get()):
        yield
        return
    work = _Work(peers)
    before = _UNDER_WAY.set((*_UNDER_WAY.get(), work))
    try:
        yield
    except PeerError:
        raise  # the others know, or are to blame
    except BaseException as error:
        if not work.told:
            peers.fail(error)
        raise
    finally:
        _UNDER_WAY.reset(before)


def tell(peers: Peers, error: BaseException) -> None:
    """Tell the others `error` now, in place of what is about to be raised inside `together`."""
    for work in _UNDER_WAY.get():
        if work.peers is peers and not work.told:
            work.told = True
            peers.fail(error)
