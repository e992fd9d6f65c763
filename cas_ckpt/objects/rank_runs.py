"""Many ranks in few numbers: runs of ranks at equal distances, and sets of ranks made of them.

A run is (first, count, step). Meshes list their ranks in an order, and those of real jobs are a handful of runs:
[0, 1024, 1] is a world in order, and the same world with its dimensions exchanged is one run for each row. So what
names ranks costs what it says, not how many ranks it names.

Invariant: equal lists of ranks give equal runs, and equal sets equal spans, whoever makes them.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, groupby, starmap
from typing import Any, TypeAlias, overload

from cas_ckpt.errors import CorruptionError

Run: TypeAlias = tuple[int, int, int]
"""First rank, number of ranks, distance from one to the next (1 if there is one alone)."""

_FEWEST = 3
"""Ranks at a distance of more than 1 are a run from so many on; two are a run each, which reads better."""


def runs_of(ranks: Sequence[int]) -> tuple[Run, ...]:
    """`ranks` as runs, in their order: each as long as it can be, with steps of 1 or at least three ranks."""
    found: list[Run] = []
    start, total = 0, len(ranks)
    while start < total:
        step = ranks[start + 1] - ranks[start] if start + 1 < total else 0
        stop = start + 1
        while stop < total and ranks[stop] - ranks[stop - 1] == step and step > 0:
            stop += 1
        if stop - start < (2 if step == 1 else _FEWEST):
            step, stop = 1, start + 1
        found.append((ranks[start], stop - start, step))
        start = stop
    return tuple(found)


def ranks_of(runs: Iterable[Run]) -> Iterator[int]:
    """The ranks of `runs`, in their order."""
    for first, count, step in runs:
        yield from range(first, first + count * step, step)


def num_ranks(runs: Iterable[Run]) -> int:
    """How many ranks `runs` list."""
    return sum(count for _, count, _ in runs)


def checked_runs(flat: Any, *, world_size: int) -> tuple[Run, ...]:
    """The runs of a node: numbers, three for each run.

    Raises:
        CorruptionError: anything else, or a rank that is not one of `world_size`. Nothing is counted out for it.
    """
    if type(flat) is not list or not flat or len(flat) % 3 or {*map(type, flat)} != {int}:
        raise CorruptionError("a layout node has ranks that are not runs of three numbers each")
    runs = tuple(zip(flat[::3], flat[1::3], flat[2::3], strict=True))
    for first, count, step in runs:
        if first < 0 or count < 1 or step < 1 or (count == 1 and step > 1) or first + (count - 1) * step >= world_size:
            raise CorruptionError(
                f"a layout node of {world_size} ranks names {count} ranks from {first} on in steps of {step}"
            )
    return runs


def flat_runs(runs: Iterable[Run]) -> list[int]:
    """`runs` as a node has them."""
    return [number for run in runs for number in run]


_RUN = re.compile(r"([0-9]{1,7})(?:-([0-9]{1,7})(?::([0-9]{1,7}))?)?")


def runs_text(runs: Iterable[Run]) -> str:
    """`runs` as people write them: 0-7,16-64:8 (from 16 to 64 in steps of 8)."""
    return ",".join(
        str(first) if count == 1 else f"{first}-{first + (count - 1) * step}" + (f":{step}" if step > 1 else "")
        for first, count, step in runs
    )


def parse_runs(text: str) -> tuple[Run, ...]:
    """The runs that `runs_text` wrote.

    Raises:
        CorruptionError: it did not write that.
    """
    found = []
    for part in text.split(",") if text else ():
        match = _RUN.fullmatch(part)
        if match is None:
            raise CorruptionError(f"{text!r:.80} does not name ranks")
        first, step = int(match[1]), int(match[3] or 1)
        last = first if match[2] is None else int(match[2])
        if last < first or step < 1 or (last - first) % step:
            raise CorruptionError(f"{text!r:.80} does not name ranks")
        found.append((first, (last - first) // step + 1, step))
    return tuple(found)


class RankSet(Sequence[int]):
    """Different ranks, ascending: as small as its spans, however many ranks they are.

    A sequence of numbers: `len`, `in`, `tuple(ranks)`. As text 0-7,16-64:8 (from 16 to 64 in steps of 8).

    Attributes:
        spans: (first rank, rank after the last), ascending, none next to another.
    """

    __slots__ = ("_ends", "spans")

    def __init__(self, spans: tuple[tuple[int, int], ...] = ()) -> None:
        self.spans = spans
        self._ends = tuple(accumulate(stop - start for start, stop in spans))

    @staticmethod
    def of(ranks: Iterable[int]) -> RankSet:
        """The set of `ranks`, which may come in any order and more than once."""
        return _joined([(rank, rank + 1) for rank in ranks])

    @staticmethod
    def union(sets: Iterable[RankSet]) -> RankSet:
        """All ranks that are in one of `sets`."""
        distinct = list(dict.fromkeys(sets))
        return distinct[0] if len(distinct) == 1 else _joined([span for each in distinct for span in each.spans])

    def without(self, other: RankSet) -> RankSet:
        """The ranks that are not in `other`."""
        kept: list[tuple[int, int]] = []
        gone = iter((*other.spans, (sys.maxsize, sys.maxsize)))
        first, last = next(gone)
        for start, stop in self.spans:
            while start < stop:
                if last <= start:
                    first, last = next(gone)
                    continue
                if start < first:
                    kept.append((start, min(stop, first)))
                start = min(stop, last) if first < stop else stop
        return RankSet(tuple(kept))

    def __eq__(self, other: object) -> bool:
        return self.spans == other.spans if isinstance(other, RankSet) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.spans)

    def __len__(self) -> int:
        return self._ends[-1] if self.spans else 0

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(starmap(range, self.spans))

    def _place(self, rank: object) -> int | None:
        """How many of the ranks come before `rank`; None if it is not one of them."""
        if not isinstance(rank, int):
            return None
        at = bisect_right(self.spans, (rank, sys.maxsize)) - 1
        if at < 0 or rank >= self.spans[at][1]:
            return None
        return self._ends[at] - (self.spans[at][1] - rank)

    def __contains__(self, rank: object) -> bool:
        return self._place(rank) is not None

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(index)  # what a sequence has to raise
        at = bisect_right(self._ends, place)
        return self.spans[at][1] - (self._ends[at] - place)

    def index(self, value: Any, start: int = 0, stop: int = sys.maxsize) -> int:
        """How many of the ranks come before `value`; ValueError if it is not one of them."""
        place = self._place(value)
        if place is None or not start <= place < stop:
            raise ValueError(f"{value!r} is not in {self}")  # what a sequence has to raise
        return place

    def tolist(self) -> list[int]:
        """The ranks as a list of plain numbers."""
        return list(self)

    def __str__(self) -> str:
        return runs_text(_shown_runs(self.spans))

    def __repr__(self) -> str:
        return f"RankSet({self})"


def _joined(spans: list[tuple[int, int]]) -> RankSet:
    """The spans as they should be: ascending, those that meet made one."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return RankSet(tuple(joined))


def _shown_runs(spans: Sequence[tuple[int, int]]) -> Iterator[Run]:
    """Spans as runs; ranks that are alone and at equal distances are one run."""
    for alone, group in groupby(spans, lambda span: span[1] - span[0] == 1):
        found = list(group)
        yield from runs_of([start for start, _ in found]) if alone else ((a, b - a, 1) for a, b in found)
