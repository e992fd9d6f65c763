"""A team's year in a minute: some runs that commit every day, a policy and a collection every night.

Time is a number; nothing sleeps. What must be left is told by plain calendar arithmetic, which
knows nothing of the rules' code.
"""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from cas_ckpt import clock
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.forgotten import PREFIX, read_forgotten
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.objects.pack import PACK_PREFIX
from cas_ckpt.ops.history.log import log_commits
from cas_ckpt.ops.retention.forget import ForgetReport, apply_policy
from cas_ckpt.ops.retention.policy import Policy, set_policy
from tests.builders import commit

FIRST_DAY = datetime.date(2025, 1, 1)
STATE_BYTES = 16 * 1024
"""What one commit has for itself alone: it does not compress."""

RULES = Policy(keep_daily=7, keep_weekly=5, keep_monthly=12)


@dataclass
class Year:
    """The repository, and what was committed to it.

    Attributes:
        made: Run -> days on which it committed, the first one first.
    """

    handle: RepositoryHandle
    now_s: float = 0.0
    made: dict[str, list[datetime.date]] = field(default_factory=dict)

    def night(self, day: datetime.date, runs: list[str]) -> ForgetReport:
        """Every run commits during the day; then the policy is applied and garbage collected."""
        for number, run in enumerate(runs):
            self.now_s = midnight_s(day) + 8 * 3600 + number * 60
            noise = np.frombuffer(secrets.token_bytes(STATE_BYTES), np.uint8)
            commit(self.handle, {"own": noise, "base": np.full(2048, number, np.float32)}, branch=run, message=str(day))
            self.made.setdefault(run, []).append(day)
        self.now_s = midnight_s(day) + 23 * 3600
        return apply_policy(self.handle, gc=True)

    def kept(self, run: str) -> set[datetime.date]:
        """Days of the commits of a run that are not forgotten."""
        forgotten = read_forgotten(self.handle.store)
        commits = log_commits(self.handle, [run])
        return {datetime.date.fromisoformat(c.message) for c in commits if bytes.fromhex(c.id) not in forgotten}

    def pack_sizes(self) -> list[int]:
        return [size for _, size in self.handle.store.list(PACK_PREFIX)]

    def num_records(self) -> int:
        return len(list(self.handle.store.list(PREFIX)))


@contextmanager
def new_year() -> Iterator[Year]:
    """A repository that carries `RULES`, under a clock of its own."""
    year = Year(init_repository(f"memory://year-{secrets.token_hex(4)}"))
    with clock.fixed(lambda: year.now_s):
        set_policy(year.handle, RULES)
        yield year
    year.handle.close()


def midnight_s(day: datetime.date) -> float:
    return (day - datetime.date(1970, 1, 1)).days * 86400.0


def should_be_kept(made: list[datetime.date]) -> set[datetime.date]:
    """The last day of each of the last 7 days, 5 weeks and 12 months; the first day while there are fewer.

    A policy that is applied every night chooses among what the nights before have left, so the
    first day is only there as long as some night since kept it.
    """
    kept: set[datetime.date] = set()
    for day in made:
        kept = _chosen(sorted({*kept, day}))
    return kept


def _chosen(days: list[datetime.date]) -> set[datetime.date]:
    chosen: set[datetime.date] = set()
    for count, bucket in ((7, lambda d: d), (5, lambda d: d.isocalendar()[:2]), (12, lambda d: (d.year, d.month))):
        last_of = {bucket(day): day for day in days}  # later days replace earlier ones
        chosen |= set(sorted(last_of.values())[-count:])
        if len(last_of) < count:
            chosen.add(days[0])
    return chosen
