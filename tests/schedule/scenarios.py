"""Random schedules: what a seed stands for. The same seed gives the same schedule.

Every scenario has garbage, at least one collection, and writers that want what is garbage.
"""

from __future__ import annotations

import random
from dataclasses import replace

from tests.schedule.deciders import Accidents, Priorities, Uniform
from tests.schedule.play import Played, Scenario, play
from tests.schedule.scheduler import Decider

_COMMITS = ("commit b", "commit ab", "commit abc", "commit ba main", "commit a,ab", "commit ab,b", "commit bd side",
            "commit b fresh", "commit ab fresh", "commit bx,ax fresh")  # fmt: skip
_COLLECTIONS = ("gc", "gc", "gc repack", "gc repack small", "gc lazy")
_NAMES = {
    "plain": ("b", "a"),
    "garbage": ("b", "a"),
    "double": ("b", "ax", "a"),
    "history": ("b", "d", "c"),
    "tall": ("be", "bef", "ad", "ab"),
}

LONGEST = 140
"""Requests of a schedule of this size, more or less."""


def random_scenario(chance: random.Random, *, sql: bool = False) -> Scenario:
    """Two to five actors, one or two of them collections."""
    place = chance.choice(list(_NAMES))
    target = chance.choice(_NAMES[place])
    others = [f"branch new {target}", f"branch main {target} force", f"tag v1 {target}", f"pin p {target}",
              f"merge a main {target}", f"forget {target}", f"forget {chance.choice(_NAMES[place])}",
              "delete old" if place == "plain" else "delete side", "undelete old", "rename old new",
              "rename side aside", "read main", "read side", "rebuild"]  # fmt: skip
    deeds = [*chance.sample(_COMMITS, chance.choice([1, 1, 2])), *chance.sample(others, chance.choice([0, 1, 1, 2]))]
    deeds = chance.sample(deeds, min(len(deeds), 3))
    if place == "plain":
        deeds.append("delete old")
    named = {f"W{number}": deed for number, deed in enumerate(deeds)}
    for number in range(chance.choice([1, 1, 2])):
        named[f"G{number}"] = chance.choice(_COLLECTIONS)
    scenario = Scenario(place, named, sql=sql, shares_index=chance.random() < 0.1, paged=chance.random() < 0.15)
    if chance.random() < 0.15:
        keeping = {name: deed + " keep" if deed.startswith("gc") else deed for name, deed in named.items()}
        scenario = replace(scenario, deeds=keeping, keeps_reflog=True)
    return scenario


def random_decider(chance: random.Random) -> Decider:
    """By chance, half of the time with deaths and lost replies."""
    inner: Decider = Uniform(chance)
    if chance.random() < 0.7:
        inner = Priorities(chance, num_changes=chance.randrange(1, 8), length=LONGEST)
    if chance.random() < 0.5:
        return inner
    faults = chance.choice([0.0, 0.0, 0.01, 0.03])
    return Accidents(inner, chance, deaths=chance.choice([0.0, 0.2, 0.5]), faults=faults, longest=40)


def play_random(seed: int, *, sql: bool = False) -> Played:
    """The schedule number `seed`."""
    chance = random.Random(f"schedule {seed}")
    scenario = random_scenario(chance, sql=sql)
    return play(scenario, random_decider(chance), seed=seed)
