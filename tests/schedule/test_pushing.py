"""Races of push, pull and clone with collections, with one another, and with other writers; race 19 of docs/gc.md.

`W` and `V` push into the world, `R` clones out of it, `G0` collects. A pull is a push as far as the repository is
concerned that takes the commits, and a clone as far as the one is concerned that gives them.
"""

from __future__ import annotations

import random

import pytest

from cas_ckpt.errors import ConflictError, NotFoundError, TransientStorageError
from tests.effects import Fault
from tests.schedule.deciders import all_of, some_of, to
from tests.schedule.play import Scenario, play
from tests.schedule.scenarios import random_decider
from tests.schedule.test_races import CONDEMN, FENCE_MAIN, at_every_request, well
from tests.searches import tries

TEXTS = ["ab", "b,ab", "abc"]


@pytest.mark.parametrize("text", TEXTS)
def test_19_a_push_that_was_stopped_at_any_moment_goes_on_after_a_whole_collection(text: str) -> None:
    for played in at_every_request(f"garbage; W=push {text}; G0=gc", "W", all_of("G0"), rest=True):
        assert not played.errors
        assert played.results["W"]


def test_19_and_after_two_collections() -> None:
    others = (all_of("G0"), all_of("V"), all_of("G1"))
    for played in at_every_request(
        "garbage; W=push ab; V=commit bc side; G0=gc; G1=gc repack", "W", *others, rest=True
    ):
        assert not played.errors


@pytest.mark.parametrize("new", ["main", "fresh"])
@pytest.mark.parametrize("how", ["gc", "gc repack"])
def test_19_a_collection_that_was_stopped_at_any_moment_loses_nothing_of_a_push(new: str, how: str) -> None:
    for played in at_every_request(f"garbage; W=push b,ab {new}; G0={how}", "G0", all_of("W"), rest=True):
        assert not played.errors


def test_19_a_push_dies_after_any_of_its_requests() -> None:
    for fault in (Fault.DIE_AFTER, Fault.DIE_BEFORE):
        for _ in at_every_request("garbage; W=push b,ab; V=push b,ab fresh; G0=gc", "W", all_of("V"), all_of("G0"),
                                  fault=fault):  # fmt: skip
            pass


def test_14_each_request_of_a_push_fails_or_loses_its_reply() -> None:
    for fault in (Fault.FAIL, Fault.LOSE_REPLY):
        told = []
        for played in at_every_request("garbage; W=push b,ab; G0=gc", "W", all_of("G0"), fault=fault, rest=True):
            told.append(played.errors.get("W"))
            assert all(isinstance(error, TransientStorageError) for error in played.errors.values())
        assert None in told


def test_two_pushers_on_one_ref_and_one_of_them_is_refused() -> None:
    for played in at_every_request("garbage; W=push ab; V=push abc", "W", all_of("V"), rest=True):
        assert len([error for error in played.errors.values() if isinstance(error, ConflictError)]) == 1


def test_a_push_and_a_commit_to_the_same_branch_and_one_is_refused_or_on_top() -> None:
    for played in at_every_request("garbage; W=push ab; V=commit bc", "W", all_of("V"), rest=True):
        assert set(played.errors) <= {"W"}


@pytest.mark.parametrize("deed", ["gc", "gc repack"])
def test_19_a_clone_beside_a_collection_is_whole(deed: str) -> None:
    for played in at_every_request(f"tall; R=clone main; G0={deed}", "R", all_of("G0"), rest=True):
        assert not played.errors
    for played in at_every_request(f"tall; R=clone main; G0={deed}", "G0", all_of("R"), rest=True):
        assert not played.errors


def test_19_a_clone_of_a_branch_that_is_deleted_and_collected_is_whole_or_refused() -> None:
    for played in at_every_request("tall; R=clone side; U=delete side; G0=gc", "R", all_of("U"), all_of("G0"),
                                   rest=True):  # fmt: skip
        assert all(isinstance(error, NotFoundError) for error in played.errors.values())


def test_19_what_a_push_relied_on_is_condemned_before_its_swap() -> None:
    """The push finds b, which is garbage, stored; then b is condemned, and main is fenced."""
    for first in ([], [some_of("W", 3)], [some_of("W", 6)]):
        played = well("garbage; W=push b; G0=gc", *first, CONDEMN, FENCE_MAIN, all_of("W"), all_of("G0"))
        assert not played.errors


def test_19_a_ref_that_was_not_fenced_yet_proves_nothing_of_what_it_keeps() -> None:
    """A branch is put onto garbage b after the mark, and deleted before the fence, while the push looks at it."""
    text = "garbage; U=branch new b; W=push ab new over b; V=delete new; G0=gc"
    first = [to("G0", "compare_and_swap gc/state"), all_of("U"), CONDEMN]
    for _ in at_every_request(text, "W", all_of("V"), all_of("G0"), first=first, rest=True):
        pass


@pytest.mark.parametrize("seed", range(tries(50, 150)))
def test_any_order_with_any_accidents(seed: int) -> None:
    chance = random.Random(f"pushing {seed}")
    place = chance.choice(["garbage", "double", "history", "tall", "plain"])
    pushes = ["push b", "push ab", "push b,ab fresh", "push abc fresh", "push bd main force", "push ab,b"]
    others = ["commit ab", "commit b fresh", "clone main", "read main", "rename old new", "rebuild", "commit bc"]
    deeds = [*chance.sample(pushes, chance.choice([1, 2])), *chance.sample(others, chance.choice([0, 1, 2]))]
    named = {f"W{number}": deed for number, deed in enumerate(deeds)}
    named |= {f"G{number}": chance.choice(["gc", "gc repack"]) for number in range(chance.choice([1, 1, 2]))}
    scenario = Scenario(place, named, sql=seed % 10 == 0, paged=chance.random() < 0.15)
    played = play(scenario, random_decider(chance), seed=seed)
    assert played.failure is None, str(played)
