"""Ctrl-C at each place where Python may notice it: as a function of Python begins, and as one of C has returned.

`places_in(work)` runs the work once and notes the places; `interrupted(work, place)` runs it again, and calls what
handles SIGINT when it comes to that place, as the interpreter would: no thread, no clock, the same on every run.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import TypeAlias

Place: TypeAlias = tuple[CodeType, int, CodeType | None, int]
"""In the code, behind the call of C at this instruction, or -1 where it begins; and from where it was called."""


def _place(frame: FrameType, event: str) -> Place | None:
    if event not in ("call", "c_return") or frame.f_code.co_name == "__del__":  # what is raised there is printed
        return None
    above = frame.f_back
    at = frame.f_lasti if event == "c_return" else -1
    return frame.f_code, at, None if above is None else above.f_code, -1 if above is None else above.f_lasti


def places_in(work: Callable[[], object], *, of: Callable[[str], bool]) -> list[Place]:
    """The places that `work` comes to, in their order, each once.

    Args:
        of: Which files of code they are in, by path.
    """
    found: dict[Place, None] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        place = _place(frame, event)
        if place is not None and of(frame.f_code.co_filename):
            found[place] = None

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return list(found)


def interrupted(work: Callable[[], object], wanted: Place) -> None:
    """Run `work`, with Ctrl-C when it first comes to the place.

    Raises:
        KeyboardInterrupt: most likely; and whatever else `work` raises.
    """

    def strike(frame: FrameType, event: str, argument: object) -> None:
        if _place(frame, event) == wanted:
            sys.setprofile(None)
            handler = signal.getsignal(signal.SIGINT)
            assert callable(handler)
            handler(signal.SIGINT, frame)

    sys.setprofile(strike)
    try:
        work()
    finally:
        sys.setprofile(None)


def told(place: Place) -> str:
    """The place, for people."""
    code, at, above, called_at = place
    where = f"{code.co_filename}:{_line(code, at)} {code.co_qualname} {'begins' if at < 0 else 'behind a call'}"
    return where if above is None else f"{where}, called in {above.co_qualname}:{_line(above, called_at)}"


def _line(code: CodeType, at: int) -> int | None:
    return next((line for start, end, line in code.co_lines() if start <= max(at, 0) < end), None)
