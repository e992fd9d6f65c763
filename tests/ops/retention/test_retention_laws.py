"""What holds for all rules of retention, whatever the history and the policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cas_ckpt.core.units import BUCKETS, UNLIMITED
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.graph import CommitGraph
from cas_ckpt.ops.retention.policy import COUNTS, DURATIONS, Candidate, Line, Policy, decide
from tests.ops.retention.retention_cases import FUTURE_US, HOUR_US, at, chain, kept, name

STEPS = st.none() | st.integers(0, 40)
METRICS = st.dictionaries(st.sampled_from(["loss", "acc"]), st.sampled_from([0.5, 1.0, 2.0, float("inf")]))
COUNT = st.sampled_from([0, 0, 0, 1, 2, 3, UNLIMITED])
SPAN = st.sampled_from(["", "", "3h", "1d", "7d", "1mo", "1y"])


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    counts = {rule: draw(COUNT) for rule in COUNTS}
    spans = {rule: draw(SPAN) for rule in DURATIONS}
    best = draw(st.sampled_from([(), ("loss:1",), ("loss:2:max", "acc:1")]))
    tags = draw(st.sampled_from([(), ("v*",)]))
    return Policy(**counts, **spans, keep_every_steps=draw(st.sampled_from([0, 10])), keep_best=best, keep_tags=tags)


@st.composite
def histories(draw: st.DrawFn) -> list[Candidate]:
    """Commits with up to two parents, at times that may lie before those of their parents."""
    commits: list[Candidate] = []
    for number in range(draw(st.integers(1, 14))):
        parents = draw(st.sets(st.integers(max(0, number - 3), number - 1), max_size=2)) if number else ()
        time_us = at("2024-02-28 12:00") + number * 9 * HOUR_US + draw(st.integers(-20, 20)) * HOUR_US
        commits.append(
            Candidate(name(number), tuple(map(name, sorted(parents))), time_us, draw(STEPS), draw(METRICS),
                      tags=draw(st.sampled_from([(), (), (), ("v1",), ("x",)])),
                      pins=draw(st.sampled_from([(), (), (), ("p",)])),
                      restored=draw(st.sampled_from([None, None, 5, 6, 7])))
        )  # fmt: skip
    return commits


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Candidate], list[Line]]:
    """A history with some branches."""
    commits = draw(histories())
    heads = draw(st.lists(st.sampled_from(range(len(commits))), min_size=1, max_size=3, unique=True))
    for head in heads:
        commits[head] = replace(commits[head], heads=(f"b{head}",))
    return commits, [Line(f"b{head}", name(head), draw(policies())) for head in heads]


def forgotten(commits: Iterable[Candidate], lines: Iterable[Line]) -> set[Digest]:
    return {one.commit.id for one in decide(commits, lines, now_us=at("2024-03-02 00:00")) if not one.keep}


@given(cases())
def test_what_a_ref_names_is_never_forgotten(case: tuple[list[Candidate], list[Line]]) -> None:
    commits, lines = case
    named = {commit.id for commit in commits if commit.refs} | {line.head for line in lines}
    assert not forgotten(commits, lines) & named


@given(cases())
def test_applied_twice_nothing_new_is_forgotten(case: tuple[list[Candidate], list[Line]]) -> None:
    commits, lines = case
    gone = forgotten(commits, lines)
    assert forgotten([replace(commit, forgotten=commit.id in gone) for commit in commits], lines) == set()


@given(cases(), st.randoms(use_true_random=False))
def test_the_order_in_which_things_are_told_does_not_matter(
    case: tuple[list[Candidate], list[Line]], random: Any
) -> None:
    commits, lines = case
    shuffled = random.sample(commits, len(commits))
    again = decide(shuffled, random.sample(lines, len(lines)), now_us=FUTURE_US)
    assert again == decide(commits, lines, now_us=FUTURE_US)


@given(cases(), policies())
def test_a_rule_more_never_keeps_less(case: tuple[list[Candidate], list[Line]], more: Policy) -> None:
    commits, lines = case
    line = lines[0]
    assert line.policy is not None
    for field in fields(Policy):
        if not getattr(line.policy, field.name):
            added = replace(line, policy=replace(line.policy, **{field.name: getattr(more, field.name)}))
            assert forgotten(commits, [added, *lines[1:]]) <= forgotten(commits, lines)


@given(cases())
def test_larger_counts_never_keep_less(case: tuple[list[Candidate], list[Line]]) -> None:
    commits, lines = case
    line = lines[0]
    assert line.policy is not None
    for rule in COUNTS:
        count = getattr(line.policy, rule)
        larger = [replace(line, policy=replace(line.policy, **{rule: more})) for more in (count + 1, UNLIMITED)]
        if count != UNLIMITED:
            assert all(forgotten(commits, [one, *lines[1:]]) <= forgotten(commits, lines) for one in larger)


@given(histories())
def test_a_commit_comes_before_its_parents(commits: list[Candidate]) -> None:
    ordered = CommitGraph({commit.id: commit for commit in commits}).log_order(commit.id for commit in commits)
    assert sorted(ordered) == sorted(commit.id for commit in commits)
    assert all(ordered.index(commit.id) < ordered.index(parent) for commit in commits for parent in commit.parents)


def walked(times_us: Sequence[int], name: str, count: int) -> Iterator[int]:
    """restic's way of counting: walk from the youngest, spend one count per new bucket, or on the very last."""
    before = None
    for number in reversed(range(len(times_us))):
        bucket = number if name == "last" else BUCKETS[name](times_us[number])
        if count and (bucket != before or number == 0):
            before, count = bucket, count - 1
            yield number


@given(st.lists(st.integers(0, 400 * 24), min_size=1, max_size=40).map(sorted), st.integers(1, 9))
def test_where_clocks_agree_buckets_are_those_of_a_walk_from_the_youngest(hours: list[int], count: int) -> None:
    times_us = [at("2023-11-20 00:00") + hour * HOUR_US for hour in hours]
    for bucket in ("last", *BUCKETS):
        wanted = {*walked(times_us, bucket, count), len(hours) - 1}
        assert kept(chain(times_us), Policy(**{f"keep_{bucket}": count})) == sorted(wanted)
