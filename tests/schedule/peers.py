"""Ranks that are actors: where one waits for the others, it waits for its turn.

A rank that gets no more turns is a rank that died without a word: the others wait, as they would
until the timeout of their group, which no schedule plays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import PeerError
from cas_ckpt.parallel import peers as blame
from tests.schedule.scheduler import Request, Scheduler


class _Group:
    """What the ranks said, call by call, and which of them gave up."""

    def __init__(self) -> None:
        self.said: dict[int, dict[int, Any]] = {}
        self.failed: dict[int, str] = {}


_groups: WeakKeyDictionary[Scheduler, _Group] = WeakKeyDictionary()


class ScheduledPeers:
    """One rank of the only group of a schedule."""

    def __init__(self, scheduler: Scheduler, actor: str, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._scheduler, self._actor = scheduler, actor
        self._group = _groups.setdefault(scheduler, _Group())
        self._calls = 0

    def _meet(self, call: str, message: Any) -> list[Any]:
        group, self._calls = self._group, self._calls + 1
        said = group.said.setdefault(self._calls, {})
        said[self.rank] = message
        self._scheduler.ask(
            self._actor, Request("meet", call), lambda: None, able=lambda: len(said) == self.size or bool(group.failed)
        )
        if len(said) < self.size:
            raise blame.failed(group.failed).error()
        return [said[rank] for rank in range(self.size)]

    def begin(self) -> None:
        pass

    def gather_all(self, message: Buffer) -> list[bytes]:
        return self._meet("gather_all", bytes(message))

    def gather(self, message: Buffer) -> list[bytes] | None:
        found = self._meet("gather", bytes(message))
        return None if self.rank else found

    def broadcast(self, message: Buffer | None) -> bytes:
        found: bytes = self._meet("broadcast", b"" if message is None else bytes(message))[0]
        return found

    def exchange(self, messages: Sequence[Buffer]) -> list[Buffer]:
        found = self._meet("exchange", [bytes(message) for message in messages])
        return [sent[self.rank] for sent in found]

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, PeerError):
            self._group.failed[self.rank] = f"{type(error).__name__}: {error}"

    def close(self) -> None:
        pass
