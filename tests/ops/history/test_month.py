"""What a month costs follows from counted requests: of real commits, restores and looks over S3."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cas_ckpt import Repository
from cas_ckpt.errors import InvalidInputError, NotFoundError
from cas_ckpt.ops.history import usage as month
from cas_ckpt.ops.history.usage import MonthRates, RunFacts, data_writes, plan_month, run_facts
from cas_ckpt.storage.object_store import ObjectStore
from cas_ckpt.transfer.sources import IN_FLIGHT_BYTES
from tests.servers import S3Server

WRITES = ("put", "begin", "put_part", "complete", "list_page", "uploads")
READS = ("read", "read_tail", "head")


class CountedBucket:
    """A `Bucket` that counts its requests by the class that vendors charge."""

    def __init__(self, inner: Any, asked: Counter[str]) -> None:
        self._inner, self._asked = inner, asked

    def __getattr__(self, name: str) -> Any:
        kind = "writes" if name in WRITES else "reads" if name in READS else "free"
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def counted(*args: Any, **how: Any) -> Any:
            self._asked[kind] += 1
            return found(*args, **how)

        return counted


@pytest.mark.slow
def test_the_requests_of_commits_restores_looks_and_collections_are_as_many_as_it_says(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Counter[str] = Counter()
    init = ObjectStore.__init__
    monkeypatch.setattr(
        ObjectStore, "__init__",
        lambda self, bucket, *rest, **how: init(self, CountedBucket(bucket, asked), *rest, **how),
    )  # fmt: skip

    def taken() -> tuple[int, int]:
        found = asked["writes"], asked["reads"]
        asked.clear()
        return found

    url = s3.url(s3.new_bucket())
    numbers = np.random.default_rng(0).integers(0, 256, 20 << 20, dtype=np.uint8)
    with Repository.init(url, group=None) as repo:
        for new_bytes in (20 << 20, 0, 1 << 20):
            if new_bytes:
                numbers[:new_bytes] = np.random.default_rng(new_bytes).integers(0, 256, new_bytes, dtype=np.uint8)
            repo.commit({"w": numbers})
            taken()
            numbers[:new_bytes] += 1
            made = repo.commit({"w": numbers})
            writes, reads = taken()
            stored = made.stats.stored_bytes
            assert writes == month.COMMIT_WRITES + data_writes(
                stored if new_bytes else 0, repo._handle.config.pack_bytes
            )
            assert reads <= month.COMMIT_READS
        repo.log()
        taken()
        repo.log()
        writes, reads = taken()
        assert writes <= month.LOOK_WRITES and reads <= month.LOOK_READS
        repo.gc(min_age_s=0)
        taken()
        repo.gc(min_age_s=0)
        writes, reads = taken()
        assert writes <= month.GC_WRITES + 2 and reads <= month.GC_READS
        assert writes >= month.GC_WRITES / 2
    with Repository.open(url, group=None, cache=str(tmp_path / "another host")) as repo:
        repo.log()
        taken()
        repo.load()
        writes, reads = taken()
        assert month.READ_BYTES == IN_FLIGHT_BYTES // 16
        spans = math.ceil((20 << 20) / month.READ_BYTES)
        assert writes <= month.RESTORE_WRITES
        assert spans <= reads <= month.RESTORE_READS + spans
        facts = run_facts(repo._handle)
        assert 20 << 20 <= facts.state_bytes < 21 << 20
        assert facts.num_commits == 5


def test_without_a_commit_nothing_is_known(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo", group=None) as repo, pytest.raises(NotFoundError, match="no commit yet"):
        repo.monthly_cost()


FACTS = RunFacts(100, 1e9, 8e9, 20 * 10**9, 200, 128 << 20)


def test_a_month_of_a_run_by_hand() -> None:
    found = plan_month(FACTS, MonthRates(48, 1, 100, 1))
    rows = {row.what: row for row in found.rows}
    # 1 GB: 7 packs of 16 parts, and one of 60.5 MB in 8 parts
    assert data_writes(1e9, 128 << 20) == 7 * 18 + 10
    assert rows["commits"].writes == 1440 * (2 + 136)
    assert rows["commits"].written_bytes == 1440e9
    assert rows["restores"].read_bytes == 240e9
    assert found.stored_bytes == 20e9 + 720e9
    assert rows["all"].writes == sum(row.writes for row in found.rows[:-1])
    kept = plan_month(FACTS, MonthRates(48, 1, 100, 1, keep_days=2))
    assert kept.stored_bytes == 8e9 + 96e9


@given(
    st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 1e12), st.floats(0, 1e13),
    st.floats(0, 1) | st.none(),
)  # fmt: skip
def test_more_of_anything_never_costs_less(
    commits: float, restores: float, looks: float, new_bytes: float, state_bytes: float, keep_days: float | None
) -> None:
    facts = RunFacts(1, new_bytes, state_bytes, 10, 1, 128 << 20)
    less = plan_month(facts, MonthRates(commits, restores, looks, 1, keep_days))
    more_facts = RunFacts(1, new_bytes * 2, state_bytes + 1, 10, 1, 128 << 20)
    more_rates = MonthRates(commits + 1, restores + 1, looks + 1, 2, None if keep_days is None else keep_days + 1)
    more = plan_month(more_facts, more_rates)
    assert less.stored_bytes <= more.stored_bytes
    for row, of_more in zip(less.rows, more.rows, strict=True):
        assert all(getattr(row, name) <= getattr(of_more, name) for name in ("writes", "reads", "read_bytes"))


def test_rates_are_checked() -> None:
    for wrong in ({"commits_per_day": -1}, {"looks_per_day": math.inf}, {"keep_days": math.nan}):
        with pytest.raises(InvalidInputError):
            MonthRates(**wrong)
