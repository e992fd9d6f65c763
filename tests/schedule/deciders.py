"""Who goes next: by a script, by chance, or as it was once before."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.effects import Fault
from tests.schedule.scheduler import Decider, Request, Turn


@dataclass(frozen=True, slots=True)
class Go:
    """Part of a script: let `actor` go on, to its end or until it is about to ask for `before`.

    Attributes:
        before: Beginning of a request as its text is, such as "compare_and_swap refs/heads/main", or
            several such, one of which is meant, between "|"; empty: to the end.
        through: That request is granted too.
        fault: What befalls that request, if it is granted.
        times: Stop at the so many-th such request.
        at_most: Stop after so many requests in any case.
    """

    actor: str
    before: str = ""
    through: bool = False
    fault: Fault | None = None
    times: int = 1
    at_most: int = 10**9


def to(actor: str, before: str, times: int = 1) -> Go:
    """Up to a request that is not granted yet."""
    return Go(actor, before, times=times)


def through(actor: str, request: str, times: int = 1, fault: Fault | None = None) -> Go:
    """Up to and with a request."""
    return Go(actor, request, through=True, times=times, fault=fault)


def all_of(actor: str) -> Go:
    """To the actor's end."""
    return Go(actor)


def some_of(actor: str, requests: int, fault: Fault | None = None) -> Go:
    """So many requests, the beginning counted as one; the fault befalls the last of them."""
    return Go(actor, at_most=requests, fault=fault)


@dataclass(frozen=True, slots=True)
class Together:
    """Part of a script: these actors in turn, until the first of them has made so many requests, or all are stuck."""

    actors: tuple[str, ...]
    requests: int


class ScriptError(AssertionError):
    """The script asks for what does not come."""


class Script:
    """A directed schedule. After the last part, whoever is at work stays where it is.

    Args:
        lax: An actor that ends before the request came is no mistake.
    """

    def __init__(self, parts: Sequence[Go | Together], *, lax: bool = False) -> None:
        self._turns = self._each(parts)
        self._lax = lax
        self._ready: Mapping[str, Request] = {}

    def choose(self, ready: Mapping[str, Request]) -> Turn | None:
        self._ready = ready
        return next(self._turns, None)

    def _each(self, parts: Sequence[Go | Together]) -> Iterator[Turn]:
        for part in parts:
            if isinstance(part, Together):
                yield from self._in_turn(part)
                continue
            seen = done = 0
            while (request := self._ready.get(part.actor)) is not None and done < part.at_most:
                done += 1
                found = bool(part.before) and str(request).startswith(tuple(part.before.split("|")))
                seen += found
                if found and seen == part.times:
                    if part.through:
                        yield Turn(part.actor, part.fault)
                    break
                yield Turn(part.actor, part.fault if done == part.at_most else None)
            else:
                if part.before and not self._lax:
                    raise ScriptError(f"{part.actor} ended before {part.before!r} came {part.times} times")

    def _in_turn(self, part: Together) -> Iterator[Turn]:
        done, last = 0, -1
        while done < part.requests:
            order = [*part.actors[last + 1 :], *part.actors[: last + 1]]
            chosen = next((actor for actor in order if actor in self._ready), None)
            if chosen is None:
                return
            last = part.actors.index(chosen)
            done += last == 0
            yield Turn(chosen)


class Uniform:
    """Any actor, each time anew."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def choose(self, ready: Mapping[str, Request]) -> Turn | None:
        return Turn(self._chance.choice(list(ready)))


class Priorities:
    """The first in a random order of the actors; at a few random moments it becomes the last.

    Finds any loss that needs `num_changes` well-placed interruptions with a chance that is known
    (Burckhardt et al., "A randomized scheduler with probabilistic guarantees of finding bugs",
    ASPLOS 2010).
    """

    def __init__(self, chance: random.Random, *, num_changes: int, length: int) -> None:
        self._chance = chance
        self._changes = {chance.randrange(length) for _ in range(num_changes)}
        self._order: list[str] = []
        self._at = 0

    def choose(self, ready: Mapping[str, Request]) -> Turn | None:
        if not self._order:
            self._order = list(ready)
            self._chance.shuffle(self._order)
        first = next(name for name in self._order if name in ready)
        if self._at in self._changes:
            self._order.remove(first)
            self._order.append(first)
            first = next(name for name in self._order if name in ready)
        self._at += 1
        return Turn(first)


class Accidents:
    """Some actors stop for ever at a random request, some requests or replies are lost."""

    def __init__(self, inner: Decider, chance: random.Random, *, deaths: float, faults: float, longest: int) -> None:
        self._inner = inner
        self._chance = chance
        self._deaths = deaths
        self._faults = faults
        self._longest = longest
        self._left: dict[str, int] = {}

    def choose(self, ready: Mapping[str, Request]) -> Turn | None:
        for name in ready:
            if name not in self._left:
                dies = self._chance.random() < self._deaths
                self._left[name] = self._chance.randrange(1, self._longest) if dies else -1
        alive = {name: request for name, request in ready.items() if self._left[name] != 0}
        turn = self._inner.choose(alive) if alive else None
        if turn is None:
            return None
        self._left[turn.actor] -= 1
        if ready[turn.actor].name != "begin" and self._chance.random() < self._faults:
            return Turn(turn.actor, self._chance.choice([Fault.FAIL, Fault.LOSE_REPLY]))
        return turn


class Replay:
    """The turns of an earlier schedule, as far as they are possible; then everybody stays where they are."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = list(turns)
        self._at = 0

    def choose(self, ready: Mapping[str, Request]) -> Turn | None:
        while self._at < len(self._turns):
            turn = self._turns[self._at]
            self._at += 1
            if turn.actor in ready:
                return turn
        return None


def shortened(turns: Sequence[Turn]) -> str:
    """Turns as text: `GC W1*3 W1!LOSE_REPLY`."""
    parts: list[list[object]] = []
    for turn in map(str, turns):
        if parts and parts[-1][0] == turn:
            parts[-1][1] += 1  # type: ignore[operator]
        else:
            parts.append([turn, 1])
    return " ".join(f"{name}*{count}" if count != 1 else str(name) for name, count in parts)


def lengthened(text: str) -> list[Turn]:
    """The turns that `shortened` wrote."""
    turns = []
    for part in text.split():
        name, _, count = part.partition("*")
        turns += [Turn.parse(name)] * int(count or 1)
    return turns
