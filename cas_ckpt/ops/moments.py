"""Moments and numbers as people write them: dates, durations back from now, ranges, comparisons.

Invariant: all times are UTC unless they say another offset; the answer is microseconds since the
epoch. A day that is written without a time begins at 00:00 and, as an end, lasts until it is over.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Sequence
from typing import TypeAlias

from cas_ckpt import clock
from cas_ckpt.errors import InvalidInputError, shown_value
from cas_ckpt.index.selection import SIGNS, CommitFilter, MetricBound
from cas_ckpt.ops.units import DAY_US, checked_step, parse_duration

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
        raise InvalidInputError(
            f"{shown_value(given)} is not a step: write N, or A:B for a range with both ends in it"
        )
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
