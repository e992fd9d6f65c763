"""Ten runs, a policy and a collection every night: sizes stay where the policy says."""

from __future__ import annotations

import datetime

import pytest

from cas_ckpt.core.forgotten import MANY_RECORDS
from cas_ckpt.index import usage
from cas_ckpt.ops.gc.plan import MANY_SMALL, GcOptions
from tests.ops.retention.retention_year import FIRST_DAY, STATE_BYTES, Year, new_year, should_be_kept
from tests.searches import tries

NODE_BYTES = 2560
"""Above what the nodes of one state take, with their share of a pack's header and directory."""

COMMIT_BYTES = 512
"""Above what one commit object takes; all of them stay."""


def at_work(runs: list[str], number: int) -> list[str]:
    """The runs that commit on a day: each rests now and then, the last one begins late."""
    return [run for at, run in enumerate(runs) if (number + at) % 9 and (run != runs[-1] or number > 20)]


def check(year: Year) -> None:
    """What must be left is left, and not more than that."""
    kept = {run: should_be_kept(made) for run, made in year.made.items()}
    assert {run: year.kept(run) for run in kept} == kept
    num_kept, num_made = sum(map(len, kept.values())), sum(map(len, year.made.values()))
    needed = num_kept * (STATE_BYTES + NODE_BYTES) + num_made * COMMIT_BYTES
    options = GcOptions()
    assert num_kept * STATE_BYTES < sum(year.pack_sizes()) < needed / (1 - options.max_unused)
    assert len(year.pack_sizes()) <= 2 * MANY_SMALL + 2
    assert year.num_records() <= MANY_RECORDS + 1


def live_through(num_days: int, num_runs: int) -> Year:
    runs = [f"run-{number}" for number in range(num_runs)]
    with new_year() as year:
        for number in range(num_days):
            year.night(FIRST_DAY + datetime.timedelta(days=number), at_work(runs, number))
            check(year)
        assert year.handle.index.read(usage.read_stats).num_commits == sum(map(len, year.made.values()))
    return year


def test_weeks_of_three_runs_stay_as_small_as_the_policy_says() -> None:
    live_through(tries(28, 42), 3)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_year_of_ten_runs_stays_as_small_as_the_policy_says() -> None:
    live_through(365, 10)
