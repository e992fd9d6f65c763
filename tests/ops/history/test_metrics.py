"""Metrics are listed, and commits are ranked by them; what a sort in Python would give."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cas_ckpt import Repository
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.forgotten import write_forgotten
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.units import commit_filter, parse_ranking
from cas_ckpt.errors import NotFoundError
from cas_ckpt.index.query import QueryLimits
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.fsck.check import check_open
from cas_ckpt.ops.history.log import best_commits, log_commits, metrics_table
from cas_ckpt.ops.history.sql import query_index
from cas_ckpt.ops.refs import delete_branch
from tests.builders import commit, new_repository


def best(repo: RepositoryHandle, metric: str, **options: object) -> list[tuple[str, float]]:
    return [(each.commit.message, each.value) for each in best_commits(repo, metric, **options)]  # type: ignore[arg-type]


@pytest.fixture
def repo(tmp_path: Path) -> RepositoryHandle:
    handle = new_repository(tmp_path / "repo")
    for number, loss in enumerate([3.0, 1.0, 2.0, 1.0]):
        commit(handle, {"x": number}, message=f"c{number}", metrics={"loss": loss}, step=number)
    commit(handle, {"x": "ft"}, message="ft", branch="ft", metrics={"loss": 0.5, "acc": 0.9})
    commit(handle, {"x": "none"}, message="none")
    return handle


def test_the_smallest_is_best_unless_the_largest_is_asked_for(repo: RepositoryHandle) -> None:
    assert best(repo, "loss") == [("ft", 0.5)]
    assert best(repo, "loss", largest=True, limit=2) == [("c0", 3.0), ("c2", 2.0)]
    assert best(repo, "loss", limit=0) == []


def test_equal_values_are_ranked_by_age(repo: RepositoryHandle) -> None:
    assert best(repo, "loss", revisions=["main"], limit=9) == [("c1", 1.0), ("c3", 1.0), ("c2", 2.0), ("c0", 3.0)]


def test_only_what_a_ref_leads_to_is_ranked(repo: RepositoryHandle) -> None:
    delete_branch(repo, "ft", force=True)
    assert best(repo, "loss") == [("c1", 1.0)]
    assert best(repo, "acc") == []


def test_forgotten_commits_are_not_ranked_unless_a_ref_names_them(repo: RepositoryHandle) -> None:
    found = {each.commit.message: Digest(bytes.fromhex(each.commit.id)) for each in best_commits(repo, "loss", limit=9)}
    write_forgotten(repo.store, [found["c1"], found["ft"]], author="me")
    assert best(repo, "loss", limit=2) == [("ft", 0.5), ("c3", 1.0)]


NAN, INF, LIMITS = float("nan"), float("inf"), QueryLimits(100, 1 << 20, 20.0)


def test_a_commit_whose_metric_is_not_a_number_is_made_and_ranked_behind_the_others(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    values = [NAN, INF, 2.0, -INF, 1.0]
    for number, loss in enumerate(values):
        commit(handle, {"x": number}, message=str(loss), metrics={"loss": loss, "one": 1.0})
    assert [name for name, _ in best(handle, "loss", limit=9)] == ["1.0", "2.0", "-inf", "inf", "nan"]
    assert [name for name, _ in best(handle, "loss", limit=9, largest=True)] == ["2.0", "1.0", "inf", "-inf", "nan"]
    assert [repr(each.metrics["loss"]) for each in reversed(metrics_table(handle))] == list(map(repr, values))
    below = log_commits(handle, wanted=commit_filter(metrics="loss<inf"))
    assert [each.message for each in below] == ["1.0", "-inf", "2.0"]
    found = query_index(handle, "SELECT value, is_nan FROM metrics WHERE name = 'loss' ORDER BY commit_no", {}, LIMITS)
    assert found.rows == ((None, 1), (INF, 0), (2.0, 0), (-INF, 0), (1.0, 0))
    as_json = query_index(handle, "SELECT json_extract(metrics, '$.loss') FROM commits ORDER BY commit_no", {}, LIMITS)
    assert as_json.rows == (("nan",), ("inf",), (2.0,), ("-inf",), (1.0,))


def test_commits_that_say_nan_are_equal_whichever_nan_it_was(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    commit(handle, {"x": 1}, metrics={"loss": -NAN})
    (first,) = metrics_table(handle)
    assert first.metrics == {"loss": math.nan}
    assert check_open(handle).ok
    with Repository.open(tmp_path / "repo") as repo:
        repo.rebuild_index()
        assert [commit.metrics for commit in repo.log()] == [first.metrics]


def test_a_metric_that_nobody_has_is_named_with_those_that_there_are(repo: RepositoryHandle) -> None:
    with pytest.raises(NotFoundError, match="'los'.*: there are acc, loss"):
        best(repo, "los")
    with pytest.raises(NotFoundError, match="'los'"):
        metrics_table(repo, names=["los"])


def test_the_table_leaves_out_commits_without_metrics(repo: RepositoryHandle) -> None:
    assert [info.message for info in metrics_table(repo)] == ["c3", "c2", "c1", "c0"]
    assert [info.message for info in metrics_table(repo, all_refs=True, names=["acc"])] == ["ft"]
    assert [info.message for info in metrics_table(repo, limit=2)] == ["c3", "c2"]


def test_how_to_rank_comes_after_the_name() -> None:
    assert [parse_ranking(text) for text in ("loss", "loss:min", "acc:max", "a:b", "val:acc:max")] == [
        ("loss", False), ("loss", False), ("acc", True), ("a:b", False), ("val:acc", True),
    ]  # fmt: skip


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=6), st.booleans())
def test_the_ranking_is_a_stable_sort(values: list[float], largest: bool) -> None:
    handle = init_repository("memory://")
    try:
        for number, value in enumerate(values):
            commit(handle, {"x": number}, message=str(number), metrics={"m": value})
        ordered = sorted(range(len(values)), key=lambda at: -values[at] if largest else values[at])
        assert [int(name) for name, _ in best(handle, "m", largest=largest, limit=9)] == ordered
    finally:
        handle.close()
