"""Effects on a medium, counted, and the fate that a plan gives to one of them.

The story of a crash test:
    1. run the work once over `FaultyStore(inner)` and read `effects.count`: it has n effects;
    2. for every k up to n, run it over `FaultyStore(fresh inner, die_before(k))` (and
       `die_after(k)`) and catch `CrashNow`: from there on every call raises, as a dead process
       makes no calls;
    3. open the inner store again, as the next process would, and check what must hold.
An effect is what changes the medium: put, put_if_absent, compare_and_swap, delete, and write
and commit of a writer. Work that has effects elsewhere (the index) shares the count through
`Effects.perform`.

Invariant: the same plan and the same work give the same fate. Must not know: stores.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from cas_ckpt.errors import CkptError, OutOfSpaceError, StorageError, TransientStorageError

T = TypeVar("T")

WRITES = frozenset({"put", "put_if_absent", "compare_and_swap", "write", "commit"})
"""Effects that need space."""

CONDITIONALS = frozenset({"put_if_absent", "compare_and_swap"})
"""Effects whose reply tells who won."""


class CrashNow(BaseException):
    """The process "died" here; a BaseException, so that no handler of errors survives it."""


class Fault(enum.Enum):
    """What goes wrong with an effect."""

    FAIL = "not done, raises"
    DIE_BEFORE = "not done, nothing happens any more"
    DIE_AFTER = "done, nothing happens any more"
    LOSE_REPLY = "done, raises as if it was not"


@dataclass(frozen=True, slots=True)
class Effect:
    """One effect that was asked for: the method's name, and the key."""

    name: str
    where: str


def _refuse(where: str) -> CkptError:
    return StorageError(f"{where}: refused by a fault that the test planned")


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Which effect goes wrong, and how.

    Attributes:
        at: Number of the effect, counted from 1; 0 for none.
        fault: What happens to it.
        counted: Names of the effects that count; None for all.
        lasting: Every counted effect after it fares the same (a full disk stays full).
        error: What FAIL and LOSE_REPLY raise, given the key.
    """

    at: int = 0
    fault: Fault = Fault.FAIL
    counted: frozenset[str] | None = None
    lasting: bool = False
    error: Callable[[str], Exception] = _refuse

    def strikes(self, number: int) -> bool:
        """True if counted effect `number` goes wrong."""
        return 0 < self.at == number or (self.lasting and 0 < self.at < number)


def die_before(k: int) -> FaultPlan:
    """Die instead of doing effect `k`."""
    return FaultPlan(k, Fault.DIE_BEFORE)


def die_after(k: int) -> FaultPlan:
    """Do effect `k`, then die before anybody hears of it."""
    return FaultPlan(k, Fault.DIE_AFTER)


def fail_at(k: int, error: Callable[[str], Exception] = _refuse) -> FaultPlan:
    """Raise `error(key)` instead of doing effect `k`."""
    return FaultPlan(k, Fault.FAIL, error=error)


def no_space_from(k: int) -> FaultPlan:
    """The disk is full from the `k`-th write on; deleting still works."""
    return FaultPlan(
        k, Fault.FAIL, WRITES, lasting=True, error=lambda where: OutOfSpaceError(f"writing {where}: no space left")
    )


def lose_reply(k: int) -> FaultPlan:
    """Do the `k`-th conditional write, then raise as if the connection had broken."""
    return FaultPlan(
        k, Fault.LOSE_REPLY, CONDITIONALS, error=lambda where: TransientStorageError(f"{where}: the reply was lost")
    )


class Effects:
    """The count of effects and the fate of each; may be shared by a store and an index."""

    def __init__(self, plan: FaultPlan | None = None) -> None:
        self.plan = plan or FaultPlan()
        self.log: list[Effect] = []
        self.dead = False
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """Counted effects so far, the one that went wrong included."""
        return len(self.log)

    def require_alive(self) -> None:
        """Raise CrashNow once the plan has struck dead: a dead process does not even read."""
        if self.dead:
            raise CrashNow("this process died at an earlier effect")

    def perform(self, name: str, where: str, action: Callable[[], T]) -> T:
        """Do `action` as effect `name` on `where`, unless the plan has other ideas."""
        self.require_alive()
        fault = self._fate(Effect(name, where))
        if fault is Fault.DIE_BEFORE:
            self._die(where)
        if fault is Fault.FAIL:
            raise self.plan.error(where)
        result = action()
        if fault is Fault.DIE_AFTER:
            self._die(where)
        if fault is Fault.LOSE_REPLY:
            raise self.plan.error(where)
        return result

    def _fate(self, effect: Effect) -> Fault | None:
        if self.plan.counted is not None and effect.name not in self.plan.counted:
            return None
        with self._lock:
            self.log.append(effect)
            return self.plan.fault if self.plan.strikes(len(self.log)) else None

    def _die(self, where: str) -> None:
        self.dead = True
        raise CrashNow(f"died at effect {self.count}, {where}")
