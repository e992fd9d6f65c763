"""A filtered log shows what a plain look at every commit would choose, in the order of the log."""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cas_ckpt import clock
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import CommitInfo
from cas_ckpt.core.revisions import resolve
from cas_ckpt.core.units import commit_filter, parse_bound, parse_moment, parse_steps
from cas_ckpt.errors import InvalidInputError
from cas_ckpt.index import tree_diff
from cas_ckpt.index.rows import AxisBound
from cas_ckpt.ops.history import log
from cas_ckpt.ops.history.log import log_commits
from tests.builders import commit, new_repository, numbers

DAY_S = 86400.0
NOON = datetime.datetime(2026, 11, 21, 12, tzinfo=datetime.UTC).timestamp()
AUTHORS = ("Ann@node-1", "bob@node-2", "Änne@node-1", "100%_sure")


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> RepositoryHandle:
    """Forty commits on two branches, six hours apart, some joined, of random authors, steps and metrics."""
    handle = new_repository(tmp_path_factory.mktemp("log") / "repo")
    draw = random.Random(4)
    for number in range(40):
        branch = draw.choice(["main", "ft"])
        metrics = {name: draw.choice([0.0, 0.5, 1.0, 2.5]) for name in ("loss", "val/acc") if draw.random() < 0.7}
        step = number * 10 if draw.random() < 0.8 else None
        joined = [resolve(handle, "main")] if branch == "ft" and number > 20 and draw.random() < 0.3 else []
        with clock.fixed(lambda at=NOON - (40 - number) * DAY_S / 4: at):
            commit(
                handle, {"x": number // 7, "y": number}, message=str(number), branch=branch, step=step,
                metrics=metrics, author=draw.choice(AUTHORS), other_parents=joined,
            )  # fmt: skip
    return handle


def chosen(repo: RepositoryHandle, *, limit: int | None = None, **conditions: Any) -> list[str]:
    with clock.fixed(lambda: NOON):
        wanted = commit_filter(**conditions)
    return [info.message for info in log_commits(repo, all_refs=True, limit=limit, wanted=wanted)]


def expected(repo: RepositoryHandle, condition: Callable[[CommitInfo], bool]) -> list[str]:
    return [info.message for info in log_commits(repo, all_refs=True) if condition(info)]


CASES: dict[str, tuple[dict[str, Any], Callable[[CommitInfo], bool]]] = {
    "since a while": ({"since": "3d"}, lambda c: c.time_s >= NOON - 3 * DAY_S),
    "since, in words": ({"since": "1 day 12 hours ago"}, lambda c: c.time_s >= NOON - 1.5 * DAY_S),
    "until a day that is taken whole": ({"until": "2026-11-18"}, lambda c: c.time_s < NOON - 2.5 * DAY_S),
    "until a moment": ({"until": "2026-11-18T12:00"}, lambda c: c.time_s <= NOON - 3 * DAY_S),
    "between": ({"since": "2026-11-15", "until": "2026-11-16"},
                lambda c: NOON - 6.5 * DAY_S <= c.time_s < NOON - 4.5 * DAY_S),
    "another offset": ({"since": "2026-11-18T14:00+02:00"}, lambda c: c.time_s >= NOON - 3 * DAY_S),
    "one step": ({"step": "30"}, lambda c: c.step == 30),
    "steps from 0 on": ({"step": ":50"}, lambda c: c.step is not None and c.step <= 50),
    "steps of a range": ({"step": "100:200"}, lambda c: c.step is not None and 100 <= c.step <= 200),
    "steps to the end": ({"step": (150, None)}, lambda c: c.step is not None and c.step >= 150),
    "a small metric": ({"metrics": ["loss<1"]}, lambda c: c.metrics.get("loss", 9) < 1),
    "a metric at most": ({"metrics": ["loss <= 1.0"]}, lambda c: c.metrics.get("loss", 9) <= 1),
    "a large metric": ({"metrics": ["val/acc>0.5"]}, lambda c: c.metrics.get("val/acc", 0) > 0.5),
    "a metric at least": ({"metrics": ["val/acc>=.5"]}, lambda c: c.metrics.get("val/acc", 0) >= 0.5),
    "an equal metric": ({"metrics": ["loss=0.5"]}, lambda c: c.metrics.get("loss") == 0.5),
    "another metric": ({"metrics": ["loss!=0.5"]}, lambda c: c.metrics.get("loss", 0.5) != 0.5),
    "two metrics": ({"metrics": ["loss<2", "val/acc>=1"]},
                    lambda c: c.metrics.get("loss", 9) < 2 and c.metrics.get("val/acc", 0) >= 1),
    "a part of an author": ({"author": "ann"}, lambda c: c.author == "Ann@node-1"),
    "an author beyond ASCII": ({"author": "äNN"}, lambda c: c.author == "Änne@node-1"),
    "signs that SQL knows": ({"author": "%_"}, lambda c: c.author == "100%_sure"),
    "a pattern of authors": ({"author": "*@NODE-1"}, lambda c: c.author.endswith("node-1")),
    "a pattern is of the whole": ({"author": "nn*"}, lambda c: False),
    "all at once": ({"since": "8d", "metrics": ["loss>0"], "author": "node", "step": "50:350"},
                    lambda c: c.time_s >= NOON - 8 * DAY_S and c.metrics.get("loss", 0) > 0 and "node" in c.author
                    and c.step is not None and 50 <= c.step <= 350),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_conditions_choose_what_they_say(repo: RepositoryHandle, name: str) -> None:
    conditions, condition = CASES[name]
    wanted = expected(repo, condition)
    assert chosen(repo, **conditions) == wanted
    assert 0 < len(wanted) < 40 or name == "a pattern is of the whole"


def test_a_limit_counts_what_is_shown(repo: RepositoryHandle) -> None:
    wanted = expected(repo, lambda c: c.metrics.get("loss", 9) < 1)
    assert chosen(repo, metrics=["loss<1"], limit=3) == wanted[:3]


def test_the_order_is_that_of_the_log(repo: RepositoryHandle) -> None:
    times = [int(message) for message in chosen(repo, author="node")]
    assert len(times) > 3
    assert all(a > b for a, b in pairwise(times))


@pytest.mark.parametrize("text", ["", "2026-13-01", "3 parsecs", "tomorrow", "d3", "2d3"])
def test_a_time_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="time|duration"):
        parse_moment(text)


@pytest.mark.parametrize("text", ["", "loss", "<2", "loss<", "loss<x", "loss<nan", "loss<<2", "loss<1<2"])
def test_a_comparison_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="comparison"):
        parse_bound(text)


@pytest.mark.parametrize("given", ["tp=2=3", "", "tp=x", "tp=-1", ["tp", 3], {"tp": 0}, {"tp": "2"}, {2: 2}, 7])
def test_a_dimension_of_another_form_is_refused(given: Any) -> None:
    assert commit_filter(axes=["tp=2", "ep"]) == commit_filter(axes={"tp": 2, "ep": None})
    assert commit_filter(axes="tp=2").axes == (AxisBound("tp", 2),)
    with pytest.raises(InvalidInputError, match="axes|dimension"):
        commit_filter(axes=given if given != "" else [""])


@pytest.mark.parametrize("given", [0, -1, "8", True, 2.0])
def test_a_number_of_ranks_of_another_form_is_refused(given: Any) -> None:
    assert commit_filter(world_size=8).world_size == 8
    with pytest.raises(InvalidInputError, match="world_size"):
        commit_filter(world_size=given)


@pytest.mark.parametrize("text", ["x", "1:2:3", "1-2", "-3"])
def test_a_step_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="step"):
        parse_steps(text)


def test_yesterday_is_the_day_before_this_one() -> None:
    with clock.fixed(lambda: NOON):
        for end in (False, True):
            assert parse_moment("yesterday", end=end) == parse_moment("2026-11-20", end=end)
            assert parse_moment("Today", end=end) == parse_moment("2026-11-21", end=end)


def test_a_day_is_taken_whole_at_the_end_and_from_its_beginning() -> None:
    start, end = parse_moment("2026-11-21"), parse_moment("2026-11-21", end=True)
    assert (start, end - start + 1) == (int((NOON - DAY_S / 2) * 1e6), int(DAY_S * 1e6))
    assert parse_moment(NOON) == parse_moment("2026-11-21 12:00", end=True) == parse_moment("2026-11-21T12:00:00Z")
    assert parse_moment(datetime.datetime(2026, 11, 21, 12)) == parse_moment(NOON)


# --- keys ------------------------------------------------------------------------------------


def grown(path: Path) -> RepositoryHandle:
    """Six commits: a tensor, a value and a container change at different times."""
    handle = new_repository(path)
    wide = {f"b{at}": numbers(300, seed=at) for at in range(3)}
    items: dict[str, Any] = {"model": {"head.weight": numbers(50, 50), "body": wide}, "step": 0}
    commit(handle, items, message="begin")
    commit(handle, items | {"step": 1}, message="step")
    commit(handle, items | {"step": 2, "more": {}}, message="more")
    changed = {"head.weight": numbers(50, 50, seed=1), "body": wide}
    commit(handle, items | {"step": 2, "model": changed}, message="head")
    other = wide | {"b1": numbers(300, seed=9)}
    commit(handle, items | {"step": 2, "model": changed | {"body": other}}, message="body")
    commit(handle, items | {"step": 2, "model": changed | {"body": wide}}, message="back")
    return handle


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ("step", ["more", "step", "begin"]),
        ("model/head.weight", ["head", "begin"]),
        ("model/head/**", ["head", "begin"]),
        ("**/weight", ["head", "begin"]),
        ("model/body/b1", ["back", "body", "begin"]),
        ("model", ["back", "body", "head", "begin"]),
        ("more", ["head", "more"]),
        ("nothing", []),
        ("", []),
        (["step", "model/body/*"], ["back", "body", "more", "step", "begin"]),
    ],
)
def test_commits_that_changed_an_entry_are_found_by_its_key(tmp_path: Path, keys: Any, wanted: list[str]) -> None:
    found = [info.message for info in log_commits(grown(tmp_path / "repo"), keys=keys)]
    assert found == wanted


def test_it_does_not_matter_how_many_commits_are_compared_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = grown(tmp_path / "repo")
    monkeypatch.setattr(log, "_MOST_COMMITS", 3)
    for first, most_rows in ((1, 10**6), (2, 10**6), (6, 5), (6, 1)):
        monkeypatch.setattr(log, "_FIRST_COMMITS", first)
        monkeypatch.setattr(tree_diff, "MOST_ROWS", most_rows)
        assert [info.message for info in log_commits(handle, keys="model")] == ["back", "body", "head", "begin"]


def test_a_slash_of_a_pattern_stands_for_the_dot_of_a_container(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    for number in range(2):
        commit(handle, {"layers.0": {"w": number}, "layers": {"1": 0}}, message=str(number))
    assert [info.message for info in log_commits(handle, keys="layers/0/w")] == ["1", "0"]


def test_the_limit_counts_commits_that_changed_the_entry(tmp_path: Path) -> None:
    found = log_commits(grown(tmp_path / "repo"), keys="model/body/b1", limit=2)
    assert [info.message for info in found] == ["back", "body"]


def test_a_key_is_compared_with_the_first_parent_alone(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    commit(handle, {"x": 1}, message="a")
    commit(handle, {"x": 2}, message="other", branch="ft")
    commit(handle, {"x": 1}, message="same", other_parents=[resolve(handle, "ft")])
    commit(handle, {"x": 2}, message="taken", other_parents=[resolve(handle, "ft")])
    assert [info.message for info in log_commits(handle, keys="x")] == ["taken", "other", "a"]
