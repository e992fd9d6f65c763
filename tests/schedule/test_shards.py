"""Shards of one collection run at the same time, beside writers: nothing is ever lost, and nothing is left."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from cas_ckpt.errors import ConflictError
from tests.schedule.deciders import Uniform
from tests.schedule.play import Played, Scenario, play
from tests.schedule.scenarios import random_decider, random_scenario
from tests.searches import tries

pytestmark = pytest.mark.slow

SEEDS = range(tries(640, 500), 700)
"""A shard that rescues for one ref alone, or for none, is found out by the small part already."""

SHARDS = ("gc repack {}of2", "gc repack small {}of2", "gc {}of2")


def play_shards(seed: int) -> Played:
    """The schedule number `seed`: two shards in the place of whatever collections it had."""
    chance = random.Random(f"shards {seed}")
    scenario = random_scenario(chance)
    others = {name: deed for name, deed in scenario.deeds.items() if not deed.startswith("gc")}
    keep = " keep" if scenario.keeps_reflog else ""
    shards = {f"G{part}": chance.choice(SHARDS).format(part) + keep for part in (1, 2)}
    return play(replace(scenario, deeds=others | shards), random_decider(chance), seed=seed)


def test_random_schedules_of_shards_lose_nothing_and_leave_nothing() -> None:
    failed = [played for played in map(play_shards, SEEDS) if played.failure is not None]
    assert "\n\n".join(map(str, failed)) == ""


def test_shards_that_meet_finish_what_the_other_began_and_neither_gives_up() -> None:
    for seed in range(tries(20, 60)):
        deeds = {"W": "commit ab fresh", "G1": "gc repack 1of2", "G2": "gc repack 2of2"}
        played = play(Scenario("garbage", deeds), Uniform(random.Random(f"meet {seed}")), seed=seed)
        assert played.failure is None, str(played)
        assert not [error for error in played.errors.values() if isinstance(error, ConflictError)], str(played)
        assert {"G1", "G2"} <= played.ended
