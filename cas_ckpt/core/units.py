"""Durations, sizes, shares and steps as people write them: one grammar for every verb.

    90s  15m  2h  30d  4w  6mo  1y  1y6mo  1d 12h  2 days  now       units in falling order, each once
    512  512MB  20G  1GiB  1Gi                                       K, M, G, T: powers of 1000; Ki, ...: of 1024
    5%

Invariant: `m` is minutes everywhere, a month is `mo`; sizes mean what the same unit means in what is printed.
Must not know: commits, options of the command line.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from cas_ckpt import clock
from cas_ckpt.arguments import whole_number
from cas_ckpt.errors import InvalidInputError, shown_value
from cas_ckpt.index.history import SIGNS, CommitFilter, MetricBound

SECOND_US = 1_000_000
HOUR_US = 3600 * SECOND_US
DAY_US = 24 * HOUR_US

BEFORE_ALL_US = -(2**64)
"""Earlier than any commit can say that it was made."""

EPOCH = datetime.datetime(1970, 1, 1)  # all arithmetic here is UTC without saying so
_FIRST_US = -((EPOCH - datetime.datetime.min) // datetime.timedelta(microseconds=1))
_LAST_US = (datetime.datetime.max - EPOCH) // datetime.timedelta(microseconds=1)

_MONTHS = MappingProxyType({"y": 12, "mo": 1})
_SECONDS = MappingProxyType({"w": 7 * 86400, "d": 86400, "h": 3600, "m": 60, "s": 1})
_ORDER = (*_MONTHS, *_SECONDS)
_WORDS = MappingProxyType({
    "year": "y", "yr": "y", "month": "mo", "week": "w", "day": "d", "hour": "h", "hr": "h",
    "minute": "m", "min": "m", "second": "s", "sec": "s",
})  # fmt: skip
_FORM = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{1,6})?\s*[a-z]+\s*)+\Z")
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)")
_NONE = ("0", "now")

MAX_STEP = 2**63 - 1
"""The largest step: what databases call a big integer."""

_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,6})?)\s*(?:([kmgt])(i?))?b?\Z", re.IGNORECASE)
_POWERS = MappingProxyType({"": 0, "k": 1, "m": 2, "g": 3, "t": 4})
_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*%\Z")


@dataclass(frozen=True, slots=True)
class Duration:
    """Calendar time: a month is as long as the calendar says, and whole ones come before the rest."""

    months: int = 0
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.months or self.seconds)

    def before_us(self, time_us: int) -> int:
        """The instant that is this long before `time_us`, in microseconds since the epoch.

        A month before 31 March is "31 February", which is 3 March (2 in a leap year), as in restic.
        """
        moment = calendar_time(time_us)
        year, month = divmod(moment.year * 12 + moment.month - 1 - self.months, 12)
        if year < datetime.MINYEAR:
            return BEFORE_ALL_US
        try:
            first = moment.replace(year=year, month=month + 1, day=1)
            then = first + datetime.timedelta(days=moment.day - 1) - datetime.timedelta(seconds=self.seconds)
        except OverflowError:
            return BEFORE_ALL_US
        return (then - EPOCH) // datetime.timedelta(microseconds=1)

    def ago_s(self) -> float:
        """Seconds from the instant that is this long before now, until now."""
        now_us = int(clock.now_s() * SECOND_US)
        return (now_us - self.before_us(now_us)) / SECOND_US if self.months else self.seconds


def parse_duration(text: str) -> Duration:
    """The duration that `text` means, e.g. "15m", "2h", "1d 12h", "6mo", "1y6mo", "2 days", "now".

    Raises:
        InvalidInputError: another form, an unknown unit, units that are not in falling order, or parts of a month.
    """
    plain = text.strip().lower()
    if plain in _NONE:
        return Duration()
    if not _FORM.match(plain):
        raise InvalidInputError(
            f"{text[:40]!r} is not a duration: write a number with a unit, e.g. 90s, 15m (minutes), 2h, 30d, 4w, "
            "6mo (months), 1y, or several as in 1d12h"
        )
    months, seconds, last = 0, 0.0, -1
    for number, word in _PART.findall(plain):
        unit = _unit(text, word)
        if _ORDER.index(unit) <= last:
            raise InvalidInputError(
                f"{text[:40]!r} is not a duration: its units are not in falling order (y, mo, w, d, h, m, s); "
                "m is minutes, a month is mo"
            )
        last = _ORDER.index(unit)
        if unit in _SECONDS:
            seconds += float(number) * _SECONDS[unit]
        elif number.isdecimal():
            months += int(number) * _MONTHS[unit]
        else:
            raise InvalidInputError(f"{text[:40]!r} is not a duration: years and months are whole numbers")
    return Duration(months, seconds)


def _unit(text: str, word: str) -> str:
    unit = word if word in _ORDER else _WORDS.get(word.removesuffix("s"))
    if unit is None:
        raise InvalidInputError(f"{text[:40]!r} is not a duration: {word!r} is not a unit (y, mo, w, d, h, m, s)")
    return unit


def parse_size(text: str | int) -> int:
    """Bytes: 512, 512MB or 20G (powers of 1000), 1GiB or 1Gi (powers of 1024).

    Raises:
        InvalidInputError: another form.
    """
    match = _SIZE.match(str(text).strip())
    if match is None:
        raise InvalidInputError(f"{str(text)[:40]!r} is not a size: write e.g. 512MB, 20G or 1GiB")
    number = int(match[1]) if match[1].isdecimal() else float(match[1])
    return int(number * (1024 if match[3] else 1000) ** _POWERS[(match[2] or "").lower()])


def parse_share(text: str) -> float:
    """A share of one, from a percentage such as "5%".

    Raises:
        InvalidInputError: another form, or not between 0 and 100 %.
    """
    match = _SHARE.match(text.strip())
    if match is None or float(match[1]) > 100:
        raise InvalidInputError(f"{text[:40]!r} is not a share: write e.g. 5%")
    return float(match[1]) / 100


def checked_step(given: Any) -> int:
    """`given` as a step: an integer of Python or NumPy, or a tensor of one.

    Raises:
        InvalidInputError: something else, or out of range.
    """
    step = whole_number(given)
    if step is None or not 0 <= step <= MAX_STEP:
        raise InvalidInputError(f"step {shown_value(given)} is not a whole number from 0 to {MAX_STEP}")
    return step


def calendar_time(time_us: int) -> datetime.datetime:
    """`time_us` in UTC; what no calendar has (a commit may say anything) is moved to its end."""
    return EPOCH + datetime.timedelta(microseconds=min(max(time_us, _FIRST_US), _LAST_US))


# DOC of cas_ckpt.core.units:
# Moments and numbers as people write them: dates, durations back from now, ranges, comparisons.
#
# Invariant: all times are UTC unless they say another offset; the answer is microseconds since the
# epoch. A day that is written without a time begins at 00:00 and, as an end, lasts until it is over.
#

Moment: TypeAlias = str | float | datetime.datetime
"""When: ISO text or a duration back from now, seconds since the epoch, or a datetime (UTC if it is naive)."""

_HOW_LONG_AGO = re.compile(r"now\Z|[0-9.]+\s*[a-z]", re.IGNORECASE)
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}\Z")
_BOUND = re.compile(r"(?P<name>[^<>=!]*[^\s<>=!])\s*(?P<sign><=|>=|==|!=|<|>|=)\s*(?P<value>[^\s<>=!]+)\s*\Z")
_STEPS = re.compile(r"(\d*):(\d*)\Z")


def parse_moment(given: Moment, *, end: bool = False) -> int:
    """`given` as microseconds since the epoch.

    Args:
        end: It ends a span: a day without a time means its last microsecond.
    Raises:
        InvalidInputError: another form.
    """
    if isinstance(given, datetime.datetime):
        return _micros(given)
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        if not math.isfinite(given):
            raise InvalidInputError(f"{given} is not a time: give seconds since the epoch")
        return round(given * 1e6)
    if not isinstance(given, str):
        raise InvalidInputError(
            f"{shown_value(given)} is not a time: give text such as 2026-11-21, seconds since the epoch, or a datetime"
        )
    text = given.strip()
    try:
        moment = _micros(datetime.datetime.fromisoformat(text))
    except (ValueError, OverflowError) as error:
        if _HOW_LONG_AGO.match(text):
            return parse_duration(text.lower().removesuffix("ago")).before_us(round(clock.now_s() * 1e6))
        raise InvalidInputError(
            f"{text!r} is not a time: write 2026-11-21, 2026-11-21T14:30 (UTC), or how long ago: 3h, 2d, '2 days ago'"
        ) from error
    return moment + DAY_US - 1 if end and _DAY.match(text) else moment


def _micros(moment: datetime.datetime) -> int:
    aware = moment.replace(tzinfo=datetime.UTC) if moment.tzinfo is None else moment
    return round((aware - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)) / datetime.timedelta(microseconds=1))


def parse_bound(text: str) -> MetricBound:
    """The comparison in e.g. "loss<2.1"; "=" means "==".

    Raises:
        InvalidInputError: another form.
    """
    match = _BOUND.match(text.strip())
    try:
        value = math.nan if match is None else float(match["value"])
    except ValueError:
        value = math.nan
    if match is None or math.isnan(value):
        raise InvalidInputError(f"{text!r} is not a comparison: write NAME{'|'.join(SIGNS)}NUMBER, e.g. 'loss<2.1'")
    return MetricBound(match["name"], "==" if match["sign"] == "=" else match["sign"], value)


def parse_steps(given: int | str | Sequence[int | None] | None) -> tuple[int | None, int | None]:
    """First and last step of a number, of "A:B" (both included, either left out), or of such a pair.

    Raises:
        InvalidInputError: another form.
    """
    if given is None:
        return None, None
    if isinstance(given, str):
        text = given.strip()
        match = _STEPS.match(text)
        if match is not None:
            given = (int(match[1]) if match[1] else 0, int(match[2]) if match[2] else None)
        elif text.isdecimal():
            given = int(text)
    ends = (given, given) if not isinstance(given, (str, Sequence)) else given
    if isinstance(ends, str) or len(ends) != 2:
        raise InvalidInputError(f"{shown_value(given)} is not a step: write N, or A:B for a range with both ends in it")
    first, last = (None if end is None else checked_step(end) for end in ends)
    return first, last


def commit_filter(
    *,
    since: Moment | None = None,
    until: Moment | None = None,
    step: int | str | Sequence[int | None] | None = None,
    metrics: Sequence[str] = (),
    author: str | None = None,
) -> CommitFilter:
    """The conditions of a log, from what people write.

    Raises:
        InvalidInputError: one of them is of another form.
    """
    first, last = parse_steps(step)
    return CommitFilter(
        since_us=None if since is None else parse_moment(since),
        until_us=None if until is None else parse_moment(until, end=True),
        first_step=first,
        last_step=last,
        metrics=tuple(parse_bound(text) for text in ([metrics] if isinstance(metrics, str) else metrics)),
        author=author or None,
    )


# DOC of cas_ckpt.core.units:
# Calendar buckets of retention rules, as restic has them.
#
# Duty: the hour, day, week, month or year of an instant, and the durations that a rule may have.
# Invariant: all of it is UTC. restic takes the local time of each snapshot; commits carry none,
# and a day that were another day on another machine would let two cron jobs disagree.
# Must not know: commits, branches, policies.
#


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
