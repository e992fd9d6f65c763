"""Durations, sizes, shares and steps as people write them: one grammar for every verb.

    90s  15m  2h  30d  4w  6mo  1y  1y6mo  1d 12h  2 days  now       units in falling order, each once
    512  512MB  20G  1GiB  1Gi                                       K, M, G, T: powers of 1000; Ki, ...: of 1024
    5%

Invariant: `m` is minutes everywhere, a month is `mo`; sizes mean what the same unit means in what is printed.
Must not know: commits, options of the command line.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from cas_ckpt import clock
from cas_ckpt.arguments import whole_number
from cas_ckpt.errors import InvalidInputError, shown_value

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
