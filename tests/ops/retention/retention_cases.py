"""Histories for the tests of retention: commits by number, times by their text."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.retention.policy import Candidate, Decision, Line, Policy, decide

HOUR_US = 3600 * 10**6
FUTURE_US = 2**62


def at(text: str) -> int:
    """Microseconds since the epoch of "2019-09-01 11:00" in UTC."""
    return int(datetime.datetime.fromisoformat(text + "+00:00").timestamp()) * 10**6


def name(number: int) -> Digest:
    return Digest(number.to_bytes(32, "big"))


def chain(times_us: Sequence[int], **columns: Sequence[Any]) -> list[Candidate]:
    """One commit on top of the other, the first time first; the last one is the head of main."""
    commits = [
        Candidate(name(n), (name(n - 1),) if n else (), time_us, **{key: values[n] for key, values in columns.items()})
        for n, time_us in enumerate(times_us)
    ]
    return [*commits[:-1], replace(commits[-1], heads=("main",))] if commits else []


def judged(commits: Sequence[Candidate], policy: Policy, *, now_us: int = FUTURE_US) -> list[Decision]:
    head = next(commit.id for commit in commits if "main" in commit.heads)
    return decide(commits, [Line("main", head, policy)], now_us=now_us)


def kept(commits: Sequence[Candidate], policy: Policy, *, now_us: int = FUTURE_US) -> list[int]:
    """Numbers of the kept commits, the oldest first."""
    decisions = judged(commits, policy, now_us=now_us)
    return sorted(int.from_bytes(decision.commit.id, "big") for decision in decisions if decision.keep)


def reasons(commits: Sequence[Candidate], policy: Policy) -> dict[int, tuple[str, ...]]:
    decisions = judged(commits, policy)
    return {int.from_bytes(one.commit.id, "big"): one.reasons for one in decisions if one.keep}


def days(first: str, count: int, *, step: int = 1) -> list[int]:
    return [at(first) + number * step * 24 * HOUR_US for number in range(count)]
