"""Who does what: all of it, by those who can, and evenly."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cas_ckpt.layout.balance import Demand, Share, assign, relieve

WORLD = 6


@st.composite
def some_demands(draw: st.DrawFn) -> list[Demand]:
    ranks = st.sets(st.integers(0, WORLD - 1), min_size=1).map(lambda found: tuple(sorted(found)))
    return draw(st.lists(st.builds(Demand, st.integers(0, 50), st.integers(0, 40), ranks), max_size=8))


def loads_of(demands: list[Demand], shares: list[tuple[Share, ...]], size: int = WORLD) -> list[int]:
    loads = [0] * size
    for demand, each in zip(demands, shares, strict=True):
        for rank, count in each:
            loads[rank] += count * demand.num_bytes
    return loads


def one_by_one(loads: list[int], num_bytes: int, count: int) -> list[int]:
    for _ in range(count):
        loads[min(range(len(loads)), key=lambda rank: (loads[rank], rank))] += num_bytes
    return sorted(loads)


@settings(deadline=None)
@given(some_demands())
def test_every_piece_is_done_once_by_one_who_can(demands: list[Demand]) -> None:
    shares = assign(demands, WORLD)
    for demand, each in zip(demands, shares, strict=True):
        assert sum(count for _, count in each) == demand.count
        assert {rank for rank, _ in each} <= set(demand.ranks)
        assert all(count > 0 for _, count in each)
        assert [rank for rank, _ in each] == sorted({rank for rank, _ in each})
    assert assign(demands, WORLD) == shares


@settings(deadline=None)
@given(st.lists(st.integers(0, 60), min_size=2, max_size=6), st.integers(1, 20), st.integers(1, 60))
def test_a_demand_levels_the_loads_as_if_piece_after_piece_went_to_the_least_loaded(
    before: list[int], num_bytes: int, count: int
) -> None:
    world = len(before)
    given_first = [Demand(load, 1, (rank,)) for rank, load in enumerate(before)]
    demands = [*given_first, Demand(num_bytes, count, tuple(range(world)))]
    got = loads_of(demands, assign(demands, world), world)
    assert sorted(got) == one_by_one(list(before), num_bytes, count)


def test_what_only_one_can_do_comes_first() -> None:
    demands = [Demand(10, 10, (0, 1)), Demand(10, 10, (0,))]
    assert assign(demands, 2) == [((1, 10),), ((0, 10),)]


def test_a_second_round_mends_what_greed_spoiled() -> None:
    # The pairs are poured in order; only when all stand can the first ones know who has room.
    demands = [Demand(1, 400, (at, (at + 1) % 5)) for at in range(5)] + [Demand(1, 300, (0, 1, 2, 3, 4, 5))]
    loads = loads_of(demands, assign(demands, WORLD))
    assert max(loads) <= 1.03 * np.mean(loads[:5])


@settings(deadline=None)
@given(some_demands())
def test_relief_keeps_the_work_and_never_raises_the_top(demands: list[Demand]) -> None:
    shares = assign(demands, WORLD)
    relieved = relieve(demands, shares, WORLD, slack=1.05)
    assert [sum(count for _, count in each) for each in relieved] == [demand.count for demand in demands]
    before, after = loads_of(demands, shares), loads_of(demands, relieved)
    assert max(after) <= max(before)
    limit = 1.05 * sum(before) / WORLD
    largest = max((demand.num_bytes for demand in demands if demand.count), default=0)
    assert max(before) <= limit or max(after) <= limit + largest


def test_one_who_wants_all_alone_is_helped_by_the_others() -> None:
    demands = [Demand(4, 12, (0,))]
    assert relieve(demands, assign(demands, 4), 4, slack=1.05) == [((0, 3), (1, 3), (2, 3), (3, 3))]


def test_a_few_large_pieces_stay_where_they_are() -> None:
    demands = [Demand(4, 1, (0,)), Demand(4, 1, (1,))]
    assert relieve(demands, assign(demands, 8), 8, slack=1.05) == [((0, 1),), ((1, 1),)]


def test_even_loads_are_left_alone() -> None:
    demands = [Demand(4, 8, (0, 1)), Demand(4, 8, (2, 3))]
    shares = assign(demands, 4)
    assert relieve(demands, shares, 4, slack=1.05) == shares
