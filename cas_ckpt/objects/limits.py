"""How much a stored state may unfold into, and how many refs there may be, before somebody says that more is meant.

Invariant: what unfolds is counted before it is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from numbers import Real

from cas_ckpt.errors import InvalidInputError, TooLargeError, shown_value


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a stored state may unfold into, and how many refs there may be, before somebody says that more is meant.

    Equal containers are stored once: a tree of 40 small nodes, each naming the next one twice, stands for
    more entries than any memory holds. So what unfolds is counted while it is made; a limit is never
    reached by work that grows with what is stored, only by what it unfolds into.

    Attributes:
        max_entries: Entries of one state, containers among them, each as often as it occurs.
        max_bytes: Bytes of new tensors and arrays in host memory; None: what the system has available.
        max_refs: Refs of each kind that a listing takes, those that were deleted among them; and so many times 16 KiB
            of their records, together.
    """

    max_entries: int = 1 << 21
    max_bytes: int | None = None
    max_refs: int = 100_000


_DEFAULT = Limits()
_current: ContextVar[Limits] = ContextVar("limits", default=_DEFAULT)


def current_limits() -> Limits:
    """The limits of this call."""
    return _current.get()


@contextmanager
def limits(
    *, max_entries: int | None = None, max_bytes: int | None = None, max_refs: int | None = None
) -> Iterator[None]:
    """Other limits for the calls inside of this thread.

        with cas_ckpt.limits(max_entries=50_000_000):
            repo.diff("a", "b")

    Args:
        max_entries, max_bytes, max_refs: See `Limits`; None leaves what holds already.
    Raises:
        InvalidInputError: a limit that is below 1, or not a number.
    """
    given = {"max_entries": max_entries, "max_bytes": max_bytes, "max_refs": max_refs}
    wanted = {name: value for name, value in given.items() if value is not None}
    for name, value in wanted.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not value >= 1:
            raise InvalidInputError(f"{name} is {shown_value(value)}: give a number from 1 on")
    before = _current.set(replace(_current.get(), **wanted))
    try:
        yield
    finally:
        _current.reset(before)


def check_entries(count: int, what: str, *, times: int = 1, instead: str = "restore it from a copy") -> None:
    """Raise TooLargeError if `count` is more than `times` the entries that this call may make of a state.

    Args:
        instead: What can be done besides raising the limit.
    """
    most = times * _current.get().max_entries
    if count > most:
        raise TooLargeError(
            f"{what} for more than {most} entries, equal containers counted each time: {instead}, or "
            "raise the limit if it is meant to be so large: with cas_ckpt.limits(max_entries=...)"
        )
