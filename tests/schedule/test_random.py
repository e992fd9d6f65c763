"""Random schedules of writers, users and collections: nothing is lost, and after a collection in quiet nothing is left.

`python -m tests.schedule.explore` plays any number of them, and plays one again.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.schedule.deciders import Replay, Uniform, lengthened, shortened
from tests.schedule.explore import explore, smaller
from tests.schedule.mutants import no_rescue
from tests.schedule.play import Scenario, play
from tests.schedule.scenarios import play_random
from tests.schedule.scheduler import Turn
from tests.schedule.soundness import Shelf
from tests.searches import tries

pytestmark = pytest.mark.slow

NUM_QUICK, NUM_QUICK_SQL, NUM_QUICK_FAR = tries(200, 1500), tries(4, 20), tries(30, 200)
NUM_SOAK, NUM_SOAK_SQL = 100_000, 2000


def test_random_schedules_lose_nothing_and_leave_nothing() -> None:
    assert explore(0, NUM_QUICK, jobs=1, tell=lambda text: None) == []


def test_random_schedules_over_the_real_index_lose_nothing_and_leave_nothing() -> None:
    assert explore(0, NUM_QUICK_SQL, jobs=1, tell=lambda text: None, sql=True) == []


def test_random_schedules_over_a_store_that_is_not_local_lose_nothing_and_leave_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There commits write hints, refs name packs, and what is sparse of them is rewritten without."""
    monkeypatch.setattr(Shelf, "abilities", replace(Shelf.abilities, local=False), raising=False)
    assert explore(0, NUM_QUICK_FAR, jobs=1, tell=lambda text: None) == []
    assert explore(0, NUM_QUICK_SQL, jobs=1, tell=lambda text: None, sql=True) == []
    assert any(b"CASCHINT" in value for seed in range(5) for value in play_random(seed).shelf.values.values())


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_a_hundred_thousand_random_schedules_lose_nothing_and_leave_nothing() -> None:
    assert explore(NUM_QUICK, NUM_SOAK, jobs=2, tell=print) == []


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_thousands_of_random_schedules_over_the_real_index_lose_nothing_and_leave_nothing() -> None:
    assert explore(NUM_QUICK_SQL, NUM_SOAK_SQL, jobs=2, tell=print, sql=True) == []


@pytest.mark.parametrize("sql", [False, True])
def test_a_seed_is_a_schedule(sql: bool) -> None:
    for seed in range(4):
        first, again = play_random(seed, sql=sql), play_random(seed, sql=sql)
        assert first.story == again.story
        assert first.shelf.values == again.shelf.values


def test_the_turns_of_a_schedule_play_it_again() -> None:
    for seed in range(20):
        first = play_random(seed)
        turns = lengthened(shortened(first.turns))
        assert turns == first.turns
        again = play(Scenario.parse(str(first.scenario)), Replay(turns), seed=first.seed)
        assert again.story == first.story


def test_a_failing_schedule_is_made_smaller() -> None:
    scenario = Scenario("garbage", {"W": "commit ab", "U": "read main", "G0": "gc"})
    with no_rescue():
        found = (play(scenario, Uniform(random.Random(seed)), seed=seed, to_the_end=False) for seed in range(300))
        failing = next(played for played in found if played.failure is not None)

        def fails(turns: list[Turn]) -> bool:
            return play(scenario, Replay(turns), seed=failing.seed, to_the_end=False).failure is not None

        small = smaller(failing.turns, fails)  # type: ignore[arg-type]
        assert fails(small)
    assert len(small) < len(failing.turns)
    assert all(turn.actor != "U" for turn in small)
