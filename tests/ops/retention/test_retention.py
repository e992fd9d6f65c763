"""The rules of retention: what restic documents, what is ours, and what holds for all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cas_ckpt.core.units import BUCKETS, UNLIMITED, parse_period
from cas_ckpt.errors import InvalidInputError
from cas_ckpt.ops.retention.policy import Candidate, Line, Policy, Retention, decide, policy_from
from tests.ops.retention.retention_cases import FUTURE_US, HOUR_US, at, chain, days, judged, kept, name, reasons

# --- what restic documents ----------------------------------------------------------------------


def test_of_twelve_sundays_the_last_four_days_that_have_one_are_kept() -> None:
    assert kept(chain(days("2019-09-01 11:00", 12, step=7)), Policy(keep_daily=4)) == [8, 9, 10, 11]


def test_daily_commits_of_a_hundred_years_leave_what_the_manual_says() -> None:
    commits = chain(days("1924-01-01 12:00", 36_525))
    found = judged(commits, Policy(keep_daily=7, keep_weekly=5, keep_monthly=12, keep_yearly=75))
    rules = [reason.removesuffix(" of main") for one in found if one.keep for reason in one.reasons]
    assert [rules.count(rule) for rule in ("daily", "weekly", "monthly", "yearly")] == [7, 5, 12, 75]
    assert sum(one.keep for one in found) == 7 + 4 + 11 + 74  # the last day, a Sunday, is one of each


def test_while_hours_are_missing_the_oldest_commit_is_kept_as_well() -> None:
    commits = chain([at("2024-05-17 09:36"), at("2024-05-17 09:41"), at("2024-05-17 10:20")])
    assert reasons(commits, Policy(keep_hourly=24)) == {
        0: ("oldest hourly of main",), 1: ("hourly of main",), 2: ("head of main", "hourly of main")
    }  # fmt: skip
    assert kept(commits, Policy(keep_hourly=2)) == [1, 2]
    assert kept(commits, Policy(keep_hourly=UNLIMITED)) == [0, 1, 2]


def test_two_years_are_two_calendar_years_and_the_oldest_until_there_are_two() -> None:
    year = days("2021-01-01 03:00", 366)  # the last is of 2022
    assert kept(chain(year[:300]), Policy(keep_yearly=2)) == [0, 299]
    assert kept(chain(year), Policy(keep_yearly=2)) == [364, 365]


def test_weeks_begin_on_mondays() -> None:
    sunday_monday = [at("2024-03-03 23:59"), at("2024-03-04 00:00"), at("2024-03-10 23:59"), at("2024-03-11 00:00")]
    assert kept(chain(sunday_monday), Policy(keep_weekly=3)) == [0, 2, 3]


def test_days_hours_and_months_end_in_utc() -> None:
    assert kept(chain([at("2024-01-31 23:59"), at("2024-02-01 00:00")]), Policy(keep_monthly=2)) == [0, 1]
    assert kept(chain([at("2024-01-31 22:59"), at("2024-01-31 23:00")]), Policy(keep_hourly=1)) == [1]


def test_within_reaches_back_from_the_last_commit_and_not_from_now() -> None:
    commits = chain(days("2020-01-01 00:00", 10))
    assert kept(commits, Policy(keep_within="3d"), now_us=at("2026-01-01 00:00")) == [7, 8, 9]
    assert kept(commits, Policy(keep_within="3d1h")) == [6, 7, 8, 9]


def test_a_commit_of_the_future_does_not_make_others_old() -> None:
    commits = chain([*days("2020-01-01 00:00", 3), at("2036-01-01 00:00")])
    assert kept(commits, Policy(keep_within="1d"), now_us=at("2020-01-05 00:00")) == [2, 3]
    assert kept(commits, Policy(keep_within="1d"), now_us=at("2019-01-05 00:00")) == [0, 1, 2, 3]


def test_daily_commits_within_a_time_are_the_last_of_their_days() -> None:
    times = [at("2024-06-01 10:00"), at("2024-06-09 09:00"), at("2024-06-09 10:00"), at("2024-06-10 10:00")]
    assert kept(chain(times), Policy(keep_within_daily="7d")) == [2, 3]
    assert reasons(chain(times[1:]), Policy(keep_within_daily="7d"))[0] == ("oldest daily within 7d of main",)


@pytest.mark.parametrize(("policy", "wanted"), [
    (Policy(keep_last=2), [4, 5]),
    (Policy(keep_last=99), [0, 1, 2, 3, 4, 5]),
    (Policy(keep_last=UNLIMITED), [0, 1, 2, 3, 4, 5]),
    (Policy(keep_daily=2), [3, 5]),
    (Policy(keep_daily=UNLIMITED), [0, 1, 3, 5]),
    (Policy(keep_monthly=1), [5]),
    (Policy(keep_monthly=2), [0, 5]),
    (Policy(keep_within="1h"), [4, 5]),
    (Policy(keep_last=1, keep_within_hourly="2d"), [3, 4, 5]),
])  # fmt: skip
def test_each_rule_keeps_what_it_says(policy: Policy, wanted: list[int]) -> None:
    times = ["10 08:00", "11 08:00", "12 08:10", "12 08:50", "13 07:45", "13 08:30"]
    assert kept(chain([at(f"2024-02-{time}") for time in times]), policy) == wanted


@pytest.mark.parametrize(("duration", "end", "wanted"), [
    ("1mo", "2023-03-31 12:00", "2023-03-03 12:00"),
    ("1mo", "2024-03-31 12:00", "2024-03-02 12:00"),
    ("1y", "2024-02-29 00:00", "2023-03-01 00:00"),
    ("2y5mo7d3h", "2024-01-10 02:00", "2021-08-02 23:00"),
    ("36h", "2024-01-02 12:00", "2024-01-01 00:00"),
])  # fmt: skip
def test_durations_are_calendar_time(duration: str, end: str, wanted: str) -> None:
    assert parse_period(duration).before_us(at(end)) == at(wanted)


@pytest.mark.parametrize("duration", ["9999y", "999999d", "999999y999999mo999999d999999h"])
def test_a_duration_that_is_longer_than_the_calendar_keeps_everything(duration: str) -> None:
    assert kept(chain([-(2**63), at("2024-01-02 12:00")]), Policy(keep_within=duration)) == [0, 1]


def test_times_that_no_calendar_has_lie_in_a_bucket_all_the_same() -> None:
    for time_us in (-(2**63), 2**63 - 1):
        assert all(type(bucket(time_us)) is int for bucket in BUCKETS.values())
        assert kept(chain([time_us, time_us]), Policy(keep_yearly=1, keep_within="1y")) == [0, 1]


# --- rules of our own ---------------------------------------------------------------------------


def test_a_commit_is_kept_at_every_multiple_of_steps_and_first_after_one_that_was_missed() -> None:
    steps = [0, 100, 900, 1000, 1100, 2050, 2060, None, 3000, 3100]
    commits = chain(days("2024-01-01 00:00", 10), step=steps)
    found = reasons(commits, Policy(keep_every_steps=1000))
    assert found == {
        0: ("step 0 of main",), 3: ("step 1000 of main",), 5: ("first after step 2000 of main",),
        8: ("step 3000 of main",), 9: ("head of main",),
    }  # fmt: skip


def test_before_the_first_multiple_of_steps_only_step_0_counts() -> None:
    commits = chain(days("2024-01-01 00:00", 4), step=[100, 900, 1100, 1200])
    assert kept(commits, Policy(keep_every_steps=1000)) == [2, 3]


def test_a_step_that_was_done_again_is_kept_once_the_younger_time() -> None:
    commits = chain(days("2024-01-01 00:00", 4), step=[1000, 1500, 1000, 1500])
    assert kept(commits, Policy(keep_every_steps=1000)) == [2, 3]


def test_the_best_commits_by_a_metric_are_kept_and_a_tie_keeps_the_older() -> None:
    losses = [5.0, 1.0, float("nan"), 2.0, 1.0, 7.0]
    metrics = [{"loss": loss, "acc": -loss} for loss in losses]
    commits = chain(days("2024-01-01 00:00", 7), metrics=[*metrics, {}])
    assert kept(commits, Policy(keep_best="loss:1")) == [1, 6]
    assert kept(commits, Policy(keep_best=("loss:3:min",))) == [1, 3, 4, 6]
    assert kept(commits, Policy(keep_best=("loss:1:max",))) == [5, 6]
    assert kept(commits, Policy(keep_best=("loss:1:max", "acc:1:max"))) == [1, 5, 6]
    assert kept(commits, Policy(keep_best="acc:9")) == [0, 1, 3, 4, 5, 6]


def test_the_last_restored_are_those_that_were_restored_latest_whenever_they_were_made() -> None:
    commits = chain(days("2024-01-01 12:00", 7), restored=[30, None, 50, 50, None, 10, None])
    assert kept(commits, Policy(keep_last_restored=1)) == [3, 6]
    assert kept(commits, Policy(keep_last_restored=2)) == [2, 3, 6]
    assert kept(commits, Policy(keep_last_restored=3)) == [0, 2, 3, 6]
    assert kept(commits, Policy(keep_last_restored=UNLIMITED)) == [0, 2, 3, 5, 6]
    assert reasons(commits, Policy(keep_last_restored=1))[3] == ("last restored of main",)


def test_tags_and_pins_are_kept_whatever_the_rules_say() -> None:
    commits = chain(days("2024-01-01 00:00", 5))
    commits[1] = replace(commits[1], tags=("v1", "best"))
    commits[2] = replace(commits[2], pins=("paper",))
    assert reasons(commits, Policy(keep_tags="v*")) == {
        1: ("tag best", "tag v1", "keep-tag v* of main"), 2: ("pin paper",), 4: ("head of main",)
    }  # fmt: skip
    assert kept(commits, Policy(keep_last=1)) == [1, 2, 4]


def test_what_any_branch_keeps_is_kept_and_says_for_which() -> None:
    commits = chain(days("2024-01-01 00:00", 6))
    side = Candidate(name(99), (commits[2].id,), commits[2].time_us + HOUR_US, heads=("ft",))
    lines = [Line("main", commits[-1].id, Policy(keep_last=1)), Line("ft", side.id, Policy(keep_last=2))]
    found = {one.commit.id: one.reasons for one in decide([*commits, side], lines, now_us=FUTURE_US) if one.keep}
    assert found == {
        commits[5].id: ("head of main", "last of main"), side.id: ("head of ft", "last of ft"),
        commits[2].id: ("last of ft",),
    }  # fmt: skip
    assert list(found) == [commits[5].id, side.id, commits[2].id]  # the youngest first


def test_a_branch_without_rules_keeps_all_that_it_leads_to() -> None:
    commits = chain(days("2024-01-01 00:00", 6))
    lines = [Line("main", commits[-1].id, Policy(keep_last=1)), Line("old", commits[2].id, None)]
    found = [one.commit.id for one in decide(commits, lines, now_us=FUTURE_US) if not one.keep]
    assert sorted(found) == [commits[3].id, commits[4].id]


def test_many_branches_with_one_reason_are_not_all_named() -> None:
    commits = chain(days("2024-01-01 00:00", 2))
    lines = [Line(f"b{number}", commits[-1].id, Policy(keep_last=2)) for number in range(5)]
    assert decide(commits, lines, now_us=FUTURE_US)[1].reasons == ("last of b0, b1, b2 and 2 more",)


def test_forgotten_commits_are_not_judged_but_history_goes_on_behind_them() -> None:
    commits = chain(days("2024-01-01 00:00", 6))
    commits[3] = replace(commits[3], forgotten=True)
    assert kept(commits, Policy(keep_last=3)) == [2, 4, 5]
    assert len(judged(commits, Policy(keep_last=3))) == 5


def test_durations_reach_back_from_the_last_commit_even_if_it_was_forgotten() -> None:
    commits = chain([at("2023-03-01 12:00"), at("2023-04-01 00:00"), at("2023-03-31 00:00")])
    commits[1] = replace(commits[1], forgotten=True)  # a month before 31 March is 3 March, before 1 April it is the 1st
    assert kept(commits, Policy(keep_within="1mo")) == [0, 2]


def test_commits_that_were_merged_belong_to_the_branch_and_the_youngest_of_both_sides_is_first() -> None:
    trunk = chain([at(f"2024-01-0{day} 12:00") for day in (1, 3, 5)])
    side = Candidate(name(50), (trunk[0].id,), at("2024-01-04 12:00"))
    merge = Candidate(name(60), (trunk[2].id, side.id), at("2024-01-06 12:00"), heads=("main",))
    commits = [replace(commit, heads=()) for commit in trunk]
    assert [one.commit.id for one in judged([*commits, side, merge], Policy(keep_last=1))] == [
        merge.id, trunk[2].id, side.id, trunk[1].id, trunk[0].id
    ]  # fmt: skip
    assert kept([*commits, side, merge], Policy(keep_last=3)) == [2, 50, 60]


# --- clocks that are wrong ----------------------------------------------------------------------


def test_the_last_commits_are_those_of_the_history_however_wrong_a_clock_was() -> None:
    hours = [10, 11, 14, 12, 11, 13]  # two writers: one is two hours fast, one is slow
    commits = chain([at(f"2024-01-01 {hour}:00") for hour in hours])
    assert kept(commits, Policy(keep_last=3)) == [3, 4, 5]
    assert [one.commit.id for one in judged(commits, Policy(keep_last=1))] == [commit.id for commit in commits[::-1]]


def test_a_wrong_clock_counts_for_its_bucket_and_the_younger_of_a_bucket_is_the_descendant() -> None:
    hours = [10, 14, 12, 10]
    commits = chain([at(f"2024-01-01 {hour}:00") for hour in hours])
    assert kept(commits, Policy(keep_hourly=2)) == [1, 2, 3]
    assert kept(commits, Policy(keep_hourly=3)) == [1, 2, 3]  # hour 10 is the head's, not that of the first


@given(st.lists(st.integers(-2 * HOUR_US, 2 * HOUR_US), min_size=60, max_size=60))
def test_skewed_clocks_change_at_most_what_is_at_the_edge_of_a_day(skews: list[int]) -> None:
    true_us = [at("2024-01-01 12:00") + number * 4 * HOUR_US for number in range(60)]
    found = kept(chain([true + skew for true, skew in zip(true_us, skews, strict=True)]), Policy(keep_daily=5))
    assert 5 <= len(found) <= 6 and found[-1] == 59  # five days, and the head
    latest = {(true_us[number] + skews[number]) // (24 * HOUR_US) for number in found}
    assert len(latest & set(range(max(latest) - 4, max(latest) + 1))) == 5


# --- what a policy is ---------------------------------------------------------------------------


@pytest.mark.parametrize("text", [
    "", "7", "d7", "1d2d", "0d", "now", "-1d", "2y5m7d3h", "5m", "90s", "1.51h",
    "9999999999y", "١d",
])  # fmt: skip
def test_what_is_not_a_duration_of_a_rule_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="is not a duration"):
        parse_period(text)


@pytest.mark.parametrize("rules", [
    {"keep_last": -2}, {"keep_last": True}, {"keep_last": "3"}, {"keep_daily": 2**40}, {"keep_every_steps": -1},
    {"keep_within": "soon"}, {"keep_within": 7}, {"keep_best": "loss"}, {"keep_best": "loss:0"}, {"keep_best": ":3"},
    {"keep_best": "loss:3:best"}, {"keep_best": "loss:" + "9" * 30}, {"keep_tags": [""]}, {"keep_tags": [b"v"]},
    {"keep_tags": "a\nb"}, {"keep_tags": {"v"}}, {"keep_forever": 1},
])  # fmt: skip
def test_rules_that_cannot_be_applied_are_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        policy_from(rules)


def test_a_policy_is_told_as_its_flags_and_made_from_its_rules() -> None:
    policy = Policy(keep_last=3, keep_daily=UNLIMITED, keep_within_weekly="1y2mo", keep_tags="v*", keep_best="loss:3")
    assert policy_from(policy.rules()) == policy
    told = "--keep-last 3 --keep-daily unlimited --keep-within-weekly 1y2mo --keep-tag v* --keep-best loss:3"
    assert str(policy) == told
    assert Policy().is_empty and Policy(keep_last=0, keep_tags=()).is_empty and not policy.is_empty


def test_the_first_pattern_that_a_branch_matches_is_its_policy() -> None:
    narrow, wide, other = (Policy(keep_last=number) for number in (1, 2, 3))
    retention = Retention(other, (("ft/math*", narrow), ("ft/*", wide)))
    assert [retention.policy_for(branch) for branch in ("ft/math/1", "ft/x", "main")] == [narrow, wide, other]
    assert Retention(branches=(("ft/*", wide),)).policy_for("main") is None
