"""What the commits of a filtered log are to say: plain values, which people write (core/units.py) and history.py asks.

Must not know SQL: the command line reads its arguments before anything that takes long to import is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AxisBound:
    """A dimension that some mesh of a layout is to have: its name, and its size if that matters."""

    name: str
    size: int | None = None


SIGNS: Mapping[str, str] = {
    "<": "__lt__", "<=": "__le__", ">": "__gt__", ">=": "__ge__", "==": "__eq__", "!=": "__ne__",
}  # fmt: skip
"""How a metric may be compared, and the method of numbers and columns that does."""


@dataclass(frozen=True, slots=True)
class MetricBound:
    """A comparison of one metric with a number; commits without that metric do not meet it."""

    name: str
    sign: str
    value: float


@dataclass(frozen=True, slots=True)
class CommitFilter:
    """What wanted commits say. None, or an empty tuple, is not a condition.

    Attributes:
        since_us, until_us: Microseconds since the epoch, both included.
        first_step, last_step: Steps, both included; commits without a step meet neither.
        metrics: All of these comparisons.
        author: Part of the author's name, or a pattern (*, ?, [...]) of the whole; case counts for nothing.
        world_size: Ranks that made the commit.
        axes: Dimensions that meshes of its layout are to have, all of them.
    """

    since_us: int | None = None
    until_us: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    metrics: tuple[MetricBound, ...] = ()
    author: str | None = None
    world_size: int | None = None
    axes: tuple[AxisBound, ...] = ()

    def __bool__(self) -> bool:
        return self != _EVERYTHING


_EVERYTHING = CommitFilter()
