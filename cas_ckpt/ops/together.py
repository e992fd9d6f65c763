"""What holds when several ranks do one thing together: they make the same call, and end it together.

Invariant: an error on one rank is told to the others exactly once, whoever catches it first. The first
exchange of every collective call is `tell_call`, so that calls of different kinds never take each
other's messages for their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import msgpack
from blake3 import blake3

from cas_ckpt.errors import PeerError
from cas_ckpt.transfer import blame
from cas_ckpt.transfer.peers import Peers

_MAX_SHOWN = 200
"""Characters of an argument in a message."""


@dataclass(frozen=True, slots=True)
class Call:
    """What the ranks were asked to do together.

    Attributes:
        verb: As people know it: commit, checkout, init, dcp.save.
        arguments: Those that must be the same on all ranks, by name: plain values (others count by their repr).
    """

    verb: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        said = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items() if value)
        return f"{self.verb}({said:.{_MAX_SHOWN}})"


def tell_call(peers: Peers, call: Call, own: Any = None) -> list[Any]:
    """Find out whether all ranks make this very call; what each of them says of itself (`own`), by rank.

    Collective: one exchange, in which the arguments travel as a digest; one more if the ranks disagree.

    Raises:
        PeerError: On every rank: who makes another call, or gives which other argument.
    """
    arguments = msgpack.packb(dict(call.arguments), default=repr, unicode_errors="surrogatepass")
    told = [msgpack.unpackb(data) for data in peers.gather_all(
        msgpack.packb([call.verb, blake3(arguments).digest(), own])
    )]  # fmt: skip
    if any(each[:2] != told[0][:2] for each in told):
        said = peers.gather_all(msgpack.packb([call.verb, arguments]))
        raise _difference([_unpacked(data) for data in said])
    return [each[2] for each in told]


def _unpacked(data: bytes) -> Call:
    verb, arguments = msgpack.unpackb(data)
    return Call(verb, msgpack.unpackb(arguments, unicode_errors="surrogatepass"))


def _difference(calls: Sequence[Call]) -> PeerError:
    """The first thing in which the calls of the ranks differ, and who says what."""
    verbs = Counter(call.verb for call in calls)
    usual = verbs.most_common(1)[0][0]
    if len(verbs) > 1:
        wrong = tuple(rank for rank, call in enumerate(calls) if call.verb != usual)
        said = "; ".join(f"{blame.named(ranks)}: {text}" for text, ranks in _by_text(map(str, calls)).items())
        return PeerError(
            f"the ranks do not make the same call ({said}): all ranks must commit and check out in the same order",
            wrong,
        )
    # By their text, for -0.0 and 0.0 are equal and other numbers all the same.
    texts = {name: [repr(call.arguments.get(name)) for call in calls] for name in calls[0].arguments}
    name = next(name for name, said in texts.items() if len(set(said)) > 1)
    most = Counter(texts[name]).most_common(1)[0][0]
    wrong = tuple(rank for rank, text in enumerate(texts[name]) if text != most)
    parts = ", ".join(
        f"{blame.named(ranks)} {'says' if len(ranks) == 1 else 'say'} {text:.{_MAX_SHOWN}}"
        for text, ranks in _by_text(texts[name]).items()
    )
    return PeerError(
        f"the ranks disagree on the {name}: {parts}: call {usual} with the same arguments on all ranks", wrong
    )


def _by_text(texts: Iterable[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        found.setdefault(text, []).append(rank)
    return found


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
        peers.begin()
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
