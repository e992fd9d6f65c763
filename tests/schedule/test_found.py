"""Losses that the scheduler found in this code while it was written: each of these schedules lost something once."""

from __future__ import annotations

from cas_ckpt.errors import NotFoundError
from tests.schedule.deciders import Go, Replay, Script, all_of, lengthened, through, to
from tests.schedule.play import Played, Scenario, play


def well(text: str, *parts: Go) -> Played:
    played = play(Scenario.parse(text), Script(parts))
    assert played.failure is None, str(played)
    return played


def test_a_branch_onto_a_whole_commit_whose_parent_was_collected_is_refused() -> None:
    """It was made, and its history had a hole: the commit is in packs that are kept for others, its parent was not."""
    played = well("history; W=branch new b; G0=gc", all_of("G0"), all_of("W"))
    assert isinstance(played.errors["W"], NotFoundError)


def test_packs_that_a_commit_wrote_before_a_collection_took_them_are_not_believed_at_its_second_try() -> None:
    """They were told to the index after it had been brought up to date with the new generation."""
    before_the_ref = to("W", "put_if_absent refs/heads/fresh.ref")
    well("garbage; W=commit bx,ax fresh; G0=gc", before_the_ref, all_of("G0"), all_of("W"))


def test_nor_by_the_next_commit_of_the_process() -> None:
    for request in ("get refs/heads/main.ref", "compare_and_swap refs/heads/main.ref"):
        well("garbage; W=commit bx,ax,abx; G0=gc", to("W", request), all_of("G0"), all_of("W"))


def test_a_merge_parent_that_only_a_log_remembers_is_not_collected_under_the_merge() -> None:
    """The collection had fenced `main`, and had not yet let the log expire that made the parent look alive."""
    well(
        "garbage; W=merge a main b; G0=gc",
        through("G0", "compare_and_swap gc/state"), through("G0", "compare_and_swap refs/heads/main.ref"),
        all_of("W"), all_of("G0"),
    )  # fmt: skip


def test_a_collection_that_sees_the_pages_of_a_listing_at_different_moments_cries_no_wolf() -> None:
    """It saw the commit of a writer, and not yet the data, and said that the repository is damaged."""
    scenario = Scenario.parse("history paged; W0=commit ab; W1=rename old new; G0=gc lazy; G1=gc repack")
    played = play(scenario, Replay(lengthened("G0*15 G1*68 G0*40")), seed=10954)
    assert played.failure is None, str(played)


def test_a_commit_that_came_after_the_listing_and_was_moved_off_its_branch_at_once_is_released() -> None:
    """The collection did not know it when its entry in the log expired, and it stayed as an orphan for good."""
    scenario = Scenario.parse("history; W0=branch main c force; W2=commit abc; G2=gc repack")
    played = play(scenario, Replay(lengthened("W0*3 G2*4 W2*8 W0*7 G2*29")), seed=351)
    assert played.failure is None, str(played)
