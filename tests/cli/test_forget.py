"""forget and policy on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from cas_ckpt import clock
from cas_ckpt.core.forgotten import read_forgotten
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.ops.refs import create_branch, create_tag
from tests.builders import commit, new_repository
from tests.cli.running import call, ok

FIRST_S = 1_704_110_400  # 2024-01-01 12:00 UTC


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Six days on main, d1 tagged; ft begins at d3 with a commit of its own."""
    handle = new_repository(tmp_path / "repo")
    for number in range(6):
        with clock.fixed(lambda: float(FIRST_S + number * 86400)):  # noqa: B023
            commit(handle, {"x": number}, message=f"d{number}", step=number * 100, metrics={"loss": 9.0 - number})
    create_tag(handle, "v1", "main~4")
    create_branch(handle, "ft", start="main~2")
    with clock.fixed(lambda: float(FIRST_S + 7 * 86400)):
        commit(handle, {"x": "ft"}, message="tuned", branch="ft")
    handle.close()
    return tmp_path / "repo"


def num_forgotten(place: Path) -> int:
    handle = RepositoryHandle.open(place)
    try:
        return len(read_forgotten(handle.store))
    finally:
        handle.close()


def test_a_dry_run_shows_each_commit_and_why_and_changes_nothing(place: Path) -> None:
    lines = ok("-C", place, "forget", "-n", "--keep-last", "2", "--keep-every-steps", "400").splitlines()
    assert lines[0] == "kept:"
    assert lines[1].split() == ["commit", "made", "(UTC)", "step", "reasons", "message"]
    rows = {line.split()[-1]: line for line in lines}
    assert "2024-01-06 12:00   500  head of main, last of main" in rows["d5"]
    assert "step 400 of main" in rows["d4"] and "last of ft" in rows["d3"] and "tag v1" in rows["d1"]
    assert "step 0 of ft, main" in rows["d0"]
    assert lines.index("would be forgotten:") < lines.index(rows["d2"])
    assert lines[-1].startswith("6 commits kept, 1 would be forgotten")
    assert num_forgotten(place) == 0


def test_what_was_said_is_done(place: Path) -> None:
    assert "6 commits kept, 1 forgotten" in ok("-C", place, "forget", "--keep-last", "1", "--keep-best", "loss:2")
    assert num_forgotten(place) == 1
    assert ok("-C", place, "log", "--oneline").count("\n") == 6
    assert "4 commits kept, 2 forgotten" in ok("-C", place, "forget", "--keep-last", "1", "--keep-best", "loss:1")
    assert "4 commits kept, 0 forgotten" in ok("-C", place, "forget", "--keep-last", "1", "--keep-best", "loss:1")


def test_the_report_is_json_if_that_is_wanted(place: Path) -> None:
    found = call("-C", place, "forget", "--json", "--keep-within", "25h", "--branch", "main").json
    assert [(one["message"], one["keep"]) for one in found["decisions"]] == [
        ("tuned", True), ("d5", True), ("d4", True), ("d3", True), ("d2", True), ("d1", True), ("d0", True)
    ]  # fmt: skip
    found = call("-C", place, "forget", "--json", "--keep-within", "25h").json
    assert [one["message"] for one in found["decisions"] if not one["keep"]] == ["d3", "d2", "d0"]
    assert found["forgotten_commit_ids"] == [one["commit_id"] for one in found["decisions"] if not one["keep"]]
    assert {one["message"]: one["reasons"] for one in found["decisions"]}["d4"] == ["within 25h of main"]
    assert found["dry_run"] is False


def test_single_commits_are_forgotten_by_name(place: Path) -> None:
    assert "2 would be forgotten" in ok("-C", place, "forget", "-n", "main~3", "main~1")
    assert num_forgotten(place) == 0
    assert "2 forgotten" in ok("-C", place, "forget", "main~3", "main~1")
    assert "forgotten already" in ok("-C", place, "forget", "main~3")
    assert num_forgotten(place) == 2


def test_a_commit_that_a_ref_names_is_refused(place: Path) -> None:
    ran = call("-C", place, "forget", "main~3", "v1")
    assert ran.code == 2 and "is tag v1, so it stays" in ran.err
    assert num_forgotten(place) == 0


@pytest.mark.parametrize("words", [
    (), ("--keep-last", "0"), ("--policy", "--keep-last", "1"), ("main~1", "--keep-last", "1"), ("main~1", "--policy"),
    ("main~1", "--branch", "main"), ("--keep-last", "-1"), ("--keep-last", "many"), ("--keep-within", "1m"),
    ("--keep-best", "loss"), ("--policy",), ("--keep-last", "1", "--branch", "none"), ("--keep-every-steps", "-5"),
])  # fmt: skip
def test_what_says_nothing_or_two_things_is_refused(place: Path, words: tuple[str, ...]) -> None:
    ran = call("-C", place, "forget", *words)
    assert ran.code == 2 and ran.err != ""
    assert num_forgotten(place) == 0


def test_all_can_be_kept_and_all_but_the_named_forgotten(place: Path) -> None:
    assert "7 commits kept, 0 forgotten" in ok("-C", place, "forget", "--keep-daily", "unlimited")
    assert "3 commits kept, 4 forgotten" in ok("-C", place, "forget", "--keep-tag", "v*")


def test_a_policy_is_set_shown_applied_and_cleared(place: Path) -> None:
    assert ok("-C", place, "policy", "show") == "no policy\n"
    assert ok("-C", place, "policy", "set", "--keep-last", "2") == "all branches  --keep-last 2\n"
    ok("-C", place, "policy", "set", "--branch", "ft*", "--keep-daily", "unlimited", "--keep-tag", "x*")
    assert ok("-C", place, "policy", "show").splitlines() == [
        "ft*             --keep-daily unlimited --keep-tag x*", "other branches  --keep-last 2"
    ]  # fmt: skip
    assert call("-C", place, "policy", "show", "--json").json == {
        "default": {"keep_last": 2},
        "branches": [{"pattern": "ft*", "rules": {"keep_daily": -1, "keep_tags": ["x*"]}}],
    }
    assert "0 would be forgotten" in ok("-C", place, "forget", "--policy", "-n", "--branch", "main")
    ok("-C", place, "policy", "clear", "--branch", "ft*")
    assert "2 would be forgotten" in ok("-C", place, "forget", "--policy", "-n")
    assert "5 commits kept, 2 forgotten" in ok("-C", place, "forget", "--policy")
    assert ok("-C", place, "policy", "clear") == "no policy\n"
    assert call("-C", place, "policy", "clear").code == 15


def test_a_policy_without_rules_is_refused(place: Path) -> None:
    ran = call("-C", place, "policy", "set")
    assert ran.code == 2 and "at least one rule" in ran.err


def test_collecting_follows_if_that_is_wanted(place: Path) -> None:
    lines = ok("-C", place, "forget", "--keep-last", "1", "--gc").splitlines()
    assert "3 commits kept, 4 forgotten" in lines
    assert any(line.startswith("not needed") for line in lines)
    found = call("-C", place, "forget", "main~1", "--gc", "--json").json
    assert found["gc"]["deleted_packs"] >= 0 and found["freed_bytes"] is None
    assert call("-C", place, "forget", "--keep-last", "1", "--gc", "-n", "--json").json["gc"] is None


def test_quiet_prints_nothing(place: Path) -> None:
    assert ok("-C", place, "-q", "forget", "--keep-last", "1") == ok("-C", place, "-q", "policy", "show") == ""


def test_a_rule_about_a_metric_that_no_commit_has_is_refused(place: Path) -> None:
    ran = call("-C", place, "forget", "--keep-best", "los:3")
    assert ran.code == 15 and "there are loss" in ran.err
    assert num_forgotten(place) == 0
