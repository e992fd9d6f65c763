"""Metrics come back in the order in which they were given."""

from __future__ import annotations

from cas_ckpt import Repository

GIVEN = {"loss": 1.5, "acc": 0.25, "zeta": 3.0, "beta": 4.0}


def test_metrics_keep_their_order_in_the_commit_the_log_and_the_diff() -> None:
    with Repository.init("memory://metric-order") as repo:
        repo.commit({"x": 1}, metrics=GIVEN)
        info = repo.commit({"x": 2}, metrics={name: value + 1 for name, value in GIVEN.items()})
        repo.rebuild_index()
        assert [list(found.metrics) for found in (info, *repo.log())] == [list(GIVEN)] * 3
        changed = [field.name for field in repo.diff("main").fields if field.name.startswith("metrics/")]
        assert changed == [f"metrics/{name}" for name in GIVEN]
