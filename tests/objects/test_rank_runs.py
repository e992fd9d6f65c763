"""Ranks in few numbers: what is written as runs and spans is what was there."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cas_ckpt.errors import CorruptionError
from cas_ckpt.objects.layouts import RankSet, checked_runs, flat_runs, parse_runs, ranks_of, runs_of, runs_text

RANKS = st.lists(st.integers(0, 30), max_size=14)


@given(RANKS)
def test_runs_list_the_ranks_in_their_order(ranks: list[int]) -> None:
    runs = runs_of(ranks)
    assert list(ranks_of(runs)) == ranks
    assert parse_runs(runs_text(runs)) == runs
    assert not runs or checked_runs(flat_runs(runs), world_size=31) == runs


def test_meshes_of_real_jobs_are_few_runs() -> None:
    assert runs_of(range(1024)) == ((0, 1024, 1),)
    exchanged = [row * 8 + column for column in range(8) for row in range(128)]
    assert runs_of(exchanged) == tuple((column, 128, 8) for column in range(8))
    assert runs_text(runs_of([4, 5, 6, 7, 16, 24, 32, 3])) == "4-7,16-32:8,3"
    assert runs_of([0, 8, 9, 10]) == ((0, 1, 1), (8, 3, 1))
    assert runs_of([3, 2, 1]) == ((3, 1, 1), (2, 1, 1), (1, 1, 1))


@given(RANKS, RANKS)
def test_a_set_is_the_set_of_its_ranks(some: list[int], others: list[int]) -> None:
    a, b = RankSet.of(some), RankSet.of(others)
    assert list(a) == sorted(set(some))
    assert list(a.without(b)) == sorted(set(some) - set(others))
    assert RankSet.union([a, b]) == RankSet.of(some + others) == RankSet.union([b, a])
    assert a.without(b) == RankSet.of(set(some) - set(others))
    assert list(ranks_of(parse_runs(str(a)))) == list(a)
    assert [a[at] for at in range(len(a))] == list(a) == [a[at] for at in range(-len(a), 0)]
    assert [a.index(rank) for rank in a] == list(range(len(a)))
    assert [rank for rank in range(-1, 32) if rank in a] == list(a)


def test_a_set_of_a_million_ranks_is_one_span() -> None:
    everyone = RankSet(((0, 1 << 20),))
    assert everyone.without(RankSet.of([7])).spans == ((0, 7), (8, 1 << 20))
    assert (len(everyone), everyone[-1], str(everyone)) == (1 << 20, (1 << 20) - 1, "0-1048575")


@pytest.mark.parametrize(
    "flat",
    [
        [], [0], [0, 1], "012", [0, 1, 1.0], [0, True, 1], [-1, 1, 1], [0, 0, 1], [0, 2, 0], [0, 2, -1], [0, 1, 2],
        [0, 9, 1], [7, 2, 1], [0, 1 << 60, 1], [0, 3, 4], [1 << 60, 1, 1],
    ],
    ids=str,
)  # fmt: skip
def test_runs_that_a_world_of_eight_does_not_have_are_refused(flat: Any) -> None:
    assert checked_runs([0, 8, 1], world_size=8) == ((0, 8, 1),)
    assert checked_runs([0, 3, 3], world_size=8) == ((0, 3, 3),)
    with pytest.raises(CorruptionError):
        checked_runs(flat, world_size=8)


@pytest.mark.parametrize("text", ["x", "1-", "-1", "3-1", "1-0", "0-4:0", "0-7:3", "1,,2", "1-9999999999"])
def test_a_text_that_does_not_name_ranks_is_refused(text: str) -> None:
    assert parse_runs("") == ()
    with pytest.raises(CorruptionError):
        parse_runs(text)
