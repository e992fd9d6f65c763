"""Which commits meet some conditions: those of a filtered log, answered inside the database.

Invariant: all conditions must hold. Texts are compared in Python, over the few distinct ones, so that
both databases mean the same by them. Knows nothing of refs or of order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from sqlalchemy import Connection, exists, select

from cas_ckpt.index.database import rows_for
from cas_ckpt.index.schema import COMMITS, METRICS

_SIGNS: Mapping[str, str] = {
    "<": "__lt__", "<=": "__le__", ">": "__gt__", ">=": "__ge__", "==": "__eq__", "!=": "__ne__",
}  # fmt: skip

SIGNS = tuple(_SIGNS)
"""How a metric may be compared."""

_WILD = frozenset("*?[")


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
    """

    since_us: int | None = None
    until_us: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    metrics: tuple[MetricBound, ...] = ()
    author: str | None = None

    def __bool__(self) -> bool:
        return self != _EVERYTHING


_EVERYTHING = CommitFilter()


def matching(connection: Connection, wanted: CommitFilter) -> set[int]:
    """The numbers of all commits that `wanted` lets through."""
    c, m = COMMITS.c, METRICS.c
    query = select(c.object_id)
    if wanted.since_us is not None:
        query = query.where(c.time_us >= wanted.since_us)
    if wanted.until_us is not None:
        query = query.where(c.time_us <= wanted.until_us)
    if wanted.first_step is not None:
        query = query.where(c.step >= wanted.first_step)
    if wanted.last_step is not None:
        query = query.where(c.step <= wanted.last_step)
    for bound in wanted.metrics:
        holds = getattr(m.value, _SIGNS[bound.sign])(bound.value)
        query = query.where(exists(select(m.object_id).where(m.object_id == c.object_id, m.name == bound.name, holds)))
    if wanted.author is None:
        return set(connection.execute(query).scalars())
    return {row.object_id for row in rows_for(connection, query, c.author, _authors(connection, wanted.author))}


def _authors(connection: Connection, wanted: str) -> list[str]:
    """The distinct authors that are meant."""
    text = wanted.casefold()
    pattern = text if _WILD & set(text) else None
    names = connection.execute(select(COMMITS.c.author).distinct()).scalars()
    if pattern is None:
        return [name for name in names if text in name.casefold()]
    return [name for name in names if fnmatchcase(name.casefold(), pattern)]
