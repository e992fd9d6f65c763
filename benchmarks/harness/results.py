"""The raw JSON lines, and what is asked of them: medians, spreads, ratios within a round.

A ratio is the median of the ratios of single rounds (both were measured minutes apart on the same
machine); where no round has both, it is the ratio of the medians.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Key = tuple[str, str, str]
"""(size, peer, operation)."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Least, median and greatest of the values of all rounds."""

    least: float
    median: float
    most: float
    count: int


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that one file of results says.

    Attributes:
        records: By (size, peer, operation), then by (run, round).
        machine: What the newest run said about its machine.
    """

    records: dict[Key, dict[tuple[str, int], dict[str, Any]]]
    machine: dict[str, str]

    @property
    def keys(self) -> list[Key]:
        """Everything that was tried, in the order of the first record."""
        return list(self.records)

    def values(self, key: Key, figure: str) -> dict[tuple[str, int], float]:
        """`figure` of every round that has it."""
        return {at: record[figure] for at, record in self.records.get(key, {}).items() if figure in record}

    def spread(self, key: Key, figure: str) -> Spread | None:
        """Least, median, greatest of `figure`, or None when it was never measured."""
        values = list(self.values(key, figure).values())
        return Spread(min(values), statistics.median(values), max(values), len(values)) if values else None

    def median(self, key: Key, figure: str) -> float | None:
        """The median of `figure` over the rounds."""
        spread = self.spread(key, figure)
        return None if spread is None else spread.median

    def ratio(self, over: tuple[Key, str], under: tuple[Key, str]) -> float | None:
        """`over` / `under`, round by round, as a median."""
        top, bottom = self.values(*over), self.values(*under)
        if not top or not bottom:
            return None
        shared = [top[at] / bottom[at] for at in top if at in bottom]
        return statistics.median(shared or [statistics.median(top.values()) / statistics.median(bottom.values())])

    def trouble(self) -> list[str]:
        """What could not be done, failed or was left out, one sentence each, without repeats."""
        found = dict.fromkeys(
            f"{' / '.join(key)}: {word}: {record[word]}"
            for key, rounds in self.records.items()
            for record in rounds.values()
            for word in ("error", "reason", "skipped")
            if word in record
        )
        return list(found)


def read_results(path: Path) -> Results:
    """The results in the JSON lines of `path`."""
    records: dict[Key, dict[tuple[str, int], dict[str, Any]]] = defaultdict(dict)
    machine: dict[str, str] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if "machine" in record:
            machine = record["machine"]
        else:
            key = (record["size"], record["peer"], record["operation"])
            records[key][record["run"], record["round"]] = record
    return Results(dict(records), machine)
