"""Every step of the protocol is needed: without it the scheduler finds the loss.

Each mutant is shown twice: by the schedule of the model (docs/gc.md tells them), and by random
search. The same schedules on the real code lose nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest

from tests.schedule.deciders import Go, Priorities, Script, all_of, through, to
from tests.schedule.mutants import MUTANTS
from tests.schedule.play import Scenario, play
from tests.schedule.soundness import LossError
from tests.schedule.world import world

MOST_TRIES = 400

_SWAP_STATE = "compare_and_swap gc/state|put gc/state"
_CONDEMNED = through("G0", _SWAP_STATE)
_COMMIT = Scenario("garbage", {"W": "commit ab", "G0": "gc"})
_TWICE = Scenario("garbage", {"W": "commit a,ab", "G0": "gc"})
_TWO = Scenario("garbage", {"W": "commit ab", "G0": "gc", "G1": "gc"})
_BRANCH = Scenario("garbage", {"W": "branch new b", "G0": "gc"})

_MAIN = "refs/heads/main.ref"
_UPLOADED = to("W", f"get {_MAIN}", times=2)  # the first get is before the upload, for the branch's policy
_SET_NEW = "compare_and_swap refs/heads/new.ref|put_if_absent refs/heads/new.ref"

# Mutant -> scenario, and the schedule that loses b.
SCHEDULES: dict[str, tuple[Scenario, list[Go]]] = {
    "time_only": (
        _COMMIT,
        [to("W", f"compare_and_swap {_MAIN}"), to("G0", "delete packs/"), all_of("W"), all_of("G0")],
    ),
    "no_fence": (
        _COMMIT,
        [to("W", f"compare_and_swap {_MAIN}"), _CONDEMNED, through("G0", f"get {_MAIN}"), all_of("W"), all_of("G0")],
    ),
    "no_rescue": (_COMMIT, [to("W", f"compare_and_swap {_MAIN}"), _CONDEMNED, all_of("W"), all_of("G0")]),
    "gc_before_ref": (
        _COMMIT,
        [_UPLOADED, _CONDEMNED, through("G0", f"compare_and_swap {_MAIN}"), all_of("W"), all_of("G0")],
    ),
    "touch_before_publish": (_COMMIT, [through("G0", f"compare_and_swap {_MAIN}"), all_of("W"), all_of("G0")]),
    "stale_index": (_COMMIT, [_UPLOADED, all_of("G0"), all_of("W")]),
    "filter_only": (
        _TWICE,
        [_UPLOADED, _CONDEMNED, through("W", f"compare_and_swap {_MAIN}"), all_of("G0"), all_of("W")],
    ),
    "content_names": (
        _COMMIT,
        [_UPLOADED, _CONDEMNED, through("G0", f"compare_and_swap {_MAIN}"), all_of("W"), all_of("G0")],
    ),
    "no_cas_state": (
        _TWO,
        [
            through("G1", "get gc/state"), _CONDEMNED, through("G0", f"compare_and_swap {_MAIN}"),
            to("W", f"compare_and_swap {_MAIN}"), through("G1", _SWAP_STATE),
            through("G1", f"get {_MAIN}"), all_of("W"), all_of("G1"),
        ],
    ),
    "no_placeholder": (
        _BRANCH,
        [to("W", _SET_NEW), _CONDEMNED, through("G0", "list refs/heads/"), all_of("W"), all_of("G0")],
    ),
}  # fmt: skip


@pytest.fixture(params=list(MUTANTS))
def mutant(request: pytest.FixtureRequest) -> str:
    """Worlds that were made by broken code must not outlive it, and the other way round."""
    world.cache_clear()
    return str(request.param)


@pytest.fixture(autouse=True)
def _fresh_worlds() -> object:
    yield
    world.cache_clear()


def test_the_models_schedule_finds_the_loss_of_each_mutant(mutant: str) -> None:
    scenario, parts = SCHEDULES[mutant]
    with MUTANTS[mutant]():
        played = play(scenario, Script(parts), to_the_end=False)
    assert isinstance(played.failure, LossError), f"not found:\n{played}"


def test_the_same_schedules_lose_nothing_on_the_real_code(mutant: str) -> None:
    scenario, parts = SCHEDULES[mutant]
    played = play(scenario, Script(parts, lax=True))
    assert played.failure is None, str(played)


def test_random_search_finds_the_loss_of_each_mutant_and_none_in_the_real_code(mutant: str) -> None:
    scenario, _ = SCHEDULES[mutant]
    seed = next((seed for seed in range(MOST_TRIES) if _loses(scenario, seed, MUTANTS[mutant])), None)
    assert seed is not None, f"no loss in {MOST_TRIES} random schedules"
    world.cache_clear()
    assert not any(_loses(scenario, again, nullcontext) for again in range(max(0, seed - 5), seed + 1))


def _loses(scenario: Scenario, seed: int, mutant: Callable[[], AbstractContextManager[object]]) -> bool:
    decider = Priorities(random.Random(seed), num_changes=4, length=45 * len(scenario.deeds) - 30)
    with mutant():
        return isinstance(play(scenario, decider, seed=seed, to_the_end=False).failure, LossError)
