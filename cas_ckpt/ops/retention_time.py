"""Durations and calendar buckets of retention rules, as restic has them.

Duty: "2y5m7d3h" as calendar time, and the hour, day, week, month or year of an instant.
Invariant: all of it is UTC. restic takes the local time of each snapshot; commits carry none,
and a day that were another day on another machine would let two cron jobs disagree.
Must not know: commits, branches, policies.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from cas_ckpt.errors import InvalidInputError

HOUR_US = 3600 * 1_000_000
DAY_US = 24 * HOUR_US

BEFORE_ALL_US = -(2**64)
"""Earlier than any commit can say that it was made."""

_EPOCH = datetime.datetime(1970, 1, 1)  # all arithmetic here is UTC without saying so
_FIRST_US = -((_EPOCH - datetime.datetime.min) // datetime.timedelta(microseconds=1))
_LAST_US = (datetime.datetime.max - _EPOCH) // datetime.timedelta(microseconds=1)
_FORM = re.compile(r"(?:[0-9]{1,6}[ymdh])+\Z")
_PART = re.compile(r"([0-9]+)([ymdh])")


@dataclass(frozen=True, slots=True)
class Duration:
    """Calendar time: a month is as long as the calendar says."""

    years: int = 0
    months: int = 0
    days: int = 0
    hours: int = 0

    def before_us(self, time_us: int) -> int:
        """The instant that lies this long before `time_us`.

        A month before 31 March is "31 February", which is 3 March (2 in a leap year), as in restic.
        """
        moment = _moment(time_us)
        year, month = divmod((moment.year - self.years) * 12 + moment.month - 1 - self.months, 12)
        if year < datetime.MINYEAR:
            return BEFORE_ALL_US
        try:
            first = moment.replace(year=year, month=month + 1, day=1)
            then = first + datetime.timedelta(days=moment.day - 1 - self.days, hours=-self.hours)
        except OverflowError:
            return BEFORE_ALL_US
        return (then - _EPOCH) // datetime.timedelta(microseconds=1)


def parse_duration(text: str) -> Duration:
    """The duration that `text` means: numbers of years, months, days and hours, as in "2y5m7d3h".

    Raises:
        InvalidInputError: another form, a unit twice, or no time at all.
    """
    parts = _PART.findall(text) if _FORM.match(text) else []
    amounts = {unit: int(number) for number, unit in parts}
    if not any(amounts.values()) or len(amounts) != len(parts):
        raise InvalidInputError(
            f"{text[:40]!r} is no duration: write years, months, days and hours, e.g. 2y5m7d3h or 36h (a week is 7d)"
        )
    return Duration(amounts.get("y", 0), amounts.get("m", 0), amounts.get("d", 0), amounts.get("h", 0))


def _moment(time_us: int) -> datetime.datetime:
    """`time_us` in UTC; what no calendar has (a commit may say anything) is moved to its end."""
    return _EPOCH + datetime.timedelta(microseconds=min(max(time_us, _FIRST_US), _LAST_US))


def _month(time_us: int) -> int:
    moment = _moment(time_us)
    return moment.year * 12 + moment.month


BUCKETS = MappingProxyType[str, Callable[[int], int]](
    {
        "hourly": lambda time_us: time_us // HOUR_US,
        "daily": lambda time_us: time_us // DAY_US,
        "weekly": lambda time_us: (time_us // DAY_US + 3) // 7,  # 1970 began on a Thursday, weeks on Mondays
        "monthly": _month,
        "yearly": lambda time_us: _moment(time_us).year,
    }
)
"""Name of a bucket -> the number of the one that an instant lies in; later ones have higher numbers."""
