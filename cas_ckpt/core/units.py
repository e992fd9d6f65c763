"""Durations, moments, sizes, shares, counts and ranges as people write them: one grammar for every verb.

    90s  15m  2h  30d  4w  6mo  1y  1y6mo  1d 12h  2 days  now       durations: units in falling order, each once
    2026-11-21  2026-11-21T14:30  3h  '2 days ago'  yesterday        moments: UTC unless they say another offset
    512  512MB  20G  1GiB  1Gi                                       sizes: K, M, G, T of 1000; Ki, Mi, ... of 1024
    5%   2/7                                                         a share of one; the second of seven parts
    20  unlimited                                                    counts
    100:200  100:  :200  100                                         steps, with both ends in the range
    2:10  :-1  5  ...                                                regions, as in NumPy: without the end
    loss<2.1  loss=2.31  acc:max                                     bounds, values and rankings of metrics

Invariant: `m` is minutes everywhere, a month is `mo`; a size means what the same unit means in what is printed;
a moment is microseconds since the epoch. Whatever has another form raises `InvalidInputError`, which shows the form.
Must not know: commits, policies, options of the command line.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import EllipsisType, MappingProxyType
from typing import TypeAlias

from cas_ckpt import clock
from cas_ckpt.arguments import check_whole, checked_step, one_text, texts
from cas_ckpt.errors import InvalidInputError, shown_value
from cas_ckpt.index.rows import SIGNS, AxisBound, CommitFilter, MetricBound

SECOND_US = 1_000_000
HOUR_US = 3600 * SECOND_US
DAY_US = 24 * HOUR_US

BEFORE_ALL_US = -(2**64)
"""Earlier than any time that a commit can claim."""

EPOCH = datetime.datetime(1970, 1, 1)  # naive: all arithmetic here is UTC without saying so
_FIRST_US = -((EPOCH - datetime.datetime.min) // datetime.timedelta(microseconds=1))
_LAST_US = (datetime.datetime.max - EPOCH) // datetime.timedelta(microseconds=1)

# --- durations ------------------------------------------------------------------------------

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
        unit = word if word in _ORDER else _WORDS.get(word.removesuffix("s"))
        if unit is None:
            raise InvalidInputError(f"{text[:40]!r} is not a duration: {word!r} is not a unit (y, mo, w, d, h, m, s)")
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


# --- sizes and shares -----------------------------------------------------------------------

_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,6})?)\s*(?:([kmgt])(i?))?b?\Z", re.IGNORECASE)
_POWERS = MappingProxyType({"": 0, "k": 1, "m": 2, "g": 3, "t": 4})
_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*%\Z")
_PART_OF = re.compile(r"([0-9]{1,9})/([0-9]{1,9})\Z")


def parse_size(text: str | int) -> int:
    """Bytes: 512, 512MB or 20G (powers of 1000), 1GiB or 1Gi (powers of 1024)."""
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


def parse_part(text: str) -> tuple[int, int] | None:
    """(part, parts) of a text such as "2/7", the second of seven; None if it has another form."""
    match = _PART_OF.match(one_text("a part", text))
    return (int(match[1]), int(match[2])) if match is not None and 1 <= int(match[1]) <= int(match[2]) else None


# --- counts and steps -----------------------------------------------------------------------

UNLIMITED = -1
"""As a count: all of them."""


_STEPS = re.compile(r"(\d*):(\d*)\Z")


def parse_count(text: str) -> int:
    """A number from 0 on, or `UNLIMITED`."""
    if text == "unlimited":
        return UNLIMITED
    if not text.isascii() or not text.isdigit():
        raise InvalidInputError(f"{text!r} is neither a number nor 'unlimited'")
    return int(text)


def parse_steps(given: int | str | Sequence[int | None] | None) -> tuple[int | None, int | None]:
    """First and last step of a number, of "A:B" (both included, either left out), or of such a pair."""
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


# --- regions --------------------------------------------------------------------------------

_REGION_PART = re.compile(r"(-?[0-9]{1,18})?(?:(:)(-?[0-9]{1,18})?)?")


def parse_region(text: str) -> tuple[int | slice | EllipsisType, ...]:
    """The region of a tensor that `text` means, in NumPy's words: parts with commas between.

    "2:10" from 2 up to 10, "2:", ":10", ":", "5" (one element; the dimension is dropped), negative
    numbers count from the end, "..." means all dimensions that are left.
    """
    found: list[int | slice | EllipsisType] = []
    for part in map(str.strip, text.split(",")):
        match = _REGION_PART.fullmatch(part)
        if part == "...":
            found.append(Ellipsis)
        elif match is None or not part:
            raise InvalidInputError(f"region part {part!r}: write START:STOP, START:, :STOP, :, a number or ...")
        elif match[2] is None:
            found.append(int(match[1]))
        else:
            found.append(slice(*(None if end is None else int(end) for end in (match[1], match[3]))))
    return tuple(found)


# --- moments and calendar buckets -----------------------------------------------------------

Moment: TypeAlias = str | float | datetime.datetime
"""When: ISO text or a duration back from now, seconds since the epoch, or a datetime (UTC if it is naive)."""

_HOW_LONG_AGO = re.compile(r"now\Z|[0-9.]+\s*[a-z]", re.IGNORECASE)
_DAYS_AGO = {"today": 0, "yesterday": 1}
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}\Z")


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
    if text.lower() in _DAYS_AGO:
        today = calendar_time(round(clock.now_s() * 1e6)).date()
        text = (today - datetime.timedelta(days=_DAYS_AGO[text.lower()])).isoformat()
    try:
        moment = _micros(datetime.datetime.fromisoformat(text))
    except (ValueError, OverflowError) as error:
        if _HOW_LONG_AGO.match(text):
            return parse_duration(text.lower().removesuffix("ago")).before_us(round(clock.now_s() * 1e6))
        raise InvalidInputError(
            f"{text!r} is not a time: write 2026-11-21, 2026-11-21T14:30 (UTC), yesterday, or how long ago: 3h, 2d, "
            "'2 days ago'"
        ) from error
    return moment + DAY_US - 1 if end and _DAY.match(text) else moment


def _micros(moment: datetime.datetime) -> int:
    aware = moment.replace(tzinfo=datetime.UTC) if moment.tzinfo is None else moment
    return round((aware - EPOCH.replace(tzinfo=datetime.UTC)) / datetime.timedelta(microseconds=1))


def calendar_time(time_us: int) -> datetime.datetime:
    """`time_us` in UTC; what no calendar has (a commit may say anything) is moved to its end."""
    return EPOCH + datetime.timedelta(microseconds=min(max(time_us, _FIRST_US), _LAST_US))


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
"""Name of a bucket -> the number of the one that an instant is in; later ones have higher numbers."""


# --- metrics, and the filter of a log -------------------------------------------------------

_BOUND = re.compile(r"(?P<name>[^<>=!]*[^\s<>=!])\s*(?P<sign><=|>=|==|!=|<|>|=)\s*(?P<value>[^\s<>=!]+)\s*\Z")


def parse_bound(text: str) -> MetricBound:
    """The comparison in e.g. "loss<2.1"; "=" means "=="."""
    match = _BOUND.match(text.strip())
    try:
        value = math.nan if match is None else float(match["value"])
    except ValueError:
        value = math.nan
    if match is None or math.isnan(value):
        raise InvalidInputError(f"{text!r} is not a comparison: write NAME{'|'.join(SIGNS)}NUMBER, e.g. 'loss<2.1'")
    return MetricBound(match["name"], "==" if match["sign"] == "=" else match["sign"], value)


def parse_metric(text: str) -> tuple[str, float]:
    """The name and the value in NAME=NUMBER."""
    name, _, value = text.rpartition("=")
    try:
        if name:
            return name, float(value)
    except ValueError:
        pass  # refused below, like a name that is missing
    raise InvalidInputError(f"metric {text!r}: wanted NAME=NUMBER")


def parse_ranking(text: str) -> tuple[str, bool]:
    """(metric, whether the largest is best) of "loss", "loss:min" or "acc:max".

    The smallest is best unless the text says otherwise: nothing is guessed from the name.
    """
    name, colon, end = text.rpartition(":")
    return (name, end == "max") if colon and end in ("min", "max") else (text, False)


_AXIS = re.compile(r"(?P<name>[^=]*)(?:=(?P<size>[0-9]{1,9}))?")


def parse_axis(text: str) -> AxisBound:
    """The dimension of a mesh in "tp=2", or in "ep": of any size."""
    match = _AXIS.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or not text.strip():
        raise InvalidInputError(f"{shown_value(text)} is not a dimension of a mesh: write tp=2, or ep for any size")
    return AxisBound(match["name"], None if match["size"] is None else int(match["size"]))


def axis_bounds(given: str | Sequence[str] | Mapping[str, int | None]) -> tuple[AxisBound, ...]:
    """Dimensions of meshes, from what people write: "tp=2", several of them, or {"tp": 2, "ep": None}."""
    if isinstance(given, str):
        return (parse_axis(given),)
    if not isinstance(given, (Mapping, Sequence, Set)):
        raise InvalidInputError(
            f'axes is {shown_value(given)}: give "tp=2", several of them, or {{"tp": 2, "ep": None}}'
        )
    if not isinstance(given, Mapping):
        return tuple(map(parse_axis, given))
    for name, size in given.items():
        if not isinstance(name, str) or not (size is None or (type(size) is int and size > 0)):
            raise InvalidInputError(
                f"axes: {shown_value(name)}: {shown_value(size)}: wanted a name and its size or None"
            )
    return tuple(AxisBound(name, size) for name, size in given.items())


def commit_filter(
    *,
    since: Moment | None = None,
    until: Moment | None = None,
    step: int | str | Sequence[int | None] | None = None,
    metrics: str | Sequence[str] = (),
    author: str | None = None,
    world_size: int | None = None,
    axes: str | Sequence[str] | Mapping[str, int | None] = (),
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
        metrics=tuple(map(parse_bound, texts("where", metrics))),
        author=None if author is None else one_text("author", author) or None,
        world_size=None if world_size is None else check_whole("world_size", world_size, least=1),
        axes=axis_bounds(axes),
    )


# --- `--shard I/N`: packs divided among jobs that share work ---

MOST_SHARDS = 100_000


@dataclass(frozen=True, slots=True)
class PackShard:
    """One part of the packs: number `part`, from 1 on, of `parts`.

    The part of a pack follows from its name alone, which is random and never changes: so the parts hold each pack once,
    for every process, host and time, and are about equal.
    """

    part: int
    parts: int

    def __post_init__(self) -> None:
        if not 1 <= self.part <= self.parts <= MOST_SHARDS:
            raise InvalidInputError(
                f"shard {self.part}/{self.parts}: give I/N with I from 1 to N, N up to {MOST_SHARDS}"
            )

    def __str__(self) -> str:
        return f"{self.part}/{self.parts}"

    def has(self, pack: str) -> bool:
        """Whether the pack under this key is in the part."""
        return int(pack.rpartition("/")[2].partition(".")[0][:8], 16) % self.parts + 1 == self.part

    def of(self, packs: Iterable[str]) -> list[str]:
        """Those of `packs` that are in the part, in their order."""
        return [pack for pack in packs if self.has(pack)]


def parse_shard(text: str) -> PackShard:
    """The part that "2/7", the second of seven, means.

    Raises:
        InvalidInputError: another form.
    """
    found = parse_part(text)
    if found is None:
        raise InvalidInputError(
            f"shard {shown_value(text)}: give I/N, such as 2/7 (the second of seven; not from 0 on)"
        )
    return PackShard(*found)
