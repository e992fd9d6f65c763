"""Plans what is read of packs over a network: few requests, each of bytes that are wanted.

    1. a caller says in which spans of which packs it is (`Wanted`)
    2. `plan_units` joins spans that are near one another: a unit is what one thread reads, and what it then has

Invariant: pure; every wanted byte is in one unit, and no byte in two, as long as nobody wants the same byte twice.
What is wanted in several places far apart makes a unit by itself, so that whoever gets a unit has all of it.
Knows nothing of stores, threads or digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, NamedTuple, TypeVar

from cas_ckpt.objects.pack import coalesced

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Limits for joining two spans; docs/decisions/011 has the measurements.

    Attributes:
        gap_bytes: Bytes read in vain, at most, to save a request.
        span_bytes: Bytes of one request, at most, unless what is wanted for one item is longer.
    """

    gap_bytes: int
    span_bytes: int


class Span(NamedTuple):
    """Consecutive bytes of a pack, from `offset` to `end`."""

    pack: str
    offset: int
    end: int


@dataclass(frozen=True, slots=True)
class Wanted(Generic[T]):
    """Something that is in some spans of one or several packs; in no span: read by other means."""

    item: T
    spans: Sequence[Span]


@dataclass(frozen=True, slots=True, eq=False)
class Unit(Generic[T]):
    """Spans that one thread reads, one request each, and the items that are in them."""

    spans: tuple[Span, ...]
    items: tuple[T, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that reading it takes."""
        return sum(span.end - span.offset for span in self.spans)


def plan_units(wanted: Iterable[Wanted[T]], limits: ReadLimits) -> list[Unit[T]]:
    """The units in which all that is wanted is read, in the order in which it is stored; first what has no span."""
    units: list[Unit[T]] = []
    placed: list[tuple[str, Span, Unit[T] | None, T]] = []
    for each in wanted:
        spans = _joined(each.spans, limits)
        if not spans:
            units.append(Unit((), (each.item,)))
        alone = Unit(spans, (each.item,)) if len(spans) > 1 else None
        placed += [(span.pack, span, alone, each.item) for span in spans]
    placed.sort(key=lambda each: each[1])
    # A span of what is read by itself ends the unit before it: nothing is read across it.
    for alone, run in groupby(placed, key=lambda each: each[2]):
        if alone is None:
            units += _shared(run, limits)
        elif next(run)[1] == alone.spans[0]:
            units.append(alone)
    return units


def opening_first(units: Iterable[Unit[T]]) -> list[Unit[T]]:
    """The same units, the first one of each pack before all others: reading begins at many packs, not at one."""
    begun: set[str] = set()
    first: list[Unit[T]] = []
    others: list[Unit[T]] = []
    for unit in units:
        packs = {span.pack for span in unit.spans}
        (others if packs and packs <= begun else first).append(unit)
        begun |= packs
    return first + others


def longest_bytes(units: Iterable[Unit[T]]) -> int:
    """Bytes of the longest unit; 0 if there is none."""
    return max((unit.num_bytes for unit in units), default=0)


def _joined(spans: Sequence[Span], limits: ReadLimits) -> tuple[Span, ...]:
    """The spans of one item, those joined that are near one another: they are in memory together anyway."""
    if len(spans) < 2:
        return tuple(spans)
    ordered = sorted(spans)
    longest = sum(span.end for span in spans)
    near = coalesced(((span.pack, span, None) for span in ordered), gap_bytes=limits.gap_bytes, span_bytes=longest)
    return tuple(_around([span for _, span, _ in group]) for group in near)


def _shared(run: Iterable[tuple[str, Span, Unit[T] | None, T]], limits: ReadLimits) -> Iterator[Unit[T]]:
    items = ((pack, span, item) for pack, span, _, item in run)
    for group in coalesced(items, gap_bytes=limits.gap_bytes, span_bytes=limits.span_bytes):
        yield Unit((_around([span for _, span, _ in group]),), tuple(item for _, _, item in group))


def _around(spans: Sequence[Span]) -> Span:
    return Span(spans[0].pack, spans[0].offset, max(span.end for span in spans))
