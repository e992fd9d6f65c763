"""Runs actors one store request at a time, in an order that a decider chooses.

    1. every actor has a thread of its own, and a `GatedStore` as its store
    2. at a request the actor stops; the decider looks at what all actors are about to ask, and
       names the one whose request is granted next
    3. the request is done, whatever must hold is checked, and the actor runs on to its next one
At any moment one actor runs, so a schedule is its list of turns: it can be written down,
replayed and made smaller. An actor that gets no more turns stands for a process that died or
was stopped for ever. Must not know: what the actors do.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from cas_ckpt.errors import TransientStorageError
from tests.effects import CrashNow, Fault

T = TypeVar("T")

WATCHDOG_S = 60.0
"""A schedule that takes longer hangs, and the test fails; no schedule is decided by time."""


@dataclass(frozen=True, slots=True)
class Request:
    """What an actor is about to ask of the store; `begin` stands before its first one."""

    name: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.where}".rstrip()


@dataclass(frozen=True, slots=True)
class Turn:
    """The decision: who goes next, and what befalls the request."""

    actor: str
    fault: Fault | None = None

    def __str__(self) -> str:
        return self.actor + ("" if self.fault is None else f"!{self.fault.name}")

    @staticmethod
    def parse(text: str) -> Turn:
        actor, _, fault = text.partition("!")
        return Turn(actor, Fault[fault] if fault else None)


class Decider(Protocol):
    """Names the next turn, or None: whoever is still at work stays where it is for ever."""

    def choose(self, ready: Mapping[str, Request]) -> Turn | None: ...


class Stalled(CrashNow):
    """This actor gets no more turns."""


class HangingError(AssertionError):
    """An actor waits for something that is no store request."""


@dataclass(slots=True, eq=False)
class _Actor:
    name: str
    work: Callable[[], Any]
    thread: threading.Thread | None = None
    wake: threading.Lock = field(default_factory=threading.Lock)
    one_request: threading.Lock = field(default_factory=threading.Lock)
    pending: Request | None = Request("begin")
    able: Callable[[], bool] | None = None
    fault: Fault | None = None
    result: Any = None
    error: BaseException | None = None


class Scheduler:
    """One schedule.

    Attributes:
        trace: The turns so far, with what was asked.
        failure: What `check` raised, if it did: the schedule ended there.
    """

    def __init__(self, decider: Decider, *, check: Callable[[Request], None] = lambda request: None) -> None:
        self._decider = decider
        self._check = check
        self._actors: dict[str, _Actor] = {}
        self._running: _Actor | None = None
        self._over = threading.Event()
        self._stopped = False
        self.trace: list[tuple[Turn, Request]] = []
        self.failure: BaseException | None = None

    def add(self, name: str, work: Callable[[], Any]) -> None:
        """One more actor, at work once it gets its first turn."""
        actor = self._actors[name] = _Actor(name, work)
        actor.wake.acquire()

    def run(self) -> None:
        """Run until nobody is left, the decider ends it, or the check fails; then all threads have ended."""
        first = self._next()
        if first is not None:
            self._hand_over(first)
            if not self._over.wait(WATCHDOG_S):
                faulthandler.dump_traceback(file=sys.__stderr__)
                raise HangingError(f"{self._running and self._running.name} hangs after:\n{self.story()}")
        self._stop()
        for actor in self._actors.values():
            if actor.thread is not None:
                if actor.thread.is_alive():
                    actor.wake.release()
                actor.thread.join(WATCHDOG_S)
        if self.failure is not None:
            raise self.failure

    @property
    def turns(self) -> list[Turn]:
        """The turns so far: what `Replay` takes."""
        return [turn for turn, _ in self.trace]

    def story(self) -> str:
        """The schedule in words, a request a line."""
        return "\n".join(f"  {turn}: {request}" for turn, request in self.trace)

    def result(self, name: str) -> Any:
        """What the actor's work returned; None if it did not end, or raised."""
        return self._actors[name].result

    def error(self, name: str) -> BaseException | None:
        """What the actor's work raised."""
        return self._actors[name].error

    def ended(self, name: str) -> bool:
        """Whether the actor came to its end (an error is one)."""
        return self._actors[name].pending is None

    # --- called by actors ----------------------------------------------------------------------

    def ask(self, name: str, request: Request, action: Callable[[], T], able: Callable[[], bool] | None = None) -> T:
        """Wait for this actor's turn, then do `action` and check.

        Args:
            able: Whether the turn may be given now; None for always.
        """
        actor = self._actors[name]
        with actor.one_request:  # of several threads of one actor, one at a time
            if self._stopped:
                raise Stalled(name)
            actor.pending, actor.able = request, able
            self._pass_on(actor)
            fault, actor.fault = actor.fault, None
            if fault is Fault.FAIL:
                raise TransientStorageError(f"{request.where}: refused by the schedule")
            result = action()
            self._checked(actor, request)
            if fault is Fault.LOSE_REPLY:
                raise TransientStorageError(f"{request.where}: the reply was lost by the schedule")
            return result

    def _checked(self, actor: _Actor, request: Request) -> None:
        try:
            self._check(request)
        except BaseException as failure:
            self.failure = failure
            self._stop()
            raise Stalled(actor.name) from failure

    def _pass_on(self, actor: _Actor) -> None:
        chosen = self._next()
        if chosen is actor:
            return
        if chosen is None:
            self._stop()
        else:
            self._hand_over(chosen)
        actor.wake.acquire()
        if self._stopped:
            raise Stalled(actor.name)

    def _next(self) -> _Actor | None:
        waiting = [actor for actor in self._actors.values() if actor.pending is not None]
        ready = {actor.name: actor.pending for actor in waiting if actor.able is None or actor.able()}
        try:
            turn = self._decider.choose(ready) if ready else None  # type: ignore[arg-type]
        except BaseException as failure:  # noqa: BLE001 - raised by run
            self.failure, turn = failure, None
        if turn is None:
            return None
        chosen = self._actors[turn.actor]
        chosen.fault = turn.fault
        self.trace.append((turn, ready[turn.actor]))  # type: ignore[arg-type]
        self._running = chosen
        return chosen

    def _hand_over(self, actor: _Actor) -> None:
        if actor.thread is None:
            actor.thread = threading.Thread(target=self._live, args=(actor,), name=actor.name, daemon=True)
            actor.thread.start()
        else:
            actor.wake.release()

    def _live(self, actor: _Actor) -> None:
        try:
            actor.result = actor.work()
        except Stalled:
            return
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            actor.error = error
        actor.pending = None
        if self._stopped:
            return
        chosen = self._next()
        if chosen is None:
            self._stop()
        else:
            self._hand_over(chosen)

    def _stop(self) -> None:
        self._stopped = True
        self._over.set()
