"""Calendar buckets of retention rules, as restic has them.

Duty: the hour, day, week, month or year of an instant, and the durations that a rule may have.
Invariant: all of it is UTC. restic takes the local time of each snapshot; commits carry none,
and a day that were another day on another machine would let two cron jobs disagree.
Must not know: commits, branches, policies.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.ops.units import DAY_US, HOUR_US, Duration, calendar_time, parse_duration


def parse_period(text: str) -> Duration:
    """The duration of a rule, in hours or longer units.

    Minutes are refused: restic writes a month as `m`, and a rule that was meant in months would
    forget nearly everything if it were taken in minutes.

    Raises:
        InvalidInputError: not a duration, no time at all, or not whole hours.
    """
    period = parse_duration(text)
    if not period:
        raise InvalidInputError(f"{text[:40]!r} is not a duration that keeps anything: write e.g. 36h, 7d, 2w, 5mo, 1y")
    if period.seconds % 3600:
        raise InvalidInputError(
            f"{text[:40]!r} is not a duration of a rule, which counts whole hours: m is minutes, a month is mo "
            "(restic's 2y5m7d is 2y5mo7d here)"
        )
    return period


def _month(time_us: int) -> int:
    moment = calendar_time(time_us)
    return moment.year * 12 + moment.month


BUCKETS = MappingProxyType[str, Callable[[int], int]](
    {
        "hourly": lambda time_us: time_us // HOUR_US,
        "daily": lambda time_us: time_us // DAY_US,
        "weekly": lambda time_us: (time_us // DAY_US + 3) // 7,  # 1970 began on a Thursday, weeks on Mondays
        "monthly": _month,
        "yearly": lambda time_us: calendar_time(time_us).year,
    }
)
"""Name of a bucket -> the number of the one that an instant lies in; later ones have higher numbers."""
